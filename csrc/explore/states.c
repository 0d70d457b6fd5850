/* The states of a crash point that are evaluated, in the order in which they find most: all, nothing, one line or
 * sector lost, one kept, prefixes, pairs, torn ones, random ones; or all states, if they are few. */
#include "explore/states.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "explore/evaluate.h"
#include "explore/prune.h"
#include "explore/replay.h"
#include "explore/state.h"

enum { SEEN_FIRST = 1 << 12, PROGRESS_EVERY = 256 };

/* ---- images that were evaluated already ----------------------------------------------------------------------- */

static pm_seen_image *seen_slot(const pm_explorer *e, uint64_t image)
{
    size_t at = (size_t)image & (e->seen_room - 1);
    while (e->seen[at].sequence_plus_1 && e->seen[at].image != image) at = (at + 1) & (e->seen_room - 1);
    return &e->seen[at];
}

static pm_status seen_grow(pm_explorer *e)
{
    if (2 * e->seen_count < e->seen_room) return PM_OK;
    pm_seen_image *old = e->seen;
    size_t room = e->seen_room;
    e->seen_room = room ? 2 * room : SEEN_FIRST;
    e->seen = calloc(e->seen_room, sizeof *e->seen);
    if (!e->seen) {
        e->seen = old, e->seen_room = room;
        return pm_fail(PM_NO_MEMORY, "no memory to explore further: give a smaller budget");
    }
    for (size_t i = 0; i < room; i++)
        if (old[i].sequence_plus_1) *seen_slot(e, old[i].image) = old[i];
    free(old);
    return PM_OK;
}

/* ---- one state ---------------------------------------------------------------------------------------------- */

static bool refused(pm_explorer *e, pm_finding *finding)
{
    if (!e->callback || e->callback(e->user, e->sandbox.image, e->sandbox.size, e->bound, e->started)) return false;
    *finding = (pm_finding){.problem = PM_CRASH_CHECK, .sequence = finding->sequence};
    return true;
}

/* Recovers and compares the state in the sandbox, and asks the caller. */
static pm_finding examine(pm_explorer *e, uint32_t stale, uint64_t hash)
{
    enum { READER_ONE_IN = 4 };
    pm_finding finding = {0};
    if (!e->options->raw) {
        /* A single state that is replayed is always opened as a reader would, too. */
        bool reader = !e->point_count || hash % READER_ONE_IN == 0;
        finding = pm_evaluate(&e->sandbox, &e->expected, e->event, e->bound, e->started, reader);
        if (!finding.problem && e->learns) pm_prune_learn(e, stale, finding.sequence);
        if (finding.problem || !e->callback) return finding;
        pm_state_unbuild(e, stale);
        if (e->stop || !pm_state_build(e, stale, &hash)) return finding;
    }
    refused(e, &finding);
    return finding;
}

/* False if the caller wants no more. */
static bool goes_on(pm_explorer *e)
{
    if (!e->stop && e->progress && e->result->evaluated % PROGRESS_EVERY == 0 &&
        !e->progress(e->user, e->result->evaluated, e->options->budget))
        e->stop = true;
    return !e->stop;
}

void pm_states_evaluate(pm_explorer *e, pm_crash_kind kind, uint32_t stale)
{
    uint64_t hash;
    if (!goes_on(e)) return;
    pm_state_set_bound(e);
    e->result->evaluated++;
    e->result->by_kind[kind]++;
    /* A state that keeps everything has a narrower bound. */
    if (e->bound == e->durable && pm_prune_alike(e, stale)) {
        e->result->pruned++;
        return;
    }
    pm_explorer_fail(e, seen_grow(e));
    if (e->stop || !pm_state_build(e, stale, &hash)) return;
    pm_seen_image *seen = seen_slot(e, hash);
    bool again =
        seen->sequence_plus_1 && seen->sequence_plus_1 > e->bound && seen->sequence_plus_1 - 1 <= e->started;
    pm_finding finding = {0};
    if (!again) {
        finding = examine(e, stale, hash);
        e->result->distinct++;
        if (!seen->sequence_plus_1) e->seen_count++;
        *seen = (pm_seen_image){hash, finding.sequence + 1};
    }
    pm_state_unbuild(e, stale);
    if (finding.problem) pm_state_found(e, &finding, kind, stale);
    else if (!again && e->nested_left && pm_explorer_by_chance(e, e->nested_chance)) pm_replay_nest(e, kind, stale);
}

/* ---- the states of one crash point -------------------------------------------------------------------------- */

/* Loses some writes of the cell. */
static void lose(pm_explorer *e, size_t i)
{
    e->keep[i] = (pm_model_keep){(uint32_t)pm_explorer_below(e, e->model.cells[i].count), 0};
}

