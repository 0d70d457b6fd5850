#define _GNU_SOURCE
#include "base/thread.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

enum { THREAD_STACK = 512 << 10 };

/* Signals are for the program's threads. Signals of this thread's own faults are not blocked: a blocked SIGBUS, of a
 * file that was cut short or can't be read, would end the process without a message from the program's handler. */
static sigset_t signals_of_others(void)
{
    static const int own[] = {SIGBUS, SIGSEGV, SIGILL, SIGFPE};
    sigset_t set;
    sigfillset(&set);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&set, own[i]);
    return set;
}

static int start(pthread_t *thread, void *(*run)(void *), void *argument)
{
    pthread_attr_t attributes;
    sigset_t others = signals_of_others(), before;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, THREAD_STACK);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    int error = pthread_create(thread, &attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

int pm_thread_start(pm_thread *thread, pm_schedule *schedule, void *(*run)(void *), void *argument)
{
    thread->routine = NULL;
    if (!schedule) return start(&thread->thread, run, argument);
    thread->routine = pm_schedule_routine_new(schedule, run, argument);
    int error = thread->routine ? start(&thread->thread, pm_schedule_routine_run, thread->routine) : ENOMEM;
    if (error && thread->routine) pm_schedule_routine_free(thread->routine);
    return error;
}

bool pm_thread_one_processor(void)
{
    cpu_set_t set;
    /* An error means that there are more processors than the set holds. */
    return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) < 2;
}

bool pm_thread_start_alone(void *(*run)(void *), void *argument)
{
    pthread_t thread;
    return !start(&thread, run, argument) && !pthread_detach(thread);
}

void pm_thread_join(pm_thread *thread, pm_schedule *schedule)
{
    while (thread->routine && !pm_schedule_routine_ended(thread->routine)) pm_schedule_go_on(schedule);
    pthread_join(thread->thread, NULL);
    if (thread->routine) pm_schedule_routine_free(thread->routine);
}

/* ---- what they wait for ------------------------------------------------------------------------------------------ */

void pm_thread_mutex_init(pm_mutex *mutex, pm_schedule *schedule)
{
    pthread_mutex_init(&mutex->mutex, NULL);
    mutex->schedule = schedule;
}

void pm_thread_condition_init(pm_condition *condition)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&condition->condition, &clock);
    pthread_condattr_destroy(&clock);
}

void pm_thread_wait(pm_condition *condition, pm_mutex *mutex)
{
    if (mutex->schedule) pm_schedule_wait(mutex->schedule, condition, &mutex->mutex, 0);
    else pthread_cond_wait(&condition->condition, &mutex->mutex);
}

void pm_thread_wait_until(pm_condition *condition, pm_mutex *mutex, uint64_t until)
{
    struct timespec time = {(time_t)(until / 1000000000), (long)(until % 1000000000)};
    if (mutex->schedule) pm_schedule_wait(mutex->schedule, condition, &mutex->mutex, until);
    else pthread_cond_timedwait(&condition->condition, &mutex->mutex, &time);
}

void pm_thread_wake(pm_condition *condition, pm_mutex *mutex)
{
    if (mutex->schedule) pm_schedule_wake(mutex->schedule, condition);
    else pthread_cond_broadcast(&condition->condition);
}

uint64_t pm_thread_now(const pm_schedule *schedule)
{
    if (schedule) return pm_schedule_now(schedule);
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}
