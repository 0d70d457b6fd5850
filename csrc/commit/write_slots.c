/*
 * Which extents get two slots or lose them, and the commits that write double-buffered extents whole (D4). slots.h
 * draws an extent's life.
 *
 * I6   Each byte is loaded once; the loaded bytes are hashed and written.
 * I7   Only the slot that is not current is written, before the record that makes it current.
 */
#include "commit/write_slots.h"

#include "space/extent.h"
#include "space/overlay.h"
#include "space/region_image.h"
#include "space/slots.h"
#include "commit/async.h"
#include "commit/checkpoint.h"
#include "commit/uncommitted.h"

enum { DOUBLE_BUFFER_FROM_MEMORY = PM_PAGE, WHOLE_COMMITS = 2, SPARSE_COMMITS = 32 };

/* Samples are kept in memory, as the committed image's lines are not in the cache: they were streamed. */
static uint64_t sample_at(const pm_double_buffer *pair, unsigned i)
{
    uint64_t lines = pair->length / PM_LINE;
    return (lines * i / PM_DOUBLE_BUFFER_SAMPLES + lines / (2 * PM_DOUBLE_BUFFER_SAMPLES)) * PM_LINE;
}

static void take_sample(pm_double_buffer *pair, const uint8_t *live)
{
    pair->sampled = true;
    for (unsigned i = 0; i < PM_DOUBLE_BUFFER_SAMPLES; i++) memcpy(pair->sample[i], live + sample_at(pair, i), PM_LINE);
}

/* True if most of the sample differs from the extent. */
static bool differs(const pm_double_buffer *pair, const uint8_t *live)
{
    unsigned changed = 0;
    for (unsigned i = 0; i < PM_DOUBLE_BUFFER_SAMPLES; i++)
        changed += memcmp(pair->sample[i], live + sample_at(pair, i), PM_LINE) != 0;
    return changed >= PM_DOUBLE_BUFFER_SAMPLES - PM_DOUBLE_BUFFER_SAMPLES / 4;
}

/* True if a sample of a few lines shows that most of an extent differs from the committed image, and all of it can be
 * read: a page that no program has touched may be on a bad block. pair: NULL if it has one slot. */
static bool mostly_changed(const pm_region *region, pm_buffer *buffer, const pm_double_buffer *pair)
{
    uint64_t place = buffer->offset, length = buffer->length, committed = pair ? pair->slot[pair->current] : place;
    if (!buffer->sampled && !pm_gather_sample_readable(region, place, committed, length)) return false;
    buffer->sampled = true;
    bool sampled = pair && pair->sampled;
    if (sampled ? !differs(pair, region->live + place) : !pm_gather_mostly_changed(region, place, committed, length))
        return false;
    /* What the commit reads. The committed image of pages that the program has written may have left memory again. */
    if (!buffer->readable && !buffer->seen)
        buffer->seen = pm_region_readable(region, region->live, place, length, "contents") == PM_OK;
    return buffer->readable || buffer->seen;
}

/* True if only the next commit uses the slot: the commit that left it is durable, and no logged range of it waits. */
static bool is_left(const pm_store *store, const pm_double_buffer *pair, unsigned slot)
{
    uint64_t first = pair->slot[slot] / PM_PAGE, end = first + pm_extent_pages(pair->length);
    return slot != pair->current && pair->flipped <= store->log.durable
           && pm_overlay_next(&store->region, first, end) == end;
}

/* Writes the whole extent into the slot that is not current: each byte is loaded once, and the loaded bytes are hashed
 * and written (I6, I7). */
