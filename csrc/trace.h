/*
 * What happens to the durable bytes of a store, in order. A trace belongs to its caller and may follow several lives of
 * one store. The media report to it from the functions that touch durable bytes, so that
 * a flush or a sync that they leave out is left out of the trace too.
 *
 * It also makes chosen operations fail, and gives stores ids that are the same in every run.
 */
#ifndef PM_TRACE_H
#define PM_TRACE_H

#include <stdbool.h>

#include "pmstore.h"
#include "schedule.h"

/* One more pm_trace_free is needed: a store keeps its trace until it is closed, in whatever order a garbage collector
 * lets go. */
void pm_trace_keep(pm_trace *trace);

/* data: length bytes that were written, or NULL. */
void pm_trace_add(pm_trace *trace, pm_event_kind kind, uint64_t offset, uint64_t length, const void *data);

/* Stores under this trace are to use `view`, where the caller has mapped their file, instead of mapping it themselves:
 * the crash explorer opens the same file thousands of times a second. They can't grow then, and the bytes that they
 * write are not kept. */
void pm_trace_lend_view(pm_trace *trace, uint8_t *view, uint64_t size);
uint8_t *pm_trace_view(const pm_trace *trace, uint64_t *size); /* NULL: there is none */

/* 1 or 0: whether a synced write of a range is to be taken for one flush of the disk, as on ext4 and xfs; -1: ask the
 * file system. */
int pm_trace_ranges(const pm_trace *trace);

/* In which order the background work of stores under this trace is done; NULL: they have none. */
pm_schedule *pm_trace_schedule(const pm_trace *trace);

/* The next id of a store under this trace: not random, and not the same twice. */
uint64_t pm_trace_id(pm_trace *trace);

/* False if the operation that is about to begin is to fail; errno is then what it fails with. */
bool pm_trace_allows(pm_trace *trace, pm_operation operation);

/* The same for a write of `length` bytes. The bytes that it may write: all, some, or 0 if it is to fail. */
size_t pm_trace_allows_write(pm_trace *trace, size_t length);

#endif
