#include "space/catalog.h"

#include "base/hash.h"
#include "space/page.h"

/* ---- nodes -------------------------------------------------------------------------------------------------- */

enum { CELLS_END = PM_PAGE, LARGEST_INNER = sizeof(pm_cell) + PM_KEY_MAX + 8 };

int pm_catalog_key_compare(pm_key a, pm_key b)
{
    size_t common = a.length < b.length ? a.length : b.length;
    int order = common ? memcmp(a.bytes, b.bytes, common) : 0;
    if (!order) order = (a.length > b.length) - (a.length < b.length);
    return (order > 0) - (order < 0);
}

static size_t cell_size(size_t key_length, size_t meta_length)
{
    return (sizeof(pm_cell) + key_length + meta_length + 7) & ~(size_t)7;
}

pm_cell pm_catalog_node_cell(const pm_node *node, unsigned i, pm_key *key, const uint8_t **meta)
{
    pm_cell cell;
    const uint8_t *at = (const uint8_t *)node + node->slots[i];
    memcpy(&cell, at, sizeof cell);
    if (key) *key = (pm_key){at + sizeof cell, cell.key_length};
    if (meta) *meta = at + sizeof cell + cell.key_length;
    return cell;
}

bool pm_catalog_node_valid(const pm_node *node)
{
    size_t slots_end = PM_LINE + 2 * (size_t)node->count, used = 0;
    if (node->count > sizeof node->slots / 2 || slots_end > node->low || node->low > CELLS_END) return false;
    pm_key before = {NULL, 0};
    uint64_t taken[PM_PAGE / 8 / 64] = {0}; /* a bit for each 8 bytes: cells must not overlap */
    for (unsigned i = 0; i < node->count; i++) {
        if (node->slots[i] < node->low || node->slots[i] % 8 || node->slots[i] > CELLS_END - sizeof(pm_cell))
            return false;
        pm_key key;
        pm_cell cell = pm_catalog_node_cell(node, i, &key, NULL);
        size_t size = cell_size(cell.key_length, cell.meta_length);
        if (cell.key_length == 0 || cell.key_length > PM_KEY_MAX || cell.meta_length > PM_META_MAX) return false;
        if (size > (size_t)CELLS_END - node->slots[i]) return false;
        if (i && pm_catalog_key_compare(before, key) >= 0) return false;
        for (size_t unit = node->slots[i] / 8u; unit < (node->slots[i] + size) / 8; unit++) {
            if (taken[unit / 64] >> unit % 64 & 1) return false;
            taken[unit / 64] |= UINT64_C(1) << unit % 64;
        }
        before = key;
        used += size;
    }
    return used == node->used;
}

static pm_node *node_read(pm_region *region, uint64_t offset, uint32_t level, pm_status *status)
{
    bool known = offset < region->size && region->flags[offset / PM_PAGE] & PM_FLAG_VERIFIED;
    pm_node *node = pm_page_read(region, offset, PM_TYPE_NODE, status);
    if (!node) return NULL;
    /* Contents that programs may write can't pass for a node: the map says what a page is. Levels fall by one, so
     * references can't form a loop. */
    bool valid = known
                 || (pm_catalog_node_valid(node)
                     && pm_heap_live_kind(region, offset / PM_PAGE, status) == PM_PAGE_META);
    if (!valid || node->head.level != level) {
        region->flags[offset / PM_PAGE] &= (uint8_t)~PM_FLAG_VERIFIED;
        if (*status == PM_OK)
            *status = pm_fail(PM_CORRUPT, "the catalog is damaged at region offset %llu", (unsigned long long)offset);
        return NULL;
    }
    return node;
}

/* The first slot with a key >= key; *exact if it is equal. Not by PM_FIRST: a comparison has three results, and
 * comparing once more with the key that was found would read its slot again. */
