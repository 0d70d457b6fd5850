/* Checks the whole committed state against its hashes and its digest. See pm_check. */
#ifndef PM_VERIFY_H
#define PM_VERIFY_H

#include "commit/store_state.h"

pm_status pm_verify(pm_store *store, pm_report **out);

/* The place whose contribution is wrong, if it is the only one in a difference of two digests; otherwise UINT64_MAX. */
uint64_t pm_verify_place(const pm_region *region, pm_digest difference);

#endif
