/* The states of a crash point that are judged, in the order in which they find most: all, nothing, one line or sector
 * lost, one kept, prefixes, pairs, torn ones, random ones; all that there are, if they are few. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "crash_explorer.h"
#include "status.h"

enum { SEEN_FIRST = 1 << 12, PROGRESS_EVERY = 256 };

uint64_t pm_explorer_below(pm_explorer *e, uint64_t end)
{
    return end ? pm_explorer_random(e) % end : 0;
}

/* ---- images that were judged already ------------------------------------------------------------------------ */

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

static int ascending(const void *a, const void *b)
{
    const pm_crash_cell *x = a, *y = b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

uint64_t pm_explorer_offset(const pm_model *model, const pm_model_cell *cell)
{
    return cell->unit == PM_MODEL_SIZE ? PM_CRASH_SIZE_CELL : cell->unit * model->unit_size;
}

/* The cells of which not all is kept. */
pm_status pm_explorer_note(const pm_explorer *e, pm_crash_kind kind, uint32_t stale, pm_crash_schedule *out)
{
    *out = (pm_crash_schedule){
        .event = e->event, .kind = kind, .stale = stale, .acknowledged = e->bound, .started = e->started};
    out->cells = malloc((e->model.count + 1) * sizeof *out->cells);
    if (!out->cells) return pm_fail(PM_NO_MEMORY, "no memory to note a crash");
    for (size_t i = 0; i < e->model.count; i++) {
        const pm_model_cell *cell = &e->model.cells[i];
        if (e->keep[i].kept == cell->count) continue;
        out->cells[out->cell_count++] =
            (pm_crash_cell){pm_explorer_offset(&e->model, cell), e->keep[i].torn, e->keep[i].kept, cell->count};
    }
    qsort(out->cells, out->cell_count, sizeof *out->cells, ascending);
    return PM_OK;
}

void pm_explorer_found(pm_explorer *e, const pm_finding *finding, pm_crash_kind kind, uint32_t stale)
{
    pm_crash_result *result = e->result;
    pm_explorer_fail(e, pm_explorer_note(e, kind, stale, &result->levels[0]));
    result->level_count = 1;
    result->problem = finding->problem;
    result->sequence = finding->sequence;
    memcpy(result->text, finding->text, sizeof result->text);
    e->stop = true;
}

/* Builds the image of the chosen cells on the bench, which shows what is durable; false: it could not be. */
bool pm_explorer_build(pm_explorer *e, uint32_t stale, uint64_t *hash)
{
    uint64_t size;
    *hash = pm_model_build(&e->model, e->keep, stale, e->bench.image, &size);
    pm_explorer_fail(e, pm_workbench_fit(&e->bench, size, e->model.durable));
    return !e->stop;
}

void pm_explorer_unbuild(pm_explorer *e, uint32_t stale)
{
    pm_workbench_restore(&e->bench, e->bench.size, e->model.durable);
    /* What lies behind a size that was lost comes back with it. */
    pm_explorer_fail(e, pm_workbench_fit(&e->bench, e->model.visible, e->model.durable));
    if (!e->stop || e->bench.size >= e->model.visible) pm_model_unbuild(&e->model, stale, e->bench.image);
}

static bool refused(pm_explorer *e, pm_finding *finding)
{
    if (!e->callback || e->callback(e->user, e->bench.image, e->bench.size, e->bound, e->started)) return false;
    *finding = (pm_finding){.problem = PM_CRASH_CHECK, .sequence = finding->sequence};
    return true;
}

/* Recovers and compares the state on the bench, and asks the caller. */
static pm_finding look_at(pm_explorer *e, uint32_t stale, uint64_t hash)
{
    enum { READER_ONE_IN = 4 };
    pm_finding finding = {0};
    if (!e->options->raw) {
        /* A single state that is replayed is always looked at as a reader would, too. */
        bool reader = !e->point_count || hash % READER_ONE_IN == 0;
        finding = pm_judge(&e->bench, &e->expected, e->event, e->bound, e->started, reader);
        if (!finding.problem && e->learns) pm_explorer_learn_alike(e, stale, finding.sequence);
        if (finding.problem || !e->callback) return finding;
        pm_explorer_unbuild(e, stale);
        if (e->stop || !pm_explorer_build(e, stale, &hash)) return finding;
    }
    refused(e, &finding);
    return finding;
}

/* Whether the caller has had enough. */
static bool goes_on(pm_explorer *e)
{
    if (!e->stop && e->progress && e->result->judged % PROGRESS_EVERY == 0 &&
        !e->progress(e->user, e->result->judged, e->options->budget))
        e->stop = true;
    return !e->stop;
}

void pm_explorer_set_bound(pm_explorer *e)
{
    e->bound = e->acknowledged;
    for (size_t i = 0; i < e->model.count && e->bound != e->durable; i++)
        if (e->keep[i].kept < e->model.cells[i].count) e->bound = e->durable;
}

void pm_explorer_judge(pm_explorer *e, pm_crash_kind kind, uint32_t stale)
{
    uint64_t hash;
    if (!goes_on(e)) return;
    pm_explorer_set_bound(e);
    e->result->judged++;
    e->result->by_kind[kind]++;
    /* The bound of one that keeps everything is a narrower one. */
    if (e->bound == e->durable && pm_explorer_alike(e, stale)) {
        e->result->pruned++;
        return;
    }
    pm_explorer_fail(e, seen_grow(e));
    if (e->stop || !pm_explorer_build(e, stale, &hash)) return;
    pm_seen_image *seen = seen_slot(e, hash);
    bool again =
        seen->sequence_plus_1 && seen->sequence_plus_1 > e->bound && seen->sequence_plus_1 - 1 <= e->started;
    pm_finding finding = {0};
    if (!again) {
        finding = look_at(e, stale, hash);
        e->result->distinct++;
        if (!seen->sequence_plus_1) e->seen_count++;
        *seen = (pm_seen_image){hash, finding.sequence + 1};
    }
    pm_explorer_unbuild(e, stale);
    if (finding.problem) pm_explorer_found(e, &finding, kind, stale);
    else if (!again && e->nested_left && pm_explorer_by_chance(e, e->nested_chance)) pm_explorer_nest(e, kind, stale);
}

/* ---- the states of one crash point -------------------------------------------------------------------------- */

void pm_explorer_keep_all(pm_explorer *e)
{
    for (size_t i = 0; i < e->model.count; i++) e->keep[i] = pm_model_whole(&e->model.cells[i]);
}

void pm_explorer_keep_none(pm_explorer *e)
{
    memset(e->keep, 0, e->model.count * sizeof *e->keep);
}

/* Not all of the cell, by as little as may be. */
static void lose(pm_explorer *e, size_t i)
{
    e->keep[i] = (pm_model_keep){(uint32_t)pm_explorer_below(e, e->model.cells[i].count), 0};
}

static void tear(pm_explorer *e, size_t i)
{
    lose(e, i);
    unsigned pieces = pm_model_pieces(&e->model.cells[i], e->keep[i].kept);
    if (pieces < 2) return;
    /* The first ones, the last ones, all but one, or any: a checksum that leaves out a field fails with one of the
     * first three. */
    uint64_t all = (UINT64_C(1) << pieces) - 1, first = (UINT64_C(1) << (1 + pm_explorer_below(e, pieces - 1))) - 1;
    uint64_t manner = pm_explorer_below(e, 4), one = UINT64_C(1) << pm_explorer_below(e, pieces);
    e->keep[i].torn = manner == 0   ? first
                      : manner == 1 ? all & ~first
                      : manner == 2 ? all & ~one
                                    : 1 + pm_explorer_below(e, all - 1);
}

/* `wanted` of `count` numbers, spread evenly and at random within their parts. */
static uint64_t spread(pm_explorer *e, uint64_t i, uint64_t wanted, uint64_t count)
{
    if (wanted >= count) return i;
    uint64_t from = i * count / wanted, to = (i + 1) * count / wanted;
    return from + pm_explorer_below(e, to - from);
}

/* Cells that one write touched stand one behind the other; true if this one begins with another write than the one
 * before. */
static bool begins_write(const pm_model *model, size_t i)
{
    const pm_model_cell *cell = &model->cells[i], *before = cell - 1;
    if (!i || cell->unit != before->unit + 1) return true;
    return cell->writes[0].data != before->writes[0].data + before->writes[0].length;
}

/* A cell: by turns any, the first one of its write, and the last one. Headers stand at one end of what is written. */
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

static void judge_singles(pm_explorer *e, pm_crash_kind kind, uint64_t wanted)
{
    size_t count = e->model.count;
    if (!pm_explorer_wants(e, kind)) return;
    uint64_t most = kind == PM_CRASH_TORN ? 8 * count : count; /* a cell can be torn in many ways */
    if (wanted > most) wanted = most;
    for (uint64_t i = 0; i < wanted && !e->stop; i++) {
        size_t cell = chosen(e, i, wanted);
        if (kind == PM_CRASH_KEPT_ONE) {
            pm_explorer_keep_none(e);
            e->keep[cell] = pm_model_whole(&e->model.cells[cell]);
        } else {
            pm_explorer_keep_all(e);
            if (kind == PM_CRASH_TORN) tear(e, cell);
            else lose(e, cell);
        }
        pm_explorer_judge(e, kind, 0);
    }
}

/* The cells of the write that a cell chosen at random belongs to are lost, or kept, all of them. */
static void whole_write(pm_explorer *e, bool kept)
{
    size_t from = pm_explorer_below(e, e->model.count), end = from + 1;
    while (!begins_write(&e->model, from)) from--;
    while (end < e->model.count && !begins_write(&e->model, end)) end++;
    for (size_t i = from; i < end; i++) e->keep[i] = kept ? pm_model_whole(&e->model.cells[i]) : (pm_model_keep){0};
}

static void judge_writes(pm_explorer *e, pm_crash_kind kind, uint64_t wanted)
{
    for (uint64_t i = 0; pm_explorer_wants(e, kind) && e->model.count > 1 && i < wanted && !e->stop; i++) {
        bool kept = kind == PM_CRASH_KEPT_ONE || (kind == PM_CRASH_PAIR && i % 2);
        if (kept) pm_explorer_keep_none(e);
        else pm_explorer_keep_all(e);
        whole_write(e, kept);
        if (kind == PM_CRASH_PAIR) whole_write(e, kept);
        pm_explorer_judge(e, kind, 0);
    }
}

static void judge_prefixes(pm_explorer *e, uint64_t wanted)
{
    size_t count = e->model.count;
    if (wanted > count) wanted = count;
    for (uint64_t i = 0; pm_explorer_wants(e, PM_CRASH_PREFIX) && i < wanted && !e->stop; i++) {
        size_t edge = spread(e, i, wanted, count);
        pm_explorer_keep_all(e);
        memset(e->keep + edge, 0, (count - edge) * sizeof *e->keep);
        pm_explorer_judge(e, PM_CRASH_PREFIX, 0);
    }
}

static void judge_pairs(pm_explorer *e, uint64_t wanted)
{
    size_t count = e->model.count;
    for (uint64_t i = 0; pm_explorer_wants(e, PM_CRASH_PAIR) && count > 2 && i < wanted && !e->stop; i++) {
        size_t a = pm_explorer_below(e, count), b = pm_explorer_below(e, count);
        if (i % 2) {
            pm_explorer_keep_all(e);
            lose(e, a);
            lose(e, b);
        } else {
            pm_explorer_keep_none(e);
            e->keep[a] = pm_model_whole(&e->model.cells[a]);
            e->keep[b] = pm_model_whole(&e->model.cells[b]);
        }
        pm_explorer_judge(e, PM_CRASH_PAIR, 0);
    }
}

static void judge_random(pm_explorer *e, uint64_t wanted)
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
        pm_explorer_judge(e, PM_CRASH_RANDOM, 0);
    }
}

