/* Applies an input's edits to the bytes of a base. */
#include "space/catalog.h"
#include "log/log.h"
#include "fuzz.h"

enum { FLIPS = 4 /* more of them could make a CRC-32C right */ };

typedef struct {
    const fuzz_base *base;
    uint8_t *bytes;
    uint64_t size;
    bool touched[FUZZ_ROOM / PM_PAGE]; /* per page of the file */
    unsigned flips;
} editor;

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void poke(editor *e, uint64_t place, const void *bytes, uint64_t length)
{
    if (place >= e->size) return;
    length = least(length, e->size - place);
    if (!length) return;
    memmove(e->bytes + place, bytes, length);
    for (uint64_t page = place / PM_PAGE; page <= (place + length - 1) / PM_PAGE; page++) e->touched[page] = true;
}

/* ---- what an edit means
 * --------------------------------------------------------------------------------------------- */

static fuzz_range pick(const fuzz_range *ranges, size_t count, uint64_t index)
{
    return count ? ranges[index % count] : (fuzz_range){0, PM_REGION_START};
}

static uint64_t page_of(const fuzz_base *base, uint64_t index)
{
    return PM_REGION_START + base->pages[index % base->page_count];
}

/* A place in the base's file: anywhere, or in something that matters. */
static uint64_t place_of(const fuzz_base *base, unsigned what, uint64_t index, uint64_t at)
{
    fuzz_range range;
    switch (what % 8) {
    case 0: return (index << 16 | at) % base->size;
    case 1: return at % PM_REGION_START;
    case 2: case 3: return page_of(base, index) + at % PM_PAGE;
    case 4:
        range = pick(base->extents, base->extent_count, index);
        return PM_REGION_START * (base->extent_count != 0) + range.start + at % pm_extent_size(range.length);
    case 5:
        range = pick(base->outside, base->outside_count, index);
        return range.start + at % range.length;
    case 6: return PM_DURABLE_MARKER_PLACE + at % sizeof(pm_durable_marker);
    default:
        range = pick(base->records, base->record_count, index);
        return range.start + at % range.length;
    }
}

static uint64_t sector_of(const fuzz_edit *edit)
{
    static const uint16_t sizes[] = {512, 4096, 512, 64};
    return sizes[edit->what >> 4 & 3];
}

static uint64_t value_of(const editor *e, const fuzz_edit *edit, uint64_t old)
{
    const uint64_t region = e->base->header.region_size, v = edit->value;
    const uint64_t interesting[] = {0,
                                    1,
                                    63,
                                    64,
                                    4095,
                                    4096,
                                    region,
                                    region - PM_PAGE,
                                    region - 1,
                                    e->base->header.log_offset,
                                    e->size,
                                    PM_REGION_LIMIT,
                                    PM_REGION_LIMIT - PM_PAGE,
                                    UINT64_C(1) << 32,
                                    UINT64_C(1) << 63,
                                    (UINT64_C(1) << 56) - 1,
                                    UINT64_MAX,
                                    UINT64_MAX - 4095,
                                    UINT64_MAX - 7,
                                    2008,
                                    2009,
                                    65535};
    switch (edit->size & 7) {
    case 0: return v;
    case 1: return old + (uint64_t)(int64_t)(int8_t)v;
    case 2: return interesting[v % (sizeof interesting / sizeof *interesting)];
    case 3: return e->base->pages[v % e->base->page_count];
    case 4: return e->base->extent_count ? e->base->extents[v % e->base->extent_count].start : v;
    case 5: return old ^ UINT64_C(1) << v % 64;
    case 6: return v % (region / PM_PAGE + 8) * PM_PAGE;
    default: return v & 0xfff;
    }
}

/* Sets a field of `width` bytes. */
static void set_field(editor *e, const fuzz_edit *edit, uint64_t place, unsigned width)
{
    uint64_t old = 0;
    if (place + width > e->size) return;
    memcpy(&old, e->bytes + place, width);
    uint64_t value = value_of(e, edit, old);
    poke(e, place, &value, width);
}

/* ---- damage
 * ----------------------------------------------------------------------------------------------------------- */

