/*
 * The pages of a store that a snapshot needs, as of one commit, in a memory file: steps 1 to 3 of reader/snapshot.h.
 */
#ifndef PM_PAGES_H
#define PM_PAGES_H

#include "dirty/page_set.h"
#include "reader/page_hashes.h"
#include "reader/source.h"

/* How many bytes of a page belong to an extent that ends there or later. The rest of its last page belongs to none. */
static inline size_t pm_pages_used(uint64_t page, uint64_t extent_end)
{
    uint64_t left = extent_end - page * PM_PAGE;
    return left < PM_PAGE ? (size_t)left : PM_PAGE;
}

/* A page of a table of hashes: so many bytes of it are to be hashed. hash 0: that was not done. */
typedef struct {
    uint64_t page, hash;
    size_t used;
} pm_table_page;

/* A double-buffered extent. */
typedef struct {
    uint64_t extent, length, current;
} pm_pages_pair;

/* The state of the copy. Zero but for source.fd and source.copy, which are -1, before the first pm_pages_reach. */
typedef struct {
    pm_source source;
    uint64_t loaded_pages;     /* of the region when it was begun */
    pm_page_set loaded, unapplied; /* the second: of these, the pages whose records have not been applied yet */
    uint64_t unapplied_from, unapplied_to;
    size_t seen;   /* so many of them were found in this pass, constant ones unless `contents` */
    uint64_t added; /* bytes copied in this pass */
    uint64_t small; /* bytes of small contents in this pass */
    unsigned flips; /* how often a double-buffered extent has left a slot */
    pm_page_set changed;     /* the pages that records in the log change */
    pm_page_hashes tables;   /* of the tables of large contents that no record changes */
    pm_table_page *queue;    /* those that are to be hashed at the end of this pass */
    size_t queued;
    uint8_t *read;           /* to hash them: TABLE_PAGES pages for each of two threads */
    bool log_read;
    bool complete;  /* the last pass left nothing missing, and no commit came since */
    pm_pages_pair *pairs;
    size_t pair_count;
    bool missed;

    /* These stay when it is begun anew. */
    const pm_extent_place *wanted;
    size_t wanted_count;
    bool contents; /* of the wanted extents: they are to be copied */
    bool follows;  /* it is a reader's */
    bool changing; /* it has all pages that records in the log change, too */
    bool lenient;  /* what is damaged or can't be read is left out: the core reports it when it is used */
    bool held;     /* a pause that the process that writes was asked for goes on when the newest commit is there */
    int64_t asked; /* the byte of the request; 0: there is none */
} pm_pages;

/* Goes to the newest commit; from the beginning, if commits were missed. PM_STALE if they come too quickly. */
pm_status pm_pages_reach(pm_pages *t, int fd);
void pm_pages_release(pm_pages *t, int fd); /* ends a pause */
void pm_pages_end(pm_pages *t); /* frees what it has */

/* The header pages of a store at rest: of the commit that was reached, and with an empty log. */
void pm_pages_header(const pm_pages *t, uint8_t *pages);

/* Where an extent's bytes are. *paired: it is double-buffered. */
uint64_t pm_pages_place(const pm_pages_pair *pairs, size_t count, uint64_t extent, uint64_t length, bool *paired);

bool pm_pages_wanted(const pm_pages *t, uint64_t extent, uint64_t length);

/* PM_CORRUPT, with a message. */
pm_status pm_pages_damaged(const char *what, uint64_t offset) __attribute__((cold));

#endif
