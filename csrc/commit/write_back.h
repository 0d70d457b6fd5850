/*
 * The deferred write-back (D13): the committed image is brought up to date after the commit has returned.
 */
#ifndef PM_WRITE_BACK_H
#define PM_WRITE_BACK_H

#include "commit/store_state.h"

void pm_write_back_open(pm_store *store);

/* The committed image is to show this record. It does when this returns; or, if may_wait, at the latest when the next
 * call enters the store. Fails as pm_write_back_drain does. */
pm_status pm_write_back_enqueue(pm_store *store, pm_write_back_job job, bool may_wait);

/* When this returns PM_OK, the committed image shows the last commit (I2). PM_NO_SPACE: the job stays enqueued, and a
 * later call may succeed. */
pm_status pm_write_back_drain(pm_store *store);

/* Ends the thread, and starts none any more. Must be called without the store's mutex. */
void pm_write_back_stop(pm_store *store);

#endif
