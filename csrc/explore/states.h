/*
 * The states of a crash point that are evaluated.
 */
#ifndef PM_STATES_H
#define PM_STATES_H

#include "explore/explorer.h"

/* Evaluates as many states of a crash point as its quota allows. */
void pm_states_evaluate_point(pm_explorer *explorer, const pm_crash_point *point);

/* Evaluates the state that explorer->keep describes. */
void pm_states_evaluate(pm_explorer *explorer, pm_crash_kind kind, uint32_t stale);

#endif
