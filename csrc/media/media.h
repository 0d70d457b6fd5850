/*
 * Durable bytes. All writes and syncs of an open store's file come through here, so the trace sees every one. (Other
 * files, and what else a medium changes: docs/source.md, "Another medium".)
 *
 *   memory  tmpfs, mapped shared: cached or non-temporal stores, cache-line flushes, sfence, as its domain needs them
 *   dax     persistent memory: the same, mapped with MAP_SYNC (dax.h)
 *   file    pwrite, sync_file_range, RWF_DSYNC, fdatasync
 *
 * Each function that touches durable bytes reports what it did to the trace, if there is one (media/trace.h). One that
 * can fail asks the trace before. Both are points of the schedule (base/schedule.h), where other threads may run.
 */
#ifndef PM_MEDIA_H
#define PM_MEDIA_H

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>

#include "base/format.h"
#include "base/hash.h"
#include "media/direct_io.h"
#include "media/domain.h"
#include "media/file_system.h"
#include "media/lines.h"
#include "base/status.h"
#include "media/trace.h"

/* A C library older than Linux 4.15 lacks them. */
#ifndef MAP_SYNC
#define MAP_SYNC 0x80000
#endif
#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 3
#endif

typedef struct pm_media pm_media;

typedef enum {
    PM_WRITE_CACHED, /* memory: durable at the next fence after a flush. File: durable at the next fence */
    /* Durable at the next fence or write_through. File: on its way to the disk at once, if it is long */
    PM_WRITE_STREAM,
    /* The same, but the disk may fetch the bytes from memory later. The caller leaves `source` unchanged until the next
     * fence, write_through or await_writes. Whole pages, from a source at a multiple of PM_PAGE */
    PM_WRITE_BEGIN
} pm_write_how;

/* Pages of a file, [from, to), that were streamed; the kernel was asked to write back those before `begun`. */
typedef struct {
    uint64_t from, begun, to;
} pm_streamed;
enum { PM_STREAMED = 64 };

/*
 * What a medium does. A commit becomes durable by write_through, a checkpoint and a new store by fence, and a commit in
 * the background by sync (D11).
 *
 * Places      Offset and length of a write are any: a header has 256 bytes, the durable marker has 16, and a piece of a
 *             large body begins 64 bytes after a multiple of PM_PAGE. A medium that writes only whole units has to
 *             read, change and write them itself. `log_unit` is the unit of logged ranges, not of writes. write_hashed
 *             and PM_WRITE_BEGIN always have whole pages.
 * Visible     When a write has returned, `view`, every private mapping of `fd` (I2) and other processes see its bytes,
 *             and they outlive the process (D11). With PM_WRITE_BEGIN, that is so after the next await_writes, fence or
 *             write_through. Where bytes are not addressable, other processes see the writes in the order of the calls
 *             (I19). Otherwise the core orders the durable marker itself (pm_log_durable_marker).
 * Threads     One thread at a time calls these functions: the one with the store's mutex, or the thread of a deferred
 *             write-back (D13), for which all others wait. Beside it, the thread of a background sync (D11) may call
 *             sync, and write the durable marker (PM_WRITE_CACHED). It does neither during grow.
 * Statuses    PM_NO_SPACE and PM_NO_MEMORY: nothing counts as written, and the caller may try again. PM_IO: it is
 *             unknown what was written, and the store writes nothing more (D7). A failed sync is always PM_IO, whatever
 *             its errno: neither sync nor a sync within another function returns PM_NO_SPACE.
 */
typedef struct {
    /* PM_WRITE_BEGIN is used only if `part` is not 0. */
    pm_status (*write)(pm_media *media, uint64_t offset, const void *source, size_t length, pm_write_how how);
    /* Writes whole pages, which a program may be changing: each byte is loaded once, and the loaded bytes are written
     * and hashed (I6). Durable as after PM_WRITE_STREAM. hashes: pm_hash64 of each page. */
    pm_status (*write_hashed)(pm_media *media, uint64_t offset, const uint8_t *source, uint64_t pages,
                              uint64_t *hashes);
    /* These lines, written as PM_WRITE_CACHED, are durable at the next fence. Called only if `flushes`. It returns no
     * status: a medium whose flush can fail notes the range here, and flushes it in fence. */
    void (*flush)(pm_media *media, uint64_t offset, uint64_t length);
    /* File: begins to write back this range, so that a fence has less to wait for. A medium may do nothing. An error is
     * that of a failed sync, and final (D7). */
    pm_status (*write_back)(pm_media *media, uint64_t offset, uint64_t length);
    /* Makes durable what was streamed or flushed (memory), or written (file). */
    pm_status (*fence)(pm_media *media);
    /* Writes these bytes, and makes them and what was streamed before durable. */
    pm_status (*write_through)(pm_media *media, uint64_t offset, const void *source, size_t length);
    /* Makes the file `size` bytes long and reserves space for them, both durably. */
    pm_status (*grow)(pm_media *media, uint64_t size);
    /* Waits until the disk fetches no bytes from memory any more. It makes nothing durable. */
    pm_status (*await_writes)(pm_media *media);
    /* As fence, for everything that was written before the call, also by other threads. It need not wait for
     * PM_WRITE_BEGIN, which only records use that have to be durable at once. */
    pm_status (*sync)(pm_media *media);
} pm_media_operations;

