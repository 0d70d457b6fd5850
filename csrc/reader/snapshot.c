#define _GNU_SOURCE
#include "reader/snapshot.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/address.h"
#include "base/descriptor.h"
#include "reader/parts.h"
#include "space/region_fork.h"

#define TRIAL_BYTES (INT64_C(15) << 59) /* 2^58 of them, behind those of readers */

pm_status pm_snapshot_new(const pm_pages *t, int fd, pm_snapshot **out)
{
    int own = fcntl(fd, F_DUPFD_CLOEXEC, PM_FIRST_FD);
    if (own < 0) return pm_fail_errno("cannot keep the file of a store open");
    pm_snapshot *snapshot = calloc(1, sizeof *snapshot);
    if (!snapshot) {
        close(own);
        return pm_fail(PM_NO_MEMORY, "no memory for a snapshot");
    }
    *snapshot = (pm_snapshot){.fd = own, .copy = -1, .locked = -1, .seen = t->seen,
                              .size = t->source.store.region.size, .store_id = t->source.store.region.store_id,
                              .sequence = t->source.store.log.sequence, .written = t->source.written,
                              .file_size = t->source.store.media.size,
                              .log_size = t->source.store.log.header.log_size, .records = t->source.found.count};
    if (snapshot->records) {
        const pm_recovery_body *last = &t->source.found.bodies[snapshot->records - 1];
        snapshot->log_used = last->place + last->record_length - t->source.store.log.header.log_offset;
    }
    *out = snapshot;
    return PM_OK;
}

/* A snapshot that takes the memory file and all else over. */
static pm_status take(int fd, const pm_extent_place *wanted, size_t count, bool contents, pm_snapshot **out)
{
    pm_pages *t = calloc(1, sizeof *t);
    if (!t) return pm_fail(PM_NO_MEMORY, "no memory for a snapshot");
    *t = (pm_pages){.source = {.fd = -1, .copy = -1}, .wanted = wanted, .wanted_count = count, .contents = contents};
    pm_status status = pm_pages_reach(t, fd);
    if (status == PM_OK) status = pm_snapshot_new(t, fd, out);
    if (status == PM_OK) {
        pm_pages_header(t, t->source.store.media.view);
        (*out)->copy = t->source.copy, (*out)->loaded = t->loaded.bits;
        (*out)->pairs = t->pairs, (*out)->pair_count = t->pair_count, (*out)->tables = t->tables;
        t->source.copy = -1, t->loaded.bits = NULL, t->pairs = NULL, t->tables = (pm_page_hashes){0};
    }
    pm_pages_end(t);
    free(t);
    return status;
}

void pm_snapshot_free(pm_snapshot *snapshot)
{
    if (!snapshot) return;
    if (snapshot->locked >= 0) close(snapshot->locked);
    if (snapshot->copy >= 0) close(snapshot->copy);
    close(snapshot->fd);
    free(snapshot->loaded);
    free(snapshot->pairs);
    pm_page_hashes_free(&snapshot->tables);
    free(snapshot);
}

/* ---- a snapshot ------------------------------------------------------------------------------------------------ */

int pm_snapshot_file(const pm_snapshot *snapshot)
{
    return fcntl(snapshot->copy, F_DUPFD_CLOEXEC, PM_FIRST_FD);
}

void pm_snapshot_describe(const pm_snapshot *snapshot, pm_statistics *out)
{
    out->file_size = snapshot->file_size;
    out->log_size = snapshot->log_size, out->log_used = snapshot->log_used;
    out->records_replayed = snapshot->written ? 0 : snapshot->records;
}

const char *pm_snapshot_media(const pm_snapshot *snapshot)
{
    pm_media_kind kind = PM_MEDIA_FILE;
    pm_domain domain;
    pm_media_of(snapshot->fd, &kind, &domain);
    return pm_media_names[kind];
}

const char *pm_snapshot_domain(const pm_snapshot *snapshot)
{
    pm_media_kind kind;
    pm_domain domain = PM_DOMAIN_DISK;
    pm_media_of(snapshot->fd, &kind, &domain);
    return pm_domain_name(domain);
}

/* ---- contents, later ------------------------------------------------------------------------------------------ */

