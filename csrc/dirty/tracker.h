/*
 * The kernel's knowledge of writes to a private mapping of the file. This unit knows mappings, no extents and no log.
 *
 *   uffd     userfaultfd write-protect, asynchronous (Linux 6.7): a store into a protected page removes the
 *            protection, and PAGEMAP_SCAN lists such pages and protects them again, in one step
 *   pagemap  lists private pages; all others show the file, so they can't differ from it
 *   compare  knows nothing: every byte is compared
 *
 * Pages that are neither private nor read yet stay unprotected: a store makes them private and unprotected, which is
 * reported. So arming costs nothing for pages that are not in memory, and the first store into such a page takes one
 * fault, not two.
 */
#ifndef PM_TRACKER_H
#define PM_TRACKER_H

#include <stdbool.h>

#include "base/status.h"
#include "dirty/page_set.h"

typedef enum { PM_TRACKER_COMPARE, PM_TRACKER_PAGEMAP, PM_TRACKER_UFFD } pm_tracker_kind;

typedef struct {
    pm_tracker_kind kind;
    int uffd, pagemap; /* -1: none */
    bool scans;        /* PAGEMAP_SCAN works; otherwise the pagemap is read */
    bool forced;       /* PMSTORE_TRACKER chose the kind */
    void *found;       /* room for the answer of a call */
} pm_tracker;

/* Takes the best kind that passes a test on a private mapping of four pages of the file. The test proves that writes
 * are told, once, to pages that were private, read, swapped out, dropped or not in memory: by the program, by the
 * kernel's copies and by its lookups (O_DIRECT). Reads must not be told, and a mapping that was replaced must be.
 * PMSTORE_TRACKER chooses another kind; if that does not work here, it is an error. */
pm_status pm_tracker_open(pm_tracker *tracker, int fd, uint64_t file_offset);
void pm_tracker_close(pm_tracker *tracker);

/* True if PMSTORE_TRACKER is set. */
bool pm_tracker_is_forced(void);

const char *pm_tracker_name(pm_tracker_kind kind);

/* Notes stores to these whole pages from now on; earlier stores are not noted. Returns the number of pages that are in
 * memory, or -1 if the kernel refuses: then the pages are not armed. */
int64_t pm_tracker_arm(pm_tracker *tracker, const uint8_t *from, uint64_t length);
bool pm_tracker_disarm(pm_tracker *tracker, const uint8_t *from, uint64_t length);

/* The next functions return the number of pages that they add to the set, or -1: then the set is not complete. */

/* Adds armed pages that were written since they were armed or last collected, and protects them again. May add pages
 * that were only read. filled: pm_tracker_fill was called, which makes this faster. */
int64_t pm_tracker_collect(pm_tracker *tracker, const uint8_t *from, uint64_t length, bool filled, pm_page_set *set);

/* Also protects the pages of an armed range that are not in memory. */
bool pm_tracker_fill(pm_tracker *tracker, const uint8_t *from, uint64_t length);

/* Adds the pages that may differ from the file: those that are private. */
int64_t pm_tracker_private(pm_tracker *tracker, const uint8_t *from, uint64_t length, pm_page_set *set);

#endif
