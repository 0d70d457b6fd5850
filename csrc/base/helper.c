#include "base/helper.h"

enum { NOTHING, OFFERED, TAKEN };

void pm_helper_init(pm_helper *helper, pm_schedule *schedule)
{
    pm_thread_mutex_init(&helper->mutex, schedule);
    pm_thread_condition_init(&helper->offered);
    pm_thread_condition_init(&helper->done);
}

static void *help(void *argument)
{
    pm_helper *helper = argument;
    pm_thread_lock(&helper->mutex);
    while (!helper->stop) {
        if (helper->state != OFFERED) {
            pm_thread_wait(&helper->offered, &helper->mutex);
            continue;
        }
        helper->state = TAKEN;
        pm_thread_unlock(&helper->mutex);
        helper->work(helper->argument);
        pm_thread_lock(&helper->mutex);
        helper->state = NOTHING;
        pm_thread_wake(&helper->done, &helper->mutex);
    }
    pm_thread_unlock(&helper->mutex);
    return NULL;
}

bool pm_helper_can_share(pm_helper *helper)
{
    if (!helper->started && !helper->alone) {
        helper->started = !pm_thread_one_processor()
                          && !pm_thread_start(&helper->thread, helper->mutex.schedule, help, helper);
        helper->alone = !helper->started;
    }
    return helper->started;
}

void pm_helper_offer(pm_helper *helper, void (*work)(void *argument), void *argument)
{
    if (!helper->started) return;
    pm_thread_lock(&helper->mutex);
    helper->work = work, helper->argument = argument;
    helper->state = OFFERED;
    pm_thread_wake(&helper->offered, &helper->mutex);
    pm_thread_unlock(&helper->mutex);
}

void pm_helper_withdraw(pm_helper *helper)
{
    enum { GLANCES = 20000 };
    /* This mostly takes a few microseconds; to fall asleep and be woken would take longer. */
    for (int i = 0; i < GLANCES && helper->state == TAKEN; i++) continue;
    pm_thread_lock(&helper->mutex);
    if (helper->state == OFFERED) helper->state = NOTHING;
    while (helper->state == TAKEN) pm_thread_wait(&helper->done, &helper->mutex);
    pm_thread_unlock(&helper->mutex);
}

void pm_helper_stop(pm_helper *helper)
{
    helper->alone = true;
    if (!helper->started) return;
    pm_thread_lock(&helper->mutex);
    helper->stop = true;
    pm_thread_wake(&helper->offered, &helper->mutex);
    pm_thread_unlock(&helper->mutex);
    pm_thread_join(&helper->thread, helper->mutex.schedule);
    helper->started = false;
}
