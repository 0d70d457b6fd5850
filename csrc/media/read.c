/*
 * Asking before reading. If the disk can't read a page, or the file was cut short before it, a system call that reads
 * the page returns an error, and touching its mapping is a signal (SIGBUS). So the core asks before it reads a page
 * that may not have been read before: MADV_POPULATE_READ brings pages into the page table, as touching them would, and
 * returns an error if it can't. The kernel can nearly always give a page again that it had once, so the core does not
 * ask twice.
 *
 * Programs touch their arrays without asking: for them a bad block is a signal, as in any mapping.
 *
 * On tmpfs there are no bad blocks. But a page of a hole takes space when it is touched, which is a signal if tmpfs is
 * full. So all holes get pages when a sparse file is opened.
 */
#define _GNU_SOURCE
#include "media/media.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif

static int populate(const uint8_t *at, uint64_t length, int how)
{
    int result;
    do result = madvise((void *)(uintptr_t)at, length, how);
    while (result && errno == EINTR);
    return result;
}

/* True if a page of the file can't be read, with errno; errno is 0 if the file ends before the page. */
static bool is_bad(const pm_media *media, uint64_t offset)
{
    uint8_t page[PM_PAGE];
    ssize_t got;
    do got = pread(media->fd, page, sizeof page, (off_t)offset);
    while (got < 0 && errno == EINTR);
    if (!got) errno = 0;
    return got <= 0;
}

static void tell(uint64_t offset, const char *what)
{
    char text[128];
    /* The GNU variant returns the text, which need not be in the buffer. */
    const char *why = errno ? strerror_r(errno, text, sizeof text) : "the file was cut short";
    pm_fail(PM_UNREADABLE, "cannot read %s: %s, at offset %llu of the file", what, why, (unsigned long long)offset);
}

/* The first bad page of a range in which one was found; UINT64_MAX if it can be read now. */
static uint64_t find_bad(const pm_media *media, const uint8_t *at, uint64_t offset, uint64_t length, int how,
                         const char *what)
{
    for (uint64_t done = 0; done < length; done += PM_PAGE) {
        if (!populate(at + done, PM_PAGE, how)) continue;
        /* Any other error says nothing of the page: EINVAL, if the kernel is older than these calls; ENOMEM. */
        bool signal = errno == EFAULT || errno == EHWPOISON;
        if (!is_bad(media, offset + done)) {
            if (!signal || !populate(at + done, PM_PAGE, how)) continue;
            errno = EIO;
        }
        tell(offset + done, what);
        return offset + done;
    }
    return UINT64_MAX;
}

uint64_t pm_media_find_unreadable(const pm_media *media, const uint8_t *at, uint64_t offset, uint64_t length,
                                  bool privately, const char *what)
{
    uint64_t before = offset % PM_PAGE;
    int how = privately ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    at -= before, offset -= before, length = pm_round_up(length + before, PM_PAGE);
    return populate(at, length, how) ? find_bad(media, at, offset, length, how, what) : UINT64_MAX;
}

pm_status pm_media_fill_holes(pm_media *media)
{
    off_t size = (off_t)media->size, from, to = 0;
    while ((from = lseek(media->fd, to, SEEK_HOLE)) >= 0 && from < size) {
        to = lseek(media->fd, from, SEEK_DATA);
        if (to < 0 || to > size) to = size; /* no data follow */
        if (!populate(media->view + from, (uint64_t)(to - from), MADV_POPULATE_READ)) continue;
        if (errno != EFAULT && errno != ENOMEM) break; /* a kernel without this call */
        if (errno == EFAULT) errno = ENOSPC;
        return pm_media_no_room(media, "the holes of this sparse file need", (uint64_t)(to - from));
    }
    return PM_OK;
}
