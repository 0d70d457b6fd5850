#include "transaction.h"

#include <stdlib.h>

#include "region_unsettled.h"

/* The log grows until it takes COMMITS_PER_LOG, so that home is written once for many commits, by LOG_STEP at most:
 * each growth makes a commit wait, but commits may turn out smaller than the first ones. Once a part of it (1 in
 * LOG_EARNED) was taken by records of this process, it grows until a checkpoint falls on less than one commit in 1000,
 * and is not in the 99.9th percentile of their times; for that to no more than 16 MiB, whose space a disk writes once
 * in some hundredths of a second (4 MiB on memory, where a checkpoint costs little). */
enum {
    COMMITS_PER_LOG = 32,
    LOG_STEP = 8,
    LOG_LARGEST = 64 << 20,
    LOG_EARNED = 8,
    LOG_RARE = 16 << 20,
    LOG_RARE_MEMORY = 4 << 20,
    COMMITS_RARE = 1500 /* those that wait for the log to grow are among the longest, too */
};
#define GROW_LEAST ((uint64_t)256 << 10)
#define GROW_MOST ((uint64_t)1 << 30)
#define SLOTS_GROWN ((uint64_t)8 << 20)

pm_status pm_failed(pm_store *store, pm_status status)
{
    PM_CHECK(status != PM_NO_SPACE); /* it tells callers that they may go on */
    store->failed |= status != PM_OK;
    return status;
}

pm_status pm_failed_unless_space(pm_store *store, pm_status status)
{
    return status == PM_NO_SPACE ? status : pm_failed(store, status);
}

pm_status pm_failed_if_io(pm_store *store, pm_status status)
{
    return status == PM_IO ? pm_failed(store, status) : status;
}

/* ---- checkpoint and growth ---------------------------------------------------------------------------------- */

/* Home durable, then a header with `next`'s layout and a new salt. */
static pm_status reset_log(pm_store *store, pm_header next)
{
    PM_TRY(pm_async_settle(store));
    if (!store->home_durable) PM_TRY(pm_home_sync(store));
    PM_TRY(pm_home_asked(store));
    PM_CHECK(store->home_durable && !store->behind.job.body); /* I3 */
    PM_CHECK(!store->async || store->log.durable == store->log.sequence);
    PM_TRY(pm_failed_unless_space(store, pm_log_reset(&store->log, next)));
    pm_async_emptied(store);
    store->commits_since_reset = 0;
    store->statistics.checkpoints++;
    return PM_OK;
}

pm_status pm_transaction_checkpoint(pm_store *store, bool clean)
{
    pm_header next = store->log.header;
    next.flags = clean ? PM_HEADER_CLEAN : 0;
    return reset_log(store, next);
}

/* On disks, a log whose blocks were written before takes a record without changes of the file's metadata. None of the
 * old log, which is needed until the new header is durable. */
static pm_status write_log_once(pm_store *store, uint64_t log_offset, uint64_t log_size)
{
    const pm_header *old = &store->log.header;
    bool file = store->media.kind == PM_MEDIA_FILE;
    uint64_t from = log_offset, to = log_offset + (file && log_size > LOG_RARE ? LOG_RARE : log_size);
    if (from < old->log_offset + old->log_size) from = old->log_offset + old->log_size;
    if (from >= to) return PM_OK;
    /* A small log soon moves, as the region grows over it, and an extent's second slot may come there: 1 MiB took 1.3
     * times the floor instead of 1.2 in what had been a log in small folios. */
    uint64_t folio = log_size < LOG_RARE ? PM_FOLIO_WHOLE : PM_FOLIO_LOG;
    if (file) return pm_failed_if_io(store, pm_media_write_zeros(&store->media, from, to, folio));
    pm_media_touch(&store->media, from, to);
    return PM_OK;
}

