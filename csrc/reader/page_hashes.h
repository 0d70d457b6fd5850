/*
 * Hashes of pages that a snapshot does not copy: of the tables of hashes of large contents. When contents are asked
 * for, their table is read from the store's file and compared (I20).
 */
#ifndef PM_PAGE_HASHES_H
#define PM_PAGE_HASHES_H

#include <stdbool.h>

#include "base/status.h"

typedef struct {
    uint64_t page, hash; /* page 0: unused; hash 0: it was removed */
} pm_page_hash;

/* Zero: empty. */
typedef struct {
    pm_page_hash *slots;
    size_t size, used; /* a power of two, or 0; at most half of it is used */
} pm_page_hashes;

uint64_t pm_page_hashes_of(const void *bytes, size_t count); /* the hash of a page's first bytes: never 0 */
pm_status pm_page_hashes_add(pm_page_hashes *hashes, pm_page_hash one);
void pm_page_hashes_remove(pm_page_hashes *hashes, uint64_t page);
uint64_t pm_page_hashes_at(const pm_page_hashes *hashes, uint64_t page); /* 0: it is not there */
/* True if the page is there, and these are its first bytes. */
bool pm_page_hashes_fit(const pm_page_hashes *hashes, uint64_t page, const void *bytes, size_t count);
pm_status pm_page_hashes_copy(pm_page_hashes *to, const pm_page_hashes *from);
void pm_page_hashes_free(pm_page_hashes *hashes);

#endif
