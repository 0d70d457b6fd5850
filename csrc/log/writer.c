#include "log/writer.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "base/hash.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

enum {
    HUGE_PAGE = 2 << 20,
    ON_FIRST_PAGE = PM_PAGE - sizeof(pm_record) /* bytes of the body in the first page of the record */
};

static uint64_t fold(uint64_t hash, uint64_t piece)
{
    return (hash << 7 | hash >> 57) * UINT64_C(0x9e3779b97f4a7c15) + piece;
}

static uint64_t piece_hash(const uint8_t *piece, uint64_t length, uint64_t place, uint64_t key)
{
    return pm_keyed_checksum(pm_hash64(piece, length, 0), place, key);
}

uint64_t pm_writer_body_hash(const uint8_t *body, uint64_t length, uint64_t place, uint64_t key)
{
    uint64_t hash = 0;
    for (uint64_t at = 0; at < length; at += PM_PIECE)
        hash = fold(hash, piece_hash(body + at, length - at < PM_PIECE ? length - at : PM_PIECE, place + at, key));
    return hash;
}

/* Behind the stage: room for what one call may add, and for the padding. */
static size_t stage_bytes(const pm_writer *writer)
{
    return PM_PAGE + writer->stage_size + 4 * PM_PAGE;
}

void pm_writer_init(pm_writer *writer, pm_media *media)
{
    *writer = (pm_writer){.media = media};
    writer->stage_size = media->stage;
    writer->early = media->byte_addressable;
}

pm_status pm_writer_prepare(pm_writer *writer)
{
    if (writer->stage) return PM_OK;
    size_t alignment = writer->media->part ? HUGE_PAGE : PM_PAGE;
    if (posix_memalign((void **)&writer->stage, alignment, stage_bytes(writer))) {
        writer->stage = NULL;
        return pm_fail(PM_NO_MEMORY, "no memory to gather commits in");
    }
    return PM_OK;
}

void pm_writer_free(pm_writer *writer)
{
    /* the disk fetches nothing from there any more */
    if (writer->stage) writer->media->operations->await_writes(writer->media);
    free(writer->stage);
}

void pm_writer_begin(pm_writer *writer, uint64_t place, uint64_t capacity, uint64_t key, pm_body_how how)
{
    enum { IN_CACHE = 4 * PM_PIECE, AT_ONCE = 512 << 10 };
    /* Field by field: compilers zero a struct of this size by `rep stos`. Loads of what that stored wait until all
     * earlier stores have left the store buffer, which is slow after streamed bytes. */
    size_t large = writer->early ? IN_CACHE : AT_ONCE;
    writer->stage_room = how != PM_BODY_LARGE || large > writer->stage_size ? writer->stage_size : large;
    writer->place = place, writer->capacity = capacity, writer->key = key;
    writer->base = writer->written = writer->hashed = writer->hash = writer->last_end = writer->payload = 0;
    writer->part = how == PM_BODY_PARTS ? writer->media->part : 0;
    writer->used = writer->last_range = 0;
    writer->counting = writer->overflow = false;
    /* Parts of a failed attempt may still be on their way from the stage. */
    writer->status = writer->media->operations->await_writes(writer->media);
}

void pm_writer_count(pm_writer *writer)
{
    pm_writer_begin(writer, 0, UINT64_MAX, 0, PM_BODY_WHOLE);
    writer->counting = true;
}

static uint8_t *body_in_stage(pm_writer *writer)
{
    return writer->stage + sizeof(pm_record);
}

/* Hashes whole pieces of the body, up to `end`. Later bytes can't grow a logged range that stands in them. */
static void hash_pieces(pm_writer *writer, uint64_t end)
{
    for (uint64_t at = writer->hashed; at < end; at += PM_PIECE)
        writer->hash = fold(writer->hash,
                            piece_hash(pm_writer_staged(writer, at), PM_PIECE, writer->place + at, writer->key));
    writer->hashed = end;
    writer->last_range = 0;
}

static void write_part(pm_writer *writer, uint64_t from, uint64_t to, pm_write_how how)
{
    if (to > writer->capacity) writer->overflow = true;
    else
        writer->status =
            pm_media_write(writer->media, writer->place + from, pm_writer_staged(writer, from), to - from, how);
    writer->written = to;
}

/* Writes whole pieces. */
static void write_pieces(pm_writer *writer)
{
    uint64_t end = pm_writer_length(writer) / PM_PIECE * PM_PIECE;
    if (end <= writer->written) return;
    hash_pieces(writer, end);
    write_part(writer, writer->written, end, PM_WRITE_STREAM);
}

