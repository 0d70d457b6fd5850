#include "explore/model.h"

#include <stdlib.h>

#include "base/format.h"
#include "base/hash.h"
#include "base/status.h"

enum { PIECE = 8 };

/* ---- begin and end ---------------------------------------------------------------------------------------------- */

static bool is_write(uint32_t kind)
{
    return kind == PM_EVENT_STORE || kind == PM_EVENT_STREAM || kind == PM_EVENT_WRITE;
}

static uint64_t largest_size(const pm_recording *recording)
{
    uint64_t size = recording->base_size;
    for (uint64_t i = 0; i < recording->count; i++) {
        const pm_event *event = &recording->events[i];
        uint64_t end = event->kind == PM_EVENT_GROW ? event->offset
                       : is_write(event->kind)      ? event->offset + event->length
                                                    : 0;
        if (end > size) size = end;
    }
    return size;
}

static bool events_valid(const pm_recording *recording)
{
    for (uint64_t i = 0; i < recording->count; i++) {
        const pm_event *event = &recording->events[i];
        bool places = is_write(event->kind) || event->kind == PM_EVENT_FLUSH || event->kind == PM_EVENT_SYNC_RANGE;
        if (places && (event->offset > PM_REGION_LIMIT || event->length > PM_REGION_LIMIT)) return false;
        if (event->kind == PM_EVENT_GROW && event->offset > PM_REGION_LIMIT) return false;
        if (event->thread >= PM_MODEL_THREADS) return false;
        if (is_write(event->kind) && (!event->has_data || event->data > recording->data_size ||
                                      event->length > recording->data_size - event->data))
            return false;
    }
    return true;
}

pm_status pm_model_init(pm_model *model, const pm_recording *recording, const pm_crash_options *options)
{
    *model = (pm_model){.memory = options->media == PM_MEDIA_MEMORY, .eadr = options->eadr};
    model->unit_size = model->memory ? PM_LINE : options->sector;
    if (!model->memory &&
        (model->unit_size < 64 || model->unit_size > 1 << 16 || model->unit_size & (model->unit_size - 1)))
        return pm_fail(PM_INVALID, "a sector has a power of two bytes, from 64 to 65536");
    if (!events_valid(recording))
        return pm_fail(PM_CORRUPT, "the recording is damaged: an event points outside it, or has an unknown thread");
    model->capacity = pm_round_up(largest_size(recording), PM_PAGE);
    model->units = model->capacity / model->unit_size + 1;
    model->size = model->visible = recording->base_size;
    model->durable = calloc(1, model->capacity + PM_PAGE);
    model->index = calloc(model->units, sizeof *model->index);
    model->never = calloc(model->units, 1);
    if (!model->durable || !model->index || !model->never) {
        uint64_t capacity = model->capacity;
        pm_model_free(model);
        return pm_fail(PM_NO_MEMORY, "no memory to explore a store of %llu bytes", (unsigned long long)capacity);
    }
    if (recording->base_size) memcpy(model->durable, recording->base, recording->base_size);
    return PM_OK;
}

void pm_model_free(pm_model *model)
{
    for (size_t i = 0; i < model->count; i++) free(model->cells[i].writes);
    free(model->cells);
    free(model->durable);
    free(model->index);
    free(model->never);
    *model = (pm_model){0};
}

/* ---- cells -------------------------------------------------------------------------------------------------- */

static uint32_t *index_of(pm_model *model, uint64_t unit)
{
    return &model->index[unit == PM_MODEL_SIZE ? model->units - 1 : unit];
}

static pm_model_cell *cell_of(pm_model *model, uint64_t unit)
{
    uint32_t *index = index_of(model, unit);
    if (*index) return &model->cells[*index - 1];
    if (model->count == model->room) {
        size_t room = model->room ? 2 * model->room : 256;
        pm_model_cell *cells = realloc(model->cells, room * sizeof *cells);
        if (!cells) return NULL;
        model->cells = cells, model->room = room;
    }
    model->cells[model->count] = (pm_model_cell){.unit = unit};
    *index = (uint32_t)++model->count;
    return &model->cells[model->count - 1];
}

static pm_model_cell *add_write(pm_model *model, uint64_t unit, pm_model_write write)
{
    pm_model_cell *cell = cell_of(model, unit);
    if (cell && cell->count == cell->room) {
        uint32_t room = cell->room ? 2 * cell->room : 2;
        pm_model_write *writes = realloc(cell->writes, room * sizeof *writes);
        if (!writes) cell = NULL;
        else cell->writes = writes, cell->room = room;
    }
    if (!cell) {
        model->no_memory = true;
        return NULL;
    }
    cell->writes[cell->count++] = write;
    return cell;
}

