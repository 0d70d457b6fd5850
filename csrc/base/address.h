/*
 * Address space of the process: ranges that are reserved for growth, mappings that may move, pages that are dropped.
 * This unit knows no files.
 */
#ifndef PM_ADDRESS_H
#define PM_ADDRESS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

/* Reserves addresses: nothing else takes them, and they must not be touched. NULL with errno if there are none. alone:
 * at a place where the addresses behind are likely to stay free, for pm_address_keep_more. */
void *pm_address_keep(uint64_t size, bool alone);

/* Reserves the addresses right behind a reserved range, too. False with errno if not; EEXIST: they are in use. */
bool pm_address_keep_more(void *behind, uint64_t size);

/* Makes a mapping larger; it may move. at NULL: zeroed memory. NULL with errno: nothing changed. */
void *pm_address_resize(void *at, uint64_t old_size, uint64_t size);

/* Drops whole pages of a private mapping, so that the mapped file shows through. It also drops locked pages (mlockall),
 * which may be unlocked by that. */
void pm_address_drop(void *at, uint64_t length);

/* Makes whole pages private, with the bytes that they show, while other threads may write to them. False with errno if
 * some pages could not be made private. */
bool pm_address_own(void *at, uint64_t length);

/* A mapping of so many bytes was refused with the current errno: the message names the limit and a remedy. */
pm_status pm_address_refused(const char *what, uint64_t bytes) __attribute__((cold));

#endif
