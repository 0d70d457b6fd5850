/*
 * After a failed write or sync the medium's contents are unknown, so the store refuses to write anything more (D7).
 * These functions note that, and return the status that they get.
 */
#ifndef PM_FAILED_H
#define PM_FAILED_H

#include "commit/store_state.h"

/* Every status but PM_OK is a failure. PM_NO_SPACE is not allowed: it tells callers that they may go on. */
static inline pm_status pm_failed(pm_store *store, pm_status status)
{
    PM_CHECK(status != PM_NO_SPACE);
    store->failed |= status != PM_OK;
    return status;
}

/* Every status but PM_OK and PM_NO_SPACE is a failure: a write that lacked space was not made. */
static inline pm_status pm_failed_unless_space(pm_store *store, pm_status status)
{
    return status == PM_NO_SPACE ? status : pm_failed(store, status);
}

/* PM_IO alone is a failure: a lack of memory, too, was found before anything was written. */
static inline pm_status pm_failed_if_io(pm_store *store, pm_status status)
{
    return status == PM_IO ? pm_failed(store, status) : status;
}

#endif
