/*
 * Readers in other processes (reader/snapshot.h) and the process that writes. A reader needs no permission to write, so
 * the two know of each other by locks on bytes of the file that data never reach.
 *
 * I21  A commit never waits for a reader, with one exception. If commits change pages as quickly as a reader copies
 *      them, the reader asks for a pause. A pause takes at most PAUSE_MOST, and there is at most one in POLL_INTERVAL.
 *      After a pause that no reader ended, pauses become rarer, down to one in IGNORED_MOST. A request is valid for
 *      ASKED_MOST.
 *
 * The writer looks for locks once in POLL_INTERVAL, before a commit. In other commits, the locks cost only the reading
 * of a clock.
 */
#ifndef PM_READERS_H
#define PM_READERS_H

#include "commit/store_state.h"

/* ---- the process that writes ---- */

void pm_readers_poll(pm_store *store); /* before a commit, without the store's mutex */

/* The durable marker names this commit now. Wakes those that wait for a commit. Under the store's mutex. */
void pm_readers_told(pm_store *store, uint64_t sequence);

/* The store is recovered. Before that, readers adopt what recovery adopts. */
void pm_readers_begin(pm_store *store);
bool pm_readers_begun(int fd); /* for readers */

/* ---- readers ---- */

/* Asks for a pause. Returns the byte of the request, which ends it. Requests of other readers, which may share the open
 * file, stay. */
int64_t pm_readers_ask(int fd);
void pm_readers_ask_no_more(int fd, int64_t byte);
/* Asks, and waits until the pause begins. False: it has waited for so long that the pause seems to be refused. */
bool pm_readers_ask_and_wait(int fd, int64_t *byte);
void pm_readers_nap(void);      /* a tenth of a millisecond */
uint64_t pm_readers_time(void); /* nanoseconds */

/* The durable marker, mapped to be waited for; NULL: it can't be mapped. Only the kernel touches it, so that a file
 * that was cut short is an error. */
uint8_t *pm_readers_map(int fd);
void pm_readers_unmap(uint8_t *marker);

/* Waits until the low half of the durable marker's sequence number is no longer `seen`, or for so many nanoseconds.
 * They are less than a second. Returns the error of the kernel, or 0. EFAULT: the file can't be waited for. EINTR: a
 * signal came. */
int pm_readers_wait(int fd, uint8_t *marker, uint32_t seen, uint64_t nanoseconds);

#endif
