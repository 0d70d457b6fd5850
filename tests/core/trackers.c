/*
 * The tracker's self-test on kernels that are wrong. Each lie changes what a system call does, and the tracker that is
 * chosen then must not rely on it. Run by tests/core/test_tracker_proof.py.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dirty/page_set.h"

typedef enum {
    HONEST,
    NO_SCAN,            /* as before Linux 6.7 */
    NO_PAGEMAP,
    NO_USERFAULTFD,
    NO_POPULATING,      /* as before Linux 5.14, or in a sandbox */
    NOT_ASYNCHRONOUS,   /* as before Linux 6.7 */
    NOTHING_WRITTEN,    /* no page is ever told as written */
    WRITTEN_FOR_EVER,   /* pages are not protected again */
    ALL_WRITTEN,        /* protected pages are told, written or not */
    NOT_WHAT_IT_READ,   /* the kernel's own writes into protected pages are not told */
    NOT_WHAT_IT_FOUND,  /* nor writes to pages that it looked up */
    NOT_WHAT_IT_SHOWED, /* the first write to a protected page that showed the file is not told */
    NO_FILLING,         /* pages that are not in memory are not protected */
    OTHERS_UNNOTICED,   /* a mapping that replaced an armed one is not noticed */
    STILL_WATCHED,      /* watching can't be ended */
    READ_IS_PRIVATE,    /* pages that show the file are told as private, as for DAX */
    NOTHING_PRIVATE,
    ONLY_EXCLUSIVE,     /* private pages are not told once the kernel has written to them */
    SWAPPED_IS_NOTHING, /* a page that was swapped out is not told */
    INTERRUPTED_READ,   /* no lie: as before Linux 6.7, and a signal comes before anything is read */
    INTERRUPTED_SCAN,   /* no lie: a signal comes behind the first page, if there is nothing to tell of it */
    NO_DROPPING,        /* a part of the mapping can't be dropped */
    NOT_THE_LAST,       /* of the pages in memory, the last one is never told as written */
    TOLD_TWICE,         /* pages that were told and protected are told once more, written or not */
    LIES
} lie;

static const char *const lies[] = {
    "honest", "no scan", "no pagemap", "no userfaultfd", "no populating", "not asynchronous", "nothing written",
    "written for ever", "all written", "not what it read", "not what it found", "not what it showed", "no filling",
    "others unnoticed", "still armed", "read is private", "nothing private", "only exclusive", "swapped is nothing",
    "interrupted read", "interrupted scan", "no dropping", "not the last", "told twice"};

static lie told;
static uint8_t *pages; /* the mapping of the test */
static int map_fd = -1;

enum { PAGES = 4, REAL_PAGE = 4096, WRITTEN = 2, IN_FILE = 4, PRESENT = 8, SWAPPED = 16, PROTECT = 1, ASYNC = 2 };

typedef struct {
    uint64_t start, end, categories;
} region;

typedef struct {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, any, returned;
} argument;

#define SCAN _IOWR('f', 16, argument)

static void protect_again(const void *page)
{
    region found[1];
    argument how = {sizeof how, PROTECT, (uint64_t)(uintptr_t)page, (uint64_t)(uintptr_t)page + REAL_PAGE, 0,
                    (uint64_t)(uintptr_t)found, 1, 0, 0, WRITTEN, 0, WRITTEN};
    if (map_fd >= 0) ioctl(map_fd, SCAN, &how);
}

static bool is_private(const void *page)
{
    uint64_t entry = 0;
    if (map_fd < 0 || pread(map_fd, &entry, 8, (off_t)((uintptr_t)page / REAL_PAGE * 8)) != 8) return false;
    return entry >> 62 && !(entry >> 61 & 1);
}

static int scan_with_lies(int fd, argument *how)
{
    if (told == NO_SCAN || told == INTERRUPTED_READ) return errno = ENOTTY, -1;
    if (told == INTERRUPTED_SCAN && how->end - how->start > REAL_PAGE) {
        argument first = *how;
        first.end = how->start + REAL_PAGE, first.flags &= ~(uint64_t)PROTECT;
        if (!ioctl(fd, SCAN, &first)) return how->walk_end = first.end, errno = EINTR, -1;
    }
    bool for_written = how->mask & WRITTEN;
    if (told == WRITTEN_FOR_EVER) how->flags &= ~(uint64_t)PROTECT;
    if (told == OTHERS_UNNOTICED) how->flags &= ~(uint64_t)ASYNC;
    if (told == NO_FILLING && how->inverted & PRESENT) return how->walk_end = how->end, 0;
    if (told == READ_IS_PRIVATE && how->mask & IN_FILE) how->mask = how->inverted = 0;
    if (told == NOTHING_PRIVATE && how->mask & IN_FILE) return how->walk_end = how->end, 0;
    if (told == NOTHING_WRITTEN && for_written && !(how->inverted & PRESENT)) {
        ioctl(fd, SCAN, how);
        return how->walk_end = how->end, 0;
    }
    if (told == NOT_THE_LAST && for_written && how->any) {
        how->end -= REAL_PAGE;
        int regions = ioctl(fd, SCAN, how);
        return how->walk_end = how->end += REAL_PAGE, regions;
    }
    if (told == ALL_WRITTEN && for_written) how->mask = how->inverted = 0;
    static int scans;
    if (told == TOLD_TWICE && for_written && how->any && ++scans == 2) how->mask = how->inverted = 0;
    if (told == NOT_WHAT_IT_SHOWED && for_written) {
        static bool showed[PAGES];
        for (int i = 0; i < PAGES; i++) {
            bool shows = !is_private(pages + i * REAL_PAGE);
            if (showed[i] && !shows) protect_again(pages + i * REAL_PAGE);
            showed[i] = shows;
        }
    }
    return ioctl(fd, SCAN, how);
}

