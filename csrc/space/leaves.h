/*
 * What `salvage` reads a damaged store by. The catalog's leaves have all entries: here they are found without the nodes
 * above them, by the space map, or by the tree where the map is damaged. So a damaged page costs what it holds itself,
 * and not what it leads to.
 */
#ifndef PM_LEAVES_H
#define PM_LEAVES_H

#include "space/catalog.h"

/* The region was opened for reading. Replaces a damaged root by what can be known of it, and finds the leaves: from now
 * on, the functions of space/catalog.h read these, in the order of their keys. PM_NO_MEMORY, PM_IO. */
pm_status pm_leaves_find(pm_region *region);

/* Whether a leaf may be missing before number i of them, or, for i == leaf_count, behind the last one. */
bool pm_leaves_gap(pm_region *region, size_t i);

#endif
