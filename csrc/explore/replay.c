/* Crashes in the recovery of a crash, and after it; the replay of single states; the C interface. */
#include "explore/replay.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "explore/evaluate.h"
#include "explore/explore.h"
#include "explore/state.h"
#include "explore/states.h"

/* Crashes are explored in and after the recovery of some of the states. Each exploration takes so many states, and all
 * together add about a quarter to the budget. */
enum { NESTED_BUDGET = 60, NESTED_SHARE = 4, NESTED_LEAST = 4 };

/* ---- crashes inside recovery, and after it ------------------------------------------------------------------ */

/* The recording of a recovery, and of what follows it. */
typedef struct {
    pm_recording recording;
    uint64_t skip; /* its first events, which belong to the run before */
    uint8_t *base;
    pm_event *events;
    uint8_t *data;
} second_run;

static void second_run_free(second_run *run)
{
    free(run->base);
    free(run->events);
    free(run->data);
}

/* After a crash of the machine: nothing but the image in e's sandbox is left. */
static pm_status after_crash(pm_explorer *e, uint64_t size, second_run *run)
{
    run->recording = (pm_recording){.base = run->base,
                                     .base_size = size,
                                     .events = pm_trace_events(e->sandbox.trace),
                                     .count = pm_trace_count(e->sandbox.trace),
                                     .data = pm_trace_data(e->sandbox.trace),
                                     .data_size = pm_trace_bytes(e->sandbox.trace),
                                     .acknowledged = e->bound,
                                     .started = e->started};
    return PM_OK;
}

/* After a kill of the process: the writes on their way are still on their way, after those that recovery finds in the
 * cache. */
static pm_status after_kill(pm_explorer *e, second_run *run)
{
    const pm_recording *outer = e->recording;
    uint64_t count = pm_trace_count(e->sandbox.trace), data_size = pm_trace_bytes(e->sandbox.trace);
    run->skip = e->event;
    run->events = malloc((e->event + count + 1) * sizeof *run->events);
    run->data = malloc(outer->data_size + data_size + 1);
    if (!run->events || !run->data) return pm_fail(PM_NO_MEMORY, "no memory to explore");
    memcpy(run->events, outer->events, e->event * sizeof *run->events);
    if (outer->data_size) memcpy(run->data, outer->data, outer->data_size);
    if (count) memcpy(run->events + e->event, pm_trace_events(e->sandbox.trace), count * sizeof *run->events);
    if (data_size) memcpy(run->data + outer->data_size, pm_trace_data(e->sandbox.trace), data_size);
    for (uint64_t i = e->event; i < e->event + count; i++) run->events[i].data += outer->data_size;
    run->recording = *outer;
    run->recording.events = run->events, run->recording.count = e->event + count;
    run->recording.data = run->data, run->recording.data_size = outer->data_size + data_size;
    return PM_OK;
}

/* Recovers the state in e's sandbox and commits more, under a recorder. */
static pm_status run_again(pm_explorer *e, uint64_t image, bool killed, second_run *run, pm_finding *finding)
{
    uint64_t size = e->sandbox.size;
    run->base = malloc(size + 1);
    if (!run->base) return pm_fail(PM_NO_MEMORY, "no memory to explore");
    memcpy(run->base, e->sandbox.image, size);
    *finding = pm_evaluate_going_on(&e->sandbox, (image ^ e->options->seed) | 1);
    return killed ? after_kill(e, run) : after_crash(e, size, run);
}

/* The states that e's crash may end in. After a kill, whose recording contains e's events, only the states before
 * them. */
static pm_status copy_expected(pm_explorer *inner, const pm_explorer *e, bool killed)
{
    inner->expected =
        (pm_expectations){malloc((e->expected.count + 1) * sizeof *e->expected.states), 0, e->expected.count + 1};
    if (!inner->expected.states) return pm_fail(PM_NO_MEMORY, "no memory to explore");
    for (size_t i = 0; i < e->expected.count; i++) {
        pm_expected state = e->expected.states[i];
        if (killed ? state.from : e->event < state.from || e->event > state.until) continue;
        state.from = 0, state.until = UINT64_MAX;
        inner->expected.states[inner->expected.count++] = state;
    }
    return pm_evaluate_expect(&inner->expected, inner->recording);
}

static void take_inner_result(pm_explorer *e, const pm_crash_result *inner, pm_crash_kind kind, uint32_t stale)
{
    e->result->nested += inner->evaluated + inner->nested;
    if (!inner->problem) return;
    pm_finding finding = {.problem = inner->problem, .sequence = inner->sequence};
    memcpy(finding.text, inner->text, sizeof finding.text);
    pm_state_found(e, &finding, kind, stale);
    e->result->level_count = 1 + inner->level_count;
    memcpy(&e->result->levels[1], inner->levels, inner->level_count * sizeof inner->levels[0]);
}

