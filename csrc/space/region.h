/*
 * The region: the part of the file that programs see. `live` is a private mapping of it, so that stores by any code
 * stay in this process until a commit; `committed` is the shared view of the same bytes, which is the committed image
 * (I2).
 *
 * I9   Space is not reused while a buffer lives over it; pm_region_covered finds such buffers.
 * I10  A writable buffer whose array may be dirty stays a candidate after its release, until a commit or a rollback.
 * I11  Rollback can't fail, and leaves nothing of the transaction here but the living buffers.
 */
#ifndef PM_REGION_H
#define PM_REGION_H

#include "space/region_state.h"

pm_status pm_region_open(pm_region *region, pm_media *media, uint64_t size, uint64_t store_id);
pm_status pm_region_keep(pm_region *region, uint64_t size);   /* reserves addresses for so many bytes */
pm_status pm_region_extend(pm_region *region, uint64_t size); /* after pm_region_keep and the growth of the media */
void pm_region_moved(pm_region *region);                      /* the media's view may have moved */
/* Gives living buffers memory of their own with the same bytes. PM_NO_MEMORY: none has it. PM_UNREADABLE: some bytes
 * could not be read. Any other error: some buffers still show the file. */
pm_status pm_region_part(pm_region *region);
/* Lets the file go. keep: living buffers have memory of their own (pm_region_part); otherwise they show the file until
 * the process ends, which is soon. */
void pm_region_close(pm_region *region, bool keep);
void pm_region_free(pm_region *region);

/* ---- reading what may be on a bad block ---- */

/* The first region offset of a range that can't be read without a signal, in an image of the region, live or committed;
 * see pm_media_unreadable. UINT64_MAX: all of it can. */
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

/* Checks that the bytes that programs see at `place` can be compared with the committed bytes at `committed`. */
pm_status pm_region_comparable(const pm_region *region, uint64_t place, uint64_t committed, uint64_t length);

/* For a new buffer: checks that the pages that commits always compare can be read. */
pm_status pm_region_prepare(const pm_region *region, pm_buffer *buffer);

/* Makes pages of the live mapping private. */
pm_status pm_region_make_private(pm_region *region, uint64_t offset, uint64_t length, const char *what);

/* Free pages become contents: neither a commit nor a rollback may treat them as metadata, and their private pages are
 * dropped. */
void pm_region_take(pm_region *region, uint64_t offset, uint64_t length);

static inline bool pm_region_holds(const pm_region *region, uint64_t offset, uint64_t length)
{
    return offset && length && offset < region->size && length <= region->size - offset;
}

/* ---- extents with two slots ---- */

/* The table of slots and the catalog may contradict each other in a damaged file, so an extent is found only by its own
 * length (D9). */
pm_double_buffer *pm_region_find_double_buffer(const pm_region *region, uint64_t place, uint64_t length);
pm_double_buffer *pm_region_find_double_buffer_of(const pm_region *region, uint64_t extent);

/* The double-buffered extent whose mapped slot is there; NULL: none. This is called for each buffer in each commit, and
 * mostly there are none at all. */
static inline pm_double_buffer *pm_region_double_buffer(const pm_region *region, uint64_t place, uint64_t length)
{
    return region->double_buffer_count ? pm_region_find_double_buffer(region, place, length) : NULL;
}

/* The double-buffered extent that the catalog knows by this offset, of any length; NULL: it has one slot. */
static inline pm_double_buffer *pm_region_double_buffer_of(const pm_region *region, uint64_t extent)
{
    return region->double_buffer_count ? pm_region_find_double_buffer_of(region, extent) : NULL;
}

/* The place where programs see an extent that the catalog knows by this offset. */
static inline uint64_t pm_region_place(const pm_region *region, uint64_t extent, uint64_t length)
{
    const pm_double_buffer *pair = pm_region_double_buffer_of(region, extent);
    return pair && pair->length == length ? pair->slot[pair->mapped] : extent;
}

static inline uint8_t *pm_region_live(const pm_region *region, uint64_t extent, uint64_t length)
{
    return region->live + pm_region_place(region, extent, length);
}

/* The place of the committed bytes of an extent that programs see at this place. */
static inline uint64_t pm_region_committed(const pm_region *region, uint64_t place, uint64_t length)
{
    const pm_double_buffer *pair = pm_region_double_buffer(region, place, length);
    return pair ? pair->slot[pair->current] : place;
}

/* Drops the private pages of a range of whole pages, so that the committed image shows through. */
void pm_region_drop(pm_region *region, uint64_t offset, uint64_t length);
/* The same for those pages of an extent that equal the bytes that would show, and the committed bytes. */
pm_status pm_region_release(pm_region *region, uint64_t place, uint64_t length);

/* ---- buffers ---- */

pm_status pm_region_add_buffer(pm_region *region, pm_buffer *buffer);
/* Revives a released buffer over the same extent that was not freed yet; NULL if there is none. */
pm_buffer *pm_region_revive_buffer(pm_region *region, uint64_t offset, uint64_t length, bool writable);
/* The end of a living buffer that overlaps the range, which no extent owns; 0 if there is none. */
uint64_t pm_region_covered(const pm_region *region, uint64_t offset, uint64_t length);
void pm_region_detach(pm_region *region, uint64_t offset); /* the extent has lost its owner */
/* A constant extent that a commit owns is about to lose its owner. Readers of commits up to `sequence` may map it: its
 * space is not used again as long as one does. PM_NO_MEMORY. */
pm_status pm_region_leave_to_readers(pm_region *region, pm_store *store, uint64_t offset, uint64_t length,
                                     uint64_t sequence);
/* When a store is opened for writing: finds children that were forked earlier, and pages that readers map. What they
 * may see is not used again as long as they live. PM_NO_MEMORY. */
pm_status pm_region_find_users(pm_region *region, pm_store *store);
/* An owned buffer that has all of a range; NULL if there is none. */
const pm_buffer *pm_region_owner(const pm_region *region, const void *address, uint64_t length);
/* Marks a range for the next commit, also for one with a declared write set. Does nothing if no owned buffer has all of
 * it. */
void pm_region_mark(pm_region *region, const void *address, uint64_t length);
/* See pm_mark_dirty. */
pm_status pm_region_mark_dirty(pm_region *region, const void *address, uint64_t length, int *out);
/* before a commit gathers, or a rollback restores. all: it scans every buffer */
void pm_region_begin(pm_region *region, bool all);
void pm_region_finalize(pm_region *region);  /* after a commit */
void pm_region_restore(pm_region *region); /* rollback: restores arrays, metadata and buffers */

#endif
