#include "space/heap.h"

#include "space/overlay.h"
#include "space/page.h"
#include "space/region_fork.h"
#include "space/region_image.h"

/* ---- reading the map ---------------------------------------------------------------------------------------- */

#define PAGES_PER_LIST ((uint64_t)PM_MAP_LIST_SLOTS * PM_MAP_PAGES)
#define LOW_BITS UINT64_C(0x5555555555555555)

_Static_assert(PM_REGION_LIMIT / PM_PAGE <= PM_ROOT_LISTS * PAGES_PER_LIST, "the lists describe the largest region");

/* The map page that describes `page` in an image of the region; NULL: all of its pages are free, or the reference is
 * impossible. The committed image was checked page by page when it was first read into the live state. */
static const pm_map *map_in(const pm_region *region, const uint8_t *image, uint64_t page)
{
    const pm_root *root = (const void *)image;
    uint64_t list_offset = root->map_lists[page / PAGES_PER_LIST];
    if (!list_offset || list_offset % PM_PAGE || list_offset >= region->size) return NULL;
    const pm_map_list *list = (const void *)(image + list_offset);
    uint64_t map_offset = list->maps[page % PAGES_PER_LIST / PM_MAP_PAGES];
    if (!map_offset || map_offset % PM_PAGE || map_offset >= region->size) return NULL;
    return (const void *)(image + map_offset);
}

static unsigned kind_in(const pm_map *map, uint64_t page)
{
    uint64_t i = page % PM_MAP_PAGES;
    return map ? map->words[i / 32] >> i % 32 * 2 & 3 : PM_PAGE_FREE;
}

unsigned pm_heap_kind(const pm_region *region, const uint8_t *image, uint64_t page)
{
    return kind_in(map_in(region, image, page), page);
}

pm_root *pm_heap_root(pm_region *region, pm_status *status)
{
    return pm_page_read(region, 0, PM_TYPE_ROOT, status);
}

/* The live map page for `page`, checked; NULL with PM_OK if there is none yet. */
static pm_map *map_read(pm_region *region, uint64_t page, pm_status *status)
{
    pm_root *root = pm_heap_root(region, status);
    if (!root || !root->map_lists[page / PAGES_PER_LIST]) return NULL;
    pm_map_list *list = pm_page_read(region, root->map_lists[page / PAGES_PER_LIST], PM_TYPE_MAP_LIST, status);
    if (!list) return NULL;
    uint64_t offset = list->maps[page % PAGES_PER_LIST / PM_MAP_PAGES];
    return offset ? pm_page_read(region, offset, PM_TYPE_MAP, status) : NULL;
}

unsigned pm_heap_live_kind(pm_region *region, uint64_t page, pm_status *status)
{
    if (map_read(region, page, status) || *status == PM_OK) return pm_heap_kind(region, region->live, page);
    if (*status == PM_UNREADABLE) return PM_PAGE_FREE;
    /* A damaged map may still say what the page is: only what it frees or gives away has to be right. A damaged list
     * may lead to any page. */
    *status = PM_OK;
    const uint8_t *map = (const void *)map_in(region, region->live, page);
    uint64_t offset = map ? (uint64_t)(map - region->live) : 0;
    if (map) *status = pm_region_readable(region, region->live, offset, PM_PAGE, "a page of metadata");
    return *status == PM_OK ? pm_heap_kind(region, region->live, page) : PM_PAGE_FREE;
}

bool pm_heap_knows(pm_region *region, uint64_t page)
{
    pm_status status;
    return !region->map_lost && (map_read(region, page, &status) || status == PM_OK);
}

/* ---- searching ---------------------------------------------------------------------------------------------- */

/* The end of whatever forbids the use of a free range: a detached buffer (I9), a page that the space map took and could
 * not mark yet, or a page that is not yet durable (I13). 0 if nothing does. */
static uint64_t forbidden(const pm_region *region, uint64_t offset, uint64_t length)
{
    uint64_t end = pm_region_covered(region, offset, length);
    for (size_t i = 0; i < region->taken_count; i++) {
        uint64_t taken = region->taken[i];
        if (taken >= offset && taken < offset + length && taken + PM_PAGE > end) end = taken + PM_PAGE;
    }
    uint64_t stop = (offset + length) / PM_PAGE, page = pm_overlay_next(region, offset / PM_PAGE, stop);
    if (page == stop) return end;
    while (page < stop && pm_overlay_next(region, page, stop) == page) page++;
    if (page * PM_PAGE > end) end = page * PM_PAGE;
    return end;
}

