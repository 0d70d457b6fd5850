/*
 * Direct writes (D3): contents of new extents go straight to their place.
 */
#ifndef PM_DIRECT_H
#define PM_DIRECT_H

#include "commit/store_state.h"

/* Writes contents of an uncommitted extent, within its length. PM_NO_SPACE, PM_NO_MEMORY: the store goes on. */
pm_status pm_direct_write(pm_store *store, pm_uncommitted *extent, uint64_t at, const void *source, uint64_t length);

/* Fills `length` bytes from the start of an uncommitted extent with whole patterns. Fails as pm_direct_write does. */
pm_status pm_direct_fill(pm_store *store, pm_uncommitted *extent, uint64_t length, const void *pattern,
                         size_t pattern_length);

/* Before a commit, for an extent that is not small: writes the blocks that the program has changed through memory, and
 * the table of hashes. */
pm_status pm_direct_finish(pm_store *store, pm_uncommitted *extent);

#endif
