/*
 * XXH3-64 and CRC-32C.
 *
 * XXH3 follows the published description, "xxHash fast digest algorithm" 0.2.0 (doc/xxhash_spec.md of the xxHash
 * project); the section of each step is named beside it. There is one function per class of length:
 *
 *     0 | 1..3 | 4..8 | 9..16 | 17..128 | 129..240 | more
 *
 * The last is where the time goes, so it exists once in plain C and once per vector width. Invariants:
 *
 *   H1  every version of hash_long and of crc32c returns the same value for the same input;
 *   H2  the version is chosen when the library is loaded, before any thread can call, and never changes;
 *   H3  only bytes[0 .. length) are read.
 */
#include "base/hash.h"

#include <stdbool.h>
#include <string.h>

#include "pmstore.h" /* so that the compiler compares the two declarations */

#if defined(__x86_64__) && !defined(PM_PORTABLE) /* tests define PM_PORTABLE or PM_NO_AVX512 to try every version */
#include <immintrin.h>
#define PM_X86 1
#elif defined(__aarch64__) && !defined(PM_PORTABLE)
#include <sys/auxv.h>
#define PM_ARM 1
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

/* ---- words --------------------------------------------------------------------------------------------------- */

__extension__ typedef unsigned __int128 wide;

static ALWAYS_INLINE uint32_t read32(const uint8_t *from)
{
    uint32_t word;
    memcpy(&word, from, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap32(word);
#endif
    return word;
}

static ALWAYS_INLINE uint64_t read64(const uint8_t *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static ALWAYS_INLINE void write64(uint8_t *to, uint64_t word)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    memcpy(to, &word, sizeof word);
}

static ALWAYS_INLINE uint64_t rotate_left(uint64_t word, unsigned bits)
{
    return word << bits | word >> (64 - bits);
}

/* The 128-bit product of a and b, its halves folded into one word. */
static ALWAYS_INLINE uint64_t multiply_fold(uint64_t a, uint64_t b)
{
    wide product = (wide)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* ---- constants of XXH3 --------------------------------------------------------------------------------------- */

#define PRIME32_1 UINT64_C(0x9E3779B1)
#define PRIME32_2 UINT64_C(0x85EBCA77)
#define PRIME32_3 UINT64_C(0xC2B2AE3D)
#define PRIME64_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME64_3 UINT64_C(0x165667B19E3779F9)
#define PRIME64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME64_5 UINT64_C(0x27D4EB2F165667C5)
#define PRIME_MX1 UINT64_C(0x165667919E3779F9)
#define PRIME_MX2 UINT64_C(0x9FB21C651E98DF25)

enum {
    SECRET = 192,              /* bytes */
    STRIPE = 64,               /* bytes that one step of the long loop takes */
    SECRET_STEP = 8,           /* each next stripe uses the secret from 8 bytes further on */
    STRIPES = (SECRET - STRIPE) / SECRET_STEP, /* before the secret is used up and the accumulators are scrambled */
    ROUND = STRIPES * STRIPE,  /* bytes */
    AT_SCRAMBLE = SECRET - 64, /* offsets in the secret */
    AT_LAST_STRIPE = SECRET - 71,
    AT_MERGE = 11
};

_Static_assert(ROUND == 1024 && STRIPES % 2 == 0, "the loops below are unrolled for it");

static const uint8_t default_secret[SECRET] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t initial_accumulators[8] __attribute__((aligned(64))) = {
    PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
};

/* "Final Mixing Step": one for XXH3, one inherited from XXH64. */
static ALWAYS_INLINE uint64_t avalanche(uint64_t x)
{
    x = (x ^ x >> 37) * PRIME_MX1;
    return x ^ x >> 32;
}

static ALWAYS_INLINE uint64_t avalanche_xxh64(uint64_t x)
{
    x = (x ^ x >> 33) * PRIME64_2;
    x = (x ^ x >> 29) * PRIME64_3;
    return x ^ x >> 32;
}

/* ---- up to 240 bytes: the seed is added to the secret as it is used ------------------------------------------ */

/* "Small inputs" */
static ALWAYS_INLINE uint64_t hash_to_16(const uint8_t *bytes, size_t length, uint64_t seed)
{
    const uint8_t *secret = default_secret;
    if (length > 8) {
        uint64_t low = ((read64(secret + 24) ^ read64(secret + 32)) + seed) ^ read64(bytes);
        uint64_t high = ((read64(secret + 40) ^ read64(secret + 48)) - seed) ^ read64(bytes + length - 8);
        return avalanche(length + __builtin_bswap64(low) + high + multiply_fold(low, high));
    }
    if (length >= 4) {
        uint64_t mixed_seed = seed ^ (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t input = (uint64_t)read32(bytes) << 32 | read32(bytes + length - 4);
        uint64_t x = ((read64(secret + 8) ^ read64(secret + 16)) - mixed_seed) ^ input;
        x ^= rotate_left(x, 49) ^ rotate_left(x, 24);
        x *= PRIME_MX2;
        x ^= (x >> 35) + length;
        x *= PRIME_MX2;
        return x ^ x >> 28;
    }
    if (length > 0) {
        uint32_t input = (uint32_t)bytes[0] << 16 | (uint32_t)bytes[length / 2] << 24 | (uint32_t)length << 8 |
                         bytes[length - 1];
        return avalanche_xxh64(((read32(secret) ^ read32(secret + 4)) + seed) ^ input);
    }
    return avalanche_xxh64(seed ^ read64(secret + 56) ^ read64(secret + 64));
}

static ALWAYS_INLINE uint64_t mix16(const uint8_t *bytes, size_t at, uint64_t seed)
{
    return multiply_fold(read64(bytes) ^ (read64(default_secret + at) + seed),
                         read64(bytes + 8) ^ (read64(default_secret + at + 8) - seed));
}

/* "Medium inputs", 17..128: pairs of 16 bytes from both ends towards the middle, where they may overlap. */
static ALWAYS_INLINE uint64_t hash_to_128(const uint8_t *bytes, size_t length, uint64_t seed)
{
    const uint8_t *end = bytes + length - 16;
    uint64_t sum = length * PRIME64_1;
    sum += mix16(bytes, 0, seed) + mix16(end, 16, seed);
    if (length > 32)
        sum += mix16(bytes + 16, 32, seed) + mix16(end - 16, 48, seed);
    if (length > 64)
        sum += mix16(bytes + 32, 64, seed) + mix16(end - 32, 80, seed);
    if (length > 96)
        sum += mix16(bytes + 48, 96, seed) + mix16(end - 48, 112, seed);
    return avalanche(sum);
}

/* "Medium inputs", 129..240 */
static uint64_t hash_to_240(const uint8_t *bytes, size_t length, uint64_t seed)
{
    uint64_t sum = length * PRIME64_1;
#pragma GCC unroll 8
    for (size_t at = 0; at < 128; at += 16)
        sum += mix16(bytes + at, at, seed);
    sum = avalanche(sum);
    for (size_t at = 128; at + 16 <= length; at += 16)
        sum += mix16(bytes + at, at - 128 + 3, seed);
    return avalanche(sum + mix16(bytes + length - 16, 119, seed));
}

/* ---- more than 240 bytes, "Large inputs" --------------------------------------------------------------------- */

/*
 * Eight accumulators, one per 8-byte lane of a stripe. With key = lane ^ secret word, a stripe adds low(key) *
 * high(key) to the lane's own accumulator and the lane itself to its neighbour's. Until the scramble these are mere
 * sums, so the vector versions sum lanes and products apart and cross the neighbours over once per round, not once
 * per stripe.
 *
 * A round of 16 stripes, then a scramble, as long as more than a round of input is left; then the full stripes
 * of the rest, without the last byte; then the last 64 bytes as one more stripe, which may overlap what went before.
 */
typedef uint64_t hash_long_function(const uint8_t *bytes, size_t length, const uint8_t *secret);

/* "Seed and Secret" */
static void derive_secret(uint8_t secret[SECRET], uint64_t seed)
{
    for (size_t at = 0; at < SECRET; at += 16) {
        write64(secret + at, read64(default_secret + at) + seed);
        write64(secret + at + 8, read64(default_secret + at + 8) - seed);
    }
}

/* "Finalization" */
static ALWAYS_INLINE uint64_t merge(const uint64_t accumulators[8], size_t length, const uint8_t *secret)
{
    uint64_t sum = length * PRIME64_1;
    for (size_t i = 0; i < 8; i += 2)
        sum += multiply_fold(accumulators[i] ^ read64(secret + AT_MERGE + 8 * i),
                             accumulators[i + 1] ^ read64(secret + AT_MERGE + 8 * i + 8));
    return avalanche(sum);
}

static ALWAYS_INLINE void stripe_portable(uint64_t accumulators[8], const uint8_t *bytes, const uint8_t *secret)
{
    for (size_t i = 0; i < 8; i++) {
        uint64_t lane = read64(bytes + 8 * i);
        uint64_t key = lane ^ read64(secret + 8 * i);
        accumulators[i ^ 1] += lane;
        accumulators[i] += (uint64_t)(uint32_t)key * (key >> 32);
    }
}

/* Copies a page; every stripe is loaded once. next: the page that will be copied after it, as a hint. */
typedef uint64_t copy_page_function(uint8_t *to, const uint8_t *bytes, const uint8_t *next);
enum { COPY_PAGE = 4096 };

static uint64_t hash_long_portable(const uint8_t *bytes, size_t length, const uint8_t *secret)
{
    const uint8_t *last_stripe = bytes + length - STRIPE;
    size_t left = length;
    uint64_t accumulators[8];
    memcpy(accumulators, initial_accumulators, sizeof accumulators);
    for (; left > ROUND; left -= ROUND, bytes += ROUND) {
        for (size_t n = 0; n < STRIPES; n++)
            stripe_portable(accumulators, bytes + n * STRIPE, secret + n * SECRET_STEP);
        for (size_t i = 0; i < 8; i++) {
            uint64_t x = accumulators[i];
            accumulators[i] = (x ^ x >> 47 ^ read64(secret + AT_SCRAMBLE + 8 * i)) * PRIME32_1;
        }
    }
    for (size_t n = 0; n < (left - 1) / STRIPE; n++)
        stripe_portable(accumulators, bytes + n * STRIPE, secret + n * SECRET_STEP);
    stripe_portable(accumulators, last_stripe, secret + AT_LAST_STRIPE);
    return merge(accumulators, length, secret);
}

static uint64_t copy_page_portable(uint8_t *to, const uint8_t *bytes, const uint8_t *next)
{
    (void)next;
    memcpy(to, bytes, COPY_PAGE);
    return hash_long_portable(to, COPY_PAGE, default_secret);
}

#ifdef PM_X86

#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f")))

/* Half of the accumulators: those of lanes 0..3 or 4..7 of each stripe. */
typedef struct {
    __m256i products, lanes;
} half;

AVX2 static ALWAYS_INLINE __m256i load256(const void *from)
{
    return _mm256_loadu_si256(from);
}

AVX2 static ALWAYS_INLINE half stripe_avx2(half sum, const uint8_t *bytes, const uint8_t *secret, uint8_t *copy,
                                           bool stream)
{
    __m256i lane = load256(bytes);
    if (copy && stream)
        _mm256_stream_si256((void *)copy, lane);
    else if (copy)
        _mm256_storeu_si256((void *)copy, lane);
    __m256i key = _mm256_xor_si256(lane, load256(secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    return (half){_mm256_add_epi64(sum.products, product), _mm256_add_epi64(sum.lanes, lane)};
}

AVX2 static ALWAYS_INLINE __m256i cross_avx2(half sum)
{
    return _mm256_add_epi64(sum.products, _mm256_shuffle_epi32(sum.lanes, 0x4e));
}

AVX2 static ALWAYS_INLINE half scramble_avx2(half sum, const uint8_t *secret)
{
    const __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    __m256i x = cross_avx2(sum);
    x = _mm256_xor_si256(_mm256_xor_si256(x, load256(secret)), _mm256_srli_epi64(x, 47));
    __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime), 32);
    return (half){_mm256_add_epi64(_mm256_mul_epu32(x, prime), high), _mm256_setzero_si256()};
}

AVX2 static ALWAYS_INLINE uint64_t long_avx2(const uint8_t *bytes, size_t length, const uint8_t *secret, uint8_t *copy,
                                             bool stream)
{
    const uint8_t *start = bytes, *last_stripe = bytes + length - STRIPE;
    size_t left = length;
    half a = {load256(initial_accumulators), _mm256_setzero_si256()};
    half b = {load256(initial_accumulators + 4), _mm256_setzero_si256()};
    for (; left > ROUND; left -= ROUND, bytes += ROUND) {
#pragma GCC unroll 16
        for (size_t n = 0; n < STRIPES; n++) {
            uint8_t *to = copy ? copy + (bytes - start) + n * STRIPE : NULL;
            a = stripe_avx2(a, bytes + n * STRIPE, secret + n * SECRET_STEP, to, stream);
            b = stripe_avx2(b, bytes + n * STRIPE + 32, secret + n * SECRET_STEP + 32, to ? to + 32 : NULL, stream);
        }
        a = scramble_avx2(a, secret + AT_SCRAMBLE);
        b = scramble_avx2(b, secret + AT_SCRAMBLE + 32);
    }
    for (size_t n = 0; n < (left - 1) / STRIPE; n++) {
        uint8_t *to = copy ? copy + (bytes - start) + n * STRIPE : NULL;
        a = stripe_avx2(a, bytes + n * STRIPE, secret + n * SECRET_STEP, to, stream);
        b = stripe_avx2(b, bytes + n * STRIPE + 32, secret + n * SECRET_STEP + 32, to ? to + 32 : NULL, stream);
    }
    uint8_t *to = copy ? copy + length - STRIPE : NULL;
    a = stripe_avx2(a, last_stripe, secret + AT_LAST_STRIPE, to, stream);
    b = stripe_avx2(b, last_stripe + 32, secret + AT_LAST_STRIPE + 32, to ? to + 32 : NULL, stream);

    uint64_t accumulators[8] __attribute__((aligned(32)));
    _mm256_store_si256((__m256i *)accumulators, cross_avx2(a));
    _mm256_store_si256((__m256i *)(accumulators + 4), cross_avx2(b));
    return merge(accumulators, length, secret);
}

AVX2 static uint64_t hash_long_avx2(const uint8_t *bytes, size_t length, const uint8_t *secret)
{
    return long_avx2(bytes, length, secret, NULL, false);
}

AVX2 static uint64_t copy_page_avx2(uint8_t *to, const uint8_t *bytes, const uint8_t *next)
{
    (void)next;
    return long_avx2(bytes, COPY_PAGE, default_secret, to, false);
}

AVX2 static uint64_t stream_page_avx2(uint8_t *to, const uint8_t *bytes)
{
    return long_avx2(bytes, COPY_PAGE, default_secret, to, true);
}

typedef struct {
    __m512i products, lanes;
} whole;

/* ahead: distance in bytes to the line that is prefetched, if there is a copy. */
AVX512 static ALWAYS_INLINE whole stripe_avx512(whole sum, const uint8_t *bytes, const uint8_t *secret, uint8_t *copy,
                                                bool stream, ptrdiff_t ahead)
{
    __m512i lane = _mm512_loadu_si512(bytes);
    if (copy) {
        if (stream) _mm512_stream_si512((void *)copy, lane);
        else _mm512_storeu_si512(copy, lane);
        _mm_prefetch(bytes + ahead, _MM_HINT_T0);
    }
    __m512i key = _mm512_xor_si512(lane, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    return (whole){_mm512_add_epi64(sum.products, product), _mm512_add_epi64(sum.lanes, lane)};
}

AVX512 static ALWAYS_INLINE __m512i cross_avx512(whole sum)
{
    return _mm512_add_epi64(sum.products, _mm512_shuffle_epi32(sum.lanes, _MM_PERM_BADC));
}

AVX512 static ALWAYS_INLINE whole scramble_avx512(whole sum, const uint8_t *secret)
{
    const __m512i prime = _mm512_set1_epi64((long long)PRIME32_1);
    __m512i x = cross_avx512(sum);
    x = _mm512_ternarylogic_epi64(x, _mm512_loadu_si512(secret), _mm512_srli_epi64(x, 47), 0x96 /* a ^ b ^ c */);
    __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime), 32);
    return (whole){_mm512_add_epi64(_mm512_mul_epu32(x, prime), high), _mm512_setzero_si512()};
}

AVX512 static ALWAYS_INLINE uint64_t long_avx512(const uint8_t *bytes, size_t length, const uint8_t *secret,
                                                 uint8_t *copy, bool stream, ptrdiff_t ahead)
{
    const uint8_t *start = bytes, *last_stripe = bytes + length - STRIPE;
    size_t left = length;
    whole sum = {_mm512_load_si512(initial_accumulators), _mm512_setzero_si512()};
    for (; left > ROUND; left -= ROUND, bytes += ROUND) {
#pragma GCC unroll 16
        for (size_t n = 0; n < STRIPES; n++)
            sum = stripe_avx512(sum, bytes + n * STRIPE, secret + n * SECRET_STEP,
                                copy ? copy + (bytes - start) + n * STRIPE : NULL, stream, ahead);
        sum = scramble_avx512(sum, secret + AT_SCRAMBLE);
    }
#pragma GCC unroll 16
    for (size_t n = 0; n < (left - 1) / STRIPE; n++)
        sum = stripe_avx512(sum, bytes + n * STRIPE, secret + n * SECRET_STEP,
                            copy ? copy + (bytes - start) + n * STRIPE : NULL, stream, ahead);
    sum = stripe_avx512(sum, last_stripe, secret + AT_LAST_STRIPE, copy ? copy + length - STRIPE : NULL, stream, ahead);

    uint64_t accumulators[8] __attribute__((aligned(64)));
    _mm512_store_si512(accumulators, cross_avx512(sum));
    return merge(accumulators, length, secret);
}

AVX512 static uint64_t hash_long_avx512(const uint8_t *bytes, size_t length, const uint8_t *secret)
{
    return long_avx512(bytes, length, secret, NULL, false, 0);
}

AVX512 static uint64_t copy_page_avx512(uint8_t *to, const uint8_t *bytes, const uint8_t *next)
{
    return long_avx512(bytes, COPY_PAGE, default_secret, to, false, next - bytes);
}

AVX512 static uint64_t stream_page_avx512(uint8_t *to, const uint8_t *bytes)
{
    return long_avx512(bytes, COPY_PAGE, default_secret, to, true, COPY_PAGE);
}

#endif /* PM_X86 */

static hash_long_function *hash_long = hash_long_portable;
static copy_page_function *copy_page = copy_page_portable;
static pm_hash64_page_function *stream_page;

uint64_t pm_hash64_copy_page(uint8_t *to, const uint8_t *bytes)
{
    return pm_hash64_copy_page_of(to, bytes, bytes + COPY_PAGE);
}

uint64_t pm_hash64_copy_page_of(void *to, const void *bytes, const void *next)
{
    return copy_page(to, bytes, next);
}

pm_hash64_page_function *pm_hash64_stream_page(void)
{
    return stream_page;
}

uint64_t pm_hash64(const void *bytes, size_t length, uint64_t seed)
{
    if (length <= 16)
        return hash_to_16(bytes, length, seed);
    if (length <= 128)
        return hash_to_128(bytes, length, seed);
    if (length <= 240)
        return hash_to_240(bytes, length, seed);
    if (seed == 0)
        return hash_long(bytes, length, default_secret);
    uint8_t secret[SECRET] __attribute__((aligned(64)));
    derive_secret(secret, seed);
    return hash_long(bytes, length, secret);
}

/* ---- CRC-32C ------------------------------------------------------------------------------------------------- */

typedef uint32_t crc32c_function(const uint8_t *bytes, size_t length, uint32_t crc);

/* The remainder of a byte, bits reflected, polynomial 0x1EDC6F41: linear, so the sum of the remainders of its bits. */
#define BYTE_1(i) \
    (((i) & 0x01 ? 0xF26B8303u : 0) ^ ((i) & 0x02 ? 0xE13B70F7u : 0) ^ ((i) & 0x04 ? 0xC79A971Fu : 0) ^ \
     ((i) & 0x08 ? 0x8AD958CFu : 0) ^ ((i) & 0x10 ? 0x105EC76Fu : 0) ^ ((i) & 0x20 ? 0x20BD8EDEu : 0) ^ \
     ((i) & 0x40 ? 0x417B1DBCu : 0) ^ ((i) & 0x80 ? 0x82F63B78u : 0))
#define BYTE_4(i) BYTE_1(i), BYTE_1((i) + 1), BYTE_1((i) + 2), BYTE_1((i) + 3)
#define BYTE_16(i) BYTE_4(i), BYTE_4((i) + 4), BYTE_4((i) + 8), BYTE_4((i) + 12)
#define BYTE_64(i) BYTE_16(i), BYTE_16((i) + 16), BYTE_16((i) + 32), BYTE_16((i) + 48)

static const uint32_t byte_remainders[256] = {BYTE_64(0), BYTE_64(64), BYTE_64(128), BYTE_64(192)};

static uint32_t crc32c_portable(const uint8_t *bytes, size_t length, uint32_t crc)
{
    for (size_t i = 0; i < length; i++)
        crc = crc >> 8 ^ byte_remainders[(crc ^ bytes[i]) & 0xff];
    return crc;
}

#ifdef PM_X86
__attribute__((target("sse4.2"))) static uint32_t crc32c_sse42(const uint8_t *bytes, size_t length, uint32_t crc)
{
    uint64_t wide_crc = crc;
    for (; length >= 8; length -= 8, bytes += 8)
        wide_crc = _mm_crc32_u64(wide_crc, read64(bytes));
    crc = (uint32_t)wide_crc;
    if (length & 4) {
        crc = _mm_crc32_u32(crc, read32(bytes));
        bytes += 4;
    }
    for (size_t i = 0; i < (length & 3); i++)
        crc = _mm_crc32_u8(crc, bytes[i]);
    return crc;
}
#endif

#ifdef PM_ARM
/* Without the compiler's names, which GCC and Clang have for processors only that are known to have a CRC. */
#define CRC(instruction, crc, word) \
    __asm__(".arch_extension crc\n\t" instruction : "+r"(crc) : "r"(word))

static uint32_t crc32c_arm(const uint8_t *bytes, size_t length, uint32_t crc)
{
    for (; length >= 8; length -= 8, bytes += 8)
        CRC("crc32cx %w0, %w0, %x1", crc, read64(bytes));
    for (; length; length--, bytes++)
        CRC("crc32cb %w0, %w0, %w1", crc, (uint32_t)*bytes);
    return crc;
}
#endif

static crc32c_function *crc32c = crc32c_portable;

uint32_t pm_crc32c(const void *bytes, size_t length, uint32_t crc)
{
    return ~crc32c(bytes, length, ~crc);
}

/* ---- choice of the version (H2) ------------------------------------------------------------------------------ */

#ifdef PM_X86
__attribute__((constructor)) static void choose_versions(void)
{
    __builtin_cpu_init();
#ifndef PM_NO_AVX512
    bool avx512 = __builtin_cpu_supports("avx512f");
#else
    bool avx512 = false;
#endif
    if (avx512)
        hash_long = hash_long_avx512, copy_page = copy_page_avx512, stream_page = stream_page_avx512;
    else if (__builtin_cpu_supports("avx2"))
        hash_long = hash_long_avx2, copy_page = copy_page_avx2, stream_page = stream_page_avx2;
    if (__builtin_cpu_supports("sse4.2"))
        crc32c = crc32c_sse42;
}
#endif

#ifdef PM_ARM
__attribute__((constructor)) static void choose_versions(void)
{
    enum { HAS_CRC32 = 1 << 7 }; /* the kernel's HWCAP_CRC32 */
    if (getauxval(AT_HWCAP) & HAS_CRC32) crc32c = crc32c_arm;
}
#endif
