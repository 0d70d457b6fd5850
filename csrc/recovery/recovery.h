/*
 * Recovery: the records that a crash left in the log are applied to the committed image.
 *
 * I4  Idempotent and complete: everything adopted is written again and synced, then a header with a new salt and an
 *     empty log becomes durable, and only then is a commit possible. If recovery crashes, the next one gives the same
 *     state.
 * I8  Recovery scans first, then applies. A logged range is not applied where a later record declares a direct write.
 */
#ifndef PM_RECOVERY_H
#define PM_RECOVERY_H

#include "commit/store_state.h"

/* ---- the log, as recovery adopts it ---- */

typedef struct {
    const uint8_t *body;
    uint64_t length;
    uint64_t place, record_length; /* of the record: its file offset and its bytes */
    uint64_t overflow;         /* file offset of the body, if it is not in the record */
    pm_digest digest; /* of the state after it */
    uint64_t sequence;
    bool pages; /* its logged ranges are whole pages, or end where an extent does */
} pm_recovery_body;

typedef struct {
    pm_recovery_body *bodies; /* bodies of the valid records, in order */
    size_t count, room;
    /* up to this sequence, records are known to have been durable, with everything that they declare */
    uint64_t durable;
    uint64_t recorded;  /* the same, by header and records alone: the marker itself may not be durable */
    uint32_t *declared; /* per page of the region: 1 + the last record that declares it; NULL: none does */
} pm_recovery_log;

/* Adds a valid record, which stands at this file offset. */
pm_status pm_recovery_add(pm_recovery_log *found, const pm_record *record, uint64_t place);

/* Finds the records that recovery adopts: from the header on, up to the last whole one whose declared contents are
 * there. It reads the log, and what the newest records declare. Only the fields media, log and region of the store are
 * used; log.sequence and log.digest are then those of the last record. The caller frees `bodies`. */
pm_status pm_recovery_scan(pm_store *store, pm_recovery_log *found);

/* On a read-only store the private mapping is brought up to date, and the file stays as it is. PM_CORRUPT,
 * PM_UNREADABLE, PM_NO_SPACE, PM_NO_MEMORY, PM_IO. */
pm_status pm_recovery_run(pm_store *store);

#endif
