/*
 * The commits that write double-buffered extents whole (D4). space/slots.h draws an extent's life.
 */
#ifndef PM_WRITE_SLOTS_H
#define PM_WRITE_SLOTS_H

#include "commit/gather.h"
#include "commit/store_state.h"

/* Before anything is gathered: gives extents a second slot or takes it away, and writes the extents that most of which
 * changed. A slot that a failed attempt has written is written again. only: see pm_transaction_commit. */
pm_status pm_write_slots(pm_store *store, bool only);

/* Declares the written slots in the record, and adds their contributions to the digest. */
void pm_write_slots_declare(pm_store *store, pm_digest *digest);

/* The record is durable: the slots that were written are the current ones from here on (I2). */
void pm_write_slots_flip(pm_store *store);

/* After a commit: learns which extents change as a whole, time and again. */
void pm_write_slots_learn(pm_store *store, const pm_candidate *list, size_t count);

/* Copies the current slot into the mapped one, before memory of the extent is given back. */
pm_status pm_write_slots_fill_mapped(pm_store *store, uint64_t place, uint64_t length);

#endif
