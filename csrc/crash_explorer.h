/*
 * The parts of the explorer share this: one walk over one recording. crash_explore.c walks and divides the budget,
 * crash_states.c chooses the states of a crash point and has them judged, crash_replay.c crashes recoveries, and
 * replays.
 */
#ifndef PM_CRASH_EXPLORER_H
#define PM_CRASH_EXPLORER_H

#include "crash_judge.h"
#include "format.h"

typedef struct {
    uint64_t event;  /* the crash is right before it */
    uint64_t writes; /* since the point before */
    uint64_t cells;
    double digits; /* decimal ones, of the number of ways to keep them */
    uint64_t quota;
} pm_crash_point;

typedef struct {
    uint64_t image, sequence_plus_1;
} pm_seen_image;

typedef struct {
    const pm_recording *recording;
    const pm_crash_options *options;
    pm_crash_callback callback;
    pm_crash_progress progress;
    void *user;
    pm_crash_result *result;
    pm_model model;
    pm_workbench bench;
    pm_expectations expected;
    uint64_t acknowledged, started;
    uint64_t durable, bound; /* what a power cut leaves at least; what the state that is judged does */
    bool lazily;             /* commits are acknowledged before they are durable (PM_EVENT_DURABLE) */
    pm_crash_point *points;
    size_t point_count, point_room;
    pm_model_keep *keep;
    size_t keep_room;
    uint64_t event; /* of the states that are being judged */
    uint64_t skip;  /* so many events are walked over, and not crashed */
    uint64_t random;
    pm_seen_image *seen;
    size_t seen_count, seen_room;
    struct pm_alike *alike;
    bool learns; /* more states of this point are to come */
    uint64_t nested_left;
    double nested_chance; /* after a state */
    double kill_chance;   /* at a crash point */
    bool stop;            /* something is wrong, or the caller wants no more */
    pm_status status;
} pm_explorer;

/* ---- crash_explore.c ---- */

/* Judges states until the budget is spent or one is wrong. */
pm_status pm_explorer_run(pm_explorer *explorer);
void pm_explorer_free(pm_explorer *explorer);

/* Goes to where `event` events have happened: then explorer->model holds what is on its way, and explorer->keep all of
 * it. */
pm_status pm_explorer_go_to(pm_explorer *explorer, uint64_t event);
pm_status pm_explorer_make_keep(pm_explorer *explorer); /* room for what is kept of each cell */

static inline void pm_explorer_fail(pm_explorer *explorer, pm_status status)
{
    if (status == PM_OK) return;
    explorer->status = status;
    explorer->stop = true;
}

static inline uint64_t pm_explorer_random(pm_explorer *explorer)
{
    explorer->random += UINT64_C(0x9e3779b97f4a7c15);
    return pm_seal(0, explorer->random, 0);
}

static inline bool pm_explorer_by_chance(pm_explorer *explorer, double chance)
{
    return (double)(pm_explorer_random(explorer) >> 11) * 0x1p-53 < chance;
}

static inline bool pm_explorer_wants(const pm_explorer *explorer, pm_crash_kind kind)
{
    return explorer->options->kinds >> kind & 1;
}

/* ---- crash_states.c ---- */

/* Judges the states of one crash point that its quota allows. */
void pm_explorer_judge_point(pm_explorer *explorer, const pm_crash_point *point);

/* The last commit that the state which explorer->keep describes must have: of those that are acknowledged and not
 * durable, one that keeps everything, as a kill of the process does, loses none. */
void pm_explorer_set_bound(pm_explorer *explorer);

/* Judges the state that explorer->keep describes. */
void pm_explorer_judge(pm_explorer *explorer, pm_crash_kind kind, uint32_t stale);
void pm_explorer_keep_all(pm_explorer *explorer);
void pm_explorer_keep_none(pm_explorer *explorer);
uint64_t pm_explorer_below(pm_explorer *explorer, uint64_t end); /* a random number */

/* Builds the image on the bench, which shows what is durable; false: it could not be. And back. */
bool pm_explorer_build(pm_explorer *explorer, uint32_t stale, uint64_t *hash);
void pm_explorer_unbuild(pm_explorer *explorer, uint32_t stale);

/* The state that explorer->keep describes as a schedule, and as what is wrong. */
pm_status pm_explorer_note(const pm_explorer *explorer, pm_crash_kind kind, uint32_t stale, pm_crash_schedule *out);
void pm_explorer_found(pm_explorer *explorer, const pm_finding *finding, pm_crash_kind kind, uint32_t stale);
uint64_t pm_explorer_offset(const pm_model *model, const pm_model_cell *cell); /* as schedules have it */

/* ---- crash_prune.c ---- */

/* True if a state was judged at this point that differs from explorer->keep only in what recovery does not look at. */
bool pm_explorer_alike(pm_explorer *explorer, uint32_t stale);

/* Learns from the state on the bench, which was recovered to `sequence` without fault. Leaves it recovered. */
void pm_explorer_learn_alike(pm_explorer *explorer, uint32_t stale, uint64_t sequence);
void pm_explorer_forget_alike(pm_explorer *explorer); /* at the next point */
void pm_explorer_free_alike(pm_explorer *explorer);

/* ---- crash_replay.c ---- */

/* Recovers the state that explorer->keep describes, commits more, and explores the crashes of that. */
void pm_explorer_nest(pm_explorer *explorer, pm_crash_kind kind, uint32_t stale);
/* The same after a kill: recovery finds all that was written, and the crash comes later. */
void pm_explorer_nest_killed(pm_explorer *explorer);

#endif
