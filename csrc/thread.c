#define _GNU_SOURCE
#include "thread.h"

#include <sched.h>
#include <signal.h>

enum { THREAD_STACK = 512 << 10 };

/* Signals are for the threads of the program. But not those of what this thread does itself: where they are blocked, a file that was cut short, or
 * can't be read, ends the process without a word from whoever handles them. */
static sigset_t signals_of_others(void)
{
    static const int own[] = {SIGBUS, SIGSEGV, SIGILL, SIGFPE};
    sigset_t set;
    sigfillset(&set);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&set, own[i]);
    return set;
}

int pm_thread_start(pthread_t *thread, void *(*run)(void *), void *argument)
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

/* ---- a helper ----------------------------------------------------------------------------------------------------- */

enum { NOTHING, OFFERED, TAKEN };

static bool one_processor(void)
{
    cpu_set_t set;
    /* An error: there are more than such a set holds. */
    return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) < 2;
}

void pm_helper_init(pm_helper *helper)
{
    pthread_mutex_init(&helper->mutex, NULL);
    pthread_cond_init(&helper->offered, NULL);
    pthread_cond_init(&helper->done, NULL);
}

static void *help(void *argument)
{
    pm_helper *helper = argument;
    pthread_mutex_lock(&helper->mutex);
    while (!helper->stop) {
        if (helper->state != OFFERED) {
            pthread_cond_wait(&helper->offered, &helper->mutex);
            continue;
        }
        helper->state = TAKEN;
        pthread_mutex_unlock(&helper->mutex);
        helper->work(helper->argument);
        pthread_mutex_lock(&helper->mutex);
        helper->state = NOTHING;
        pthread_cond_signal(&helper->done);
    }
    pthread_mutex_unlock(&helper->mutex);
    return NULL;
}

bool pm_can_share(pm_helper *helper)
{
    if (!helper->started && !helper->alone) {
        helper->started = !one_processor() && !pm_thread_start(&helper->thread, help, helper);
        helper->alone = !helper->started;
    }
    return helper->started;
}

void pm_offer(pm_helper *helper, void (*work)(void *argument), void *argument)
{
    if (!helper->started) return;
    pthread_mutex_lock(&helper->mutex);
    helper->work = work, helper->argument = argument;
    helper->state = OFFERED;
    pthread_cond_signal(&helper->offered);
    pthread_mutex_unlock(&helper->mutex);
}

void pm_withdraw(pm_helper *helper)
{
    enum { GLANCES = 20000 };
    /* A few microseconds, mostly: to fall asleep and be woken would take longer. */
    for (int i = 0; i < GLANCES && helper->state == TAKEN; i++) continue;
    pthread_mutex_lock(&helper->mutex);
    if (helper->state == OFFERED) helper->state = NOTHING;
    while (helper->state == TAKEN) pthread_cond_wait(&helper->done, &helper->mutex);
    pthread_mutex_unlock(&helper->mutex);
}

void pm_helper_stop(pm_helper *helper)
{
    helper->alone = true;
    if (!helper->started) return;
    pthread_mutex_lock(&helper->mutex);
    helper->stop = true;
    pthread_cond_signal(&helper->offered);
    pthread_mutex_unlock(&helper->mutex);
    pthread_join(helper->thread, NULL);
    helper->started = false;
}
