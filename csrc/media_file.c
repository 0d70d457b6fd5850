/* A file on a disk: everything is written through one open file, and what is read is the page cache. */
#define _GNU_SOURCE
#include "media.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "hash.h"

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

/* pwrite that tells the trace what it did. flags: RWF_DSYNC, or 0. */
static ssize_t write_some(pm_media *media, uint64_t offset, const void *source, size_t length, int flags)
{
    if (media->trace && !(length = pm_trace_allows_write(media->trace, length))) return -1;
    if (media->trace && flags && !pm_trace_allows(media->trace, PM_OPERATION_SYNC)) return fail_to_sync(media, offset, source, length);
    struct iovec part = {(void *)(uintptr_t)source, length};
    ssize_t done = flags ? pwritev2(media->fd, &part, 1, (off_t)offset, flags) : pwrite(media->fd, source, length, (off_t)offset);
    if (media->trace && done > 0) {
        pm_trace_add(media->trace, PM_EVENT_WRITE, offset, (uint64_t)done, source);
        if (flags) pm_trace_add(media->trace, PM_EVENT_SYNC_RANGE, offset, (uint64_t)done, NULL);
    }
    return done;
}

/* fdatasync or fsync that tells the trace. Not 0: it failed. */
static int sync_all(pm_media *media, int (*sync)(int fd))
{
    bool allowed = !media->trace || pm_trace_allows(media->trace, PM_OPERATION_SYNC);
    int result = allowed ? sync(media->fd) : -1;
    if (media->trace) pm_trace_add(media->trace, result ? PM_EVENT_SYNC_FAILED : PM_EVENT_SYNC, 0, 0, NULL);
    return result;
}

static pm_status write_all(pm_media *media, uint64_t offset, const void *source, size_t length, int flags)
{
    const char *from = source;
    while (length) {
        ssize_t done = write_some(media, offset, from, length, flags);
        if (done < 0 && errno == EINTR) continue;
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

static pm_status file_write(pm_media *media, uint64_t offset, const void *source, size_t length, pm_write_how how)
{
    (void)how;
    PM_CHECK(offset + length <= media->size);
    return write_all(media, offset, source, length, 0);
}

static pm_status file_write_hashed(pm_media *media, uint64_t offset, const uint8_t *source, uint64_t pages, uint64_t *hashes)
{
    enum { PAGES_AT_ONCE = 64 /* they stay in the cache until they are written */ };
    uint8_t copy[PAGES_AT_ONCE * PM_PAGE] __attribute__((aligned(PM_LINE)));
    PM_CHECK(offset + pages * PM_PAGE <= media->size);
    while (pages) {
        uint64_t some = pages < PAGES_AT_ONCE ? pages : PAGES_AT_ONCE;
        for (uint64_t page = 0; page < some; page++)
            hashes[page] = pm_hash64_copy_page(copy + page * PM_PAGE, source + page * PM_PAGE);
        PM_TRY(write_all(media, offset, copy, some * PM_PAGE, 0));
        offset += some * PM_PAGE, source += some * PM_PAGE, hashes += some, pages -= some;
    }
    return PM_OK;
}

static void file_flush(pm_media *media, uint64_t offset, uint64_t length)
{
    (void)media, (void)offset, (void)length;
}

static pm_status file_fence(pm_media *media)
{
    media->syncs++;
    /* Not retried: after a failed sync the kernel may have dropped the dirty pages (D7). */
    return sync_all(media, fdatasync) ? sync_failed() : PM_OK;
}

static pm_status file_write_through(pm_media *media, uint64_t offset, const void *source, size_t length)
{
    PM_CHECK(offset + length <= media->size);
    if (media->durable_range) {
        pm_status status = write_all(media, offset, source, length, RWF_DSYNC);
        media->syncs++;
        if (status == PM_OK || pm_errno() != EOPNOTSUPP) return status == PM_NO_SPACE ? PM_IO : status;
        media->durable_range = false;
    }
    PM_TRY(write_all(media, offset, source, length, 0));
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
            status = pm_media_write_zeros(media, from, size);
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

const pm_media_operations pm_media_file = {file_write, file_write_hashed, file_flush, file_fence, file_write_through, file_grow};
