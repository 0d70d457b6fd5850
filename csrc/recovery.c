#include "recovery.h"

#include <stdlib.h>

typedef struct {
    const uint8_t *body;
    uint64_t length;
    uint64_t place, record; /* of the record: where in the file, and how many bytes */
    uint64_t spill;         /* file offset of the body, if it does not stand in the record */
    pm_digest digest; /* of the state after it */
    uint64_t sequence;
    bool pages; /* its runs are whole pages, or end with an extent */
} found_body;

typedef struct {
    found_body *bodies; /* of the valid records, in order */
    size_t count, room;
    uint64_t durable;   /* what is known to have been: up to this sequence, with all that the records declare */
    uint64_t recorded;  /* the same, as far as header and records know: the witness may not be durable itself */
    uint32_t *declared; /* per page of the region: 1 + the last record that declares it; NULL: none does */
} found_log;

/* ---- scanning ----------------------------------------------------------------------------------------------- */

/* An extent that was written in its place. */
static bool is_direct(const pm_log_item *item)
{
    return item->kind == PM_ITEM_DIRECT || item->kind == PM_ITEM_SLOT;
}

static pm_direct direct_of(const pm_log_item *item)
{
    pm_direct direct;
    memcpy(&direct, item->bytes, sizeof direct);
    return direct;
}

/* Every item lies inside the region, and nothing follows the last. */
static bool items_sound(const pm_region *region, const uint8_t *body, uint64_t length, bool spilled)
{
    pm_log_item item;
    uint64_t cursor = 0;
    while (pm_log_next(body, length, &cursor, &item)) {
        uint64_t size = is_direct(&item) && item.length < PM_REGION_LIMIT ? pm_extent_size(item.length) : item.length;
        /* The root's page has offset 0, which pm_region_holds takes for "none". */
        if (!item.length || item.offset >= region->size || size > region->size - item.offset) return false;
        if (is_direct(&item) && item.offset % PM_PAGE) return false;
        if (item.kind == PM_ITEM_SLOT && direct_of(&item).slot >= 2 * PM_SLOTS_MOST) return false;
        if (item.kind == PM_ITEM_SPILL && (spilled || item.offset % PM_PAGE || cursor != length)) return false;
    }
    return cursor == length;
}

/* A record's items may stand in free pages of the region instead of the log. *sound: they are what it says. */
static pm_status follow_spill(pm_store *store, found_body *body, bool *sound)
{
    pm_log_item item;
    uint64_t cursor = 0;
    *sound = true;
    if (!pm_log_next(body->body, body->length, &cursor, &item) || item.kind != PM_ITEM_SPILL) return PM_OK;
    uint64_t place = PM_REGION_START + item.offset;
    const uint8_t *spilled = store->media.view + place;
    PM_TRY(pm_media_readable(&store->media, place, item.length, "a commit's list of changes"));
    *sound = pm_body_hash(spilled, item.length, place, store->log.header.salt) == direct_of(&item).hash;
    if (!*sound) return PM_OK;
    body->body = spilled, body->length = item.length, body->spill = place;
    *sound = items_sound(&store->region, spilled, item.length, true);
    return PM_OK;
}

/* What a record declares was not surely durable before it. So it is verified, in the newest record, and in all that
 * nothing durable knows of (I14). Others may have been changed in their place since. */
static pm_status directs_sound(pm_store *store, const found_body *body, bool *sound)
{
    const pm_region *region = &store->region;
    const uint8_t *home = store->media.view + PM_REGION_START;
    pm_log_item item;
    for (uint64_t cursor = 0; *sound && pm_log_next(body->body, body->length, &cursor, &item);) {
        if (!is_direct(&item)) continue;
        uint64_t block, place = item.offset + pm_extent_table(item.length), size = 8 * pm_extent_blocks(item.length);
        pm_status status = pm_region_readable(region, home, place, size, "the hashes of a new array");
        if (status == PM_OK && pm_table_hash(region, home + place, size, place) != direct_of(&item).hash)
            status = PM_CORRUPT;
        if (status == PM_OK) status = pm_extent_check(region, home, item.offset, item.length, &block);
        if (status == PM_UNREADABLE) return status;
        *sound = status == PM_OK;
    }
    return PM_OK;
}

