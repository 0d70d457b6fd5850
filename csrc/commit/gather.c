#include "commit/gather.h"

#include <stdlib.h>

#include "base/compare.h"
#include "base/hash.h"
#include "space/extent.h"
#include "space/page.h"
#include "commit/parallel_compare.h"

/* Puts bytes of the new state into whole log units of the committed one, in ascending order, and keeps those units that
 * differ. */
typedef struct {
    pm_region *region;
    pm_helper *helper;
    pm_writer *writer;
    pm_digest changed; /* by how much the state's digest differs */
    uint64_t offset; /* of the log unit in `bytes`; UINT64_MAX: none */
    /* A part of the unit was free at the last commit, which therefore says nothing about it: see pm_gather */
    bool taken;
    uint8_t bytes[PM_PAGE] __attribute__((aligned(64)));
} composer;

/* end: the end of an extent that has its pages to itself, if one was composed. The bytes behind it mean nothing, and
 * are left out. */
static void compose_flush(composer *c, uint64_t end)
{
    uint64_t length = c->region->media->log_unit;
    if (end - c->offset < length) length = pm_round_up(end - c->offset, PM_LINE);
    if (c->offset != UINT64_MAX && (c->taken || memcmp(c->bytes, c->region->committed + c->offset, length))) {
        uint8_t *room = pm_writer_room(c->writer, c->offset, length);
        memcpy(room, c->bytes, length);
        pm_writer_keep(c->writer, c->offset, room, length);
    }
    c->offset = UINT64_MAX;
    c->taken = false;
}

/* uncommitted: this space was free at the last commit. */
static void compose(composer *c, uint64_t offset, const void *source, size_t length, bool uncommitted)
{
    uint64_t log_unit = c->region->media->log_unit;
    const uint8_t *from = source;
    while (length) {
        uint64_t base = offset / log_unit * log_unit;
        size_t part = base + log_unit - offset < length ? base + log_unit - offset : length;
        if (base != c->offset) {
            compose_flush(c, UINT64_MAX);
            memcpy(c->bytes, c->region->committed + base, log_unit);
            c->offset = base;
        }
        memcpy(c->bytes + (offset - base), from, part);
        c->taken |= uncommitted;
        offset += part, from += part, length -= part;
    }
}

void pm_gather_expect(const pm_region *region, const uint8_t *live, uint64_t committed, uint64_t length, uint64_t at,
                      uint64_t bytes)
{
    enum { FIRST = 4 };
    for (uint64_t i = 0; i < bytes && i < FIRST * PM_PAGE; i += PM_LINE) __builtin_prefetch(live + at + i);
    __builtin_prefetch(region->committed + committed + pm_extent_table(length) + 8 * (at / PM_PAGE));
}

typedef enum { PAGE_EQUAL, PAGE_SPARSE, PAGE_WHOLE } page_change;

/* Gathers a whole page of the new state: it is copied once into the writer's room, and compared, hashed and written
 * from there (I6). offset: of its place in the committed image. next: the page that will follow. uncommitted: as of
 * compose; all of it is logged. */
static page_change gather_page(composer *c, const uint8_t *live, const uint8_t *next, uint64_t offset,
                               bool uncommitted, uint64_t *hash)
{
    pm_region *region = c->region;
    pm_writer *writer = c->writer;
    compose_flush(c, UINT64_MAX);
    uint8_t *room = pm_writer_room(writer, offset, PM_PAGE);
    for (unsigned at = 0; !uncommitted && at < PM_PAGE; at += PM_LINE)
        __builtin_prefetch(region->committed + offset + at);
    uint64_t page_hash = pm_hash64_copy_page_of(room, live, next);
    uint64_t changed = uncommitted ? UINT64_MAX : pm_compare_changed_lines(room, region->committed + offset);
    if (!changed) return PAGE_EQUAL;
    if (hash) *hash = pm_keyed_checksum(page_hash, offset, region->store_id);
    int lines_changed = __builtin_popcountll(changed);
    if (region->media->log_unit == PM_PAGE || lines_changed > 48) {
        pm_writer_keep(writer, offset, room, PM_PAGE);
        return PAGE_WHOLE;
    }
    while (changed) {
        unsigned first = (unsigned)__builtin_ctzll(changed);
        unsigned lines = (unsigned)__builtin_ctzll(~(changed >> first)); /* not all of them have changed */
        pm_writer_keep(writer, offset + first * PM_LINE, room + first * PM_LINE, lines * PM_LINE);
        changed &= lines + first < 64 ? ~UINT64_C(0) << (lines + first) : 0;
    }
    return PAGE_SPARSE;
}

