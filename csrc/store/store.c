/*
 * The C interface: locks, handles, status codes.
 *
 * commit/store_state.h has the order of the locks.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "space/catalog.h"
#include "space/extent.h"
#include "space/leaves.h"
#include "space/region_fork.h"
#include "space/slots.h"
#include "commit/async.h"
#include "commit/checkpoint.h"
#include "commit/direct.h"
#include "commit/failed.h"
#include "commit/only.h"
#include "commit/pending.h"
#include "commit/readers.h"
#include "commit/transaction.h"
#include "commit/uncommitted.h"
#include "commit/write_back.h"
#include "commit/write_slots.h"
#include "recovery/recovery.h"
#include "recovery/salvage.h"
#include "recovery/verify.h"
#include "store/entries.h"
#include "store/forks.h"

/* ---- life ------------------------------------------------------------------------------------------------------- */

static void free_store(pm_store *store)
{
    pm_leaves_free(store->region.leaves);
    pm_region_free(&store->region);
    pm_writer_free(&store->writer);
    pm_media_close(&store->media);
    pm_uncommitted_forget(store);
    pm_async_free(store);
    free(store->uncommitted.list);
    free(store->candidates.list);
    free(store);
}

static pm_status report_failed(pm_store *store)
{
    store->unreported = false;
    return pm_fail(PM_FAILED,
                   "an earlier write or sync failed, so the store refuses to go on: close it and open it again");
}

static void release_reference(pm_store *store)
{
    if (atomic_fetch_sub(&store->references, 1) == 1) free_store(store);
}

static pm_status open_layers(pm_store *store, int fd, pm_media_kind kind, unsigned flags, pm_trace *trace)
{
    PM_TRY(pm_media_open(&store->media, fd, kind, flags & PM_OPEN_READ_ONLY, trace));
    PM_TRY(pm_log_open(&store->log, &store->media));
    const pm_header *header = &store->log.header;
    if (!store->media.read_only) PM_TRY(pm_media_own_space(&store->media, header->log_offset + header->log_size));
    PM_TRY(pm_region_open(&store->region, &store->media, store->log.header.region_size, store->log.header.store_id));
    pm_writer_init(&store->writer, &store->media);
    store->region.snapshot = flags & PM_OPEN_SNAPSHOT, store->region.salvage = flags & PM_OPEN_SALVAGE;
    PM_TRY(pm_recovery_run(store));
    /* A reader that takes its lock from here on knows of all that recovery has freed. */
    PM_TRY(pm_region_find_users(&store->region, store));
    PM_TRY(store->region.salvage ? pm_salvage_open(store) : pm_slots_load(&store->region, store->log.slots));
    pm_readers_begin(store);
    return pm_transaction_mark(store, PM_EVENT_RECOVERED, store->log.sequence);
}

pm_status pm_open(int fd, pm_media_kind kind, unsigned flags, uint64_t max_size, pm_trace *trace, pm_store **out)
{
    pm_store *store = calloc(1, sizeof *store);
    if (!store) {
        close(fd);
        return pm_fail(PM_NO_MEMORY, "no memory to open a store");
    }
    store->schedule = trace ? pm_trace_schedule(trace) : NULL;
    pm_thread_mutex_init(&store->mutex, store->schedule);
    pm_write_back_open(store);
    pm_helper_init(&store->helper, store->schedule);
    atomic_store(&store->references, 1);
    store->max_size = max_size;
    store->media.fd = fd;
    pm_status status = open_layers(store, fd, kind, flags, trace);
    if (status != PM_OK) {
        free_store(store);
        return status;
    }
    pm_forks_add(store);
    *out = store;
    return PM_OK;
}

/* Makes everything durable and the log empty. Pending changes are dropped. */
static pm_status finish_file(pm_store *store)
{
    pm_status status = pm_write_back_drain(store);
    if (store->unreported) status = report_failed(store);
    bool untouched = store->log.header.flags & PM_HEADER_CLEAN;
    if (status == PM_OK && !store->failed && !store->media.read_only && !untouched)
        status = pm_checkpoint_make(store, true);
    if (status != PM_NO_SPACE) return status;
    /* The log has every commit, and the next process that opens the file replays it. */
    return store->async ? pm_failed(store, store->media.operations->sync(&store->media)) : PM_OK;
}

