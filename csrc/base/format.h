/*
 * The bytes on the medium. Everything is little-endian; places are offsets, never pointers.
 *
 *   file offset     what
 *   0               header, copy A (one page)
 *   4096            header, copy B (one page)
 *   8192            region: region_size bytes, whole pages; its first page is the root
 *   log_offset      log: log_size bytes, whole pages, behind the region
 *
 * docs/format.md describes the same bytes for people.
 */
#ifndef PM_FORMAT_H
#define PM_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pmstore's format is little-endian, and so must be the machine"
#endif

enum {
    PM_PAGE = 4096,
    PM_LINE = 64,
    PM_REGION_START = 2 * PM_PAGE,
    PM_FORMAT_VERSION = 1, /* of what is written; that of all earlier ones is read (D28) */
    PM_PIECE = 4096 /* the body of a record is hashed in pieces of this size */
};

/* Limits of the table of slots: the header has a bit for each double-buffered extent. */
enum { PM_SLOT_PAGES = 8, PM_SLOTS_PER_PAGE = 126, PM_SLOTS_MOST = 1024 };

#define PM_REGION_LIMIT (UINT64_C(1) << 42) /* bytes; bounds every offset that is read from a file */

/* The digest of a state, over all of its hashes. See pm_digest_contribution. */
typedef struct {
    uint64_t sum, moment;
} pm_digest;

/* ---- header: two copies, each written and made durable by itself -------------------------------------------- */

static const uint8_t PM_MAGIC[8] = {'P', 'M', 'S', 'T', 'O', 'R', 'E', 0x1a};

enum { PM_HEADER_CLEAN = 1 /* the log is empty, and nothing was written since */ };

typedef struct {
    uint8_t magic[8];
    uint32_t version;
    uint32_t features; /* bits that a reader must know; none yet (D28) */
    uint64_t store_id; /* random; seeds the hashes at rest, so that no block of another store is valid here */
    uint64_t generation;
    uint64_t salt;     /* of the log; changes whenever the log is emptied */
    uint64_t sequence; /* sequence number of the last commit that the committed image has durably */
    uint64_t region_size;
    uint64_t log_offset;
    uint64_t log_size;
    pm_digest digest; /* of the state that the committed image has durably (I12) */
    uint64_t slots[PM_SLOTS_MOST / 64]; /* a bit for each entry of the table of slots: the slot that was current then */
    uint32_t flags;
    /* Format 0 ends here: the CRC-32C of all bytes before is in the place of write_features. */
    uint32_t write_features;    /* bits that a writer must know, and a reader need not; none yet */
    uint32_t optional_features; /* bits that nobody must know; none yet */
    uint8_t reserved[24];       /* 0; a writer keeps what it does not know, here and in the bits */
    uint32_t crc;               /* CRC-32C of all bytes before */
} pm_header;

_Static_assert(sizeof(pm_header) == 256 && offsetof(pm_header, crc) == 252, "header");
_Static_assert(offsetof(pm_header, version) == 8 && offsetof(pm_header, store_id) == 16 &&
               offsetof(pm_header, sequence) == 40 && offsetof(pm_header, log_size) == 64 &&
               offsetof(pm_header, digest) == 72 && offsetof(pm_header, slots) == 88 &&
               offsetof(pm_header, flags) == 216 && offsetof(pm_header, write_features) == 220, "header's fields");

/* The durable-sequence marker, in the page of header copy A: the log held this record durably. It is written after the
 * record is durable and before the committed image changes, with no order or sync of its own. Where the marker is
 * found, the record must be found too. */
enum { PM_DURABLE_MARKER_PLACE = 2048 };

typedef struct {
    uint64_t sequence;
    uint64_t checksum; /* of sequence, salt and store_id: see log/log.c */
} pm_durable_marker;

/* ---- log: records one after the other from log_offset; zeros are never valid ------------------------------ */

enum { PM_RECORD_MAGIC = 0x43524d50 /* "PMRC" */ };

/* PREPARE and RESOLVE are reserved for commits over several stores. */
enum { PM_RECORD_COMMIT = 1, PM_RECORD_PREPARE = 2, PM_RECORD_RESOLVE = 3 };

