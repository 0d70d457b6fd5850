/*
 * Checkpoints, which empty the log, and the growth of the file.
 */
#ifndef PM_COMMIT_CHECKPOINT_H
#define PM_COMMIT_CHECKPOINT_H

#include "commit/store_state.h"

/* Makes the committed image durable and the log empty. clean: no commit will follow. */
pm_status pm_checkpoint_make(pm_store *store, bool clean);

/* The same, and gives the last commit another number. Only for a store that no other process knows, and whose commits
 * are durable when they return. */
pm_status pm_checkpoint_renumber(pm_store *store, uint64_t sequence);

/* Makes room in the region for `pages` more pages in a row. PM_NO_SPACE: the disk, max_size or the address space has
 * none. */
pm_status pm_checkpoint_grow(pm_store *store, uint64_t pages);

/* Empties the log. Makes it larger if it was full too soon, or if a body of `body` bytes has to fit. */
pm_status pm_checkpoint_make_log_room(pm_store *store, uint64_t body);

/* Runs an operation again after growing the region, if space was all that it lacked. */
#define PM_WITH_SPACE(store, pages, status, operation)                                                    \
    do {                                                                                                  \
        (status) = (operation);                                                                           \
        if ((status) != PM_NO_SPACE || ((status) = pm_checkpoint_grow((store), (pages))) != PM_OK) break; \
    } while (1)

#endif
