/*
 * Entries of the catalog together with their extents. The caller holds the store's mutex.
 */
#ifndef PM_ENTRIES_H
#define PM_ENTRIES_H

#include "commit/store_state.h"
#include "space/catalog.h"

/* PM_INVALID for an empty key, PM_TOO_LONG. */
pm_status pm_entries_check_key(const uint8_t *key, size_t length, pm_key *out);

/* Puts an entry, and frees the extent of the entry that it replaces. See pm_put. */
pm_status pm_entries_put(pm_store *store, pm_key key, const pm_entry *entry, const uint8_t *meta);

/* Deletes an entry, and frees its extent. PM_NOT_FOUND. */
pm_status pm_entries_delete(pm_store *store, pm_key key);

/* Gives entries other keys, with the extents that they own, and then puts `entry`, if it is not NULL: all of this, or
 * nothing. See pm_rename and pm_put. */
pm_status pm_entries_rename(pm_store *store, const pm_renaming *all, size_t count, pm_key key, const pm_entry *entry,
                            const uint8_t *meta);

/* Replaces members of a sequence: all of it, or nothing. See pm_splice. */
pm_status pm_entries_splice(pm_store *store, pm_key prefix, uint64_t at, uint64_t removed, const pm_member *all,
                            size_t count);

/* Deletes all entries whose keys start with the prefix. An empty prefix deletes none. */
pm_status pm_entries_delete_prefix(pm_store *store, const uint8_t *prefix, size_t length);

/* The rows of entries whose keys start with the prefix, from `from` on, or after it. See pm_scan. */
pm_status pm_entries_scan(pm_store *store, pm_key from, bool after, const uint8_t *prefix, size_t prefix_length,
                          uint8_t *rows, size_t capacity, size_t *used);

/* The row of the last entry before `end`. PM_NOT_FOUND: its key does not start with the prefix, or there is none. */
pm_status pm_entries_before(pm_store *store, pm_key end, const uint8_t *prefix, size_t prefix_length, uint8_t *rows);

#endif