static uint64_t hash_of(const pm_model *model, uint64_t unit, const uint8_t *bytes)
{
    return pm_hash64(bytes, model->unit_size, unit + 1);
}

/* Copies a unit. The last one may reach beyond the file; the model has room for it. */
static void copy_unit(const pm_model *model, uint64_t unit, const uint8_t *bytes, uint8_t *to)
{
    memcpy(to + unit * model->unit_size, bytes + unit * model->unit_size, model->unit_size);
}

/* The first `count` writes of a cell become durable. */
static void make_durable(pm_model *model, pm_model_cell *cell, uint32_t count)
{
    if (!count) return;
    if (cell->unit == PM_MODEL_SIZE) {
        uint64_t size = cell->writes[count - 1].offset;
        model->hash ^= pm_hash64(&model->size, sizeof size, 0) ^ pm_hash64(&size, sizeof size, 0);
        model->size = size;
    } else {
        uint8_t *bytes = model->durable + cell->unit * model->unit_size;
        model->hash ^= hash_of(model, cell->unit, bytes);
        for (uint32_t i = 0; i < count; i++)
            memcpy(model->durable + cell->writes[i].offset, cell->writes[i].data, cell->writes[i].length);
        model->hash ^= hash_of(model, cell->unit, bytes);
        model->never[cell->unit] = 0;
        if (model->mirror) copy_unit(model, cell->unit, model->durable, model->mirror);
    }
    cell->count -= count;
    for (unsigned i = 0; i <= PM_MODEL_ANY; i++)
        cell->handed[i] = cell->handed[i] > count ? cell->handed[i] - count : 0;
    memmove(cell->writes, cell->writes + count, cell->count * sizeof *cell->writes);
}

static void drop_durable(pm_model *model)
{
    size_t kept = 0;
    for (size_t i = 0; i < model->count; i++) {
        pm_model_cell *cell = &model->cells[i];
        if (cell->count) {
            model->cells[kept++] = *cell;
            *index_of(model, cell->unit) = (uint32_t)kept;
        } else {
            *index_of(model, cell->unit) = 0;
            free(cell->writes);
        }
    }
    model->count = kept;
}

/* ---- events ------------------------------------------------------------------------------------------------- */

static void feed_size(pm_model *model, uint64_t size)
{
    if (size <= model->visible) return;
    for (uint64_t unit = pm_round_up(model->visible, model->unit_size) / model->unit_size;
         unit * model->unit_size < size; unit++)
        model->never[unit] = 1;
    model->visible = size;
    pm_model_cell *cell = add_write(model, PM_MODEL_SIZE, (pm_model_write){.offset = size});
    if (!cell || !model->memory) return;
    make_durable(model, cell, cell->count);
    drop_durable(model);
}

/* A page that is written again is written back in full. */
static void reclaim_page(pm_model *model, uint64_t offset)
{
    uint64_t end = (offset / PM_PAGE + 1) * PM_PAGE / model->unit_size;
    for (uint64_t unit = offset / PM_PAGE * PM_PAGE / model->unit_size; unit < end && unit < model->units - 1; unit++)
        if (model->index[unit]) model->cells[model->index[unit] - 1].abandoned = false;
}

/* The kernel tracks pages, and marks whole ones as clean. */
static void feed_failed_sync(pm_model *model, const pm_event *event)
{
    uint64_t from = event->offset / PM_PAGE * PM_PAGE, end = pm_round_up(event->offset + event->length, PM_PAGE);
    for (size_t i = 0; i < model->count; i++) {
        pm_model_cell *cell = &model->cells[i];
        uint64_t at = cell->unit * model->unit_size;
        if (cell->unit == PM_MODEL_SIZE || (event->length && (at + model->unit_size <= from || at >= end))) continue;
        cell->abandoned = true;
        cell->handed[0] = 0;
    }
}

/* The disk is flushed for all threads. */
static unsigned thread_of(const pm_model *model, const pm_event *event)
{
    return model->memory ? event->thread : 0;
}

static void hand(pm_model_cell *cell, unsigned thread)
{
    if (!cell->abandoned) cell->handed[thread] = cell->count;
}

/* What the thread streamed and flushed is durable at the next fence of any. */
static void hand_over(pm_model *model, unsigned thread)
{
    for (size_t i = 0; model->memory && i < model->count; i++) {
        uint32_t *handed = model->cells[i].handed;
        if (handed[thread] > handed[PM_MODEL_ANY]) handed[PM_MODEL_ANY] = handed[thread];
    }
}

