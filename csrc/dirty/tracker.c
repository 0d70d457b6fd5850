#define _GNU_SOURCE
#include "dirty/tracker.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- the kernel's interface ------------------------------------------------------------------------------------- */

/* The definitions are repeated here, as the headers of the build machine may be older than the running kernel. */

enum {
    UFFD_API_VERSION = 0xaa,
    /* Needs no privilege; read(2) into a protected page still works in the asynchronous mode */
    UFFD_USER_MODE_ONLY_FLAG = 1,
    UFFD_MODE_WP = 2,
    UFFD_WP_UNPOPULATED = 1 << 13, /* pages that are not in memory can be protected */
    UFFD_WP_ASYNC = 1 << 15        /* the kernel lifts the protection by itself */
};

typedef struct {
    uint64_t api, features, ioctls;
} uffd_api;

typedef struct {
    uint64_t start, length;
} uffd_range;

typedef struct {
    uffd_range range;
    uint64_t mode, ioctls;
} uffd_register;

#define UFFDIO_API_CALL _IOWR(0xaa, 0x3f, uffd_api)
#define UFFDIO_REGISTER_CALL _IOWR(0xaa, 0x00, uffd_register)
#define UFFDIO_UNREGISTER_CALL _IOR(0xaa, 0x01, uffd_range)

typedef struct {
    uint64_t start, end, categories;
} page_region;

typedef struct {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
} scan_argument;

_Static_assert(sizeof(scan_argument) == 96 && sizeof(page_region) == 24 && sizeof(uffd_register) == 32,
               "the kernel's layout");

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21 /* Linux 5.4 */
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

#define PAGEMAP_SCAN_CALL _IOWR('f', 16, scan_argument)

enum { IS_WRITTEN = 2, IS_FILE = 4, IS_PRESENT = 8, IS_SWAPPED = 16, SCAN_PROTECT = 1, SCAN_ONLY_ASYNC = 2 };

/* A pagemap entry. Bit 61: the page is of a file or shared, so not private. Bit 62: swapped out; only private pages
 * are. */
#define ENTRY_PRESENT (UINT64_C(1) << 63)
#define ENTRY_SWAPPED (UINT64_C(1) << 62)
#define ENTRY_FILE (UINT64_C(1) << 61)

enum { FOUND_AT_ONCE = 512 }; /* ranges, or pagemap entries: the kernel returns up to so many at once */

static uint64_t page_at(const pm_page_set *set, uint64_t address)
{
    return (address - (uint64_t)(uintptr_t)set->base) / PM_PAGE;
}

/* ---- asking the kernel ------------------------------------------------------------------------------------------- */

/* Adds the pages of a range that have all of `mask` (for bits in `inverted`: none) and any of `any`. set: NULL if only
 * their number matters. */
static int64_t scan(pm_tracker *tracker, const uint8_t *from, uint64_t length, scan_argument how, pm_page_set *set)
{
    const page_region *found = tracker->found;
    int64_t count = 0;
    how.size = sizeof how;
    how.start = (uint64_t)(uintptr_t)from;
    how.end = how.start + length;
    how.vec = (uint64_t)(uintptr_t)tracker->found;
    how.vec_len = FOUND_AT_ONCE;
    while (how.start < how.end) {
        how.walk_end = 0;
        int regions = ioctl(tracker->pagemap, PAGEMAP_SCAN_CALL, &how);
        if (regions < 0 && errno == EINTR && how.walk_end > how.start) regions = 0;
        if (regions < 0 || how.walk_end <= how.start) return -1;
        for (int i = 0; i < regions; i++) {
            if (set) pm_page_set_add(set, page_at(set, found[i].start), page_at(set, found[i].end));
            count += (int64_t)((found[i].end - found[i].start) / PM_PAGE);
        }
        how.start = how.walk_end;
    }
    return count;
}

int64_t pm_tracker_collect(pm_tracker *tracker, const uint8_t *from, uint64_t length, bool filled, pm_page_set *set)
{
    /* SCAN_ONLY_ASYNC: an error if another mapping was put there, which is not armed. */
    scan_argument how = {
        .flags = SCAN_PROTECT | SCAN_ONLY_ASYNC, .category_mask = IS_WRITTEN, .return_mask = IS_WRITTEN};
    /* A page that is not in memory counts as written as long as it is not protected. */
    if (!filled) how.category_anyof_mask = IS_PRESENT | IS_SWAPPED;
    return scan(tracker, from, length, how, set);
}

