#define _GNU_SOURCE
#include "media/lines.h"

#include <stdatomic.h>
#include <string.h>

#include "base/format.h"

typedef struct {
    const char *name;
    pm_lines_flush *flush;
    bool (*supported)(void);
} flush_kind;

static pm_lines_flush *find(const flush_kind *kinds, size_t count, const char *name, bool *known)
{
    *known = !name;
    for (size_t i = 0; i < count; i++) {
        bool named = name && !strcmp(name, kinds[i].name);
        if (named) *known = true;
        if ((!name || named) && kinds[i].supported()) return kinds[i].flush;
    }
    return NULL;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Bytes before and after the whole lines of a streamed range: a part of one line. clflush: every processor has it. */
static void copy_edge(uint8_t *to, const uint8_t *from, size_t length)
{
    memcpy(to, from, length);
    _mm_clflush(to);
}

#define STREAM_FUNCTION(name, isa, body)                                                        \
    __attribute__((target(isa))) static void name(void *destination, const void *source, size_t length) \
    {                                                                                           \
        uint8_t *to = destination;                                                              \
        const uint8_t *from = source;                                                           \
        size_t edge = -(uintptr_t)to & (PM_LINE - 1);                                           \
        if (edge > length) edge = length;                                                       \
        if (edge) copy_edge(to, from, edge);                                                    \
        to += edge, from += edge, length -= edge;                                               \
        for (; length >= PM_LINE; to += PM_LINE, from += PM_LINE, length -= PM_LINE) body       \
        if (length) copy_edge(to, from, length);                                                \
    }

STREAM_FUNCTION(stream_avx512, "avx512f", { _mm512_stream_si512((void *)to, _mm512_loadu_si512(from)); })
STREAM_FUNCTION(stream_avx2, "avx2", {
    _mm256_stream_si256((void *)to, _mm256_loadu_si256((const void *)from));
    _mm256_stream_si256((void *)(to + 32), _mm256_loadu_si256((const void *)(from + 32)));
})
STREAM_FUNCTION(stream_sse2, "sse2", {
    for (int i = 0; i < PM_LINE; i += 16)
        _mm_stream_si128((void *)(to + i), _mm_loadu_si128((const void *)(from + i)));
})

#define FLUSH_FUNCTION(name, isa, instruction)                                                      \
    __attribute__((target(isa))) static void name(const void *address, uint64_t lines)              \
    {                                                                                               \
        for (char *line = (char *)(uintptr_t)address; lines; lines--, line += PM_LINE) instruction; \
    }

FLUSH_FUNCTION(flush_clwb, "clwb", _mm_clwb(line))
FLUSH_FUNCTION(flush_clflushopt, "clflushopt", _mm_clflushopt(line))
FLUSH_FUNCTION(flush_clflush, "sse2", _mm_clflush(line))

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

static bool has_clwb(void)
{
    return features() >> 24 & 1;
}

static bool has_clflushopt(void)
{
    return features() >> 23 & 1;
}

static bool has_clflush(void)
{
    return true;
}

pm_lines_flush *pm_lines_find_flush(const char *name, bool *known)
{
    static const flush_kind kinds[] = {{"clwb", flush_clwb, has_clwb},
                                       {"clflushopt", flush_clflushopt, has_clflushopt},
                                       {"clflush", flush_clflush, has_clflush}};
    return find(kinds, sizeof kinds / sizeof *kinds, name, known);
}

pm_lines_stream *pm_lines_find_stream(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") ? stream_avx512
           : __builtin_cpu_supports("avx2")  ? stream_avx2
                                             : stream_sse2;
}

void pm_lines_order(bool durable)
{
    (void)durable; /* an sfence does both */
    _mm_sfence();
}

#elif defined(__aarch64__)
#include <sys/auxv.h>

#ifndef HWCAP_DCPOP
#define HWCAP_DCPOP (1UL << 16)
#endif

/* The processor's lines may be shorter than 64 bytes. Each instruction takes the line that has its address. */
static size_t line_size(void)
{
    static atomic_size_t known;
    size_t size = known;
    if (size) return size;
    uint64_t type;
    __asm__("mrs %0, ctr_el0" : "=r"(type));
    size = (size_t)4 << (type >> 16 & 15);
    return known = size < PM_LINE ? size : PM_LINE;
}

/* The barrier: another thread may have stored to the lines. Having seen that orders later stores, and no flush. */
#define FLUSH_FUNCTION(name, instruction)                                                  \
    static void name(const void *address, uint64_t lines)                                  \
    {                                                                                      \
        __asm__ volatile("dmb ish" : : : "memory");                                        \
        const char *line = address, *end = line + lines * PM_LINE;                         \
        for (size_t step = line_size(); line < end; line += step)                          \
            __asm__ volatile(instruction : : "r"(line) : "memory");                        \
    }

FLUSH_FUNCTION(flush_cvap, "sys #3, c7, c12, #1, %0") /* dc cvap: older assemblers do not know it */
FLUSH_FUNCTION(flush_cvac, "dc cvac, %0")

static bool has_cvap(void)
{
    return getauxval(AT_HWCAP) & HWCAP_DCPOP;
}

static bool has_cvac(void)
{
    return true;
}

pm_lines_flush *pm_lines_find_flush(const char *name, bool *known)
{
    static const flush_kind kinds[] = {{"cvap", flush_cvap, has_cvap}, {"cvac", flush_cvac, has_cvac}};
    return find(kinds, sizeof kinds / sizeof *kinds, name, known);
}

pm_lines_stream *pm_lines_find_stream(void)
{
    return NULL;
}

void pm_lines_order(bool durable)
{
    /* A barrier of data waits until lines have arrived; a barrier of memory orders what others see. */
    if (durable) __asm__ volatile("dsb sy" : : : "memory");
    else __asm__ volatile("dmb ish" : : : "memory");
}

#else
pm_lines_flush *pm_lines_find_flush(const char *name, bool *known)
{
    return find(NULL, 0, name, known);
}

pm_lines_stream *pm_lines_find_stream(void)
{
    return NULL;
}

void pm_lines_order(bool durable)
{
    (void)durable;
    atomic_thread_fence(memory_order_seq_cst);
}
#endif