/* Whether what a record refers to outside of the log is what it says. unsure: it may never have been there. */
static pm_status references_sound(pm_store *store, found_body *body, bool unsure, bool *sound)
{
    PM_TRY(follow_spill(store, body, sound));
    return unsure ? directs_sound(store, body, sound) : PM_OK;
}

static pm_status add_body(found_log *found, const pm_record *record, uint64_t place)
{
    if (found->count == found->room) {
        size_t room = found->room ? 2 * found->room : 64;
        found_body *bodies = realloc(found->bodies, room * sizeof *bodies);
        if (!bodies) return pm_fail(PM_NO_MEMORY, "no memory to recover the store");
        found->bodies = bodies, found->room = room;
    }
    found->bodies[found->count++] = (found_body){.body = (const uint8_t *)(record + 1), .length = record->body,
                                                 .place = place, .record = record->length, .digest = record->digest,
                                                 .sequence = record->sequence, .pages = record->pages == 1};
    uint64_t knows = record->sequence - record->behind;
    if (knows > found->recorded) found->recorded = knows;
    if (knows > found->durable) found->durable = knows;
    return PM_OK;
}

/* Items that stand in the region are read while runs are written there. A store puts them into free pages, and empties
 * the log at once; a file where a run changes them, or with a second such record, is somebody else's work (D9). */
static bool spill_stays(const found_log *found)
{
    const found_body *spilled = NULL;
    for (size_t i = 0; i < found->count; i++) {
        if (!found->bodies[i].spill) continue;
        if (spilled) return false;
        spilled = &found->bodies[i];
    }
    for (size_t i = 0; spilled && i < found->count; i++) {
        uint64_t from = spilled->spill - PM_REGION_START, to = from + spilled->length;
        pm_log_item item;
        for (uint64_t cursor = 0; pm_log_next(found->bodies[i].body, found->bodies[i].length, &cursor, &item);)
            if (item.kind == PM_ITEM_RUN && item.offset < to && from < item.offset + item.length) return false;
    }
    return true;
}

static pm_status scan(pm_store *store, found_log *found)
{
    pm_log *log = &store->log;
    uint64_t at = 0, witnessed = pm_log_witnessed(log);
    const pm_record *record;
    /* A block that can't be read may be of a record that was acknowledged, wherever it is (D6). */
    PM_TRY(pm_media_readable(log->media, log->header.log_offset, log->header.log_size, "the log"));
    found->recorded = log->sequence;
    found->durable = log->sequence > witnessed ? log->sequence : witnessed;
    while ((record = pm_log_record(log, at, log->sequence + 1))) {
        const uint8_t *body = (const uint8_t *)(record + 1);
        if (!items_sound(&store->region, body, record->body, false))
            return pm_fail(PM_CORRUPT, "the log is damaged: commit %llu points outside the store",
                           (unsigned long long)record->sequence);
        PM_TRY(add_body(found, record, log->header.log_offset + at));
        log->sequence++;
        at += record->length;
    }
    /* A bad record is the end of the log, unless something later knows that it was durable (D6). */
    if (pm_log_knows_durable(log, at, log->sequence + 1))
        return pm_fail(PM_CORRUPT, "the log is damaged: commit %llu was durable, and can't be read any more",
                       (unsigned long long)(log->sequence + 1));
    for (size_t i = 0; i < found->count; i++) {
        found_body *body = &found->bodies[i];
        bool unsure = body->sequence > found->durable || i + 1 == found->count, sound;
        PM_TRY(references_sound(store, body, unsure, &sound));
        if (sound) continue;
        if (body->sequence <= found->durable || pm_log_knows_durable(log, at, body->sequence))
            return pm_fail(PM_CORRUPT, "the log is damaged: an acknowledged commit has lost its contents");
        /* It was never durable, for contents and record share one ordering point; nor were those behind it. */
        log->sequence = body->sequence - 1;
        found->count = i;
    }
    if (!spill_stays(found))
        return pm_fail(PM_CORRUPT, "the log is damaged: a commit would write over its own list of changes");
    if (found->count) log->digest = found->bodies[found->count - 1].digest;
    return PM_OK;
}

