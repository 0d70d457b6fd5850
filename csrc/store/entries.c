#include "store/entries.h"

#include <stdlib.h>

#include "commit/checkpoint.h"
#include "commit/failed.h"
#include "commit/uncommitted.h"

pm_status pm_entries_check_key(const uint8_t *key, size_t length, pm_key *out)
{
    if (!length) return pm_fail(PM_INVALID, "an empty key");
    if (length > PM_KEY_MAX)
        return pm_fail(PM_TOO_LONG, "a key of %zu bytes is over the limit of %d", length, PM_KEY_MAX);
    *out = (pm_key){key, length};
    return PM_OK;
}

static bool starts_with(pm_key key, const uint8_t *prefix, size_t length)
{
    return key.length >= length && (!length || !memcmp(key.bytes, prefix, length));
}

/* Keeps the contents of an entry that is about to go for readers that may map them. */
static pm_status leave_to_readers(pm_store *store, const pm_entry *old)
{
    bool mapped = old->offset && old->flags & PM_ENTRY_FIXED && !pm_extent_is_small(old->length)
                  && pm_region_holds(&store->region, old->offset, old->length);
    if (!mapped || pm_uncommitted_find(store, old->offset)) return PM_OK;
    uint64_t size = pm_extent_size(old->length); /* a reader's check reads the hashes, too */
    return pm_region_leave_to_readers(&store->region, store, old->offset, size, store->log.sequence);
}

/* Frees the extent of an entry that is gone already. If it can't be freed, it is damaged, or its neighbour in a list
 * is: its space stays taken, which check() reports together with the damage. */
static void free_replaced(pm_store *store, const pm_entry *old)
{
    if (old->offset) (void)pm_uncommitted_free(store, old->offset, old->length);
}

pm_status pm_entries_delete_prefix(pm_store *store, const uint8_t *prefix, size_t length)
{
    pm_found found;
    pm_status status = length ? PM_OK : PM_NOT_FOUND;
    while (status == PM_OK) {
        status = pm_catalog_seek(&store->region, (pm_key){prefix, length}, false, &found);
        if (status != PM_OK || !starts_with(found.key, prefix, length)) break;
        uint8_t bytes[PM_KEY_MAX];
        pm_key key = {bytes, found.key.length};
        pm_entry old = found.entry;
        memcpy(bytes, found.key.bytes, found.key.length);
        PM_TRY(leave_to_readers(store, &old));
        status = pm_catalog_delete(&store->region, key);
        if (status == PM_OK) free_replaced(store, &old);
    }
    return status == PM_NOT_FOUND ? PM_OK : status;
}

pm_status pm_entries_put(pm_store *store, pm_key key, const pm_entry *entry, const uint8_t *meta)
{
    pm_found found;
    pm_entry old = {0};
    pm_status status = pm_catalog_get(&store->region, key, &found);
    if (status == PM_OK) old = found.entry;
    else if (status != PM_NOT_FOUND) return status;
    bool owned = entry->offset && entry->offset == old.offset;
    if (owned && entry->length != old.length) return pm_fail(PM_INVALID, "an extent keeps its length");
    pm_uncommitted *uncommitted = pm_uncommitted_find(store, entry->offset);
    if (entry->offset && !owned && (!uncommitted || uncommitted->owned || uncommitted->length != entry->length))
        return pm_fail(PM_INVALID, "an entry takes an extent that has no owner, or the one that it has");
    if (!owned) PM_TRY(leave_to_readers(store, &old));
    PM_WITH_SPACE(store, PM_TREE_HEIGHT + 1, status, pm_catalog_put(&store->region, key, entry, meta));
    PM_TRY(status);
    if (uncommitted) uncommitted->owned = true;
    if (!owned) free_replaced(store, &old);
    return PM_OK;
}

pm_status pm_entries_delete(pm_store *store, pm_key key)
{
    pm_found found;
    PM_TRY(pm_catalog_get(&store->region, key, &found));
    pm_entry old = found.entry;
    PM_TRY(leave_to_readers(store, &old));
    PM_TRY(pm_catalog_delete(&store->region, key));
    free_replaced(store, &old);
    return PM_OK;
}

