/*
 * Reading beside the process that writes: the rest of the C interface, which Python may call. reader/snapshot.h
 * explains it.
 *
 * cffi reads the part between the two "cffi" lines as it stands: no preprocessor, no static inline.
 */
#ifndef PM_READER_H
#define PM_READER_H

#include <stdbool.h>

#include "pmstore.h"

/* cffi: begin */
typedef struct pm_snapshot pm_snapshot;
typedef struct pm_reader pm_reader;
typedef struct pm_waiter pm_waiter;

/* An extent as an entry names it: its offset, and the bytes of its contents. */
typedef struct {
    uint64_t extent, length;
} pm_extent_place;

/* Makes a reader of a store's file. It keeps what it has read, so that its next snapshot reads what has changed. It
 * must not be used in a forked child.
 *
 *   fd         of the file, open for reading; it stays the caller's
 *   changing   for backups: its snapshots have all pages that records in the log change, so that no contents are
 *              missing because they are not in the committed image yet
 *   out        the reader, to be freed with pm_reader_free
 *
 * PM_NO_MEMORY, PM_IO. */
pm_status pm_reader_open(int fd, bool changing, pm_reader **out);

/* Takes a snapshot of the newest commit that is durable. A process that writes the store does not wait for it.
 *
 *   wanted, count   extents of entries whose contents are copied at once, besides small ones
 *   out             the snapshot, to be freed with pm_snapshot_free
 *
 * PM_NOT_A_STORE, PM_VERSION, PM_CORRUPT, PM_UNREADABLE, PM_NO_MEMORY, PM_IO. */
pm_status pm_reader_take(pm_reader *reader, const pm_extent_place *wanted, size_t count, pm_snapshot **out);

/* From now on, a pause that a snapshot needs (I21) goes on after it, so that contents can be copied, too. A pause that
 * was asked for before ends.
 *
 *   ask   asks for one at once, and waits some milliseconds until it begins: returns whether it has */
bool pm_reader_hold(pm_reader *reader, bool ask);
/* Ends the pauses. */
void pm_reader_release(pm_reader *reader);

/* Frees a reader. Its snapshots stay. */
void pm_reader_free(pm_reader *reader);

/* A descriptor of a store at rest in memory, for pm_open with PM_OPEN_READ_ONLY and PM_OPEN_SNAPSHOT. Large contents
 * are not in it: pm_snapshot_load puts them into the memory of a buffer. -1 with errno if there is none. */
int pm_snapshot_file(const pm_snapshot *snapshot);

/* "memory", "file" or "dax": what PM_MEDIA_AUTO is for the store's file. Its writer may use another medium. */
const char *pm_snapshot_media(const pm_snapshot *snapshot);
/* Its persistence domain, as for pm_domain_in_use. */
const char *pm_snapshot_domain(const pm_snapshot *snapshot);

/* The store's own file. out: file_size, log_size, log_used and records_replayed are set, as of the snapshot. */
void pm_snapshot_describe(const pm_snapshot *snapshot, pm_statistics *out);

/* Copies the contents of an extent to where a buffer of the opened snapshot has them, unless they are there already.
 *
 *   extent, length   as an entry of the snapshot names it
 *   address          of the buffer
 *
 * PM_STALE if a later commit has changed them; PM_CORRUPT if they are damaged; PM_UNREADABLE, PM_NO_MEMORY. */
pm_status pm_snapshot_load(const pm_snapshot *snapshot, uint64_t extent, uint64_t length, void *address);

/* Copies bytes of an extent.
 *
 *   extent, length   as an entry of the snapshot names it
 *   at, count        from the extent's start; within it
 *   destination      room for count bytes
 *
 * Statuses as of pm_snapshot_load. */
pm_status pm_snapshot_copy(const pm_snapshot *snapshot, uint64_t extent, uint64_t length, uint64_t at, uint64_t count,
                           void *destination);

/* The hashes of all blocks (PM_BLOCK bytes, the last one fewer) of an extent: XXH3 of the bytes alone, as the tables of
 * hashes at rest have them. They do not depend on the place of the contents or on the store, so that those of two
 * snapshots tell which blocks differ, also when the contents are in another slot. A small extent has one block.
 *
 *   extent, length   as an entry of the snapshot names it
 *   out              room for a hash for each block
 *
 * The table of a small extent is in the snapshot. Otherwise PM_STALE if a later commit has changed the table, or
 * PM_UNREADABLE; PM_CORRUPT if there can be no such extent; PM_NO_MEMORY. */
