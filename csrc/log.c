#include "log.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "hash.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

enum { HUGE_PAGE = 2 << 20 };

enum { LOG_LEAST = 4 * PM_PAGE, LOG_MOST = 128 << 20 }; /* what a header may say */

/* ---- header ----------------------------------------------------------------------------------------------- */

uint64_t pm_new_id(const pm_media *media)
{
    uint64_t value = media->trace ? pm_trace_id(media->trace) : 0;
    if (value) return value;
    if (getrandom(&value, sizeof value, 0) != sizeof value) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        value = pm_seal((uint64_t)now.tv_nsec, (uint64_t)now.tv_sec, (uint64_t)getpid());
    }
    return value ? value : 1;
}

bool pm_header_sound(const pm_header *header)
{
    return !memcmp(header->magic, PM_MAGIC, sizeof PM_MAGIC) &&
           header->crc == pm_crc32c(header, offsetof(pm_header, crc), 0);
}

/* good: the copy that is known to be sound. */
static pm_status header_write(pm_media *media, pm_header *header, unsigned good)
{
    header->crc = pm_crc32c(header, offsetof(pm_header, crc), 0);
    /* durable: the other copy → then: the good one. Otherwise a crash in here could tear the only sound copy. Both
     * before any record under the new salt, so that whichever single copy rots later, the other one describes the same
     * log. */
    PM_TRY(media->operations->write_through(media, (1 - good) * PM_PAGE, header, sizeof *header));
    return media->operations->write_through(media, good * PM_PAGE, header, sizeof *header);
}

static pm_status layout_sound(const pm_header *header, const pm_media *media)
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

/* Which of the header's copies the disk can't read. */
static void find_lost(const pm_media *media, bool *lost)
{
    uint64_t size = media->size < PM_REGION_START ? media->size : PM_REGION_START;
    if (pm_media_readable(media, 0, size, "the header") == PM_OK) return;
    for (uint64_t copy = 0; copy * PM_PAGE < size; copy++)
        lost[copy] = pm_media_readable(media, copy * PM_PAGE, 1, "the header") != PM_OK;
}

/* A copy that can't be read is left as zeros, which are never sound. */
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

/* A copy that can't be read gets what the other one says, as a whole page, so that nobody has to read the old one.
 * Later writes of a header or a witness change a part of the page, and would. */
static pm_status mend_lost(pm_log *log, unsigned copy)
{
    uint8_t page[PM_PAGE] __attribute__((aligned(PM_LINE))) = {0};
    memcpy(page, &log->header, sizeof log->header);
    return log->media->operations->write_through(log->media, copy * PM_PAGE, page, sizeof page);
}

pm_status pm_log_open(pm_log *log, pm_media *media)
{
    *log = (pm_log){.media = media, .read_only = media->read_only};
    pm_header copies[2] = {0};
    find_lost(media, log->lost);
    PM_TRY(read_copies(media, copies, log->lost));
    bool sound[2] = {pm_header_sound(&copies[0]), pm_header_sound(&copies[1])};
    const pm_header *best = NULL;
    if (sound[0]) best = &copies[0];
    if (sound[1] && (!best || copies[1].generation > best->generation)) best = &copies[1];
    if (!best) {
        /* A later format may check its header in another way. */
        if (copies[0].version == copies[1].version && copies[0].version > PM_FORMAT_VERSION && copies[0].version < 1000)
            best = copies;
        if (!best && (log->lost[0] || log->lost[1])) return PM_UNREADABLE;
        if (!best) return pm_fail(PM_CORRUPT, "both copies of the header are damaged");
    }
    if (best->version != PM_FORMAT_VERSION)
        return pm_fail(PM_VERSION,
                       "the store has format version %u; this pmstore reads version %d: use a newer pmstore",
                       best->version, PM_FORMAT_VERSION);
    if (best->features)
        return pm_fail(PM_VERSION, "the store uses features (%#x) that this pmstore does not know: use a newer one",
                       best->features);
    PM_TRY(layout_sound(best, media));
    log->copy = best == &copies[1];
    log->half_written = memcmp(&copies[0], &copies[1], sizeof copies[0]) != 0;
    log->header = *best;
    log->sequence = log->durable = best->sequence;
    log->digest = best->digest;
    memcpy(log->slots, best->slots, sizeof log->slots);
    bool mends = log->lost[1 - log->copy] && !log->read_only;
    return mends ? mend_lost(log, 1 - log->copy) : PM_OK;
}

