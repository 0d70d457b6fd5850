#include "commit/checkpoint.h"

#include "space/slots.h"
#include "commit/async.h"
#include "commit/failed.h"
#include "commit/image.h"

/* The log grows until it holds COMMITS_PER_LOG commits, so that one checkpoint serves many commits. It grows by at most
 * LOG_STEP at a time, as growth makes a commit wait, and later commits may be smaller. Once records of this process
 * have used a part of the log (1 in LOG_EARNED), the log grows until less than one commit in 1000 waits for a
 * checkpoint. For that it grows to LOG_RARE at most, which a disk writes quickly (LOG_RARE_MEMORY on memory, where a
 * checkpoint costs little). */
enum {
    COMMITS_PER_LOG = 32,
    LOG_STEP = 8,
    LOG_LARGEST = 64 << 20,
    LOG_EARNED = 8,
    LOG_RARE = 16 << 20,
    LOG_RARE_MEMORY = 4 << 20,
    COMMITS_RARE = 1500 /* commits that wait for growth are among the longest, too */
};
#define GROW_LEAST ((uint64_t)256 << 10)
#define GROW_MOST ((uint64_t)1 << 30)
#define SLOTS_GROWN ((uint64_t)8 << 20)

/* ---- checkpoint ----------------------------------------------------------------------------------------------- */

/* Makes the committed image durable, then writes a header with `next`'s layout and a new salt. */
static pm_status reset_log(pm_store *store, pm_header next)
{
    PM_TRY(pm_async_finalize(store));
    if (!store->image.durable) PM_TRY(pm_image_sync(store));
    PM_CHECK(store->image.durable && !store->write_back.job.body); /* I3 */
    PM_CHECK(!store->async || store->log.durable == store->log.sequence);
    PM_TRY(pm_failed_unless_space(store, pm_log_reset(&store->log, next)));
    pm_async_emptied(store);
    store->log_use.commits = 0;
    store->statistics.checkpoints++;
    return PM_OK;
}

pm_status pm_checkpoint_make(pm_store *store, bool clean)
{
    pm_header next = store->log.header;
    next.flags = clean ? PM_HEADER_CLEAN : 0;
    return reset_log(store, next);
}

/* One header has the number, and a salt by which no record in the log is valid: a crash leaves this header or the one
 * before. */
pm_status pm_checkpoint_renumber(pm_store *store, uint64_t sequence)
{
    uint64_t before = store->log.sequence;
    PM_CHECK(!store->async);
    store->log.sequence = sequence;
    pm_status status = pm_checkpoint_make(store, true);
    if (status != PM_OK) store->log.sequence = before;
    for (size_t i = 0; status == PM_OK && i < store->region.double_buffer_count; i++)
        store->region.double_buffers[i]->flipped = 0; /* durable, by no record */
    return status;
}

/* ---- growth --------------------------------------------------------------------------------------------------- */

/* Writes the new log's space once. On disks, a record in blocks that were written before changes no metadata of the
 * file. The old log is left alone: it is needed until the new header is durable. */
static pm_status write_log_once(pm_store *store, uint64_t log_offset, uint64_t log_size)
{
    const pm_header *old = &store->log.header;
    bool file = !store->media.byte_addressable;
    uint64_t from = log_offset, to = log_offset + (file && log_size > LOG_RARE ? LOG_RARE : log_size);
    if (from < old->log_offset + old->log_size) from = old->log_offset + old->log_size;
    if (from >= to) return PM_OK;
    if (file) return pm_failed_if_io(store, pm_media_write_zeros(&store->media, from, to));
    pm_media_touch(&store->media, from, to);
    return PM_OK;
}

/* Changes the sizes of region and log. The log stands behind the region, so that both can grow: it is emptied, and
 * begins again further back. */
