/*
 * Commits that return before they are durable (D11): durability="async", on disks.
 *
 * A commit leaves its record in the page cache, which outlives the process, and its runs in the image that stands in
 * home's place (region_unsettled.h). A sync makes all commits up to a snapshot durable, and settles them:
 *
 *                    begin                 make_durable                  finish
 *   commits pending ───────▶ snapshot taken ────────────▶ durable, witnessed ──────▶ home in the file is up to date
 *        (store's mutex)                  (no mutex, or the store's)              (store's mutex)
 *
 * The three are called by a thread, some time after the first pending commit; or by who needs all of it now: a
 * checkpoint, growth, a commit that has to write a slot, pm_sync. Whoever finds a snapshot taken waits for the second
 * step and takes the third one itself. Between the first and the third the log is not emptied and the file does not
 * grow.
 *
 * I3   Home in the file changes only in `finish`, after make_durable.
 * I14  What is declared, by a commit that nothing durable knows to be durable, is not changed: recovery verifies it. So
 *      the witness of a commit is itself durable before home changes, if anything was declared.
 * D7   If it fails, the store refuses to go on: the next call says so.
 */
#include <stdlib.h>

#include "region_unsettled.h"
#include "transaction.h"

/* Records are whole pages, and a header allows a log of 128 MiB. */
enum { RECORDS_MOST = (128 << 20) / PM_PAGE };

struct pm_async {
    uint64_t interval; /* nanoseconds */

    /* Under the store's mutex. */
    bool running;           /* a snapshot is taken and not settled */
    bool scheduled, hurried; /* the thread knows of the commits since the snapshot; and that the log is getting full */
    bool declared, snapshot_declared; /* a commit has declared something: since the snapshot, before it */
    uint64_t snapshot;      /* the last commit before it */
    size_t first, count, snapshot_count; /* of records: not settled, in the log, before the snapshot */
    uint32_t *records;      /* places of all records of the log, in pages */

    /* Under this mutex, which is the innermost. */
    pm_mutex mutex;
    pm_condition changed;
    bool done;        /* make_durable of the running snapshot has ended, with: */
    pm_status result;
    int error;
    uint64_t due;     /* when the thread is to sync; 0: nothing is pending */
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
    pm_unsettled_snapshot(&store->region);
    pm_lock(&async->mutex);
    async->done = false;
    pm_unlock(&async->mutex);
}

/* durable: all records up to the snapshot, and what they declare → then: their witness → then: home. */
static pm_status sync_snapshot(pm_store *store)
{
    pm_media *media = &store->media;
    PM_TRY(media->operations->sync(media));
    PM_TRY(pm_log_witness(&store->log, store->async->snapshot));
    /* Otherwise a power cut could keep a part of home and not the witness: recovery would miss what was declared there,
     * and take an older commit for the last one (I14). */
    return store->async->snapshot_declared ? media->operations->sync(media) : PM_OK;
}

static void make_durable(pm_store *store)
{
    pm_async *async = store->async;
    pm_status status = sync_snapshot(store);
    pm_lock(&async->mutex);
    async->result = status;
    async->error = pm_errno();
    async->done = true;
    pm_wake(&async->changed, &async->mutex);
    pm_unlock(&async->mutex);
}

/* The runs of one record, home. */
static pm_status settle_record(pm_store *store, uint64_t at)
{
    pm_log_item item;
    const uint8_t *view = store->media.view;
    const pm_record *record = (const void *)(view + store->log.header.log_offset + at);
    PM_CHECK(record->sequence <= store->async->snapshot); /* a sync has made it durable (I3, I13) */
    const uint8_t *body = (const uint8_t *)(record + 1);
    uint64_t length = record->body, cursor = 0;
    if (pm_log_next(body, length, &cursor, &item) && item.kind == PM_ITEM_SPILL) {
        body = view + PM_REGION_START + item.offset, length = item.length;
        PM_TRY(pm_media_readable(&store->media, PM_REGION_START + item.offset, length, "a commit's list of changes"));
    }
    for (cursor = 0; pm_log_next(body, length, &cursor, &item);)
        if (item.kind == PM_ITEM_RUN)
            PM_TRY(pm_unsettled_settle(&store->region, item.offset, item.bytes, item.length,
                                       &store->statistics.bytes_home));
    return PM_OK;
}

/* Newest first: each page is written once. */
static pm_status settle_records(pm_store *store)
{
    pm_async *async = store->async;
    PM_CHECK(async->running && async->done && async->result == PM_OK); /* I3, I14 */
    store->home_durable = false;
    uint64_t from = store->log.head, place = store->log.header.log_offset;
    if (async->first < async->snapshot_count) from = (uint64_t)async->records[async->first] * PM_PAGE;
    PM_TRY(pm_media_readable(&store->media, place + from, store->log.head - from, "the log"));
    for (size_t i = async->snapshot_count; i-- > async->first;)
        PM_TRY(settle_record(store, (uint64_t)async->records[i] * PM_PAGE));
    async->first = async->snapshot_count;
    pm_unsettled_settled(&store->region);
    return PM_OK;
}

