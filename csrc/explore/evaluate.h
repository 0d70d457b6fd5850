/*
 * Recovers a crash image, as a program that opens it would, and reports what is wrong with it.
 */
#ifndef PM_EVALUATE_H
#define PM_EVALUATE_H

#include "explore/sandbox.h"

/* The hash of the state after a commit, and when a crash may end in it: when at least `from` and at most `until` events
 * have happened. After those, a newer commit was acknowledged, or a recovery did not find this one. */
typedef struct {
    uint64_t sequence, hash;
    uint64_t from, until;
} pm_expected;

typedef struct {
    pm_expected *states;
    size_t count, room;
} pm_expectations;

/* Learns the expected states from the events. PM_INVALID if they contradict each other: a commit began with one state
 * and ended with another. */
pm_status pm_evaluate_expect(pm_expectations *expected, const pm_recording *recording);
void pm_evaluate_expectations_free(pm_expectations *expected);

typedef struct {
    pm_crash_problem problem;
    uint64_t sequence;
    char text[400];
} pm_finding;

/* Recovers the image and compares its state. event: so many events have happened. reader: also opens it as a reader
 * would. */
pm_finding pm_evaluate(pm_sandbox *sandbox, const pm_expectations *expected, uint64_t event, uint64_t acknowledged,
                       uint64_t started, bool reader);

/* Recovers the image, and commits twice more, with background work in an order that the seed decides. sandbox->trace
 * becomes the trace of this. The file is left as a kill would leave it. */
pm_finding pm_evaluate_going_on(pm_sandbox *sandbox, uint64_t seed);

#endif
