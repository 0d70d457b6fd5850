#include "watch.h"

#include <stdlib.h>
#include <string.h>

#include "thread.h"

/* What things cost, in nanoseconds a page; benchmarks/bench_trackers.py shows whether what follows from them is
 * right. */
enum {
    FAULT = 1100,  /* the first store into an armed page, and protecting it again */
    FAULT_NEXT = 500, /* the same if most pages are written: what the kernel needs for one is at hand for the next */
    ARM = 60,      /* protecting a private page for the first time */
    DISARM = 80,
    /* To be told whether a page is private: the kernel looks at what it knows of each that is in memory */
    ASK_MOST = 40,
    COLLECT = 1200, /* to ask for written pages at all, and one more for each page */
    CHANGE = 20000  /* arming or disarming at all: the mapping is split or joined */
};

enum {
    ARMED_MOST = 1024,  /* each splits the mapping, and the system limits how often */
    PATIENCE_LEAST = 2,
    PATIENCE_MOST = 64,
    REWARDED_ENOUGH = 16,
    BLIND_FOR = 15,
    CREDIT = 8
};

/* To compare a page that is equal: it and home come from a cache, or from memory. Two threads take more than half as
 * long, for the first one gathers, too: 50 MB of which 1600 to 2000 random pages were written take as long in either
 * way. */
static int64_t cost_of_looking(const pm_watches *watches, uint64_t pages)
{
    int64_t alone = pages <= 1024 ? 80 : pages <= 4096 ? 150 : 190;
    return watches->shared && pages >= PM_SHARED_FROM ? alone * 2 / 3 : alone;
}

static int64_t cost_of_change(const pm_watch *watch)
{
    return CHANGE + (int64_t)watch->resident * (watch->armed ? DISARM : ARM);
}

static const uint8_t *place(const pm_watches *watches, const pm_watch *watch)
{
    return watches->live + watch->offset;
}

/* ---- the list ------------------------------------------------------------------------------------------------- */

static size_t first_from(const pm_watches *watches, uint64_t offset)
{
    size_t low = 0, high = watches->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (watches->list[middle].offset < offset) low = middle + 1;
        else high = middle;
    }
    return low;
}

static pm_watch *find(const pm_watches *watches, uint64_t offset)
{
    size_t at = first_from(watches, offset);
    return at < watches->count && watches->list[at].offset == offset ? &watches->list[at] : NULL;
}

/* NULL if there is no memory: such an extent is compared whole. */
static pm_watch *find_or_add(pm_watches *watches, uint64_t offset, uint64_t pages)
{
    pm_watch *found = find(watches, offset);
    if (found) return found;
    if (watches->count == watches->room) {
        size_t room = watches->room ? 2 * watches->room : 16;
        pm_watch *list = realloc(watches->list, room * sizeof *list);
        if (!list) return NULL;
        watches->list = list, watches->room = room;
    }
    size_t at = first_from(watches, offset);
    memmove(&watches->list[at + 1], &watches->list[at], (watches->count - at) * sizeof *watches->list);
    watches->count++;
    watches->list[at] = (pm_watch){.offset = offset, .pages = pages, .patience = PATIENCE_LEAST};
    return &watches->list[at];
}

/* ---- arming ---------------------------------------------------------------------------------------------------- */

/* From the next commit on, all that may differ is found anew each time: nothing is lost if the set goes. */
static void disarm(pm_watches *watches, pm_watch *watch)
{
    pm_tracker_disarm(&watches->tracker, place(watches, watch), watch->pages * PM_PAGE);
    watch->armed = watch->filled = false;
    watch->regret = 0;
    watch->rewarded = 0;
    watches->armed--;
}

static bool wants_to_be_armed(const pm_watches *watches, const pm_watch *watch)
{
    if (watches->tracker.kind != PM_TRACKER_UFFD || watch->refused || watches->armed >= ARMED_MOST) return false;
    return watches->tracker.forced || watch->regret > cost_of_change(watch) * watch->patience;
}

/* Most pages may be private by now: protecting the others too makes the kernel's list of written ones come twice as
 * fast. */
static void fill_if_worthwhile(pm_watches *watches, pm_watch *watch)
{
    if (watch->filled || watch->present < watch->pages) return;
    watch->filled = pm_tracker_fill(&watches->tracker, place(watches, watch), watch->pages * PM_PAGE);
    watch->present = 0;
}

/* ---- commit ----------------------------------------------------------------------------------------------------- */

