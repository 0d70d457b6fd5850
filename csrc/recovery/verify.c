#include "recovery/verify.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/search.h"
#include "space/extent.h"
#include "space/leaves.h"
#include "space/page.h"

enum { PROBLEMS_KEPT = 1000, HOLES_TOLD = 100 /* the last one goes to the end if there are more */ };

struct pm_report {
    pm_problem *problems;
    size_t count, room;
};

typedef struct {
    pm_region *region;
    const uint8_t *image;
    pm_report *report;
    uint8_t *kinds;    /* per page: its kind, by the catalog and the map's own pages */
    uint64_t *blocks;  /* per page of kind slab: the blocks that entries own */
    uint64_t keys;
    uint64_t paired;   /* entries whose extent has two slots */
    size_t beside;     /* problems of contents, which change neither the digest nor what is reachable */
    pm_digest digest;  /* of the state as it was found */
    uint64_t suspect;  /* the place whose contribution is not the committed one; UINT64_MAX: not known */
    bool no_memory;
} checker;

static void add_problem(checker *c, uint64_t offset, uint64_t length, uint64_t block, pm_key key, const char *format,
                        ...) __attribute__((format(printf, 6, 7)));

static void add_problem(checker *c, uint64_t offset, uint64_t length, uint64_t block, pm_key key, const char *format,
                        ...)
{
    pm_report *report = c->report;
    if (report->count == PROBLEMS_KEPT) return;
    if (report->count == report->room) {
        size_t room = report->room ? 2 * report->room : 16;
        pm_problem *problems = realloc(report->problems, room * sizeof *problems);
        if (!problems) {
            c->no_memory = true;
            return;
        }
        report->problems = problems, report->room = room;
    }
    pm_problem *problem = &report->problems[report->count++];
    problem->offset = offset, problem->length = length, problem->block = block;
    problem->key_length = (uint32_t)key.length;
    if (key.length) memcpy(problem->key, key.bytes, key.length);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem->text, sizeof problem->text, format, arguments);
    va_end(arguments);
}

static const pm_key no_key = {NULL, 0};

static bool is_valid_beside_contents(const checker *c)
{
    return c->report->count == c->beside;
}

#define LOST_WRITE "(or were not when last changed): a write was lost or went astray"

/* ---- pages --------------------------------------------------------------------------------------------------- */

static const char *page_name(uint32_t type)
{
    switch (type) {
    case PM_TYPE_ROOT: return "root";
    case PM_TYPE_MAP_LIST: return "list of the space map";
    case PM_TYPE_MAP: return "space map";
    case PM_TYPE_NODE: return "catalog node";
    case PM_TYPE_SLOTS: return "table of slots";
    default: return "slab";
    }
}

/* Counts a page, or a slab's header, whose own checksum is valid. */
static void count_page(checker *c, uint64_t offset, uint32_t type)
{
    pm_digest_add(&c->digest, offset, pm_page_contribution(c->image, offset));
    if (offset == c->suspect)
        add_problem(c, offset, pm_page_bytes(type), 0, no_key,
                    "the %s page at region offset %llu is not the one that was committed last " LOST_WRITE,
                    page_name(type), (unsigned long long)offset);
}

/* Notes that a page is of `kind`; false if it has a use already, or lies outside. */
static bool claim(checker *c, uint64_t offset, unsigned kind, pm_key key)
{
    if (offset % PM_PAGE || offset >= c->region->size) {
        add_problem(c, offset, PM_PAGE, 0, key, "a reference points outside the store");
        return false;
    }
    uint8_t *there = &c->kinds[offset / PM_PAGE];
    if (*there != PM_PAGE_FREE && !(kind == PM_PAGE_SLAB && *there == PM_PAGE_SLAB)) {
        add_problem(c, offset, PM_PAGE, 0, key, "the page at region offset %llu is used twice",
                    (unsigned long long)offset);
        return false;
    }
    *there = (uint8_t)kind;
    return true;
}

/* True if bytes of a page can be read; otherwise adds a problem. */
static bool is_readable(checker *c, uint64_t offset, uint64_t length, const char *what)
{
    if (pm_region_readable(c->region, c->image, offset, length, what) == PM_OK) return true;
    add_problem(c, offset, length, 0, no_key, "%s", pm_message());
    return false;
}

