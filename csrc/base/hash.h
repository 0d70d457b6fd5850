/*
 * The two checksums that a store's bytes carry (D5): pm_hash64 over contents and log payload, pm_crc32c
 * over headers. Both are part of the file format: for one input they give one value, on every CPU and for ever.
 *
 * Neither keeps state nor allocates, any alignment will do, and with length 0 the pointer may be NULL.
 */
#ifndef PM_HASH_H
#define PM_HASH_H

#include <stddef.h>
#include <stdint.h>

/* XXH3, 64 bits, of any length and seed. Fastest with seed 0: another seed derives a secret first if length > 240. */
uint64_t pm_hash64(const void *bytes, size_t length, uint64_t seed);

/* Copies 4096 bytes and returns pm_hash64 of the copy, with seed 0. Each byte is loaded once: another thread may be
 * changing the source. */
uint64_t pm_hash64_copy_page(uint8_t *to, const uint8_t *bytes);

/* The same for one of several pages that lie apart. next: the page that will be copied after it, which the processor
 * can't guess. */
uint64_t pm_hash64_copy_page_of(void *to, const void *bytes, const void *next);

/* The same with non-temporal stores; a fence must follow. NULL if the processor's stores are too narrow to gain by
 * it. */
typedef uint64_t pm_hash64_page_function(uint8_t *to, const uint8_t *bytes);
pm_hash64_page_function *pm_hash64_stream_page(void);

/* CRC-32C (Castagnoli, as in iSCSI). Start with crc = 0; pm_crc32c(b, n, pm_crc32c(a, m, 0)) is that of a then b. */
uint32_t pm_crc32c(const void *bytes, size_t length, uint32_t crc);

#endif