static void feed_write(pm_model *model, const pm_event *event, const uint8_t *data)
{
    uint64_t end = event->offset + event->length;
    feed_size(model, end);
    for (uint64_t at = event->offset; at < end;) {
        uint64_t unit = at / model->unit_size, stop = (unit + 1) * model->unit_size;
        if (stop > end) stop = end;
        pm_model_cell *cell =
            add_write(model, unit, (pm_model_write){at, data + (at - event->offset), (uint32_t)(stop - at)});
        if (!cell) return;
        if (!model->memory) reclaim_page(model, at);
        if (event->kind == PM_EVENT_STREAM) cell->handed[thread_of(model, event)] = cell->count;
        at = stop;
    }
    if (model->eadr && event->kind == PM_EVENT_STORE) model->stored = event;
}

/* eADR: a store is durable once it has happened; while it happens it may be torn (M2). */
static void end_store(pm_model *model)
{
    if (!model->stored || !model->stored->length) return;
    uint64_t unit = model->stored->offset / model->unit_size,
             last = (model->stored->offset + model->stored->length - 1) / model->unit_size;
    for (; unit <= last; unit++)
        if (model->index[unit])
            make_durable(model, &model->cells[model->index[unit] - 1], model->cells[model->index[unit] - 1].count);
    model->stored = NULL;
    drop_durable(model);
}

static void feed_flush(pm_model *model, const pm_event *event)
{
    if (!event->length) return;
    uint64_t last = (event->offset + event->length - 1) / model->unit_size;
    for (uint64_t unit = event->offset / model->unit_size; unit <= last && unit < model->units - 1; unit++)
        if (model->index[unit]) hand(&model->cells[model->index[unit] - 1], thread_of(model, event));
}

static void feed_fence(pm_model *model, unsigned thread)
{
    for (size_t i = 0; i < model->count; i++) {
        pm_model_cell *cell = &model->cells[i];
        uint32_t own = cell->handed[thread], any = cell->handed[PM_MODEL_ANY];
        if (!cell->abandoned) make_durable(model, cell, own > any ? own : any);
    }
    drop_durable(model);
}

static void hand_size(pm_model *model, uint64_t beyond)
{
    uint32_t index = *index_of(model, PM_MODEL_SIZE);
    if (index && beyond > model->size) hand(&model->cells[index - 1], 0);
}

void pm_model_feed(pm_model *model, const pm_recording *recording, const pm_event *event)
{
    end_store(model);
    switch (event->kind) {
    case PM_EVENT_STORE:
    case PM_EVENT_STREAM:
    case PM_EVENT_WRITE:
        feed_write(model, event, recording->data + event->data);
        break;
    case PM_EVENT_FLUSH:
        feed_flush(model, event);
        break;
    case PM_EVENT_FENCE:
        feed_fence(model, thread_of(model, event));
        break;
    case PM_EVENT_SYNC_RANGE:
        /* The range becomes durable with the metadata that is needed to read it, and with everything that was handed to
         * the disk before, as the disk is flushed. */
        feed_flush(model, event);
        hand_size(model, event->offset + event->length);
        feed_fence(model, 0);
        break;
    case PM_EVENT_SYNC:
        for (size_t i = 0; i < model->count; i++) hand(&model->cells[i], 0);
        feed_fence(model, 0);
        break;
    case PM_EVENT_SYNC_FAILED:
        feed_failed_sync(model, event);
        break;
    case PM_EVENT_GROW:
        feed_size(model, event->offset);
        break;
    case PM_EVENT_HAND_OVER:
        hand_over(model, event->thread);
        break;
    case PM_EVENT_OPEN:
        /* A store that closes hands over, and a process that ends is taken off its processors, which orders all. */
        for (unsigned thread = 0; thread < PM_MODEL_THREADS; thread++) hand_over(model, thread);
        break;
    default:
        break;
    }
}

bool pm_model_orders(const pm_model *model, const pm_event *event)
{
    if (model->stored) return true;
    switch (event->kind) {
    case PM_EVENT_WRITE:
    case PM_EVENT_STREAM:
        return false;
    case PM_EVENT_STORE:
        return model->eadr;
    case PM_EVENT_GROW:
        return model->memory;
    case PM_EVENT_FLUSH:
    case PM_EVENT_HAND_OVER:
        return false;
    default:
        return true;
    }
}

