/*
 * The body of one commit record: it is gathered in memory, hashed, and written as it grows.
 *
 * I6   Bytes are hashed and written from the writer's stage, never from memory that a program may be changing.
 */
#ifndef PM_WRITER_H
#define PM_WRITER_H

#include "media/media.h"

/* The hash of a body at a place: the keyed checksums of its pieces, folded into one. */
uint64_t pm_writer_body_hash(const uint8_t *body, uint64_t length, uint64_t place, uint64_t key);

typedef struct {
    pm_media *media;
    /* The record's header, then bytes of the body. NULL: nothing was committed yet */
    uint8_t *stage;
    size_t stage_size, stage_room; /* allocated bytes, and bytes that this body uses */
    bool huge;      /* the kernel was asked for huge pages */
    bool early;     /* write each whole piece at once, while it is in the cache */
    uint64_t place;    /* file offset of the body */
    uint64_t capacity; /* bytes that the body may have */
    uint64_t key;      /* keys the hash */
    uint64_t base;     /* the place in the body where the stage begins; 0 if the stage holds all of it */
    size_t used;       /* bytes of the body in the stage */
    uint64_t written;  /* bytes of the body that are on the medium, or on their way */
    uint64_t hashed;   /* so many bytes of the body, whole pieces, are in `hash` */
    uint64_t hash;
    /* So many bytes leave for the disk as soon as they are whole, in pages of the record, while the stage keeps them.
     * The first page, with the record's header, is then written last. 0: the body leaves at the end */
    size_t part;
    size_t last_range; /* stage index of the logged range that may grow; 0: none */
    uint64_t last_end; /* region offset where that range ends */
    bool counting;     /* only count the bytes */
    bool overflow;     /* the body is larger than capacity */
    uint64_t payload;  /* bytes in logged ranges */
    pm_status status;  /* the first failure; later calls do nothing */
} pm_writer;

void pm_writer_init(pm_writer *writer, pm_media *media);
void pm_writer_free(pm_writer *writer);
/* Gets the memory of the stage, if it is not there. Before the first body begins. */
pm_status pm_writer_prepare(pm_writer *writer);

typedef enum {
    PM_BODY_WHOLE, /* the body is in the stage before any of it is written */
    PM_BODY_PARTS, /* on disks parts leave before; for a body in the log that must be durable at once */
    /* the body will not fit into the stage, so only as much of the stage is used as stays in the cache */
    PM_BODY_LARGE
} pm_body_how;

/* Begins a body at file offset `place`. key: see pm_writer_body_hash. */
void pm_writer_begin(pm_writer *writer, uint64_t place, uint64_t capacity, uint64_t key, pm_body_how how);
void pm_writer_count(pm_writer *writer); /* the same without a place: only counts, and writes nothing */

/* Room for `length` bytes (at most PM_PAGE) of region offset `offset`. The caller copies the bytes there,
 * compares them, and keeps the parts that it wants as logged ranges, in ascending order. */
uint8_t *pm_writer_room(pm_writer *writer, uint64_t offset, size_t length);
void pm_writer_keep(pm_writer *writer, uint64_t offset, const uint8_t *bytes, size_t length);

void pm_writer_direct(pm_writer *writer, unsigned kind, uint64_t offset, uint64_t length, pm_direct direct);

/* Writes the rest of the body, not durably. */
pm_status pm_writer_finish(pm_writer *writer);

static inline uint64_t pm_writer_length(const pm_writer *writer)
{
    return writer->base + writer->used;
}

/* The hash of the whole body, also of what is not on the medium yet. */
uint64_t pm_writer_hash(const pm_writer *writer);

/* The byte `at` of the body, which is in the stage. */
static inline uint8_t *pm_writer_staged(const pm_writer *writer, uint64_t at)
{
    return writer->stage + sizeof(pm_record) + (at - writer->base);
}

/* The whole body in memory; NULL if it was too large for the stage. */
static inline const uint8_t *pm_writer_body(const pm_writer *writer)
{
    return writer->base ? NULL : writer->stage + sizeof(pm_record);
}

#endif
