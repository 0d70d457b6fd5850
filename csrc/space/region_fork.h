/*
 * What a forked child keeps seeing (I18): the bytes that its parent saw at the fork, for as long as the child lives.
 *
 * The child has the parent's private pages. All other pages show the file, which the parent keeps changing. So before a
 * fork
 *
 *   pages under arrays that may change become private in the parent, and the child gets them with the others:
 *   neither waits for the other
 *
 *   arrays that never change keep their space: it is not used again while a child lives that was forked when they
 *   were alive
 *
 * A living child is known by a lock on one byte of the file. The lock belongs to an open file description that only a
 * mapping keeps. The mapping is made before the fork and undone in the parent, so that only its children have it,
 * whichever descriptors they close. A child lets it go when it executes another program, or dies. Each fork locks a
 * byte of its own, whose number contains the size of the region. So processes that open the file later leave space
 * alone that a living child may see.
 *
 * A reader (reader/snapshot.h) that maps a constant array locks a byte for each of its pages in the same way, before it
 * asks whether the array is still there. So what it maps is kept for it, by later openings, too. If that is many
 * ranges, it locks what lies between some of them as well.
 */
#ifndef PM_REGION_FORK_H
#define PM_REGION_FORK_H

#include "space/region_state.h"

/* Must be called under the store's mutex, which is held until the fork is over. */
void pm_region_fork_begins(pm_region *region);
void pm_region_fork_is_over(pm_region *region); /* in the parent */
void pm_region_fork_in_child(pm_region *region);

/* Finds living children, but no readers, when a store is opened for writing. */
void pm_region_fork_find_children(pm_region *region);

/* True if a child, or a reader, may see the memory of a released buffer. */
bool pm_region_fork_may_show(const pm_region *region, pm_buffer *buffer);

/* The byte that a reader locks, as a child does, before it maps this page of a constant array. */
int64_t pm_region_fork_reader_byte(uint64_t page);

/* The next pages from *page on that a reader maps, up to *stop; false if there are none, or if the store is open for
 * reading only. */
bool pm_region_fork_mapped(const pm_region *region, uint64_t *page, uint64_t *stop);

/* The offset of the first page that earlier forks leave free. */
uint64_t pm_region_fork_free_from(pm_region *region);

/* Lets the lock of the fork go. */
void pm_region_fork_let_go(pm_region *region);

#endif
