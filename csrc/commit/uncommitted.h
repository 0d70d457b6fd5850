/*
 * Extents that were allocated since the last commit, and extents that have lost their owner since.
 */
#ifndef PM_UNCOMMITTED_H
#define PM_UNCOMMITTED_H

#include "commit/store_state.h"

/* A new extent of `length` bytes, without an owner. PM_NO_SPACE: the file can't grow. PM_NO_MEMORY. */
pm_status pm_uncommitted_alloc(pm_store *store, uint64_t length, uint64_t *offset);

/* Frees an extent, committed or not. The space of a committed extent is used again after the next commit (I7). An error
 * leaves the space taken. */
pm_status pm_uncommitted_free(pm_store *store, uint64_t offset, uint64_t length);

/* The uncommitted extent at this offset. NULL: there is none. */
pm_uncommitted *pm_uncommitted_find(const pm_store *store, uint64_t offset);

/* After a commit, a rollback, and at the end: the list is empty. */
void pm_uncommitted_forget(pm_store *store);

/* True if a buffer is over a committed extent that programs may have changed. */
static inline bool pm_uncommitted_may_change(const pm_store *store, const pm_buffer *buffer)
{
    return buffer->owned && buffer->writable
           && !(store->uncommitted.count && pm_uncommitted_find(store, buffer->offset));
}

#endif
