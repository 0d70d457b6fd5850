/*
 * Commits that return before they are durable (D11): durability="async", on disks.
 *
 * A commit leaves its record in the page cache, which outlives the process, and its logged ranges in the overlay of the
 * committed image (space/overlay.h). A sync makes all commits up to a snapshot durable, and finalizes them:
 *
 *                    begin                 make_durable                  finish
 *   commits pending ───────▶ snapshot taken ────────────▶ durable, marker written ──▶ committed image up to date
 *        (store's mutex)                  (no mutex, or the store's)              (store's mutex)
 *
 * A thread calls the three some time after the first pending commit. A call that needs all commits durable now calls
 * them too: a checkpoint, growth, a commit that has to write a slot, pm_sync. A caller that finds a snapshot taken
 * waits for the second step, and takes the third one itself. Between the first and the third step, the log is not
 * emptied and the file does not grow.
 *
 * I3   The committed image in the file changes only in `finish`, after make_durable.
 * I14  If no durable bytes show that a commit was durable, recovery verifies what it declares. That must not have
 *      changed. So if anything was declared, the durable marker of the commit is itself durable before the committed
 *      image changes.
 * D7   If a sync fails, the store refuses to go on, and the next call reports that.
 */
#include "commit/async.h"

#include <stdlib.h>

#include "space/overlay.h"
#include "space/region_image.h"
#include "commit/failed.h"
#include "commit/readers.h"

/* Records are whole pages, and a header allows a log of 128 MiB. */
enum { RECORDS_MOST = (128 << 20) / PM_PAGE };

struct pm_async {
    uint64_t interval; /* nanoseconds */

    /* Under the store's mutex. */
    bool running;           /* a snapshot is taken and not finalized */
    /* the thread knows of the commits since the snapshot; it also knows that the log is getting full */
    bool scheduled, hurried;
    bool declared, snapshot_declared; /* a commit has declared something: since the snapshot, before it */
    uint64_t snapshot;      /* the last commit before the snapshot */
    size_t first, count, snapshot_count; /* numbers of records: finalized, in the log, before the snapshot */
    uint32_t *records;      /* places of all records of the log, in pages */

    /* Under this mutex, which is the innermost lock. */
    pm_mutex mutex;
    pm_condition changed;
    bool done;        /* make_durable of the running snapshot has ended, with this: */
    pm_status result;
    int error;
    uint64_t due;     /* when the thread must sync; 0: nothing is pending */
    bool stop;

    pm_thread thread;
    bool threaded;
};

static bool pending(const pm_store *store)
{
    return store->log.durable != store->log.sequence;
}

/* ---- the three steps ------------------------------------------------------------------------------------------ */

static void begin(pm_store *store)
{
    pm_async *async = store->async;
    PM_CHECK(!async->running);
    async->running = true;
    async->scheduled = async->hurried = false;
    async->snapshot = store->log.sequence;
    async->snapshot_count = async->count;
    async->snapshot_declared = async->declared;
    async->declared = false;
    pm_overlay_snapshot(&store->region);
    pm_thread_lock(&async->mutex);
    async->done = false;
    pm_thread_unlock(&async->mutex);
}

/* durable: all records up to the snapshot, and what they declare → then: their durable marker → then: the committed
 * image. */
static pm_status sync_snapshot(pm_store *store)
{
    pm_media *media = &store->media;
    PM_TRY(media->operations->sync(media));
    PM_TRY(pm_log_durable_marker(&store->log, store->async->snapshot));
    /* Otherwise a power cut could keep a part of the committed image and not the marker. Recovery would find that
     * declared contents have changed, and take an older commit for the last one (I14). */
    return store->async->snapshot_declared ? media->operations->sync(media) : PM_OK;
}

static void make_durable(pm_store *store)
{
    pm_async *async = store->async;
    pm_status status = sync_snapshot(store);
    pm_thread_lock(&async->mutex);
    async->result = status;
    async->error = pm_errno();
    async->done = true;
    pm_thread_wake(&async->changed, &async->mutex);
    pm_thread_unlock(&async->mutex);
}

/* Applies the logged ranges of one record to the committed image. */
static pm_status finalize_record(pm_store *store, uint64_t at)
{
    pm_log_item item;
    const uint8_t *view = store->media.view;
    const pm_record *record = (const void *)(view + store->log.header.log_offset + at);
    PM_CHECK(record->sequence <= store->async->snapshot); /* a sync has made it durable (I3, I13) */
    const uint8_t *body = (const uint8_t *)(record + 1);
    uint64_t length = record->body, cursor = 0;
    if (pm_log_next(body, length, &cursor, &item) && item.kind == PM_ITEM_OVERFLOW) {
        body = view + PM_REGION_START + item.offset, length = item.length;
        PM_TRY(pm_media_readable(&store->media, PM_REGION_START + item.offset, length, "a commit's list of changes"));
    }
    for (cursor = 0; pm_log_next(body, length, &cursor, &item);)
        if (item.kind == PM_ITEM_LOGGED)
            PM_TRY(pm_region_image_finalize(&store->region, item.offset, item.bytes, item.length,
                                       &store->statistics.bytes_home));
    return PM_OK;
}

