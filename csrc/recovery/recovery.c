#include "recovery/recovery.h"

#include <stdlib.h>

#include "space/extent.h"
#include "space/region_image.h"
#include "commit/checkpoint.h"

/* ---- scanning ----------------------------------------------------------------------------------------------- */

/* Follows a record whose items are in free pages of the region instead of the log. *valid: the items match the
 * record. */
static pm_status follow_overflow(pm_store *store, pm_recovery_body *body, bool *valid)
{
    pm_log_item item;
    uint64_t cursor = 0;
    *valid = true;
    if (!pm_log_next(body->body, body->length, &cursor, &item) || item.kind != PM_ITEM_OVERFLOW) return PM_OK;
    uint64_t place = PM_REGION_START + item.offset;
    const uint8_t *overflowed = store->media.view + place;
    PM_TRY(pm_media_readable(&store->media, place, item.length, "a commit's list of changes"));
    *valid = pm_writer_body_hash(overflowed, item.length, place, store->log.header.salt) == pm_log_direct(&item).hash;
    if (!*valid) return PM_OK;
    body->body = overflowed, body->length = item.length, body->overflow = place;
    *valid = pm_log_items_valid(store->region.size, overflowed, item.length, true);
    return PM_OK;
}

/* Verifies the contents that a record declares. They may not have been durable before the record: so they are verified
 * for the newest record, and for all records that no durable bytes vouch for (I14). The contents that others declared
 * may have changed in their place since. */
static pm_status directs_valid(pm_store *store, const pm_recovery_body *body, bool *valid)
{
    const pm_region *region = &store->region;
    const uint8_t *committed = store->media.view + PM_REGION_START;
    pm_log_item item;
    for (uint64_t cursor = 0; *valid && pm_log_next(body->body, body->length, &cursor, &item);) {
        if (!pm_log_is_direct(&item)) continue;
        uint64_t block, place = item.offset + pm_extent_table(item.length), size = 8 * pm_extent_blocks(item.length);
        pm_status status = pm_region_readable(region, committed, place, size, "the hashes of a new array");
        uint64_t hash = pm_log_direct(&item).hash;
        if (status == PM_OK && pm_extent_table_hash(region, committed + place, size, place) != hash)
            status = PM_CORRUPT;
        if (status == PM_OK)
            status = pm_extent_check(region, committed, item.offset, item.length, item.length, &block);
        if (status == PM_UNREADABLE) return status;
        *valid = status == PM_OK;
    }
    return PM_OK;
}

/* Checks what a record refers to outside of the log. unsure: it may never have been written. */
static pm_status references_valid(pm_store *store, pm_recovery_body *body, bool unsure, bool *valid)
{
    PM_TRY(follow_overflow(store, body, valid));
    return unsure ? directs_valid(store, body, valid) : PM_OK;
}

pm_status pm_recovery_add(pm_recovery_log *found, const pm_record *record, uint64_t place)
{
    if (found->count == found->room) {
        size_t room = found->room ? 2 * found->room : 64;
        pm_recovery_body *bodies = realloc(found->bodies, room * sizeof *bodies);
        if (!bodies) return pm_fail(PM_NO_MEMORY, "no memory to recover the store");
        found->bodies = bodies, found->room = room;
    }
    found->bodies[found->count++] = (pm_recovery_body){.body = (const uint8_t *)(record + 1), .length = record->body,
                                                 .place = place, .record_length = record->length,
                                                 .digest = record->digest, .sequence = record->sequence,
                                                 .pages = record->pages == 1};
    uint64_t knows = record->sequence - record->behind;
    if (knows > found->recorded) found->recorded = knows;
    if (knows > found->durable) found->durable = knows;
    return PM_OK;
}

/* True if no logged range writes over items that are in the region, which are read while ranges are applied. A store
 * puts such items into free pages, and empties the log at once. So a file with such a range, or with a second such
 * record, is damaged or forged (D9). */
static bool overflow_stays(const pm_recovery_log *found)
{
    const pm_recovery_body *overflowed = NULL;
    for (size_t i = 0; i < found->count; i++) {
        if (!found->bodies[i].overflow) continue;
        if (overflowed) return false;
        overflowed = &found->bodies[i];
    }
    for (size_t i = 0; overflowed && i < found->count; i++) {
        uint64_t from = overflowed->overflow - PM_REGION_START, to = from + overflowed->length;
        pm_log_item item;
        for (uint64_t cursor = 0; pm_log_next(found->bodies[i].body, found->bodies[i].length, &cursor, &item);)
            if (item.kind == PM_ITEM_LOGGED && item.offset < to && from < item.offset + item.length) return false;
    }
    return true;
}

