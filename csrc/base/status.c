#define _GNU_SOURCE
#include "base/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static _Thread_local char last_message[500];
static _Thread_local int last_errno;

pm_status pm_fail(pm_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_message, sizeof last_message, format, arguments);
    va_end(arguments);
    last_errno = 0;
    return status;
}

pm_status pm_fail_errno(const char *what)
{
    int error = errno;
    pm_status status = PM_IO;
    if (error == ENOSPC || error == EDQUOT || error == EFBIG) status = PM_NO_SPACE;
    if (error == ENOMEM) status = PM_NO_MEMORY;
    char text[128];
    struct rlimit limit;
    if (error == EFBIG && !getrlimit(RLIMIT_FSIZE, &limit) && limit.rlim_cur != RLIM_INFINITY)
        pm_fail(status, "%s: files are limited to %llu KiB in this process: raise the limit (ulimit -f) and try again",
                what, (unsigned long long)limit.rlim_cur / 1024);
    else /* The GNU variant returns the text, which need not be in the buffer. */
        pm_fail(status, "%s: %s", what, strerror_r(error, text, sizeof text));
    last_errno = error;
    return status;
}

pm_status pm_status_explain(pm_status status, const char *more)
{
    size_t length = strlen(last_message);
    snprintf(last_message + length, sizeof last_message - length, "%s", more);
    return status;
}

const char *pm_message(void)
{
    return last_message;
}

int pm_errno(void)
{
    return last_errno;
}

void pm_check_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "pmstore: internal error: %s is false at %s:%d; committed data are safe in the file\n", condition,
            file, line);
    abort();
}
