/*
 * A file on a disk: everything is written through one open file, and what is read is the page cache.
 *
 * The commit point is a write of the record with RWF_DSYNC. It writes back the record's pages only, then the file's
 * metadata, and flushes the disk's cache. So what was streamed before is first written back, range by range
 * (sync_file_range, write and wait), and is durable with that flush. fdatasync instead would wait for every page of
 * home that was written lazily: a commit of 4 KiB took 3 to 8 ms instead of 0.1.
 *
 * The metadata. Space is reserved by fallocate, so a range may be written there for the first time, and its blocks are
 * unwritten extents until that is on the disk: a flush of the cache alone would leave bytes that read as zeros.
 * RWF_DSYNC makes the metadata of the whole inode durable, not only those of its range. media_fs.h says why that is so,
 * and on which file systems; only they are trusted with it (durable_range). The size does not come into it: growth is
 * synced by itself (file_grow). Elsewhere, and where the ranges are too many to list, it is fdatasync.
 *
 * Past the page cache (D15, media_dio.h). A record that is short, and vouches for nothing that was streamed, is written
 * there: 4 KiB take 16 us instead of 19. The parts of a long one leave while the rest is gathered, and are in the
 * disk's cache before its first page is written, whose flush covers them.
 */
#define _GNU_SOURCE
#include "media.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#include "hash.h"
#include "media_again.h"

/* As a sync that fails on the disk: the bytes are in the page cache, and nobody will write them back. */
static ssize_t fail_to_sync(pm_media *media, uint64_t offset, const void *source, size_t length)
{
    int error = errno;
    ssize_t done = pwrite(media->fd, source, length, (off_t)offset);
    if (done > 0) pm_trace_add(media->trace, PM_EVENT_WRITE, offset, (uint64_t)done, source);
    pm_trace_add(media->trace, PM_EVENT_SYNC_FAILED, offset, length, NULL);
    errno = error;
    return -1;
}

/* How a write is durable when it returns: not at all, or with what was handed to the disk before, or by itself. */
typedef enum { LATER, WITH_STREAMED, ALONE } durability;

/* What goes past the page cache by itself. Longer records are no quicker there: 62,720 B took 1.23 times the floor
 * instead of 1.15. */
enum { DIO_ALONE = 32 << 10 };

static ssize_t write_durably(pm_media *media, uint64_t offset, const void *source, size_t length, durability how)
{
    media->past_cache = how == ALONE && length <= DIO_ALONE;
    if (media->fs.reflinks) pm_dio_open(&media->dio); /* see lacked_space */
    if (media->past_cache) {
        ssize_t done = pm_dio_write(&media->dio, source, length, offset);
        if (done >= 0 || errno != EINVAL) return done;
        media->past_cache = false;
    }
    struct iovec part = {(void *)(uintptr_t)source, length};
    return pwritev2(media->fd, &part, 1, (off_t)offset, RWF_DSYNC);
}

/* pwrite that tells the trace what it did. */
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

/* fdatasync or fsync that tells the trace. Not 0: it failed. */
static int sync_all(pm_media *media, int (*sync)(int fd))
{
    int result;
    pm_again again = {0};
    do {
        bool allowed = !media->trace || pm_trace_allows(media->trace, PM_OPERATION_SYNC);
        result = allowed ? sync(media->fd) : -1;
    } while (pm_make_again(&again, result));
    if (media->trace) pm_trace_add(media->trace, result ? PM_EVENT_SYNC_FAILED : PM_EVENT_SYNC, 0, 0, NULL);
    return result;
}

static pm_status write_all(pm_media *media, uint64_t offset, const void *source, size_t length, durability how)
{
    const char *from = source;
    pm_again again = {0};
    while (length) {
        ssize_t done = write_some(media, offset, from, length, how);
        if (pm_make_again(&again, done < 0)) continue;
        if (done < 0) return pm_fail_errno("cannot write to the file");
        if (done == 0) {
            errno = ENOSPC;
            return pm_fail_errno("cannot write to the file");
        }
        from += done, offset += (uint64_t)done, length -= (size_t)done;
    }
    return PM_OK;
}

/* After a sync that failed, whatever the reason, nothing is known of what was written: that is no lack of space that a
 * caller could mend. */
