/*
 * The physical baseline of a commit, and the parts of one that can be timed by themselves. Every function returns the
 * seconds that it took, by a clock read inside it, so that a caller in Python is not part of the figure.
 *
 *   memory  the changed bytes, stored non-temporally into a mapped and touched file, and one sfence
 *   disk    the changed bytes by one pwrite into a file that is allocated and written already, and one fdatasync
 *
 * flush_lines is what libraries for persistent memory do after plain stores: every line out of the cache, and one
 * sfence.
 */
#define _GNU_SOURCE
#include "baseline.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/hash.h"

enum { PAGE = 4096, LINE = 64 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#if defined(__x86_64__)
#include <immintrin.h>
__attribute__((target("avx512f"))) static void stream_512(char *to, const char *from, size_t length)
{
    for (size_t i = 0; i + 64 <= length; i += 64) _mm512_stream_si512((void *)(to + i), _mm512_loadu_si512(from + i));
}
static void stream_128(char *to, const char *from, size_t length)
{
    for (size_t i = 0; i + 16 <= length; i += 16)
        _mm_stream_si128((void *)(to + i), _mm_loadu_si128((const void *)(from + i)));
}
static void stream(void *to, const void *from, size_t length)
{
    if (__builtin_cpu_supports("avx512f")) stream_512(to, from, length);
    else stream_128(to, from, length);
}
static void fence(void)
{
    _mm_sfence();
}
__attribute__((target("clflushopt"))) static void flush(const char *at, size_t length)
{
    for (size_t i = 0; i < length; i += LINE) _mm_clflushopt((void *)(uintptr_t)(at + i));
}
#else
static void flush(const char *at, size_t length)
{
    (void)at, (void)length;
}
static void stream(void *to, const void *from, size_t length)
{
    memcpy(to, from, length);
}
static void fence(void)
{
    __sync_synchronize();
}
#endif

static size_t lines(size_t length)
{
    return (length + LINE - 1) / LINE * LINE;
}

double baseline_memory(void *to, const void *from, size_t length)
{
    double start = now();
    stream(to, from, lines(length));
    fence();
    return now() - start;
}

double baseline_memory_rows(void *to, const void *from, size_t row, const int64_t *rows, size_t count)
{
    double start = now();
    for (size_t i = 0; i < count; i++)
        stream((char *)to + (size_t)rows[i] * row, (const char *)from + i * row, lines(row));
    fence();
    return now() - start;
}

double baseline_disk(int fd, const void *from, size_t length, double *writing)
{
    double start = now();
    for (size_t done = 0; done < length;) {
        ssize_t n = pwrite(fd, (const char *)from + done, length - done, (off_t)done);
        if (n <= 0) return -1;
        done += (size_t)n;
    }
    if (writing) *writing = now() - start;
    if (fdatasync(fd)) return -1;
    return now() - start;
}

double flush_lines(const void *at, size_t length)
{
    double start = now();
    flush(at, length);
    fence();
    return now() - start;
}

double part_fence(void *to, const void *from, size_t length)
{
    stream(to, from, lines(length));
    double start = now();
    fence();
    return now() - start;
}

double part_stream(void *to, const void *from, size_t length)
{
    double start = now();
    stream(to, from, lines(length));
    double end = now();
    fence();
    return end - start;
}

/* Page by page through a block that stays in the cache, as the core does (I6). `to` NULL: hash only. */
double part_hash_copy(void *to, const void *from, size_t length)
{
    static __attribute__((aligned(64))) unsigned char block[PAGE];
    volatile uint64_t kept = 0; /* or the compiler leaves the hash out */
    double start = now();
    for (size_t at = 0; at < length; at += PAGE) {
        size_t bytes = length - at < PAGE ? length - at : PAGE;
#ifdef HASH_COPIES
        if (bytes == PAGE) {
            kept += pm_hash64_copy_page(block, (const char *)from + at);
        } else
#endif
        {
            memcpy(block, (const char *)from + at, bytes);
            kept += pm_hash64(block, bytes, 0);
        }
        if (to) stream((char *)to + at, block, lines(bytes));
    }
    double end = now();
    fence();
    return end - start;
}

/* To the committed image, from a log that was just written. */
double part_image(void *to, const void *from, size_t length, int streaming)
{
    double start = now();
    if (streaming) stream(to, from, lines(length));
    else memcpy(to, from, length);
    double end = now();
    fence();
    return end - start;
}
