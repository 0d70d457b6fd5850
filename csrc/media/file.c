/*
 * A file on a disk: everything is written through one descriptor, and read from the page cache.
 *
 * The commit point is a write of the record with RWF_DSYNC. It writes back the record's pages only, then the file's
 * metadata, and flushes the disk's cache. So the bytes that were streamed before are written back first, range by range
 * (sync_file_range, write and wait), and that flush makes them durable. fdatasync instead would wait for every page of
 * the committed image that was written lazily, which takes much longer than a small commit itself.
 *
 * The metadata. Space is reserved by fallocate, so a range may be written for the first time, and its blocks are
 * unwritten extents until the disk has other metadata. A flush of the cache alone would leave bytes that read as zeros.
 * RWF_DSYNC makes the metadata of the whole inode durable, not only those of its range. file_system.h explains why, and
 * on which file systems; only they are trusted with it (durable_range). The file's size does not matter here: growth is
 * synced by itself (file_grow). On other file systems, and where the ranges are too many to list, fdatasync is used.
 *
 * Past the page cache (D15, direct_io.h). A short record without streamed bytes before it is written there, which is
 * quicker. The parts of a long record leave while the rest is gathered. They are in the disk's cache before its first
 * page is written, and the flush of that page covers them.
 */
#define _GNU_SOURCE
#include "media/media.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/hash.h"
#include "media/again.h"

/* Acts as a sync that fails on the disk: the bytes are in the page cache, and nothing will write them back. */
static ssize_t fail_to_sync(pm_media *media, uint64_t offset, const void *source, size_t length)
{
    int error = errno;
    ssize_t done = pwrite(media->fd, source, length, (off_t)offset);
    if (done > 0) pm_trace_add(media->trace, PM_EVENT_WRITE, offset, (uint64_t)done, source);
    pm_trace_add(media->trace, PM_EVENT_SYNC_FAILED, offset, length, NULL);
    errno = error;
    return -1;
}

/* When a write returns, nothing is durable, or the bytes with all that was handed to the disk before, or the bytes
 * alone. The trace has one event for the last two, as ALONE is used only if no streamed bytes wait for a flush. */
typedef enum { LATER, WITH_STREAMED, ALONE } durability;

/* A record of up to so many bytes goes past the page cache. Longer ones are no quicker there. */
enum { DIO_ALONE = 32 << 10 };

static ssize_t write_durably(pm_media *media, uint64_t offset, const void *source, size_t length, durability how)
{
    media->past_cache = how == ALONE && length <= DIO_ALONE;
    if (media->fs.reflinks) pm_direct_io_open(&media->dio); /* see lacked_space */
    if (media->past_cache) {
        ssize_t done = pm_direct_io_write(&media->dio, source, length, offset);
        if (done >= 0 || errno != EINVAL) return done;
        media->past_cache = false;
    }
    struct iovec part = {(void *)(uintptr_t)source, length};
    return pwritev2(media->fd, &part, 1, (off_t)offset, RWF_DSYNC);
}

/* pwrite that reports to the trace. */
static ssize_t write_some(pm_media *media, uint64_t offset, const void *source, size_t length, durability how)
{
    if (media->trace && (media->refused = !(length = pm_trace_allows_write(media->trace, length)))) return -1;
    if (media->trace && how && !pm_trace_allows(media->trace, PM_OPERATION_SYNC))
        return fail_to_sync(media, offset, source, length);
    ssize_t done =
        how ? write_durably(media, offset, source, length, how) : pwrite(media->fd, source, length, (off_t)offset);
    if (media->trace && done > 0) {
        pm_trace_add(media->trace, PM_EVENT_WRITE, offset, (uint64_t)done, source);
        if (how) pm_trace_add(media->trace, PM_EVENT_SYNC_RANGE, offset, (uint64_t)done, NULL);
    }
    return done;
}

/* fdatasync or fsync that reports to the trace. Not 0: it failed. */
static int sync_all(pm_media *media, int (*sync)(int fd))
{
    int result;
    pm_again again = {0};
    do {
        bool allowed = !media->trace || pm_trace_allows(media->trace, PM_OPERATION_SYNC);
        result = allowed ? sync(media->fd) : -1;
    } while (pm_again_make(&again, result));
    if (media->trace) pm_trace_add(media->trace, result ? PM_EVENT_SYNC_FAILED : PM_EVENT_SYNC, 0, 0, NULL);
    return result;
}

