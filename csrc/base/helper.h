/*
 * A second thread for a piece of work that falls into parts. The thread that has the work does it, and the helper joins
 * in as soon as it is awake:
 *
 *   NOTHING ── pm_helper_offer ──▶ OFFERED ── it is awake ──▶ TAKEN ── it finds no part left ──▶ NOTHING
 *                                     └─── pm_helper_withdraw: all was done before it woke ────────▲
 *
 * So the first thread waits for the helper only while the helper is at its last part.
 */
#ifndef PM_HELPER_H
#define PM_HELPER_H

#include "base/thread.h"

typedef struct {
    pm_mutex mutex;
    pm_condition offered, done;
    atomic_int state;
    void (*work)(void *argument);
    void *argument;
    pm_thread thread;
    bool started, alone; /* alone: there is one processor, or no thread can be started */
    bool stop;
} pm_helper;

void pm_helper_init(pm_helper *helper, pm_schedule *schedule);
void pm_helper_stop(pm_helper *helper); /* no thread is left. Must not be called in a fork, which has no such thread */

/* True if there is a second thread. The first call starts it. */
bool pm_helper_can_share(pm_helper *helper);

/* From now on the helper may call work(argument), once. */
void pm_helper_offer(pm_helper *helper, void (*work)(void *argument), void *argument);

/* The helper does not call it any more: its call has returned, or was never begun. May be called without an offer. */
void pm_helper_withdraw(pm_helper *helper);

#endif
