/*
 * The C face of pmstore: everything that Python may call, and nothing else.
 *
 * The part between the two "cffi" lines is read by cffi as it stands: no preprocessor, no static inline.
 *
 * Every function that can fail returns a pm_status. The text and the errno of the calling thread's last failure
 * are pm_message() and pm_errno(). Functions lock the store themselves; they may be called from any thread,
 * without the GIL. Offsets are byte offsets in the store's region and mean nothing outside it.
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
    PM_NO_SPACE,   /* the disk, the address range or max_size is full; what is pending stays pending */
    PM_NO_MEMORY,
    PM_CORRUPT,    /* the file breaks its own format; the message says where */
    PM_NOT_A_STORE,
    PM_VERSION,    /* written by a version of pmstore that this one does not know */
    PM_READ_ONLY,
    PM_CLOSED,
    PM_FORKED,     /* this process is a fork of the one that opened the store */
    PM_FAILED,     /* an earlier write or sync failed (D7): reopen the store */
    PM_NOT_FOUND,
    PM_TOO_LONG,   /* a key, a meta or an extent is over its limit */
    PM_INVALID,    /* the caller broke the contract of the function */
    PM_UNREADABLE  /* the disk can't read a part of the file; nothing was changed by that, and the rest can be used */
} pm_status;

typedef enum { PM_MEDIA_AUTO = 0, PM_MEDIA_MEMORY = 1, PM_MEDIA_FILE = 2 } pm_media_kind;

enum {
    PM_KEY_MAX = 768,  /* bytes of a key */
    PM_META_MAX = 768, /* bytes that an entry carries itself */
    PM_BLOCK = 4096    /* contents are hashed at rest in blocks of this size, counted from the extent's start */
};

/* ---- life ------------------------------------------------------------------------------------------------ */

/* Where in the file's range of locks a process that has the store open has a POSIX lock, which tells others its
 * number. */
extern const uint64_t pm_pid_byte;

enum { PM_OPEN_READ_ONLY = 1 };

/* Writes an empty store into the empty file `fd` and makes it durable. trace: as for pm_open. */
pm_status pm_format(int fd, pm_media_kind media, pm_trace *trace);

/* Opens the store in `fd`, recovering it if its last life ended in a crash. Takes `fd` over in every case, also on
 * failure. The caller holds the lock on the file. max_size: bytes that the file may grow to, 0 for no limit but the
 * disk's. trace: NULL, or what records every event on the durable bytes from the first one of recovery. */
pm_status pm_open(int fd, pm_media_kind media, unsigned flags, uint64_t max_size, pm_trace *trace, pm_store **out);

enum {
    PM_CLOSE_DISCARD = 1, /* leave the file as it is, as a crash would */
    PM_CLOSE_EXITING = 2  /* the process ends: living buffers need no memory of their own */
};

/* Makes home durable, empties the log and lets the file go. Pending changes are dropped: commit first. Memory under
 * living buffers is copied to anonymous memory at the same address and stays readable and writable. The store must not
 * be used again; its last buffer frees it. PM_NO_MEMORY: there is none for the living buffers, and the store is still
 * open. */
pm_status pm_close(pm_store *store, unsigned flags);

const char *pm_message(void);
int pm_errno(void);
const char *pm_media_name(const pm_store *store); /* "memory" or "file" */
/* How changes to large arrays are found: "uffd", "pagemap" or "compare". */
const char *pm_tracker_in_use(pm_store *store);

/* ---- transactions ---------------------------------------------------------------------------------------- */

/* Makes every change since the last commit durable together. If nothing changed, nothing is written or counted. */
pm_status pm_commit(pm_store *store);

/* From now on commits return before they are durable: what they wrote is in the page cache, and survives the process. A
 * sync begins by itself interval nanoseconds after a commit at the latest. Home in the file is brought up to date after
 * it. A power cut leaves some whole commit, not older than the last sync that ended before. Nothing changes on memory,
 * and if the store only reads. */
pm_status pm_commit_async(pm_store *store, uint64_t interval);

/* All commits that have returned are durable. */
pm_status pm_sync(pm_store *store);

