/*
 * Every way of copying and flushing that media/lines.c has, also those that this processor would not choose: each
 * writes the bytes it should, no others, and leaves no line that is neither streamed nor flushed after its last store.
 * Where the domain does not need that, it is left out, up to the size where streaming is quicker.
 * The processor's own instructions are replaced by notes, so that one that is left out is missed. Run by
 * tests/core/test_instructions.py.
 */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <immintrin.h>

enum { SPACE = 3 * 4096, LINE = 64 };

static uint8_t space[SPACE] __attribute__((aligned(4096)));
static uint8_t durable[SPACE]; /* at the next fence */
static unsigned fences;

static void note_flush(const void *address)
{
    size_t line = (size_t)((const uint8_t *)address - space) / LINE * LINE;
    if (line < SPACE) memcpy(durable + line, space + line, LINE);
}

static void note_stream(const void *address, size_t length)
{
    size_t at = (size_t)((const uint8_t *)address - space);
    memcpy(durable + at, address, length);
}

#define _mm_sfence() (fences++)
#define _mm_clwb(address) note_flush(address)
#define _mm_clflushopt(address) note_flush(address)
#define _mm_clflush(address) note_flush(address)
#define _mm512_stream_si512(to, value) (_mm512_storeu_si512(to, value), note_stream(to, 64))
#define _mm256_stream_si256(to, value) (_mm256_storeu_si256(to, value), note_stream(to, 32))
#define _mm_stream_si128(to, value) (_mm_storeu_si128(to, value), note_stream(to, 16))

#include "base/hash.c"
#include "media/lines.c"
#include "media/memory.c"

void pm_check_failed(const char *condition, const char *file, int line)
{
    printf("%s is false at %s:%d\n", condition, file, line);
    exit(1);
}
void pm_trace_add(pm_trace *trace, pm_event_kind kind, uint64_t offset, uint64_t length, const void *data)
{
    (void)trace, (void)kind, (void)offset, (void)length, (void)data;
}
pm_status pm_fail(pm_status status, const char *format, ...)
{
    (void)format;
    return status;
}
pm_status pm_media_reserve(pm_media *media, uint64_t from, uint64_t to)
{
    (void)media, (void)from, (void)to;
    return PM_OK;
}
pm_status pm_media_map(pm_media *media)
{
    (void)media;
    return PM_OK;
}
pm_status pm_dax_grow(pm_media *media, uint64_t size)
{
    (void)media, (void)size;
    return PM_OK;
}

static void fail(const char *name, size_t offset, size_t length, const char *what)
{
    printf("%s: %zu bytes at %zu: %s\n", name, length, offset, what);
    exit(1);
}

static void begin(void)
{
    memset(space, 0xaa, SPACE);
    memcpy(durable, space, SPACE);
}

/* The range holds source, the rest what it held, and all of it would outlive a power cut. */
static void look(const char *name, const uint8_t *source, size_t offset, size_t length)
{
    if (memcmp(space + offset, source, length)) fail(name, offset, length, "other bytes were written");
    for (size_t i = 0; i < SPACE; i++)
        if ((i < offset || i >= offset + length) && space[i] != 0xaa)
            fail(name, offset, length, "bytes beside the range were changed");
    if (memcmp(durable, space, SPACE)) fail(name, offset, length, "a line is neither streamed nor flushed");
}

static void write_to(pm_media *media, size_t offset, const uint8_t *source, size_t length, pm_write_how how)
{
    begin();
    if (pm_media_write(media, offset, source, length, how)) fail("write", offset, length, "refused");
}

/* True if what was written would outlive a power cut that loses the caches. */
static bool left_the_cache(void)
{
    return !memcmp(durable, space, SPACE);
}

