#define _GNU_SOURCE
#include "space/region_fork.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/address.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/*
 * The bytes are behind those that pmstore/_store/held.py locks. The number of a fork's byte contains the number of
 * pages of the region, and the number of the fork: later forks of a process have later bytes. Two processes may use the
 * same byte for two forks: then space is kept for a little longer.
 */
#define FORK_BYTES ((INT64_C(1) << 62) + (INT64_C(1) << 61))
/* Readers that map constant arrays lock bytes from here on, one for each page of the region that they map. */
#define READER_BYTES (FORK_BYTES + (INT64_C(1) << 60))
#define READER_BYTES_END (READER_BYTES + (INT64_C(1) << 59))
enum { NUMBER_BITS = 24 };

const uint64_t pm_pid_byte = (UINT64_C(1) << 62) + 1;

static atomic_uint forks; /* forks of this process */

/* ---- locks ---------------------------------------------------------------------------------------------------- */

/* The first and the last byte from first to last that one lock of another open file has; 0: there is none, or the file
 * system has no such locks. Of several locks it is any. */
static int64_t locked(const pm_region *region, int64_t first, int64_t last, int64_t *end)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = first, .l_len = last - first + 1};
    if (fcntl(region->media->fd, F_OFD_GETLK, &lock) || lock.l_type == F_UNLCK) return 0;
    *end = !lock.l_len || lock.l_len > last - lock.l_start ? last : lock.l_start + lock.l_len - 1;
    return lock.l_start > first ? lock.l_start : first;
}

/* The byte of a living child's lock, of the forks from first to last; 0: there is none. */
static int64_t child_lives(const pm_region *region, int64_t first, int64_t last)
{
    int64_t end;
    return locked(region, first, last, &end);
}

/* Takes the process's POSIX lock again, which closing a descriptor has dropped. It only tells other processes its
 * number. */
static void tell_pid_again(const pm_region *region)
{
    short kind = region->media->read_only ? F_RDLCK : F_WRLCK;
    struct flock lock = {.l_type = kind, .l_whence = SEEK_SET, .l_start = (int64_t)pm_pid_byte, .l_len = 1};
    (void)fcntl(region->media->fd, F_SETLK, &lock);
}

/* Makes a mapping that keeps the lock of this fork; NULL if that can't be done. */
static void *lock_fork(const pm_region *region, int64_t fork)
{
    char name[32];
    snprintf(name, sizeof name, "/proc/self/fd/%d", region->media->fd);
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NULL;
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = fork, .l_len = 1};
    void *kept = fcntl(fd, F_OFD_SETLK, &lock) ? MAP_FAILED : mmap(NULL, PM_PAGE, PROT_NONE, MAP_SHARED, fd, 0);
    close(fd);
    tell_pid_again(region);
    if (kept == MAP_FAILED) return NULL;
    /* Some file systems, such as overlayfs, map another file instead. Then nothing keeps the lock. */
    if (child_lives(region, fork, fork)) return kept;
    munmap(kept, PM_PAGE);
    return NULL;
}

/* ---- around a fork ---------------------------------------------------------------------------------------------- */

/* True if the buffer's bytes never change, nor any other byte on its pages. Before the array is committed, no record
 * declares it, and a recovery may write an older array's bytes there (I8). */
static bool stays(const pm_buffer *buffer)
{
    return buffer->fixed && buffer->committed && buffer->offset % PM_PAGE == 0;
}

/* Makes pages private. Without memory for one, the child must not take other bytes for the parent's, so it gets no
 * page. A page that the disk can't read stays unreadable in the child. */
static void own_pages(pm_region *region, uint64_t from, uint64_t to)
{
    if (from >= to || pm_address_own(region->live + from, to - from)) return;
    for (; from < to; from += PM_PAGE)
        if (!pm_address_own(region->live + from, PM_PAGE) && errno != EFAULT) region->hidden_from_child = true;
}

/* Has a large array that never changes mapped anew in the child, which sees the same pages of the file: copying the
 * page table of a large array makes the fork slow. */
static void map_in_child(const pm_region *region, pm_buffer *buffer)
{
    enum { MAPPED_FROM = 1 << 20 };
    if (buffer->mapped_in_child || buffer->length < MAPPED_FROM) return;
    buffer->mapped_in_child = !madvise(region->live + buffer->offset, buffer->length, MADV_DONTFORK);
}

int64_t pm_region_fork_reader_byte(uint64_t page)
{
    return READER_BYTES + (int64_t)page;
}