/* From `page`, where a word of the map begins: the first word before `end` that has a free page, or the last one. */
static uint64_t skip_full(const pm_map *map, uint64_t page, uint64_t end)
{
    for (const uint64_t *word = map->words + page % PM_MAP_PAGES / 32; page + 32 < end; page += 32, word++)
        if (((*word | *word >> 1) & LOW_BITS) != LOW_BITS) break;
    return page;
}

/* Finds the first `pages` usable pages in a row. They are free in the live map, in the committed one and in the durable
 * one (I7), durable (I13), and not under a detached buffer (I9). */
static pm_status search(pm_region *region, uint64_t pages, uint64_t *first)
{
    uint64_t count = region->size / PM_PAGE, start = region->search_from,
             children = pm_region_fork_free_from(region) / PM_PAGE;
    if (start < children) start = children;
    uint64_t page = start;
    bool skipped = false;
    while (page < count) {
        pm_status status;
        const pm_map *live = map_read(region, page, &status);
        PM_TRY(status);
        const pm_map *committed = map_in(region, region->committed, page);
        const pm_map *durable = region->overlay ? map_in(region, region->overlay->file, page) : NULL;
        uint64_t end = page - page % PM_MAP_PAGES + PM_MAP_PAGES;
        if (end > count) end = count;
        while (page < end) {
            uint64_t i = page % PM_MAP_PAGES;
            uint64_t used = (live ? live->words[i / 32] : 0) | (committed ? committed->words[i / 32] : 0);
            if (durable) used |= durable->words[i / 32];
            used = (used | used >> 1) & LOW_BITS;
            uint64_t word_end = page - i % 32 + 32;
            if (word_end > end) word_end = end;
            if (used == LOW_BITS) {
                page = start = live ? skip_full(live, word_end, end) : word_end;
                continue;
            }
            for (; page < word_end; page++) {
                if (used >> page % PM_MAP_PAGES % 32 * 2 & 1) {
                    start = page + 1;
                } else if (page + 1 - start == pages) {
                    uint64_t covered = forbidden(region, start * PM_PAGE, pages * PM_PAGE);
                    if (!covered) {
                        *first = start;
                        if (pages == 1 && !skipped) region->search_from = start;
                        return PM_OK;
                    }
                    skipped = true;
                    start = (covered + PM_PAGE - 1) / PM_PAGE;
                    if (start > page) {
                        page = start;
                        break;
                    }
                }
            }
        }
    }
    return pm_fail(PM_NO_SPACE, "the store has no %llu free pages in a row", (unsigned long long)pages);
}

/* The same; PM_CORRUPT if metadata are there that this process has read: they are in use, whatever the maps say. */
static pm_status find(pm_region *region, uint64_t pages, uint64_t *first)
{
    PM_TRY(search(region, pages, first));
    for (uint64_t page = *first; page < *first + pages; page++)
        if (region->flags[page] & PM_FLAG_VERIFIED)
            return pm_fail(PM_CORRUPT, "the space map is damaged: the metadata at region offset %llu are free in it",
                           (unsigned long long)(page * PM_PAGE));
    return PM_OK;
}

pm_status pm_heap_find(pm_region *region, uint64_t pages, uint64_t *offset)
{
    uint64_t first;
    PM_TRY(find(region, pages, &first));
    *offset = first * PM_PAGE;
    return PM_OK;
}

static bool is_new(const pm_region *region, uint64_t first, uint64_t end)
{
    const uint8_t *durable = region->overlay ? region->overlay->file : region->committed;
    for (uint64_t page = first; page < end; page++) {
        if (pm_heap_kind(region, region->committed, page) != PM_PAGE_FREE) return false;
        if (durable != region->committed && pm_heap_kind(region, durable, page) != PM_PAGE_FREE) return false;
    }
    return pm_overlay_next(region, first, end) == end;
}

pm_status pm_heap_check_new(const pm_region *region, uint64_t offset, uint64_t length)
{
    if (is_new(region, offset / PM_PAGE, (offset + length + PM_PAGE - 1) / PM_PAGE)) return PM_OK;
    return pm_fail(PM_CORRUPT,
                   "the space map is damaged: it has given away pages at region offset %llu that are in use",
                   (unsigned long long)offset);
}

