/*
 * The bytes of elements, sorted by their place in the element. docs/archive.md explains the codec.
 *
 *     elements (minus those before) ──split──▶ planes: the first bytes of all elements, the second bytes, …
 *     planes ──join──▶ elements (plus those before)
 *
 * An element is a little-endian number, so that its first byte is the lowest.
 *
 * The bytes of a block of 16 elements are in as many vectors as an element has bytes. A byte is at a position of 4 bits
 * in a vector, whose number has 1 to 3 bits. Interleaving the vectors whose numbers differ in one bit moves this bit to
 * the lower end of the position, and the upper bit of the position takes its place. With e for the bits of the element
 * and b for those of the byte, of 8 bytes:
 *
 *     split            vector     position           join             vector     position
 *     elements         e3 e2 e1   e0 b2 b1 b0        planes           b2 b1 b0   e3 e2 e1 e0
 *     first bit        e0 e2 e1   b2 b1 b0 e3        first bit        e3 b1 b0   e2 e1 e0 b2
 *     second bit       e0 b2 e1   b1 b0 e3 e2        second bit       e3 e2 b0   e1 e0 b2 b1
 *     third bit        e0 b2 b1   b0 e3 e2 e1        third bit        e3 e2 e1   e0 b2 b1 b0: elements
 *     first bit        b0 b2 b1   e3 e2 e1 e0: planes
 */
#include <stdbool.h>
#include <string.h>

#include "codecs/planes.h"

enum { BLOCK = 16, MOST = 8 }; /* elements; bytes of an element */
enum { SAMPLES = 256, DENSE = SAMPLES + SAMPLES * 5 / 4 };

typedef uint8_t vector __attribute__((vector_size(BLOCK)));

#if defined(__clang__) || __GNUC__ >= 12
#define INTERLEAVED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define INTERLEAVED(a, b, ...) __builtin_shuffle(a, b, (vector){__VA_ARGS__})
#endif

static inline void interleave(vector *vectors, unsigned size, unsigned bit)
{
    for (unsigned i = 0; i < size; i++) {
        if (i & bit) continue;
        vector low = vectors[i], high = vectors[i | bit];
        vectors[i] = INTERLEAVED(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        vectors[i | bit] = INTERLEAVED(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
}

#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define LITTLE(bits, number) __builtin_bswap##bits(number)
#else
#define LITTLE(bits, number) (number)
#endif

/* x + sign * other for the elements of a block, modulo 2 to the number of their bits. sign: 1 or -1 */
#define ADD(bits)                                                                                                      \
    static inline void add##bits(uint8_t *x, const uint8_t *other, int sign)                                           \
    {                                                                                                                  \
        uint##bits##_t to[BLOCK], with[BLOCK];                                                                         \
        memcpy(to, x, sizeof to);                                                                                      \
        memcpy(with, other, sizeof with);                                                                              \
        for (unsigned i = 0; i < BLOCK; i++) {                                                                         \
            uint##bits##_t a = LITTLE(bits, to[i]), b = LITTLE(bits, with[i]);                                         \
            a = (uint##bits##_t)(sign < 0 ? a - b : a + b);                                                            \
            to[i] = LITTLE(bits, a);                                                                                   \
        }                                                                                                              \
        memcpy(x, to, sizeof to);                                                                                      \
    }

ADD(16)
ADD(32)
ADD(64)

static inline void add(uint8_t *x, const uint8_t *other, int sign, unsigned size)
{
    if (size == 2) add16(x, other, sign);
    else if (size == 4) add32(x, other, sign);
    else add64(x, other, sign);
}

/* The bytes of some elements of a block, or of all. */
static inline void take(uint8_t *block, const uint8_t *from, uint64_t count, unsigned size)
{
    if (count == BLOCK) memcpy(block, from, (size_t)BLOCK * size);
    else memcpy(block, from, count * size);
}

static inline void split(const uint8_t *x, const uint8_t *before, uint64_t n, unsigned size, uint8_t *planes)
{
    uint8_t block[BLOCK * MOST] = {0}, old[BLOCK * MOST] = {0};
    vector vectors[MOST];
    for (uint64_t at = 0; at < n; at += BLOCK) {
        uint64_t count = n - at < BLOCK ? n - at : BLOCK;
        take(block, x + at * size, count, size);
        if (before) {
            take(old, before + at * size, count, size);
            add(block, old, -1, size);
        }
        memcpy(vectors, block, (size_t)BLOCK * size);
        for (unsigned turn = 0, bit = size; turn < 4; turn++) {
            bit = bit > 1 ? bit / 2 : size / 2;
            interleave(vectors, size, bit);
        }
        for (unsigned plane = 0; plane < size; plane++) { /* of 8 bytes, the lowest bit of the plane is the upper one */
            unsigned number = size == 8 ? (plane & 1) << 2 | plane >> 1 : plane;
            if (count == BLOCK) memcpy(planes + plane * n + at, &vectors[number], BLOCK);
            else memcpy(planes + plane * n + at, &vectors[number], count);
        }
    }
}

static inline void join(const uint8_t *const *planes, const uint8_t *before, uint64_t n, unsigned size, uint8_t *x)
{
    uint8_t block[BLOCK * MOST], old[BLOCK * MOST] = {0};
    vector vectors[MOST] = {0};
    for (uint64_t at = 0; at < n; at += BLOCK) {
        uint64_t count = n - at < BLOCK ? n - at : BLOCK;
        for (unsigned plane = 0; plane < size; plane++) take((uint8_t *)&vectors[plane], planes[plane] + at, count, 1);
        for (unsigned bit = size / 2; bit; bit /= 2) interleave(vectors, size, bit);
        memcpy(block, vectors, (size_t)BLOCK * size);
        if (before) {
            take(old, before + at * size, count, size);
            add(block, old, 1, size);
        }
        take(x + at * size, block, count, size);
    }
}

/* Whether the bytes of a plane look as if each value were equally likely: by the pairs of equal ones among some. */
static bool is_dense(const uint8_t *plane, uint64_t n)
{
    uint16_t counts[256] = {0};
    uint64_t step = (n / SAMPLES) | 1, at = 0;
    unsigned equal = 0;
    if (n < 2 * SAMPLES) return false;
    for (unsigned i = 0; i < SAMPLES; i++, at = at + step < n ? at + step : at + step - n) counts[plane[at]]++;
    for (unsigned i = 0; i < 256; i++) equal += (unsigned)counts[i] * counts[i];
    return equal < DENSE;
}

unsigned pm_planes_split(const void *x, const void *before, uint64_t n, unsigned size, void *planes)
{
    unsigned dense = 0;
    switch (size) { /* a constant in each copy of the loop */
    case 2: split(x, before, n, 2, planes); break;
    case 4: split(x, before, n, 4, planes); break;
    case 8: split(x, before, n, 8, planes); break;
    }
    for (unsigned plane = 0; plane < size; plane++)
        dense |= (unsigned)is_dense((const uint8_t *)planes + plane * n, n) << plane;
    return dense;
}

void pm_planes_join(const uint8_t *const *planes, const void *before, uint64_t n, unsigned size, void *x)
{
    switch (size) {
    case 2: join(planes, before, n, 2, x); break;
    case 4: join(planes, before, n, 4, x); break;
    case 8: join(planes, before, n, 8, x); break;
    }
}