/* Lets a whole part leave for the disk: whole pages of the record, except its first, from whole pages of the stage. */
static void begin_part(pm_writer *writer)
{
    if (!writer->huge) {
        /* With a huge page, the disk fetches from one piece of memory instead of from many. The kernel is asked only
         * now, because most stores have no record that is so long. Where it can't, nothing is lost. */
        writer->huge = true;
        madvise(writer->stage, stage_bytes(writer), MADV_HUGEPAGE);
        madvise(writer->stage, stage_bytes(writer), MADV_COLLAPSE);
    }
    uint64_t end = (sizeof(pm_record) + writer->used) / PM_PAGE * PM_PAGE - sizeof(pm_record),
             from = writer->written ? writer->written : ON_FIRST_PAGE;
    hash_pieces(writer, end / PM_PIECE * PM_PIECE);
    write_part(writer, from, end, PM_WRITE_BEGIN);
}

/* Drops the written bytes from the stage, to make room. */
static void slide(pm_writer *writer)
{
    if (writer->counting) {
        writer->hashed = pm_writer_length(writer);
    } else {
        if (writer->part && writer->written) {
            /* Bytes on their way must not move before they have arrived. The first page waited for its header, which is
             * now written separately. */
            writer->status = writer->media->operations->await_writes(writer->media);
            if (writer->status == PM_OK)
                writer->status = pm_media_write(writer->media, writer->place, body_in_stage(writer), ON_FIRST_PAGE,
                                                PM_WRITE_STREAM);
        }
        writer->part = 0;
        if (writer->status == PM_OK) write_pieces(writer);
    }
    size_t gone = writer->hashed - writer->base;
    writer->base += gone;
    writer->used -= gone;
    memmove(body_in_stage(writer), body_in_stage(writer) + gone, writer->used);
    writer->last_range = 0;
}

static void make_room(pm_writer *writer)
{
    if (!writer->counting) {
        if (writer->early && pm_writer_length(writer) >= writer->written + PM_PIECE) write_pieces(writer);
        if (writer->part && writer->used >= writer->written + writer->part) begin_part(writer);
    }
    if (writer->used + PM_PAGE + 64 > writer->stage_room) slide(writer);
    /* After a failure, what is in the stage does not matter. */
    if (writer->overflow || writer->status != PM_OK) writer->used = 0, writer->last_range = 0;
}

uint8_t *pm_writer_room(pm_writer *writer, uint64_t offset, size_t length)
{
    PM_CHECK(length <= PM_PAGE);
    make_room(writer);
    bool grows = writer->last_range && writer->last_end == offset;
    return body_in_stage(writer) + writer->used + (grows ? 0 : sizeof(pm_item));
}

void pm_writer_keep(pm_writer *writer, uint64_t offset, const uint8_t *bytes, size_t length)
{
    uint8_t *body = body_in_stage(writer);
    pm_item item;
    if (writer->last_range && writer->last_end == offset) {
        memmove(body + writer->used, bytes, length);
        memcpy(&item, body + writer->last_range - 1, sizeof item);
        item.kind_length += length;
        memcpy(body + writer->last_range - 1, &item, sizeof item);
    } else {
        memmove(body + writer->used + sizeof item, bytes, length);
        item = (pm_item){offset, pm_item_pack(PM_ITEM_LOGGED, length)};
        memcpy(body + writer->used, &item, sizeof item);
        writer->last_range = writer->used + 1;
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
    writer->last_range = 0;
}

uint64_t pm_writer_hash(const pm_writer *writer)
{
    uint64_t hash = writer->hash, end = pm_writer_length(writer);
    for (uint64_t at = writer->hashed; at < end; at += PM_PIECE)
        hash = fold(hash, piece_hash(pm_writer_staged(writer, at), end - at < PM_PIECE ? end - at : PM_PIECE,
                                     writer->place + at, writer->key));
    return hash;
}

pm_status pm_writer_finish(pm_writer *writer)
{
    PM_TRY(writer->status);
    PM_CHECK(!writer->overflow && !writer->counting && pm_writer_length(writer) <= writer->capacity);
    writer->hash = pm_writer_hash(writer);
    return pm_media_write(writer->media, writer->place + writer->written, pm_writer_staged(writer, writer->written),
                          pm_writer_length(writer) - writer->written, PM_WRITE_STREAM);
}