/* Puts an entry under its new key, too. */
static pm_status put_again(pm_store *store, pm_key from, pm_key to)
{
    uint8_t meta[PM_META_MAX]; /* a found entry is valid until the catalog changes, or the region grows */
    pm_found found;
    pm_status status = pm_catalog_get(&store->region, to, &found);
    if (status == PM_OK) return pm_fail(PM_INVALID, "the new key of an entry is taken");
    if (status != PM_NOT_FOUND) return status;
    PM_TRY(pm_catalog_get(&store->region, from, &found));
    const pm_entry entry = found.entry;
    PM_CHECK(entry.meta_length <= PM_META_MAX);
    if (entry.meta_length) memcpy(meta, found.meta, entry.meta_length);
    PM_WITH_SPACE(store, PM_TREE_HEIGHT + 1, status, pm_catalog_put(&store->region, to, &entry, meta));
    return status;
}

/* An extent must not get two owners. So the keys of one side go whatever happens. They were found just now: a store in
 * which that fails writes nothing more. */
static pm_status remove_side(pm_store *store, const pm_renaming *all, size_t count, bool new_ones)
{
    for (size_t i = 0; i < count; i++) {
        pm_key key = new_ones ? (pm_key){all[i].to, all[i].to_length} : (pm_key){all[i].from, all[i].from_length};
        pm_status status = pm_catalog_delete(&store->region, key);
        if (status != PM_OK) return pm_failed(store, status);
    }
    return PM_OK;
}

pm_status pm_entries_rename(pm_store *store, const pm_renaming *all, size_t count, pm_key key, const pm_entry *entry,
                            const uint8_t *meta)
{
    pm_key checked;
    for (size_t i = 0; i < count; i++) {
        PM_TRY(pm_entries_check_key(all[i].from, all[i].from_length, &checked));
        PM_TRY(pm_entries_check_key(all[i].to, all[i].to_length, &checked));
        if (entry && !pm_node_compare_keys(key, (pm_key){all[i].from, all[i].from_length}))
            return pm_fail(PM_INVALID, "an entry that gets a new key can't be replaced in the same call");
    }
    size_t made = 0;
    pm_status status = PM_OK;
    for (; made < count && status == PM_OK; made += status == PM_OK)
        status = put_again(store, (pm_key){all[made].from, all[made].from_length},
                           (pm_key){all[made].to, all[made].to_length});
    if (status == PM_OK && entry) status = pm_entries_put(store, key, entry, meta);
    if (status == PM_OK) return remove_side(store, all, count, false);
    PM_TRY(remove_side(store, all, made, true));
    return status;
}

/* ---- sequences ---------------------------------------------------------------------------------------------- */

static pm_status find_member(pm_store *store, pm_key prefix, uint64_t number)
{
    uint8_t bytes[PM_KEY_MAX];
    pm_found found;
    pm_status status = pm_catalog_get(&store->region, pm_node_numbered(bytes, prefix, number), &found);
    return status == PM_NOT_FOUND ? pm_fail(PM_CORRUPT, "a sequence lacks a member") : status;
}

/* Checks that the sequence has the place and the members that go, and that each of them moves once at most. */
static pm_status check_splice(pm_store *store, pm_key prefix, uint64_t at, uint64_t removed, const pm_member *all,
                              size_t count)
{
    if (at > UINT64_MAX / 4) return pm_fail(PM_INVALID, "a sequence has no such numbers");
    if (at) PM_TRY(find_member(store, prefix, at - 1));
    for (uint64_t i = 0; i < removed; i++) PM_TRY(find_member(store, prefix, at + i));
    uint8_t *moved = calloc(removed / 8 + 1, 1); /* a bit for each */
    if (!moved) return pm_fail(PM_NO_MEMORY, "no memory for the members that move");
    pm_status status = PM_OK;
    for (size_t i = 0; i < count && status == PM_OK; i++) {
        uint64_t number = all[i].number - at;
        if (!all[i].moves) continue;
        if (number >= removed || moved[number / 8] >> number % 8 & 1)
            status = pm_fail(PM_INVALID, "a member moves that is not removed, or moves twice");
        else moved[number / 8] |= (uint8_t)(1u << number % 8);
    }
    free(moved);
    return status;
}

static pm_status put_member(pm_store *store, pm_key prefix, const pm_member *one, uint64_t number)
{
    uint8_t from[PM_KEY_MAX], to[PM_KEY_MAX];
    pm_key key = pm_node_numbered(to, prefix, number);
    if (one->moves) return put_again(store, pm_node_numbered(from, prefix, one->number), key);
    return pm_entries_put(store, key, &one->entry, one->meta);
}

