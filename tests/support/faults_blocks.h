/* A part of faults.c: a file system whose files share blocks, and have flags. */
/* A copy, as nobody can tell it from shared blocks. */
static int share(int fd, const struct file_clone_range *range)
{
    NEXT(pwrite);
    off_t from = (off_t)range->src_offset, to = (off_t)range->dest_offset;
    for (ssize_t left = (ssize_t)range->src_length, done; left > 0; left -= done)
        if ((done = copy_file_range((int)range->src_fd, &from, fd, &to, (size_t)left, 0)) <= 0) return -1;
    if (fault_reflinks == 3)
        for (unsigned long block = 2; block * 4096 < range->src_length && block < 70; block += 67)
            if (next(fd, "of another commit", 17, (off_t)(range->dest_offset + block * 4096)) != 17) return -1;
    return 0;
}

/* An extent for each block, as if each had another place on the disk. */
static int tell_blocks(int fd, struct fiemap *map)
{
    enum { BLOCK = 4096 };
    struct stat file;
    if (fstat(fd, &file)) return -1;
    if (map->fm_flags) {
        errno = EBADR;
        return -1;
    }
    map->fm_mapped_extents = 0;
    if (fault_reflinks == 4) return 0;
    for (unsigned long at = map->fm_start / BLOCK * BLOCK; at < (unsigned long)file.st_size; at += BLOCK) {
        if (at >= map->fm_start + map->fm_length || map->fm_mapped_extents == map->fm_extent_count ||
            (int)map->fm_mapped_extents == fault_extents)
            break;
        struct fiemap_extent *extent = &map->fm_extents[map->fm_mapped_extents++];
        *extent = (struct fiemap_extent){.fe_logical = at, .fe_length = BLOCK};
        if (at + BLOCK >= (unsigned long)file.st_size) extent->fe_flags |= FIEMAP_EXTENT_LAST;
        long block = (long)(at / BLOCK);
        if (fault_reflinks == 2 && block >= fault_first_shared && block <= fault_last_shared)
            extent->fe_flags |= FIEMAP_EXTENT_SHARED;
    }
    return 0;
}

static int tell_flags(unsigned long request, int *flags)
{
    if (request == FS_IOC_SETFLAGS) fault_inode_flags = *flags;
    else if (fault_inode_flags != -2) *flags = fault_inode_flags;
    else {
        errno = ENOTTY;
        return -1;
    }
    return 0;
}