bool pm_tracker_fill(pm_tracker *tracker, const uint8_t *from, uint64_t length)
{
    const uint64_t neither = IS_PRESENT | IS_SWAPPED;
    scan_argument how = {.flags = SCAN_PROTECT | SCAN_ONLY_ASYNC,
                         .category_mask = neither,
                         .category_inverted = neither,
                         .return_mask = IS_PRESENT};
    return scan(tracker, from, length, how, NULL) >= 0;
}

static int64_t read_pagemap(pm_tracker *tracker, const uint8_t *from, uint64_t length, pm_page_set *set)
{
    const uint64_t *entries = tracker->found;
    uint64_t page = (uint64_t)(uintptr_t)from / PM_PAGE, pages = length / PM_PAGE,
             first = page_at(set, (uint64_t)(uintptr_t)from);
    int64_t count = 0;
    for (uint64_t done = 0; done < pages;) {
        uint64_t part = pages - done < FOUND_AT_ONCE ? pages - done : FOUND_AT_ONCE;
        ssize_t got =
            pread(tracker->pagemap, tracker->found, part * sizeof *entries, (off_t)((page + done) * sizeof *entries));
        if (got < 0 && errno == EINTR) continue;
        if (got < (ssize_t)sizeof *entries) return -1;
        part = (uint64_t)got / sizeof *entries;
        for (uint64_t i = 0; i < part; i++) {
            if (!(entries[i] & ENTRY_SWAPPED) && (!(entries[i] & ENTRY_PRESENT) || entries[i] & ENTRY_FILE)) continue;
            pm_page_set_add(set, first + done + i, first + done + i + 1);
            count++;
        }
        done += part;
    }
    return count;
}

int64_t pm_tracker_private(pm_tracker *tracker, const uint8_t *from, uint64_t length, pm_page_set *set)
{
    if (!tracker->scans) return read_pagemap(tracker, from, length, set);
    scan_argument how = {.category_inverted = IS_FILE,
                         .category_mask = IS_FILE,
                         .category_anyof_mask = IS_PRESENT | IS_SWAPPED,
                         .return_mask = IS_PRESENT};
    return scan(tracker, from, length, how, set);
}

int64_t pm_tracker_arm(pm_tracker *tracker, const uint8_t *from, uint64_t length)
{
    uffd_register argument = {{(uint64_t)(uintptr_t)from, length}, UFFD_MODE_WP, 0};
    if (ioctl(tracker->uffd, UFFDIO_REGISTER_CALL, &argument)) return -1;
    int64_t present = pm_tracker_collect(tracker, from, length, false, NULL);
    if (present < 0) pm_tracker_disarm(tracker, from, length);
    return present;
}

bool pm_tracker_disarm(pm_tracker *tracker, const uint8_t *from, uint64_t length)
{
    uffd_range argument = {(uint64_t)(uintptr_t)from, length};
    return ioctl(tracker->uffd, UFFDIO_UNREGISTER_CALL, &argument) == 0;
}

/* ---- the self-test ----------------------------------------------------------------------------------------------- */

enum { TEST_PAGES = 4 };

/* A mapping of the file's own pages for the test, and the set of pages that is found in it. */
typedef struct {
    uint8_t *pages;
    uint64_t bits;
    pm_page_set set;
} test_mapping;

static void touch(uint8_t *page)
{
    *(volatile uint8_t *)page = *(volatile uint8_t *)page;
}

/* Lets the kernel write, as read(2) into an array does. */
static bool touch_by_kernel(int fd, uint64_t file_offset, uint8_t *page)
{
    return pread(fd, page, PM_LINE, (off_t)file_offset) == PM_LINE;
}

/* Lets the kernel look the page up for a write, as a read past the page cache does, which writes without a fault of its
 * own (O_DIRECT, process_vm_writev). */
static void touch_by_lookup(uint8_t *page)
{
    if (madvise(page, PM_PAGE, MADV_POPULATE_WRITE)) touch(page); /* an older kernel */
}

static bool gives(test_mapping *test, int64_t count, uint64_t bits)
{
    bool right = count == __builtin_popcountll(bits) && test->bits == bits;
    test->bits = 0;
    return right;
}

static bool private_is_found(pm_tracker *tracker, test_mapping *test, uint64_t expected)
{
    return gives(test, pm_tracker_private(tracker, test->pages, TEST_PAGES * PM_PAGE, &test->set), expected);
}

static bool written_is_found(pm_tracker *tracker, test_mapping *test, bool filled, uint64_t expected)
{
    return gives(test, pm_tracker_collect(tracker, test->pages, TEST_PAGES * PM_PAGE, filled, &test->set), expected);
}

/* Swaps a private page out; without swap space nothing happens. */
static void swap_out(uint8_t *page)
{
    madvise(page, PM_PAGE, MADV_PAGEOUT);
}