static void fill(editor *e, const fuzz_edit *edit, uint64_t place, uint64_t size)
{
    uint8_t sector[PM_PAGE];
    uint64_t random = edit->value;
    switch (edit->value % 3) {
    case 0: memset(sector, 0, sizeof sector); break;
    case 1: memset(sector, 255, sizeof sector); break;
    default:
        for (size_t i = 0; i < sizeof sector; i += 8) {
            uint64_t word = fuzz_random(&random);
            memcpy(sector + i, &word, 8);
        }
    }
    poke(e, place, sector, size);
}

/* What the same place held some commits ago, and may verify by itself. */
static void stale(editor *e, uint64_t place, uint64_t size)
{
    const fuzz_base *base = e->base;
    if (base->old && place + size <= base->old_size) poke(e, place, base->old + place, size);
}

static void tear(editor *e, const fuzz_edit *edit, uint64_t size)
{
    fuzz_range range = pick(e->base->records, e->base->record_count, edit->index);
    static const uint8_t zeros[PM_PAGE];
    uint64_t first = range.start / size, last = (range.start + range.length - 1) / size;
    for (uint64_t i = first; i <= last; i++) {
        if (!(edit->value >> (i - first) % 64 & 1)) continue;
        uint64_t from = i * size < range.start ? range.start : i * size;
        poke(e, from, zeros, (i + 1) * size - from);
    }
}

static void damage(editor *e, const fuzz_edit *edit)
{
    const fuzz_base *base = e->base;
    uint64_t place = place_of(base, edit->what, edit->index, edit->at), size = sector_of(edit),
             sector = place / size * size;
    uint64_t other = place_of(base, edit->what >> 6 ? edit->what : 0, edit->value & 0xffff, edit->value >> 16 & 0xffff)
                     / size * size;
    uint8_t copy[PM_PAGE];
    switch (edit->op % DAMAGE_OPS) {
    case OP_FLIP:
        if (place >= e->size || ++e->flips > FLIPS) return;
        copy[0] = e->bytes[place] ^ (uint8_t)(1 << edit->value % 8);
        poke(e, place, copy, 1);
        return;
    case OP_FILL: fill(e, edit, sector, size); return;
    case OP_SWAP:
        if (sector + size > e->size) return;
        memcpy(copy, e->bytes + sector, size);
        poke(e, sector, base->bytes + other, size);
        poke(e, other, copy, size);
        return;
    case OP_COPY: poke(e, sector, base->bytes + other, size); return;
    case OP_FOREIGN: {
        const fuzz_base *foreign = &fuzz_bases[edit->value % fuzz_base_count];
        if (foreign != base && sector + size <= foreign->size) poke(e, sector, foreign->bytes + sector, size);
        return;
    }
    case OP_STALE: stale(e, sector, size); return;
    case OP_TRUNCATE: e->size = least(e->size, edit->size & 1 ? place : sector); return;
    case OP_EXTEND:
        if (e->size < base->size || e->size + edit->value % FUZZ_EXTEND > FUZZ_ROOM) return;
        memset(e->bytes + e->size, edit->what & 16 ? 255 : 0, edit->value % FUZZ_EXTEND);
        e->size += edit->value % FUZZ_EXTEND;
        return;
    default: tear(e, edit, size); return;
    }
}

/* ---- hostile edits
 * ------------------------------------------------------------------------------------------------------ */

static void edit_header(editor *e, const fuzz_edit *edit)
{
    static const uint8_t fields[] = {offsetof(pm_header, generation), offsetof(pm_header, salt),
                                     offsetof(pm_header, sequence),   offsetof(pm_header, region_size),
                                     offsetof(pm_header, log_offset), offsetof(pm_header, log_size),
                                     offsetof(pm_header, flags),      offsetof(pm_header, store_id),
                                     offsetof(pm_header, features),   offsetof(pm_header, version),
                                     offsetof(pm_header, write_features), offsetof(pm_header, optional_features)};
    unsigned field = fields[edit->index % sizeof fields];
    for (unsigned copy = 0; copy < 2; copy++) {
        uint64_t start = copy * PM_PAGE;
        if (edit->what >> copy & 1) continue;
        if (edit->what & 8 && e->size >= PM_REGION_START) { /* a copy of format 0, see rehash_headers */
            pm_header header;
            memcpy(&header, e->bytes + start, sizeof header);
            header.version = 0;
            poke(e, start, &header, sizeof header);
        }
        if (edit->what & 4 && e->size >= PM_REGION_START) { /* a layout that is possible */
            pm_header header;
            memcpy(&header, e->bytes + start, sizeof header);
            header.region_size = (4 + edit->value % 1024) * PM_PAGE;
            header.log_offset = PM_REGION_START + header.region_size;
            header.log_size = (4 + (edit->value >> 16) % 512) * PM_PAGE;
            poke(e, start, &header, sizeof header);
            continue;
        }
        bool narrow = field >= offsetof(pm_header, flags) || field == offsetof(pm_header, features) ||
                      field == offsetof(pm_header, version);
        set_field(e, edit, start + field, narrow ? 4 : 8);
    }
}

