#include "space/region.h"

#include <stdlib.h>

#include "base/search.h"
#include "space/overlay.h"
#include "space/region_fork.h"

void pm_region_take(pm_region *region, uint64_t offset, uint64_t length)
{
    for (uint64_t page = offset / PM_PAGE; page < (offset + length) / PM_PAGE; page++) {
        if (!(region->flags[page] & PM_FLAG_LISTED)) continue;
        size_t i = 0;
        while (region->edited[i] != page * PM_PAGE) i++;
        region->edited[i] = region->edited[--region->edited_count];
        region->flags[page] &= PM_FLAG_FLUSH; /* the others are those of metadata */
    }
    pm_policy_forget(&region->policy, offset, length);
    pm_region_drop(region, offset, length);
}

/* ---- extents with two slots ----------------------------------------------------------------------------------- */

static uint64_t mapped_place(const pm_double_buffer *pair)
{
    return pair->slot[pair->mapped];
}

pm_double_buffer *pm_region_find_double_buffer(const pm_region *region, uint64_t place, uint64_t length)
{
    size_t at = PM_FIRST(i, region->double_buffer_count, mapped_place(region->double_buffers[i]) >= place);
    if (at == region->double_buffer_count) return NULL;
    pm_double_buffer *pair = region->double_buffers[at];
    return mapped_place(pair) == place && pair->length == length ? pair : NULL;
}

pm_double_buffer *pm_region_find_double_buffer_of(const pm_region *region, uint64_t extent)
{
    for (size_t i = 0; i < region->double_buffer_count; i++)
        if (region->double_buffers[i]->slot[0] == extent) return region->double_buffers[i];
    return NULL;
}

/* ---- buffers ------------------------------------------------------------------------------------------------ */

/* The first buffer that begins at `offset` or behind it. */
static size_t first_from(const pm_region *region, uint64_t offset)
{
    return PM_FIRST(i, region->buffer_count, region->buffers[i]->offset >= offset);
}

/* The first buffer that could reach beyond `offset`. */
static size_t first_near(const pm_region *region, uint64_t offset)
{
    return PM_FIRST(i, region->buffer_count, region->buffers[i]->reach > offset);
}

/* The furthest end of the buffers up to number `at`, if the one before it knows its own. */
static uint64_t reach_at(const pm_region *region, size_t at)
{
    uint64_t end = region->buffers[at]->offset + region->buffers[at]->length;
    return at && region->buffers[at - 1]->reach > end ? region->buffers[at - 1]->reach : end;
}

/* Keeps a buffer, behind `*kept` others. */
static void keep(pm_region *region, pm_buffer *buffer, size_t *kept)
{
    region->buffers[*kept] = buffer;
    buffer->reach = reach_at(region, *kept);
    ++*kept;
}

/* Frees released buffers that are no candidates. The end of the transaction drops what a buffer has declared. */
static void sweep(pm_region *region)
{
    size_t kept = 0;
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        bool candidate = buffer->writable && (buffer->owned || buffer->owned_at_commit || buffer->only);
        if (atomic_load(&buffer->living) || candidate || pm_region_fork_may_show(region, buffer))
            keep(region, buffer, &kept);
        else free(buffer);
    }
    region->buffer_count = kept;
}

static pm_status more_room_for_buffers(pm_region *region)
{
    size_t room = region->buffer_room ? 2 * region->buffer_room : 64;
    pm_buffer **buffers = realloc(region->buffers, room * sizeof *buffers);
    if (!buffers) return pm_fail(PM_NO_MEMORY, "no memory for a buffer");
    region->buffers = buffers, region->buffer_room = room;
    return PM_OK;
}

pm_status pm_region_add_buffer(pm_region *region, pm_buffer *buffer)
{
    PM_TRY(pm_region_prepare(region, buffer));
    if (region->buffer_count == region->buffer_room) {
        sweep(region);
        /* Doubles the room unless the sweep made enough of it: so each buffer is looked at a few times at most. */
        if (region->buffer_count >= region->buffer_room / 2) PM_TRY(more_room_for_buffers(region));
    }
    size_t at = region->buffer_count++;
    for (; at && region->buffers[at - 1]->offset > buffer->offset; at--) region->buffers[at] = region->buffers[at - 1];
    region->buffers[at] = buffer;
    for (buffer->reach = 0; at < region->buffer_count; at++) {
        uint64_t reach = reach_at(region, at);
        if (region->buffers[at]->reach >= reach) break;
        region->buffers[at]->reach = reach;
    }
    return PM_OK;
}

pm_buffer *pm_region_revive_buffer(pm_region *region, uint64_t offset, uint64_t length, bool writable)
{
    for (size_t i = first_from(region, offset); i < region->buffer_count && region->buffers[i]->offset == offset; i++) {
        pm_buffer *buffer = region->buffers[i];
        if (atomic_load(&buffer->living) || !buffer->owned || buffer->length != length || buffer->writable != writable)
            continue;
        atomic_store(&buffer->living, 1);
        return buffer;
    }
    return NULL;
}

