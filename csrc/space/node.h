/*
 * A node of the catalog: a page with cells in the order of their keys.
 *
 *   head │ slots: where each cell begins → │ free │ ← cells, in any order │
 *
 * These functions know one page. They change it in place, after pm_page_edit.
 */
#ifndef PM_NODE_H
#define PM_NODE_H

#include "space/region.h"

typedef struct {
    const uint8_t *bytes;
    size_t length;
} pm_key;

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

size_t pm_node_cell_size(size_t key_length, size_t meta_length);
pm_cell pm_node_cell(const pm_node *node, unsigned i, pm_key *key, const uint8_t **meta);
int pm_node_compare_keys(pm_key a, pm_key b); /* -1, 0 or 1 */

/* The key of a member of a sequence: a prefix, then a number, its most significant byte first. bytes: room for it. */
enum { PM_NUMBER_BYTES = 8 };
pm_key pm_node_numbered(uint8_t *bytes, pm_key prefix, uint64_t number);
uint64_t pm_node_number_read(const uint8_t *at);
void pm_node_number_write(uint8_t *at, uint64_t number);

bool pm_node_key_within(pm_key key, pm_key from, pm_key to); /* from <= key < to; one without bytes is no bound */
bool pm_node_valid(const pm_node *node); /* every cell lies inside, in order */
size_t pm_node_room(const pm_node *node); /* bytes for cells and their slots */

/* The first slot with a key >= key; *exact if it is equal. */
unsigned pm_node_lower_bound(const pm_node *node, pm_key key, bool *exact);

/* The child that has the key: 0 is first_child, i > 0 is the child of slot i - 1. */
unsigned pm_node_child_index(const pm_node *node, pm_key key);
uint64_t pm_node_child_at(const pm_node *node, unsigned index);

void pm_node_clear(pm_node *node);

/* Adds a cell at a slot; there must be room. */
void pm_node_insert(pm_node *node, unsigned slot, const pm_cell *cell, const uint8_t *key, const uint8_t *meta);
void pm_node_remove(pm_node *node, unsigned slot);

#endif
