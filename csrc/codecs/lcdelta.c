/*
 * The passes of a lossy difference over its elements (LC-Checkpoint, ICML 2020). docs/lossy.md explains the codec.
 *
 *     x, before ──count──▶ the number and the sum of the changes x - before with each sign and exponent
 *                          ──▶ the table of the kept ones, and their values
 *     x, before ──apply──▶ codes, before + values[code], its error, and the elements that must be exact
 *     codes ──pack──▶ a byte for each code that is not 0, with the number of zeros before it
 *
 * Arithmetic is that of one addition per element, rounded once, so that every machine decodes the same bits.
 *
 * A pass takes a block of elements at a time through several loops. The compiler makes vectors of those loops that have
 * no branch and look nothing up. Each pass is compiled twice, for every processor and for those with AVX2.
 */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "pmstore.h"

#if defined(__x86_64__) && !defined(PM_PORTABLE) /* tests define it, to try both */
#include <cpuid.h>
#include <immintrin.h>
#define PM_X86 1
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 4")

enum { LANES = 4 };        /* numbers that are added up in turns: an addition need not wait for the one before */
enum { AT_ONCE = 16 };     /* errors */
enum { BLOCK_BYTES = 512 }; /* of the numbers of a block: what the loops leave for each other stays in the L1 cache */

/* ---- numbers of elements, and back. A float is computed with unless elements are doubles */

