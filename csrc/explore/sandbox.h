/*
 * The sandbox: a crash image in an anonymous file in memory, in which it is recovered. There is one for all states, so
 * that a state needs no process, no file and no copy of the store.
 */
#ifndef PM_SANDBOX_H
#define PM_SANDBOX_H

#include "explore/model.h"

typedef struct {
    int fd;
    pm_media_kind media;
    uint8_t *image;    /* the file, mapped */
    uint64_t capacity; /* mapped */
    uint64_t size;     /* of the file */
    pm_trace *trace;   /* of the last recovery */
} pm_sandbox;

pm_status pm_sandbox_init(pm_sandbox *sandbox, uint64_t capacity, pm_media_kind media);
void pm_sandbox_free(pm_sandbox *sandbox);

/* Makes the file `size` bytes long; new bytes are copied from `source`. */
pm_status pm_sandbox_fit(pm_sandbox *sandbox, uint64_t size, const uint8_t *source);
/* Undoes what the last recovery wrote. */
void pm_sandbox_restore(pm_sandbox *sandbox, uint64_t size, const uint8_t *source);

#endif