static void tear(pm_explorer *e, size_t i)
{
    lose(e, i);
    unsigned pieces = pm_model_pieces(&e->model.cells[i], e->keep[i].kept);
    if (pieces < 2) return;
    /* The first pieces, the last ones, all but one, or any: a checksum that leaves out a field fails with one of the
     * first three. */
    uint64_t all = (UINT64_C(1) << pieces) - 1, first = (UINT64_C(1) << (1 + pm_explorer_below(e, pieces - 1))) - 1;
    uint64_t manner = pm_explorer_below(e, 4), one = UINT64_C(1) << pm_explorer_below(e, pieces);
    e->keep[i].torn = manner == 0   ? first
                      : manner == 1 ? all & ~first
                      : manner == 2 ? all & ~one
                                    : 1 + pm_explorer_below(e, all - 1);
}

/* The i-th of `wanted` of `count` numbers, spread evenly and at random within their parts. */
static uint64_t spread(pm_explorer *e, uint64_t i, uint64_t wanted, uint64_t count)
{
    if (wanted >= count) return i;
    uint64_t from = i * count / wanted, to = (i + 1) * count / wanted;
    return from + pm_explorer_below(e, to - from);
}

/* True if this cell begins with another write than the cell before. Cells that one write touched are neighbours. */
static bool begins_write(const pm_model *model, size_t i)
{
    const pm_model_cell *cell = &model->cells[i], *before = cell - 1;
    if (!i || cell->unit != before->unit + 1) return true;
    return cell->writes[0].data != before->writes[0].data + before->writes[0].length;
}

/* Chooses a cell: in rotation any, the first one of its write, and the last one. Headers are at one end of what is
 * written. */
static size_t chosen(pm_explorer *e, uint64_t i, uint64_t wanted)
{
    if (wanted >= e->model.count) return i % e->model.count;
    size_t cell = spread(e, i, wanted, e->model.count);
    if (i % 3 == 1)
        while (!begins_write(&e->model, cell)) cell--;
    if (i % 3 == 2)
        while (cell + 1 < e->model.count && !begins_write(&e->model, cell + 1)) cell++;
    return cell;
}

static void evaluate_singles(pm_explorer *e, pm_crash_kind kind, uint64_t wanted)
{
    size_t count = e->model.count;
    if (!pm_explorer_wants(e, kind)) return;
    uint64_t most = kind == PM_CRASH_TORN ? 8 * count : count; /* a cell can be torn in many ways */
    if (wanted > most) wanted = most;
    for (uint64_t i = 0; i < wanted && !e->stop; i++) {
        size_t cell = chosen(e, i, wanted);
        if (kind == PM_CRASH_KEPT_ONE) {
            pm_state_keep_none(e);
            e->keep[cell] = pm_model_whole(&e->model.cells[cell]);
        } else {
            pm_state_keep_all(e);
            if (kind == PM_CRASH_TORN) tear(e, cell);
            else lose(e, cell);
        }
        pm_states_evaluate(e, kind, 0);
    }
}

/* Loses or keeps all cells of a write that is chosen at random. */
static void whole_write(pm_explorer *e, bool kept)
{
    size_t from = pm_explorer_below(e, e->model.count), end = from + 1;
    while (!begins_write(&e->model, from)) from--;
    while (end < e->model.count && !begins_write(&e->model, end)) end++;
    for (size_t i = from; i < end; i++) e->keep[i] = kept ? pm_model_whole(&e->model.cells[i]) : (pm_model_keep){0};
}

static void evaluate_writes(pm_explorer *e, pm_crash_kind kind, uint64_t wanted)
{
    for (uint64_t i = 0; pm_explorer_wants(e, kind) && e->model.count > 1 && i < wanted && !e->stop; i++) {
        bool kept = kind == PM_CRASH_KEPT_ONE || (kind == PM_CRASH_PAIR && i % 2);
        if (kept) pm_state_keep_none(e);
        else pm_state_keep_all(e);
        whole_write(e, kept);
        if (kind == PM_CRASH_PAIR) whole_write(e, kept);
        pm_states_evaluate(e, kind, 0);
    }
}

static void evaluate_prefixes(pm_explorer *e, uint64_t wanted)
{
    size_t count = e->model.count;
    if (wanted > count) wanted = count;
    for (uint64_t i = 0; pm_explorer_wants(e, PM_CRASH_PREFIX) && i < wanted && !e->stop; i++) {
        size_t edge = spread(e, i, wanted, count);
        pm_state_keep_all(e);
        memset(e->keep + edge, 0, (count - edge) * sizeof *e->keep);
        pm_states_evaluate(e, PM_CRASH_PREFIX, 0);
    }
}

static void evaluate_pairs(pm_explorer *e, uint64_t wanted)
{
    size_t count = e->model.count;
    for (uint64_t i = 0; pm_explorer_wants(e, PM_CRASH_PAIR) && count > 2 && i < wanted && !e->stop; i++) {
        size_t a = pm_explorer_below(e, count), b = pm_explorer_below(e, count);
        if (i % 2) {
            pm_state_keep_all(e);
            lose(e, a);
            lose(e, b);
        } else {
            pm_state_keep_none(e);
            e->keep[a] = pm_model_whole(&e->model.cells[a]);
            e->keep[b] = pm_model_whole(&e->model.cells[b]);
        }
        pm_states_evaluate(e, PM_CRASH_PAIR, 0);
    }
}

