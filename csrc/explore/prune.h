/*
 * States that recovery can't tell apart are evaluated once.
 */
#ifndef PM_PRUNE_H
#define PM_PRUNE_H

#include "explore/explorer.h"

/* True if a state of this point was evaluated that differs from explorer->keep only in bytes that recovery does not
 * read. */
bool pm_prune_alike(pm_explorer *explorer, uint32_t stale);

/* Learns from the state in the sandbox, which was recovered to `sequence` without fault. Leaves it recovered. */
void pm_prune_learn(pm_explorer *explorer, uint32_t stale, uint64_t sequence);

/* At the next point. */
void pm_prune_forget(pm_explorer *explorer);
void pm_prune_free(pm_explorer *explorer);

#endif
