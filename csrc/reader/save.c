/* Backups: a snapshot, written to another file. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "reader/contents.h"

enum { PART = 64 /* pages that are read, verified and written at once */ };
static const char FAILED[] = "cannot write the copy";

pm_status pm_save_begin(const pm_snapshot *snapshot, int copy)
{
    struct stat memory;
    bool failed = fstat(snapshot->copy, &memory) || ftruncate(copy, memory.st_size);
    return failed ? pm_fail_errno(FAILED) : PM_OK;
}

/* True if there is nothing yet at this place. */
static bool is_hole(int fd, uint64_t from, uint64_t end)
{
    off_t data = lseek(fd, (off_t)from, SEEK_DATA);
    return data < 0 ? errno == ENXIO : (uint64_t)data >= end;
}

/* Shares blocks of the store's file. Any failure leaves a hole, or blocks that the hashes tell from the right ones. */
static void share(const pm_snapshot *snapshot, int copy, uint64_t from, uint64_t end)
{
    struct file_clone_range range = {.src_fd = snapshot->fd, .src_offset = from, .src_length = end - from,
                                     .dest_offset = from};
    (void)ioctl(copy, FICLONERANGE, &range);
}

/* Contents on their way to the copy. */
typedef struct {
    const pm_snapshot *snapshot;
    int copy;
    const pm_contents *p;
    const uint64_t *hashes; /* of the blocks, in the snapshot */
    uint64_t *there;        /* of the blocks, in the copy; as a hash is also of its place, it is not the other slot's */
    uint8_t *bytes;         /* room for PART pages */
} saving;

/* Notes which of some blocks in `bytes` are right. Returns whether all are. */
static bool note(const saving *s, uint64_t block, uint64_t end)
{
    bool all = true;
    for (const uint8_t *at = s->bytes; block < end; block++, at += PM_PAGE) {
        uint64_t hash = s->hashes[block - s->p->first];
        bool fits = pm_contents_hash(s->snapshot, s->p, block, at) == hash;
        if (fits) s->there[block] = hash;
        all &= fits;
    }
    return all;
}

static uint64_t place_of(const pm_contents *p, uint64_t block)
{
    return PM_REGION_START + p->place + block * PM_PAGE;
}

/* Shares blocks of the store's file, and looks which of them are right. */
static pm_status share_blocks(const saving *s)
{
    uint64_t end = s->p->first + s->p->blocks, from = place_of(s->p, s->p->first), to = place_of(s->p, end);
    if (!is_hole(s->copy, from, to)) return PM_OK;
    share(s->snapshot, s->copy, from, to);
    if (is_hole(s->copy, from, to)) return PM_OK;
    for (uint64_t block = s->p->first, next; block < end; block = next) {
        next = block + PART < end ? block + PART : end;
        uint64_t length = pm_contents_bytes(s->p, block, next);
        PM_TRY(pm_source_pread(s->copy, place_of(s->p, block), length, s->bytes, "the copy"));
        note(s, block, next);
    }
    return PM_OK;
}

/* Blocks are written before it is known that all of them are right: a later snapshot's are written over the others. */
static pm_status save_blocks(const saving *s, bool *whole)
{
    uint64_t end = s->p->first + s->p->blocks;
    for (uint64_t block = s->p->first, next; block < end; block = next) {
        next = block + 1;
        if (s->there[block] == s->hashes[block - s->p->first]) continue;
        while (next < end && next - block < PART && s->there[next] != s->hashes[next - s->p->first]) next++;
        for (uint64_t i = block; i < next; i++) s->there[i] = 0;
        PM_TRY(pm_contents_read(s->snapshot, s->p, block, next, s->bytes));
        *whole &= note(s, block, next);
        uint64_t length = pm_contents_bytes(s->p, block, next);
        PM_TRY(pm_source_pwrite(s->copy, place_of(s->p, block), length, s->bytes, FAILED));
    }
    return PM_OK;
}

pm_status pm_save_contents(const pm_snapshot *snapshot, int copy, uint64_t extent, uint64_t length, uint64_t at,
                           uint64_t count, uint64_t *there, bool *whole)
{
    pm_contents p = pm_contents_of(snapshot, extent, length, at, count);
    uint8_t small[PM_PAGE / 2];
    *whole = true;
    PM_TRY(pm_contents_valid(snapshot, &p));
    if (pm_extent_is_small(length)) return pm_contents_small(snapshot, &p, small); /* slabs are metadata */
    pm_status status;
    uint64_t *hashes = pm_contents_hashes(snapshot, &p, &status);
    *whole = hashes;
    if (!hashes) return status == PM_STALE ? PM_OK : status;
    saving s = {snapshot, copy, &p, hashes, there, malloc((size_t)PART * PM_PAGE)};
    if (!s.bytes) status = pm_fail(PM_NO_MEMORY, "no memory to copy");
    if (status == PM_OK && !snapshot->written) status = share_blocks(&s);
    if (status == PM_OK) status = save_blocks(&s, whole);
    uint64_t table = place_of(&p, 0) + pm_extent_table(length) + 8 * p.first;
    if (status == PM_OK)
        status = pm_source_pwrite(copy, table, p.blocks * sizeof *hashes, (const uint8_t *)hashes, FAILED);
    free(s.bytes);
    free(hashes);
    return status;
}

/* Writes pages that the memory file has. */
static pm_status save_pages(const pm_snapshot *snapshot, int copy, uint64_t place, uint64_t end, uint8_t *bytes)
{
    for (uint64_t length; place < end; place += length) {
        length = end - place < (uint64_t)PART * PM_PAGE ? end - place : (uint64_t)PART * PM_PAGE;
        PM_TRY(pm_source_pread(snapshot->copy, place, length, bytes, "a snapshot"));
        PM_TRY(pm_source_pwrite(copy, place, length, bytes, FAILED));
    }
    return PM_OK;
}

pm_status pm_save_rest(const pm_snapshot *snapshot, int copy)
{
    const pm_page_set loaded = {.bits = snapshot->loaded};
    uint64_t pages = snapshot->size / PM_PAGE;
    uint8_t *bytes = malloc((size_t)PART * PM_PAGE);
    if (!bytes) return pm_fail(PM_NO_MEMORY, "no memory to copy");
    pm_status status = save_pages(snapshot, copy, 0, PM_REGION_START, bytes);
    for (uint64_t page = 0; status == PM_OK && (page = pm_page_set_next(&loaded, page, pages)) < pages;) {
        uint64_t first = page;
        page = pm_page_set_next_absent(&loaded, page, pages);
        status = save_pages(snapshot, copy, PM_REGION_START + first * PM_PAGE, PM_REGION_START + page * PM_PAGE, bytes);
    }
    free(bytes);
    return status;
}
