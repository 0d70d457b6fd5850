/* The base stores, made through the C interface: one for each shape that a file can have. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "space/catalog.h"
#include "log/log.h"
#include "fuzz.h"

enum { KINDS = 8 };
fuzz_base fuzz_bases[2 * KINDS];
size_t fuzz_base_count;

static uint64_t random_state;
static fuzz_view view;

static void must(pm_status status, const char *what)
{
    if (status != PM_OK) fuzz_fail("making a base: %s: %s", what, pm_message());
}

/* ---- one store in the making
 * -------------------------------------------------------------------------------------- */

typedef struct {
    int fd;
    pm_media_kind medium;
    pm_store *store;
} maker;

static void open_store(maker *m, uint64_t max_size)
{
    must(pm_open(dup(m->fd), m->medium, 0, max_size, NULL, &m->store), "open");
}

static uint8_t *file_bytes(const maker *m, uint64_t *size)
{
    *size = (uint64_t)lseek(m->fd, 0, SEEK_END);
    uint8_t *bytes = malloc(*size);
    if (!bytes || pread(m->fd, bytes, *size, 0) != (ssize_t)*size) fuzz_fail("cannot read a base");
    return bytes;
}

static void put(maker *m, const char *key, uint64_t length)
{
    uint8_t meta[40], contents[40000];
    uint64_t r = fuzz_random(&random_state);
    pm_entry entry = {.kind = 2, .length = length, .meta_length = (uint16_t)(8 + r % 32)};
    memset(meta, (int)r, sizeof meta);
    for (uint64_t i = 0; i < length; i++) contents[i] = (uint8_t)(r >> i % 8 * 8) + (uint8_t)(i / 512);
    if (length) {
        must(pm_alloc(m->store, length, &entry.offset), "alloc");
        must(pm_write(m->store, entry.offset, 0, contents, length), "write");
    }
    must(pm_put(m->store, (const uint8_t *)key, strlen(key), &entry, meta, NULL, 0, NULL, 0), "put");
}

static void scribble(maker *m, const char *key, uint64_t at, uint64_t length)
{
    uint8_t meta[PM_META_MAX];
    pm_entry entry;
    pm_buffer *buffer;
    must(pm_get(m->store, (const uint8_t *)key, strlen(key), &entry, meta), "get");
    must(pm_buffer_open(m->store, entry.offset, entry.length, 1, &buffer), "buffer");
    memset((uint8_t *)pm_buffer_address(buffer) + at, (int)fuzz_random(&random_state), length);
    pm_buffer_release(buffer, NULL);
}

static void commit(maker *m, fuzz_base *base)
{
    must(pm_commit(m->store), "commit");
    fuzz_walk(m->store, &view, false);
    must(view.status, "walk");
    if (base->state_count == FUZZ_STATES) fuzz_fail("too many states");
    base->states[base->state_count++] = (fuzz_state){view.sequence, view.digest};
}

static void fill(maker *m)
{
    char key[32];
    put(m, "large", 20000);
    put(m, "middle", 2500);
    put(m, "small", 40);
    put(m, "slab/a", 700);
    put(m, "slab/b", 1900);
    for (int i = 0; i < 24; i++) {
        snprintf(key, sizeof key, "many/%03d", i);
        put(m, key, i % 3 ? 0 : 24);
    }
}

/* ---- the kinds
 * ---------------------------------------------------------------------------------------------------- */

static void keep_old(maker *m, fuzz_base *base)
{
    base->old = file_bytes(m, &base->old_size);
}

static void make_clean(maker *m, fuzz_base *base)
{
    fill(m);
    commit(m, base);
    keep_old(m, base);
    scribble(m, "large", 4096, 5000);
    scribble(m, "small", 0, 40);
    put(m, "new", 100);
    commit(m, base);
    must(pm_close(m->store, 0), "close");
}

static void reopened(maker *m, fuzz_base *base)
{
    fill(m);
    must(pm_commit(m->store), "commit");
    must(pm_close(m->store, 0), "close");
    open_store(m, 0);
    commit(m, base); /* changes nothing: the state before the log */
}

static void make_log(maker *m, fuzz_base *base)
{
    reopened(m, base);
    for (int i = 0; i < 5; i++) {
        scribble(m, "large", (uint64_t)i * 3000, 700);
        scribble(m, "small", 8, 16);
        put(m, "new", i % 2 ? 300 : 0);
        commit(m, base);
        if (i == 2) keep_old(m, base);
    }
    pm_close(m->store, PM_CLOSE_DISCARD);
}

/* Also contents where an older record of the same log has logged ranges: a slab that came and went. */
static void make_direct(maker *m, fuzz_base *base)
{
    reopened(m, base);
    put(m, "slab/x", 1900);
    put(m, "slab/y", 1900);
    commit(m, base);
    must(pm_delete(m->store, (const uint8_t *)"slab/x", 6, (const uint8_t *)"slab/y", 6), "delete");
    commit(m, base);
    put(m, "direct/0", 9000);
    commit(m, base);
    keep_old(m, base);
    put(m, "direct/1", 4096);
    put(m, "direct/0", 12000);
    commit(m, base);
    put(m, "direct/2", 7000);
    put(m, "direct/3", 3000);
    scribble(m, "small", 8, 16);
    commit(m, base);
    pm_close(m->store, PM_CLOSE_DISCARD);
}

