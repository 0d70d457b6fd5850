/*
 * What the kernel knows of writes to a private mapping of the file. Knows mappings, no extents and no log.
 *
 *   uffd     userfaultfd write-protect, asynchronous (Linux 6.7): a store into a protected page takes the protection
 *   away, and
 *            PAGEMAP_SCAN gives such pages and protects them again, in one step
 *   pagemap  pages that are private; all others show the file, so they can't differ from it
 *   compare  nothing: every byte is compared
 *
 * Pages that neither are private nor have been read stay unprotected: a store makes them private and unprotected, which
 * is reported. So arming costs nothing for what is not in memory, and the first store into a page takes one fault, not
 * two.
 */
#ifndef PM_TRACKER_H
#define PM_TRACKER_H

#include <stdbool.h>

#include "format.h"
#include "status.h"

typedef enum { PM_TRACKER_COMPARE, PM_TRACKER_PAGEMAP, PM_TRACKER_UFFD } pm_tracker_kind;

typedef struct {
    pm_tracker_kind kind;
    int uffd, pagemap; /* -1: none */
    bool scans;        /* PAGEMAP_SCAN works; otherwise the pagemap is read */
    bool forced;       /* by PMSTORE_TRACKER */
    void *found;       /* room for what a call gives */
} pm_tracker;

/* Takes the best one that proves itself on a private mapping of four pages of the file. PMSTORE_TRACKER names another,
 * and then it is an error if that one does not work. */
pm_status pm_tracker_open(pm_tracker *tracker, int fd, uint64_t file_offset);
void pm_tracker_close(pm_tracker *tracker);

/* True if PMSTORE_TRACKER is set. */
bool pm_tracker_is_forced(void);

const char *pm_tracker_name(pm_tracker_kind kind);

/* A set of pages: bit 0 of bits[0] is the page at `base`. */
typedef struct {
    const uint8_t *base;
    uint64_t *bits;
} pm_page_set;

static inline bool pm_page_in(const pm_page_set *set, uint64_t page)
{
    return set->bits[page / 64] >> page % 64 & 1;
}

/* The first page in [page, end) that is in the set; end if none is. */
uint64_t pm_page_next(const pm_page_set *set, uint64_t page, uint64_t end);
uint64_t pm_page_count(const pm_page_set *set, uint64_t page, uint64_t end);
void pm_page_add(pm_page_set *set, uint64_t page, uint64_t end);
void pm_page_clear(pm_page_set *set, uint64_t page, uint64_t end);

/* From now on stores to these whole pages are noted; what was written before is not. Gives the number of pages that are
 * in memory, or -1 if the kernel refuses: then they are not watched. */
int64_t pm_tracker_arm(pm_tracker *tracker, const uint8_t *from, uint64_t length);
bool pm_tracker_disarm(pm_tracker *tracker, const uint8_t *from, uint64_t length);

/* These give the number of pages that they add to the set, or -1: then it says nothing. */

/* Armed pages that were written since they were armed or last collected; they are protected again. May give pages that
 * were only read. filled: pm_tracker_fill was called, which makes it twice as fast. */
int64_t pm_tracker_collect(pm_tracker *tracker, const uint8_t *from, uint64_t length, bool filled, pm_page_set *set);

/* Protects the pages of an armed range that are not in memory, too. */
bool pm_tracker_fill(pm_tracker *tracker, const uint8_t *from, uint64_t length);

/* Pages that may differ from the file: those that are private. */
int64_t pm_tracker_private(pm_tracker *tracker, const uint8_t *from, uint64_t length, pm_page_set *set);

#endif
