#include "reader/contents.h"

#include <stdlib.h>

#include "base/hash.h"

enum { AT_ONCE = 64 /* hashes that are hashed at once */ };

pm_contents pm_contents_of(const pm_snapshot *snapshot, uint64_t extent, uint64_t length, uint64_t at, uint64_t count)
{
    bool paired;
    uint64_t place = pm_pages_place(snapshot->pairs, snapshot->pair_count, extent, length, &paired);
    uint64_t first = at / PM_PAGE, end = (at + count + PM_PAGE - 1) / PM_PAGE;
    return (pm_contents){place, length, at, count, first, end - first};
}

pm_status pm_contents_valid(const pm_snapshot *snapshot, const pm_contents *p)
{
    bool small = pm_extent_is_small(p->length), aligned = p->place % PM_PAGE == 0;
    bool inside = p->length && p->length < snapshot->size && (small || aligned) && p->count && p->at < p->length
                  && p->count <= p->length - p->at && pm_extent_size(p->length) <= snapshot->size
                  && p->place <= snapshot->size - pm_extent_size(p->length);
    return inside ? PM_OK : pm_pages_damaged("an extent", p->place);
}

pm_status pm_contents_stale(const pm_snapshot *snapshot)
{
    return pm_fail(PM_STALE, "the contents have changed since commit %llu, which this snapshot shows",
                   (unsigned long long)snapshot->sequence);
}

/* The end of the pages from this one on that are in the same file. *fd: the memory file, if it has them, or the store's
 * file. */
static uint64_t run_end(const pm_snapshot *snapshot, uint64_t page, uint64_t end, int *fd)
{
    const pm_page_set loaded = {.bits = snapshot->loaded};
    bool here = pm_page_set_has(&loaded, page);
    *fd = here ? snapshot->copy : snapshot->fd;
    do page++;
    while (page < end && pm_page_set_has(&loaded, page) == here);
    return page;
}

/* Reads some pages of the table of an extent, and verifies those that the memory file does not have. */
static pm_status read_table(const pm_snapshot *snapshot, uint64_t extent_end, uint64_t first, uint64_t end, uint8_t *to)
{
    while (first < end) {
        int fd;
        uint64_t next = run_end(snapshot, first, end, &fd);
        PM_TRY(pm_source_pread(fd, PM_REGION_START + first * PM_PAGE, (next - first) * PM_PAGE, to, "a table"));
        for (; first < next; first++, to += PM_PAGE)
            if (fd == snapshot->fd
                && !pm_page_hashes_fit(&snapshot->tables, first, to, pm_pages_used(first, extent_end)))
                return pm_contents_stale(snapshot);
    }
    return PM_OK;
}

uint64_t *pm_contents_hashes(const pm_snapshot *snapshot, const pm_contents *p, pm_status *status)
{
    uint64_t at = p->place + pm_extent_table(p->length) + 8 * p->first, size = 8 * p->blocks;
    uint64_t first = at / PM_PAGE, end = (at + size + PM_PAGE - 1) / PM_PAGE;
    uint8_t *pages = malloc((end - first) * PM_PAGE);
    *status = pages ? read_table(snapshot, p->place + pm_extent_size(p->length), first, end, pages)
                    : pm_fail(PM_NO_MEMORY, "no memory for the hashes of contents");
    if (*status == PM_OK) {
        memmove(pages, pages + at % PM_PAGE, size);
        return (uint64_t *)(void *)pages;
    }
    free(pages);
    return NULL;
}

/* The hash of a page of a table: the same from the page's bytes as from what was kept instead of them. */
static pm_status table_page_hash(const pm_snapshot *snapshot, uint64_t page, size_t used, uint64_t *hash)
{
    const pm_page_set loaded = {.bits = snapshot->loaded};
    uint8_t bytes[PM_PAGE];
    if (!pm_page_set_has(&loaded, page)) {
        *hash = pm_page_hashes_at(&snapshot->tables, page);
        return *hash ? PM_OK : pm_fail(PM_UNREADABLE, "the hashes of contents could not be read");
    }
    PM_TRY(pm_source_pread(snapshot->copy, PM_REGION_START + page * PM_PAGE, PM_PAGE, bytes, "a snapshot"));
    *hash = pm_page_hashes_of(bytes, used);
    return PM_OK;
}

