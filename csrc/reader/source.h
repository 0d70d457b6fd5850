/*
 * The file of a store that another process may be writing: its header, and the log's records up to the newest commit.
 * It is only read, with pread, so that a file that was cut short, or a bad block, is an error and no signal.
 *
 * What is read is kept in a memory file of the same layout (`store.media.view`), so that the functions of the log and
 * of recovery work on it.
 */
#ifndef PM_SOURCE_H
#define PM_SOURCE_H

#include "reader/reader.h"
#include "recovery/recovery.h"

typedef struct {
    int fd;         /* of the file; not owned */
    int copy;       /* the memory file, mapped at store.media.view; -1: there is none yet */
    bool written;   /* a process has the file open for writing */
    pm_store store; /* only media, log and region: see pm_recovery_scan. log has the newest commit that was found */
    pm_recovery_log found; /* the records since the header, in order */
    uint8_t *overflowed;   /* the body of one of them that was in free pages; NULL: there is none */
    uint64_t read_to;      /* so much of the log is in the memory file */
    uint64_t ahead;        /* bytes of the log that are read at once: few after a small commit */
} pm_source;

/* Reads the header, and makes the memory file. pm_source_end must follow, also after a failure. After it, the source is
 * of use to pm_source_begin only. */
pm_status pm_source_begin(pm_source *source, int fd);
void pm_source_end(pm_source *source);

/* A file in memory of this size, of zeros. */
pm_status pm_source_memory(uint64_t size, int *fd);

/* Gives memory of the copy back that is not needed any more. If that can't be done, it stays as it is. */
void pm_source_let_go(pm_source *source, uint64_t place, uint64_t length);

/* Reads bytes of the file into the memory file. PM_UNREADABLE; PM_CORRUPT if the file ends before. */
pm_status pm_source_read(pm_source *source, uint64_t place, uint64_t length, const char *what);

/* The same into other memory. */
pm_status pm_source_pread(int fd, uint64_t place, uint64_t length, void *destination, const char *what);

/* True if a test has a function called before each read (pm_source_pause). */
bool pm_source_is_followed(void);

/* Writes bytes to a file. failed: the message if that can't be done. */
pm_status pm_source_pwrite(int fd, uint64_t place, uint64_t length, const uint8_t *bytes, const char *failed);

/* Finds the commits since the last call. While a process writes the store, these are the commits that the durable
 * marker names. Otherwise they are the ones that recovery adopts.
 *
 *   from     found.bodies[*from] and those after it are new. 0: those that were known before are no longer there, and
 *            in the committed image
 *   missed   records were gone before they were read: begin anew
 */
pm_status pm_source_follow(pm_source *source, size_t *from, bool *missed);

#endif
