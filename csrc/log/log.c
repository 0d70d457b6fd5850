#include "log/log.h"

#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "base/hash.h"
#include "media/lines.h"

enum { LOG_LEAST = 4 * PM_PAGE, LOG_MOST = 128 << 20 }; /* bounds of a header's log_size */

/* ---- header ----------------------------------------------------------------------------------------------- */

uint64_t pm_log_new_id(const pm_media *media)
{
    uint64_t value = media->trace ? pm_trace_id(media->trace) : 0;
    if (value) return value;
    if (getrandom(&value, sizeof value, 0) != sizeof value) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        value = pm_keyed_checksum((uint64_t)now.tv_nsec, (uint64_t)now.tv_sec, (uint64_t)getpid());
    }
    return value ? value : 1;
}

bool pm_log_header_valid(const pm_header *header)
{
    if (memcmp(header->magic, PM_MAGIC, sizeof PM_MAGIC)) return false;
    if (!header->version) return header->write_features == pm_crc32c(header, offsetof(pm_header, write_features), 0);
    return header->crc == pm_crc32c(header, offsetof(pm_header, crc), 0);
}

/* The fields that format 0 does not have are 0. Its first writer makes it format 1, with the first header. */
static void from_format_0(pm_header *header)
{
    size_t end = offsetof(pm_header, write_features);
    memset((uint8_t *)header + end, 0, sizeof *header - end);
}

void pm_log_header_finish(pm_header *header)
{
    header->version = PM_FORMAT_VERSION;
    header->crc = pm_crc32c(header, offsetof(pm_header, crc), 0);
}

/* good: the copy that is known to be valid. */
static pm_status header_write(pm_media *media, pm_header *header, unsigned good)
{
    pm_log_header_finish(header);
    /* durable: the other copy → then: the good one. Otherwise a crash in here could tear the only valid copy. Both are
     * durable before any record under the new salt, so that if a single copy rots later, the other one describes the
     * same log. */
    PM_TRY(media->operations->write_through(media, (1 - good) * PM_PAGE, header, sizeof *header));
    return media->operations->write_through(media, good * PM_PAGE, header, sizeof *header);
}

static pm_status layout_valid(const pm_header *header, const pm_media *media)
{
    if (header->region_size < 4 * PM_PAGE || header->region_size % PM_PAGE || header->region_size > PM_REGION_LIMIT)
        return pm_fail(PM_CORRUPT, "the header is damaged: impossible region size");
    if (header->log_offset != PM_REGION_START + header->region_size || header->log_size < LOG_LEAST ||
        header->log_size % PM_PAGE || header->log_size > LOG_MOST)
        return pm_fail(PM_CORRUPT, "the header is damaged: impossible log");
    if (header->log_offset + header->log_size > media->size)
        return pm_fail(PM_CORRUPT, "the file is truncated: it has %llu bytes, and its header needs %llu",
                       (unsigned long long)media->size, (unsigned long long)(header->log_offset + header->log_size));
    return PM_OK;
}

/* Finds the copies of the header that the disk can't read. */
static void find_lost(const pm_media *media, bool *lost)
{
    uint64_t size = media->size < PM_REGION_START ? media->size : PM_REGION_START;
    if (pm_media_readable(media, 0, size, "the header") == PM_OK) return;
    for (uint64_t copy = 0; copy * PM_PAGE < size; copy++)
        lost[copy] = pm_media_readable(media, copy * PM_PAGE, 1, "the header") != PM_OK;
}

/* A copy that can't be read stays zeros, which are never valid. */
static pm_status read_copies(const pm_media *media, pm_header *copies, const bool *lost)
{
    bool store = !lost[0] && media->size >= sizeof PM_MAGIC && !memcmp(media->view, PM_MAGIC, sizeof PM_MAGIC);
    if (!store && !lost[1] && media->size >= PM_REGION_START)
        store = !memcmp(media->view + PM_PAGE, PM_MAGIC, sizeof PM_MAGIC);
    if (!store && (lost[0] || lost[1])) return PM_UNREADABLE;
    if (!store)
        return pm_fail(PM_NOT_A_STORE,
                       media->size ? "this file is not a pmstore store" : "the file is empty, not a store");
    if (media->size < PM_REGION_START) return pm_fail(PM_CORRUPT, "the file is truncated: its headers are cut off");
    if (!lost[0]) memcpy(&copies[0], media->view, sizeof copies[0]);
    if (!lost[1]) memcpy(&copies[1], media->view + PM_PAGE, sizeof copies[1]);
    return PM_OK;
}

