/* Records what happens to the durable bytes, in order, and lets the medium under it do it. */
#include "media.h"

#include <stdlib.h>

struct pm_trace {
    pm_event *events;
    size_t count, room;
    uint8_t *data;
    size_t used, capacity;
};

static pm_status record(pm_media *media, pm_event_kind kind, uint64_t offset, uint64_t length, const void *data)
{
    pm_trace *trace = media->trace;
    if (trace->count == trace->room) {
        size_t room = trace->room ? 2 * trace->room : 1024;
        pm_event *events = realloc(trace->events, room * sizeof *events);
        if (!events) return pm_fail(PM_NO_MEMORY, "no memory for the trace");
        trace->events = events, trace->room = room;
    }
    size_t bytes = data ? length : 0;
    if (trace->capacity - trace->used < bytes) {
        size_t capacity = 2 * trace->capacity + bytes + (1 << 20);
        uint8_t *grown = realloc(trace->data, capacity);
        if (!grown) return pm_fail(PM_NO_MEMORY, "no memory for the trace");
        trace->data = grown, trace->capacity = capacity;
    }
    trace->events[trace->count++] = (pm_event){.offset = offset, .length = length, .kind = kind,
                                               .data_length = (uint32_t)bytes, .data = trace->used};
    if (bytes) memcpy(trace->data + trace->used, data, bytes);
    trace->used += bytes;
    return PM_OK;
}

static pm_status trace_write(pm_media *media, uint64_t offset, const void *source, size_t length, pm_write_how how)
{
    pm_event_kind kind = media->kind == PM_MEDIA_FILE ? PM_EVENT_WRITE
                         : how == PM_WRITE_STREAM     ? PM_EVENT_STREAM
                                                      : PM_EVENT_STORE;
    PM_TRY(record(media, kind, offset, length, source));
    return media->traced->write(media, offset, source, length, how);
}

static void trace_flush(pm_media *media, uint64_t offset, uint64_t length)
{
    if (media->kind == PM_MEDIA_MEMORY) PM_CHECK(record(media, PM_EVENT_FLUSH, offset, length, NULL) == PM_OK);
    media->traced->flush(media, offset, length);
}

static pm_status trace_fence(pm_media *media)
{
    PM_TRY(media->traced->fence(media));
    return record(media, media->kind == PM_MEDIA_FILE ? PM_EVENT_SYNC : PM_EVENT_FENCE, 0, 0, NULL);
}

static pm_status trace_write_through(pm_media *media, uint64_t offset, const void *source, size_t length)
{
    bool file = media->kind == PM_MEDIA_FILE;
    PM_TRY(record(media, file ? PM_EVENT_WRITE : PM_EVENT_STREAM, offset, length, source));
    PM_TRY(media->traced->write_through(media, offset, source, length));
    return record(media, file ? PM_EVENT_SYNC_RANGE : PM_EVENT_FENCE, offset, length, NULL);
}

static pm_status trace_grow(pm_media *media, uint64_t size)
{
    PM_TRY(media->traced->grow(media, size));
    return record(media, PM_EVENT_GROW, size, 0, NULL);
}

const pm_media_operations pm_media_traced = {trace_write, trace_flush, trace_fence, trace_write_through, trace_grow};

pm_status pm_trace_start(pm_media *media)
{
    media->trace = calloc(1, sizeof *media->trace);
    if (!media->trace) return pm_fail(PM_NO_MEMORY, "no memory for the trace");
    media->traced = media->operations;
    media->operations = &pm_media_traced;
    return PM_OK;
}

void pm_trace_stop(pm_media *media)
{
    if (!media->trace) return;
    free(media->trace->events);
    free(media->trace->data);
    free(media->trace);
    media->trace = NULL;
    media->operations = media->traced;
}

void pm_trace_mark(pm_media *media, pm_event_kind kind, uint64_t sequence)
{
    if (media->trace) PM_CHECK(record(media, kind, sequence, 0, NULL) == PM_OK);
}

size_t pm_trace_length(const pm_media *media)
{
    return media->trace ? media->trace->count : 0;
}

const pm_event *pm_trace_at(const pm_media *media)
{
    return media->trace ? media->trace->events : NULL;
}

const uint8_t *pm_trace_bytes(const pm_media *media)
{
    return media->trace ? media->trace->data : NULL;
}

void pm_trace_reset(pm_media *media)
{
    if (media->trace) media->trace->count = media->trace->used = 0;
}