static void read_page(const uint8_t *page)
{
    (void)*(const volatile uint8_t *)page;
}

static bool drop(uint8_t *page, uint64_t pages)
{
    return madvise(page, pages * PM_PAGE, MADV_DONTNEED) == 0;
}

/* No page is in memory. */
static bool prove_pagemap(pm_tracker *tracker, test_mapping *test, int fd, uint64_t file_offset)
{
    uint8_t *first = test->pages, *second = first + PM_PAGE, *third = second + PM_PAGE;
    read_page(third);
    if (!private_is_found(tracker, test, 0)) return false;
    touch(first);
    if (!touch_by_kernel(fd, file_offset, second) || !private_is_found(tracker, test, 3)) return false;
    touch_by_lookup(third);
    swap_out(first);
    return private_is_found(tracker, test, 7);
}

/* True if every write to a protected page is told, once: to a private page, to one that was read, by the program and by
 * the kernel, and to one that was swapped out; also the first write to a page that was not in memory. Pages 0 and 1 are
 * protected, and were not written; pages 2 and 3 are not in memory. */
static bool prove_writes(pm_tracker *tracker, test_mapping *test, int fd, uint64_t file_offset)
{
    uint8_t *first = test->pages, *second = first + PM_PAGE, *third = second + PM_PAGE, *fourth = third + PM_PAGE;
    touch(first);
    if (!written_is_found(tracker, test, false, 1) || !written_is_found(tracker, test, false, 0)) return false;
    touch(second);
    touch(third);
    if (!touch_by_kernel(fd, file_offset, fourth) || !written_is_found(tracker, test, false, 14)) return false;
    swap_out(first);
    touch(first);
    touch_by_lookup(second);
    if (!touch_by_kernel(fd, file_offset, third) || !written_is_found(tracker, test, false, 7)) return false;
    return private_is_found(tracker, test, 15);
}

/* True if the same holds for pages that were protected while they were not in memory: page 0, which was dropped after
 * a write, and page 1, which was dropped while it was protected. */
static bool prove_filled(pm_tracker *tracker, test_mapping *test, int fd, uint64_t file_offset)
{
    uint8_t *first = test->pages, *second = first + PM_PAGE;
    touch(first);
    if (!drop(first, 2) || !pm_tracker_fill(tracker, first, TEST_PAGES * PM_PAGE)) return false;
    if (!written_is_found(tracker, test, true, 0)) return false;
    touch(first);
    return touch_by_kernel(fd, file_offset, second) && written_is_found(tracker, test, true, 3);
}

/* True if a mapping that replaced a page is noticed, and pages that are not armed any more are private all the
 * same. */
static bool prove_end(pm_tracker *tracker, test_mapping *test, int fd, uint64_t file_offset)
{
    const uint64_t others = (TEST_PAGES - 1) * PM_PAGE;
    if (mmap(test->pages + others, PM_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, fd,
             (off_t)(file_offset + others)) == MAP_FAILED)
        return false;
    if (pm_tracker_collect(tracker, test->pages, others + PM_PAGE, true, &test->set) >= 0) return false;
    test->bits = 0;
    if (!pm_tracker_disarm(tracker, test->pages, others)) return false;
    touch(test->pages);
    return private_is_found(tracker, test, 7);
}

/* No page is in memory. */
static bool prove_uffd(pm_tracker *tracker, test_mapping *test, int fd, uint64_t file_offset)
{
    touch(test->pages);
    read_page(test->pages + PM_PAGE);
    /* The kernel may have mapped more pages than were read. */
    if (!drop(test->pages + 2 * PM_PAGE, 2)) return false;
    if (pm_tracker_arm(tracker, test->pages, TEST_PAGES * PM_PAGE) != 2) return false;
    if (!written_is_found(tracker, test, false, 0)) return false;
    return prove_writes(tracker, test, fd, file_offset) && prove_filled(tracker, test, fd, file_offset) &&
           prove_end(tracker, test, fd, file_offset);
}

static bool open_uffd(pm_tracker *tracker)
{
#ifdef SYS_userfaultfd
    tracker->uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY_FLAG);
    uffd_api api = {UFFD_API_VERSION, UFFD_WP_UNPOPULATED | UFFD_WP_ASYNC, 0};
    return tracker->uffd >= 0 && ioctl(tracker->uffd, UFFDIO_API_CALL, &api) == 0;
#else
    (void)tracker;
    errno = ENOSYS;
    return false;
#endif
}

static void close_uffd(pm_tracker *tracker)
{
    if (tracker->uffd >= 0) close(tracker->uffd);
    tracker->uffd = -1;
}

