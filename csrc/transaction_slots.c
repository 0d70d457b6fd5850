/*
 * Which extents get two slots or lose them, and the commits that write them whole (D4). slots.h draws an extent's life.
 *
 * I6   Each byte is loaded once; what was loaded is hashed and written.
 * I7   Only the slot that is not home is written, before the record that makes it home.
 */
#include "hash.h"
#include "region_unsettled.h"
#include "transaction.h"

enum { DENSE_FROM_MEMORY = PM_PAGE, DENSE_COMMITS = 2, SPARSE_COMMITS = 32 };

/* Home's own lines are not in the cache: what is streamed does not stay there. */
static uint64_t sample_at(const pm_dense *dense, unsigned i)
{
    uint64_t lines = dense->length / PM_LINE;
    return (lines * i / PM_DENSE_SAMPLES + lines / (2 * PM_DENSE_SAMPLES)) * PM_LINE;
}

static void take_sample(pm_dense *dense, const uint8_t *live)
{
    dense->sampled = true;
    for (unsigned i = 0; i < PM_DENSE_SAMPLES; i++) memcpy(dense->sample[i], live + sample_at(dense, i), PM_LINE);
}

/* True if most of an extent differs from home, as far as a few lines tell. */
static bool mostly_changed(const pm_region *region, const pm_dense *dense)
{
    uint64_t place = dense->slot[dense->seat];
    unsigned changed = 0;
    if (!dense->sampled) return pm_gather_mostly_changed(region, place, dense->slot[dense->home], dense->length);
    for (unsigned i = 0; i < PM_DENSE_SAMPLES; i++)
        changed += memcmp(dense->sample[i], region->live + place + sample_at(dense, i), PM_LINE) != 0;
    return changed >= PM_DENSE_SAMPLES - PM_DENSE_SAMPLES / 4;
}

/* Nobody but the next commit needs what the slot holds: the commit that left it is durable, and no run waits for it. */
static bool is_left(const pm_store *store, const pm_dense *dense, unsigned slot)
{
    uint64_t first = dense->slot[slot] / PM_PAGE, end = first + pm_extent_pages(dense->length);
    return slot != dense->home && dense->flipped <= store->log.durable
           && pm_unsettled_next(&store->region, first, end) == end;
}

/* The whole extent into the slot that is not home: each byte is loaded once, and what was loaded is hashed and written
 * (I6, I7). */
static pm_status write_slot(pm_store *store, pm_dense *dense)
{
    pm_region *region = &store->region;
    /* The other slot holds what is durable, as long as the commit that left it is not (I7). */
    if (dense->flipped > store->log.durable) PM_TRY(pm_async_settle(store));
    unsigned to = 1 - dense->home;
    PM_CHECK(is_left(store, dense, to)); /* I7, I13 */
    uint64_t offset = dense->slot[to], home = dense->slot[dense->home], length = dense->length;
    uint64_t pages = length / PM_PAGE, left = length % PM_PAGE, table_at = pm_extent_table(length) - pages * PM_PAGE;
    const uint8_t *live = region->live + dense->slot[dense->seat];
    uint64_t *table = (void *)(dense->tail + table_at);
    /* Before the pages are streamed: this is stored and loaded again at once, and behind them that would wait for them
     * (see pm_writer_begin). */
    memcpy(dense->tail, live + pages * PM_PAGE, left);
    if (left) table[pages] = pm_block_hash(region, dense->tail, left, offset + pages * PM_PAGE);
    PM_TRY(pm_home_write_hashed(region, offset, live, pages, table, PM_FOLIO_WHOLE));
    uint64_t size = 8 * pm_extent_blocks(length), rest = pm_round_up(table_at + size, store->media.granule);
    PM_TRY(pm_home_write(region, offset + pages * PM_PAGE, dense->tail, rest, PM_WRITE_STREAM));
    dense->table_hash = pm_table_hash(region, table, size, offset + pm_extent_table(length));
    if (!dense->known_terms) {
        uint64_t known = home + pm_extent_table(length);
        PM_TRY(pm_region_readable(region, region->home, known, size, "the hashes of contents"));
        dense->terms = (pm_digest){0};
        pm_extent_digest(&dense->terms, region->home + known, home, length);
        dense->known_terms = true;
    }
    dense->written_terms = (pm_digest){0};
    pm_extent_digest(&dense->written_terms, (const uint8_t *)table, offset, length);
    take_sample(dense, live);
    dense->written = true;
    store->statistics.bytes_direct += length + size;
    return PM_OK;
}

/* Two slots for an extent most of which changed in the last commits, and in this one as far as a sample tells. A lack
 * of space or of entries leaves it as it is. */
static pm_status give_slots(pm_store *store, pm_buffer *buffer)
{
    pm_status status;
    uint64_t least = store->media.kind == PM_MEDIA_MEMORY ? DENSE_FROM_MEMORY : PM_DENSE_FROM_FILE;
    /* What the log doesn't take would be written twice, and end in a checkpoint. */
    bool fits = buffer->length < store->log.header.log_size;
    if ((fits && buffer->dense_commits < DENSE_COMMITS) || buffer->length < least) return PM_OK;
    const pm_region *region = &store->region;
    uint64_t offset = buffer->offset;
    if (!buffer->sampled && !pm_gather_sample_readable(region, offset, offset, buffer->length)) return PM_OK;
    buffer->sampled = true;
    if (!pm_gather_mostly_changed(&store->region, buffer->offset, buffer->offset, buffer->length)) return PM_OK;
    PM_WITH_SPACE(store, pm_extent_pages(buffer->length), status,
                  pm_slots_add(&store->region, store->log.slots, buffer->offset, buffer->length));
    if (status != PM_NO_SPACE && status != PM_TOO_LONG && status != PM_NO_MEMORY) return status;
    if (store->failed) return status;
    buffer->dense_commits = 0;
    return PM_OK;
}

