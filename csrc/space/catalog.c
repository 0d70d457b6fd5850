#include "space/catalog.h"

#include "base/hash.h"
#include "space/leaves.h"
#include "space/page.h"

enum { LARGEST_INNER = sizeof(pm_cell) + PM_KEY_MAX + 8 };

/* ---- reading a node ----------------------------------------------------------------------------------------- */

/* For salvage, a node whose part of the space map is lost counts as one. */
static bool is_metadata(pm_region *region, uint64_t page, pm_status *status)
{
    if (pm_heap_live_kind(region, page, status) == PM_PAGE_META) return true;
    if (!region->salvage || pm_heap_knows(region, page)) return false;
    *status = PM_OK;
    return true;
}

pm_node *pm_catalog_node(pm_region *region, uint64_t offset, uint32_t level, pm_status *status)
{
    bool known = offset < region->size && region->flags[offset / PM_PAGE] & PM_FLAG_VERIFIED;
    pm_node *node = pm_page_read(region, offset, PM_TYPE_NODE, status);
    if (!node) return NULL;
    /* Contents that programs may write can't pass for a node: the map says what a page is. Levels fall by one, so
     * references can't form a loop. */
    bool valid = known || (pm_node_valid(node) && is_metadata(region, offset / PM_PAGE, status));
    if (!valid || node->head.level != level) {
        region->flags[offset / PM_PAGE] &= (uint8_t)~PM_FLAG_VERIFIED;
        if (*status == PM_OK)
            *status = pm_fail(PM_CORRUPT, "the catalog is damaged at region offset %llu", (unsigned long long)offset);
        return NULL;
    }
    return node;
}

/* ---- looking up --------------------------------------------------------------------------------------------- */

typedef struct {
    pm_node *nodes[PM_TREE_HEIGHT]; /* from the root */
    unsigned children[PM_TREE_HEIGHT]; /* the child taken in each inner node */
    unsigned depth; /* of the leaf */
    size_t leaf;    /* its number, if leaves were found */
} tree_path;

static pm_status descend_tree(pm_region *region, pm_key key, tree_path *path)
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
        pm_node *node = pm_catalog_node(region, offset, level, &status);
        PM_TRY(status);
        path->nodes[path->depth] = node;
        if (!level) return PM_OK;
        path->children[path->depth] = pm_node_child_index(node, key);
        offset = pm_node_child_at(node, path->children[path->depth]);
    }
}

static pm_status find_leaf(const pm_leaves *leaves, pm_key key, tree_path *path)
{
    if (!leaves->count) return PM_NOT_FOUND;
    path->leaf = pm_leaves_at(leaves, key);
    path->nodes[0] = leaves->all[path->leaf];
    return PM_OK;
}

static pm_status descend(pm_region *region, pm_key key, tree_path *path)
{
    path->depth = 0;
    return region->leaves ? find_leaf(region->leaves, key, path) : descend_tree(region, key, path);
}

void pm_catalog_node_found(const pm_node *leaf, unsigned slot, pm_found *found)
{
    pm_cell cell = pm_node_cell(leaf, slot, &found->key, &found->meta);
    found->entry = (pm_entry){cell.offset, cell.length, cell.kind, cell.flags, cell.meta_length};
}

pm_status pm_catalog_get(pm_region *region, pm_key key, pm_found *found)
{
    tree_path path;
    bool exact;
    PM_TRY(descend(region, key, &path));
    const pm_node *leaf = path.nodes[path.depth];
    unsigned slot = pm_node_lower_bound(leaf, key, &exact);
    if (!exact) return PM_NOT_FOUND;
    pm_catalog_node_found(leaf, slot, found);
    return PM_OK;
}

static pm_status step_found(const pm_leaves *leaves, tree_path *path, int by)
{
    if (path->leaf == (by < 0 ? 0 : leaves->count - 1)) return PM_NOT_FOUND;
    path->nodes[0] = leaves->all[path->leaf += (size_t)by];
    return PM_OK;
}

/* Steps to the neighbouring leaf: by = 1 or -1. PM_NOT_FOUND at the end. */
static pm_status step_leaf(pm_region *region, tree_path *path, int by)
{
    if (region->leaves) return step_found(region->leaves, path, by);
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
        uint64_t offset = pm_node_child_at(node, path->children[depth]);
        path->nodes[depth + 1] = pm_catalog_node(region, offset, node->head.level - 1, &status);
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
    unsigned slot = pm_node_lower_bound(path.nodes[path.depth], key, &exact);
    if (exact && after) slot++;
    while (slot >= path.nodes[path.depth]->count) {
        PM_TRY(step_leaf(region, &path, 1));
        slot = 0;
    }
    pm_catalog_node_found(path.nodes[path.depth], slot, found);
    return in_order(pm_node_compare_keys(found->key, key) >= (after ? 1 : 0));
}