/* The best kind, at most `most`, that works on this mapping. */
static pm_tracker_kind choose(pm_tracker *tracker, pm_tracker_kind most, test_mapping *test, int fd,
                              uint64_t file_offset)
{
    if (most == PM_TRACKER_COMPARE) return PM_TRACKER_COMPARE;
    tracker->found = malloc(FOUND_AT_ONCE * sizeof(page_region));
    tracker->pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (!tracker->found || tracker->pagemap < 0) return PM_TRACKER_COMPARE;
    tracker->scans = true;
    tracker->scans = pm_tracker_private(tracker, test->pages, PM_PAGE, &test->set) >= 0;
    test->bits = 0;
    bool proven = prove_pagemap(tracker, test, fd, file_offset);
    if (most == PM_TRACKER_UFFD && tracker->scans && proven && drop(test->pages, TEST_PAGES)) {
        if (open_uffd(tracker) && prove_uffd(tracker, test, fd, file_offset)) return PM_TRACKER_UFFD;
        close_uffd(tracker);
    }
    return proven ? PM_TRACKER_PAGEMAP : PM_TRACKER_COMPARE;
}

static const char *const names[] = {"compare", "pagemap", "uffd"};

const char *pm_tracker_name(pm_tracker_kind kind)
{
    return names[kind];
}

bool pm_tracker_is_forced(void)
{
    const char *forced = getenv("PMSTORE_TRACKER");
    return forced && *forced;
}

/* The test touches pages that may not have been read yet: on a bad block that would be a signal. */
static bool test_readable(int fd, uint64_t file_offset)
{
    uint8_t page[PM_PAGE];
    for (uint64_t i = 0; i < TEST_PAGES; i++)
        if (pread(fd, page, PM_PAGE, (off_t)(file_offset + i * PM_PAGE)) != PM_PAGE) return false;
    return true;
}

/*
 * On DAX, bytes are compared. Of the kernels that were tried (6.1, 6.12), none tells private pages of such a mapping
 * from those that show the file, and userfaultfd loops for ever at the first access to a protected page that is not in
 * memory, also in the self-test: so it is not even tried.
 *
 * The same as pm_dax_is: `dirty` may not include `media`.
 */
static bool is_dax(int fd)
{
    enum { ATTRIBUTE_DAX = 0x200000 };
    struct statx file;
    return !statx(fd, "", AT_EMPTY_PATH, 0, &file) && file.stx_attributes & ATTRIBUTE_DAX;
}

pm_status pm_tracker_open(pm_tracker *tracker, int fd, uint64_t file_offset)
{
    *tracker = (pm_tracker){.uffd = -1, .pagemap = -1, .forced = pm_tracker_is_forced()};
    pm_tracker_kind most = PM_TRACKER_UFFD;
    if (tracker->forced) {
        const char *name = getenv("PMSTORE_TRACKER");
        while (most != PM_TRACKER_COMPARE && strcmp(name, names[most])) most--;
        if (strcmp(name, names[most]))
            return pm_fail(PM_INVALID, "PMSTORE_TRACKER is uffd, pagemap or compare, not %.40s", name);
    }
    if (is_dax(fd)) {
        if (!tracker->forced || most == PM_TRACKER_COMPARE) return PM_OK; /* the kind is COMPARE */
        return pm_fail(PM_INVALID, "PMSTORE_TRACKER=%s can't be used on DAX, where changes are found by comparing: "
                                   "unset it, or set it to compare", names[most]);
    }
    test_mapping test = {0};
    if (!test_readable(fd, file_offset)) return PM_OK; /* the kind is COMPARE */
    void *pages =
        mmap(NULL, TEST_PAGES * PM_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, (off_t)file_offset);
    if (pages != MAP_FAILED) {
        test = (test_mapping){.pages = pages, .set = {pages, &test.bits}};
        tracker->kind = choose(tracker, most, &test, fd, file_offset);
        munmap(pages, TEST_PAGES * PM_PAGE);
    }
    if (tracker->kind == PM_TRACKER_COMPARE) pm_tracker_close(tracker);
    if (tracker->forced && tracker->kind != most) {
        pm_tracker_close(tracker);
        return pm_fail(PM_IO, "PMSTORE_TRACKER=%s is not supported here", names[most]);
    }
    return PM_OK;
}

void pm_tracker_close(pm_tracker *tracker)
{
    close_uffd(tracker);
    if (tracker->pagemap >= 0) close(tracker->pagemap);
    tracker->pagemap = -1;
    free(tracker->found);
    tracker->found = NULL;
    tracker->kind = PM_TRACKER_COMPARE;
}
