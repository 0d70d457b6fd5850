#include "media/trace.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/format.h"
#include "base/status.h"

struct pm_trace {
    atomic_int references;
    pm_event *events;
    size_t count, room;
    uint8_t *data;
    size_t used, capacity;
    bool incomplete; /* memory ran out */
    uint64_t seed, ids;
    pm_fault fault;
    uint64_t operations, faults;
    uint8_t *view;
    uint64_t view_size;
    int ranges;
    pm_schedule *schedule;
    pthread_t threads[PM_TRACE_PROGRAM_THREADS]; /* of the program, in the order of their first events */
    uint16_t thread_count;
};

pm_trace *pm_trace_new(uint64_t seed)
{
    pm_trace *trace = calloc(1, sizeof *trace);
    if (!trace) return NULL;
    atomic_store(&trace->references, 1);
    trace->seed = seed, trace->ranges = -1;
    return trace;
}

void pm_trace_keep(pm_trace *trace)
{
    atomic_fetch_add(&trace->references, 1);
}

void pm_trace_free(pm_trace *trace)
{
    if (!trace || atomic_fetch_sub(&trace->references, 1) > 1) return;
    pm_schedule_free(trace->schedule);
    free(trace->events);
    free(trace->data);
    free(trace);
}

static bool make_room(pm_trace *trace, size_t bytes)
{
    if (trace->count == trace->room) {
        size_t room = trace->room ? 2 * trace->room : 1024;
        pm_event *events = realloc(trace->events, room * sizeof *events);
        if (!events) return false;
        trace->events = events, trace->room = room;
    }
    if (trace->capacity - trace->used < bytes) {
        size_t capacity = 2 * trace->capacity + bytes + (64 << 10);
        uint8_t *grown = realloc(trace->data, capacity);
        if (!grown) return false;
        trace->data = grown, trace->capacity = capacity;
    }
    return true;
}

/* 0 for the program's first thread; those that come after the last number share it. */
static uint16_t program_thread(pm_trace *trace)
{
    uint16_t i = 0;
    while (i < trace->thread_count && !pthread_equal(trace->threads[i], pthread_self())) i++;
    if (i == PM_TRACE_PROGRAM_THREADS) i--;
    if (i == trace->thread_count) trace->threads[trace->thread_count++] = pthread_self();
    return i ? PM_TRACE_STORE_THREADS + i : 0;
}

static void add(pm_trace *trace, pm_event_kind kind, uint64_t offset, uint64_t length, const void *data)
{
    /* The lender of a view knows the bytes that were there before, and needs places only. */
    size_t bytes = data && !trace->view ? length : 0;
    if (trace->incomplete || !make_room(trace, bytes)) {
        trace->incomplete = true;
        return;
    }
    if (bytes) memcpy(trace->data + trace->used, data, bytes);
    uint16_t own = pm_schedule_thread();
    PM_CHECK(own <= PM_TRACE_STORE_THREADS);
    pm_event *last = trace->count ? &trace->events[trace->count - 1] : NULL;
    pm_event event = {.offset = offset, .length = length, .kind = kind, .has_data = data != NULL,
                      .thread = own ? own : program_thread(trace), .data = trace->used};
    /* Lines that are streamed in a row are one event. */
    if (last && kind == PM_EVENT_STREAM && last->kind == kind && last->thread == event.thread
        && last->offset + last->length == offset)
        last->length += length;
    else
        trace->events[trace->count++] = event;
    trace->used += bytes;
}

void pm_trace_add(pm_trace *trace, pm_event_kind kind, uint64_t offset, uint64_t length, const void *data)
{
    add(trace, kind, offset, length, data);
    pm_schedule_point(trace->schedule);
}

void pm_trace_lend_view(pm_trace *trace, uint8_t *view, uint64_t size)
{
    trace->view = view;
    trace->view_size = size;
}

uint8_t *pm_trace_view(const pm_trace *trace, uint64_t *size)
{
    *size = trace->view_size;
    return trace->view;
}

void pm_trace_sync_ranges(pm_trace *trace, int ranges)
{
    trace->ranges = ranges;
}

int pm_trace_ranges(const pm_trace *trace)
{
    return trace->ranges;
}

pm_status pm_trace_background(pm_trace *trace, uint64_t seed, unsigned pace)
{
    pm_schedule *schedule = pm_schedule_new(seed, pace);
    if (!schedule) return pm_fail(PM_NO_MEMORY, "no memory for a schedule");
    pm_schedule_free(trace->schedule);
    trace->schedule = schedule;
    return PM_OK;
}

void pm_trace_no_background(pm_trace *trace)
{
    pm_schedule_free(trace->schedule);
    trace->schedule = NULL;
}

pm_schedule *pm_trace_schedule(const pm_trace *trace)
{
    return trace->schedule;
}

uint64_t pm_trace_id(pm_trace *trace)
{
    if (!trace->seed) return 0;
    uint64_t id = pm_keyed_checksum(0, trace->seed, ++trace->ids);
    return id ? id : 1;
}

void pm_trace_clear(pm_trace *trace)
{
    trace->count = trace->used = 0;
    trace->thread_count = 0;
}

size_t pm_trace_count(const pm_trace *trace)
{
    return trace->count;
}

const pm_event *pm_trace_events(const pm_trace *trace)
{
    return trace->events;
}

const uint8_t *pm_trace_data(const pm_trace *trace)
{
    return trace->data;
}

size_t pm_trace_bytes(const pm_trace *trace)
{
    return trace->used;
}

int pm_trace_incomplete(const pm_trace *trace)
{
    return trace->incomplete;
}

/* ---- faults ------------------------------------------------------------------------------------------------- */

void pm_trace_fail(pm_trace *trace, const pm_fault *fault)
{
    trace->fault = fault ? *fault : (pm_fault){0};
    trace->operations = trace->faults = 0;
}

uint64_t pm_trace_operations(const pm_trace *trace, uint64_t *faults)
{
    if (faults) *faults = trace->faults;
    return trace->operations;
}

/* True if the operation that is about to begin must fail. Other threads may run before it. */
static bool meant(pm_trace *trace, pm_operation operation)
{
    pm_schedule_point(trace->schedule);
    if (!(trace->fault.operations & operation)) return false;
    uint64_t number = ++trace->operations, at = trace->fault.at;
    return at && (number == at || (trace->fault.lasting && number > at));
}

bool pm_trace_allows(pm_trace *trace, pm_operation operation)
{
    if (!meant(trace, operation)) return true;
    trace->faults++;
    errno = trace->fault.error;
    return false;
}

size_t pm_trace_allows_write(pm_trace *trace, size_t length)
{
    if (!meant(trace, PM_OPERATION_WRITE)) return length;
    trace->faults++;
    errno = trace->fault.error;
    return trace->fault.error ? 0 : length > 1 ? length / 2 : length;
}