/* The place of the edit's page, if it has this type; otherwise of the next one that has. */
static uint64_t page_of_type(const editor *e, const fuzz_edit *edit, uint32_t type)
{
    for (size_t i = 0; i < e->base->page_count; i++) {
        uint64_t place = page_of(e->base, edit->index + i);
        if (((const pm_page_head *)(const void *)(e->base->bytes + place))->type == type) return place;
    }
    return PM_REGION_START;
}

static void edit_cell(editor *e, const fuzz_edit *edit)
{
    static const uint8_t width[] = {8, 8, 2, 2, 1, 1, 8, 8};
    static const uint8_t at[] = {offsetof(pm_cell, offset),
                                 offsetof(pm_cell, length),
                                 offsetof(pm_cell, key_length),
                                 offsetof(pm_cell, meta_length),
                                 offsetof(pm_cell, kind),
                                 offsetof(pm_cell, flags),
                                 sizeof(pm_cell),
                                 offsetof(pm_cell, offset)};
    uint64_t place = page_of_type(e, edit, PM_TYPE_NODE);
    if (place + PM_PAGE > e->size) return;
    pm_node node;
    memcpy(&node, e->bytes + place, sizeof node);
    unsigned slot = node.count ? edit->at % node.count : 0, field = edit->what % 12;
    if (slot >= sizeof node.slots / sizeof *node.slots) return;
    if (field == 8) set_field(e, edit, place + offsetof(pm_node, slots) + 2 * slot, 2);
    else if (field == 9) set_field(e, edit, place + offsetof(pm_node, first_child), 8);
    else if (field == 10) set_field(e, edit, place + offsetof(pm_node, count) + 2 * (edit->at % 3), 2);
    else if (field == 11) set_field(e, edit, place + offsetof(pm_page_head, level), 4);
    else if (node.slots[slot] <= PM_PAGE - 8 - at[field])
        set_field(e, edit, place + node.slots[slot] + at[field], width[field]);
}

static void edit_map(editor *e, const fuzz_edit *edit)
{
    uint64_t place = page_of_type(e, edit, PM_TYPE_MAP), page = edit->at % (e->base->header.region_size / PM_PAGE + 4),
             word;
    place += offsetof(pm_map, words) + page / 32 * 8;
    if (place + 8 > e->size) return;
    memcpy(&word, e->bytes + place, sizeof word);
    word = (word & ~(UINT64_C(3) << page % 32 * 2)) | (edit->value & 3) << page % 32 * 2;
    poke(e, place, &word, sizeof word);
}

static void edit_slab(editor *e, const fuzz_edit *edit)
{
    static const uint8_t at[] = {offsetof(pm_slab, used),   offsetof(pm_slab, next),       offsetof(pm_slab, previous),
                                 offsetof(pm_slab, listed), offsetof(pm_page_head, level), offsetof(pm_slab, used),
                                 offsetof(pm_slab, next),   offsetof(pm_slab, previous)};
    set_field(e, edit, page_of_type(e, edit, PM_TYPE_SLAB) + at[edit->what % 8], edit->what % 8 == 4 ? 4 : 8);
}

static void edit_record(editor *e, const fuzz_edit *edit)
{
    fuzz_range range = pick(e->base->records, e->base->record_count, edit->index);
    unsigned words = sizeof(pm_record) / 4, word = edit->what % words;
    set_field(e, edit, range.start + 4 * word, edit->what & 16 && word + 1 < words ? 8 : 4);
}