static pm_status close_locked(pm_store *store, unsigned flags)
{
    bool keep = !(flags & PM_CLOSE_EXITING);
    pm_helper_stop(&store->helper);
    /* PM_CLOSE_DISCARD leaves the file as a crash would */
    pm_status status = flags & PM_CLOSE_DISCARD ? PM_OK : finish_file(store);
    pm_status parted = keep ? pm_region_part(&store->region) : PM_OK;
    if (parted == PM_NO_MEMORY) return parted;
    pm_region_close(&store->region, keep);
    store->schedule = store->mutex.schedule = NULL; /* it belongs to the trace, which may soon be freed */
    pm_media_close(&store->media);
    store->closed = true;
    if (status == PM_OK) return parted;
    return status == PM_NO_MEMORY ? PM_IO : status; /* PM_NO_MEMORY would mean that the store is still open */
}

/* Another thread may enter now, and rely on its own fences. */
static void unlock(pm_store *store)
{
    pm_media_memory_hand_over(&store->media);
    pm_thread_unlock(&store->mutex);
}

pm_status pm_close(pm_store *store, unsigned flags)
{
    pm_status status = PM_OK;
    if (!store->forked) {
        pm_async_stop(store);
        pm_write_back_stop(store);
        pm_thread_lock(&store->mutex);
        status = close_locked(store, flags);
        bool closed = store->closed;
        unlock(store);
        if (!closed) {
            pm_async_start(store);
            return status;
        }
    }
    pm_forks_remove(store);
    release_reference(store);
    return status;
}

const char *pm_media_name(const pm_store *store)
{
    return pm_media_names[store->media.kind];
}

const char *pm_domain_in_use(const pm_store *store)
{
    return pm_domain_name(store->media.domain);
}

/* ---- entering and leaving ------------------------------------------------------------------------------------- */

static pm_status leave(pm_store *store, pm_status status)
{
    unlock(store);
    pm_schedule_point(store->schedule);
    return status;
}

/* also_failed: also after a failure, for a rollback. */
static pm_status enter_even(pm_store *store, bool also_failed)
{
    if (store->forked)
        return pm_fail(PM_FORKED,
                       "this process is a fork of the one that opened the store; open it again here with mode='r'");
    pm_schedule_point(store->schedule);
    pm_thread_lock(&store->mutex);
    pm_status status = store->closed ? PM_OK : pm_write_back_drain(store);
    if (also_failed && status == PM_NO_SPACE) store->rollback_due = true;
    /* The store has failed */
    if (status != PM_OK && status != PM_NO_SPACE) store->unreported = true, status = PM_OK;
    if (store->closed) status = pm_fail(PM_CLOSED, "the store is closed");
    else if (store->failed && !(also_failed && !store->image.outdated)) status = report_failed(store);
    /* I2, I9 */
    PM_CHECK(status != PM_OK || store->failed || !(store->write_back.job.body || store->write_back.overflowed));
    return status == PM_OK ? PM_OK : leave(store, status);
}

static pm_status enter(pm_store *store)
{
    return enter_even(store, false);
}

/* Refuses a read-only store, and leaves it. */
static pm_status require_writable(pm_store *store)
{
    return store->media.read_only ? leave(store, pm_fail(PM_READ_ONLY, "the store is open for reading only")) : PM_OK;
}

static pm_status enter_to_write(pm_store *store)
{
    PM_TRY(enter(store));
    PM_TRY(require_writable(store));
    if (!store->rollback_due) return PM_OK;
    return leave(store,
                 pm_fail(PM_NO_SPACE, "there was no space for a rollback, and nothing can be changed or committed "
                                      "before it is done: call rollback() again"));
}

/* ---- transactions ------------------------------------------------------------------------------------------------ */

