/*
 * Faults on demand. Preloaded into a process, this makes chosen calls on one file fail, fall short or be interrupted,
 * or kills the process there; tests/support/shim.py sets the variables below through ctypes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/falloc.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/futex.h>
#include <linux/magic.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef STATX_ATTR_DAX
#define STATX_ATTR_DAX 0x200000
#endif

enum {
    PWRITE = 1,
    PWRITEV2 = 2,
    FDATASYNC = 4,
    FSYNC = 8,
    FALLOCATE = 16,
    NAMES = 32,
    SYNC_FILE_RANGE = 64,
    IO_SETUP = 128,
    IO_SUBMIT = 256,
    IO_RESULT = 512,
    IO_GETEVENTS = 1024,
    MEMORY = 2048,
    MAPPINGS = 4096, /* and threads */
    STATUS = 8192    /* fstat of the code */
};
enum {
    ONCE,      /* the call number fault_at fails, after which all is well again */
    HALF,      /* that call does half of its work and says so, and the next one fails */
    FROM_THEN, /* every call from that one on fails */
    INTERRUPT, /* every other call is interrupted before it has done anything */
    SHORT,     /* every write of more than a byte does half of its work */
    /* Every call is interrupted, as by a timer that is quicker than it, unless the thread has blocked SIGPROF */
    STORM,
    KILL,      /* the process is killed before the call number fault_at */
    KILL_HALF, /* after half of it, if it is a write */
    KILL_AFTER, /* after it */
    STOP        /* the process is stopped before the call number fault_at, until somebody lets it go on */
};

int fault_calls; /* a bit for each kind of call that counts; 0: nothing happens */
int fault_manner;
int fault_errno;
long fault_at;             /* counted from 1 */
long fault_count;          /* calls so far */
long fault_hits;           /* faults so far */
long fault_past_cache;     /* durable writes past the page cache so far */
long fault_begun;          /* asynchronous writes so far */
long fault_unaligned;      /* writes of either kind that are not whole pages from whole pages of memory */
long fault_contexts;       /* of asynchronous writes: those that exist now */
int fault_no_direct;       /* files can't be opened for writes past the page cache, with this error */
long fault_direct;         /* attempts to open one so */
unsigned long fault_inode; /* of the file; 0: any */
int fault_sparse;          /* space is not reserved: a file may be larger than the disk */
int fault_populate;        /* madvise refuses to populate pages with this error; EINVAL: as before Linux 5.14 */
int fault_no_drop_locked;  /* 1: madvise drops no locked memory, as before Linux 5.18 */
int fault_no_random;       /* 1: the kernel gives no random numbers */
int fault_fences;          /* 1: behind each mapping of a file are pages that can't be touched */
/* Blocks that files share. 1: a file's blocks may be shared; 2: some are, until the file is given blocks of its own;
 * 3: the third and the 70th of those that are shared at once are of another commit; 4: the file system does not say
 * which are. */
int fault_reflinks;
long fault_first_shared = 1, fault_last_shared = 1L << 40; /* blocks */
int fault_extents = 1000;  /* the file system tells of no more at once */
int fault_inode_flags = -1; /* chattr's; -1: the truth; -2: the file system has none */
unsigned long fault_mount, fault_fsid, fault_device_number; /* of all files that the code looks at; 0: the truth */
long fault_magic;          /* of their file system; 0: the truth */
int fault_no_scan;         /* 1: the kernel has no PAGEMAP_SCAN, as before Linux 6.7 */
long fault_scans;          /* calls of PAGEMAP_SCAN so far */
int fault_ext4 = -1;       /* 1, 0: the file system says that it is ext4, or something else; -1: the truth */
int fault_no_sysfs;        /* 1: nothing is said of devices, if it says that it is ext4 */
/* As the kernel tells them, if it says that it is ext4; "": its driver is another one; NULL: the file is empty. */
const char *fault_ext4_options = "rw\ndata=ordered\n";
unsigned long fault_from, fault_to; /* where the code lies whose requests for memory count */
/* DAX, pretended on a file system of a disk. 1: MAP_SYNC is granted; -N: a mapping with it fails with this error */
int fault_dax;
long fault_sync_mapped;    /* bytes of the last mapping with MAP_SYNC that was granted */
const char *fault_device;  /* a folder with the files that sysfs has for a device; NULL: it has none */
int fault_flags;           /* of the last durable write past the page cache */