/* True if a page of metadata is sound; otherwise adds a problem. */
static bool is_sound(checker *c, uint64_t offset, uint32_t type)
{
    if (!is_readable(c, offset, PM_PAGE, page_name(type))) return false;
    if (pm_page_valid(c->region, c->image, offset, type)) return true;
    add_problem(c, offset, PM_PAGE, 0, no_key, "the %s page at region offset %llu is damaged", page_name(type),
                (unsigned long long)offset);
    return false;
}

static const void *metadata(checker *c, uint64_t offset, uint32_t type)
{
    if (!claim(c, offset, PM_PAGE_META, no_key) || !is_sound(c, offset, type)) return NULL;
    count_page(c, offset, type);
    return c->image + offset;
}

/* ---- entries ------------------------------------------------------------------------------------------------- */

static void check_small(checker *c, uint64_t offset, uint64_t length, pm_key key)
{
    unsigned class = pm_heap_slab_class(pm_extent_size(length));
    uint64_t page = offset / PM_PAGE, inside = offset % PM_PAGE - PM_LINE, block = inside / pm_heap_slab_block(class);
    if (offset % PM_PAGE < PM_LINE || inside % pm_heap_slab_block(class) || !(pm_heap_slab_all(class) >> block & 1)) {
        add_problem(c, offset, length, 0, key, "its extent is not on a block");
        return;
    }
    if (!claim(c, page * PM_PAGE, PM_PAGE_SLAB, key)) return;
    if (c->blocks[page] >> block & 1) add_problem(c, offset, length, 0, key, "its block is used twice");
    c->blocks[page] |= UINT64_C(1) << block;
    const pm_slab *slab = (const void *)(c->image + page * PM_PAGE);
    /* If it can't be read, check_contents reports that. */
    if (pm_region_readable(c->region, c->image, page * PM_PAGE, PM_PAGE, "slab") != PM_OK) return;
    if (slab->head.level != class) add_problem(c, offset, length, 0, key, "its slab has blocks of another size");
}

/* The slots of an extent at the last commit; NULL: it has one. */
static const pm_double_buffer *slots_of(const checker *c, uint64_t extent)
{
    const pm_double_buffer *pair = pm_region_double_buffer_of(c->region, extent);
    return pair && !pair->added ? pair : NULL;
}

/* Checks the contents of an entry, which are at `committed`, and their hashes. */
static void check_contents(checker *c, const pm_cell *cell, pm_key key, uint64_t committed)
{
    uint64_t block, distance = c->suspect - committed, wrong = distance / PM_PAGE;
    bool suspect = c->suspect >= committed && distance % PM_PAGE == 0 && wrong < pm_extent_blocks(cell->length);
    pm_status status = pm_extent_check(c->region, c->image, committed, cell->length, cell->length, &block);
    uint64_t table = committed + pm_extent_table(cell->length), size = 8 * pm_extent_blocks(cell->length);
    if (status == PM_UNREADABLE) {
        add_problem(c, cell->offset, cell->length, block, key, "%s", pm_message());
        /* Is its contribution to the digest known? */
        if (pm_region_readable(c->region, c->image, table, size, "hashes") != PM_OK) return;
    }
    pm_extent_digest(&c->digest, c->image + table, committed, cell->length);
    if (status == PM_CORRUPT)
        add_problem(c, cell->offset, cell->length, block, key,
                    "its contents are damaged in block %llu (bytes %llu and following)", (unsigned long long)block,
                    (unsigned long long)(block * PM_PAGE));
    if (status != PM_OK) {
        if (suspect && wrong == block) return; /* this is known already */
        c->beside++;
    }
    if (suspect)
        add_problem(
            c, cell->offset, cell->length, wrong, key,
            "its contents in block %llu (bytes %llu and following) are not those that were committed last " LOST_WRITE,
            (unsigned long long)wrong, (unsigned long long)distance);
}

static void check_entry(checker *c, const pm_cell *cell, pm_key key)
{
    if (!cell->offset) return;
    const pm_double_buffer *pair = slots_of(c, cell->offset);
    uint64_t committed = pair ? pair->slot[pair->current] : cell->offset;
    if (pair && pair->length != cell->length) {
        add_problem(c, cell->offset, cell->length, 0, key, "its extent has another length than its slots");
        return;
    }
    if (!cell->length || cell->length > PM_REGION_LIMIT
        || !pm_region_holds(c->region, cell->offset, pm_extent_size(cell->length))) {
        add_problem(c, cell->offset, cell->length, 0, key, "its extent lies outside the store");
        return;
    }
    if (pm_extent_is_small(cell->length)) {
        check_small(c, cell->offset, cell->length, key);
    } else {
        for (uint64_t page = 0; page < pm_extent_pages(cell->length); page++) {
            if (!claim(c, cell->offset + page * PM_PAGE, PM_PAGE_DATA, key)) return;
            if (pair && !claim(c, pair->slot[1] + page * PM_PAGE, PM_PAGE_DATA, key)) return;
        }
        c->paired += pair != NULL;
    }
    check_contents(c, cell, key, committed);
}

