/*
 * The contents of a commit: the changed bytes of extents and of metadata. They are found by comparing with the
 * committed image, and put into a writer as logged ranges of whole log units. The last one of an extent that has its
 * pages to itself may end where the extent does.
 *
 * I6   A page is copied once; its copy is compared, hashed and written.
 * I12  If a hash changes, its contribution to the digest is exchanged at the same time.
 */
#ifndef PM_GATHER_H
#define PM_GATHER_H

#include "space/catalog.h"
#include "log/log.h"
#include "base/helper.h"

typedef struct pm_candidate {
    uint64_t offset, length;
    /* NEW_EXTENT: a small one that the committed image does not have. META_GONE: a page that is no longer metadata */
    enum { PM_EXTENT, PM_NEW_EXTENT, PM_META_PAGE, PM_META_SLAB, PM_META_GONE } what;
    pm_buffer *buffer; /* PM_EXTENT: the buffer over it */
    uint64_t committed;     /* extents: where its committed bytes are; logged ranges name this place */
    pm_scan_kind scan;      /* PM_EXTENT: which of its blocks may differ */
    bool shared;       /* PM_EXTENT: two threads compare it. See commit/parallel_compare.h */
    uint64_t changed;  /* PM_EXTENT: how many blocks differed when it was last gathered */
    bool mostly_changed;        /* PM_EXTENT: most of most blocks differed */
} pm_candidate;

/* Sorts candidates by region offset: a writer takes logged ranges in no other order. */
void pm_gather_sort(pm_candidate *list, size_t count);

/* True if anything differs from the committed image, among the bytes that programs may write. */
bool pm_gather_finds_any(const pm_region *region, const pm_candidate *list, size_t count);

/* The same for one extent. */
bool pm_gather_differs(const pm_region *region, const pm_candidate *extent);

/* True if a sample of a few lines of a few pages shows that most of an extent differs from the committed image. */
bool pm_gather_mostly_changed(const pm_region *region, uint64_t place, uint64_t committed, uint64_t length);
/* True if those pages can be read. Must be asked before the first time, as a program may not have touched them. */
bool pm_gather_sample_readable(const pm_region *region, uint64_t place, uint64_t committed, uint64_t length);

/* A program will soon change the bytes [at, at + bytes) of an extent, whose memory begins at `live`, and commit.
 * Prefetches the first of these pages, and what the commit needs of the committed image. More pages would be out of the
 * cache again. */
void pm_gather_expect(const pm_region *region, const uint8_t *live, uint64_t committed, uint64_t length, uint64_t at,
                      uint64_t bytes);

/* Puts what differs from the committed image into the writer, and sets the checksums of metadata pages. May be called
 * again if the writer overflowed. *digest: by how much the state's digest changes. */
pm_status pm_gather(pm_region *region, pm_helper *helper, pm_writer *writer, pm_candidate *list, size_t count,
                    pm_digest *digest);

#endif