/* What make_durable of the running snapshot came to, by whichever thread. */
static pm_status result_of_sync(pm_async *async)
{
    pm_lock(&async->mutex);
    while (!async->done) pm_wait(&async->changed, &async->mutex);
    pm_status status = async->result;
    errno = async->error;
    pm_unlock(&async->mutex);
    return status;
}

/* PM_NO_SPACE, where a copy shares the file's blocks: the snapshot goes on running, and the next call takes up where
 * this one ended. */
static pm_status finish(pm_store *store)
{
    pm_async *async = store->async;
    pm_status status = result_of_sync(async);
    if (status == PM_NO_SPACE) { /* for the witness */
        make_durable(store);
        status = result_of_sync(async);
    }
    if (status == PM_NO_SPACE) return pm_fail_errno("cannot write to the file");
    if (status != PM_OK) pm_fail_errno("cannot sync the file"); /* it may have been another thread that was told */
    if (status == PM_OK && store->failed) status = pm_fail(PM_FAILED, "an earlier write or sync failed");
    if (status == PM_OK) {
        if (store->media.trace) pm_trace_add(store->media.trace, PM_EVENT_DURABLE, async->snapshot, 0, NULL);
        status = settle_records(store);
        if (status == PM_NO_SPACE) return status;
    }
    async->running = false;
    store->media.syncs += 1 + async->snapshot_declared;
    /* Not before home shows them: a slot may be written anew when the commit that left it is durable, and no run for it
     * may be waiting then (I13). */
    if (status == PM_OK) store->log.durable = async->snapshot;
    store->failed = store->failed || status != PM_OK;
    return status;
}

/* A failure is told by the next call. A lack of space is none: the next call takes the step again. */
static void finish_behind(pm_store *store)
{
    pm_status status = finish(store);
    if (status != PM_OK && status != PM_NO_SPACE) store->untold = true;
}

pm_status pm_async_sync(pm_store *store)
{
    pm_status status = pm_async_settle(store);
    /* There is no space to bring home up to date. The records, and what they declare, are durable without that. */
    return status == PM_NO_SPACE ? pm_failed(store, store->media.operations->sync(&store->media)) : status;
}

pm_status pm_async_settle(pm_store *store)
{
    pm_async *async = store->async;
    if (!async) return PM_OK;
    /* A sync that this call did not begin. */
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
        if (item.kind == PM_ITEM_RUN) {
            pm_unsettled_run(region, item.offset, item.bytes, item.length);
        } else {
            pm_unsettled_direct(region, item.offset, pm_extent_size(item.length));
            async->declared = true;
        }
    }
}

static void schedule(pm_store *store, uint64_t due)
{
    pm_async *async = store->async;
    pm_lock(&async->mutex);
    if (!async->due || due < async->due) async->due = due;
    pm_wake(&async->changed, &async->mutex);
    pm_unlock(&async->mutex);
}

void pm_async_acknowledged(pm_store *store)
{
    pm_async *async = store->async;
    if (!pending(store)) return; /* what the log was too small for is durable already: there is no sync to wait for */
    if (!async->scheduled) schedule(store, pm_now(store->schedule) + async->interval);
    async->scheduled = true;
    /* A full log makes a commit wait for all of it. */
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

/* There was no space to bring home up to date, as a copy shares the file's blocks. If there still is none, the commits
 * since the snapshot become durable all the same, and the thread comes back. */
static void sync_again(pm_store *store)
{
    pm_async *async = store->async;
    finish_behind(store);
    if (!async->running || store->failed) return;
    store->untold = pm_failed(store, store->media.operations->sync(&store->media)) != PM_OK;
    schedule(store, pm_now(store->schedule) + async->interval);
    async->scheduled = true;
}

static void sync_in_background(pm_store *store)
{
    pm_async *async = store->async;
    pm_lock(&store->mutex);
    async->scheduled = async->hurried = false;
    if (async->running && !store->failed) sync_again(store);
    bool mine = !store->failed && !async->running && pending(store);
    if (mine) begin(store);
    pm_unlock(&store->mutex);
    if (!mine) return;
    make_durable(store);
    pm_lock(&store->mutex);
    /* Otherwise another one has, who could not wait. */
    if (async->running && !store->failed) finish_behind(store);
    pm_unlock(&store->mutex);
}

static void *background(void *argument)
{
    pm_store *store = argument;
    pm_async *async = store->async;
    pm_lock(&async->mutex);
    while (!async->stop) {
        if (!async->due) {
            pm_wait(&async->changed, &async->mutex);
        } else if (pm_now(store->schedule) < async->due) {
            pm_wait_until(&async->changed, &async->mutex, async->due);
        } else {
            async->due = 0;
            pm_unlock(&async->mutex);
            sync_in_background(store);
            pm_lock(&async->mutex);
        }
    }
    pm_unlock(&async->mutex);
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
    pm_mutex_init(&async->mutex, store->schedule);
    pm_condition_init(&async->changed);
    async->interval = interval;
    store->async = async;
    pm_status status = pm_unsettled_open(region);
    if (status == PM_OK) status = pm_async_start(store);
    if (status != PM_OK) {
        if (region->unsettled) region->home = region->unsettled->settled;
        pm_unsettled_close(region);
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
    pm_lock(&async->mutex);
    async->stop = true;
    pm_wake(&async->changed, &async->mutex);
    pm_unlock(&async->mutex);
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