static void make_deep(maker *m, fuzz_base *base)
{
    char key[600];
    memset(key, 'k', sizeof key);
    for (int i = 0; i < 110; i++) {
        snprintf(key + 430, sizeof key - 430, "/%03d", i * 37 % 110);
        put(m, key, i % 20 ? 0 : 100);
    }
    commit(m, base);
    keep_old(m, base);
    put(m, "first", 0);
    must(pm_delete(m->store, (const uint8_t *)key, strlen(key), NULL, 0), "delete");
    commit(m, base);
    must(pm_close(m->store, 0), "close");
}

static void make_grown(maker *m, fuzz_base *base)
{
    char key[32];
    fill(m);
    for (int i = 0; i < 10; i++) {
        snprintf(key, sizeof key, "gone/%d", i);
        put(m, key, 30000);
    }
    commit(m, base);
    must(pm_close(m->store, 0), "close");
    open_store(m, 0);
    keep_old(m, base);
    must(pm_delete(m->store, (const uint8_t *)"gone/3", 6, (const uint8_t *)"gone/", 5), "delete");
    commit(m, base);
    put(m, "many/008", 3000);
    commit(m, base);
    pm_close(m->store, PM_CLOSE_DISCARD);
}

static void make_empty(maker *m, fuzz_base *base)
{
    commit(m, base);
    keep_old(m, base);
    must(pm_close(m->store, 0), "close");
}

static void set_size(maker *m, const uint8_t *bytes, uint64_t size)
{
    if (ftruncate(m->fd, (off_t)size) || pwrite(m->fd, bytes, size, 0) != (ssize_t)size)
        fuzz_fail("cannot write a base");
}

/* A crash between the two copies of the header that ends a recovery. */
static void make_half_header(maker *m, fuzz_base *base)
{
    uint64_t size, after_size;
    make_log(m, base);
    uint8_t *before = file_bytes(m, &size);
    open_store(m, 0);
    pm_close(m->store, PM_CLOSE_DISCARD);
    uint8_t *after = file_bytes(m, &after_size);
    memcpy(after + PM_PAGE, before + PM_PAGE, PM_PAGE);
    set_size(m, after, after_size);
    free(before);
    free(after);
}

/* A crash between a commit whose items stand in free pages and the checkpoint that follows it: the committed image as
 * it was before, record and items as they are, and the header under whose salt they were written. */
static void make_overflow(maker *m, fuzz_base *base)
{
    char key[32];
    uint64_t size;
    unsigned extents = m->medium == PM_MEDIA_MEMORY ? 14 : 7, freed = extents + 6; /* more than the log has room for */
    for (unsigned i = 0; i < extents + freed; i++) {
        snprintf(key, sizeof key, "overflow/%02u", i);
        put(m, key, 39000);
    }
    fill(m);
    must(pm_commit(m->store), "commit");
    for (unsigned i = extents; i < extents + freed; i++) {
        snprintf(key, sizeof key, "overflow/%02u", i);
        must(pm_delete(m->store, (const uint8_t *)key, strlen(key), NULL, 0), "delete");
    }
    commit(m, base);
    must(pm_close(m->store, 0), "close");
    open_store(m, (uint64_t)lseek(m->fd, 0, SEEK_END));
    uint8_t *before = file_bytes(m, &size);
    for (unsigned i = 0; i < extents; i++) {
        snprintf(key, sizeof key, "overflow/%02u", i);
        scribble(m, key, 0, 39000);
    }
    commit(m, base);
    pm_close(m->store, PM_CLOSE_DISCARD);
    uint8_t *after = file_bytes(m, &size);
    pm_header header;
    memcpy(&header, before, sizeof header);
    const pm_record *record = (const void *)(after + header.log_offset);
    pm_log_item item = {0};
    uint64_t cursor = 0;
    pm_log_next((const uint8_t *)(record + 1), record->body, &cursor, &item);
    if (item.kind != PM_ITEM_OVERFLOW) fuzz_fail("making a base: the commit did not overflow");
    memcpy(before + header.log_offset, record, record->length);
    memcpy(before + PM_REGION_START + item.offset, after + PM_REGION_START + item.offset, item.length);
    header.salt = record->salt, header.generation += 2, header.flags = 0;
    header.crc = pm_crc32c(&header, offsetof(pm_header, crc), 0);
    memcpy(before, &header, sizeof header);
    memcpy(before + PM_PAGE, &header, sizeof header);
    pm_durable_marker marker = {record->sequence, fuzz_marker_checksum(&header, record->sequence)};
    memcpy(before + PM_DURABLE_MARKER_PLACE, &marker, sizeof marker);
    set_size(m, before, size);
    base->old = before, base->old_size = size;
    free(after);
}

/* ---- what is known of a base
 * ---------------------------------------------------------------------------------------- */