pm_status pm_recovery_scan(pm_store *store, pm_recovery_log *found)
{
    pm_log *log = &store->log;
    uint64_t at = 0, marked_durable = pm_log_marked_durable(log);
    const pm_record *record;
    /* A block that can't be read may be part of an acknowledged record, wherever it is (D6). */
    PM_TRY(pm_media_readable(log->media, log->header.log_offset, log->header.log_size, "the log"));
    found->recorded = log->sequence;
    found->durable = log->sequence > marked_durable ? log->sequence : marked_durable;
    while ((record = pm_log_record(log, at, log->sequence + 1))) {
        const uint8_t *body = (const uint8_t *)(record + 1);
        if (!pm_log_items_valid(store->region.size, body, record->body, false))
            return pm_fail(PM_CORRUPT, "the log is damaged: commit %llu points outside the store",
                           (unsigned long long)record->sequence);
        PM_TRY(pm_recovery_add(found, record, log->header.log_offset + at));
        log->sequence++;
        at += record->length;
    }
    /* A bad record is the end of the log, unless later bytes show that it was durable (D6). */
    if (pm_log_knows_durable(log, at, log->sequence + 1))
        return pm_fail(PM_CORRUPT, "the log is damaged: commit %llu was durable, and can't be read any more",
                       (unsigned long long)(log->sequence + 1));
    for (size_t i = 0; i < found->count; i++) {
        pm_recovery_body *body = &found->bodies[i];
        bool unsure = body->sequence > found->durable || i + 1 == found->count, valid;
        PM_TRY(references_valid(store, body, unsure, &valid));
        if (valid) continue;
        if (body->sequence <= found->durable || pm_log_knows_durable(log, at, body->sequence))
            return pm_fail(PM_CORRUPT, "the log is damaged: an acknowledged commit has lost its contents");
        /* It was never durable, as contents and record share one ordering point. Nor were the records after it. */
        log->sequence = body->sequence - 1;
        found->count = i;
    }
    if (!overflow_stays(found))
        return pm_fail(PM_CORRUPT, "the log is damaged: a commit would write over its own list of changes");
    if (found->count) log->digest = found->bodies[found->count - 1].digest;
    return PM_OK;
}

/* ---- applying ----------------------------------------------------------------------------------------------- */

static pm_status note_declared(pm_store *store, pm_recovery_log *found)
{
    for (size_t i = 0; i < found->count; i++) {
        pm_log_item item;
        for (uint64_t cursor = 0; pm_log_next(found->bodies[i].body, found->bodies[i].length, &cursor, &item);) {
            if (!pm_log_is_direct(&item)) continue;
            if (!found->declared && !(found->declared = calloc(store->region.size / PM_PAGE, sizeof *found->declared)))
                return pm_fail(PM_NO_MEMORY, "no memory to recover the store");
            uint64_t end = (item.offset + pm_extent_size(item.length) + PM_PAGE - 1) / PM_PAGE;
            for (uint64_t page = item.offset / PM_PAGE; page < end; page++) found->declared[page] = (uint32_t)i + 1;
        }
    }
    return PM_OK;
}

/* Brings the private mapping up to date. For salvage, a page that can't be read stays so. */
static pm_status write_private(pm_region *region, uint64_t offset, const uint8_t *bytes, uint64_t length)
{
    for (uint64_t at = 0, part; at < length; at += part) {
        part = region->salvage ? PM_PAGE - (offset + at) % PM_PAGE : length;
        if (part > length - at) part = length - at;
        pm_status status = pm_region_make_private(region, offset + at, part, "what a commit has changed in part");
        if (status != PM_OK && region->salvage) continue;
        PM_TRY(status);
        memcpy(region->live + offset + at, bytes + at, part);
    }
    return PM_OK;
}

static pm_status write_committed(pm_store *store, uint64_t offset, const uint8_t *bytes, uint64_t length)
{
    if (store->media.read_only) return write_private(&store->region, offset, bytes, length);
    return pm_region_write(&store->region, offset, bytes, length, PM_WRITE_STREAM);
}

/* True if no later record declares the page's contents (I8). */
static bool applies_to(const pm_recovery_log *found, size_t record, uint64_t page)
{
    return !found->declared || found->declared[page] <= record + 1;
}

