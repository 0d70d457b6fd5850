/*
 * Extents with two slots. An array most of which changes in every commit is not logged: the commit writes it once, into
 * the slot that does not hold the last durable state, and its record declares which slot is current from then on.
 *
 *   place in the region    slot 0 = the extent, as its catalog entry knows it        slot 1 = the other
 *   home                   the slot with the committed bytes; changes with every such commit
 *   seat                   the slot over which the private memory lies that programs see; stays while the store is open
 *
 *                   most of it changed, twice           pm_slots_add
 *   one slot ────────────────────────────────────────────────────▶ two slots ──▶ whole commit: home = the other slot
 *      ▲                                                            │   ▲ │
 *      │  seat is slot 0, and this commit leaves home there         │   └─┘ sparse commit: logged into home
 *      └────────── pm_slots_remove ◀── sparse, many times in a row ─┘
 *
 * Which slot is home stands in the header and, after it, in the records; not in the table, so that a commit which only
 * flips slots changes no metadata. What is noted here in process memory is taken from these three when the store opens,
 * and follows the metadata through commits and rollbacks.
 *
 * I7   The slot that is not home holds no durable state: it alone is written.
 * I8   A logged run into a slot is not applied where a later record declares the slot.
 * I9   The seat's pages that are not private show the slot there. Such a page is never out of date: since it was last
 *      private the program has not written it, so each commit into that slot wrote the same bytes over it. Memory is
 *      given back only where the slot there and home agree (pm_region_release), which is made so first. The seat is
 *      never freed but with the extent.
 */
#ifndef PM_SLOTS_H
#define PM_SLOTS_H

#include "heap.h"

/* Reads the table. current: a bit for each of its entries, see pm_log. */
pm_status pm_slots_load(pm_region *region, const uint64_t *current);

/* Gives an extent that has pages of its own a second slot, which is written by nobody yet. current: as above.
 * PM_NO_SPACE: grow the region by its pages; PM_TOO_LONG: the table is full. */
pm_status pm_slots_add(pm_region *region, const uint64_t *current, uint64_t extent, uint64_t length);

/* Takes the second slot away again: slot 0 must hold the committed bytes once the next commit is durable. */
pm_status pm_slots_remove(pm_region *region, pm_dense *dense);

void pm_slots_settle(pm_region *region);  /* after a commit */
void pm_slots_restore(pm_region *region); /* after a rollback */

#endif