static unsigned lower_bound(const pm_node *node, pm_key key, bool *exact)
{
    unsigned low = 0, high = node->count;
    *exact = false;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        pm_key there;
        pm_catalog_node_cell(node, middle, &there, NULL);
        int order = pm_catalog_key_compare(there, key);
        if (order == 0) *exact = true;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The child that has the key: 0 is first_child, i > 0 is the child of slot i - 1. */
static unsigned child_index(const pm_node *node, pm_key key)
{
    bool exact;
    unsigned slot = lower_bound(node, key, &exact);
    return exact ? slot + 1 : slot;
}

static uint64_t child_at(const pm_node *node, unsigned index)
{
    return index ? pm_catalog_node_cell(node, index - 1, NULL, NULL).offset : node->first_child;
}

static size_t room_in(const pm_node *node)
{
    return CELLS_END - PM_LINE - 2 * (size_t)node->count - node->used;
}

static void node_clear(pm_node *node)
{
    node->count = node->used = 0;
    node->low = CELLS_END;
}

/* Adds a cell at a slot; there must be room. */
static void cell_insert(pm_node *node, unsigned slot, const pm_cell *cell, const uint8_t *key, const uint8_t *meta);

/* Moves the cells together at the end of the page. */
static void node_pack(pm_node *node)
{
    pm_node old = *node;
    node_clear(node);
    for (unsigned i = 0; i < old.count; i++) {
        pm_key key;
        const uint8_t *meta;
        pm_cell cell = pm_catalog_node_cell(&old, i, &key, &meta);
        cell_insert(node, i, &cell, key.bytes, meta);
    }
}

static void cell_insert(pm_node *node, unsigned slot, const pm_cell *cell, const uint8_t *key, const uint8_t *meta)
{
    size_t size = cell_size(cell->key_length, cell->meta_length);
    PM_CHECK(size + 2 <= room_in(node));
    if (PM_LINE + 2 * ((size_t)node->count + 1) + size > node->low) node_pack(node);
    memmove(&node->slots[slot + 1], &node->slots[slot], 2 * (size_t)(node->count - slot));
    node->low = (uint16_t)(node->low - size);
    node->slots[slot] = node->low;
    uint8_t *at = (uint8_t *)node + node->low;
    memset(at + size - 8, 0, 8);
    memcpy(at, cell, sizeof *cell);
    memcpy(at + sizeof *cell, key, cell->key_length);
    if (cell->meta_length) memcpy(at + sizeof *cell + cell->key_length, meta, cell->meta_length);
    node->used = (uint16_t)(node->used + size);
    node->count++;
}

static void cell_remove(pm_node *node, unsigned slot)
{
    pm_cell cell = pm_catalog_node_cell(node, slot, NULL, NULL);
    size_t size = cell_size(cell.key_length, cell.meta_length);
    if (node->slots[slot] == node->low) node->low = (uint16_t)(node->low + size);
    node->used = (uint16_t)(node->used - size);
    node->count--;
    memmove(&node->slots[slot], &node->slots[slot + 1], 2 * (size_t)(node->count - slot));
    if (!node->count) node_clear(node);
}

/* ---- looking up --------------------------------------------------------------------------------------------- */

typedef struct {
    pm_node *nodes[PM_TREE_HEIGHT]; /* from the root */
    unsigned children[PM_TREE_HEIGHT]; /* the child taken in each inner node */
    unsigned depth; /* of the leaf */
} tree_path;

static pm_status descend(pm_region *region, pm_key key, tree_path *path)
{
    pm_status status;
    pm_root *root = pm_heap_root(region, &status);
    PM_TRY(status);
    uint64_t offset = root->tree;
    if (!pm_region_holds(region, offset, PM_PAGE) || offset % PM_PAGE)
        return pm_fail(PM_CORRUPT, "the catalog's root lies outside the store");
    if (!(region->flags[offset / PM_PAGE] & PM_FLAG_VERIFIED))
        PM_TRY(pm_region_make_private(region, offset, PM_PAGE, "a page of metadata"));
    uint32_t level = ((const pm_page_head *)(const void *)(region->live + offset))->level;
    if (level >= PM_TREE_HEIGHT) return pm_fail(PM_CORRUPT, "the catalog is damaged: it is too high");
    for (path->depth = 0;; path->depth++, level--) {
        pm_node *node = node_read(region, offset, level, &status);
        PM_TRY(status);
        path->nodes[path->depth] = node;
        if (!level) return PM_OK;
        path->children[path->depth] = child_index(node, key);
        offset = child_at(node, path->children[path->depth]);
    }
}

void pm_catalog_node_found(const pm_node *leaf, unsigned slot, pm_found *found)
{
    pm_cell cell = pm_catalog_node_cell(leaf, slot, &found->key, &found->meta);
    found->entry = (pm_entry){cell.offset, cell.length, cell.kind, cell.flags, cell.meta_length};
}

pm_status pm_catalog_get(pm_region *region, pm_key key, pm_found *found)
{
    tree_path path;
    bool exact;
    PM_TRY(descend(region, key, &path));
    const pm_node *leaf = path.nodes[path.depth];
    unsigned slot = lower_bound(leaf, key, &exact);
    if (!exact) return PM_NOT_FOUND;
    pm_catalog_node_found(leaf, slot, found);
    return PM_OK;
}

/* Steps to the neighbouring leaf: by = 1 or -1. PM_NOT_FOUND at the end. */
static pm_status step_leaf(pm_region *region, tree_path *path, int by)
{
    int depth = (int)path->depth - 1;
    for (; depth >= 0; depth--) {
        if (by > 0 && path->children[depth] < path->nodes[depth]->count) break;
        if (by < 0 && path->children[depth] > 0) break;
    }
    if (depth < 0) return PM_NOT_FOUND;
    path->children[depth] += (unsigned)by;
    for (; depth < (int)path->depth; depth++) {
        pm_status status;
        const pm_node *node = path->nodes[depth];
        uint64_t offset = child_at(node, path->children[depth]);
        path->nodes[depth + 1] = node_read(region, offset, node->head.level - 1, &status);
        PM_TRY(status);
        path->children[depth + 1] = by > 0 ? 0 : path->nodes[depth + 1]->count;
    }
    /* Only the root may be an empty leaf; walking over others could take for ever. */
    if (!path->nodes[path->depth]->count) return pm_fail(PM_CORRUPT, "the catalog is damaged: a leaf is empty");
    return PM_OK;
}

static pm_status in_order(bool is)
{
    return is ? PM_OK : pm_fail(PM_CORRUPT, "the catalog is damaged: its keys are not in order");
}

pm_status pm_catalog_seek(pm_region *region, pm_key key, bool after, pm_found *found)
{
    tree_path path;
    bool exact;
    PM_TRY(descend(region, key, &path));
    unsigned slot = lower_bound(path.nodes[path.depth], key, &exact);
    if (exact && after) slot++;
    while (slot >= path.nodes[path.depth]->count) {
        PM_TRY(step_leaf(region, &path, 1));
        slot = 0;
    }
    pm_catalog_node_found(path.nodes[path.depth], slot, found);
    return in_order(pm_catalog_key_compare(found->key, key) >= (after ? 1 : 0));
}

pm_status pm_catalog_before(pm_region *region, pm_key key, pm_found *found)
{
    tree_path path;
    bool exact;
    PM_TRY(descend(region, key, &path));
    unsigned slot = lower_bound(path.nodes[path.depth], key, &exact);
    while (!slot) {
        PM_TRY(step_leaf(region, &path, -1));
        slot = path.nodes[path.depth]->count;
    }
    pm_catalog_node_found(path.nodes[path.depth], slot - 1, found);
    return in_order(pm_catalog_key_compare(found->key, key) < 0);
}

/* ---- changing ----------------------------------------------------------------------------------------------- */

/* Pages that are taken before anything is changed, so that a full store leaves the tree as it was. */
typedef struct {
    uint64_t pages[PM_TREE_HEIGHT + 1];
    unsigned count;
} spare_pages;

static void give_back(pm_region *region, spare_pages *spare)
{
    while (spare->count) {
        /* The page was allocated a moment ago: its map is there, so this can't fail. */
        PM_CHECK(pm_heap_free_pages(region, spare->pages[--spare->count], 1) == PM_OK);
    }
}

static pm_status take_spares(pm_region *region, const tree_path *path, size_t leaf_bytes, spare_pages *spare)
{
    spare->count = 0;
    unsigned wanted = 0;
    int depth = (int)path->depth;
    for (size_t bytes = leaf_bytes; depth >= 0 && room_in(path->nodes[depth]) < bytes + 2;
         depth--, bytes = LARGEST_INNER)
        wanted++;
    if (depth < 0) wanted++; /* a new root */
    while (spare->count < wanted) {
        pm_status status = pm_heap_pages(region, 1, PM_PAGE_META, &spare->pages[spare->count]);
        if (status != PM_OK) {
            give_back(region, spare);
            return status;
        }
        spare->count++;
    }
    return PM_OK;
}

typedef struct {
    pm_cell cell;
    pm_key key;
    const uint8_t *meta;
} tree_item;

/* The i-th of the node's cells and the new one, which is at `slot`. */
static tree_item item_at(const pm_node *node, unsigned i, unsigned slot, const tree_item *inserted)
{
    if (i == slot) return *inserted;
    tree_item item;
    item.cell = pm_catalog_node_cell(node, i < slot ? i : i - 1, &item.key, &item.meta);
    return item;
}

static size_t item_bytes(const tree_item *item)
{
    return cell_size(item->cell.key_length, item->cell.meta_length) + 2;
}

/* How many of the items stay at the left: the cut that leaves the larger side smallest. A cell has at most 1560 of the
 * 4032 bytes, so both sides fit. */
static unsigned choose_cut(const pm_node *node, unsigned slot, const tree_item *inserted)
{
    /* If keys only grow, the left page stays full. */
    if (slot == node->count && node->head.level == 0) return node->count;
    size_t total = node->used + 2 * (size_t)node->count + item_bytes(inserted), left = 0, best = SIZE_MAX;
    unsigned cut = 1;
    for (unsigned i = 0; i < node->count; i++) {
        tree_item item = item_at(node, i, slot, inserted);
        left += item_bytes(&item);
        size_t larger = left > total - left ? left : total - left;
        if (larger < best) best = larger, cut = i + 1;
    }
    return cut;
}

/* Divides the cells of `node` and a new one between it and a new node at its right. *separator becomes the first item
 * of the right side; of an inner node it moves up instead. key_bytes: room for its key. */
static pm_status divide(pm_region *region, pm_node *node, unsigned slot, const tree_item *inserted, uint64_t page,
                        pm_node **right, pm_key *separator, uint8_t *key_bytes)
{
    *right = pm_page_new(region, page, PM_TYPE_NODE, node->head.level);
    node_clear(*right);
    unsigned cut = choose_cut(node, slot, inserted);
    pm_node old = *node;
    node_clear(node);
    for (unsigned i = 0; i <= old.count; i++) {
        tree_item item = item_at(&old, i, slot, inserted);
        pm_node *target = i < cut ? node : *right;
        if (i == cut) {
            memcpy(key_bytes, item.key.bytes, item.key.length);
            *separator = (pm_key){key_bytes, item.key.length};
            if (old.head.level) {
                target->first_child = item.cell.offset;
                continue;
            }
        }
        cell_insert(target, target->count, &item.cell, item.key.bytes, item.meta);
    }
    return PM_OK;
}

/* Inserts an item at `depth`, splitting upwards as needed. Spares are there for every split. */
static pm_status insert_at(pm_region *region, tree_path *path, unsigned depth, const tree_item *inserted,
                           spare_pages *spare)
{
    pm_node *node = path->nodes[depth];
    bool exact;
    unsigned slot = lower_bound(node, inserted->key, &exact);
    pm_page_edit(region, node);
    if (item_bytes(inserted) <= room_in(node)) {
        cell_insert(node, slot, &inserted->cell, inserted->key.bytes, inserted->meta);
        return PM_OK;
    }
    PM_CHECK(spare->count > 0);
    uint8_t key_bytes[PM_KEY_MAX];
    pm_node *right;
    tree_item up = {.meta = NULL};
    PM_TRY(divide(region, node, slot, inserted, spare->pages[--spare->count], &right, &up.key, key_bytes));
    up.cell = (pm_cell){.key_length = (uint16_t)up.key.length, .offset = right->head.self};
    if (depth) return insert_at(region, path, depth - 1, &up, spare);
    pm_status status;
    pm_root *root = pm_heap_root(region, &status);
    PM_TRY(status);
    pm_page_edit(region, root);
    PM_CHECK(spare->count > 0);
    pm_node *top = pm_page_new(region, spare->pages[--spare->count], PM_TYPE_NODE, node->head.level + 1);
    node_clear(top);
    top->first_child = node->head.self;
    cell_insert(top, 0, &up.cell, up.key.bytes, NULL);
    root->tree = top->head.self;
    return PM_OK;
}

static pm_status add_to_count(pm_region *region, int by)
{
    pm_status status;
    pm_root *root = pm_heap_root(region, &status);
    PM_TRY(status);
    pm_page_edit(region, root);
    root->keys += (uint64_t)(int64_t)by;
    return PM_OK;
}

pm_status pm_catalog_put(pm_region *region, pm_key key, const pm_entry *entry, const uint8_t *meta)
{
    tree_path path;
    PM_TRY(descend(region, key, &path));
    pm_node *leaf = path.nodes[path.depth];
    bool exact;
    unsigned slot = lower_bound(leaf, key, &exact);
    pm_cell cell = {.key_length = (uint16_t)key.length, .meta_length = entry->meta_length, .kind = entry->kind,
                    .flags = entry->flags, .offset = entry->offset, .length = entry->length};
    tree_item inserted = {cell, key, meta};
    if (exact) {
        pm_cell old = pm_catalog_node_cell(leaf, slot, NULL, NULL);
        if (old.meta_length == cell.meta_length) {
            pm_page_edit(region, leaf);
            uint8_t *at = (uint8_t *)leaf + leaf->slots[slot];
            memcpy(at, &cell, sizeof cell);
            if (cell.meta_length) memcpy(at + sizeof cell + key.length, meta, cell.meta_length);
            return PM_OK;
        }
    }
    spare_pages spare;
    PM_TRY(take_spares(region, &path, cell_size(key.length, cell.meta_length), &spare));
    if (exact) {
        pm_page_edit(region, leaf);
        cell_remove(leaf, slot);
    } else {
        PM_TRY(add_to_count(region, 1));
    }
    PM_TRY(insert_at(region, &path, path.depth, &inserted, &spare));
    give_back(region, &spare);
    return PM_OK;
}

static pm_status free_node(pm_region *region, pm_node *node)
{
    uint64_t offset = node->head.self;
    PM_TRY(pm_heap_free_pages(region, offset, 1));
    pm_page_forget(region, offset);
    return PM_OK;
}

/* Takes child `index` out of an inner node. */
static void remove_child(pm_node *node, unsigned index)
{
    if (index) {
        cell_remove(node, index - 1);
    } else if (node->count) {
        node->first_child = pm_catalog_node_cell(node, 0, NULL, NULL).offset;
        cell_remove(node, 0);
    } else {
        node->first_child = 0;
    }
}

/* Moves the cells of leaf `index + 1` of `parent` into leaf `index` if they fit. It only saves space, so a damaged
 * neighbour is left alone. */
static pm_status merge_leaves(pm_region *region, pm_node *parent, unsigned index)
{
    pm_status status;
    pm_node *left = node_read(region, child_at(parent, index), 0, &status);
    pm_node *right = node_read(region, child_at(parent, index + 1), 0, &status);
    if (!left || !right || left == right || right->used + 2u * right->count > room_in(left)) return PM_OK;
    pm_page_edit(region, left);
    pm_page_edit(region, parent);
    for (unsigned i = 0; i < right->count; i++) {
        pm_key key;
        const uint8_t *meta;
        pm_cell cell = pm_catalog_node_cell(right, i, &key, &meta);
        cell_insert(left, left->count, &cell, key.bytes, meta);
    }
    remove_child(parent, index + 1);
    return free_node(region, right);
}

pm_status pm_catalog_delete(pm_region *region, pm_key key)
{
    tree_path path;
    PM_TRY(descend(region, key, &path));
    pm_node *leaf = path.nodes[path.depth];
    bool exact;
    unsigned slot = lower_bound(leaf, key, &exact);
    if (!exact) return PM_NOT_FOUND;
    PM_TRY(add_to_count(region, -1));
    pm_page_edit(region, leaf);
    cell_remove(leaf, slot);
    if (!path.depth) return PM_OK;
    pm_node *parent = path.nodes[path.depth - 1];
    unsigned index = path.children[path.depth - 1];
    if (leaf->count && leaf->used < (PM_PAGE - PM_LINE) / 4u) {
        if (index < parent->count) PM_TRY(merge_leaves(region, parent, index));
        if (index) PM_TRY(merge_leaves(region, parent, index - 1));
    }
    /* Removes an empty node, and an inner one that has lost its last child with it. */
    int depth = (int)path.depth;
    for (; depth > 0; depth--) {
        pm_node *node = path.nodes[depth];
        bool empty = node->head.level ? !node->first_child : !node->count;
        if (!empty) break;
        pm_page_edit(region, path.nodes[depth - 1]);
        remove_child(path.nodes[depth - 1], path.children[depth - 1]);
        PM_TRY(free_node(region, node));
    }
    /* A root with one child is replaced by it; a root that has lost everything becomes an empty leaf. */
    pm_status status;
    pm_root *root = pm_heap_root(region, &status);
    PM_TRY(status);
    for (pm_node *top = path.nodes[0]; top->head.level && !top->count;) {
        uint64_t child = top->first_child;
        if (!child) {
            top->head.level = 0;
            break;
        }
        pm_page_edit(region, root);
        root->tree = child;
        uint32_t level = top->head.level - 1;
        PM_TRY(free_node(region, top));
        top = node_read(region, child, level, &status);
        PM_TRY(status);
    }
    return PM_OK;
}

void pm_catalog_format(uint8_t *image, uint64_t offset, uint64_t store_id)
{
    pm_region region = {.live = image, .store_id = store_id};
    pm_node *node = (void *)(image + offset);
    node->head = (pm_page_head){.self = offset, .type = PM_TYPE_NODE};
    node_clear(node);
    pm_page_checksum(&region, node);
}

bool pm_catalog_row(const pm_found *found, uint8_t *rows, size_t capacity, size_t *used)
{
    size_t length = pm_round_up(sizeof(pm_row) + found->key.length + found->entry.meta_length, 8);
    if (length > capacity - *used) return false;
    pm_row row = {found->entry.offset,      found->entry.length,         found->entry.kind, found->entry.flags,
                  found->entry.meta_length, (uint16_t)found->key.length, (uint16_t)length};
    uint8_t *at = rows + *used;
    memset(at + length - 8, 0, 8);
    memcpy(at, &row, sizeof row);
    memcpy(at + sizeof row, found->key.bytes, found->key.length);
    if (row.meta_length) memcpy(at + sizeof row + row.key_length, found->meta, row.meta_length);
    *used += length;
    return true;
}

pm_status pm_catalog_hash(pm_region *region, uint64_t *hash)
{
    uint8_t last[PM_KEY_MAX];
    pm_key from = {last, 0};
    *hash = 0;
    for (bool after = false;; after = true) {
        pm_found found;
        pm_status status = pm_catalog_seek(region, from, after, &found);
        if (status == PM_NOT_FOUND) return PM_OK;
        PM_TRY(status);
        const pm_entry *entry = &found.entry;
        uint64_t fixed[] = {entry->offset != 0, entry->length,    entry->kind,
                            entry->flags,       found.key.length, entry->meta_length};
        *hash = pm_hash64(fixed, sizeof fixed, *hash);
        *hash = pm_hash64(found.key.bytes, found.key.length, *hash);
        *hash = pm_hash64(found.meta, entry->meta_length, *hash);
        memcpy(last, found.key.bytes, found.key.length);
        from = (pm_key){last, found.key.length};
        if (!entry->offset) continue;
        uint64_t place = pm_region_place(region, entry->offset, entry->length);
        PM_TRY(pm_heap_check_extent(region, entry->offset, entry->length));
        PM_TRY(pm_region_readable(region, region->live, place, entry->length, "contents"));
        *hash = pm_hash64(region->live + place, entry->length, *hash);
    }
}
