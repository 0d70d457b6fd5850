/*
 * Address space of the process: ranges that are kept for something that grows, mappings that may move, pages that are
 * dropped. Knows no files.
 */
#ifndef PM_ADDRESS_H
#define PM_ADDRESS_H

#include <stdbool.h>
#include <stdint.h>

#include "status.h"

/* Addresses that nothing else takes, and nothing may touch; NULL with errno if there are none. alone: where the
 * addresses behind it are likely to stay free, for pm_address_keep_more. */
void *pm_address_keep(uint64_t size, bool alone);

/* The addresses right behind what was kept, too. False if they are in use. */
bool pm_address_keep_more(void *behind, uint64_t size);

/* Makes a mapping larger; it may move. at NULL: zeroed memory. NULL with errno: nothing changed. */
void *pm_address_resize(void *at, uint64_t old_size, uint64_t size);

/* Drops whole pages of a private mapping: what is mapped there shows through. Locked pages too (mlockall), which may
 * then be locked no longer. */
void pm_address_drop(void *at, uint64_t length);

/* Whole pages become this process's own, with the bytes that they show; other threads may be writing to them. False
 * with errno if some could not. */
bool pm_address_own(void *at, uint64_t length);

/* A mapping of so many bytes was refused, with the current errno: names the limit, and what to do. */
pm_status pm_address_refused(const char *what, uint64_t bytes) __attribute__((cold));

#endif