typedef struct {
    uint32_t magic;
    uint16_t kind;
    /* 1: logged ranges are whole pages. That at the end of an extent may be shorter; the rest of its page has no
     * meaning */
    uint16_t pages;
    uint64_t sequence;
    uint64_t salt;
    uint32_t length; /* of the record with header and padding; a multiple of 64 */
    uint32_t body;   /* bytes of items behind the header */
    uint64_t hash;   /* of the body, see pm_writer_body_hash */
    pm_digest digest; /* of the state after this commit (I12) */
    uint32_t behind; /* sequence - behind was known to be durable when this record was built (D6); 1 to sequence */
    uint32_t crc;    /* CRC-32C of all bytes before, started with the low half of the record's file offset */
} pm_record;

_Static_assert(sizeof(pm_record) == 64, "record");
_Static_assert(offsetof(pm_record, crc) == 60, "record.crc");

/* An item is a pm_item and its bytes. The next one follows at once. */
enum {
    PM_ITEM_LOGGED = 1, /* length bytes for region offset; the bytes follow */
    PM_ITEM_DIRECT,     /* an extent of length contents bytes was written in place; a pm_direct follows */
    /* The items themselves are length bytes at region offset; a pm_direct follows; the only item */
    PM_ITEM_OVERFLOW,
    PM_ITEM_SLOT /* as DIRECT, in a slot of a double-buffered extent; this slot is the current one from here on */
};

typedef struct {
    uint64_t offset;
    uint64_t kind_length; /* kind in the top 8 bits */
} pm_item;

typedef struct {
    uint64_t hash; /* DIRECT, SLOT: of the extent's table of block hashes. OVERFLOW: of the items, as of a body */
    uint64_t slot; /* SLOT: 2 * the entry in the table of slots + its bit from here on; otherwise 0 */
} pm_direct;

_Static_assert(sizeof(pm_item) == 16 && sizeof(pm_direct) == 16, "items");

static inline uint64_t pm_item_pack(unsigned kind, uint64_t length)
{
    return (uint64_t)kind << 56 | length;
}

/* ---- region: pages of metadata -------------------------------------------------------------------------------- */

enum { PM_TYPE_ROOT = 0x544f4f52, PM_TYPE_MAP_LIST = 0x5453494c, PM_TYPE_MAP = 0x2050414d, PM_TYPE_NODE = 0x45444f4e,
       PM_TYPE_SLAB = 0x42414c53, PM_TYPE_SLOTS = 0x544f4c53 };

typedef struct {
    uint64_t hash; /* checksum of the bytes behind it (in a slab: of the header), keyed with place and store_id */
    uint64_t self; /* region offset of this page */
    uint32_t type;
    uint32_t level; /* a node's height over the leaves */
} pm_page_head;

_Static_assert(sizeof(pm_page_head) == 24, "page head");

/* Two bits for every page of the region say what it is. */
enum { PM_PAGE_FREE = 0, PM_PAGE_DATA = 1, PM_PAGE_META = 2, PM_PAGE_SLAB = 3 };

enum {
    PM_MAP_PAGES = (PM_PAGE - PM_LINE) * 4,           /* pages that one map page describes */
    PM_MAP_LIST_SLOTS = (PM_PAGE - PM_LINE) / 8,      /* map pages that one list names */
    PM_ROOT_LISTS = 256,
    PM_SLAB_CLASSES = 9
};

typedef struct {
    pm_page_head head;
    uint64_t tree;   /* the catalog's root node */
    uint64_t keys;   /* entries in the catalog */
    uint64_t slabs[PM_SLAB_CLASSES];  /* per class, the first slab with a free block */
    uint64_t map_lists[PM_ROOT_LISTS];
    uint64_t slots[PM_SLOT_PAGES]; /* the table of slots; 0: none yet */
} pm_root;

_Static_assert(sizeof(pm_root) <= PM_PAGE, "root");

typedef struct {
    pm_page_head head;
    uint8_t reserved[PM_LINE - sizeof(pm_page_head)];
    uint64_t maps[PM_MAP_LIST_SLOTS]; /* 0: all its pages are free */
} pm_map_list;