/* Copies a block of which only a part is asked for. */
static pm_status copy_piece(const pm_snapshot *snapshot, const pm_contents *p, const uint64_t *hashes, uint64_t block,
                            uint8_t *to, bool *fits)
{
    uint8_t page[PM_PAGE];
    uint64_t from = block * PM_PAGE < p->at ? p->at : block * PM_PAGE, end = (block + 1) * PM_PAGE;
    if (end > p->at + p->count) end = p->at + p->count;
    PM_TRY(pm_contents_read(snapshot, p, block, block + 1, page));
    *fits = pm_contents_fit(snapshot, p, hashes, block, block + 1, page);
    memcpy(to + (from - p->at), page + from % PM_PAGE, end - from);
    return PM_OK;
}

typedef struct {
    const pm_snapshot *snapshot;
    const pm_contents *p;
    const uint64_t *hashes;
    uint8_t *to;
} copying;

/* Copies whole blocks. PM_STALE, without a message: their hashes are others. */
static pm_status copy_blocks(void *argument, unsigned thread, uint64_t block, uint64_t end)
{
    const copying *c = argument;
    uint8_t *to = c->to + (block * PM_PAGE - c->p->at);
    (void)thread;
    PM_TRY(pm_contents_read(c->snapshot, c->p, block, end, to));
    return pm_contents_fit(c->snapshot, c->p, c->hashes, block, end, to) ? PM_OK : PM_STALE;
}

/* Copies the bytes. *fits: they are those of the snapshot, by their hashes. */
static pm_status copy_part(const pm_snapshot *snapshot, const pm_contents *p, const uint64_t *hashes, uint8_t *to,
                           bool *fits)
{
    uint64_t last = p->first + p->blocks, first = (p->at + PM_PAGE - 1) / PM_PAGE, end = (p->at + p->count) / PM_PAGE;
    copying c = {snapshot, p, hashes, to};
    pm_status status = PM_OK;
    *fits = true;
    if (p->first < first) PM_TRY(copy_piece(snapshot, p, hashes, p->first, to, fits));
    if (*fits && first < end) status = pm_parts_do(first, end, copy_blocks, &c);
    if (status == PM_STALE) *fits = false;
    else PM_TRY(status);
    /* The range ends in the middle of a block, and this is not the block in which it begins. */
    return *fits && end < last && end >= first ? copy_piece(snapshot, p, hashes, end, to, fits) : PM_OK;
}

/* The hashes of the same bytes in a later snapshot: *equal if they are the same, in the same place. */
static pm_status equal_later(const pm_snapshot *snapshot, const pm_snapshot *later, const pm_contents *p,
                             const pm_contents *now, bool *equal)
{
    pm_status status;
    *equal = later->seen && p->place == now->place;
    if (!*equal) return PM_OK;
    uint64_t *before = pm_contents_hashes(snapshot, p, &status);
    uint64_t *after = before ? pm_contents_hashes(later, now, &status) : NULL;
    *equal = after && !memcmp(before, after, p->blocks * sizeof *before);
    free(before);
    free(after);
    return status;
}

/* Contents of the later snapshot, too, do not match their hashes. */
static pm_status gone(const pm_snapshot *snapshot, const pm_snapshot *later)
{
    uint64_t newest;
    PM_TRY(pm_source_newest(later->fd, &newest));
    if (newest > later->sequence) return pm_contents_stale(snapshot);
    return pm_fail(PM_CORRUPT, "contents are damaged: they do not match their hashes");
}

/* The bytes were not there: they have changed, or a record has them that was not applied to the committed image yet, or
 * they are damaged. */
static pm_status copy_later(const pm_snapshot *snapshot, uint64_t extent, const pm_contents *p, uint8_t *to)
{
    const pm_extent_place wanted = {extent, p->length};
    pm_snapshot *later;
    PM_TRY(take(snapshot->fd, &wanted, 1, true, &later));
    pm_contents now = pm_contents_of(later, extent, p->length, p->at, p->count);
    bool equal, fits = false;
    pm_status status = equal_later(snapshot, later, p, &now, &equal);
    if (status == PM_OK && !equal) status = pm_contents_stale(snapshot);
    uint64_t *hashes = status == PM_OK ? pm_contents_hashes(later, &now, &status) : NULL;
    if (hashes) status = copy_part(later, &now, hashes, to, &fits);
    free(hashes);
    if (status == PM_OK && !fits) status = gone(snapshot, later);
    pm_snapshot_free(later);
    return status;
}

