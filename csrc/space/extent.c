#include "space/extent.h"

#include "base/hash.h"

/* So many pages are asked for at once: an extent may be larger than memory. */
enum { PART = 256 };

uint64_t pm_extent_block_hash(const pm_region *region, const void *block, size_t length, uint64_t offset)
{
    return pm_keyed_checksum(pm_hash64(block, length, 0), offset, region->store_id);
}

uint64_t pm_extent_table_hash(const pm_region *region, const void *table, uint64_t bytes, uint64_t offset)
{
    return pm_keyed_checksum(pm_hash64(table, bytes, 0), offset, region->store_id);
}

void pm_extent_digest(pm_digest *digest, const uint8_t *table, uint64_t offset, uint64_t length)
{
    for (uint64_t block = 0; block < pm_extent_blocks(length); block++) {
        uint64_t hash;
        memcpy(&hash, table + 8 * block, sizeof hash);
        pm_digest_add(digest, offset + block * PM_PAGE, pm_digest_contribution(offset + block * PM_PAGE, hash));
    }
}

pm_status pm_extent_check(const pm_region *region, const uint8_t *image, uint64_t offset, uint64_t length,
                          uint64_t count, uint64_t *block)
{
    *block = 0;
    if (!count) return PM_OK;
    const uint8_t *table = image + offset + pm_extent_table(length);
    uint64_t blocks = pm_extent_blocks(count), last = (blocks - 1) / PART * PART, from = last * PM_PAGE;
    bool all = blocks == pm_extent_blocks(length);
    /* Asks for the last part together with the table behind it: small extents have no other part. */
    uint64_t end = all ? pm_extent_size(length) : blocks * PM_PAGE;
    uint64_t bad = pm_region_unreadable(region, image, offset + from, end - from, "contents");
    if (bad == UINT64_MAX && !all)
        bad = pm_region_unreadable(region, image, offset + pm_extent_table(length), 8 * blocks, "contents");
    for (*block = 0; *block < blocks; ++*block) {
        uint64_t at = *block * PM_PAGE, expected;
        size_t bytes = length - at < PM_PAGE ? length - at : PM_PAGE;
        if (bad == UINT64_MAX && *block % PART == 0 && *block < last)
            bad = pm_region_unreadable(region, image, offset + at, PART * PM_PAGE, "contents");
        if (bad != UINT64_MAX) {
            *block = bad > offset ? (bad - offset) / PM_PAGE : 0;
            return PM_UNREADABLE;
        }
        memcpy(&expected, table + 8 * *block, sizeof expected);
        if (pm_extent_block_hash(region, image + offset + at, bytes, offset + at) != expected) return PM_CORRUPT;
    }
    return PM_OK;
}

pm_status pm_extent_check_committed(const pm_region *region, uint64_t extent, uint64_t length, uint64_t count)
{
    uint64_t block, place = pm_region_place(region, extent, length);
    pm_status status =
        pm_extent_check(region, region->committed, pm_region_committed(region, place, length), length, count, &block);
    if (status == PM_CORRUPT)
        return pm_fail(PM_CORRUPT,
                       "contents are damaged: block %llu of the extent at region offset %llu does not match its "
                       "hash",
                       (unsigned long long)block, (unsigned long long)extent);
    PM_TRY(status);
    return pm_region_readable(region, region->live, place, count, "contents");
}