/* ---- changing the map --------------------------------------------------------------------------------------- */

/* Sets the kind of pages that lie in one map page. */
static void set_kind_in(pm_region *region, pm_map *map, uint64_t page, uint64_t end, unsigned kind)
{
    pm_page_edit(region, map);
    for (; page < end; page++) {
        uint64_t i = page % PM_MAP_PAGES;
        map->words[i / 32] = (map->words[i / 32] & ~(UINT64_C(3) << i % 32 * 2)) | (uint64_t)kind << i % 32 * 2;
    }
}

static pm_status set_kind(pm_region *region, uint64_t page, uint64_t pages, unsigned kind)
{
    uint64_t end = page + pages;
    while (page < end) {
        pm_status status;
        pm_map *map = map_read(region, page, &status);
        PM_TRY(status);
        if (!map) return pm_fail(PM_CORRUPT, "the space map is damaged: a page has no map");
        uint64_t part = page - page % PM_MAP_PAGES + PM_MAP_PAGES;
        if (part > end) part = end;
        set_kind_in(region, map, page, part, kind);
        page = part;
    }
    return PM_OK;
}

static pm_status ensure_map(pm_region *region, uint64_t page);

/* Prepares a free page, which may be on a block that the disk can't read. Metadata change in parts, which begins with
 * reading the page. Writing all of it reads nothing. */
static pm_status make_readable(pm_region *region, uint64_t page)
{
    static const uint8_t zeros[PM_PAGE];
    if (pm_region_readable(region, region->committed, page * PM_PAGE, PM_PAGE, "free space") == PM_OK) return PM_OK;
    return pm_region_write(region, page * PM_PAGE, zeros, PM_PAGE, PM_WRITE_CACHED);
}

/* Adds a page for the map itself, named by `slot` of `parent`. It is marked as used once a map describes it, which may
 * have to be made first, or be this very page. Until then `taken` keeps it from being found again. */
static pm_status add_map_page(pm_region *region, uint32_t type, void *parent, uint64_t *slot)
{
    uint64_t page;
    pm_status status;
    PM_TRY(find(region, 1, &page));
    PM_TRY(make_readable(region, page));
    pm_page_edit(region, parent);
    pm_page_new(region, page * PM_PAGE, type, 0);
    PM_CHECK(region->taken_count < sizeof region->taken / sizeof region->taken[0]);
    region->taken[region->taken_count++] = page * PM_PAGE;
    *slot = page * PM_PAGE;
    status = ensure_map(region, page);
    if (status == PM_OK) status = set_kind(region, page, 1, PM_PAGE_META);
    region->taken_count--;
    if (status != PM_OK) {
        *slot = 0;
        pm_page_forget(region, page * PM_PAGE);
    }
    return status;
}

/* Makes sure that a map describes `page`. */
static pm_status ensure_map(pm_region *region, uint64_t page)
{
    pm_status status;
    pm_root *root = pm_heap_root(region, &status);
    PM_TRY(status);
    uint64_t *list_slot = &root->map_lists[page / PAGES_PER_LIST];
    if (!*list_slot) PM_TRY(add_map_page(region, PM_TYPE_MAP_LIST, root, list_slot));
    pm_map_list *list = pm_page_read(region, *list_slot, PM_TYPE_MAP_LIST, &status);
    PM_TRY(status);
    uint64_t *map_slot = &list->maps[page % PAGES_PER_LIST / PM_MAP_PAGES];
    return *map_slot ? PM_OK : add_map_page(region, PM_TYPE_MAP, list, map_slot);
}

pm_status pm_heap_pages(pm_region *region, uint64_t pages, unsigned kind, uint64_t *offset)
{
    uint64_t first;
    PM_TRY(find(region, pages, &first));
    for (uint64_t page = first; page < first + pages; page = page - page % PM_MAP_PAGES + PM_MAP_PAGES) {
        pm_status status;
        const pm_map *map = map_read(region, page, &status);
        PM_TRY(status);
        if (map) continue;
        PM_TRY(ensure_map(region, page));
        /* The new map page may be one of the pages that were found: search again. */
        return pm_heap_pages(region, pages, kind, offset);
    }
    if (kind != PM_PAGE_DATA) PM_TRY(make_readable(region, first));
    PM_TRY(set_kind(region, first, pages, kind));
    if (kind == PM_PAGE_DATA) pm_region_take(region, first * PM_PAGE, pages * PM_PAGE);
    *offset = first * PM_PAGE;
    return PM_OK;
}