/* The distance of a sample's pages from each other, in pages. */
static uint64_t sample_step(uint64_t length)
{
    enum { ONE_PAGE_OF = 8, PAGES_MOST = 64 };
    uint64_t blocks = length / PM_PAGE;
    return blocks / PAGES_MOST > ONE_PAGE_OF ? blocks / PAGES_MOST : ONE_PAGE_OF;
}

bool pm_gather_sample_readable(const pm_region *region, uint64_t place, uint64_t committed, uint64_t length)
{
    uint64_t step = sample_step(length) * PM_PAGE;
    for (uint64_t at = 0; at + PM_PAGE <= length; at += step)
        if (pm_region_comparable(region, place + at, committed + at, PM_PAGE) != PM_OK) return false;
    return true;
}

bool pm_gather_mostly_changed(const pm_region *region, uint64_t place, uint64_t committed, uint64_t length)
{
    enum { LINES_APART = 21 };
    uint64_t blocks = length / PM_PAGE, step = sample_step(length), seen = 0, changed = 0;
    for (uint64_t block = 0; block < blocks; block += step, seen++) {
        uint64_t at = block * PM_PAGE, end = at + PM_PAGE;
        while (at < end && memcmp(region->live + place + at, region->committed + committed + at, PM_LINE))
            at += LINES_APART * PM_LINE;
        changed += at >= end;
    }
    return seen && changed >= seen - seen / 4;
}

/* How the blocks of an extent are gathered. `choose_strategy` decides it once. */
typedef struct strategy {
    const pm_region *region;
    pm_parallel_compare *parallel;                             /* for next_compared */
    uint64_t first, end;                                       /* the extent's pages, in the region */
    uint64_t (*next)(const struct strategy *s, uint64_t page); /* the next page, from this one on, that may differ */
    bool uncommitted; /* the committed image does not have the extent yet: nothing is compared, and all is logged */
    /* Most pages will be equal, so they are compared in place before they are copied. Blocks that are not whole pages
     * are always compared in place. */
    bool in_place;
} strategy;

static uint64_t next_of_all(const strategy *s, uint64_t page)
{
    (void)s;
    return page;
}

static uint64_t next_declared(const strategy *s, uint64_t page)
{
    return pm_policy_declared(&s->region->policy, page, s->end);
}

static uint64_t next_listed(const strategy *s, uint64_t page)
{
    return pm_page_set_next(&s->region->policy.dirty, page, s->end);
}

static uint64_t next_compared(const strategy *s, uint64_t page)
{
    return pm_parallel_compare_next(s->parallel, page, s->end);
}

/* parallel: NULL if one thread compares the extent. */
static strategy choose_strategy(const pm_region *region, const pm_candidate *extent, pm_parallel_compare *parallel,
                                bool uncommitted)
{
    uint64_t first = extent->offset / PM_PAGE;
    strategy s = {.region = region, .parallel = parallel, .first = first,
                  .end = first + pm_extent_blocks(extent->length), .uncommitted = uncommitted};
    if (extent->scan == PM_SCAN_ALL) s.next = next_of_all;
    else if (extent->scan == PM_SCAN_ONLY) s.next = next_declared;
    else s.next = parallel ? next_compared : next_listed;
    s.in_place = extent->scan < PM_SCAN_CHANGED;
    return s;
}

/* The next block, from this one on, that may differ from the committed image. */
static uint64_t next_block(const strategy *s, uint64_t block)
{
    return s->next(s, s->first + block) - s->first;
}

/* Checks that the hashes that a commit changes can be read. The program has read the contents that it changed, and
 * smaller extents were read when a program got them (pm_region_prepare). The hashes may be read for the first time
 * here. */
static pm_status table_readable(const pm_region *region, const pm_candidate *extent, uint64_t first, uint64_t last)
{
    if (pm_extent_blocks(extent->length) < PM_POLICY_LEAST) return PM_OK;
    uint64_t table = extent->committed + pm_extent_table(extent->length);
    uint64_t size = 8 * (last - first + 1);
    return pm_region_readable(region, region->committed, table + 8 * first, size, "the hashes of contents");
}

