#include "reader/pages.h"

#include <stdlib.h>

#include "space/catalog.h"
#include "space/page.h"
#include "reader/parts.h"
#include "commit/readers.h"

enum {
    ATTEMPTS = 1000,
    ATTEMPTS_LEAST = 4,     /* also if the process was stopped longer than its patience */
    AT_ONCE = 4 << 20,      /* so many bytes are copied before the records are read again, which may soon be gone */
    SMALL_EACH = 256 << 10, /* contents up to this size, and so many in all, are copied at once */
    SMALL_ALL = 1 << 20,
    FLIPS_MOST = 4,
    PASSES_MOST = 16, /* before a process that writes is asked for a pause */
    TABLE_PAGES = 16, /* that are read at once */
    QUEUED_MOST = AT_ONCE / PM_PAGE
};
#define PATIENCE UINT64_C(5000000000) /* nanoseconds */

static uint8_t *page_at(const pm_pages *t, uint64_t offset)
{
    return t->source.store.region.live + offset;
}

/* ---- applying records ----------------------------------------------------------------------------------------- */

/* Notes what a new record declares: copies of these pages are of no use. */
static void note_declared(pm_pages *t, size_t record)
{
    const pm_recovery_log *found = &t->source.found;
    pm_log_item item;
    for (uint64_t cursor = 0; pm_log_next(found->bodies[record].body, found->bodies[record].length, &cursor, &item);) {
        if (!pm_log_is_direct(&item)) continue;
        uint64_t first = item.offset / PM_PAGE, end = first + pm_extent_pages(item.length);
        pm_page_set_clear(&t->loaded, first, end);
        for (uint64_t page = first + pm_extent_table(item.length) / PM_PAGE; page < end; page++)
            pm_page_hashes_remove(&t->tables, page);
        if (item.kind == PM_ITEM_SLOT) {
            uint64_t slot = pm_log_direct(&item).slot;
            pm_log_choose_slot(&t->source.store.log, (unsigned)(slot / 2), slot % 2);
            t->flips++;
        }
    }
}

/* Finds the last record that declares each of these pages, as far as one does. */
static pm_status find_declared(const pm_pages *t, pm_page_hashes *declared)
{
    const pm_recovery_log *found = &t->source.found;
    pm_log_item item;
    for (size_t i = 0; i < found->count; i++)
        for (uint64_t cursor = 0; pm_log_next(found->bodies[i].body, found->bodies[i].length, &cursor, &item);) {
            if (!pm_log_is_direct(&item)) continue;
            uint64_t page = item.offset / PM_PAGE, end = page + pm_extent_pages(item.length);
            if (page < t->unapplied_from) page = t->unapplied_from;
            if (end > t->unapplied_to) end = t->unapplied_to;
            for (; page < end && (page = pm_page_set_next(&t->unapplied, page, end)) < end; page++)
                PM_TRY(pm_page_hashes_add(declared, (pm_page_hash){page, i + 1}));
        }
    return PM_OK;
}

/* Applies the logged ranges of a record to the pages of a set, but for those that a later record declares (I8). */
static void apply(pm_pages *t, size_t record, const pm_page_set *set, const pm_page_hashes *declared)
{
    const pm_recovery_log *found = &t->source.found;
    pm_log_item item;
    for (uint64_t cursor = 0; pm_log_next(found->bodies[record].body, found->bodies[record].length, &cursor, &item);) {
        if (item.kind != PM_ITEM_LOGGED) continue;
        for (uint64_t at = item.offset, end = at + item.length; at < end;) {
            uint64_t page = at / PM_PAGE, page_end = (page + 1) * PM_PAGE < end ? (page + 1) * PM_PAGE : end;
            if (pm_page_set_has(set, page) && pm_page_hashes_at(declared, page) <= record + 1)
                memcpy(page_at(t, at), item.bytes + (at - item.offset), page_end - at);
            at = page_end;
        }
    }
}

