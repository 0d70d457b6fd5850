#include "slots.h"

#include <stdlib.h>

/* ---- in process memory --------------------------------------------------------------------------------------- */

static void forget(pm_region *region, size_t i)
{
    free(region->dense[i]->tail);
    free(region->dense[i]);
    memmove(&region->dense[i], &region->dense[i + 1], (--region->dense_count - i) * sizeof *region->dense);
}

static unsigned bit_of(const uint64_t *current, unsigned entry)
{
    return current[entry / 64] >> entry % 64 & 1;
}

/* The memory that programs see lies over the slot that is current now. There may be more of them than entries of the
 * table: those that are gone are known until the commit. */
static pm_status note(pm_region *region, const uint64_t *current, unsigned entry, const pm_slot_pair *pair, bool added)
{
    unsigned base = (unsigned)pair->base, home = bit_of(current, entry) ^ base;
    pm_dense *dense = calloc(1, sizeof *dense), **all = realloc(region->dense, (region->dense_count + 1) * sizeof *all);
    if (all) region->dense = all;
    uint64_t whole = pair->length / PM_PAGE * PM_PAGE,
             tail = pm_round_up(pm_extent_size(pair->length) - whole, PM_PAGE);
    if (!dense || !all || posix_memalign((void **)&dense->tail, PM_PAGE, tail)) {
        free(dense);
        return pm_fail(PM_NO_MEMORY, "no memory for an array with two slots");
    }
    memset(dense->tail, 0, tail);
    dense->slot[0] = pair->extent, dense->slot[1] = pair->other, dense->length = pair->length;
    dense->entry = entry, dense->base = base;
    dense->added = added;
    dense->home = dense->seat = home;
    size_t at = region->dense_count++;
    for (; at && all[at - 1]->slot[all[at - 1]->seat] > dense->slot[home]; at--) all[at] = all[at - 1];
    all[at] = dense;
    return PM_OK;
}

void pm_slots_settle(pm_region *region)
{
    for (size_t i = region->dense_count; i-- > 0;) {
        region->dense[i]->added = false;
        if (region->dense[i]->gone) forget(region, i);
    }
}

void pm_slots_restore(pm_region *region)
{
    for (size_t i = region->dense_count; i-- > 0;) {
        region->dense[i]->gone = false;
        if (region->dense[i]->added) forget(region, i);
    }
}

/* ---- the table ------------------------------------------------------------------------------------------------ */

static pm_slot_table *table_page(pm_region *region, unsigned page, pm_status *status)
{
    const pm_root *root = pm_root_read(region, status);
    return root && root->slots[page] ? pm_page_read(region, root->slots[page], PM_TYPE_SLOTS, status) : NULL;
}

/* Two extents of contents, apart from each other (D9). */
static pm_status pair_sound(pm_region *region, const pm_slot_pair *pair)
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
        PM_TRY(status);
        for (unsigned i = 0; table && i < PM_SLOTS_PER_PAGE; i++) {
            unsigned entry = page * PM_SLOTS_PER_PAGE + i;
            if (!table->pairs[i].extent) continue;
            PM_TRY(pair_sound(region, &table->pairs[i]));
            PM_TRY(note(region, current, entry, &table->pairs[i], false));
        }
    }
    return PM_OK;
}

/* A free entry. One that is free now and was not at the last commit counts too. */
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
            pm_root *root = pm_root_read(region, &status);
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
    /* The bit is what an earlier extent, or none, has left. */
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

pm_status pm_slots_remove(pm_region *region, pm_dense *dense)
{
    pm_status status;
    pm_slot_table *table = table_page(region, dense->entry / PM_SLOTS_PER_PAGE, &status);
    PM_TRY(status);
    PM_CHECK(table && !dense->gone);
    PM_TRY(pm_heap_free(region, dense->slot[1], dense->length));
    pm_page_edit(region, table);
    table->pairs[dense->entry % PM_SLOTS_PER_PAGE] = (pm_slot_pair){0};
    dense->gone = true;
    return PM_OK;
}