/* What PMSTORE_FLUSH forces, and what each domain needs. */
static void choices(pm_media *media, const uint8_t *source)
{
    static const char *const forced[] = {NULL, "clwb", "clflushopt", "clflush", "stream"};
    uint64_t hash;
    for (size_t i = 0; i < 5; i++)
        for (pm_domain domain = PM_DOMAIN_PROCESS; domain <= PM_DOMAIN_MEMORY; domain++) {
            bool stays = domain != PM_DOMAIN_MEMORY && i < 4;
            /* Much is streamed in each domain. A flush that was asked for is not made where nothing needs it. */
            bool much_stays = stays && i;
            const char *name = forced[i] ? forced[i] : "nothing is forced";
            forced[i] ? setenv("PMSTORE_FLUSH", forced[i], 1) : unsetenv("PMSTORE_FLUSH");
            media->domain = domain;
            if (pm_media_memory_choose(media)) {
                if (!i || i > 2) fail(name, 0, 0, "refused");
                continue; /* this processor has no such instruction */
            }
            media->plain = 0;
            write_to(media, 200, source, 300, PM_WRITE_STREAM);
            if (left_the_cache() == stays) fail(name, 200, 300, "streamed as another domain needs it");
            write_to(media, 200, source, 300, PM_WRITE_CACHED);
            if (left_the_cache() != (i == 4)) fail(name, 200, 300, "a cached write");
            if (media->flushes == (domain != PM_DOMAIN_MEMORY || i == 4)) fail(name, 0, 0, "flushes");
            begin();
            if (media->operations->write_hashed(media, 4096, source, 1, &hash)) fail(name, 0, 0, "refused");
            if (memcmp(space + 4096, source, 4096) || hash != pm_hash64(source, 4096, 0)) fail(name, 0, 0, "hashed");
            if (left_the_cache() == stays) fail(name, 4096, 4096, "streamed as another domain needs it");
            media->plain = PLAIN_MOST - 299;
            write_to(media, 200, source, 300, PM_WRITE_STREAM);
            if (left_the_cache() == much_stays) fail(name, 200, 300, "much of it");
            media->operations->fence(media);
            write_to(media, 200, source, 300, PM_WRITE_STREAM);
            if (left_the_cache() == stays) fail(name, 200, 300, "the count goes on behind a fence");
        }
    setenv("PMSTORE_FLUSH", "magic", 1);
    if (pm_media_memory_choose(media) != PM_INVALID) fail("magic", 0, 0, "taken");
    unsetenv("PMSTORE_FLUSH");
}

int main(void)
{
    static uint8_t source[SPACE];
    struct {
        const char *name;
        pm_lines_stream *copy;
        bool supported;
    } streams[] = {{"avx512", stream_avx512, __builtin_cpu_supports("avx512f")},
                   {"avx2", stream_avx2, __builtin_cpu_supports("avx2")},
                   {"sse2", stream_sse2, true},
                   {"the chosen one", NULL, true}};
    struct {
        const char *name;
        pm_lines_flush *flush;
    } flushes[] = {
        {"clwb", flush_clwb}, {"clflushopt", flush_clflushopt}, {"clflush", flush_clflush}, {"the chosen one", NULL}};
    pm_media media = {.kind = PM_MEDIA_MEMORY,
                      .domain = PM_DOMAIN_MEMORY,
                      .view = space,
                      .size = SPACE,
                      .operations = &pm_media_memory};
    if (pm_media_memory_choose(&media)) return 1;
    streams[3].copy = media.stream;
    flushes[3].flush = media.flush_lines;
    for (size_t i = 0; i < SPACE; i++) source[i] = (uint8_t)(i * 7 % 161);

    for (size_t s = 0; s < 4; s++) {
        if (!streams[s].supported) continue;
        for (size_t offset = 128; offset < 128 + 2 * LINE; offset += 8)
            for (size_t length = 1; length <= 5 * LINE; length++) {
                begin();
                streams[s].copy(space + offset, source, length);
                look(streams[s].name, source, offset, length);
            }
    }
    for (size_t f = 0; f < 4; f++)
        for (size_t offset = 128; offset < 128 + LINE; offset += 3)
            for (size_t length = 1; length <= 4 * LINE; length++) {
                begin();
                media.flush_lines = flushes[f].flush;
                if (pm_media_write(&media, offset, source, length, PM_WRITE_CACHED)) return 1;
                media.operations->flush(&media, offset, length);
                look(flushes[f].name, source, offset, length);
            }
    struct {
        const char *name;
        pm_hash64_page_function *copy;
        bool supported;
    } pages[] = {{"page, avx512", stream_page_avx512, __builtin_cpu_supports("avx512f")},
                 {"page, avx2", stream_page_avx2, __builtin_cpu_supports("avx2")},
                 {"page, without either", NULL, true}};
    uint64_t hash;
    for (size_t p = 0; p < 3; p++) {
        if (!pages[p].supported) continue;
        media.stream_page = pages[p].copy;
        for (size_t shift = 0; shift < 16; shift += 5) {
            begin();
            if (media.operations->write_hashed(&media, 4096, source + shift, 1, &hash)) return 1;
            look(pages[p].name, source + shift, 4096, 4096);
            if (hash != pm_hash64(source + shift, 4096, 0)) fail(pages[p].name, 4096, 4096, "another hash");
        }
    }
    begin();
    unsigned before = fences;
    if (media.operations->write_through(&media, 192, source, 100) || fences != before + 1)
        fail("write_through", 192, 100, "no fence");
    look("write_through", source, 192, 100);
    if (media.operations->fence(&media) || fences != before + 2) fail("fence", 0, 0, "no fence");
    if (media.fences != 2) fail("fence", 0, 0, "not counted");
    choices(&media, source);
    return 0;
}
