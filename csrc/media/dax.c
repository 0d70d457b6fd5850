#define _GNU_SOURCE
#include "media/dax.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/address.h"
#include "media/again.h"
#include "media/media.h"

#ifndef STATX_ATTR_DAX
#define STATX_ATTR_DAX 0x200000
#endif

bool pm_dax_is(int fd)
{
    struct statx more;
    return !statx(fd, "", AT_EMPTY_PATH, 0, &more) && more.stx_attributes & STATX_ATTR_DAX;
}

/* ---- what the kernel says of the device -------------------------------------------------------------------------- */

static bool is_in_sysfs(int folder)
{
    struct statfs fs;
    return !fstatfs(folder, &fs) && fs.f_type == SYSFS_MAGIC;
}

/* Reads a small file of the nearest folder in sysfs, from the file's block device upward, that has it: a partition is
 * below its disk, a disk below its namespace, and that below its region. Returns the number of bytes, which is 0 if no
 * folder has the file. */
static ssize_t read_above(const struct stat *file, const char *name, char *text, size_t room)
{
    char link[64];
    snprintf(link, sizeof link, "/sys/dev/block/%u:%u", major(file->st_dev), minor(file->st_dev));
    int folder = open(link, O_PATH | O_DIRECTORY | O_CLOEXEC), found = -1;
    while (folder >= 0 && is_in_sysfs(folder) && (found = openat(folder, name, O_RDONLY | O_CLOEXEC)) < 0) {
        int above = openat(folder, "..", O_PATH | O_DIRECTORY | O_CLOEXEC);
        close(folder);
        folder = above;
    }
    if (folder >= 0) close(folder);
    ssize_t length = found < 0 ? 0 : read(found, text, room);
    if (found >= 0) close(found);
    return length;
}

bool pm_dax_keeps_cache(const struct stat *file)
{
    char domain[9];
    return read_above(file, "persistence_domain", domain, sizeof domain) == (ssize_t)sizeof domain
           && !memcmp(domain, "cpu_cache", sizeof domain);
}

static bool has_bad_blocks(const struct stat *file)
{
    char first;
    return read_above(file, "badblocks", &first, sizeof first) > 0;
}

pm_dax_answer pm_dax_ask(int fd, bool dax, const struct stat *file)
{
    if (!dax) return PM_DAX_NONE;
    void *page = mmap(NULL, PM_PAGE, PROT_READ, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
    if (page == MAP_FAILED) {
        if (errno == EOPNOTSUPP || errno == EINVAL) return PM_DAX_LATE;
        pm_address_refused("cannot map the file", PM_PAGE);
        return PM_DAX_FAILED;
    }
    munmap(page, PM_PAGE);
    return has_bad_blocks(file) ? PM_DAX_BLOCKS : PM_DAX_GRANTED;
}

pm_status pm_dax_refused(pm_dax_answer answer, bool tmpfs)
{
    switch (answer) {
    case PM_DAX_LATE:
        return pm_fail(PM_INVALID, "media 'dax' needs MAP_SYNC, and the kernel refuses it for this file although it is "
                                   "on DAX: flushing the processor's cache makes nothing durable on its device (such "
                                   "as virtio-pmem). Use media 'file' or 'auto', which sync the file");
    case PM_DAX_BLOCKS:
        return pm_fail(PM_INVALID, "media 'dax': the device has bad blocks, where a store would end the process. Clear "
                                   "them (ndctl clear-errors), or use media 'file' or 'auto'");
    default:
        return pm_fail(PM_INVALID, "media 'dax' needs a file on persistent memory: ext4 or xfs, mounted with -o "
                                   "dax=always. This one is %s: use media '%s' or 'auto'",
                       tmpfs ? "on tmpfs" : "not on DAX", tmpfs ? "memory" : "file");
    }
}

/* ---- growth ------------------------------------------------------------------------------------------------------ */

/* Writes zeros through the descriptor. They take the place of those that the kernel would write at the first store to
 * each page, when it would also sync the file's metadata, page by page. */
static pm_status write_zeros(pm_media *media, uint64_t from, uint64_t to)
{
    enum { AT_ONCE = 1 << 20 };
    void *zeros = calloc(1, AT_ONCE);
    if (!zeros) return pm_fail(PM_NO_MEMORY, "no memory to write zeros");
    pm_again again = {0};
    ssize_t done = 1;
    while (from < to) {
        done = pwrite(media->fd, zeros, to - from < AT_ONCE ? to - from : AT_ONCE, (off_t)from);
        if (pm_again_make(&again, done < 0)) continue;
        if (done <= 0) break;
        from += (uint64_t)done;
    }
    free(zeros);
    if (!done) errno = ENOSPC;
    return from < to ? pm_fail_errno("cannot write to the file") : PM_OK;
}

pm_status pm_dax_grow(pm_media *media, uint64_t size)
{
    if (size > media->size) {
        PM_TRY(pm_media_reserve(media, media->size, size));
        PM_TRY(write_zeros(media, media->size, size));
        int result;
        pm_again again = {0};
        do result = fsync(media->fd);
        while (pm_again_make(&again, result));
        media->syncs++;
        /* durable: the new size and its blocks → then: a header that needs them. MAP_SYNC does not order the two: the
         * header's page was writable before. Without this sync, a power cut could leave a header that names a log
         * beyond the end of the file. */
        if (result) {
            pm_fail_errno("cannot sync the file");
            return PM_IO;
        }
        media->size = size;
    }
    return pm_media_map(media);
}
