/* Preloaded into the workload's process: the calls that PMSTORE_LIES names do nothing, and say that it was done. A
 * program whose calls are such has to be caught by the cuts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int lies_about(const char *call)
{
    const char *lies = getenv("PMSTORE_LIES");
    return lies && strstr(lies, call);
}

int fdatasync(int fd)
{
    static int (*real)(int);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "fdatasync");
    return lies_about("fdatasync") ? 0 : real(fd);
}

int fsync(int fd)
{
    static int (*real)(int);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "fsync");
    return lies_about("fsync") ? 0 : real(fd);
}

int sync_file_range(int fd, off_t offset, off_t length, unsigned flags)
{
    static int (*real)(int, off_t, off_t, unsigned);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "sync_file_range");
    return lies_about("sync_file_range") ? 0 : real(fd, offset, length, flags);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
    static ssize_t (*real)(int, const struct iovec *, int, off_t, int);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pwritev2");
    return real(fd, parts, count, offset, lies_about("RWF_DSYNC") ? flags & ~RWF_DSYNC : flags);
}