pm_status pm_contents_digest(const pm_snapshot *snapshot, const pm_contents *p, uint64_t *digest)
{
    uint64_t table = p->place + pm_extent_table(p->length), end = p->place + pm_extent_size(p->length);
    uint64_t kept[AT_ONCE]; /* each hash is bound to its place */
    unsigned count = 0;
    *digest = 0;
    if (pm_extent_is_small(p->length)) /* other contents are in the same page */
        return pm_source_pread(snapshot->copy, PM_REGION_START + table, sizeof *digest, digest, "a snapshot");
    for (uint64_t page = table / PM_PAGE; page * PM_PAGE < end; page++) {
        if (count == AT_ONCE) {
            *digest = pm_hash64(kept, sizeof kept, *digest);
            count = 0;
        }
        PM_TRY(table_page_hash(snapshot, page, pm_pages_used(page, end), &kept[count++]));
    }
    *digest = pm_hash64(kept, count * sizeof *kept, *digest);
    return PM_OK;
}

uint64_t pm_contents_bytes(const pm_contents *p, uint64_t block, uint64_t end)
{
    return end * PM_PAGE < p->length ? (end - block) * PM_PAGE : p->length - block * PM_PAGE;
}

pm_status pm_contents_read(const pm_snapshot *snapshot, const pm_contents *p, uint64_t block, uint64_t end,
                           uint8_t *to)
{
    const uint64_t first = p->place / PM_PAGE;
    while (block < end) {
        int fd;
        uint64_t next = run_end(snapshot, first + block, first + end, &fd) - first;
        uint64_t place = PM_REGION_START + (first + block) * PM_PAGE;
        PM_TRY(pm_source_pread(fd, place, pm_contents_bytes(p, block, next), to, "contents"));
        to += (next - block) * PM_PAGE;
        block = next;
    }
    return PM_OK;
}

uint64_t pm_contents_hash(const pm_snapshot *snapshot, const pm_contents *p, uint64_t block, const uint8_t *bytes)
{
    uint64_t at = block * PM_PAGE;
    size_t length = p->length - at < PM_PAGE ? p->length - at : PM_PAGE;
    return pm_keyed_checksum(pm_hash64(bytes, length, 0), p->place + at, snapshot->store_id);
}

bool pm_contents_fit(const pm_snapshot *snapshot, const pm_contents *p, const uint64_t *hashes, uint64_t block,
                     uint64_t end, const uint8_t *bytes)
{
    for (; block < end; block++, bytes += PM_PAGE)
        if (pm_contents_hash(snapshot, p, block, bytes) != hashes[block - p->first]) return false;
    return true;
}

pm_status pm_contents_check(const pm_snapshot *snapshot, const pm_contents *p, const uint8_t *address)
{
    const uint8_t *table = address + pm_extent_table(p->length);
    for (uint64_t block = 0; block < pm_extent_blocks(p->length); block++) {
        uint64_t hash;
        memcpy(&hash, table + 8 * block, sizeof hash);
        if (pm_contents_hash(snapshot, p, block, address + block * PM_PAGE) != hash)
            return pm_fail(PM_CORRUPT, "contents are damaged: block %llu of the extent at region offset %llu does not "
                                       "match its hash",
                           (unsigned long long)block, (unsigned long long)p->place);
    }
    return PM_OK;
}

pm_status pm_contents_small(const pm_snapshot *snapshot, const pm_contents *p, uint8_t *to)
{
    uint8_t bytes[PM_PAGE / 2];
    PM_CHECK(pm_extent_size(p->length) <= sizeof bytes);
    PM_TRY(pm_source_pread(snapshot->copy, PM_REGION_START + p->place, pm_extent_size(p->length), bytes, "a snapshot"));
    PM_TRY(pm_contents_check(snapshot, p, bytes));
    memcpy(to, bytes + p->at, p->count);
    return PM_OK;
}
