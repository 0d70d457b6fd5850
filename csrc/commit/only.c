/* Declared write sets (pm_commit_only): what a program declares, and whether it changed more. */
#include "commit/only.h"

#include "commit/gather.h"
#include "commit/uncommitted.h"

bool pm_only_holds(const pm_store *store, const void *address, uint64_t length)
{
    const pm_region *region = &store->region;
    const pm_buffer *buffer = pm_region_owner(region, address, length);
    if (!buffer) return false;
    /* This is called before the program writes the range that it declares, and commits: prefetching has the time of
     * both. */
    const uint8_t *live = buffer->address;
    uint64_t committed = pm_region_committed(region, buffer->offset, buffer->length);
    pm_gather_expect(region, live, committed, buffer->length, (uint64_t)((const uint8_t *)address - live), length);
    return true;
}

void pm_only_declare(pm_store *store, const pm_range *ranges, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (ranges[i].length)
            pm_region_mark(&store->region, (const uint8_t *)(uintptr_t)ranges[i].address, ranges[i].length);
}

/* True if pm_mark noted a change of this byte. It notes whole pages. */
static bool marked(const pm_region *region, uint64_t offset, bool own_pages)
{
    return own_pages && pm_page_set_has(&region->policy.only, offset / PM_PAGE);
}

static bool declared(uint64_t address, const pm_range *ranges, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (address >= ranges[i].address && address - ranges[i].address < ranges[i].length) return true;
    return false;
}

/* True if a page of an extent, or what the extent has of it, equals the committed bytes. A page that the disk can't
 * read does: writing to it would have read it first. */
static bool is_unchanged(const pm_region *region, uint64_t offset, uint64_t committed, uint64_t length, bool readable)
{
    if (!readable && pm_region_comparable(region, offset, committed, length) != PM_OK) return true;
    return !memcmp(region->live + offset, region->committed + committed, length);
}

/* Finds the first range of changed bytes of an extent that no declared range has. */
static bool breaks(const pm_store *store, const pm_buffer *buffer, const pm_range *ranges, size_t count, pm_broken *out)
{
    const pm_region *region = &store->region;
    const pm_double_buffer *pair = pm_region_double_buffer(region, buffer->offset, buffer->length);
    uint64_t place = pm_region_committed(region, buffer->offset, buffer->length);
    bool own_pages = buffer->offset % PM_PAGE == 0;
    if (!own_pages && buffer->only) return false;
    bool readable = buffer->readable || pm_region_comparable(region, buffer->offset, place, buffer->length) == PM_OK;
    *out = (pm_broken){.extent = pair ? pair->slot[0] : buffer->offset};
    for (uint64_t at = 0; at < buffer->length; at++) {
        if (out->length && at >= out->at + out->length + PM_LINE) break;
        uint64_t offset = buffer->offset + at, left = buffer->length - at;
        if (at % PM_PAGE == 0
            && is_unchanged(region, offset, place + at, left < PM_PAGE ? left : PM_PAGE, readable)) {
            at += PM_PAGE - 1;
            continue;
        }
        const uint8_t *live = region->live + offset;
        if (*live == region->committed[place + at] || marked(region, offset, own_pages)
            || declared((uint64_t)(uintptr_t)live, ranges, count))
            continue;
        if (!out->length) out->at = at;
        out->length = at + 1 - out->at;
    }
    return out->length;
}

void pm_only_violation(pm_store *store, const pm_range *ranges, size_t count, pm_broken *out)
{
    *out = (pm_broken){0};
    for (size_t i = 0; i < store->region.buffer_count; i++) {
        const pm_buffer *buffer = store->region.buffers[i];
        if (buffer->owned && buffer->writable && !pm_uncommitted_find(store, buffer->offset) &&
            breaks(store, buffer, ranges, count, out))
            return;
    }
    *out = (pm_broken){0};
}
