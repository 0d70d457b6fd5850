/*
 * The C interface of pmstore: everything that Python may call, and nothing else.
 *
 * cffi reads the part between the two "cffi" lines as it stands: no preprocessor, no static inline.
 *
 * Threads     Functions lock the store themselves. They may be called from any thread, without the GIL.
 * Offsets     are byte offsets in the store's region, and mean nothing outside it.
 * Statuses    Every function that can fail returns a pm_status. pm_message() and pm_errno() describe the calling
 *             thread's last failure.
 *
 * The usual statuses. Every function that takes an open store and returns a pm_status may return these, besides those
 * that are listed with it:
 *
 *   PM_OK           it is done
 *   PM_CLOSED       the store was closed
 *   PM_FORKED       this process is a fork of the process that opened the store
 *   PM_FAILED       an earlier write or sync failed (D7): only pm_rollback and pm_close are possible any more
 *   PM_NO_SPACE     an earlier commit is safe in the log, but there is no space to bring the file up to date with it;
 *                   of a function that names this status, also: there is no space for what the function does
 *   PM_CORRUPT      a part of the file that was read breaks the format
 *   PM_UNREADABLE   a part of the file is on a bad block
 *   PM_NO_MEMORY    there was no memory; nothing has changed
 *
 * A function that changes the store ("to write") may also return
 *
 *   PM_READ_ONLY    the store was opened with PM_OPEN_READ_ONLY
 *   PM_IO           a write or a sync failed; later calls return PM_FAILED
 */
#ifndef PMSTORE_H
#define PMSTORE_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */
typedef struct pm_store pm_store;
typedef struct pm_buffer pm_buffer;
typedef struct pm_trace pm_trace;

typedef enum {
    PM_OK = 0,
    PM_IO,         /* the system refused an operation; pm_errno() says which */
    PM_NO_SPACE,   /* the disk, the address range or max_size is full; pending changes stay pending */
    PM_NO_MEMORY,
    PM_CORRUPT,    /* the file breaks its own format; the message says where */
    PM_NOT_A_STORE,
    PM_VERSION,    /* written by a version of pmstore that this one does not know */
    PM_READ_ONLY,
    PM_CLOSED,
    PM_FORKED,     /* this process is a fork of the process that opened the store */
    PM_FAILED,     /* an earlier write or sync failed (D7): reopen the store */
    PM_NOT_FOUND,
    PM_TOO_LONG,   /* a key or a meta is over its limit */
    PM_INVALID,    /* the caller broke the contract of the function */
    PM_STALE,      /* a later commit has changed what a snapshot should give */
    PM_UNREADABLE  /* the disk can't read a part of the file; nothing was changed, and the rest can be used */
} pm_status;

typedef enum { PM_MEDIA_AUTO = 0, PM_MEDIA_MEMORY = 1, PM_MEDIA_FILE = 2, PM_MEDIA_DAX = 3 } pm_media_kind;

enum {
    PM_KEY_MAX = 768,  /* bytes of a key */
    PM_META_MAX = 768, /* bytes that an entry carries itself */
    PM_BLOCK = 4096    /* contents are hashed at rest in blocks of this size, counted from the extent's start */
};

/* ---- life ------------------------------------------------------------------------------------------------ */

/* On this byte of the file, a process that has the store open holds a POSIX lock, which tells others its number. */
extern const uint64_t pm_pid_byte;

enum {
    PM_OPEN_READ_ONLY = 1,
    PM_OPEN_SNAPSHOT = 2, /* with PM_OPEN_READ_ONLY: the file is a snapshot's, which only this process has */
    PM_OPEN_SALVAGE = 4   /* with PM_OPEN_READ_ONLY: damaged metadata hide nothing that can be found without them */
};

