/*
 * Which pages of an extent a commit has to look at: learned for each, so that finding changes costs little.
 *
 *   small           all of it: to compare it is quicker than to ask the kernel
 *   open            those that are private (pm_tracker_private), compared with home
 *   armed           those that were written (pm_tracker_collect), copied and compared
 *
 *              looked at too much in vain             rolled back, committed
 *     open ─────────────────────────────▶ armed  ◀──────────────────┐
 *      ▲      (protected, then listed)      │  └───────────────────┘
 *      └────────────────────────────────────┘
 *        faults cost more than looking would; somebody put another mapping there
 *
 * I10  The set `dirty` is sticky: what was found stays in it until the commit that carried it has succeeded
 *      (pm_watch_carried), or a rollback has dropped it (pm_watch_restored). Only armed extents depend on it: of
 *      others, all that may differ is found again each time.
 * D2   Protect, then copy: pm_watch_look comes before any byte is copied, and protects what it lists.
 * I9   Space that is used for something else is watched no longer (pm_watch_forget).
 */
#ifndef PM_WATCH_H
#define PM_WATCH_H

#include "tracker.h"

typedef enum {
    PM_LOOK_ALL,    /* every page */
    PM_LOOK_SOME,    /* those in `dirty`, most of which will be equal */
    PM_LOOK_CHANGED, /* those in `dirty`, most of which will differ */
    PM_LOOK_ONLY     /* those in `only`: a promise says that no others changed */
} pm_look;

/* What was learned of an extent. Times are in nanoseconds. */
typedef struct {
    uint64_t offset, pages;
    bool armed, filled;
    bool refused;       /* the kernel would not: never again */
    uint64_t looked;    /* pages that the running commit looks at */
    int64_t asking;     /* what it took, the last time, to learn which of an open extent's are private */
    uint64_t resident;  /* about as many are private */
    uint64_t present;   /* twice the pages that were in memory when it was armed, plus those listed since */
    int64_t regret;     /* how much the other way would have saved since the last change; below 0: credit */
    unsigned patience;  /* it must save this much more than a change costs: changes that were regretted raise it */
    unsigned rewarded;  /* commits in a row without regret */
    unsigned blind;     /* commits left that don't ask which pages are private, for most are */
} pm_watch;

enum {
    PM_WATCH_LEAST = 64,  /* pages: to compare fewer takes no longer than to ask the kernel */
    PM_SHARED_FROM = 1024 /* pages: fewer are compared sooner than a second thread wakes */
};

typedef struct {
    pm_tracker tracker;
    bool shared;       /* two threads compare extents of so many pages and more */
    bool known;        /* the tracker was opened; that waits until it is needed */
    int fd;
    uint64_t fd_start; /* where in the file the region begins */
    uint8_t *live;
    pm_page_set dirty, only;
    uint64_t only_from, only_end; /* no page outside is in `only`; both 0: none is */
    pm_watch *list;    /* by offset */
    size_t count, room, armed;
} pm_watches;

/* `dirty` and `only` have room for a bit for each page of the region, always. An error only if PMSTORE_TRACKER asks for
 * what does not work. */
pm_status pm_watch_open(pm_watches *watches, uint8_t *live, int fd, uint64_t fd_start);
void pm_watch_close(pm_watches *watches);
pm_tracker_kind pm_watch_kind(pm_watches *watches); /* the best that there is */

/* Pages that a promise names: `only`, until the extents that have them are told to drop theirs, and pm_watch_dropped.
 * To look for them, and to drop them, takes as long as they are far apart, not as the extent is large. */
void pm_watch_promise(pm_watches *watches, uint64_t page, uint64_t end);
/* The first in [page, end); end if none is */
uint64_t pm_watch_promised(const pm_watches *watches, uint64_t page, uint64_t end);
void pm_watch_drop_promise(pm_watches *watches, uint64_t page, uint64_t end);
void pm_watch_dropped(pm_watches *watches);

/* The following take an extent with pages of its own, by its offset, and the number of pages that its contents
 * touch. */

/* Once for each commit, before a byte is copied. */
pm_look pm_watch_look(pm_watches *watches, uint64_t offset, uint64_t pages);

/* The commit that looked has succeeded, and found so many pages changed. */
void pm_watch_carried(pm_watches *watches, uint64_t offset, uint64_t pages, uint64_t changed);

/* The same of a commit that looked at so many pages only, because of a promise. Others stay as they were. */
void pm_watch_carried_only(pm_watches *watches, uint64_t offset, uint64_t looked);

/* The commit that has succeeded took all of it, without a look. */
void pm_watch_carried_whole(pm_watches *watches, uint64_t offset);

/* A rollback: true if `dirty` has all that must be dropped, false if that may be any page. */
bool pm_watch_restore(pm_watches *watches, uint64_t offset, uint64_t pages);
void pm_watch_restored(pm_watches *watches, uint64_t offset, uint64_t pages);

/* What stands in this range is watched no longer. */
void pm_watch_forget(pm_watches *watches, uint64_t offset, uint64_t length);

#endif