/* Notes which pages a new record changes. */
static void note_changed(pm_pages *t, size_t record)
{
    const pm_recovery_body *found = &t->source.found.bodies[record];
    pm_log_item item;
    for (uint64_t cursor = 0; pm_log_next(found->body, found->length, &cursor, &item);) {
        if (item.kind != PM_ITEM_LOGGED) continue;
        uint64_t first = item.offset / PM_PAGE, end = (item.offset + item.length + PM_PAGE - 1) / PM_PAGE;
        pm_page_set_add(&t->changed, first, end);
        for (uint64_t page = first; page < end; page++) pm_page_hashes_remove(&t->tables, page);
    }
}

/* The log was emptied: the committed image has the pages that its records changed. */
static void forget_changed(pm_pages *t)
{
    uint64_t pages = t->source.store.region.size / PM_PAGE;
    for (uint64_t page = 0; t->changing && (page = pm_page_set_next(&t->changed, page, pages)) < pages; page++) {
        pm_page_set_clear(&t->loaded, page, page + 1);
        pm_source_let_go(&t->source, PM_REGION_START + page * PM_PAGE, PM_PAGE);
    }
    pm_page_set_clear(&t->changed, 0, pages);
}

/* Brings the pages that were copied since to the commit of the others. */
static pm_status apply_to_unapplied(pm_pages *t)
{
    pm_page_hashes declared = {0};
    pm_status status = find_declared(t, &declared);
    for (size_t i = 0; status == PM_OK && i < t->source.found.count; i++) apply(t, i, &t->unapplied, &declared);
    pm_page_hashes_free(&declared);
    pm_page_set_clear(&t->unapplied, t->unapplied_from, t->unapplied_to);
    t->unapplied_from = t->unapplied_to = 0;
    return status;
}

/* Brings all pages that were copied to the newest commit (I19). */
static pm_status apply_records(pm_pages *t)
{
    const pm_page_hashes none = {0}; /* it is the newest record */
    pm_source *source = &t->source;
    size_t from;
    if (t->unapplied_from < t->unapplied_to) PM_TRY(apply_to_unapplied(t));
    const uint64_t generation = source->store.log.header.generation, sequence = source->store.log.sequence;
    PM_TRY(pm_source_follow(source, &from, &t->missed));
    if (source->store.log.header.generation != generation || source->store.log.sequence != sequence)
        t->complete = false;
    if (!from) forget_changed(t);
    for (size_t i = from; i < source->found.count && !t->missed; i++) {
        note_declared(t, i);
        note_changed(t, i);
        apply(t, i, &t->loaded, &none);
    }
    return PM_OK;
}

/* ---- which pages are needed ----------------------------------------------------------------------------------- */

pm_status pm_pages_damaged(const char *what, uint64_t offset)
{
    return pm_fail(PM_CORRUPT, "%s at region offset %llu is damaged", what, (unsigned long long)offset);
}

/* A reference to something that is not in the region. */
static pm_status outside(const pm_pages *t, uint64_t offset)
{
    return t->lenient ? PM_OK : pm_pages_damaged("a reference in the metadata", offset);
}

/* Reads pages. Those of contents that can't be read are left for later; metadata then stay zeros, which are not
 * valid. */
static pm_status read_leniently(pm_pages *t, uint64_t first, uint64_t end, bool contents)
{
    for (uint64_t page = first; page < end; page++) {
        pm_status status = pm_source_read(&t->source, PM_REGION_START + page * PM_PAGE, PM_PAGE, "a page");
        if (status == PM_OK || (!contents && status == PM_UNREADABLE)) pm_page_set_add(&t->loaded, page, page + 1);
        else if (status != PM_UNREADABLE) return status;
    }
    return PM_OK;
}