/* Writes an empty store into an empty file, and makes it durable.
 *
 *   fd      of the file, open for reading and writing. It stays the caller's.
 *   media   which medium; PM_MEDIA_AUTO: memory on tmpfs, dax where the kernel grants MAP_SYNC, otherwise file
 *   trace   as for pm_open
 *
 * PM_INVALID if the file is not empty, or can't have this medium; PM_NOT_A_STORE if it is not a regular file; PM_IO,
 * PM_NO_SPACE, PM_NO_MEMORY. */
pm_status pm_format(int fd, pm_media_kind media, pm_trace *trace);

/* Renames a file, in one step and only if no file has the new name. Gives errno; EINVAL: the file system can't. */
int pm_rename_file(const char *from, const char *to);
uint32_t pm_file_system_type(const char *path); /* of statfs; 0: it can't be asked */

/* Opens a store, and recovers it if the last process that had it ended in a crash.
 *
 *   fd         of the file. The store takes it over in every case, also on failure. The caller holds the lock on the
 *              file.
 *   media      as for pm_format
 *   flags      0, or PM_OPEN_READ_ONLY, perhaps with PM_OPEN_SNAPSHOT or PM_OPEN_SALVAGE
 *   max_size   bytes that the file may grow to; 0: as many as the disk has
 *   trace      NULL, or a trace that records every event on the durable bytes, from the first one of recovery on
 *   out        the store, if the status is PM_OK
 *
 * PM_NOT_A_STORE, PM_VERSION if this pmstore does not know the format, PM_CORRUPT, PM_UNREADABLE, PM_IO, PM_NO_SPACE,
 * PM_NO_MEMORY. PM_INVALID if a variable PMSTORE_… has a wrong value here, or the file can't have this medium. */
pm_status pm_open(int fd, pm_media_kind media, unsigned flags, uint64_t max_size, pm_trace *trace, pm_store **out);

enum {
    PM_CLOSE_DISCARD = 1, /* leave the file as it is, as a crash would */
    PM_CLOSE_EXITING = 2  /* the process ends: living buffers need no memory of their own */
};

/* Makes the committed image durable, empties the log and lets the file go. Pending changes are dropped: commit first.
 * Memory under living buffers is copied to anonymous memory at the same address, and stays readable and writable.
 *
 * PM_NO_MEMORY: there is none for the living buffers, and the store is still open. After any other status the store is
 * closed and must not be used again; its last buffer frees it. PM_IO, PM_FAILED: the last commit is not known to be
 * durable. PM_UNREADABLE: a living array has pages on a bad block, and gets zeros there. */
pm_status pm_close(pm_store *store, unsigned flags);

/* The text of the calling thread's last failure, valid until its next one; its errno, 0 if it was not the system's. */
const char *pm_message(void);
int pm_errno(void);

/* "memory", "file" or "dax", and the persistence domain (D24): "process", "cpu_cache", "memory" or "disk". */
const char *pm_media_name(const pm_store *store);
const char *pm_domain_in_use(const pm_store *store);

/* How changes to large arrays are found: "uffd", "pagemap" or "compare". The first call tests what the kernel has. */
const char *pm_tracker_in_use(pm_store *store);

/* ---- transactions ---------------------------------------------------------------------------------------- */

/* Makes every change since the last commit durable together. If nothing changed, nothing is written or counted.
 *
 * To write. PM_NO_SPACE: the disk or max_size is full. All changes stay pending, and the last commit is as it was. */
pm_status pm_commit(pm_store *store);

/* From now on commits return before they are durable (D11): their bytes are in the page cache, and survive the process.
 * The committed image in the file is brought up to date after each sync. A power cut leaves a whole commit, not older
 * than the last sync that ended before. On memory, and in a read-only store, nothing changes.
 *
 *   interval   nanoseconds after a commit at which a sync begins by itself, at the latest
 *
 * PM_IO: the system refused a thread or a mapping; commits stay as they were. */
pm_status pm_commit_async(pm_store *store, uint64_t interval);

