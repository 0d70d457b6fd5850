#define _GNU_SOURCE
#include "region_unsettled.h"

#include <stdlib.h>

#include "hash.h"
#include "region_fork.h"

/* ---- metadata ----------------------------------------------------------------------------------------------- */

static uint64_t page_hash(const pm_region *region, const uint8_t *page, uint64_t offset, uint32_t type)
{
    return pm_seal(pm_hash64(page + 8, pm_page_bytes(type) - 8, 0), offset, region->store_id);
}

void pm_page_seal(const pm_region *region, void *page)
{
    pm_page_head *head = page;
    head->hash = page_hash(region, page, head->self, head->type);
}

bool pm_page_sound(const pm_region *region, const uint8_t *image, uint64_t offset, uint32_t type)
{
    if (!pm_region_holds(region, offset, PM_PAGE) && offset) return false;
    if (offset % PM_PAGE) return false;
    pm_page_head head;
    memcpy(&head, image + offset, sizeof head);
    return head.type == type && head.self == offset && head.hash == page_hash(region, image + offset, offset, type);
}

uint64_t pm_page_term(const uint8_t *image, uint64_t offset)
{
    pm_page_head head;
    memcpy(&head, image + offset, sizeof head);
    return pm_digest_term(offset, head.hash);
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
        /* What is checked now is what is used later (D9). */
        if ((*status = pm_region_make_private(region, offset, PM_PAGE, "a page of metadata")) != PM_OK) return NULL;
        if (!pm_page_sound(region, region->live, offset, type)) {
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

/* Can't fail: a change of metadata that stopped half-way for want of memory could not be taken back. */
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
    /* It stands in the list of edited pages: a rollback must bring its committed bytes back, and a commit takes its
     * term out of the digest. */
    list_edited(region, offset);
    region->flags[offset / PM_PAGE] &= (uint8_t)~(PM_FLAG_VERIFIED | PM_FLAG_EDITED | PM_FLAG_EDITED_SLAB);
}

void pm_region_take(pm_region *region, uint64_t offset, uint64_t length)
{
    for (uint64_t page = offset / PM_PAGE; page < (offset + length) / PM_PAGE; page++) {
        if (!(region->flags[page] & PM_FLAG_LISTED)) continue;
        size_t i = 0;
        while (region->edited[i] != page * PM_PAGE) i++;
        region->edited[i] = region->edited[--region->edited_count];
        region->flags[page] &= (uint8_t)~(PM_FLAG_LISTED | PM_FLAG_VERIFIED | PM_FLAG_EDITED | PM_FLAG_EDITED_SLAB);
    }
    pm_watch_forget(&region->watches, offset, length);
    pm_region_drop(region, offset, length);
}

/* ---- contents ----------------------------------------------------------------------------------------------- */

uint64_t pm_block_hash(const pm_region *region, const void *block, size_t length, uint64_t offset)
{
    return pm_seal(pm_hash64(block, length, 0), offset, region->store_id);
}

uint64_t pm_table_hash(const pm_region *region, const void *table, uint64_t bytes, uint64_t offset)
{
    return pm_seal(pm_hash64(table, bytes, 0), offset, region->store_id);
}

void pm_extent_digest(pm_digest *digest, const uint8_t *table, uint64_t offset, uint64_t length)
{
    for (uint64_t block = 0; block < pm_extent_blocks(length); block++) {
        uint64_t hash;
        memcpy(&hash, table + 8 * block, sizeof hash);
        pm_digest_add(digest, offset + block * PM_PAGE, pm_digest_term(offset + block * PM_PAGE, hash));
    }
}

/* ---- extents with two slots ----------------------------------------------------------------------------------- */

static pm_dense *seated(const pm_region *region, uint64_t place)
{
    size_t low = 0, high = region->dense_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        pm_dense *dense = region->dense[middle];
        if (dense->slot[dense->seat] == place) return dense;
        if (dense->slot[dense->seat] < place) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

pm_dense *pm_region_find_dense(const pm_region *region, uint64_t place, uint64_t length)
{
    pm_dense *dense = seated(region, place);
    return dense && dense->length == length ? dense : NULL;
}

pm_dense *pm_region_find_dense_of(const pm_region *region, uint64_t extent)
{
    pm_dense *dense = seated(region, extent);
    if (dense && !dense->seat) return dense;
    for (size_t i = 0; i < region->dense_count; i++)
        if (region->dense[i]->slot[0] == extent) return region->dense[i];
    return NULL;
}

/* ---- buffers ------------------------------------------------------------------------------------------------ */

/* The first buffer that begins at `offset` or behind it. */
static size_t first_from(const pm_region *region, uint64_t offset)
{
    size_t low = 0, high = region->buffer_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (region->buffers[middle]->offset < offset) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The first buffer that could reach beyond `offset`. */
static size_t first_near(const pm_region *region, uint64_t offset)
{
    return first_from(region, offset > region->longest_buffer ? offset - region->longest_buffer : 0);
}

/* Frees released buffers that are no candidates. */
static void sweep(pm_region *region)
{
    size_t kept = 0;
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        bool candidate = buffer->writable && (buffer->owned || buffer->owned_at_commit);
        if (atomic_load(&buffer->living) || candidate || pm_fork_may_show(region, buffer))
            region->buffers[kept++] = buffer;
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
        /* Twice the room unless the sweep made enough of it: each buffer is looked at a few times at most. */
        if (region->buffer_count >= region->buffer_room / 2) PM_TRY(more_room_for_buffers(region));
    }
    if (buffer->length > region->longest_buffer) region->longest_buffer = buffer->length;
    size_t at = region->buffer_count++;
    for (; at && region->buffers[at - 1]->offset > buffer->offset; at--) region->buffers[at] = region->buffers[at - 1];
    region->buffers[at] = buffer;
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
        /* One that is owned, now or at the last commit, stands on space that is not free anyway. */
        if (buffer_end <= offset || buffer->owned || buffer->owned_at_commit || buffer_end <= end) continue;
        if (atomic_load(&buffer->living) || pm_fork_may_show(region, buffer)) end = buffer_end;
    }
    return end;
}

void pm_region_detach(pm_region *region, uint64_t offset)
{
    for (size_t i = first_from(region, offset); i < region->buffer_count && region->buffers[i]->offset == offset; i++)
        region->buffers[i]->owned = false;
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
            pm_watch_promise(&region->watches, offset / PM_PAGE, (end + PM_PAGE - 1) / PM_PAGE);
    }
}