static pm_status read_pages(pm_pages *t, uint64_t first, uint64_t end, bool contents)
{
    const char *what = contents ? "contents" : "a page of metadata";
    pm_status status = pm_source_read(&t->source, PM_REGION_START + first * PM_PAGE, (end - first) * PM_PAGE, what);
    if (status == PM_UNREADABLE && t->lenient) return read_leniently(t, first, end, contents);
    if (status == PM_OK) pm_page_set_add(&t->loaded, first, end);
    return status;
}

/* Copies those of some pages that are missing. */
static pm_status need(pm_pages *t, uint64_t first, uint64_t end, bool contents)
{
    uint64_t size = t->source.store.region.size / PM_PAGE;
    if (first >= size || end > size) return outside(t, first * PM_PAGE);
    while (first < end && t->added < AT_ONCE) {
        if (pm_page_set_has(&t->loaded, first)) {
            first++;
            continue;
        }
        uint64_t to = first + 1;
        while (to < end && !pm_page_set_has(&t->loaded, to) && (to - first) * PM_PAGE < AT_ONCE) to++;
        PM_TRY(read_pages(t, first, to, contents));
        if (!pm_page_set_has(&t->loaded, first)) { /* it can't be read */
            first = to;
            continue;
        }
        pm_page_set_add(&t->unapplied, first, to);
        if (t->unapplied_from == t->unapplied_to) t->unapplied_from = first, t->unapplied_to = to;
        if (first < t->unapplied_from) t->unapplied_from = first;
        if (to > t->unapplied_to) t->unapplied_to = to;
        t->added += (to - first) * PM_PAGE;
        first = to;
    }
    return PM_OK;
}

static pm_status need_metadata(pm_pages *t, uint64_t offset)
{
    return need(t, offset / PM_PAGE, offset / PM_PAGE + 1, false);
}

/* *skip: the page is damaged, and is left out. */
static pm_status valid_page(const pm_pages *t, uint64_t offset, uint32_t type, bool *skip)
{
    const pm_region *region = &t->source.store.region;
    *skip = !pm_page_valid(region, region->live, offset, type);
    return *skip && !t->lenient ? pm_pages_damaged("the metadata page", offset) : PM_OK;
}

/* The same for a node. */
static pm_status valid_node(const pm_pages *t, uint64_t offset, bool *skip)
{
    PM_TRY(valid_page(t, offset, PM_TYPE_NODE, skip));
    if (!*skip) *skip = !pm_node_valid((const void *)page_at(t, offset));
    return *skip && !t->lenient ? pm_pages_damaged("the catalog", offset) : PM_OK;
}

/* Calls a function for the place of each map page; `number` is that of the first page that it describes. */
typedef pm_status map_visitor(pm_pages *t, uint64_t map, uint64_t number);

static pm_status for_each_map(pm_pages *t, map_visitor *visit)
{
    const pm_root *root = (const void *)page_at(t, 0);
    for (unsigned list = 0; list < PM_ROOT_LISTS; list++) {
        bool skip = !root->map_lists[list];
        if (!skip) PM_TRY(valid_page(t, root->map_lists[list], PM_TYPE_MAP_LIST, &skip));
        if (skip) continue;
        const pm_map_list *maps = (const void *)page_at(t, root->map_lists[list]);
        for (unsigned i = 0; i < PM_MAP_LIST_SLOTS; i++)
            if (maps->maps[i]) PM_TRY(visit(t, maps->maps[i], ((uint64_t)list * PM_MAP_LIST_SLOTS + i) * PM_MAP_PAGES));
    }
    return PM_OK;
}

static pm_status need_lists(pm_pages *t)
{
    const pm_root *root = (const void *)page_at(t, 0);
    for (unsigned list = 0; list < PM_ROOT_LISTS; list++)
        if (root->map_lists[list]) PM_TRY(need_metadata(t, root->map_lists[list]));
    return PM_OK;
}

static pm_status need_map(pm_pages *t, uint64_t map, uint64_t number)
{
    (void)number;
    return need_metadata(t, map);
}