/* Waits until all commits that have returned are durable. PM_IO: they may not be durable, and later calls return
 * PM_FAILED. */
pm_status pm_sync(pm_store *store);

/* A range of live memory. */
typedef struct {
    uint64_t address, length;
} pm_range;

/* Commits a declared write set: the caller declares that no arrays changed but in these ranges, and in extents that
 * pm_mark was called for. Only pages with any of these bytes are scanned, besides names, values and new arrays. A
 * change elsewhere is in a later commit.
 *
 *   ranges, count   of live memory. One that is not in an array is ignored.
 *
 * Statuses as of pm_commit. */
pm_status pm_commit_only(pm_store *store, const pm_range *ranges, size_t count);

/* Lets the next commit scan all `length` bytes of the extent at `offset`, whatever its write set is. To write. */
pm_status pm_mark(pm_store *store, uint64_t offset, uint64_t length);

/* Notes that live memory may have changed unnoticed by the kernel. The next commit without a declared write set
 * compares all of its pages, and a rollback restores them.
 *
 *   address, length   the range of memory, at least one byte
 *   out               0 if no array has all of the range, 1 if only one has it that can't change, otherwise 2
 *
 * To write. */
pm_status pm_mark_dirty(pm_store *store, const void *address, uint64_t length, int *out);

/* Tests whether a living array has all of a range. Does not wait for the write-back of earlier commits.
 *
 *   address, length   the range
 *   ranges, i         ranges[i] becomes the range, if an array has it
 *
 * 1 if an array has it, otherwise 0; also 0 if the store is closed or this process is a fork. */
int pm_holds(pm_store *store, const void *address, uint64_t length, pm_range *ranges, size_t i);

/* A change outside a declared write set. */
typedef struct {
    uint64_t extent, at, length; /* the extent's offset; from its start */
} pm_broken;

/* Finds the first array that was changed outside a declared write set. Compares everything.
 *
 *   ranges, count   the write set, as for pm_commit_only
 *   out             the place of the change; its length is 0 if there is no such array
 *
 * To write. */
pm_status pm_violation(pm_store *store, const pm_range *ranges, size_t count, pm_broken *out);

/* Takes arrays and names back to the last commit, in place. It works after PM_FAILED, too.
 *
 * PM_READ_ONLY. It can't fail on an open store (I11), unless a commit was durable and could not be applied to the
 * committed image: PM_NO_SPACE, after which nothing but another rollback is possible, or PM_FAILED. */
pm_status pm_rollback(pm_store *store);

/* Makes the committed image durable and empties the log. To write. PM_NO_SPACE: the log stays as it is. */
pm_status pm_checkpoint(pm_store *store);

/* The same, and gives the last commit the number `sequence`, from which the next ones count. A crash leaves either
 * number. To write; only for a new store that no other process has seen, and not after pm_commit_async. */
pm_status pm_renumber(pm_store *store, uint64_t sequence);

/* The number of commits since the store was made, or since the commit that pm_renumber gave a number. */
uint64_t pm_sequence(const pm_store *store);

/* The random number of the store, which its copies have, too. */
uint64_t pm_store_id(const pm_store *store);

/* ---- catalog: key -> entry -------------------------------------------------------------------------------- */

/* An entry has up to PM_META_MAX bytes of meta, and may own one extent. */
enum { PM_ENTRY_FIXED = 1 /* of flags: the contents never change as long as the entry owns them */ };
typedef struct {
    uint64_t offset; /* of the extent; 0: none */
    uint64_t length; /* bytes of contents in the extent */
    uint8_t kind;    /* the caller's */
    uint8_t flags;
    uint16_t meta_length;
} pm_entry;

/* Looks a key up.
 *
 *   key, key_length   1 to PM_KEY_MAX bytes
 *   entry             the entry of the key
 *   meta              room for PM_META_MAX bytes; the first entry->meta_length of them are written
 *
 * PM_NOT_FOUND if there is no such key; PM_INVALID if the key is empty, PM_TOO_LONG if it is too long. */
