/*
 * A store's threads, and what they wait for: the system's, or, under a schedule, what the seed decides (schedule.h).
 */
#ifndef PM_THREAD_H
#define PM_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "schedule.h"

typedef struct {
    pthread_t thread;
    pm_routine *routine; /* NULL: there is no schedule */
} pm_thread;

/* A thread that takes no signals but those of its own faults. Not 0: an errno. */
int pm_thread_start(pm_thread *thread, pm_schedule *schedule, void *(*run)(void *), void *argument);
void pm_thread_join(pm_thread *thread, pm_schedule *schedule);

typedef struct {
    pthread_mutex_t mutex;
    pm_schedule *schedule;
} pm_mutex;

void pm_mutex_init(pm_mutex *mutex, pm_schedule *schedule);

static inline void pm_lock(pm_mutex *mutex)
{
    if (mutex->schedule) pm_schedule_lock(mutex->schedule, &mutex->mutex);
    else pthread_mutex_lock(&mutex->mutex);
}

static inline void pm_unlock(pm_mutex *mutex)
{
    if (mutex->schedule) pm_schedule_unlock(&mutex->mutex);
    else pthread_mutex_unlock(&mutex->mutex);
}

/* Never destroyed: in a forked child a thread seems to wait for it for ever. */
typedef struct {
    pthread_cond_t condition;
} pm_condition;

void pm_condition_init(pm_condition *condition);
void pm_wait(pm_condition *condition, pm_mutex *mutex); /* may return without a reason */
/* True: it is `until` (pm_now). */
bool pm_wait_until(pm_condition *condition, pm_mutex *mutex, uint64_t until);
void pm_wake(pm_condition *condition, pm_mutex *mutex); /* all who wait with this mutex */

uint64_t pm_now(const pm_schedule *schedule); /* nanoseconds */

/* Whether something is done that pays from `least` on. Under a schedule everything is small, and the seed decides. */
static inline bool pm_is_worth(pm_schedule *schedule, uint64_t amount, uint64_t least)
{
    return schedule ? pm_schedule_choose(schedule, 2) : amount >= least;
}

/*
 * A second thread for a piece of work that falls into parts. Who has the work does it, and the other one joins in as
 * soon as it is awake:
 *
 *   NOTHING ── pm_offer ──▶ OFFERED ── it is awake ──▶ TAKEN ── it finds no part left ──▶ NOTHING
 *                              └─── pm_withdraw: all was done before it woke ────────────────▲
 *
 * So nobody waits for it but while it is at its last part.
 */
typedef struct {
    pm_mutex mutex;
    pm_condition offered, done;
    atomic_int state;
    void (*work)(void *argument);
    void *argument;
    pm_thread thread;
    bool started, alone; /* alone: there is one processor, or no thread to be had */
    bool stop;
} pm_helper;

void pm_helper_init(pm_helper *helper, pm_schedule *schedule);
void pm_helper_stop(pm_helper *helper); /* no thread is left. Not in a fork: it has none */

/* True if there is a second thread; it is started by the first who asks. */
bool pm_can_share(pm_helper *helper);

/* From now on it may call work(argument), once. */
void pm_offer(pm_helper *helper, void (*work)(void *argument), void *argument);

/* It does not, and will not: the work has returned there, or was never begun. Also without an offer. */
void pm_withdraw(pm_helper *helper);

#endif
