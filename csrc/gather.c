#include "gather.h"

#include <stdlib.h>

#include "compare.h"
#include "hash.h"
#include "sieve.h"

/* Puts bytes of the new state into whole granules of the committed one, in ascending order, and keeps those that
 * differ. */
typedef struct {
    pm_region *region;
    pm_helper *helper;
    pm_writer *writer;
    pm_digest changed; /* by what the state's digest differs */
    uint64_t offset; /* of the granule in `bytes`; UINT64_MAX: none */
    /* Some of it was taken into use since the last commit, which says nothing about it: see pm_gather */
    bool taken;
    uint8_t bytes[PM_PAGE] __attribute__((aligned(64)));
} composer;

/* end: of an extent that has its pages to itself, if one was composed: what follows there means nothing, and is left
 * out. */
static void compose_flush(composer *c, uint64_t end)
{
    uint64_t length = c->region->media->granule;
    if (end - c->offset < length) length = pm_round_up(end - c->offset, PM_LINE);
    if (c->offset != UINT64_MAX && (c->taken || memcmp(c->bytes, c->region->home + c->offset, length))) {
        uint8_t *room = pm_writer_room(c->writer, c->offset, length);
        memcpy(room, c->bytes, length);
        pm_writer_keep(c->writer, c->offset, room, length);
    }
    c->offset = UINT64_MAX;
    c->taken = false;
}

/* fresh: this space belonged to nobody at the last commit. */
static void compose(composer *c, uint64_t offset, const void *source, size_t length, bool fresh)
{
    uint64_t granule = c->region->media->granule;
    const uint8_t *from = source;
    while (length) {
        uint64_t base = offset / granule * granule;
        size_t part = base + granule - offset < length ? base + granule - offset : length;
        if (base != c->offset) {
            compose_flush(c, UINT64_MAX);
            memcpy(c->bytes, c->region->home + base, granule);
            c->offset = base;
        }
        memcpy(c->bytes + (offset - base), from, part);
        c->taken |= fresh;
        offset += part, from += part, length -= part;
    }
}

/* Lines of a page that tell of it. No two are as far apart as two others: changes at regular distances meet few of
 * them. */
static const uint8_t sample[] = {3, 8, 18, 26, 35, 42, 55, 61};
enum { SAMPLED = sizeof sample, SAMPLED_HALF = 3 };

static void ask_for_sample(const uint8_t *page)
{
    for (int i = 0; i < SAMPLED; i++) __builtin_prefetch(page + sample[i] * PM_LINE);
}

/* True if about half of a page differs, or more, as far as its sample tells. False if nothing does. */
static bool sample_differs(const uint8_t *a, const uint8_t *b)
{
    int changed = 0;
    for (int i = 0; i < SAMPLED; i++) changed += memcmp(a + sample[i] * PM_LINE, b + sample[i] * PM_LINE, PM_LINE) != 0;
    return changed >= SAMPLED_HALF;
}

void pm_gather_expect(const pm_region *region, const uint8_t *live, uint64_t home, uint64_t length, uint64_t at,
                      uint64_t bytes)
{
    enum { FIRST = 4 };
    uint64_t block = at / PM_PAGE, end = pm_extent_blocks(at + bytes);
    for (uint64_t i = 0; i < bytes && i < FIRST * PM_PAGE; i += PM_LINE) __builtin_prefetch(live + at + i);
    __builtin_prefetch(region->home + home + pm_extent_table(length) + 8 * block);
    for (uint64_t i = block; i < end && i < block + FIRST; i++) ask_for_sample(region->home + home + i * PM_PAGE);
}

typedef enum { PAGE_EQUAL, PAGE_SPARSE, PAGE_WHOLE } page_change;

/* A whole page of the new state: copied once into the writer's room, and compared, hashed and written from there (I6).
 * offset: of its home. next: the page that will follow. unseen: take it without comparing it with home. */
static page_change gather_page(composer *c, const uint8_t *live, const uint8_t *next, uint64_t offset, bool unseen,
                               uint64_t *hash)
{
    pm_region *region = c->region;
    pm_writer *writer = c->writer;
    compose_flush(c, UINT64_MAX);
    uint8_t *room = pm_writer_room(writer, offset, PM_PAGE);
    for (unsigned at = 0; !unseen && at < PM_PAGE; at += PM_LINE) __builtin_prefetch(region->home + offset + at);
    uint64_t page_hash = pm_hash64_copy_page_of(room, live, next);
    uint64_t changed = unseen ? UINT64_MAX : pm_page_changed_lines(room, region->home + offset);
    if (!changed) return PAGE_EQUAL;
    if (hash) *hash = pm_seal(page_hash, offset, region->store_id);
    int lines_changed = __builtin_popcountll(changed);
    if (region->media->granule == PM_PAGE || lines_changed > 48) {
        pm_writer_keep(writer, offset, room, PM_PAGE);
        return PAGE_WHOLE;
    }
    while (changed) {
        unsigned first = (unsigned)__builtin_ctzll(changed);
        uint64_t rest = ~(changed >> first);
        unsigned lines = rest ? (unsigned)__builtin_ctzll(rest) : 64;
        pm_writer_keep(writer, offset + first * PM_LINE, room + first * PM_LINE, lines * PM_LINE);
        changed &= lines + first < 64 ? ~UINT64_C(0) << (lines + first) : 0;
    }
    return PAGE_SPARSE;
}