void pm_region_fork_begins(pm_region *region)
{
    bool any = false;
    if (region->snapshot) return; /* the child sees the same memory */
    for (size_t i = 0; i < region->buffer_count && !any; i++)
        any = atomic_load(&region->buffers[i]->living) && stays(region->buffers[i]);
    int64_t number = any ? atomic_fetch_add(&forks, 1) % (1 << NUMBER_BITS) : 0;
    int64_t fork = FORK_BYTES + ((int64_t)(region->size / PM_PAGE) << NUMBER_BITS) + number;
    uint64_t from = 0, to = 0;
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
        uint64_t first = buffer->offset / PM_PAGE * PM_PAGE,
                 end = pm_round_up(buffer->offset + buffer->length, PM_PAGE);
        if (first > to) own_pages(region, from, to), from = first;
        if (end > to) to = end;
    }
    own_pages(region, from, to);
}

void pm_region_fork_is_over(pm_region *region)
{
    bool any = false;
    for (size_t i = 0; i < region->buffer_count; i++) {
        any |= region->buffers[i]->mapped_in_child;
        region->buffers[i]->mapped_in_child = false;
    }
    /* for the whole region, so that no mapping has to be split */
    if (any) madvise(region->live, region->size, MADV_DOFORK);
    region->hidden_from_child = false;
    pm_region_fork_let_go(region);
}

static void *map_again(pm_region *region, uint64_t offset, uint64_t length, int access, int how, int fd)
{
    return mmap(region->live + offset, length, access, MAP_PRIVATE | MAP_NORESERVE | how, fd,
                fd < 0 ? 0 : (off_t)(PM_REGION_START + offset));
}

void pm_region_fork_in_child(pm_region *region)
{
    if (region->hidden_from_child) {
        PM_CHECK(map_again(region, 0, region->size, PROT_NONE, MAP_ANONYMOUS | MAP_FIXED, -1) == region->live);
        return;
    }
    for (size_t i = 0; i < region->buffer_count; i++) {
        const pm_buffer *buffer = region->buffers[i];
        if (!buffer->mapped_in_child) continue;
        /* Another fork handler may have mapped something there, though it is unlikely. */
        PM_CHECK(map_again(region, buffer->offset, buffer->length, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE,
                           region->media->fd)
                 == region->live + buffer->offset);
    }
}

void pm_region_fork_let_go(pm_region *region)
{
    if (region->fork_lock) munmap(region->fork_lock, PM_PAGE);
    region->fork_lock = NULL;
}

/* ---- space ------------------------------------------------------------------------------------------------------ */

bool pm_region_fork_may_show(const pm_region *region, pm_buffer *buffer)
{
    if (buffer->last_fork) {
        int64_t last = buffer->last_fork < buffer->first_fork ? READER_BYTES - 1 : buffer->last_fork;
        if (child_lives(region, buffer->first_fork, last)) return true;
        buffer->first_fork = buffer->last_fork = 0;
    }
    /* Until readers see the commit that has freed the bytes, one may map them, and lock them after this question. */
    if (buffer->shared && region->told <= buffer->shown_until) return true;
    uint64_t first = buffer->offset / PM_PAGE, last = (buffer->offset + buffer->length - 1) / PM_PAGE;
    buffer->shared = buffer->shared
                     && child_lives(region, pm_region_fork_reader_byte(first), pm_region_fork_reader_byte(last));
    return buffer->shared;
}

bool pm_region_fork_mapped(const pm_region *region, uint64_t *page, uint64_t *stop)
{
    int64_t first = pm_region_fork_reader_byte(*page), last = READER_BYTES_END - 1, end = 0, found = 0;
    if (region->media->read_only || region->media->lent) return false;
    for (int64_t one; first <= last && (one = locked(region, first, last, &end)); last = one - 1) {
        found = one;
        *stop = (uint64_t)(end - READER_BYTES) + 1;
    }
    if (found) *page = (uint64_t)(found - READER_BYTES);
    return found;
}

/* The bytes of the region that a living child may see. */
static uint64_t shown(const pm_region *region)
{
    int64_t found = 0;
    for (int64_t at = FORK_BYTES; (at = child_lives(region, at, READER_BYTES - 1)); at++) found = at;
    return found ? (uint64_t)((found - FORK_BYTES) >> NUMBER_BITS) * PM_PAGE : 0;
}

void pm_region_fork_find_children(pm_region *region)
{
    region->shown_to_children = region->media->read_only || region->media->lent ? 0 : shown(region);
}

uint64_t pm_region_fork_free_from(pm_region *region)
{
    if (!region->shown_to_children) return 0;
    /* Locks that were taken since then do not count: their space is known by its buffers. */
    uint64_t now = shown(region);
    if (now < region->shown_to_children) region->shown_to_children = now;
    return region->shown_to_children;
}