/* For salvage: whether a node was found that counts. One that is damaged is told. */
static bool was_found(checker *c, uint64_t offset)
{
    bool inside = !(offset % PM_PAGE) && offset < c->region->size;
    if (inside && pm_page_set_has(&c->region->leaves->seen, offset / PM_PAGE)) return true;
    if (inside) is_sound(c, offset, PM_TYPE_NODE);
    return false;
}

static bool is_filled_leaf(const checker *c, uint64_t offset, uint32_t level)
{
    return !level && ((const pm_node *)(const void *)(c->image + offset))->count;
}

/* Checks a subtree whose keys lie in [from, to). An empty key is no bound. For salvage, check_leaves and check_entries
 * check the leaves that were found and have entries. */
static void check_tree(checker *c, uint64_t offset, uint32_t level, pm_key from, pm_key to)
{
    if (c->region->leaves && (!was_found(c, offset) || is_filled_leaf(c, offset, level))) return;
    const pm_node *node = metadata(c, offset, PM_TYPE_NODE);
    if (!node) return;
    if (!pm_node_valid(node) || node->head.level != level) {
        add_problem(c, offset, PM_PAGE, 0, no_key, "the catalog node at region offset %llu is damaged",
                    (unsigned long long)offset);
        return;
    }
    for (unsigned i = 0; i <= node->count; i++) {
        pm_key key = i < node->count ? (pm_key){0} : to, before = from;
        pm_cell cell = {0};
        if (i < node->count) cell = pm_node_cell(node, i, &key, NULL);
        if (i < node->count && !pm_node_key_within(key, from, to))
            add_problem(c, offset, PM_PAGE, 0, no_key,
                        "the catalog node at region offset %llu holds a key of another node",
                        (unsigned long long)offset);
        if (!level) {
            if (i < node->count) check_entry(c, &cell, key), c->keys++;
            continue;
        }
        uint64_t child = node->first_child;
        if (i) child = pm_node_cell(node, i - 1, &before, NULL).offset;
        check_tree(c, child, level - 1, before, key);
    }
}

/* For salvage: claims the leaves that were found. */
static void check_leaves(checker *c)
{
    const pm_leaves *leaves = c->region->leaves;
    for (size_t i = 0; leaves && i < leaves->count; i++) metadata(c, leaves->all[i]->head.self, PM_TYPE_NODE);
}

/* For salvage: checks the entries of the leaves that were found. */
static void check_entries(checker *c)
{
    const pm_leaves *leaves = c->region->leaves;
    for (size_t i = 0; leaves && i < leaves->count; i++) {
        for (unsigned slot = 0; slot < leaves->all[i]->count; slot++) {
            pm_key key;
            pm_cell cell = pm_node_cell(leaves->all[i], slot, &key, NULL);
            check_entry(c, &cell, key), c->keys++;
        }
    }
}

/* The first leaf that begins with this key, or a higher one. */
static size_t first_from(const pm_leaves *leaves, pm_key key)
{
    return PM_FIRST(i, leaves->count, pm_node_compare_keys(pm_leaves_first(leaves->all[i]), key) >= 0);
}

/* For salvage: tells where keys may be missing, by two problems for each hole. */
static void check_holes(checker *c, const pm_root *root)
{
    const pm_key behind_all = {(const uint8_t *)"\xff", 1};
    const pm_leaves *leaves = c->region->leaves;
    if (!leaves || !c->region->wrong) return; /* nothing but the root is wrong */
    if (root && root->keys == pm_leaves_keys(leaves) && !c->region->unproved) return;
    for (size_t hole = 0; hole < leaves->hole_count && hole < HOLES_TOLD; hole++) {
        pm_key from = leaves->holes[hole].from, to = leaves->holes[hole].to;
        size_t before = first_from(leaves, from), after = to.length ? first_from(leaves, to) : leaves->count;
        from = before ? pm_leaves_last(leaves->all[before - 1]) : no_key;
        bool all_behind = hole + 1 == HOLES_TOLD && hole + 1 < leaves->hole_count;
        to = after < leaves->count && !all_behind ? pm_leaves_first(leaves->all[after]) : behind_all;
        add_problem(c, 0, 0, UINT64_MAX, from, "keys behind this one may be missing");
        add_problem(c, 0, 0, UINT64_MAX, to, "keys before this one may be missing");
    }
}

