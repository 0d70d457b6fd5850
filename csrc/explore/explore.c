/*
 * Chooses the crash points, and divides the budget among them. A first walk over the recording counts the states that
 * could be evaluated; a second one evaluates. All choices follow from the seed.
 */
#include "explore/explore.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "explore/evaluate.h"
#include "explore/prune.h"
#include "explore/sandbox.h"
#include "explore/state.h"
#include "explore/states.h"

/* ---- walking the recording ---------------------------------------------------------------------------------- */

static bool acknowledges(const pm_event *event)
{
    return event->kind == PM_EVENT_COMMIT_END || event->kind == PM_EVENT_RECOVERED;
}

static void move_bounds(pm_explorer *e, const pm_event *event)
{
    if (event->kind == PM_EVENT_COMMIT_BEGIN && event->offset > e->started) e->started = event->offset;
    if (acknowledges(event)) e->acknowledged = e->started = event->offset;
    if (event->kind == PM_EVENT_OPEN) e->lazily = false;
    if (event->kind == PM_EVENT_DURABLE) e->lazily = true;
    bool durable = event->kind == PM_EVENT_RECOVERED || (event->kind == PM_EVENT_COMMIT_END && !e->lazily);
    if (durable || event->kind == PM_EVENT_DURABLE) e->durable = event->offset;
}

/* Room to note what is kept of each cell. */
static pm_status make_keep(pm_explorer *e)
{
    if (e->model.no_memory) return pm_fail(PM_NO_MEMORY, "no memory to explore");
    if (e->model.count < e->keep_room) return PM_OK;
    size_t room = 2 * e->model.count + 64;
    pm_model_keep *keep = realloc(e->keep, room * sizeof *keep);
    if (!keep) return pm_fail(PM_NO_MEMORY, "no memory to explore");
    e->keep = keep, e->keep_room = room;
    return PM_OK;
}

static void feed(pm_explorer *e, const pm_event *event)
{
    /* The file is as long as the program sees it, so that the sandbox can show what becomes durable there. */
    uint64_t end = event->kind == PM_EVENT_GROW ? event->offset : event->has_data ? event->offset + event->length : 0;
    if (end > e->sandbox.size) pm_explorer_fail(e, pm_sandbox_fit(&e->sandbox, end, e->model.durable));
    pm_model_feed(&e->model, e->recording, event);
    move_bounds(e, event);
}

static pm_status start_walk(pm_explorer *e)
{
    pm_model_free(&e->model);
    PM_TRY(pm_model_init(&e->model, e->recording, e->options));
    e->durable = e->acknowledged = e->recording->acknowledged, e->started = e->recording->started;
    e->lazily = false;
    e->event = 0;
    return PM_OK;
}

static pm_status show_base(pm_explorer *e)
{
    pm_sandbox_free(&e->sandbox);
    PM_TRY(pm_sandbox_init(&e->sandbox, e->model.capacity, (pm_media_kind)e->options->media));
    e->model.mirror = e->sandbox.image;
    return pm_sandbox_fit(&e->sandbox, e->recording->base_size, e->model.durable);
}

static pm_status add_point(pm_explorer *e, uint64_t writes)
{
    if (e->point_count == e->point_room) {
        size_t room = e->point_room ? 2 * e->point_room : 256;
        pm_crash_point *points = realloc(e->points, room * sizeof *points);
        if (!points) return pm_fail(PM_NO_MEMORY, "no memory to explore");
        e->points = points, e->point_room = room;
    }
    double digits = 0;
    for (size_t i = 0; i < e->model.count; i++) digits += log10(pm_model_ways(&e->model, &e->model.cells[i]));
    e->points[e->point_count++] =
        (pm_crash_point){.event = e->event, .writes = writes, .cells = e->model.count, .digits = digits};
    return PM_OK;
}

/* Finds the crash points. Right before an event that orders writes, all writes since the last such event may be lost.
 * So its states include those of earlier crashes, except for the bounds, which change at marks only. */
static pm_status find_points(pm_explorer *e)
{
    uint64_t writes = 0;
    bool news = true;
    PM_TRY(start_walk(e));
    for (e->event = 0; e->event <= e->recording->count; e->event++) {
        const pm_event *event = e->event < e->recording->count ? &e->recording->events[e->event] : NULL;
        if (e->event >= e->skip && (!event || pm_model_orders(&e->model, event)) && news) {
            PM_TRY(add_point(e, writes));
            writes = 0;
            news = false;
        }
        if (!event) break;
        pm_model_feed(&e->model, e->recording, event);
        writes += event->has_data;
        news = news || (event->kind != PM_EVENT_FLUSH && event->kind != PM_EVENT_HAND_OVER);
        if (e->model.no_memory) return pm_fail(PM_NO_MEMORY, "no memory to explore");
    }
    return PM_OK;
}

static bool mine(const pm_explorer *e, size_t number)
{
    return !e->options->workers || number % e->options->workers == e->options->worker;
}

