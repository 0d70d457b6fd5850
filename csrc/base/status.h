/*
 * Two kinds of failure. A failure that the system or the disk can cause returns a pm_status through pm_fail(). A
 * failure that only a bug in this library can cause stops at PM_CHECK, which NDEBUG does not remove.
 */
#ifndef PM_STATUS_H
#define PM_STATUS_H

#include "pmstore.h"

/* Remembers text and errno for the calling thread, and returns `status`. */
pm_status pm_fail(pm_status status, const char *format, ...) __attribute__((format(printf, 2, 3), cold));

/* The same with the current errno: PM_NO_SPACE for a full disk or a file as large as may be, PM_NO_MEMORY, otherwise
 * PM_IO. */
pm_status pm_fail_errno(const char *what) __attribute__((cold));

/* Adds to the text that was remembered. */
pm_status pm_status_explain(pm_status status, const char *more) __attribute__((cold));

void pm_check_failed(const char *condition, const char *file, int line) __attribute__((noreturn, cold));

#define PM_CHECK(condition)                                       \
    do {                                                          \
        if (__builtin_expect(!(condition), 0))                    \
            pm_check_failed(#condition, __FILE__, __LINE__);      \
    } while (0)

#define PM_TRY(expression)                    \
    do {                                      \
        pm_status pm_try_ = (expression);     \
        if (pm_try_ != PM_OK) return pm_try_; \
    } while (0)

#endif
