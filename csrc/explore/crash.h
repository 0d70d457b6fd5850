/*
 * The crash explorer: builds the states that a crash could leave of a recorded store, recovers each, and evaluates it.
 * docs/crash-model.md states the model of the media; explore/model.c builds it.
 */
#ifndef PM_CRASH_H
#define PM_CRASH_H

#include "pmstore.h"

/* cffi: begin */
/* A recording: the durable bytes before it, and the events since. acknowledged, started: the bounds on the sequence
 * number at its first event. */
typedef struct {
    const uint8_t *base;
    uint64_t base_size;
    const pm_event *events;
    uint64_t count;
    const uint8_t *data;
    uint64_t data_size;
    uint64_t acknowledged, started;
} pm_recording;

/* The rule by which a crash state was chosen. */
typedef enum {
    PM_CRASH_PREFIX = 0, /* all writes up to an event, and none after: the state after a kill of the process */
    PM_CRASH_NOTHING,    /* nothing that is not surely durable */
    PM_CRASH_ALL,        /* everything, right before an ordering point */
    PM_CRASH_LOST_ONE,   /* one line or sector is lost */
    PM_CRASH_KEPT_ONE,   /* only one line or sector is kept */
    PM_CRASH_PAIR,       /* two are lost, or only two kept */
    PM_CRASH_TORN,       /* memory: some of the 8-byte pieces of a store are kept */
    PM_CRASH_RANDOM,
    PM_CRASH_EXHAUSTIVE, /* one of all states of this point */
    PM_CRASH_STALE,      /* files: space that was never written does not hold zeros */
    PM_CRASH_KINDS
} pm_crash_kind;

enum { PM_CRASH_DEPTH = 4, PM_CRASH_SIZE_CELL = 1 };

typedef struct {
    uint32_t media;           /* PM_MEDIA_MEMORY or PM_MEDIA_FILE */
    uint32_t sector;          /* of a file's disk: 512 or 4096 bytes */
    uint32_t eadr;            /* memory: caches are durable too */
    uint32_t kinds;           /* bits, 1 << pm_crash_kind */
    uint32_t depth;           /* crashes in the recovery of a crash, and after it; below PM_CRASH_DEPTH */
    uint32_t raw;             /* states are not recovered, only given to the callback */
    uint32_t worker, workers; /* this worker takes every workers-th crash point */
    uint32_t exhaustive;      /* all states of a crash point are evaluated if there are at most so many */
    uint64_t seed, budget;
} pm_crash_options;

/* A line or a sector, and the part of its writes on their way that is kept: the first `kept` writes, and of the next
 * one the 8-byte pieces in `torn` (memory). The cell at offset PM_CRASH_SIZE_CELL is the file's size, if that is on its
 * way. */
typedef struct {
    uint64_t offset;
    uint64_t torn;
    uint32_t kept, of;
} pm_crash_cell;

/* A crash state. Cells that are not listed are kept whole. */
typedef struct {
    uint64_t event; /* the number of events that have happened */
    uint32_t kind, stale;
    /* only the process was killed: recovery finds everything, and what is on its way still is. Another level
     * follows, of this run and that recovery, recorded as one */
    uint32_t killed;
    uint64_t cell_count;
    pm_crash_cell *cells; /* ascending */
    uint64_t acknowledged, started;
} pm_crash_schedule;

typedef enum {
    PM_CRASH_FINE = 0,
    PM_CRASH_OPEN,     /* the store does not open */
    PM_CRASH_SEQUENCE, /* an acknowledged commit is lost, or a commit is there that never began */
    PM_CRASH_MIXED,    /* the state is not that of its commit */
    PM_CRASH_INVALID,  /* pm_check finds problems */
    PM_CRASH_READER,   /* a reader sees another state than the writer that recovers */
    PM_CRASH_WRITE,    /* the recovered store can't be written, or commits something else */
    PM_CRASH_CHECK     /* the callback refused it */
} pm_crash_problem;

typedef struct {
    /* Evaluated states: distinct ones were recovered; pruned ones differ from one of those only in bytes that recovery
     * does not read; the rest have the same bytes as one of them. */
    uint64_t points, evaluated, distinct, pruned, nested, by_kind[10];
    double possible;         /* log10 of the number of states in the model */
    uint64_t sampled_points; /* points of which not all states were evaluated */
    uint64_t left_out;       /* points of which no state was evaluated: the budget is less than one state for each */
    /* The problem, and how to reach it: levels[0] is a crash of the recording, the next level one of its recovery and
     * of what followed */
    uint32_t problem, level_count;
    uint64_t sequence;
    char text[400];
    pm_crash_schedule levels[4];
} pm_crash_result;

/* Gets a state that the explorer found no fault with, valid for this call only. Returns 0 if the caller finds it
 * wrong. */
typedef int (*pm_crash_callback)(void *user, const uint8_t *image, uint64_t size, uint64_t acknowledged,
                                 uint64_t started);
/* Returns 0 to stop. */
typedef int (*pm_crash_progress)(void *user, uint64_t evaluated, uint64_t budget);

/* Explores until the budget is spent or a state is wrong. PM_OK in both cases; the result must be freed. */
pm_status pm_crash_explore(const pm_recording *recording, const pm_crash_options *options, pm_crash_callback callback,
                           pm_crash_progress progress, void *user, pm_crash_result *result);

/* Evaluates one state, that of the last level. */
pm_status pm_crash_evaluate(const pm_recording *recording, const pm_crash_options *options,
                            const pm_crash_schedule *levels, uint32_t level_count, pm_crash_callback callback,
                            void *user, pm_crash_result *result);

/* Builds the bytes of that state, which must be freed with pm_crash_free. The schedule says what is kept of each
 * cell. */
pm_status pm_crash_image(const pm_recording *recording, const pm_crash_options *options,
                         const pm_crash_schedule *levels, uint32_t level_count, uint8_t **image, uint64_t *size);

/* The cells that are on their way when `event` events have happened, each with all of its writes; must be freed with
 * pm_crash_free. */
pm_status pm_crash_cells(const pm_recording *recording, const pm_crash_options *options, uint64_t event,
                         pm_crash_cell **cells, uint64_t *count);

void pm_crash_result_free(pm_crash_result *result);
void pm_crash_free(void *pointer);
/* cffi: end */

#endif