uint64_t fuzz_marker_checksum(const pm_header *header, uint64_t sequence)
{
    return pm_keyed_checksum(pm_hash64(&sequence, sizeof sequence, 0), header->salt, header->store_id);
}

static void add(fuzz_range *ranges, size_t *count, size_t most, uint64_t start, uint64_t length)
{
    if (*count == most) fuzz_fail("a base is too large");
    ranges[(*count)++] = (fuzz_range){start, length};
}

static void list_items(fuzz_base *base, const uint8_t *body, uint64_t length)
{
    pm_log_item item;
    for (uint64_t cursor = 0; pm_log_next(body, length, &cursor, &item);) {
        if (item.kind == PM_ITEM_LOGGED) continue;
        uint64_t bytes = item.kind == PM_ITEM_DIRECT ? pm_extent_size(item.length) : item.length;
        add(base->outside, &base->outside_count, FUZZ_EXTENTS, PM_REGION_START + item.offset, bytes);
    }
}

static void list_records(fuzz_base *base)
{
    uint64_t at = base->header.log_offset, end = at + base->header.log_size;
    const pm_record *record = (const void *)(base->bytes + at);
    for (; at < end && record->magic == PM_RECORD_MAGIC && record->salt == base->header.salt;
         record = (const void *)(base->bytes + at)) {
        add(base->records, &base->record_count, FUZZ_RECORDS, at, sizeof *record + record->body);
        list_items(base, (const uint8_t *)(record + 1), record->body);
        at += record->length;
    }
    uint64_t newest = base->states[base->state_count - 1].sequence;
    pm_durable_marker marker;
    memcpy(&marker, base->bytes + PM_DURABLE_MARKER_PLACE, sizeof marker);
    if (base->record_count && (marker.sequence != newest
                               || marker.checksum != fuzz_marker_checksum(&base->header, newest)))
        fuzz_fail("base %s has no durable marker", base->name);
    if (base->header.flags & PM_HEADER_CLEAN ? base->record_count
                                             : base->header.sequence + base->record_count != newest)
        fuzz_fail("base %s: %zu records for commit %llu", base->name, base->record_count, (unsigned long long)newest);
}

static void list_pages(fuzz_base *base)
{
    static const uint32_t types[] = {PM_TYPE_ROOT, PM_TYPE_MAP_LIST, PM_TYPE_MAP, PM_TYPE_NODE, PM_TYPE_SLAB};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        for (uint64_t offset = 0; offset < base->header.region_size && base->page_count < FUZZ_PAGES;
             offset += PM_PAGE) {
            const pm_page_head *head = (const void *)(base->bytes + PM_REGION_START + offset);
            if (head->type == types[t] && head->self == offset) base->pages[base->page_count++] = (uint32_t)offset;
        }
    }
}

static void list_extents(fuzz_base *base, int fd)
{
    pm_store *store;
    must(pm_open(dup(fd), PM_MEDIA_FILE, PM_OPEN_READ_ONLY, 0, NULL, &store), "open a base");
    fuzz_walk(store, &view, false);
    const fuzz_state *newest = &base->states[base->state_count - 1];
    if (view.status != PM_OK || view.digest != newest->digest || view.sequence != newest->sequence
        || view.count > FUZZ_KEYS)
        fuzz_fail("base %s does not hold what it was given: %s", base->name, pm_message());
    for (size_t i = 0; i < view.count; i++)
        if (view.rows[i].entry.offset)
            add(base->extents, &base->extent_count, FUZZ_EXTENTS, view.rows[i].entry.offset, view.rows[i].entry.length);
    pm_close(store, PM_CLOSE_DISCARD);
}

static void make(const char *name, pm_media_kind medium, void (*how)(maker *, fuzz_base *))
{
    maker m = {.fd = memfd_create("pmstore-base", MFD_CLOEXEC), .medium = medium};
    if (m.fd < 0) fuzz_fail("no memfd");
    fuzz_base *base = &fuzz_bases[fuzz_base_count++];
    base->name = name;
    random_state = fuzz_base_count;
    must(pm_format(m.fd, medium, NULL), "format");
    open_store(&m, 0);
    how(&m, base);
    base->bytes = file_bytes(&m, &base->size);
    memcpy(&base->header, base->bytes + PM_PAGE, sizeof base->header); /* of the two, the one that records are under */
    list_records(base);
    list_pages(base);
    list_extents(base, m.fd);
    if (base->size > FUZZ_ROOM / 2) fuzz_fail("base %s is too large", name);
    close(m.fd);
}

void fuzz_make_bases(void)
{
    fuzz_reset_ids(1);
    for (pm_media_kind medium = PM_MEDIA_MEMORY; medium <= PM_MEDIA_FILE; medium++) {
        make("log", medium, make_log);
        make("clean", medium, make_clean);
        make("direct", medium, make_direct);
        make("deep", medium, make_deep);
        make("half header", medium, make_half_header);
        make("grown", medium, make_grown);
        make("overflow", medium, make_overflow);
        make("empty", medium, make_empty);
    }
}