static pm_status write_slot(pm_store *store, pm_double_buffer *pair)
{
    pm_region *region = &store->region;
    /* The other slot holds the durable state as long as the commit that left it is not durable (I7). */
    if (pair->flipped > store->log.durable) PM_TRY(pm_async_finalize(store));
    unsigned to = 1 - pair->current;
    PM_CHECK(is_left(store, pair, to)); /* I7, I13 */
    uint64_t offset = pair->slot[to], committed = pair->slot[pair->current], length = pair->length;
    uint64_t pages = length / PM_PAGE, left = length % PM_PAGE, table_at = pm_extent_table(length) - pages * PM_PAGE;
    const uint8_t *live = region->live + pair->slot[pair->mapped];
    uint64_t *table = (void *)(pair->tail + table_at);
    /* Before the pages are streamed: these bytes are stored and loaded again at once, which would wait for streamed
     * ones (see pm_writer_begin). */
    memcpy(pair->tail, live + pages * PM_PAGE, left);
    if (left) table[pages] = pm_extent_block_hash(region, pair->tail, left, offset + pages * PM_PAGE);
    PM_TRY(pm_region_write_hashed(region, offset, live, pages, table));
    uint64_t size = 8 * pm_extent_blocks(length), rest = pm_round_up(table_at + size, store->media.log_unit);
    PM_TRY(pm_region_write(region, offset + pages * PM_PAGE, pair->tail, rest, PM_WRITE_STREAM));
    pair->table_hash = pm_extent_table_hash(region, table, size, offset + pm_extent_table(length));
    if (!pair->known_contributions) {
        uint64_t known = committed + pm_extent_table(length);
        PM_TRY(pm_region_readable(region, region->committed, known, size, "the hashes of contents"));
        pair->contributions = (pm_digest){0};
        pm_extent_digest(&pair->contributions, region->committed + known, committed, length);
        pair->known_contributions = true;
    }
    pair->written_contributions = (pm_digest){0};
    pm_extent_digest(&pair->written_contributions, (const uint8_t *)table, offset, length);
    take_sample(pair, live);
    pair->written = true;
    store->statistics.bytes_direct += length + size;
    return PM_OK;
}

/* Gives two slots to an extent if most of it changed in the last commits, and a sample shows the same for this commit.
 * Without space or entries it stays as it is. */
static pm_status give_slots(pm_store *store, pm_buffer *buffer)
{
    pm_status status;
    uint64_t least = store->media.byte_addressable ? DOUBLE_BUFFER_FROM_MEMORY : PM_DOUBLE_BUFFER_FROM_FILE;
    /* An extent that is larger than the log would be written twice, and end in a checkpoint. */
    bool fits = buffer->length < store->log.header.log_size;
    if ((fits && buffer->whole_commits < WHOLE_COMMITS) || buffer->length < least) return PM_OK;
    if (!mostly_changed(&store->region, buffer, NULL)) return PM_OK;
    PM_WITH_SPACE(store, pm_extent_pages(buffer->length), status,
                  pm_slots_add(&store->region, store->log.slots, buffer->offset, buffer->length));
    if (status != PM_NO_SPACE && status != PM_TOO_LONG && status != PM_NO_MEMORY) return status;
    if (store->failed) return status;
    buffer->whole_commits = 0;
    return PM_OK;
}

/* Takes the second slot back if few changes were found many times in a row, in a commit that leaves the contents in the
 * first slot. */
static pm_status take_slot_back(pm_store *store, pm_double_buffer *pair)
{
    const pm_region *region = &store->region;
    if (pair->gone || pair->mapped || pair->sparse < SPARSE_COMMITS) return PM_OK;
    if (pm_region_comparable(region, pair->slot[0], pair->slot[pair->current], pair->length) != PM_OK) {
        pair->sparse = 0; /* A page that this commit need not read is on a bad block: asked again much later. */
        return PM_OK;
    }
    if (!memcmp(region->live + pair->slot[0], region->committed + pair->slot[pair->current], pair->length))
        return PM_OK;
    return pm_slots_remove(&store->region, pair);
}

/* True if the running commit writes the whole extent. all: it may. If its second slot is taken back, the contents must
 * be in slot 0, whatever was declared. */
static bool takes_whole(const pm_store *store, bool all, pm_buffer *buffer, const pm_double_buffer *pair)
{
    if (pair->gone) return pair->current;
    return all && mostly_changed(&store->region, buffer, pair);
}

pm_status pm_write_slots(pm_store *store, bool only)
{
    pm_region *region = &store->region;
    for (size_t i = 0; i < region->double_buffer_count; i++) {
        pm_double_buffer *pair = region->double_buffers[i];
        /* A failed attempt wrote it: the sample is of bytes that were never committed */
        if (pair->written) pair->sampled = false;
        pair->written = false;
    }
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        if (!pm_uncommitted_may_change(store, buffer) || pm_extent_is_small(buffer->length)) continue;
        pm_double_buffer *pair = pm_region_double_buffer(region, buffer->offset, buffer->length);
        bool all = !only || buffer->only_all;
        if (!pair && all) {
            PM_TRY(give_slots(store, buffer));
            pair = pm_region_double_buffer(region, buffer->offset, buffer->length);
        }
        if (!pair || pair->written) continue; /* written: several buffers over one extent */
        if (!only) PM_TRY(take_slot_back(store, pair));
        if (takes_whole(store, all, buffer, pair)) PM_TRY(write_slot(store, pair));
    }
    return PM_OK;
}

