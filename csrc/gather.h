/*
 * What a commit carries: the changed bytes of extents and of metadata, found by comparing them with home, as runs of
 * whole granules in a writer; the last one of an extent that has its pages to itself may end with it.
 *
 * I6   A page is copied once; its copy is compared, hashed and written.
 * I12  Each term of the digest that changes is exchanged where the hash changes.
 */
#ifndef PM_GATHER_H
#define PM_GATHER_H

#include "catalog.h"
#include "log.h"
#include "thread.h"

typedef struct {
    uint64_t offset, length;
    /* New: a small one that home knows nothing of. Gone: a page that is no longer metadata. */
    enum { PM_EXTENT, PM_NEW_EXTENT, PM_META_PAGE, PM_META_SLAB, PM_META_GONE } what;
    pm_buffer *buffer; /* PM_EXTENT: over it */
    uint64_t home;     /* extents: where its committed bytes are, and runs go */
    pm_look look;      /* PM_EXTENT: which of its blocks may differ */
    bool shared;       /* PM_EXTENT: so many that two threads compare them. See sieve.h */
    uint64_t changed;  /* PM_EXTENT: how many did, when it was last gathered */
} pm_candidate;

/* In ascending order of the region: a writer takes runs in no other. */
void pm_gather_sort(pm_candidate *list, size_t count);

/* True if anything differs from home, as far as bytes are concerned that programs may write. */
bool pm_gather_finds_any(const pm_region *region, const pm_candidate *list, size_t count);

/* The same of one extent. */
bool pm_gather_differs(const pm_region *region, const pm_candidate *extent);

/* True if most of an extent differs from home, as far as a few lines of a few of its pages tell. */
bool pm_gather_mostly_changed(const pm_region *region, uint64_t place, uint64_t home, uint64_t length);
/* Whether those pages can be read: to be asked for before the first time, for no program may have touched them. */
bool pm_gather_sample_readable(const pm_region *region, uint64_t place, uint64_t home, uint64_t length);

/* A program will soon change the bytes [at, at + bytes) of an extent, whose memory begins at `live`, and commit: they
 * are fetched from memory, and what the commit reads of home to decide how, and cannot go on without. Of the first
 * pages: more would be gone from the cache again. */
void pm_gather_expect(const pm_region *region, const uint8_t *live, uint64_t home, uint64_t length, uint64_t at,
                      uint64_t bytes);

/* Puts what differs from home into the writer. Seals metadata pages. May be called again if the writer overflowed.
 * *digest: by what the state's digest changes. */
pm_status pm_gather(pm_region *region, pm_helper *helper, pm_writer *writer, pm_candidate *list, size_t count,
                    pm_digest *digest);

#endif
