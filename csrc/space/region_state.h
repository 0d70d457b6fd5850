/*
 * The state of a region: the parts of space/ share it.
 */
#ifndef PM_REGION_STATE_H
#define PM_REGION_STATE_H

#include <stdatomic.h>

#include "dirty/policy.h"
#include "media/media.h"

enum {
    PM_FLAG_VERIFIED = 1,  /* this metadata page was checked when it was first read */
    PM_FLAG_EDITED = 2,    /* the metadata page changed since the last commit */
    PM_FLAG_EDITED_SLAB = 4, /* a slab's header changed since the last commit */
    PM_FLAG_LISTED = 8,      /* it is in the list `edited` */
    PM_FLAG_FLUSH = 16       /* the committed image was written through the cache since the last checkpoint */
};

enum { PM_DOUBLE_BUFFER_SAMPLES = 16 };

/* A double-buffered extent: it has two slots. See space/slots.h. */
typedef struct {
    uint64_t slot[2], length; /* slot[0] is the extent as the catalog knows it */
    unsigned entry, base;     /* in the table of slots; slot 0 is current if the entry's bit is base */
    unsigned current;         /* the slot with the committed bytes */
    unsigned mapped;          /* the slot at whose place programs see the extent */
    bool added, gone;         /* since the last commit */
    bool written;             /* the running commit has written the other slot, and makes it current */
    unsigned sparse;          /* commits in a row that found a few changes only */
    uint64_t flipped;         /* the commit that made this slot current; 0: a durable one */
    uint64_t table_hash;      /* of the slot that was written */
    /* Contributions to the digest: of the current slot's blocks, if known_contributions, and of the slot that was
     * written */
    pm_digest contributions, written_contributions;
    bool known_contributions;
    /* `sample` has lines of the current slot; they show whether most of it changed */
    bool sampled;
    uint64_t sample[PM_DOUBLE_BUFFER_SAMPLES][PM_LINE / 8];
    /* Room for the bytes after the last whole page of contents: see write_slot in commit/write_slots.c */
    uint8_t *tail;
} pm_double_buffer;

typedef struct {
    pm_media *media;
    uint8_t *live;
    const uint8_t *committed; /* the committed image; in a read-only store the same as live */
    /* The overlay: commits that the file's committed image does not have yet (space/overlay.h). NULL: commits are
     * synchronous */
    struct pm_overlay *overlay;
    uint8_t *flags;      /* PM_FLAG_* for each page */
    uint64_t size, store_id;
    uint64_t told; /* readers see this commit of this process, or a later one, as the newest; 0: none yet */
    bool snapshot; /* of another store: nothing changes what is mapped */
    /* The region has the addresses from live + first up to live + kept; first is 0 until it is closed */
    uint64_t first, kept;

    uint64_t *edited; /* metadata pages that were changed since the last commit, each once */
    size_t edited_count;
    uint64_t *flush;  /* pages with PM_FLAG_FLUSH */
    size_t flush_count;
    /* one mapping holds edited, flush, the policy's sets and flags, with room for so many pages */
    uint64_t notes_pages;
    pm_policy policy;

    pm_buffer **buffers; /* by offset */
    size_t buffer_count, buffer_room;

    pm_double_buffer **double_buffers; /* by the place of their mapped slot */
    size_t double_buffer_count;

    bool salvage;  /* damaged metadata hide nothing that can be found without them: */
    struct pm_leaves *leaves; /* the catalog's (space/leaves.h); NULL: the tree leads to them */
    bool map_lost;   /* the space map is an older one */
    bool unproved;   /* the digest is not that of what was found, */
    uint64_t wrong;  /* or differs from it in this place only; UINT64_MAX: in none, or many */
    bool slots_lost; /* the table of slots is damaged */

    void *fork_lock;            /* keeps the lock of a fork (space/region_fork.h); NULL: there is none */
    uint64_t shown_to_children; /* bytes of the region that children of an earlier opening may see */
    bool hidden_from_child;

    uint64_t search_from; /* a hint: no page below is usable; 0 after every commit and rollback */
    uint64_t taken[8];    /* pages of the space map that no map describes yet */
    size_t taken_count;
} pm_region;

/*
 * A buffer's life, by what owns its extent now and at the last commit:
 *
 *               now   last commit
 *   uncommitted yes   no      commit → committed, rollback → detached, delete → detached
 *   committed   yes   yes     delete → leaving
 *   leaving     no    yes     rollback → committed, commit → detached
 *   detached    no    no      until it is released
 */
struct pm_buffer {
    pm_store *store;
    void *address;
    uint64_t offset, length; /* of the extent's contents */
    uint64_t reach; /* no buffer up to this one, by offset, ends behind it */
    atomic_int living;
    bool writable, owned, owned_at_commit;
    bool fixed;     /* the program declares that these bytes never change */
    bool committed; /* it had an owner at some commit */
    int64_t first_fork, last_fork; /* the forks whose children may see the bytes; 0: none */
    bool shared;    /* readers of commits up to this one may map the bytes, though the extent has lost its owner: */
    uint64_t shown_until;
    bool mapped_in_child;           /* in the fork that is being made */
    bool done; /* it was released before the running commit or rollback began */
    /* a declared write set names it, or the core wrote to it: a commit with a declared write set scans it */
    bool only;
    bool only_all; /* such a commit scans all of it */
    /* this process has written or read the committed image of it, as far as commits compare it in full */
    bool readable;
    bool sampled;   /* the same, as far as commits compare a sample */
    bool seen;      /* this process has read all of it, as programs see it */
    unsigned whole_commits; /* so many commits in a row found most of its pages changed */
};

#endif