void pm_region_begin(pm_region *region, bool all)
{
    /* I10: one that is not looked at may have been written before it was released. */
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
                pm_watch_drop_promise(&region->watches, first, first + pm_extent_blocks(buffer->length));
            buffer->only = buffer->only_all = false;
        }
        /* One that was released meanwhile may have been written behind our back: it stays a candidate (I10). */
        if (atomic_load(&buffer->living) || !buffer->done || buffer->last_fork) region->buffers[kept++] = buffer;
        else free(buffer);
    }
    region->buffer_count = kept;
    pm_watch_dropped(&region->watches);
    region->search_from = 0;
}

void pm_region_settle(pm_region *region)
{
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        buffer->owned_at_commit = buffer->owned;
        buffer->committed |= buffer->owned;
    }
    finish_transaction(region);
}

/* Pages that are equal need not become private. */
static void copy_home(pm_region *region, uint64_t offset, uint64_t home, uint64_t length)
{
    for (uint64_t at = 0; at < length; at += PM_PAGE) {
        size_t bytes = length - at < PM_PAGE ? length - at : PM_PAGE;
        if (memcmp(region->live + offset + at, region->home + home + at, bytes))
            memcpy(region->live + offset + at, region->home + home + at, bytes);
    }
}

/* Whole pages, which are dropped; or copied, where the file is not what was committed (I13). end: of the contents. */
static void restore_pages(pm_region *region, uint64_t page, uint64_t last, uint64_t end)
{
    while (page < last) {
        uint64_t stop = pm_unsettled_next(region, page, last);
        if (page < stop) pm_region_drop(region, page * PM_PAGE, (stop - page) * PM_PAGE);
        for (page = stop; page < last && pm_is_unsettled(region, page * PM_PAGE); page++)
            copy_home(region, page * PM_PAGE, page * PM_PAGE,
                      end - page * PM_PAGE < PM_PAGE ? end - page * PM_PAGE : PM_PAGE);
    }
}

/* The pages that were written, where it is known which. Each is protected before it is dropped: a store that comes
 * between is found by the next commit. */
static bool restore_watched(pm_region *region, uint64_t offset, uint64_t length)
{
    uint64_t pages = pm_extent_blocks(length), end = offset / PM_PAGE + pages;
    const pm_page_set *dirty = &region->watches.dirty;
    if (!pm_watch_restore(&region->watches, offset, pages)) return false;
    for (uint64_t page = pm_page_next(dirty, offset / PM_PAGE, end); page < end;
         page = pm_page_next(dirty, page, end)) {
        uint64_t first = page;
        while (page < end && pm_page_in(dirty, page)) page++;
        restore_pages(region, first, page, offset + length);
    }
    return true;
}

