/*
 * Asking before reading. A page that the disk can't give, or that somebody has cut off the file, is an error to whoever
 * asks for it by a call, and a signal to whoever touches its mapping (SIGBUS). So the core asks for what it reads,
 * where that may be the first time: MADV_POPULATE_READ brings pages into the page table, as touching them would, and
 * says if it can't. What the kernel had once it can nearly always give again, and is not asked for twice.
 *
 * Programs touch their arrays without asking: for them a bad block is a signal, as in any mapping.
 */
#define _GNU_SOURCE
#include "media.h"

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

/* Whether a page of the file can't be read, with errno: 0 if the file ends before it. */
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

/* The first bad page of a range in which there is one, as far as it can be found again. */
static uint64_t find_bad(const pm_media *media, const uint8_t *at, uint64_t offset, uint64_t length, int how,
                         const char *what)
{
    for (uint64_t done = 0; done < length; done += PM_PAGE) {
        if (!populate(at + done, PM_PAGE, how)) continue;
        /* Anything else is no word on the page: EINVAL, the kernel is older than these calls; ENOMEM. */
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
