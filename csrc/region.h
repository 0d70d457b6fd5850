/*
 * The region: the part of the file that programs see. `live` is a private mapping of it, so that stores by any code
 * stay in this process until a commit; `home` is the shared view of the same bytes, which is the committed image (I2).
 *
 * I9   Space is not reused while a buffer lives over it; pm_region_covered tells.
 * I10  A writable buffer whose array may be dirty stays a candidate after its death until a commit or a rollback.
 * I11  Rollback can't fail, and leaves nothing of the transaction here but the living buffers.
 */
#ifndef PM_REGION_H
#define PM_REGION_H

#include <stdatomic.h>

#include "media.h"
#include "watch.h"

enum {
    PM_FLAG_VERIFIED = 1,  /* this metadata page was checked when it was first read */
    PM_FLAG_EDITED = 2,    /* metadata changed since the last commit: the whole page */
    PM_FLAG_EDITED_SLAB = 4, /* the same, only the slab's header */
    PM_FLAG_LISTED = 8,      /* it stands in `edited` */
    PM_FLAG_FLUSH = 16       /* home was written through the cache since the last checkpoint */
};

enum { PM_DENSE_SAMPLES = 16 };

/* An extent with two slots; slots.h says more. */
typedef struct {
    uint64_t slot[2], length; /* slot[0] is the extent as the catalog knows it */
    unsigned entry, base;     /* in the table of slots; slot 0 is current if the entry's bit is base */
    unsigned home;            /* the slot with the committed bytes */
    unsigned seat;            /* the slot over whose place the memory lies that programs see */
    bool added, gone;         /* since the last commit */
    /* In the running commit: contents are in the slot that is not home, and become home with it */
    bool written;
    unsigned sparse;          /* commits in a row that found a few changes only */
    uint64_t flipped;         /* the commit that made `home` home; 0: one that is durable */
    uint64_t table_hash;      /* of what was written */
    pm_digest terms, written_terms; /* of the digest: of home's blocks, if known_terms, and of what was written */
    bool known_terms;
    bool sampled;             /* lines of what is home, which tell whether most of it changed again: */
    uint64_t sample[PM_DENSE_SAMPLES][PM_LINE / 8];
    /* Room for what follows the last whole page of contents: see write_slot in transaction.c */
    uint8_t *tail;
} pm_dense;

typedef struct {
    pm_media *media;
    uint8_t *live;
    const uint8_t *home; /* the committed image; in a read-only store the same as live */
    /* Commits that are not home in the file yet (region_unsettled.h); NULL: there are none, ever */
    struct pm_unsettled *unsettled;
    uint8_t *flags;      /* PM_FLAG_* for each page */
    uint64_t size, store_id;
    /* Addresses from live + first up to live + kept are the region's: first is 0 until it is closed */
    uint64_t first, kept;

    uint64_t *edited; /* pages that were changed as metadata since the last commit, each once */
    size_t edited_count;
    uint64_t *flush;  /* pages with PM_FLAG_FLUSH */
    size_t flush_count;
    uint64_t notes_pages; /* one mapping has edited, flush, the watches' sets and flags, with room for so many pages */
    pm_watches watches;

    pm_buffer **buffers; /* by offset */
    size_t buffer_count, buffer_room;
    uint64_t longest_buffer;

    pm_dense **dense; /* by the place of their seat */
    size_t dense_count;

    void *fork_lock;            /* region_fork.h: keeps the lock of a fork; NULL: there is none */
    uint64_t shown_to_children; /* bytes of the region that children of an earlier opening may see */
    bool hidden_from_child;

    uint64_t search_from; /* no page below is usable; only a hint, 0 after every commit and rollback */
    uint64_t taken[8];    /* pages of the space map that no map describes yet */
    size_t taken_count;
} pm_region;

/* A buffer's life, by what owns its extent now and at the last commit:
 *
 *              now   last commit
 *   fresh      yes   no      commit → settled, rollback → detached, delete → detached
 *   settled    yes   yes     delete → leaving
 *   leaving    no    yes     rollback → settled, commit → detached
 *   detached   no    no      until it is released
 */