static void edit_item(editor *e, const fuzz_edit *edit)
{
    fuzz_range range = pick(e->base->records, e->base->record_count, edit->index);
    if (!e->base->record_count || range.start + range.length > e->size) return;
    const uint8_t *body = e->bytes + range.start + sizeof(pm_record);
    uint64_t length = range.length - sizeof(pm_record), cursor = 0, start = 0;
    pm_log_item item;
    for (unsigned i = 0; i <= edit->at % 32u; i++) {
        uint64_t next = cursor;
        if (!pm_log_next(body, length, &cursor, &item)) break;
        start = next;
    }
    uint64_t place = range.start + sizeof(pm_record) + start;
    switch (edit->what % 4) {
    case 0: set_field(e, edit, place, 8); return;
    case 1: set_field(e, edit, place + 8, 7); return;  /* the length */
    case 2: set_field(e, edit, place + 15, 1); return; /* the kind */
    default: set_field(e, edit, place + 16 + edit->at / 32u % 64 * 8, 8); return;
    }
}

/* Makes a page what another one is. */
static void plant(editor *e, const fuzz_edit *edit)
{
    uint8_t copy[PM_PAGE];
    uint64_t to = edit->at % (e->base->header.region_size / PM_PAGE) * PM_PAGE;
    memcpy(copy, e->base->bytes + page_of(e->base, edit->index), sizeof copy);
    if (edit->what & 1) memcpy(copy + offsetof(pm_page_head, self), &to, sizeof to);
    poke(e, PM_REGION_START + to, copy, sizeof copy);
}

static void hostile_edit(editor *e, const fuzz_edit *edit)
{
    switch (edit->op % ALL_OPS) {
    case OP_HEADER: edit_header(e, edit); return;
    case OP_PAGE: {
        unsigned width = 1u << (edit->what & 3);
        set_field(e, edit, page_of(e->base, edit->index) + edit->at % PM_PAGE / width * width, width);
        return;
    }
    case OP_CELL: edit_cell(e, edit); return;
    case OP_MAP: edit_map(e, edit); return;
    case OP_ROOT:
        set_field(e, edit, PM_REGION_START + sizeof(pm_page_head) + 8 * (edit->at % (2 + PM_SLAB_CLASSES + 4)), 8);
        return;
    case OP_SLAB: edit_slab(e, edit); return;
    case OP_RECORD: edit_record(e, edit); return;
    case OP_ITEM: edit_item(e, edit); return;
    case OP_MARKER: set_field(e, edit, PM_DURABLE_MARKER_PLACE, 8); return;
    case OP_PLANT: plant(e, edit); return;
    case OP_RAW: set_field(e, edit, place_of(e->base, edit->what, edit->index, edit->at), 8); return;
    default: damage(e, edit); return;
    }
}

/* ---- checksums
 * -------------------------------------------------------------------------------------------------------------- */

static void rehash_headers(editor *e)
{
    for (unsigned copy = 0; copy < 2; copy++) {
        pm_header *header = (void *)(e->bytes + copy * PM_PAGE);
        if (e->touched[copy] && !header->version) /* of format 0 */
            header->write_features = pm_crc32c(header, offsetof(pm_header, write_features), 0);
        if (e->touched[copy]) header->crc = pm_crc32c(header, offsetof(pm_header, crc), 0);
    }
}

static void rehash_pages(editor *e, uint64_t store_id, bool all)
{
    for (uint64_t place = PM_REGION_START; place + PM_PAGE <= e->size; place += PM_PAGE) {
        pm_page_head *head = (void *)(e->bytes + place);
        uint64_t offset = place - PM_REGION_START, size = head->type == PM_TYPE_SLAB ? PM_LINE : PM_PAGE;
        bool known = head->type == PM_TYPE_ROOT || head->type == PM_TYPE_MAP_LIST || head->type == PM_TYPE_MAP ||
                     head->type == PM_TYPE_NODE || head->type == PM_TYPE_SLAB;
        if (!known || head->self != offset || !(all || e->touched[place / PM_PAGE])) continue;
        head->hash = pm_keyed_checksum(pm_hash64(e->bytes + place + 8, size - 8, 0), offset, store_id);
    }
}

