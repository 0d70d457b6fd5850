/* Everything that is done with a store. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "fuzz.h"

enum { ROWS = 32 << 10, KEYS_MOST = 50000, READ_MOST = 32 << 20 };

noreturn void fuzz_fail(const char *format, ...)
{
    va_list arguments;
    fflush(stdout);
    fputs("fuzz: ", stderr);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

uint64_t fuzz_random(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static uint64_t ids = 1;

void fuzz_reset_ids(uint64_t seed)
{
    ids = seed;
}

/* The core is compiled with -Dgetrandom=fuzz_getrandom. */
ssize_t fuzz_getrandom(void *buffer, size_t length, unsigned flags);
ssize_t fuzz_getrandom(void *buffer, size_t length, unsigned flags)
{
    (void)flags;
    for (size_t at = 0; at < length; at += 8) {
        uint64_t value = fuzz_random(&ids);
        memcpy((uint8_t *)buffer + at, &value, length - at < 8 ? length - at : 8);
    }
    return (ssize_t)length;
}

/* ---- looking ---------------------------------------------------------------------------------------------------- */

uint64_t fuzz_hash_row(const uint8_t *key, size_t key_length, const pm_entry *entry, const uint8_t *meta,
                       const void *contents)
{
    const uint64_t multiplier = UINT64_C(0x9e3779b97f4a7c15);
    uint64_t hash = pm_hash64(key, key_length, 1);
    hash = hash * multiplier + (entry->meta_length ? pm_hash64(meta, entry->meta_length, 2) : 0);
    hash = hash * multiplier + entry->kind + 256u * entry->flags;
    if (entry->offset) hash = hash * multiplier + pm_hash64(contents, entry->length, 3) + entry->length;
    return hash ^ hash >> 29;
}

static void note(fuzz_view *view, pm_status status)
{
    if (view->status == PM_OK) view->status = status;
}

/* Opens a buffer and reads its ends: no address that a store gives out may be bad. */
static void touch_buffer(pm_store *store, uint64_t offset, uint64_t length, bool writable)
{
    pm_buffer *buffer;
    if (pm_buffer_open(store, offset, length, writable, &buffer) != PM_OK) return;
    volatile uint8_t *bytes = pm_buffer_address(buffer);
    (void)bytes[0], (void)bytes[length - 1];
    if (writable) bytes[length / 2] = (uint8_t)(bytes[length / 2] + 1);
    pm_buffer_release(buffer, NULL);
}

static void walk_row(pm_store *store, fuzz_view *view, const pm_row *row, bool touch, uint64_t *read)
{
    const uint8_t *key = (const uint8_t *)(row + 1), *meta = key + row->key_length;
    pm_entry entry = {row->offset, row->length, row->kind, row->flags, row->meta_length}, found;
    uint8_t *contents = NULL, again[PM_META_MAX];
    pm_status status = pm_get(store, key, row->key_length, &found, again);
    note(view, status);
    if (status == PM_OK && (memcmp(&found.offset, &entry.offset, 16) || found.meta_length != entry.meta_length ||
                            memcmp(again, meta, entry.meta_length)))
        note(view, PM_CORRUPT);
    if (entry.offset) {
        /* First without a destination: it says whether the length can be believed. */
        status = pm_read(store, entry.offset, entry.length, NULL);
        if (status == PM_OK && (*read += entry.length) < READ_MOST) {
            contents = malloc(entry.length);
            if (!contents) fuzz_fail("no memory for %llu bytes", (unsigned long long)entry.length);
            status = pm_read(store, entry.offset, entry.length, contents);
            if (touch) touch_buffer(store, entry.offset, entry.length, false);
        }
        note(view, status);
    }
    uint64_t hash = !entry.offset || contents ? fuzz_hash_row(key, row->key_length, &entry, meta, contents) : 1;
    free(contents);
    view->digest += hash;
    if (view->count < FUZZ_KEYS) {
        fuzz_row *kept = &view->rows[view->count];
        memcpy(kept->key, key, row->key_length);
        kept->key_length = row->key_length, kept->hash = hash, kept->entry = entry;
    }
    view->count++;
}

void fuzz_walk(pm_store *store, fuzz_view *view, bool touch)
{
    static uint8_t rows[ROWS] __attribute__((aligned(8)));
    uint8_t last[PM_KEY_MAX];
    size_t last_length = 0, used;
    uint64_t read = 0;
    view->status = PM_OK, view->digest = 0, view->count = 0;
    view->sequence = pm_sequence(store);
    for (;;) {
        pm_status status = pm_scan(store, last, last_length, last_length != 0, NULL, 0, rows, sizeof rows, &used);
        note(view, status);
        if (status != PM_OK || !used) break;
        for (size_t at = 0; at < used;) {
            const pm_row *row = (const void *)(rows + at);
            walk_row(store, view, row, touch, &read);
            memcpy(last, row + 1, last_length = row->key_length);
            at += row->row_length;
        }
        if (view->count > KEYS_MOST) fuzz_fail("the keys do not end");
    }
    pm_statistics statistics;
    note(view, pm_stats(store, &statistics));
    if (view->status == PM_OK && statistics.keys != view->count) note(view, PM_CORRUPT);
}