/* Allows nested explorations; half of them begin with a kill. */
static void allow_nesting(pm_explorer *e, uint64_t most)
{
    if (!e->options->depth || e->options->raw) return;
    e->nested_left = most;
    e->nested_chance = (double)most * 2 / (double)(e->options->budget + 1);
    e->kill_chance = (double)most / 2;
}

/* Finds the states that the inner run may end in. Commits that contradict each other are a finding. */
static pm_status begin_inner(pm_explorer *inner, const pm_explorer *e, bool killed, pm_finding *finding)
{
    pm_status status = copy_expected(inner, e, killed);
    if (status != PM_INVALID) return status;
    *finding = (pm_finding){.problem = PM_CRASH_WRITE, .sequence = finding->sequence};
    strncpy(finding->text, pm_message(), sizeof finding->text - 1);
    return PM_OK;
}

static void explore_inside(pm_explorer *e, uint64_t image, bool killed, pm_finding *finding, pm_crash_result *result)
{
    second_run run = {.skip = 0};
    pm_crash_options options = *e->options;
    options.depth--, options.budget = NESTED_BUDGET, options.worker = options.workers = 0, options.seed ^= image;
    options.kinds |= 1 << PM_CRASH_PREFIX;
    pm_explorer inner = {.recording = &run.recording, .options = &options, .result = result, .random = image};
    allow_nesting(&inner, 1);
    pm_status status = run_again(e, image, killed, &run, finding);
    inner.skip = run.skip;
    if (status == PM_OK && !finding->problem) {
        status = begin_inner(&inner, e, killed, finding);
        if (status == PM_OK && !finding->problem) status = pm_explore_run(&inner);
    }
    pm_explorer_fail(e, status);
    pm_explore_free(&inner);
    second_run_free(&run);
}

static void nest(pm_explorer *e, pm_crash_kind kind, uint32_t stale, bool killed)
{
    uint64_t image;
    pm_finding finding = {0};
    pm_crash_result result = {0};
    if (!pm_state_build(e, stale, &image)) return;
    pm_state_set_bound(e);
    explore_inside(e, image, killed, &finding, &result);
    pm_state_unbuild(e, stale);
    if (finding.problem) pm_state_found(e, &finding, kind, stale);
    else take_inner_result(e, &result, kind, stale);
    e->result->levels[0].killed = killed;
}

void pm_replay_nest(pm_explorer *e, pm_crash_kind kind, uint32_t stale)
{
    e->nested_left--;
    nest(e, kind, stale, false);
}

void pm_replay_nest_killed(pm_explorer *e)
{
    pm_state_keep_all(e);
    nest(e, PM_CRASH_PREFIX, 0, true);
}

/* ---- the C interface ---------------------------------------------------------------------------------------- */

static pm_status check_options(const pm_crash_options *options)
{
    if (options->media != PM_MEDIA_MEMORY && options->media != PM_MEDIA_FILE)
        return pm_fail(PM_INVALID, "media is memory or file");
    if (options->depth >= PM_CRASH_DEPTH) return pm_fail(PM_INVALID, "depth is at most %d", PM_CRASH_DEPTH - 1);
    return PM_OK;
}

static pm_status begin(pm_explorer *e)
{
    PM_TRY(check_options(e->options));
    e->random = e->options->seed;
    return e->options->raw ? PM_OK : pm_evaluate_expect(&e->expected, e->recording);
}

pm_status pm_crash_explore(const pm_recording *recording, const pm_crash_options *options, pm_crash_callback callback,
                           pm_crash_progress progress, void *user, pm_crash_result *result)
{
    *result = (pm_crash_result){0};
    pm_explorer e = {.recording = recording,
                     .options = options,
                     .callback = callback,
                     .progress = progress,
                     .user = user,
                     .result = result};
    pm_status status = begin(&e);
    allow_nesting(&e, options->budget / NESTED_SHARE / NESTED_BUDGET + NESTED_LEAST);
    if (status == PM_OK) status = pm_explore_run(&e);
    pm_explore_free(&e);
    return status;
}

/* Goes to the schedule's event, and keeps what it says. */
static pm_status choose(pm_explorer *e, const pm_crash_schedule *schedule)
{
    PM_TRY(pm_explore_go_to(e, schedule->event));
    uint64_t used = 0;
    for (size_t i = 0; i < e->model.count; i++)
        for (uint64_t j = 0; j < schedule->cell_count; j++) {
            const pm_crash_cell *cell = &schedule->cells[j];
            if (cell->offset != pm_state_offset(&e->model, &e->model.cells[i])) continue;
            if (cell->kept > e->model.cells[i].count)
                return pm_fail(PM_INVALID, "the schedule is of another recording: it keeps more writes than there are");
            e->keep[i] = (pm_model_keep){cell->kept, e->model.memory ? cell->torn : 0}; /* M2 */
            used++;
        }
    if (used != schedule->cell_count)
        return pm_fail(PM_INVALID, "the schedule is of another recording: a cell of it has no write on its way");
    return PM_OK;
}

