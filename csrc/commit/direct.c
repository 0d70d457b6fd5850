/*
 * Direct writes (D3): contents of new extents, straight to their place.
 *
 * Nothing durable refers to that place (I7). So it is written before the commit, and again if the commit is tried
 * again. Each block is hashed from the bytes that are written, in the same pass (I6), and the hash is kept until the
 * commit declares it. A commit looks again only at blocks that were written in parts, and at blocks that a program may
 * have changed since through a buffer.
 */
#include "commit/direct.h"

#include <stdlib.h>

#include "base/hash.h"
#include "space/extent.h"
#include "space/heap.h"
#include "space/region_image.h"
#include "commit/failed.h"

/* Stands for a hash that is not known. A block may also hash to 0; then it is hashed once more, and nothing else
 * happens. */
enum { UNKNOWN = 0 };

static size_t block_bytes(const pm_uncommitted *extent, uint64_t block)
{
    uint64_t left = extent->length - block * PM_PAGE;
    return left < PM_PAGE ? left : PM_PAGE;
}

static pm_status need_hashes(pm_uncommitted *extent)
{
    if (!extent->hashes && !(extent->hashes = calloc(pm_extent_blocks(extent->length), sizeof *extent->hashes)))
        return pm_fail(PM_NO_MEMORY, "no memory for the hashes of a new array");
    return PM_OK;
}

/* Writes whole blocks, from memory that a program may be changing. */
static pm_status write_pages(pm_store *store, pm_uncommitted *extent, uint64_t block, const uint8_t *source,
                             uint64_t pages)
{
    pm_region *region = &store->region;
    uint64_t offset = extent->offset + block * PM_PAGE, *hashes = extent->hashes + block;
    pm_status status = pm_region_write_hashed(region, offset, source, pages, hashes);
    if (status != PM_OK) memset(hashes, UNKNOWN, pages * sizeof *hashes);
    return status;
}

/* Writes bytes within one block. */
static pm_status write_part(pm_store *store, pm_uncommitted *extent, uint64_t at, const uint8_t *source, size_t length)
{
    pm_region *region = &store->region;
    uint64_t block = at / PM_PAGE;
    uint8_t copy[PM_PAGE];
    memcpy(copy, source, length);
    extent->hashes[block] = UNKNOWN;
    PM_TRY(pm_region_write(region, extent->offset + at, copy, length, PM_WRITE_STREAM));
    if (length == block_bytes(extent, block))
        extent->hashes[block] = pm_extent_block_hash(region, copy, length, extent->offset + at);
    return PM_OK;
}

static pm_status write_range(pm_store *store, pm_uncommitted *extent, uint64_t at, const uint8_t *source,
                             uint64_t length)
{
    PM_TRY(pm_heap_check_new(&store->region, extent->offset + at, length));
    PM_TRY(need_hashes(extent));
    store->statistics.bytes_direct += length;
    while (length) {
        uint64_t some = PM_PAGE - at % PM_PAGE;
        if (some > length) some = length;
        if (some == PM_PAGE) {
            some = length / PM_PAGE * PM_PAGE;
            PM_TRY(write_pages(store, extent, at / PM_PAGE, source, some / PM_PAGE));
        } else {
            PM_TRY(write_part(store, extent, at, source, some));
        }
        at += some, source += some, length -= some;
    }
    return PM_OK;
}

pm_status pm_direct_write(pm_store *store, pm_uncommitted *extent, uint64_t at, const void *source, uint64_t length)
{
    /* A lack of space leaves everything as it was, as nothing durable refers to that place. */
    if (!pm_extent_is_small(extent->length))
        return pm_failed_if_io(store, write_range(store, extent, at, source, length));
    /* A small extent goes through the log, with the rest of its page. */
    memcpy(store->region.live + extent->offset + at, source, length);
    return PM_OK;
}

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t rest = a % b;
        a = b, b = rest;
    }
    return a;
}

/* Fills whole pages. `repeated` holds `chunk` bytes of a pattern that comes again after `period` pages, so each of
 * these is hashed once. */
static pm_status fill_pages(pm_store *store, pm_uncommitted *extent, uint64_t pages, const uint8_t *repeated,
                            uint64_t chunk, uint64_t period)
{
    pm_region *region = &store->region;
    uint64_t known[256];
    PM_CHECK(period <= sizeof known / sizeof *known && chunk % (period * PM_PAGE) == 0);
    PM_TRY(pm_heap_check_new(region, extent->offset, pages * PM_PAGE));
    PM_TRY(need_hashes(extent));
    for (uint64_t i = 0; i < period; i++) known[i] = pm_hash64(repeated + i * PM_PAGE, PM_PAGE, 0);
    for (uint64_t block = 0; block < pages; block += chunk / PM_PAGE) {
        uint64_t some = pages - block < chunk / PM_PAGE ? pages - block : chunk / PM_PAGE;
        uint64_t offset = extent->offset + block * PM_PAGE, *hashes = extent->hashes + block;
        memset(hashes, UNKNOWN, some * sizeof *hashes);
        PM_TRY(pm_region_write(region, offset, repeated, some * PM_PAGE, PM_WRITE_STREAM));
        for (uint64_t i = 0; i < some; i++)
            hashes[i] = pm_keyed_checksum(known[i % period], offset + i * PM_PAGE, region->store_id);
        store->statistics.bytes_direct += some * PM_PAGE;
    }
    return PM_OK;
}

