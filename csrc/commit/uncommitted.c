#include "commit/uncommitted.h"

#include <stdlib.h>

#include "base/search.h"
#include "space/extent.h"
#include "space/slots.h"
#include "commit/checkpoint.h"

static size_t first_from(const pm_uncommitted_list *all, uint64_t offset)
{
    return PM_FIRST(i, all->count, all->list[i].offset >= offset);
}

pm_uncommitted *pm_uncommitted_find(const pm_store *store, uint64_t offset)
{
    const pm_uncommitted_list *all = &store->uncommitted;
    size_t at = first_from(all, offset);
    return at < all->count && all->list[at].offset == offset ? &all->list[at] : NULL;
}

pm_status pm_uncommitted_alloc(pm_store *store, uint64_t length, uint64_t *offset)
{
    if (length > PM_REGION_LIMIT / 2)
        return pm_fail(PM_NO_SPACE, "%llu bytes are more than a store can hold", (unsigned long long)length);
    pm_uncommitted_list *all = &store->uncommitted;
    if (all->count == all->room) {
        size_t room = all->room ? 2 * all->room : 64;
        pm_uncommitted *list = realloc(all->list, room * sizeof *list);
        if (!list) return pm_fail(PM_NO_MEMORY, "no memory to note a new extent");
        all->list = list, all->room = room;
    }
    pm_status status;
    PM_WITH_SPACE(store, pm_extent_pages(length), status, pm_heap_alloc(&store->region, length, offset));
    PM_TRY(status);
    size_t at = first_from(all, *offset);
    memmove(&all->list[at + 1], &all->list[at], (all->count - at) * sizeof *all->list);
    all->list[at] = (pm_uncommitted){.offset = *offset, .length = length};
    all->count++;
    return PM_OK;
}

pm_status pm_uncommitted_free(pm_store *store, uint64_t offset, uint64_t length)
{
    /* Even if its space can't be had back, the extent has no owner any more. */
    pm_region *region = &store->region;
    pm_uncommitted_list *all = &store->uncommitted;
    pm_double_buffer *pair = pm_region_double_buffer_of(region, offset);
    if (pair && pair->length != length) pair = NULL; /* a damaged file: check() reports the second slot */
    uint64_t place = pair ? pair->slot[pair->mapped] : offset,
             committed = pair ? pair->slot[pair->current] : offset;
    pm_region_detach(region, place);
    if (pm_uncommitted_find(store, offset)) {
        size_t at = first_from(all, offset);
        free(all->list[at].hashes);
        memmove(&all->list[at], &all->list[at + 1], (--all->count - at) * sizeof *all->list);
    } else if (length <= PM_REGION_LIMIT && pm_region_holds(region, offset, pm_extent_size(length))) {
        /* If its hashes can't be read, its contributions stay in the digest, and its space stays taken: check() reports
         * that. */
        uint64_t table = committed + pm_extent_table(length), size = 8 * pm_extent_blocks(length);
        PM_TRY(pm_region_readable(region, region->committed, table, size, "the hashes of contents"));
        pm_extent_digest(&all->freed, region->committed + table, committed, length);
    }
    if (pair && !pair->gone) PM_TRY(pm_slots_remove(region, pair));
    return pm_heap_free(region, offset, length);
}

void pm_uncommitted_forget(pm_store *store)
{
    for (size_t i = 0; i < store->uncommitted.count; i++) free(store->uncommitted.list[i].hashes);
    store->uncommitted.count = 0;
    store->uncommitted.freed = (pm_digest){0};
}
