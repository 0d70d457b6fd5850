#define _GNU_SOURCE
#include "media/file_system.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

#include "media/again.h"

#ifndef XFS_SUPER_MAGIC
#define XFS_SUPER_MAGIC 0x58465342
#endif
#ifndef STATX_ATTR_DAX
#define STATX_ATTR_DAX 0x200000
#endif
#ifndef STATX_MNT_ID_UNIQUE
#define STATX_MNT_ID_UNIQUE 0x4000 /* Linux 6.8 */
#endif

/* The options of a file system that the ext4 driver has mounted, a line for each, behind a line "rw" or "ro". False:
 * another driver has mounted it, or the driver is not known. ext2, ext3 and ext4 have the same magic number. */
static bool ext4_options(dev_t device, char *options, size_t room)
{
    char link[64], target[256], path[320];
    snprintf(link, sizeof link, "/sys/dev/block/%u:%u", major(device), minor(device));
    ssize_t length = readlink(link, target, sizeof target - 1);
    if (length < 0) return false;
    target[length] = 0;
    const char *name = strrchr(target, '/');
    snprintf(path, sizeof path, "/proc/fs/ext4/%s/options", name ? name + 1 : target);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    length = read(fd, options, room - 1);
    close(fd);
    if (length <= 0) return false;
    options[length] = 0;
    return true;
}

static pm_fs look(const struct stat *file, const struct statfs *fs)
{
    char options[2048];
    pm_fs found = {.synced = RWF_DSYNC};
    switch ((unsigned long)fs->f_type) {
    case XFS_SUPER_MAGIC:
        found.ranges = major(file->st_dev) != 0; /* 0: the type is that of a server of 9p */
        found.reflinks = true;
        break;
    case EXT4_SUPER_MAGIC:
        if (!ext4_options(file->st_dev, options, sizeof options)) break;
        found.ranges = !strstr(options, "\ndata=journal\n");
        if (!strstr(options, "\ndata=")) found.synced = RWF_SYNC; /* there is no journal */
        break;
    default: found.reflinks = true;
    }
    return found;
}

pm_fs pm_file_system_of(int fd, const struct stat *file, const struct statfs *fs)
{
    static _Thread_local struct {
        bool known;
        dev_t device;
        unsigned long long mount;
        struct statfs fs;
        pm_fs found;
    } last;
    struct statx more = {0}; /* if statx fails, it changes nothing */
    (void)statx(fd, "", AT_EMPTY_PATH, STATX_MNT_ID_UNIQUE, &more);
    /* Before Linux 6.8, a later mount may get the same number. */
    bool same = last.known && last.device == file->st_dev && last.mount == more.stx_mnt_id &&
                last.fs.f_type == fs->f_type && !memcmp(&last.fs.f_fsid, &fs->f_fsid, sizeof fs->f_fsid);
    if (!same) {
        last.known = true, last.device = file->st_dev, last.mount = more.stx_mnt_id, last.fs = *fs;
        last.found = look(file, fs);
    }
    pm_fs found = last.found;
    found.dax = more.stx_attributes & STATX_ATTR_DAX;
    if (found.dax) found.ranges = false;
    return found;
}

/* ---- blocks that files share ------------------------------------------------------------------------------------ */

/* True if the file system reports a shared block. */
static bool is_shared(int fd, uint64_t size)
{
    enum { EXTENTS = 32 };
    union {
        struct fiemap map;
        char room[sizeof(struct fiemap) + EXTENTS * sizeof(struct fiemap_extent)];
    } asked;
    for (uint64_t from = 0; from < size;) {
        asked.map = (struct fiemap){.fm_start = from, .fm_length = size - from, .fm_extent_count = EXTENTS};
        if (ioctl(fd, FS_IOC_FIEMAP, &asked.map) || !asked.map.fm_mapped_extents) return false;
        for (unsigned i = 0; i < asked.map.fm_mapped_extents; i++) {
            const struct fiemap_extent *extent = &asked.map.fm_extents[i];
            if (extent->fe_flags & FIEMAP_EXTENT_SHARED) return true;
            from = extent->fe_logical + extent->fe_length;
        }
    }
    return false;
}

void pm_file_system_unshare(int fd, uint64_t size)
{
    if (!is_shared(fd, size)) return;
    int result;
    pm_again again = {0};
    do {
        result = fallocate(fd, FALLOC_FL_UNSHARE_RANGE, 0, (off_t)size);
    } while (pm_again_make(&again, result));
}

void pm_file_system_write_in_place(int fd)
{
    int flags;
    if (ioctl(fd, FS_IOC_GETFLAGS, &flags)) return;
    flags |= FS_NOCOW_FL;
    ioctl(fd, FS_IOC_SETFLAGS, &flags); /* file systems other than btrfs refuse it */
}
