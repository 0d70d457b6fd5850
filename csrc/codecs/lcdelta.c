/*
 * The passes of a lossy difference over its elements (LC-Checkpoint, ICML 2020). docs/lossy.md explains the codec.
 *
 *     x, before ──count──▶ how often each sign and exponent of x - before occurs ──▶ the table of the kept ones
 *     x, before ──code──▶ a code for each element, the sums for the value of each code
 *     x, before ──apply──▶ before + values[code], its error, and the elements that must be exact
 *     codes ──pack──▶ a byte for each code that is not 0, with the number of zeros before it
 *
 * Arithmetic is that of one addition per element, rounded once, so that every machine decodes the same bits.
 */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "pmstore.h"

enum { SIGN = 2048, NO_NUMBER = 2047 }; /* of a bucket; the others are the exponents of a double, biased by 1023 */
enum { CODES = 256, LANES = 4 };        /* sums in turns: an addition need not wait for the one before */

/* ---- elements: as they are stored, and as the number that is computed with */

static float float_of_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
    float value;
    if (rest >= 0x400) {
        bits = sign | ((rest << 13) + (rest >= 0x7c00 ? 0x70000000 : 0x38000000));
    } else {
        value = (float)rest * 0x1p-24f;
        memcpy(&bits, &value, sizeof bits);
        bits |= sign;
    }
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t half_of_float(float value)
{
    uint32_t bits, rest;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return sign | 0x7e00;
    if (rest >= 0x477ff000) return sign | 0x7c00; /* what rounds to 65536 and more */
    if (rest >= 0x38800000) return (uint16_t)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
    value = fabsf(value) + 0.5f; /* whose last bit counts 2^-24, as that of a denormal half */
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(sign | (bits - 0x3f000000));
}

