/* Crashes in the recovery of a crash, and after it; single states, replayed; the C face. */
#include <stdlib.h>
#include <string.h>

#include "crash_explorer.h"
#include "status.h"

/* Crashes are explored in and after the recovery of some of the states. Each takes so many states, and all together add about
 * a quarter to the budget. */
enum { NESTED_BUDGET = 60, NESTED_SHARE = 4, NESTED_LEAST = 4 };

/* ---- crashes inside recovery, and after it ------------------------------------------------------------------ */

/* The recording of a recovery of the state on e's bench, and of what follows it. `base`: room for e->bench.size bytes. */
static pm_finding record_nested(pm_explorer *e, uint64_t image, uint8_t *base, pm_recording *recording)
{
    uint64_t size = e->bench.size;
    memcpy(base, e->bench.image, size);
    pm_finding finding = pm_go_on(&e->bench, (image ^ e->options->seed) | 1);
    *recording = (pm_recording){.base = base, .base_size = size, .events = pm_trace_events(e->bench.trace),
                                .count = pm_trace_count(e->bench.trace), .data = pm_trace_data(e->bench.trace),
                                .data_size = pm_trace_bytes(e->bench.trace), .acknowledged = e->acknowledged, .started = e->started};
    return finding;
}

static pm_status copy_expected(pm_explorer *inner, const pm_explorer *e)
{
    inner->expected = (pm_expectations){malloc((e->expected.count + 1) * sizeof *e->expected.states), e->expected.count, e->expected.count + 1};
    if (!inner->expected.states) return pm_fail(PM_NO_MEMORY, "no memory to explore");
    memcpy(inner->expected.states, e->expected.states, e->expected.count * sizeof *e->expected.states);
    return pm_expect(&inner->expected, inner->recording);
}

static void take_inner_result(pm_explorer *e, const pm_crash_result *inner, pm_crash_kind kind, uint32_t stale)
{
    e->result->nested += inner->judged + inner->nested;
    if (!inner->problem) return;
    pm_finding finding = {.problem = inner->problem, .sequence = inner->sequence};
    memcpy(finding.text, inner->text, sizeof finding.text);
    pm_explorer_found(e, &finding, kind, stale);
    e->result->level_count = 1 + inner->level_count;
    memcpy(&e->result->levels[1], inner->levels, inner->level_count * sizeof inner->levels[0]);
}

void pm_explorer_nest(pm_explorer *e, pm_crash_kind kind, uint32_t stale)
{
    uint64_t image;
    e->nested_left--;
    if (!pm_explorer_build(e, stale, &image)) return;
    uint8_t *base = malloc(e->bench.size + 1);
    pm_recording recording;
    pm_crash_options options = *e->options;
    options.depth--, options.budget = NESTED_BUDGET, options.worker = options.workers = 0, options.seed ^= image;
    options.kinds |= 1 << PM_CRASH_PREFIX;
    pm_crash_result result = {0};
    pm_explorer inner = {.recording = &recording, .options = &options, .result = &result, .random = image};
    pm_finding finding = {0};
    if (!base) pm_explorer_fail(e, pm_fail(PM_NO_MEMORY, "no memory to explore"));
    else finding = record_nested(e, image, base, &recording);
    if (base && !finding.problem) {
        pm_status status = copy_expected(&inner, e);
        if (status == PM_INVALID) {
            finding = (pm_finding){.problem = PM_CRASH_WRITE, .sequence = finding.sequence};
            strncpy(finding.text, pm_message(), sizeof finding.text - 1);
        } else pm_explorer_fail(e, status != PM_OK ? status : pm_explorer_run(&inner));
    }
    pm_explorer_unbuild(e, stale);
    if (finding.problem) pm_explorer_found(e, &finding, kind, stale);
    else take_inner_result(e, &result, kind, stale);
    pm_explorer_free(&inner);
    free(base);
}

/* ---- the C face --------------------------------------------------------------------------------------------- */

static pm_status check_options(const pm_crash_options *options)
{
    if (options->media != PM_MEDIA_MEMORY && options->media != PM_MEDIA_FILE) return pm_fail(PM_INVALID, "media is memory or file");
    if (options->depth >= PM_CRASH_DEPTH) return pm_fail(PM_INVALID, "depth is at most %d", PM_CRASH_DEPTH - 1);
    return PM_OK;
}

static pm_status begin(pm_explorer *e)
{
    PM_TRY(check_options(e->options));
    e->random = e->options->seed;
    return e->options->raw ? PM_OK : pm_expect(&e->expected, e->recording);
}

pm_status pm_crash_explore(const pm_recording *recording, const pm_crash_options *options, pm_crash_callback callback,
                           pm_crash_progress progress, void *user, pm_crash_result *result)
{
    *result = (pm_crash_result){0};
    pm_explorer e = {.recording = recording, .options = options, .callback = callback, .progress = progress, .user = user, .result = result};
    pm_status status = begin(&e);
    if (options->depth && !options->raw) {
        e.nested_left = options->budget / NESTED_SHARE / NESTED_BUDGET + NESTED_LEAST;
        e.nested_chance = (double)e.nested_left * 2 / (double)(options->budget + 1);
    }
    if (status == PM_OK) status = pm_explorer_run(&e);
    pm_explorer_free(&e);
    return status;
}