static pm_status write_all(pm_media *media, uint64_t offset, const void *source, size_t length, durability how)
{
    const char *from = source;
    pm_again again = {0};
    while (length) {
        ssize_t done = write_some(media, offset, from, length, how);
        if (pm_again_make(&again, done < 0)) continue;
        if (done < 0) return pm_fail_errno("cannot write to the file");
        if (done == 0) {
            errno = ENOSPC;
            return pm_fail_errno("cannot write to the file");
        }
        from += done, offset += (uint64_t)done, length -= (size_t)done;
    }
    return PM_OK;
}

/* After a failed sync, whatever the reason, the state of the written bytes is unknown. It is no lack of space that a
 * caller could mend. */
static pm_status sync_failed(void)
{
    pm_fail_errno("cannot sync the file");
    return PM_IO;
}

/* A synced write has ended with ENOSPC. Returns true if it never came to the sync: it needed a block, as a copy shares
 * the old ones. Then nothing is lost, and the write may be tried again. But if the disk had no space for a page (thin
 * provisioning), the kernel reports ENOSPC as well, once to each descriptor of the file. The descriptor that the write
 * did not use tells the two apart: its sync fails only in the second case. */
static bool lacked_space(pm_media *media)
{
    if (media->trace) return media->refused;
    int other = media->past_cache ? media->fd : media->dio.fd;
    return other >= 0 && !fdatasync(other);
}

/* ---- what was streamed -------------------------------------------------------------------------------------- */

/* From BEGIN_WRITEBACK bytes on, a call of its own that begins the write-back is worth its cost. Up to AT_ONCE bytes,
 * one call that writes and waits is quicker than parts of BEGIN_WRITEBACK bytes; longer ranges are quicker in parts. */
enum { BEGIN_WRITEBACK = 1 << 19, AT_ONCE = (1 << 20) + (1 << 17) };

/* True if a sandbox forbids a call that has failed so. */
static bool is_forbidden(int error)
{
    return error == ENOSYS || error == EPERM;
}

/* sync_file_range that reports to the trace what it waited for: only that is in the disk's cache. Where a sandbox
 * forbids it, nothing is written back, and fdatasync is the commit point from then on. */
static pm_status write_back(pm_media *media, uint64_t from, uint64_t to, unsigned how)
{
    int result;
    bool allowed;
    pm_again again = {0};
    do {
        allowed = !media->trace || pm_trace_allows(media->trace, PM_OPERATION_SYNC);
        result = allowed ? sync_file_range(media->fd, (off_t)from, (off_t)(to - from), how) : -1;
    } while (pm_again_make(&again, result));
    if (result && allowed && is_forbidden(errno)) {
        media->durable_range = false;
        return PM_OK;
    }
    if (media->trace && (result || how & SYNC_FILE_RANGE_WAIT_AFTER))
        pm_trace_add(media->trace, result ? PM_EVENT_SYNC_FAILED : PM_EVENT_FLUSH, from, to - from, NULL);
    /* Not retried: a later sync would not hear of the error again (D7). */
    return result ? sync_failed() : PM_OK;
}

static pm_status begin_writeback(pm_media *media, pm_streamed *range, uint64_t least)
{
    if (range->to - range->begun < least) return PM_OK;
    PM_TRY(write_back(media, range->begun, range->to, SYNC_FILE_RANGE_WRITE));
    range->begun = range->to;
    return PM_OK;
}

/* Notes streamed bytes; returns their range, or NULL if it is not listed. It is called before the bytes are written: a
 * write that fails may have written some of them, and the next attempt leaves out the bytes that the page cache has. */
static pm_streamed *note_streamed(pm_media *media, uint64_t offset, uint64_t length)
{
    uint64_t from = offset / PM_PAGE * PM_PAGE, to = pm_round_up(offset + length, PM_PAGE);
    if (media->streamed_count > PM_STREAMED) return NULL;
    for (unsigned i = media->streamed_count; i-- > 0;) {
        pm_streamed *range = &media->streamed[i];
        if (from > range->to || to < range->from) continue;
        if (from < range->begun) range->begun = from > range->from ? from : range->from;
        if (from < range->from) range->from = range->begun = from;
        if (to > range->to) range->to = to;
        return range;
    }
    if (media->streamed_count++ == PM_STREAMED) return NULL;
    media->streamed[media->streamed_count - 1] = (pm_streamed){from, from, to};
    return &media->streamed[media->streamed_count - 1];
}

static pm_status file_write_back(pm_media *media, uint64_t offset, uint64_t length)
{
    /* Where fdatasync is the commit point, the next one would wait for these pages. */
    return media->durable_range && length ? write_back(media, offset, offset + length, SYNC_FILE_RANGE_WRITE) : PM_OK;
}

