/*
 * Contents of a snapshot: step 5 of reader/snapshot.h. They are in the memory file, or else in the store's file, where
 * a later commit may have changed them. So they are verified by the snapshot's hashes (I20).
 */
#ifndef PM_CONTENTS_H
#define PM_CONTENTS_H

#include "reader/pages.h"

enum { PM_LOCKED_RANGES = 64 }; /* each lock of a file costs all its readers, and the process that writes */

/* See reader/snapshot.h. */
struct pm_snapshot {
    int fd, copy; /* of the store's file, and of the memory file */
    uint64_t sequence, store_id;
    uint64_t size;    /* of the region */
    uint64_t *loaded; /* a bit for each page that the memory file has */
    pm_page_hashes tables; /* of the tables that it does not have */
    pm_pages_pair *pairs;
    size_t pair_count;
    size_t seen;      /* so many of the wanted extents are there */
    bool written;     /* a process was writing the store */
    uint64_t file_size, log_size, log_used, records;
    int locked;       /* the file again, with locks that keep the space of constant extents; -1: not yet */
    struct { uint64_t from, to; } ranges[PM_LOCKED_RANGES]; /* pages that it has locked, in order */
    unsigned range_count;
};

/* Bytes of an extent. */
typedef struct {
    uint64_t place, length; /* of the extent */
    uint64_t at, count;     /* from its start */
    uint64_t first, blocks; /* the blocks with these bytes */
} pm_contents;

pm_contents pm_contents_of(const pm_snapshot *snapshot, uint64_t extent, uint64_t length, uint64_t at, uint64_t count);

/* PM_CORRUPT, unless the extent is in the region and has these bytes. */
pm_status pm_contents_valid(const pm_snapshot *snapshot, const pm_contents *p);

/* The hashes of the blocks, to be freed; NULL with *status. PM_STALE: the table has changed since. */
uint64_t *pm_contents_hashes(const pm_snapshot *snapshot, const pm_contents *p, pm_status *status);

/* A digest of the table, whose hashes are bound to the place of the contents, from what the snapshot has in memory.
 * PM_UNREADABLE: it has nothing of a page that could not be read. */
pm_status pm_contents_digest(const pm_snapshot *snapshot, const pm_contents *p, uint64_t *digest);

/* PM_STALE, with a message. */
pm_status pm_contents_stale(const pm_snapshot *snapshot) __attribute__((cold));

/* How many bytes these blocks have: the last one of the extent may be short. */
uint64_t pm_contents_bytes(const pm_contents *p, uint64_t block, uint64_t end);

/* Reads blocks, from the memory file if it has them. */
pm_status pm_contents_read(const pm_snapshot *snapshot, const pm_contents *p, uint64_t block, uint64_t end,
                           uint8_t *to);

/* The hash of a block at rest. */
uint64_t pm_contents_hash(const pm_snapshot *snapshot, const pm_contents *p, uint64_t block, const uint8_t *bytes);

/* True if blocks have their hashes, of which the first is that of the block p->first. */
bool pm_contents_fit(const pm_snapshot *snapshot, const pm_contents *p, const uint64_t *hashes, uint64_t block,
                     uint64_t end, const uint8_t *bytes);

/* Verifies bytes of a slab, which the memory file has, and copies them. */
pm_status pm_contents_small(const pm_snapshot *snapshot, const pm_contents *p, uint8_t *to);

/* Verifies contents that are in the memory file, and so at this address. */
pm_status pm_contents_check(const pm_snapshot *snapshot, const pm_contents *p, const uint8_t *address);

#endif