pm_status pm_heap_free_pages(pm_region *region, uint64_t offset, uint64_t pages)
{
    if (offset / PM_PAGE < region->search_from) region->search_from = offset / PM_PAGE;
    return set_kind(region, offset / PM_PAGE, pages, PM_PAGE_FREE);
}

/* ---- slabs -------------------------------------------------------------------------------------------------- */

static const uint16_t class_size[PM_SLAB_CLASSES] = {64, 128, 192, 256, 384, 512, 768, 1344, 2016};

unsigned pm_heap_slab_class(uint64_t size)
{
    unsigned class = 0;
    while (class_size[class] < size) class++;
    return class;
}

uint64_t pm_heap_slab_block(unsigned class)
{
    return class_size[class];
}

uint64_t pm_heap_slab_all(unsigned class)
{
    return (UINT64_C(1) << (PM_PAGE - PM_LINE) / class_size[class]) - 1;
}

static pm_slab *slab_read(pm_region *region, uint64_t offset, pm_status *status)
{
    bool known = offset < region->size && region->flags[offset / PM_PAGE] & PM_FLAG_VERIFIED;
    pm_slab *slab = pm_page_read(region, offset, PM_TYPE_SLAB, status);
    if (!slab) return NULL;
    /* Contents that programs may write can't pass for a slab. One that a damaged map calls free stays: see `find`. */
    pm_status unreadable;
    bool is_data = !known && pm_heap_live_kind(region, offset / PM_PAGE, &unreadable) == PM_PAGE_DATA;
    if (is_data || slab->head.level >= PM_SLAB_CLASSES || slab->used & ~pm_heap_slab_all(slab->head.level)) {
        region->flags[offset / PM_PAGE] &= (uint8_t)~PM_FLAG_VERIFIED;
        *status = pm_fail(PM_CORRUPT, "the slab at region offset %llu is damaged", (unsigned long long)offset);
        return NULL;
    }
    return slab;
}

static uint64_t slab_used_at_commit(const pm_region *region, uint64_t offset, unsigned class)
{
    if (pm_heap_kind(region, region->committed, offset / PM_PAGE) != PM_PAGE_SLAB) return 0;
    const pm_slab *committed = (const void *)(region->committed + offset);
    return committed->head.level == class ? committed->used : UINT64_MAX;
}

/* The caller edits the slab, of this function and of the next one. A slab in no list has no neighbours: `previous` is
 * 0. */
static pm_status slab_link(pm_region *region, pm_root *root, pm_slab *slab)
{
    unsigned class = slab->head.level;
    pm_status status;
    if (root->slabs[class]) {
        pm_slab *next = slab_read(region, root->slabs[class], &status);
        PM_TRY(status);
        pm_page_edit(region, next);
        next->previous = slab->head.self;
    }
    pm_page_edit(region, root);
    slab->next = root->slabs[class];
    slab->listed = 1;
    root->slabs[class] = slab->head.self;
    return PM_OK;
}

static pm_status slab_unlink(pm_region *region, pm_root *root, pm_slab *slab)
{
    pm_status status;
    if (slab->next) {
        pm_slab *next = slab_read(region, slab->next, &status);
        PM_TRY(status);
        pm_page_edit(region, next);
        next->previous = slab->previous;
    }
    if (slab->previous) {
        pm_slab *previous = slab_read(region, slab->previous, &status);
        PM_TRY(status);
        pm_page_edit(region, previous);
        previous->next = slab->next;
    } else {
        pm_page_edit(region, root);
        root->slabs[slab->head.level] = slab->next;
    }
    slab->next = slab->previous = slab->listed = 0;
    return PM_OK;
}

static uint64_t block_offset(const pm_slab *slab, unsigned block)
{
    return slab->head.self + PM_LINE + (uint64_t)block * class_size[slab->head.level];
}

