/* What all media share: finding out which one it is, and the shared view of the file. */
#define _GNU_SOURCE
#include "media.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef XFS_SUPER_MAGIC
#define XFS_SUPER_MAGIC 0x58465342
#endif

enum { STAGE_MEMORY = 2 << 20, STAGE_FILE = 8 << 20 };

/* 1 % of 50 MB in rows, 0.9 MB: its parts leave every 256 KiB. Half or twice as much took longer. Traced records are small. */
enum { PART_FILE = 256 << 10, PART_TRACED = 2 * PM_PAGE };
#define RESERVE_LEAST (UINT64_C(64) << 30)
#define RESERVE_SMALLEST (UINT64_C(16) << 20)
#define RESERVE_MOST (UINT64_C(1) << 40)

/* The address range is as large as the file can become: no more than its file system holds, within reason. */
static uint64_t reserve_wanted(const pm_media *media, const struct statfs *fs)
{
    uint64_t wanted = (uint64_t)fs->f_blocks * (uint64_t)fs->f_bsize;
    struct rlimit limit;
    if (wanted < RESERVE_LEAST) wanted = RESERVE_LEAST;
    if (wanted > RESERVE_MOST) wanted = RESERVE_MOST;
    /* Two such ranges per store; the program has a use for what a limit leaves, and perhaps for other stores. */
    if (!getrlimit(RLIMIT_AS, &limit) && limit.rlim_cur != RLIM_INFINITY && wanted > limit.rlim_cur / 16)
        wanted = limit.rlim_cur / 16;
    if (wanted < RESERVE_SMALLEST) wanted = RESERVE_SMALLEST;
    if (wanted < 2 * media->size) wanted = 2 * media->size;
    return pm_round_up(wanted, PM_PAGE);
}

pm_status pm_media_open(pm_media *media, int fd, pm_media_kind kind, bool read_only, pm_trace *trace)
{
    *media = (pm_media){.fd = fd, .read_only = read_only, .trace = trace};
    pm_dio_init(&media->dio, -1);
    if (trace) {
        pm_trace_keep(trace);
        pm_trace_add(trace, PM_EVENT_OPEN, 0, 0, NULL);
    }
    struct stat file;
    struct statfs fs;
    if (fstat(fd, &file) || fstatfs(fd, &fs)) return pm_fail_errno("cannot look at the file");
    if (!S_ISREG(file.st_mode)) return pm_fail(PM_NOT_A_STORE, "not a regular file");
    bool tmpfs = fs.f_type == TMPFS_MAGIC;
    if (kind == PM_MEDIA_AUTO) kind = tmpfs ? PM_MEDIA_MEMORY : PM_MEDIA_FILE;
    if (kind == PM_MEDIA_MEMORY && !tmpfs)
        return pm_fail(PM_INVALID, "media 'memory' needs a file on tmpfs, such as one below /dev/shm; "
                                   "this one is on a disk: use media 'file' or 'auto'");
    media->kind = kind;
    media->size = (uint64_t)file.st_size;
    if (kind == PM_MEDIA_MEMORY) {
        media->operations = &pm_media_memory;
        media->granule = PM_LINE;
        media->stage = STAGE_MEMORY;
        pm_media_memory_choose(media);
    } else {
        media->operations = &pm_media_file;
        media->granule = PM_PAGE;
        media->stage = STAGE_FILE;
        media->part = trace ? PART_TRACED : PART_FILE;
        media->durable_range = fs.f_type == EXT4_SUPER_MAGIC || fs.f_type == XFS_SUPER_MAGIC;
        if (media->durable_range && !read_only) pm_dio_init(&media->dio, fd);
        if (trace && pm_trace_ranges(trace) >= 0) media->durable_range = pm_trace_ranges(trace);
    }
    if (trace && (media->view = pm_trace_view(trace, &media->reserved))) {
        media->lent = true;
        media->mapped = media->reserved;
        return media->size <= media->reserved ? PM_OK : pm_fail(PM_INVALID, "the view that the trace lends is smaller than the file");
    }
    void *view = MAP_FAILED;
    errno = ENOMEM;
    for (uint64_t size = reserve_wanted(media, &fs); size >= 2 * media->size && size >= RESERVE_SMALLEST; size /= 2) {
        view = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        media->reserved = size;
        if (view != MAP_FAILED) break;
    }
    if (view == MAP_FAILED) return pm_fail_errno("cannot reserve an address range for the file");
    media->view = view;
    return pm_media_map(media);
}

