#include "space/region_image.h"

#include "base/address.h"

/* Writes to the file. While commits are not yet durable, the overlay shows the file there. */
static pm_status write_committed(pm_region *region, uint64_t offset, const void *source, uint64_t length,
                                 pm_write_how how)
{
    PM_TRY(pm_media_write(region->media, PM_REGION_START + offset, source, length, how));
    if (region->overlay) pm_overlay_show(region, offset, length);
    return PM_OK;
}

pm_status pm_region_write(pm_region *region, uint64_t offset, const void *source, uint64_t length, pm_write_how how)
{
    enum { FLUSH_MOST = 64 };
    PM_CHECK(offset + length <= region->size);
    if (!length) return PM_OK;
    if (region->media->flushes && how == PM_WRITE_CACHED) {
        uint64_t first = offset / PM_PAGE, last = (offset + length - 1) / PM_PAGE;
        /* A few pages that are written again and again stay in the cache until the checkpoint. More would make it long:
         * flushing pages that have left the cache takes much longer than streaming them. */
        if (region->flush_count >= FLUSH_MOST && !(region->flags[first] & region->flags[last] & PM_FLAG_FLUSH))
            return write_committed(region, offset, source, length, PM_WRITE_STREAM);
        for (uint64_t page = first; page <= last; page++) {
            if (!(region->flags[page] & PM_FLAG_FLUSH)) region->flush[region->flush_count++] = page;
            region->flags[page] |= PM_FLAG_FLUSH;
        }
    }
    return write_committed(region, offset, source, length, how);
}

pm_status pm_region_write_hashed(pm_region *region, uint64_t offset, const uint8_t *source, uint64_t pages,
                                 uint64_t *hashes)
{
    PM_CHECK(offset + pages * PM_PAGE <= region->size);
    PM_TRY(pm_media_write_hashed(region->media, PM_REGION_START + offset, source, pages, hashes));
    if (region->overlay) pm_overlay_show(region, offset, pages * PM_PAGE);
    for (uint64_t page = 0; page < pages; page++)
        hashes[page] = pm_keyed_checksum(hashes[page], offset + page * PM_PAGE, region->store_id);
    return PM_OK;
}

void pm_region_flush(pm_region *region)
{
    for (size_t i = 0; i < region->flush_count; i++) {
        uint64_t page = region->flush[i];
        region->media->operations->flush(region->media, PM_REGION_START + page * PM_PAGE, PM_PAGE);
        region->flags[page] &= (uint8_t)~PM_FLAG_FLUSH;
    }
    region->flush_count = 0;
}

pm_status pm_region_image_finalize(pm_region *region, uint64_t offset, const uint8_t *source, uint64_t length,
                                   uint64_t *written)
{
    pm_overlay *overlay = region->overlay;
    pm_page_set *before = &overlay->before;
    uint64_t end = pm_round_up(offset + length, PM_PAGE) / PM_PAGE;
    for (uint64_t page = pm_page_set_next(before, offset / PM_PAGE, end); page < end;
         page = pm_page_set_next(before, page, end)) {
        uint64_t first = page;
        bool again = pm_page_set_has(&overlay->since, first);
        while (page < end && pm_page_set_has(before, page) && pm_page_set_has(&overlay->since, page) == again) page++;
        uint64_t at = first * PM_PAGE, bytes = (page - first) * PM_PAGE;
        uint64_t logged = page == end ? offset + length - at : bytes; /* an extent may end before its page does */
        PM_TRY(pm_region_write(region, at, source + (at - offset), logged, PM_WRITE_CACHED));
        pm_page_set_clear(before, first, page);
        *written += logged;
        /* The file has the same bytes now. If the page were dropped before, the committed image would show an older
         * state for a moment (I2). */
        if (!again) pm_address_drop(overlay->pages + at, bytes);
    }
    return PM_OK;
}
