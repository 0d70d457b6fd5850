#include "dirty/policy.h"

#include <stdlib.h>
#include <string.h>

#include "base/search.h"
#include "base/thread.h"

/* Costs in nanoseconds a page. benchmarks/bench_trackers.py shows whether the decisions that follow from them are
 * right. */
enum {
    FAULT = 1100,   /* the first store into an armed page, and protecting it again */
    ARM = 60,       /* protecting a private page for the first time */
    DISARM = 80,
    ASK_MOST = 40,  /* asking whether a page is private; this costs nearly nothing if it is not in memory */
    COMPARE = 120,  /* comparing an equal page with the committed image */
    COLLECT = 1200, /* asking for written pages at all; each page adds one */
    CHANGE = 20000  /* arming or disarming at all: it splits or joins the mapping */
};

enum {
    ARMED_MOST = 1024, /* each one splits the mapping, and the system limits the number of mappings */
    HYSTERESIS = 2,    /* arming must save so many times its cost */
    SKIP_FOR = 15      /* commits: asking is a good part of the cost of a commit that changes little */
};

static int64_t cost_of_change(const pm_learned *learned)
{
    return CHANGE + (int64_t)learned->resident * (learned->armed ? DISARM : ARM);
}

static const uint8_t *place(const pm_policy *policy, const pm_learned *learned)
{
    return policy->live + learned->offset;
}

/* ---- the list ------------------------------------------------------------------------------------------------- */

static size_t first_from(const pm_policy *policy, uint64_t offset)
{
    return PM_FIRST(i, policy->count, policy->list[i].offset >= offset);
}

static pm_learned *find(const pm_policy *policy, uint64_t offset)
{
    size_t at = first_from(policy, offset);
    return at < policy->count && policy->list[at].offset == offset ? &policy->list[at] : NULL;
}

/* NULL if there is no memory: such an extent is compared in full. */
static pm_learned *find_or_add(pm_policy *policy, uint64_t offset, uint64_t pages)
{
    pm_learned *found = find(policy, offset);
    if (found) return found;
    if (policy->count == policy->room) {
        size_t room = policy->room ? 2 * policy->room : 16;
        pm_learned *list = realloc(policy->list, room * sizeof *list);
        if (!list) return NULL;
        policy->list = list, policy->room = room;
    }
    size_t at = first_from(policy, offset);
    memmove(&policy->list[at + 1], &policy->list[at], (policy->count - at) * sizeof *policy->list);
    policy->count++;
    policy->list[at] = (pm_learned){.offset = offset, .pages = pages};
    return &policy->list[at];
}

/* ---- arming ---------------------------------------------------------------------------------------------------- */

/* Nothing is lost: from the next commit on, all pages that may differ are found anew each time. */
static void disarm(pm_policy *policy, pm_learned *learned)
{
    pm_tracker_disarm(&policy->tracker, place(policy, learned), learned->pages * PM_PAGE);
    learned->armed = learned->filled = false;
    learned->balance = 0;
    policy->armed--;
}

static bool wants_to_be_armed(const pm_policy *policy, const pm_learned *learned)
{
    if (policy->tracker.kind != PM_TRACKER_UFFD || learned->refused || policy->armed >= ARMED_MOST) return false;
    return policy->tracker.forced || learned->balance > cost_of_change(learned) * HYSTERESIS;
}

/* Most pages may be private by now. Protecting the others too makes the kernel's list of written pages faster. */
static void fill_if_worthwhile(pm_policy *policy, pm_learned *learned)
{
    if (learned->filled || learned->present < learned->pages) return;
    learned->filled = pm_tracker_fill(&policy->tracker, place(policy, learned), learned->pages * PM_PAGE);
    learned->present = 0;
}

/* ---- commit ----------------------------------------------------------------------------------------------------- */

static pm_scan_kind scan_armed(pm_policy *policy, pm_learned *learned)
{
    int64_t found = pm_tracker_collect(&policy->tracker, place(policy, learned), learned->pages * PM_PAGE,
                                       learned->filled, &policy->dirty);
    if (found < 0) {
        disarm(policy, learned);
        learned->refused = true;
        return PM_SCAN_ALL;
    }
    learned->scanned = (uint64_t)found;
    learned->present += learned->scanned;
    fill_if_worthwhile(policy, learned);
    return PM_SCAN_CHANGED;
}

