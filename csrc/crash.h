/*
 * The crash explorer: builds the states that a crash could leave of a recorded store, recovers each, and judges it.
 * docs/crash-model.md states the model of the media; crash_model.c builds it.
 */
#ifndef PM_CRASH_H
#define PM_CRASH_H

#include "pmstore.h"

/* cffi: begin */
/* What was recorded: the durable bytes before, and the events since. Acknowledged, started: the bounds on the sequence
 * that hold at its first event. */
typedef struct {
    const uint8_t *base;
    uint64_t base_size;
    const pm_event *events;
    uint64_t count;
    const uint8_t *data;
    uint64_t data_size;
    uint64_t acknowledged, started;
} pm_recording;

/* How a crash state was chosen. */
typedef enum {
    PM_CRASH_PREFIX = 0, /* all writes up to an event, and none after: what a killed process leaves */
    PM_CRASH_NOTHING,    /* nothing that is not surely durable */
    PM_CRASH_ALL,        /* everything, right before an ordering point */
    PM_CRASH_LOST_ONE,   /* one line or sector is lost */
    PM_CRASH_KEPT_ONE,   /* only one is kept */
    PM_CRASH_PAIR,       /* two are lost, or only two kept */
    PM_CRASH_TORN,       /* memory: some of the 8-byte pieces of a store are kept */
    PM_CRASH_RANDOM,
    PM_CRASH_EXHAUSTIVE, /* one of all that there are at this point */
    PM_CRASH_STALE,      /* files: space never written holds something else than zeros */
    PM_CRASH_KINDS
} pm_crash_kind;

enum { PM_CRASH_DEPTH = 4, PM_CRASH_SIZE_CELL = 1 };

typedef struct {
    uint32_t media;           /* PM_MEDIA_MEMORY or PM_MEDIA_FILE */
    uint32_t sector;          /* of a file's disk: 512 or 4096 bytes */
    uint32_t eadr;            /* memory: caches are durable too */
    uint32_t kinds;           /* bits, 1 << pm_crash_kind */
    uint32_t depth;           /* crashes in the recovery of a crash, and after it; below PM_CRASH_DEPTH */
    uint32_t raw;             /* states are not recovered, only handed to the callback */
    uint32_t worker, workers; /* this one takes every workers-th crash point */
    uint32_t exhaustive;      /* a crash point with at most so many states has all of them judged */
    uint64_t seed, budget;
} pm_crash_options;

/* A line or a sector, and what is kept of its writes that are on their way: the first `kept`, and of the next one the
 * 8-byte pieces in `torn` (memory). The cell at offset PM_CRASH_SIZE_CELL is the file's size, if that is on its way. */
typedef struct {
    uint64_t offset;
    uint64_t torn;
    uint32_t kept, of;
} pm_crash_cell;

/* A crash state. Cells that are not listed are kept whole. */
typedef struct {
    uint64_t event; /* so many events have happened */
    uint32_t kind, stale;
    uint32_t killed; /* only the process: recovery finds everything, and what is on its way still is. Another level
                        follows, of the recording of this life and that recovery's as one */
    uint64_t cell_count;
    pm_crash_cell *cells; /* ascending */
    uint64_t acknowledged, started;
} pm_crash_schedule;

typedef enum {
    PM_CRASH_FINE = 0,
    PM_CRASH_OPEN,     /* the store does not open */
    PM_CRASH_SEQUENCE, /* an acknowledged commit is lost, or one is there that never began */
    PM_CRASH_MIXED,    /* the state is not that of its commit */
    PM_CRASH_UNSOUND,  /* pm_check finds problems */
    PM_CRASH_READER,   /* a reader sees something else than the writer that recovers */
    PM_CRASH_WRITE,    /* the recovered store can't be written, or commits something else */
    PM_CRASH_CHECK     /* the callback refused it */
} pm_crash_problem;

typedef struct {
    /* Judged: distinct ones were recovered, pruned ones differ from one of those only in what recovery does not look
     * at, and the rest have the bytes of one. */
    uint64_t points, judged, distinct, pruned, nested, by_kind[10];
    double possible;         /* log10 of the number of states in the model */
    uint64_t sampled_points; /* points at which not all of them were judged */
    uint64_t left_out;       /* points at which none was: the budget is less than one state for each */
    /* what is wrong, and how to get there: levels[0] is a crash of the recording, the next one of its recovery and of
     * what followed */
    uint32_t problem, level_count;
    uint64_t sequence;
    char text[400];
    pm_crash_schedule levels[4];
} pm_crash_result;

/* A state that the explorer found no fault with; 0: it is wrong by the caller's own measure. Valid for the call only.
 */
typedef int (*pm_crash_callback)(void *user, const uint8_t *image, uint64_t size, uint64_t acknowledged,
                                 uint64_t started);
/* 0: stop. */
typedef int (*pm_crash_progress)(void *user, uint64_t judged, uint64_t budget);

/* Explores until the budget is spent or a state is wrong. PM_OK either way; the result is to be freed. */
pm_status pm_crash_explore(const pm_recording *recording, const pm_crash_options *options, pm_crash_callback callback,
                           pm_crash_progress progress, void *user, pm_crash_result *result);

/* Judges one state, that of the last level. */
pm_status pm_crash_judge(const pm_recording *recording, const pm_crash_options *options,
                         const pm_crash_schedule *levels, uint32_t level_count, pm_crash_callback callback, void *user,
                         pm_crash_result *result);

/* Its bytes, to be freed with pm_crash_free; of what is kept of each cell, what the schedule says. */
pm_status pm_crash_image(const pm_recording *recording, const pm_crash_options *options,
                         const pm_crash_schedule *levels, uint32_t level_count, uint8_t **image, uint64_t *size);

/* The cells that are on their way when `event` events have happened, each with all that it has; to be freed with
 * pm_crash_free. */
pm_status pm_crash_cells(const pm_recording *recording, const pm_crash_options *options, uint64_t event,
                         pm_crash_cell **cells, uint64_t *count);

void pm_crash_result_free(pm_crash_result *result);
void pm_crash_free(void *pointer);
/* cffi: end */

#endif