static bool any_touched(const editor *e, uint64_t start, uint64_t length)
{
    for (uint64_t page = start / PM_PAGE; page <= (start + length - 1) / PM_PAGE; page++)
        if (e->touched[page]) return true;
    return false;
}

static void rehash_extent(editor *e, uint64_t offset, uint64_t length, uint64_t store_id)
{
    uint64_t start = PM_REGION_START + offset;
    for (uint64_t block = 0; block < pm_extent_blocks(length); block++) {
        uint64_t at = block * PM_PAGE, bytes = least(length - at, PM_PAGE);
        uint64_t hash = pm_keyed_checksum(pm_hash64(e->bytes + start + at, bytes, 0), offset + at, store_id);
        memcpy(e->bytes + start + pm_extent_table(length) + 8 * block, &hash, sizeof hash);
    }
}

/* Sets the hash of what an item refers to, wherever that lies in the file. */
static void rehash_item(editor *e, const pm_log_item *item, const pm_header *header)
{
    uint64_t room = e->size > PM_REGION_START ? e->size - PM_REGION_START : 0;
    if (item->kind == PM_ITEM_LOGGED || item->offset >= room || !item->length || item->length > room - item->offset)
        return;
    uint64_t place = PM_REGION_START + item->offset, hash;
    if (item->kind == PM_ITEM_OVERFLOW) {
        hash = pm_writer_body_hash(e->bytes + place, item->length, place, header->salt);
    } else {
        if (pm_extent_size(item->length) > room - item->offset) return;
        rehash_extent(e, item->offset, item->length, header->store_id);
        uint64_t table = item->offset + pm_extent_table(item->length);
        hash = pm_keyed_checksum(pm_hash64(e->bytes + PM_REGION_START + table, 8 * pm_extent_blocks(item->length), 0),
                                 table, header->store_id);
    }
    memcpy(e->bytes + (item->bytes - e->bytes), &hash, sizeof hash);
}

static void rehash_record(editor *e, fuzz_range range, const pm_header *header)
{
    if (range.start + sizeof(pm_record) > e->size) return;
    pm_record *record = (void *)(e->bytes + range.start);
    uint64_t body = range.start + sizeof *record;
    record->salt = header->salt;
    if (record->body <= e->size - body) {
        pm_log_item item;
        for (uint64_t cursor = 0; pm_log_next(e->bytes + body, record->body, &cursor, &item);)
            rehash_item(e, &item, header);
        record->hash = pm_writer_body_hash(e->bytes + body, record->body, body, record->salt);
    }
    record->crc = pm_crc32c(record, offsetof(pm_record, crc), (uint32_t)range.start);
}

static void rehash(editor *e)
{
    const fuzz_base *base = e->base;
    if (e->size < PM_REGION_START) return;
    rehash_headers(e);
    pm_header header;
    memcpy(&header, e->bytes + PM_PAGE, sizeof header);
    bool rebound = header.store_id != base->header.store_id || header.salt != base->header.salt;
    rehash_pages(e, header.store_id, rebound);
    for (size_t i = 0; i < base->extent_count; i++) {
        fuzz_range range = base->extents[i];
        uint64_t place = PM_REGION_START + range.start, size = pm_extent_size(range.length);
        if (place + size <= e->size && (rebound || any_touched(e, place, size)))
            rehash_extent(e, range.start, range.length, header.store_id);
    }
    for (size_t i = 0; i < base->record_count; i++)
        if (rebound || e->touched[0] || any_touched(e, base->records[i].start, base->records[i].length)
            || base->outside_count)
            rehash_record(e, base->records[i], &header);
    pm_durable_marker *marker = (void *)(e->bytes + PM_DURABLE_MARKER_PLACE);
    if (e->touched[0] && marker->sequence) marker->checksum = fuzz_marker_checksum(&header, marker->sequence);
}

uint64_t fuzz_apply(const fuzz_base *base, bool hostile, const fuzz_edit *edits, size_t count, uint8_t *bytes)
{
    static editor e;
    e = (editor){.base = base, .bytes = bytes, .size = base->size};
    for (size_t i = 0; i < count && i < FUZZ_EDITS; i++) hostile ? hostile_edit(&e, &edits[i]) : damage(&e, &edits[i]);
    if (hostile) rehash(&e);
    return e.size;
}