static pm_look look_at_armed(pm_watches *watches, pm_watch *watch)
{
    int64_t found = pm_tracker_collect(&watches->tracker, place(watches, watch), watch->pages * PM_PAGE, watch->filled,
                                       &watches->dirty);
    if (found < 0) {
        disarm(watches, watch);
        watch->refused = true;
        return PM_LOOK_ALL;
    }
    watch->looked = (uint64_t)found;
    watch->present += watch->looked;
    fill_if_worthwhile(watches, watch);
    return PM_LOOK_CHANGED;
}

static pm_look look_at_open(pm_watches *watches, pm_watch *watch)
{
    watch->looked = watch->resident = watch->pages;
    watch->asking = 0;
    if (watch->blind) {
        watch->blind--;
        return PM_LOOK_ALL;
    }
    int64_t start = (int64_t)pm_now(NULL), most = (int64_t)watch->pages * ASK_MOST;
    int64_t found =
        pm_tracker_private(&watches->tracker, place(watches, watch), watch->pages * PM_PAGE, &watches->dirty);
    if (found < 0) return PM_LOOK_ALL;
    /* Nearly nothing for pages that are not in memory. What takes longer than it can was interrupted. */
    int64_t taken = (int64_t)pm_now(NULL) - start;
    watch->asking = taken < most ? taken : most;
    watch->looked = watch->resident = (uint64_t)found;
    if (watch->looked > watch->pages / 2 && !watches->tracker.forced) watch->blind = BLIND_FOR;
    return PM_LOOK_SOME;
}

pm_look pm_watch_look(pm_watches *watches, uint64_t offset, uint64_t pages)
{
    if (pages < PM_WATCH_LEAST && !(watches->known && watches->tracker.forced)) return PM_LOOK_ALL;
    if (pm_watch_kind(watches) == PM_TRACKER_COMPARE) return PM_LOOK_ALL;
    pm_watch *watch = find_or_add(watches, offset, pages);
    if (!watch) return PM_LOOK_ALL;
    if (watch->pages != pages) { /* two extents at one place: only a damaged file has that */
        pm_watch_forget(watches, offset, PM_PAGE);
        return PM_LOOK_ALL;
    }
    if (watch->armed) return look_at_armed(watches, watch);
    if (wants_to_be_armed(watches, watch)) {
        /* Protected first: a store that this look misses is seen by the next one. What was written before made its page
         * private. */
        int64_t present = pm_tracker_arm(&watches->tracker, place(watches, watch), pages * PM_PAGE);
        watch->armed = present >= 0;
        watch->refused = !watch->armed;
        watch->present = 2 * (uint64_t)present;
        watches->armed += watch->armed;
        watch->regret = 0;
        watch->blind = 0;
    }
    pm_look how = look_at_open(watches, watch);
    if (!watch->armed) return how;
    watch->looked = 0; /* none of these was a fault */
    fill_if_worthwhile(watches, watch);
    /* What this commit can't list, no later one would. */
    if (how == PM_LOOK_ALL) disarm(watches, watch);
    return how;
}

static void disarm_if_regretted(pm_watches *watches, pm_watch *watch)
{
    if (watch->regret <= cost_of_change(watch)) return;
    disarm(watches, watch);
    if (watch->patience < PATIENCE_MOST) watch->patience *= 4;
}

static void learn(pm_watches *watches, pm_watch *watch, uint64_t changed)
{
    int64_t looking = cost_of_looking(watches, watch->pages);
    int64_t faults = (int64_t)watch->looked * (watch->looked > watch->pages / 2 ? FAULT_NEXT : FAULT);
    if (!watch->armed) {
        uint64_t in_vain = watch->looked > changed ? watch->looked - changed : 0;
        watch->regret +=
            watch->asking + (int64_t)in_vain * looking - (int64_t)changed * FAULT - COLLECT - (int64_t)watch->pages;
    } else {
        watch->resident =
            watch->resident + watch->looked < watch->pages ? watch->resident + watch->looked : watch->pages;
        watch->regret += faults - (int64_t)watch->resident * looking - watch->asking;
        watch->rewarded = watch->regret > 0 ? 0 : watch->rewarded + 1;
        if (watch->rewarded == REWARDED_ENOUGH) watch->patience = PATIENCE_LEAST;
    }
    /* What arming has saved is its credit: one commit that changes everything need not end it. */
    int64_t least = watch->armed ? -CREDIT * (CHANGE + (int64_t)watch->pages * DISARM) : 0;
    if (watch->regret < least) watch->regret = least;
    if (watch->armed) disarm_if_regretted(watches, watch);
}

