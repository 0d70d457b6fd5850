/*
 * Byte-addressable durable memory, mapped shared. Its domain (media/domain.h) says what a written line needs.
 *
 * In the domains process and cpu_cache nothing needs to leave the cache. Streaming is then only a way to write much:
 * it does not read what it replaces, and leaves the cache to the program. Up to PLAIN_MOST bytes between two fences,
 * plain copies are quicker, as the next commit finds the lines in the cache (docs/performance.md).
 */
#define _GNU_SOURCE
#include "media/media.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/hash.h"
#include "media/dax.h"
#include "media/lines.h"

enum { PLAIN_MOST = 3 << 19 };

static uint64_t offset_of(const pm_media *media, const void *address)
{
    return (uint64_t)((const uint8_t *)address - media->view);
}

static uint8_t *line_of(const void *address)
{
    return (uint8_t *)((uintptr_t)address / PM_LINE * PM_LINE);
}

static void flush_traced(pm_media *media, const uint8_t *line)
{
    pm_trace_add(media->trace, PM_EVENT_FLUSH, offset_of(media, line), PM_LINE, NULL);
}

/* As the copies past the cache do it: bytes before and after the whole lines go through the cache, and are flushed. */
static void stream_traced(pm_media *media, uint8_t *to, const uint8_t *from, size_t length)
{
    while (length) {
        size_t part = PM_LINE - (uintptr_t)to % PM_LINE;
        if (part > length) part = length;
        memcpy(to, from, part);
        pm_event_kind kind = part == PM_LINE ? PM_EVENT_STREAM : PM_EVENT_STORE;
        pm_trace_add(media->trace, kind, offset_of(media, to), part, from);
        if (part < PM_LINE) flush_traced(media, line_of(to));
        to += part, from += part, length -= part;
    }
}

static void flush(pm_media *media, const uint8_t *address, size_t length)
{
    const uint8_t *first = line_of(address), *end = line_of(address + length + PM_LINE - 1);
    if (media->trace) {
        for (; first < end; first += PM_LINE) flush_traced(media, first);
    } else if (media->flush_lines && length) {
        media->flush_lines(first, (uint64_t)(end - first) / PM_LINE);
    }
}

/* Durable at the next fence. Without streaming stores, lines that need it are flushed at once. */
static void stream(pm_media *media, uint8_t *to, const uint8_t *from, size_t length)
{
    if (media->trace) {
        stream_traced(media, to, from, length);
    } else if (media->stream) {
        media->stream(to, from, length);
    } else {
        memcpy(to, from, length);
        if (media->flushes) flush(media, to, length);
    }
}

/* PMSTORE_FLUSH chooses. */
static pm_status choose_forced(pm_media *media, const char *name)
{
    media->streams_all = !strcmp(name, "stream") && media->stream;
    if (media->streams_all) {
        media->flushes = false;
        return PM_OK;
    }
    bool known;
    media->flush_lines = pm_lines_find_flush(name, &known);
    if (!known) return pm_fail(PM_INVALID, "PMSTORE_FLUSH: this kind of processor has no %.40s", name);
    if (!media->flush_lines) return pm_fail(PM_INVALID, "PMSTORE_FLUSH: this processor has no %.40s", name);
    media->stream = NULL;
    media->stream_page = NULL;
    return PM_OK;
}

pm_status pm_media_memory_choose(pm_media *media)
{
    bool known;
    media->flushes = media->domain == PM_DOMAIN_MEMORY;
    if (media->trace) return PM_OK;
    media->stream = pm_lines_find_stream();
    media->stream_page = pm_hash64_stream_page();
    media->flush_lines = pm_lines_find_flush(NULL, &known);
    const char *forced = getenv("PMSTORE_FLUSH");
    return forced && *forced ? choose_forced(media, forced) : PM_OK;
}

/* Notes that lines are on their way, and not before a fence. */
static void note_unordered(pm_media *media)
{
    if (media->domain == PM_DOMAIN_MEMORY) media->unordered = true;
}