pm_status pm_direct_fill(pm_store *store, pm_uncommitted *extent, uint64_t length, const void *pattern,
                         size_t pattern_length)
{
    enum { CHUNK = 1 << 20 };
    /* Chunks of whole patterns and, unless the pattern has an odd large length, of whole pages. */
    uint64_t period = pattern_length / common_divisor(PM_PAGE, pattern_length), done = 0;
    uint64_t unit = period * PM_PAGE <= CHUNK ? period * PM_PAGE : pattern_length;
    uint64_t chunk = unit > CHUNK ? unit : CHUNK / unit * unit;
    bool paged = unit % PM_PAGE == 0 && period * PM_PAGE <= CHUNK && !pm_extent_is_small(extent->length);
    if (!length) return PM_OK;
    if (chunk > length && !paged) chunk = length;
    if (paged && chunk > pm_round_up(length, unit)) chunk = pm_round_up(length, unit);
    uint8_t *repeated = malloc(chunk);
    if (!repeated) return pm_fail(PM_NO_MEMORY, "no memory to fill an array");
    for (uint64_t i = 0; i < chunk; i += pattern_length) memcpy(repeated + i, pattern, pattern_length);
    pm_status status = PM_OK;
    if (paged) {
        done = length / PM_PAGE * PM_PAGE;
        status = pm_failed_if_io(store, fill_pages(store, extent, length / PM_PAGE, repeated, chunk, period));
    }
    for (; status == PM_OK && done < length; done += chunk - done % chunk)
        status = pm_direct_write(store, extent, done, repeated + done % chunk,
                                 length - done < chunk - done % chunk ? length - done : chunk - done % chunk);
    free(repeated);
    return status;
}

/* Counts the whole blocks from `block` on that differ from the bytes in their place in the file, but no more than one
 * write can gain by. */
static uint64_t count_changed(const pm_region *region, const pm_uncommitted *extent, uint64_t block)
{
    enum { AT_ONCE = 64 };
    uint64_t whole = extent->length / PM_PAGE, end = block;
    while (end < whole && end < block + AT_ONCE) {
        uint64_t at = extent->offset + end * PM_PAGE;
        if (!memcmp(region->live + at, region->committed + at, PM_PAGE)) break;
        end++;
    }
    return end - block;
}

/* Writes the blocks that the program has changed through memory, and hashes those whose hash is not known. */
static pm_status write_changed(pm_store *store, pm_uncommitted *extent)
{
    pm_region *region = &store->region;
    for (uint64_t block = 0, blocks = pm_extent_blocks(extent->length); block < blocks;) {
        uint64_t at = extent->offset + block * PM_PAGE,
                 changed = extent->opened ? count_changed(region, extent, block) : 0;
        size_t bytes = block_bytes(extent, block);
        if (changed) {
            PM_TRY(write_pages(store, extent, block, region->live + at, changed));
            store->statistics.bytes_direct += changed * PM_PAGE;
            block += changed;
            continue;
        }
        if (extent->opened && bytes < PM_PAGE && memcmp(region->live + at, region->committed + at, bytes)) {
            PM_TRY(write_part(store, extent, block * PM_PAGE, region->live + at, bytes));
            store->statistics.bytes_direct += bytes;
        }
        if (extent->hashes[block] == UNKNOWN)
            extent->hashes[block] = pm_extent_block_hash(region, region->committed + at, bytes, at);
        block++;
    }
    return PM_OK;
}

pm_status pm_direct_finish(pm_store *store, pm_uncommitted *extent)
{
    pm_region *region = &store->region;
    uint64_t size = 8 * pm_extent_blocks(extent->length), place = extent->offset + pm_extent_table(extent->length);
    PM_TRY(pm_heap_check_new(region, extent->offset, pm_extent_size(extent->length)));
    PM_TRY(need_hashes(extent));
    PM_TRY(write_changed(store, extent));
    const uint64_t *table = extent->hashes;
    PM_TRY(pm_region_write(region, place, table, size, PM_WRITE_STREAM));
    extent->table_hash = pm_extent_table_hash(region, table, size, place);
    extent->digest = (pm_digest){0};
    pm_extent_digest(&extent->digest, (const uint8_t *)table, extent->offset, extent->length);
    return PM_OK;
}
