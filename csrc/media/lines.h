/*
 * The processor's instructions that take lines out of its caches, and that order stores. No other file names them.
 *
 *   x86-64    clwb, clflushopt, clflush; non-temporal stores of 64, 32 or 16 bytes; sfence
 *   aarch64   dc cvap (to the point of persistence), dc cvac (to memory); dsb. Its non-temporal stores are a hint, so
 *             that streaming is a copy and then a flush
 *   others    none: memory is what tmpfs is, and its bytes outlive the process
 */
#ifndef PM_LINES_H
#define PM_LINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef void pm_lines_flush(const void *address, uint64_t lines); /* whole lines of 64 bytes, from the first one */
typedef void pm_lines_stream(void *destination, const void *source, size_t length);

/* The flush of this name, or the best one for NULL. NULL: there is none. known: whether a processor of this kind may
 * have it. */
pm_lines_flush *pm_lines_find_flush(const char *name, bool *known);

/* The widest copy past the cache. Bytes before and after the whole lines go through the cache and are flushed. NULL:
 * there is none. */
pm_lines_stream *pm_lines_find_stream(void);

/* Earlier stores, streams and flushes of this thread come before its later stores. durable: what it flushed has also
 * arrived. */
void pm_lines_order(bool durable);

#endif
