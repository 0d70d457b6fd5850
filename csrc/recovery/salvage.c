#include "recovery/salvage.h"

#include <stdlib.h>

#include "space/extent.h"
#include "space/leaves.h"
#include "space/page.h"
#include "space/slots.h"
#include "recovery/verify.h"

typedef struct {
    pm_region *region;
    pm_digest digest;
    pm_page_set slabs; /* that were counted */
} counter;

static void count_page(counter *c, uint64_t offset, uint32_t type)
{
    pm_region *region = c->region;
    if (offset >= region->size || offset % PM_PAGE
        || pm_region_readable(region, region->live, offset, pm_page_bytes(type), "a page of metadata") != PM_OK
        || !pm_page_valid(region, region->live, offset, type))
        return;
    pm_digest_add(&c->digest, offset, pm_page_contribution(region->live, offset));
}

/* The root, the space map and the table of slots. */
static void count_map(counter *c)
{
    const pm_root *root = (const void *)c->region->live;
    count_page(c, 0, PM_TYPE_ROOT);
    for (unsigned i = 0; i < PM_SLOT_PAGES; i++)
        if (root->slots[i]) count_page(c, root->slots[i], PM_TYPE_SLOTS);
    for (unsigned i = 0; i < PM_ROOT_LISTS; i++) {
        pm_status status;
        if (!root->map_lists[i]) continue;
        count_page(c, root->map_lists[i], PM_TYPE_MAP_LIST);
        const pm_map_list *list = pm_page_read(c->region, root->map_lists[i], PM_TYPE_MAP_LIST, &status);
        for (unsigned j = 0; list && j < PM_MAP_LIST_SLOTS; j++)
            if (list->maps[j]) count_page(c, list->maps[j], PM_TYPE_MAP);
    }
}

static void count_entry(counter *c, const pm_cell *cell)
{
    pm_region *region = c->region;
    if (!cell->offset || pm_heap_check_extent(region, cell->offset, cell->length) != PM_OK) return;
    uint64_t page = cell->offset / PM_PAGE;
    if (pm_extent_is_small(cell->length) && !pm_page_set_has(&c->slabs, page)) {
        pm_page_set_add(&c->slabs, page, page + 1);
        count_page(c, page * PM_PAGE, PM_TYPE_SLAB);
    }
    uint64_t place = pm_region_place(region, cell->offset, cell->length), table = place + pm_extent_table(cell->length);
    uint64_t bytes = 8 * pm_extent_blocks(cell->length);
    if (pm_region_readable(region, region->live, table, bytes, "hashes") == PM_OK)
        pm_extent_digest(&c->digest, region->live + table, place, cell->length);
}

/* Whether the leaves that were found, with all that belongs to them, are the last commit but for a single place, or
 * nothing. That is so if one page is damaged, or was left as it was before by a lost write. */
static pm_status explain(pm_store *store, bool *explains)
{
    pm_region *region = &store->region;
    const pm_leaves *leaves = region->leaves;
    const uint64_t pages = region->size / PM_PAGE;
    counter c = {.region = region, .slabs.bits = calloc(pages / 64 + 1, sizeof *c.slabs.bits)};
    if (!c.slabs.bits) return pm_fail(PM_NO_MEMORY, "no memory to compare a store with its digest");
    count_map(&c);
    for (uint64_t page = 0; (page = pm_page_set_next(&leaves->seen, page, pages)) < pages; page++)
        count_page(&c, page * PM_PAGE, PM_TYPE_NODE);
    for (size_t i = 0; i < leaves->count; i++)
        for (unsigned slot = 0; slot < leaves->all[i]->count; slot++) {
            pm_cell cell = pm_node_cell(leaves->all[i], slot, NULL, NULL);
            count_entry(&c, &cell);
        }
    free(c.slabs.bits);
    pm_digest difference = pm_digest_minus(store->log.digest, c.digest);
    region->wrong = pm_verify_place(region, difference);
    *explains = region->wrong != UINT64_MAX || (!difference.sum && !difference.moment);
    return PM_OK;
}

/* Finds the leaves in a way, and the extents with two slots, on whose pages the map has to agree unless it is lost. */
static pm_status find(pm_store *store, pm_leaves_way way, bool slots_lost)
{
    PM_TRY(pm_leaves_find(&store->region, way));
    store->region.slots_lost = slots_lost;
    pm_slots_forget(&store->region);
    return pm_slots_load(&store->region, store->log.slots);
}

pm_status pm_salvage_open(pm_store *store)
{
    static const pm_leaves_way ways[] = {PM_LEAVES_BY_TREE, PM_LEAVES_BY_MAP, PM_LEAVES_BY_TREE_ALONE};
    pm_region *region = &store->region;
    bool explains = false;
    PM_TRY(pm_leaves_prepare(region));
    const bool lost = region->slots_lost;
    for (size_t i = 0; i < sizeof ways / sizeof ways[0] && !explains; i++) {
        PM_TRY(find(store, ways[i], lost));
        PM_TRY(explain(store, &explains));
    }
    region->unproved = !explains;
    return explains ? PM_OK : find(store, PM_LEAVES_BY_TREE, lost);
}