/* Takes members out of the gap. Those that move are still at their old places; extents of new ones have no owner. */
static pm_status empty_gap(pm_store *store, pm_key prefix, uint64_t gap, const pm_member *all, size_t made)
{
    for (size_t i = 0; i < made; i++) {
        uint8_t bytes[PM_KEY_MAX];
        PM_TRY(pm_catalog_delete(&store->region, pm_node_numbered(bytes, prefix, gap + i)));
        pm_uncommitted *extent = all[i].moves ? NULL : pm_uncommitted_find(store, all[i].entry.offset);
        if (extent) extent->owned = false;
    }
    return PM_OK;
}

/* Deletes the members before the gap: the keys of those that have moved, and all of the others. */
static pm_status remove_members(pm_store *store, pm_key prefix, uint64_t at, uint64_t removed, const pm_member *all,
                                size_t count)
{
    uint8_t bytes[PM_KEY_MAX];
    for (size_t i = 0; i < count; i++)
        if (all[i].moves)
            PM_TRY(pm_catalog_delete(&store->region, pm_node_numbered(bytes, prefix, all[i].number)));
    for (uint64_t i = at; i < at + removed; i++) {
        pm_status status = pm_entries_delete(store, pm_node_numbered(bytes, prefix, i));
        if (status != PM_OK && status != PM_NOT_FOUND) return status; /* not found: it has moved */
    }
    return PM_OK;
}

/* at │ removed │ gap: all │ behind → at │ all │ behind. The first shift reads all that the second one will. Until the
 * gap is full, all can be taken back, which takes no space. */
pm_status pm_entries_splice(pm_store *store, pm_key prefix, uint64_t at, uint64_t removed, const pm_member *all,
                            size_t count)
{
    PM_TRY(check_splice(store, prefix, at, removed, all, count));
    uint8_t bytes[PM_KEY_MAX];
    pm_found found;
    uint64_t gap = at + removed;
    size_t made = 0;
    pm_key first = pm_node_numbered(bytes, prefix, gap);
    pm_status undone = PM_OK, status = pm_catalog_seek(&store->region, first, false, &found);
    if (status != PM_OK && status != PM_NOT_FOUND) return status;
    bool behind = status == PM_OK && starts_with(found.key, prefix.bytes, prefix.length);
    if (behind && pm_node_compare_keys(found.key, first)) return pm_fail(PM_CORRUPT, "a sequence lacks a member");
    bool at_end = !behind && !removed; /* no number changes, as in an append */
    if (!at_end) PM_TRY(pm_catalog_shift(&store->region, prefix, gap, (int64_t)count));
    status = PM_OK;
    for (; made < count && status == PM_OK; made += status == PM_OK)
        status = put_member(store, prefix, &all[made], gap + made);
    if (status != PM_OK) {
        undone = empty_gap(store, prefix, gap, all, made);
        if (undone == PM_OK && !at_end)
            undone = pm_catalog_shift(&store->region, prefix, gap + count, -(int64_t)count);
        return undone == PM_OK ? status : pm_failed(store, undone);
    }
    if (at_end) return PM_OK;
    status = remove_members(store, prefix, at, removed, all, count);
    if (status == PM_OK) status = pm_catalog_shift(&store->region, prefix, gap, -(int64_t)removed);
    return status == PM_OK ? PM_OK : pm_failed(store, status);
}

/* ---- reading ------------------------------------------------------------------------------------------------ */

pm_status pm_entries_scan(pm_store *store, pm_key from, bool after, const uint8_t *prefix, size_t prefix_length,
                          uint8_t *rows, size_t capacity, size_t *used)
{
    uint8_t last[PM_KEY_MAX];
    for (;;) {
        pm_found found;
        pm_status status = pm_catalog_seek(&store->region, from, after, &found);
        if (status == PM_NOT_FOUND) return PM_OK;
        PM_TRY(status);
        if (!starts_with(found.key, prefix, prefix_length)) return PM_OK;
        if (!pm_catalog_row(&found, rows, capacity, used)) return PM_OK;
        memcpy(last, found.key.bytes, found.key.length);
        from = (pm_key){last, found.key.length};
        after = true;
    }
}

pm_status pm_entries_before(pm_store *store, pm_key end, const uint8_t *prefix, size_t prefix_length, uint8_t *rows)
{
    pm_found found;
    pm_status status = pm_catalog_before(&store->region, end, &found);
    if (status == PM_OK && !starts_with(found.key, prefix, prefix_length)) status = PM_NOT_FOUND;
    if (status != PM_OK) return status;
    size_t used = 0;
    bool fits = pm_catalog_row(&found, rows, PM_PAGE, &used);
    PM_CHECK(fits);
    return PM_OK;
}
