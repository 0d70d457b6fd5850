/*
 * An entry that differs from the last commit's stands in an edited leaf: in the leaf as it is now, as it was, or both.
 * So the entries of edited leaves, as they are and as they were, include all such entries. An entry that only moved to
 * another leaf is in both, and equal.
 */
#include "commit/pending.h"

#include <stdlib.h>

#include "commit/candidates.h"
#include "space/catalog.h"

typedef struct {
    pm_found *list;
    size_t count, room;
} entries;

typedef struct {
    uint8_t *bytes;
    size_t length, room;
} row_list;

static pm_status no_memory(void)
{
    return pm_fail(PM_NO_MEMORY, "no memory to list what is pending");
}

static pm_status add_leaf(entries *all, const uint8_t *page)
{
    const pm_node *node = (const void *)page;
    if (node->head.type != PM_TYPE_NODE || node->head.level || !pm_node_valid(node)) return PM_OK;
    if (all->room - all->count < node->count) {
        size_t room = 2 * all->room + node->count;
        pm_found *list = realloc(all->list, room * sizeof *list);
        if (!list) return no_memory();
        all->list = list, all->room = room;
    }
    for (unsigned i = 0; i < node->count; i++) pm_catalog_node_found(node, i, &all->list[all->count++]);
    return PM_OK;
}

static pm_status add_row(row_list *rows, const pm_found *found)
{
    size_t used = rows->length;
    if (rows->room - rows->length < PM_PAGE) {
        size_t room = 2 * rows->room + PM_PAGE;
        uint8_t *bytes = realloc(rows->bytes, room);
        if (!bytes) return no_memory();
        rows->bytes = bytes, rows->room = room;
    }
    PM_CHECK(pm_catalog_row(found, rows->bytes, rows->room, &used));
    rows->length = used;
    return PM_OK;
}

static int by_key(const void *a, const void *b)
{
    return pm_node_compare_keys(((const pm_found *)a)->key, ((const pm_found *)b)->key);
}

static bool is_same(const pm_found *a, const pm_found *b)
{
    const pm_entry *x = &a->entry, *y = &b->entry;
    return x->offset == y->offset && x->length == y->length && x->kind == y->kind && x->flags == y->flags &&
           x->meta_length == y->meta_length && (!x->meta_length || !memcmp(a->meta, b->meta, x->meta_length));
}

static pm_status add_changes(row_list *rows, const entries *now, const entries *before)
{
    for (size_t i = 0, k = 0; i < now->count || k < before->count;) {
        int order = i == now->count ? 1 : k == before->count ? -1 : by_key(&now->list[i], &before->list[k]);
        if (order || !is_same(&now->list[i], &before->list[k]))
            PM_TRY(add_row(rows, order > 0 ? &before->list[k] : &now->list[i]));
        i += order <= 0;
        k += order >= 0;
    }
    return PM_OK;
}

static pm_status list_entries(const pm_region *region, entries *now, entries *before)
{
    for (size_t i = 0; i < region->edited_count; i++) {
        uint64_t offset = region->edited[i], page = offset / PM_PAGE;
        if (region->flags[page] & PM_FLAG_EDITED) PM_TRY(add_leaf(now, region->live + offset));
        if (pm_heap_kind(region, region->committed, page) == PM_PAGE_META)
            PM_TRY(add_leaf(before, region->committed + offset));
    }
    if (now->count) qsort(now->list, now->count, sizeof *now->list, by_key);
    if (before->count) qsort(before->list, before->count, sizeof *before->list, by_key);
    return PM_OK;
}

/* Adds a row without a key for each extent whose bytes programs have changed. */
static pm_status add_extents(pm_store *store, row_list *rows)
{
    pm_candidate *list;
    size_t count;
    PM_TRY(pm_candidates_find(store, false, &list, &count));
    for (size_t i = 0; i < count; i++) {
        const pm_candidate *extent = &list[i];
        if (extent->what != PM_EXTENT || (i && list[i - 1].offset == extent->offset)) continue;
        if (!pm_gather_differs(&store->region, extent)) continue;
        const pm_double_buffer *pair = pm_region_double_buffer(&store->region, extent->offset, extent->length);
        uint64_t offset = pair ? pair->slot[0] : extent->offset;
        pm_entry entry = {.offset = offset, .length = extent->length};
        PM_TRY(add_row(rows, &(pm_found){.key = {(const uint8_t *)"", 0}, .entry = entry}));
    }
    return PM_OK;
}

pm_status pm_pending_rows(pm_store *store, uint8_t **rows, size_t *length)
{
    entries now = {0}, before = {0};
    row_list found = {0};
    pm_status status = list_entries(&store->region, &now, &before);
    if (status == PM_OK) status = add_changes(&found, &now, &before);
    if (status == PM_OK) status = add_extents(store, &found);
    free(now.list);
    free(before.list);
    if (status == PM_OK) {
        *rows = found.bytes;
        *length = found.length;
    } else {
        free(found.bytes);
    }
    return status;
}

void pm_pending_free(uint8_t *rows)
{
    free(rows);
}
