/* Reads what may be on a bad block: see media/read.c. It may be the first time that these pages are read. */
#include "space/region.h"

#include "space/overlay.h"

/* So many pages are asked for at once: an extent may be larger than memory. */
enum { PART = 256 };

pm_status pm_region_make_private(pm_region *region, uint64_t offset, uint64_t length, const char *what)
{
    const pm_media *media = region->media;
    uint8_t *from = region->live + offset;
    bool ask = media->may_be_bad && !media->lent;
    if (ask && pm_media_find_unreadable(media, from, PM_REGION_START + offset, length, true, what) != UINT64_MAX)
        return PM_UNREADABLE;
    /* They are private already, unless the kernel could not be asked: on memory, or an older kernel. */
    for (volatile uint8_t *byte = from, *end = from + length; byte < end; byte += PM_PAGE) *byte = *byte;
    from[length - 1] = *(volatile uint8_t *)(from + length - 1);
    return PM_OK;
}

pm_status pm_region_comparable(const pm_region *region, uint64_t place, uint64_t committed, uint64_t length)
{
    /* Memory that is not private shows the page cache, which has the page once it was read. */
    PM_TRY(pm_region_readable(region, region->committed, committed, length, "contents"));
    return committed == place ? PM_OK : pm_region_readable(region, region->committed, place, length, "contents");
}

pm_status pm_region_prepare(const pm_region *region, pm_buffer *buffer)
{
    uint64_t offset = buffer->offset, length = buffer->length;
    buffer->readable = buffer->sampled = !buffer->owned_at_commit;
    /* Commits compare an array of a few pages in full, also pages that the program has not touched: an error here is
     * better than a signal there. Of a large array they compare what was written. The page of a slab was read when its
     * extent was looked up. */
    bool whole = offset % PM_PAGE == 0 && pm_extent_blocks(length) < PM_POLICY_LEAST;
    if (!buffer->writable || buffer->readable || !whole) return PM_OK;
    buffer->readable = true;
    return pm_region_comparable(region, offset, pm_region_committed(region, offset, length), pm_extent_size(length));
}

/* Drops pages that equal both the bytes that would show, and the committed bytes at `committed`. */
static void drop_clean(pm_region *region, uint64_t offset, uint64_t committed, uint64_t length)
{
    uint64_t from = offset, end = offset + length;
    for (uint64_t at = offset; at <= end; at += PM_PAGE) {
        if (at < end && !pm_overlay_covers(region, at) && !memcmp(region->live + at, region->committed + at, PM_PAGE) &&
            (committed == offset || !memcmp(region->live + at, region->committed + committed + (at - offset), PM_PAGE)))
            continue;
        if (from < at) pm_region_drop(region, from, at - from);
        from = at + PM_PAGE;
    }
}

pm_status pm_region_release(pm_region *region, uint64_t place, uint64_t length)
{
    uint64_t committed = pm_region_committed(region, place, length), end = pm_round_up(pm_extent_size(length), PM_PAGE);
    for (uint64_t at = 0, part; at < end; at += part) {
        part = end - at < PART * PM_PAGE ? end - at : PART * PM_PAGE;
        PM_TRY(pm_region_comparable(region, place + at, committed + at, part));
        drop_clean(region, place + at, committed + at, part);
    }
    return PM_OK;
}