/* True if these bytes may stay in the cache, and are better there. */
static bool stays_in_cache(pm_media *media, uint64_t length)
{
    bool may = media->domain != PM_DOMAIN_MEMORY && !media->streams_all;
    if (!may || media->plain + length > PLAIN_MOST) return false;
    media->plain += length;
    return true;
}

static pm_status memory_write(pm_media *media, uint64_t offset, const void *source, size_t length, pm_write_how how)
{
    PM_CHECK(offset + length <= media->size);
    bool streams = how == PM_WRITE_STREAM ? !stays_in_cache(media, length) : media->streams_all;
    if (streams) {
        note_unordered(media);
        stream(media, media->view + offset, source, length);
        return PM_OK;
    }
    memcpy(media->view + offset, source, length);
    if (media->trace) pm_trace_add(media->trace, PM_EVENT_STORE, offset, length, source);
    return PM_OK;
}

static pm_status memory_write_hashed(pm_media *media, uint64_t offset, const uint8_t *source, uint64_t pages,
                                     uint64_t *hashes)
{
    PM_CHECK(offset % PM_PAGE == 0 && offset + pages * PM_PAGE <= media->size);
    pm_hash64_page_function *copy = stays_in_cache(media, pages * PM_PAGE) ? pm_hash64_copy_page : media->stream_page;
    uint8_t *to = media->view + offset;
    note_unordered(media);
    for (uint64_t page = 0; page < pages; page++, to += PM_PAGE, source += PM_PAGE) {
        if (copy) {
            hashes[page] = copy(to, source);
        } else {
            uint8_t bytes[PM_PAGE] __attribute__((aligned(PM_LINE)));
            hashes[page] = pm_hash64_copy_page(bytes, source);
            stream(media, to, bytes, PM_PAGE);
        }
    }
    return PM_OK;
}

static void memory_flush(pm_media *media, uint64_t offset, uint64_t length)
{
    note_unordered(media);
    flush(media, media->view + offset, length);
}

static pm_status memory_write_back(pm_media *media, uint64_t offset, uint64_t length)
{
    (void)media, (void)offset, (void)length;
    return PM_OK;
}

static void order_stores(pm_media *media)
{
    pm_lines_order(media->domain == PM_DOMAIN_MEMORY);
    media->unordered = false;
    if (media->trace) pm_trace_add(media->trace, PM_EVENT_FENCE, 0, 0, NULL);
}

/* A barrier, as on aarch64 that of another thread waits for none of this one's lines. On x86-64 the release of a mutex
 * is a locked instruction, which would order them, but not in a process that had one thread until then. */
void pm_media_memory_hand_over(pm_media *media)
{
    if (!media->unordered) return;
    pm_lines_order(true);
    media->unordered = false;
    if (media->trace) pm_trace_add(media->trace, PM_EVENT_HAND_OVER, 0, 0, NULL);
}

static pm_status memory_fence(pm_media *media)
{
    order_stores(media);
    media->plain = 0;
    media->fences++;
    return PM_OK;
}

static pm_status memory_write_through(pm_media *media, uint64_t offset, const void *source, size_t length)
{
    PM_TRY(memory_write(media, offset, source, length, PM_WRITE_STREAM));
    return memory_fence(media);
}

static pm_status memory_grow(pm_media *media, uint64_t size)
{
    if (size > media->size) {
        /* Reserved here, so that a full tmpfs is an error, and not SIGBUS at a later store. */
        PM_TRY(pm_media_reserve(media, media->size, size));
        media->size = size;
    }
    return pm_media_map(media);
}

static pm_status memory_await_writes(pm_media *media)
{
    (void)media;
    return PM_OK;
}

#define OPERATIONS(its_grow) {                  \
    .write = memory_write,                      \
    .write_hashed = memory_write_hashed,        \
    .flush = memory_flush,                      \
    .write_back = memory_write_back,            \
    .fence = memory_fence,                      \
    .write_through = memory_write_through,      \
    .grow = its_grow,                           \
    .await_writes = memory_await_writes,        \
    .sync = memory_fence,                       \
}

const pm_media_operations pm_media_memory = OPERATIONS(memory_grow);
const pm_media_operations pm_media_dax = OPERATIONS(pm_dax_grow);
