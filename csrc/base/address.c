#define _GNU_SOURCE
#include "base/address.h"

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "base/format.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000 /* Linux 4.17; an older kernel takes the address for a hint */
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24 /* Linux 5.18 */
#endif

enum { NOTHING_YET = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE };

/*
 * Returns a hint for the next range that may grow. The kernel places mappings one below the other, so none can grow
 * upward. Ranges that may grow get places of their own in the middle of the address space, which nothing else uses. The
 * bits of a counter, in reverse order, keep these places as far from each other as possible: with 2,000 ranges, two of
 * them are 32 GiB apart.
 */
static void *lonely_place(void)
{
    enum { BITS = 14 };
    const uint64_t first = UINT64_C(1) << 44, span = UINT64_C(1) << 46;
    static atomic_uint count;
    uint64_t number = atomic_fetch_add(&count, 1), reversed = 0;
    for (int bit = 0; bit < BITS; bit++) reversed |= (number >> bit & 1) << (BITS - 1 - bit);
    return (void *)(uintptr_t)(first + reversed * (span >> BITS)); /* NOLINT: a hint, not a pointer to anything */
}

void *pm_address_keep(uint64_t size, bool alone)
{
    void *at = mmap(alone ? lonely_place() : NULL, size, PROT_NONE, NOTHING_YET, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

bool pm_address_keep_more(void *behind, uint64_t size)
{
    void *at = mmap(behind, size, PROT_NONE, NOTHING_YET | MAP_FIXED_NOREPLACE, -1, 0);
    if (at == behind) return true;
    if (at == MAP_FAILED) return false;
    munmap(at, size); /* an older kernel, which takes another place */
    errno = EEXIST;
    return false;
}

void *pm_address_resize(void *at, uint64_t old_size, uint64_t size)
{
    void *moved =
        at ? mremap(at, old_size, size, MREMAP_MAYMOVE) : mmap(NULL, size, PROT_READ | PROT_WRITE, NOTHING_YET, -1, 0);
    return moved == MAP_FAILED ? NULL : moved;
}

void pm_address_drop(void *at, uint64_t length)
{
    if (!madvise(at, length, MADV_DONTNEED) || !madvise(at, length, MADV_DONTNEED_LOCKED)) return;
    PM_CHECK(munlock(at, length) == 0 && madvise(at, length, MADV_DONTNEED) == 0);
}

bool pm_address_own(void *at, uint64_t length)
{
    if (!madvise(at, length, MADV_POPULATE_WRITE)) return true;
    if (errno != EINVAL) return false;
    /* An older kernel. The byte is not changed, because another thread may be storing to it. */
    for (uint64_t done = 0; done < length; done += PM_PAGE)
        __atomic_fetch_or((uint8_t *)at + done, 0, __ATOMIC_RELAXED);
    return true;
}

static pm_status limited(const char *what, unsigned long long mebibytes, const char *of, rlim_t limit, char option)
{
    return pm_fail(PM_NO_MEMORY,
                   "%s: %llu MiB are needed, and the %s of this process is limited to %llu MiB: raise the limit "
                   "(ulimit -%c), or close stores and let go of arrays",
                   what, mebibytes, of, (unsigned long long)(limit >> 20), option);
}

pm_status pm_address_refused(const char *what, uint64_t bytes)
{
    struct rlimit limit;
    unsigned long long mebibytes = (unsigned long long)(pm_round_up(bytes, 1 << 20) >> 20);
    if (errno == EAGAIN) /* the limit on locked memory (mlockall) */
        return pm_fail(
            PM_NO_MEMORY,
            "%s: %llu MiB can't be locked in memory: raise the limit (ulimit -l), or close stores and let go of arrays",
            what, mebibytes);
    if (errno != ENOMEM) return pm_fail_errno(what);
    if (!getrlimit(RLIMIT_AS, &limit) && limit.rlim_cur != RLIM_INFINITY)
        return limited(what, mebibytes, "address space", limit.rlim_cur, 'v');
    if (!getrlimit(RLIMIT_DATA, &limit) && limit.rlim_cur != RLIM_INFINITY)
        return limited(what, mebibytes, "memory", limit.rlim_cur, 'd');
    return pm_fail(PM_NO_MEMORY,
                   "%s: the system refuses %llu MiB: it has too little memory, or this process has as many mappings as "
                   "vm.max_map_count allows: close stores and let go of arrays, or raise it",
                   what, mebibytes);
}
