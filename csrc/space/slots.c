#include "space/slots.h"

#include <stdlib.h>

#include "space/page.h"

/* ---- in process memory --------------------------------------------------------------------------------------- */

static void forget(pm_region *region, size_t i)
{
    free(region->double_buffers[i]->tail);
    free(region->double_buffers[i]);
    pm_double_buffer **at = &region->double_buffers[i];
    memmove(at, at + 1, (--region->double_buffer_count - i) * sizeof *at);
}

static unsigned bit_of(const uint64_t *current, unsigned entry)
{
    return current[entry / 64] >> entry % 64 & 1;
}

/* Notes an extent: programs see it over the slot that is current now. There may be more notes than entries of the
 * table: extents that are gone are known until the commit. */
static pm_status note(pm_region *region, const uint64_t *current, unsigned entry, const pm_slot_pair *pair, bool added)
{
    unsigned base = (unsigned)pair->base, committed = bit_of(current, entry) ^ base;
    pm_double_buffer *slots = calloc(1, sizeof *slots);
    pm_double_buffer **all = realloc(region->double_buffers, (region->double_buffer_count + 1) * sizeof *all);
    if (all) region->double_buffers = all;
    uint64_t whole = pair->length / PM_PAGE * PM_PAGE,
             tail = pm_round_up(pm_extent_size(pair->length) - whole, PM_PAGE);
    if (!slots || !all || posix_memalign((void **)&slots->tail, PM_PAGE, tail)) {
        free(slots);
        return pm_fail(PM_NO_MEMORY, "no memory for an array with two slots");
    }
    memset(slots->tail, 0, tail);
    slots->slot[0] = pair->extent, slots->slot[1] = pair->other, slots->length = pair->length;
    slots->entry = entry, slots->base = base;
    slots->added = added;
    slots->current = slots->mapped = committed;
    size_t at = region->double_buffer_count++;
    for (; at && all[at - 1]->slot[all[at - 1]->mapped] > slots->slot[committed]; at--) all[at] = all[at - 1];
    all[at] = slots;
    return PM_OK;
}

void pm_slots_finalize(pm_region *region)
{
    for (size_t i = region->double_buffer_count; i-- > 0;) {
        region->double_buffers[i]->added = false;
        if (region->double_buffers[i]->gone) forget(region, i);
    }
}

void pm_slots_restore(pm_region *region)
{
    for (size_t i = region->double_buffer_count; i-- > 0;) {
        region->double_buffers[i]->gone = false;
        if (region->double_buffers[i]->added) forget(region, i);
    }
}

/* ---- the table ------------------------------------------------------------------------------------------------ */

static pm_slot_table *table_page(pm_region *region, unsigned page, pm_status *status)
{
    const pm_root *root = pm_heap_root(region, status);
    return root && root->slots[page] ? pm_page_read(region, root->slots[page], PM_TYPE_SLOTS, status) : NULL;
}

/* Checks that the two slots are extents of contents, apart from each other (D9). */
static pm_status pair_valid(pm_region *region, const pm_slot_pair *pair)
{
    if (pair->length > PM_REGION_LIMIT || !pair->length || pair->base > 1 || pm_extent_is_small(pair->length)
        || pair->extent == pair->other)
        return pm_fail(PM_CORRUPT, "the table of slots is damaged");
    PM_TRY(pm_heap_check_extent(region, pair->extent, pair->length));
    return pm_heap_check_extent(region, pair->other, pair->length);
}

pm_status pm_slots_load(pm_region *region, const uint64_t *current)
{
    for (unsigned page = 0; page < PM_SLOT_PAGES; page++) {
        pm_status status;
        const pm_slot_table *table = table_page(region, page, &status);
        if (status != PM_OK && region->salvage) region->slots_lost = true; /* salvage goes on */
        else PM_TRY(status);
        for (unsigned i = 0; table && i < PM_SLOTS_PER_PAGE; i++) {
            unsigned entry = page * PM_SLOTS_PER_PAGE + i;
            if (!table->pairs[i].extent) continue;
            status = pair_valid(region, &table->pairs[i]);
            if (status != PM_OK && region->salvage) {
                region->slots_lost = true;
                continue;
            }
            PM_TRY(status);
            PM_TRY(note(region, current, entry, &table->pairs[i], false));
        }
    }
    return PM_OK;
}

void pm_slots_forget(pm_region *region)
{
    while (region->double_buffer_count) forget(region, region->double_buffer_count - 1);
}

/* Finds a free entry. An entry that is free now and was not at the last commit counts too. */
static pm_status free_entry(pm_region *region, unsigned *entry)
{
    for (unsigned page = 0; page < PM_SLOT_PAGES; page++) {
        pm_status status;
        const pm_slot_table *table = table_page(region, page, &status);
        PM_TRY(status);
        if (!table) {
            uint64_t offset;
            PM_TRY(pm_heap_pages(region, 1, PM_PAGE_META, &offset));
            pm_page_new(region, offset, PM_TYPE_SLOTS, 0);
            pm_root *root = pm_heap_root(region, &status);
            pm_page_edit(region, root);
            root->slots[page] = offset;
            table = table_page(region, page, &status);
        }
        for (unsigned i = 0; i < PM_SLOTS_PER_PAGE; i++) {
            if (table->pairs[i].extent) continue;
            *entry = page * PM_SLOTS_PER_PAGE + i;
            return PM_OK;
        }
    }
    return pm_fail(PM_TOO_LONG, "%d arrays have two slots: no more can", PM_SLOT_PAGES * PM_SLOTS_PER_PAGE);
}

pm_status pm_slots_add(pm_region *region, const uint64_t *current, uint64_t extent, uint64_t length)
{
    unsigned entry = 0;
    pm_status status;
    pm_slot_pair pair = {.extent = extent, .length = length};
    PM_TRY(free_entry(region, &entry));
    /* An earlier extent may have left the bit set. */
    pair.base = bit_of(current, entry);
    PM_TRY(pm_heap_alloc(region, length, &pair.other));
    status = note(region, current, entry, &pair, true);
    pm_slot_table *table = status == PM_OK ? table_page(region, entry / PM_SLOTS_PER_PAGE, &status) : NULL;
    if (!table) {
        (void)pm_heap_free(region, pair.other, length);
        return status;
    }
    pm_page_edit(region, table);
    table->pairs[entry % PM_SLOTS_PER_PAGE] = pair;
    return PM_OK;
}

pm_status pm_slots_remove(pm_region *region, pm_double_buffer *slots)
{
    pm_status status;
    pm_slot_table *table = table_page(region, slots->entry / PM_SLOTS_PER_PAGE, &status);
    PM_TRY(status);
    PM_CHECK(table && !slots->gone);
    PM_TRY(pm_heap_free(region, slots->slot[1], slots->length));
    pm_page_edit(region, table);
    table->pairs[slots->entry % PM_SLOTS_PER_PAGE] = (pm_slot_pair){0};
    slots->gone = true;
    return PM_OK;
}