/* The log stands behind the region, so that both can grow: it is emptied, and begins again further back. */
static pm_status relayout(pm_store *store, uint64_t region_size, uint64_t log_size)
{
    uint64_t end = PM_REGION_START + region_size + log_size;
    if (store->max_size && end > store->max_size)
        return pm_fail(PM_NO_SPACE, "the store would grow to %llu bytes; max_size is %llu", (unsigned long long)end,
                       (unsigned long long)store->max_size);
    if (region_size > PM_REGION_LIMIT)
        return pm_fail(PM_NO_SPACE, "a store can't be larger than %llu bytes", (unsigned long long)PM_REGION_LIMIT);
    if (!pm_media_may_have(&store->media, end))
        return pm_fail(PM_NO_SPACE, "the view that the trace lends has no more room");
    PM_TRY(pm_region_keep(&store->region, region_size));
    PM_TRY(pm_async_settle(store));
    PM_TRY(pm_failed_if_io(store, store->media.operations->grow(&store->media, end)));
    pm_region_moved(&store->region);
    PM_TRY(write_log_once(store, PM_REGION_START + region_size, log_size));
    pm_header next = store->log.header;
    next.region_size = region_size;
    next.log_size = log_size;
    next.flags = 0;
    PM_TRY(reset_log(store, next));
    return region_size > store->region.size ? pm_failed(store, pm_region_extend(&store->region, region_size)) : PM_OK;
}

pm_status pm_transaction_grow(pm_store *store, uint64_t pages)
{
    uint64_t size = store->region.size, least = pages * PM_PAGE;
    if (pages > PM_REGION_LIMIT / PM_PAGE) return pm_fail(PM_NO_SPACE, "more than a store can hold");
    /* There may be enough that waits for commits to be durable (I7, I13). */
    if (store->async && store->log.durable != store->log.sequence) return pm_async_settle(store);
    /* The space map may need pages of its own: one for each 63 MiB, and a list. */
    least += (pages / PM_MAP_PAGES + 3) * PM_PAGE;
    uint64_t more = pm_round_up(size / 2, PM_PAGE);
    if (more > GROW_MOST) more = GROW_MOST;
    if (more < GROW_LEAST) more = GROW_LEAST;
    /* An extent that may get a second slot: there is room for it, and the blocks of both are written here, in large
     * pieces. The commit that makes it would wait for the file to grow, and every first write of a block for the file's
     * metadata. */
    uint64_t slots =
        store->media.kind == PM_MEDIA_FILE && least >= PM_DENSE_FROM_FILE && least <= SLOTS_GROWN ? 2 * least : least;
    if (more < slots) more = pm_round_up(slots, PM_PAGE);
    pm_status status = relayout(store, size + more, store->log.header.log_size);
    if (status == PM_OK && slots > least)
        return pm_failed_if_io(store, pm_media_write_zeros(&store->media, PM_REGION_START + size,
                                                           PM_REGION_START + size + slots, PM_FOLIO_WHOLE));
    if (status == PM_NO_SPACE && more > least && !store->failed)
        status = relayout(store, size + pm_round_up(least, PM_PAGE), store->log.header.log_size);
    return status;
}

/* The log's size for commits like those since the last checkpoint. */
static uint64_t log_wanted(const pm_store *store)
{
    uint64_t size = store->log.header.log_size, wanted = size;
    if (!store->commits_since_reset) return size;
    uint64_t each = store->log.head / store->commits_since_reset, target = each * COMMITS_PER_LOG,
             rare = each * COMMITS_RARE;
    if (target > LOG_STEP * size) target = LOG_STEP * size;
    if (target > LOG_LARGEST) target = LOG_LARGEST;
    uint64_t most = store->media.kind == PM_MEDIA_MEMORY ? LOG_RARE_MEMORY : LOG_RARE;
    if (rare > most) rare = most;
    if (rare > target && rare <= LOG_EARNED * store->logged) target = rare;
    while (wanted < target) wanted *= 2;
    return wanted;
}

