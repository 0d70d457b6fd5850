#include "space/node.h"

enum { CELLS_END = PM_PAGE };

int pm_node_compare_keys(pm_key a, pm_key b)
{
    size_t common = a.length < b.length ? a.length : b.length;
    int order = common ? memcmp(a.bytes, b.bytes, common) : 0;
    if (!order) order = (a.length > b.length) - (a.length < b.length);
    return (order > 0) - (order < 0);
}

bool pm_node_key_within(pm_key key, pm_key from, pm_key to)
{
    return pm_node_compare_keys(key, from) >= 0 && (!to.length || pm_node_compare_keys(key, to) < 0);
}

uint64_t pm_node_number_read(const uint8_t *at)
{
    uint64_t number = 0;
    for (unsigned i = 0; i < PM_NUMBER_BYTES; i++) number = number << 8 | at[i];
    return number;
}

void pm_node_number_write(uint8_t *at, uint64_t number)
{
    for (unsigned i = PM_NUMBER_BYTES; i-- > 0; number >>= 8) at[i] = (uint8_t)number;
}

pm_key pm_node_numbered(uint8_t *bytes, pm_key prefix, uint64_t number)
{
    memcpy(bytes, prefix.bytes, prefix.length);
    pm_node_number_write(bytes + prefix.length, number);
    return (pm_key){bytes, prefix.length + PM_NUMBER_BYTES};
}

size_t pm_node_cell_size(size_t key_length, size_t meta_length)
{
    return (sizeof(pm_cell) + key_length + meta_length + 7) & ~(size_t)7;
}

pm_cell pm_node_cell(const pm_node *node, unsigned i, pm_key *key, const uint8_t **meta)
{
    pm_cell cell;
    const uint8_t *at = (const uint8_t *)node + node->slots[i];
    memcpy(&cell, at, sizeof cell);
    if (key) *key = (pm_key){at + sizeof cell, cell.key_length};
    if (meta) *meta = at + sizeof cell + cell.key_length;
    return cell;
}

bool pm_node_valid(const pm_node *node)
{
    size_t slots_end = PM_LINE + 2 * (size_t)node->count, used = 0;
    if (node->count > sizeof node->slots / 2 || slots_end > node->low || node->low > CELLS_END) return false;
    pm_key before = {NULL, 0};
    uint64_t taken[PM_PAGE / 8 / 64] = {0}; /* a bit for each 8 bytes: cells must not overlap */
    for (unsigned i = 0; i < node->count; i++) {
        if (node->slots[i] < node->low || node->slots[i] % 8 || node->slots[i] > CELLS_END - sizeof(pm_cell))
            return false;
        pm_key key;
        pm_cell cell = pm_node_cell(node, i, &key, NULL);
        size_t size = pm_node_cell_size(cell.key_length, cell.meta_length);
        if (cell.key_length == 0 || cell.key_length > PM_KEY_MAX || cell.meta_length > PM_META_MAX) return false;
        if (size > (size_t)CELLS_END - node->slots[i]) return false;
        if (i && pm_node_compare_keys(before, key) >= 0) return false;
        for (size_t unit = node->slots[i] / 8u; unit < (node->slots[i] + size) / 8; unit++) {
            if (taken[unit / 64] >> unit % 64 & 1) return false;
            taken[unit / 64] |= UINT64_C(1) << unit % 64;
        }
        before = key;
        used += size;
    }
    return used == node->used;
}

/* Not by PM_FIRST: a comparison has three results, and comparing once more with the key that was found would read its
 * slot again. */
unsigned pm_node_lower_bound(const pm_node *node, pm_key key, bool *exact)
{
    unsigned low = 0, high = node->count;
    *exact = false;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        pm_key there;
        pm_node_cell(node, middle, &there, NULL);
        int order = pm_node_compare_keys(there, key);
        if (order == 0) *exact = true;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return low;
}

unsigned pm_node_child_index(const pm_node *node, pm_key key)
{
    bool exact;
    unsigned slot = pm_node_lower_bound(node, key, &exact);
    return exact ? slot + 1 : slot;
}

uint64_t pm_node_child_at(const pm_node *node, unsigned index)
{
    return index ? pm_node_cell(node, index - 1, NULL, NULL).offset : node->first_child;
}

size_t pm_node_room(const pm_node *node)
{
    return CELLS_END - PM_LINE - 2 * (size_t)node->count - node->used;
}

void pm_node_clear(pm_node *node)
{
    node->count = node->used = 0;
    node->low = CELLS_END;
}

/* Moves the cells together at the end of the page. */
static void node_pack(pm_node *node)
{
    pm_node old = *node;
    pm_node_clear(node);
    for (unsigned i = 0; i < old.count; i++) {
        pm_key key;
        const uint8_t *meta;
        pm_cell cell = pm_node_cell(&old, i, &key, &meta);
        pm_node_insert(node, i, &cell, key.bytes, meta);
    }
}

void pm_node_insert(pm_node *node, unsigned slot, const pm_cell *cell, const uint8_t *key, const uint8_t *meta)
{
    size_t size = pm_node_cell_size(cell->key_length, cell->meta_length);
    PM_CHECK(size + 2 <= pm_node_room(node));
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

void pm_node_remove(pm_node *node, unsigned slot)
{
    pm_cell cell = pm_node_cell(node, slot, NULL, NULL);
    size_t size = pm_node_cell_size(cell.key_length, cell.meta_length);
    if (node->slots[slot] == node->low) node->low = (uint16_t)(node->low + size);
    node->used = (uint16_t)(node->used - size);
    node->count--;
    memmove(&node->slots[slot], &node->slots[slot + 1], 2 * (size_t)(node->count - slot));
    if (!node->count) pm_node_clear(node);
}
