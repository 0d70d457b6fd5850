/*
 * What a commit would carry, told by keys: for whoever drops it.
 */
#ifndef PM_PENDING_H
#define PM_PENDING_H

#include "transaction.h"

/* See pm_pending. */
pm_status pm_pending_rows(pm_store *store, uint8_t **rows, size_t *length);

#endif