pm_status pm_get(pm_store *store, const uint8_t *key, size_t key_length, pm_entry *entry, uint8_t *meta);

typedef struct { const uint8_t *from, *to; size_t from_length, to_length; } pm_renaming; /* a key, and its new one */

/* Sets or replaces an entry.
 *
 *   key, key_length         1 to PM_KEY_MAX bytes
 *   entry                   its offset is 0, or an extent from pm_alloc that has no owner yet, or the one that this
 *                           key's entry owns already
 *   meta                    entry->meta_length bytes, at most PM_META_MAX
 *   all, count              other entries, which get new keys before, as by pm_rename: all of this is done, or nothing
 *   prefix, prefix_length   every key that starts with it is deleted, as by pm_delete; none if it has no bytes
 * The replaced entry's own extent, if it is another, is freed, and its buffers are detached. To write. PM_INVALID: the
 * key is empty, the extent has another owner or length, or `all` has the key, too. PM_TOO_LONG: the key or the meta.
 * PM_NO_SPACE; with `all`, also the statuses of pm_rename. */
pm_status pm_put(pm_store *store, const uint8_t *key, size_t key_length, const pm_entry *entry, const uint8_t *meta,
                 const pm_renaming *all, size_t count, const uint8_t *prefix, size_t prefix_length);

/* Deletes an entry, frees its extent, and detaches the extent's buffers.
 *
 *   key, key_length         1 to PM_KEY_MAX bytes
 *   prefix, prefix_length   as for pm_put
 *
 * To write. Otherwise as pm_get. */
pm_status pm_delete(pm_store *store, const uint8_t *key, size_t key_length, const uint8_t *prefix,
                    size_t prefix_length);

/* Gives the `count` entries in `all` new keys, or none of them, and keeps extents and buffers. To write. PM_NOT_FOUND:
 * there is no such key; PM_INVALID: a new key is taken, or a key is empty; PM_TOO_LONG: a key; PM_NO_SPACE. */
pm_status pm_rename(pm_store *store, const pm_renaming *all, size_t count);

typedef struct { const uint8_t *meta; pm_entry entry; uint64_t number; int moves; } pm_member; /* new, or moves */
/* Replaces members of a sequence: entries whose keys are a prefix and a number of 8 bytes, big-endian, from 0 on. The
 * members behind get other numbers. All of it is done, or nothing. Only new entries take space.
 *
 *   prefix, prefix_length   1 to PM_KEY_MAX - 8 bytes
 *   at, removed             the number of the first member that goes, and how many go; those in `all` that move stay
 *   all, count              the members that take their place
 *
 * To write. PM_CORRUPT: a member is missing among those, or before them. PM_INVALID: the prefix is empty, a number too
 * large, an extent has an owner, a member moves that does not go. PM_TOO_LONG: the prefix or a meta. PM_NO_SPACE. */
pm_status pm_splice(pm_store *store, const uint8_t *prefix, size_t prefix_length, uint64_t at, uint64_t removed,
                    const pm_member *all, size_t count);

/* A key and its entry: this, then the key, then the meta, padded to 8 bytes. */
typedef struct {
    uint64_t offset, length;
    uint8_t kind, flags;
    uint16_t meta_length, key_length, row_length; /* row_length: of this row with key, meta and padding */
} pm_row;

/* Copies out rows, in byte order of their keys.
 *
 *   from, from_length       the first key, if there is one; at most PM_KEY_MAX bytes
 *   after                   0: keys from `from` on; 1: keys after it
 *   prefix, prefix_length   only keys that start with it; at most PM_KEY_MAX bytes
 *   rows, capacity          room for them; at least 4096 bytes
 *   used                    how many bytes were written; 0: there are no more rows
 *
 * PM_TOO_LONG: `from` or the prefix; PM_INVALID: there is too little room. */
