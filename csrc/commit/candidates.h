/*
 * The candidates of a commit: the extents and metadata pages that may differ from the committed image.
 */
#ifndef PM_CANDIDATES_H
#define PM_CANDIDATES_H

#include "commit/gather.h"
#include "commit/store_state.h"

/* Lists what may differ from the committed image and belongs to the new state, in ascending order, and which blocks of
 * it may. only: see pm_transaction_commit. The list is valid until the next call. */
pm_status pm_candidates_find(pm_store *store, bool only, pm_candidate **list, size_t *count);

/* The commit has succeeded: the dirty-tracking policy learns what it found. */
void pm_candidates_committed(pm_store *store, const pm_candidate *list, size_t count);

#endif
