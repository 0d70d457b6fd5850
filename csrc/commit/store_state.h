/*
 * The state of an open store. Each part of the fields belongs to the unit that is named beside it; other units read it.
 *
 *            first change                    pm_commit
 *   CLEAN ────────────────▶ PENDING ─────────────────────▶ CLEAN
 *                            │  ▲ │ pm_rollback ──────────▶ CLEAN
 *                            └──┘ no space: stays PENDING
 *   any ── a write or sync fails ──▶ FAILED ── reopen ──▶ recovered (D7)
 *
 * No field says that a change is pending. Pending are the bytes that differ from the committed image (I2), the edited
 * metadata, and the uncommitted extents.
 *
 * Locks, outermost first. A thread that holds a lock takes only locks below it, so no two threads wait for each other.
 *
 *   lock                        protects                          taken by
 *   list of open stores         store/forks.c                     opening, closing; a fork, which takes the others too
 *   a store's mutex             the store                         every call except the release of a buffer
 *   async.mutex                 the fields of its thread          that thread, and every thread that waits for it
 *   helper.mutex                the helper's state                a commit and the helper
 *   (a schedule's)              under a trace only                base/schedule.c
 *
 * Which thread waits for which:
 *
 *   waiting, lock held          for                               which meanwhile needs
 *   a call, none                the write-back job (busy)         the store's mutex, which pm_thread_wait gave back
 *   a call, the store's mutex   a background sync (async.done)    async.mutex
 *   a commit, the store's mutex the second comparer               helper.mutex
 *   close, none                 the end of both threads           the store's mutex
 *
 * A thread for which another waits with the store's mutex held reports its end before it takes that mutex. A failure is
 * a state (failed, unreported). No thread waits for a failure.
 */
#ifndef PM_STORE_STATE_H
#define PM_STORE_STATE_H

#include "base/helper.h"
#include "base/thread.h"
#include "log/log.h"
#include "space/region.h"

typedef struct pm_async pm_async;         /* commit/async.c */
typedef struct pm_candidate pm_candidate; /* commit/gather.h */

/* An extent that was allocated since the last commit. */
typedef struct {
    uint64_t offset, length;
    bool owned;  /* an entry of the catalog owns it; otherwise the next commit frees it */
    bool opened; /* a program may have changed it through memory */
    /* Of the blocks that were written to their place; 0: not known. NULL: none is known, or the extent is small */
    uint64_t *hashes;
    /* Of an extent with pages of its own, once its contents and hashes are in their place: */
    uint64_t table_hash;
    pm_digest digest; /* the contribution of its blocks */
} pm_uncommitted;

/* Owned by commit/uncommitted.c. */
typedef struct {
    pm_uncommitted *list; /* by offset */
    size_t count, room;
    pm_digest freed; /* contributions of committed extents that have no owner any more */
} pm_uncommitted_list;

/* Memory for the candidates of a commit, owned by commit/candidates.c. It is kept, as large memory is slow to get. */
typedef struct {
    pm_candidate *list;
    size_t room;
} pm_candidate_list;

/* The committed image in the file, owned by commit/image.c. */
typedef struct {
    bool outdated; /* it does not show the last commit yet: the write-back is enqueued, or has failed */
    bool durable;  /* nothing was written to it since it was synced */
    /* File offsets: between them it was written, and the kernel was not asked to write it back. Both 0: nothing was */
    uint64_t from, to;
} pm_image;

/* How records use the log: commit/checkpoint.c chooses the size of the log by it. */
typedef struct {
    uint64_t commits;   /* since the log was emptied */
    uint64_t last_body; /* bytes of the last record's body; 0: it overflowed */
    uint64_t logged;    /* bytes of the log that this process's records took, with header and padding */
} pm_log_use;

/* A durable record that the committed image does not show yet. */
typedef struct {
    const uint8_t *body; /* NULL: there is none */
    uint64_t length;
    uint64_t before; /* the end of the log without this record */
} pm_write_back_job;

/* The deferred write-back, owned by commit/write_back.c. */
typedef struct {
    pm_write_back_job job; /* the enqueued job */
    bool overflowed; /* the last record's body is in free pages, so a checkpoint comes before anything else (I9) */
    bool stuck;      /* the job lacked space: the next call tries again, and the thread does not */
    bool busy;       /* the thread has taken the job, and is the only one that uses the committed image */
    pm_condition enqueued, done;
    pm_thread thread;
    bool threaded;   /* the thread runs */
    bool alone;      /* no thread can be started, or none may be started any more */
    bool stop;       /* asks the thread to end */
} pm_write_back;

/* What this process knows of readers, owned by commit/readers.c. */
typedef struct {
    atomic_ullong polled; /* the time of the last poll, in nanoseconds */
    atomic_bool waiting;  /* some wait for a commit */
    /* After a pause that no reader ended, requests are ignored; used only by the thread that polls */
    uint64_t ignored_until, ignored_for;
} pm_readers;

struct pm_store {
    pm_mutex mutex;        /* protects all fields below */
    pm_schedule *schedule; /* of the background work; NULL: the system's threads */
    atomic_int references; /* living buffers, and one for the open store */
    pm_store *next;        /* in the list of open stores (store/forks.c) */

    /* Read on entering, in store/store.c */
    bool closed, forked;
    bool failed;       /* a write or a sync failed: nothing more is written (D7) */
    bool unreported;   /* a background write failed, and the error has not been reported yet */
    bool rollback_due; /* a rollback was refused: no change is accepted before it is done (I11) */

    /* The layers below */
    uint64_t max_size; /* of the file; 0: no limit */
    pm_media media;
    pm_log log;
    pm_region region;

    /* The running commit */
    pm_writer writer;
    pm_helper helper; /* the second comparer */
    pm_candidate_list candidates;
    pm_uncommitted_list uncommitted;

    /* After the commit */
    pm_log_use log_use;
    pm_image image;
    pm_write_back write_back;
    pm_readers readers;
    pm_async *async; /* NULL: every commit is durable when it returns */

    pm_statistics statistics;
};

#endif
