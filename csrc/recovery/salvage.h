/*
 * Opening a damaged store for `salvage` (D29).
 */
#ifndef PM_SALVAGE_H
#define PM_SALVAGE_H

#include "commit/store_state.h"

/* The store was opened for reading, and its log is applied. Finds the root, the extents with two slots, and the leaves
 * of the catalog, as far as they can be found. PM_NO_MEMORY, PM_IO. */
pm_status pm_salvage_open(pm_store *store);

#endif