pm_status pm_commit(pm_store *store)
{
    pm_readers_poll(store);
    PM_TRY(enter_to_write(store));
    return leave(store, pm_transaction_commit(store, false));
}

pm_status pm_commit_only(pm_store *store, const pm_range *ranges, size_t count)
{
    pm_readers_poll(store);
    PM_TRY(enter_to_write(store));
    pm_only_declare(store, ranges, count);
    return leave(store, pm_transaction_commit(store, true));
}

pm_status pm_mark(pm_store *store, uint64_t offset, uint64_t length)
{
    PM_TRY(enter_to_write(store));
    pm_region_mark(&store->region, pm_region_live(&store->region, offset, length), length);
    return leave(store, PM_OK);
}

pm_status pm_mark_dirty(pm_store *store, const void *address, uint64_t length, int *out)
{
    PM_TRY(enter_to_write(store));
    return leave(store, pm_region_mark_dirty(&store->region, address, length, out));
}

pm_status pm_violation(pm_store *store, const pm_range *ranges, size_t count, pm_broken *out)
{
    PM_TRY(enter_to_write(store));
    pm_only_violation(store, ranges, count, out);
    return leave(store, PM_OK);
}

pm_status pm_rollback(pm_store *store)
{
    /* After a failure, too, the committed image is the last commit, unless writing the committed image has failed (I2,
     * I11). */
    PM_TRY(enter_even(store, true));
    PM_TRY(require_writable(store));
    pm_transaction_rollback(store);
    store->rollback_due = false;
    return leave(store, PM_OK);
}

pm_status pm_checkpoint(pm_store *store)
{
    PM_TRY(enter_to_write(store));
    return leave(store, pm_checkpoint_make(store, false));
}

pm_status pm_commit_async(pm_store *store, uint64_t interval)
{
    PM_TRY(enter(store));
    bool as_before = store->media.byte_addressable || store->media.read_only || store->async;
    return leave(store, as_before ? PM_OK : pm_async_open(store, interval));
}

pm_status pm_sync(pm_store *store)
{
    PM_TRY(enter(store));
    return leave(store, pm_async_sync(store));
}

pm_status pm_renumber(pm_store *store, uint64_t sequence)
{
    PM_TRY(enter_to_write(store));
    return leave(store, pm_checkpoint_renumber(store, sequence));
}

uint64_t pm_sequence(const pm_store *store)
{
    return store->log.sequence;
}

uint64_t pm_store_id(const pm_store *store)
{
    return store->region.store_id;
}

/* ---- catalog ----------------------------------------------------------------------------------------------------- */

static pm_status check_meta(const pm_entry *entry)
{
    if (entry->meta_length <= PM_META_MAX) return PM_OK;
    return pm_fail(PM_TOO_LONG, "a meta of %u bytes is over the limit of %d", entry->meta_length, PM_META_MAX);
}

pm_status pm_get(pm_store *store, const uint8_t *key, size_t key_length, pm_entry *entry, uint8_t *meta)
{
    pm_key k;
    pm_found found;
    PM_TRY(pm_entries_check_key(key, key_length, &k));
    PM_TRY(enter(store));
    pm_status status = pm_catalog_get(&store->region, k, &found);
    if (status == PM_OK) {
        *entry = found.entry;
        PM_CHECK(found.entry.meta_length <= PM_META_MAX);
        if (found.entry.meta_length) memcpy(meta, found.meta, found.entry.meta_length);
    }
    return leave(store, status);
}

pm_status pm_put(pm_store *store, const uint8_t *key, size_t key_length, const pm_entry *entry, const uint8_t *meta,
                 const pm_renaming *all, size_t count, const uint8_t *prefix, size_t prefix_length)
{
    pm_key k;
    PM_TRY(pm_entries_check_key(key, key_length, &k));
    PM_TRY(check_meta(entry));
    PM_TRY(enter_to_write(store));
    pm_status status = pm_entries_rename(store, all, count, k, entry, meta);
    if (status == PM_OK) status = pm_entries_delete_prefix(store, prefix, prefix_length);
    return leave(store, status);
}