static int my_ioctl(int fd, unsigned long request, void *value)
{
    if (request == SCAN) return scan_with_lies(fd, value);
    if (told == STILL_WATCHED && _IOC_TYPE(request) == 0xaa && _IOC_NR(request) == 1) return errno = EINVAL, -1;
    if (told == NOT_ASYNCHRONOUS && _IOC_TYPE(request) == 0xaa && _IOC_NR(request) == 0x3f) return errno = EINVAL, -1;
    return ioctl(fd, request, value);
}

static ssize_t my_pread(int fd, void *to, size_t length, off_t at)
{
    static bool interrupted;
    if (told == INTERRUPTED_READ && fd == map_fd && (interrupted = !interrupted)) return errno = EINTR, -1;
    ssize_t got = pread(fd, to, length, at);
    if (fd == map_fd || (uint8_t *)to < pages || (uint8_t *)to >= pages + PAGES * REAL_PAGE) return got;
    if (told == NOT_WHAT_IT_READ) protect_again(to);
    if (told == ONLY_EXCLUSIVE) madvise(to, REAL_PAGE, MADV_DONTNEED);
    return got;
}

static int my_madvise(void *at, size_t length, int how)
{
    enum { PAGE_OUT = 21, POPULATE_WRITE = 23 };
    /* Without swap space no page is swapped out, so that a drop stands for it. */
    if (how == PAGE_OUT && told == SWAPPED_IS_NOTHING) return madvise(at, length, MADV_DONTNEED);
    if (how == POPULATE_WRITE && told == NO_POPULATING) return errno = EINVAL, -1;
    if (how == MADV_DONTNEED && told == NO_DROPPING && length < PAGES * REAL_PAGE) return errno = EINVAL, -1;
    int result = madvise(at, length, how);
    if (how == POPULATE_WRITE && told == NOT_WHAT_IT_FOUND) protect_again(at);
    return result;
}

static int my_open(const char *path, int flags)
{
    if (told == NO_PAGEMAP) return errno = ENOENT, -1;
    return map_fd = open(path, flags);
}

static long my_syscall(long number, long flags)
{
    if (told == NO_USERFAULTFD) return errno = EPERM, -1;
    return syscall(number, flags);
}

static void *my_mmap(void *at, size_t length, int access, int flags, int fd, off_t offset)
{
    void *found = mmap(at, length, access, flags, fd, offset);
    if (!at) pages = found;
    return found;
}

/* A descriptor that is closed twice may be another one of the program by then. */
static int my_close(int fd)
{
    int result = close(fd);
    if (result) printf("closed twice: %d\n", fd);
    return result;
}

#define close(fd) my_close(fd)
#define ioctl(fd, request, value) my_ioctl(fd, request, value)
#define pread(fd, to, length, at) my_pread(fd, to, length, at)
#define madvise(at, length, how) my_madvise(at, length, how)
#define open(path, flags) my_open(path, flags)
#define syscall(number, flags) my_syscall(number, flags)
#define mmap(at, length, access, flags, fd, offset) my_mmap(at, length, access, flags, fd, offset)

#include "dirty/page_set.c"
#include "dirty/tracker.c"

pm_status pm_fail(pm_status status, const char *format, ...)
{
    (void)format;
    return status;
}

/* -1: the kernel can't be asked about a single page. */
static int64_t private_of_one_page(pm_tracker *tracker)
{
    static uint64_t bits;
    uint8_t *page = (mmap)(NULL, REAL_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pm_page_set set = {.bits = &bits, .base = page};
    *page = 1;
    return pm_tracker_private(tracker, page, REAL_PAGE, &set);
}

int main(int count, char **arguments)
{
    int fd = (open)(arguments[count - 1], O_RDWR);
    for (told = HONEST; told < LIES; told++) {
        pm_tracker tracker;
        map_fd = -1;
        if (pm_tracker_open(&tracker, fd, 0)) return 1;
        printf("%s: %s\n", lies[told], pm_tracker_name(tracker.kind));
        if (tracker.kind != PM_TRACKER_UFFD && tracker.uffd >= 0) printf("not used, and open: %d\n", tracker.uffd);
        if (told == NO_SCAN) printf("private of one page: %d\n", (int)private_of_one_page(&tracker));
        pm_tracker_close(&tracker);
    }
    return 0;
}