enum { DO_ALL, DO_HALF, DO_NOTHING };
enum { TAKES_HALF = PWRITE | PWRITEV2 | IO_RESULT };

static int dying; /* when the call that is under way is over */

static int chosen(int fd, int call)
{
    struct stat status;
    return fault_calls & call && (!fault_inode || (!fstat(fd, &status) && status.st_ino == fault_inode));
}

static int is_blocked(int signal)
{
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, NULL, &blocked);
    return sigismember(&blocked, signal);
}

/* For processes that no shim.py prepares. */
__attribute__((constructor)) static void pretend(void)
{
    const char *dax = getenv("PMSTORE_PRETENDED_DAX");
    if (dax) fault_dax = atoi(dax);
}

/* What becomes of this call; sets errno if nothing. */
static int fate(int fd, int call)
{
    if (!chosen(fd, call)) return DO_ALL;
    long number = ++fault_count;
    int what = DO_ALL;
    if (fault_manner >= KILL) {
        if (number != fault_at) return DO_ALL;
        if (fault_manner == STOP) {
            raise(SIGSTOP);
            return DO_ALL;
        }
        if (fault_manner == KILL) kill(getpid(), SIGKILL);
        dying = 1;
        return fault_manner == KILL_HALF && TAKES_HALF & call ? DO_HALF : DO_ALL;
    }
    if (fault_manner == SHORT) what = DO_HALF;
    else if (fault_manner == STORM) what = is_blocked(SIGPROF) ? DO_ALL : DO_NOTHING;
    else if (fault_manner == INTERRUPT) what = number % 2 ? DO_NOTHING : DO_ALL;
    else if (fault_manner == HALF && number == fault_at && TAKES_HALF & call) return DO_HALF;
    else if (number == fault_at + (fault_manner == HALF && TAKES_HALF & call)) what = DO_NOTHING;
    else if (fault_manner == FROM_THEN && number > fault_at) what = DO_NOTHING;
    fault_hits += what != DO_ALL;
    if (what == DO_NOTHING) errno = fault_errno;
    return what;
}

static void look_at_pages(unsigned long source, unsigned long length, unsigned long at)
{
    fault_unaligned += (source | length | at) % 4096 != 0;
}

/* The result of a call, if it has one. */
static long done(long result)
{
    if (dying) kill(getpid(), SIGKILL);
    return result;
}

#define NEXT(name) static __typeof__(name) *next; if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#include "faults_blocks.h"

/* glibc's, as dlsym asks for memory itself. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *block);

int fault_watched; /* 1: what the code requests is noted until it is freed */
long fault_live;   /* blocks that are noted */

enum { PLACES = 1 << 16, GONE = 1 };

static unsigned long noted[PLACES]; /* a hash table of addresses */
static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;

static void *note(void *block)
{
    if (!fault_watched || !block) return block;
    pthread_mutex_lock(&noting);
    unsigned long place = (unsigned long)block / 16 % PLACES;
    while (noted[place] > GONE) place = (place + 1) % PLACES;
    noted[place] = (unsigned long)block;
    fault_live++;
    pthread_mutex_unlock(&noting);
    return block;
}

static void forget(const void *block)
{
    if (!fault_live) return;
    pthread_mutex_lock(&noting);
    unsigned long place = (unsigned long)block / 16 % PLACES;
    while (noted[place] && noted[place] != (unsigned long)block) place = (place + 1) % PLACES;
    if (noted[place]) noted[place] = GONE, fault_live--;
    pthread_mutex_unlock(&noting);
}

#define OF_THE_CODE ((unsigned long)__builtin_return_address(0) - fault_from < fault_to - fault_from)
#define REFUSED (fault_calls & MEMORY && OF_THE_CODE && fate(-1, MEMORY) == DO_NOTHING)
#define UNMAPPED (fault_calls & MAPPINGS && OF_THE_CODE && fate(-1, MAPPINGS) == DO_NOTHING)
#define NOTED(block) (OF_THE_CODE ? note(block) : (block))

void *malloc(size_t size)
{
    return REFUSED ? NULL : NOTED(__libc_malloc(size));
}

