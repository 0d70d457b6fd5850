/*
 * The walk over a recording, from crash point to crash point.
 */
#ifndef PM_EXPLORE_H
#define PM_EXPLORE_H

#include "explore/explorer.h"

/* Evaluates states until the budget is spent or a state is wrong. */
pm_status pm_explore_run(pm_explorer *explorer);
void pm_explore_free(pm_explorer *explorer);

/* Goes to the point where `event` events have happened. Then explorer->model holds the writes that are on their way,
 * and explorer->keep keeps all of them. */
pm_status pm_explore_go_to(pm_explorer *explorer, uint64_t event);

#endif