/* ---- the space map ------------------------------------------------------------------------------------------- */

static void check_map_pages(checker *c, const pm_root *root)
{
    for (unsigned l = 0; l < PM_ROOT_LISTS; l++) {
        if (!root->map_lists[l]) continue;
        const pm_map_list *list = metadata(c, root->map_lists[l], PM_TYPE_MAP_LIST);
        for (unsigned m = 0; list && m < PM_MAP_LIST_SLOTS; m++)
            if (list->maps[m]) metadata(c, list->maps[m], PM_TYPE_MAP);
    }
}

/* Checks the table of slots; returns the number of extents that have two. */
static uint64_t check_slots(checker *c, const pm_root *root)
{
    uint64_t pairs = 0;
    for (unsigned page = 0; page < PM_SLOT_PAGES; page++) {
        const pm_slot_table *table = root->slots[page] ? metadata(c, root->slots[page], PM_TYPE_SLOTS) : NULL;
        for (unsigned i = 0; table && i < PM_SLOTS_PER_PAGE; i++) pairs += table->pairs[i].extent != 0;
    }
    return pairs;
}

static void check_slab(checker *c, uint64_t page)
{
    uint64_t offset = page * PM_PAGE;
    if (!is_readable(c, offset, PM_LINE, "slab")) return;
    if (!pm_page_valid(c->region, c->image, offset, PM_TYPE_SLAB)) {
        add_problem(c, offset, PM_LINE, 0, no_key, "the slab at region offset %llu is damaged",
                    (unsigned long long)offset);
        return;
    }
    count_page(c, offset, PM_TYPE_SLAB);
    const pm_slab *slab = (const void *)(c->image + offset);
    if (slab->used != c->blocks[page])
        add_problem(c, offset, PM_LINE, 0, no_key,
                    "the slab at region offset %llu counts other blocks than the catalog uses",
                    (unsigned long long)offset);
}

static void check_space(checker *c)
{
    static const char *const names[] = {"free", "contents", "metadata", "a slab"};
    for (uint64_t page = 0; page < c->region->size / PM_PAGE; page++) {
        unsigned said = pm_heap_kind(c->region, c->image, page), found = c->kinds[page];
        if (said != found)
            add_problem(c, page * PM_PAGE, PM_PAGE, 0, no_key,
                        "the space map says that the page at region offset %llu is %s; it is %s",
                        (unsigned long long)(page * PM_PAGE), names[said], found ? names[found] : "used by nothing");
        else if (found == PM_PAGE_SLAB)
            check_slab(c, page);
    }
}

static void check_headers(checker *c, const pm_media *media)
{
    for (int copy = 0; copy < 2; copy++) {
        pm_header header;
        if (pm_media_readable(media, (uint64_t)copy * PM_PAGE, sizeof header, "a copy of the header") != PM_OK) {
            add_problem(c, 0, 0, 0, no_key, "%s; the other one is in use", pm_message());
            continue;
        }
        memcpy(&header, media->view + copy * PM_PAGE, sizeof header);
        if (!pm_log_header_valid(&header))
            add_problem(c, 0, 0, 0, no_key, "copy %c of the file's header is damaged; the other one is in use",
                        'A' + copy);
    }
}

static void check_catalog(checker *c, const pm_root *root)
{
    bool inside = !(root->tree % PM_PAGE) && root->tree < c->region->size;
    const pm_page_head *top = (const void *)(c->image + (inside ? root->tree : 0));
    if (inside && !is_readable(c, root->tree, PM_PAGE, "catalog node")) return;
    if (!inside || top->level >= PM_TREE_HEIGHT)
        add_problem(c, 0, PM_PAGE, 0, no_key, "the catalog's root is damaged");
    else
        check_tree(c, root->tree, top->level, no_key, no_key);
}