pm_status pm_media_reserve(pm_media *media, uint64_t from, uint64_t to)
{
    int result;
    do {
        bool allowed = !media->trace || pm_trace_allows(media->trace, PM_OPERATION_GROW);
        result = allowed ? fallocate(media->fd, 0, (off_t)from, (off_t)(to - from)) : -1;
    } while (result && errno == EINTR);
    if (result) return pm_fail_errno("cannot reserve space for the file");
    if (media->trace) pm_trace_add(media->trace, PM_EVENT_GROW, to, 0, NULL);
    return PM_OK;
}

pm_status pm_media_fill_holes(pm_media *media, uint64_t size)
{
    struct stat file;
    if (fstat(media->fd, &file)) return pm_fail_errno("cannot look at the file");
    if ((uint64_t)file.st_blocks * 512 >= size) return PM_OK;
    pm_status status = pm_media_reserve(media, 0, size);
    return pm_media_cannot_reserve(status) ? PM_OK : status;
}

pm_status pm_media_map(pm_media *media)
{
    uint64_t size = pm_round_up(media->size, PM_PAGE);
    if (size <= media->mapped) return PM_OK;
    if (size > media->reserved) return pm_fail(PM_NO_SPACE, "the file outgrows the address range that was reserved for it");
    int access = PROT_READ | (media->kind == PM_MEDIA_MEMORY && !media->read_only ? PROT_WRITE : 0);
    if (!pm_media_may_map(media)) return pm_fail_errno("cannot map the file");
    void *at = mmap(media->view + media->mapped, size - media->mapped, access, MAP_SHARED | MAP_FIXED, media->fd,
                    (off_t)media->mapped);
    if (at == MAP_FAILED) return pm_fail_errno("cannot map the file");
    /* A forked child must not be able to reach the file; it has its copy of the private pages. */
    madvise(at, size - media->mapped, MADV_DONTFORK);
    media->mapped = size;
    return PM_OK;
}

bool pm_media_shrink(pm_media *media)
{
    uint64_t half = media->reserved / 2 / PM_PAGE * PM_PAGE;
    if (media->lent || half < 2 * media->size || half < RESERVE_SMALLEST) return false;
    munmap(media->view + half, media->reserved - half);
    media->reserved = half;
    return true;
}

void pm_media_touch(pm_media *media, uint64_t from, uint64_t to)
{
#ifdef MADV_POPULATE_WRITE
    from = from / PM_PAGE * PM_PAGE;
    if (from < to) madvise(media->view + from, to - from, MADV_POPULATE_WRITE); /* an old kernel refuses: then they are faults */
#else
    (void)media, (void)from, (void)to;
#endif
}

pm_status pm_media_write_zeros(pm_media *media, uint64_t from, uint64_t to, uint64_t folio)
{
    void *zeros = calloc(1, folio);
    if (!zeros) return pm_fail(PM_NO_MEMORY, "no memory to write zeros");
    pm_status status = PM_OK;
    while (status == PM_OK && from < to) {
        uint64_t next = from + pm_folio_left(from, folio);
        if (next > to) next = to;
        status = pm_media_write(media, from, zeros, next - from, PM_WRITE_STREAM);
        from = next;
    }
    free(zeros);
    return status;
}

void pm_media_close(pm_media *media)
{
    if (media->view && !media->lent) munmap(media->view, media->reserved);
    media->view = NULL;
    pm_dio_close(&media->dio);
    if (media->fd >= 0) close(media->fd);
    media->fd = -1;
    if (media->trace) pm_trace_free(media->trace);
    media->trace = NULL;
}

void pm_media_forked(pm_media *media)
{
    /* The mapped part is not there in the child, and its addresses may soon be somebody else's. */
    if (media->view && !media->lent) munmap(media->view + media->mapped, media->reserved - media->mapped);
    media->view = NULL;
    pm_dio_forked(&media->dio);
    if (media->fd >= 0) close(media->fd);
    media->fd = -1;
}
