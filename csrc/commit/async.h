/*
 * Commits that become durable some time after they returned (D11).
 */
#ifndef PM_ASYNC_H
#define PM_ASYNC_H

#include "commit/store_state.h"

/* From now on, commits are durable `interval` nanoseconds after they returned, or sooner. */
pm_status pm_async_open(pm_store *store, uint64_t interval);

/* Starts the thread, if commits are asynchronous and no thread runs. */
pm_status pm_async_start(pm_store *store);

/* Ends the thread. Must be called without the store's mutex. */
void pm_async_stop(pm_store *store);

void pm_async_free(pm_store *store);

/* Makes all commits durable. */
pm_status pm_async_sync(pm_store *store);

/* The same, and brings the committed image in the file up to date. PM_NO_SPACE: a later call may succeed. */
pm_status pm_async_finalize(pm_store *store);

/* A commit's record is in the log at `record`, with these items. */
void pm_async_committed(pm_store *store, uint64_t record, const uint8_t *body, uint64_t length);

/* The commit is done: its sync is scheduled. */
void pm_async_acknowledged(pm_store *store);

/* The log was emptied. */
void pm_async_emptied(pm_store *store);

#endif