void *calloc(size_t count, size_t size)
{
    return REFUSED ? NULL : NOTED(__libc_calloc(count, size));
}

void *realloc(void *old, size_t size)
{
    if (REFUSED) return NULL;
    forget(old);
    return NOTED(__libc_realloc(old, size));
}

void free(void *block)
{
    forget(block);
    __libc_free(block);
}

int posix_memalign(void **out, size_t alignment, size_t size)
{
    void *got = REFUSED ? NULL : __libc_memalign(alignment, size);
    if (!got) return ENOMEM;
    *out = NOTED(got);
    return 0;
}

ssize_t pwrite(int fd, const void *source, size_t length, off_t at)
{
    NEXT(pwrite);
    int what = fate(fd, PWRITE);
    if (what == DO_NOTHING) return -1;
    return done(next(fd, source, what == DO_HALF && length > 1 ? length / 2 : length, at));
}

ssize_t pwrite64(int fd, const void *source, size_t length, off_t at)
{
    return pwrite(fd, source, length, at);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags)
{
    NEXT(pwritev2);
    int what = fate(fd, PWRITEV2);
    if (fcntl(fd, F_GETFL) & O_DIRECT) {
        fault_past_cache++, fault_flags = flags;
        look_at_pages((unsigned long)parts->iov_base, parts->iov_len, (unsigned long)at);
    }
    if (what == DO_NOTHING) return -1;
    struct iovec half = {parts->iov_base, parts->iov_len / 2};
    if (what == DO_HALF && half.iov_len) return done(next(fd, &half, 1, at, flags));
    return done(next(fd, parts, count, at, flags));
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off_t at, int flags)
{
    return pwritev2(fd, parts, count, at, flags);
}

int ioctl(int fd, unsigned long request, ...)
{
    NEXT(ioctl);
    va_list more;
    va_start(more, request);
    void *argument = va_arg(more, void *);
    va_end(more);
    int is_scan = _IOC_TYPE(request) == 'f' && _IOC_NR(request) == 16 && _IOC_DIR(request) == 3;
    fault_scans += is_scan;
    if (fault_no_scan && is_scan) {
        errno = ENOTTY;
        return -1;
    }
    if (fault_reflinks && request == FICLONERANGE) return share(fd, argument);
    if (fault_reflinks && request == FS_IOC_FIEMAP) return tell_blocks(fd, argument);
    if (fault_inode_flags != -1 && (request == FS_IOC_GETFLAGS || request == FS_IOC_SETFLAGS))
        return tell_flags(request, argument);
    return next(fd, request, argument);
}

#include "faults_clock.h"

int madvise(void *address, size_t length, int advice)
{
    enum { POPULATE_READ = 22, POPULATE_WRITE = 23, DONTNEED_LOCKED = 24 };
    NEXT(madvise);
    int error = 0;
    if (advice == POPULATE_READ || advice == POPULATE_WRITE) error = fault_populate;
    if (advice == DONTNEED_LOCKED && fault_no_drop_locked) error = EINVAL;
    if (!error) return next(address, length, advice);
    errno = error;
    return -1;
}

int fdatasync(int fd)
{
    NEXT(fdatasync);
    return fate(fd, FDATASYNC) == DO_NOTHING ? -1 : (int)done(next(fd));
}

int fsync(int fd)
{
    NEXT(fsync);
    return fate(fd, FSYNC) == DO_NOTHING ? -1 : (int)done(next(fd));
}

int sync_file_range(int fd, off_t at, off_t length, unsigned flags)
{
    NEXT(sync_file_range);
    return fate(fd, SYNC_FILE_RANGE) == DO_NOTHING ? -1 : (int)done(next(fd, at, length, flags));
}

int sync_file_range64(int fd, off_t at, off_t length, unsigned flags)
{
    return sync_file_range(fd, at, length, flags);
}

int fallocate(int fd, int mode, off_t at, off_t length)
{
    NEXT(fallocate);
    struct stat file;
    if (fault_reflinks && mode == FALLOC_FL_UNSHARE_RANGE) {
        if (fate(fd, FALLOCATE) == DO_NOTHING) return -1;
        if (!at && !fstat(fd, &file) && length == file.st_size) fault_reflinks = 1;
        return 0;
    }
    if (fault_sparse && !mode) return fstat(fd, &file) || (file.st_size < at + length && ftruncate(fd, at + length));
    return fate(fd, FALLOCATE) == DO_NOTHING ? -1 : (int)done(next(fd, mode, at, length));
}

