/*
 * The open stores of this process, for forks: while one is made, no store is between two states, and each has what its
 * child will need (I18).
 *
 * Lock order: the list, then the stores' mutexes in its order. They are held until the fork is over; in the child for
 * good, which never takes one again.
 */
#ifndef PM_STORE_FORKS_H
#define PM_STORE_FORKS_H

#include "transaction.h"

void pm_list_store(pm_store *store);
void pm_unlist_store(pm_store *store);

#endif