/* Brings what was streamed into the disk's cache. */
static pm_status wait_for_streamed(pm_media *media)
{
    enum { WRITE_AND_WAIT = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER };
    /* All of it is on its way before anything is waited for, including the end of a range whose beginning has left
     * already. */
    for (unsigned i = 0; i < media->streamed_count; i++)
        if (media->streamed_count > 1 || media->streamed[i].begun > media->streamed[i].from)
            PM_TRY(begin_writeback(media, &media->streamed[i], 1));
    for (unsigned i = 0; i < media->streamed_count; i++)
        PM_TRY(write_back(media, media->streamed[i].from, media->streamed[i].to, WRITE_AND_WAIT));
    media->streamed_count = 0;
    return PM_OK;
}

/* The disk is told of every `part` bytes, and works while the next part is copied or gathered. */
static pm_status stream(pm_media *media, uint64_t offset, const uint8_t *source, size_t length, size_t part)
{
    if (!media->durable_range) return write_all(media, offset, source, length, LATER);
    while (length) {
        size_t some = length < part ? length : part;
        pm_streamed *range = note_streamed(media, offset, some);
        PM_TRY(write_all(media, offset, source, some, LATER));
        if (range) PM_TRY(begin_writeback(media, range, part));
        source += some, offset += some, length -= some;
    }
    return PM_OK;
}

/* The disk fetches the bytes past the page cache, or they are streamed. They are noted as streamed in both cases: some
 * file systems put such a write into the cache (ext4 if it encrypts, xfs if it can't drop the cached pages), and
 * waiting for pages that are not there takes no time. */
static pm_status begin(pm_media *media, uint64_t offset, const void *source, size_t length)
{
    if (!media->durable_range || !pm_direct_io_begin(&media->dio, source, length, offset))
        return stream(media, offset, source, length, length);
    note_streamed(media, offset, length);
    return PM_OK;
}

/* Does one of the writes that were begun, with the bytes that are in memory now. A write that fails writes nothing. */
static bool do_one_begun(void *argument)
{
    pm_media *media = argument;
    int number = pm_direct_io_next(&media->dio);
    if (number < 0) return false;
    const struct iocb *write = &media->dio.writes[number];
    const void *source = (const void *)(uintptr_t)write->aio_buf;
    size_t length = pm_trace_allows_write(media->trace, write->aio_nbytes);
    ssize_t done = length ? pwrite(media->fd, source, length, write->aio_offset) : -1;
    pm_direct_io_done(&media->dio, number, done < 0 ? -errno : done);
    if (done <= 0) return true;
    uint64_t offset = (uint64_t)write->aio_offset;
    pm_trace_add(media->trace, PM_EVENT_WRITE, offset, (uint64_t)done, source);
    pm_trace_add(media->trace, PM_EVENT_FLUSH, offset, (uint64_t)done, NULL);
    return true;
}

void pm_media_file_schedule(pm_media *media, pm_schedule *schedule)
{
    media->dio.schedule = schedule;
    media->dio_work = (pm_scheduled_work){.do_one = do_one_begun, .argument = media};
    pm_schedule_add(schedule, &media->dio_work);
}

/* Streams what could not be written past the page cache. */
static pm_status file_await_writes(pm_media *media)
{
    if (!media->dio.begun) return PM_OK;
    unsigned failed = pm_direct_io_wait(&media->dio);
    for (unsigned i = 0; i < failed; i++) {
        const struct iocb *write = &media->dio.writes[i];
        PM_TRY(stream(media, (uint64_t)write->aio_offset, (const void *)(uintptr_t)write->aio_buf, write->aio_nbytes,
                      write->aio_nbytes));
    }
    return PM_OK;
}

static pm_status file_write(pm_media *media, uint64_t offset, const void *source, size_t length, pm_write_how how)
{
    PM_CHECK(offset + length <= media->size);
    if (how == PM_WRITE_STREAM) return stream(media, offset, source, length, BEGIN_WRITEBACK);
    if (how == PM_WRITE_BEGIN) return begin(media, offset, source, length);
    media->lazy += pm_round_up(offset % PM_PAGE + length, PM_PAGE);
    return write_all(media, offset, source, length, LATER);
}

enum {
    COPY_PAGES = 64,
    COPY_BYTES = COPY_PAGES * PM_PAGE /* small enough to stay in the processor's cache until they are written */
};

