/*
 * Which file system a file is on, and what it may be trusted with.
 *
 * What a commit on a disk saves, beside fdatasync, rests on this: in ext4 and xfs fdatasync has three steps. (1) Dirty
 * pages are written back and waited for. (2) What is needed to find them is made durable, for the inode as a whole. (3)
 * The disk's cache is flushed. A write with RWF_DSYNC ends in the same function; its range limits the first step only.
 * And sync_file_range that writes and waits is the first step alone, for another range, with its errors. So
 * sync_file_range of what was streamed, then RWF_DSYNC of the record, differs from fdatasync in one thing: pages
 * elsewhere, which is home, are not waited for.
 *
 *   ext4, journal (data=ordered, data=writeback)
 *                        it holds. Step 2 commits the inode's last transaction (i_datasync_tid). Blocks that fallocate
 *                        reserved are marked as written before the writeback of their pages ends, or before it begins
 *                        (dioread_lock), so that is in that transaction, or in one before it.
 *   ext4, data=journal   fdatasync. It would hold, for contents are in the transaction, too; but each range that is
 *                        waited for is a commit of the journal, so there is nothing to gain. The kernel takes no direct
 *                        writes there.
 *   ext4 without a journal
 *                        it holds. Step 2 writes the extent blocks that belong to the inode, and the inode. Not so for
 *                        direct writes with RWF_DSYNC: where the disk has no cache, or writes through it (FUA), the
 *                        kernel leaves step 2 out if it takes the blocks for written, and without a journal it does not
 *                        look whether the inode says so on the disk. RWF_SYNC takes step 2. Kernels from 5.5 on, until
 *                        "ext4: fix fsync(2) for nojournal mode" (2026), forget the inode in step 2 of fdatasync, too.
 *   ext2, ext3           the same, by ext4's code. They have no extents: growth writes the blocks, and syncs them. The
 *                        kernel's old driver for ext2 was not examined: fdatasync.
 *   nobarrier            step 3 is left out, in fdatasync, too: a power cut may take commits.
 *   xfs                  it holds. Step 2 forces the log up to the inode's last change.
 *   DAX                  fdatasync: there are no pages to write back, so nothing is gained, and none was here to try it
 *                        on.
 *   all others           fdatasync. btrfs's fsync looks at the range in the second step.
 */
#ifndef PM_MEDIA_FS_H
#define PM_MEDIA_FS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/vfs.h>

typedef struct {
    bool ranges;   /* it holds */
    int synced;    /* the flag of direct writes that are durable when they return: RWF_DSYNC or RWF_SYNC */
    bool reflinks; /* files may share blocks, whoever writes then needs new ones */
} pm_fs;

/* A few system calls; 1 us if the thread asked for a file of the same mount before. */
pm_fs pm_fs_of(int fd, const struct stat *file, const struct statfs *fs);

/*
 * Space that was reserved is needed once more where a copy shares the file's blocks (cp on xfs and btrfs): a write in
 * place is given new ones.
 */

/* The file's bytes up to `size` get blocks of their own again, as far as the file system can do that and has space. */
void pm_fs_unshare(int fd, uint64_t size);
/* Before the first byte of a new file: what is reserved is written in place, where that is to be asked for (btrfs:
 * chattr +C). */
void pm_fs_write_in_place(int fd);

#endif
