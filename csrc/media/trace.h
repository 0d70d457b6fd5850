/*
 * Records what happens to the durable bytes of a store, in order. A trace belongs to its caller, and may follow several
 * openings of one store. The functions of the media that touch durable bytes report to it, so that a flush or a sync
 * that they leave out is left out of the trace too.
 *
 * It also makes chosen operations fail, and gives stores ids that are the same in every run.
 */
#ifndef PM_TRACE_H
#define PM_TRACE_H

#include <stdbool.h>

#include "pmstore.h"
#include "base/schedule.h"

/* The threads that events name: 1 to 3 are a store's; 0, 4 and 5 are the program's, in the order of their first events.
 * All further ones count as 5. */
enum { PM_TRACE_STORE_THREADS = 3, PM_TRACE_PROGRAM_THREADS = 3 };

/* One more pm_trace_free is needed after this. A store keeps its trace until it is closed, in whatever order a garbage
 * collector frees the two. */
void pm_trace_keep(pm_trace *trace);

/* Adds an event. data: `length` written bytes, or NULL. */
void pm_trace_add(pm_trace *trace, pm_event_kind kind, uint64_t offset, uint64_t length, const void *data);

/* Stores under this trace use `view`, where the caller has mapped their file, instead of mapping it themselves: the
 * crash explorer opens the same file thousands of times a second. Then they can't grow, and the bytes that they write
 * are not kept. */
void pm_trace_lend_view(pm_trace *trace, uint8_t *view, uint64_t size);
uint8_t *pm_trace_view(const pm_trace *trace, uint64_t *size); /* NULL: there is none */

/* 1 or 0: whether a synced write of a range counts as one flush of the disk, as on ext4 and xfs; -1: as on the file's
 * own file system. */
int pm_trace_ranges(const pm_trace *trace);

/* The schedule that orders the background work of stores under this trace; NULL: they have none. */
pm_schedule *pm_trace_schedule(const pm_trace *trace);

/* Undoes pm_trace_background. No store under the trace may be open. */
void pm_trace_no_background(pm_trace *trace);

/* The next id of a store under this trace: not random, and never the same twice. */
uint64_t pm_trace_id(pm_trace *trace);

/* False if the trace makes the operation fail that is about to begin; errno is then set. This call and pm_trace_add are
 * points of the schedule. */
bool pm_trace_allows(pm_trace *trace, pm_operation operation);

/* The same for a write of `length` bytes. Returns how many of them it may write: all, some, or 0 if it fails. */
size_t pm_trace_allows_write(pm_trace *trace, size_t length);

#endif