/* Memory for COPY_PAGES, NULL if there is none. It is not on the stack, which may be small. */
static uint8_t *copy_buffer(pm_media *media)
{
    if (!media->copy && posix_memalign((void **)&media->copy, PM_PAGE, COPY_BYTES)) media->copy = NULL;
    return media->copy;
}

static pm_status file_write_hashed(pm_media *media, uint64_t offset, const uint8_t *source, uint64_t pages,
                                   uint64_t *hashes)
{
    uint8_t *copy = copy_buffer(media);
    if (!copy) return pm_fail(PM_NO_MEMORY, "no memory to write an array");
    PM_CHECK(offset + pages * PM_PAGE <= media->size);
    size_t part = pages * PM_PAGE <= AT_ONCE ? SIZE_MAX : BEGIN_WRITEBACK;
    while (pages) {
        uint64_t some = pages < COPY_PAGES ? pages : COPY_PAGES;
        for (uint64_t page = 0; page < some; page++)
            hashes[page] = pm_hash64_copy_page(copy + page * PM_PAGE, source + page * PM_PAGE);
        PM_TRY(stream(media, offset, copy, some * PM_PAGE, part));
        offset += some * PM_PAGE, source += some * PM_PAGE, hashes += some, pages -= some;
    }
    return PM_OK;
}

static void file_flush(pm_media *media, uint64_t offset, uint64_t length)
{
    (void)media, (void)offset, (void)length;
}

static pm_status file_sync(pm_media *media)
{
    /* Not retried: after a failed sync the kernel may have dropped the dirty pages (D7). */
    return sync_all(media, fdatasync) ? sync_failed() : PM_OK;
}

static pm_status file_fence(pm_media *media)
{
    PM_TRY(file_await_writes(media));
    media->syncs++;
    media->streamed_count = 0;
    media->lazy = 0;
    return file_sync(media);
}

/* Writes these bytes durably, after what was streamed. If durable_range is false then, the system can't or may not, and
 * fdatasync has to make both durable. */
static pm_status write_range_durably(pm_media *media, uint64_t offset, const void *source, size_t length)
{
    /* in the disk's cache: what was streamed → then: the record, whose flush covers both. In the other order, a power
     * cut could keep the record alone. */
    durability how = media->streamed_count ? WITH_STREAMED : ALONE;
    PM_TRY(wait_for_streamed(media));
    if (!media->durable_range) return PM_OK;
    pm_status status = write_all(media, offset, source, length, how);
    media->syncs++;
    if (status == PM_NO_SPACE) return lacked_space(media) ? PM_NO_SPACE : PM_IO;
    if (status == PM_OK || (pm_errno() != EOPNOTSUPP && !is_forbidden(pm_errno()))) return status;
    media->durable_range = false;
    return PM_OK;
}

static pm_status file_write_through(pm_media *media, uint64_t offset, const void *source, size_t length)
{
    enum { LAZY_MOST = 8 * PM_PAGE };
    PM_CHECK(offset + length <= media->size);
    bool begun = media->dio.begun;
    PM_TRY(file_await_writes(media));
    /* With little else to write back, fdatasync is quicker: it sends record and streamed bytes together, while
     * RWF_DSYNC has to come after the streamed bytes. */
    bool all = media->streamed_count && !begun && media->lazy <= LAZY_MOST;
    if (media->durable_range && media->streamed_count <= PM_STREAMED && !all) {
        PM_TRY(write_range_durably(media, offset, source, length));
        if (media->durable_range) return PM_OK;
    }
    PM_TRY(write_all(media, offset, source, length, LATER));
    return file_fence(media);
}

static pm_status file_grow(pm_media *media, uint64_t size)
{
    if (size > media->size) {
        pm_status status = pm_media_reserve(media, media->size, size);
        if (pm_media_cannot_reserve(status)) {
            /* This file system reserves space only by writing it. */
            uint64_t from = media->size;
            media->size = size;
            status = pm_media_write_zeros(media, from, size);
            media->size = from;
            if (status != PM_OK) pm_media_give_back(media);
        }
        PM_TRY(status);
        media->syncs++;
        /* durable: the new size and its blocks → then: a header that needs them. */
        if (sync_all(media, fsync)) return sync_failed();
        media->size = size;
    }
    return pm_media_map(media);
}

const pm_media_operations pm_media_file = {
    .write = file_write,
    .write_hashed = file_write_hashed,
    .flush = file_flush,
    .write_back = file_write_back,
    .fence = file_fence,
    .write_through = file_write_through,
    .grow = file_grow,
    .await_writes = file_await_writes,
    .sync = file_sync,
};
