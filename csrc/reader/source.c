#define _GNU_SOURCE
#include "reader/source.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/address.h"
#include "base/descriptor.h"
#include "commit/readers.h"

enum { AHEAD_FIRST = 4 << 10, AHEAD_MOST = 256 << 10, HEAD_ATTEMPTS = 1000 };
#define LIFE_EVERY UINT64_C(250000000) /* nanoseconds between two looks at whether a process writes */

/* The byte on which a process that writes the store holds an exclusive lock (pmstore/_store/held.py). */
#define WRITER_BYTE (INT64_C(1) << 62)

static void (*pause_before_reading)(void *);
static void *pause_argument;

void pm_source_pause(void (*pause)(void *argument), void *argument)
{
    pause_before_reading = pause, pause_argument = argument;
}

bool pm_source_is_followed(void)
{
    return pause_before_reading;
}

pm_status pm_source_pread(int fd, uint64_t place, uint64_t length, void *destination, const char *what)
{
    if (pause_before_reading) pause_before_reading(pause_argument);
    for (uint8_t *to = destination; length;) {
        ssize_t got = pread(fd, to, length, (off_t)place);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            char text[128];
            const char *why = strerror_r(errno, text, sizeof text);
            return pm_fail(PM_UNREADABLE, "cannot read %s: %s, at offset %llu of the file", what, why,
                           (unsigned long long)place);
        }
        if (!got) {
            struct stat file;
            uint64_t end = fstat(fd, &file) ? place : (uint64_t)file.st_size;
            return pm_fail(PM_CORRUPT, "the file is truncated: it ends at %llu, before the end of %s",
                           (unsigned long long)end, what);
        }
        place += (uint64_t)got, to += got, length -= (uint64_t)got;
    }
    /* What is read later is not older than this (I19): the kernel's own loads have no order on some processors. */
    atomic_thread_fence(memory_order_acquire);
    return PM_OK;
}

pm_status pm_source_pwrite(int fd, uint64_t place, uint64_t length, const uint8_t *bytes, const char *failed)
{
    while (length) {
        ssize_t done = pwrite(fd, bytes, length, (off_t)place);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return pm_fail_errno(failed);
        bytes += done, place += (uint64_t)done, length -= (uint64_t)done;
    }
    return PM_OK;
}

pm_status pm_source_read(pm_source *source, uint64_t place, uint64_t length, const char *what)
{
    return pm_source_pread(source->fd, place, length, source->store.media.view + place, what);
}

/* ---- the header ----------------------------------------------------------------------------------------------- */

/* Reads both copies of the header, and the durable marker, if that is possible. */
static pm_status read_both(int fd, uint64_t size, uint8_t *pages)
{
    return pm_source_pread(fd, 0, size < PM_REGION_START ? size : PM_REGION_START, pages, "the header");
}

/* The same, but a copy that can't be read stays zeros. */
static pm_status read_copies(int fd, uint64_t size, uint8_t *pages)
{
    memset(pages, 0, PM_REGION_START);
    if (read_both(fd, size, pages) == PM_OK) return PM_OK;
    if (size > PM_REGION_START) size = PM_REGION_START;
    pm_status first = pm_source_pread(fd, 0, size < PM_PAGE ? size : PM_PAGE, pages, "the header");
    if (first != PM_OK) memset(pages, 0, PM_PAGE);
    if (size <= PM_PAGE) return first;
    pm_status second = pm_source_pread(fd, PM_PAGE, size - PM_PAGE, pages + PM_PAGE, "the header");
    if (second != PM_OK) memset(pages + PM_PAGE, 0, PM_PAGE);
    return first == PM_OK ? PM_OK : second;
}

static pm_status size_of(int fd, uint64_t *size)
{
    struct stat file;
    if (fstat(fd, &file)) return pm_fail_errno("cannot look at the file");
    if (!S_ISREG(file.st_mode)) return pm_fail(PM_NOT_A_STORE, "not a regular file");
    *size = (uint64_t)file.st_size;
    return PM_OK;
}