/* Replaces an unreadable copy by the other one. It writes the whole page, because the old page can't be read, and later
 * writes of a header or a durable marker change only a part of it. */
static pm_status mend_lost(pm_log *log, unsigned copy)
{
    uint8_t page[PM_PAGE] __attribute__((aligned(PM_LINE))) = {0};
    pm_header header = log->header;
    pm_log_header_finish(&header);
    memcpy(page, &header, sizeof header);
    return log->media->operations->write_through(log->media, copy * PM_PAGE, page, sizeof page);
}

static pm_status format_known(const pm_header *header)
{
    if (header->version <= PM_FORMAT_VERSION) return PM_OK;
    return pm_fail(PM_VERSION,
                   "the store has format version %u; this pmstore reads versions up to %d: use a newer pmstore",
                   header->version, PM_FORMAT_VERSION);
}

/* No bit is known yet. The first one needs a mask here and in pmstore/_store/file_format.py. */
static pm_status features_known(const pm_header *header, bool read_only)
{
    if (header->features)
        return pm_fail(PM_VERSION, "the store uses features (%#x) that this pmstore does not know: use a newer one",
                       header->features);
    if (header->write_features && !read_only)
        return pm_fail(PM_VERSION, "the store uses features (%#x) that this pmstore can't write: use a newer one, or "
                                   "open the store with mode='r'", header->write_features);
    return PM_OK;
}

pm_status pm_log_open(pm_log *log, pm_media *media)
{
    *log = (pm_log){.media = media, .read_only = media->read_only};
    pm_header copies[2] = {0};
    find_lost(media, log->lost);
    PM_TRY(read_copies(media, copies, log->lost));
    bool valid[2] = {pm_log_header_valid(&copies[0]), pm_log_header_valid(&copies[1])};
    const pm_header *best = NULL;
    if (valid[0]) best = &copies[0];
    if (valid[1] && (!best || copies[1].generation > best->generation)) best = &copies[1];
    if (!best) {
        /* A later format may check its header in another way. */
        if (copies[0].version == copies[1].version && copies[0].version > PM_FORMAT_VERSION && copies[0].version < 1000)
            best = copies;
        if (!best && (log->lost[0] || log->lost[1])) return PM_UNREADABLE;
        if (!best) return pm_fail(PM_CORRUPT, "both copies of the header are damaged");
    }
    PM_TRY(format_known(best));
    log->copy = best == &copies[1];
    log->half_written = memcmp(&copies[0], &copies[1], sizeof copies[0]) != 0;
    log->header = *best;
    if (!best->version) from_format_0(&log->header);
    PM_TRY(features_known(&log->header, log->read_only));
    PM_TRY(layout_valid(&log->header, media));
    log->sequence = log->durable = best->sequence;
    log->digest = best->digest;
    memcpy(log->slots, best->slots, sizeof log->slots);
    bool mends = log->lost[1 - log->copy] && !log->read_only;
    return mends ? mend_lost(log, 1 - log->copy) : PM_OK;
}

pm_status pm_log_format(pm_media *media, uint64_t region_size, uint64_t log_size, uint64_t store_id, pm_digest digest)
{
    pm_header header = {.store_id = store_id,
                        .generation = 1,
                        .salt = pm_log_new_id(media),
                        .region_size = region_size,
                        .log_offset = PM_REGION_START + region_size,
                        .log_size = log_size,
                        .digest = digest,
                        .flags = PM_HEADER_CLEAN};
    memcpy(header.magic, PM_MAGIC, sizeof PM_MAGIC);
    return header_write(media, &header, 1);
}