/* Copies large contents. table: where their hashes go, or NULL. */
static pm_status copy_large(const pm_snapshot *snapshot, uint64_t extent, const pm_contents *p, uint8_t *to,
                            uint8_t *table)
{
    pm_status status;
    bool fits;
    uint64_t *hashes = pm_contents_hashes(snapshot, p, &status);
    if (!hashes) return status;
    status = copy_part(snapshot, p, hashes, to, &fits);
    if (table) memcpy(table, hashes, p->blocks * sizeof *hashes);
    free(hashes);
    return status == PM_OK && !fits ? copy_later(snapshot, extent, p, to) : status;
}

pm_status pm_snapshot_copy(const pm_snapshot *snapshot, uint64_t extent, uint64_t length, uint64_t at, uint64_t count,
                           void *destination)
{
    pm_contents p = pm_contents_of(snapshot, extent, length, at, count);
    PM_TRY(pm_contents_valid(snapshot, &p));
    if (pm_extent_is_small(length)) return pm_contents_small(snapshot, &p, destination);
    return copy_large(snapshot, extent, &p, destination, NULL);
}

pm_status pm_snapshot_hashes(const pm_snapshot *snapshot, uint64_t extent, uint64_t length, uint64_t *out)
{
    pm_contents p = pm_contents_of(snapshot, extent, length, 0, length);
    pm_status status;
    PM_TRY(pm_contents_valid(snapshot, &p));
    uint64_t *hashes = pm_contents_hashes(snapshot, &p, &status);
    if (!hashes) return status;
    /* To bind a hash to its place twice is to undo it. */
    for (uint64_t block = 0; block < p.blocks; block++)
        out[block] = pm_keyed_checksum(hashes[block], p.place + block * PM_PAGE, snapshot->store_id);
    free(hashes);
    return PM_OK;
}

pm_status pm_snapshot_digest(const pm_snapshot *snapshot, uint64_t extent, uint64_t length, uint64_t *digest)
{
    pm_contents p = pm_contents_of(snapshot, extent, length, 0, length);
    PM_TRY(pm_contents_valid(snapshot, &p));
    return pm_contents_digest(snapshot, &p, digest);
}

pm_status pm_snapshot_load(const pm_snapshot *snapshot, uint64_t extent, uint64_t length, void *address)
{
    const pm_page_set loaded = {.bits = snapshot->loaded};
    pm_contents p = pm_contents_of(snapshot, extent, length, 0, length);
    PM_TRY(pm_contents_valid(snapshot, &p));
    if (pm_extent_is_small(length)) return pm_contents_check(snapshot, &p, address); /* slabs are metadata */
    uint64_t page = p.place / PM_PAGE, end = page + pm_extent_pages(length);
    if (pm_page_set_next_absent(&loaded, page, end) == end) return pm_contents_check(snapshot, &p, address);
    /* Memory of its own, as writing to a private page of a file copies a page of the file first. */
    uint64_t whole = pm_extent_table(length) / PM_PAGE * PM_PAGE;
    if (whole && mmap(address, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0)
        == MAP_FAILED)
        return pm_address_refused("cannot map memory for an array", whole);
    if (whole) madvise(address, whole, MADV_HUGEPAGE);
    return copy_large(snapshot, extent, &p, address, (uint8_t *)address + pm_extent_table(length));
}

/* ---- constant contents ---------------------------------------------------------------------------------------- */

/* Some file systems, such as overlayfs, map another file. Then the lock would go before the arrays. */
static bool mapping_keeps_lock(int fd, int locked)
{
    char name[32];
    uint64_t number; /* one that no other trial has: its lock would count as this one's */
    if (getrandom(&number, sizeof number, 0) != sizeof number) return false;
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = TRIAL_BYTES + (int64_t)(number >> 6),
                         .l_len = 1};
    snprintf(name, sizeof name, "/proc/self/fd/%d", locked);
    int trial = open(name, O_RDONLY | O_CLOEXEC);
    if (trial < 0) return false;
    void *kept = fcntl(trial, F_OFD_SETLK, &lock) ? MAP_FAILED : mmap(NULL, PM_PAGE, PROT_NONE, MAP_SHARED, trial, 0);
    close(trial);
    if (kept == MAP_FAILED) return false;
    lock.l_type = F_WRLCK;
    bool keeps = !fcntl(fd, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK;
    munmap(kept, PM_PAGE);
    return keeps;
}

