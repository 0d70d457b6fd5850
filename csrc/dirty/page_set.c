#include "dirty/page_set.h"

void pm_page_set_add(pm_page_set *set, uint64_t page, uint64_t end)
{
    for (; page < end && page % 64; page++) set->bits[page / 64] |= UINT64_C(1) << page % 64;
    for (; page + 64 <= end; page += 64) set->bits[page / 64] = UINT64_MAX;
    for (; page < end; page++) set->bits[page / 64] |= UINT64_C(1) << page % 64;
}

void pm_page_set_clear(pm_page_set *set, uint64_t page, uint64_t end)
{
    for (; page < end && page % 64; page++) set->bits[page / 64] &= ~(UINT64_C(1) << page % 64);
    for (; page + 64 <= end; page += 64) set->bits[page / 64] = 0;
    for (; page < end; page++) set->bits[page / 64] &= ~(UINT64_C(1) << page % 64);
}

uint64_t pm_page_set_next(const pm_page_set *set, uint64_t page, uint64_t end)
{
    while (page < end) {
        uint64_t rest = set->bits[page / 64] >> page % 64;
        if (rest) {
            page += (uint64_t)__builtin_ctzll(rest);
            return page < end ? page : end;
        }
        page = page - page % 64 + 64;
    }
    return end;
}

uint64_t pm_page_set_next_absent(const pm_page_set *set, uint64_t page, uint64_t end)
{
    while (page < end && pm_page_set_has(set, page)) page++;
    return page;
}

uint64_t pm_page_set_count(const pm_page_set *set, uint64_t page, uint64_t end)
{
    uint64_t count = 0;
    for (; page < end && page % 64; page++) count += pm_page_set_has(set, page);
    for (; page + 64 <= end; page += 64) count += (uint64_t)__builtin_popcountll(set->bits[page / 64]);
    for (; page < end; page++) count += pm_page_set_has(set, page);
    return count;
}