pm_status pm_log_reset(pm_log *log, pm_header next)
{
    next.generation = log->header.generation + 1;
    next.salt = pm_log_new_id(log->media);
    next.sequence = log->sequence;
    next.digest = log->digest;
    memcpy(next.slots, log->slots, sizeof next.slots);
    next.log_offset = PM_REGION_START + next.region_size;
    log->half_written = true; /* unless it succeeds */
    PM_TRY(header_write(log->media, &next, log->copy));
    log->half_written = false;
    log->header = next;
    log->head = 0;
    log->durable = log->sequence;
    return PM_OK;
}

/* ---- writing ---------------------------------------------------------------------------------------------- */

/* Writes to the page cache, where the record outlives this process. The order does not matter: the hash ties body and
 * record together. */
static pm_status append_lazily(pm_log *log, pm_writer *writer, const pm_record *record, uint64_t place, uint64_t length)
{
    if (!writer->written) return pm_media_write(log->media, place, writer->stage, length, PM_WRITE_CACHED);
    uint64_t from = sizeof *record + writer->written;
    const uint8_t *rest = pm_writer_staged(writer, writer->written);
    PM_TRY(pm_media_write(log->media, place + from, rest, length - from, PM_WRITE_CACHED));
    return pm_media_write(log->media, place, record, sizeof *record, PM_WRITE_CACHED);
}

uint64_t pm_log_room(const pm_log *log)
{
    uint64_t taken = log->head + sizeof(pm_record) + PM_PAGE;
    return taken < log->header.log_size ? log->header.log_size - taken : 0;
}

pm_status pm_log_append(pm_log *log, pm_writer *writer, pm_digest digest, bool lazy)
{
    PM_TRY(writer->status);
    PM_CHECK(!writer->overflow && !writer->counting && pm_writer_length(writer) <= pm_log_room(log));
    pm_media *media = log->media;
    uint64_t body = pm_writer_length(writer);
    uint64_t place = log->header.log_offset + log->head;
    uint64_t length = pm_round_up(sizeof(pm_record) + body, media->log_unit);
    pm_record record = {.magic = PM_RECORD_MAGIC, .kind = PM_RECORD_COMMIT, .pages = media->log_unit == PM_PAGE,
                        .sequence = log->sequence + 1,
                        .salt = log->header.salt, .length = (uint32_t)length, .body = (uint32_t)body,
                        .hash = pm_writer_hash(writer), .digest = digest,
                        .behind = (uint32_t)(log->sequence + 1 - log->durable)};
    record.crc = pm_crc32c(&record, offsetof(pm_record, crc), (uint32_t)place);
    memcpy(writer->stage, &record, sizeof record);
    size_t padding = length - sizeof record - body;
    memset(pm_writer_staged(writer, body), 0, padding);
    /* durable: direct writes, pieces, record → then: acknowledge, and write to the committed image. Otherwise a power
     * cut forgets an acknowledged commit, or keeps half of its changes to the committed image (I1, I3). */
    if (lazy) {
        PM_TRY(append_lazily(log, writer, &record, place, length));
    } else if (!writer->written) {
        PM_TRY(media->operations->write_through(media, place, writer->stage, length));
    } else {
        /* Most of it is on its way already, in any order: the hash ties it together, not a fence. */
        uint64_t from = sizeof record + writer->written, first = writer->part ? PM_PAGE : sizeof record;
        PM_TRY(pm_media_write(media, place + from, pm_writer_staged(writer, writer->written), length - from,
                              writer->part ? PM_WRITE_BEGIN : PM_WRITE_STREAM));
        PM_TRY(media->operations->write_through(media, place, writer->stage, first));
    }
    log->head += length;
    log->sequence++;
    log->digest = digest;
    if (!lazy) log->durable = log->sequence;
    return PM_OK;
}

static uint64_t marker_checksum(const pm_log *log, uint64_t sequence)
{
    return pm_keyed_checksum(pm_hash64(&sequence, sizeof sequence, 0), log->header.salt, log->header.store_id);
}

pm_status pm_log_durable_marker(const pm_log *log, uint64_t sequence)
{
    pm_durable_marker marker = {sequence, marker_checksum(log, sequence)};
    PM_TRY(pm_media_write(log->media, PM_DURABLE_MARKER_PLACE, &marker, sizeof marker, PM_WRITE_CACHED));
    /* Readers see it before what is written next, the committed image (I19). Neither streamed stores nor those of
     * aarch64 wait for earlier ones. */
    if (log->media->byte_addressable) pm_lines_order(false);
    return PM_OK;
}