pm_status pm_catalog_before(pm_region *region, pm_key key, pm_found *found)
{
    tree_path path;
    bool exact;
    PM_TRY(descend(region, key, &path));
    unsigned slot = pm_node_lower_bound(path.nodes[path.depth], key, &exact);
    while (!slot) {
        PM_TRY(step_leaf(region, &path, -1));
        slot = path.nodes[path.depth]->count;
    }
    pm_catalog_node_found(path.nodes[path.depth], slot - 1, found);
    return in_order(pm_node_compare_keys(found->key, key) < 0);
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
    for (size_t bytes = leaf_bytes; depth >= 0 && pm_node_room(path->nodes[depth]) < bytes + 2;
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
    item.cell = pm_node_cell(node, i < slot ? i : i - 1, &item.key, &item.meta);
    return item;
}

static size_t item_bytes(const tree_item *item)
{
    return pm_node_cell_size(item->cell.key_length, item->cell.meta_length) + 2;
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
    pm_node_clear(*right);
    unsigned cut = choose_cut(node, slot, inserted);
    pm_node old = *node;
    pm_node_clear(node);
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
        pm_node_insert(target, target->count, &item.cell, item.key.bytes, item.meta);
    }
    return PM_OK;
}

/* Inserts an item at `depth`, splitting upwards as needed. Spares are there for every split. */
static pm_status insert_at(pm_region *region, tree_path *path, unsigned depth, const tree_item *inserted,
                           spare_pages *spare)
{
    pm_node *node = path->nodes[depth];
    bool exact;
    unsigned slot = pm_node_lower_bound(node, inserted->key, &exact);
    pm_page_edit(region, node);
    if (item_bytes(inserted) <= pm_node_room(node)) {
        pm_node_insert(node, slot, &inserted->cell, inserted->key.bytes, inserted->meta);
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
    pm_node_clear(top);
    top->first_child = node->head.self;
    pm_node_insert(top, 0, &up.cell, up.key.bytes, NULL);
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
    unsigned slot = pm_node_lower_bound(leaf, key, &exact);
    pm_cell cell = {.key_length = (uint16_t)key.length, .meta_length = entry->meta_length, .kind = entry->kind,
                    .flags = entry->flags, .offset = entry->offset, .length = entry->length};
    tree_item inserted = {cell, key, meta};
    if (exact) {
        pm_cell old = pm_node_cell(leaf, slot, NULL, NULL);
        if (old.meta_length == cell.meta_length) {
            pm_page_edit(region, leaf);
            uint8_t *at = (uint8_t *)leaf + leaf->slots[slot];
            memcpy(at, &cell, sizeof cell);
            if (cell.meta_length) memcpy(at + sizeof cell + key.length, meta, cell.meta_length);
            return PM_OK;
        }
    }
    spare_pages spare;
    PM_TRY(take_spares(region, &path, pm_node_cell_size(key.length, cell.meta_length), &spare));
    if (exact) {
        pm_page_edit(region, leaf);
        pm_node_remove(leaf, slot);
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
        pm_node_remove(node, index - 1);
    } else if (node->count) {
        node->first_child = pm_node_cell(node, 0, NULL, NULL).offset;
        pm_node_remove(node, 0);
    } else {
        node->first_child = 0;
    }
}

/* Moves the cells of leaf `index + 1` of `parent` into leaf `index` if they fit. It only saves space, so a damaged
 * neighbour is left alone. */
static pm_status merge_leaves(pm_region *region, pm_node *parent, unsigned index)
{
    pm_status status;
    pm_node *left = pm_catalog_node(region, pm_node_child_at(parent, index), 0, &status);
    pm_node *right = pm_catalog_node(region, pm_node_child_at(parent, index + 1), 0, &status);
    if (!left || !right || left == right || right->used + 2u * right->count > pm_node_room(left)) return PM_OK;
    pm_page_edit(region, left);
    pm_page_edit(region, parent);
    for (unsigned i = 0; i < right->count; i++) {
        pm_key key;
        const uint8_t *meta;
        pm_cell cell = pm_node_cell(right, i, &key, &meta);
        pm_node_insert(left, left->count, &cell, key.bytes, meta);
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
    unsigned slot = pm_node_lower_bound(leaf, key, &exact);
    if (!exact) return PM_NOT_FOUND;
    PM_TRY(add_to_count(region, -1));
    pm_page_edit(region, leaf);
    pm_node_remove(leaf, slot);
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
    pm_root *root = pm_heap_root(region, &status); /* which `descend` has read */
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
        top = pm_catalog_node(region, child, level, &status);
        PM_TRY(status);
    }
    return PM_OK;
}

/* ---- numbered keys ------------------------------------------------------------------------------------------ */

typedef struct {
    pm_key prefix;
    uint64_t from; /* the first number that changes */
    int64_t by;
} shift;

/* The number of a key that begins with the prefix. False: it has another prefix. */
static bool number_of(pm_key key, const shift *how, uint64_t *number)
{
    size_t length = how->prefix.length;
    if (key.length != length + PM_NUMBER_BYTES || memcmp(key.bytes, how->prefix.bytes, length)) return false;
    *number = pm_node_number_read(key.bytes + length);
    return true;
}

/* A key of an inner node stays between the keys at its sides. No key is in the numbers that are filled from above. */
static uint64_t shifted(uint64_t number, const shift *how)
{
    if (number >= how->from) return number + (uint64_t)how->by;
    uint64_t least = how->from + (uint64_t)how->by;
    return how->by < 0 && number > least ? least : number;
}

static void shift_cells(pm_region *region, pm_node *node, const shift *how)
{
    for (unsigned i = 0; i < node->count; i++) {
        pm_key key;
        uint64_t number;
        pm_node_cell(node, i, &key, NULL);
        if (!number_of(key, how, &number) || shifted(number, how) == number) continue;
        pm_page_edit(region, node);
        uint8_t *at = (uint8_t *)node + node->slots[i] + sizeof(pm_cell) + how->prefix.length;
        pm_node_number_write(at, shifted(number, how));
    }
}

/* The keys of a node lie from `low` on and below `high`; without bytes: without an end. */
typedef struct {
    pm_key low, high;
} bounds;

/* Whether the keys of a node can get their new numbers: they have one, without an overflow, their order stays, and no
 * entry is in the way. A leaf that lies within its bounds and has a key is at one place of the tree only, so a walk
 * over all of them ends. */
static pm_status check_shift(const pm_node *node, const shift *how, const bounds *in)
{
    bool leaf = !node->head.level, any = false, valid = !leaf || node->count || !(in->low.length || in->high.length);
    uint64_t number, now, before = 0, least = how->from + (uint64_t)how->by;
    for (unsigned i = 0; i < node->count && valid; i++) {
        pm_key key;
        pm_node_cell(node, i, &key, NULL);
        valid = pm_node_key_within(key, in->low, in->high);
        if (key.length < how->prefix.length || memcmp(key.bytes, how->prefix.bytes, how->prefix.length)) continue;
        if (!number_of(key, how, &number)) valid = false;
        else if (how->by > 0 && number >= how->from && number > UINT64_MAX - (uint64_t)how->by) valid = false;
        else if (how->by < 0 && leaf && number >= least && number < how->from) valid = false;
        if (!valid) break;
        now = shifted(number, how);
        valid = !any || now > before;
        any = true, before = now;
    }
    return valid ? PM_OK : pm_fail(PM_CORRUPT, "the catalog is damaged: a key has no place in its sequence");
}

/* Checks a node and what is below it, or, without bounds, changes them. */
static pm_status shift_below(pm_region *region, pm_node *node, const shift *how, const bounds *in)
{
    if (in) PM_TRY(check_shift(node, how, in));
    if (node->head.level) {
        uint8_t bytes[PM_KEY_MAX];
        unsigned last = pm_node_child_index(node, pm_node_numbered(bytes, how->prefix, UINT64_MAX));
        uint64_t least = how->by < 0 ? how->from + (uint64_t)how->by : how->from;
        unsigned i = pm_node_child_index(node, pm_node_numbered(bytes, how->prefix, least));
        for (; i <= last; i++) {
            pm_status status;
            pm_node *child = pm_catalog_node(region, pm_node_child_at(node, i), node->head.level - 1, &status);
            PM_TRY(status);
            bounds below = in ? *in : (bounds){{NULL, 0}, {NULL, 0}};
            if (in && i) pm_node_cell(node, i - 1, &below.low, NULL);
            if (in && i < node->count) pm_node_cell(node, i, &below.high, NULL);
            PM_TRY(shift_below(region, child, how, in ? &below : NULL));
        }
    }
    if (!in) shift_cells(region, node, how);
    return PM_OK;
}

pm_status pm_catalog_shift(pm_region *region, pm_key prefix, uint64_t from, int64_t by)
{
    tree_path path;
    shift how = {prefix, from, by};
    uint8_t bytes[PM_KEY_MAX];
    PM_TRY(descend(region, pm_node_numbered(bytes, prefix, from), &path));
    const bounds none = {{NULL, 0}, {NULL, 0}};
    PM_TRY(shift_below(region, path.nodes[0], &how, &none));
    return by ? shift_below(region, path.nodes[0], &how, NULL) : PM_OK;
}

void pm_catalog_format(uint8_t *image, uint64_t offset, uint64_t store_id)
{
    pm_region region = {.live = image, .store_id = store_id};
    pm_node *node = (void *)(image + offset);
    node->head = (pm_page_head){.self = offset, .type = PM_TYPE_NODE};
    pm_node_clear(node);
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
