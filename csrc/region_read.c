/* Reading what may be on a bad block: see media_read.c. What is read here is read for the first time, perhaps. */
#include "region_unsettled.h"

/* Pages that are asked for at once: an extent may be larger than memory. */
enum { PART = 256 };

pm_status pm_region_make_private(pm_region *region, uint64_t offset, uint64_t length, const char *what)
{
    const pm_media *media = region->media;
    uint8_t *from = region->live + offset;
    bool ask = media->kind == PM_MEDIA_FILE && !media->lent;
    if (ask && pm_media_find_unreadable(media, from, PM_REGION_START + offset, length, true, what) != UINT64_MAX)
        return PM_UNREADABLE;
    /* They are private already, unless there was nobody to ask: on memory, or by an older kernel. */
    for (volatile uint8_t *byte = from, *end = from + length; byte < end; byte += PM_PAGE) *byte = *byte;
    from[length - 1] = *(volatile uint8_t *)(from + length - 1);
    return PM_OK;
}

pm_status pm_region_comparable(const pm_region *region, uint64_t place, uint64_t home, uint64_t length)
{
    /* Where memory is not private, it shows the page cache, which then has the page. */
    PM_TRY(pm_region_readable(region, region->home, home, length, "contents"));
    return home == place ? PM_OK : pm_region_readable(region, region->home, place, length, "contents");
}

pm_status pm_region_prepare(const pm_region *region, pm_buffer *buffer)
{
    uint64_t offset = buffer->offset, length = buffer->length;
    buffer->readable = buffer->sampled = !buffer->owned_at_commit;
    /* Commits compare all of an array of a few pages, also what the program has not touched: better an error here than
     * a signal there. Of a large one they look at what was written. The page of a slab was read when its extent was
     * looked up. */
    bool whole = offset % PM_PAGE == 0 && pm_extent_blocks(length) < PM_WATCH_LEAST;
    if (!buffer->writable || buffer->readable || !whole) return PM_OK;
    buffer->readable = true;
    return pm_region_comparable(region, offset, pm_region_home(region, offset, length), pm_extent_size(length));
}

/* ---- extents -------------------------------------------------------------------------------------------------- */

pm_status pm_extent_check(const pm_region *region, const uint8_t *image, uint64_t offset, uint64_t length,
                          uint64_t *block)
{
    const uint8_t *table = image + offset + pm_extent_table(length);
    uint64_t blocks = pm_extent_blocks(length), last = (blocks - 1) / PART * PART, from = last * PM_PAGE;
    /* The last part, with the table behind it: small extents have no other. */
    uint64_t bad = pm_region_unreadable(region, image, offset + from, pm_extent_size(length) - from, "contents");
    for (*block = 0; *block < blocks; ++*block) {
        uint64_t at = *block * PM_PAGE, expected;
        size_t bytes = length - at < PM_PAGE ? length - at : PM_PAGE;
        if (bad == UINT64_MAX && *block % PART == 0 && *block < last)
            bad = pm_region_unreadable(region, image, offset + at, PART * PM_PAGE, "contents");
        if (bad != UINT64_MAX) {
            *block = bad > offset ? (bad - offset) / PM_PAGE : 0;
            return PM_UNREADABLE;
        }
        memcpy(&expected, table + 8 * *block, sizeof expected);
        if (pm_block_hash(region, image + offset + at, bytes, offset + at) != expected) return PM_CORRUPT;
    }
    return PM_OK;
}

pm_status pm_region_check(const pm_region *region, uint64_t extent, uint64_t length)
{
    uint64_t block, place = pm_region_place(region, extent, length);
    pm_status status = pm_extent_check(region, region->home, pm_region_home(region, place, length), length, &block);
    if (status == PM_CORRUPT)
        return pm_fail(PM_CORRUPT,
                       "contents are damaged: block %llu of the extent at region offset %llu does not match its "
                       "hash",
                       (unsigned long long)block, (unsigned long long)extent);
    PM_TRY(status);
    return pm_region_readable(region, region->live, place, length, "contents");
}

/* Drops what equals both what would show and what is committed, which stands at `home`. */
static void drop_clean(pm_region *region, uint64_t offset, uint64_t home, uint64_t length)
{
    uint64_t from = offset, end = offset + length;
    for (uint64_t at = offset; at <= end; at += PM_PAGE) {
        if (at < end && !pm_is_unsettled(region, at) && !memcmp(region->live + at, region->home + at, PM_PAGE) &&
            (home == offset || !memcmp(region->live + at, region->home + home + (at - offset), PM_PAGE)))
            continue;
        if (from < at) pm_region_drop(region, from, at - from);
        from = at + PM_PAGE;
    }
}

pm_status pm_region_release(pm_region *region, uint64_t place, uint64_t length)
{
    uint64_t home = pm_region_home(region, place, length), end = pm_round_up(pm_extent_size(length), PM_PAGE);
    for (uint64_t at = 0, part; at < end; at += part) {
        part = end - at < PART * PM_PAGE ? end - at : PART * PM_PAGE;
        PM_TRY(pm_region_comparable(region, place + at, home + at, part));
        drop_clean(region, place + at, home + at, part);
    }
    return PM_OK;
}
