/*
 * The committed image in the file: records are applied to it, and it is made durable.
 */
#ifndef PM_IMAGE_H
#define PM_IMAGE_H

#include "commit/store_state.h"

/* Applies the logged ranges of a record's body, not durably. PM_NO_SPACE: a copy of the file shares its blocks. */
pm_status pm_image_apply(pm_store *store, const uint8_t *body, uint64_t length);

/* Makes the committed image durable. */
pm_status pm_image_sync(pm_store *store);

/* Asks the kernel, now and then, to write back what was written to the image. before: the end of the log without the
 * record that was applied last. */
pm_status pm_image_begin_write_back(pm_store *store, uint64_t before);

/* Leaves what was written so far to the kernel: it is not asked to write it back. */
void pm_image_forget_range(pm_store *store);

#endif
