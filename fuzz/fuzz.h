/*
 * Fuzzing of damaged files. An input is a head and a list of edits on one of the base stores, which the harness makes
 * itself when it starts. So inputs stay small, and a mutation of an input is a mutation of what a file means.
 *
 *   bases.c   the base stores, and what is known of them
 *   edits.c   applies an input's edits to a copy of a base; computes the checksums as a hostile writer would
 *   use.c     everything that is done with a store: walk, check, change
 *   fuzz.c    one execution, and the oracle
 *   mutate.c  mutates inputs edit by edit
 *   driver.c  main() where there is no libFuzzer
 */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdbool.h>
#include <stdnoreturn.h>

#include "base/format.h"
#include "pmstore.h"

/* ---- inputs ------------------------------------------------------------------------------------------------- */

enum {
    FUZZ_HOSTILE = 1,     /* all hashes are set right after the edits; otherwise the edits are damage */
    FUZZ_FILE = 2,        /* opened as the medium "file" */
    FUZZ_DISCARD = 4,     /* the changed store ends in a crash, not in a close */
    FUZZ_KEEP_BUFFER = 8, /* a buffer outlives its store */
    FUZZ_OTHER_MEDIUM = 16 /* the last opening is as the other medium */
};

typedef struct {
    uint8_t flags, base;
    uint16_t seed; /* of what is done with the store */
} fuzz_head;

typedef struct {
    uint8_t op, what;
    uint16_t index, at, size;
    uint64_t value;
} fuzz_edit;

_Static_assert(sizeof(fuzz_head) == 4 && sizeof(fuzz_edit) == 16, "inputs are read as they stand");

enum { FUZZ_EDITS = 48, FUZZ_MOST = sizeof(fuzz_head) + FUZZ_EDITS * sizeof(fuzz_edit) };

enum {
    OP_FLIP,
    OP_FILL,
    OP_COPY,
    OP_SWAP,
    OP_FOREIGN,
    OP_STALE,
    OP_TRUNCATE,
    OP_EXTEND,
    OP_TEAR,
    DAMAGE_OPS,
    OP_HEADER = DAMAGE_OPS,
    OP_PAGE,
    OP_CELL,
    OP_MAP,
    OP_ROOT,
    OP_SLAB,
    OP_RECORD,
    OP_ITEM,
    OP_MARKER,
    OP_PLANT,
    OP_RAW,
    ALL_OPS
};

/* ---- bases ---------------------------------------------------------------------------------------------------- */

enum { FUZZ_STATES = 16, FUZZ_RECORDS = 32, FUZZ_EXTENTS = 256, FUZZ_PAGES = 256 };

typedef struct {
    uint64_t start, length;
} fuzz_range;

typedef struct {
    uint64_t sequence, digest;
} fuzz_state;

typedef struct {
    const char *name;
    uint8_t *bytes, *old; /* the file, and the file some commits earlier */
    uint64_t size, old_size;
    pm_header header;
    fuzz_state states[FUZZ_STATES]; /* the commits that its log holds, and the one before; the newest is the last */
    fuzz_range records[FUZZ_RECORDS]; /* with their headers */
    fuzz_range outside[FUZZ_EXTENTS]; /* what records declare outside the log */
    fuzz_range extents[FUZZ_EXTENTS]; /* contents of the catalog's entries, from the region's start */
    uint32_t pages[FUZZ_PAGES];       /* region offsets of metadata pages, roots first */
    size_t state_count, record_count, outside_count, extent_count, page_count;
} fuzz_base;

extern fuzz_base fuzz_bases[];
extern size_t fuzz_base_count;
void fuzz_make_bases(void);
uint64_t fuzz_marker_checksum(const pm_header *header, uint64_t sequence);

/* ---- edits ---------------------------------------------------------------------------------------------------- */

/* Applies edits to the bytes of a base; returns the file's new size. bytes: room for fuzz_room. */
uint64_t fuzz_apply(const fuzz_base *base, bool hostile, const fuzz_edit *edits, size_t count, uint8_t *bytes);
enum { FUZZ_ROOM = 8 << 20, FUZZ_EXTEND = 1 << 20 };

/* ---- use ------------------------------------------------------------------------------------------------------- */

enum { FUZZ_KEYS = 1024 };

typedef struct {
    uint8_t key[PM_KEY_MAX];
    uint16_t key_length;
    uint64_t hash; /* of the key, its entry and its contents */
    pm_entry entry;
} fuzz_row;

typedef struct {
    pm_status status; /* the first that was not PM_OK */
    uint64_t sequence, digest; /* the sum of the rows' hashes */
    size_t count;
    fuzz_row rows[FUZZ_KEYS]; /* the first of them */
} fuzz_view;

/* Reads all that there is. The digest does not depend on the order in which things were done. */
void fuzz_walk(pm_store *store, fuzz_view *view, bool touch);

/* Problems that pm_check reports; PM_OK and 0: sound. */
pm_status fuzz_check(pm_store *store, size_t *problems, bool say);

/* Changes the store; the view follows. strict: whatever fails but for want of space is a failure of the store. */
void fuzz_change(pm_store *store, fuzz_view *view, uint64_t *random, unsigned steps, bool strict);

void fuzz_rolled_back(void);
void fuzz_let_go(bool strict); /* of the buffers that changes have left open */

uint64_t fuzz_hash_row(const uint8_t *key, size_t key_length, const pm_entry *entry, const uint8_t *meta,
                       const void *contents);
uint64_t fuzz_random(uint64_t *state);
void fuzz_reset_ids(uint64_t seed); /* stores draw their ids and salts from this: the same input does the same again */

noreturn void fuzz_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
