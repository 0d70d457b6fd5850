/*
 * Writes past the page cache (D15): whole pages, from whole pages of memory, through a second descriptor of the file
 * with O_DIRECT. Writes that it does not take go through the page cache.
 *
 *   pm_direct_io_begin ──▶ the disk fetches the bytes from memory, beside the program ──▶ pm_direct_io_wait
 *
 * The written bytes are in the disk's cache, and durable after the next flush. Only the bytes of pm_direct_io_write are
 * durable when it returns, and nothing else is: the kernel may force them to the medium (FUA) instead of flushing the
 * disk's cache.
 */
#ifndef PM_DIRECT_IO_H
#define PM_DIRECT_IO_H

#include <linux/aio_abi.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/schedule.h"

enum { PM_DIO_MOST = 32 /* writes that were begun and not waited for */ };

typedef struct {
    int file;     /* the file's own descriptor; -1: it is not written like this */
    /* The second descriptor, opened by the first such write; -1: there is none. It is closed with the file and not
     * before, as closing any descriptor drops the lock that tells other processes which process has the file. For the
     * same reason, creating a store must not open one */
    int fd;
    int synced;   /* how pm_direct_io_write is durable: RWF_DSYNC or RWF_SYNC (media/file_system.h) */
    bool refused; /* the file can't be opened so, or the file system does not take these writes */
    bool waits;   /* the system can't begin them, or can't wait for them */
    aio_context_t context; /* 0: there is none yet */
    unsigned begun;
    struct iocb writes[PM_DIO_MOST];
    bool done[PM_DIO_MOST];
    int64_t results[PM_DIO_MOST]; /* of the writes that are done: bytes, or -errno */
    pm_schedule *schedule;        /* decides when each is done; NULL: the kernel does */
} pm_dio;

void pm_direct_io_init(pm_dio *dio, int file, int synced);
void pm_direct_io_close(pm_dio *dio);
void pm_direct_io_forked(pm_dio *dio); /* in a forked child: the writes that its parent began are not its own */

/* True if there is a second descriptor; it is opened if need be. */
bool pm_direct_io_open(pm_dio *dio);

/* As pwrite, but durable when it returns. EINVAL: use the page cache. */
ssize_t pm_direct_io_write(pm_dio *dio, const void *source, size_t length, uint64_t offset);

/* Begins a write. False: it was not begun. The bytes must not change until pm_direct_io_wait. */
bool pm_direct_io_begin(pm_dio *dio, const void *source, size_t length, uint64_t offset);

/* Waits for all writes that were begun. Returns how many have failed or fell short: those are the first of `writes`. */
unsigned pm_direct_io_wait(pm_dio *dio);

/* Under a schedule: the number of a write that is done now; -1: there is none. */
int pm_direct_io_next(pm_dio *dio);
void pm_direct_io_done(pm_dio *dio, int number, int64_t result);

#endif
