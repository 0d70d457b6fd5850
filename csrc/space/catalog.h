/*
 * The catalog: a B+tree from key to entry, in metadata pages. Opening it costs nothing; a look-up reads one page per
 * level. An operation changes the tree or, if it lacks space, leaves the tree as it was.
 */
#ifndef PM_CATALOG_H
#define PM_CATALOG_H

#include "space/heap.h"

typedef struct {
    const uint8_t *bytes;
    size_t length;
} pm_key;

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

pm_status pm_catalog_put(pm_region *region, pm_key key, const pm_entry *entry, const uint8_t *meta);
pm_status pm_catalog_delete(pm_region *region, pm_key key);

/* The hash of all keys, entries and contents, as the program sees them. It does not depend on their places. */
pm_status pm_catalog_hash(pm_region *region, uint64_t *hash);

void pm_catalog_format(uint8_t *image, uint64_t offset, uint64_t store_id); /* an empty root node */

/* ---- for recovery/verify.c and commit/pending.c: nodes of an image ---- */

enum { PM_TREE_HEIGHT = 24 };
typedef struct {
    uint16_t key_length, meta_length;
    uint8_t kind, flags;
    uint16_t reserved;
    uint64_t offset; /* leaf: of the extent. inner: of the child with keys >= key */
    uint64_t length; /* of the extent's contents */
} pm_cell;

_Static_assert(sizeof(pm_cell) == 24, "cell");

typedef struct {
    pm_page_head head;
    uint64_t first_child; /* inner: of keys below the first cell's */
    uint16_t count;
    uint16_t low;  /* where the lowest cell begins; cells grow down from the page's end */
    uint16_t used; /* bytes in cells */
    uint16_t reserved;
    uint8_t reserved2[PM_LINE - sizeof(pm_page_head) - 16];
    uint16_t slots[(PM_PAGE - PM_LINE) / 2]; /* where each cell begins, in order of the keys */
} pm_node;

_Static_assert(sizeof(pm_node) == PM_PAGE && offsetof(pm_node, slots) == PM_LINE, "node");

bool pm_catalog_node_valid(const pm_node *node); /* every cell lies inside, in order */
void pm_catalog_node_found(const pm_node *leaf, unsigned slot, pm_found *found);
pm_cell pm_catalog_node_cell(const pm_node *node, unsigned i, pm_key *key, const uint8_t **meta);
int pm_catalog_key_compare(pm_key a, pm_key b); /* -1, 0 or 1 */

#endif