/* Empties the log; makes it larger if it was full too soon, or if `body` bytes have to fit. */
static pm_status make_log_room(pm_store *store, uint64_t body)
{
    uint64_t size = store->log.header.log_size, wanted = log_wanted(store);
    uint64_t needed = body + 2 * PM_PAGE;
    while (needed <= LOG_LARGEST && wanted < needed) wanted *= 2;
    if (wanted > size) {
        pm_status status = relayout(store, store->region.size, wanted);
        /* Too little space for a larger log is no failure as long as the smaller one does. */
        if (status != PM_NO_SPACE || store->failed) return status;
    }
    return pm_transaction_checkpoint(store, false);
}

/* ---- fresh extents ------------------------------------------------------------------------------------------ */

static size_t fresh_at(const pm_store *store, uint64_t offset)
{
    size_t low = 0, high = store->fresh_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (store->fresh[middle].offset < offset) low = middle + 1;
        else high = middle;
    }
    return low;
}

pm_fresh *pm_transaction_fresh(const pm_store *store, uint64_t offset)
{
    size_t at = fresh_at(store, offset);
    return at < store->fresh_count && store->fresh[at].offset == offset ? &store->fresh[at] : NULL;
}

pm_status pm_transaction_alloc(pm_store *store, uint64_t length, uint64_t *offset)
{
    if (length > PM_REGION_LIMIT / 2)
        return pm_fail(PM_NO_SPACE, "%llu bytes are more than a store can hold", (unsigned long long)length);
    if (store->fresh_count == store->fresh_room) {
        size_t room = store->fresh_room ? 2 * store->fresh_room : 64;
        pm_fresh *fresh = realloc(store->fresh, room * sizeof *fresh);
        if (!fresh) return pm_fail(PM_NO_MEMORY, "no memory to note a new extent");
        store->fresh = fresh, store->fresh_room = room;
    }
    pm_status status;
    PM_WITH_SPACE(store, pm_extent_pages(length), status, pm_heap_alloc(&store->region, length, offset));
    PM_TRY(status);
    size_t at = fresh_at(store, *offset);
    memmove(&store->fresh[at + 1], &store->fresh[at], (store->fresh_count - at) * sizeof *store->fresh);
    store->fresh[at] = (pm_fresh){.offset = *offset, .length = length};
    store->fresh_count++;
    return PM_OK;
}

pm_status pm_transaction_free(pm_store *store, uint64_t offset, uint64_t length)
{
    /* Whether or not its space can be had back, nobody owns it any more. */
    pm_region *region = &store->region;
    pm_dense *dense = pm_region_dense_of(region, offset);
    if (dense && dense->length != length) dense = NULL; /* a damaged file: check() reports the second slot */
    uint64_t place = dense ? dense->slot[dense->seat] : offset, home = dense ? dense->slot[dense->home] : offset;
    pm_region_detach(region, place);
    if (pm_transaction_fresh(store, offset)) {
        size_t at = fresh_at(store, offset);
        free(store->fresh[at].hashes);
        memmove(&store->fresh[at], &store->fresh[at + 1], (--store->fresh_count - at) * sizeof *store->fresh);
    } else if (length <= PM_REGION_LIMIT && pm_region_holds(region, offset, pm_extent_size(length))) {
        /* Without its hashes its part of the digest stays, and so does its space: check() says so. */
        uint64_t table = home + pm_extent_table(length), size = 8 * pm_extent_blocks(length);
        PM_TRY(pm_region_readable(region, region->home, table, size, "the hashes of contents"));
        pm_extent_digest(&store->freed, region->home + table, home, length);
    }
    if (dense && !dense->gone) PM_TRY(pm_slots_remove(region, dense));
    return pm_heap_free(region, offset, length);
}

void pm_transaction_forget_fresh(pm_store *store)
{
    for (size_t i = 0; i < store->fresh_count; i++) free(store->fresh[i].hashes);
    store->fresh_count = 0;
}

