#define _GNU_SOURCE
#include "explore/evaluate.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/format.h"
#include "base/status.h"
#include "media/trace.h"

/* ---- what is expected --------------------------------------------------------------------------------------- */

static const pm_expected *find(const pm_expectations *expected, uint64_t sequence)
{
    for (size_t i = expected->count; i-- > 0;)
        if (expected->states[i].sequence == sequence) return &expected->states[i];
    return NULL;
}

/* A crash after event i leaves no older state than this one. */
static void end_before(pm_expectations *expected, uint64_t sequence, uint64_t i)
{
    for (size_t j = 0; j < expected->count; j++)
        if (expected->states[j].until == UINT64_MAX && expected->states[j].sequence < sequence)
            expected->states[j].until = i;
}

pm_status pm_evaluate_expect(pm_expectations *expected, const pm_recording *recording)
{
    bool any_sure = expected->count != 0; /* or the earlier state is known */
    bool lazily = false;                  /* commits are acknowledged before they are durable */
    for (uint64_t i = 0; i < recording->count; i++) {
        const pm_event *event = &recording->events[i];
        if (event->kind == PM_EVENT_OPEN) lazily = false;
        if (event->kind == PM_EVENT_DURABLE) {
            lazily = true;
            end_before(expected, event->offset, i);
        }
        if (event->kind < PM_EVENT_COMMIT_BEGIN || event->kind == PM_EVENT_DURABLE) continue;
        const pm_expected *known = find(expected, event->offset);
        /* A failed commit may be tried again with more changes. */
        if (known && known->hash != event->length && event->kind != PM_EVENT_COMMIT_BEGIN)
            return pm_fail(PM_INVALID, "commit %llu began with one state and ended with another: %s",
                           (unsigned long long)event->offset,
                           event->kind == PM_EVENT_RECOVERED ? "recovery changed it"
                                                             : "memory changed while it was written");
        if (expected->count == expected->room) {
            size_t room = expected->room ? 2 * expected->room : 64;
            pm_expected *states = realloc(expected->states, room * sizeof *states);
            if (!states) return pm_fail(PM_NO_MEMORY, "no memory to note the states of a store");
            expected->states = states, expected->room = room;
        }
        bool sure = event->kind != PM_EVENT_COMMIT_BEGIN;
        /* Older states may come back until this one is durable; its own number has no other state. */
        bool only_same = lazily && event->kind == PM_EVENT_COMMIT_END;
        for (size_t j = 0; sure && j < expected->count; j++)
            if (expected->states[j].until == UINT64_MAX
                && (!only_same || expected->states[j].sequence == event->offset))
                expected->states[j].until = i;
        /* The state that the first recovery ends in was there before. */
        expected->states[expected->count++] =
            (pm_expected){event->offset, event->length, sure && !any_sure ? 0 : i + 1, UINT64_MAX};
        any_sure = any_sure || sure;
    }
    return PM_OK;
}

void pm_evaluate_expectations_free(pm_expectations *expected)
{
    free(expected->states);
    *expected = (pm_expectations){0};
}


/* ---- evaluating ----------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 3, 4))) static pm_finding found(pm_crash_problem problem, uint64_t sequence,
                                                              const char *format, ...)
{
    pm_finding finding = {.problem = problem, .sequence = sequence};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(finding.text, sizeof finding.text, format, arguments);
    va_end(arguments);
    return finding;
}

static pm_status open_image(pm_sandbox *sandbox, unsigned flags, pm_trace *trace, pm_store **store)
{
    int fd = dup(sandbox->fd);
    if (fd < 0) return pm_fail_errno("cannot open a crash image");
    return pm_open(fd, sandbox->media, flags, 0, trace, store);
}

static pm_finding problems_of(pm_store *store, uint64_t sequence)
{
    pm_report *report;
    pm_finding finding = {.sequence = sequence};
    if (pm_check(store, &report) != PM_OK) return found(PM_CRASH_INVALID, sequence, "check fails: %s", pm_message());
    size_t count = pm_report_count(report);
    if (count) {
        const pm_problem *first = pm_report_get(report, 0);
        finding = found(PM_CRASH_INVALID, sequence, "check finds %zu problem%s, the first at region offset %llu: %s",
                        count, count == 1 ? "" : "s", (unsigned long long)first->offset, first->text);
    }
    pm_report_free(report);
    return finding;
}

static uint64_t recovered_hash(const pm_sandbox *sandbox)
{
    const pm_event *events = pm_trace_events(sandbox->trace);
    for (size_t i = pm_trace_count(sandbox->trace); i-- > 0;)
        if (events[i].kind == PM_EVENT_RECOVERED) return events[i].length;
    return 0;
}

/* Opens the image as a reader does, which leaves the file alone. */
static pm_finding read_only(pm_sandbox *sandbox, uint64_t *sequence, uint64_t *hash)
{
    pm_store *store;
    if (open_image(sandbox, PM_OPEN_READ_ONLY, sandbox->trace, &store) != PM_OK) {
        pm_trace_clear(sandbox->trace);
        return found(PM_CRASH_READER, 0, "a reader can't open it: %s", pm_message());
    }
    *sequence = pm_sequence(store);
    *hash = recovered_hash(sandbox);
    pm_close(store, PM_CLOSE_DISCARD | PM_CLOSE_EXITING);
    pm_trace_clear(sandbox->trace);
    return (pm_finding){.sequence = *sequence};
}