pm_status fuzz_check(pm_store *store, size_t *problems, bool say)
{
    pm_report *report;
    *problems = 0;
    pm_status status = pm_check(store, &report);
    if (status != PM_OK) return status;
    *problems = pm_report_count(report);
    for (size_t i = 0; say && i < *problems && i < 5; i++)
        fprintf(stderr, "fuzz: check: %s\n", pm_report_get(report, i)->text);
    pm_report_free(report);
    return PM_OK;
}

/* ---- buffers that are held over what is deleted ------------------------------------------------------------------ */

enum { HELD = 4 };

static struct {
    pm_buffer *buffer;
    uint64_t length, hash;
    bool shows; /* nobody may have written there since */
} held[HELD];

void fuzz_rolled_back(void)
{
    for (unsigned i = 0; i < HELD; i++) held[i].shows = false;
}

void fuzz_let_go(bool strict)
{
    for (unsigned i = 0; i < HELD; i++) {
        if (!held[i].buffer) continue;
        uint64_t hash = pm_hash64(pm_buffer_address(held[i].buffer), held[i].length, 0);
        if (strict && held[i].shows && hash != held[i].hash)
            fuzz_fail("a buffer over a deleted extent shows something else");
        pm_buffer_release(held[i].buffer, NULL);
        held[i].buffer = NULL;
    }
}

/* ---- changing --------------------------------------------------------------------------------------------------- */

typedef struct {
    pm_store *store;
    fuzz_view *view;
    uint64_t *random;
    bool strict;
} changer;

/* True if it was done; false if it was not, and need not have been. */
static bool done(const changer *c, pm_status status, const char *what)
{
    if (status == PM_OK) return true;
    if (c->strict && status != PM_NO_SPACE) fuzz_fail("%s failed on a sound store: %s", what, pm_message());
    return false;
}

static fuzz_row *row_of(changer *c, const uint8_t *key, size_t length)
{
    size_t kept = c->view->count < FUZZ_KEYS ? c->view->count : FUZZ_KEYS;
    for (size_t i = 0; i < kept; i++)
        if (c->view->rows[i].key_length == length && !memcmp(c->view->rows[i].key, key, length))
            return &c->view->rows[i];
    return NULL;
}

static fuzz_row *any_row(changer *c)
{
    size_t kept = c->view->count < FUZZ_KEYS ? c->view->count : FUZZ_KEYS;
    return kept ? &c->view->rows[fuzz_random(c->random) % kept] : NULL;
}

static void set_row(changer *c, const uint8_t *key, size_t length, const pm_entry *entry, uint64_t hash)
{
    fuzz_row *row = row_of(c, key, length);
    if (row) {
        c->view->digest -= row->hash;
    } else {
        if (c->view->count >= FUZZ_KEYS) return;
        row = &c->view->rows[c->view->count++];
        memmove(row->key, key, length);
        row->key_length = (uint16_t)length;
    }
    row->entry = *entry, row->hash = hash;
    c->view->digest += hash;
}

static void hold(changer *c, const pm_entry *entry)
{
    unsigned i = fuzz_random(c->random) % HELD;
    pm_buffer *buffer;
    if (held[i].buffer
        || !done(c, pm_buffer_open(c->store, entry->offset, entry->length, i & 1, &buffer), "pm_buffer_open"))
        return;
    held[i].buffer = buffer, held[i].length = entry->length, held[i].shows = true;
    held[i].hash = pm_hash64(pm_buffer_address(buffer), entry->length, 0);
}

/* A key: an old one, or one of a few new ones. */
static size_t choose_key(changer *c, uint8_t *key)
{
    uint64_t r = fuzz_random(c->random);
    const fuzz_row *row = r & 1 ? any_row(c) : NULL;
    if (row) {
        memcpy(key, row->key, row->key_length);
        return row->key_length;
    }
    size_t length = (size_t)snprintf((char *)key, 16, "fz%llu", (unsigned long long)(r >> 8 & 15));
    for (; r >> 16 & 1 && length < 300; length++) key[length] = 'k';
    return length;
}