/* ---- what a commit may carry --------------------------------------------------------------------------------- */

/* Edited metadata and small new extents: few, mostly, and in no order. */
static size_t list_few(pm_store *store, pm_candidate *few)
{
    const pm_region *region = &store->region;
    size_t n = 0;
    for (size_t i = 0; i < region->edited_count; i++) {
        uint8_t flags = region->flags[region->edited[i] / PM_PAGE];
        if (flags & PM_FLAG_EDITED)
            few[n++] = (pm_candidate){region->edited[i], PM_PAGE, PM_META_PAGE, NULL, 0, PM_LOOK_ALL, false, 0};
        else if (flags & PM_FLAG_EDITED_SLAB)
            few[n++] = (pm_candidate){region->edited[i], PM_LINE, PM_META_SLAB, NULL, 0, PM_LOOK_ALL, false, 0};
        else few[n++] = (pm_candidate){region->edited[i], PM_PAGE, PM_META_GONE, NULL, 0, PM_LOOK_ALL, false, 0};
    }
    for (size_t i = 0; i < store->fresh_count; i++)
        if (pm_extent_is_small(store->fresh[i].length))
            few[n++] = (pm_candidate){store->fresh[i].offset,
                                      store->fresh[i].length,
                                      PM_NEW_EXTENT,
                                      NULL,
                                      store->fresh[i].offset,
                                      PM_LOOK_ALL,
                                      false,
                                      0};
    pm_gather_sort(few, n);
    return n;
}

/* Everything that may differ from home and belongs to the new state, in ascending order. Buffers are kept in that
 * order: only the few others are sorted, and merged into them. The list's memory is kept, for a large one is slow to
 * come by. */
static pm_status list_candidates(pm_store *store, bool only, pm_candidate **list, size_t *count)
{
    const pm_region *region = &store->region;
    size_t most = region->edited_count + store->fresh_count, next = 0, n = 0;
    size_t room = most + most + region->buffer_count + 1; /* never none, whose list would be no place to point behind */
    if (room > store->list_room) {
        free(store->list);
        store->list_room = 0;
        if (!(store->list = malloc(2 * room * sizeof *store->list)))
            return pm_fail(PM_NO_MEMORY, "no memory to gather a commit");
        store->list_room = 2 * room;
    }
    pm_candidate *few = store->list, *all = few + most;
    size_t few_count = list_few(store, few);
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        if ((only && !buffer->only) || !pm_transaction_may_change(store, buffer)) continue;
        const pm_dense *dense = pm_region_dense(region, buffer->offset, buffer->length);
        if (dense && dense->written) continue;
        while (next < few_count && few[next].offset <= buffer->offset) all[n++] = few[next++];
        uint64_t home = dense ? dense->slot[dense->home] : buffer->offset;
        all[n++] = (pm_candidate){buffer->offset, buffer->length, PM_EXTENT, buffer, home, PM_LOOK_ALL, false, 0};
    }
    while (next < few_count) all[n++] = few[next++];
    *list = all;
    *count = n;
    return PM_OK;
}

/* An extent that a tracker may watch: it has pages of its own. */
static bool is_watchable(const pm_candidate *list, size_t i)
{
    return list[i].what == PM_EXTENT && list[i].offset % PM_PAGE == 0;
}

/* Whether two threads compare an extent. */
static bool is_shared(pm_store *store, const pm_candidate *extent)
{
    if (extent->look >= PM_LOOK_CHANGED) return false;
    pm_watches *watches = &store->region.watches;
    uint64_t pages = extent->length / PM_PAGE, first = extent->offset / PM_PAGE;
    if (!pm_is_worth(store->schedule, pages, PM_SHARED_FROM)) return false;
    if (!(watches->shared = pm_can_share(&store->helper))) return false;
    if (extent->look == PM_LOOK_ALL) return true;
    return pm_is_worth(store->schedule, pm_page_count(&watches->dirty, first, first + pages), PM_SHARED_FROM);
}