pm_status pm_scan(pm_store *store, const uint8_t *from, size_t from_length, int after,
                  const uint8_t *prefix, size_t prefix_length, uint8_t *rows, size_t capacity, size_t *used);

/* Copies out the row of the last key that starts with a prefix.
 *
 *   prefix, prefix_length   1 to PM_KEY_MAX bytes, otherwise PM_INVALID
 *   rows                    room for 4096 bytes
 *
 * PM_NOT_FOUND if there is no such key. */
pm_status pm_last(pm_store *store, const uint8_t *prefix, size_t prefix_length, uint8_t *rows);

/* ---- extents and buffers ---------------------------------------------------------------------------------- */

/* Allocates an extent, and grows the file if need be. Its contents are undefined: all of it must be written (pm_write,
 * pm_fill) before the commit. It has no owner until pm_put; a commit frees it if it has none by then.
 *
 *   length   bytes of contents, at least 1
 *   offset   where it begins
 *
 * To write. PM_NO_SPACE; PM_INVALID if the length is 0. */
pm_status pm_alloc(pm_store *store, uint64_t length, uint64_t *offset);

/* Frees an extent that was allocated since the last commit and has no owner. offset, length: as given by, and to,
 * pm_alloc. To write. PM_INVALID if it was not. */
pm_status pm_free(pm_store *store, uint64_t offset, uint64_t length);

/* Writes contents of an extent that was allocated since the last commit, straight to their place (D3).
 *
 *   offset           of the extent
 *   at, length       from the extent's start; within it
 *   source           length bytes
 *
 * To write. PM_INVALID: the extent is older, or ends before the bytes do. */
pm_status pm_write(pm_store *store, uint64_t offset, uint64_t at, const void *source, uint64_t length);

/* The same with a pattern that is repeated from the extent's start on.
 *
 *   offset, length            of the extent, and the bytes to write: a multiple of pattern_length
 *   pattern, pattern_length   at least 1 byte
 *
 * To write. PM_INVALID: as pm_write, or the pattern is empty or does not fit. */
pm_status pm_fill(pm_store *store, uint64_t offset, uint64_t length, const void *pattern, size_t pattern_length);

/* Copies out all of an extent's contents, and checks them against their hashes at rest: for contents that are never
 * changed in place.
 *
 *   offset, length   of the extent
 *   destination      room for length bytes; NULL: only tests whether there is such an extent
 *
 * PM_CORRUPT if there is none, or a hash differs. */
pm_status pm_read(pm_store *store, uint64_t offset, uint64_t length, void *destination);

/* Checks the blocks of the first `count` committed bytes of the extent at `offset`, which has `length` bytes, as
 * pm_read does, without a copy of them. PM_CORRUPT as there; PM_INVALID if count > length. */
pm_status pm_check_contents(pm_store *store, uint64_t offset, uint64_t length, uint64_t count);

/* Tests whether bytes of an extent can be read. Through a buffer, a bad block would be a signal.
 *
 *   offset, length   of the extent
 *   at, count        from its start; within it
 *
 * PM_UNREADABLE if the disk can't read them. */
pm_status pm_readable(pm_store *store, uint64_t offset, uint64_t length, uint64_t at, uint64_t count);

enum {
    PM_BUFFER_WRITABLE = 1,
    /* These bytes never change as long as the extent has an owner: a forked child need not have its own */
    PM_BUFFER_FIXED = 2
};

/* Opens a living buffer over the extent that a key owns. While it lives, the address stays valid and the space is not
 * reused (I9). A writable one makes the extent a candidate of every commit while a key owns it.
 *
 *   offset, length   of the extent
 *   how              PM_BUFFER_WRITABLE and PM_BUFFER_FIXED. In a read-only store no buffer is writable.
 *   out              to be given to pm_buffer_release
 */
