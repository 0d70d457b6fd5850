/*
 * Metadata pages.
 */
#ifndef PM_PAGE_H
#define PM_PAGE_H

#include "space/region.h"

/* Reads a metadata page of this type, which is checked the first time. NULL with PM_CORRUPT or PM_UNREADABLE in
 * *status. */
void *pm_page_read(pm_region *region, uint64_t offset, uint32_t type, pm_status *status);

/* Must be called before a metadata page (or a slab's header) is changed. */
void pm_page_edit(pm_region *region, void *page);

/* Makes a page metadata, zeroed. */
void *pm_page_new(pm_region *region, uint64_t offset, uint32_t type, uint32_t level);
void pm_page_forget(pm_region *region, uint64_t offset); /* the page is no longer metadata */

void pm_page_checksum(const pm_region *region, void *page); /* sets the checksum */
bool pm_page_valid(const pm_region *region, const uint8_t *image, uint64_t offset, uint32_t type);
uint64_t pm_page_contribution(const uint8_t *image, uint64_t offset); /* to the digest */
static inline size_t pm_page_bytes(uint32_t type)
{
    return type == PM_TYPE_SLAB ? PM_LINE : PM_PAGE;
}

#endif