/* Pages from one page of a sample to the next. */
static uint64_t sample_step(uint64_t length)
{
    enum { ONE_PAGE_OF = 8, PAGES_MOST = 64 };
    uint64_t blocks = length / PM_PAGE;
    return blocks / PAGES_MOST > ONE_PAGE_OF ? blocks / PAGES_MOST : ONE_PAGE_OF;
}

bool pm_gather_sample_readable(const pm_region *region, uint64_t place, uint64_t home, uint64_t length)
{
    uint64_t step = sample_step(length) * PM_PAGE;
    for (uint64_t at = 0; at + PM_PAGE <= length; at += step)
        if (pm_region_comparable(region, place + at, home + at, PM_PAGE) != PM_OK) return false;
    return true;
}

bool pm_gather_mostly_changed(const pm_region *region, uint64_t place, uint64_t home, uint64_t length)
{
    enum { LINES_APART = 21 };
    uint64_t blocks = length / PM_PAGE, step = sample_step(length), seen = 0, changed = 0;
    for (uint64_t block = 0; block < blocks; block += step, seen++) {
        uint64_t at = block * PM_PAGE, end = at + PM_PAGE;
        while (at < end && memcmp(region->live + place + at, region->home + home + at, PM_LINE))
            at += LINES_APART * PM_LINE;
        changed += at >= end;
    }
    return seen && changed >= seen - seen / 4;
}

/* Which blocks of an extent are gathered. */
typedef struct {
    bool all; /* without comparing them with home */
    pm_sieve *sieve; /* NULL: what may differ is in a set */
} choice;

/* The next block, from this one on, that may differ from home. */
static uint64_t next_block(const pm_region *region, const pm_candidate *extent, choice of, uint64_t block)
{
    if (of.all || extent->look == PM_LOOK_ALL) return block;
    uint64_t first = extent->offset / PM_PAGE, end = first + pm_extent_blocks(extent->length);
    if (extent->look == PM_LOOK_ONLY) return pm_watch_promised(&region->watches, first + block, end) - first;
    return (of.sieve ? pm_sieve_next(of.sieve, first + block, end)
                     : pm_page_next(&region->watches.dirty, first + block, end))
           - first;
}

enum { UNCOMPARED = 7 };

/* The hashes that a commit changes can be read. Contents were read by the program that changed them, and smaller
 * extents when a program got them (pm_region_prepare): of the hashes this may be the first time. */
static pm_status table_readable(const pm_region *region, const pm_candidate *extent, uint64_t first, uint64_t last)
{
    if (pm_extent_blocks(extent->length) < PM_WATCH_LEAST) return PM_OK;
    uint64_t table = extent->home + pm_extent_table(extent->length);
    uint64_t size = 8 * (last - first + 1);
    return pm_region_readable(region, region->home, table + 8 * first, size, "the hashes of contents");
}

