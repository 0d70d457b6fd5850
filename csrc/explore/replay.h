/*
 * Crashes of recoveries.
 */
#ifndef PM_REPLAY_H
#define PM_REPLAY_H

#include "explore/explorer.h"

/* Recovers the state that explorer->keep describes, commits more, and explores the crashes of that. */
void pm_replay_nest(pm_explorer *explorer, pm_crash_kind kind, uint32_t stale);

/* The same after a kill: recovery finds everything that was written, and the crash comes later. */
void pm_replay_nest_killed(pm_explorer *explorer);

#endif