static pm_status relayout(pm_store *store, uint64_t region_size, uint64_t log_size)
{
    uint64_t end = PM_REGION_START + region_size + log_size;
    if (store->max_size && end > store->max_size)
        return pm_fail(PM_NO_SPACE,
                       "the store would grow to %llu bytes; max_size is %llu (a larger one can be given when the store "
                       "is opened again)",
                       (unsigned long long)end, (unsigned long long)store->max_size);
    if (region_size > PM_REGION_LIMIT)
        return pm_fail(PM_NO_SPACE, "a store can't be larger than %llu bytes", (unsigned long long)PM_REGION_LIMIT);
    if (!pm_media_may_have(&store->media, end))
        return pm_fail(PM_NO_SPACE, "the view that the trace lends has no more room");
    PM_TRY(pm_region_keep(&store->region, region_size));
    PM_TRY(pm_async_finalize(store));
    pm_status grown = pm_failed_if_io(store, store->media.operations->grow(&store->media, end));
    if (grown == PM_IO)
        pm_status_explain(grown, "; the store has failed: open it again at the last commit, without changes since");
    PM_TRY(grown);
    pm_region_moved(&store->region);
    PM_TRY(write_log_once(store, PM_REGION_START + region_size, log_size));
    pm_header next = store->log.header;
    next.region_size = region_size;
    next.log_size = log_size;
    next.flags = 0;
    PM_TRY(reset_log(store, next));
    return region_size > store->region.size ? pm_failed(store, pm_region_extend(&store->region, region_size)) : PM_OK;
}

pm_status pm_checkpoint_grow(pm_store *store, uint64_t pages)
{
    uint64_t size = store->region.size, least = pages * PM_PAGE;
    /* Enough space may wait for commits to be durable (I7, I13). */
    if (store->async && store->log.durable != store->log.sequence) return pm_async_finalize(store);
    /* The space map may need pages of its own: one for each 63 MiB, and a list. */
    least += (pages / PM_MAP_PAGES + 3) * PM_PAGE;
    uint64_t more = pm_round_up(size / 2, PM_PAGE);
    if (more > GROW_MOST) more = GROW_MOST;
    if (more < GROW_LEAST) more = GROW_LEAST;
    /* An extent that may get a second slot: room is made for both, and their blocks are written here, in large pieces.
     * Otherwise a later commit would wait for the file to grow, and each first write of a block for the file's
     * metadata. */
    bool may_get_slots = least >= PM_DOUBLE_BUFFER_FROM_FILE && least <= SLOTS_GROWN;
    uint64_t slots = !store->media.byte_addressable && may_get_slots ? 2 * least : least;
    if (more < slots) more = pm_round_up(slots, PM_PAGE);
    pm_status status = relayout(store, size + more, store->log.header.log_size);
    if (status == PM_OK && slots > least)
        return pm_failed_if_io(store, pm_media_write_zeros(&store->media, PM_REGION_START + size,
                                                           PM_REGION_START + size + slots));
    if (status == PM_NO_SPACE && more > least && !store->failed)
        status = relayout(store, size + pm_round_up(least, PM_PAGE), store->log.header.log_size);
    return status;
}

/* The size of the log for commits like those since the last checkpoint. */
static uint64_t log_wanted(const pm_store *store)
{
    uint64_t size = store->log.header.log_size, wanted = size;
    if (!store->log_use.commits) return size;
    uint64_t each = store->log.head / store->log_use.commits, target = each * COMMITS_PER_LOG,
             rare = each * COMMITS_RARE;
    if (target > LOG_STEP * size) target = LOG_STEP * size;
    if (target > LOG_LARGEST) target = LOG_LARGEST;
    uint64_t most = store->media.byte_addressable ? LOG_RARE_MEMORY : LOG_RARE;
    if (rare > most) rare = most;
    if (rare > target && rare <= LOG_EARNED * store->log_use.logged) target = rare;
    while (wanted < target) wanted *= 2;
    return wanted;
}

pm_status pm_checkpoint_make_log_room(pm_store *store, uint64_t body)
{
    uint64_t size = store->log.header.log_size, wanted = log_wanted(store);
    uint64_t needed = body + 2 * PM_PAGE;
    while (needed <= LOG_LARGEST && wanted < needed) wanted *= 2;
    if (wanted > size) {
        pm_status status = relayout(store, store->region.size, wanted);
        /* The smaller log will do if there is no space for a larger one. */
        if (status != PM_NO_SPACE || store->failed) return status;
    }
    return pm_checkpoint_make(store, false);
}