pm_status pm_log_format(pm_media *media, uint64_t region_size, uint64_t log_size, uint64_t store_id, pm_digest digest)
{
    pm_header header = {.version = PM_FORMAT_VERSION,
                        .store_id = store_id,
                        .generation = 1,
                        .salt = pm_new_id(media),
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
    next.salt = pm_new_id(log->media);
    next.sequence = log->sequence;
    next.digest = log->digest;
    memcpy(next.slots, log->slots, sizeof next.slots);
    next.log_offset = PM_REGION_START + next.region_size;
    log->half_written = true; /* if it fails */
    PM_TRY(header_write(log->media, &next, log->copy));
    log->half_written = false;
    log->header = next;
    log->head = 0;
    log->durable = log->sequence;
    return PM_OK;
}

/* ---- writing ---------------------------------------------------------------------------------------------- */

static uint64_t fold(uint64_t hash, uint64_t piece)
{
    return (hash << 7 | hash >> 57) * UINT64_C(0x9e3779b97f4a7c15) + piece;
}

static uint64_t piece_hash(const uint8_t *piece, uint64_t length, uint64_t place, uint64_t key)
{
    return pm_seal(pm_hash64(piece, length, 0), place, key);
}

uint64_t pm_body_hash(const uint8_t *body, uint64_t length, uint64_t place, uint64_t key)
{
    uint64_t hash = 0;
    for (uint64_t at = 0; at < length; at += PM_PIECE)
        hash = fold(hash, piece_hash(body + at, length - at < PM_PIECE ? length - at : PM_PIECE, place + at, key));
    return hash;
}

/* Behind the room: what one call may add, and the padding. */
static size_t stage_bytes(const pm_writer *writer)
{
    return PM_PAGE + writer->stage_size + 4 * PM_PAGE;
}

pm_status pm_writer_init(pm_writer *writer, pm_media *media)
{
    *writer = (pm_writer){.media = media};
    writer->stage_size = media->stage;
    writer->early = media->kind == PM_MEDIA_MEMORY;
    if (posix_memalign((void **)&writer->stage, media->part ? HUGE_PAGE : PM_PAGE, stage_bytes(writer)))
        return pm_fail(PM_NO_MEMORY, "no memory to gather commits in");
    return PM_OK;
}

void pm_writer_free(pm_writer *writer)
{
    if (writer->stage) writer->media->operations->settle(writer->media); /* nothing is fetched from there any more */
    free(writer->stage);
    writer->stage = NULL;
}

void pm_writer_begin(pm_writer *writer, uint64_t place, uint64_t capacity, uint64_t key, pm_body_how how)
{
    enum { IN_CACHE = 4 * PM_PIECE, AT_ONCE = 512 << 10 };
    /* One by one: compilers zero a struct of this size by `rep stos`, and loads of what that has stored wait until all
     * stores before it have left the store buffer: 0.2 µs, if the last 60 KB of them were streamed. */
    size_t large = writer->early ? IN_CACHE : AT_ONCE;
    writer->stage_room = how != PM_BODY_LARGE || large > writer->stage_size ? writer->stage_size : large;
    writer->place = place, writer->capacity = capacity, writer->key = key;
    writer->base = writer->written = writer->hashed = writer->hash = writer->last_end = writer->payload = 0;
    writer->part = how == PM_BODY_PARTS ? writer->media->part : 0;
    writer->used = writer->last_run = 0;
    writer->counting = writer->overflow = false;
    /* Parts of an attempt that came to nothing may still be on their way from the stage. */
    writer->status = writer->media->operations->settle(writer->media);
}

void pm_writer_count(pm_writer *writer)
{
    pm_writer_begin(writer, 0, UINT64_MAX, 0, PM_BODY_WHOLE);
    writer->counting = true;
}

static uint8_t *body_in_stage(pm_writer *writer)
{
    return writer->stage + PM_LINE;
}

static const uint8_t *staged(pm_writer *writer, uint64_t at)
{
    return body_in_stage(writer) + (at - writer->base);
}

/* Whole pieces of the body, up to `end`. What follows can't grow a run that stands in them. */
static void hash_pieces(pm_writer *writer, uint64_t end)
{
    for (uint64_t at = writer->hashed; at < end; at += PM_PIECE)
        writer->hash = fold(writer->hash, piece_hash(staged(writer, at), PM_PIECE, writer->place + at, writer->key));
    writer->hashed = end;
    writer->last_run = 0;
}

static void write_part(pm_writer *writer, uint64_t from, uint64_t to, pm_write_how how)
{
    if (to > writer->capacity) writer->overflow = true;
    else writer->status = pm_media_write(writer->media, writer->place + from, staged(writer, from), to - from, how);
    writer->written = to;
}

/* Writes the pieces that are whole. */
static void write_pieces(pm_writer *writer)
{
    uint64_t end = pm_writer_length(writer) / PM_PIECE * PM_PIECE;
    if (end <= writer->written) return;
    hash_pieces(writer, end);
    write_part(writer, writer->written, end, PM_WRITE_STREAM);
}

/* Lets the part that is whole leave for the disk: whole pages of the record but its first, from whole pages of the
 * stage. */
static void begin_part(pm_writer *writer)
{
    if (!writer->huge) {
        /* One piece of memory for the disk to fetch from, instead of 64: 1 % of 50 MB in rows takes 0.9 of the time.
         * From now on only: most stores have no record that is so long. Kernels that can't are no worse off. */
        writer->huge = true;
        madvise(writer->stage, stage_bytes(writer), MADV_HUGEPAGE);
        madvise(writer->stage, stage_bytes(writer), MADV_COLLAPSE);
    }
    uint64_t end = (PM_LINE + writer->used) / PM_PAGE * PM_PAGE - PM_LINE,
             from = writer->written ? writer->written : PM_PAGE - PM_LINE;
    hash_pieces(writer, end / PM_PIECE * PM_PIECE);
    write_part(writer, from, end, PM_WRITE_BEGIN);
}

/* Lets go of what is written, to make room in the stage. */
static void slide(pm_writer *writer)
{
    if (writer->counting) {
        writer->hashed = pm_writer_length(writer);
    } else {
        if (writer->part && writer->written) {
            /* What has left must not move before it has arrived. The first page waited for a header that comes by
             * itself now. */
            writer->status = writer->media->operations->settle(writer->media);
            if (writer->status == PM_OK)
                writer->status = pm_media_write(writer->media, writer->place, body_in_stage(writer), PM_PAGE - PM_LINE,
                                                PM_WRITE_STREAM);
        }
        writer->part = 0;
        if (writer->status == PM_OK) write_pieces(writer);
    }
    size_t gone = writer->hashed - writer->base;
    writer->base += gone;
    writer->used -= gone;
    memmove(body_in_stage(writer), body_in_stage(writer) + gone, writer->used);
    writer->last_run = 0;
}

static void make_room(pm_writer *writer)
{
    if (!writer->counting) {
        if (writer->early && pm_writer_length(writer) >= writer->written + PM_PIECE) write_pieces(writer);
        if (writer->part && writer->used >= writer->written + writer->part) begin_part(writer);
    }
    if (writer->used + PM_PAGE + 64 > writer->stage_room) slide(writer);
    /* After a failure the stage is only scribbled on. */
    if (writer->overflow || writer->status != PM_OK) writer->used = 0, writer->last_run = 0;
}

uint8_t *pm_writer_room(pm_writer *writer, uint64_t offset, size_t length)
{
    PM_CHECK(length <= PM_PAGE);
    make_room(writer);
    bool grows = writer->last_run && writer->last_end == offset;
    return body_in_stage(writer) + writer->used + (grows ? 0 : sizeof(pm_item));
}

void pm_writer_keep(pm_writer *writer, uint64_t offset, const uint8_t *bytes, size_t length)
{
    uint8_t *body = body_in_stage(writer);
    pm_item item;
    if (writer->last_run && writer->last_end == offset) {
        memmove(body + writer->used, bytes, length);
        memcpy(&item, body + writer->last_run - 1, sizeof item);
        item.kind_length += length;
        memcpy(body + writer->last_run - 1, &item, sizeof item);
    } else {
        memmove(body + writer->used + sizeof item, bytes, length);
        item = (pm_item){offset, pm_item_pack(PM_ITEM_RUN, length)};
        memcpy(body + writer->used, &item, sizeof item);
        writer->last_run = writer->used + 1;
        writer->used += sizeof item;
    }
    writer->used += length;
    writer->last_end = offset + length;
    writer->payload += length;
}

void pm_writer_direct(pm_writer *writer, unsigned kind, uint64_t offset, uint64_t length, pm_direct direct)
{
    make_room(writer);
    pm_item item = {offset, pm_item_pack(kind, length)};
    memcpy(body_in_stage(writer) + writer->used, &item, sizeof item);
    memcpy(body_in_stage(writer) + writer->used + sizeof item, &direct, sizeof direct);
    writer->used += sizeof item + sizeof direct;
    writer->last_run = 0;
}

/* The hash of the whole body: what is not yet hashed counts, whole or not. */
static uint64_t writer_hash(pm_writer *writer)
{
    uint64_t hash = writer->hash, end = pm_writer_length(writer);
    for (uint64_t at = writer->hashed; at < end; at += PM_PIECE)
        hash = fold(hash, piece_hash(staged(writer, at), end - at < PM_PIECE ? end - at : PM_PIECE, writer->place + at,
                                     writer->key));
    return hash;
}

pm_status pm_writer_finish(pm_writer *writer)
{
    PM_TRY(writer->status);
    PM_CHECK(!writer->overflow && !writer->counting);
    if (pm_writer_length(writer) > writer->capacity) {
        writer->overflow = true;
        return PM_OK;
    }
    writer->hash = writer_hash(writer);
    return pm_media_write(writer->media, writer->place + writer->written, staged(writer, writer->written),
                          pm_writer_length(writer) - writer->written, PM_WRITE_STREAM);
}

/* In the page cache, where it outlives this process. In any order: the hash ties body and record together. */
static pm_status append_lazily(pm_log *log, pm_writer *writer, const pm_record *record, uint64_t place, uint64_t length)
{
    if (!writer->written) return pm_media_write(log->media, place, writer->stage, length, PM_WRITE_CACHED);
    uint64_t from = sizeof *record + writer->written;
    PM_TRY(pm_media_write(log->media, place + from, staged(writer, writer->written), length - from, PM_WRITE_CACHED));
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
    uint64_t length = pm_round_up(sizeof(pm_record) + body, media->granule);
    pm_record record = {.magic = PM_RECORD_MAGIC, .kind = PM_RECORD_COMMIT, .pages = media->granule == PM_PAGE,
                        .sequence = log->sequence + 1,
                        .salt = log->header.salt, .length = (uint32_t)length, .body = (uint32_t)body,
                        .hash = writer_hash(writer), .digest = digest,
                        .behind = (uint32_t)(log->sequence + 1 - log->durable)};
    record.crc = pm_crc32c(&record, offsetof(pm_record, crc), (uint32_t)place);
    memcpy(writer->stage, &record, sizeof record);
    size_t padding = length - sizeof record - body;
    memset(body_in_stage(writer) + writer->used, 0, padding);
    /* durable: direct writes, pieces, record → then: acknowledge, and write home. Otherwise a power cut forgets an
     * acknowledged commit, or keeps half of its home (I1, I3). */
    if (lazy) {
        PM_TRY(append_lazily(log, writer, &record, place, length));
    } else if (!writer->written) {
        PM_TRY(media->operations->write_through(media, place, writer->stage, length));
    } else {
        /* Most of it is on its way already, in any order: the hash ties it together, not a fence. */
        uint64_t from = sizeof record + writer->written, first = writer->part ? PM_PAGE : sizeof record;
        PM_TRY(pm_media_write(media, place + from, staged(writer, writer->written), length - from,
                              writer->part ? PM_WRITE_BEGIN : PM_WRITE_STREAM));
        PM_TRY(media->operations->write_through(media, place, writer->stage, first));
    }
    log->head += length;
    log->sequence++;
    log->digest = digest;
    if (!lazy) log->durable = log->sequence;
    return PM_OK;
}

static uint64_t witness_seal(const pm_log *log, uint64_t sequence)
{
    return pm_seal(pm_hash64(&sequence, sizeof sequence, 0), log->header.salt, log->header.store_id);
}

pm_status pm_log_witness(const pm_log *log, uint64_t sequence)
{
    pm_witness witness = {sequence, witness_seal(log, sequence)};
    return pm_media_write(log->media, PM_WITNESS_PLACE, &witness, sizeof witness, PM_WRITE_CACHED);
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

static bool body_sound(const pm_log *log, const pm_record *record, uint64_t at)
{
    uint64_t place = log->header.log_offset + at + sizeof *record;
    return pm_body_hash(log->media->view + place, record->body, place, record->salt) == record->hash;
}

const pm_record *pm_log_record(const pm_log *log, uint64_t at, uint64_t sequence)
{
    const pm_record *record = header_at(log, at);
    return record && record->sequence == sequence && body_sound(log, record, at) ? record : NULL;
}

uint64_t pm_log_witnessed(const pm_log *log)
{
    pm_witness witness;
    if (log->lost[0]) return 0;
    memcpy(&witness, log->media->view + PM_WITNESS_PLACE, sizeof witness);
    return witness.seal == witness_seal(log, witness.sequence) ? witness.sequence : 0;
}

bool pm_log_knows_durable(const pm_log *log, uint64_t from, uint64_t sequence)
{
    if (pm_log_witnessed(log) >= sequence) return true;
    uint64_t left = log->header.log_size; /* bytes to hash: true records do not overlap, so they have no more */
    for (uint64_t at = from; at + sizeof(pm_record) <= log->header.log_size; at += PM_LINE) {
        const pm_record *record = header_at(log, at);
        if (!record || record->sequence - record->behind < sequence || record->body > left) continue;
        if (body_sound(log, record, at)) return true;
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
    uint64_t bytes = item->kind == PM_ITEM_RUN ? item->length : sizeof(pm_direct);
    if (item->kind < PM_ITEM_RUN || item->kind > PM_ITEM_SLOT || bytes > length - *cursor - sizeof head) return false;
    *cursor += sizeof head + bytes;
    return true;
}