/* A large extent all of which is compared for the first time: a page that no program has touched may be on a bad
 * block. */
static pm_status read_once(pm_store *store, const pm_candidate *extent)
{
    PM_TRY(pm_region_comparable(&store->region, extent->offset, extent->home, extent->length));
    extent->buffer->readable = true;
    return PM_OK;
}

/* Lists, and protects, what may have been written, before any of it is copied. */
static pm_status look(pm_store *store, bool only, pm_candidate *list, size_t count)
{
    pm_watches *watches = &store->region.watches;
    for (size_t i = 0; i < count; i++) {
        if (!is_watchable(list, i)) continue;
        if (only && !list[i].buffer->only_all) list[i].look = PM_LOOK_ONLY;
        else if (i && list[i - 1].offset == list[i].offset) list[i].look = list[i - 1].look;
        else list[i].look = pm_watch_look(watches, list[i].offset, pm_extent_blocks(list[i].length));
        if (list[i].look == PM_LOOK_ALL && !list[i].buffer->readable) PM_TRY(read_once(store, &list[i]));
        list[i].shared = is_shared(store, &list[i]);
    }
    return PM_OK;
}

pm_status pm_transaction_search(pm_store *store, bool only, pm_candidate **list, size_t *count)
{
    PM_TRY(list_candidates(store, only, list, count));
    return look(store, only, *list, *count);
}

/* The commit has succeeded: what it looked at is clean. */
static void carried(pm_store *store, const pm_candidate *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!is_watchable(list, i) || (i && list[i - 1].offset == list[i].offset)) continue;
        pm_watches *watches = &store->region.watches;
        if (list[i].look == PM_LOOK_ONLY) pm_watch_carried_only(watches, list[i].offset, list[i].changed);
        else pm_watch_carried(watches, list[i].offset, pm_extent_blocks(list[i].length), list[i].changed);
    }
}

/* ---- direct writes ------------------------------------------------------------------------------------------ */

static pm_status finish_directs(pm_store *store)
{
    for (size_t i = 0; i < store->fresh_count; i++)
        if (!pm_extent_is_small(store->fresh[i].length))
            PM_TRY(pm_failed_if_io(store, pm_direct_finish(store, &store->fresh[i])));
    return PM_OK;
}

/* An extent that nobody put into the catalog belongs to a caller that was interrupted. */
static pm_status free_unowned(pm_store *store)
{
    for (size_t i = store->fresh_count; i-- > 0;)
        if (!store->fresh[i].owned) PM_TRY(pm_transaction_free(store, store->fresh[i].offset, store->fresh[i].length));
    return PM_OK;
}

static void declare_directs(pm_store *store, pm_digest *digest)
{
    for (size_t i = 0; i < store->fresh_count; i++) {
        const pm_fresh *extent = &store->fresh[i];
        if (pm_extent_is_small(extent->length)) continue;
        pm_writer_direct(&store->writer, PM_ITEM_DIRECT, extent->offset, extent->length,
                         (pm_direct){extent->table_hash, 0});
        *digest = pm_digest_plus(*digest, extent->digest);
    }
}

/* ---- commit ------------------------------------------------------------------------------------------------- */

/* What goes into a commit record besides the body. */
typedef struct {
    uint64_t spill; /* where the body stands instead; 0: in the log */
    pm_digest digest; /* of the new state (I12) */
    bool declares; /* contents that are written already */
} pending_commit;

/* How the body is gathered. */
static pm_body_how body_how(const pm_store *store, uint64_t spill)
{
    if (store->last_body > store->media.stage) return PM_BODY_LARGE;
    bool whole = spill || store->async;
    return whole ? PM_BODY_WHOLE : PM_BODY_PARTS;
}