uint64_t pm_region_covered(const pm_region *region, uint64_t offset, uint64_t length)
{
    uint64_t end = 0;
    for (size_t i = first_near(region, offset); i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        if (buffer->offset >= offset + length) break;
        uint64_t buffer_end = buffer->offset + buffer->length;
        if (buffer_end <= offset || buffer_end <= end) continue;
        if (atomic_load(&buffer->living) || pm_region_fork_may_show(region, buffer)) end = buffer_end;
    }
    return end;
}

void pm_region_detach(pm_region *region, uint64_t offset)
{
    for (size_t i = first_from(region, offset); i < region->buffer_count && region->buffers[i]->offset == offset; i++)
        region->buffers[i]->owned = false;
}

pm_status pm_region_leave_to_readers(pm_region *region, pm_store *store, uint64_t offset, uint64_t length,
                                     uint64_t sequence)
{
    bool covered = false;
    for (size_t i = first_from(region, offset); i < region->buffer_count && region->buffers[i]->offset == offset; i++) {
        region->buffers[i]->shared = true, region->buffers[i]->shown_until = sequence;
        covered |= region->buffers[i]->length >= length; /* a part may be all that a reader of an earlier one mapped */
    }
    if (covered) return PM_OK;
    pm_buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer) return pm_fail(PM_NO_MEMORY, "no memory for a buffer");
    *buffer = (pm_buffer){.store = store, .address = region->live + offset, .offset = offset, .length = length,
                          .shared = true, .shown_until = sequence};
    pm_status status = pm_region_add_buffer(region, buffer);
    if (status != PM_OK) free(buffer);
    return status;
}

pm_status pm_region_find_users(pm_region *region, pm_store *store)
{
    pm_region_fork_find_children(region);
    uint64_t pages = region->size / PM_PAGE;
    for (uint64_t page = 0, stop; pm_region_fork_mapped(region, &page, &stop) && page < pages; page = stop) {
        if (stop > pages) stop = pages;
        PM_TRY(pm_region_leave_to_readers(region, store, page * PM_PAGE, (stop - page) * PM_PAGE, 0));
    }
    return PM_OK;
}

/* The owned buffer from number *i on that has all of a range. */
static pm_buffer *owner(const pm_region *region, const uint8_t *address, uint64_t length, size_t *i)
{
    uint64_t offset = (uint64_t)(address - region->live);
    if (address < region->live || offset >= region->size || length > region->size - offset) return NULL;
    if (!*i) *i = first_near(region, offset);
    for (; *i < region->buffer_count && region->buffers[*i]->offset <= offset; ++*i) {
        pm_buffer *buffer = region->buffers[*i];
        if (buffer->owned && offset + length <= buffer->offset + buffer->length) return buffer;
    }
    return NULL;
}

const pm_buffer *pm_region_owner(const pm_region *region, const void *address, uint64_t length)
{
    size_t i = 0;
    return owner(region, address, length, &i);
}

void pm_region_mark(pm_region *region, const void *address, uint64_t length)
{
    uint64_t offset = (uint64_t)((const uint8_t *)address - region->live), end = offset + length;
    size_t i = 0;
    for (pm_buffer *buffer; (buffer = owner(region, address, length, &i)); i++) {
        if (!buffer->writable) continue;
        buffer->only = true;
        buffer->only_all |= offset == buffer->offset && end == buffer->offset + buffer->length;
        if (buffer->offset % PM_PAGE == 0)
            pm_policy_declare(&region->policy, offset / PM_PAGE, (end + PM_PAGE - 1) / PM_PAGE);
    }
}

pm_status pm_region_mark_dirty(pm_region *region, const void *address, uint64_t length, int *out)
{
    uint64_t offset = (uint64_t)((const uint8_t *)address - region->live), end = offset + length;
    size_t i = 0;
    *out = 0;
    for (pm_buffer *buffer; (buffer = owner(region, address, length, &i)); i++) {
        if (!*out) *out = 1;
        if (!buffer->writable) continue;
        *out = 2;
        if (buffer->offset % PM_PAGE) continue; /* it shares its page with others, and is always compared in full */
        uint64_t committed = pm_region_committed(region, buffer->offset, buffer->length) + (offset - buffer->offset);
        /* The program need not have touched the pages, and the next commit reads them. */
        if (!buffer->readable) PM_TRY(pm_region_comparable(region, offset, committed, length));
        PM_TRY(pm_policy_mark_dirty(&region->policy, buffer->offset, pm_extent_blocks(buffer->length), offset / PM_PAGE,
                                    (end + PM_PAGE - 1) / PM_PAGE));
    }
    return PM_OK;
}