/* Takes the committed bytes of an extent back into the memory that programs see. */
static void restore_extent(pm_region *region, uint64_t offset, uint64_t length)
{
    uint64_t home = pm_region_home(region, offset, length);
    bool watched = home == offset && offset % PM_PAGE == 0 && restore_watched(region, offset, length);
    pm_watch_restored(&region->watches, offset, pm_extent_blocks(length));
    if (watched) return;
    /* An extent that begins on a page has its pages to itself; a smaller one shares its page with other blocks. */
    if (offset % PM_PAGE == 0 && home == offset) {
        restore_pages(region, offset / PM_PAGE, offset / PM_PAGE + pm_extent_blocks(length), offset + length);
        return;
    }
    copy_home(region, offset, home, length);
}

void pm_region_restore(pm_region *region)
{
    pm_region_begin(region, true);
    for (size_t i = 0; i < region->edited_count; i++) {
        uint64_t offset = region->edited[i];
        const pm_page_head *home = (const void *)(region->home + offset);
        /* A slab's header shares its page with blocks, also with blocks of detached arrays, which keep their bytes. */
        const pm_page_head *live = (const void *)(region->live + offset);
        bool slab = live->type == PM_TYPE_SLAB && live->self == offset;
        bool was_slab = home->type == PM_TYPE_SLAB && home->self == offset;
        memcpy(region->live + offset, home, slab || was_slab ? PM_LINE : PM_PAGE);
        /* What is there now may be free space: it is checked again when it is next read as metadata. */
        region->flags[offset / PM_PAGE] &= (uint8_t)~PM_FLAG_VERIFIED;
    }
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        buffer->owned = buffer->owned_at_commit;
        if (buffer->owned && buffer->writable) restore_extent(region, buffer->offset, buffer->length);
    }
    finish_transaction(region);
}

/* ---- home --------------------------------------------------------------------------------------------------- */

/* In the file; where commits are not settled, the image shows it. */
static pm_status write_home(pm_region *region, uint64_t offset, const void *source, uint64_t length, pm_write_how how)
{
    PM_TRY(pm_media_write(region->media, PM_REGION_START + offset, source, length, how));
    if (region->unsettled) pm_unsettled_show(region, offset, length);
    return PM_OK;
}

pm_status pm_home_write(pm_region *region, uint64_t offset, const void *source, uint64_t length, pm_write_how how)
{
    enum { FLUSH_MOST = 64 };
    PM_CHECK(offset + length <= region->size);
    if (!length) return PM_OK;
    if (region->media->kind == PM_MEDIA_MEMORY && how == PM_WRITE_CACHED) {
        uint64_t first = offset / PM_PAGE, last = (offset + length - 1) / PM_PAGE;
        /* A few pages that are written again and again stay in the cache until the checkpoint. Were they many, it would
         * be a long one: flushing what no longer fits the cache takes ten times as long as streaming it. */
        if (region->flush_count >= FLUSH_MOST && !(region->flags[first] & region->flags[last] & PM_FLAG_FLUSH))
            return write_home(region, offset, source, length, PM_WRITE_STREAM);
        for (uint64_t page = first; page <= last; page++) {
            if (!(region->flags[page] & PM_FLAG_FLUSH)) region->flush[region->flush_count++] = page;
            region->flags[page] |= PM_FLAG_FLUSH;
        }
    }
    return write_home(region, offset, source, length, how);
}

pm_status pm_home_write_hashed(pm_region *region, uint64_t offset, const uint8_t *source, uint64_t pages,
                               uint64_t *hashes, uint64_t folio)
{
    PM_CHECK(offset + pages * PM_PAGE <= region->size);
    PM_TRY(pm_media_write_hashed(region->media, PM_REGION_START + offset, source, pages, hashes, folio));
    if (region->unsettled) pm_unsettled_show(region, offset, pages * PM_PAGE);
    for (uint64_t page = 0; page < pages; page++)
        hashes[page] = pm_seal(hashes[page], offset + page * PM_PAGE, region->store_id);
    return PM_OK;
}

void pm_home_flush(pm_region *region)
{
    for (size_t i = 0; i < region->flush_count; i++) {
        uint64_t page = region->flush[i];
        region->media->operations->flush(region->media, PM_REGION_START + page * PM_PAGE, PM_PAGE);
        region->flags[page] &= (uint8_t)~PM_FLAG_FLUSH;
    }
    region->flush_count = 0;
}
