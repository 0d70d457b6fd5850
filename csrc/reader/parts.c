#include "reader/parts.h"

#include <stdlib.h>

#include "base/thread.h"
#include "reader/source.h"

enum {
    SHARED_FROM = 384, /* pages: a thread takes longer to start than to read fewer */
    TAKEN_MOST = 512   /* pages: the two threads mostly write to different huge pages, which are cleared once */
};

typedef struct {
    pm_parts_work *work;
    void *argument;
    uint64_t end;
    atomic_uint_least64_t next; /* the first page that no thread has taken */
    uint64_t from, to;          /* what the second thread failed to do; none if they are equal */
    pm_mutex mutex;
    pm_condition ended;
    enum { WAITING, WORKING, ENDED, LATE } state; /* of the second thread */
} parts;

/* Takes pages. False: there are none left. */
static bool take(parts *p, uint64_t *first, uint64_t *end)
{
    uint64_t at = p->next, count;
    do {
        if (at >= p->end) return false;
        count = (p->end - at) / 4;
        if (count > TAKEN_MOST) count = TAKEN_MOST;
        if (count < PM_PARTS_PAGES) count = PM_PARTS_PAGES;
        if (count > p->end - at) count = p->end - at;
    } while (!atomic_compare_exchange_weak(&p->next, &at, at + count));
    *first = at, *end = at + count;
    return true;
}

/* *first: the first page that was not done. */
static pm_status do_part(const parts *p, unsigned thread, uint64_t *first, uint64_t end)
{
    while (*first < end) {
        uint64_t next = *first + PM_PARTS_PAGES < end ? *first + PM_PARTS_PAGES : end;
        PM_TRY(p->work(p->argument, thread, *first, next));
        *first = next;
    }
    return PM_OK;
}

static void help(parts *p)
{
    for (uint64_t first, end; take(p, &first, &end);) {
        if (do_part(p, 1, &first, end) == PM_OK) continue;
        p->from = first, p->to = end;
        return;
    }
}

static void *second_thread(void *argument)
{
    parts *p = argument;
    pm_thread_lock(&p->mutex);
    bool late = p->state == LATE;
    if (!late) p->state = WORKING;
    pm_thread_unlock(&p->mutex);
    if (late) {
        free(p);
        return NULL;
    }
    help(p);
    pm_thread_lock(&p->mutex);
    p->state = ENDED;
    pm_thread_wake(&p->ended, &p->mutex);
    pm_thread_unlock(&p->mutex);
    return NULL;
}

/* Waits until the second thread has ended its work. False: it is late. */
static bool end_second(parts *p)
{
    pm_thread_lock(&p->mutex);
    bool late = p->state == WAITING;
    if (late) p->state = LATE;
    while (p->state == WORKING) pm_thread_wait(&p->ended, &p->mutex);
    pm_thread_unlock(&p->mutex);
    return !late;
}

/* NULL: it is not started. */
static parts *start_second(const parts *p)
{
    if (p->end - p->next < SHARED_FROM || pm_source_is_followed() || pm_thread_one_processor()) return NULL;
    parts *shared = malloc(sizeof *shared);
    if (!shared) return NULL;
    *shared = (parts){.work = p->work, .argument = p->argument, .end = p->end};
    atomic_init(&shared->next, p->next);
    pm_thread_mutex_init(&shared->mutex, NULL);
    pm_thread_condition_init(&shared->ended);
    if (pm_thread_start_alone(second_thread, shared)) return shared;
    free(shared);
    return NULL;
}

pm_status pm_parts_do(uint64_t first, uint64_t end, pm_parts_work *work, void *argument)
{
    parts alone = {.work = work, .argument = argument, .end = end};
    atomic_init(&alone.next, first);
    parts *p = start_second(&alone);
    if (!p) return do_part(&alone, 0, &first, end);
    pm_status status = PM_OK;
    while (status == PM_OK && take(p, &first, &end)) status = do_part(p, 0, &first, end);
    if (status != PM_OK) p->next = p->end; /* the second thread takes no more */
    if (!end_second(p)) return status; /* it frees p */
    first = p->from;
    if (status == PM_OK) status = do_part(p, 0, &first, p->to);
    free(p);
    return status;
}