/* Newest first: each page is written once. */
static pm_status finalize_records(pm_store *store)
{
    pm_async *async = store->async;
    PM_CHECK(async->running && async->done && async->result == PM_OK); /* I3, I14 */
    PM_CHECK(async->first < async->snapshot_count); /* a snapshot is taken only if a commit is pending */
    store->image.durable = false;
    uint64_t from = (uint64_t)async->records[async->first] * PM_PAGE, place = store->log.header.log_offset;
    PM_TRY(pm_media_readable(&store->media, place + from, store->log.head - from, "the log"));
    for (size_t i = async->snapshot_count; i-- > async->first;)
        PM_TRY(finalize_record(store, (uint64_t)async->records[i] * PM_PAGE));
    async->first = async->snapshot_count;
    pm_overlay_finalized(&store->region);
    return PM_OK;
}

/* Waits for make_durable of the running snapshot, in whichever thread it runs, and returns its status. */
static pm_status result_of_sync(pm_async *async)
{
    pm_thread_lock(&async->mutex);
    while (!async->done) pm_thread_wait(&async->changed, &async->mutex);
    pm_status status = async->result;
    errno = async->error;
    pm_thread_unlock(&async->mutex);
    return status;
}

/* PM_NO_SPACE: a copy shares the file's blocks. The snapshot stays, and the next call goes on where this one ended. */
static pm_status finish(pm_store *store)
{
    pm_async *async = store->async;
    pm_status status = result_of_sync(async);
    if (status == PM_NO_SPACE) { /* for the durable marker */
        make_durable(store);
        status = result_of_sync(async);
    }
    if (status == PM_NO_SPACE) return pm_fail_errno("cannot write to the file");
    if (status != PM_OK) pm_fail_errno("cannot sync the file"); /* another thread may have the message */
    if (status == PM_OK && store->failed) status = pm_fail(PM_FAILED, "an earlier write or sync failed");
    if (status == PM_OK) {
        if (store->media.trace) pm_trace_add(store->media.trace, PM_EVENT_DURABLE, async->snapshot, 0, NULL);
        status = finalize_records(store);
        if (status == PM_NO_SPACE) return status;
    }
    async->running = false;
    store->media.syncs += 1 + async->snapshot_declared;
    /* Not before the committed image shows them: a slot may be written again once the commit that left it is durable,
     * and no logged range of it may be waiting then (I13). */
    if (status == PM_OK) {
        store->log.durable = async->snapshot;
        pm_readers_told(store, store->log.durable);
    }
    store->failed = store->failed || status != PM_OK;
    return status;
}

/* The next call reports a failure. A lack of space is no failure: the next call takes the step again. */
static void finish_write_back(pm_store *store)
{
    pm_status status = finish(store);
    if (status != PM_OK && status != PM_NO_SPACE) store->unreported = true;
}

pm_status pm_async_sync(pm_store *store)
{
    pm_status status = pm_async_finalize(store);
    /* There is no space to bring the committed image up to date. The records, and what they declare, are durable
     * without that. */
    return status == PM_NO_SPACE ? pm_failed(store, store->media.operations->sync(&store->media)) : status;
}

pm_status pm_async_finalize(pm_store *store)
{
    pm_async *async = store->async;
    if (!async) return PM_OK;
    /* An earlier call, or the thread, has begun a sync. */
    pm_status status = async->running ? finish(store) : PM_OK;
    if (status == PM_NO_SPACE) return status;
    if (status != PM_OK)
        return pm_fail(
            PM_FAILED,
            "the sync of an earlier commit failed, so the store refuses to go on: close it and open it again");
    if (!pending(store)) return PM_OK;
    begin(store);
    make_durable(store);
    return finish(store);
}

/* ---- commits -------------------------------------------------------------------------------------------------- */

void pm_async_committed(pm_store *store, uint64_t record, const uint8_t *body, uint64_t length)
{
    pm_async *async = store->async;
    pm_region *region = &store->region;
    pm_log_item item;
    PM_CHECK(async->count < RECORDS_MOST && record % PM_PAGE == 0);
    async->records[async->count++] = (uint32_t)(record / PM_PAGE);
    for (uint64_t cursor = 0; pm_log_next(body, length, &cursor, &item);) {
        if (item.kind == PM_ITEM_LOGGED) {
            pm_overlay_logged(region, item.offset, item.bytes, item.length);
        } else {
            pm_overlay_direct(region, item.offset, pm_extent_size(item.length));
            async->declared = true;
        }
    }
}