struct pm_buffer {
    pm_store *store;
    void *address;
    uint64_t offset, length; /* of the extent's contents */
    atomic_int living;
    bool writable, owned, owned_at_commit;
    bool fixed;     /* these bytes never change */
    bool committed; /* once, with an owner */
    int64_t first_fork, last_fork; /* forks whose children may see them; 0: none */
    bool mapped_in_child;           /* in the fork that is under way */
    bool done; /* nobody could write through it any more when the running commit or rollback began */
    bool only;  /* a promise names it, or the core wrote to it: a commit under a promise looks at it */
    bool only_all; /* and at all of it */
    bool readable;  /* home, as far as commits compare all of it, was written or read by this process */
    bool sampled;   /* the same, as far as they compare a sample */
    bool dense; /* learned: the last commit found most of its pages changed */
    unsigned dense_commits; /* learned: how many in a row did */
};

pm_status pm_region_open(pm_region *region, pm_media *media, uint64_t size, uint64_t store_id);
pm_status pm_region_keep(pm_region *region, uint64_t size);   /* addresses for so many bytes */
pm_status pm_region_extend(pm_region *region, uint64_t size); /* after they were kept, and the media have grown */
void pm_region_moved(pm_region *region);                      /* the media have grown: their view is somewhere else */
/* Living buffers get memory of their own with the same bytes. PM_NO_MEMORY: none has. PM_UNREADABLE: some could
 * not be read. Anything else: some go on to show the file. */
pm_status pm_region_part(pm_region *region);
/* Lets go of the file. keep: after pm_region_part; otherwise living buffers go on to show the file, for the moments
 * until the process ends. */
void pm_region_close(pm_region *region, bool keep);
void pm_region_free(pm_region *region);

/* ---- reading what may be on a bad block ---- */

/* The first region offset of a range that can't be read in an image of the region, live or home, without a signal, as
 * pm_media_unreadable; UINT64_MAX: all can. */
static inline uint64_t pm_region_unreadable(const pm_region *region, const uint8_t *image, uint64_t offset,
                                            uint64_t length, const char *what)
{
    uint64_t bad = pm_media_unreadable(region->media, image + offset, PM_REGION_START + offset, length, what);
    return bad == UINT64_MAX ? bad : bad - PM_REGION_START;
}

static inline pm_status pm_region_readable(const pm_region *region, const uint8_t *image, uint64_t offset,
                                           uint64_t length, const char *what)
{
    return pm_region_unreadable(region, image, offset, length, what) == UINT64_MAX ? PM_OK : PM_UNREADABLE;
}

/* What programs see at `place` can be compared with the committed bytes, which stand at `home`. */
pm_status pm_region_comparable(const pm_region *region, uint64_t place, uint64_t home, uint64_t length);

/* For a new buffer: what commits compare of it without being asked to can be read. */
pm_status pm_region_prepare(const pm_region *region, pm_buffer *buffer);

/* Makes pages of the live mapping private. */
pm_status pm_region_make_private(pm_region *region, uint64_t offset, uint64_t length, const char *what);

/* ---- metadata ---- */

/* A metadata page of this type, checked when it is first read. NULL with PM_CORRUPT or PM_UNREADABLE in *status. */
void *pm_page_read(pm_region *region, uint64_t offset, uint32_t type, pm_status *status);

/* Must be called before a metadata page (or a slab's header) is changed. */
void pm_page_edit(pm_region *region, void *page);

/* A page that is metadata from now on, zeroed. */
void *pm_page_new(pm_region *region, uint64_t offset, uint32_t type, uint32_t level);
void pm_page_forget(pm_region *region, uint64_t offset); /* it is no longer metadata */

/* Free pages become contents: neither a commit nor a rollback may treat them as metadata, and nothing private stays. */
void pm_region_take(pm_region *region, uint64_t offset, uint64_t length);

void pm_page_seal(const pm_region *region, void *page); /* sets the hash */
bool pm_page_sound(const pm_region *region, const uint8_t *image, uint64_t offset, uint32_t type);
uint64_t pm_page_term(const uint8_t *image, uint64_t offset); /* of the digest */
static inline size_t pm_page_bytes(uint32_t type)
{
    return type == PM_TYPE_SLAB ? PM_LINE : PM_PAGE;
}

static inline bool pm_region_holds(const pm_region *region, uint64_t offset, uint64_t length)
{
    return offset && length && offset < region->size && length <= region->size - offset;
}

/* ---- contents ---- */

uint64_t pm_block_hash(const pm_region *region, const void *block, size_t length, uint64_t offset);

/* What a commit record declares of an extent that was written in place: the hash of its table of hashes. */
uint64_t pm_table_hash(const pm_region *region, const void *table, uint64_t bytes, uint64_t offset);

