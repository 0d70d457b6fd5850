/*
 * The bytes that are surely durable at some point of a recording, and the writes that are on their way: cells (lines of
 * memory, sectors of a disk) with writes, of which a crash keeps some first ones. docs/crash-model.md states the rules
 * and their sources.
 *
 * M1  A crash keeps a prefix of the writes to a cell, of any length; cells are independent of each other.
 * M2  Memory: of the first write that is not kept, any of its 8-byte pieces may be kept.
 * M3  A fence makes durable what its thread streamed or flushed before it, or another one had handed over; a flush of
 *     the disk, what any thread handed to the disk.
 * M4  Files: a size that was not synced may be lost, and with it everything beyond.
 * M5  Files: no later sync covers what was written before a sync that failed, unless its page is written again.
 */
#ifndef PM_MODEL_H
#define PM_MODEL_H

#include <stdbool.h>

#include "explore/crash.h"
#include "media/trace.h"

#define PM_MODEL_SIZE UINT64_MAX /* the unit of the cell that is the file's size */

/* The first thread of the program, those of a store (one writes back, one makes commits durable, one compares), and
 * others of the program. */
enum { PM_MODEL_THREADS = PM_TRACE_STORE_THREADS + PM_TRACE_PROGRAM_THREADS, PM_MODEL_ANY = PM_MODEL_THREADS };

typedef struct {
    uint64_t offset;
    const uint8_t *data;
    uint32_t length;
} pm_model_write; /* for the size cell, offset is the new size */

typedef struct {
    uint64_t unit;
    uint32_t count, room;              /* writes; allocated */
    /* By thread: the writes that its next fence makes durable; [PM_MODEL_ANY]: that any fence does. Files: by [0] */
    uint32_t handed[PM_MODEL_THREADS + 1];
    bool abandoned; /* a sync failed, and the kernel marks the page as clean */
    pm_model_write *writes;
} pm_model_cell;

/* The part of one cell that is kept. */
typedef struct {
    uint32_t kept;
    uint64_t torn;
} pm_model_keep;

typedef struct {
    uint64_t unit_size, capacity, units;
    bool memory, eadr;
    uint8_t *durable;       /* capacity bytes; the file surely has `size` of them */
    uint8_t *mirror;        /* the caller's: bytes that become durable are written there too; NULL: none */
    uint64_t size, visible; /* visible: as the program sees it */
    pm_model_cell *cells;   /* in order of their first writes */
    size_t count, room;
    uint32_t *index;        /* by unit: 1 + the index of its cell */
    uint8_t *never;         /* by unit: 1 if it was made by growth, and nothing durable was written there */
    uint64_t hash;          /* a hash of the durable bytes */
    const pm_event *stored; /* eADR: the last store, of which a crash may keep a part */
    bool no_memory;
} pm_model;

pm_status pm_model_init(pm_model *model, const pm_recording *recording, const pm_crash_options *options);
void pm_model_free(pm_model *model);

void pm_model_feed(pm_model *model, const pm_recording *recording, const pm_event *event);

/* True if a crash right before the event leaves states that no later crash does: the event orders writes, or moves the
 * bounds. */
bool pm_model_orders(const pm_model *model, const pm_event *event);

/* The number of ways in which a crash can keep the cell; capped. */
double pm_model_ways(const pm_model *model, const pm_model_cell *cell);
pm_model_keep pm_model_way(const pm_model *model, const pm_model_cell *cell, uint64_t number);

static inline pm_model_keep pm_model_whole(const pm_model_cell *cell)
{
    return (pm_model_keep){cell->count, 0};
}

/* True if a crash may keep some pieces of a write to it (M2). */
bool pm_model_tears(const pm_model *model, const pm_model_cell *cell);

/* the number of 8-byte pieces that a write to it touches */
unsigned pm_model_pieces(const pm_model_cell *cell, uint32_t write);

/* Changes `image`, which shows the durable bytes, to the state after a crash that keeps keep[i] of cell i. stale: not 0
 * if space that was never written does not hold zeros. *size: of the file. The hash tells images apart. */
uint64_t pm_model_build(const pm_model *model, const pm_model_keep *keep, uint32_t stale, uint8_t *image,
                        uint64_t *size);
void pm_model_unbuild(const pm_model *model, uint32_t stale, uint8_t *image); /* back to the durable bytes */

#endif