/* ---- applying ----------------------------------------------------------------------------------------------- */

static pm_status note_declared(pm_store *store, found_log *found)
{
    for (size_t i = 0; i < found->count; i++) {
        pm_log_item item;
        for (uint64_t cursor = 0; pm_log_next(found->bodies[i].body, found->bodies[i].length, &cursor, &item);) {
            if (!is_direct(&item)) continue;
            if (!found->declared && !(found->declared = calloc(store->region.size / PM_PAGE, sizeof *found->declared)))
                return pm_fail(PM_NO_MEMORY, "no memory to recover the store");
            uint64_t end = (item.offset + pm_extent_size(item.length) + PM_PAGE - 1) / PM_PAGE;
            for (uint64_t page = item.offset / PM_PAGE; page < end; page++) found->declared[page] = (uint32_t)i + 1;
        }
    }
    return PM_OK;
}

static pm_status write_home(pm_store *store, uint64_t offset, const uint8_t *bytes, uint64_t length)
{
    if (store->media.read_only) {
        PM_TRY(pm_region_make_private(&store->region, offset, length, "what a commit has changed in part"));
        memcpy(store->region.live + offset, bytes, length);
        return PM_OK;
    }
    return pm_home_write(&store->region, offset, bytes, length, PM_WRITE_STREAM);
}

/* No later record declares the page's contents (I8). */
static bool applies_to(const found_log *found, size_t record, uint64_t page)
{
    return !found->declared || found->declared[page] <= record + 1;
}

static pm_status apply_run(pm_store *store, const found_log *found, size_t record, const pm_log_item *item)
{
    if (!found->declared) return write_home(store, item->offset, item->bytes, item->length);
    for (uint64_t at = item->offset, end = at + item->length; at < end;) {
        uint64_t page_end = at - at % PM_PAGE + PM_PAGE;
        if (page_end > end) page_end = end;
        if (applies_to(found, record, at / PM_PAGE))
            PM_TRY(write_home(store, at, item->bytes + (at - item->offset), page_end - at));
        at = page_end;
    }
    return PM_OK;
}

/* Bytes of the file that are only in the page cache, perhaps on pages that the kernel takes for clean after a failed
 * write. */
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

static pm_status write_record_again(pm_store *store, const found_body *body)
{
    pm_log_item item;
    for (uint64_t cursor = 0; pm_log_next(body->body, body->length, &cursor, &item);)
        if (is_direct(&item)) PM_TRY(write_again(store, PM_REGION_START + item.offset, pm_extent_size(item.length)));
    if (body->spill) PM_TRY(write_again(store, body->spill, body->length));
    return write_again(store, body->place, body->record);
}

/* The newest record may be that of a process which died, or whose sync failed, before it was durable; so may all that
 * nothing durable knows of. Now that they are adopted they have to be, with all that they declare. */
static pm_status make_durable(pm_store *store, const found_log *found)
{
    size_t unsure = 1;
    while (unsure < found->count && found->bodies[found->count - unsure - 1].sequence > found->durable) unsure++;
    for (size_t i = found->count - unsure; i < found->count; i++) PM_TRY(write_record_again(store, &found->bodies[i]));
    /* durable: the record and what it declares → then: home. Otherwise a power cut, after a process was killed in a
     * commit, finds half of its home and no record (I3). */
    PM_TRY(store->media.operations->fence(&store->media));
    PM_TRY(pm_log_witness(&store->log, store->log.sequence));
    /* durable: that they are → then: home, where one may change what another declares: a recovery of this one must not
     * verify that (I4, I14). */
    return store->log.sequence - found->recorded > 1 ? store->media.operations->fence(&store->media) : PM_OK;
}