pm_status pm_delete(pm_store *store, const uint8_t *key, size_t key_length, const uint8_t *prefix, size_t prefix_length)
{
    pm_key k;
    PM_TRY(pm_entries_check_key(key, key_length, &k));
    PM_TRY(enter_to_write(store));
    pm_status status = pm_entries_delete(store, k);
    if (status == PM_OK) status = pm_entries_delete_prefix(store, prefix, prefix_length);
    return leave(store, status);
}

pm_status pm_rename(pm_store *store, const pm_renaming *all, size_t count)
{
    PM_TRY(enter_to_write(store));
    return leave(store, pm_entries_rename(store, all, count, (pm_key){NULL, 0}, NULL, NULL));
}

pm_status pm_splice(pm_store *store, const uint8_t *prefix, size_t prefix_length, uint64_t at, uint64_t removed,
                    const pm_member *all, size_t count)
{
    pm_key key;
    PM_TRY(pm_entries_check_key(prefix, prefix_length, &key));
    if (key.length > PM_KEY_MAX - PM_NUMBER_BYTES) return pm_fail(PM_TOO_LONG, "the prefix is too long for numbers");
    for (size_t i = 0; i < count; i++)
        if (!all[i].moves) PM_TRY(check_meta(&all[i].entry));
    PM_TRY(enter_to_write(store));
    return leave(store, pm_entries_splice(store, key, at, removed, all, count));
}

pm_status pm_scan(pm_store *store, const uint8_t *from, size_t from_length, int after, const uint8_t *prefix,
                  size_t prefix_length, uint8_t *rows, size_t capacity, size_t *used)
{
    *used = 0;
    if (from_length > PM_KEY_MAX || prefix_length > PM_KEY_MAX) return pm_fail(PM_TOO_LONG, "a key is over the limit");
    if (capacity < PM_PAGE) return pm_fail(PM_INVALID, "too little room for a row");
    PM_TRY(enter(store));
    pm_key first = {from, from_length};
    return leave(store, pm_entries_scan(store, first, after, prefix, prefix_length, rows, capacity, used));
}

pm_status pm_last(pm_store *store, const uint8_t *prefix, size_t prefix_length, uint8_t *rows)
{
    /* The first key after all keys that start with the prefix: the prefix, counted up by one. */
    uint8_t end[PM_KEY_MAX + 1];
    if (!prefix_length || prefix_length > PM_KEY_MAX)
        return pm_fail(PM_INVALID, "the prefix must have 1 to %d bytes", PM_KEY_MAX);
    memcpy(end, prefix, prefix_length);
    size_t length = prefix_length;
    while (length && end[length - 1] == 0xff) length--;
    if (length) end[length - 1]++;
    else memset(end, 0xff, length = sizeof end);
    PM_TRY(enter(store));
    return leave(store, pm_entries_before(store, (pm_key){end, length}, prefix, prefix_length, rows));
}

/* ---- extents and buffers ----------------------------------------------------------------------------------------- */

pm_status pm_alloc(pm_store *store, uint64_t length, uint64_t *offset)
{
    if (!length) return pm_fail(PM_INVALID, "an extent of no bytes");
    PM_TRY(enter_to_write(store));
    return leave(store, pm_uncommitted_alloc(store, length, offset));
}

pm_status pm_free(pm_store *store, uint64_t offset, uint64_t length)
{
    PM_TRY(enter_to_write(store));
    const pm_uncommitted *found = pm_uncommitted_find(store, offset);
    if (!found || found->owned || found->length != length)
        return leave(store, pm_fail(PM_INVALID, "only an extent without an owner is freed by hand"));
    return leave(store, pm_uncommitted_free(store, offset, length));
}

static pm_status uncommitted_extent(const pm_store *store, uint64_t offset, uint64_t at, uint64_t length,
                                    pm_uncommitted **out)
{
    *out = pm_uncommitted_find(store, offset);
    if (!*out) return pm_fail(PM_INVALID, "only an extent allocated since the last commit is written like this");
    if (at > (*out)->length || length > (*out)->length - at)
        return pm_fail(PM_INVALID, "a write beyond the end of an extent");
    return PM_OK;
}

