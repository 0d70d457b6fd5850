#define _GNU_SOURCE
#include "region_unsettled.h"

#include <stdlib.h>
#include <sys/mman.h>

enum { RESERVE = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE };

static uint64_t *new_set(uint64_t bytes)
{
    void *bits = mmap(NULL, bytes, PROT_READ | PROT_WRITE, RESERVE, -1, 0);
    return bits == MAP_FAILED ? NULL : bits;
}

pm_status pm_unsettled_open(pm_region *region)
{
    pm_unsettled *unsettled = calloc(1, sizeof *unsettled);
    if (!unsettled) return pm_fail(PM_NO_MEMORY, "no memory to commit asynchronously");
    /* Where address space is limited, the store may grow less. */
    void *image = MAP_FAILED;
    for (uint64_t size = region->reserved; image == MAP_FAILED && size >= region->size; size = size / 2 / PM_PAGE * PM_PAGE) {
        image = mmap(NULL, size, PROT_NONE, RESERVE, -1, 0);
        unsettled->reserved = size;
    }
    if (image == MAP_FAILED) {
        free(unsettled);
        return pm_fail_errno("cannot reserve an address range for commits that are not durable yet");
    }
    unsettled->image = image;
    unsettled->set_bytes = (unsettled->reserved / PM_PAGE / 64 + 1) * 8;
    unsettled->settled = region->media->view + PM_REGION_START;
    unsettled->since = (pm_page_set){region->live, new_set(unsettled->set_bytes)};
    unsettled->before = (pm_page_set){region->live, new_set(unsettled->set_bytes)};
    region->unsettled = unsettled;
    if (!unsettled->since.bits || !unsettled->before.bits) {
        pm_unsettled_close(region);
        return pm_fail(PM_NO_MEMORY, "no memory to commit asynchronously");
    }
    uint64_t size = region->size;
    region->size = 0;
    pm_status status = pm_unsettled_extend(region, size);
    region->size = size;
    if (status == PM_OK) region->home = unsettled->image;
    else pm_unsettled_close(region);
    return status;
}

void pm_unsettled_close(pm_region *region)
{
    pm_unsettled *unsettled = region->unsettled;
    if (!unsettled) return;
    munmap(unsettled->image, unsettled->reserved);
    if (unsettled->since.bits) munmap(unsettled->since.bits, unsettled->set_bytes);
    if (unsettled->before.bits) munmap(unsettled->before.bits, unsettled->set_bytes);
    free(unsettled);
    region->unsettled = NULL;
}

pm_status pm_unsettled_extend(pm_region *region, uint64_t size)
{
    if (!pm_media_may_map(region->media)) return pm_fail_errno("cannot map the region");
    if (mmap(region->unsettled->image + region->size, size - region->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
             region->media->fd, (off_t)(PM_REGION_START + region->size)) == MAP_FAILED)
        return pm_fail_errno("cannot map the region");
    return PM_OK;
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

void pm_unsettled_snapshot(pm_region *region)
{
    pm_page_set empty = region->unsettled->before;
    region->unsettled->before = region->unsettled->since;
    region->unsettled->since = empty;
}

pm_status pm_unsettled_settle(pm_region *region, uint64_t offset, const uint8_t *source, uint64_t length, uint64_t *written)
{
    pm_unsettled *unsettled = region->unsettled;
    pm_page_set *before = &unsettled->before;
    uint64_t end = pm_round_up(offset + length, PM_PAGE) / PM_PAGE;
    for (uint64_t page = pm_page_next(before, offset / PM_PAGE, end); page < end; page = pm_page_next(before, page, end)) {
        uint64_t first = page;
        bool again = pm_page_in(&unsettled->since, first);
        while (page < end && pm_page_in(before, page) && pm_page_in(&unsettled->since, page) == again) page++;
        uint64_t at = first * PM_PAGE, bytes = (page - first) * PM_PAGE;
        uint64_t logged = page == end ? offset + length - at : bytes; /* an extent may end before its page */
        PM_TRY(pm_home_write(region, at, source + (at - offset), logged, PM_WRITE_CACHED));
        pm_page_clear(before, first, page);
        *written += logged;
        /* The file has the same bytes now. Dropped before, home would have shown an older state for a moment (I2). */
        if (!again) PM_CHECK(madvise(unsettled->image + at, bytes, MADV_DONTNEED) == 0);
    }
    return PM_OK;
}

void pm_unsettled_settled(pm_region *region)
{
    /* What was declared is in its place anyway. */
    PM_CHECK(madvise(region->unsettled->before.bits, region->unsettled->set_bytes, MADV_DONTNEED) == 0);
    region->search_from = 0; /* space that waited may be used now */
}