typedef struct {
    pm_page_head head;
    uint8_t reserved[PM_LINE - sizeof(pm_page_head)];
    uint64_t words[(PM_PAGE - PM_LINE) / 8]; /* 32 pages each */
} pm_map;

/* A double-buffered extent: two slots, each with contents and table of hashes. The header, and the records after it,
 * say which slot is current. */
typedef struct {
    uint64_t extent; /* as its catalog entry knows it, and the first slot; 0: this entry is free */
    uint64_t other;
    uint64_t length; /* bytes of contents */
    uint64_t base;   /* the first slot is current if the entry's bit is this, 0 or 1; otherwise the other */
} pm_slot_pair;

typedef struct {
    pm_page_head head;
    uint8_t reserved[PM_LINE - sizeof(pm_page_head)];
    pm_slot_pair pairs[PM_SLOTS_PER_PAGE];
} pm_slot_table;

typedef struct {
    pm_page_head head; /* level: the class */
    uint64_t used;     /* a bit per block */
    uint64_t next, previous; /* in the list of slabs of this class that have a free block */
    uint64_t listed;         /* 1 if in it */
    uint8_t reserved[8];
} pm_slab;

_Static_assert(sizeof(pm_map_list) == PM_PAGE && sizeof(pm_map) == PM_PAGE && sizeof(pm_slot_table) == PM_PAGE &&
               sizeof(pm_slab) == PM_LINE && PM_SLOT_PAGES * PM_SLOTS_PER_PAGE <= PM_SLOTS_MOST, "pages");

/* ---- region: extents ------------------------------------------------------------------------------------------ */

/* Contents, padded to 8 bytes, then one keyed checksum for each block of PM_BLOCK bytes of contents. */
static inline uint64_t pm_extent_blocks(uint64_t length)
{
    return (length + PM_PAGE - 1) / PM_PAGE;
}
static inline uint64_t pm_extent_table(uint64_t length) /* where the hashes begin, from the extent's offset */
{
    return (length + 7) & ~UINT64_C(7);
}
static inline uint64_t pm_extent_size(uint64_t length)
{
    return pm_extent_table(length) + 8 * pm_extent_blocks(length);
}

/* True if a block of a slab holds the extent. */
static inline bool pm_extent_is_small(uint64_t length)
{
    return pm_extent_size(length) <= 2016;
}

static inline uint64_t pm_extent_pages(uint64_t length)
{
    return (pm_extent_size(length) + PM_PAGE - 1) / PM_PAGE;
}

/* Binds a hash to a place, and to a store, a salt or both, so that bytes that belong elsewhere do not verify (I5). */
static inline uint64_t pm_keyed_checksum(uint64_t hash, uint64_t place, uint64_t key)
{
    uint64_t x = place + key * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return hash ^ x ^ x >> 31;
}

/* ---- the digest of a state ------------------------------------------------------------------------------------ */

/* A state's digest has a contribution for each hash at rest that the state uses, bound to the hash's place: of metadata
 * pages, of slab headers, and of every block of contents that an entry owns. A lost write leaves an older version,
 * which verifies by itself; the digest shows that it is not the committed version. Contributions commute, so a commit
 * exchanges only those of what it changes. If a single contribution is wrong, moment / sum is its place. */
static inline uint64_t pm_digest_contribution(uint64_t place, uint64_t hash)
{
    uint64_t x = hash + place * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 32) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 29) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 32;
}
/* contribution: or a difference of two */
static inline void pm_digest_add(pm_digest *digest, uint64_t place, uint64_t contribution)
{
    digest->sum += contribution;
    digest->moment += contribution * (place / PM_LINE);
}
static inline pm_digest pm_digest_plus(pm_digest a, pm_digest b)
{
    return (pm_digest){a.sum + b.sum, a.moment + b.moment};
}
static inline pm_digest pm_digest_minus(pm_digest a, pm_digest b)
{
    return (pm_digest){a.sum - b.sum, a.moment - b.moment};
}
static inline int pm_digest_equal(pm_digest a, pm_digest b)
{
    return a.sum == b.sum && a.moment == b.moment;
}

static inline uint64_t pm_round_up(uint64_t x, uint64_t to)
{
    return (x + to - 1) / to * to;
}

#endif