/* Blocks that differ, in ascending order, and their new hashes. */
typedef struct {
    struct block_hash {
        uint64_t block, hash;
    } few[64], *list;
    uint64_t count, room;
} block_hashes;

/* Room grows as needed: clearing room for all blocks of a large extent would take longer than the rest. */
static pm_status note_hash(block_hashes *found, uint64_t block, uint64_t hash)
{
    if (found->count == found->room) {
        bool first = found->list == found->few;
        uint64_t room = 8 * found->room;
        struct block_hash *more = realloc(first ? NULL : found->list, room * sizeof *more);
        if (!more) return pm_fail(PM_NO_MEMORY, "no memory to gather a commit");
        if (first) memcpy(more, found->few, sizeof found->few);
        found->list = more;
        found->room = room;
    }
    found->list[found->count++] = (struct block_hash){block, hash};
    return PM_OK;
}

/* Gathers a block if it differs. next: the block that will follow. */
static page_change gather_block(composer *c, const strategy *s, const pm_candidate *extent, uint64_t block,
                                uint64_t next, uint64_t *hash)
{
    const pm_region *region = c->region;
    uint64_t at = extent->committed + block * PM_PAGE, left = extent->length - block * PM_PAGE;
    size_t bytes = left < PM_PAGE ? left : PM_PAGE;
    const uint8_t *live = region->live + extent->offset + block * PM_PAGE;
    bool compared = !s->uncommitted && (s->in_place || bytes < PM_PAGE);
    if (compared && !memcmp(live, region->committed + at, bytes)) return PAGE_EQUAL;
    /* Read when all blocks are gathered */
    __builtin_prefetch(region->committed + extent->committed + pm_extent_table(extent->length) + 8 * block);
    if (bytes == PM_PAGE) return gather_page(c, live, live + (next - block) * PM_PAGE, at, s->uncommitted, hash);
    uint8_t copy[PM_PAGE];
    memcpy(copy, live, bytes);
    *hash = pm_extent_block_hash(region, copy, bytes, at);
    compose(c, at, copy, bytes, s->uncommitted);
    return PAGE_SPARSE;
}

/* Gathers the entries of the table of hashes, and exchanges the contributions of the blocks. */
static pm_status gather_hashes(composer *c, const pm_candidate *extent, const block_hashes *found, bool uncommitted)
{
    const struct block_hash *hashes = found->list;
    if (!found->count) return PM_OK;
    if (!uncommitted)
        PM_TRY(table_readable(c->region, extent, hashes[0].block, hashes[found->count - 1].block));
    for (uint64_t i = 0; i < found->count; i++) {
        uint64_t at = extent->committed + hashes[i].block * PM_PAGE,
                 entry = extent->committed + pm_extent_table(extent->length) + 8 * hashes[i].block, old;
        memcpy(&old, c->region->committed + entry, sizeof old);
        uint64_t before = uncommitted ? 0 : pm_digest_contribution(at, old);
        pm_digest_add(&c->changed, at, pm_digest_contribution(at, hashes[i].hash) - before);
        compose(c, entry, &hashes[i].hash, sizeof hashes[i].hash, uncommitted);
    }
    return PM_OK;
}

/* Gathers changed blocks of an extent, then the entries of its table of hashes. */
static pm_status gather_blocks(composer *c, pm_candidate *extent, const strategy *s)
{
    uint64_t length = extent->length, blocks = pm_extent_blocks(length), whole = 0;
    block_hashes found;
    found.list = found.few, found.count = 0, found.room = sizeof found.few / sizeof *found.few;
    pm_status status = PM_OK;
    for (uint64_t block = next_block(s, 0), next; status == PM_OK && block < blocks; block = next) {
        next = next_block(s, block + 1);
        uint64_t hash;
        page_change change = gather_block(c, s, extent, block, next, &hash);
        whole += change == PAGE_WHOLE;
        if (change != PAGE_EQUAL) status = note_hash(&found, block, hash);
    }
    if (status == PM_OK) status = gather_hashes(c, extent, &found, s->uncommitted);
    if (!pm_extent_is_small(length)) compose_flush(c, extent->committed + pm_extent_size(length));
    if (found.list != found.few) free(found.list);
    extent->changed = found.count;
    extent->mostly_changed = length >= PM_PAGE && whole + (length % PM_PAGE != 0) >= blocks - blocks / 4;
    return status;
}

