/*
 * The region's mappings: `live`, which must not move, as programs hold addresses in it; the notes on its pages; and the
 * memory of living arrays after the store closes.
 *
 *   live   ├── shows the file ──┼── kept for growth ──┤ ── more is kept when it is needed, if the addresses are free
 */
#define _GNU_SOURCE
#include "space/region.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "base/address.h"
#include "space/region_fork.h"
#include "space/overlay.h"

#define KEPT_LEAST (UINT64_C(4) << 30)
#define KEPT_LIMITED (UINT64_C(16) << 20)

/* ---- opening and growing ------------------------------------------------------------------------------------ */

/* How many addresses to keep for a region of this size. Under a limit, most of them are left to the program and to
 * other stores. */
static uint64_t kept_for(const pm_region *region, uint64_t size)
{
    struct rlimit limit;
    if (region->media->read_only) return size;
    uint64_t kept = 2 * size < KEPT_LEAST ? KEPT_LEAST : 2 * size;
    if (!getrlimit(RLIMIT_AS, &limit) && limit.rlim_cur != RLIM_INFINITY && kept > limit.rlim_cur / 16)
        kept = limit.rlim_cur / 16 < KEPT_LIMITED ? KEPT_LIMITED : limit.rlim_cur / 16;
    return kept < size ? size : pm_round_up(kept, PM_PAGE);
}

static uint64_t words_of(uint64_t pages)
{
    return pages / 64 + 1;
}

static uint64_t notes_bytes(uint64_t pages)
{
    return pages * (sizeof(uint64_t) + sizeof(uint64_t) + sizeof(uint8_t)) + 2 * words_of(pages) * sizeof(uint64_t);
}

/* Makes room for the notes on every page. */
static pm_status make_room_for_notes(pm_region *region, uint64_t size)
{
    enum { PAGES_LEAST = 1024 };
    uint64_t old = region->notes_pages, pages = old ? old : PAGES_LEAST;
    while (pages < size / PM_PAGE) pages *= 2;
    if (pages == old) return PM_OK;
    uint64_t *edited = pm_address_resize(NULL, 0, notes_bytes(pages));
    if (!edited) return pm_address_refused("cannot map the notes on pages", notes_bytes(pages));
    uint64_t *flush = edited + pages, *dirty = flush + pages, *only = dirty + words_of(pages);
    uint8_t *flags = (uint8_t *)(only + words_of(pages));
    if (old) {
        memcpy(edited, region->edited, region->edited_count * sizeof *edited);
        memcpy(flush, region->flush, region->flush_count * sizeof *flush);
        memcpy(dirty, region->policy.dirty.bits, words_of(old) * sizeof *dirty);
        memcpy(only, region->policy.only.bits, words_of(old) * sizeof *only);
        memcpy(flags, region->flags, old);
        munmap(region->edited, notes_bytes(old));
    }
    region->edited = edited, region->flush = flush, region->flags = flags;
    region->policy.dirty.bits = dirty, region->policy.only.bits = only;
    region->notes_pages = pages;
    return PM_OK;
}

/* Maps more of the file, behind the mapped part. */
static pm_status show(pm_region *region, uint64_t size)
{
    if (!pm_media_may_map(region->media)) return pm_fail_errno("cannot map the region");
    if (mmap(region->live + region->size, size - region->size, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, region->media->fd, (off_t)(PM_REGION_START + region->size))
        == MAP_FAILED)
        return pm_address_refused("cannot map the region", size - region->size);
    return PM_OK;
}

pm_status pm_region_open(pm_region *region, pm_media *media, uint64_t size, uint64_t store_id)
{
    *region = (pm_region){.media = media, .store_id = store_id};
    uint64_t kept = kept_for(region, size);
    bool alone = !media->read_only && !media->trace;
    while (!(region->live = pm_address_keep(kept, alone)) && kept > size)
        kept = kept / 2 < size ? size : pm_round_up(kept / 2, PM_PAGE);
    if (!region->live) return pm_address_refused("cannot reserve addresses for the arrays", kept);
    region->kept = kept;
    PM_TRY(pm_region_extend(region, size));
    return pm_policy_open(&region->policy, region->live, media->fd, PM_REGION_START);
}

pm_status pm_region_keep(pm_region *region, uint64_t size)
{
    if (size <= region->kept) return PM_OK;
    uint64_t least = size - region->kept, more = least < region->kept ? region->kept : least;
    while (!pm_address_keep_more(region->live + region->kept, more)) {
        if (more == least && errno == ENOMEM) { /* a growth that is refused leaves all pending */
            pm_address_refused("cannot reserve more addresses for the arrays", least);
            return PM_NO_SPACE;
        }
        if (more == least)
            return pm_fail(PM_NO_SPACE,
                           "the addresses after the arrays of this store are in use, so it can't grow to %llu bytes: "
                           "close it and open it again",
                           (unsigned long long)size);
        more = more / 2 < least ? least : pm_round_up(more / 2, PM_PAGE);
    }
    region->kept += more;
    return PM_OK;
}

pm_status pm_region_extend(pm_region *region, uint64_t size)
{
    PM_CHECK(size <= region->kept);
    PM_TRY(make_room_for_notes(region, size));
    PM_TRY(show(region, size));
    if (region->overlay) PM_TRY(pm_overlay_extend(region, size));
    region->size = size;
    pm_region_moved(region);
    return PM_OK;
}

void pm_region_moved(pm_region *region)
{
    const uint8_t *file = region->media->view + PM_REGION_START;
    if (region->overlay) pm_overlay_moved(region, file);
    else region->committed = region->media->read_only ? region->live : file;
}

