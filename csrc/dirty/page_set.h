/*
 * Sets of pages.
 */
#ifndef PM_PAGE_SET_H
#define PM_PAGE_SET_H

#include <stdbool.h>

#include "base/format.h"

/* A set of pages: bit 0 of bits[0] is the page at `base`. */
typedef struct {
    const uint8_t *base;
    uint64_t *bits;
} pm_page_set;

static inline bool pm_page_set_has(const pm_page_set *set, uint64_t page)
{
    return set->bits[page / 64] >> page % 64 & 1;
}

/* The first page in [page, end) that is in the set; `end` if none is. */
uint64_t pm_page_set_next(const pm_page_set *set, uint64_t page, uint64_t end);
/* The first page in [page, end) that is not in the set; `end` if all are. */
uint64_t pm_page_set_next_absent(const pm_page_set *set, uint64_t page, uint64_t end);
uint64_t pm_page_set_count(const pm_page_set *set, uint64_t page, uint64_t end);
void pm_page_set_add(pm_page_set *set, uint64_t page, uint64_t end);
void pm_page_set_clear(pm_page_set *set, uint64_t page, uint64_t end);

#endif
