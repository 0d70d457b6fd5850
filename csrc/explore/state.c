#include "explore/state.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "explore/evaluate.h"
#include "explore/sandbox.h"

static int ascending(const void *a, const void *b)
{
    const pm_crash_cell *x = a, *y = b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

uint64_t pm_state_offset(const pm_model *model, const pm_model_cell *cell)
{
    return cell->unit == PM_MODEL_SIZE ? PM_CRASH_SIZE_CELL : cell->unit * model->unit_size;
}

pm_status pm_state_note(const pm_explorer *e, pm_crash_kind kind, uint32_t stale, pm_crash_schedule *out)
{
    *out = (pm_crash_schedule){
        .event = e->event, .kind = kind, .stale = stale, .acknowledged = e->bound, .started = e->started};
    out->cells = malloc((e->model.count + 1) * sizeof *out->cells);
    if (!out->cells) return pm_fail(PM_NO_MEMORY, "no memory to note a crash");
    for (size_t i = 0; i < e->model.count; i++) {
        const pm_model_cell *cell = &e->model.cells[i];
        if (e->keep[i].kept == cell->count) continue;
        out->cells[out->cell_count++] =
            (pm_crash_cell){pm_state_offset(&e->model, cell), e->keep[i].torn, e->keep[i].kept, cell->count};
    }
    qsort(out->cells, out->cell_count, sizeof *out->cells, ascending);
    return PM_OK;
}

void pm_state_found(pm_explorer *e, const pm_finding *finding, pm_crash_kind kind, uint32_t stale)
{
    pm_crash_result *result = e->result;
    pm_explorer_fail(e, pm_state_note(e, kind, stale, &result->levels[0]));
    result->level_count = 1;
    result->problem = finding->problem;
    result->sequence = finding->sequence;
    memcpy(result->text, finding->text, sizeof result->text);
    e->stop = true;
}

bool pm_state_build(pm_explorer *e, uint32_t stale, uint64_t *hash)
{
    uint64_t size;
    *hash = pm_model_build(&e->model, e->keep, stale, e->sandbox.image, &size);
    pm_explorer_fail(e, pm_sandbox_fit(&e->sandbox, size, e->model.durable));
    return !e->stop;
}

void pm_state_unbuild(pm_explorer *e, uint32_t stale)
{
    pm_sandbox_restore(&e->sandbox, e->sandbox.size, e->model.durable);
    /* The bytes behind a lost size come back with it. */
    pm_explorer_fail(e, pm_sandbox_fit(&e->sandbox, e->model.visible, e->model.durable));
    if (!e->stop || e->sandbox.size >= e->model.visible) pm_model_unbuild(&e->model, stale, e->sandbox.image);
}

void pm_state_set_bound(pm_explorer *e)
{
    e->bound = e->acknowledged;
    for (size_t i = 0; i < e->model.count && e->bound != e->durable; i++)
        if (e->keep[i].kept < e->model.cells[i].count) e->bound = e->durable;
}

void pm_state_keep_all(pm_explorer *e)
{
    for (size_t i = 0; i < e->model.count; i++) e->keep[i] = pm_model_whole(&e->model.cells[i]);
}

void pm_state_keep_none(pm_explorer *e)
{
    memset(e->keep, 0, e->model.count * sizeof *e->keep);
}