static void put(changer *c, bool with_extent)
{
    static const uint16_t lengths[] = {1, 5, 64, 100, 1000, 2008, 2009, 4096, 5000, 9000, 30000};
    uint8_t key[PM_KEY_MAX], meta[PM_META_MAX];
    size_t key_length = choose_key(c, key);
    uint64_t r = fuzz_random(c->random);
    pm_entry entry = {.kind = 2, .meta_length = (uint16_t)(r % (r & 1024 ? PM_META_MAX : 40))};
    uint64_t *contents = NULL;
    memset(meta, (int)(r >> 32), sizeof meta);
    if (with_extent) {
        entry.length = lengths[(r >> 16) % (sizeof lengths / sizeof *lengths)];
        if (!done(c, pm_alloc(c->store, entry.length, &entry.offset), "pm_alloc")) return;
        size_t words = entry.length / 8 + 1;
        contents = malloc(8 * words);
        if (!contents) fuzz_fail("no memory");
        bool filled = r & 2048 && entry.length % 8 == 0;
        for (size_t i = 0; i < words; i++) contents[i] = filled ? r : r + i / 64;
        if (filled) done(c, pm_fill(c->store, entry.offset, entry.length, contents, 8), "pm_fill");
        else done(c, pm_write(c->store, entry.offset, 0, contents, entry.length), "pm_write");
    }
    uint64_t hash = fuzz_hash_row(key, key_length, &entry, meta, contents);
    if (done(c, pm_put(c->store, key, key_length, &entry, meta, NULL, 0, NULL, 0), "pm_put"))
        set_row(c, key, key_length, &entry, hash);
    else if (with_extent) done(c, pm_free(c->store, entry.offset, entry.length), "pm_free");
    free(contents);
}

static void forget_row(fuzz_view *rows, fuzz_row *row)
{
    size_t kept = rows->count < FUZZ_KEYS ? rows->count : FUZZ_KEYS;
    rows->digest -= row->hash;
    if (row != &rows->rows[kept - 1]) *row = rows->rows[kept - 1];
    rows->count--;
}

/* Deletes a key, or all that start with the same bytes. A buffer over what is deleted goes on to show it. */
static void delete(changer *c)
{
    fuzz_row *row = any_row(c);
    if (!row) return;
    uint64_t r = fuzz_random(c->random);
    uint8_t prefix[PM_KEY_MAX];
    size_t length = r % 4 ? 0 : 1 + (r >> 8) % row->key_length;
    memcpy(prefix, row->key, length);
    if (r & 4 && row->entry.offset) hold(c, &row->entry);
    if (!done(c, pm_delete(c->store, row->key, row->key_length, prefix, length), "pm_delete")) return;
    forget_row(c->view, row);
    size_t kept = c->view->count < FUZZ_KEYS ? c->view->count : FUZZ_KEYS;
    for (size_t i = kept; length && i-- > 0;) {
        row = &c->view->rows[i];
        if (row->key_length >= length && !memcmp(row->key, prefix, length)) forget_row(c->view, row);
    }
}

static void write_in_place(changer *c)
{
    uint8_t meta[PM_META_MAX];
    pm_buffer *buffer;
    pm_entry entry;
    fuzz_row *row = any_row(c);
    if (!row || !row->entry.offset) return;
    if (!done(c, pm_get(c->store, row->key, row->key_length, &entry, meta), "pm_get") || !entry.offset) return;
    if (!done(c, pm_buffer_open(c->store, entry.offset, entry.length, true, &buffer), "pm_buffer_open")) return;
    uint8_t *bytes = pm_buffer_address(buffer);
    uint64_t r = fuzz_random(c->random), at = (r >> 8) % entry.length, size = 1 + r % 200;
    if (size > entry.length - at) size = entry.length - at;
    memset(bytes + at, (int)(r >> 56), size);
    set_row(c, row->key, row->key_length, &entry, fuzz_hash_row(row->key, row->key_length, &entry, meta, bytes));
    pm_buffer_release(buffer, NULL);
}

static void look(changer *c)
{
    uint8_t rows[PM_PAGE] __attribute__((aligned(8)));
    size_t used;
    fuzz_row *row = any_row(c);
    pm_status status = row ? pm_last(c->store, row->key, 1, rows) : PM_OK;
    if (status != PM_NOT_FOUND || (row && c->strict)) done(c, status, "pm_last");
    if (row) done(c, pm_scan(c->store, row->key, row->key_length, 1, row->key, 1, rows, sizeof rows, &used), "pm_scan");
    if (row && row->entry.offset) done(c, pm_release(c->store, row->entry.offset, row->entry.length), "pm_release");
}

void fuzz_change(pm_store *store, fuzz_view *view, uint64_t *random, unsigned steps, bool strict)
{
    changer c = {store, view, random, strict};
    for (unsigned i = 0; i < steps; i++) {
        switch (fuzz_random(random) % 8) {
        case 0: case 1: case 2: put(&c, true); break;
        case 3: put(&c, false); break;
        case 4: delete(&c); break;
        case 5: case 6: write_in_place(&c); break;
        default: look(&c); break;
        }
    }
}