/* One attempt: the body in the log or, if spill is not 0, in free pages there. The writer says if it overflowed. */
static pm_status gather_into(pm_store *store, pm_candidate *list, size_t count, uint64_t spill_pages,
                             pending_commit *next)
{
    uint64_t spill = next->spill;
    uint64_t place = spill ? PM_REGION_START + spill : pm_log_body(&store->log);
    uint64_t capacity = spill ? spill_pages * PM_PAGE : pm_log_room(&store->log);
    pm_writer_begin(&store->writer, place, capacity, store->log.header.salt, body_how(store, spill));
    next->digest = pm_digest_minus(store->log.digest, store->freed);
    declare_directs(store, &next->digest);
    pm_transaction_declare_slots(store, &next->digest);
    next->declares = pm_writer_length(&store->writer);
    pm_digest changed;
    PM_TRY(pm_failed_if_io(store, pm_gather(&store->region, &store->helper, &store->writer, list, count, &changed)));
    next->digest = pm_digest_plus(next->digest, changed);
    if (pm_writer_length(&store->writer) > store->writer.capacity) store->writer.overflow = true;
    return PM_OK;
}

static pm_status count_bytes(pm_store *store, pm_candidate *list, size_t count, uint64_t *bytes)
{
    pm_digest changed;
    pm_writer_count(&store->writer); /* waits for the attempt's parts, which may have failed */
    PM_TRY(pm_failed_if_io(store, pm_gather(&store->region, &store->helper, &store->writer, list, count, &changed)));
    *bytes = pm_writer_length(&store->writer) + 32 * (store->fresh_count + store->region.dense_count);
    return PM_OK;
}

/* Free pages for a body that is larger than any log. They hold it until the checkpoint that follows at once, so nothing
 * else can want them meanwhile (I9). */
static pm_status find_spill(pm_store *store, uint64_t bytes, uint64_t *offset, uint64_t *pages)
{
    pm_status status;
    /* Racing writers may change a little more before it is gathered. */
    *pages = (bytes + bytes / 16) / PM_PAGE + 16;
    PM_WITH_SPACE(store, *pages, status, pm_heap_find(&store->region, *pages, offset));
    return status;
}

/* The body of the commit in the writer, in the log or in next->spill. */
static pm_status gather_body(pm_store *store, pm_candidate *list, size_t count, pending_commit *next)
{
    uint64_t spill_pages = 0;
    next->spill = 0;
    /* Commits resemble each other: one that will not fit is better known before it is gathered. */
    if (store->last_body > pm_log_room(&store->log) && pm_gather_finds_any(&store->region, list, count))
        PM_TRY(make_log_room(store, 0));
    PM_TRY(gather_into(store, list, count, 0, next));
    for (uint64_t attempt = 0; store->writer.overflow; attempt++) {
        uint64_t bytes;
        PM_TRY(count_bytes(store, list, count, &bytes));
        bytes += bytes / 4 * attempt;
        PM_TRY(make_log_room(store, bytes));
        next->spill = 0;
        if (bytes > pm_log_room(&store->log)) PM_TRY(find_spill(store, bytes, &next->spill, &spill_pages));
        PM_TRY(gather_into(store, list, count, spill_pages, next));
    }
    return PM_OK;
}

pm_status pm_transaction_mark(pm_store *store, pm_event_kind kind, uint64_t sequence)
{
    uint64_t hash;
    if (!store->media.trace) return PM_OK;
    PM_TRY(pm_catalog_hash(&store->region, &hash));
    pm_trace_add(store->media.trace, kind, sequence, hash, NULL);
    return PM_OK;
}

/* It is committed: the next call does first what lacked space. */
static pm_status now_or_later(pm_status status)
{
    return status == PM_NO_SPACE ? PM_OK : status;
}