void pm_region_drop(pm_region *region, uint64_t offset, uint64_t length)
{
    PM_CHECK(offset % PM_PAGE == 0 && length % PM_PAGE == 0 && offset + length <= region->size);
    pm_address_drop(region->live + offset, length);
}

/* ---- closing ------------------------------------------------------------------------------------------------ */

/* A range of whole pages, as byte offsets. */
typedef struct {
    uint64_t from, to;
} page_run;

static page_run pages_of(const pm_buffer *buffer)
{
    return (page_run){buffer->offset / PM_PAGE * PM_PAGE, pm_round_up(buffer->offset + buffer->length, PM_PAGE)};
}

/* All pages under living buffers, and the pages between them. */
static page_run living(const pm_region *region)
{
    page_run all = {0, 0};
    for (size_t i = 0; i < region->buffer_count; i++) {
        if (!atomic_load(&region->buffers[i]->living)) continue;
        page_run pages = pages_of(region->buffers[i]);
        if (!all.to) all.from = pages.from;
        if (pages.to > all.to) all.to = pages.to;
    }
    return all;
}

/* Copies pages. Those that the disk can't read stay zeros, and the status reports that. */
static pm_status copy_pages(const pm_region *region, page_run pages, uint8_t *copy)
{
    const char *what = "an array that is still alive, and gets zeros";
    uint64_t length = pages.to - pages.from;
    if (pm_region_readable(region, region->live, pages.from, length, what) == PM_OK) {
        memcpy(copy, region->live + pages.from, length);
        return PM_OK;
    }
    pm_status status = PM_OK;
    for (uint64_t at = 0; at < length; at += PM_PAGE) {
        pm_status page = pm_region_readable(region, region->live, pages.from + at, PM_PAGE, what);
        if (page == PM_OK) memcpy(copy + at, region->live + pages.from + at, PM_PAGE);
        else status = page;
    }
    return status;
}

/* Copies the bytes of living buffers in [part.from, part.to), from number *next on. */
static pm_status copy_living(const pm_region *region, size_t *next, page_run part, uint8_t *copy)
{
    uint64_t done = part.from;
    size_t first = *next;
    pm_status status = PM_OK;
    for (size_t i = first; i < region->buffer_count; i++) {
        page_run pages = pages_of(region->buffers[i]);
        if (pages.from >= part.to) break;
        if (pages.to <= part.from && i == *next) *next = i + 1;
        if (!atomic_load(&region->buffers[i]->living) || pages.to <= done) continue;
        if (pages.from < done) pages.from = done;
        if (pages.to > part.to) pages.to = part.to;
        pm_status copied = copy_pages(region, pages, copy + (pages.from - part.from));
        if (copied != PM_OK) status = copied;
        done = pages.to;
    }
    return status;
}

/*
 * One mapping is made for all living buffers. It is moved to their place part by part, as private pages take memory
 * twice while they are copied. The gaps take no memory, as they are never touched. So the number of arrays does not
 * matter, and only the first step can be refused before anything is changed.
 */
pm_status pm_region_part(pm_region *region)
{
    enum { PART = 16 << 20 };
    page_run all = living(region), part;
    uint64_t size = all.to - all.from;
    if (!size) return PM_OK;
    uint8_t *copy = pm_address_resize(NULL, 0, size);
    if (!copy) {
        pm_address_refused("cannot give the arrays that are still alive memory of their own", size);
        return PM_NO_MEMORY;
    }
    madvise(copy, size, MADV_NOHUGEPAGE); /* so that a small array takes no more than its pages */
    size_t next = 0;
    pm_status status = PM_OK;
    for (part.from = all.from; part.from < all.to; part.from = part.to) {
        part.to = all.to - part.from < PART ? all.to : part.from + PART;
        uint8_t *at = copy + (part.from - all.from);
        pm_status copied = copy_living(region, &next, part, at);
        if (copied != PM_OK) status = copied;
        if (mremap(at, part.to - part.from, part.to - part.from, MREMAP_MAYMOVE | MREMAP_FIXED,
                   region->live + part.from)
            == MAP_FAILED) {
            status = pm_address_refused("cannot give the arrays that are still alive memory of their own", size);
            munmap(at, all.to - part.from);
            return part.from == all.from ? PM_NO_MEMORY : status == PM_NO_MEMORY ? PM_IO : status;
        }
    }
    return status;
}

void pm_region_close(pm_region *region, bool keep)
{
    page_run all = living(region);
    if (keep) {
        /* Programs have no addresses before the first living array, nor behind the last one. */
        if (all.from) munmap(region->live, all.from);
        munmap(region->live + all.to, region->kept - all.to);
        region->first = all.from, region->kept = all.to;
    }
    pm_policy_close(&region->policy); /* after the unmapping: unmapped pages need no unprotecting */
    pm_overlay_close(region); /* a mapping of the file would keep its space in use */
    region->media = NULL;
    region->committed = NULL;
}

void pm_region_free(pm_region *region)
{
    for (size_t i = 0; i < region->buffer_count; i++) free(region->buffers[i]);
    free(region->buffers);
    for (size_t i = 0; i < region->double_buffer_count; i++) {
        free(region->double_buffers[i]->tail);
        free(region->double_buffers[i]);
    }
    free(region->double_buffers);
    if (region->policy.live) pm_policy_close(&region->policy);
    pm_overlay_close(region);
    pm_region_fork_let_go(region);
    if (region->live && region->kept > region->first)
        munmap(region->live + region->first, region->kept - region->first);
    if (region->edited) munmap(region->edited, notes_bytes(region->notes_pages));
    *region = (pm_region){0};
}
