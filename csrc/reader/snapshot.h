/*
 * Snapshots: one commit of a store that another process may be changing, in memory of this process.
 *
 *   the store's file                                     the memory file
 *   header, durable marker ── which commit is newest
 *   pages ────────────────── 1 copied, at any moment ──▶ pages of any age
 *   log ──────────────────── 2 records, applied ───────▶ pages of one commit, T
 *                            3 which pages are needed at T? Those that are missing: 1 again
 *                            4 a header of T, an empty log ▶ a store at rest, which the core opens like any other
 *   contents ─────────────── 5 later, when they are asked for, verified by their hashes at T
 *
 * Needed are the pages of metadata and slabs, small contents, and contents that the caller wants to be of the same
 * commit. Of the tables of hashes of other contents, a hash of each page is enough, unless a record in the log changes
 * the page. The process that writes the store does nothing for any of this. It waits only in the case
 * of I21 (commit/readers.h).
 *
 * I19  A page that was copied while it changed has, besides bytes of its own commit, only bytes of later records: the
 *      committed image changes only after the durable marker of the record (I3). The marker is read after the page is
 *      copied, and the records up to it are applied. So the page is then as of the newest of them. A page whose
 *      contents were written in place has no such record: it is copied again after the record that declares it, and
 *      not at all while no record does.
 * I20  What a snapshot gives is of its commit: the pages of 1 to 4 by I19, and later contents by their hashes.
 */
#ifndef PM_SNAPSHOT_H
#define PM_SNAPSHOT_H

#include "reader/contents.h"

/* A snapshot without a memory file yet. */
pm_status pm_snapshot_new(const pm_pages *t, int fd, pm_snapshot **out);

#endif
