/*
 * Writes past the page cache (D15): whole pages, from whole pages of memory, to a file that is open once more with
 * O_DIRECT. It is only one more way: what it does not take goes through the page cache.
 *
 *   pm_dio_begin ──▶ the disk fetches the bytes from where they are, beside the program ──▶ pm_dio_wait
 *
 * What is written is in the disk's cache, not durable: it takes a flush behind it. pm_dio_write alone is durable when
 * it returns, and nothing else with it: the kernel may force these bytes to the medium (FUA) instead of flushing the
 * disk's cache.
 */
#ifndef PM_MEDIA_DIO_H
#define PM_MEDIA_DIO_H

#include <linux/aio_abi.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "schedule.h"

enum { PM_DIO_MOST = 32 /* that are begun and not waited for */ };

typedef struct {
    int file;     /* the descriptor of the file itself; -1: it is not to be written like this */
    /* Opened by the first such write; -1: there is none. Closed with the file and not before, as closing any
     * descriptor gives up the lock that tells others which process has it: for the same reason, creating a store
     * must not open one */
    int fd;
    int synced;   /* how pm_dio_write is durable: RWF_DSYNC or RWF_SYNC (media_fs.h) */
    bool refused; /* it can't be opened, or the file system does not take these writes */
    bool waits;   /* the system has nothing to begin them with, or to wait for them */
    aio_context_t context; /* 0: there is none yet */
    unsigned begun;
    struct iocb writes[PM_DIO_MOST];
    bool done[PM_DIO_MOST];
    int64_t results[PM_DIO_MOST]; /* of those that are done: bytes, or -errno */
    pm_schedule *schedule;        /* decides when each is done; NULL: the kernel does it when it likes */
} pm_dio;

void pm_dio_init(pm_dio *dio, int file, int synced);
void pm_dio_close(pm_dio *dio);
void pm_dio_forked(pm_dio *dio); /* in a child: what its parent has begun is none of its own */

/* Whether there is a descriptor for it, opened if it wasn't. */
bool pm_dio_open(pm_dio *dio);

/* As pwrite, durable when it returns. EINVAL: write it through the page cache. */
ssize_t pm_dio_write(pm_dio *dio, const void *source, size_t length, uint64_t offset);

/* False: it was not begun. The bytes must stay as they are until pm_dio_wait. */
bool pm_dio_begin(pm_dio *dio, const void *source, size_t length, uint64_t offset);

/* Waits for all that was begun. Returns how many were not written, or not all of it: the first so many of `writes`. */
unsigned pm_dio_wait(pm_dio *dio);

/* Under a schedule: the number of a write that is to be done now; -1: there is none. */
int pm_dio_next(pm_dio *dio);
void pm_dio_done(pm_dio *dio, int number, int64_t result);

#endif
