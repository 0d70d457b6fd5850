/*
 * Home behind the log (D13).
 *
 * When a record is durable, home is brought up to date with it (I3). For a small record the commit does it. A large one
 * costs about as much again as its log, so the commit may return, and the job is put up:
 *
 *   commit ── record durable ── job put up ──▶ the program goes on
 *                                  ├── the thread takes it, and does it beside the program; whoever enters the store
 *                                  │   meanwhile waits
 *                                  └── whoever enters the store first takes it, and does it before anything else
 *
 * So whoever has entered finds home as the last commit left it (I2), and nothing else has to know of this. Only
 * pm_holds enters without: it looks at buffers, which no job touches, and reads nothing of home. What programs see does
 * not change: what a record carries is private memory.
 *
 * I1   The record is durable before the job is put up: killed before it is done, recovery replays the log.
 * D7   If it fails, the next call says so; the log has everything.
 * D8   If it lacks space, because a copy shares the file's blocks, the job stays put up. Each call tries again before
 *      anything else, and is refused as long as there is no space.
 */
#include "transaction.h"

/* A thread takes some 20 us to wake. To bring 384 KiB home takes less on memory, but the commit that wakes it does not
 * wait: 1 % of 50 MB in rows, 0.6 MB, takes 265 us instead of 285, and one right behind another as long as before. */
enum { STREAM_HOME_FROM = 4 << 20, WAIT_FROM_MEMORY = 384 << 10, WAIT_FROM_FILE = 256 << 10 };

/* What spreads over less is not worth beginning early: it is soon written again, and a checkpoint has no more than this
 * to wait for. */
enum { SPREAD_LEAST = 1 << 20 };

typedef struct {
    uint64_t from, length;
} file_range;

/* ---- home ------------------------------------------------------------------------------------------------------- */

/* durable: home → then: a header that empties the log. Without this fence a crash finds neither the records nor what
 * they had changed (I3). */
pm_status pm_home_sync(pm_store *store)
{
    pm_home_flush(&store->region);
    PM_TRY(pm_failed_unless_space(store, store->media.operations->fence(&store->media)));
    store->home_durable = true;
    store->home_from = store->home_to = 0;
    return PM_OK;
}

static pm_status apply(pm_store *store, const uint8_t *body, uint64_t length)
{
    pm_log_item item;
    store->home_durable = false;
    /* On disks home is lazy: what is streamed would be waited for by the next record. */
    bool stream = store->media.kind == PM_MEDIA_MEMORY && pm_is_worth(store->schedule, length, STREAM_HOME_FROM);
    pm_write_how how = stream ? PM_WRITE_STREAM : PM_WRITE_CACHED;
    for (uint64_t cursor = 0; pm_log_next(body, length, &cursor, &item);) {
        if (item.kind != PM_ITEM_RUN) continue;
        /* The body comes in order, which the processor sees by itself; where the next run goes it can't: one line
         * brings its translation. */
        if (cursor < length) __builtin_prefetch(store->region.home + pm_log_place(body, cursor));
        PM_TRY(pm_home_write(&store->region, item.offset, item.bytes, item.length, how));
        uint64_t from = PM_REGION_START + item.offset, to = from + item.length;
        if (!store->home_to || from < store->home_from) store->home_from = from;
        if (to > store->home_to) store->home_to = to;
        store->statistics.bytes_home += item.length;
    }
    return PM_OK;
}

/* Does the job, or leaves it where it is for want of space: the log has all of it. After any other failure the caller
 * has the store refuse to go on. */
static pm_status take_home(pm_store *store)
{
    pm_home_job job = store->behind.job;
    PM_CHECK(!store->async && store->log.durable == store->log.sequence); /* the record that it is of is durable (I3) */
    pm_status status = apply(store, job.body, job.length);
    store->behind.stuck = status == PM_NO_SPACE;
    if (store->behind.stuck) return status;
    store->behind.job.body = NULL;
    PM_TRY(status);
    store->home_torn = false;
    /* The next commit like this one has to write the header twice: home is waited for here. */
    return store->last_body > pm_log_room(&store->log) ? pm_home_sync(store) : PM_OK;
}