static void judge_every(pm_explorer *e)
{
    uint64_t *numbers = calloc(e->model.count + 1, sizeof *numbers);
    if (!numbers) {
        pm_explorer_fail(e, pm_fail(PM_NO_MEMORY, "no memory to explore"));
        return;
    }
    for (size_t carry = 0; carry < e->model.count + (e->model.count == 0) && !e->stop;) {
        for (size_t i = 0; i < e->model.count; i++)
            e->keep[i] = pm_model_way(&e->model, &e->model.cells[i], numbers[i]);
        pm_explorer_judge(e, PM_CRASH_EXHAUSTIVE, 0);
        for (carry = 0; carry < e->model.count; carry++) {
            if (++numbers[carry] < (uint64_t)pm_model_ways(&e->model, &e->model.cells[carry])) break;
            numbers[carry] = 0;
        }
        if (!e->model.count) break;
    }
    free(numbers);
}

static void judge_stale(pm_explorer *e, uint64_t wanted)
{
    bool any = e->model.visible > e->recording->base_size && !e->model.memory;
    for (uint64_t i = 0; any && pm_explorer_wants(e, PM_CRASH_STALE) && i < wanted && !e->stop; i++) {
        pm_explorer_keep_all(e);
        for (size_t j = 0; i % 2 && j < e->model.count; j++)
            if (e->model.cells[j].unit != PM_MODEL_SIZE) e->keep[j] = (pm_model_keep){0};
        pm_explorer_judge(e, PM_CRASH_STALE, 2 + (uint32_t)pm_explorer_below(e, 1 << 12));
    }
}