void pm_watch_carried(pm_watches *watches, uint64_t offset, uint64_t pages, uint64_t changed)
{
    pm_page_clear(&watches->dirty, offset / PM_PAGE, offset / PM_PAGE + pages);
    pm_watch *watch = find(watches, offset);
    if (!watch) return;
    if (!watches->tracker.forced) learn(watches, watch, changed);
}

void pm_watch_carried_only(pm_watches *watches, uint64_t offset, uint64_t looked)
{
    pm_watch *watch = find(watches, offset);
    if (!watch || !watch->armed || watches->tracker.forced) return;
    /* Unarmed, they would have been written without faults, and nobody would have asked. */
    watch->regret += (int64_t)looked * FAULT;
    disarm_if_regretted(watches, watch);
}

void pm_watch_carried_whole(pm_watches *watches, uint64_t offset)
{
    pm_watch *watch = find(watches, offset);
    /* Of an armed one the next look lists the pages that it cost. */
    if (!watch || watch->armed || watches->tracker.forced) return;
    watch->resident = watch->pages;
    watch->regret -= (int64_t)watch->pages * FAULT_NEXT;
    if (watch->regret < 0) watch->regret = 0;
}

/* ---- promises --------------------------------------------------------------------------------------------------- */

void pm_watch_promise(pm_watches *watches, uint64_t page, uint64_t end)
{
    pm_page_add(&watches->only, page, end);
    if (!watches->only_end || page < watches->only_from) watches->only_from = page;
    if (end > watches->only_end) watches->only_end = end;
}

uint64_t pm_watch_promised(const pm_watches *watches, uint64_t page, uint64_t end)
{
    uint64_t from = page > watches->only_from ? page : watches->only_from,
             to = end < watches->only_end ? end : watches->only_end;
    uint64_t found = pm_page_next(&watches->only, from, to);
    return found < to ? found : end;
}

void pm_watch_drop_promise(pm_watches *watches, uint64_t page, uint64_t end)
{
    pm_page_clear(&watches->only, page > watches->only_from ? page : watches->only_from,
                  end < watches->only_end ? end : watches->only_end);
}

void pm_watch_dropped(pm_watches *watches)
{
    watches->only_from = watches->only_end = 0;
}

/* ---- rollback and reuse
 * -------------------------------------------------------------------------------------------- */

bool pm_watch_restore(pm_watches *watches, uint64_t offset, uint64_t pages)
{
    pm_watch *watch = find(watches, offset);
    if (!watch || !watch->armed || watch->pages != pages) return false;
    return look_at_armed(watches, watch) == PM_LOOK_CHANGED;
}

void pm_watch_restored(pm_watches *watches, uint64_t offset, uint64_t pages)
{
    if (find(watches, offset)) pm_page_clear(&watches->dirty, offset / PM_PAGE, offset / PM_PAGE + pages);
}

void pm_watch_forget(pm_watches *watches, uint64_t offset, uint64_t length)
{
    size_t kept = 0;
    for (size_t i = 0; i < watches->count; i++) {
        pm_watch *watch = &watches->list[i];
        uint64_t end = watch->offset + watch->pages * PM_PAGE;
        if (watch->offset >= offset + length || end <= offset) {
            watches->list[kept++] = *watch;
            continue;
        }
        if (watch->armed) disarm(watches, watch);
        pm_page_clear(&watches->dirty, watch->offset / PM_PAGE, end / PM_PAGE);
    }
    watches->count = kept;
}

/* ---- life
 * -------------------------------------------------------------------------------------------------------------- */

static pm_status open_tracker(pm_watches *watches)
{
    watches->known = true;
    return pm_tracker_open(&watches->tracker, watches->fd, watches->fd_start);
}

pm_status pm_watch_open(pm_watches *watches, uint8_t *live, int fd, uint64_t fd_start)
{
    watches->fd = fd, watches->fd_start = fd_start;
    watches->live = live, watches->dirty.base = live, watches->only.base = live;
    watches->tracker = (pm_tracker){.uffd = -1, .pagemap = -1};
    return pm_tracker_is_forced() ? open_tracker(watches) : PM_OK;
}

/* Later than when the store is opened: to prove a tracker takes as long as to open a store, and many have no large
 * arrays. */
pm_tracker_kind pm_watch_kind(pm_watches *watches)
{
    if (!watches->known) (void)open_tracker(watches);
    return watches->tracker.kind;
}

void pm_watch_close(pm_watches *watches)
{
    pm_tracker_close(&watches->tracker);
    free(watches->list);
    watches->list = NULL;
    watches->count = watches->room = 0;
    watches->known = true;
}
