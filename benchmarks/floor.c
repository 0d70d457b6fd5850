/* The physical floor of a commit on memory-like media: the same bytes, stored non-temporally, and one fence. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
__attribute__((target("avx512f"))) static void stream_512(char *to, const char *from, size_t length)
{
    for (size_t i = 0; i + 64 <= length; i += 64) _mm512_stream_si512((void *)(to + i), _mm512_loadu_si512(from + i));
}
static void stream_128(char *to, const char *from, size_t length)
{
    for (size_t i = 0; i + 16 <= length; i += 16) _mm_stream_si128((void *)(to + i), _mm_loadu_si128((const void *)(from + i)));
}
static void floor_copy(char *to, const char *from, size_t length)
{
    if (__builtin_cpu_supports("avx512f")) stream_512(to, from, length);
    else stream_128(to, from, length);
    _mm_sfence();
}
#else
static void floor_copy(char *to, const char *from, size_t length)
{
    memcpy(to, from, length);
    __sync_synchronize();
}
#endif

/* Seconds that one such copy takes. Lengths that are no multiple of 64 are rounded up: `to` and `from` have the room. */
double floor_seconds(void *to, const void *from, size_t length)
{
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    floor_copy(to, from, (length + 63) / 64 * 64);
    clock_gettime(CLOCK_MONOTONIC, &b);
    return (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
}