/* Opens the file of which constant extents are mapped. Its locks keep their space from being used again, until `locked`
 * and all mappings of it are gone (space/region_fork.h). */
static pm_status open_locked(pm_snapshot *snapshot)
{
    char name[32];
    if (pm_media_has_holes(snapshot->fd))
        return pm_fail(PM_STALE, "a mapping of a sparse file on tmpfs may need space that there is not");
    snprintf(name, sizeof name, "/proc/self/fd/%d", snapshot->fd);
    int fd = pm_descriptor_above_standard(open(name, O_RDONLY | O_CLOEXEC));
    if (fd < 0) return pm_fail_errno("cannot open the file of a store again");
    if (!mapping_keeps_lock(snapshot->fd, fd)) {
        close(fd);
        return pm_fail(PM_STALE, "mappings of this file system do not keep locks");
    }
    snapshot->locked = fd;
    return PM_OK;
}

/* Notes pages to be locked. They are merged with the ranges that they touch. If there would be too many ranges, they
 * are merged with the nearest one: more may be locked than is mapped. */
static void note_range(pm_snapshot *snapshot, uint64_t *from, uint64_t *to)
{
    unsigned count = snapshot->range_count, first = 0, end;
    while (first < count && snapshot->ranges[first].to < *from) first++;
    for (end = first; end < count && snapshot->ranges[end].from <= *to; end++) continue;
    if (first == end && count == PM_LOCKED_RANGES) {
        uint64_t before = first ? *from - snapshot->ranges[first - 1].to : UINT64_MAX;
        uint64_t behind = first < count ? snapshot->ranges[first].from - *to : UINT64_MAX;
        if (before < behind) first--;
        else end++;
    }
    if (first < end) {
        if (snapshot->ranges[first].from < *from) *from = snapshot->ranges[first].from;
        if (snapshot->ranges[end - 1].to > *to) *to = snapshot->ranges[end - 1].to;
    }
    memmove(&snapshot->ranges[first + 1], &snapshot->ranges[end], (count - end) * sizeof *snapshot->ranges);
    snapshot->ranges[first].from = *from, snapshot->ranges[first].to = *to;
    snapshot->range_count = count - (end - first) + 1;
}

static pm_status lock_pages(pm_snapshot *snapshot, uint64_t from, uint64_t to)
{
    if (snapshot->locked < 0) PM_TRY(open_locked(snapshot));
    note_range(snapshot, &from, &to);
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = pm_region_fork_reader_byte(from),
                         .l_len = (int64_t)(to - from)};
    if (fcntl(snapshot->locked, F_OFD_SETLK, &lock)) return pm_fail(PM_STALE, "this file system gives no locks");
    return PM_OK;
}

/* A commit that frees an extent asks for locks after it is durable. So an extent that is there after the lock was taken
 * stays. */
static pm_status is_there(const pm_snapshot *snapshot, uint64_t extent, const pm_contents *p)
{
    const pm_extent_place wanted = {extent, p->length};
    uint64_t newest;
    PM_TRY(pm_source_newest(snapshot->fd, &newest));
    if (newest == snapshot->sequence) return PM_OK;
    pm_snapshot *later;
    PM_TRY(take(snapshot->fd, &wanted, 1, false, &later));
    pm_contents now = pm_contents_of(later, extent, p->length, p->at, p->count);
    bool equal;
    pm_status status = equal_later(snapshot, later, p, &now, &equal);
    pm_snapshot_free(later);
    return status == PM_OK && !equal ? pm_contents_stale(snapshot) : status;
}

pm_status pm_snapshot_map(pm_snapshot *snapshot, uint64_t extent, uint64_t length, void *address)
{
    pm_contents p = pm_contents_of(snapshot, extent, length, 0, length);
    PM_TRY(pm_contents_valid(snapshot, &p));
    uint64_t size = pm_extent_pages(length) * PM_PAGE;
    PM_TRY(lock_pages(snapshot, p.place / PM_PAGE, (p.place + size) / PM_PAGE));
    PM_TRY(is_there(snapshot, extent, &p));
    if (mmap(address, size, PROT_READ, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, snapshot->locked,
             (off_t)(PM_REGION_START + p.place)) == MAP_FAILED)
        return pm_address_refused("cannot map a constant array", size);
    return PM_OK;
}
