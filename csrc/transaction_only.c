/* Promises that little has changed (pm_commit_only), and whether they were kept. */
#include "transaction.h"

bool pm_transaction_holds(const pm_store *store, const void *address, uint64_t length)
{
    const pm_region *region = &store->region;
    const pm_buffer *buffer = pm_region_owner(region, address, length);
    if (!buffer) return false;
    /* It is asked before the program writes what it promises, and commits: memory has the time that both take. */
    const uint8_t *live = buffer->address;
    uint64_t home = pm_region_home(region, buffer->offset, buffer->length);
    pm_gather_expect(region, live, home, buffer->length, (uint64_t)((const uint8_t *)address - live), length);
    return true;
}

void pm_transaction_promise(pm_store *store, const pm_range *ranges, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (ranges[i].length)
            pm_region_mark(&store->region, (const uint8_t *)(uintptr_t)ranges[i].address, ranges[i].length);
}

/* True if the core was told itself, by pm_mark, that this byte changed: it knows pages. */
static bool marked(const pm_region *region, uint64_t offset, bool own_pages)
{
    return own_pages && pm_page_in(&region->watches.only, offset / PM_PAGE);
}

static bool promised(uint64_t address, const pm_range *ranges, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (address >= ranges[i].address && address - ranges[i].address < ranges[i].length) return true;
    return false;
}

/* The first run of changed bytes of an extent that nothing promised. */
static bool breaks(const pm_store *store, const pm_buffer *buffer, const pm_range *ranges, size_t count, pm_broken *out)
{
    const pm_region *region = &store->region;
    const pm_dense *dense = pm_region_dense(region, buffer->offset, buffer->length);
    const uint8_t *home = region->home + pm_region_home(region, buffer->offset, buffer->length);
    bool own_pages = buffer->offset % PM_PAGE == 0;
    if (!own_pages && buffer->only) return false;
    *out = (pm_broken){.extent = dense ? dense->slot[0] : buffer->offset};
    for (uint64_t at = 0; at < buffer->length; at++) {
        uint64_t offset = buffer->offset + at, left = buffer->length - at;
        const uint8_t *live = region->live + offset;
        if (!out->length && at % PM_PAGE == 0 && !memcmp(live, home + at, left < PM_PAGE ? left : PM_PAGE)) {
            at += PM_PAGE - 1;
            continue;
        }
        bool broken = *live != home[at] && !marked(region, offset, own_pages) &&
                      !promised((uint64_t)(uintptr_t)live, ranges, count);
        if (broken && !out->length) out->at = at;
        if (broken) out->length = at + 1 - out->at;
        else if (out->length && at >= out->at + out->length + PM_LINE) break;
    }
    return out->length;
}

void pm_transaction_unpromised(pm_store *store, const pm_range *ranges, size_t count, pm_broken *out)
{
    *out = (pm_broken){0};
    for (size_t i = 0; i < store->region.buffer_count; i++) {
        const pm_buffer *buffer = store->region.buffers[i];
        if (buffer->owned && buffer->writable && !pm_transaction_fresh(store, buffer->offset) &&
            breaks(store, buffer, ranges, count, out))
            return;
    }
    *out = (pm_broken){0};
}