/* ---- reading ---------------------------------------------------------------------------------------------- */

static const pm_record *header_at(const pm_log *log, uint64_t at)
{
    if (at + sizeof(pm_record) > log->header.log_size) return NULL;
    uint64_t place = log->header.log_offset + at;
    const pm_record *record = (const void *)(log->media->view + place);
    if (record->magic != PM_RECORD_MAGIC || record->salt != log->header.salt) return NULL;
    if (record->crc != pm_crc32c(record, offsetof(pm_record, crc), (uint32_t)place)) return NULL;
    if (record->kind != PM_RECORD_COMMIT || record->length % PM_LINE || record->length < sizeof *record ||
        record->length > log->header.log_size - at || record->body > record->length - sizeof *record ||
        !record->behind || record->behind > record->sequence)
        return NULL;
    return record;
}

static bool body_valid(const pm_log *log, const pm_record *record, uint64_t at)
{
    uint64_t place = log->header.log_offset + at + sizeof *record;
    return pm_writer_body_hash(log->media->view + place, record->body, place, record->salt) == record->hash;
}

const pm_record *pm_log_record(const pm_log *log, uint64_t at, uint64_t sequence)
{
    const pm_record *record = header_at(log, at);
    return record && record->sequence == sequence && body_valid(log, record, at) ? record : NULL;
}

uint64_t pm_log_marked_durable(const pm_log *log)
{
    pm_durable_marker marker;
    if (log->lost[0]) return 0;
    memcpy(&marker, log->media->view + PM_DURABLE_MARKER_PLACE, sizeof marker);
    return marker.checksum == marker_checksum(log, marker.sequence) ? marker.sequence : 0;
}

bool pm_log_knows_durable(const pm_log *log, uint64_t from, uint64_t sequence)
{
    if (pm_log_marked_durable(log) >= sequence) return true;
    uint64_t left = log->header.log_size; /* bytes to hash: genuine records do not overlap, so they have no more */
    for (uint64_t at = from; at + sizeof(pm_record) <= log->header.log_size; at += PM_LINE) {
        const pm_record *record = header_at(log, at);
        if (!record || record->sequence - record->behind < sequence || record->body > left) continue;
        if (body_valid(log, record, at)) return true;
        left -= record->body;
    }
    return false;
}

bool pm_log_next(const uint8_t *body, uint64_t length, uint64_t *cursor, pm_log_item *item)
{
    pm_item head;
    if (*cursor >= length || length - *cursor < sizeof head) return false;
    memcpy(&head, body + *cursor, sizeof head);
    item->kind = (unsigned)(head.kind_length >> 56);
    item->offset = head.offset;
    item->length = head.kind_length & (UINT64_MAX >> 8);
    item->bytes = body + *cursor + sizeof head;
    uint64_t bytes = item->kind == PM_ITEM_LOGGED ? item->length : sizeof(pm_direct);
    if (item->kind < PM_ITEM_LOGGED || item->kind > PM_ITEM_SLOT) return false;
    if (bytes > length - *cursor - sizeof head) return false;
    *cursor += sizeof head + bytes;
    return true;
}

bool pm_log_items_valid(uint64_t region_size, const uint8_t *body, uint64_t length, bool overflowed)
{
    pm_log_item item;
    uint64_t cursor = 0;
    while (pm_log_next(body, length, &cursor, &item)) {
        bool direct = pm_log_is_direct(&item);
        uint64_t size = direct && item.length < PM_REGION_LIMIT ? pm_extent_size(item.length) : item.length;
        /* The root's page has offset 0, which pm_region_holds takes for "none". */
        if (!item.length || item.offset >= region_size || size > region_size - item.offset) return false;
        if (direct && item.offset % PM_PAGE) return false;
        if (item.kind == PM_ITEM_SLOT && pm_log_direct(&item).slot >= 2 * PM_SLOTS_MOST) return false;
        if (item.kind == PM_ITEM_OVERFLOW && (overflowed || item.offset % PM_PAGE || cursor != length)) return false;
    }
    return cursor == length;
}
