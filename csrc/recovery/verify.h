/* Checks the whole committed state against its hashes and its digest. See pm_check. */
#ifndef PM_VERIFY_H
#define PM_VERIFY_H

#include "commit/store_state.h"

pm_status pm_verify(pm_store *store, pm_report **out);

#endif