static double wanted_at(const pm_explorer *e, const pm_crash_point *p)
{
    double plan = 8.0 * (double)p->cells + (double)p->writes + 16;
    double ways = p->digits < 9 ? round(pow(10, p->digits)) : 1e9;
    return ways <= e->options->exhaustive ? ways : plan;
}

/* Gives every point what it can use, as far as the budget goes. */
static void divide_budget(pm_explorer *e)
{
    double left = (double)e->options->budget;
    size_t open = 0;
    e->result->possible = 0;
    for (size_t i = 0; i < e->point_count; i++) {
        open += mine(e, i);
        double digits = e->points[i].digits;
        double more = e->result->possible, least = more < digits ? more : digits;
        if (more < digits) more = digits;
        e->result->possible = i ? more + log10(1 + pow(10, least - more)) : digits;
    }
    bool changed = true;
    while (open && changed) {
        double share = left / (double)open;
        changed = false;
        for (size_t i = 0; i < e->point_count; i++) {
            pm_crash_point *p = &e->points[i];
            if (!mine(e, i) || p->quota || wanted_at(e, p) > share) continue;
            p->quota = (uint64_t)wanted_at(e, p);
            left -= (double)p->quota;
            open--;
            changed = true;
        }
    }
    for (size_t i = 0; i < e->point_count; i++)
        if (mine(e, i) && !e->points[i].quota) {
            /* The budget is less than one state for each point: some points are left out. */
            double share = left / (double)open--;
            uint64_t quota = 0;
            if (share >= 4) quota = (uint64_t)share;
            else if (pm_explorer_by_chance(e, share / 4)) quota = 4;
            e->points[i].quota = quota;
            left -= (double)quota;
            if (left < 0) left = 0;
        }
}

/* Evaluates a crash right after the current event, which loses nothing. */
static pm_status evaluate_whole(pm_explorer *e, pm_crash_kind kind)
{
    if (!pm_explorer_wants(e, kind)) return PM_OK;
    PM_TRY(make_keep(e));
    pm_state_keep_all(e);
    e->event++; /* the event has happened */
    pm_states_evaluate(e, kind, 0);
    e->event--;
    return PM_OK;
}

pm_status pm_explore_run(pm_explorer *e)
{
    size_t number = 0;
    uint64_t in_segment = 0;
    PM_TRY(find_points(e));
    divide_budget(e);
    e->result->points = e->point_count;
    PM_TRY(start_walk(e));
    PM_TRY(show_base(e));
    for (e->event = 0; !e->stop; e->event++) {
        if (number < e->point_count && e->points[number].event == e->event) {
            PM_TRY(make_keep(e));
            e->learns = true;
            if (e->points[number].quota) pm_states_evaluate_point(e, &e->points[number]);
            else e->result->left_out += mine(e, number);
            e->learns = false;
            pm_prune_forget(e);
            number++;
            in_segment = 0;
        }
        if (e->event == e->recording->count || e->stop) break;
        const pm_event *event = &e->recording->events[e->event];
        feed(e, event);
        /* The state after a commit, if all of it survives. It is the plainest state, and shows a program's own
         * mistakes, so it is evaluated beyond the budget. */
        if (acknowledges(event) && e->event >= e->skip && mine(e, e->event) && !e->stop)
            PM_TRY(evaluate_whole(e, PM_CRASH_ALL));
        if (!event->has_data || number == e->point_count || e->stop || e->event < e->skip) continue;
        /* The state that a process leaves if it is killed between two writes: a part of the quota of each point's
         * writes. */
        const pm_crash_point *p = &e->points[number];
        uint64_t wanted = p->quota * 15 / 100 + (p->quota > 4);
        in_segment++;
        if (in_segment == p->writes || !pm_explorer_wants(e, PM_CRASH_PREFIX)) continue;
        if (wanted < p->writes && pm_explorer_below(e, p->writes) >= wanted) continue;
        PM_TRY(evaluate_whole(e, PM_CRASH_PREFIX));
    }
    return e->status;
}

pm_status pm_explore_go_to(pm_explorer *e, uint64_t event)
{
    PM_TRY(start_walk(e));
    PM_TRY(show_base(e));
    if (event > e->recording->count)
        return pm_fail(PM_INVALID, "the schedule is of another recording: it has only %llu events",
                       (unsigned long long)e->recording->count);
    for (; e->event < event && !e->stop; e->event++) feed(e, &e->recording->events[e->event]);
    PM_TRY(e->status);
    PM_TRY(make_keep(e));
    pm_state_keep_all(e);
    return PM_OK;
}

void pm_explore_free(pm_explorer *e)
{
    pm_prune_free(e);
    pm_model_free(&e->model);
    pm_sandbox_free(&e->sandbox);
    pm_evaluate_expectations_free(&e->expected);
    free(e->points);
    free(e->keep);
    free(e->seen);
}