pm_status pm_buffer_open(pm_store *store, uint64_t offset, uint64_t length, unsigned how, pm_buffer **out);

/* The address where the buffer's memory begins. */
void *pm_buffer_address(pm_buffer *buffer);

/* Lets a buffer go. May be called from any thread at any time, also after pm_close.
 *
 *   address   is ignored. It gives the function the signature of a finalizer for the address, so that a garbage
 *             collector can call it directly. */
void pm_buffer_release(pm_buffer *buffer, const void *address);

/* Gives back the private memory of an extent's pages that equal the committed image.
 *
 *   offset, length   of the extent. No thread may be writing to it.
 *
 * PM_IO: a write to a double-buffered extent failed. */
pm_status pm_release(pm_store *store, uint64_t offset, uint64_t length);

/* ---- inspection -------------------------------------------------------------------------------------------- */

/* Each field is one of Stats in pmstore/_store/report.py. */
typedef struct {
    uint64_t sequence, commits, checkpoints, records_replayed; /* since the store was opened, except sequence */
    uint64_t durable_sequence;                                 /* the last commit that is known to be durable */
    uint64_t bytes_logged, bytes_direct, bytes_home;           /* written to the medium */
    uint64_t fences, syncs;                                    /* ordering points issued */
    uint64_t dirty_bytes;                                      /* changed bytes that the last commit logged */
    uint64_t file_size, region_size, region_used, log_size, log_used;
    uint64_t buffers;                                          /* living, or released and still to be committed */
    uint64_t keys;
    uint64_t max_size;                                         /* as given to pm_open, 0 for none */
} pm_statistics;

/* Statistics of an open store. out: all fields are set. */
pm_status pm_stats(pm_store *store, pm_statistics *out);

/* The number of keys. Unlike pm_stats, it takes no longer in a larger file. */
pm_status pm_count_keys(pm_store *store, uint64_t *keys);

/* Lists what a commit would change: a row for each key whose entry is not that of the last commit (its old entry, if
 * it is deleted), then one without a key for each extent that a program has changed in place.
 *
 *   rows, length   the rows, and their bytes. To be freed with pm_pending_free. To write. */
pm_status pm_pending(pm_store *store, uint8_t **rows, size_t *length);

/* Frees the rows of pm_pending. */
void pm_pending_free(uint8_t *rows);

/* The problems that pm_check has found. */
typedef struct pm_report pm_report;
typedef struct {
    uint64_t offset, length; /* where in the region */
    uint64_t block;          /* first bad block of the contents; 2^64 - 1: keys up to the next one may be missing */
    uint32_t key_length;     /* > 0: the damage is in the entry or extent of this key */
    uint8_t key[768];
    char text[200];          /* a sentence without the key */
} pm_problem;

/* Verifies the committed state, not the log: headers, every metadata page, the space map, every content hash. PM_OK if
 * the check could be made, whether problems were found or not. out: a report, to be freed with pm_report_free. */
pm_status pm_check(pm_store *store, pm_report **out);

/* The number of problems in a report. At most 1000 are kept. */
size_t pm_report_count(const pm_report *report);

/* Problem i, counted from 0. It is valid as long as the report. */
const pm_problem *pm_report_get(const pm_report *report, size_t i);

/* Frees a report and its problems. */
void pm_report_free(pm_report *report);

/* ---- trace: what happens to durable bytes, for the crash explorer ------------------------------------------ */

