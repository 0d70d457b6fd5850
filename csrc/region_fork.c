#define _GNU_SOURCE
#include "region_fork.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "address.h"

/* Behind the bytes that _opening.py locks: number `fork` belongs to that fork of its process. Two processes may give one number to two forks: then space is
 * kept for a little longer. */
#define FORK_BYTES ((INT64_C(1) << 62) + (INT64_C(1) << 32))
#define FORKS_MOST (INT64_C(1) << 40)

const uint64_t pm_pid_byte = (UINT64_C(1) << 62) + 1;

static atomic_ullong forks; /* of this process */

/* ---- locks ---------------------------------------------------------------------------------------------------- */

/* Whether a child lives of one of these forks. If it can't be known, one may. */
static bool child_lives(const pm_region *region, uint64_t first, uint64_t last)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = FORK_BYTES + (int64_t)first, .l_len = (int64_t)(last - first) + 1};
    return fcntl(region->media->fd, F_OFD_GETLK, &lock) || lock.l_type != F_UNLCK;
}

/* Closing a descriptor has dropped the process's POSIX lock on the file, which only tells others its number. */
static void tell_pid_again(const pm_region *region)
{
    short kind = region->media->read_only ? F_RDLCK : F_WRLCK;
    struct flock lock = {.l_type = kind, .l_whence = SEEK_SET, .l_start = (int64_t)pm_pid_byte, .l_len = 1};
    (void)fcntl(region->media->fd, F_SETLK, &lock);
}

/* A mapping that keeps the lock of this fork; NULL if there can't be one. */
static void *lock_fork(const pm_region *region, uint64_t fork)
{
    char name[32];
    snprintf(name, sizeof name, "/proc/self/fd/%d", region->media->fd);
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NULL;
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = FORK_BYTES + (int64_t)(fork % FORKS_MOST), .l_len = 1};
    void *kept = fcntl(fd, F_OFD_SETLK, &lock) ? MAP_FAILED : mmap(NULL, PM_PAGE, PROT_NONE, MAP_SHARED, fd, 0);
    close(fd);
    tell_pid_again(region);
    return kept == MAP_FAILED ? NULL : kept;
}

/* ---- around a fork ---------------------------------------------------------------------------------------------- */

/* Its bytes never change, nor anything else on its pages. */
static bool stays(const pm_buffer *buffer)
{
    return buffer->fixed && buffer->offset % PM_PAGE == 0;
}

/* Without memory for a page of its own the child must not take other bytes for the parent's: it gets none. A page that the disk can't read stays
 * unreadable in the child. */
static void own_pages(pm_region *region, uint64_t from, uint64_t to)
{
    if (from >= to || pm_address_own(region->live + from, to - from)) return;
    for (; from < to; from += PM_PAGE)
        if (!pm_address_own(region->live + from, PM_PAGE) && errno != EFAULT) region->hidden_from_child = true;
}

/* A large array that stays is mapped anew in the child, which sees the same pages of the file: to copy the page table of 1 GiB takes 10 to 30 ms. */
static void map_in_child(const pm_region *region, pm_buffer *buffer)
{
    enum { MAPPED_FROM = 1 << 20 };
    if (buffer->mapped_in_child || buffer->length < MAPPED_FROM) return;
    buffer->mapped_in_child = !madvise(region->live + buffer->offset, buffer->length, MADV_DONTFORK);
}

void pm_fork_begins(pm_region *region)
{
    bool any = false;
    for (size_t i = 0; i < region->buffer_count && !any; i++) any = atomic_load(&region->buffers[i]->living) && stays(region->buffers[i]);
    uint64_t fork = any ? atomic_fetch_add(&forks, 1) + 1 : 0, from = 0, to = 0;
    region->fork_lock = any ? lock_fork(region, fork) : NULL;
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        if (!atomic_load(&buffer->living)) continue;
        if (stays(buffer) && region->fork_lock) {
            if (!buffer->first_fork) buffer->first_fork = fork;
            buffer->last_fork = fork;
            map_in_child(region, buffer);
            continue;
        }
        uint64_t first = buffer->offset / PM_PAGE * PM_PAGE, end = pm_round_up(buffer->offset + buffer->length, PM_PAGE);
        if (first > to) own_pages(region, from, to), from = first;
        if (end > to) to = end;
    }
    own_pages(region, from, to);
}

void pm_fork_is_over(pm_region *region)
{
    for (size_t i = 0; i < region->buffer_count; i++) {
        pm_buffer *buffer = region->buffers[i];
        if (!buffer->mapped_in_child) continue;
        madvise(region->live + buffer->offset, buffer->length, MADV_DOFORK);
        buffer->mapped_in_child = false;
    }
    region->hidden_from_child = false;
    pm_fork_let_go(region);
}

void pm_fork_in_child(pm_region *region)
{
    if (region->hidden_from_child) mprotect(region->live, region->size, PROT_NONE);
    for (size_t i = 0; i < region->buffer_count; i++) {
        const pm_buffer *buffer = region->buffers[i];
        if (!buffer->mapped_in_child) continue;
        /* Nothing else is there: other handlers of forks ran in the parent's addresses, and these are far from where mappings are put. */
        void *at = region->live + buffer->offset;
        PM_CHECK(mmap(at, buffer->length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, region->media->fd,
                      (off_t)(PM_REGION_START + buffer->offset)) == at);
    }
}

void pm_fork_let_go(pm_region *region)
{
    if (region->fork_lock) munmap(region->fork_lock, PM_PAGE);
    region->fork_lock = NULL;
}

/* ---- space ------------------------------------------------------------------------------------------------------ */

bool pm_fork_may_show(const pm_region *region, pm_buffer *buffer)
{
    if (!buffer->last_fork) return false;
    if (child_lives(region, buffer->first_fork, buffer->last_fork)) return true;
    buffer->first_fork = buffer->last_fork = 0;
    return false;
}

void pm_fork_find_children(pm_region *region)
{
    bool any = !region->media->read_only && !region->media->lent && child_lives(region, 0, FORKS_MOST - 1);
    region->shown_to_children = any ? region->size : 0;
}

uint64_t pm_fork_free_from(pm_region *region)
{
    if (region->shown_to_children && !child_lives(region, 0, FORKS_MOST - 1)) region->shown_to_children = 0;
    return region->shown_to_children;
}