pm_status pm_write(pm_store *store, uint64_t offset, uint64_t at, const void *source, uint64_t length)
{
    pm_uncommitted *extent;
    PM_TRY(enter_to_write(store));
    pm_status status = uncommitted_extent(store, offset, at, length, &extent);
    if (status == PM_OK && length) status = pm_direct_write(store, extent, at, source, length);
    return leave(store, status);
}

pm_status pm_fill(pm_store *store, uint64_t offset, uint64_t length, const void *pattern, size_t pattern_length)
{
    pm_uncommitted *extent;
    if (!pattern_length || length % pattern_length)
        return pm_fail(PM_INVALID, "a pattern that does not fit into the extent");
    PM_TRY(enter_to_write(store));
    pm_status status = uncommitted_extent(store, offset, 0, length, &extent);
    if (status == PM_OK) status = pm_direct_fill(store, extent, length, pattern, pattern_length);
    return leave(store, status);
}

/* Checks an extent that the catalog names: the space map and the table of slots must agree (D9). */
static pm_status extent_valid(pm_store *store, uint64_t offset, uint64_t length)
{
    PM_TRY(pm_heap_check_extent(&store->region, offset, length));
    const pm_double_buffer *pair = pm_region_double_buffer_of(&store->region, offset);
    return pair && pair->length != length ? pm_fail(PM_CORRUPT, "an extent is damaged: its slots have another length")
                                            : PM_OK;
}

static pm_status verify(pm_store *store, uint64_t offset, uint64_t length, uint64_t count)
{
    if (pm_uncommitted_find(store, offset)) return PM_OK; /* it has no hashes yet */
    return pm_extent_check_committed(&store->region, offset, length, count);
}

pm_status pm_check_contents(pm_store *store, uint64_t offset, uint64_t length, uint64_t count)
{
    PM_TRY(enter(store));
    pm_status status = extent_valid(store, offset, length);
    if (status == PM_OK && count > length) status = pm_fail(PM_INVALID, "more bytes than the extent has");
    if (status == PM_OK) status = verify(store, offset, length, count);
    return leave(store, status);
}

pm_status pm_read(pm_store *store, uint64_t offset, uint64_t length, void *destination)
{
    PM_TRY(enter(store));
    pm_status status = extent_valid(store, offset, length);
    if (status == PM_OK && destination) status = verify(store, offset, length, length);
    if (status == PM_OK && destination) memcpy(destination, pm_region_live(&store->region, offset, length), length);
    return leave(store, status);
}

pm_status pm_readable(pm_store *store, uint64_t offset, uint64_t length, uint64_t at, uint64_t count)
{
    PM_TRY(enter(store));
    pm_status status = extent_valid(store, offset, length);
    uint64_t place = pm_region_place(&store->region, offset, length) + at;
    if (status == PM_OK) status = pm_region_readable(&store->region, store->region.live, place, count, "contents");
    return leave(store, status);
}

static pm_status new_buffer(pm_store *store, uint64_t offset, uint64_t length, bool writable, bool fixed,
                            pm_buffer **out)
{
    pm_buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer) return pm_fail(PM_NO_MEMORY, "no memory for a buffer");
    bool committed = !pm_uncommitted_find(store, offset);
    *buffer = (pm_buffer){.store = store, .address = store->region.live + offset, .offset = offset, .length = length,
                          .writable = writable, .fixed = fixed, .owned = true, .owned_at_commit = committed,
                          .committed = committed};
    atomic_store(&buffer->living, 1);
    pm_status status = pm_region_add_buffer(&store->region, buffer);
    if (status == PM_OK) *out = buffer;
    else free(buffer);
    return status;
}

