/*
 * Writing to the committed image in the file.
 */
#ifndef PM_REGION_IMAGE_H
#define PM_REGION_IMAGE_H

#include "space/overlay.h"

/* Writes committed bytes to the committed image. Streamed bytes need no flush at the checkpoint. */
pm_status pm_region_write(pm_region *region, uint64_t offset, const void *source, uint64_t length, pm_write_how how);
/* Streams whole pages, which a program may be changing, and returns the hashes that their blocks have at rest. After a
 * failure the hashes mean nothing. */
pm_status pm_region_write_hashed(pm_region *region, uint64_t offset, const uint8_t *source, uint64_t pages,
                                 uint64_t *hashes);
/* flushes everything that was written through the cache; a fence must follow */
void pm_region_flush(pm_region *region);

/* Finalizes a logged range of a commit before the overlay's snapshot; newer commits come first. Bytes that no newer
 * commit has written are written to the committed image, and their number is added to *written. */
pm_status pm_region_image_finalize(pm_region *region, uint64_t offset, const uint8_t *source, uint64_t length,
                                   uint64_t *written);

#endif
