/*
 * Background work in an order that a seed decides, for the crash explorer.
 *
 * In production a store's threads run beside the program, and the kernel writes what was handed to it. Under a schedule
 * both happen only at points: before and after each operation on durable bytes, and when the program enters or leaves
 * the core. At a point the seed decides whether a thread goes on, which one, and whether a write that was begun is done
 * now. A thread goes on until its own next point: those, and whenever it gives back a mutex or has to wait.
 *
 *   program's thread ── point ──┬─▶ a thread of the store goes on ── its next point ──┐
 *                               ├─▶ a write that was begun is done ───────────────────┤
 *                               └─▶ nothing ──▶ the program goes on ◀─────────────────┘
 *
 * The threads are threads, and run the code that production runs; but only one of them goes on at a time, and the
 * program's thread waits meanwhile. So the same seed and the same program give the same order. thread.h has what is
 * built on this: mutexes, conditions and threads, which are the system's where there is no schedule.
 */
#ifndef PM_SCHEDULE_H
#define PM_SCHEDULE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct pm_schedule pm_schedule;

/* pace: in 256, how likely something goes on at a point; 0: only what is waited for. NULL: no memory. */
pm_schedule *pm_schedule_new(uint64_t seed, unsigned pace);
void pm_schedule_free(pm_schedule *schedule); /* no thread and no work of it is left */

void pm_schedule_point(pm_schedule *schedule); /* NULL: nothing happens */

/* Something goes on, because the caller waits for it. */
void pm_schedule_go_on(pm_schedule *schedule);

/* A number below `below`. */
uint64_t pm_schedule_choose(pm_schedule *schedule, uint64_t below);

/* Time as the store's threads know it, in nanoseconds: it passes when they have waited for it. */
uint64_t pm_schedule_now(const pm_schedule *schedule);

/* Work that is done without a thread: do_one() does some of it and returns true; false: there is none. */
typedef struct pm_scheduled_work {
    bool (*do_one)(void *argument);
    void *argument;
    struct pm_scheduled_work *next;
} pm_scheduled_work;

void pm_schedule_add(pm_schedule *schedule, pm_scheduled_work *work);
void pm_schedule_remove(pm_schedule *schedule, pm_scheduled_work *work);

/* ---- for thread.c
 * ------------------------------------------------------------------------------------------------- */

typedef struct pm_routine pm_routine; /* a thread under a schedule */

pm_routine *pm_routine_new(pm_schedule *schedule, void *(*run)(void *), void *argument);
void *pm_routine_run(void *routine);       /* what its thread is to run */
void pm_routine_free(pm_routine *routine); /* its thread has ended, or was never begun */
bool pm_routine_ended(const pm_routine *routine);

/* Others go on until the mutex is free. */
void pm_schedule_lock(pm_schedule *schedule, pthread_mutex_t *mutex);
void pm_schedule_unlock(pthread_mutex_t *mutex); /* for one of the store's threads this is a point */

/* Without the mutex, until pm_schedule_wake of the same place, or until `until` if that is not 0: true if it was that.
 * May also return without a reason. */
bool pm_schedule_wait(pm_schedule *schedule, const void *place, pthread_mutex_t *mutex, uint64_t until);
void pm_schedule_wake(pm_schedule *schedule, const void *place);

#endif
