/*
 * Begin, commit, roll back: which bytes go where.
 *
 *            first change                    pm_commit
 *   CLEAN ────────────────▶ PENDING ─────────────────────▶ CLEAN
 *                            │  ▲ │ pm_rollback ──────────▶ CLEAN
 *                            └──┘ no space: stays PENDING
 *   any ── a write or sync fails ──▶ FAILED ── reopen ──▶ recovered (D7)
 *
 * What is pending is nowhere noted as such: it is what differs from home (I2), the edited metadata, and the fresh
 * extents.
 *
 * Locks, outermost first. Whoever holds one takes only locks below it, so no two threads wait for each other.
 *
 *   lock                        over                              taken by
 *   list of open stores         store_forks.c                     opening, closing; a fork, which takes the others too
 *   a store's mutex             the store                         every call; not releasing a buffer
 *   behind.asking, async.mutex  what a thread of the store has    that thread, and whoever waits for it
 *   helper.mutex                just begun or done
 *   (a schedule's)              under a trace only                schedule.c
 *
 * Who waits for whom:
 *
 *   waits, with                 for                               which needs meanwhile
 *   a call, no lock             home's job (behind.busy)          the store's mutex at its end; pm_wait gave it back
 *   a call, the store's mutex   a write-back (behind.is_asking)   behind.asking, then the store's mutex when it is over
 *   a call, the store's mutex   a background sync (async.done)    async.mutex
 *   a commit, the store's mutex the second comparer               helper.mutex
 *   close, no lock              the end of both threads           the store's mutex
 *
 * So none of the four that are waited for with the store's mutex held takes it before it has said that it is done. A
 * failure is a state (failed, untold), never a wait.
 */
#ifndef PM_TRANSACTION_H
#define PM_TRANSACTION_H

#include "gather.h"
#include "slots.h"
#include "thread.h"

typedef struct pm_async pm_async;

/* An extent allocated since the last commit. */
typedef struct {
    uint64_t offset, length;
    bool owned;          /* by an entry of the catalog; if not, a commit frees it */
    bool opened;         /* a program may have changed it through memory */
    /* Of its blocks as they stand in their place, 0: not known. NULL: nothing is known, or it is small */
    uint64_t *hashes;
    uint64_t table_hash; /* of one with pages of its own, once its contents and hashes are in their place */
    pm_digest digest;    /* of its blocks, likewise */
} pm_fresh;

/* A record is durable, and home does not show it yet. */
typedef struct {
    const uint8_t *body; /* NULL: there is none */
    uint64_t length;
    uint64_t before; /* where the log ended without it */
} pm_home_job;

/* See transaction_home.c. Under the store's mutex. */
typedef struct {
    pm_home_job job; /* that is put up */
    bool spilled;    /* the last record's body is in free pages, so a checkpoint comes before anything else (I9) */
    bool stuck;      /* there was no space for it: who enters next tries again, and nobody else does */
    bool busy;       /* the thread has taken it: home is its own, and all that is noted of home */
    pm_condition put_up, done;
    /* The thread asks for pages of home to be written back, beside what the program does. Set under the store's mutex,
     * reset under this one, which is innermost. */
    pm_mutex asking;
    pm_condition asked;
    bool is_asking, refused; /* refused: one of them failed */
    pm_thread thread;
    bool threaded, alone; /* alone: no thread can be started, or is to be any more */
    bool stop;
} pm_behind;

struct pm_store {
    pm_mutex mutex; /* over everything below */
    pm_schedule *schedule; /* of the background work; NULL: the system's */
    atomic_int references; /* living buffers, and one for the open store */
    bool closed, forked;
    bool failed;    /* a write or a sync failed: nothing more is written (D7) */
    bool untold;    /* it was behind a call's back, and none has said so yet */
    bool home_torn; /* home is not the last commit: it waits to be brought up to date, or that failed */
    bool rollback_due; /* one was refused: no change is taken before it is done (I11) */
    pm_media media;
    pm_log log;
    pm_region region;
    pm_writer writer;
    uint64_t max_size;
    pm_fresh *fresh; /* by offset */
    size_t fresh_count, fresh_room;
    pm_candidate *list; /* of the running commit */
    size_t list_room;
    pm_digest freed; /* terms of extents that the last commit has, and that nobody owns any more */
    uint64_t commits_since_reset, last_body;
    uint64_t logged; /* bytes of the log that records have taken, with header and padding */
    bool home_durable;            /* nothing was written home since it was synced */
    uint64_t home_from, home_to;  /* file offsets: between them home was written, and not asked to be written back */
    pm_behind behind;
    pm_helper helper;
    pm_async *async; /* NULL: every commit is durable when it returns */
    pm_statistics statistics;
    pm_store *next; /* list of open stores, for forks */
};

/* A write or a sync failed: what the medium holds is unknown, so nothing more is written (D7). */
pm_status pm_failed(pm_store *store, pm_status status);
/* The same, where a lack of space leaves everything as it was: a write that needed it was not made. */
pm_status pm_failed_unless_space(pm_store *store, pm_status status);
/* The same, where a lack of memory does so too: before anything is written. */
pm_status pm_failed_if_io(pm_store *store, pm_status status);

