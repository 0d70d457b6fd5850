#include "space/leaves.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "space/page.h"

static bool is_page(const pm_region *region, uint64_t offset, uint32_t type)
{
    return pm_region_readable(region, region->live, offset, PM_PAGE, "a page of metadata") == PM_OK
           && pm_page_valid(region, region->live, offset, type);
}

/* The page that is the only one of its type; 0: there is none, or *several. */
static uint64_t only_page(const pm_region *region, uint32_t type, bool *several)
{
    uint64_t found = 0;
    *several = false;
    for (uint64_t offset = PM_PAGE; offset < region->size; offset += PM_PAGE) {
        if (!is_page(region, offset, type)) continue;
        *several = found;
        if (found) return 0;
        found = offset;
    }
    return found;
}

/* Makes a root that leads to the space map and the table of slots, if each has a single page to begin with: the map of
 * up to 31 GiB, the table of up to 126 extents. The checksum stays invalid, which pm_verify reports. */
static pm_status make_root(pm_region *region)
{
    bool several;
    pm_root *root = (void *)region->live;
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED; /* the disk may not be able to read what is there */
    if (!region->media->lent && mmap(root, PM_PAGE, PROT_READ | PROT_WRITE, how, -1, 0) == MAP_FAILED)
        return pm_fail_errno("cannot map a page of memory");
    *root = (pm_root){.head = {.type = PM_TYPE_ROOT}};
    root->map_lists[0] = only_page(region, PM_TYPE_MAP_LIST, &several);
    root->slots[0] = only_page(region, PM_TYPE_SLOTS, &region->slots_lost);
    region->flags[0] |= PM_FLAG_VERIFIED;
    return PM_OK;
}

static pm_key edge(const pm_node *leaf, bool last)
{
    pm_key key;
    pm_node_cell(leaf, last ? leaf->count - 1u : 0, &key, NULL);
    return key;
}

static int by_key(const void *a, const void *b)
{
    return pm_node_compare_keys(edge(*(const pm_node *const *)a, false), edge(*(const pm_node *const *)b, false));
}

/* The leaf on a page, if it is one that the catalog has now: a page that is free may have been a leaf once. */
static pm_node *leaf_at(pm_region *region, uint64_t offset)
{
    pm_status status;
    const bool known = pm_heap_knows(region, offset / PM_PAGE);
    if (known && pm_heap_kind(region, region->live, offset / PM_PAGE) != PM_PAGE_META) return NULL;
    if (!is_page(region, offset, PM_TYPE_NODE)) return NULL;
    pm_node *leaf = pm_page_read(region, offset, PM_TYPE_NODE, &status);
    if (!leaf || leaf->head.level || !leaf->count || !pm_node_valid(leaf)) return NULL;
    const pm_node *there = leaf, *beside;
    if (!known && pm_catalog_beside(region, edge(leaf, false), 0, &there, &beside) != PM_OK) return NULL;
    return there == leaf ? leaf : NULL;
}

pm_status pm_leaves_find(pm_region *region)
{
    pm_status status;
    size_t count = 0, room = 64;
    region->salvage = true;
    if (!pm_heap_root(region, &status)) PM_TRY(make_root(region));
    void **leaves = malloc(room * sizeof *leaves), **more = leaves;
    for (uint64_t offset = PM_PAGE; more && offset < region->size; offset += PM_PAGE) {
        void *leaf = leaf_at(region, offset);
        if (!leaf) continue;
        if (count == room) more = realloc(leaves, (room *= 2) * sizeof *leaves);
        if (more) (leaves = more)[count++] = leaf;
    }
    if (!more) {
        free(leaves);
        return pm_fail(PM_NO_MEMORY, "no memory for a list of the catalog's pages");
    }
    qsort(leaves, count, sizeof *leaves, by_key);
    region->leaves = leaves, region->leaf_count = count;
    return PM_OK;
}

bool pm_leaves_gap(pm_region *region, size_t i)
{
    const pm_node *before = i ? region->leaves[i - 1] : NULL, *leaf, *beside;
    const pm_node *after = i < region->leaf_count ? region->leaves[i] : NULL;
    if (!before && !after) return true;
    pm_key key = after ? edge(after, false) : edge(before, true);
    if (pm_catalog_beside(region, key, after ? -1 : 1, &leaf, &beside) != PM_OK) return true;
    return leaf != (after ? after : before) || beside != (after ? before : NULL);
}
