/*
 * Commit and rollback: which bytes go where, and in which order.
 */
#ifndef PM_TRANSACTION_H
#define PM_TRANSACTION_H

#include "commit/store_state.h"

/* Commits what is pending. only: scans metadata, uncommitted extents and the ranges that pm_region_mark noted, and no
 * other array. PM_NO_SPACE, PM_NO_MEMORY: everything stays pending. */
pm_status pm_transaction_commit(pm_store *store, bool only);

/* Takes memory, metadata and space back to the last commit. It can't fail (I11). */
void pm_transaction_rollback(pm_store *store);

/* Adds an event to the trace, if there is one: a step that leads to the state that the program sees now. */
pm_status pm_transaction_mark(pm_store *store, pm_event_kind kind, uint64_t sequence);

#endif
