/*
 * The hashes of contents.
 */
#ifndef PM_EXTENT_H
#define PM_EXTENT_H

#include "space/region.h"

uint64_t pm_extent_block_hash(const pm_region *region, const void *block, size_t length, uint64_t offset);

/* The hash that a commit record declares of an extent that was written in its place: the keyed checksum of its table of
 * hashes. */
uint64_t pm_extent_table_hash(const pm_region *region, const void *table, uint64_t bytes, uint64_t offset);

/* Checks the blocks of the first `count` bytes of an extent of an image against their hashes. PM_CORRUPT, without a
 * message, or PM_UNREADABLE: *block is a bad one. */
pm_status pm_extent_check(const pm_region *region, const uint8_t *image, uint64_t offset, uint64_t length,
                          uint64_t count, uint64_t *block);

/* The same for the committed contents of an entry, with a message. Also checks that programs can read them. */
pm_status pm_extent_check_committed(const pm_region *region, uint64_t extent, uint64_t length, uint64_t count);

/* Adds the contributions of an extent's blocks, from its table of hashes. */
void pm_extent_digest(pm_digest *digest, const uint8_t *table, uint64_t offset, uint64_t length);

#endif
