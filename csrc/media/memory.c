/*
 * Byte-addressable durable memory, mapped shared. Its domain (media/domain.h) says what a written line needs.
 *
 * In the domains process and cpu_cache nothing needs to leave the cache. Streaming is then only a way to write much:
 * it does not read what it replaces, and leaves the cache to the program. Up to PLAIN_MOST bytes between two fences,
 * plain copies are quicker, as the next commit finds the lines in the cache (docs/performance.md).
 */
#define _GNU_SOURCE
#include "media/media.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/hash.h"

enum { PLAIN_MOST = 3 << 19 };

#if defined(__x86_64__)
#include <immintrin.h>

/* The functions below give lines to the processor, or also to the trace, line by line. */

static void store_plain(pm_media *media, void *to, const void *from, size_t length)
{
    (void)media;
    memcpy(to, from, length);
}

static void flush_plain(pm_media *media, const void *line)
{
    (void)media;
    _mm_clflush(line);
}

static uint64_t offset_of(const pm_media *media, const void *address)
{
    return (uint64_t)((const uint8_t *)address - media->view);
}

static void store_traced(pm_media *media, void *to, const void *from, size_t length)
{
    memcpy(to, from, length);
    pm_trace_add(media->trace, PM_EVENT_STORE, offset_of(media, to), length, from);
}

static void flush_traced(pm_media *media, const void *line)
{
    pm_trace_add(media->trace, PM_EVENT_FLUSH, offset_of(media, line) / PM_LINE * PM_LINE, PM_LINE, NULL);
}

static void stream_traced_line(pm_media *media, uint8_t *to, const uint8_t *from)
{
    memcpy(to, from, PM_LINE);
    pm_trace_add(media->trace, PM_EVENT_STREAM, offset_of(media, to), PM_LINE, from);
}

/* Bytes before and behind the whole lines of a streamed range go through the cache, so their lines are flushed here. */
#define EDGE(manner, to, from, length)                   \
    do {                                                 \
        store_##manner(media, to, from, length);         \
        flush_##manner(media, to);                       \
        flush_##manner(media, (to) + (length) - 1);      \
    } while (0)

#define STREAM_FUNCTION(name, isa, manner, body)                                               \
    __attribute__((target(isa)))                                                               \
    static void name(pm_media *media, void *destination, const void *source, size_t length)    \
    {                                                                                          \
        uint8_t *to = destination;                                                             \
        const uint8_t *from = source;                                                          \
        size_t edge = -(uintptr_t)to & (PM_LINE - 1);                                          \
        if (edge > length) edge = length;                                                      \
        if (edge) EDGE(manner, to, from, edge);                                                \
        to += edge, from += edge, length -= edge;                                              \
        for (; length >= PM_LINE; to += PM_LINE, from += PM_LINE, length -= PM_LINE) body      \
        if (length) EDGE(manner, to, from, length);                                            \
    }

STREAM_FUNCTION(stream_avx512, "avx512f", plain, { _mm512_stream_si512((void *)to, _mm512_loadu_si512(from)); })
STREAM_FUNCTION(stream_avx2, "avx2", plain, {
    _mm256_stream_si256((void *)to, _mm256_loadu_si256((const void *)from));
    _mm256_stream_si256((void *)(to + 32), _mm256_loadu_si256((const void *)(from + 32)));
})
STREAM_FUNCTION(stream_sse2, "sse2", plain, {
    for (int i = 0; i < PM_LINE; i += 16)
        _mm_stream_si128((void *)(to + i), _mm_loadu_si128((const void *)(from + i)));
})
STREAM_FUNCTION(stream_traced, "sse2", traced, { stream_traced_line(media, to, from); })

#define FLUSH_FUNCTION(name, isa, instruction)                                                      \
    __attribute__((target(isa))) static void name(pm_media *media, const void *address, uint64_t lines) \
    {                                                                                               \
        (void)media;                                                                                \
        for (char *line = (char *)(uintptr_t)address; lines; lines--, line += PM_LINE) instruction; \
    }

FLUSH_FUNCTION(flush_clwb, "clwb", _mm_clwb(line))
FLUSH_FUNCTION(flush_clflushopt, "clflushopt", _mm_clflushopt(line))
FLUSH_FUNCTION(flush_clflush, "sse2", _mm_clflush(line))
FLUSH_FUNCTION(flush_lines_traced, "sse2", flush_traced(media, line))

/* EBX of CPUID leaf 7. A virtual machine is left for each CPUID, which costs a snapshot a tenth of its opening. */
static unsigned features(void)
{
    static atomic_uint known; /* with bit 0, which nobody asks for */
    unsigned a = 7, b = known, c = 0, d = 0;
    if (b) return b;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    known = b | 1;
    return b | 1;
}

/* For PMSTORE_FLUSH: what was written through the cache is flushed at once. */
static void stream_flushing(pm_media *media, void *destination, const void *source, size_t length)
{
    if (!length) return;
    memcpy(destination, source, length);
    uint64_t at = offset_of(media, destination), first = at / PM_LINE, end = (at + length + PM_LINE - 1) / PM_LINE;
    media->flush_lines(media, media->view + first * PM_LINE, end - first);
}