/* Evaluates whether the recovered state can be committed to, as pm_replay_nest does. */
static pm_status evaluate_going_on(pm_explorer *e, const pm_crash_schedule *level)
{
    uint64_t hash;
    pm_finding finding = {0};
    second_run run = {.skip = 0};
    pm_explorer inner = {.recording = &run.recording};
    if (e->stop || e->options->raw || !pm_state_build(e, level->stale, &hash)) return e->status;
    pm_state_set_bound(e);
    pm_status status = run_again(e, hash, level->killed, &run, &finding);
    if (status == PM_OK && !finding.problem) status = begin_inner(&inner, e, level->killed, &finding);
    pm_state_unbuild(e, level->stale);
    if (finding.problem) pm_state_found(e, &finding, (pm_crash_kind)level->kind, level->stale);
    e->result->levels[0].killed = level->killed;
    pm_explore_free(&inner);
    second_run_free(&run);
    return status == PM_OK ? e->status : status;
}

/* Builds the state of the last level in the sandbox of its own explorer. */
static pm_status replay(pm_explorer *e, const pm_crash_schedule *levels, uint32_t level_count,
                        pm_crash_callback callback, void *user, uint8_t **image, uint64_t *size)
{
    uint64_t hash;
    PM_TRY(choose(e, levels));
    if (level_count == 1) {
        if (!image) {
            e->callback = callback, e->user = user;
            pm_states_evaluate(e, (pm_crash_kind)levels->kind, levels->stale);
            return evaluate_going_on(e, levels);
        }
        if (!pm_state_build(e, levels->stale, &hash)) return e->status;
        *size = e->sandbox.size;
        *image = malloc(*size + 1);
        if (!*image) return pm_fail(PM_NO_MEMORY, "no memory for a crash image");
        memcpy(*image, e->sandbox.image, *size);
        return PM_OK;
    }
    if (!pm_state_build(e, levels->stale, &hash)) return e->status;
    pm_state_set_bound(e);
    second_run run = {.skip = 0};
    pm_finding finding = {0};
    pm_crash_options options = *e->options;
    options.depth = options.depth ? options.depth - 1 : 0, options.seed ^= hash;
    pm_explorer inner = {.recording = &run.recording, .options = &options, .result = e->result, .random = hash};
    pm_status status = run_again(e, hash, levels->killed, &run, &finding);
    if (status == PM_OK && finding.problem) status = pm_fail(PM_INVALID, "%s", finding.text);
    if (status == PM_OK) status = copy_expected(&inner, e, levels->killed);
    if (status == PM_OK) status = replay(&inner, levels + 1, level_count - 1, NULL, NULL, image, size);
    pm_explore_free(&inner);
    second_run_free(&run);
    return status;
}

static pm_status replay_from(const pm_recording *recording, const pm_crash_options *options,
                             const pm_crash_schedule *levels, uint32_t level_count, pm_crash_callback callback,
                             void *user, pm_crash_result *result, uint8_t **image, uint64_t *size)
{
    *result = (pm_crash_result){0};
    if (!level_count || level_count > PM_CRASH_DEPTH)
        return pm_fail(PM_INVALID, "a schedule has 1 to %d levels", PM_CRASH_DEPTH);
    pm_explorer e = {.recording = recording, .options = options, .result = result};
    pm_status status = begin(&e);
    if (status == PM_OK) status = replay(&e, levels, level_count, callback, user, image, size);
    pm_explore_free(&e);
    return status;
}

pm_status pm_crash_evaluate(const pm_recording *recording, const pm_crash_options *options,
                            const pm_crash_schedule *levels, uint32_t level_count, pm_crash_callback callback,
                            void *user, pm_crash_result *result)
{
    return replay_from(recording, options, levels, level_count, callback, user, result, NULL, NULL);
}

pm_status pm_crash_image(const pm_recording *recording, const pm_crash_options *options,
                         const pm_crash_schedule *levels, uint32_t level_count, uint8_t **image, uint64_t *size)
{
    pm_crash_result result;
    *image = NULL;
    pm_status status = replay_from(recording, options, levels, level_count, NULL, NULL, &result, image, size);
    pm_crash_result_free(&result);
    return status;
}

pm_status pm_crash_cells(const pm_recording *recording, const pm_crash_options *options, uint64_t event,
                         pm_crash_cell **cells, uint64_t *count)
{
    pm_crash_result result = {0};
    pm_crash_schedule out = {0};
    pm_explorer e = {.recording = recording, .options = options, .result = &result};
    pm_status status = check_options(options);
    if (status == PM_OK) status = pm_explore_go_to(&e, event);
    if (status == PM_OK) {
        pm_state_keep_none(&e);
        status = pm_state_note(&e, PM_CRASH_NOTHING, 0, &out);
    }
    pm_explore_free(&e);
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