static pm_status sync_failed(void)
{
    pm_fail_errno("cannot sync the file");
    return PM_IO;
}

/* A synced write has ended with ENOSPC. True if it never came to the sync: it needed a block, as a copy shares those
 * that were there. Then nothing is lost, and it may be tried again. But a page for which the disk had no space (thin
 * provisioning) is reported in the same way: once, to each descriptor of the file. So the other descriptor, which the
 * write has not used, would be told too. */
static bool lacked_space(pm_media *media)
{
    if (media->trace) return media->refused;
    int other = media->past_cache ? media->fd : media->dio.fd;
    return other >= 0 && !fdatasync(other);
}

/* ---- what was streamed -------------------------------------------------------------------------------------- */

/* Bytes that are worth a call of their own; and what is better left to the call that waits, for it is one request then:
 * 1 MiB takes 1.17 times the floor, and 1.29 in two parts. From 2 MiB on it is the other way round. */
enum { BEGIN_WRITEBACK = 1 << 19, AT_ONCE = (1 << 20) + (1 << 17) };

/* sync_file_range that tells the trace what it waited for: only then has the disk got it. */
static pm_status write_back(pm_media *media, uint64_t from, uint64_t to, unsigned how)
{
    int result;
    pm_again again = {0};
    do {
        bool allowed = !media->trace || pm_trace_allows(media->trace, PM_OPERATION_SYNC);
        result = allowed ? sync_file_range(media->fd, (off_t)from, (off_t)(to - from), how) : -1;
    } while (pm_make_again(&again, result));
    if (media->trace && (result || how & SYNC_FILE_RANGE_WAIT_AFTER))
        pm_trace_add(media->trace, result ? PM_EVENT_SYNC_FAILED : PM_EVENT_FLUSH, from, to - from, NULL);
    /* Not retried, nor made good by a later sync: that would not hear of the error again (D7). */
    return result ? sync_failed() : PM_OK;
}

static pm_status begin_writeback(pm_media *media, pm_streamed *range, uint64_t least)
{
    if (range->to - range->begun < least) return PM_OK;
    PM_TRY(write_back(media, range->begun, range->to, SYNC_FILE_RANGE_WRITE));
    range->begun = range->to;
    return PM_OK;
}

/* The range that these bytes belong to, NULL if it is not listed. Called before they are written: a write that fails
 * may have written some of them, and who tries again leaves out what it finds in the page cache. */
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
    /* Where fdatasync is the commit point, the next one would wait for it. */
    return media->durable_range && length ? write_back(media, offset, offset + length, SYNC_FILE_RANGE_WRITE) : PM_OK;
}

/* What was streamed is in the disk's cache when it returns. */
static pm_status wait_for_streamed(pm_media *media)
{
    enum { WRITE_AND_WAIT = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER };
    /* All of it is on its way before anything is waited for: the end of a range, too, whose beginning has left
     * already. */
    for (unsigned i = 0; i < media->streamed_count; i++)
        if (media->streamed_count > 1 || media->streamed[i].begun > media->streamed[i].from)
            PM_TRY(begin_writeback(media, &media->streamed[i], 1));
    for (unsigned i = 0; i < media->streamed_count; i++)
        PM_TRY(write_back(media, media->streamed[i].from, media->streamed[i].to, WRITE_AND_WAIT));
    media->streamed_count = 0;
    return PM_OK;
}

/* The disk works while the next part is copied, or gathered: it is told of every `part` bytes. */
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

/* The disk fetches it from there, past the page cache, or it is streamed. It is listed all the same: some file systems
 * take such a write and put it into the cache (ext4 if it encrypts, xfs if it can't drop what the cache has there), and
 * to wait for pages that aren't there takes no time. */
static pm_status begin(pm_media *media, uint64_t offset, const void *source, size_t length)
{
    if (!media->durable_range || !pm_dio_begin(&media->dio, source, length, offset))
        return stream(media, offset, source, length, length);
    note_streamed(media, offset, length);
    return PM_OK;
}