static pm_finding evaluate_recovered(const pm_expectations *expected, uint64_t event, uint64_t sequence, uint64_t hash,
                                     uint64_t acknowledged, uint64_t started)
{
    if (sequence < acknowledged || sequence > started)
        return found(PM_CRASH_SEQUENCE, sequence, "recovered to commit %llu; %llu was acknowledged, and %llu had begun",
                     (unsigned long long)sequence, (unsigned long long)acknowledged, (unsigned long long)started);
    bool known = false;
    for (size_t i = 0; i < expected->count; i++) {
        if (expected->states[i].sequence != sequence) continue;
        bool now = event >= expected->states[i].from && event <= expected->states[i].until;
        if (now && expected->states[i].hash == hash) return (pm_finding){.sequence = sequence};
        known = true;
    }
    return found(PM_CRASH_MIXED, sequence,
                 known ? "recovered to commit %llu, but not to its state"
                       : "recovered to commit %llu, which never began",
                 (unsigned long long)sequence);
}

pm_finding pm_evaluate(pm_sandbox *sandbox, const pm_expectations *expected, uint64_t event, uint64_t acknowledged,
                       uint64_t started, bool reader)
{
    uint64_t read_sequence = 0, read_hash = 0;
    pm_trace_clear(sandbox->trace);
    pm_finding finding, read = {0};
    if (reader) read = read_only(sandbox, &read_sequence, &read_hash);
    /* The writer's problem comes first: the same state has the same problem, with a reader or without. */
    pm_store *store;
    if (open_image(sandbox, 0, sandbox->trace, &store) != PM_OK)
        return found(PM_CRASH_OPEN, 0, "the store does not open: %s", pm_message());
    uint64_t sequence = pm_sequence(store), hash = recovered_hash(sandbox);
    finding = evaluate_recovered(expected, event, sequence, hash, acknowledged, started);
    if (!finding.problem) finding = problems_of(store, sequence);
    if (!finding.problem && read.problem) finding = read;
    if (!finding.problem && reader && (sequence != read_sequence || hash != read_hash))
        finding = found(PM_CRASH_READER, sequence, "a reader sees commit %llu%s, recovery ends at commit %llu",
                        (unsigned long long)read_sequence, sequence == read_sequence ? " in another state" : "",
                        (unsigned long long)sequence);
    pm_close(store, PM_CLOSE_DISCARD | PM_CLOSE_EXITING);
    return finding;
}

/* ---- going on ----------------------------------------------------------------------------------------------- */

/* Kinds of entries in Python (pmstore/_catalog/kinds.py), so that Python can read what is added here. */
enum { ARRAY = 1, INLINE = 2 };
enum { MOST_CHANGED = 4 };

/* Changes some bytes of an extent in place, as a program would. */
static pm_status change(pm_store *store, const pm_row *row, unsigned by)
{
    pm_buffer *buffer;
    PM_TRY(pm_buffer_open(store, row->offset, row->length, PM_BUFFER_WRITABLE, &buffer));
    uint8_t *bytes = pm_buffer_address(buffer);
    for (uint64_t at = 0; at < row->length; at += row->length / 3 + 1) bytes[at] = (uint8_t)(bytes[at] + by);
    bytes[row->length - 1] ^= 1;
    pm_buffer_release(buffer, bytes);
    return PM_OK;
}

