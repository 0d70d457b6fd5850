/*
 * Binary search.
 */
#ifndef PM_SEARCH_H
#define PM_SEARCH_H

#include <stddef.h>

/* The first i of [0, count) for which `reached`, an expression of i, is true; count if it is true for none. It must be
 * false up to some i, and true from there on. */
#define PM_FIRST(i, count, reached)                        \
    ({                                                     \
        size_t pm_low = 0, pm_high = (count);              \
        while (pm_low < pm_high) {                         \
            size_t i = pm_low + (pm_high - pm_low) / 2;    \
            if (reached) pm_high = i;                      \
            else pm_low = i + 1;                           \
        }                                                  \
        pm_low;                                            \
    })

#endif
