/*
 * Threads of a store's own.
 */
#ifndef PM_THREAD_H
#define PM_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

/* A thread that takes no signals but those of its own faults. Not 0: an errno. */
int pm_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);

/*
 * A second thread for a piece of work that falls into parts. Who has the work does it, and the other one joins in as soon as it is awake:
 *
 *   NOTHING ── pm_offer ──▶ OFFERED ── it is awake ──▶ TAKEN ── it finds no part left ──▶ NOTHING
 *                              └─── pm_withdraw: all was done before it woke ────────────────▲
 *
 * So nobody waits for it but while it is at its last part.
 */
typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t offered, done;
    atomic_int state;
    void (*work)(void *argument);
    void *argument;
    pthread_t thread;
    bool started, alone; /* alone: there is one processor, or no thread to be had */
    bool stop;
} pm_helper;

void pm_helper_init(pm_helper *helper);
void pm_helper_stop(pm_helper *helper); /* no thread is left. Not in a fork: it has none */

/* True if there is a second thread; it is started by the first who asks. */
bool pm_can_share(pm_helper *helper);

/* From now on it may call work(argument), once. */
void pm_offer(pm_helper *helper, void (*work)(void *argument), void *argument);

/* It does not, and will not: the work has returned there, or was never begun. Also without an offer. */
void pm_withdraw(pm_helper *helper);

#endif
