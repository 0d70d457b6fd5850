/*
 * The state of one walk over one recording, which the parts of the explorer share. explore/explore.c walks and divides
 * the budget, explore/states.c chooses the states of a crash point and evaluates them, explore/replay.c crashes
 * recoveries, and replays.
 */
#ifndef PM_EXPLORER_H
#define PM_EXPLORER_H

#include "explore/evaluate.h"
#include "base/format.h"

typedef struct {
    uint64_t event;  /* the crash is right before it */
    uint64_t writes; /* since the previous point */
    uint64_t cells;
    double digits; /* decimal digits of the number of ways to keep the cells */
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
    pm_sandbox sandbox;
    pm_expectations expected;
    uint64_t acknowledged, started;
    /* the last commit that a power cut leaves for sure, and that the evaluated state must have */
    uint64_t durable, bound;
    bool lazily;             /* commits are acknowledged before they are durable (PM_EVENT_DURABLE) */
    pm_crash_point *points;
    size_t point_count, point_room;
    pm_model_keep *keep;
    size_t keep_room;
    uint64_t event; /* of the states that are being evaluated */
    uint64_t skip;  /* so many first events are walked over without a crash */
    uint64_t random;
    pm_seen_image *seen;
    size_t seen_count, seen_room;
    struct pm_alike *alike;
    bool learns; /* more states of this point will follow */
    uint64_t nested_left;
    double nested_chance; /* after a state */
    double kill_chance;   /* at a crash point */
    bool stop;            /* a state is wrong, or the caller wants no more */
    pm_status status;
} pm_explorer;

static inline void pm_explorer_fail(pm_explorer *explorer, pm_status status)
{
    if (status == PM_OK) return;
    explorer->status = status;
    explorer->stop = true;
}

static inline uint64_t pm_explorer_random(pm_explorer *explorer)
{
    explorer->random += UINT64_C(0x9e3779b97f4a7c15);
    return pm_keyed_checksum(0, explorer->random, 0);
}

/* A random number below `end`; 0 if there is none. */
static inline uint64_t pm_explorer_below(pm_explorer *explorer, uint64_t end)
{
    return end ? pm_explorer_random(explorer) % end : 0;
}

static inline bool pm_explorer_by_chance(pm_explorer *explorer, double chance)
{
    return (double)(pm_explorer_random(explorer) >> 11) * 0x1p-53 < chance;
}

static inline bool pm_explorer_wants(const pm_explorer *explorer, pm_crash_kind kind)
{
    return explorer->options->kinds >> kind & 1;
}

#endif