static pm_status apply_range(pm_store *store, const pm_recovery_log *found, size_t record, const pm_log_item *item)
{
    if (!found->declared) return write_committed(store, item->offset, item->bytes, item->length);
    for (uint64_t at = item->offset, end = at + item->length; at < end;) {
        uint64_t page_end = at - at % PM_PAGE + PM_PAGE;
        if (page_end > end) page_end = end;
        if (applies_to(found, record, at / PM_PAGE))
            PM_TRY(write_committed(store, at, item->bytes + (at - item->offset), page_end - at));
        at = page_end;
    }
    return PM_OK;
}

/* Writes bytes again that are only in the page cache. After a failed write, the kernel may take their pages for
 * clean. */
static pm_status write_again(pm_store *store, uint64_t place, uint64_t length)
{
    uint8_t copy[PM_PAGE];
    for (uint64_t at = place, end = place + length; at < end; at += PM_PAGE) {
        size_t bytes = end - at < PM_PAGE ? end - at : PM_PAGE;
        memcpy(copy, store->media.view + at, bytes);
        PM_TRY(pm_media_write(&store->media, at, copy, bytes, PM_WRITE_STREAM));
    }
    return PM_OK;
}

static pm_status write_record_again(pm_store *store, const pm_recovery_body *body)
{
    pm_log_item item;
    for (uint64_t cursor = 0; pm_log_next(body->body, body->length, &cursor, &item);)
        if (pm_log_is_direct(&item))
            PM_TRY(write_again(store, PM_REGION_START + item.offset, pm_extent_size(item.length)));
    if (body->overflow) PM_TRY(write_again(store, body->overflow, body->length));
    return write_again(store, body->place, body->record_length);
}

/* Makes adopted records durable, with everything that they declare. The newest record may be of a process that died, or
 * whose sync failed, before it was durable; so may all records that no durable bytes vouch for. */
static pm_status make_durable(pm_store *store, const pm_recovery_log *found)
{
    size_t unsure = 1;
    while (unsure < found->count && found->bodies[found->count - unsure - 1].sequence > found->durable) unsure++;
    for (size_t i = found->count - unsure; i < found->count; i++) PM_TRY(write_record_again(store, &found->bodies[i]));
    /* durable: the record and what it declares → then: the committed image. Otherwise a power cut, after a process was
     * killed in a commit, finds half of its changes to the committed image and no record (I3). */
    PM_TRY(store->media.operations->fence(&store->media));
    PM_TRY(pm_log_durable_marker(&store->log, store->log.sequence));
    /* durable: the marker → then: the committed image, where one record may change what another declares. If this
     * recovery crashes, the next one must not verify that (I4, I14). */
    if (store->log.sequence - found->recorded <= 1) return PM_OK;
    /* A process may have left these records on the medium `file`. */
    if (store->media.flushes)
        store->media.operations->flush(&store->media, PM_DURABLE_MARKER_PLACE, sizeof(pm_durable_marker));
    return store->media.operations->fence(&store->media);
}

static pm_status apply_records(pm_store *store, const pm_recovery_log *found)
{
    for (size_t i = 0; i < found->count; i++) {
        pm_log_item item;
        for (uint64_t cursor = 0; pm_log_next(found->bodies[i].body, found->bodies[i].length, &cursor, &item);)
            if (item.kind == PM_ITEM_LOGGED) PM_TRY(apply_range(store, found, i, &item));
    }
    return PM_OK;
}

enum { GROUP = PM_PAGE / sizeof(uint8_t *) }; /* so many pointers in `newest` fill a page of memory */

/* The place of each page's newest bytes. calloc gives memory only to groups that are used, and only they are looked
 * through. */
typedef struct {
    const uint8_t **newest;
    uint16_t *cut; /* the number of bytes, where an extent ends before its page does; 0: a whole page */
    bool *groups;
} found_pages;

/* Collects logged ranges of whole pages, as logs on disks have them. False: the log has other ranges, too. */
static bool newest_pages(const pm_recovery_log *found, found_pages *pages)
{
    for (size_t i = 0; i < found->count; i++) {
        pm_log_item item;
        for (uint64_t cursor = 0; pm_log_next(found->bodies[i].body, found->bodies[i].length, &cursor, &item);) {
            if (item.kind != PM_ITEM_LOGGED) continue;
            if (item.offset % PM_PAGE || (item.length % PM_PAGE && !found->bodies[i].pages)) return false;
            for (uint64_t at = 0; at < item.length; at += PM_PAGE) {
                uint64_t page = (item.offset + at) / PM_PAGE;
                if (!applies_to(found, i, page)) continue;
                pages->newest[page] = item.bytes + at;
                pages->cut[page] = (uint16_t)(item.length - at < PM_PAGE ? item.length - at : 0);
                pages->groups[page / GROUP] = true;
            }
        }
    }
    return true;
}

