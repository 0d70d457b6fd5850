/*
 * Byte-addressable durable memory, mapped shared. On tmpfs the bytes outlive the process, not the machine; flushes and
 * fences are issued all the same, as persistent memory needs them.
 */
#define _GNU_SOURCE
#include "media/media.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/hash.h"

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

void pm_media_memory_choose(pm_media *media)
{
    if (media->trace) {
        media->stream = stream_traced;
        media->flush_lines = flush_lines_traced;
        return;
    }
    __builtin_cpu_init();
    unsigned b = features();
    media->stream = __builtin_cpu_supports("avx512f") ? stream_avx512
                    : __builtin_cpu_supports("avx2")  ? stream_avx2
                                                      : stream_sse2;
    /* CPUID leaf 7: EBX bit 24 is clwb, bit 23 is clflushopt. */
    media->flush_lines = b >> 24 & 1 ? flush_clwb : b >> 23 & 1 ? flush_clflushopt : flush_clflush;
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
void pm_media_memory_choose(pm_media *media)
{
    media->stream = stream_plain;
    media->flush_lines = flush_none;
}
static void order_stores(pm_media *media)
{
    __sync_synchronize();
    if (media->trace) pm_trace_add(media->trace, PM_EVENT_FENCE, 0, 0, NULL);
}
#endif

static pm_status memory_write(pm_media *media, uint64_t offset, const void *source, size_t length, pm_write_how how)
{
    PM_CHECK(offset + length <= media->size);
    if (how == PM_WRITE_STREAM) {
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
    pm_hash64_page_function *stream_page = media->trace ? NULL : pm_hash64_stream_page();
    uint8_t *to = media->view + offset;
    for (uint64_t page = 0; page < pages; page++, to += PM_PAGE, source += PM_PAGE) {
        if (stream_page) {
            hashes[page] = stream_page(to, source);
        } else {
            uint8_t copy[PM_PAGE] __attribute__((aligned(PM_LINE)));
            hashes[page] = pm_hash64_copy_page(copy, source);
            media->stream(media, to, copy, PM_PAGE);
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
