/*
 * The file system that a file is on, and which of its operations can be relied on.
 *
 * A commit on a disk is cheaper than fdatasync because of the following. In ext4 and xfs, fdatasync has three steps.
 * (1) Dirty pages are written back and waited for. (2) The metadata that is needed to find them is made durable, for
 * the inode as a whole. (3) The disk's cache is flushed. A write with RWF_DSYNC ends in the same function; its range
 * limits the first step only. sync_file_range that writes and waits is the first step alone, for another range, and
 * reports its errors. So sync_file_range of the streamed bytes, then RWF_DSYNC of the record, differs from fdatasync in
 * one point: pages elsewhere, those of the committed image, are not waited for.
 *
 *   ext4, journal (data=ordered, data=writeback)
 *                        it holds. Step 2 commits the inode's last transaction (i_datasync_tid). Blocks that fallocate
 *                        reserved are marked as written before the writeback of their pages ends, or before it begins
 *                        (dioread_lock). So the mark is in that transaction, or in one before it.
 *   ext4, data=journal   fdatasync. The rule would hold, as contents are in the transaction, too. But each range that
 *                        is waited for is a commit of the journal, so nothing would be gained. The kernel takes no
 *                        direct writes there.
 *   ext4 without a journal
 *                        it holds. Step 2 writes the inode and its extent blocks. It does not hold for direct writes
 *                        with RWF_DSYNC: where the disk has no cache, or writes through it (FUA), the kernel leaves
 *                        step 2 out if it knows the blocks as written, and without a journal it does not check
 *                        whether the inode on the disk says so. RWF_SYNC takes step 2. Kernels from 5.5 on, until
 *                        "ext4: fix fsync(2) for nojournal mode" (2026), leave out the inode in step 2 of fdatasync,
 *                        too.
 *   ext2, ext3           the same, by ext4's code. They have no extents: growth writes the blocks, and syncs them. The
 *                        kernel's old driver for ext2 was not examined, so it gets fdatasync.
 *   nobarrier            step 3 is left out, in fdatasync, too: a power cut may lose commits.
 *   xfs                  it holds. Step 2 forces the log up to the inode's last change.
 *   DAX                  fdatasync: there are no pages to write back, so nothing would be gained. It was not tried.
 *                        (A file gets the medium `file` there only if MAP_SYNC is refused, or if it is asked for.)
 *   all others           fdatasync. btrfs's fsync looks at the range in the second step.
 */
#ifndef PM_FILE_SYSTEM_H
#define PM_FILE_SYSTEM_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/vfs.h>

typedef struct {
    bool ranges;   /* the rule above holds */
    int synced;    /* the flag that makes a direct write durable: RWF_DSYNC or RWF_SYNC */
    bool reflinks; /* files may share blocks: a write then needs new ones */
    bool dax;      /* mappings of the file have no page cache (dax.h) */
} pm_fs;

/* This takes a few system calls, or one if the thread asked for a file of the same mount before. */
pm_fs pm_file_system_of(int fd, const struct stat *file, const struct statfs *fs);

/*
 * Where a copy shares the file's blocks (cp on xfs and btrfs), reserved space is needed once more: a write in place
 * gets new blocks.
 */

/* Gives the file's bytes up to `size` blocks of their own again, as far as the file system can do that and has
 * space. */
void pm_file_system_unshare(int fd, uint64_t size);
/* Before the first byte of a new file: has reserved space written in place, on file systems that must be asked for that
 * (btrfs: chattr +C). */
void pm_file_system_write_in_place(int fd);

#endif
