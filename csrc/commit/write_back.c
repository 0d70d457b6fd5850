/*
 * The deferred write-back (D13).
 *
 * When a record is durable, the committed image is brought up to date with it (I3). For a small record the commit does
 * it. A large one costs about as much again as its log, so the commit may return, and a job is enqueued:
 *
 *   commit ── record durable ── job enqueued ──▶ the program goes on
 *                                  ├── the thread takes the job, and does it beside the program; a call that enters the
 *                                  │   store meanwhile waits
 *                                  └── or a call that enters the store first takes the job, and does it before anything
 *                                      else
 *
 * So every call finds the committed image as the last commit left it (I2), and no other code has to know of the job.
 * Only pm_holds does not wait: it looks at buffers, which no job touches, and does not read the committed image. What
 * programs see does not change, as it is private memory.
 *
 * I1   The record is durable before the job is enqueued. If the process is killed before the job is done, recovery
 *      replays the log.
 * D7   If the job fails, the next call reports that. The log has everything.
 * D8   If the job lacks space, because a copy shares the file's blocks, it stays enqueued. Each call tries again first,
 *      and is refused as long as there is no space.
 */
#include "commit/write_back.h"

#include "commit/checkpoint.h"
#include "commit/failed.h"
#include "commit/image.h"

/* The least bytes for which the commit does not wait: for fewer, waking the thread costs about as much as the job. */
enum { WAIT_FROM_MEMORY = 384 << 10, WAIT_FROM_FILE = 256 << 10 };

/* Does the job. If it lacks space, it stays enqueued: the log has all of it. After any other failure, the caller makes
 * the store refuse to go on. */
static pm_status run_job(pm_store *store)
{
    pm_write_back_job job = store->write_back.job;
    PM_CHECK(!store->async && store->log.durable == store->log.sequence); /* its record is durable (I3) */
    pm_status status = pm_image_apply(store, job.body, job.length);
    store->write_back.stuck = status == PM_NO_SPACE;
    if (store->write_back.stuck) return status;
    store->write_back.job.body = NULL;
    PM_TRY(status);
    store->image.outdated = false;
    /* The next commit like this one has to write the header twice, so the committed image is synced here. */
    return store->log_use.last_body > pm_log_room(&store->log) ? pm_image_sync(store) : PM_OK;
}

pm_status pm_write_back_drain(pm_store *store)
{
    while (store->write_back.busy) pm_thread_wait(&store->write_back.done, &store->mutex);
    pm_write_back *write_back = &store->write_back;
    if ((!write_back->job.body && !write_back->overflowed) || store->failed) return PM_OK;
    uint64_t before = write_back->job.before;
    pm_status status = write_back->job.body ? run_job(store) : PM_OK;
    if (status == PM_OK)
        status = write_back->overflowed ? pm_checkpoint_make(store, false) : pm_image_begin_write_back(store, before);
    if (status == PM_OK) write_back->overflowed = false;
    if (status != PM_NO_SPACE) return pm_failed(store, status);
    return pm_fail(PM_NO_SPACE,
                   "the last commit is safe in the log, but there is no space to bring the file up to date "
                   "with it, as a copy shares its blocks: free some space");
}

/* ---- the thread ------------------------------------------------------------------------------------------------- */

/* The thread does the job without the mutex. Meanwhile only it uses the committed image. */
static pm_status run_job_alone(pm_store *store)
{
    store->write_back.busy = true;
    pm_thread_unlock(&store->mutex);
    pm_status status = run_job(store);
    pm_media_memory_hand_over(&store->media);
    pm_thread_lock(&store->mutex);
    pm_image_forget_range(store); /* the kernel writes back so much by itself */
    store->write_back.busy = false;
    pm_thread_wake(&store->write_back.done, &store->mutex);
    return status;
}

static void *write_back_thread(void *argument)
{
    pm_store *store = argument;
    pm_write_back *write_back = &store->write_back;
    pm_thread_lock(&store->mutex);
    while (!write_back->stop && !store->failed) {
        if (!write_back->job.body || write_back->stuck) {
            pm_thread_wait(&write_back->enqueued, &store->mutex);
            continue;
        }
        pm_status status = run_job_alone(store);
        if (status != PM_NO_SPACE && pm_failed(store, status) != PM_OK) store->unreported = true;
    }
    pm_thread_unlock(&store->mutex);
    return NULL;
}

/* True if the thread does this job. The thread is started for the first such job, as most stores have no commit that is
 * so large. */
static bool waits(pm_store *store, const pm_write_back_job *job)
{
    pm_write_back *write_back = &store->write_back;
    uint64_t least = store->media.byte_addressable ? WAIT_FROM_MEMORY : WAIT_FROM_FILE;
    if (!pm_schedule_is_worth(store->schedule, job->length, least) || write_back->alone) return false;
    if (!write_back->threaded) {
        write_back->threaded = !pm_thread_start(&write_back->thread, store->schedule, write_back_thread, store);
        write_back->alone = !write_back->threaded;
    }
    return write_back->threaded;
}

pm_status pm_write_back_enqueue(pm_store *store, pm_write_back_job job, bool may_wait)
{
    store->write_back.job = job;
    if (!may_wait || !waits(store, &job)) return pm_write_back_drain(store);
    pm_thread_wake(&store->write_back.enqueued, &store->mutex);
    return PM_OK;
}

void pm_write_back_open(pm_store *store)
{
    pm_thread_condition_init(&store->write_back.enqueued);
    pm_thread_condition_init(&store->write_back.done);
}

void pm_write_back_stop(pm_store *store)
{
    pm_thread_lock(&store->mutex);
    bool threaded = store->write_back.threaded;
    store->write_back.alone = true; /* no thread is started from here on, and no job is left to this one */
    store->write_back.threaded = false;
    store->write_back.stop = true;
    pm_thread_wake(&store->write_back.enqueued, &store->mutex);
    pm_thread_unlock(&store->mutex);
    if (threaded) pm_thread_join(&store->write_back.thread, store->schedule);
}