static const struct {
    const char *name;
    unsigned bit; /* of EBX of CPUID leaf 7; 32: every processor has it */
    void (*lines)(pm_media *media, const void *address, uint64_t lines);
} flushes[] = {{"clwb", 24, flush_clwb}, {"clflushopt", 23, flush_clflushopt}, {"clflush", 32, flush_clflush}};
enum { FLUSHES = sizeof flushes / sizeof *flushes };

static bool has(unsigned bit)
{
    return bit == 32 || features() >> bit & 1;
}

static pm_status choose_forced(pm_media *media, const char *name)
{
    media->streams_all = !strcmp(name, "stream");
    if (media->streams_all) {
        media->flushes = false;
        return PM_OK;
    }
    for (unsigned i = 0; i < FLUSHES; i++) {
        if (strcmp(name, flushes[i].name)) continue;
        if (!has(flushes[i].bit)) return pm_fail(PM_INVALID, "PMSTORE_FLUSH=%s: this processor has no %s", name, name);
        media->stream = stream_flushing;
        media->stream_page = NULL;
        media->flush_lines = flushes[i].lines;
        return PM_OK;
    }
    return pm_fail(PM_INVALID, "PMSTORE_FLUSH is clwb, clflushopt, clflush or stream, not %.40s", name);
}

pm_status pm_media_memory_choose(pm_media *media)
{
    media->flushes = media->domain == PM_DOMAIN_MEMORY;
    if (media->trace) {
        media->stream = stream_traced;
        media->flush_lines = flush_lines_traced;
        return PM_OK;
    }
    __builtin_cpu_init();
    media->stream = __builtin_cpu_supports("avx512f") ? stream_avx512
                    : __builtin_cpu_supports("avx2")  ? stream_avx2
                                                      : stream_sse2;
    media->stream_page = pm_hash64_stream_page();
    unsigned best = 0;
    while (!has(flushes[best].bit)) best++;
    media->flush_lines = flushes[best].lines;
    const char *forced = getenv("PMSTORE_FLUSH");
    return forced && *forced ? choose_forced(media, forced) : PM_OK;
}

static void order_stores(pm_media *media)
{
    _mm_sfence();
    if (media->trace) pm_trace_add(media->trace, PM_EVENT_FENCE, 0, 0, NULL);
}
#else
/* Without known flush instructions this medium gives what tmpfs can give: the bytes outlive the process. */
static void stream_plain(pm_media *media, void *destination, const void *source, size_t length)
{
    memcpy(destination, source, length);
    if (media->trace)
        pm_trace_add(media->trace, PM_EVENT_STREAM, (uint64_t)((uint8_t *)destination - media->view), length, source);
}
static void flush_none(pm_media *media, const void *address, uint64_t lines)
{
    if (media->trace)
        pm_trace_add(media->trace, PM_EVENT_FLUSH, (uint64_t)((const uint8_t *)address - media->view), lines * PM_LINE,
                     NULL);
}
pm_status pm_media_memory_choose(pm_media *media)
{
    const char *forced = getenv("PMSTORE_FLUSH");
    if (forced && *forced) return pm_fail(PM_INVALID, "PMSTORE_FLUSH: no instruction of this processor is known");
    media->flushes = media->domain == PM_DOMAIN_MEMORY;
    media->stream = stream_plain;
    media->flush_lines = flush_none;
    return PM_OK;
}
static void order_stores(pm_media *media)
{
    __sync_synchronize();
    if (media->trace) pm_trace_add(media->trace, PM_EVENT_FENCE, 0, 0, NULL);
}
#endif

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
        media->stream(media, media->view + offset, source, length);
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
    for (uint64_t page = 0; page < pages; page++, to += PM_PAGE, source += PM_PAGE) {
        if (copy) {
            hashes[page] = copy(to, source);
        } else {
            uint8_t bytes[PM_PAGE] __attribute__((aligned(PM_LINE)));
            hashes[page] = pm_hash64_copy_page(bytes, source);
            media->stream(media, to, bytes, PM_PAGE);
        }
    }
    return PM_OK;
}

static void memory_flush(pm_media *media, uint64_t offset, uint64_t length)
{
    uint64_t first = offset / PM_LINE, end = (offset + length + PM_LINE - 1) / PM_LINE;
    media->flush_lines(media, media->view + first * PM_LINE, end - first);
}

static pm_status memory_write_back(pm_media *media, uint64_t offset, uint64_t length)
{
    (void)media, (void)offset, (void)length;
    return PM_OK;
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

const pm_media_operations pm_media_memory = {
    .write = memory_write,
    .write_hashed = memory_write_hashed,
    .flush = memory_flush,
    .write_back = memory_write_back,
    .fence = memory_fence,
    .write_through = memory_write_through,
    .grow = memory_grow,
    .await_writes = memory_await_writes,
    .sync = memory_fence,
};
