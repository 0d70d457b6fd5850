/*
 * Lists what a commit would change, by key, for the warning when it is dropped.
 */
#ifndef PM_PENDING_H
#define PM_PENDING_H

#include "commit/store_state.h"

/* See pm_pending. */
pm_status pm_pending_rows(pm_store *store, uint8_t **rows, size_t *length);

#endif
