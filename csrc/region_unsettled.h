/*
 * Commits that returned before they were durable (D11). The file's own home may not have them yet (I3), so another
 * private mapping of the region, the image, stands in its place: what a commit logged is copied there, all other pages
 * of it show the file. region->home points to it. Once a commit is known durable it is settled: its runs are written
 * home, and pages of the image that no later commit has written are dropped, so that they show the same bytes in the
 * file.
 *
 *   the file's home (settled)     the state of a commit that is known durable; which one, says log.durable
 *   the image (region->home)      the last commit (I2)
 *
 * I13  Pages that a commit which is not settled has logged or declared are unsettled. No direct write touches them, and
 *      no memory that programs see is dropped there, for what would show is an older state. What the settled state
 *      uses, by the map in the file, isn't written directly either (I7).
 */
#ifndef PM_REGION_UNSETTLED_H
#define PM_REGION_UNSETTLED_H

#include "region.h"

typedef struct pm_unsettled {
    uint8_t *image;         /* moves when the region grows */
    uint64_t size;          /* of the image */
    const uint8_t *settled; /* the file's own home */
    pm_page_set since;      /* unsettled pages of commits since the last snapshot */
    pm_page_set before;     /* and of those before, which are being made durable */
    uint64_t set_bytes;     /* of each set's memory */
} pm_unsettled;

pm_status pm_unsettled_open(pm_region *region);
void pm_unsettled_close(pm_region *region);
pm_status pm_unsettled_extend(pm_region *region, uint64_t size); /* after the media have grown, as pm_region_extend */
void pm_unsettled_moved(pm_region *region, const uint8_t *file);  /* as pm_region_moved */

/* The last commit logged this run, of pages, of which the last may be cut; or declared this range. */
void pm_unsettled_run(pm_region *region, uint64_t offset, const void *source, uint64_t length);
void pm_unsettled_direct(pm_region *region, uint64_t offset, uint64_t length);

/* The file was written, and not the image, which may have a copy of its own where nothing is unsettled: locked memory
 * does (mlockall). */
void pm_unsettled_show(pm_region *region, uint64_t offset, uint64_t length);

/* The commits up to now are to be settled, those that follow are not. */
void pm_unsettled_snapshot(pm_region *region);
/* A run of a commit before the snapshot; newer commits first. What no newer one has written is written home. */
pm_status pm_unsettled_settle(pm_region *region, uint64_t offset, const uint8_t *source, uint64_t length,
                              uint64_t *written);
/* All runs before the snapshot were given. */
void pm_unsettled_settled(pm_region *region);

/* The first unsettled page in [page, end); end if there is none. */
static inline uint64_t pm_unsettled_next(const pm_region *region, uint64_t page, uint64_t end)
{
    const pm_unsettled *unsettled = region->unsettled;
    if (!unsettled) return end;
    return pm_page_next(&unsettled->since, page, pm_page_next(&unsettled->before, page, end));
}

static inline bool pm_is_unsettled(const pm_region *region, uint64_t offset)
{
    return pm_unsettled_next(region, offset / PM_PAGE, offset / PM_PAGE + 1) == offset / PM_PAGE;
}

#endif
