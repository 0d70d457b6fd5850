/*
 * The catalog: a B+tree from key to entry, in metadata pages. Opening it costs nothing; a look-up reads one page per
 * level. An operation changes the tree or, if it lacks space, leaves the tree as it was.
 */
#ifndef PM_CATALOG_H
#define PM_CATALOG_H

#include "space/heap.h"
#include "space/node.h"

/* An entry in a leaf: valid until the next change of the catalog. */
typedef struct {
    pm_key key;
    pm_entry entry;
    const uint8_t *meta;
} pm_found;

/* Appends an entry as a row (pm_row); false if there is no room. */
bool pm_catalog_row(const pm_found *found, uint8_t *rows, size_t capacity, size_t *used);

/* PM_NOT_FOUND, without a message, if there is no such key. */
pm_status pm_catalog_get(pm_region *region, pm_key key, pm_found *found);

/* The first entry with a key >= key (> key if after); PM_NOT_FOUND if there is none. */
pm_status pm_catalog_seek(pm_region *region, pm_key key, bool after, pm_found *found);

/* The last entry with a key < key; PM_NOT_FOUND if there is none. */
pm_status pm_catalog_before(pm_region *region, pm_key key, pm_found *found);

/* A node of the tree, checked when it is first read; NULL with PM_CORRUPT or PM_UNREADABLE. */
pm_node *pm_catalog_node(pm_region *region, uint64_t offset, uint32_t level, pm_status *status);

pm_status pm_catalog_put(pm_region *region, pm_key key, const pm_entry *entry, const uint8_t *meta);
pm_status pm_catalog_delete(pm_region *region, pm_key key);

/* Adds `by` to the number of each numbered key (pm_node_numbered) with this prefix, from the number `from` on. For
 * by < 0, no key may have a number of [from + by, from). It takes no space: a failure finds the catalog damaged, before
 * anything is changed. by == 0 finds that out. */
pm_status pm_catalog_shift(pm_region *region, pm_key prefix, uint64_t from, int64_t by);

/* The hash of all keys, entries and contents, as the program sees them. It does not depend on their places. */
pm_status pm_catalog_hash(pm_region *region, uint64_t *hash);

void pm_catalog_format(uint8_t *image, uint64_t offset, uint64_t store_id); /* an empty root node */

enum { PM_TREE_HEIGHT = 24 };

/* The entry in a slot of a leaf, which need not be one of the tree. */
void pm_catalog_node_found(const pm_node *leaf, unsigned slot, pm_found *found);

#endif