static pm_status apply_records(pm_store *store, const found_log *found)
{
    for (size_t i = 0; i < found->count; i++) {
        pm_log_item item;
        for (uint64_t cursor = 0; pm_log_next(found->bodies[i].body, found->bodies[i].length, &cursor, &item);)
            if (item.kind == PM_ITEM_RUN) PM_TRY(apply_run(store, found, i, &item));
    }
    return PM_OK;
}

enum { GROUP = PM_PAGE / sizeof(uint8_t *) }; /* pages whose places in `newest` are one page of memory */

/* Where each page's newest bytes stand: calloc gives memory to the groups that have any, and only they are looked
 * through. */
typedef struct {
    const uint8_t **newest;
    uint16_t *cut; /* how many there are, where an extent ends before its page does; 0: all */
    bool *groups;
} found_pages;

/* Runs of pages, as disks have them. False: others are in the log, too. */
static bool newest_pages(const found_log *found, found_pages *pages)
{
    for (size_t i = 0; i < found->count; i++) {
        pm_log_item item;
        for (uint64_t cursor = 0; pm_log_next(found->bodies[i].body, found->bodies[i].length, &cursor, &item);) {
            if (item.kind != PM_ITEM_RUN) continue;
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

/* A page that is cut is written whole all the same: the disk may be unable to read what a crash has left of it. */
static pm_status apply_cut(pm_store *store, const found_pages *pages, uint64_t page)
{
    uint8_t whole[PM_PAGE] = {0};
    memcpy(whole, pages->newest[page], pages->cut[page]);
    return pm_home_write(&store->region, page * PM_PAGE, whole, PM_PAGE, PM_WRITE_CACHED);
}

/* A disk gets each page once, in the file's order, and works while the next ones are copied. */
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
                pm_home_write(&store->region, page * PM_PAGE, newest[page], (end - page) * PM_PAGE, PM_WRITE_CACHED));
        }
        page = end;
        if (page * PM_PAGE - begun < BEGIN_WRITEBACK) continue;
        PM_TRY(media->operations->write_back(media, PM_REGION_START + begun, page * PM_PAGE - begun));
        begun = page * PM_PAGE;
    }
    return PM_OK;
}

static pm_status apply(pm_store *store, const found_log *found)
{
    found_pages pages = {0};
    uint64_t count = store->region.size / PM_PAGE;
    if (store->media.granule == PM_PAGE && !store->media.read_only && found->count) {
        pages.newest = calloc(count, sizeof *pages.newest); /* NULL: the slower way does it too */
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
                uint64_t slot = direct_of(&item).slot;
                pm_log_choose_slot(&store->log, (unsigned)(slot / 2), slot % 2);
            }
        store->statistics.records_replayed++;
    }
    return status;
}

pm_status pm_recover(pm_store *store)
{
    if (store->log.header.flags & PM_HEADER_CLEAN) {
        /* Both copies agree before any record relies on them (see header_write in log.c). */
        bool mend = store->log.half_written && !store->media.read_only;
        return mend ? pm_transaction_checkpoint(store, true) : PM_OK;
    }
    found_log found = {0};
    pm_status status = scan(store, &found);
    if (status == PM_OK) status = note_declared(store, &found);
    if (status == PM_OK && found.count && !store->media.read_only) status = make_durable(store, &found);
    if (status == PM_OK) status = apply(store, &found);
    free(found.bodies);
    free(found.declared);
    if (status == PM_OK && store->media.read_only) return PM_OK;
    /* The file may be longer than the header says, and the records may have been in the page cache only: the
     * checkpoint's fence covers what was just written, its header ends the old log. */
    if (status == PM_OK) status = pm_transaction_checkpoint(store, false);
    if (status != PM_NO_SPACE) return status;
    return pm_fail(PM_NO_SPACE, "there is no space to bring the file up to date with its log, as a copy shares its "
                                "blocks: nothing is lost; free some space, or open it with mode='r'");
}
