/*
 * Two threads compare a large extent that is not armed. They find the pages that differ, as a tracker would. While
 * the second thread compares later parts, the first one gathers what was found.
 *
 *   the first    gathers the next part as soon as it is compared; until then it takes a part that no thread has
 *                taken, and compares it
 *   the second   takes the next part that no thread has taken, and compares it
 *
 * I10  Pages are put into `dirty` before they are gathered, and taken out of it only if they equal the committed image.
 *      The next commit scans all pages again, so it finds later changes. If the extent was armed just now, the tracker
 *      finds them.
 */
#ifndef PM_PARALLEL_COMPARE_H
#define PM_PARALLEL_COMPARE_H

#include "space/region.h"
#include "base/helper.h"

enum { PM_SHARED_FROM = 1024 /* pages: one thread compares fewer before a second one wakes */ };

typedef struct {
    pm_region *region;
    pm_helper *helper;
    uint64_t place, committed; /* of the extent */
    bool all;                  /* compare all pages; otherwise those in `dirty` */
    uint64_t from, to;         /* its whole pages, in the region */
    /* Words of `dirty`: the first word of the first part, and the words of each part, so that no two threads touch one
     * word */
    uint64_t first, part;
    atomic_uint_least64_t next; /* the next part that no thread has taken */
    atomic_bool compared[256];  /* one for each part */
} pm_parallel_compare;

/* Begins the comparison of an extent of `length` bytes at `place`, whose committed bytes are at `committed`. */
void pm_parallel_compare_begin(pm_parallel_compare *parallel, pm_region *region, pm_helper *helper, uint64_t place,
                               uint64_t committed, uint64_t length, bool all);

/* The first page in [page, end) that differs from the committed image; `end` if none does. The last page of an extent,
 * if it is not a whole one, is always returned. */
uint64_t pm_parallel_compare_next(pm_parallel_compare *parallel, uint64_t page, uint64_t end);

/* Ends the comparison: no thread compares any more, and `dirty` has all pages of the extent that differ. */
void pm_parallel_compare_end(pm_parallel_compare *parallel);

#endif