pm_status pm_snapshot_hashes(const pm_snapshot *snapshot, uint64_t extent, uint64_t length, uint64_t *out);

/* A digest of the table of hashes of an extent, from what the snapshot has in memory; the file is not read. Each
 * hash at rest is bound to its place. So if two snapshots of a store have the same digest for an extent, they have the
 * same contents in the same place. If the digests differ, the contents may be the same, for example in another slot.
 *
 *   extent, length   as an entry of the snapshot names it; small or not
 *
 * PM_CORRUPT if there can be no such extent; PM_UNREADABLE if the snapshot could not read the table. */
pm_status pm_snapshot_digest(const pm_snapshot *snapshot, uint64_t extent, uint64_t length, uint64_t *digest);

/* Maps the contents of a constant extent (PM_ENTRY_FIXED) to where a buffer of the opened snapshot has them. As long as
 * the mapping lives, the space is not used again.
 *
 * Statuses as of pm_snapshot_load. */
pm_status pm_snapshot_map(pm_snapshot *snapshot, uint64_t extent, uint64_t length, void *address);

/* Begins a backup, or goes on with it: makes another file as long as the snapshot's store.
 *
 *   copy   of the other file, open for reading and writing; empty, or with what an earlier snapshot of the same store
 *          has left there
 *
 * PM_NO_SPACE, PM_IO. */
pm_status pm_save_begin(const pm_snapshot *snapshot, int copy);

/* Brings bytes of an extent in a backup to those of the snapshot. While no process writes the store, the two files
 * share blocks where the file system can.
 *
 *   extent, length   as an entry of the snapshot names it
 *   at, count        from the extent's start; within it, and from the start of a block of PM_BLOCK bytes
 *   there            what the backup has of the extent: an element for each block, zeros at first. To be used again
 *                    with the next snapshot if that has the same extent, and otherwise not.
 *   whole            false if some of the bytes are not there: a later commit has changed them, or they are damaged
 *
 * PM_CORRUPT if small contents are damaged; PM_UNREADABLE, PM_NO_MEMORY, PM_NO_SPACE, PM_IO. */
pm_status pm_save_contents(const pm_snapshot *snapshot, int copy, uint64_t extent, uint64_t length, uint64_t at,
                           uint64_t count, uint64_t *there, bool *whole);

/* Ends a backup that has all contents of the snapshot: writes header and metadata. The file is a store at rest then, of
 * the snapshot's commit. It is not synced.
 *
 * PM_UNREADABLE, PM_NO_SPACE, PM_IO. */
pm_status pm_save_rest(const pm_snapshot *snapshot, int copy);

/* Frees a snapshot. A store that was opened on it stays. */
void pm_snapshot_free(pm_snapshot *snapshot);

/* The sequence number of the newest commit that is known to be durable.
 *
 *   fd   of the file, open for reading
 *
 * Statuses as of pm_reader_take. */
pm_status pm_source_newest(int fd, uint64_t *sequence);

typedef enum {
    PM_WAITED_COMMIT = 1, /* there is a newer commit */
    PM_WAITED_TIME,       /* the time is over */
    PM_WAITED_CLOSED,     /* nobody has the store open for writing: it was closed */
    PM_WAITED_DIED,       /* the same, and it was not closed */
    PM_WAITED_SIGNAL      /* the thread got a signal: call again after its handler, which may end the wait */
} pm_waited;

/* Keeps what waits for commits need, so that a wait ends soon after the commit.
 *
 *   fd    of the file, open for reading; it stays the caller's
 *   out   to be freed with pm_source_waiter_free
 *
 * PM_NO_MEMORY, PM_IO. */
pm_status pm_source_waiter(int fd, pm_waiter **out);
void pm_source_waiter_free(pm_waiter *waiter);

/* Sleeps until there is a commit newer than `after`. The end of the process that writes is noticed within a quarter of
 * a second. Several threads may wait.
 *
 *   nanoseconds   how long, at most
 *   sequence      the newest durable commit
 *
 * Statuses as of pm_reader_take. */
pm_status pm_source_wait(const pm_waiter *waiter, uint64_t after, uint64_t nanoseconds, pm_waited *why,
                         uint64_t *sequence);

/* For tests: a function that is called before each read of a file, and may change the file; NULL: none. */
void pm_source_pause(void (*pause)(void *argument), void *argument);
/* cffi: end */

#endif