/* Calls a function for each run of pages of metadata and slabs that a map describes. */
typedef pm_status run_visitor(pm_pages *t, uint64_t first, uint64_t end);

static pm_status for_each_run(pm_pages *t, uint64_t map_offset, uint64_t number, run_visitor *visit)
{
    const uint64_t metadata = UINT64_C(0xaaaaaaaaaaaaaaaa); /* PM_PAGE_META and PM_PAGE_SLAB have this bit */
    uint64_t first = 0, end = 0;
    for (unsigned word = 0; word < PM_MAP_PAGES / 32; word++) {
        /* The visit may copy pages, but not this one */
        const pm_map *map = (const void *)page_at(t, map_offset);
        for (uint64_t left = map->words[word] & metadata; left; left &= left - 1) {
            uint64_t page = number + word * 32u + (unsigned)__builtin_ctzll(left) / 2;
            if (page == end) {
                end++;
                continue;
            }
            if (first < end) PM_TRY(visit(t, first, end));
            first = page, end = page + 1;
        }
    }
    return first < end ? visit(t, first, end) : PM_OK;
}

static pm_status need_run(pm_pages *t, uint64_t first, uint64_t end)
{
    return need(t, first, end, false);
}

static pm_status need_described(pm_pages *t, uint64_t map, uint64_t number)
{
    bool skip;
    PM_TRY(valid_page(t, map, PM_TYPE_MAP, &skip));
    return skip ? PM_OK : for_each_run(t, map, number, need_run);
}

static pm_status add_pair(pm_pages *t, const pm_slot_pair *pair, unsigned entry)
{
    const uint64_t *bits = t->source.store.log.slots;
    pm_pages_pair *pairs = realloc(t->pairs, (t->pair_count + 1) * sizeof *pairs);
    if (!pairs) return pm_fail(PM_NO_MEMORY, "no memory for a snapshot");
    t->pairs = pairs;
    bool first = (bits[entry / 64] >> entry % 64 & 1) == pair->base;
    pairs[t->pair_count++] = (pm_pages_pair){pair->extent, pair->length, first ? pair->extent : pair->other};
    return PM_OK;
}

/* Reads the table of slots. */
static pm_status find_pairs(pm_pages *t)
{
    const pm_root *root = (const void *)page_at(t, 0);
    t->pair_count = 0;
    for (unsigned i = 0; i < PM_SLOT_PAGES; i++) {
        bool skip = !root->slots[i];
        if (!skip) PM_TRY(valid_page(t, root->slots[i], PM_TYPE_SLOTS, &skip));
        if (skip) continue;
        const pm_slot_table *table = (const void *)page_at(t, root->slots[i]);
        for (unsigned j = 0; j < PM_SLOTS_PER_PAGE; j++)
            if (table->pairs[j].extent && i * PM_SLOTS_PER_PAGE + j < PM_SLOTS_MOST)
                PM_TRY(add_pair(t, &table->pairs[j], i * PM_SLOTS_PER_PAGE + j));
    }
    return PM_OK;
}

uint64_t pm_pages_place(const pm_pages_pair *pairs, size_t count, uint64_t extent, uint64_t length, bool *paired)
{
    for (size_t i = 0; i < count; i++) {
        if (pairs[i].extent != extent || pairs[i].length != length) continue;
        *paired = true;
        return pairs[i].current;
    }
    *paired = false;
    return extent;
}

bool pm_pages_wanted(const pm_pages *t, uint64_t extent, uint64_t length)
{
    for (size_t i = 0; i < t->wanted_count; i++)
        if (t->wanted[i].extent == extent && t->wanted[i].length == length) return true;
    return false;
}

