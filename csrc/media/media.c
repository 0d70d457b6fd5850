/* Code that all media share: which medium a file is on, and the shared view of the file. */
#define _GNU_SOURCE
#include "media/media.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/address.h"
#include "media/again.h"
#include "media/dax.h"

enum { STAGE_MEMORY = 2 << 20, STAGE_FILE = 8 << 20, STAGE_SCHEDULED = 12 * PM_PAGE };

/* Parts of half or twice this size were slower. Under a schedule, parts are small. */
enum { PART_FILE = 256 << 10, PART_SCHEDULED = 2 * PM_PAGE };

const char *const pm_media_names[] = {"auto", "memory", "file", "dax"};

/* What the system says of a file. */
typedef struct {
    struct stat status;
    bool tmpfs, dax;      /* dax: its mappings have no page cache */
    pm_dax_answer answer; /* whether it can have the medium `dax` */
} file_facts;

static pm_media_kind best_kind(const file_facts *file)
{
    return file->tmpfs ? PM_MEDIA_MEMORY : file->answer == PM_DAX_GRANTED ? PM_MEDIA_DAX : PM_MEDIA_FILE;
}

/* PMSTORE_DOMAIN=process is for tmpfs: on DAX, a power cut would take acknowledged commits. */
static pm_status find_domain(const file_facts *file, pm_media_kind kind, pm_domain *domain)
{
    pm_domain found = PM_DOMAIN_DISK;
    if (kind == PM_MEDIA_MEMORY) found = PM_DOMAIN_PROCESS;
    if (kind == PM_MEDIA_DAX) found = pm_dax_keeps_cache(&file->status) ? PM_DOMAIN_CPU_CACHE : PM_DOMAIN_MEMORY;
    *domain = found;
    if (kind == PM_MEDIA_FILE) return PM_OK;
    PM_TRY(pm_domain_override(domain));
    if (kind == PM_MEDIA_DAX && *domain == PM_DOMAIN_PROCESS) *domain = found;
    return PM_OK;
}

/* A client of 9p gives the type of its server's file system. Only files of tmpfs can tell their seals. */
static bool is_tmpfs(int fd, const struct statfs *fs)
{
    return fs->f_type == TMPFS_MAGIC && (fcntl(fd, F_GET_SEALS) >= 0 || errno != EINVAL);
}

/* On tmpfs the number of blocks is exact, but it includes blocks behind the end. lseek takes pages for holes that were
 * reserved and never written, so it is asked only where the number does not tell. */
static bool has_holes(int fd, const struct stat *file, const struct statfs *fs)
{
    if (!fs->f_blocks) return false; /* f_blocks 0: without a limit, such as a memfd */
    uint64_t size = pm_round_up((uint64_t)file->st_size, PM_PAGE), owned = (uint64_t)file->st_blocks * 512;
    return owned < size || (owned > size && lseek(fd, 0, SEEK_HOLE) < file->st_size);
}

bool pm_media_has_holes(int fd)
{
    struct stat file;
    struct statfs fs;
    return !fstat(fd, &file) && !fstatfs(fd, &fs) && is_tmpfs(fd, &fs) && has_holes(fd, &file, &fs);
}

pm_status pm_media_of(int fd, pm_media_kind *kind, pm_domain *domain)
{
    struct statfs fs;
    file_facts file;
    if (fstatfs(fd, &fs) || fstat(fd, &file.status)) return pm_fail_errno("cannot look at the file");
    file.tmpfs = is_tmpfs(fd, &fs);
    file.dax = !file.tmpfs && pm_dax_is(fd);
    file.answer = pm_dax_ask(fd, file.dax, &file.status);
    *kind = best_kind(&file);
    return find_domain(&file, *kind, domain);
}

/* The kind that was asked for, or for AUTO the best that the file can have. The explorer knows no medium `dax`, so a
 * store on DAX is recorded as `file`. The operations of `dax` are those of `memory`, which is explored on tmpfs. */
static pm_status choose_kind(pm_media *media, pm_media_kind kind, const file_facts *file)
{
    if (file->answer == PM_DAX_FAILED && kind != PM_MEDIA_FILE) return PM_NO_MEMORY;
    if (kind == PM_MEDIA_AUTO) kind = best_kind(file);
    if (kind == PM_MEDIA_DAX && media->trace) kind = PM_MEDIA_FILE;
    if (kind == PM_MEDIA_MEMORY && !file->tmpfs)
        return pm_fail(PM_INVALID, "media 'memory' needs a file on tmpfs, such as one below /dev/shm; "
                                   "this one is on a disk: use media 'file' or 'auto'");
    if (kind == PM_MEDIA_DAX && file->answer != PM_DAX_GRANTED) return pm_dax_refused(file->answer, file->tmpfs);
    PM_CHECK(kind == PM_MEDIA_MEMORY || kind == PM_MEDIA_FILE || kind == PM_MEDIA_DAX);
    media->kind = kind;
    return find_domain(file, kind, &media->domain);
}