static void check_state(checker *c)
{
    uint64_t pairs = 0;
    const pm_root *root = metadata(c, 0, PM_TYPE_ROOT);
    check_leaves(c);
    check_holes(c, root);
    if (c->region->unproved)
        add_problem(c, 0, 0, 0, no_key,
                    "the store does not match its digest: there may be pages or small extents that are not those that "
                    "were committed last");
    if (c->region->slots_lost)
        add_problem(c, 0, 0, 0, no_key,
                    "the table of slots is damaged: large arrays may be those of an earlier commit");
    if (root) {
        check_map_pages(c, root);
        pairs = check_slots(c, root);
        check_catalog(c, root);
    }
    check_entries(c);
    if (root && is_valid_beside_contents(c) && c->keys != root->keys)
        add_problem(c, 0, PM_PAGE, 0, no_key, "the root counts %llu keys; the catalog has %llu",
                    (unsigned long long)root->keys, (unsigned long long)c->keys);
    if (is_valid_beside_contents(c) && c->paired != pairs)
        add_problem(c, 0, PM_PAGE, 0, no_key, "the table of slots names %llu extents; the catalog has %llu of them",
                    (unsigned long long)pairs, (unsigned long long)c->paired);
    /* After damage above, unreachable pages would only repeat it. */
    if (is_valid_beside_contents(c)) check_space(c);
}

/* The two sums differ by x and x * line, so the line is their quotient, except for as many high bits as x has zeros at
 * its end. If several contributions are wrong, the quotient is hardly ever a line of the region. */
uint64_t pm_verify_place(const pm_region *region, pm_digest difference)
{
    if (!difference.sum) return UINT64_MAX;
    unsigned zeros = (unsigned)__builtin_ctzll(difference.sum);
    uint64_t odd = difference.sum >> zeros, inverse = odd; /* right in 3 bits; each step doubles them */
    for (int i = 0; i < 5; i++) inverse *= 2 - odd * inverse;
    uint64_t line = (difference.moment >> zeros) * inverse & UINT64_MAX >> zeros;
    return line < region->size / PM_LINE && difference.sum * line == difference.moment ? line * PM_LINE : UINT64_MAX;
}

/* Every page may be valid by itself. The digest says whether they are the committed state (I12). */
static void check_digest(checker *c, pm_digest committed)
{
    if (pm_digest_equal(c->digest, committed)) return;
    c->suspect = pm_verify_place(c->region, pm_digest_minus(committed, c->digest));
    if (c->suspect != UINT64_MAX) {
        /* Once more, to name the owner of that place. */
        uint64_t pages = c->region->size / PM_PAGE;
        c->report->count = 0;
        memset(c->kinds, 0, pages);
        memset(c->blocks, 0, pages * sizeof *c->blocks);
        c->keys = c->paired = c->beside = 0;
        check_state(c);
    }
    if (!is_valid_beside_contents(c)) return;
    if (c->suspect != UINT64_MAX)
        add_problem(c, c->suspect, PM_LINE, 0, no_key,
                    "the contents at region offset %llu, which were deleted, were not those that had been committed: a "
                    "write was lost or went astray, or they were damaged",
                    (unsigned long long)c->suspect);
    else
        add_problem(c, 0, c->region->size, 0, no_key,
                    "the store does not match its digest: several pages or small extents are not those that were "
                    "committed last " LOST_WRITE);
}

pm_status pm_verify(pm_store *store, pm_report **out)
{
    pm_region *region = &store->region;
    uint64_t pages = region->size / PM_PAGE;
    checker c = {.region = region,
                 .image = region->committed,
                 .report = calloc(1, sizeof *c.report),
                 .kinds = calloc(pages, 1),
                 .blocks = calloc(pages, sizeof *c.blocks),
                 .suspect = region->salvage ? region->wrong : UINT64_MAX};
    if (c.report && c.kinds && c.blocks) {
        check_state(&c);
        check_digest(&c, store->log.digest);
        check_headers(&c, &store->media);
    } else {
        c.no_memory = true;
    }
    free(c.kinds);
    free(c.blocks);
    if (c.no_memory) {
        pm_report_free(c.report);
        return pm_fail(PM_NO_MEMORY, "no memory to check the store");
    }
    *out = c.report;
    return PM_OK;
}

size_t pm_report_count(const pm_report *report)
{
    return report->count;
}

const pm_problem *pm_report_get(const pm_report *report, size_t i)
{
    return i < report->count ? &report->problems[i] : NULL;
}

void pm_report_free(pm_report *report)
{
    if (report) free(report->problems);
    free(report);
}