/* An extent that has become sparse gives its second slot back, by a commit that leaves its contents in the first
 * one. */
static pm_status take_slot_back(pm_store *store, pm_dense *dense)
{
    const pm_region *region = &store->region;
    if (dense->gone || dense->seat || dense->sparse < SPARSE_COMMITS) return PM_OK;
    PM_TRY(pm_region_comparable(region, dense->slot[0], dense->slot[dense->home], dense->length));
    if (!memcmp(region->live + dense->slot[0], region->home + dense->slot[dense->home], dense->length)) return PM_OK;
    return pm_slots_remove(&store->region, dense);
}

/* Whether the running commit takes all of an extent. all: it may. One that gives its second slot back must have its
 * contents in slot 0, whatever was promised. */
static bool takes_whole(const pm_store *store, bool all, const pm_dense *dense)
{
    if (dense->gone) return dense->home;
    if (!all) return false;
    return mostly_changed(&store->region, dense);
}

pm_status pm_transaction_write_slots(pm_store *store, bool only)
{
    pm_region *region = &store->region;
    for (size_t i = 0; i < region->dense_count; i++) {
        pm_dense *dense = region->dense[i];
        /* By an attempt that failed: the sample is of what was never committed */
        if (dense->written) dense->sampled = false;
        dense->written = false;
    }
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        if (!pm_transaction_may_change(store, buffer) || pm_extent_is_small(buffer->length)) continue;
        pm_dense *dense = pm_region_dense(region, buffer->offset, buffer->length);
        bool all = !only || buffer->only_all;
        if (!dense && all) {
            PM_TRY(give_slots(store, buffer));
            dense = pm_region_dense(region, buffer->offset, buffer->length);
        }
        if (!dense || dense->written) continue; /* written: several buffers over one extent */
        if (!only) PM_TRY(take_slot_back(store, dense));
        if (takes_whole(store, all, dense)) PM_TRY(write_slot(store, dense));
    }
    return PM_OK;
}

/* The seat's slot gets home's bytes, so that memory can be given back that was committed into the other slot. Pages
 * that are not private show them already (I9). It holds no durable state (I7), and until the next commit writes it
 * nobody takes it for one. */
pm_status pm_transaction_fill_seat(pm_store *store, uint64_t place, uint64_t length)
{
    pm_region *region = &store->region;
    const pm_dense *dense = pm_region_find_dense(region, place, length);
    if (!dense || dense->home == dense->seat) return PM_OK;
    if (dense->flipped > store->log.durable) PM_TRY(pm_async_settle(store));
    PM_CHECK(is_left(store, dense, dense->seat)); /* I7, I13 */
    PM_TRY(pm_region_comparable(region, place, dense->slot[dense->home], length));
    for (uint64_t at = 0; at + PM_PAGE <= length; at += PM_PAGE) {
        const uint8_t *home = region->home + dense->slot[dense->home] + at;
        /* Another release may have made them equal. */
        if (memcmp(region->live + place + at, home, PM_PAGE) || !memcmp(region->home + place + at, home, PM_PAGE))
            continue;
        uint8_t copy[PM_PAGE] __attribute__((aligned(PM_LINE)));
        memcpy(copy, home, PM_PAGE); /* a write from the mapping of the file that is written may find its page locked */
        PM_TRY(pm_home_write(region, place + at, copy, PM_PAGE, PM_WRITE_CACHED));
        store->statistics.bytes_home += PM_PAGE;
    }
    return PM_OK;
}

void pm_transaction_declare_slots(pm_store *store, pm_digest *digest)
{
    for (size_t i = 0; i < store->region.dense_count; i++) {
        const pm_dense *dense = store->region.dense[i];
        if (!dense->written) continue;
        unsigned to = 1 - dense->home;
        pm_direct direct = {dense->table_hash, dense->gone ? 0 : 2 * dense->entry + (to ^ dense->base)};
        pm_writer_direct(&store->writer, dense->gone ? PM_ITEM_DIRECT : PM_ITEM_SLOT, dense->slot[to], dense->length,
                         direct);
        *digest = pm_digest_plus(*digest, pm_digest_minus(dense->written_terms, dense->terms));
    }
}

void pm_transaction_flip_slots(pm_store *store)
{
    for (size_t i = 0; i < store->region.dense_count; i++) {
        pm_dense *dense = store->region.dense[i];
        if (!dense->written) continue;
        PM_CHECK(dense->flipped < store->log.sequence); /* the record that declares it is in the log (I1) */
        pm_watch_carried_whole(&store->region.watches, dense->slot[dense->seat]);
        dense->written = false;
        dense->sparse = 0;
        dense->home = 1 - dense->home;
        dense->terms = dense->written_terms;
        dense->flipped = store->log.sequence;
        if (!dense->gone) pm_log_choose_slot(&store->log, dense->entry, dense->home ^ dense->base);
    }
}

void pm_transaction_learn(pm_store *store, const pm_candidate *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        pm_buffer *buffer = list[i].buffer;
        if (list[i].what != PM_EXTENT || !list[i].changed) continue;
        buffer->dense_commits = buffer->dense ? buffer->dense_commits + 1 : 0;
        pm_dense *dense = pm_region_dense(&store->region, buffer->offset, buffer->length);
        if (!dense) continue;
        dense->sparse = buffer->dense ? 0 : dense->sparse + 1;
        dense->known_terms = false;
        dense->sampled = false; /* the log has changed what it is of */
    }
}