typedef enum {
    PM_EVENT_STORE = 1,    /* cached store: durable when flushed and fenced; may be sooner */
    PM_EVENT_STREAM,       /* non-temporal store: durable at the next fence; may be sooner */
    /* The lines of offset, length: durable at the next fence. File: handed to the disk, durable at its next flush */
    PM_EVENT_FLUSH,
    PM_EVENT_FENCE,        /* orders what its thread streamed and flushed, and what was handed over */
    PM_EVENT_HAND_OVER,    /* any thread's next fence orders what this one streamed and flushed */
    PM_EVENT_WRITE,        /* pwrite */
    /* The bytes of offset, length are durable now, and so is what was handed to the disk before */
    PM_EVENT_SYNC_RANGE,
    PM_EVENT_SYNC,         /* everything is durable now, size included */
    /* The file is now `offset` bytes long; new bytes are zeros. File: durable at the next sync */
    PM_EVENT_GROW,
    /* The bytes of offset, length, or all if length is 0: no later sync covers what was written before, unless its page
     * is written again */
    PM_EVENT_SYNC_FAILED,
    PM_EVENT_OPEN,         /* a store is opened: everything in the file was written before */
    /* offset: the sequence number that it would get; length: the hash of its state (pm_state_hash) */
    PM_EVENT_COMMIT_BEGIN,
    PM_EVENT_COMMIT_END,   /* the same, for the commit that is acknowledged now */
    PM_EVENT_RECOVERED,    /* the same, for the state that recovery ended in; pm_open is about to return */
    /* offset: the last sequence number that is durable now. After the first such event since opening, a commit
     * survives the end of the process from its COMMIT_END on, and a power cut only from such an event on */
    PM_EVENT_DURABLE
} pm_event_kind;

typedef struct {
    uint64_t offset, length; /* in the file */
    uint32_t kind;
    uint16_t has_data, thread; /* thread: 1 to 3: one of the store's; 0, 4, 5: of the program's */
    uint64_t data;             /* index of the written bytes in pm_trace_data */
} pm_event;

/* Makes an empty trace; NULL if there is no memory. seed: if not 0, stores under this trace draw their ids and salts
 * from it, so that a program that does the same writes the same bytes. */
pm_trace *pm_trace_new(uint64_t seed);

/* Frees a trace. Open stores keep it until they are closed. */
void pm_trace_free(pm_trace *trace);

/* The number of the events of a trace, and the events, in order. They are valid until the next event. */
size_t pm_trace_count(const pm_trace *trace);
const pm_event *pm_trace_events(const pm_trace *trace);

/* All bytes that were written, in order, and how many they are. Valid until the next event. */
const uint8_t *pm_trace_data(const pm_trace *trace);
size_t pm_trace_bytes(const pm_trace *trace);

/* 1 if memory ran out, and the rest of the events is missing. */
int pm_trace_incomplete(const pm_trace *trace);
void pm_trace_clear(pm_trace *trace); /* drops all events */

/* How records are written to files. ranges: 1: by a synced write of their range, as on ext4 and xfs; 0: by write and
 * fdatasync, as on other file systems; -1, the default: as the file system needs it. */
void pm_trace_sync_ranges(pm_trace *trace, int ranges);

/* Stores that are opened from now on do their background work (deferred write-back, syncs of commits that are durable
 * later, writes past the page cache) in an order that the seed decides, at points between operations on durable bytes.
 * Without this call, small stores have none. No store under the trace may be open.
 *
 *   pace   in 256, how likely some of it is done at a point; 0: only what is waited for
 *
 * PM_NO_MEMORY. */
pm_status pm_trace_background(pm_trace *trace, uint64_t seed, unsigned pace);

typedef enum {
    PM_OPERATION_WRITE = 1,
    PM_OPERATION_SYNC = 2,
    PM_OPERATION_GROW = 4,
    PM_OPERATION_MAP = 8
} pm_operation;

typedef struct {
    uint32_t operations; /* pm_operation bits: the operations that count */
    int32_t error;       /* errno; 0: the write is cut short */
    uint64_t at;         /* the first operation that fails, counted from 1; 0: none fails, they are only counted */
    uint32_t lasting;    /* all later ones fail too */
} pm_fault;

/* From now on operations fail as `fault` says; NULL: none does. */
void pm_trace_fail(pm_trace *trace, const pm_fault *fault);