int fallocate64(int fd, int mode, off_t at, off_t length)
{
    return fallocate(fd, mode, at, length);
}

/* An asynchronous write ends as it pleases. The kernel has done all of it, so what it has not done by its own account
 * is destroyed. */
static void spoil(struct io_event *event)
{
    static const char junk[4096] = "this was never written";
    const struct iocb *write = (const void *)(unsigned long)event->obj;
    char path[32];
    NEXT(pwrite);
    int what = fate((int)write->aio_fildes, IO_RESULT);
    if (what == DO_ALL) return;
    event->res = what == DO_HALF ? event->res / 2 : -fault_errno;
    snprintf(path, sizeof path, "/proc/self/fd/%u", write->aio_fildes);
    int fd = open(path, O_WRONLY); /* through the cache, which takes any length */
    for (long at = what == DO_HALF ? (long)event->res : 0, left; (left = (long)write->aio_nbytes - at) > 0;
         at += (long)sizeof junk)
        if (next(fd, junk, left < (long)sizeof junk ? (size_t)left : sizeof junk, write->aio_offset + at) < 0)
            kill(getpid(), SIGKILL);
    close(fd);
}

long syscall(long number, ...)
{
    NEXT(syscall);
    va_list rest;
    long a[6];
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    const struct iocb *first = number == SYS_io_submit ? *(struct iocb **)a[2] : NULL;
    if (first && fate((int)first->aio_fildes, IO_SUBMIT) == DO_NOTHING) return -1;
    fault_begun += number == SYS_io_submit;
    if (number == SYS_futex && OF_THE_CODE) {
        note_wake(a);
        if (fault_clock && a[1] == FUTEX_WAIT) return sleep_until_woken(next, a);
    }
    if (first) look_at_pages(first->aio_buf, first->aio_nbytes, (unsigned long)first->aio_offset);
    if (number == SYS_io_setup && fate(-1, IO_SETUP) == DO_NOTHING) return -1;
    if (number == SYS_io_getevents && fate(-1, IO_GETEVENTS) == DO_NOTHING) return -1;
    /* No write has ended yet, for one who does not wait. */
    if (number == SYS_io_getevents && !a[1]) return 0;
    long result = next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (!result && number == SYS_io_setup) fault_contexts++;
    if (!result && number == SYS_io_destroy) fault_contexts--;
    if (number == SYS_io_getevents)
        for (long i = 0; i < result; i++) spoil((struct io_event *)a[3] + i);
    return first ? done(result) : result;
}

/* These have no descriptor: they count for any file only. */
int link(const char *old, const char *name)
{
    NEXT(link);
    return fate(-1, NAMES) == DO_NOTHING ? -1 : (int)done(next(old, name));
}

int linkat(int from, const char *old, int to, const char *name, int flags)
{
    NEXT(linkat);
    return fate(-1, NAMES) == DO_NOTHING ? -1 : (int)done(next(from, old, to, name, flags));
}

int unlink(const char *name)
{
    NEXT(unlink);
    return fate(-1, NAMES) == DO_NOTHING ? -1 : (int)done(next(name));
}

int rename(const char *old, const char *name)
{
    NEXT(rename);
    return fate(-1, NAMES) == DO_NOTHING ? -1 : (int)done(next(old, name));
}

int fstatfs(int fd, struct statfs *about)
{
    NEXT(fstatfs);
    int status = next(fd, about);
    if (!status && fault_ext4 == 1) about->f_type = EXT4_SUPER_MAGIC;
    if (!status && fault_ext4 == 0 && about->f_type == EXT4_SUPER_MAGIC) about->f_type = BTRFS_SUPER_MAGIC;
    if (!status && fault_magic) about->f_type = fault_magic;
    if (!status && fault_fsid) memcpy(&about->f_fsid, &fault_fsid, sizeof fault_fsid);
    return status;
}

#define OPTIONS "/proc/fs/ext4/pretended/options"

