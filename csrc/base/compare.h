/*
 * Compares two pages: whether they are equal, and which lines differ.
 */
#ifndef PM_COMPARE_H
#define PM_COMPARE_H

#include <stdbool.h>
#include <stdint.h>

/* True if two pages of 4096 bytes are equal. Any alignment will do. If another thread changes one of them meanwhile,
 * the answer may be either. */
bool pm_compare_equal(const void *a, const void *b);

/* One bit for each of the 64 lines that differs. */
uint64_t pm_compare_changed_lines(const void *a, const void *b);

#endif
