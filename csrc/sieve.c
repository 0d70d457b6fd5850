#include "sieve.h"

#include "compare.h"

enum { WORD = 64 /* pages */, PARTS = sizeof((pm_sieve *)0)->compared / sizeof(atomic_bool) };

static uint64_t differing(const pm_sieve *s, uint64_t pages, uint64_t word)
{
    uint64_t kept = 0;
    for (uint64_t rest = pages; rest; rest &= rest - 1) {
        uint64_t bit = rest & -rest, at = (word * WORD + (uint64_t)__builtin_ctzll(rest)) * PM_PAGE;
        if (!pm_page_equal(s->region->live + at, s->region->home + s->home + (at - s->place))) kept |= bit;
    }
    return kept;
}

static void compare_word(const pm_sieve *s, uint64_t word)
{
    uint64_t *bits = &s->region->watches.dirty.bits[word], own = ~UINT64_C(0), start = word * WORD;
    if (start < s->from) own &= ~UINT64_C(0) << (s->from - start);
    if (start + WORD > s->to) own &= ~UINT64_C(0) >> (start + WORD - s->to);
    *bits = (*bits & ~own) | differing(s, s->all ? own : *bits & own, word);
}

static bool compare_next(pm_sieve *s)
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

void pm_sieve_begin(pm_sieve *s, pm_region *region, pm_helper *helper, uint64_t place, uint64_t home, uint64_t length,
                    bool all)
{
    s->region = region;
    s->helper = helper;
    s->place = place, s->home = home;
    s->all = all;
    s->from = place / PM_PAGE, s->to = s->from + length / PM_PAGE;
    s->first = s->from / WORD;
    s->part = (s->to - s->first * WORD) / WORD / PARTS + 1;
    atomic_init(&s->next, 0);
    for (int part = 0; part < PARTS; part++) atomic_init(&s->compared[part], false);
    if (length % PM_PAGE) pm_page_add(&region->watches.dirty, s->to, s->to + 1);
    pm_offer(helper, compare_all, s);
}

uint64_t pm_sieve_next(pm_sieve *s, uint64_t page, uint64_t end)
{
    while (page < s->to && page < end) {
        uint64_t part = (page / WORD - s->first) / s->part, part_end = (s->first + (part + 1) * s->part) * WORD;
        /* If no part is left, somebody is at this one. */
        while (!s->compared[part])
            if (!compare_next(s)) pm_withdraw(s->helper);
        if (part_end > s->to) part_end = s->to;
        if ((page = pm_page_next(&s->region->watches.dirty, page, part_end)) < part_end) break;
    }
    return page < end ? page : end;
}

void pm_sieve_end(pm_sieve *s)
{
    compare_all(s);
    pm_withdraw(s->helper);
}
