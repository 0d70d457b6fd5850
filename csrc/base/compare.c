#include "base/compare.h"

#include <string.h>

#include "base/format.h"

#if defined(__x86_64__) && !defined(PM_PORTABLE) /* tests define it, to try both */
#include <immintrin.h>
#define PM_X86 1
#endif

enum { LINES = PM_PAGE / PM_LINE };

static bool equal_portable(const uint8_t *a, const uint8_t *b)
{
    return !memcmp(a, b, PM_PAGE);
}

static uint64_t changed_lines_portable(const uint8_t *a, const uint8_t *b)
{
    uint64_t changed = 0;
    for (unsigned line = 0; line < LINES; line++) {
        uint64_t x[8], y[8], difference = 0;
        memcpy(x, a + line * PM_LINE, sizeof x);
        memcpy(y, b + line * PM_LINE, sizeof y);
        for (int i = 0; i < 8; i++) difference |= x[i] ^ y[i];
        changed |= (uint64_t)(difference != 0) << line;
    }
    return changed;
}

#ifdef PM_X86

#define AVX512 __attribute__((target("avx512f")))

/* One branch for eight lines: memcmp branches after every four vectors of half the width, which is slower from
 * memory. */
AVX512 static bool equal_avx512(const uint8_t *a, const uint8_t *b)
{
    enum { AT_ONCE = 8 * PM_LINE };
    for (unsigned at = 0; at < PM_PAGE; at += AT_ONCE) {
        __m512i differing = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (unsigned line = at; line < at + AT_ONCE; line += PM_LINE)
            differing = _mm512_ternarylogic_epi64(differing, _mm512_loadu_si512(a + line), _mm512_loadu_si512(b + line),
                                                  0xf6 /* d | (a ^ b) */);
        if (_mm512_test_epi64_mask(differing, differing)) return false;
    }
    return true;
}

AVX512 static uint64_t changed_lines_avx512(const uint8_t *a, const uint8_t *b)
{
    uint64_t changed = 0;
#pragma GCC unroll 8
    for (unsigned line = 0; line < LINES; line++) {
        __mmask8 differing =
            _mm512_cmpneq_epi64_mask(_mm512_loadu_si512(a + line * PM_LINE), _mm512_loadu_si512(b + line * PM_LINE));
        changed |= (uint64_t)(differing != 0) << line;
    }
    return changed;
}

#endif /* PM_X86 */

static bool (*equal)(const uint8_t *, const uint8_t *) = equal_portable;
static uint64_t (*changed_lines)(const uint8_t *, const uint8_t *) = changed_lines_portable;

bool pm_compare_equal(const void *a, const void *b)
{
    return equal(a, b);
}

uint64_t pm_compare_changed_lines(const void *a, const void *b)
{
    return changed_lines(a, b);
}

#ifdef PM_X86
/* Runs when the library is loaded, before any thread can call. */
__attribute__((constructor)) static void choose_versions(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) equal = equal_avx512, changed_lines = changed_lines_avx512;
}
#endif