/* Changed blocks of an extent, then the entries of its table of hashes. fresh: home means nothing yet. */
static pm_status gather_blocks(composer *c, pm_candidate *extent, choice of, bool fresh, bool *dense)
{
    pm_region *region = c->region;
    uint64_t offset = extent->home, length = extent->length;
    uint64_t blocks = pm_extent_blocks(length), dirty = 0, whole = 0;
    struct block_hash {
        uint64_t block, hash;
    } few[64], *hashes = few;
    uint64_t room = sizeof few / sizeof *few;
    /* Pages that were written and of which much changed, as a sample of one in eight of them says, are taken whole: to
     * compare them would be to wait for home's. The first one is always looked at: a commit without changes carries
     * nothing. */
    bool sampled = !of.all && extent->look >= PM_LOOK_CHANGED;
    unsigned uncompared = 0;
    bool copy_first = fresh || of.all || extent->look >= PM_LOOK_CHANGED;
    for (uint64_t block = next_block(region, extent, of, 0), next; block < blocks; block = next) {
        next = next_block(region, extent, of, block + 1);
        uint64_t at = offset + block * PM_PAGE;
        size_t bytes = length - block * PM_PAGE < PM_PAGE ? length - block * PM_PAGE : PM_PAGE;
        const uint8_t *live = region->live + extent->offset + block * PM_PAGE;
        if ((!copy_first || bytes < PM_PAGE) && !fresh && !memcmp(live, region->home + at, bytes)) continue;
        uint64_t hash;
        /* Read when all are gathered */
        __builtin_prefetch(region->home + offset + pm_extent_table(length) + 8 * block);
        if (bytes == PM_PAGE) {
            if (sampled && !uncompared && sample_differs(live, region->home + at)) uncompared = 1 + UNCOMPARED;
            if (sampled && uncompared <= 1) ask_for_sample(region->home + offset + next * PM_PAGE);
            page_change change = gather_page(c, live, live + (next - block) * PM_PAGE, at, of.all || uncompared, &hash);
            if (uncompared) uncompared--;
            whole += change == PAGE_WHOLE;
            if (change == PAGE_EQUAL) continue;
        } else {
            uint8_t copy[PM_PAGE];
            memcpy(copy, live, bytes);
            hash = pm_block_hash(region, copy, bytes, at);
            compose(c, at, copy, bytes, fresh);
        }
        if (dirty == room) {
            /* No more than it needs: for a few blocks of a large extent it would take longer than all the rest. */
            struct block_hash *more = realloc(hashes == few ? NULL : hashes, (room = 8 * room) * sizeof *hashes);
            if (!more) {
                if (hashes != few) free(hashes);
                return pm_fail(PM_NO_MEMORY, "no memory to gather a commit");
            }
            if (hashes == few) memcpy(more, few, sizeof few);
            hashes = more;
        }
        hashes[dirty++] = (struct block_hash){block, hash};
    }
    pm_status status = PM_OK;
    if (dirty && !fresh) status = table_readable(region, extent, hashes[0].block, hashes[dirty - 1].block);
    for (uint64_t i = 0; status == PM_OK && i < dirty; i++) {
        uint64_t at = offset + hashes[i].block * PM_PAGE,
                 entry = offset + pm_extent_table(length) + 8 * hashes[i].block, old;
        memcpy(&old, region->home + entry, sizeof old);
        pm_digest_add(&c->changed, at, pm_digest_term(at, hashes[i].hash) - (fresh ? 0 : pm_digest_term(at, old)));
        compose(c, entry, &hashes[i].hash, sizeof hashes[i].hash, fresh);
    }
    if (!pm_extent_is_small(length)) compose_flush(c, offset + pm_extent_size(length));
    if (hashes != few) free(hashes);
    extent->changed = dirty;
    if (dirty && extent->look != PM_LOOK_ONLY)
        *dense = length >= PM_PAGE && whole + (length % PM_PAGE != 0) >= blocks - blocks / 4;
    return status;
}

/* *dense: learned, most of it changed last time: if a sample says so again, it is taken whole, for comparing costs more
 * than it could save. */
static pm_status gather_extent(composer *c, pm_candidate *extent, bool fresh, bool *dense)
{
    pm_region *region = c->region;
    bool all = *dense && extent->look != PM_LOOK_ONLY
               && pm_gather_mostly_changed(region, extent->offset, extent->home, extent->length);
    if (all || !extent->shared) return gather_blocks(c, extent, (choice){all, NULL}, fresh, dense);
    pm_sieve sieve;
    pm_sieve_begin(&sieve, region, c->helper, extent->offset, extent->home, extent->length,
                   extent->look == PM_LOOK_ALL);
    extent->look = PM_LOOK_CHANGED;
    extent->shared = false; /* who gathers it again finds all in the set */
    pm_status status = gather_blocks(c, extent, (choice){false, &sieve}, fresh, dense);
    pm_sieve_end(&sieve);
    return status;
}

/* The page's old term goes, if it was metadata at the last commit. Returns what it was then. */
static unsigned gather_term(composer *c, uint64_t offset, bool gone)
{
    const pm_region *region = c->region;
    unsigned was = pm_map_kind(region, region->home, offset / PM_PAGE);
    if (was == PM_PAGE_META || was == PM_PAGE_SLAB)
        pm_digest_add(&c->changed, offset, -pm_page_term(region->home, offset));
    if (!gone) pm_digest_add(&c->changed, offset, pm_page_term(region->live, offset));
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
    uint64_t blocks = pm_extent_blocks(extent->length);
    for (uint64_t block = 0; (block = next_block(region, extent, (choice){false, NULL}, block)) < blocks; block++) {
        uint64_t at = block * PM_PAGE, left = extent->length - at;
        if (memcmp(region->live + extent->offset + at, region->home + extent->home + at,
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

/* Home is the committed image only where the committed state owns it (I2). In free space it shows what was there
 * before, or direct writes that no record declares: recovery brings none of that back, and applies older records there.
 * So what takes free space goes into the record whole, also where it equals home. */
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
        bool never = false, fresh;
        switch (next->what) {
        case PM_EXTENT:
            PM_TRY(gather_extent(&c, next, false, &next->buffer->dense));
            break;
        case PM_NEW_EXTENT:
            PM_TRY(gather_extent(&c, next, true, &never));
            break;
        case PM_META_PAGE:
            pm_page_seal(region, live);
            gather_page(&c, live, live, next->offset, gather_term(&c, next->offset, false) != PM_PAGE_META, NULL);
            break;
        case PM_META_SLAB:
            pm_page_seal(region, live);
            fresh = gather_term(&c, next->offset, false) != PM_PAGE_SLAB;
            compose(&c, next->offset, live, PM_LINE, fresh);
            break;
        case PM_META_GONE:
            gather_term(&c, next->offset, true);
            break;
        }
    }
    compose_flush(&c, UINT64_MAX);
    *digest = c.changed;
    return writer->status;
}
