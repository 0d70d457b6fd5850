/*
 * The file header, and the linear redo log behind the region. The log knows logged ranges of bytes, declared direct
 * writes and commit records. It does not know arrays.
 *
 * I3  The log is emptied only by a header with a new salt, which is written after the committed image is durable.
 * I5  Zeros are never valid; every hash is bound to the salt and to its place.
 * I6  Bytes are hashed and written from the writer's stage, never from memory that a program may be changing.
 */
#ifndef PM_LOG_H
#define PM_LOG_H

#include "log/writer.h"

typedef struct {
    pm_media *media;
    pm_header header;  /* as it is durable; of format 0, without a checksum */
    uint64_t head;     /* the place of the next record, from log_offset */
    uint64_t sequence; /* sequence number of the last record, or of the header */
    uint64_t durable;  /* the last record that is known to be durable, with everything that it declares */
    pm_digest digest;  /* of the state after the last record */
    uint64_t slots[PM_SLOTS_MOST / 64]; /* the current slots after the last record */
    bool read_only;
    unsigned copy;     /* the copy of the header that was read: 0 for A and 1 for B */
    /* The header copies differ, or may differ: after a crash between them, damage to one, or a lack of space for one.
     * No record is written before they agree. */
    bool half_written;
    bool lost[2];      /* copies that could not be read; A's page also holds the durable marker */
} pm_log;

/* Reads both copies of the header, and checks the file against them. */
pm_status pm_log_open(pm_log *log, pm_media *media);

uint64_t pm_log_new_id(const pm_media *media); /* random, not 0 */

/* Writes the first header of an empty store. */
pm_status pm_log_format(pm_media *media, uint64_t region_size, uint64_t log_size, uint64_t store_id, pm_digest digest);

/* Empties the log: both header copies, one after the other, with a new salt. The committed image must be durable (I3).
 * Changes of layout and flags in `next` become durable with it. */
pm_status pm_log_reset(pm_log *log, pm_header next);

void pm_log_header_finish(pm_header *header); /* sets the version and the checksum */

/* True if a copy of the header is valid; recovery/verify.c checks each of the two. */
bool pm_log_header_valid(const pm_header *header);

/* ---- writing ---- */

/* The commit point: on return the record, and everything that was streamed before it, is durable. The body is in the
 * writer, begun at pm_log_body(log). digest: of the new state. lazy: the record survives this process, but is durable
 * only after the next sync (D11). */
pm_status pm_log_append(pm_log *log, pm_writer *writer, pm_digest digest, bool lazy);

/* Sets which of an extent's two slots is current: the bit of its entry in the table. */
static inline void pm_log_choose_slot(pm_log *log, unsigned entry, unsigned bit)
{
    log->slots[entry / 64] = (log->slots[entry / 64] & ~(UINT64_C(1) << entry % 64)) | (uint64_t)bit << entry % 64;
}

/* Writes the durable marker for the record with this sequence number. It tells later damage to the record from a crash
 * that tore it. */
pm_status pm_log_durable_marker(const pm_log *log, uint64_t sequence);

static inline uint64_t pm_log_body(const pm_log *log)
{
    return log->header.log_offset + log->head + sizeof(pm_record);
}
uint64_t pm_log_room(const pm_log *log); /* for a body; 0 if there is none */

/* ---- reading ---- */

/* The record at log position `at`, if it is whole and has this sequence; NULL otherwise. */
const pm_record *pm_log_record(const pm_log *log, uint64_t at, uint64_t sequence);

uint64_t pm_log_marked_durable(const pm_log *log); /* the sequence number in the durable marker; 0: there is none */

/* True if the durable marker, or a valid record at or behind `from`, shows that `sequence` was durable. */
bool pm_log_knows_durable(const pm_log *log, uint64_t from, uint64_t sequence);

typedef struct {
    unsigned kind;
    uint64_t offset, length;
    const uint8_t *bytes; /* LOGGED: the bytes. Otherwise a pm_direct */
} pm_log_item;

/* Steps through a body. False at its end. Then *cursor is the body's length, unless the items are malformed. */
bool pm_log_next(const uint8_t *body, uint64_t length, uint64_t *cursor, pm_log_item *item);

/* True if the item declares an extent that was written in its place. */
static inline bool pm_log_is_direct(const pm_log_item *item)
{
    return item->kind == PM_ITEM_DIRECT || item->kind == PM_ITEM_SLOT;
}

static inline pm_direct pm_log_direct(const pm_log_item *item)
{
    pm_direct direct;
    memcpy(&direct, item->bytes, sizeof direct);
    return direct;
}

/* True if every item of a body lies inside the region, and nothing follows the last. overflowed: the body is in free
 * pages itself. */
bool pm_log_items_valid(uint64_t region_size, const uint8_t *body, uint64_t length, bool overflowed);

/* The place that the item at the cursor goes to, unchecked: for a hint. */
static inline uint64_t pm_log_place(const uint8_t *body, uint64_t cursor)
{
    uint64_t offset;
    memcpy(&offset, body + cursor + offsetof(pm_item, offset), sizeof offset);
    return offset;
}

#endif
