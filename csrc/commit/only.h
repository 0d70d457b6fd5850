/*
 * Declared write sets (pm_commit_only): a program declares the ranges of its arrays that a commit must scan.
 */
#ifndef PM_ONLY_H
#define PM_ONLY_H

#include "commit/store_state.h"

/* True if an array of the store has all of a range. See pm_holds. */
bool pm_only_holds(const pm_store *store, const void *address, uint64_t length);

/* Marks the ranges for the next commit. See pm_commit_only. */
void pm_only_declare(pm_store *store, const pm_range *ranges, size_t count);

/* Finds the first change outside the declared ranges. out->length is 0 if there is none. See pm_violation. */
void pm_only_violation(pm_store *store, const pm_range *ranges, size_t count, pm_broken *out);

#endif