ssize_t readlink(const char *path, char *target, size_t room)
{
    NEXT(readlink);
    if (fault_ext4 != 1 || strncmp(path, "/sys/dev/block/", 15)) return next(path, target, room);
    if (fault_no_sysfs) {
        errno = ENOENT;
        return -1;
    }
    memset(target, '/', room); /* there is no zero at the end */
    memcpy(target, "devices/pretended", 17);
    return 17;
}

int open(const char *path, int how, ...)
{
    NEXT(open);
    va_list rest;
    va_start(rest, how);
    int mode = how & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    if (fault_device && !strncmp(path, "/sys/dev/block/", 15)) path = "/sys/dev/block";
    fault_direct += (how & O_DIRECT) != 0;
    if (how & O_DIRECT && fault_no_direct) {
        errno = fault_no_direct;
        return -1;
    }
    const char *options = fault_ext4_options ? fault_ext4_options : "";
    if (fault_ext4 != 1 || strcmp(path, OPTIONS) || (fault_ext4_options && !*options)) return next(path, how, mode);
    int fd = memfd_create("options", MFD_CLOEXEC);
    ssize_t length = (ssize_t)strlen(options);
    return write(fd, options, (size_t)length) == length && !lseek(fd, 0, SEEK_SET) ? fd : -1;
}

int fstatfs64(int fd, struct statfs64 *about)
{
    return fstatfs(fd, (struct statfs *)about);
}

/* The device's files are those of the folder above it, as those of a partition are. */
int openat(int folder, const char *path, int how, ...)
{
    static int asked;
    NEXT(openat);
    va_list rest;
    va_start(rest, how);
    int mode = how & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    if (!fault_device || (strcmp(path, "badblocks") && strcmp(path, "persistence_domain")))
        return next(folder, path, how, mode);
    char full[4096];
    snprintf(full, sizeof full, "%s/%s", fault_device, ++asked % 2 ? "nothing" : path);
    return open(full, how);
}

int statx(int folder, const char *restrict path, int how, unsigned wanted, struct statx *restrict about)
{
    NEXT(statx);
    int status = next(folder, path, how, wanted, about);
    if (!status && fault_dax) about->stx_attributes |= STATX_ATTR_DAX;
    if (!status && fault_mount) about->stx_mnt_id = fault_mount;
    return status;
}

int fstat(int fd, struct stat *about)
{
    NEXT(fstat);
    if (fault_calls & STATUS && OF_THE_CODE && fate(-1, STATUS) == DO_NOTHING) return -1;
    int status = next(fd, about);
    if (!status && fault_device_number && OF_THE_CODE) about->st_dev = fault_device_number;
    return status;
}

void *mmap(void *at, size_t length, int access, int flags, int fd, off_t from)
{
    enum { SYNC = 0x80000 /* MAP_SYNC */, FENCE = 1 << 20 };
    NEXT(mmap);
    if (UNMAPPED) return MAP_FAILED;
    if (fault_dax && flags & SYNC) {
        if (fault_dax < 0) {
            errno = -fault_dax;
            return MAP_FAILED;
        }
        fault_sync_mapped = (long)length;
        flags = MAP_SHARED | (flags & ~(SYNC | MAP_SHARED_VALIDATE));
    }
    if (fault_fences && !at && fd >= 0) {
        at = next(NULL, length + FENCE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        flags |= MAP_FIXED;
    }
    return next(at, length, access, flags, fd, from);
}

void *mremap(void *old, size_t old_length, size_t length, int flags, ...)
{
    NEXT(mremap);
    va_list rest;
    va_start(rest, flags);
    void *at = flags & MREMAP_FIXED ? va_arg(rest, void *) : NULL;
    va_end(rest);
    return UNMAPPED ? MAP_FAILED : next(old, old_length, length, flags, at);
}

int memfd_create(const char *name, unsigned flags)
{
    NEXT(memfd_create);
    return UNMAPPED ? -1 : next(name, flags);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *argument)
{
    NEXT(pthread_create);
    return UNMAPPED ? EAGAIN : next(thread, how, run, argument);
}

ssize_t getrandom(void *bytes, size_t length, unsigned flags)
{
    NEXT(getrandom);
    if (!fault_no_random) return next(bytes, length, flags);
    errno = ENOSYS;
    return -1;
}
