/*
 * The list of this process's open stores, for forks. While the process forks, no store is between two states, and each
 * has prepared what its child will need (I18).
 *
 * Lock order: the list, then the stores' mutexes in its order. They are held until the fork is over. In the child they
 * stay locked, and are never taken again.
 */
#ifndef PM_FORKS_H
#define PM_FORKS_H

#include "commit/store_state.h"

void pm_forks_add(pm_store *store);
void pm_forks_remove(pm_store *store);

#endif