/* ---- on its way to the disk, so that a checkpoint has less to wait for
 * ---------------------------------------------- */

/* Whether it is begun before the checkpoint. */
static bool is_spread(const pm_store *store)
{
    uint64_t bytes = store->home_to - store->home_from;
    return bytes && pm_is_worth(store->schedule, bytes, SPREAD_LEAST);
}

/* The first bytes of what was written home and not asked to be written back, in the file. */
static file_range part_of_home(pm_store *store, uint64_t most)
{
    file_range part = {store->home_from, store->home_to - store->home_from};
    if (part.length > most) part.length = most;
    store->home_from += part.length;
    if (store->home_from == store->home_to) store->home_from = store->home_to = 0;
    return part;
}

static pm_status begin_write_back(pm_store *store, file_range part)
{
    return part.length ? store->media.operations->write_back(&store->media, part.from, part.length) : PM_OK;
}

/* Without the store's mutex: home is whole, and this changes nothing. */
static pm_status ask_for_write_back(pm_store *store, file_range part)
{
    pm_behind *behind = &store->behind;
    behind->is_asking = true;
    pm_unlock(&store->mutex);
    pm_status status = begin_write_back(store, part);
    pm_lock(&behind->asking);
    behind->is_asking = false;
    behind->refused |= status != PM_OK;
    pm_wake(&behind->asked, &behind->asking);
    pm_unlock(&behind->asking);
    pm_lock(&store->mutex);
    return status;
}

/* The kernel tells only once of a page that it could not write (D7), and may have told the thread. So whoever takes
 * such pages for durable asks here first: a checkpoint takes all of home, a commit takes what it has written straight
 * to its place, which may lie between pages of home. */
pm_status pm_home_asked(pm_store *store)
{
    pm_behind *behind = &store->behind;
    if (!behind->threaded) return PM_OK;
    pm_lock(&behind->asking);
    while (behind->is_asking) pm_wait(&behind->asked, &behind->asking);
    bool refused = behind->refused;
    pm_unlock(&behind->asking);
    return refused ? pm_failed(store, pm_fail(PM_IO, "a part of the file could not be written back")) : PM_OK;
}

/* Behind a small record: all of it, whenever the log has grown by so much. */
static pm_status begin_now_and_then(pm_store *store, uint64_t before)
{
    /* Pages far apart are a request each: asked for often, they are never so many that a commit waits behind them. No
     * more of them than a disk's queue takes: beyond, asking for it waits for the disk too. */
    enum { PART = 128 << 10, MOST = 1 << 20 };
    if (!is_spread(store) || before / PART == store->log.head / PART || store->log.head - before > MOST) return PM_OK;
    return begin_write_back(store, part_of_home(store, UINT64_MAX));
}

/* Behind a large one: a part, once the log is getting full. Until then it waits for the program to leave the disk alone
 * for a while. */
static file_range part_behind_large(pm_store *store)
{
    enum { PARTS = 4, PART_LEAST = 4 << 20 };
    if (!is_spread(store) || store->log.head <= store->log.header.log_size / 8 * 5) return (file_range){0, 0};
    uint64_t part = (store->home_to - store->home_from) / PARTS / PM_PAGE * PM_PAGE;
    return part_of_home(store, part < PART_LEAST ? PART_LEAST : part);
}

pm_status pm_home_catch_up(pm_store *store)
{
    while (store->behind.busy) pm_wait(&store->behind.done, &store->mutex);
    pm_behind *behind = &store->behind;
    if ((!behind->job.body && !behind->spilled) || store->failed) return PM_OK;
    uint64_t before = behind->job.before;
    pm_status status = behind->job.body ? take_home(store) : PM_OK;
    if (status == PM_OK)
        status = behind->spilled ? pm_transaction_checkpoint(store, false) : begin_now_and_then(store, before);
    if (status == PM_OK) behind->spilled = false;
    if (status != PM_NO_SPACE) return pm_failed(store, status);
    return pm_fail(PM_NO_SPACE,
                   "the last commit is safe in the log, but there is no space to bring the file up to date "
                   "with it, as a copy shares its blocks: free some space");
}