static pm_scan_kind scan_open(pm_policy *policy, pm_learned *learned)
{
    learned->scanned = learned->resident = learned->pages;
    learned->asking = 0;
    if (learned->skips) {
        learned->skips--;
        return PM_SCAN_ALL;
    }
    int64_t start = (int64_t)pm_thread_now(NULL), most = (int64_t)learned->pages * ASK_MOST;
    int64_t found =
        pm_tracker_private(&policy->tracker, place(policy, learned), learned->pages * PM_PAGE, &policy->dirty);
    if (found < 0) return PM_SCAN_ALL;
    int64_t taken = (int64_t)pm_thread_now(NULL) - start;
    learned->asking = taken < most ? taken : most; /* a longer time means that the thread was interrupted */
    learned->scanned = learned->resident = (uint64_t)found;
    if (learned->scanned > learned->pages / 2 && !policy->tracker.forced) learned->skips = SKIP_FOR;
    return PM_SCAN_SOME;
}

pm_scan_kind pm_policy_scan(pm_policy *policy, uint64_t offset, uint64_t pages)
{
    if (pages < PM_POLICY_LEAST && !(policy->known && policy->tracker.forced)) return PM_SCAN_ALL;
    if (pm_policy_kind(policy) == PM_TRACKER_COMPARE) return PM_SCAN_ALL;
    pm_learned *learned = find_or_add(policy, offset, pages);
    if (!learned) return PM_SCAN_ALL;
    if (learned->pages != pages) { /* two extents at one place: only a damaged file has that */
        pm_policy_forget(policy, offset, PM_PAGE);
        return PM_SCAN_ALL;
    }
    if (learned->armed) return scan_armed(policy, learned);
    if (wants_to_be_armed(policy, learned)) {
        /* Protect first: the next scan sees a store that this one misses. An earlier store made its page private. */
        int64_t present = pm_tracker_arm(&policy->tracker, place(policy, learned), pages * PM_PAGE);
        learned->armed = present >= 0;
        learned->refused = !learned->armed;
        learned->present = 2 * (uint64_t)present;
        policy->armed += learned->armed;
        learned->balance = 0;
        learned->skips = 0;
    }
    pm_scan_kind how = scan_open(policy, learned);
    if (!learned->armed) return how;
    learned->scanned = 0; /* none of these pages was a fault */
    fill_if_worthwhile(policy, learned);
    /* No later commit would list what this one can't. */
    if (how == PM_SCAN_ALL) disarm(policy, learned);
    return how;
}

pm_status pm_policy_mark_dirty(pm_policy *policy, uint64_t offset, uint64_t pages, uint64_t page, uint64_t end)
{
    /* Without an entry in the list, nothing would take the pages out of `dirty` when their space is used again. */
    if (!find_or_add(policy, offset, pages)) return pm_fail(PM_NO_MEMORY, "no memory to note changed pages");
    pm_page_set_add(&policy->dirty, page, end);
    return PM_OK;
}

static void disarm_if_worthwhile(pm_policy *policy, pm_learned *learned)
{
    if (learned->balance > cost_of_change(learned)) disarm(policy, learned);
}

/* An open extent costs the question for its private pages, and the comparison of equal ones. An armed extent costs
 * faults, and the collection of written pages. */
static void learn(pm_policy *policy, pm_learned *learned, uint64_t changed)
{
    if (!learned->armed) {
        uint64_t in_vain = learned->scanned > changed ? learned->scanned - changed : 0;
        learned->balance += learned->asking + (int64_t)in_vain * COMPARE;
        learned->balance -= (int64_t)changed * FAULT + COLLECT + (int64_t)learned->pages;
    } else {
        learned->resident += learned->scanned;
        if (learned->resident > learned->pages) learned->resident = learned->pages;
        learned->balance += (int64_t)learned->scanned * FAULT - (int64_t)learned->resident * COMPARE - learned->asking;
    }
    if (learned->balance < 0) learned->balance = 0;
    if (learned->armed) disarm_if_worthwhile(policy, learned);
}

void pm_policy_committed(pm_policy *policy, uint64_t offset, uint64_t pages, uint64_t changed)
{
    pm_page_set_clear(&policy->dirty, offset / PM_PAGE, offset / PM_PAGE + pages);
    pm_learned *learned = find(policy, offset);
    if (!learned) return;
    if (!policy->tracker.forced) learn(policy, learned, changed);
}