pm_status pm_media_open(pm_media *media, int fd, pm_media_kind kind, bool read_only, pm_trace *trace)
{
    pm_schedule *schedule = trace ? pm_trace_schedule(trace) : NULL;
    *media = (pm_media){.fd = fd, .read_only = read_only, .trace = trace};
    pm_direct_io_init(&media->dio, -1, 0);
    if (trace) {
        pm_trace_keep(trace);
        pm_trace_add(trace, PM_EVENT_OPEN, 0, 0, NULL);
    }
    file_facts file;
    struct statfs fs;
    if (fstat(fd, &file.status) || fstatfs(fd, &fs)) return pm_fail_errno("cannot look at the file");
    if (!S_ISREG(file.status.st_mode)) return pm_fail(PM_NOT_A_STORE, "not a regular file");
    media->size = (uint64_t)file.status.st_size;
    file.tmpfs = is_tmpfs(fd, &fs);
    if (!file.tmpfs && !read_only) media->fs = pm_file_system_of(fd, &file.status, &fs);
    file.dax = media->fs.dax || (!file.tmpfs && read_only && pm_dax_is(fd));
    file.answer = pm_dax_ask(fd, file.dax, &file.status);
    PM_TRY(choose_kind(media, kind, &file));
    media->may_be_bad = media->kind != PM_MEDIA_MEMORY;
    media->holes = file.tmpfs && has_holes(fd, &file.status, &fs);
    if (media->kind != PM_MEDIA_FILE) {
        media->operations = media->kind == PM_MEDIA_DAX ? &pm_media_dax : &pm_media_memory;
        media->byte_addressable = true;
        media->log_unit = PM_LINE;
        media->stage = STAGE_MEMORY;
        if (trace) media->domain = PM_DOMAIN_MEMORY;
        PM_TRY(pm_media_memory_choose(media));
    } else {
        media->operations = &pm_media_file;
        media->log_unit = PM_PAGE;
        media->stage = STAGE_FILE;
        media->part = schedule ? PART_SCHEDULED : PART_FILE;
        media->durable_range = media->fs.ranges;
        if (media->durable_range) pm_direct_io_init(&media->dio, fd, media->fs.synced);
        if (trace && pm_trace_ranges(trace) >= 0) media->durable_range = pm_trace_ranges(trace);
        if (schedule && !read_only) pm_media_file_schedule(media, schedule);
    }
    PM_CHECK(media->log_unit == (media->byte_addressable ? PM_LINE : PM_PAGE));
    PM_CHECK((media->domain == PM_DOMAIN_DISK) == !media->byte_addressable);
    PM_CHECK(!media->byte_addressable || !media->part);
    if (schedule && pm_schedule_choose(schedule, 2)) media->stage = STAGE_SCHEDULED;
    if (trace && (media->view = pm_trace_view(trace, &media->mapped))) media->lent = true;
    PM_TRY(pm_media_map(media));
    return media->holes && read_only && !media->lent ? pm_media_fill_holes(media) : PM_OK;
}

/* The message names the folder: a file that was just created may have had another name. */
pm_status pm_media_no_room(const pm_media *media, const char *what, uint64_t bytes)
{
    int error = errno;
    char link[32], folder[256], text[420];
    snprintf(link, sizeof link, "/proc/self/fd/%d", media->fd);
    ssize_t length = readlink(link, folder, sizeof folder);
    const char *end = length > 0 && length < (ssize_t)sizeof folder ? memrchr(folder, '/', (size_t)length) : NULL;
    struct statfs system = {0};
    fstatfs(media->fd, &system);
    unsigned long long missing = bytes / 1024, left = (uint64_t)system.f_bavail * (uint64_t)system.f_bsize / 1024;
    const char *place = end ? folder : "its file system";
    int shown = end ? (int)(end + 1 - folder) : 15;
    if (error == EDQUOT)
        snprintf(text, sizeof text,
                 "%s %llu KiB in %.*s, where a quota leaves less (raise it, or make room, and try again: no change is "
                 "lost)", what, missing, shown, place);
    else if (error == ENOSPC)
        snprintf(text, sizeof text, "%s %llu KiB: %.*s has %llu KiB left (make room and try again: no change is lost)",
                 what, missing, shown, place, left);
    else
        snprintf(text, sizeof text, "%s %llu KiB in %.*s", what, missing, shown, place);
    errno = error;
    return pm_fail_errno(text);
}

void pm_media_give_back(pm_media *media)
{
    int error = errno, result = 0;
    struct stat file;
    if (!fstat(media->fd, &file) && (uint64_t)file.st_size >= media->size) /* xfs keeps blocks behind the file's end */
        result = ftruncate(media->fd, (off_t)media->size);
    (void)result; /* the file that stays too large is a sound one */
    errno = error;
}

