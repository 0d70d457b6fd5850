/*
 * Durable bytes. Nothing else in pmstore writes to the file: what does not come through pm_media_operations does not
 * happen, so the trace sees everything.
 *
 *   memory  tmpfs, mapped shared: cached or non-temporal stores, cache-line flushes, sfence
 *   file    pwrite, sync_file_range, RWF_DSYNC, fdatasync
 * Each function that touches durable bytes reports what it did to the trace, if there is one (trace.h).
 */
#ifndef PM_MEDIA_H
#define PM_MEDIA_H

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "format.h"
#include "media_dio.h"
#include "media_fs.h"
#include "status.h"
#include "trace.h"

typedef struct pm_media pm_media;

typedef enum {
    PM_WRITE_CACHED, /* memory: must be flushed before a fence makes it durable. File: durable at the next fence */
    /* Durable at the next fence or write_through. File: on its way to the disk at once, if it is long */
    PM_WRITE_STREAM,
    /* The same, of bytes that stay as they are until then, or until settle: the disk may fetch them from there */
    PM_WRITE_BEGIN
} pm_write_how;

/* Pages of a file, [from, to), that were streamed; the kernel was asked to write back those before `begun`. */
typedef struct {
    uint64_t from, begun, to;
} pm_streamed;
enum { PM_STREAMED = 64 };

typedef struct {
    pm_status (*write)(pm_media *media, uint64_t offset, const void *source, size_t length, pm_write_how how);
    /* Whole pages, which a program may be changing: each byte is loaded once, and what was loaded is what is written
     * and hashed (I6). Durable as after PM_WRITE_STREAM. hashes: pm_hash64 of each page. folio: that the place is to be
     * kept in, if these are its first bytes. */
    pm_status (*write_hashed)(pm_media *media, uint64_t offset, const uint8_t *source, uint64_t pages, uint64_t *hashes,
                              uint64_t folio);
    void (*flush)(pm_media *media, uint64_t offset, uint64_t length);
    /* File: what was written here begins its way to the disk, so that a fence has less to wait for. No more than a
     * hint. May be called beside other operations, by another thread. */
    pm_status (*write_back)(pm_media *media, uint64_t offset, uint64_t length);
    /* What was streamed or flushed (memory), or written (file), is durable when it returns. */
    pm_status (*fence)(pm_media *media);
    /* These bytes, and what was streamed before, are durable when it returns. */
    pm_status (*write_through)(pm_media *media, uint64_t offset, const void *source, size_t length);
    /* The file has `size` bytes, space for them is reserved, and both are durable. */
    pm_status (*grow)(pm_media *media, uint64_t size);
    /* What was begun is on its way from memory no more. Nothing is durable by that. */
    pm_status (*settle)(pm_media *media);
    /* As fence, of all that was written before it began. May be called beside other operations but grow, by another
     * thread. */
    pm_status (*sync)(pm_media *media);
} pm_media_operations;

struct pm_media {
    const pm_media_operations *operations;
    pm_media_kind kind;
    int fd;
    bool read_only;
    /* What runs are made of: cache lines, or pages (torn sectors); the last one may end where its extent does */
    uint64_t granule;
    size_t stage;       /* bytes of a record that are worth gathering before the first write */
    /* Bytes of a record that are worth a request of their own while the rest is gathered; 0: none are */
    size_t part;
    uint64_t size;      /* of the file */
    bool lent;          /* the view is the trace's */
    uint64_t mapped;    /* bytes of the view */
    /* The file, mapped shared: for reading; only media_memory.c writes through it. Moves when the file grows */
    uint8_t *view;
    /* file: RWF_DSYNC of one range is one cache flush, and waits for nothing else. Read by threads that write back,
     * too */
    atomic_bool durable_range;
    pm_streamed streamed[PM_STREAMED]; /* then: since the last ordering point */
    unsigned streamed_count;           /* more than PM_STREAMED: some are not listed */
    pm_fs fs; /* file, open for writing */
    bool past_cache; /* the last synced write went there */
    bool refused;    /* the trace has refused the last write, not a sync */
    pm_dio dio;
    pm_scheduled_work dio_work;
    uint8_t *copy; /* file: what write_hashed copies into, from the first use on */
    /* Bytes of the pages that were written otherwise since the last fence; by a thread that syncs, too */
    atomic_ullong lazy;
    uint64_t fences, syncs;
    /* memory: non-temporal copy */
    void (*stream)(pm_media *media, void *destination, const void *source, size_t length);
    void (*flush_lines)(pm_media *media, const void *address, uint64_t lines);
    pm_trace *trace;    /* of the caller's; NULL: none */
};