/* ---- what a crash may keep ---------------------------------------------------------------------------------- */

unsigned pm_model_pieces(const pm_model_cell *cell, uint32_t write)
{
    const pm_model_write *one = &cell->writes[write];
    return (unsigned)((one->offset + one->length - 1) / PIECE - one->offset / PIECE + 1);
}

bool pm_model_tears(const pm_model *model, const pm_model_cell *cell)
{
    return model->memory && cell->unit != PM_MODEL_SIZE;
}

double pm_model_ways(const pm_model *model, const pm_model_cell *cell)
{
    if (!pm_model_tears(model, cell)) return cell->count + 1.0;
    double ways = 1;
    for (uint32_t i = 0; i < cell->count; i++) ways += (double)((UINT64_C(1) << pm_model_pieces(cell, i)) - 1);
    return ways;
}

pm_model_keep pm_model_way(const pm_model *model, const pm_model_cell *cell, uint64_t number)
{
    if (!pm_model_tears(model, cell)) return (pm_model_keep){(uint32_t)number, 0};
    for (uint32_t i = 0; i < cell->count; i++) {
        uint64_t masks = (UINT64_C(1) << pm_model_pieces(cell, i)) - 1;
        if (number < masks) return (pm_model_keep){i, number};
        number -= masks;
    }
    return pm_model_whole(cell);
}

/* ---- images ------------------------------------------------------------------------------------------------- */

static void write_torn(const pm_model_write *write, uint64_t torn, uint8_t *image)
{
    uint64_t end = write->offset + write->length;
    unsigned piece = 0;
    for (uint64_t at = write->offset; at < end; piece++) {
        uint64_t stop = at / PIECE * PIECE + PIECE;
        if (stop > end) stop = end;
        if (torn >> piece & 1) memcpy(image + at, write->data + (at - write->offset), stop - at);
        at = stop;
    }
}

/* Writes what an earlier owner of the space may have left: noise, or an older part of this very file. */
static void write_stale(const pm_model *model, uint64_t unit, uint32_t stale, uint8_t *image)
{
    uint8_t *to = image + unit * model->unit_size;
    uint64_t shift = (stale / 2 * PM_PAGE) / model->unit_size, source = unit > shift ? unit - shift : unit + shift;
    if (stale % 2 && source < model->units - 1) {
        memcpy(to, model->durable + source * model->unit_size, model->unit_size);
        return;
    }
    for (uint64_t i = 0; i < model->unit_size; i += 8) {
        uint64_t noise = pm_keyed_checksum(stale, unit * model->unit_size + i, 1);
        memcpy(to + i, &noise, 8);
    }
}

static bool is_stale(const pm_model *model, uint64_t unit)
{
    return model->never[unit] && unit * model->unit_size < model->visible;
}

uint64_t pm_model_build(const pm_model *model, const pm_model_keep *keep, uint32_t stale, uint8_t *image,
                        uint64_t *size)
{
    uint64_t hash = model->hash ^ stale;
    *size = model->size;
    for (uint64_t unit = 0; stale && unit < model->units - 1; unit++)
        if (is_stale(model, unit)) write_stale(model, unit, stale, image);
    for (size_t i = 0; i < model->count; i++) {
        const pm_model_cell *cell = &model->cells[i];
        if (cell->unit == PM_MODEL_SIZE) {
            if (keep[i].kept) *size = cell->writes[keep[i].kept - 1].offset;
            continue;
        }
        if (!keep[i].kept && !keep[i].torn) continue;
        for (uint32_t j = 0; j < keep[i].kept; j++)
            memcpy(image + cell->writes[j].offset, cell->writes[j].data, cell->writes[j].length);
        if (keep[i].torn && keep[i].kept < cell->count) write_torn(&cell->writes[keep[i].kept], keep[i].torn, image);
        hash ^= hash_of(model, cell->unit, model->durable + cell->unit * model->unit_size);
        hash ^= hash_of(model, cell->unit, image + cell->unit * model->unit_size);
    }
    return hash ^ pm_hash64(size, sizeof *size, 1);
}

void pm_model_unbuild(const pm_model *model, uint32_t stale, uint8_t *image)
{
    for (uint64_t unit = 0; stale && unit < model->units - 1; unit++)
        if (is_stale(model, unit)) copy_unit(model, unit, model->durable, image);
    for (size_t i = 0; i < model->count; i++)
        if (model->cells[i].unit != PM_MODEL_SIZE) copy_unit(model, model->cells[i].unit, model->durable, image);
}