struct pm_media {
    const pm_media_operations *operations;
    pm_media_kind kind; /* its name. The next fields follow from it; pm_media_open checks that they fit together */
    /* Memory: stores of the processor reach it, and lines become durable by flush and fence. Then log_unit is PM_LINE,
     * `part` is 0, and the domain is not PM_DOMAIN_DISK. File: pages become durable by writes and syncs. Then log_unit
     * is PM_PAGE, the domain is PM_DOMAIN_DISK, and commits may become durable later (D11). Sizes of the log and limits
     * of D4 and D13 also follow from this field */
    bool byte_addressable;
    pm_domain domain;
    /* A page of the file may be on a bad block: the core asks before it reads one (read.c). On tmpfs there are none */
    bool may_be_bad;
    bool holes; /* of a sparse file on tmpfs: reading a page there takes space, and is SIGBUS if there is none */
    int fd;
    bool read_only;
    /* Dirty ranges consist of these: PM_LINE (a torn line), or PM_PAGE (a torn sector), which sets `pages` in each
     * record. The last one may end where its extent does */
    uint64_t log_unit;
    size_t stage;       /* so many bytes of a record are gathered before the first write */
    /* So many bytes of a record get a request of their own while the rest is gathered; 0: none do */
    size_t part;
    uint64_t size;      /* of the file; open for writing: of what the store has of it */
    bool lent;          /* the view is the trace's */
    uint64_t mapped;    /* bytes of the view */
    /* The file, mapped shared: for reading; memory and dax also write through it. Moves when the file grows */
    uint8_t *view;
    /* file: RWF_DSYNC of one range is one cache flush, and waits for nothing else. Threads that write back read it,
     * too */
    atomic_bool durable_range;
    pm_streamed streamed[PM_STREAMED]; /* if durable_range: since the last ordering point */
    unsigned streamed_count;           /* more than PM_STREAMED: some are not listed */
    pm_fs fs; /* file, open for writing */
    bool past_cache; /* the last synced write went past the page cache */
    bool refused;    /* the trace made the last write fail, not a sync */
    pm_dio dio;
    pm_scheduled_work dio_work;
    uint8_t *copy; /* file: write_hashed copies pages into it; allocated at the first use */
    /* file: bytes of the pages that PM_WRITE_CACHED has written since the last fence; threads that sync use it, too */
    atomic_ullong lazy;
    uint64_t fences, syncs;
    bool flushes;     /* memory: lines in the cache have to be flushed (domain memory) */
    bool streams_all; /* PM_WRITE_CACHED streams, too (PMSTORE_FLUSH=stream) */
    bool unordered;   /* domain memory: lines were streamed or flushed since the last fence, and not handed over */
    uint64_t plain;   /* bytes that were to be streamed since the last fence, and stayed in the cache */
    pm_lines_stream *stream;      /* NULL: copies, and flush_lines after them */
    pm_lines_flush *flush_lines;  /* NULL: the processor has none */
    pm_hash64_page_function *stream_page; /* NULL: pages are hashed first, and then streamed */
    pm_trace *trace;    /* the caller's; NULL: there is none */
};

/* True if the file is sparse, and on a tmpfs that can be full: reading a page of a hole takes space there. */
bool pm_media_has_holes(int fd);

/* Finds the medium that AUTO is for this file, and its domain. PM_IO, or PM_INVALID as pm_domain_override. */
pm_status pm_media_of(int fd, pm_media_kind *kind, pm_domain *domain);

/* Takes fd over, and maps the file. kind AUTO: the file system decides. */
pm_status pm_media_open(pm_media *media, int fd, pm_media_kind kind, bool read_only, pm_trace *trace);
void pm_media_close(pm_media *media);
void pm_media_forked(pm_media *media); /* in a forked child: lets the file and its lock go */

