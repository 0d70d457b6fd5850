#include "space/page.h"

#include "base/hash.h"

static uint64_t page_hash(const pm_region *region, const uint8_t *page, uint64_t offset, uint32_t type)
{
    return pm_keyed_checksum(pm_hash64(page + 8, pm_page_bytes(type) - 8, 0), offset, region->store_id);
}

void pm_page_checksum(const pm_region *region, void *page)
{
    pm_page_head *head = page;
    head->hash = page_hash(region, page, head->self, head->type);
}

bool pm_page_valid(const pm_region *region, const uint8_t *image, uint64_t offset, uint32_t type)
{
    if (!pm_region_holds(region, offset, PM_PAGE) && offset) return false;
    if (offset % PM_PAGE) return false;
    pm_page_head head;
    memcpy(&head, image + offset, sizeof head);
    return head.type == type && head.self == offset && head.hash == page_hash(region, image + offset, offset, type);
}

uint64_t pm_page_contribution(const uint8_t *image, uint64_t offset)
{
    pm_page_head head;
    memcpy(&head, image + offset, sizeof head);
    return pm_digest_contribution(offset, head.hash);
}

void *pm_page_read(pm_region *region, uint64_t offset, uint32_t type, pm_status *status)
{
    if (offset % PM_PAGE || offset >= region->size) {
        *status = pm_fail(PM_CORRUPT, "metadata point outside the store (offset %llu)", (unsigned long long)offset);
        return NULL;
    }
    uint8_t *page = region->live + offset;
    uint8_t *flags = &region->flags[offset / PM_PAGE];
    if (!(*flags & PM_FLAG_VERIFIED)) {
        /* The bytes that are checked now are used later (D9). */
        if ((*status = pm_region_make_private(region, offset, PM_PAGE, "a page of metadata")) != PM_OK) return NULL;
        if (!pm_page_valid(region, region->live, offset, type)) {
            *status = pm_fail(PM_CORRUPT, "the metadata page at region offset %llu is damaged",
                              (unsigned long long)offset);
            return NULL;
        }
        *flags |= PM_FLAG_VERIFIED;
    }
    const pm_page_head *head = (const void *)page;
    if (head->type != type || head->self != offset) {
        *status = pm_fail(PM_CORRUPT,
                          "the metadata page at region offset %llu is of another kind than its reference says",
                          (unsigned long long)offset);
        return NULL;
    }
    *status = PM_OK;
    return page;
}

/* Can't fail: a change of metadata that stopped half-way for lack of memory could not be undone. */
static void list_edited(pm_region *region, uint64_t offset)
{
    uint8_t *flags = &region->flags[offset / PM_PAGE];
    if (!(*flags & PM_FLAG_LISTED)) region->edited[region->edited_count++] = offset;
    *flags |= PM_FLAG_LISTED;
}

static void mark_edited(pm_region *region, uint64_t offset, uint32_t type)
{
    list_edited(region, offset);
    region->flags[offset / PM_PAGE] |= type == PM_TYPE_SLAB ? PM_FLAG_EDITED_SLAB : PM_FLAG_EDITED;
}

void pm_page_edit(pm_region *region, void *page)
{
    const pm_page_head *head = page;
    mark_edited(region, head->self, head->type);
}

void *pm_page_new(pm_region *region, uint64_t offset, uint32_t type, uint32_t level)
{
    PM_CHECK(offset % PM_PAGE == 0 && offset < region->size);
    mark_edited(region, offset, type);
    uint8_t *page = region->live + offset;
    memset(page, 0, pm_page_bytes(type));
    *(pm_page_head *)(void *)page = (pm_page_head){.self = offset, .type = type, .level = level};
    region->flags[offset / PM_PAGE] |= PM_FLAG_VERIFIED;
    return page;
}

void pm_page_forget(pm_region *region, uint64_t offset)
{
    /* It is in the list of edited pages: a rollback must restore its committed bytes, and a commit takes its
     * contribution out of the digest. */
    list_edited(region, offset);
    region->flags[offset / PM_PAGE] &= (uint8_t)~(PM_FLAG_VERIFIED | PM_FLAG_EDITED | PM_FLAG_EDITED_SLAB);
}