/* True if the durable marker has no valid checksum because it was read while it was written. One of another salt, or a
 * damaged one, is the same when it is read again. */
static bool marker_is_torn(int fd, const pm_log *log, const uint8_t *pages)
{
    pm_durable_marker again;
    if (pm_log_marked_durable(log)) return false;
    pm_status status = pm_source_pread(fd, PM_DURABLE_MARKER_PLACE, sizeof again, &again, "the header");
    return status == PM_OK && memcmp(&again, pages + PM_DURABLE_MARKER_PLACE, sizeof again) != 0;
}

/* A copy that is being written has a bad checksum for a moment, and the other copy is written right after it. */
static pm_status read_header(int fd, uint8_t *pages, pm_media *media, pm_log *log)
{
    pm_status status = PM_OK;
    media->view = pages;
    for (unsigned attempt = 0; attempt < HEAD_ATTEMPTS; attempt++) {
        PM_TRY(size_of(fd, &media->size));
        PM_TRY(read_copies(fd, media->size, pages));
        status = pm_log_open(log, media);
        if (status == PM_OK && marker_is_torn(fd, log, pages)) continue;
        if (status != PM_CORRUPT || media->size < PM_REGION_START) break;
    }
    /* Perhaps the copy that can't be read is a sound one. */
    if (status == PM_CORRUPT || status == PM_NOT_A_STORE) PM_TRY(read_both(fd, media->size, pages));
    return status;
}

static pm_media memory(void)
{
    return (pm_media){.fd = -1, .read_only = true, .byte_addressable = true, .log_unit = PM_LINE};
}

/* The newest commit that the header or the durable marker names. */
static uint64_t newest(const pm_log *log)
{
    uint64_t marked = pm_log_marked_durable(log);
    return marked > log->header.sequence ? marked : log->header.sequence;
}

/* Looks at the header. seen: the low half of the sequence number in the durable marker. */
static pm_status look(int fd, uint64_t *sequence, bool *clean, uint32_t *seen)
{
    pm_media media = memory();
    pm_log log;
    uint8_t *pages = malloc(PM_REGION_START);
    if (!pages) return pm_fail(PM_NO_MEMORY, "no memory to look at a store");
    pm_status status = read_header(fd, pages, &media, &log);
    if (status == PM_OK) {
        *sequence = newest(&log);
        *clean = log.header.flags & PM_HEADER_CLEAN;
        memcpy(seen, pages + PM_DURABLE_MARKER_PLACE, sizeof *seen);
    }
    free(pages);
    return status;
}

pm_status pm_source_newest(int fd, uint64_t *sequence)
{
    bool clean;
    uint32_t seen;
    return look(fd, sequence, &clean, &seen);
}

static bool is_written(int fd)
{
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = WRITER_BYTE, .l_len = 1};
    return !fcntl(fd, F_OFD_GETLK, &lock) && lock.l_type == F_WRLCK && pm_readers_begun(fd);
}

struct pm_waiter {
    int fd;
    uint8_t *marker;
};

pm_status pm_source_waiter(int fd, pm_waiter **out)
{
    int own = fcntl(fd, F_DUPFD_CLOEXEC, PM_FIRST_FD);
    if (own < 0) return pm_fail_errno("cannot keep the file of a store open");
    pm_waiter *waiter = malloc(sizeof *waiter);
    if (!waiter) {
        close(own);
        return pm_fail(PM_NO_MEMORY, "no memory to wait for commits");
    }
    *waiter = (pm_waiter){own, pm_readers_map(own)};
    *out = waiter;
    return PM_OK;
}

void pm_source_waiter_free(pm_waiter *waiter)
{
    pm_readers_unmap(waiter->marker);
    close(waiter->fd);
    free(waiter);
}