/* False if the trace makes mapping the file fail, with errno. */
static inline bool pm_media_may_map(pm_media *media)
{
    return !media->trace || pm_trace_allows(media->trace, PM_OPERATION_MAP);
}

/* False if the file can't become as large as that, because its view is lent and smaller. */
static inline bool pm_media_may_have(const pm_media *media, uint64_t size)
{
    return !media->lent || size <= media->mapped;
}

/* Maps the file up to its current size; the view may move. */
pm_status pm_media_map(pm_media *media);

extern const char *const pm_media_names[];

extern const pm_media_operations pm_media_memory, pm_media_dax, pm_media_file;
/* Chooses the instructions for the medium's domain, or those of PMSTORE_FLUSH. PM_INVALID if this processor has none of
 * that name. */
pm_status pm_media_memory_choose(pm_media *media);
/* Called before another thread may go on: the next fence of any thread orders what this one streamed or flushed (M3).
 * Otherwise only its own would. Media that are byte_addressable set `unordered` when they do either. */
void pm_media_memory_hand_over(pm_media *media);
/* Files: the schedule decides when writes past the page cache are done. */
void pm_media_file_schedule(pm_media *media, pm_schedule *schedule);

static inline pm_status pm_media_write(pm_media *media, uint64_t offset, const void *source, size_t length,
                                       pm_write_how how)
{
    return media->operations->write(media, offset, source, length, how);
}

static inline pm_status pm_media_write_hashed(pm_media *media, uint64_t offset, const uint8_t *source, uint64_t pages,
                                              uint64_t *hashes)
{
    return media->operations->write_hashed(media, offset, source, pages, hashes);
}

/* The kernel has refused space for `bytes` with errno: "WHAT N KiB: …". */
pm_status pm_media_no_room(const pm_media *media, const char *what, uint64_t bytes) __attribute__((cold));

/* Reserves blocks for [from, to) of the file, so that writing there can't fail for lack of space (D8). */
pm_status pm_media_reserve(pm_media *media, uint64_t from, uint64_t to);
/* Gives back what growth has reserved before it failed: ext4 and xfs keep the blocks. */
void pm_media_give_back(pm_media *media);
/* True if that failed because the file system has no such operation, or a sandbox forbids it. */
static inline bool pm_media_cannot_reserve(pm_status status)
{
    return status == PM_IO && (pm_errno() == EOPNOTSUPP || pm_errno() == ENOSYS || pm_errno() == EPERM);
}

/* Prepares a new file, before anything is reserved. */
void pm_media_begin_new(pm_media *media);
/* Prepares a file of which the store has the first `size` bytes. If it is a copy, holes, where there were zeros, get
 * blocks: on a full tmpfs, a store into a hole would be SIGBUS. (Readers: pm_media_fill_holes.) Shared
 * blocks are copied, as far as that can be done, so that writing in place does not need new ones (D8). Bytes behind
 * `size` are left by a growth that was interrupted. They count as not there, so that the next growth reserves and syncs
 * them, whatever the first one came to. */
pm_status pm_media_own_space(pm_media *media, uint64_t size);

/* Finds the first offset of a range that can't be read without a signal, where the file is mapped at `at`; UINT64_MAX:
 * all of it can (media/read.c). If there is one, the failure is remembered: "cannot read WHAT: …". privately: the
 * mapping is private, and its pages become private. */
uint64_t pm_media_find_unreadable(const pm_media *media, const uint8_t *at, uint64_t offset, uint64_t length,
                                  bool privately, const char *what);

static inline uint64_t pm_media_unreadable(const pm_media *media, const uint8_t *at, uint64_t offset, uint64_t length,
                                           const char *what)
{
    if (!media->may_be_bad || media->lent || !length) return UINT64_MAX;
    return pm_media_find_unreadable(media, at, offset, length, false, what);
}

/* The same for the shared view, as a status. */
static inline pm_status pm_media_readable(const pm_media *media, uint64_t offset, uint64_t length, const char *what)
{
    return pm_media_unreadable(media, media->view + offset, offset, length, what) == UINT64_MAX ? PM_OK : PM_UNREADABLE;
}

/* Gives each hole of a sparse file on tmpfs pages of zeros. PM_NO_SPACE if the tmpfs is full. */
pm_status pm_media_fill_holes(pm_media *media);

/* Memory: brings the pages of [from, to) into the page table, so that the first store to each does not cost a fault. */
void pm_media_touch(pm_media *media, uint64_t from, uint64_t to);

/* Writes zeros to [from, to). */
pm_status pm_media_write_zeros(pm_media *media, uint64_t from, uint64_t to);

#endif
