/*
 * Commits that returned before they were durable (D11). The committed image in the file may not have them yet (I3). So
 * another private mapping of the region lies over it, the overlay: logged bytes are copied there, and all other pages
 * of the overlay show the file. region->committed points to the overlay. Once a commit is durable it is finalized: its
 * logged ranges are written to the file, and pages of the overlay that no later commit has written are dropped, so that
 * they show the same bytes in the file.
 *
 *   the file                          the state of a commit that is known to be durable; log.durable says which one
 *   the overlay (region->committed)   the last commit (I2)
 *
 * I13  Pages that a commit has logged or declared are in the overlay until it is finalized. No direct write touches
 *      them, and no memory that programs see is dropped there, because an older state would show. Space that the
 *      durable state uses, by the map in the file, is not written directly either (I7).
 */
#ifndef PM_OVERLAY_H
#define PM_OVERLAY_H

#include "space/region_state.h"

typedef struct pm_overlay {
    uint8_t *pages;         /* the mapping; moves when the region grows */
    uint64_t size;          /* of the mapping */
    const uint8_t *file;    /* the shared view of the file */
    pm_page_set since;      /* pages of commits since the last snapshot */
    pm_page_set before;     /* pages of commits before it, which are being made durable */
    uint64_t set_bytes;     /* of each set's memory */
} pm_overlay;

pm_status pm_overlay_open(pm_region *region);
void pm_overlay_close(pm_region *region);
pm_status pm_overlay_extend(pm_region *region, uint64_t size); /* after the media have grown, as pm_region_extend */
void pm_overlay_moved(pm_region *region, const uint8_t *file);  /* as pm_region_moved */

/* The last commit logged this range of pages, the last of which may be cut; or declared this range. */
void pm_overlay_logged(pm_region *region, uint64_t offset, const void *source, uint64_t length);
void pm_overlay_direct(pm_region *region, uint64_t offset, uint64_t length);

/* The file was written, and the overlay was not. Drops pages of the overlay that have a copy of their own though they
 * show the file, as locked memory has (mlockall). */
void pm_overlay_show(pm_region *region, uint64_t offset, uint64_t length);

/* Takes a snapshot: the commits up to now will be finalized, later ones will not. */
void pm_overlay_snapshot(pm_region *region);
/* All logged ranges before the snapshot are finalized. */
void pm_overlay_finalized(pm_region *region);

/* The first page in [page, end) that is in the overlay; end if there is none. */
static inline uint64_t pm_overlay_next(const pm_region *region, uint64_t page, uint64_t end)
{
    const pm_overlay *overlay = region->overlay;
    if (!overlay) return end;
    return pm_page_set_next(&overlay->since, page, pm_page_set_next(&overlay->before, page, end));
}

static inline bool pm_overlay_covers(const pm_region *region, uint64_t offset)
{
    return pm_overlay_next(region, offset / PM_PAGE, offset / PM_PAGE + 1) == offset / PM_PAGE;
}

#endif
