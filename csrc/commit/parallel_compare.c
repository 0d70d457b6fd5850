#include "commit/parallel_compare.h"

#include "base/compare.h"

enum { WORD = 64 /* pages */, PARTS = sizeof((pm_parallel_compare *)0)->compared / sizeof(atomic_bool) };

static uint64_t differing(const pm_parallel_compare *s, uint64_t pages, uint64_t word)
{
    uint64_t kept = 0;
    for (uint64_t rest = pages; rest; rest &= rest - 1) {
        uint64_t bit = rest & -rest, at = (word * WORD + (uint64_t)__builtin_ctzll(rest)) * PM_PAGE;
        if (!pm_compare_equal(s->region->live + at, s->region->committed + s->committed + (at - s->place))) kept |= bit;
    }
    return kept;
}

static void compare_word(const pm_parallel_compare *s, uint64_t word)
{
    uint64_t *bits = &s->region->policy.dirty.bits[word], own = ~UINT64_C(0), start = word * WORD;
    if (start < s->from) own &= ~UINT64_C(0) << (s->from - start);
    if (start + WORD > s->to) own &= ~UINT64_C(0) >> (start + WORD - s->to);
    *bits = (*bits & ~own) | differing(s, s->all ? own : *bits & own, word);
}

static bool compare_next(pm_parallel_compare *s)
{
    uint64_t part = s->next++, word = s->first + part * s->part, end = word + s->part;
    if (word * WORD >= s->to) return false;
    for (; word < end && word * WORD < s->to; word++) compare_word(s, word);
    s->compared[part] = true;
    return true;
}

static void compare_all(void *argument)
{
    while (compare_next(argument)) continue;
}

void pm_parallel_compare_begin(pm_parallel_compare *s, pm_region *region, pm_helper *helper, uint64_t place,
                               uint64_t committed, uint64_t length, bool all)
{
    s->region = region;
    s->helper = helper;
    s->place = place, s->committed = committed;
    s->all = all;
    s->from = place / PM_PAGE, s->to = s->from + length / PM_PAGE;
    s->first = s->from / WORD;
    s->part = (s->to - s->first * WORD) / WORD / PARTS + 1;
    atomic_init(&s->next, 0);
    for (int part = 0; part < PARTS; part++) atomic_init(&s->compared[part], false);
    if (length % PM_PAGE) pm_page_set_add(&region->policy.dirty, s->to, s->to + 1);
    pm_helper_offer(helper, compare_all, s);
}

uint64_t pm_parallel_compare_next(pm_parallel_compare *s, uint64_t page, uint64_t end)
{
    while (page < s->to) {
        uint64_t part = (page / WORD - s->first) / s->part, part_end = (s->first + (part + 1) * s->part) * WORD;
        /* If no part is left, the other thread compares this one. */
        while (!s->compared[part])
            if (!compare_next(s)) pm_helper_withdraw(s->helper);
        if (part_end > s->to) part_end = s->to;
        if ((page = pm_page_set_next(&s->region->policy.dirty, page, part_end)) < part_end) break;
    }
    return page < end ? page : end;
}

void pm_parallel_compare_end(pm_parallel_compare *s)
{
    compare_all(s);
    pm_helper_withdraw(s->helper);
}
