/*
 * Background work in an order that a seed decides, for the crash explorer.
 *
 * In production a store's threads run beside the program, and the kernel writes at any time what was handed to it.
 * Under a schedule, both happen only at points: before and after each operation on durable bytes, and when the program
 * enters or leaves the core. At each point the seed decides whether a thread runs, which one, and whether a write that
 * was begun is done. The thread then runs until its own next point; giving back a mutex and waiting are points, too.
 *
 *   program's thread ── point ──┬─▶ a thread of the store runs ── its next point ───┐
 *                               ├─▶ a write that was begun is done ─────────────────┤
 *                               └─▶ nothing ──▶ the program goes on ◀───────────────┘
 *
 * The threads are real threads and run production code, but only one of them runs at a time, and the program's thread
 * waits meanwhile. So the same seed and the same program give the same order. thread.h builds mutexes, conditions and
 * threads on this; without a schedule they are the system's.
 */
#ifndef PM_SCHEDULE_H
#define PM_SCHEDULE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct pm_schedule pm_schedule;

/* pace: how likely, in 256, something runs at a point. 0: only what is waited for. NULL: no memory. */
pm_schedule *pm_schedule_new(uint64_t seed, unsigned pace);
void pm_schedule_free(pm_schedule *schedule); /* no thread and no work of it may be left */

void pm_schedule_point(pm_schedule *schedule); /* NULL: nothing happens */

/* Runs something, because the caller waits for it. */
void pm_schedule_go_on(pm_schedule *schedule);

/* The number of the thread that calls: for each of a store's another one, from 1 on, and 0 for the program's. */
uint16_t pm_schedule_thread(void);

/* A number below `below`. */
uint64_t pm_schedule_choose(pm_schedule *schedule, uint64_t below);

/* The time of the store's threads, in nanoseconds: it passes when they have waited for it. */
uint64_t pm_schedule_now(const pm_schedule *schedule);

/* Work without a thread: do_one() does a part of it and returns true, or false if there is none. */
typedef struct pm_scheduled_work {
    bool (*do_one)(void *argument);
    void *argument;
    struct pm_scheduled_work *next;
} pm_scheduled_work;

void pm_schedule_add(pm_schedule *schedule, pm_scheduled_work *work);
void pm_schedule_remove(pm_schedule *schedule, pm_scheduled_work *work);

/* ---- for base/thread.c ------------------------------------------------------------------------------------------- */

typedef struct pm_routine pm_routine; /* a thread under a schedule */

pm_routine *pm_schedule_routine_new(pm_schedule *schedule, void *(*run)(void *), void *argument);
void *pm_schedule_routine_run(void *routine);       /* the function that its thread must run */
void pm_schedule_routine_free(pm_routine *routine); /* its thread has ended, or was never begun */
bool pm_schedule_routine_ended(const pm_routine *routine);

/* Runs other threads until the mutex is free. */
void pm_schedule_lock(pm_schedule *schedule, pthread_mutex_t *mutex);
void pm_schedule_unlock(pthread_mutex_t *mutex); /* a point, for one of the store's threads */

/* Waits without the mutex until pm_schedule_wake of the same place, or until `until` if that is not 0. May also return
 * without a reason. */
void pm_schedule_wait(pm_schedule *schedule, const void *place, pthread_mutex_t *mutex, uint64_t until);
void pm_schedule_wake(pm_schedule *schedule, const void *place);

/* True if something is done that pays from `least` on. Under a schedule all amounts are small, and the seed decides. */
static inline bool pm_schedule_is_worth(pm_schedule *schedule, uint64_t amount, uint64_t least)
{
    return schedule ? pm_schedule_choose(schedule, 2) : amount >= least;
}

#endif
