/*
 * Recovery: what a crash left in the log is brought home.
 *
 * I4  Idempotent and complete: everything adopted is written again and synced, then a header with a new salt and an
 *     empty log becomes durable, and only then is a commit possible. A crash in it, then another recovery, gives the
 *     same state.
 * I8  It scans first, then applies. A run is not applied where a later record declares a direct write.
 */
#ifndef PM_RECOVERY_H
#define PM_RECOVERY_H

#include "transaction.h"

/* On a read-only store the private mapping is brought up to date, and the file stays as it is. */
pm_status pm_recover(pm_store *store);

#endif
