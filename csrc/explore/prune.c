/*
 * States that recovery can't tell apart. Bytes that recovery wrote over without reading them can't matter: once a state
 * is recovered, all other states of the same crash point that differ from it only in such cells would end alike.
 * Whether recovery reads a cell is tested: the same state is recovered again with noise in those cells, and must end in
 * the same commit.
 */
#include "explore/prune.h"

#include <stdlib.h>
#include <string.h>

#include "explore/evaluate.h"
#include "explore/state.h"

enum { MOST_CLASSES = 8, LEAST_COVERED = 2, EVALUATE_ONE_IN = 16 };

struct pm_alike {
    struct {
        uint64_t key;
        uint8_t *covered; /* by cell of the model: recovery wrote over all of it without reading it */
    } classes[MOST_CLASSES];
    size_t count, tried;
    uint8_t *units; /* by unit: the last recovery wrote all of it */
};

void pm_prune_forget(pm_explorer *e)
{
    if (!e->alike) return;
    for (size_t i = 0; i < e->alike->count; i++) free(e->alike->classes[i].covered);
    e->alike->count = e->alike->tried = 0;
}

void pm_prune_free(pm_explorer *e)
{
    if (!e->alike) return;
    pm_prune_forget(e);
    free(e->alike->units);
    free(e->alike);
    e->alike = NULL;
}

static uint64_t key_of(const pm_explorer *e, const uint8_t *covered, uint32_t stale)
{
    uint64_t key = stale;
    for (size_t i = 0; i < e->model.count; i++)
        if (!covered[i])
            key = pm_keyed_checksum(key, e->keep[i].kept, e->keep[i].torn + 1) * UINT64_C(0x9e3779b97f4a7c15) + i;
    return key;
}

bool pm_prune_alike(pm_explorer *e, uint32_t stale)
{
    for (size_t i = 0; e->alike && i < e->alike->count; i++)
        if (e->alike->classes[i].key == key_of(e, e->alike->classes[i].covered, stale))
            return pm_explorer_below(e, EVALUATE_ONE_IN) != 0;
    return false;
}

static struct pm_alike *notes_of(pm_explorer *e)
{
    if (e->alike) return e->alike;
    e->alike = calloc(1, sizeof *e->alike);
    if (!e->alike) return NULL;
    e->alike->units = malloc(e->model.units);
    if (e->alike->units) return e->alike;
    free(e->alike);
    return e->alike = NULL;
}

/* Finds the cells that the recovery in the sandbox wrote over, and counts them. The file's size is not one of them. */
static size_t find_covered(const pm_explorer *e, uint8_t *units, uint8_t *covered)
{
    const pm_event *events = pm_trace_events(e->sandbox.trace);
    uint64_t size = e->model.unit_size, count = 0;
    memset(units, 0, e->model.units);
    for (size_t i = 0; i < pm_trace_count(e->sandbox.trace); i++) {
        if (!events[i].has_data) continue;
        uint64_t end = (events[i].offset + events[i].length) / size;
        for (uint64_t unit = (events[i].offset + size - 1) / size; unit < end && unit < e->model.units; unit++)
            units[unit] = 1;
    }
    for (size_t i = 0; i < e->model.count; i++) {
        covered[i] = e->model.cells[i].unit != PM_MODEL_SIZE && units[e->model.cells[i].unit];
        count += covered[i];
    }
    return count;
}

static void add_noise(const pm_explorer *e, const uint8_t *covered)
{
    for (size_t i = 0; i < e->model.count; i++) {
        uint64_t at = e->model.cells[i].unit * e->model.unit_size;
        if (covered[i] && at + e->model.unit_size <= e->sandbox.size)
            memset(e->sandbox.image + at, 0xa5, e->model.unit_size);
    }
}

void pm_prune_learn(pm_explorer *e, uint32_t stale, uint64_t sequence)
{
    struct pm_alike *alike = notes_of(e);
    uint8_t *covered = alike && alike->tried++ < MOST_CLASSES ? malloc(e->model.count + 1) : NULL;
    if (!covered) return; /* then more states are evaluated than need be */
    uint64_t hash;
    bool kept = false;
    if (find_covered(e, alike->units, covered) >= LEAST_COVERED) {
        pm_state_unbuild(e, stale);
        if (!e->stop && pm_state_build(e, stale, &hash)) {
            add_noise(e, covered);
            pm_finding finding = pm_evaluate(&e->sandbox, &e->expected, e->event, e->bound, e->started, true);
            kept = !finding.problem && finding.sequence == sequence;
        }
    }
    if (kept) {
        alike->classes[alike->count].key = key_of(e, covered, stale);
        alike->classes[alike->count++].covered = covered;
    } else {
        free(covered);
    }
}
