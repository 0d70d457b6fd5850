#include "space/leaves.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "base/search.h"
#include "space/page.h"

static const pm_key no_key = {NULL, 0};

pm_key pm_leaves_first(const pm_node *leaf)
{
    pm_key key;
    pm_node_cell(leaf, 0, &key, NULL);
    return key;
}

pm_key pm_leaves_last(const pm_node *leaf)
{
    pm_key key;
    pm_node_cell(leaf, leaf->count - 1u, &key, NULL);
    return key;
}

uint64_t pm_leaves_keys(const pm_leaves *leaves)
{
    uint64_t keys = 0;
    for (size_t i = 0; i < leaves->count; i++) keys += leaves->all[i]->count;
    return keys;
}

size_t pm_leaves_at(const pm_leaves *leaves, pm_key key)
{
    size_t next = PM_FIRST(i, leaves->count, pm_node_compare_keys(pm_leaves_first(leaves->all[i]), key) > 0);
    return next ? next - 1 : 0;
}

static bool is_within(const pm_node *node, pm_key from, pm_key to)
{
    if (!node->count) return true;
    return pm_node_key_within(pm_leaves_first(node), from, to) && pm_node_key_within(pm_leaves_last(node), from, to);
}

static bool is_page(const pm_region *region, uint64_t offset, uint32_t type)
{
    return pm_region_readable(region, region->live, offset, PM_PAGE, "a page of metadata") == PM_OK
           && pm_page_valid(region, region->live, offset, type);
}

static bool is_metadata(pm_region *region, uint64_t offset)
{
    uint64_t page = offset / PM_PAGE;
    return pm_heap_knows(region, page) && pm_heap_kind(region, region->live, page) == PM_PAGE_META;
}

/* ---- the root --------------------------------------------------------------------------------------------------- */

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

/* Whether a page is damaged that the map calls metadata: it may be one of the table of slots. */
static bool any_damaged(pm_region *region)
{
    static const uint32_t types[] = {PM_TYPE_NODE, PM_TYPE_MAP, PM_TYPE_MAP_LIST, PM_TYPE_SLOTS};
    for (uint64_t offset = PM_PAGE; offset < region->size; offset += PM_PAGE) {
        bool sound = !is_metadata(region, offset);
        for (size_t i = 0; i < sizeof types / sizeof types[0] && !sound; i++)
            sound = is_page(region, offset, types[i]);
        if (!sound) return true;
    }
    return false;
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
    region->flags[0] |= PM_FLAG_VERIFIED;
    root->map_lists[0] = only_page(region, PM_TYPE_MAP_LIST, &several);
    root->slots[0] = only_page(region, PM_TYPE_SLOTS, &several);
    region->slots_lost = several || !root->map_lists[0] || any_damaged(region);
    return PM_OK;
}

/* ---- leaves ------------------------------------------------------------------------------------------------------ */

/* The array with room for one more element; NULL: there is no memory. */
static void *roomy(void *array, size_t count, size_t *room, size_t size)
{
    if (count < *room) return array;
    size_t more = *room ? 2 * *room : 64;
    void *larger = realloc(array, more * size);
    if (larger) *room = more;
    return larger;
}

static pm_status no_memory(void)
{
    return pm_fail(PM_NO_MEMORY, "no memory for a list of the catalog's pages");
}

static pm_status add_leaf(pm_leaves *leaves, pm_node *leaf)
{
    if (!leaf->count) return PM_OK;
    void *all = roomy(leaves->all, leaves->count, &leaves->room, sizeof(pm_node *));
    if (!all) return no_memory();
    leaves->all = all;
    leaves->all[leaves->count++] = leaf;
    return PM_OK;
}

/* Adds a hole, or makes the one before it larger if they are neighbours. */
static pm_status add_hole(pm_leaves *leaves, pm_key from, pm_key to)
{
    pm_hole *last = leaves->hole_count ? &leaves->holes[leaves->hole_count - 1] : NULL;
    if (last && !pm_node_compare_keys(last->to, from)) {
        last->to = to;
        return PM_OK;
    }
    void *holes = roomy(leaves->holes, leaves->hole_count, &leaves->hole_room, sizeof(pm_hole));
    if (!holes) return no_memory();
    leaves->holes = holes;
    leaves->holes[leaves->hole_count++] = (pm_hole){from, to};
    return PM_OK;
}

/* A node that is sound, and has the keys that it should have; NULL: it is not, or the tree leads to it in two ways. */
static pm_node *node_at(pm_region *region, uint64_t offset, uint32_t level, pm_key from, pm_key to)
{
    pm_status status;
    pm_page_set *seen = &region->leaves->seen;
    if (offset % PM_PAGE || offset >= region->size || pm_page_set_has(seen, offset / PM_PAGE)) return NULL;
    pm_node *node = pm_catalog_node(region, offset, level, &status);
    if (!node) return NULL;
    if (!is_within(node, from, to)) {
        region->flags[offset / PM_PAGE] &= (uint8_t)~PM_FLAG_VERIFIED;
        return NULL;
    }
    pm_page_set_add(seen, offset / PM_PAGE, offset / PM_PAGE + 1);
    return node;
}

