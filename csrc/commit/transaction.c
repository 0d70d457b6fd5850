#include "commit/transaction.h"

#include "space/catalog.h"
#include "space/slots.h"
#include "commit/async.h"
#include "commit/candidates.h"
#include "commit/checkpoint.h"
#include "commit/direct.h"
#include "commit/failed.h"
#include "commit/readers.h"
#include "commit/uncommitted.h"
#include "commit/write_back.h"
#include "commit/write_slots.h"

/* ---- direct writes ------------------------------------------------------------------------------------------ */

static pm_status finish_directs(pm_store *store)
{
    for (size_t i = 0; i < store->uncommitted.count; i++)
        if (!pm_extent_is_small(store->uncommitted.list[i].length))
            PM_TRY(pm_failed_if_io(store, pm_direct_finish(store, &store->uncommitted.list[i])));
    return PM_OK;
}

/* Frees extents that are not in the catalog: the caller that allocated them was interrupted. */
static pm_status free_unowned(pm_store *store)
{
    for (size_t i = store->uncommitted.count; i-- > 0;) {
        const pm_uncommitted *extent = &store->uncommitted.list[i];
        if (!extent->owned) PM_TRY(pm_uncommitted_free(store, extent->offset, extent->length));
    }
    return PM_OK;
}

static void declare_directs(pm_store *store, pm_digest *digest)
{
    for (size_t i = 0; i < store->uncommitted.count; i++) {
        const pm_uncommitted *extent = &store->uncommitted.list[i];
        if (pm_extent_is_small(extent->length)) continue;
        pm_writer_direct(&store->writer, PM_ITEM_DIRECT, extent->offset, extent->length,
                         (pm_direct){.hash = extent->table_hash});
        *digest = pm_digest_plus(*digest, extent->digest);
    }
}

/* ---- commit ------------------------------------------------------------------------------------------------- */

/* The contents of a commit record besides the body. */
typedef struct {
    uint64_t overflow; /* where the body stands in free pages; 0: it is in the log */
    pm_digest digest; /* of the new state (I12) */
    bool declares; /* it declares contents that are written already */
} pending_commit;

/* Chooses how the body is gathered. */
static pm_body_how body_how(const pm_store *store, uint64_t overflow)
{
    if (store->log_use.last_body > store->media.stage) return PM_BODY_LARGE;
    bool whole = overflow || store->async;
    return whole ? PM_BODY_WHOLE : PM_BODY_PARTS;
}

/* One attempt to gather the body, in the log or, if overflow is not 0, in free pages there. The writer notes an
 * overflow. */
static pm_status gather_into(pm_store *store, pm_candidate *list, size_t count, uint64_t overflow_pages,
                             pending_commit *next)
{
    uint64_t overflow = next->overflow;
    uint64_t place = overflow ? PM_REGION_START + overflow : pm_log_body(&store->log);
    uint64_t capacity = overflow ? overflow_pages * PM_PAGE : pm_log_room(&store->log);
    pm_writer_begin(&store->writer, place, capacity, store->log.header.salt, body_how(store, overflow));
    next->digest = pm_digest_minus(store->log.digest, store->uncommitted.freed);
    declare_directs(store, &next->digest);
    pm_write_slots_declare(store, &next->digest);
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
    pm_writer_count(&store->writer); /* waits for parts of the attempt, which may have failed */
    PM_TRY(pm_failed_if_io(store, pm_gather(&store->region, &store->helper, &store->writer, list, count, &changed)));
    *bytes = pm_writer_length(&store->writer) + 32 * (store->uncommitted.count + store->region.double_buffer_count);
    return PM_OK;
}

/* Finds free pages for a body that is larger than any log. They hold it until the checkpoint that follows at once, so
 * nothing else uses them meanwhile (I9). */
static pm_status find_overflow(pm_store *store, uint64_t bytes, uint64_t *offset, uint64_t *pages)
{
    pm_status status;
    /* Other threads may change a little more before it is gathered. */
    *pages = (bytes + bytes / 16) / PM_PAGE + 16;
    PM_WITH_SPACE(store, *pages, status, pm_heap_find(&store->region, *pages, offset));
    return status;
}