static float float_of_brain(uint16_t brain)
{
    uint32_t bits = (uint32_t)brain << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t brain_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float float_of_float(float value)
{
    return value;
}

static double double_of_double(double value)
{
    return value;
}

/* ---- buckets: sign and exponent. 0 and NO_NUMBER are never kept: zeros, denormals, infinities, NaN */

static inline unsigned bucket_of_float(float change)
{
    uint32_t bits;
    memcpy(&bits, &change, sizeof bits);
    unsigned exponent = bits >> 23 & 0xff;
    exponent = !exponent ? 0 : exponent == 0xff ? NO_NUMBER : exponent + (1023 - 127);
    return (bits >> 31) * SIGN | exponent;
}

static inline unsigned bucket_of_double(double change)
{
    uint64_t bits;
    memcpy(&bits, &change, sizeof bits);
    return (unsigned)(bits >> 52);
}

/* ---- the passes, for each type. T: as it is stored; U: its bits; N: the number; LEAST: the smallest that is not
 * denormal */

#define PASSES(NAME, T, U, N, NUMBER, STORED, LEAST)                                                                   \
    static void count_##NAME(const void *data, const void *base, uint64_t n, uint64_t *counts)                         \
    {                                                                                                                  \
        const T *x = data, *before = base;                                                                             \
        for (uint64_t i = 0; i < n; i++) counts[bucket_of_##N(NUMBER(x[i]) - NUMBER(before[i]))]++;                    \
    }                                                                                                                  \
    static void code_##NAME(const void *data, const void *base, uint64_t n, const uint8_t *table, uint8_t *codes,      \
                            double *sums, uint64_t *numbers)                                                           \
    {                                                                                                                  \
        const T *x = data, *before = base;                                                                             \
        for (uint64_t i = 0; i < n; i++) {                                                                             \
            N change = NUMBER(x[i]) - NUMBER(before[i]);                                                               \
            unsigned code = table[bucket_of_##N(change)];                                                              \
            codes[i] = (uint8_t)code;                                                                                  \
            sums[i % LANES * CODES + code] += change;                                                                  \
            numbers[i % LANES * CODES + code]++;                                                                       \
        }                                                                                                              \
    }                                                                                                                  \
    static inline T moved_##NAME(T x, uint8_t code, const double *values)                                              \
    {                                                                                                                  \
        T sum = STORED(NUMBER(x) + (N)values[code]);                                                                   \
        U old, new, mask = (U)-(code != 0); /* without a branch, which would be hard to predict */                     \
        memcpy(&old, &x, sizeof old);                                                                                  \
        memcpy(&new, &sum, sizeof new);                                                                                \
        old = (U)((old & (U)~mask) | (new & mask));                                                                    \
        memcpy(&x, &old, sizeof x);                                                                                    \
        return x;                                                                                                      \
    }                                                                                                                  \
    static void add_##NAME(void *data, const uint8_t *codes, uint64_t n, const double *values)                         \
    {                                                                                                                  \
        T *x = data;                                                                                                   \
        for (uint64_t i = 0; i < n; i++) x[i] = moved_##NAME(x[i], codes[i], values);                                  \
    }                                                                                                                  \
    static uint64_t apply_##NAME(const void *data, const void *base, uint64_t n, const uint8_t *codes,                 \
                                 const double *values, void *result, uint32_t *places, double *errors)                 \
    {                                                                                                                  \
        const T *x = data, *before = base;                                                                             \
        T *out = result;                                                                                               \
        uint64_t found = 0;                                                                                            \
        double most = errors[0], squares = errors[1], total = errors[2];                                               \
        for (uint64_t i = 0; i < n; i++) {                                                                             \
            out[i] = moved_##NAME(before[i], codes[i], values);                                                        \
            N wanted = NUMBER(x[i]), got = NUMBER(out[i]);                                                             \
            bool special = !(fabs((double)wanted) >= LEAST) || isinf(wanted) || !isfinite(got);                        \
            if (special && memcmp(&x[i], &out[i], sizeof(T))) {                                                        \
                places[found++] = (uint32_t)i;                                                                         \
                out[i] = x[i];                                                                                         \
                got = wanted;                                                                                          \
            }                                                                                                          \
            if (!isfinite(wanted)) continue;                                                                           \
            double error = fabs((double)wanted - (double)got);                                                         \
            most = error > most ? error : most;                                                                        \
            squares += error * error;                                                                                  \
            total += (double)wanted * (double)wanted;                                                                  \
        }                                                                                                              \
        errors[0] = most, errors[1] = squares, errors[2] = total;                                                      \
        return found;                                                                                                  \
    }

PASSES(double, double, uint64_t, double, double_of_double, double_of_double, 0x1p-1022)
PASSES(float, float, uint32_t, float, float_of_float, float_of_float, 0x1p-126)
PASSES(half, uint16_t, uint16_t, float, float_of_half, half_of_float, 0x1p-14)
PASSES(brain, uint16_t, uint16_t, float, float_of_brain, brain_of_float, 0x1p-126)

#define EACH(type, call)                                                                                               \
    switch (type) {                                                                                                    \
    case PM_LCDELTA_DOUBLE: call(double); break;                                                                       \
    case PM_LCDELTA_FLOAT: call(float); break;                                                                         \
    case PM_LCDELTA_HALF: call(half); break;                                                                           \
    case PM_LCDELTA_BRAIN: call(brain); break;                                                                         \
    }

void pm_lcdelta_count(pm_lcdelta_type type, const void *x, const void *before, uint64_t n, uint64_t *counts)
{
#define COUNT(name) count_##name(x, before, n, counts)
    EACH(type, COUNT);
}

void pm_lcdelta_code(pm_lcdelta_type type, const void *x, const void *before, uint64_t n, const uint8_t *table,
                     uint8_t *codes, double *sums, uint64_t *numbers)
{
#define CODE(name) code_##name(x, before, n, table, codes, sums, numbers)
    EACH(type, CODE);
}

void pm_lcdelta_add(pm_lcdelta_type type, void *x, const uint8_t *codes, uint64_t n, const double *values)
{
#define ADD(name) add_##name(x, codes, n, values)
    EACH(type, ADD);
}

uint64_t pm_lcdelta_apply(pm_lcdelta_type type, const void *x, const void *before, uint64_t n, const uint8_t *codes,
                          const double *values, void *result, uint32_t *places, double *errors)
{
    uint64_t found = 0;
#define APPLY(name) found = apply_##name(x, before, n, codes, values, result, places, errors)
    EACH(type, APPLY);
    return found;
}

uint64_t pm_lcdelta_pack(const uint8_t *codes, uint64_t n, unsigned bits, uint8_t *bytes)
{
    unsigned most = (1u << (8 - bits)) - 1, zeros = 0;
    uint64_t count = 0, eight;
    for (uint64_t i = 0; i < n; i++) { /* without a branch: the byte is written until it is complete */
        if (zeros + 8 <= most && n - i > 8 && (memcpy(&eight, codes + i, 8), !eight)) {
            zeros += 8, i += 7;
            continue;
        }
        bytes[count] = (uint8_t)(zeros << bits | codes[i]);
        unsigned complete = (codes[i] != 0) | (zeros == most);
        count += complete;
        zeros = (zeros + 1) & (complete - 1);
    }
    if (zeros) bytes[count++] = (uint8_t)((zeros - 1) << bits);
    return count;
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