static void evaluate_random(pm_explorer *e, uint64_t wanted)
{
    for (uint64_t i = 0; pm_explorer_wants(e, PM_CRASH_RANDOM) && i < wanted && !e->stop; i++) {
        /* Few kept, half of them, or few lost. */
        uint64_t chance = i % 3 == 0 ? 1 : i % 3 == 1 ? 8 : 15;
        for (size_t j = 0; j < e->model.count; j++) {
            e->keep[j] = pm_explorer_below(e, 16) < chance ? pm_model_whole(&e->model.cells[j]) : (pm_model_keep){0};
            if (!e->keep[j].kept && pm_explorer_below(e, 4) == 0) {
                if (pm_model_tears(&e->model, &e->model.cells[j])) tear(e, j);
                else lose(e, j);
            }
        }
        pm_states_evaluate(e, PM_CRASH_RANDOM, 0);
    }
}

static void evaluate_every(pm_explorer *e)
{
    uint64_t *numbers = calloc(e->model.count + 1, sizeof *numbers);
    if (!numbers) {
        pm_explorer_fail(e, pm_fail(PM_NO_MEMORY, "no memory to explore"));
        return;
    }
    for (size_t carry = 0; carry < e->model.count + (e->model.count == 0) && !e->stop;) {
        for (size_t i = 0; i < e->model.count; i++)
            e->keep[i] = pm_model_way(&e->model, &e->model.cells[i], numbers[i]);
        pm_states_evaluate(e, PM_CRASH_EXHAUSTIVE, 0);
        for (carry = 0; carry < e->model.count; carry++) {
            if (++numbers[carry] < (uint64_t)pm_model_ways(&e->model, &e->model.cells[carry])) break;
            numbers[carry] = 0;
        }
        if (!e->model.count) break;
    }
    free(numbers);
}

static void evaluate_stale(pm_explorer *e, uint64_t wanted)
{
    bool any = e->model.visible > e->recording->base_size && !e->model.memory;
    for (uint64_t i = 0; any && pm_explorer_wants(e, PM_CRASH_STALE) && i < wanted && !e->stop; i++) {
        pm_state_keep_all(e);
        for (size_t j = 0; i % 2 && j < e->model.count; j++)
            if (e->model.cells[j].unit != PM_MODEL_SIZE) e->keep[j] = (pm_model_keep){0};
        pm_states_evaluate(e, PM_CRASH_STALE, 2 + (uint32_t)pm_explorer_below(e, 1 << 12));
    }
}

static bool few(const pm_explorer *e, const pm_crash_point *p)
{
    double ways = p->digits < 9 ? round(pow(10, p->digits)) : 1e9;
    return ways <= e->options->exhaustive && ways <= (double)p->quota && pm_explorer_wants(e, PM_CRASH_EXHAUSTIVE);
}

void pm_states_evaluate_point(pm_explorer *e, const pm_crash_point *p)
{
    if (e->kill_chance && pm_explorer_by_chance(e, e->kill_chance / (double)e->point_count)) pm_replay_nest_killed(e);
    if (few(e, p)) {
        evaluate_every(e);
        evaluate_stale(e, 2);
        return;
    }
    uint64_t end = e->result->evaluated + p->quota;
    e->result->sampled_points++;
    pm_state_keep_all(e);
    if (pm_explorer_wants(e, PM_CRASH_ALL)) pm_states_evaluate(e, PM_CRASH_ALL, 0);
    pm_state_keep_none(e);
    if (pm_explorer_wants(e, PM_CRASH_NOTHING)) pm_states_evaluate(e, PM_CRASH_NOTHING, 0);
    uint64_t left = p->quota > 2 ? p->quota - 2 : 0;
    evaluate_singles(e, PM_CRASH_LOST_ONE, left * 20 / 100);
    evaluate_writes(e, PM_CRASH_LOST_ONE, left * 5 / 100 + 1);
    evaluate_singles(e, PM_CRASH_KEPT_ONE, left * 15 / 100);
    evaluate_writes(e, PM_CRASH_KEPT_ONE, left * 5 / 100 + 1);
    evaluate_prefixes(e, left * 10 / 100);
    evaluate_pairs(e, left * 6 / 100 + 1);
    evaluate_writes(e, PM_CRASH_PAIR, left * 4 / 100);
    if (e->model.memory) evaluate_singles(e, PM_CRASH_TORN, left * 20 / 100);
    evaluate_stale(e, 1 + left * 5 / 100);
    evaluate_random(e, end > e->result->evaluated ? end - e->result->evaluated : 0);
}
