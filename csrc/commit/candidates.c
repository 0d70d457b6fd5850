#include "commit/candidates.h"

#include <stdlib.h>

#include "commit/parallel_compare.h"
#include "commit/uncommitted.h"

/* Lists edited metadata and small new extents. They are mostly few, and in no order. */
static size_t list_few(pm_store *store, pm_candidate *few)
{
    const pm_region *region = &store->region;
    size_t n = 0;
    for (size_t i = 0; i < region->edited_count; i++) {
        uint64_t page = region->edited[i];
        uint8_t flags = region->flags[page / PM_PAGE];
        if (flags & PM_FLAG_EDITED) few[n++] = (pm_candidate){.what = PM_META_PAGE, .offset = page, .length = PM_PAGE};
        else if (flags & PM_FLAG_EDITED_SLAB)
            few[n++] = (pm_candidate){.what = PM_META_SLAB, .offset = page, .length = PM_LINE};
        else few[n++] = (pm_candidate){.what = PM_META_GONE, .offset = page, .length = PM_PAGE};
    }
    for (size_t i = 0; i < store->uncommitted.count; i++) {
        const pm_uncommitted *extent = &store->uncommitted.list[i];
        uint64_t offset = extent->offset, length = extent->length;
        if (pm_extent_is_small(length))
            few[n++] = (pm_candidate){.what = PM_NEW_EXTENT, .offset = offset, .length = length, .committed = offset};
    }
    pm_gather_sort(few, n);
    return n;
}

/* Lists everything that may differ from the committed image and belongs to the new state, in ascending order. Buffers
 * are kept in that order; only the few others are sorted, and merged into them. The list's memory is kept, as large
 * memory is slow to get. */
static pm_status list_candidates(pm_store *store, bool only, pm_candidate **list, size_t *count)
{
    const pm_region *region = &store->region;
    size_t most = region->edited_count + store->uncommitted.count, next = 0, n = 0;
    size_t room = most + most + region->buffer_count + 1; /* never 0: the memory of an empty list could be NULL */
    if (room > store->candidates.room) {
        free(store->candidates.list);
        store->candidates.room = 0;
        if (!(store->candidates.list = malloc(2 * room * sizeof *store->candidates.list)))
            return pm_fail(PM_NO_MEMORY, "no memory to gather a commit");
        store->candidates.room = 2 * room;
    }
    pm_candidate *few = store->candidates.list, *all = few + most;
    size_t few_count = list_few(store, few);
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        if ((only && !buffer->only) || !pm_uncommitted_may_change(store, buffer)) continue;
        const pm_double_buffer *pair = pm_region_double_buffer(region, buffer->offset, buffer->length);
        if (pair && pair->written) continue;
        while (next < few_count && few[next].offset <= buffer->offset) all[n++] = few[next++];
        uint64_t committed = pair ? pair->slot[pair->current] : buffer->offset;
        all[n++] = (pm_candidate){.what = PM_EXTENT,
                                  .buffer = buffer,
                                  .offset = buffer->offset,
                                  .length = buffer->length,
                                  .committed = committed};
    }
    while (next < few_count) all[n++] = few[next++];
    *list = all;
    *count = n;
    return PM_OK;
}

/* True for an extent that a tracker may watch: it has pages of its own. */
static bool is_watchable(const pm_candidate *list, size_t i)
{
    return list[i].what == PM_EXTENT && list[i].offset % PM_PAGE == 0;
}

/* True if two threads compare the extent. */
static bool is_shared(pm_store *store, const pm_candidate *extent)
{
    if (extent->scan >= PM_SCAN_CHANGED) return false;
    uint64_t pages = extent->length / PM_PAGE, first = extent->offset / PM_PAGE;
    if (!pm_schedule_is_worth(store->schedule, pages, PM_SHARED_FROM)) return false;
    if (!pm_helper_can_share(&store->helper)) return false;
    if (extent->scan == PM_SCAN_ALL) return true;
    return pm_schedule_is_worth(store->schedule, pm_page_set_count(&store->region.policy.dirty, first, first + pages),
                                PM_SHARED_FROM);
}

/* For a large extent that is compared in full for the first time: a page that no program has touched may be on a bad
 * block. */
static pm_status read_once(pm_store *store, const pm_candidate *extent)
{
    PM_TRY(pm_region_comparable(&store->region, extent->offset, extent->committed, extent->length));
    extent->buffer->readable = true;
    return PM_OK;
}

/* For a large extent of which the declared pages are compared: the program need not have touched all of them. */
static pm_status read_declared(pm_store *store, const pm_candidate *extent)
{
    const pm_policy *policy = &store->region.policy;
    uint64_t first = extent->offset / PM_PAGE, end = first + pm_extent_blocks(extent->length);
    for (uint64_t page = first, last; (page = pm_policy_declared(policy, page, end)) < end; page = last) {
        last = pm_page_set_next_absent(&policy->only, page, end);
        uint64_t committed = extent->committed + (page - first) * PM_PAGE, length = (last - page) * PM_PAGE;
        PM_TRY(pm_region_comparable(&store->region, page * PM_PAGE, committed, length));
    }
    return PM_OK;
}

/* Finds, and protects, the pages that may have been written, before any of them is copied. */
static pm_status scan(pm_store *store, bool only, pm_candidate *list, size_t count)
{
    pm_policy *policy = &store->region.policy;
    for (size_t i = 0; i < count; i++) {
        if (!is_watchable(list, i)) continue;
        if (only && !list[i].buffer->only_all) list[i].scan = PM_SCAN_ONLY;
        else if (i && list[i - 1].offset == list[i].offset) list[i].scan = list[i - 1].scan;
        else list[i].scan = pm_policy_scan(policy, list[i].offset, pm_extent_blocks(list[i].length));
        if (!list[i].buffer->readable) {
            if (list[i].scan == PM_SCAN_ALL) PM_TRY(read_once(store, &list[i]));
            if (list[i].scan == PM_SCAN_ONLY) PM_TRY(read_declared(store, &list[i]));
        }
        list[i].shared = is_shared(store, &list[i]);
    }
    return PM_OK;
}

pm_status pm_candidates_find(pm_store *store, bool only, pm_candidate **list, size_t *count)
{
    PM_TRY(list_candidates(store, only, list, count));
    return scan(store, only, *list, *count);
}

void pm_candidates_committed(pm_store *store, const pm_candidate *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!is_watchable(list, i) || (i && list[i - 1].offset == list[i].offset)) continue;
        pm_policy *policy = &store->region.policy;
        if (list[i].scan == PM_SCAN_ONLY) pm_policy_committed_only(policy, list[i].offset, list[i].changed);
        else pm_policy_committed(policy, list[i].offset, pm_extent_blocks(list[i].length), list[i].changed);
    }
}
