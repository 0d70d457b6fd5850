/*
 * The dirty-tracking policy: which pages of an extent a commit scans. The policy learns from each commit, extent by
 * extent, how to find changes at the least cost.
 *
 *   small           all pages: comparing them is quicker than asking the kernel
 *   open            pages that are private (pm_tracker_private), which are compared with the committed image
 *   armed           pages that were written (pm_tracker_collect), which are copied and compared
 *
 *              scanned too much in vain               rolled back, committed
 *     open ─────────────────────────────▶ armed  ◀──────────────────┐
 *      ▲      (protected, then listed)      │  └───────────────────┘
 *      └────────────────────────────────────┘
 *        faults cost more than scanning would; another mapping was put there
 *
 * I10  The set `dirty` is sticky: a page that was found stays in it until the commit that found it has succeeded
 *      (pm_policy_committed), or a rollback has dropped it (pm_policy_restored). Only armed extents depend on that: in
 *      others, all pages that may differ are found again each time.
 * D2   Protect, then copy: pm_policy_scan comes before any byte is copied, and protects the pages that it lists.
 * I9   Space that gets another use is armed no longer (pm_policy_forget).
 */
#ifndef PM_POLICY_H
#define PM_POLICY_H

#include "dirty/tracker.h"

typedef enum {
    PM_SCAN_ALL,     /* every page */
    PM_SCAN_SOME,    /* pages in `dirty`; most of them will be equal */
    PM_SCAN_CHANGED, /* pages in `dirty`; most of them will differ */
    PM_SCAN_ONLY     /* pages in `only`, the declared write set; no others have changed */
} pm_scan_kind;

/* The notes on an extent. Times are in nanoseconds. */
typedef struct {
    uint64_t offset, pages;
    bool armed, filled;
    bool refused;       /* the kernel refused to arm it: it is not tried again */
    uint64_t scanned;   /* for `balance`: pages listed, or all if not asked; 0 in the commit that armed it */
    int64_t asking;     /* how long it took, the last time, to learn which pages of an open extent are private */
    uint64_t resident;  /* about so many pages are private */
    uint64_t present;   /* twice the pages that were in memory when it was armed, plus those listed since */
    int64_t balance;    /* cost balance: how much the other method would have saved since the last change */
    unsigned skips;     /* skip count: so many commits do not ask which pages are private, because most are */
} pm_learned;

enum { PM_POLICY_LEAST = 64 /* pages: comparing fewer takes no longer than asking the kernel */ };

typedef struct {
    pm_tracker tracker;
    bool known;        /* the tracker was opened, which waits until it is needed */
    int fd;
    uint64_t fd_start; /* file offset of the region */
    uint8_t *live;
    pm_page_set dirty, only;
    uint64_t only_from, only_end; /* no page outside is in `only`; both 0: no page is */
    pm_learned *list;  /* by offset */
    size_t count, room, armed;
} pm_policy;

/* `dirty` and `only` always have room for a bit for each page of the region. Fails only if PMSTORE_TRACKER asks for a
 * tracker that does not work here. */
pm_status pm_policy_open(pm_policy *policy, uint8_t *live, int fd, uint64_t fd_start);
void pm_policy_close(pm_policy *policy);
pm_tracker_kind pm_policy_kind(pm_policy *policy); /* the best kind that works here */

/* Adds pages to `only`, the declared write set. They stay in it until the extents drop theirs, and pm_policy_dropped.
 * The time to find and to drop them depends on how far apart they are, not on the size of the extent. */
void pm_policy_declare(pm_policy *policy, uint64_t page, uint64_t end);
/* The first declared page in [page, end); `end` if none is */
uint64_t pm_policy_declared(const pm_policy *policy, uint64_t page, uint64_t end);
void pm_policy_drop(pm_policy *policy, uint64_t page, uint64_t end);
void pm_policy_dropped(pm_policy *policy);

/* The following functions take an extent with pages of its own, by its offset, and the number of pages that its
 * contents touch. */

/* Must be called by each commit before a byte is copied. pm_pending calls it too; the pages found stay in `dirty` until
 * a commit has succeeded (I10). */
pm_scan_kind pm_policy_scan(pm_policy *policy, uint64_t offset, uint64_t pages);

/* These pages of the extent may have been written without the kernel's knowledge: they are in `dirty` from now on.
 * PM_NO_MEMORY. */
pm_status pm_policy_mark_dirty(pm_policy *policy, uint64_t offset, uint64_t pages, uint64_t page, uint64_t end);

/* The commit that scanned the extent has succeeded, and found so many pages changed. */
void pm_policy_committed(pm_policy *policy, uint64_t offset, uint64_t pages, uint64_t changed);

/* The same for a commit that scanned so many declared pages only. Other pages stay as they were. */
void pm_policy_committed_only(pm_policy *policy, uint64_t offset, uint64_t scanned);

/* The commit that has succeeded took the whole extent, without a scan. */
void pm_policy_committed_whole(pm_policy *policy, uint64_t offset);

/* For a rollback: true if `dirty` has all pages that must be dropped, false if that may be any page. */
bool pm_policy_restore(pm_policy *policy, uint64_t offset, uint64_t pages);
void pm_policy_restored(pm_policy *policy, uint64_t offset, uint64_t pages);

/* Stops watching the extents in this range. */
void pm_policy_forget(pm_policy *policy, uint64_t offset, uint64_t length);

#endif