/* Hashes queued pages that follow one another. A page that can't be read is left for later. */
static pm_status hash_run(const pm_pages *t, unsigned thread, uint64_t at, uint64_t end)
{
    uint8_t *read = t->read + (size_t)thread * TABLE_PAGES * PM_PAGE;
    uint64_t place = PM_REGION_START + t->queue[at].page * PM_PAGE;
    uint64_t length = (end - at - 1) * PM_PAGE + t->queue[end - 1].used;
    pm_status status = pm_source_pread(t->source.fd, place, length, read, "a table");
    if (status == PM_UNREADABLE && end - at == 1) return PM_OK;
    if (status == PM_UNREADABLE) {
        for (; at < end; at++) PM_TRY(hash_run(t, thread, at, at + 1));
        return PM_OK;
    }
    for (pm_table_page *p = t->queue + at; status == PM_OK && p < t->queue + end; p++, read += PM_PAGE)
        p->hash = pm_page_hashes_of(read, p->used);
    return status;
}

static pm_status hash_queued(void *pages, unsigned thread, uint64_t at, uint64_t end)
{
    const pm_pages *t = pages;
    for (uint64_t next; at < end; at = next) {
        next = at + 1;
        while (next < end && next - at < TABLE_PAGES && t->queue[next].page == t->queue[next - 1].page + 1) next++;
        PM_TRY(hash_run(t, thread, at, next));
    }
    return PM_OK;
}

/* Hashes all pages that are queued. */
static pm_status hash_tables(pm_pages *t)
{
    PM_TRY(pm_parts_do(0, t->queued, hash_queued, t));
    for (size_t i = 0; i < t->queued; i++) {
        if (!t->queue[i].hash) continue;
        PM_TRY(pm_page_hashes_add(&t->tables, (pm_page_hash){t->queue[i].page, t->queue[i].hash}));
        t->added += PM_PAGE;
    }
    return PM_OK;
}

static bool is_table_missing(const pm_pages *t, uint64_t page)
{
    return !pm_page_set_has(&t->loaded, page) && !pm_page_set_has(&t->changed, page)
           && !pm_page_hashes_at(&t->tables, page);
}

/* Queues the pages of a table, up to the end of its extent, or copies those of them that records change (I19). */
static pm_status need_table(pm_pages *t, uint64_t table, uint64_t extent_end)
{
    uint64_t end = (extent_end + PM_PAGE - 1) / PM_PAGE;
    for (uint64_t page = table / PM_PAGE; page < end && t->added < AT_ONCE && t->queued < QUEUED_MOST; page++) {
        if (pm_page_set_has(&t->changed, page)) PM_TRY(need(t, page, page + 1, true));
        if (!is_table_missing(t, page)) continue;
        t->queue[t->queued++] = (pm_table_page){.page = page, .used = pm_pages_used(page, extent_end)};
    }
    return PM_OK;
}

static pm_status need_extent(pm_pages *t, uint64_t extent, uint64_t length, bool fixed)
{
    bool paired;
    uint64_t limit = t->source.store.region.size;
    uint64_t place = pm_pages_place(t->pairs, t->pair_count, extent, length, &paired);
    if (extent % PM_PAGE || place % PM_PAGE || length > limit || pm_extent_size(length) > limit
        || place > limit - pm_extent_size(length))
        return outside(t, extent);
    uint64_t first = place / PM_PAGE, end = first + pm_extent_pages(length);
    bool wanted = pm_pages_wanted(t, extent, length);
    t->seen += wanted && (fixed || t->contents);
    bool small = length <= SMALL_EACH && t->small + length <= SMALL_ALL;
    if (small) t->small += length;
    /* A commit that writes an extent whole leaves the slot before it alone. So such contents are copied last, after
     * the newest commit is known: mostly they are there until the next commit but one. Once in a while they are needed
     * together with the records that changed a part of them. */
    bool now = wanted && t->contents && !(paired && (t->follows || t->flips > FLIPS_MOST));
    if (small || now) return need(t, first, end, true);
    return need_table(t, place + pm_extent_table(length), place + pm_extent_size(length));
}