static ALWAYS_INLINE uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static ALWAYS_INLINE float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static ALWAYS_INLINE uint64_t bits_of_double(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static ALWAYS_INLINE double double_of_bits(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* `yes` or `no`. The compiler makes a branch of `?:` if one of them takes long to compute. */
static ALWAYS_INLINE uint32_t chosen(bool condition, uint32_t yes, uint32_t no)
{
    uint32_t mask = -(uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

static ALWAYS_INLINE float float_of_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t normal = (rest << 13) + (rest >= 0x7c00 ? 0x70000000 : 0x38000000);
    uint32_t denormal = bits_of_float((float)(int32_t)rest * 0x1p-24f);
    return float_of_bits(sign | chosen(rest >= 0x400, normal, denormal));
}

static ALWAYS_INLINE uint16_t half_of_float(float value)
{
    uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    uint32_t normal = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
    uint32_t denormal = bits_of_float(fabsf(value) + 0.5f) - 0x3f000000; /* the last bit of the sum counts 2^-24 */
    uint32_t half = chosen(rest >= 0x38800000, normal, denormal);
    half = chosen(rest >= 0x477ff000, 0x7c00, half); /* what rounds to 65536 and more */
    return (uint16_t)(sign | chosen(rest > 0x7f800000, 0x7e00, half));
}

static ALWAYS_INLINE float float_of_brain(uint16_t brain)
{
    return float_of_bits((uint32_t)brain << 16);
}

static ALWAYS_INLINE uint16_t brain_of_float(float value)
{
    uint32_t bits = bits_of_float(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)chosen((bits & 0x7fffffff) > 0x7f800000, bits >> 16 | 0x40, rounded);
}

enum { FLOATS = BLOCK_BYTES / sizeof(float) };

static void numbers_of_halves(const uint16_t *halves, float *numbers)
{
    for (unsigned i = 0; i < FLOATS; i++) numbers[i] = float_of_half(halves[i]);
}

static void halves_of_numbers(const float *numbers, uint16_t *halves)
{
    for (unsigned i = 0; i < FLOATS; i++) halves[i] = half_of_float(numbers[i]);
}

static void values_of_codes(const float *values, const uint8_t *codes, float *found)
{
#pragma GCC unroll 4
    for (unsigned i = 0; i < FLOATS; i++) found[i] = values[codes[i]];
}

#ifdef PM_X86

#define F16C __attribute__((target("avx2,f16c")))

F16C static void numbers_of_halves_f16c(const uint16_t *halves, float *numbers)
{
    for (unsigned i = 0; i < FLOATS; i += 8)
        _mm256_storeu_ps(numbers + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
}

F16C static void halves_of_numbers_f16c(const float *numbers, uint16_t *halves)
{
    const __m256 sign = _mm256_set1_ps(-0.0f), nan = _mm256_set1_ps(NAN);
    for (unsigned i = 0; i < FLOATS; i += 8) {
        __m256 x = _mm256_loadu_ps(numbers + i);
        x = _mm256_blendv_ps(x, _mm256_or_ps(_mm256_and_ps(x, sign), nan), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        _mm_storeu_si128((__m128i *)(halves + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
}

__attribute__((target("avx2"))) static void values_of_few_avx2(const float *values, const uint8_t *codes, float *found)
{
    const __m256 all = _mm256_loadu_ps(values);
    for (unsigned i = 0; i < FLOATS; i += 8) {
        __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
        _mm256_storeu_ps(found + i, _mm256_permutevar8x32_ps(all, code));
    }
}

#endif

/* How halves are converted, and values are looked up: of codes to FEW. Chosen when the library is loaded, before any
 * thread can call. */
static void (*from_halves)(const uint16_t *, float *) = numbers_of_halves;
static void (*to_halves)(const float *, uint16_t *) = halves_of_numbers;
static void (*values_of_few)(const float *, const uint8_t *, float *) = values_of_codes;

enum { FEW = 7 };

static bool are_few(const uint8_t *table, unsigned buckets)
{
    uint8_t most = 0;
    for (unsigned i = 0; i < buckets; i++) most = table[i] > most ? table[i] : most;
    return most <= FEW;
}

static ALWAYS_INLINE void look_up_float(const float *values, const uint8_t *codes, bool few, float *found)
{
    (few ? values_of_few : values_of_codes)(values, codes, found);
}

static ALWAYS_INLINE void look_up_double(const double *values, const uint8_t *codes, bool few, double *found)
{
    (void)few;
#pragma GCC unroll 4
    for (unsigned i = 0; i < BLOCK_BYTES / sizeof(double); i++) found[i] = values[codes[i]];
}

/* Numbers that may also be read as their bits. */
typedef double some_double __attribute__((may_alias));
typedef float some_float __attribute__((may_alias));

/* For each type of elements: the numbers of a block, in `room` unless they are what is stored; and back. */

static ALWAYS_INLINE const some_double *numbers_double(const uint64_t *x, double *room)
{
    (void)room;
    return (const some_double *)x;
}

static ALWAYS_INLINE const some_float *numbers_float(const uint32_t *x, float *room)
{
    (void)room;
    return (const some_float *)x;
}

static ALWAYS_INLINE const some_float *numbers_half(const uint16_t *x, float *room)
{
    from_halves(x, room);
    return room;
}

static ALWAYS_INLINE const some_float *numbers_brain(const uint16_t *x, float *room)
{
    for (unsigned i = 0; i < FLOATS; i++) room[i] = float_of_brain(x[i]);
    return room;
}

static ALWAYS_INLINE void stored_double(const double *numbers, uint64_t *out)
{
    memcpy(out, numbers, BLOCK_BYTES);
}

static ALWAYS_INLINE void stored_float(const float *numbers, uint32_t *out)
{
    memcpy(out, numbers, BLOCK_BYTES);
}

static ALWAYS_INLINE void stored_half(const float *numbers, uint16_t *out)
{
    to_halves(numbers, out);
}

static ALWAYS_INLINE void stored_brain(const float *numbers, uint16_t *out)
{
    for (unsigned i = 0; i < FLOATS; i++) out[i] = brain_of_float(numbers[i]);
}

/* ---- the buckets of changes: sign and exponent */

enum { MANTISSA = 23, NUMBER = 44 }; /* bits */
enum { BUCKETS_double = 4096, BUCKETS_float = 512 };
#define CHANGES_double UINT64_MAX
#define CHANGES_float (UINT64_C(1) << 22) /* so many fit into the bits of a tally */

/* Changes of a bucket, in turns. */
typedef struct tallies_double {
    double sum[LANES];
    uint64_t number[LANES];
} tallies_double;

/* Floats have one exponent, so that their sum is that of their mantissas. Each is 2^NUMBER and its mantissa. */
typedef struct tallies_float {
    uint64_t both[LANES];
} tallies_float;

static ALWAYS_INLINE uint16_t bucket_double(double change)
{
    return (uint16_t)(bits_of_double(change) >> 52);
}

static ALWAYS_INLINE uint16_t bucket_float(float change)
{
    return (uint16_t)(bits_of_float(change) >> MANTISSA);
}

static ALWAYS_INLINE void tally_double(double change, unsigned lane, tallies_double *all)
{
    tallies_double *found = all + bucket_double(change);
    found->sum[lane] += change;
    found->number[lane]++;
}

static ALWAYS_INLINE void tally_float(float change, unsigned lane, tallies_float *all)
{
    uint32_t bits = bits_of_float(change);
    all[bits >> MANTISSA].both[lane] += (UINT64_C(1) << NUMBER) + (bits & ((1u << MANTISSA) - 1));
}

/* Adds the tallies up, and clears them. The order of doubles matters. */
static void add_up_double(tallies_double *all, uint64_t *numbers, double *sums)
{
    for (unsigned i = 0; i < BUCKETS_double; i++) {
        for (unsigned lane = 0; lane < LANES; lane++) numbers[i] += all[i].number[lane];
        if (numbers[i]) sums[i] = all[i].sum[0] + all[i].sum[1] + all[i].sum[2] + all[i].sum[3];
    }
    memset(all, 0, BUCKETS_double * sizeof *all);
}

static void add_up_float(tallies_float *all, uint64_t *numbers, double *sums)
{
    for (unsigned i = 0; i < BUCKETS_float; i++) {
        uint64_t number = 0, mantissas = 0;
        for (unsigned lane = 0; lane < LANES; lane++) {
            number += all[i].both[lane] >> NUMBER;
            mantissas += all[i].both[lane] & ((UINT64_C(1) << NUMBER) - 1);
        }
        double sum = ldexp((double)((number << MANTISSA) + mantissas), (int)(i & 0xff) - 127 - MANTISSA);
        numbers[i] += number, sums[i] += i & 0x100 ? -sum : sum;
    }
    memset(all, 0, BUCKETS_float * sizeof *all);
}

/* ---- errors */

typedef double four __attribute__((vector_size(4 * sizeof(double))));
typedef int64_t four_bits __attribute__((vector_size(4 * sizeof(int64_t))));

/* The largest errors, and the sums of the squares of errors and of elements, in turns. */
typedef struct measures {
    four most[AT_ONCE / 4], squares[AT_ONCE / 4], total[AT_ONCE / 4];
} measures;

static ALWAYS_INLINE void measure(const double *wanted, const double *errors, measures *all)
{
    four x, error;
#pragma GCC unroll 4
    for (unsigned i = 0; i < AT_ONCE / 4; i++) {
        memcpy(&x, wanted + 4 * i, sizeof x);
        memcpy(&error, errors + 4 * i, sizeof error);
        four_bits larger = error > all->most[i];
        all->most[i] = (four)(((four_bits)error & larger) | ((four_bits)all->most[i] & ~larger));
        all->squares[i] += error * error;
        all->total[i] += x * x;
    }
}

static const measures nothing;

static void add_up(const measures *all, double *errors)
{
    for (unsigned i = 0; i < AT_ONCE; i++) {
        errors[0] = fmax(errors[0], all->most[i / 4][i % 4]);
        errors[1] += all->squares[i / 4][i % 4];
        errors[2] += all->total[i / 4][i % 4];
    }
}

/* ---- loops over a block, for each type. U: an element's bits; N: its number, of which M are the bits; EXPONENT: those
 * of U that are the exponent; INFINITE: those of M */

#define LOOPS(NAME, U, N, M, EXPONENT, INFINITE)                                                                       \
    enum { BLOCK_##NAME = BLOCK_BYTES / sizeof(N) };                                                                   \
    typedef U bits_##NAME;                                                                                             \
    /* The last block gets zeros behind it. */                                                                         \
    static ALWAYS_INLINE const U *whole_##NAME(const U *x, uint64_t n, U *room)                                        \
    {                                                                                                                  \
        if (n >= BLOCK_##NAME) return x;                                                                               \
        memset(room, 0, BLOCK_##NAME * sizeof(U));                                                                     \
        return memcpy(room, x, n * sizeof(U));                                                                         \
    }                                                                                                                  \
    /* x with the values added where the code is not 0. Elsewhere even the bits of NaN are kept. */                    \
    static ALWAYS_INLINE void sums_##NAME(const U *x, const some_##N *numbers, const N *value, const uint8_t *code,   \
                                          U *out)                                                                      \
    {                                                                                                                  \
        N sum[BLOCK_##NAME];                                                                                           \
        for (unsigned i = 0; i < BLOCK_##NAME; i++) sum[i] = numbers[i] + value[i];                                    \
        stored_##NAME(sum, out);                                                                                       \
        for (unsigned i = 0; i < BLOCK_##NAME; i++) {                                                                  \
            U mask = (U)-(code[i] != 0);                                                                               \
            out[i] = (U)((out[i] & mask) | (x[i] & (U)~mask));                                                         \
        }                                                                                                              \
    }                                                                                                                  \
    /* Makes elements exact that have to be: `wrong` gets the bits that differed. Returns whether there were any. */   \
    static ALWAYS_INLINE bool correct_##NAME(const U *x, U *out, U *wrong)                                             \
    {                                                                                                                  \
        U any = 0;                                                                                                     \
        for (unsigned i = 0; i < BLOCK_##NAME; i++) {                                                                  \
            U exponent = x[i] & EXPONENT, of_sum = out[i] & EXPONENT;                                                  \
            bool special = (exponent == 0) | (exponent == EXPONENT) | (of_sum == EXPONENT);                            \
            wrong[i] = (U)((x[i] ^ out[i]) & (U)-special);                                                             \
            out[i] ^= wrong[i];                                                                                        \
            any |= wrong[i];                                                                                           \
        }                                                                                                              \
        return any;                                                                                                    \
    }                                                                                                                  \
    static ALWAYS_INLINE void measure_##NAME(const some_##N *numbers, const some_##N *got, measures *all)              \
    {                                                                                                                  \
        double wanted[BLOCK_##NAME], errors[BLOCK_##NAME];                                                             \
        for (unsigned i = 0; i < BLOCK_##NAME; i++) {                                                                  \
            M bits = bits_of_##N(numbers[i]), finite = (M)-((bits & INFINITE) != INFINITE);                            \
            wanted[i] = N##_of_bits(bits & finite);                                                                    \
            errors[i] = fabs(wanted[i] - (double)N##_of_bits(bits_of_##N(got[i]) & finite));                           \
        }                                                                                                              \
        for (unsigned i = 0; i < BLOCK_##NAME; i += AT_ONCE) measure(wanted + i, errors + i, all);                     \
    }

LOOPS(double, uint64_t, double, uint64_t, (UINT64_C(0x7ff) << 52), (UINT64_C(0x7ff) << 52))
LOOPS(float, uint32_t, float, uint32_t, (0xffu << 23), (0xffu << 23))
LOOPS(half, uint16_t, float, uint32_t, (0x1f << 10), (0xffu << 23))
LOOPS(brain, uint16_t, float, uint32_t, (0xff << 7), (0xffu << 23))

/* ---- the passes, for each type and version. FOR: attributes of the functions of a version */

#define PASSES(NAME, N, VERSION, FOR)                                                                                  \
    FOR static void count_##NAME##VERSION(const bits_##NAME *x, const bits_##NAME *before, uint64_t n,                 \
                                          tallies_##N *room, uint64_t *numbers, double *sums)                          \
    {                                                                                                                  \
        bits_##NAME last[2][BLOCK_##NAME];                                                                             \
        N own[2][BLOCK_##NAME], change[BLOCK_##NAME];                                                                  \
        for (uint64_t at = 0; at < n; at += BLOCK_##NAME) {                                                            \
            const some_##N *new = numbers_##NAME(whole_##NAME(x + at, n - at, last[0]), own[0]);                       \
            const some_##N *old = numbers_##NAME(whole_##NAME(before + at, n - at, last[1]), own[1]);                  \
            for (unsigned i = 0; i < BLOCK_##NAME; i++) change[i] = new[i] - old[i];                                   \
            for (unsigned i = 0; i < BLOCK_##NAME; i += LANES)                                                         \
                UNROLLED for (unsigned lane = 0; lane < LANES; lane++) tally_##N(change[i + lane], lane, room);        \
            if ((at + BLOCK_##NAME) % CHANGES_##N == 0) add_up_##N(room, numbers, sums);                               \
        }                                                                                                              \
        add_up_##N(room, numbers, sums);                                                                               \
        numbers[0] -= -n % BLOCK_##NAME; /* the zeros behind the last ones */                                          \
    }                                                                                                                  \
    FOR static void add_##NAME##VERSION(bits_##NAME *data, const uint8_t *codes, uint64_t n, const N *values)          \
    {                                                                                                                  \
        bits_##NAME last[BLOCK_##NAME], out[BLOCK_##NAME];                                                             \
        N room[BLOCK_##NAME], value[BLOCK_##NAME];                                                                     \
        uint8_t code[BLOCK_##NAME] = {0};                                                                              \
        for (uint64_t at = 0; at < n; at += BLOCK_##NAME) {                                                            \
            size_t some = n - at < BLOCK_##NAME ? n - at : BLOCK_##NAME;                                               \
            const bits_##NAME *x = whole_##NAME(data + at, n - at, last);                                              \
            memcpy(code, codes + at, some);                                                                            \
            look_up_##N(values, code, false, value);                                                                   \
            sums_##NAME(x, numbers_##NAME(x, room), value, code, out);                                                 \
            memcpy(data + at, out, some * sizeof *out);                                                                \
        }                                                                                                              \
    }                                                                                                                  \
    FOR static uint64_t apply_##NAME##VERSION(const bits_##NAME *data, const bits_##NAME *base, uint64_t n,            \
                                              const uint8_t *table, const N *values, uint8_t *codes,                   \
                                              bits_##NAME *result, uint32_t *places, double *errors)                   \
    {                                                                                                                  \
        bits_##NAME last[2][BLOCK_##NAME], out[BLOCK_##NAME], wrong[BLOCK_##NAME];                                     \
        N room[2][BLOCK_##NAME], value[BLOCK_##NAME];                                                                  \
        uint16_t bucket[BLOCK_##NAME];                                                                                 \
        uint8_t code[BLOCK_##NAME];                                                                                    \
        bool few = are_few(table, BUCKETS_##N);                                                                        \
        uint64_t exact = 0;                                                                                            \
        measures all = nothing;                                                                                        \
        for (uint64_t at = 0; at < n; at += BLOCK_##NAME) {                                                            \
            size_t some = n - at < BLOCK_##NAME ? n - at : BLOCK_##NAME;                                               \
            const bits_##NAME *x = whole_##NAME(data + at, n - at, last[0]);                                           \
            const bits_##NAME *before = whole_##NAME(base + at, n - at, last[1]);                                      \
            const some_##N *new = numbers_##NAME(x, room[0]), *old = numbers_##NAME(before, room[1]);                  \
            for (unsigned i = 0; i < BLOCK_##NAME; i++) bucket[i] = bucket_##N(new[i] - old[i]);                       \
            UNROLLED for (unsigned i = 0; i < BLOCK_##NAME; i++) code[i] = table[bucket[i]];                           \
            look_up_##N(values, code, few, value);                                                                     \
            sums_##NAME(before, old, value, code, out);                                                                \
            if (correct_##NAME(x, out, wrong))                                                                         \
                for (unsigned i = 0; i < some; i++) places[exact] = (uint32_t)(at + i), exact += wrong[i] != 0;        \
            measure_##NAME(new, numbers_##NAME(out, room[1]), &all);                                                   \
            memcpy(codes + at, code, some);                                                                            \
            memcpy(result + at, out, some * sizeof *out);                                                              \
        }                                                                                                              \
        add_up(&all, errors);                                                                                          \
        return exact;                                                                                                  \
    }

#define PASSES_OF_ALL(VERSION, FOR)                                                                                    \
    PASSES(double, double, VERSION, FOR)                                                                               \
    PASSES(float, float, VERSION, FOR)                                                                                 \
    PASSES(half, float, VERSION, FOR)                                                                                  \
    PASSES(brain, float, VERSION, FOR)

#define EACH(type, call)                                                                                               \
    switch (type) {                                                                                                    \
    case PM_LCDELTA_DOUBLE: call(double); break;                                                                       \
    case PM_LCDELTA_FLOAT: call(float); break;                                                                         \
    case PM_LCDELTA_HALF: call(half); break;                                                                           \
    case PM_LCDELTA_BRAIN: call(brain); break;                                                                         \
    }

PASSES_OF_ALL(_portable, )

#ifdef PM_X86

PASSES_OF_ALL(_avx2, __attribute__((target("avx2"))))

static bool avx2;
#define CHOSEN(name) (avx2 ? name##_avx2 : name##_portable)

__attribute__((constructor)) static void choose_versions(void)
{
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    avx2 = __builtin_cpu_supports("avx2");
    if (avx2) values_of_few = values_of_few_avx2;
    if (avx2 && __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C)
        from_halves = numbers_of_halves_f16c, to_halves = halves_of_numbers_f16c;
}

#else

#define CHOSEN(name) name##_portable

#endif

void pm_lcdelta_count(pm_lcdelta_type type, const void *x, const void *before, uint64_t n, void *room,
                      uint64_t *numbers, double *sums)
{
#define COUNT(name) CHOSEN(count_##name)(x, before, n, room, numbers, sums)
    EACH(type, COUNT);
}

void pm_lcdelta_add(pm_lcdelta_type type, void *x, const uint8_t *codes, uint64_t n, const void *values)
{
#define ADD(name) CHOSEN(add_##name)(x, codes, n, values)
    EACH(type, ADD);
}

uint64_t pm_lcdelta_apply(pm_lcdelta_type type, const void *x, const void *before, uint64_t n, const uint8_t *table,
                          const void *values, uint8_t *codes, void *result, uint32_t *places, double *errors)
{
    uint64_t exact = 0;
#define APPLY(name) exact = CHOSEN(apply_##name)(x, before, n, table, values, codes, result, places, errors)
    EACH(type, APPLY);
    return exact;
}

/* ---- codes as bytes */

/* A bit for each of 64 codes that is not 0. */
static ALWAYS_INLINE uint64_t kept(const uint8_t *codes)
{
    const uint64_t low = UINT64_C(0x7f7f7f7f7f7f7f7f), gather = UINT64_C(0x0002040810204081);
    uint64_t mask = 0, next;
    for (unsigned i = 0; i < 64; i += 8) {
        memcpy(&next, codes + i, sizeof next);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        next = __builtin_bswap64(next);
#endif
        next = (((next & low) + low) | next) & ~low;
        mask |= (next * gather >> 56) << i;
    }
    return mask;
}

/* Bytes for so many zeros that fewer than `each` are left. Returns where they end. */
static ALWAYS_INLINE uint8_t *pack_zeros(uint8_t *bytes, uint64_t *zeros, unsigned each, unsigned bits)
{
    for (; *zeros >= each; *zeros -= each) *bytes++ = (uint8_t)((each - 1) << bits);
    return bytes;
}

uint64_t pm_lcdelta_pack(const uint8_t *codes, uint64_t n, unsigned bits, uint8_t *bytes)
{
    unsigned each = 1u << (8 - bits);
    uint8_t *end = bytes, last[64] = {0};
    uint64_t packed = 0, zeros;
    for (uint64_t at = 0; at < n; at += 64) {
        const uint8_t *from = n - at < 64 ? memcpy(last, codes + at, n - at) : codes + at;
        for (uint64_t mask = kept(from); mask; mask &= mask - 1) {
            uint64_t place = at + (unsigned)__builtin_ctzll(mask);
            zeros = place - packed;
            end = pack_zeros(end, &zeros, each, bits);
            *end++ = (uint8_t)(zeros << bits | codes[place]);
            packed = place + 1;
        }
    }
    zeros = n - packed;
    end = pack_zeros(end, &zeros, each, bits);
    if (zeros) *end++ = (uint8_t)((zeros - 1) << bits);
    return (uint64_t)(end - bytes);
}

uint64_t pm_lcdelta_unpack(const uint8_t *bytes, uint64_t count, unsigned bits, uint8_t *codes, uint64_t n)
{
    uint64_t at = 0;
    memset(codes, 0, n);
    for (uint64_t i = 0; i < count; i++) {
        at += bytes[i] >> bits;
        if (at >= n) return n + 1;
        codes[at++] = (uint8_t)(bytes[i] & ((1u << bits) - 1));
    }
    return at;
}