static pm_status gather_extent(composer *c, pm_candidate *extent, bool uncommitted)
{
    strategy s;
    if (!extent->shared) {
        s = choose_strategy(c->region, extent, NULL, uncommitted);
        return gather_blocks(c, extent, &s);
    }
    pm_parallel_compare parallel;
    pm_parallel_compare_begin(&parallel, c->region, c->helper, extent->offset, extent->committed, extent->length,
                              extent->scan == PM_SCAN_ALL);
    extent->scan = PM_SCAN_CHANGED;
    extent->shared = false; /* if it is gathered again, the set has all such pages */
    s = choose_strategy(c->region, extent, &parallel, uncommitted);
    pm_status status = gather_blocks(c, extent, &s);
    pm_parallel_compare_end(&parallel);
    return status;
}

/* Exchanges the page's contribution to the digest; the old one goes if the page was metadata at the last commit.
 * Returns the kind of the page at the last commit. */
static unsigned gather_contribution(composer *c, uint64_t offset, bool gone)
{
    const pm_region *region = c->region;
    unsigned was = pm_heap_kind(region, region->committed, offset / PM_PAGE);
    if (was == PM_PAGE_META || was == PM_PAGE_SLAB)
        pm_digest_add(&c->changed, offset, -pm_page_contribution(region->committed, offset));
    if (!gone) pm_digest_add(&c->changed, offset, pm_page_contribution(region->live, offset));
    return was;
}

static int by_offset(const void *a, const void *b)
{
    const pm_candidate *x = a, *y = b;
    return x->offset != y->offset ? (x->offset > y->offset) - (x->offset < y->offset) : (int)y->what - (int)x->what;
}

void pm_gather_sort(pm_candidate *list, size_t count)
{
    if (count > 1) qsort(list, count, sizeof *list, by_offset);
}

bool pm_gather_differs(const pm_region *region, const pm_candidate *extent)
{
    const strategy s = choose_strategy(region, extent, NULL, false);
    uint64_t blocks = pm_extent_blocks(extent->length);
    for (uint64_t block = 0; (block = next_block(&s, block)) < blocks; block++) {
        uint64_t at = block * PM_PAGE, left = extent->length - at;
        if (memcmp(region->live + extent->offset + at, region->committed + extent->committed + at,
                   left < PM_PAGE ? left : PM_PAGE))
            return true;
    }
    return false;
}

bool pm_gather_finds_any(const pm_region *region, const pm_candidate *list, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (list[i].what != PM_EXTENT || pm_gather_differs(region, &list[i])) return true;
    return false;
}

/* The shared view is the committed image only where the committed state owns the space (I2). In free space it shows
 * older bytes, or direct writes that no record declares. Recovery restores none of these, and applies older records
 * there. So a change that takes free space is logged in full, even where it equals the committed image. */
pm_status pm_gather(pm_region *region, pm_helper *helper, pm_writer *writer, pm_candidate *list, size_t count,
                    pm_digest *digest)
{
    composer c;
    c.region = region;
    c.helper = helper;
    c.writer = writer;
    c.changed = (pm_digest){0};
    c.offset = UINT64_MAX;
    c.taken = false;
    for (size_t i = 0; i < count && !writer->overflow && writer->status == PM_OK; i++) {
        pm_candidate *next = &list[i];
        if (i && next->offset == list[i - 1].offset) continue; /* several buffers over one extent */
        uint8_t *live = region->live + next->offset;
        bool uncommitted;
        switch (next->what) {
        case PM_EXTENT:
            PM_TRY(gather_extent(&c, next, false));
            break;
        case PM_NEW_EXTENT:
            PM_TRY(gather_extent(&c, next, true));
            break;
        case PM_META_PAGE:
            pm_page_checksum(region, live);
            uncommitted = gather_contribution(&c, next->offset, false) != PM_PAGE_META;
            gather_page(&c, live, live, next->offset, uncommitted, NULL);
            break;
        case PM_META_SLAB:
            pm_page_checksum(region, live);
            uncommitted = gather_contribution(&c, next->offset, false) != PM_PAGE_SLAB;
            compose(&c, next->offset, live, PM_LINE, uncommitted);
            break;
        case PM_META_GONE:
            gather_contribution(&c, next->offset, true);
            break;
        }
    }
    compose_flush(&c, UINT64_MAX);
    *digest = c.changed;
    return writer->status;
}