void pm_region_begin(pm_region *region, bool all)
{
    /* I10: a buffer that is not scanned may have been written before it was released. */
    for (size_t i = 0; i < region->buffer_count; i++)
        region->buffers[i]->done = !atomic_load(&region->buffers[i]->living) && (all || !region->buffers[i]->owned);
}

static void finish_transaction(pm_region *region)
{
    for (size_t i = 0; i < region->edited_count; i++)
        region->flags[region->edited[i] / PM_PAGE] &= (uint8_t)~(PM_FLAG_LISTED | PM_FLAG_EDITED | PM_FLAG_EDITED_SLAB);
    region->edited_count = 0;
    size_t kept = 0;
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        if (buffer->only) {
            uint64_t first = buffer->offset / PM_PAGE;
            if (buffer->offset % PM_PAGE == 0)
                pm_policy_drop(&region->policy, first, first + pm_extent_blocks(buffer->length));
            buffer->only = buffer->only_all = false;
        }
        /* A buffer that was released meanwhile may have been written before that, so it stays a candidate (I10). */
        if (atomic_load(&buffer->living) || !buffer->done || buffer->last_fork || buffer->shared)
            keep(region, buffer, &kept);
        else free(buffer);
    }
    region->buffer_count = kept;
    pm_policy_dropped(&region->policy);
    region->search_from = 0;
}

void pm_region_finalize(pm_region *region)
{
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        buffer->owned_at_commit = buffer->owned;
        buffer->committed |= buffer->owned;
    }
    finish_transaction(region);
}

/* Copies only pages that differ, as equal pages need not become private. */
static void copy_committed(pm_region *region, uint64_t offset, uint64_t committed, uint64_t length)
{
    for (uint64_t at = 0; at < length; at += PM_PAGE) {
        size_t bytes = length - at < PM_PAGE ? length - at : PM_PAGE;
        if (memcmp(region->live + offset + at, region->committed + committed + at, bytes))
            memcpy(region->live + offset + at, region->committed + committed + at, bytes);
    }
}

/* Restores whole pages. They are dropped; or copied, where the file does not have the committed bytes (I13). */
static void restore_pages(pm_region *region, uint64_t page, uint64_t last)
{
    while (page < last) {
        uint64_t stop = pm_overlay_next(region, page, last);
        if (page < stop) pm_region_drop(region, page * PM_PAGE, (stop - page) * PM_PAGE);
        for (page = stop; page < last && pm_overlay_covers(region, page * PM_PAGE); page++)
            copy_committed(region, page * PM_PAGE, page * PM_PAGE, PM_PAGE);
    }
}

/* Restores the written pages, if they are known. Each is protected before it is dropped, so that the next commit finds
 * a store that comes between. */
static bool restore_armed(pm_region *region, uint64_t offset, uint64_t length)
{
    uint64_t pages = pm_extent_blocks(length), end = offset / PM_PAGE + pages;
    const pm_page_set *dirty = &region->policy.dirty;
    if (!pm_policy_restore(&region->policy, offset, pages)) return false;
    for (uint64_t page = pm_page_set_next(dirty, offset / PM_PAGE, end); page < end;
         page = pm_page_set_next(dirty, page, end)) {
        uint64_t first = page;
        page = pm_page_set_next_absent(dirty, page, end);
        restore_pages(region, first, page);
    }
    return true;
}

/* Restores the committed bytes of an extent in the memory that programs see. */
static void restore_extent(pm_region *region, uint64_t offset, uint64_t length)
{
    uint64_t committed = pm_region_committed(region, offset, length);
    bool armed = committed == offset && restore_armed(region, offset, length);
    pm_policy_restored(&region->policy, offset, pm_extent_blocks(length));
    if (armed) return;
    /* An extent that begins on a page has its pages to itself; a smaller one shares its page with other blocks. */
    if (offset % PM_PAGE == 0 && committed == offset) {
        restore_pages(region, offset / PM_PAGE, offset / PM_PAGE + pm_extent_blocks(length));
        return;
    }
    copy_committed(region, offset, committed, length);
}

void pm_region_restore(pm_region *region)
{
    pm_region_begin(region, true);
    for (size_t i = 0; i < region->edited_count; i++) {
        uint64_t offset = region->edited[i];
        /* A slab's header shares its page with blocks, also with blocks of detached arrays, which keep their bytes. A
         * slab that was freed still has its header: nothing gets a page that the committed image uses. */
        const pm_page_head *live = (const void *)(region->live + offset);
        bool slab = live->type == PM_TYPE_SLAB && live->self == offset;
        memcpy(region->live + offset, region->committed + offset, slab ? PM_LINE : PM_PAGE);
        /* The page may be free space now: it is checked again when it is next read as metadata. */
        region->flags[offset / PM_PAGE] &= (uint8_t)~PM_FLAG_VERIFIED;
    }
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        buffer->owned = buffer->owned_at_commit;
        if (buffer->owned && buffer->writable) restore_extent(region, buffer->offset, buffer->length);
    }
    finish_transaction(region);
}
