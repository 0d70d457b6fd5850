/*
 * Recovers a crash image, as a program that opens it would, and says what is wrong with it. The image is an anonymous
 * file in memory that is there for all states: no process, no file and no copy of the store per state.
 */
#ifndef PM_CRASH_JUDGE_H
#define PM_CRASH_JUDGE_H

#include "crash_model.h"

/* The hash of the state after a commit, and when a crash may end there: with at least `from` events that have happened,
 * and at most `until`. Then something newer was acknowledged, or recovery did not find it. */
typedef struct {
    uint64_t sequence, hash;
    uint64_t from, until;
} pm_expected;

typedef struct {
    pm_expected *states;
    size_t count, room;
} pm_expectations;

/* Takes what the events tell. PM_INVALID if they contradict each other: a commit began with one state and ended with
 * another. */
pm_status pm_expect(pm_expectations *expected, const pm_recording *recording);
void pm_expectations_free(pm_expectations *expected);

typedef struct {
    int fd;
    pm_media_kind media;
    uint8_t *image;    /* the file, mapped */
    uint64_t capacity; /* mapped */
    uint64_t size;     /* of the file */
    pm_trace *trace;   /* of the last recovery */
} pm_workbench;

pm_status pm_workbench_init(pm_workbench *bench, uint64_t capacity, pm_media_kind media);
void pm_workbench_free(pm_workbench *bench);

/* Makes the file `size` bytes long; what is new is copied from `source`. */
pm_status pm_workbench_fit(pm_workbench *bench, uint64_t size, const uint8_t *source);
/* Undoes what the last recovery wrote. */
void pm_workbench_restore(pm_workbench *bench, uint64_t size, const uint8_t *source);

typedef struct {
    pm_crash_problem problem;
    uint64_t sequence;
    char text[400];
} pm_finding;

/* Recovers the image and compares. event: so many have happened. reader: also as a reader would. */
pm_finding pm_judge(pm_workbench *bench, const pm_expectations *expected, uint64_t event, uint64_t acknowledged,
                    uint64_t started, bool reader);

/* Recovers the image, and commits twice more, under bench->trace with this seed. The file is left as a kill would. */
pm_finding pm_go_on(pm_workbench *bench, uint64_t seed);

#endif