/* A usable block of this slab, or -1. */
static int usable_block(const pm_region *region, const pm_slab *slab)
{
    unsigned class = slab->head.level;
    uint64_t free = pm_heap_slab_all(class) & ~slab->used & ~slab_used_at_commit(region, slab->head.self, class);
    for (; free; free &= free - 1) {
        unsigned block = (unsigned)__builtin_ctzll(free);
        if (!pm_region_covered(region, block_offset(slab, block), class_size[class])) return (int)block;
    }
    return -1;
}

static pm_status slab_alloc(pm_region *region, unsigned class, uint64_t *offset)
{
    enum { LOOK_AT_MOST = 8 }; /* slabs whose free blocks all wait for a commit or a buffer */
    pm_status status;
    pm_root *root = pm_heap_root(region, &status);
    PM_TRY(status);
    pm_slab *slab = NULL;
    int block = -1;
    uint64_t at = root->slabs[class];
    for (int i = 0; at && i < LOOK_AT_MOST && block < 0; i++, at = slab->next) {
        slab = slab_read(region, at, &status);
        PM_TRY(status);
        if (slab->head.level != class) return pm_fail(PM_CORRUPT, "the lists of slabs are damaged");
        block = usable_block(region, slab);
    }
    if (block < 0) {
        uint64_t page;
        PM_TRY(pm_heap_pages(region, 1, PM_PAGE_SLAB, &page));
        slab = pm_page_new(region, page, PM_TYPE_SLAB, class);
        PM_TRY(slab_link(region, root, slab));
        block = 0;
    }
    pm_page_edit(region, slab);
    slab->used |= UINT64_C(1) << block;
    if (slab->used == pm_heap_slab_all(class)) PM_TRY(slab_unlink(region, root, slab));
    *offset = block_offset(slab, (unsigned)block);
    return PM_OK;
}

/* The slab and block of an extent; PM_CORRUPT if there is no such block in use. */
static pm_status slab_of(pm_region *region, uint64_t offset, uint64_t length, pm_slab **slab, unsigned *block)
{
    pm_status status;
    uint64_t page = offset / PM_PAGE * PM_PAGE, inside = offset % PM_PAGE - PM_LINE;
    unsigned class = pm_heap_slab_class(pm_extent_size(length));
    *slab = slab_read(region, page, &status);
    PM_TRY(status);
    *block = (unsigned)(inside / class_size[class]);
    if ((*slab)->head.level != class || inside % class_size[class] || !((*slab)->used >> *block & 1))
        return pm_fail(PM_CORRUPT, "an extent is damaged: no such block at region offset %llu",
                       (unsigned long long)offset);
    return PM_OK;
}

static pm_status slab_free(pm_region *region, uint64_t offset, uint64_t length)
{
    pm_status status;
    pm_slab *slab;
    unsigned block;
    pm_root *root = pm_heap_root(region, &status);
    PM_TRY(status);
    PM_TRY(slab_of(region, offset, length, &slab, &block));
    pm_page_edit(region, slab);
    slab->used &= ~(UINT64_C(1) << block);
    if (!slab->listed) PM_TRY(slab_link(region, root, slab));
    if (slab->used) return PM_OK;
    PM_TRY(slab_unlink(region, root, slab));
    PM_TRY(pm_heap_free_pages(region, slab->head.self, 1));
    pm_page_forget(region, slab->head.self);
    return PM_OK;
}

/* ---- extents ------------------------------------------------------------------------------------------------ */

pm_status pm_heap_alloc(pm_region *region, uint64_t length, uint64_t *offset)
{
    PM_CHECK(length > 0 && length <= PM_REGION_LIMIT / 2);
    if (pm_extent_is_small(length)) return slab_alloc(region, pm_heap_slab_class(pm_extent_size(length)), offset);
    return pm_heap_pages(region, pm_extent_pages(length), PM_PAGE_DATA, offset);
}

/* For salvage: whether the head of a slab is damaged, or the part of the map that describes it. Its blocks have hashes,
 * which prove them. */
static bool is_lost(pm_region *region, uint64_t slab)
{
    if (!region->salvage) return false;
    if (!pm_heap_knows(region, slab / PM_PAGE)) return true;
    return pm_region_readable(region, region->live, slab, PM_LINE, "a slab") == PM_OK
           && !pm_page_valid(region, region->live, slab, PM_TYPE_SLAB);
}

