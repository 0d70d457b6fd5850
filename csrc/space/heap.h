/*
 * Space in the region. A map has two bits for every page; small blocks are in slabs, pages with a header and blocks of
 * one size. All of it is metadata of the region, committed and rolled back with everything else. Nothing is kept in
 * process memory (I11).
 *
 * I7, I9  A page or block is usable if it is free in the live state and in the committed one, and no detached buffer
 *         lives over it. So the space that the last durable state refers to is never written before the commit that
 *         frees it.
 */
#ifndef PM_HEAP_H
#define PM_HEAP_H

#include "space/region.h"

/* Makes the first pages of an empty region out of zeros; see PM_HEAP_FIRST_PAGES. */
void pm_heap_format(uint8_t *image, uint64_t store_id);
enum { PM_HEAP_FIRST_PAGES = 4 /* root, map list, map, and the catalog's root node */ };
pm_digest pm_heap_digest(const uint8_t *image); /* of an empty region, whose pages have their checksums */

pm_root *pm_heap_root(pm_region *region, pm_status *status);

/* Allocates pages for an extent, or one page for metadata. PM_NO_SPACE if the region has none in a row: grow it.
 * PM_CORRUPT if the space map is damaged: it says that metadata which were read are free. */
pm_status pm_heap_pages(pm_region *region, uint64_t pages, unsigned kind, uint64_t *offset);
pm_status pm_heap_free_pages(pm_region *region, uint64_t offset, uint64_t pages);

/* Finds usable pages without allocating them, for a use that ends before the next allocation. */
pm_status pm_heap_find(pm_region *region, uint64_t pages, uint64_t *offset);

/* PM_CORRUPT if anything but pending changes may be in these pages (I7, I13): then the space map is damaged that gave
 * them away. */
pm_status pm_heap_check_new(const pm_region *region, uint64_t offset, uint64_t length);

/* Allocates space for an extent with `length` bytes of contents: a block of a slab, or pages. */
pm_status pm_heap_alloc(pm_region *region, uint64_t length, uint64_t *offset);
pm_status pm_heap_free(pm_region *region, uint64_t offset, uint64_t length);

/* PM_CORRUPT unless the live state has exactly such an extent there. */
pm_status pm_heap_check_extent(pm_region *region, uint64_t offset, uint64_t length);

/* For recovery/verify.c: how slabs are divided. */
unsigned pm_heap_slab_class(uint64_t size); /* the class for a block of `size` bytes */
uint64_t pm_heap_slab_block(unsigned class); /* bytes of a block */
uint64_t pm_heap_slab_all(unsigned class);   /* a bit for every block */

/* The kind of a page in an image of the region. Map pages are not verified, but their places are checked. */
unsigned pm_heap_kind(const pm_region *region, const uint8_t *image, uint64_t page);
/* Whether the part of the map that describes the page is sound. It may say that the page is free, or be absent. */
bool pm_heap_knows(pm_region *region, uint64_t page);
/* The same in the live state, whose map may have to be read first; *status says if the disk can't read it. */
unsigned pm_heap_live_kind(pm_region *region, uint64_t page, pm_status *status);
uint64_t pm_heap_used(pm_region *region); /* allocated pages in the live state */

#endif
