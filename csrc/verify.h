/* The whole committed state, checked against itself. */
#ifndef PM_VERIFY_H
#define PM_VERIFY_H

#include "transaction.h"

pm_status pm_verify(pm_store *store, pm_report **out);

#endif