/* Writes a page that is cut as a whole: a crash may have left bytes there that the disk can't read. */
static pm_status apply_cut(pm_store *store, const found_pages *pages, uint64_t page)
{
    uint8_t whole[PM_PAGE] = {0};
    memcpy(whole, pages->newest[page], pages->cut[page]);
    return pm_region_write(&store->region, page * PM_PAGE, whole, PM_PAGE, PM_WRITE_CACHED);
}

/* Writes each page once, in the file's order. The disk works while the next pages are copied. */
static pm_status apply_pages(pm_store *store, const found_pages *pages)
{
    enum { BEGIN_WRITEBACK = 1 << 20 };
    pm_media *media = &store->media;
    const uint8_t *const *newest = pages->newest;
    uint64_t count = store->region.size / PM_PAGE, begun = 0;
    for (uint64_t page = 0; page < count;) {
        if (!newest[page]) {
            page++;
            while (page < count && page % GROUP == 0 && !pages->groups[page / GROUP]) page += GROUP;
            continue;
        }
        uint64_t end = page + 1, most = page + BEGIN_WRITEBACK / PM_PAGE;
        if (pages->cut[page]) {
            PM_TRY(apply_cut(store, pages, page));
        } else {
            while (end < count && end < most && newest[end] == newest[page] + (end - page) * PM_PAGE
                   && !pages->cut[end])
                end++;
            PM_TRY(
                pm_region_write(&store->region, page * PM_PAGE, newest[page], (end - page) * PM_PAGE, PM_WRITE_CACHED));
        }
        page = end;
        if (page * PM_PAGE - begun < BEGIN_WRITEBACK) continue;
        PM_TRY(media->operations->write_back(media, PM_REGION_START + begun, page * PM_PAGE - begun));
        begun = page * PM_PAGE;
    }
    return PM_OK;
}

static pm_status apply(pm_store *store, const pm_recovery_log *found)
{
    found_pages pages = {0};
    uint64_t count = store->region.size / PM_PAGE;
    if (store->media.log_unit == PM_PAGE && !store->media.read_only && found->count) {
        pages.newest = calloc(count, sizeof *pages.newest); /* if it is NULL, the slower way is taken */
        pages.cut = calloc(count, sizeof *pages.cut);
        pages.groups = calloc(count / GROUP + 1, sizeof *pages.groups);
    }
    bool once = pages.newest && pages.cut && pages.groups && newest_pages(found, &pages);
    pm_status status = once ? apply_pages(store, &pages) : apply_records(store, found);
    free(pages.newest);
    free(pages.cut);
    free(pages.groups);
    for (size_t i = 0; i < found->count; i++) {
        pm_log_item item;
        for (uint64_t cursor = 0; pm_log_next(found->bodies[i].body, found->bodies[i].length, &cursor, &item);)
            if (item.kind == PM_ITEM_SLOT) {
                uint64_t slot = pm_log_direct(&item).slot;
                pm_log_choose_slot(&store->log, (unsigned)(slot / 2), slot % 2);
            }
        store->statistics.records_replayed++;
    }
    return status;
}

pm_status pm_recovery_run(pm_store *store)
{
    if (store->log.header.flags & PM_HEADER_CLEAN) {
        /* Both copies agree before any record relies on them (see header_write in log/log.c). */
        bool mend = store->log.half_written && !store->media.read_only;
        return mend ? pm_checkpoint_make(store, true) : PM_OK;
    }
    pm_recovery_log found = {0};
    pm_status status = pm_recovery_scan(store, &found);
    if (status == PM_OK) status = note_declared(store, &found);
    if (status == PM_OK && found.count && !store->media.read_only) status = make_durable(store, &found);
    if (status == PM_OK) status = apply(store, &found);
    free(found.bodies);
    free(found.declared);
    if (status == PM_OK && store->media.read_only) return PM_OK;
    /* The file may be longer than the header says, and the records may have been in the page cache only. The
     * checkpoint's fence makes durable what was just written, and its header ends the old log. */
    if (status == PM_OK) status = pm_checkpoint_make(store, false);
    if (status != PM_NO_SPACE) return status;
    return pm_fail(PM_NO_SPACE, "there is no space to bring the file up to date with its log, as a copy shares its "
                                "blocks: nothing is lost; free some space, or open it with mode='r'");
}