void pm_policy_committed_only(pm_policy *policy, uint64_t offset, uint64_t scanned)
{
    pm_learned *learned = find(policy, offset);
    if (!learned || !learned->armed || policy->tracker.forced) return;
    /* In an open extent these pages would have been written without faults, and the kernel would not have been
     * asked. */
    learned->balance += (int64_t)scanned * FAULT;
    disarm_if_worthwhile(policy, learned);
}

void pm_policy_committed_whole(pm_policy *policy, uint64_t offset)
{
    pm_learned *learned = find(policy, offset);
    /* The next scan of an armed extent lists the pages that were faults. */
    if (!learned || learned->armed || policy->tracker.forced) return;
    learned->resident = learned->pages;
    learned->balance -= (int64_t)learned->pages * FAULT;
    if (learned->balance < 0) learned->balance = 0;
}

/* ---- declared write sets ----------------------------------------------------------------------------------------- */

void pm_policy_declare(pm_policy *policy, uint64_t page, uint64_t end)
{
    pm_page_set_add(&policy->only, page, end);
    if (!policy->only_end || page < policy->only_from) policy->only_from = page;
    if (end > policy->only_end) policy->only_end = end;
}

uint64_t pm_policy_declared(const pm_policy *policy, uint64_t page, uint64_t end)
{
    uint64_t from = page > policy->only_from ? page : policy->only_from,
             to = end < policy->only_end ? end : policy->only_end;
    uint64_t found = pm_page_set_next(&policy->only, from, to);
    return found < to ? found : end;
}

void pm_policy_drop(pm_policy *policy, uint64_t page, uint64_t end)
{
    pm_page_set_clear(&policy->only, page > policy->only_from ? page : policy->only_from,
                      end < policy->only_end ? end : policy->only_end);
}

void pm_policy_dropped(pm_policy *policy)
{
    policy->only_from = policy->only_end = 0;
}

/* ---- rollback and reuse ------------------------------------------------------------------------------------------ */

bool pm_policy_restore(pm_policy *policy, uint64_t offset, uint64_t pages)
{
    pm_learned *learned = find(policy, offset);
    if (!learned || !learned->armed || learned->pages != pages) return false;
    return scan_armed(policy, learned) == PM_SCAN_CHANGED;
}

void pm_policy_restored(pm_policy *policy, uint64_t offset, uint64_t pages)
{
    if (find(policy, offset)) pm_page_set_clear(&policy->dirty, offset / PM_PAGE, offset / PM_PAGE + pages);
}

void pm_policy_forget(pm_policy *policy, uint64_t offset, uint64_t length)
{
    size_t kept = 0;
    for (size_t i = 0; i < policy->count; i++) {
        pm_learned *learned = &policy->list[i];
        uint64_t end = learned->offset + learned->pages * PM_PAGE;
        if (learned->offset >= offset + length || end <= offset) {
            policy->list[kept++] = *learned;
            continue;
        }
        if (learned->armed) disarm(policy, learned);
        pm_page_set_clear(&policy->dirty, learned->offset / PM_PAGE, end / PM_PAGE);
    }
    policy->count = kept;
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

static pm_status open_tracker(pm_policy *policy)
{
    policy->known = true;
    return pm_tracker_open(&policy->tracker, policy->fd, policy->fd_start);
}

pm_status pm_policy_open(pm_policy *policy, uint8_t *live, int fd, uint64_t fd_start)
{
    policy->fd = fd, policy->fd_start = fd_start;
    policy->live = live, policy->dirty.base = live, policy->only.base = live;
    policy->tracker = (pm_tracker){.uffd = -1, .pagemap = -1};
    return pm_tracker_is_forced() ? open_tracker(policy) : PM_OK;
}

/* Not when the store is opened: testing a tracker takes as long as opening a store, and many stores have no large
 * arrays. */
pm_tracker_kind pm_policy_kind(pm_policy *policy)
{
    if (!policy->known) (void)open_tracker(policy);
    return policy->tracker.kind;
}

void pm_policy_close(pm_policy *policy)
{
    pm_tracker_close(&policy->tracker);
    free(policy->list);
    policy->list = NULL;
    policy->count = policy->room = 0;
}
