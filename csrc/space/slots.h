/*
 * Double-buffered extents: extents with two slots. An array most of which changes in every commit is not logged: the
 * commit writes it once, into the slot that does not hold the last durable state, and its record declares the slot that
 * is current from then on.
 *
 *   place in the region    slot 0 = the extent, as its catalog entry knows it        slot 1 = the other
 *   current                the slot with the committed bytes; changes with every such commit
 *   mapped                 the slot over which the private memory lies that programs see; stays while the store is open
 *
 *                   most of it changed, twice           pm_slots_add
 *   one slot ────────────────────────────────────────────────────▶ two slots ──▶ whole commit: the other is current
 *      ▲                                                            │   ▲ │
 *      │  slot 0 is mapped, and this commit leaves it current       │   └─┘ sparse commit: logged into the current slot
 *      └────────── pm_slots_remove ◀── sparse, many times in a row ─┘
 *
 * The header, and the records after it, say which slot is current. The table does not, so that a commit which only
 * flips slots changes no metadata. The notes in process memory are made from these three when the store opens, and
 * follow the metadata through commits and rollbacks.
 *
 * I7   The slot that is not current holds no durable state: only it is written.
 * I8   A logged range of a slot is not applied where a later record declares the slot.
 * I9   The mapped slot's pages that are not private show the slot there. Such a page is never out of date: since it was
 *      last private the program has not written it, so each commit into that slot wrote the same bytes over it. Memory
 *      is given back only where the mapped and the current slot agree (pm_region_release), which is ensured first. The
 *      mapped slot is only freed together with the extent.
 */
#ifndef PM_SLOTS_H
#define PM_SLOTS_H

#include "space/heap.h"

enum { PM_DOUBLE_BUFFER_FROM_FILE = 1 << 20 /* bytes: on disks, a shorter extent has one slot */ };

/* Reads the table. current: a bit for each of its entries, see pm_log. */
pm_status pm_slots_load(pm_region *region, const uint64_t *current);

/* Forgets what was read. For a region that was opened for reading. */
void pm_slots_forget(pm_region *region);

/* Gives an extent that has pages of its own a second slot, which is not written yet. current: as above. PM_NO_SPACE:
 * grow the region by the extent's pages. PM_TOO_LONG: the table is full. */
pm_status pm_slots_add(pm_region *region, const uint64_t *current, uint64_t extent, uint64_t length);

/* Takes the second slot away: slot 0 must have the committed bytes once the next commit is durable. */
pm_status pm_slots_remove(pm_region *region, pm_double_buffer *slots);

void pm_slots_finalize(pm_region *region);  /* after a commit */
void pm_slots_restore(pm_region *region); /* after a rollback */

#endif
