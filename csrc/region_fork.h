/*
 * What a forked child goes on to see (I18): the bytes that its parent saw at the fork, for as long as the child lives.
 *
 * The child has the parent's private pages; all others show the file, which the parent goes on to change. So before a
 * fork
 *
 *   pages under arrays that may change become private in the parent, and the child gets them with the others: it waits
 *   for nobody, and nobody for it arrays that never change keep their space: it is not used again while a child lives
 *   that was forked when they were alive
 *
 * A child is known to live by a lock on one byte of the file, which belongs to an open file description that only a
 * mapping keeps. The mapping is made before the fork and undone in the parent, so that its children alone have it,
 * whichever descriptors they close. A child that executes another program lets go of it, and so does its death. Each
 * fork locks a byte of its own, which tells how large the region was: those who open the file later use no space that a
 * living child may have had.
 */
#ifndef PM_REGION_FORK_H
#define PM_REGION_FORK_H

#include "region.h"

/* Under the store's mutex, which is held until the fork is over. */
void pm_fork_begins(pm_region *region);
void pm_fork_is_over(pm_region *region); /* in the parent */
void pm_fork_in_child(pm_region *region);

/* When a store is opened for writing. */
void pm_fork_find_children(pm_region *region);

/* True if a child may have the memory of a buffer that has been released. */
bool pm_fork_may_show(const pm_region *region, pm_buffer *buffer);

/* Offset of the first page that may be used, as far as earlier forks go. */
uint64_t pm_fork_free_from(pm_region *region);

/* In a child: its arrays are gone. */
void pm_fork_let_go(pm_region *region);

#endif