/* The extents of all entries in the leaves among these pages. */
static pm_status need_of_leaves(pm_pages *t, uint64_t first, uint64_t end)
{
    uint64_t pages = t->source.store.region.size / PM_PAGE; /* a damaged map describes more */
    if (end > pages) end = pages;
    for (uint64_t at = first * PM_PAGE; at < end * PM_PAGE; at += PM_PAGE) {
        const pm_node *node = (const void *)page_at(t, at);
        if (node->head.type != PM_TYPE_NODE || node->head.self != at || node->head.level) continue;
        bool skip;
        PM_TRY(valid_node(t, at, &skip));
        for (unsigned i = 0; i < node->count && !skip; i++) {
            pm_cell cell = pm_node_cell(node, i, NULL, NULL);
            if (cell.offset && !pm_extent_is_small(cell.length))
                PM_TRY(need_extent(t, cell.offset, cell.length, cell.flags & PM_ENTRY_FIXED));
        }
    }
    return PM_OK;
}

static pm_status need_extents(pm_pages *t, uint64_t map, uint64_t number)
{
    bool skip;
    PM_TRY(valid_page(t, map, PM_TYPE_MAP, &skip));
    return skip ? PM_OK : for_each_run(t, map, number, need_of_leaves);
}

/* Copies the pages that records change. */
static pm_status need_changed(pm_pages *t)
{
    uint64_t pages = t->source.store.region.size / PM_PAGE;
    for (uint64_t page = 0; (page = pm_page_set_next(&t->changed, page, pages)) < pages && t->added < AT_ONCE; page++)
        PM_TRY(need(t, page, page + 1, true));
    return PM_OK;
}

/* Looks through what is there, and copies what is missing at the next level. */
static pm_status pass(pm_pages *t)
{
    t->added = t->small = t->seen = t->queued = 0;
    t->complete = false;
    PM_TRY(need_metadata(t, 0));
    if (t->added) return PM_OK;
    bool skip;
    PM_TRY(valid_page(t, 0, PM_TYPE_ROOT, &skip));
    if (skip) return PM_OK;
    PM_TRY(need_lists(t));
    if (t->added) return PM_OK;
    PM_TRY(for_each_map(t, need_map));
    if (t->added) return PM_OK;
    PM_TRY(for_each_map(t, need_described));
    if (t->added) return PM_OK;
    PM_TRY(find_pairs(t));
    PM_TRY(for_each_map(t, need_extents));
    PM_TRY(hash_tables(t));
    if (t->changing) PM_TRY(need_changed(t));
    t->complete = t->added < AT_ONCE && t->queued < QUEUED_MOST;
    return PM_OK;
}

/* ---- taking ----------------------------------------------------------------------------------------------------- */

void pm_pages_header(const pm_pages *t, uint8_t *pages)
{
    const pm_log *log = &t->source.store.log;
    pm_header header = log->header;
    header.sequence = log->sequence;
    header.digest = log->digest;
    memcpy(header.slots, log->slots, sizeof header.slots);
    header.salt = pm_log_new_id(&t->source.store.media); /* so that no record in the file is valid */
    header.flags = PM_HEADER_CLEAN;
    pm_log_header_finish(&header);
    memset(pages, 0, PM_REGION_START);
    memcpy(pages, &header, sizeof header);
    memcpy(pages + PM_PAGE, &header, sizeof header);
}

static pm_status begin(pm_pages *t, int fd)
{
    PM_TRY(pm_source_begin(&t->source, fd));
    t->loaded_pages = t->source.store.region.size / PM_PAGE;
    uint64_t words = t->loaded_pages / 64 + 1;
    t->loaded.bits = calloc(words, sizeof *t->loaded.bits);
    t->unapplied.bits = calloc(words, sizeof *t->unapplied.bits);
    t->changed.bits = calloc(words, sizeof *t->changed.bits);
    t->queue = malloc(QUEUED_MOST * sizeof *t->queue);
    t->read = malloc((size_t)2 * TABLE_PAGES * PM_PAGE);
    bool there = t->loaded.bits && t->unapplied.bits && t->changed.bits && t->queue && t->read;
    return there ? PM_OK : pm_fail(PM_NO_MEMORY, "no memory for a snapshot");
}