pm_status pm_source_wait(const pm_waiter *waiter, uint64_t after, uint64_t nanoseconds, pm_waited *why,
                         uint64_t *sequence)
{
    uint64_t begun = pm_readers_time();
    bool clean, written = true;
    for (;;) {
        uint32_t seen;
        PM_TRY(look(waiter->fd, sequence, &clean, &seen));
        *why = *sequence > after ? PM_WAITED_COMMIT : clean ? PM_WAITED_CLOSED : PM_WAITED_DIED;
        if (*sequence > after || !written) return PM_OK;
        written = is_written(waiter->fd);
        if (!written) continue; /* a process that has ended may have committed since the look */
        uint64_t passed = pm_readers_time() - begun, left = passed < nanoseconds ? nanoseconds - passed : 0;
        *why = PM_WAITED_TIME;
        if (!left) return PM_OK;
        int ended = pm_readers_wait(waiter->fd, waiter->marker, seen, left < LIFE_EVERY ? left : LIFE_EVERY);
        if (ended == EINTR) {
            *why = PM_WAITED_SIGNAL;
            return PM_OK;
        }
        if (ended == EFAULT)
            return pm_fail(PM_IO, "commits of this file can't be waited for: it was cut short, or is on a file system "
                                  "without shared mappings");
    }
}

/* ---- the memory file ------------------------------------------------------------------------------------------ */

pm_status pm_source_memory(uint64_t size, int *fd)
{
    *fd = pm_descriptor_above_standard(memfd_create("pmstore-snapshot", MFD_CLOEXEC));
    if (*fd < 0) return pm_fail_errno("cannot make a file in memory for a snapshot");
    return ftruncate(*fd, (off_t)size) ? pm_fail_errno("cannot make a file in memory for a snapshot") : PM_OK;
}

static pm_status make_copy(pm_source *source, const uint8_t *pages)
{
    pm_media *media = &source->store.media;
    const pm_header *header = &source->store.log.header;
    uint64_t size = header->log_offset + header->log_size;
    PM_TRY(pm_source_memory(size, &source->copy));
    media->view = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, source->copy, 0);
    if (media->view == MAP_FAILED) {
        media->view = NULL;
        return pm_address_refused("cannot map a snapshot", size);
    }
    media->mapped = size;
    memcpy(media->view, pages, PM_REGION_START);
    return PM_OK;
}

pm_status pm_source_begin(pm_source *source, int fd)
{
    *source = (pm_source){.fd = fd, .copy = -1, .written = is_written(fd)};
    pm_store *store = &source->store;
    store->media = memory();
    uint8_t *pages = malloc(PM_REGION_START);
    if (!pages) return pm_fail(PM_NO_MEMORY, "no memory for a snapshot");
    pm_status status = read_header(fd, pages, &store->media, &store->log);
    if (status == PM_OK) status = make_copy(source, pages);
    else store->media.view = NULL;
    free(pages);
    PM_TRY(status);
    const pm_header *header = &store->log.header;
    store->region = (pm_region){.media = &store->media, .size = header->region_size, .store_id = header->store_id,
                                .live = store->media.view + PM_REGION_START,
                                .committed = store->media.view + PM_REGION_START};
    return PM_OK;
}

static void forget_records(pm_source *source)
{
    source->found.count = 0;
    source->read_to = 0;
    free(source->overflowed);
    source->overflowed = NULL;
}

void pm_source_end(pm_source *source)
{
    forget_records(source);
    free(source->found.bodies);
    if (source->store.media.view) munmap(source->store.media.view, source->store.media.mapped);
    if (source->copy >= 0) close(source->copy);
}

/* ---- records -------------------------------------------------------------------------------------------------- */