pm_status pm_heap_check_extent(pm_region *region, uint64_t offset, uint64_t length)
{
    if (!length || length > PM_REGION_LIMIT || !pm_region_holds(region, offset, pm_extent_size(length)))
        return pm_fail(PM_CORRUPT, "an extent is damaged: it lies outside the store");
    if (pm_extent_is_small(length)) {
        pm_slab *slab;
        unsigned block;
        pm_status status;
        if (offset % PM_PAGE >= PM_LINE && is_lost(region, offset / PM_PAGE * PM_PAGE)) return PM_OK;
        unsigned there = pm_heap_live_kind(region, offset / PM_PAGE, &status);
        PM_TRY(status);
        if (offset % PM_PAGE < PM_LINE || there != PM_PAGE_SLAB)
            return pm_fail(PM_CORRUPT, "an extent is damaged: no slab at region offset %llu",
                           (unsigned long long)offset);
        return slab_of(region, offset, length, &slab, &block);
    }
    uint64_t end = offset / PM_PAGE + pm_extent_pages(length);
    if (offset % PM_PAGE) return pm_fail(PM_CORRUPT, "an extent is damaged: it is not on whole pages");
    for (uint64_t page = offset / PM_PAGE; page < end;) {
        pm_status status;
        const pm_map *map = map_read(region, page, &status);
        if (!region->salvage) PM_TRY(status);
        uint64_t part = page - page % PM_MAP_PAGES + PM_MAP_PAGES;
        if (part > end) part = end;
        if (status != PM_OK || region->map_lost) page = part; /* their hashes prove them */
        for (; page < part; page++) {
            uint64_t i = page % PM_MAP_PAGES;
            if (map && i % 32 == 0 && map->words[i / 32] == LOW_BITS * PM_PAGE_DATA) page += 31;
            else if (kind_in(map, page) != PM_PAGE_DATA)
                return pm_fail(PM_CORRUPT, "an extent is damaged: the space map disagrees at region offset %llu",
                               (unsigned long long)(page * PM_PAGE));
        }
    }
    return PM_OK;
}

pm_status pm_heap_free(pm_region *region, uint64_t offset, uint64_t length)
{
    PM_TRY(pm_heap_check_extent(region, offset, length));
    return pm_extent_is_small(length) ? slab_free(region, offset, length)
                                      : pm_heap_free_pages(region, offset, pm_extent_pages(length));
}

uint64_t pm_heap_used(pm_region *region)
{
    uint64_t used = 0, count = region->size / PM_PAGE;
    for (uint64_t page = 0; page < count; page += PM_MAP_PAGES) {
        pm_status status;
        const pm_map *map = map_read(region, page, &status);
        for (size_t i = 0; map && i < sizeof map->words / 8; i++)
            used += (uint64_t)__builtin_popcountll((map->words[i] | map->words[i] >> 1) & LOW_BITS);
    }
    return used;
}

/* ---- an empty region ---------------------------------------------------------------------------------------- */

void pm_heap_format(uint8_t *image, uint64_t store_id)
{
    pm_region region = {.live = image, .store_id = store_id};
    pm_root *root = (void *)image;
    pm_map_list *list = (void *)(image + PM_PAGE);
    pm_map *map = (void *)(image + 2 * PM_PAGE);
    root->head = (pm_page_head){.type = PM_TYPE_ROOT};
    list->head = (pm_page_head){.self = PM_PAGE, .type = PM_TYPE_MAP_LIST};
    map->head = (pm_page_head){.self = 2 * PM_PAGE, .type = PM_TYPE_MAP};
    root->tree = 3 * PM_PAGE;
    root->map_lists[0] = PM_PAGE;
    list->maps[0] = 2 * PM_PAGE;
    for (int page = 0; page < PM_HEAP_FIRST_PAGES; page++) map->words[0] |= (uint64_t)PM_PAGE_META << 2 * page;
    pm_page_checksum(&region, root);
    pm_page_checksum(&region, list);
    pm_page_checksum(&region, map);
}

pm_digest pm_heap_digest(const uint8_t *image)
{
    pm_digest digest = {0};
    for (uint64_t page = 0; page < PM_HEAP_FIRST_PAGES; page++)
        pm_digest_add(&digest, page * PM_PAGE, pm_page_contribution(image, page * PM_PAGE));
    return digest;
}
