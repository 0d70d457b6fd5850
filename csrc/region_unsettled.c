#define _GNU_SOURCE
#include "region_unsettled.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "address.h"

pm_status pm_unsettled_open(pm_region *region)
{
    pm_unsettled *unsettled = calloc(1, sizeof *unsettled);
    if (!unsettled) return pm_fail(PM_NO_MEMORY, "no memory to commit asynchronously");
    unsettled->since.base = unsettled->before.base = region->live;
    region->unsettled = unsettled;
    pm_status status = pm_unsettled_extend(region, region->size);
    if (status != PM_OK) pm_unsettled_close(region);
    pm_region_moved(region);
    return status;
}

void pm_unsettled_close(pm_region *region)
{
    pm_unsettled *unsettled = region->unsettled;
    if (!unsettled) return;
    if (unsettled->image) munmap(unsettled->image, unsettled->size);
    if (unsettled->since.bits) munmap(unsettled->since.bits, unsettled->set_bytes);
    if (unsettled->before.bits) munmap(unsettled->before.bits, unsettled->set_bytes);
    free(unsettled);
    region->unsettled = NULL;
}

/* Both sets, with room for the pages of `size` bytes. */
static pm_status make_sets(pm_unsettled *unsettled, uint64_t size)
{
    uint64_t bytes = unsettled->set_bytes ? unsettled->set_bytes : PM_PAGE;
    while (bytes * 8 <= size / PM_PAGE) bytes *= 2;
    if (bytes == unsettled->set_bytes) return PM_OK;
    uint64_t *since = pm_address_resize(unsettled->since.bits, unsettled->set_bytes, bytes);
    if (since) unsettled->since.bits = since;
    uint64_t *before = since ? pm_address_resize(unsettled->before.bits, unsettled->set_bytes, bytes) : NULL;
    if (!before) return pm_address_refused("cannot map the notes on pages", bytes);
    unsettled->before.bits = before;
    unsettled->set_bytes = bytes;
    return PM_OK;
}

pm_status pm_unsettled_extend(pm_region *region, uint64_t size)
{
    pm_unsettled *unsettled = region->unsettled;
    PM_TRY(make_sets(unsettled, size));
    if (!pm_media_may_map(region->media)) return pm_fail_errno("cannot map the region");
    void *image = unsettled->image ? pm_address_resize(unsettled->image, unsettled->size, size)
                                   : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                                          region->media->fd, PM_REGION_START);
    if (!image || image == MAP_FAILED) return pm_address_refused("cannot map the region", size);
    unsettled->image = image;
    unsettled->size = size;
    return PM_OK;
}

void pm_unsettled_moved(pm_region *region, const uint8_t *file)
{
    region->home = region->unsettled->image;
    region->unsettled->settled = file;
}

void pm_unsettled_run(pm_region *region, uint64_t offset, const void *source, uint64_t length)
{
    PM_CHECK(offset % PM_PAGE == 0 && offset + length <= region->size);
    memcpy(region->unsettled->image + offset, source, length);
    pm_unsettled_direct(region, offset, length);
}

void pm_unsettled_direct(pm_region *region, uint64_t offset, uint64_t length)
{
    pm_page_add(&region->unsettled->since, offset / PM_PAGE, pm_round_up(offset + length, PM_PAGE) / PM_PAGE);
}

void pm_unsettled_show(pm_region *region, uint64_t offset, uint64_t length)
{
    uint64_t page = offset / PM_PAGE, end = pm_round_up(offset + length, PM_PAGE) / PM_PAGE;
    while (page < end) {
        uint64_t stop = pm_unsettled_next(region, page, end);
        if (page < stop) pm_address_drop(region->unsettled->image + page * PM_PAGE, (stop - page) * PM_PAGE);
        for (page = stop; page < end && pm_unsettled_next(region, page, page + 1) == page; page++) continue;
    }
}

void pm_unsettled_snapshot(pm_region *region)
{
    pm_page_set empty = region->unsettled->before;
    region->unsettled->before = region->unsettled->since;
    region->unsettled->since = empty;
}

pm_status pm_unsettled_settle(pm_region *region, uint64_t offset, const uint8_t *source, uint64_t length,
                              uint64_t *written)
{
    pm_unsettled *unsettled = region->unsettled;
    pm_page_set *before = &unsettled->before;
    uint64_t end = pm_round_up(offset + length, PM_PAGE) / PM_PAGE;
    for (uint64_t page = pm_page_next(before, offset / PM_PAGE, end); page < end;
         page = pm_page_next(before, page, end)) {
        uint64_t first = page;
        bool again = pm_page_in(&unsettled->since, first);
        while (page < end && pm_page_in(before, page) && pm_page_in(&unsettled->since, page) == again) page++;
        uint64_t at = first * PM_PAGE, bytes = (page - first) * PM_PAGE;
        uint64_t logged = page == end ? offset + length - at : bytes; /* an extent may end before its page */
        PM_TRY(pm_home_write(region, at, source + (at - offset), logged, PM_WRITE_CACHED));
        pm_page_clear(before, first, page);
        *written += logged;
        /* The file has the same bytes now. Dropped before, home would have shown an older state for a moment (I2). */
        if (!again) pm_address_drop(unsettled->image + at, bytes);
    }
    return PM_OK;
}

void pm_unsettled_settled(pm_region *region)
{
    /* What was declared is in its place anyway. */
    pm_address_drop(region->unsettled->before.bits, region->unsettled->set_bytes);
    region->search_from = 0; /* space that waited may be used now */
}