/* Does one of the writes that were begun, with the bytes that are in memory now. One that fails writes nothing. */
static bool do_one_begun(void *argument)
{
    pm_media *media = argument;
    int number = pm_dio_next(&media->dio);
    if (number < 0) return false;
    const struct iocb *write = &media->dio.writes[number];
    const void *source = (const void *)(uintptr_t)write->aio_buf;
    size_t length = pm_trace_allows_write(media->trace, write->aio_nbytes);
    ssize_t done = length ? pwrite(media->fd, source, length, write->aio_offset) : -1;
    pm_dio_done(&media->dio, number, done < 0 ? -errno : done);
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

/* What could not be written past the page cache is streamed. */
static pm_status file_settle(pm_media *media)
{
    if (!media->dio.begun) return PM_OK;
    unsigned failed = pm_dio_wait(&media->dio);
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
    COPY_BYTES = COPY_PAGES * PM_PAGE /* they stay in the processor's cache until they are written */
};

/* Memory for COPY_PAGES, NULL if there is none. It belongs to the medium: the caller may be a thread with a small
 * stack. */
static uint8_t *copy_buffer(pm_media *media)
{
    if (!media->copy && posix_memalign((void **)&media->copy, PM_PAGE, COPY_BYTES)) media->copy = NULL;
    return media->copy;
}

static pm_status file_write_hashed(pm_media *media, uint64_t offset, const uint8_t *source, uint64_t pages,
                                   uint64_t *hashes, uint64_t folio)
{
    uint8_t *copy = copy_buffer(media);
    if (!copy) return pm_fail(PM_NO_MEMORY, "no memory to write an array");
    PM_CHECK(offset + pages * PM_PAGE <= media->size);
    size_t part = pages * PM_PAGE <= AT_ONCE ? SIZE_MAX : BEGIN_WRITEBACK;
    while (pages) {
        uint64_t some = pages < COPY_PAGES ? pages : COPY_PAGES, left = pm_folio_left(offset, folio) / PM_PAGE;
        if (folio < COPY_BYTES && some > left) some = left;
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
    PM_TRY(file_settle(media));
    media->syncs++;
    media->streamed_count = 0;
    media->lazy = 0;
    return file_sync(media);
}

static pm_status file_write_through(pm_media *media, uint64_t offset, const void *source, size_t length)
{
    enum { LAZY_MOST = 8 * PM_PAGE };
    PM_CHECK(offset + length <= media->size);
    bool begun = media->dio.begun;
    PM_TRY(file_settle(media));
    /* With little else to write back, fdatasync is quicker: record and streamed bytes are on their way together, while
     * RWF_DSYNC has to come after them. 1 MiB into a slot: 1.4 times the floor, and 1.7. */
    bool all = media->streamed_count && !begun && media->lazy <= LAZY_MOST;
    if (media->durable_range && media->streamed_count <= PM_STREAMED && !all) {
        /* in the disk's cache: what was streamed → then: the record, whose flush covers both. The other way round a
         * power cut could keep the record alone. */
        durability how = media->streamed_count ? WITH_STREAMED : ALONE;
        PM_TRY(wait_for_streamed(media));
        pm_status status = write_all(media, offset, source, length, how);
        media->syncs++;
        if (status == PM_NO_SPACE) return lacked_space(media) ? PM_NO_SPACE : PM_IO;
        if (status == PM_OK || pm_errno() != EOPNOTSUPP) return status;
        media->durable_range = false;
    }
    PM_TRY(write_all(media, offset, source, length, LATER));
    return file_fence(media);
}

static pm_status file_grow(pm_media *media, uint64_t size)
{
    if (size > media->size) {
        pm_status status = pm_media_reserve(media, media->size, size);
        if (pm_media_cannot_reserve(status)) {
            /* This file system can't reserve space but by writing it. */
            uint64_t from = media->size;
            media->size = size;
            status = pm_media_write_zeros(media, from, size, PM_FOLIO_WHOLE);
            media->size = from;
        }
        PM_TRY(status);
        media->syncs++;
        /* durable: the new size and its blocks → then: a header that counts on them. */
        if (sync_all(media, fsync)) return sync_failed();
        media->size = size;
    }
    return pm_media_map(media);
}

const pm_media_operations pm_media_file = {file_write, file_write_hashed, file_flush, file_write_back, file_fence,
                                           file_write_through, file_grow, file_settle, file_sync};
