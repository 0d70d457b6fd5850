/*
 * Numbers of descriptors. A program that has closed its standard output and still prints would otherwise print into a
 * store, or into a snapshot.
 */
#ifndef PM_DESCRIPTOR_H
#define PM_DESCRIPTOR_H

#include <fcntl.h>
#include <unistd.h>

#define PM_FIRST_FD 3

/* A descriptor that was opened, or a copy in its place if its number is one of a standard stream. -1 with errno. */
static inline int pm_descriptor_above_standard(int fd)
{
    if (fd < 0 || fd >= PM_FIRST_FD) return fd;
    int above = fcntl(fd, F_DUPFD_CLOEXEC, PM_FIRST_FD);
    close(fd);
    return above;
}

#endif
