/*
 * DAX: the mapping of a file is the persistent memory itself, with no page cache between them.
 *
 * The medium `dax` stores to a mapping with MAP_SYNC. Its bytes become durable as those of media/memory.c, by flushes
 * and fences. MAP_SYNC means that a store to a page finds the file's metadata durable: before the kernel makes a page
 * writable, it makes durable where the page is, and how long the file is. It does not concern other pages. A header
 * that was writable before names a file that has grown since, so growth is synced by itself (pm_dax_grow).
 *
 * A mapping with DAX alone, without MAP_SYNC (virtio-pmem), is not enough: there only a sync makes anything durable.
 * Such a file gets the medium `file`, as one without DAX does.
 */
#ifndef PM_DAX_H
#define PM_DAX_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include "base/status.h"

typedef struct pm_media pm_media;

/* True if mappings of the file have no page cache. */
bool pm_dax_is(int fd);

/* Why a file can't have the medium `dax`. */
typedef enum {
    PM_DAX_GRANTED,
    PM_DAX_NONE,   /* there is a page cache */
    PM_DAX_LATE,   /* DAX without MAP_SYNC */
    PM_DAX_BLOCKS, /* the device has bad blocks: a store to one would be a signal. A write through the descriptor
                      gives it a sound block */
    PM_DAX_FAILED  /* there are no addresses or no memory to ask; the failure is remembered */
} pm_dax_answer;

/* Asks for MAP_SYNC. dax: what pm_dax_is says of the file. */
pm_dax_answer pm_dax_ask(int fd, bool dax, const struct stat *file);

/* The error for a file that can't have the medium: PM_INVALID. */
pm_status pm_dax_refused(pm_dax_answer answer, bool tmpfs);

/* True if stores are durable once they are in the processor's cache: if power fails, the machine writes the cache back
 * (eADR). Otherwise lines have to be flushed. */
bool pm_dax_keeps_cache(const struct stat *file);

/* The operation `grow` of the medium. */
pm_status pm_dax_grow(pm_media *media, uint64_t size);

#endif