/* Copies the current slot into the mapped one. Memory can then be given back although its bytes were committed into the
 * other slot: pages that are not private show them already (I9). The mapped slot holds no durable state (I7), and does
 * not count until the next commit writes it. */
pm_status pm_write_slots_fill_mapped(pm_store *store, uint64_t place, uint64_t length)
{
    pm_region *region = &store->region;
    const pm_double_buffer *pair = pm_region_find_double_buffer(region, place, length);
    if (!pair || pair->current == pair->mapped) return PM_OK;
    if (pair->flipped > store->log.durable) PM_TRY(pm_async_finalize(store));
    PM_CHECK(is_left(store, pair, pair->mapped)); /* I7, I13 */
    PM_TRY(pm_region_comparable(region, place, pair->slot[pair->current], length));
    for (uint64_t at = 0; at + PM_PAGE <= length; at += PM_PAGE) {
        const uint8_t *committed = region->committed + pair->slot[pair->current] + at;
        /* Another release may have made them equal. */
        if (memcmp(region->live + place + at, committed, PM_PAGE)
            || !memcmp(region->committed + place + at, committed, PM_PAGE))
            continue;
        uint8_t copy[PM_PAGE] __attribute__((aligned(PM_LINE)));
        /* Writing to the file from its own mapping may find the page locked */
        memcpy(copy, committed, PM_PAGE);
        PM_TRY(pm_region_write(region, place + at, copy, PM_PAGE, PM_WRITE_CACHED));
        store->statistics.bytes_home += PM_PAGE;
    }
    return PM_OK;
}

void pm_write_slots_declare(pm_store *store, pm_digest *digest)
{
    for (size_t i = 0; i < store->region.double_buffer_count; i++) {
        const pm_double_buffer *pair = store->region.double_buffers[i];
        if (!pair->written) continue;
        unsigned to = 1 - pair->current;
        pm_direct direct = {pair->table_hash, pair->gone ? 0 : 2 * pair->entry + (to ^ pair->base)};
        pm_writer_direct(&store->writer, pair->gone ? PM_ITEM_DIRECT : PM_ITEM_SLOT, pair->slot[to], pair->length,
                         direct);
        *digest = pm_digest_plus(*digest, pm_digest_minus(pair->written_contributions, pair->contributions));
    }
}

void pm_write_slots_flip(pm_store *store)
{
    for (size_t i = 0; i < store->region.double_buffer_count; i++) {
        pm_double_buffer *pair = store->region.double_buffers[i];
        if (!pair->written) continue;
        PM_CHECK(pair->flipped < store->log.sequence); /* the record that declares it is in the log (I1) */
        pm_policy_committed_whole(&store->region.policy, pair->slot[pair->mapped]);
        pair->written = false;
        pair->sparse = 0;
        pair->current = 1 - pair->current;
        pair->contributions = pair->written_contributions;
        pair->flipped = store->log.sequence;
        if (!pair->gone) pm_log_choose_slot(&store->log, pair->entry, pair->current ^ pair->base);
    }
}

void pm_write_slots_learn(pm_store *store, const pm_candidate *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        pm_buffer *buffer = list[i].buffer;
        if (list[i].what != PM_EXTENT || !list[i].changed) continue;
        bool scanned = list[i].scan != PM_SCAN_ONLY; /* otherwise the other pages are not known */
        if (scanned) buffer->whole_commits = list[i].mostly_changed ? buffer->whole_commits + 1 : 0;
        pm_double_buffer *pair = pm_region_double_buffer(&store->region, buffer->offset, buffer->length);
        if (!pair) continue;
        if (scanned) pair->sparse = list[i].mostly_changed ? 0 : pair->sparse + 1;
        pair->known_contributions = false;
        pair->sampled = false; /* the log has changed the sampled bytes */
    }
}