/* Copies the array to another name, or deletes that copy. */
static pm_status copy_or_delete(pm_store *store, const pm_row *row, bool copy)
{
    uint8_t key[PM_KEY_MAX];
    const uint8_t *row_key = (const uint8_t *)(row + 1);
    if (row->key_length == PM_KEY_MAX) return PM_OK;
    memcpy(key, row_key, row->key_length);
    key[row->key_length] = '~';
    if (!copy) return pm_delete(store, key, row->key_length + 1u, NULL, 0);
    pm_entry entry = {.length = row->length, .kind = row->kind, .flags = row->flags, .meta_length = row->meta_length};
    uint8_t *contents = malloc(row->length);
    if (!contents) return pm_fail(PM_NO_MEMORY, "no memory for a copy");
    pm_status status = pm_read(store, row->offset, row->length, contents);
    if (status == PM_OK) status = pm_alloc(store, row->length, &entry.offset);
    if (status == PM_OK) status = pm_write(store, entry.offset, 0, contents, row->length);
    if (status == PM_OK)
        status = pm_put(store, key, row->key_length + 1u, &entry, row_key + row->key_length, NULL, 0, NULL, 0);
    free(contents);
    return status;
}

static pm_status change_some(pm_store *store, const uint8_t *rows, size_t used, unsigned by)
{
    unsigned changed = 0;
    for (size_t at = 0; at < used && changed < MOST_CHANGED;) {
        const pm_row *row = (const void *)(rows + at);
        at += row->row_length;
        const uint8_t *key = (const uint8_t *)(row + 1);
        if (row->kind != ARRAY || !row->offset || key[row->key_length - 1] == '~') continue;
        if (!changed) PM_TRY(copy_or_delete(store, row, by != 2));
        PM_TRY(change(store, row, by));
        changed++;
    }
    /* A store without arrays gets a value. */
    uint8_t own = '~', value = (uint8_t)by;
    pm_entry entry = {.kind = INLINE, .meta_length = 1};
    return changed ? PM_OK : pm_put(store, &own, 1, &entry, &value, NULL, 0, NULL, 0);
}

static pm_status commit_more(pm_store *store)
{
    static _Thread_local uint64_t rows[(64 << 10) / 8];
    size_t used;
    PM_TRY(pm_scan(store, NULL, 0, false, NULL, 0, (uint8_t *)rows, sizeof rows, &used));
    for (unsigned by = 1; by <= 2; by++) {
        PM_TRY(change_some(store, (const uint8_t *)rows, used, by));
        PM_TRY(pm_commit(store));
        /* A rolled back change must not get into the next commit. */
        PM_TRY(change_some(store, (const uint8_t *)rows, used, 3));
        PM_TRY(pm_rollback(store));
    }
    return pm_commit(store);
}

/* How the recovered store goes on. The seed decides all of it. */
typedef struct {
    bool ranges;   /* how records are written: pm_trace_sync_ranges */
    bool late;     /* commits become durable later, on files */
    unsigned pace; /* of background work: only what is waited for, some of it, most of it */
} manner;

static manner manner_of(uint64_t seed)
{
    static const unsigned paces[] = {0, 64, 160};
    uint64_t random = pm_keyed_checksum(0, seed, 0);
    return (manner){.ranges = random & 1, .late = (random >> 1 & 3) == 0, .pace = paces[(random >> 3) % 3]};
}

/* The sync of late commits comes SYNC_INTERVAL after the first of them, in the time of the schedule. */
enum { SYNC_INTERVAL = 1000000 };

static pm_finding go_on(pm_sandbox *sandbox, const manner *how)
{
    pm_store *store; /* it maps the file itself, as it may grow */
    if (open_image(sandbox, 0, sandbox->trace, &store) != PM_OK)
        return found(PM_CRASH_OPEN, 0, "the store does not open: %s", pm_message());
    pm_finding finding = {.sequence = pm_sequence(store)};
    pm_status status = how->late ? pm_commit_async(store, SYNC_INTERVAL) : PM_OK;
    if (status == PM_OK) status = commit_more(store);
    if (status != PM_OK)
        finding = found(PM_CRASH_WRITE, pm_sequence(store), "the recovered store can't be written: %s", pm_message());
    pm_close(store, PM_CLOSE_DISCARD | PM_CLOSE_EXITING);
    return finding;
}

pm_finding pm_evaluate_going_on(pm_sandbox *sandbox, uint64_t seed)
{
    manner how = manner_of(seed);
    pm_trace *trace = pm_trace_new(seed);
    if (!trace || pm_trace_background(trace, seed, how.pace) != PM_OK) {
        pm_trace_free(trace);
        return found(PM_CRASH_WRITE, 0, "no memory for a trace");
    }
    pm_trace_sync_ranges(trace, how.ranges);
    pm_trace_free(sandbox->trace);
    sandbox->trace = trace;
    pm_finding finding = go_on(sandbox, &how);
    /* The states of this recording are recovered under the same trace, many of them, without background work. */
    pm_trace_no_background(trace);
    pm_trace_lend_view(trace, sandbox->image, sandbox->capacity);
    return finding;
}