/* only: looks at metadata, fresh extents and what pm_region_mark was told. */
pm_status pm_transaction_commit(pm_store *store, bool only);
/* What may differ from home and belongs to the new state, in ascending order, and where it may. only: as above. */
pm_status pm_transaction_search(pm_store *store, bool only, pm_candidate **list, size_t *count);
/* See pm_commit_only: the ranges are marked, for the next commit. */
void pm_transaction_promise(pm_store *store, const pm_range *ranges, size_t count);

/* See pm_holds. */
bool pm_transaction_holds(const pm_store *store, const void *address, uint64_t length);

/* See pm_unpromised. */
void pm_transaction_unpromised(pm_store *store, const pm_range *ranges, size_t count, pm_broken *out);

void pm_transaction_rollback(pm_store *store);

/* Tells the trace, if there is one, of a step that leads to the state that the program sees now. */
pm_status pm_transaction_mark(pm_store *store, pm_event_kind kind, uint64_t sequence);

/* Home becomes durable and the log empty. clean: nothing will follow. */
pm_status pm_transaction_checkpoint(pm_store *store, bool clean);

/* Makes room for `pages` more pages in a row. */
pm_status pm_transaction_grow(pm_store *store, uint64_t pages);

/* Fresh extents. */
pm_status pm_transaction_alloc(pm_store *store, uint64_t length, uint64_t *offset);
pm_status pm_transaction_free(pm_store *store, uint64_t offset, uint64_t length);
pm_fresh *pm_transaction_fresh(const pm_store *store, uint64_t offset); /* NULL if it is not one */
void pm_transaction_forget_fresh(pm_store *store);

/* Contents of a fresh extent, within its length. From the start of the extent for pm_direct_fill; whole patterns. */
pm_status pm_direct_write(pm_store *store, pm_fresh *extent, uint64_t at, const void *source, uint64_t length);
pm_status pm_direct_fill(pm_store *store, pm_fresh *extent, uint64_t length, const void *pattern,
                         size_t pattern_length);
/* Before a commit: brings the place of one that is not small up to date with what the program sees, and writes its
 * table of hashes. */
pm_status pm_direct_finish(pm_store *store, pm_fresh *extent);

/* A settled extent that programs may have changed. */
static inline bool pm_transaction_may_change(const pm_store *store, const pm_buffer *buffer)
{
    return buffer->owned && buffer->writable && !(store->fresh_count && pm_transaction_fresh(store, buffer->offset));
}

enum { PM_DENSE_FROM_FILE = 1 << 20 }; /* bytes: on disks, shorter extents have one slot */

/* Extents with two slots. Before anything is gathered: which get or lose the second one, and which are written whole.
 * What an attempt that failed has written is written again. */
pm_status pm_transaction_write_slots(pm_store *store, bool only);
void pm_transaction_declare_slots(pm_store *store, pm_digest *digest); /* in the record */
/* Before its memory is given back */
pm_status pm_transaction_fill_seat(pm_store *store, uint64_t place, uint64_t length);
void pm_transaction_flip_slots(pm_store *store); /* it is durable: what was written is home from here on (I2) */
/* Which extents change as a whole, time and again */
void pm_transaction_learn(pm_store *store, const pm_candidate *list, size_t count);

/* Home behind the log (D13). */
void pm_home_open(pm_store *store);
/* Home is to show this commit: when it returns or, if may_wait, at the latest when somebody enters the store. */
pm_status pm_home_follow(pm_store *store, pm_home_job job, bool may_wait);
/* Home shows the last commit when it returns PM_OK (I2). PM_NO_SPACE: later, perhaps. */
pm_status pm_home_catch_up(pm_store *store);
pm_status pm_home_sync(pm_store *store);     /* and is durable */
/* The thread is not asking for anything to be written back, and nothing that it asked for has failed. */
pm_status pm_home_asked(pm_store *store);
void pm_home_stop(pm_store *store);          /* no thread is left; without the store's mutex */

/* Commits that are durable some time after they returned (D11), from now on. interval: nanoseconds. */
pm_status pm_async_open(pm_store *store, uint64_t interval);
pm_status pm_async_start(pm_store *store); /* the thread, if there is to be one and there is none */
void pm_async_stop(pm_store *store); /* no thread is left; without the store's mutex */
void pm_async_free(pm_store *store);
pm_status pm_async_settle(pm_store *store); /* all commits are durable, and home in the file */
pm_status pm_async_sync(pm_store *store);   /* all commits are durable */
/* The record in the log, and its items. */
void pm_async_committed(pm_store *store, uint64_t record, const uint8_t *body, uint64_t length);
void pm_async_acknowledged(pm_store *store);
void pm_async_emptied(pm_store *store); /* the log was */

/* Runs an operation again after growing the region, if all that it lacked was space. */
#define PM_WITH_SPACE(store, pages, status, operation)                                                      \
    do {                                                                                                    \
        (status) = (operation);                                                                             \
        if ((status) != PM_NO_SPACE || ((status) = pm_transaction_grow((store), (pages))) != PM_OK) break; \
    } while (1)

#endif