/* A range of live memory. */
typedef struct {
    uint64_t address, length;
} pm_range;

/* The same under a promise: of arrays, nothing changed but these ranges (and what pm_mark was told). Only pages with
 * any of their bytes are looked at, besides names, values and new arrays. What changed elsewhere all the same is in a
 * later commit. A range that is not in an array is ignored. */
pm_status pm_commit_only(pm_store *store, const pm_range *ranges, size_t count);

/* The caller has changed an extent: the next commit looks at all of it, whatever it promises. */
pm_status pm_mark(pm_store *store, uint64_t offset, uint64_t length);

/* Whether a living array has all of a range, which becomes ranges[i] if it has. */
int pm_holds(pm_store *store, const void *address, uint64_t length, pm_range *ranges, size_t i);

/* The first array that breaks a promise, and where: length 0 if none does. Compares everything. */
typedef struct {
    uint64_t extent, at, length; /* the extent's offset; from its start */
} pm_broken;
pm_status pm_unpromised(pm_store *store, const pm_range *ranges, size_t count, pm_broken *out);

/* Takes arrays and names back to the last commit, in place. Can't fail on an open store (I11), unless a commit was
 * durable and could not be brought home. */
pm_status pm_rollback(pm_store *store);

/* Makes home durable and empties the log. */
pm_status pm_checkpoint(pm_store *store);

uint64_t pm_sequence(const pm_store *store); /* commits since the store was made */

/* ---- catalog: key -> entry -------------------------------------------------------------------------------- */

/* An entry has up to PM_META_MAX bytes of meta, and may own one extent. kind and flags are the caller's. */
typedef struct {
    uint64_t offset; /* of the extent; 0: none */
    uint64_t length; /* bytes of contents in the extent */
    uint8_t kind;
    uint8_t flags;
    uint16_t meta_length;
} pm_entry;

/* PM_NOT_FOUND if there is no such key. meta: room for PM_META_MAX bytes. */
pm_status pm_get(pm_store *store, const uint8_t *key, size_t key_length, pm_entry *entry, uint8_t *meta);

/* Sets or replaces. entry->offset is 0, or an extent from pm_alloc that has no owner yet, or the one that this key's
 * entry owns already. The replaced entry's own extent, if another, is freed and its buffers are detached. So is all
 * that has a key that starts with prefix, if that has any bytes. */
pm_status pm_put(pm_store *store, const uint8_t *key, size_t key_length, const pm_entry *entry, const uint8_t *meta,
                 const uint8_t *prefix, size_t prefix_length);

/* Frees the entry's extent too, and detaches its buffers. The prefix as in pm_put. */
pm_status pm_delete(pm_store *store, const uint8_t *key, size_t key_length, const uint8_t *prefix,
                    size_t prefix_length);

/* One row per key, in byte order of the keys: a pm_row, then the key, then the meta, padded to 8 bytes. */
typedef struct {
    uint64_t offset, length;
    uint8_t kind, flags;
    uint16_t meta_length, key_length, row_length; /* row_length: of this row with key, meta and padding */
} pm_row;

/* Rows of keys >= from (or > from, if after), as many as fit into capacity bytes (at least 4096), and only keys that
 * start with prefix. *used = 0: no more. */
pm_status pm_scan(pm_store *store, const uint8_t *from, size_t from_length, int after,
                  const uint8_t *prefix, size_t prefix_length, uint8_t *rows, size_t capacity, size_t *used);

/* The last key that starts with prefix, as one row in rows (room for 4096 bytes); PM_NOT_FOUND if there is none. */
pm_status pm_last(pm_store *store, const uint8_t *prefix, size_t prefix_length, uint8_t *rows);

/* ---- extents and buffers ---------------------------------------------------------------------------------- */

/* A fresh extent for length bytes of contents (> 0), contents undefined: all of it is to be written (pm_write,
 * pm_fill) before the commit. It has no owner until pm_put; a commit frees it if it has none by then. Grows the file
 * if need be. */
pm_status pm_alloc(pm_store *store, uint64_t length, uint64_t *offset);
pm_status pm_free(pm_store *store, uint64_t offset, uint64_t length); /* of an extent that has no owner */