/* Finds the leaves and the holes of a subtree. */
static pm_status walk(pm_region *region, uint64_t offset, uint32_t level, pm_key from, pm_key to)
{
    pm_node *node = node_at(region, offset, level, from, to);
    if (!node) return add_hole(region->leaves, from, to);
    if (!level) return add_leaf(region->leaves, node);
    for (unsigned i = 0; i <= node->count; i++) {
        pm_key low = from, high = to;
        if (i) pm_node_cell(node, i - 1, &low, NULL);
        if (i < node->count) pm_node_cell(node, i, &high, NULL);
        PM_TRY(walk(region, pm_node_child_at(node, i), level - 1, low, high));
    }
    return PM_OK;
}

static bool is_in_hole(const pm_leaves *leaves, const pm_node *leaf)
{
    for (size_t i = 0; i < leaves->hole_count; i++)
        if (is_within(leaf, leaves->holes[i].from, leaves->holes[i].to)) return true;
    return false;
}

/* The node on a page that the map calls metadata, and to which the tree does not lead. */
static pm_node *lost_node(pm_region *region, uint64_t offset)
{
    pm_status status;
    bool seen = pm_page_set_has(&region->leaves->seen, offset / PM_PAGE);
    if (seen || !is_metadata(region, offset) || !is_page(region, offset, PM_TYPE_NODE)) return NULL;
    uint32_t level = ((const pm_page_head *)(const void *)(region->live + offset))->level;
    return pm_catalog_node(region, offset, level, &status);
}

static int by_key(const void *a, const void *b)
{
    return pm_node_compare_keys(pm_leaves_first(*(pm_node *const *)a), pm_leaves_first(*(pm_node *const *)b));
}

/* Brings the leaves into the order of their keys. Those of a hole may overlap if the map is an older one. */
static void sort(pm_leaves *leaves)
{
    size_t kept = 0;
    if (leaves->count) qsort(leaves->all, leaves->count, sizeof(pm_node *), by_key);
    for (size_t i = 0; i < leaves->count; i++) {
        pm_node *leaf = leaves->all[i];
        if (!kept || pm_node_compare_keys(pm_leaves_last(leaves->all[kept - 1]), pm_leaves_first(leaf)) < 0)
            leaves->all[kept++] = leaf;
    }
    leaves->count = kept;
}

static pm_status fill_holes(pm_region *region)
{
    pm_leaves *leaves = region->leaves;
    for (uint64_t offset = PM_PAGE; leaves->hole_count && offset < region->size; offset += PM_PAGE) {
        pm_node *node = lost_node(region, offset);
        if (!node || (!node->head.level && !is_in_hole(leaves, node))) continue;
        pm_page_set_add(&leaves->seen, offset / PM_PAGE, offset / PM_PAGE + 1);
        if (!node->head.level) PM_TRY(add_leaf(leaves, node));
    }
    sort(leaves);
    return PM_OK;
}

pm_status pm_leaves_prepare(pm_region *region)
{
    pm_status status;
    if (!pm_heap_root(region, &status)) PM_TRY(make_root(region));
    pm_leaves *leaves = region->leaves = calloc(1, sizeof *leaves);
    if (leaves) leaves->seen.bits = calloc(region->size / PM_PAGE / 64 + 1, sizeof *leaves->seen.bits);
    return leaves && leaves->seen.bits ? PM_OK : no_memory();
}

pm_status pm_leaves_find(pm_region *region, pm_leaves_way way)
{
    pm_leaves *leaves = region->leaves;
    region->map_lost = way == PM_LEAVES_BY_TREE_ALONE;
    leaves->count = leaves->hole_count = 0;
    const uint64_t pages = region->size / PM_PAGE;
    /* Nodes that were found before are checked again */
    for (uint64_t page = 0; (page = pm_page_set_next(&leaves->seen, page, pages)) < pages; page++)
        region->flags[page] &= (uint8_t)~PM_FLAG_VERIFIED;
    pm_page_set_clear(&leaves->seen, 0, pages);
    uint64_t top = ((const pm_root *)(const void *)region->live)->tree;
    uint32_t level = PM_TREE_HEIGHT;
    if (way != PM_LEAVES_BY_MAP && top % PM_PAGE == 0 && pm_region_holds(region, top, PM_PAGE)
        && pm_region_make_private(region, top, PM_PAGE, "a page of metadata") == PM_OK)
        level = ((const pm_page_head *)(const void *)(region->live + top))->level;
    if (level < PM_TREE_HEIGHT) PM_TRY(walk(region, top, level, no_key, no_key));
    else PM_TRY(add_hole(leaves, no_key, no_key));
    return fill_holes(region);
}

void pm_leaves_free(pm_leaves *leaves)
{
    if (!leaves) return;
    free(leaves->all);
    free(leaves->holes);
    free(leaves->seen.bits);
    free(leaves);
}