/* Checks an extent of an image against its hashes. PM_CORRUPT, with no message, or PM_UNREADABLE: *block is a bad
 * one. */
pm_status pm_extent_check(const pm_region *region, const uint8_t *image, uint64_t offset, uint64_t length,
                          uint64_t *block);

/* The same of the contents that an entry has, which programs can read, too: with a message. */
pm_status pm_region_check(const pm_region *region, uint64_t extent, uint64_t length);

/* Adds the terms of an extent's blocks, from its table of hashes. */
void pm_extent_digest(pm_digest *digest, const uint8_t *table, uint64_t offset, uint64_t length);

/* ---- extents with two slots ---- */

/* Table and catalog may contradict each other in a damaged file, so a pair counts only for its own length (D9). */
pm_dense *pm_region_find_dense(const pm_region *region, uint64_t place, uint64_t length);
pm_dense *pm_region_find_dense_of(const pm_region *region, uint64_t extent);

/* Whose seat is there; NULL: none. Asked for each buffer in each commit, and mostly there are none at all. */
static inline pm_dense *pm_region_dense(const pm_region *region, uint64_t place, uint64_t length)
{
    return region->dense_count ? pm_region_find_dense(region, place, length) : NULL;
}

/* That the catalog knows by this offset, of any length; NULL: it has one slot. */
static inline pm_dense *pm_region_dense_of(const pm_region *region, uint64_t extent)
{
    return region->dense_count ? pm_region_find_dense_of(region, extent) : NULL;
}

/* Where programs see an extent that the catalog knows by this offset. */
static inline uint64_t pm_region_place(const pm_region *region, uint64_t extent, uint64_t length)
{
    const pm_dense *dense = pm_region_dense_of(region, extent);
    return dense && dense->length == length ? dense->slot[dense->seat] : extent;
}

static inline uint8_t *pm_region_live(const pm_region *region, uint64_t extent, uint64_t length)
{
    return region->live + pm_region_place(region, extent, length);
}

/* Where the committed bytes are of an extent that programs see at this place. */
static inline uint64_t pm_region_home(const pm_region *region, uint64_t place, uint64_t length)
{
    const pm_dense *dense = pm_region_dense(region, place, length);
    return dense ? dense->slot[dense->home] : place;
}

/* Drops the private pages of a range of whole pages: home shows through. */
void pm_region_drop(pm_region *region, uint64_t offset, uint64_t length);
/* Only pages of an extent that equal what would show, and what is committed. */
pm_status pm_region_release(pm_region *region, uint64_t place, uint64_t length);

/* ---- buffers ---- */

pm_status pm_region_add_buffer(pm_region *region, pm_buffer *buffer);
/* A released buffer over the same extent that nothing has freed yet, brought back to life; NULL if there is none. */
pm_buffer *pm_region_revive_buffer(pm_region *region, uint64_t offset, uint64_t length, bool writable);
/* End of a living buffer that overlaps the range and does not belong to its owner any more; 0 if there is none. */
uint64_t pm_region_covered(const pm_region *region, uint64_t offset, uint64_t length);
void pm_region_detach(pm_region *region, uint64_t offset); /* the extent's owner is gone */
/* A buffer that is owned and has all of a range; NULL if there is none. */
const pm_buffer *pm_region_owner(const pm_region *region, const void *address, uint64_t length);
/* What is written there belongs to the next commit, also to one under a promise. Nothing, if no owned buffer has all of
 * it. */
void pm_region_mark(pm_region *region, const void *address, uint64_t length);
/* before a commit gathers, or a rollback restores. all: it looks at every buffer */
void pm_region_begin(pm_region *region, bool all);
void pm_region_settle(pm_region *region);  /* after a commit */
void pm_region_restore(pm_region *region); /* rollback: arrays, metadata, buffers */

/* ---- home ---- */

/* Writes committed bytes home. streamed: they need no flush at the checkpoint. */
pm_status pm_home_write(pm_region *region, uint64_t offset, const void *source, uint64_t length, pm_write_how how);
/* Streams whole pages, which a program may be changing, and gives the hashes that blocks have at rest; after a failure
 * they mean nothing. */
pm_status pm_home_write_hashed(pm_region *region, uint64_t offset, const uint8_t *source, uint64_t pages,
                               uint64_t *hashes, uint64_t folio);
void pm_home_flush(pm_region *region); /* everything written through the cache; a fence must follow */

#endif