/* Write contents of an extent allocated since the last commit: straight to their place (D3). */
pm_status pm_write(pm_store *store, uint64_t offset, uint64_t at, const void *source, uint64_t length);
pm_status pm_fill(pm_store *store, uint64_t offset, uint64_t length, const void *pattern, size_t pattern_length);

/* Copies out all of an extent's contents, checking them against their hashes at rest: for contents that are
 * never changed in place. destination NULL: only looks whether there is such an extent. */
pm_status pm_read(pm_store *store, uint64_t offset, uint64_t length, void *destination);

/* PM_UNREADABLE if the disk can't read the bytes [at, at + count) of an extent, which through a buffer would be a
 * signal. */
pm_status pm_readable(pm_store *store, uint64_t offset, uint64_t length, uint64_t at, uint64_t count);

enum {
    PM_BUFFER_WRITABLE = 1,
    /* Nobody ever changes these bytes as long as the extent has an owner: a forked child need not have its own. */
    PM_BUFFER_FIXED = 2
};

/* A living buffer over the extent that a key owns. While it lives, the address stays valid and the space isn't reused
 * (I9). A writable one makes the extent a candidate of every commit while a key owns it. pm_buffer_release may be
 * called from any thread at any time, also after pm_close. The address is not looked at: it makes the function fit as
 * what a garbage collector calls for the address, with the buffer bound, and no interrupt between. */
pm_status pm_buffer_open(pm_store *store, uint64_t offset, uint64_t length, unsigned how, pm_buffer **out);
void *pm_buffer_address(pm_buffer *buffer);
void pm_buffer_release(pm_buffer *buffer, const void *address);

/* Gives back the private memory of an extent's pages that equal the committed image. Nobody may be writing to it. */
pm_status pm_release(pm_store *store, uint64_t offset, uint64_t length);

/* ---- looking ----------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t sequence, commits, checkpoints, records_replayed; /* of this life, but sequence */
    uint64_t durable_sequence;                                 /* the last commit that is known to be durable */
    uint64_t bytes_logged, bytes_direct, bytes_home;           /* written to the medium */
    uint64_t fences, syncs;                                    /* ordering points issued */
    uint64_t dirty_bytes;                                      /* changed bytes that the last commit carried */
    uint64_t file_size, region_size, region_used, log_size, log_used;
    uint64_t buffers;                                          /* living, or released and still to be committed */
    uint64_t keys;
    uint64_t max_size;                                         /* as given to pm_open, 0 for none */
} pm_statistics;

pm_status pm_stats(pm_store *store, pm_statistics *out);

/* What a commit would carry: a row for each key whose entry is not that of the last commit (its old entry, if it is
 * deleted), then one without a key for each extent that a program has changed in place. To be freed with
 * pm_pending_free. */
pm_status pm_pending(pm_store *store, uint8_t **rows, size_t *length);
void pm_pending_free(uint8_t *rows);

/* Verifies the committed state: headers, every metadata page, the space map, every content hash. PM_OK if the check
 * could be made, sound or not. Takes a report, to be freed with pm_report_free. */
typedef struct pm_report pm_report;
typedef struct {
    uint64_t offset, length; /* where in the region */
    uint64_t block;          /* first bad block of the contents, if key_length */
    uint32_t key_length;     /* > 0: the damage is in what this key owns */
    uint8_t key[768];
    char text[200];          /* a sentence without the key */
} pm_problem;
pm_status pm_check(pm_store *store, pm_report **out);
size_t pm_report_count(const pm_report *report); /* at most 1000 are kept */
const pm_problem *pm_report_get(const pm_report *report, size_t i);
void pm_report_free(pm_report *report);

/* ---- trace: what happens to durable bytes, for the crash explorer ------------------------------------------ */