static void schedule(pm_store *store, uint64_t due)
{
    pm_async *async = store->async;
    pm_thread_lock(&async->mutex);
    if (!async->due || due < async->due) async->due = due;
    pm_thread_wake(&async->changed, &async->mutex);
    pm_thread_unlock(&async->mutex);
}

void pm_async_acknowledged(pm_store *store)
{
    pm_async *async = store->async;
    /* a commit that was larger than the log is durable already, so there is no sync to schedule */
    if (!pending(store)) return;
    if (!async->scheduled) schedule(store, pm_thread_now(store->schedule) + async->interval);
    async->scheduled = true;
    /* A full log would make a commit wait for the whole sync. */
    if (!async->hurried && store->log.head > store->log.header.log_size / 2) {
        schedule(store, 1);
        async->hurried = true;
    }
}

void pm_async_emptied(pm_store *store)
{
    if (store->async) store->async->first = store->async->count = 0;
}

/* ---- the thread ----------------------------------------------------------------------------------------------- */

/* There was no space to bring the committed image up to date, as a copy shares the file's blocks. If there still is
 * none, the commits since the snapshot become durable all the same, and the thread tries again later. */
static void sync_again(pm_store *store)
{
    pm_async *async = store->async;
    finish_write_back(store);
    if (!async->running || store->failed) return;
    store->unreported = pm_failed(store, store->media.operations->sync(&store->media)) != PM_OK;
    schedule(store, pm_thread_now(store->schedule) + async->interval);
    async->scheduled = true;
}

static void sync_in_background(pm_store *store)
{
    pm_async *async = store->async;
    pm_thread_lock(&store->mutex);
    async->scheduled = async->hurried = false;
    if (async->running && !store->failed) sync_again(store);
    bool mine = !store->failed && !async->running && pending(store);
    if (mine) begin(store);
    pm_thread_unlock(&store->mutex);
    if (!mine) return;
    make_durable(store);
    pm_thread_lock(&store->mutex);
    /* Otherwise a call that could not wait has done it. */
    if (async->running && !store->failed) finish_write_back(store);
    pm_thread_unlock(&store->mutex);
}

static void *background(void *argument)
{
    pm_store *store = argument;
    pm_async *async = store->async;
    pm_thread_lock(&async->mutex);
    while (!async->stop) {
        if (!async->due) {
            pm_thread_wait(&async->changed, &async->mutex);
        } else if (pm_thread_now(store->schedule) < async->due) {
            pm_thread_wait_until(&async->changed, &async->mutex, async->due);
        } else {
            async->due = 0;
            pm_thread_unlock(&async->mutex);
            sync_in_background(store);
            pm_thread_lock(&async->mutex);
        }
    }
    pm_thread_unlock(&async->mutex);
    return NULL;
}

pm_status pm_async_start(pm_store *store)
{
    pm_async *async = store->async;
    if (!async || async->threaded) return PM_OK;
    async->stop = false;
    errno = pm_thread_start(&async->thread, store->schedule, background, store);
    async->threaded = !errno;
    return errno ? pm_fail_errno("cannot start the thread that syncs commits") : PM_OK;
}

pm_status pm_async_open(pm_store *store, uint64_t interval)
{
    pm_region *region = &store->region;
    pm_async *async = calloc(1, sizeof *async);
    if (async) async->records = malloc(RECORDS_MOST * sizeof *async->records);
    if (!async || !async->records) {
        free(async);
        return pm_fail(PM_NO_MEMORY, "no memory to commit asynchronously");
    }
    pm_thread_mutex_init(&async->mutex, store->schedule);
    pm_thread_condition_init(&async->changed);
    async->interval = interval;
    store->async = async;
    pm_status status = pm_overlay_open(region);
    pm_region_moved(region);
    if (status == PM_OK) status = pm_async_start(store);
    if (status != PM_OK) {
        if (region->overlay) region->committed = region->overlay->file;
        pm_overlay_close(region);
        pm_async_free(store);
        return status;
    }
    if (store->media.trace) pm_trace_add(store->media.trace, PM_EVENT_DURABLE, store->log.durable, 0, NULL);
    return PM_OK;
}

void pm_async_stop(pm_store *store)
{
    pm_async *async = store->async;
    if (!async || !async->threaded) return;
    pm_thread_lock(&async->mutex);
    async->stop = true;
    pm_thread_wake(&async->changed, &async->mutex);
    pm_thread_unlock(&async->mutex);
    pm_thread_join(&async->thread, store->schedule);
    async->threaded = false;
}

void pm_async_free(pm_store *store)
{
    if (!store->async) return;
    free(store->async->records);
    free(store->async);
    store->async = NULL;
}
