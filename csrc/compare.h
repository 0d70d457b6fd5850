/*
 * Whether two pages hold the same bytes, and in which lines they don't.
 */
#ifndef PM_COMPARE_H
#define PM_COMPARE_H

#include <stdbool.h>
#include <stdint.h>

/* Both of 4096 bytes, at any alignment. Another thread may be changing one of them: then it is one answer or the
 * other. */
bool pm_page_equal(const void *a, const void *b);

/* One bit for each of the 64 lines that differs. */
uint64_t pm_page_changed_lines(const void *a, const void *b);

#endif