/* Gathers the body of the commit in the writer, for the log or next->overflow. */
static pm_status gather_body(pm_store *store, pm_candidate *list, size_t count, pending_commit *next)
{
    uint64_t overflow_pages = 0;
    next->overflow = 0;
    /* Commits resemble each other: a commit that will probably not fit gets its room before it is gathered. */
    if (store->log_use.last_body > pm_log_room(&store->log) && pm_gather_finds_any(&store->region, list, count))
        PM_TRY(pm_checkpoint_make_log_room(store, 0));
    PM_TRY(gather_into(store, list, count, 0, next));
    for (uint64_t attempt = 0; store->writer.overflow; attempt++) {
        uint64_t bytes;
        PM_TRY(count_bytes(store, list, count, &bytes));
        bytes += bytes / 4 * attempt;
        PM_TRY(pm_checkpoint_make_log_room(store, bytes));
        next->overflow = 0;
        if (bytes > pm_log_room(&store->log)) PM_TRY(find_overflow(store, bytes, &next->overflow, &overflow_pages));
        PM_TRY(gather_into(store, list, count, overflow_pages, next));
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

/* The commit is done. The next call first does the step that lacked space. */
static pm_status now_or_later(pm_status status)
{
    return status == PM_NO_SPACE ? PM_OK : status;
}

/* Takes the commit from the gathered body to the acknowledgement. */
static pm_status write_commit(pm_store *store, const pending_commit *next)
{
    uint64_t overflow = next->overflow;
    pm_writer *writer = &store->writer;
    uint64_t length = pm_writer_length(writer), payload = writer->payload, place = writer->place;
    const uint8_t *body = pm_writer_body(writer);
    bool staged = body && !overflow;
    if (!staged) body = store->media.view + place;
    PM_TRY(pm_transaction_mark(store, PM_EVENT_COMMIT_BEGIN, store->log.sequence + 1));
    if (overflow) {
        PM_TRY(pm_failed_if_io(store, pm_writer_finish(writer)));
        uint64_t hash = writer->hash;
        pm_writer_begin(writer, pm_log_body(&store->log), pm_log_room(&store->log), store->log.header.salt,
                        PM_BODY_WHOLE);
        pm_writer_direct(writer, PM_ITEM_OVERFLOW, overflow, length, (pm_direct){.hash = hash});
    }
    uint64_t before = store->log.head;
    PM_TRY(pm_failed_unless_space(store, pm_log_append(&store->log, writer, next->digest, store->async)));
    /* Committed: from here on only the medium may fail, and then the store refuses to go on. */
    store->statistics.bytes_logged += length;
    store->log_use.logged += store->log.head - before;
    store->statistics.dirty_bytes = payload;
    store->statistics.commits++;
    store->log_use.commits++;
    store->log_use.last_body = overflow ? 0 : length;
    pm_write_slots_flip(store);
    store->write_back.overflowed = overflow != 0;
    if (!staged) PM_TRY(pm_failed(store, pm_media_readable(&store->media, place, length, "the log")));
    if (store->async) {
        pm_async_committed(store, before, body, length);
        return overflow ? now_or_later(pm_write_back_drain(store)) : PM_OK;
    }
    store->image.outdated = true; /* until it shows the commit that is durable now */
    /* Without space, the next record writes its own durable marker. */
    pm_status marked = pm_log_durable_marker(&store->log, store->log.sequence);
    PM_TRY(pm_failed(store, now_or_later(marked)));
    if (marked == PM_OK) pm_readers_told(store, store->log.sequence);
    pm_write_back_job job = {.body = body, .length = length, .before = before};
    return now_or_later(pm_write_back_enqueue(store, job, !overflow));
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
             * The body is gathered again, as the salt is new. */
            PM_TRY(pm_checkpoint_make(store, false));
            PM_TRY(gather_body(store, list, count, &next));
        }
        PM_TRY(write_commit(store, &next));
        PM_TRY(pm_transaction_mark(store, PM_EVENT_COMMIT_END, store->log.sequence));
        acknowledged = true;
    }
    pm_write_slots_learn(store, list, count);
    pm_candidates_committed(store, list, count);
    pm_region_finalize(&store->region);
    pm_slots_finalize(&store->region);
    pm_uncommitted_forget(store);
    if (acknowledged && store->async) pm_async_acknowledged(store);
    return PM_OK;
}

pm_status pm_transaction_commit(pm_store *store, bool only)
{
    pm_candidate *list = NULL;
    size_t count = 0;
    PM_TRY(pm_writer_prepare(&store->writer));
    PM_TRY(free_unowned(store));
    pm_region_begin(&store->region, !only);
    PM_TRY(pm_failed_if_io(store, pm_write_slots(store, only)));
    PM_TRY(pm_candidates_find(store, only, &list, &count));
    return commit_list(store, list, count);
}

void pm_transaction_rollback(pm_store *store)
{
    pm_region_restore(&store->region);
    pm_slots_restore(&store->region);
    pm_uncommitted_forget(store);
}