pm_status pm_media_reserve(pm_media *media, uint64_t from, uint64_t to)
{
    int result;
    bool allowed;
    pm_again again = {0};
    do {
        allowed = !media->trace || pm_trace_allows(media->trace, PM_OPERATION_GROW);
        result = allowed ? fallocate(media->fd, 0, (off_t)from, (off_t)(to - from)) : -1;
    } while (pm_again_make(&again, result));
    if (result && allowed && to > media->size) pm_media_give_back(media);
    if (result) return pm_media_no_room(media, "the file can't grow by", to - from);
    if (media->trace) pm_trace_add(media->trace, PM_EVENT_GROW, to, 0, NULL);
    return PM_OK;
}

void pm_media_begin_new(pm_media *media)
{
    if (media->fs.reflinks) pm_file_system_write_in_place(media->fd);
    media->dio.file = -1; /* while a store is created, no second descriptor of the file may be closed (direct_io.h) */
}

pm_status pm_media_own_space(pm_media *media, uint64_t size)
{
    if (media->fs.reflinks) pm_file_system_unshare(media->fd, size);
    struct stat file;
    if (fstat(media->fd, &file)) return pm_fail_errno("cannot look at the file");
    media->size = size;
    if (!media->holes && file.st_blocks * 512 >= file.st_size) return PM_OK;
    pm_status status = pm_media_reserve(media, 0, size);
    if (!pm_media_cannot_reserve(status)) return status;
    return media->holes && !media->lent ? pm_media_fill_holes(media) : PM_OK;
}

/* A first mapping, which the file system itself may refuse. */
static pm_status map_refused(uint64_t size)
{
    if (errno != EINVAL && errno != ENODEV) return pm_address_refused("cannot map the file", size);
    return pm_fail_errno("cannot map the file: its file system has no shared mappings, and a store needs one: mount 9p "
                         "with cache=mmap, FUSE without direct_io, or use another file system");
}

pm_status pm_media_map(pm_media *media)
{
    uint64_t size = pm_round_up(media->size, PM_PAGE);
    if (size <= media->mapped) return PM_OK;
    if (media->lent) return pm_fail(PM_INVALID, "the view that the trace lends is smaller than the file");
    if (!pm_media_may_map(media)) return pm_fail_errno("cannot map the file");
    int access = PROT_READ | (media->byte_addressable && !media->read_only ? PROT_WRITE : 0);
    /* A mapping that was made with MAP_SYNC keeps it when it grows. */
    int how = media->kind == PM_MEDIA_DAX ? MAP_SHARED_VALIDATE | MAP_SYNC : MAP_SHARED;
    bool grows = media->view; /* which keeps the flag below */
    void *view = grows ? pm_address_resize(media->view, media->mapped, size)
                       : mmap(NULL, size, access, how, media->fd, 0);
    if (!grows && view == MAP_FAILED) return map_refused(size);
    if (!view) return pm_address_refused("cannot map the file", size);
    media->view = view;
    media->mapped = size;
    /* A forked child must not reach the file; it has its copy of the private pages. Where a sandbox forbids madvise,
     * this is an error here, because a rollback needs it, too, and can't fail (I11). */
    if (grows || !madvise(view, size, MADV_DONTFORK) || media->read_only) return PM_OK;
    return pm_fail_errno("cannot map the file: madvise failed");
}

void pm_media_touch(pm_media *media, uint64_t from, uint64_t to)
{
#ifdef MADV_POPULATE_WRITE
    from = from / PM_PAGE * PM_PAGE;
    /* An old kernel refuses: then each first store is a fault */
    if (from < to) madvise(media->view + from, to - from, MADV_POPULATE_WRITE);
#else
    (void)media, (void)from, (void)to;
#endif
}

pm_status pm_media_write_zeros(pm_media *media, uint64_t from, uint64_t to)
{
    enum { AT_ONCE = 1 << 20 };
    void *zeros = calloc(1, AT_ONCE);
    if (!zeros) return pm_fail(PM_NO_MEMORY, "no memory to write zeros");
    pm_status status = PM_OK;
    while (status == PM_OK && from < to) {
        uint64_t next = to - from < AT_ONCE ? to : from + AT_ONCE;
        status = pm_media_write(media, from, zeros, next - from, PM_WRITE_STREAM);
        from = next;
    }
    free(zeros);
    return status;
}

void pm_media_close(pm_media *media)
{
    if (media->view && !media->lent) munmap(media->view, media->mapped);
    media->view = NULL;
    pm_schedule *schedule = media->dio.schedule;
    pm_direct_io_close(&media->dio);
    if (schedule) pm_schedule_remove(schedule, &media->dio_work);
    free(media->copy);
    media->copy = NULL;
    if (media->fd >= 0) close(media->fd);
    media->fd = -1;
    if (media->trace) pm_trace_free(media->trace);
    media->trace = NULL;
}

void pm_media_forked(pm_media *media)
{
    media->view = NULL; /* it is not mapped in the child, and its addresses may soon belong to another mapping */
    pm_direct_io_forked(&media->dio);
    if (media->fd >= 0) close(media->fd);
    media->fd = -1;
}
