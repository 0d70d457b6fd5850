#include "commit/image.h"

#include "space/region_image.h"
#include "commit/failed.h"

enum { STREAM_FROM = 4 << 20 };

/* Pages within a smaller range are not worth writing back early: they are soon written again, and a checkpoint does not
 * wait long for them. */
enum { SPREAD_LEAST = 1 << 20 };

void pm_image_forget_range(pm_store *store)
{
    store->image.from = store->image.to = 0;
}

/* durable: the committed image → then: a header that empties the log. Without this fence a crash finds neither the
 * records nor what they had changed (I3). */
pm_status pm_image_sync(pm_store *store)
{
    pm_region_flush(&store->region);
    PM_TRY(pm_failed_unless_space(store, store->media.operations->fence(&store->media)));
    store->image.durable = true;
    pm_image_forget_range(store);
    return PM_OK;
}

pm_status pm_image_apply(pm_store *store, const uint8_t *body, uint64_t length)
{
    pm_log_item item;
    store->image.durable = false;
    /* On disks the committed image is written lazily: the next record would wait for streamed bytes. */
    bool stream = store->media.byte_addressable && pm_schedule_is_worth(store->schedule, length, STREAM_FROM);
    pm_write_how how = stream ? PM_WRITE_STREAM : PM_WRITE_CACHED;
    for (uint64_t cursor = 0; pm_log_next(body, length, &cursor, &item);) {
        if (item.kind != PM_ITEM_LOGGED) continue;
        /* The processor sees by itself that the body is read in order. It can't see the place of the next range, so
         * one line of it is prefetched with its translation. */
        if (cursor < length) __builtin_prefetch(store->region.committed + pm_log_place(body, cursor));
        PM_TRY(pm_region_write(&store->region, item.offset, item.bytes, item.length, how));
        uint64_t from = PM_REGION_START + item.offset, to = from + item.length;
        if (!store->image.to || from < store->image.from) store->image.from = from;
        if (to > store->image.to) store->image.to = to;
        store->statistics.bytes_home += item.length;
    }
    return PM_OK;
}

/* ---- on its way to the disk, so that a checkpoint has less to wait for ------------------------------------------- */

/* After a small record, everything is written back each time the log has grown by PART. Pages that lie far apart are
 * one request each: asked for often, they never become so many that a commit waits for them. The changes of a
 * large record are left to the kernel, because a commit would wait for more requests than a disk's queue takes. */
pm_status pm_image_begin_write_back(pm_store *store, uint64_t before)
{
    enum { PART = 128 << 10, MOST = 1 << 20 };
    uint64_t from = store->image.from, length = store->image.to - from;
    if (store->log.head - before > MOST) pm_image_forget_range(store);
    else if (before / PART != store->log.head / PART && length
             && pm_schedule_is_worth(store->schedule, length, SPREAD_LEAST)) {
        pm_image_forget_range(store);
        return store->media.operations->write_back(&store->media, from, length);
    }
    return PM_OK;
}