/* From the gathered body to the acknowledged commit. */
static pm_status write_commit(pm_store *store, const pending_commit *next)
{
    uint64_t spill = next->spill;
    pm_writer *writer = &store->writer;
    uint64_t length = pm_writer_length(writer), payload = writer->payload, place = writer->place;
    const uint8_t *body = pm_writer_body(writer);
    bool staged = body && !spill;
    if (!staged) body = store->media.view + place;
    PM_TRY(pm_transaction_mark(store, PM_EVENT_COMMIT_BEGIN, store->log.sequence + 1));
    if (spill) {
        PM_TRY(pm_failed_if_io(store, pm_writer_finish(writer)));
        uint64_t hash = writer->hash;
        pm_writer_begin(writer, pm_log_body(&store->log), pm_log_room(&store->log), store->log.header.salt,
                        PM_BODY_WHOLE);
        pm_writer_direct(writer, PM_ITEM_SPILL, spill, length, (pm_direct){hash, 0});
    }
    uint64_t before = store->log.head;
    PM_TRY(pm_failed_unless_space(store, pm_log_append(&store->log, writer, next->digest, store->async)));
    if (next->declares || spill) PM_TRY(pm_home_asked(store));
    /* Committed: from here on nothing may fail but the medium, and then the store refuses to go on. */
    store->statistics.bytes_logged += length;
    store->logged += store->log.head - before;
    store->statistics.dirty_bytes = payload;
    store->statistics.commits++;
    store->commits_since_reset++;
    store->last_body = spill ? 0 : length;
    pm_transaction_flip_slots(store);
    store->behind.spilled = spill != 0;
    if (!staged) PM_TRY(pm_failed(store, pm_media_readable(&store->media, place, length, "the log")));
    if (store->async) {
        pm_async_committed(store, before, body, length);
        return spill ? now_or_later(pm_home_catch_up(store)) : PM_OK;
    }
    store->home_torn = true; /* until it shows what is durable now */
    /* Without space it is left to the next record, which has a witness of its own. */
    PM_TRY(pm_failed(store, now_or_later(pm_log_witness(&store->log, store->log.sequence))));
    return now_or_later(pm_home_follow(store, (pm_home_job){body, length, before}, !spill));
}

static pm_status commit_list(pm_store *store, pm_candidate *list, size_t count)
{
    pending_commit next;
    bool acknowledged = false;
    PM_TRY(finish_directs(store));
    PM_TRY(gather_body(store, list, count, &next));
    if (pm_writer_length(&store->writer)) {
        if (store->log.header.flags & PM_HEADER_CLEAN || store->log.half_written) {
            /* durable: "not clean", in both copies → then: the first record. Otherwise recovery would not look for it.
             * The body is gathered again, for the salt is new. */
            PM_TRY(pm_transaction_checkpoint(store, false));
            PM_TRY(gather_body(store, list, count, &next));
        }
        PM_TRY(write_commit(store, &next));
        PM_TRY(pm_transaction_mark(store, PM_EVENT_COMMIT_END, store->log.sequence));
        acknowledged = true;
    }
    pm_transaction_learn(store, list, count);
    carried(store, list, count);
    pm_region_settle(&store->region);
    pm_slots_settle(&store->region);
    pm_transaction_forget_fresh(store);
    store->freed = (pm_digest){0};
    if (acknowledged && store->async) pm_async_acknowledged(store);
    return PM_OK;
}

pm_status pm_transaction_commit(pm_store *store, bool only)
{
    pm_candidate *list = NULL;
    size_t count = 0;
    PM_TRY(free_unowned(store));
    pm_region_begin(&store->region, !only);
    PM_TRY(pm_failed_if_io(store, pm_transaction_write_slots(store, only)));
    PM_TRY(pm_transaction_search(store, only, &list, &count));
    return commit_list(store, list, count);
}

void pm_transaction_rollback(pm_store *store)
{
    pm_region_restore(&store->region);
    pm_slots_restore(&store->region);
    pm_transaction_forget_fresh(store);
    store->freed = (pm_digest){0};
}
