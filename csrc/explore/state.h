/*
 * One state of a crash point: explorer->keep describes what is kept of each cell.
 */
#ifndef PM_STATE_H
#define PM_STATE_H

#include "explore/explorer.h"

void pm_state_keep_all(pm_explorer *explorer);
void pm_state_keep_none(pm_explorer *explorer);

/* Sets explorer->bound: the last commit that the state must have. A state that keeps everything, as a kill of the
 * process does, loses none of the acknowledged commits, durable or not. */
void pm_state_set_bound(pm_explorer *explorer);

/* Builds the image of the state in the sandbox, which shows the durable bytes. False: it could not be built. */
bool pm_state_build(pm_explorer *explorer, uint32_t stale, uint64_t *hash);

/* Makes the sandbox show the durable bytes again. */
void pm_state_unbuild(pm_explorer *explorer, uint32_t stale);

/* Notes the state as a schedule: the cells of which not everything is kept. */
pm_status pm_state_note(const pm_explorer *explorer, pm_crash_kind kind, uint32_t stale, pm_crash_schedule *out);

/* Notes the state as the one that is wrong, and stops the explorer. */
void pm_state_found(pm_explorer *explorer, const pm_finding *finding, pm_crash_kind kind, uint32_t stale);

/* The offset of a cell in schedules. */
uint64_t pm_state_offset(const pm_model *model, const pm_model_cell *cell);

#endif
