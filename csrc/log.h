/*
 * The file header, and the linear redo log behind the region. The log knows runs of bytes, declared direct writes and
 * commit records; it does not know arrays.
 *
 * I3  The log is emptied only by a header with a new salt, written after home is durable.
 * I5  Zeros are never valid; every hash is bound to the salt and to its place.
 * I6  Bytes are hashed and written from the writer's stage, never from memory that a program may be changing.
 */
#ifndef PM_LOG_H
#define PM_LOG_H

#include "media.h"

typedef struct {
    pm_media *media;
    pm_header header;  /* as it is durable */
    uint64_t head;     /* where the next record goes, from log_offset */
    uint64_t sequence; /* of the last record, or of the header */
    uint64_t durable;  /* the last one that is known to be durable, with all that it declares */
    pm_digest digest;  /* of the same */
    uint64_t slots[PM_SLOTS_MOST / 64]; /* which slots are current after the same */
    bool read_only;
    unsigned copy;     /* of the header: the one that was read, 0 for A and 1 for B */
    /* The copies differ, or may: after a crash between them, damage to one, or no space for one. No record is written
     * before they agree. */
    bool half_written;
    bool lost[2];      /* copies that could not be read, A's with its witness */
} pm_log;

/* Reads both copies of the header, and checks the file against them. */
pm_status pm_log_open(pm_log *log, pm_media *media);

uint64_t pm_new_id(const pm_media *media); /* random, not 0 */

/* Writes the first header of an empty store. */
pm_status pm_log_format(pm_media *media, uint64_t region_size, uint64_t log_size, uint64_t store_id, pm_digest digest);

/* Empties the log: both header copies, one after the other, with a new salt. Home must be durable (I3). Changes of
 * layout and flags in `next` become durable with it. */
pm_status pm_log_reset(pm_log *log, pm_header next);

/* True if the copy parses; verify.c asks for each of the two. */
bool pm_header_sound(const pm_header *header);

/* ---- writing one record ---- */

typedef struct {
    pm_media *media;
    uint8_t *stage; /* PM_LINE bytes for the record's header, then bytes of the body */
    size_t stage_size, stage_room; /* allocated, and used for this body */
    bool huge;      /* the stage was asked to be huge pages */
    bool early;     /* write each piece as soon as it is whole, while it is in the cache */
    uint64_t place;    /* file offset of the body */
    uint64_t capacity; /* bytes that the body may have */
    uint64_t key;      /* seals the hash */
    uint64_t base;     /* where in the body the stage begins: 0 if it holds all of it */
    size_t used;       /* bytes of the body in the stage */
    uint64_t written;  /* bytes of the body that are on the medium, or on their way */
    uint64_t hashed;   /* bytes of the body that `hash` is of: whole pieces */
    uint64_t hash;
    /* Bytes that leave for the disk as soon as they are whole, in pages of the record, while the stage keeps them.
     * Its first page, with its header, is then written last. 0: none do */
    size_t part;
    size_t last_run;   /* stage index of the run that may grow, 0: none */
    uint64_t last_end; /* region offset where that run ends */
    bool counting;     /* only count the bytes */
    bool overflow;     /* the body is larger than capacity */
    uint64_t payload;  /* bytes in runs */
    pm_status status;  /* the first failure; later calls do nothing */
} pm_writer;

pm_status pm_writer_init(pm_writer *writer, pm_media *media);
void pm_writer_free(pm_writer *writer);

typedef enum {
    PM_BODY_WHOLE, /* in the stage, before any of it is written */
    PM_BODY_PARTS, /* on disks parts leave before: of a record's body in the log, which is to be durable at once */
    PM_BODY_LARGE  /* it will not fit into the stage, so only as much of that is used as stays in the cache */
} pm_body_how;

/* A body at file offset `place`. Key: see pm_body_hash. */
void pm_writer_begin(pm_writer *writer, uint64_t place, uint64_t capacity, uint64_t key, pm_body_how how);
void pm_writer_count(pm_writer *writer); /* the same without a place: nothing is written */

/* Room for `length` bytes (at most PM_PAGE) that are to follow as runs of region offset `offset`. The caller copies the
 * bytes there, looks at them, and keeps the parts that it wants, in ascending order. */
uint8_t *pm_writer_room(pm_writer *writer, uint64_t offset, size_t length);
void pm_writer_keep(pm_writer *writer, uint64_t offset, const uint8_t *bytes, size_t length);

void pm_writer_direct(pm_writer *writer, unsigned kind, uint64_t offset, uint64_t length, pm_direct direct);

/* Writes what is left of the body, not durably. */
pm_status pm_writer_finish(pm_writer *writer);

static inline uint64_t pm_writer_length(const pm_writer *writer)
{
    return writer->base + writer->used;
}

/* The whole body in memory, while it is there; NULL if it was too large for the stage. */
static inline const uint8_t *pm_writer_body(const pm_writer *writer)
{
    return writer->base ? NULL : writer->stage + PM_LINE;
}

/* The commit point: on return the record, and everything streamed before it, is durable. The body is in the writer,
 * begun at pm_log_body(log). digest: of the new state. lazy: it survives this process, but is durable only after the
 * next sync (D11). */
pm_status pm_log_append(pm_log *log, pm_writer *writer, pm_digest digest, bool lazy);

/* Which of an extent's two slots is current: the bit of its entry in the table. */
static inline void pm_log_choose_slot(pm_log *log, unsigned entry, unsigned bit)
{
    log->slots[entry / 64] = (log->slots[entry / 64] & ~(UINT64_C(1) << entry % 64)) | (uint64_t)bit << entry % 64;
}

/* Notes that the record with this sequence is durable, so that later damage to it can be told from a crash that tore
 * it. */
pm_status pm_log_witness(const pm_log *log, uint64_t sequence);

static inline uint64_t pm_log_body(const pm_log *log)
{
    return log->header.log_offset + log->head + sizeof(pm_record);
}
uint64_t pm_log_room(const pm_log *log); /* for a body; 0 if there is none */

/* ---- reading ---- */

/* The hash of a body at a place: pieces sealed with their place, then folded. */
uint64_t pm_body_hash(const uint8_t *body, uint64_t length, uint64_t place, uint64_t key);

/* The record at log position `at`, if it is whole and has this sequence; NULL otherwise. */
const pm_record *pm_log_record(const pm_log *log, uint64_t at, uint64_t sequence);

uint64_t pm_log_witnessed(const pm_log *log); /* the sequence that the witness vouches for; 0: there is none */

/* True if the witness, or a valid record at or behind `from`, knows that `sequence` was durable. */
bool pm_log_knows_durable(const pm_log *log, uint64_t from, uint64_t sequence);

typedef struct {
    unsigned kind;
    uint64_t offset, length;
    const uint8_t *bytes; /* RUN: the bytes. Otherwise a pm_direct */
} pm_log_item;

/* Steps through a body. False at its end; *cursor is then its length, unless the items are malformed. */
bool pm_log_next(const uint8_t *body, uint64_t length, uint64_t *cursor, pm_log_item *item);

/* Where the item at the cursor goes, unchecked: for a hint. */
static inline uint64_t pm_log_place(const uint8_t *body, uint64_t cursor)
{
    uint64_t offset;
    memcpy(&offset, body + cursor + offsetof(pm_item, offset), sizeof offset);
    return offset;
}

#endif