pm_status pm_buffer_open(pm_store *store, uint64_t offset, uint64_t length, unsigned how, pm_buffer **out)
{
    PM_TRY(enter(store));
    pm_status status = extent_valid(store, offset, length);
    bool write = how & PM_BUFFER_WRITABLE && !store->media.read_only;
    offset = pm_region_place(&store->region, offset, length);
    pm_buffer *buffer = status == PM_OK ? pm_region_revive_buffer(&store->region, offset, length, write) : NULL;
    if (status == PM_OK && !buffer) status = new_buffer(store, offset, length, write, how & PM_BUFFER_FIXED, &buffer);
    if (status == PM_OK) {
        buffer->fixed |= (how & PM_BUFFER_FIXED) != 0; /* its earlier owner may not have declared it */
        pm_uncommitted *uncommitted = write ? pm_uncommitted_find(store, offset) : NULL;
        if (uncommitted) uncommitted->opened = true;
        atomic_fetch_add(&store->references, 1);
        *out = buffer;
    }
    return leave(store, status);
}

int pm_holds(pm_store *store, const void *address, uint64_t length, pm_range *ranges, size_t i)
{
    if (store->forked) return 0;
    pm_thread_lock(&store->mutex);
    bool holds = !store->closed && pm_only_holds(store, address, length);
    pm_thread_unlock(&store->mutex);
    if (holds) ranges[i] = (pm_range){(uint64_t)(uintptr_t)address, length};
    return holds;
}

void *pm_buffer_address(pm_buffer *buffer)
{
    return buffer->address;
}

void pm_buffer_release(pm_buffer *buffer, const void *address)
{
    (void)address;
    /* Once it is not living, another thread may free it or revive it. The reference keeps the store. */
    pm_store *store = buffer->store;
    atomic_store(&buffer->living, 0);
    release_reference(store);
}

pm_status pm_release(pm_store *store, uint64_t offset, uint64_t length)
{
    PM_TRY(enter(store));
    pm_status status = extent_valid(store, offset, length);
    if (status != PM_OK || pm_extent_is_small(length) || store->media.read_only) return leave(store, status);
    uint64_t place = pm_region_place(&store->region, offset, length);
    status = pm_write_slots_fill_mapped(store, place, length);
    return leave(store, status == PM_OK ? pm_region_release(&store->region, place, length) : status);
}

/* ---- inspection -------------------------------------------------------------------------------------------------- */

pm_status pm_stats(pm_store *store, pm_statistics *out)
{
    PM_TRY(enter(store));
    pm_status status;
    const pm_root *root = pm_heap_root(&store->region, &status);
    *out = store->statistics;
    out->sequence = store->log.sequence, out->durable_sequence = store->log.durable;
    out->fences = store->media.fences, out->syncs = store->media.syncs;
    out->file_size = store->media.size;
    out->region_size = store->region.size, out->region_used = pm_heap_used(&store->region) * PM_PAGE;
    out->log_size = store->log.header.log_size, out->log_used = store->log.head;
    out->buffers = store->region.buffer_count;
    out->keys = root ? root->keys : 0;
    out->max_size = store->max_size;
    return leave(store, status);
}

pm_status pm_count_keys(pm_store *store, uint64_t *keys)
{
    PM_TRY(enter(store));
    pm_status status;
    const pm_root *root = pm_heap_root(&store->region, &status);
    *keys = root ? root->keys : 0;
    return leave(store, status);
}

const char *pm_tracker_in_use(pm_store *store)
{
    pm_tracker_kind kind = PM_TRACKER_COMPARE;
    if (enter(store) == PM_OK) {
        if (!store->media.read_only) kind = pm_policy_kind(&store->region.policy);
        leave(store, PM_OK);
    }
    return pm_tracker_name(kind);
}

pm_status pm_pending(pm_store *store, uint8_t **rows, size_t *length)
{
    PM_TRY(enter_to_write(store));
    return leave(store, pm_pending_rows(store, rows, length));
}

pm_status pm_check(pm_store *store, pm_report **out)
{
    PM_TRY(enter(store));
    return leave(store, pm_verify(store, out));
}

pm_status pm_state_hash(pm_store *store, uint64_t *hash)
{
    PM_TRY(enter_even(store, true));
    return leave(store, pm_catalog_hash(&store->region, hash));
}
