#define _GNU_SOURCE
#include "space/overlay.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "base/address.h"

pm_status pm_overlay_open(pm_region *region)
{
    pm_overlay *overlay = calloc(1, sizeof *overlay);
    if (!overlay) return pm_fail(PM_NO_MEMORY, "no memory to commit asynchronously");
    overlay->since.base = overlay->before.base = region->live;
    region->overlay = overlay;
    pm_status status = pm_overlay_extend(region, region->size);
    if (status != PM_OK) pm_overlay_close(region);
    return status;
}

void pm_overlay_close(pm_region *region)
{
    pm_overlay *overlay = region->overlay;
    if (!overlay) return;
    if (overlay->pages) munmap(overlay->pages, overlay->size);
    if (overlay->since.bits) munmap(overlay->since.bits, overlay->set_bytes);
    if (overlay->before.bits) munmap(overlay->before.bits, overlay->set_bytes);
    free(overlay);
    region->overlay = NULL;
}

/* Makes both sets, with room for the pages of `size` bytes. */
static pm_status make_sets(pm_overlay *overlay, uint64_t size)
{
    uint64_t bytes = overlay->set_bytes ? overlay->set_bytes : PM_PAGE;
    while (bytes * 8 <= size / PM_PAGE) bytes *= 2;
    if (bytes == overlay->set_bytes) return PM_OK;
    uint64_t *since = pm_address_resize(overlay->since.bits, overlay->set_bytes, bytes);
    if (since) overlay->since.bits = since;
    uint64_t *before = since ? pm_address_resize(overlay->before.bits, overlay->set_bytes, bytes) : NULL;
    if (!before) return pm_address_refused("cannot map the notes on pages", bytes);
    overlay->before.bits = before;
    overlay->set_bytes = bytes;
    return PM_OK;
}

pm_status pm_overlay_extend(pm_region *region, uint64_t size)
{
    pm_overlay *overlay = region->overlay;
    PM_TRY(make_sets(overlay, size));
    if (!pm_media_may_map(region->media)) return pm_fail_errno("cannot map the region");
    void *pages = overlay->pages ? pm_address_resize(overlay->pages, overlay->size, size)
                                   : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                                          region->media->fd, PM_REGION_START);
    if (!pages || pages == MAP_FAILED) return pm_address_refused("cannot map the region", size);
    overlay->pages = pages;
    overlay->size = size;
    return PM_OK;
}

void pm_overlay_moved(pm_region *region, const uint8_t *file)
{
    region->committed = region->overlay->pages;
    region->overlay->file = file;
}

void pm_overlay_logged(pm_region *region, uint64_t offset, const void *source, uint64_t length)
{
    PM_CHECK(offset % PM_PAGE == 0 && offset + length <= region->size);
    memcpy(region->overlay->pages + offset, source, length);
    pm_overlay_direct(region, offset, length);
}

void pm_overlay_direct(pm_region *region, uint64_t offset, uint64_t length)
{
    pm_page_set_add(&region->overlay->since, offset / PM_PAGE, pm_round_up(offset + length, PM_PAGE) / PM_PAGE);
}

void pm_overlay_show(pm_region *region, uint64_t offset, uint64_t length)
{
    uint64_t page = offset / PM_PAGE, end = pm_round_up(offset + length, PM_PAGE) / PM_PAGE;
    while (page < end) {
        uint64_t stop = pm_overlay_next(region, page, end);
        if (page < stop) pm_address_drop(region->overlay->pages + page * PM_PAGE, (stop - page) * PM_PAGE);
        for (page = stop; page < end && pm_overlay_next(region, page, page + 1) == page; page++) continue;
    }
}

void pm_overlay_snapshot(pm_region *region)
{
    pm_page_set empty = region->overlay->before;
    region->overlay->before = region->overlay->since;
    region->overlay->since = empty;
}

void pm_overlay_finalized(pm_region *region)
{
    /* Declared contents are in their place anyway. */
    pm_address_drop(region->overlay->before.bits, region->overlay->set_bytes);
    region->search_from = 0; /* space that waited for the sync may be used now */
}