/* Reads the log up to this position. */
static pm_status read_log(pm_source *source, uint64_t to)
{
    const pm_header *header = &source->store.log.header;
    const uint64_t from = source->read_to, place = header->log_offset + from, needed = to;
    if (to <= from) return PM_OK;
    if (to < from + source->ahead) to = from + source->ahead;
    if (source->ahead < AHEAD_MOST) source->ahead *= 2;
    if (to > header->log_size) to = header->log_size;
    pm_status status = pm_source_read(source, place, to - from, "the log");
    /* The bad block may be behind the last record. */
    if (status == PM_UNREADABLE && to > needed) status = pm_source_read(source, place, (to = needed) - from, "the log");
    PM_TRY(status);
    source->read_to = to;
    return PM_OK;
}

/* The next record; NULL if it is not there, or not whole. */
static pm_status next_record(pm_source *source, const pm_record **record)
{
    const pm_log *log = &source->store.log;
    *record = NULL;
    if (log->head + sizeof **record > log->header.log_size) return PM_OK;
    PM_TRY(read_log(source, log->head + sizeof **record));
    pm_record head;
    memcpy(&head, source->store.media.view + log->header.log_offset + log->head, sizeof head);
    if (head.magic != PM_RECORD_MAGIC || head.length > log->header.log_size - log->head) return PM_OK;
    PM_TRY(read_log(source, log->head + head.length));
    *record = pm_log_record(log, log->head, log->sequence + 1);
    return PM_OK;
}

/* Follows a record whose items are in free pages. A checkpoint follows it at once, after which they may change. *valid:
 * the items match the record. */
static pm_status follow_overflow(pm_source *source, pm_recovery_body *body, bool *valid)
{
    pm_log_item item;
    uint64_t cursor = 0, salt = source->store.log.header.salt;
    if (!pm_log_next(body->body, body->length, &cursor, &item) || item.kind != PM_ITEM_OVERFLOW) return PM_OK;
    uint64_t place = PM_REGION_START + item.offset;
    *valid = !source->overflowed;
    if (!*valid) return PM_OK;
    if (!(source->overflowed = malloc(item.length))) return pm_fail(PM_NO_MEMORY, "no memory for a snapshot");
    PM_TRY(pm_source_pread(source->fd, place, item.length, source->overflowed, "a commit's list of changes"));
    *valid = pm_writer_body_hash(source->overflowed, item.length, place, salt) == pm_log_direct(&item).hash
             && pm_log_items_valid(source->store.region.size, source->overflowed, item.length, true);
    body->body = source->overflowed, body->length = item.length;
    return PM_OK;
}

/* Adds the records up to this sequence number. */
static pm_status add_records(pm_source *source, uint64_t to, bool *missed)
{
    pm_log *log = &source->store.log;
    source->read_to = log->head; /* behind it, records may have been written since */
    source->ahead = AHEAD_FIRST;
    while (log->sequence < to) {
        const pm_record *record;
        PM_TRY(next_record(source, &record));
        bool valid = record && pm_log_items_valid(source->store.region.size, (const uint8_t *)(record + 1),
                                                  record->body, false);
        if (valid) {
            PM_TRY(pm_recovery_add(&source->found, record, log->header.log_offset + log->head));
            PM_TRY(follow_overflow(source, &source->found.bodies[source->found.count - 1], &valid));
        }
        if (!valid) {
            *missed = true;
            return PM_OK;
        }
        log->head += record->length;
        log->sequence++;
        log->digest = record->digest;
    }
    return PM_OK;
}

static pm_status read_overflowed(pm_source *source, const pm_log_item *overflow);

/* Reads what items declare. unsure: recovery verifies extents that they declare. It does not verify those of older
 * records, which may be many times as large as the store, or in blocks that the disk can't read. */
static pm_status read_declared(pm_source *source, const uint8_t *body, uint64_t length, bool unsure)
{
    pm_log_item item;
    for (uint64_t cursor = 0; pm_log_next(body, length, &cursor, &item);) {
        bool overflow = item.kind == PM_ITEM_OVERFLOW;
        if (item.kind == PM_ITEM_LOGGED || !(unsure || overflow)) continue;
        uint64_t place = PM_REGION_START + item.offset, size = overflow ? item.length : pm_extent_size(item.length);
        PM_TRY(pm_source_read(source, place, size, "what a commit declares"));
        if (overflow && unsure) PM_TRY(read_overflowed(source, &item));
    }
    return PM_OK;
}

