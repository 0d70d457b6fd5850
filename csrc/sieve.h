/*
 * A large extent that is not watched has to be compared whole: two threads do it. What they find is what a tracker
 * would have found, the pages that differ; and while the second thread compares what comes later, the first one gathers
 * what was found.
 *
 *   the first    gathers the next part that was compared; if it is not yet, takes the next part that nobody has taken,
 *   and compares it the second   takes the next part that nobody has taken, and compares it
 *
 * I10  Pages are put into `dirty` before they are gathered, and taken out of it only if they equal home. What changes
 *      after that is found by the next commit, which looks at all of them again; of an extent that has just been armed,
 *      the tracker tells.
 */
#ifndef PM_SIEVE_H
#define PM_SIEVE_H

#include "region.h"
#include "thread.h"

typedef struct {
    pm_region *region;
    pm_helper *helper;
    uint64_t place, home; /* of the extent */
    bool all;             /* of its pages; otherwise those that are in `dirty` */
    uint64_t from, to;    /* its whole pages, in the region */
    /* Words of `dirty`: where parts begin, and how many each takes, so that no two threads touch one word */
    uint64_t first, part;
    atomic_uint_least64_t next; /* the next part that nobody has taken */
    atomic_bool compared[256];  /* one for each part */
} pm_sieve;

/* length: of the extent. home: where its committed bytes are. */
void pm_sieve_begin(pm_sieve *sieve, pm_region *region, pm_helper *helper, uint64_t place, uint64_t home,
                    uint64_t length, bool all);

/* The first page in [page, end) that differs from home, in the region; end if none does. The last page of an extent, if
 * it is not a whole one, always may. */
uint64_t pm_sieve_next(pm_sieve *sieve, uint64_t page, uint64_t end);

/* Nobody is at it any more, and `dirty` has what differs of all of the extent. */
void pm_sieve_end(pm_sieve *sieve);

#endif