static bool few(const pm_explorer *e, const pm_crash_point *p)
{
    double ways = p->digits < 9 ? round(pow(10, p->digits)) : 1e9;
    return ways <= e->options->exhaustive && ways <= (double)p->quota && pm_explorer_wants(e, PM_CRASH_EXHAUSTIVE);
}

void pm_explorer_judge_point(pm_explorer *e, const pm_crash_point *p)
{
    if (e->kill_chance && pm_explorer_by_chance(e, e->kill_chance / (double)e->point_count)) pm_explorer_nest_killed(e);
    if (few(e, p)) {
        judge_every(e);
        judge_stale(e, 2);
        return;
    }
    uint64_t end = e->result->judged + p->quota;
    e->result->sampled_points++;
    pm_explorer_keep_all(e);
    if (pm_explorer_wants(e, PM_CRASH_ALL)) pm_explorer_judge(e, PM_CRASH_ALL, 0);
    pm_explorer_keep_none(e);
    if (pm_explorer_wants(e, PM_CRASH_NOTHING)) pm_explorer_judge(e, PM_CRASH_NOTHING, 0);
    uint64_t left = p->quota > 2 ? p->quota - 2 : 0;
    judge_singles(e, PM_CRASH_LOST_ONE, left * 20 / 100);
    judge_writes(e, PM_CRASH_LOST_ONE, left * 5 / 100 + 1);
    judge_singles(e, PM_CRASH_KEPT_ONE, left * 15 / 100);
    judge_writes(e, PM_CRASH_KEPT_ONE, left * 5 / 100 + 1);
    judge_prefixes(e, left * 10 / 100);
    judge_pairs(e, left * 6 / 100 + 1);
    judge_writes(e, PM_CRASH_PAIR, left * 4 / 100);
    if (e->model.memory) judge_singles(e, PM_CRASH_TORN, left * 20 / 100);
    judge_stale(e, 1 + left * 5 / 100);
    judge_random(e, end > e->result->judged ? end - e->result->judged : 0);
}