/* ---- the thread ------------------------------------------------------------------------------------------------- */

/* Until something is put up, or the store has been left alone for a while with much of home not on its way to the disk.
 * True: the latter. */
static bool wait_for_work(pm_store *store)
{
    enum { A_WHILE = 2000000 /* ns */ };
    pm_behind *behind = &store->behind;
    if (store->media.kind == PM_MEDIA_MEMORY || !is_spread(store)) {
        pm_wait(&behind->put_up, &store->mutex);
        return false;
    }
    uint64_t sequence = store->log.sequence, until = pm_now(store->schedule) + A_WHILE;
    return pm_wait_until(&behind->put_up, &store->mutex, until) && store->log.sequence == sequence;
}

/* Home is its own meanwhile, without the mutex. */
static pm_status take_home_alone(pm_store *store)
{
    store->behind.busy = true;
    pm_unlock(&store->mutex);
    pm_status status = take_home(store);
    /* What it streamed is ordered by a fence of its own: none of another thread's would. */
    if (status == PM_OK && store->media.kind == PM_MEDIA_MEMORY) status = store->media.operations->fence(&store->media);
    pm_lock(&store->mutex);
    store->behind.busy = false;
    pm_wake(&store->behind.done, &store->mutex);
    return status;
}

static void *keep_up(void *argument)
{
    pm_store *store = argument;
    pm_behind *behind = &store->behind;
    pm_lock(&store->mutex);
    while (!behind->stop && !store->failed) {
        file_range part = {0, 0};
        pm_status status = PM_OK;
        if (behind->job.body && !behind->stuck) {
            status = take_home_alone(store);
            part = part_behind_large(store);
        } else if (wait_for_work(store)) {
            part = part_of_home(store, UINT64_MAX);
        }
        if (status == PM_OK && part.length) status = ask_for_write_back(store, part);
        if (status != PM_NO_SPACE && pm_failed(store, status) != PM_OK) store->untold = true;
    }
    pm_unlock(&store->mutex);
    return NULL;
}

/* Whether this job is left for later. The thread is started when the first one is: most stores never have a commit that
 * large. */
static bool waits(pm_store *store, const pm_home_job *job)
{
    pm_behind *behind = &store->behind;
    uint64_t least = store->media.kind == PM_MEDIA_MEMORY ? WAIT_FROM_MEMORY : WAIT_FROM_FILE;
    if (!pm_is_worth(store->schedule, job->length, least) || behind->alone) return false;
    if (!behind->threaded) {
        behind->threaded = !pm_thread_start(&behind->thread, store->schedule, keep_up, store);
        behind->alone = !behind->threaded;
    }
    return behind->threaded;
}

pm_status pm_home_follow(pm_store *store, pm_home_job job, bool may_wait)
{
    store->behind.job = job;
    if (!may_wait || !waits(store, &job)) return pm_home_catch_up(store);
    pm_wake(&store->behind.put_up, &store->mutex);
    return PM_OK;
}

void pm_home_open(pm_store *store)
{
    pm_condition_init(&store->behind.put_up);
    pm_condition_init(&store->behind.done);
    pm_mutex_init(&store->behind.asking, store->schedule);
    pm_condition_init(&store->behind.asked);
}

void pm_home_stop(pm_store *store)
{
    pm_lock(&store->mutex);
    bool threaded = store->behind.threaded;
    store->behind.alone = true; /* none is started from here on, and no job is left for this one */
    store->behind.threaded = false;
    store->behind.stop = true;
    pm_wake(&store->behind.put_up, &store->mutex);
    pm_unlock(&store->mutex);
    if (threaded) pm_thread_join(&store->behind.thread, store->schedule);
}