/* Goes to the schedule's event, and chooses what it keeps. */
static pm_status choose(pm_explorer *e, const pm_crash_schedule *schedule)
{
    PM_TRY(pm_explorer_go_to(e, schedule->event));
    uint64_t used = 0;
    for (size_t i = 0; i < e->model.count; i++)
        for (uint64_t j = 0; j < schedule->cell_count; j++) {
            const pm_crash_cell *cell = &schedule->cells[j];
            if (cell->offset != pm_explorer_offset(&e->model, &e->model.cells[i])) continue;
            if (cell->kept > e->model.cells[i].count) return pm_fail(PM_INVALID, "the schedule is of another recording: it keeps more writes than there are");
            e->keep[i] = (pm_model_keep){cell->kept, cell->torn};
            used++;
        }
    if (used != schedule->cell_count) return pm_fail(PM_INVALID, "the schedule is of another recording: a cell of it has no write on its way");
    return PM_OK;
}

/* Builds the state of the last level on the bench of the explorer that it returns in *last. */
static pm_status replay(pm_explorer *e, const pm_crash_schedule *levels, uint32_t level_count, pm_crash_callback callback, void *user, uint8_t **image,
                        uint64_t *size)
{
    uint64_t hash;
    PM_TRY(choose(e, levels));
    if (level_count == 1) {
        if (!image) {
            e->callback = callback, e->user = user;
            pm_explorer_judge(e, (pm_crash_kind)levels->kind, levels->stale);
            return e->status;
        }
        if (!pm_explorer_build(e, levels->stale, &hash)) return e->status;
        *size = e->bench.size;
        *image = malloc(*size + 1);
        if (!*image) return pm_fail(PM_NO_MEMORY, "no memory for a crash image");
        memcpy(*image, e->bench.image, *size);
        return PM_OK;
    }
    if (!pm_explorer_build(e, levels->stale, &hash)) return e->status;
    pm_recording recording;
    uint8_t *base = malloc(e->bench.size + 1);
    if (!base) return pm_fail(PM_NO_MEMORY, "no memory for a crash image");
    pm_finding finding = record_nested(e, hash, base, &recording);
    pm_crash_options options = *e->options;
    options.depth = options.depth ? options.depth - 1 : 0, options.seed ^= hash;
    pm_explorer inner = {.recording = &recording, .options = &options, .result = e->result, .random = hash};
    pm_status status = finding.problem ? pm_fail(PM_INVALID, "%s", finding.text) : copy_expected(&inner, e);
    if (status == PM_OK) status = replay(&inner, levels + 1, level_count - 1, NULL, NULL, image, size);
    pm_explorer_free(&inner);
    free(base);
    return status;
}

static pm_status replay_from(const pm_recording *recording, const pm_crash_options *options, const pm_crash_schedule *levels,
                             uint32_t level_count, pm_crash_callback callback, void *user, pm_crash_result *result, uint8_t **image, uint64_t *size)
{
    *result = (pm_crash_result){0};
    if (!level_count || level_count > PM_CRASH_DEPTH) return pm_fail(PM_INVALID, "a schedule has 1 to %d levels", PM_CRASH_DEPTH);
    pm_explorer e = {.recording = recording, .options = options, .result = result};
    pm_status status = begin(&e);
    if (status == PM_OK) status = replay(&e, levels, level_count, callback, user, image, size);
    pm_explorer_free(&e);
    return status;
}

pm_status pm_crash_judge(const pm_recording *recording, const pm_crash_options *options, const pm_crash_schedule *levels,
                         uint32_t level_count, pm_crash_callback callback, void *user, pm_crash_result *result)
{
    return replay_from(recording, options, levels, level_count, callback, user, result, NULL, NULL);
}

pm_status pm_crash_image(const pm_recording *recording, const pm_crash_options *options, const pm_crash_schedule *levels,
                         uint32_t level_count, uint8_t **image, uint64_t *size)
{
    pm_crash_result result;
    *image = NULL;
    pm_status status = replay_from(recording, options, levels, level_count, NULL, NULL, &result, image, size);
    pm_crash_result_free(&result);
    return status;
}

pm_status pm_crash_cells(const pm_recording *recording, const pm_crash_options *options, uint64_t event, pm_crash_cell **cells,
                         uint64_t *count)
{
    pm_crash_result result = {0};
    pm_crash_schedule out = {0};
    pm_explorer e = {.recording = recording, .options = options, .result = &result};
    pm_status status = check_options(options);
    if (status == PM_OK) status = pm_explorer_go_to(&e, event);
    if (status == PM_OK) {
        pm_explorer_keep_none(&e);
        status = pm_explorer_note(&e, PM_CRASH_NOTHING, 0, &out);
    }
    pm_explorer_free(&e);
    *cells = out.cells, *count = out.cell_count;
    return status;
}

void pm_crash_result_free(pm_crash_result *result)
{
    for (uint32_t i = 0; i < result->level_count; i++) free(result->levels[i].cells);
    result->level_count = 0;
}

void pm_crash_free(void *pointer)
{
    free(pointer);
}