/* The same of items in free pages that match their hash: recovery refuses others. In a copy: what hostile items declare
 * may be in the same pages (D9). */
static pm_status read_overflowed(pm_source *source, const pm_log_item *overflow)
{
    uint64_t place = PM_REGION_START + overflow->offset, length = overflow->length;
    const uint8_t *there = source->store.media.view + place;
    if (pm_writer_body_hash(there, length, place, source->store.log.header.salt) != pm_log_direct(overflow).hash)
        return PM_OK;
    uint8_t *items = malloc(length);
    if (!items) return pm_fail(PM_NO_MEMORY, "no memory for a snapshot");
    memcpy(items, there, length);
    bool valid = pm_log_items_valid(source->store.region.size, items, length, true); /* none of them is an overflow */
    pm_status status = valid ? read_declared(source, items, length, true) : PM_OK;
    free(items);
    return status;
}

/* Reads what the records declare, as far as recovery verifies it, and the whole log. */
static pm_status read_for_recovery(pm_source *source)
{
    pm_log log = source->store.log;
    PM_TRY(pm_source_read(source, log.header.log_offset, log.header.log_size, "the log"));
    source->read_to = log.header.log_size;
    uint64_t durable = pm_log_marked_durable(&log), newest = log.sequence, at = 0, sequence = log.sequence;
    for (const pm_record *record; (record = pm_log_record(&log, at, newest + 1)); at += record->length, newest++)
        if (record->sequence - record->behind > durable) durable = record->sequence - record->behind;
    at = 0;
    for (const pm_record *record; (record = pm_log_record(&log, at, ++sequence)); at += record->length) {
        const uint8_t *body = (const uint8_t *)(record + 1);
        if (!pm_log_items_valid(source->store.region.size, body, record->body, false)) return PM_OK;
        PM_TRY(read_declared(source, body, record->body, sequence > durable || sequence == newest));
    }
    return PM_OK;
}

/* The process that wrote the store has died: finds the records that the next process to write it will adopt. */
static pm_status adopt(pm_source *source)
{
    if (source->store.log.header.flags & PM_HEADER_CLEAN) return PM_OK;
    PM_TRY(read_for_recovery(source));
    return pm_recovery_scan(&source->store, &source->found);
}

void pm_source_let_go(pm_source *source, uint64_t place, uint64_t length)
{
    (void)fallocate(source->copy, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)place, (off_t)length);
}

/* The log was emptied: its records are in the committed image. */
static void begin_log_anew(pm_source *source, const pm_log *now)
{
    source->store.log = *now;
    pm_source_let_go(source, now->header.log_offset, now->header.log_size); /* the old records are not valid */
    forget_records(source);
}

static bool same_layout(const pm_header *a, const pm_header *b)
{
    return a->region_size == b->region_size && a->log_offset == b->log_offset && a->log_size == b->log_size
           && a->store_id == b->store_id;
}

pm_status pm_source_follow(pm_source *source, size_t *from, bool *missed)
{
    pm_log now, *log = &source->store.log;
    *from = source->found.count;
    *missed = false;
    PM_TRY(read_header(source->fd, source->store.media.view, &source->store.media, &now));
    if (now.header.generation != log->header.generation) {
        *missed = now.header.sequence != log->sequence || !same_layout(&now.header, &log->header);
        if (*missed) return PM_OK;
        begin_log_anew(source, &now);
        *from = 0;
    }
    bool was_written = source->written;
    source->written = is_written(source->fd);
    if (source->written) return add_records(source, newest(&now), missed);
    *missed = was_written && !(now.header.flags & PM_HEADER_CLEAN);
    if (*missed) return PM_OK;
    /* Nobody writes: the records are found once. */
    return source->read_to ? PM_OK : adopt(source);
}