/* How many operations were counted since pm_trace_fail. faults: NULL, or how many of them failed. */
uint64_t pm_trace_operations(const pm_trace *trace, uint64_t *faults);

/* A hash of all keys, entries and contents, as the program sees them. It works after PM_FAILED, too. */
pm_status pm_state_hash(pm_store *store, uint64_t *hash);

/* ---- hashes ------------------------------------------------------------------------------------------------ */

/* XXH3, 64 bits, of `length` bytes. seed: that of the algorithm; 0 if there is none. */
uint64_t pm_hash64(const void *bytes, size_t length, uint64_t seed);

/* CRC-32C (Castagnoli) of `length` bytes. crc: 0, or the CRC of the bytes before. */
uint32_t pm_crc32c(const void *bytes, size_t length, uint32_t crc);

/* ---- lossy differences ------------------------------------------------------------------------------------- */

typedef enum { PM_LCDELTA_DOUBLE = 0, PM_LCDELTA_FLOAT, PM_LCDELTA_HALF, PM_LCDELTA_BRAIN } pm_lcdelta_type;

/* Counts the changes x - before by bucket, and adds them up. The bucket of a change is its sign bit with the bits of
 * its exponent behind it: of a double, one of 4096; of a float, which the changes of all other types are, one of 512.
 *
 *   type            of the elements
 *   x, before       n elements each
 *   room            2^18 bytes, aligned to 8, all 0; they are 0 again afterwards
 *   numbers, sums   for each bucket, all 0: they get the number and the sum of its changes. The sums of the smallest
 *                   and the largest exponent, which zeros, denormals, infinities and NaN have, mean nothing
 */
void pm_lcdelta_count(pm_lcdelta_type type, const void *x, const void *before, uint64_t n, void *room,
                      uint64_t *numbers, double *sums);

/* Adds values[code] to each element whose code is not 0, in place.
 *
 *   type, x, n   the elements
 *   codes        n codes
 *   values       256 values: doubles if the elements are, otherwise floats */
void pm_lcdelta_add(pm_lcdelta_type type, void *x, const uint8_t *codes, uint64_t n, const void *values);

/* Gives each element the code of the bucket of its change, and computes what x is decoded to: before with values[code]
 * added, as pm_lcdelta_add does it, except for exact elements. These are the zeros, denormals, infinities and NaN of x,
 * and elements whose sum would not be a finite number.
 *
 *   type, x, before, n, values   as for the functions above
 *   table                        the code of each bucket
 *   codes                        room for n
 *   result                       n elements
 *   places                       room for n; the places of elements that had to be made exact
 *   errors                       three numbers, added to or exceeded: the largest absolute error, the sum of the
 *                                squares of the errors, and that of x; elements that are not finite do not count
 *
 * Returns the number of places. */
uint64_t pm_lcdelta_apply(pm_lcdelta_type type, const void *x, const void *before, uint64_t n, const uint8_t *table,
                          const void *values, uint8_t *codes, void *result, uint32_t *places, double *errors);

/* Packs codes into bytes. A byte is the number of zeros before a code, times 2^bits, plus the code. The code is
 * 0 only if the number of zeros does not fit into one byte, and at the end.
 *
 *   codes, n   the codes, of at most `bits` bits
 *   bits       1 to 8
 *   bytes      room for n
 *
 * Returns the number of bytes. */
uint64_t pm_lcdelta_pack(const uint8_t *codes, uint64_t n, unsigned bits, uint8_t *bytes);

/* Unpacks what pm_lcdelta_pack has packed. The bytes are not trusted.
 *
 *   bytes, count   the packed codes
 *   bits           as for pm_lcdelta_pack
 *   codes          room for n
 *
 * Returns the number of codes, or n + 1 if there are more than n. */
uint64_t pm_lcdelta_unpack(const uint8_t *bytes, uint64_t count, unsigned bits, uint8_t *codes, uint64_t n);
/* cffi: end */

#endif