void pm_pages_end(pm_pages *t)
{
    free(t->loaded.bits);
    free(t->unapplied.bits);
    free(t->changed.bits);
    free(t->queue);
    free(t->read);
    pm_page_hashes_free(&t->tables);
    free(t->pairs);
    pm_source_end(&t->source);
    *t = (pm_pages){.source = {.fd = -1, .copy = -1},
                    .wanted = t->wanted,
                    .wanted_count = t->wanted_count,
                    .contents = t->contents,
                    .follows = t->follows,
                    .changing = t->changing,
                    .lenient = t->lenient,
                    .asked = t->asked,
                    .held = t->held};
}

static pm_status too_quick(void)
{
    return pm_fail(PM_STALE, "the store changes too quickly to be read: try again");
}

void pm_pages_release(pm_pages *t, int fd)
{
    if (t->asked) pm_readers_ask_no_more(fd, t->asked);
    t->asked = 0;
}

/* Goes to the newest commit, and copies what it needs. If commits write arrays whole as quickly as these are copied,
 * the process that makes them is asked for a pause (I21). */
static pm_status advance(pm_pages *t)
{
    pm_status status = PM_OK;
    uint64_t begun = pm_readers_time();
    unsigned passes = 0;
    bool late = false;
    /* The log is read first, as most of its records are older than the pages. */
    if (!t->log_read) PM_TRY(apply_records(t));
    t->log_read = true;
    t->complete = false; /* other contents may be wanted */
    t->flips = 0;
    do {
        status = apply_records(t);
        /* No commit came since the last page was copied: the pass before this one has all that is needed. */
        if (status == PM_OK && t->complete && !t->missed) break;
        if (status == PM_OK && !t->missed) status = pass(t);
        bool many = passes++ > PASSES_MOST, quick = t->flips > FLIPS_MOST || many;
        if (quick && !t->asked) t->asked = pm_readers_ask(t->source.fd);
        else if (quick) pm_readers_nap();
        late = many && pm_readers_time() - begun > PATIENCE;
    } while (status == PM_OK && t->added && !t->missed && !late);
    if (!t->held) pm_pages_release(t, t->source.fd);
    return status == PM_OK && t->added && late ? too_quick() : status;
}

/* True if the log was emptied since: what looks damaged may be a mixture of before and after. */
static bool has_changed(const pm_pages *t, int fd)
{
    pm_source *now = calloc(1, sizeof *now);
    if (!now) return false;
    bool changed = pm_source_begin(now, fd) == PM_OK
                   && now->store.log.header.generation != t->source.store.log.header.generation;
    pm_source_end(now);
    free(now);
    return changed;
}

pm_status pm_pages_reach(pm_pages *t, int fd)
{
    uint64_t begun = pm_readers_time();
    bool written = false;
    for (unsigned i = 0; i < ATTEMPTS_LEAST || (i < ATTEMPTS && pm_readers_time() - begun < PATIENCE); i++) {
        bool old = t->source.copy >= 0;
        pm_status status = old ? PM_OK : begin(t, fd);
        if (status == PM_OK) status = advance(t);
        if (status == PM_OK && !t->missed) return PM_OK;
        bool bad = status == PM_CORRUPT || status == PM_UNREADABLE;
        bool again = status == PM_OK || (bad && (old || !t->lenient || has_changed(t, fd)));
        t->lenient |= bad && !old && !has_changed(t, fd);
        written = t->source.written;
        pm_pages_end(t);
        if (!again) return status;
    }
    return written ? too_quick()
                   : pm_fail(PM_CORRUPT, "the log is damaged: a commit that was durable can't be read any more");
}