/* Takes fd over. kind AUTO: by the file system. Maps what is there. */
pm_status pm_media_open(pm_media *media, int fd, pm_media_kind kind, bool read_only, pm_trace *trace);
void pm_media_close(pm_media *media);
void pm_media_forked(pm_media *media); /* in a forked child: lets go of the file and of its lock */

/* False if mapping the file is to fail, with errno. */
static inline bool pm_media_may_map(pm_media *media)
{
    return !media->trace || pm_trace_allows(media->trace, PM_OPERATION_MAP);
}

/* False if the file can't become as large as that: its view is lent, and smaller. */
static inline bool pm_media_may_have(const pm_media *media, uint64_t size)
{
    return !media->lent || size <= media->mapped;
}

/* Maps the file up to its size now; the view may move. */
pm_status pm_media_map(pm_media *media);

extern const pm_media_operations pm_media_memory, pm_media_file;
void pm_media_memory_choose(pm_media *media);
/* Files: writes past the page cache are done when the schedule decides. */
void pm_media_file_schedule(pm_media *media, pm_schedule *schedule);

static inline pm_status pm_media_write(pm_media *media, uint64_t offset, const void *source, size_t length,
                                       pm_write_how how)
{
    return media->operations->write(media, offset, source, length, how);
}

static inline pm_status pm_media_write_hashed(pm_media *media, uint64_t offset, const uint8_t *source, uint64_t pages,
                                              uint64_t *hashes, uint64_t folio)
{
    return media->operations->write_hashed(media, offset, source, pages, hashes, folio);
}

/* Blocks for [from, to) of the file, so that writing there can't fail for want of space (D8). */
pm_status pm_media_reserve(pm_media *media, uint64_t from, uint64_t to);
/* True if that failed because the file system has no such operation. */
static inline bool pm_media_cannot_reserve(pm_status status)
{
    return status == PM_IO && (pm_errno() == EOPNOTSUPP || pm_errno() == ENOSYS);
}

/* New file: before anything is reserved. */
void pm_media_begin_new(pm_media *media);
/* A copy of a store may have holes where there were zeros. They get blocks, for a store into one, on a full tmpfs,
 * would be SIGBUS. And it may share blocks, so that writing in place needs what the store has reserved already (D8):
 * they are copied, as far as that can be done. */
pm_status pm_media_own_space(pm_media *media, uint64_t size);

/* A range of the file, which is mapped at `at`: the first offset that can't be read there without a signal, UINT64_MAX
 * if all can (media_read.c). If there is one, the failure is remembered: "cannot read WHAT: …". privately: the mapping
 * is a private one, and its pages become private. */
uint64_t pm_media_find_unreadable(const pm_media *media, const uint8_t *at, uint64_t offset, uint64_t length,
                                  bool privately, const char *what);

static inline uint64_t pm_media_unreadable(const pm_media *media, const uint8_t *at, uint64_t offset, uint64_t length,
                                           const char *what)
{
    if (media->kind == PM_MEDIA_MEMORY || media->lent || !length) return UINT64_MAX;
    return pm_media_find_unreadable(media, at, offset, length, false, what);
}

/* The same of the shared view, as a status. */
static inline pm_status pm_media_readable(const pm_media *media, uint64_t offset, uint64_t length, const char *what)
{
    return pm_media_unreadable(media, media->view + offset, offset, length, what) == UINT64_MAX ? PM_OK : PM_UNREADABLE;
}

/* Memory: the pages of [from, to) are in the page table, so that the first store to each does not cost a fault. */
void pm_media_touch(pm_media *media, uint64_t from, uint64_t to);

/*
 * File: the page cache keeps the first bytes that are written to a place in a folio as large as that write, and aligned
 * to its size. What is written there later costs as it fits: the kernel looks at every block of a folio of which a byte
 * changes, so a page takes 1.5 us in a folio of 4 KiB, 3 in one of 64 KiB, 13 in one of 1 MiB; and 1 MiB takes 480, 275
 * and 240, with its sync.
 */
enum {
    PM_FOLIO = 64 << 10,      /* nobody knows yet */
    PM_FOLIO_LOG = 256 << 10, /* for records, which begin anywhere */
    PM_FOLIO_WHOLE = 1 << 20  /* for extents that are written whole */
};

/* Bytes from `at` up to the end of its folio. */
static inline uint64_t pm_folio_left(uint64_t at, uint64_t folio)
{
    return folio - at % folio;
}

/* Zeros for [from, to), in such folios. */
pm_status pm_media_write_zeros(pm_media *media, uint64_t from, uint64_t to, uint64_t folio);

#endif