typedef enum {
    PM_EVENT_STORE = 1,    /* cached store: durable when flushed and fenced; may be sooner */
    PM_EVENT_STREAM,       /* non-temporal store: durable at the next fence; may be sooner */
    /* Of the lines of offset, length: durable at the next fence. File: handed to the disk, durable when that is next
     * flushed (sync_file_range) */
    PM_EVENT_FLUSH,
    PM_EVENT_FENCE,
    PM_EVENT_WRITE,        /* pwrite */
    /* The bytes of offset, length are durable now, and so is what was handed to the disk before */
    PM_EVENT_SYNC_RANGE,
    PM_EVENT_SYNC,         /* everything is durable now, size included */
    /* The file is now `offset` bytes long; new bytes are zeros. File: durable at the next sync */
    PM_EVENT_GROW,
    /* Of the bytes of offset, length, or of all if length is 0: no later sync covers what was written before, unless
     * its page is written again */
    PM_EVENT_SYNC_FAILED,
    PM_EVENT_OPEN,         /* a life begins: all that stands in the file is what was written before */
    PM_EVENT_COMMIT_BEGIN, /* offset: the sequence it would get; length: the hash of that state (pm_state_hash) */
    PM_EVENT_COMMIT_END,   /* the same, of the commit that is acknowledged now */
    PM_EVENT_RECOVERED,    /* the same, of the state that recovery ended at; pm_open is about to return */
    PM_EVENT_DURABLE       /* offset: the last sequence that is durable now. From the first one in a life on, what a
                              COMMIT_END acknowledges survives the process, and a power cut only after such an event */
} pm_event_kind;

typedef struct {
    uint64_t offset, length; /* in the file */
    uint32_t kind, has_data;
    uint64_t data; /* index of the written bytes in pm_trace_data */
} pm_event;

/* seed: if not 0, stores under this trace draw their ids and salts from it, so that a program that does the same writes
 * the same. NULL: no memory. */
pm_trace *pm_trace_new(uint64_t seed);
void pm_trace_free(pm_trace *trace); /* stores that are open keep it */
size_t pm_trace_count(const pm_trace *trace);
const pm_event *pm_trace_events(const pm_trace *trace);
const uint8_t *pm_trace_data(const pm_trace *trace);
size_t pm_trace_bytes(const pm_trace *trace); /* of data */
int pm_trace_incomplete(const pm_trace *trace); /* memory ran out, and the rest is missing */
void pm_trace_clear(pm_trace *trace);

/* Files: 1 or 0: whether records are written by a synced write of their range, as on ext4 and xfs, or by write and
 * fdatasync, as on other file systems; -1, as it is at first: by the file system. */
void pm_trace_sync_ranges(pm_trace *trace, int ranges);

/* Stores that are opened from now on do their background work (home behind a commit, syncs of commits that are durable
 * later, writes past the page cache) in an order that the seed decides, at points between operations on durable bytes.
 * pace: in 256, how likely some of it is done at a point; 0: only what is waited for. Without this call, small stores
 * have none. No store under the trace may be open. PM_NO_MEMORY. */
pm_status pm_trace_background(pm_trace *trace, uint64_t seed, unsigned pace);

typedef enum {
    PM_OPERATION_WRITE = 1,
    PM_OPERATION_SYNC = 2,
    PM_OPERATION_GROW = 4,
    PM_OPERATION_MAP = 8
} pm_operation;

typedef struct {
    uint32_t operations; /* pm_operation bits: those that count */
    int32_t error;       /* errno; 0: a write falls short */
    uint64_t at;         /* the first one that fails, counted from 1; 0: none does, they are only counted */
    uint32_t lasting;    /* all that follow fail too */
} pm_fault;

/* From now on. NULL: none. */
void pm_trace_fail(pm_trace *trace, const pm_fault *fault);
uint64_t pm_trace_operations(const pm_trace *trace, uint64_t *faults); /* counted since, and those that failed */

/* A hash of all keys, entries and contents, as the program sees them. */
pm_status pm_state_hash(pm_store *store, uint64_t *hash);

/* ---- hashes ------------------------------------------------------------------------------------------------ */

uint64_t pm_hash64(const void *bytes, size_t length, uint64_t seed); /* XXH3, 64 bits */
uint32_t pm_crc32c(const void *bytes, size_t length, uint32_t crc);  /* Castagnoli; start with crc = 0 */
/* cffi: end */

#endif
