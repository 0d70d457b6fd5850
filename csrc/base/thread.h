/*
 * A store's threads, mutexes and conditions. They are the system's; or, under a schedule, the seed decides
 * (schedule.h).
 */
#ifndef PM_THREAD_H
#define PM_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/schedule.h"

typedef struct {
    pthread_t thread;
    pm_routine *routine; /* NULL: there is no schedule */
} pm_thread;

/* Starts a thread that takes no signals except those of its own faults. Returns 0 or an errno. */
int pm_thread_start(pm_thread *thread, pm_schedule *schedule, void *(*run)(void *), void *argument);
void pm_thread_join(pm_thread *thread, pm_schedule *schedule);

/* The same for a thread that no schedule knows, and that nobody joins. False: it was not started. */
bool pm_thread_start_alone(void *(*run)(void *), void *argument);

bool pm_thread_one_processor(void); /* this process may use only one */

typedef struct {
    pthread_mutex_t mutex;
    pm_schedule *schedule;
} pm_mutex;

void pm_thread_mutex_init(pm_mutex *mutex, pm_schedule *schedule);

static inline void pm_thread_lock(pm_mutex *mutex)
{
    if (mutex->schedule) pm_schedule_lock(mutex->schedule, &mutex->mutex);
    else pthread_mutex_lock(&mutex->mutex);
}

static inline void pm_thread_unlock(pm_mutex *mutex)
{
    if (mutex->schedule) pm_schedule_unlock(&mutex->mutex);
    else pthread_mutex_unlock(&mutex->mutex);
}

/* Never destroyed: in a forked child, a thread of the parent would seem to wait for it for ever. */
typedef struct {
    pthread_cond_t condition;
} pm_condition;

void pm_thread_condition_init(pm_condition *condition);
void pm_thread_wait(pm_condition *condition, pm_mutex *mutex); /* may return without a reason */
/* The same, until the time is `until` (pm_thread_now) at the latest. */
void pm_thread_wait_until(pm_condition *condition, pm_mutex *mutex, uint64_t until);
void pm_thread_wake(pm_condition *condition, pm_mutex *mutex); /* all threads that wait with this mutex */

uint64_t pm_thread_now(const pm_schedule *schedule); /* nanoseconds */

#endif
