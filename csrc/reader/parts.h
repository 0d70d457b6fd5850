/*
 * Two threads read and verify many pages. Both take the next pages that no thread has taken: many at first, and fewer
 * towards the end, so that the two end together.
 *
 *   WAITING ── the second thread runs ──▶ WORKING ── no pages are left ──▶ ENDED
 *      └────── the first thread has done all ──▶ LATE: the second one, which nobody waits for, only frees memory
 *
 * The second thread lives for one call, so that a fork finds none between two calls. It touches nothing but what the
 * caller waits for, unless it is late. It is no part of a schedule (base/schedule.h): where a test follows the reads,
 * there is one thread.
 */
#ifndef PM_PARTS_H
#define PM_PARTS_H

#include "base/status.h"

/* Reads some pages, and verifies them. thread: 0 or 1, for memory of its own. */
typedef pm_status pm_parts_work(void *argument, unsigned thread, uint64_t first, uint64_t end);

enum { PM_PARTS_PAGES = 64 /* that a call of the work has at most */ };

/* Calls work for all pages of [first, end). The first thread repeats the work that the second one failed to do: a
 * failure is always one of the calling thread. */
pm_status pm_parts_do(uint64_t first, uint64_t end, pm_parts_work *work, void *argument);

#endif
