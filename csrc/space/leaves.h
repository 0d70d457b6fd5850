/*
 * What `salvage` reads a damaged store by. The catalog's leaves have all entries. Most of them are found by the tree; a
 * damaged node is a hole in it, and the leaves in a hole are found by the space map. So a damaged page costs what it
 * holds itself, and not what it leads to (D29).
 */
#ifndef PM_LEAVES_H
#define PM_LEAVES_H

#include "dirty/page_set.h"
#include "space/catalog.h"

/* Keys that a damaged node led to: from <= key < to. A key without bytes is no bound. */
typedef struct {
    pm_key from, to;
} pm_hole;

typedef struct pm_leaves {
    pm_node **all; /* in the order of their keys */
    size_t count, room;
    pm_hole *holes; /* in the same order, none beside another; the leaves in them need not be all */
    size_t hole_count, hole_room;
    pm_page_set seen; /* sound nodes that were found */
} pm_leaves;

typedef enum {
    PM_LEAVES_BY_TREE,      /* and, in its holes, by the map */
    PM_LEAVES_BY_MAP,       /* the tree is an older one */
    PM_LEAVES_BY_TREE_ALONE /* the map is an older one */
} pm_leaves_way;

/* The region was opened for reading. Replaces a damaged root by what can be known of it. PM_NO_MEMORY, PM_IO. */
pm_status pm_leaves_prepare(pm_region *region);

/* Finds the leaves: from now on, the functions of space/catalog.h read these. It may be called again, for another way.
 * PM_NO_MEMORY. */
pm_status pm_leaves_find(pm_region *region, pm_leaves_way way);
void pm_leaves_free(pm_leaves *leaves);

uint64_t pm_leaves_keys(const pm_leaves *leaves);          /* how many */
size_t pm_leaves_at(const pm_leaves *leaves, pm_key key); /* the last that begins with no higher key, or the first */
pm_key pm_leaves_first(const pm_node *leaf);
pm_key pm_leaves_last(const pm_node *leaf);

#endif
