/* Readers: a copy of the pages that follows the commits. Snapshots are copies of it. */
#include "reader/reader.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/descriptor.h"
#include "commit/readers.h"
#include "reader/snapshot.h"

static const char FAILED[] = "cannot write a snapshot to memory";

struct pm_reader {
    int fd;
    pm_pages state;
    pm_extent_place *wanted; /* contents that the state has beyond what every snapshot needs */
    size_t count;
};

/* Lets contents go that are not wanted any more. */
static void let_go(pm_reader *reader, const pm_extent_place *wanted, size_t count)
{
    pm_pages *t = &reader->state;
    t->wanted = wanted, t->wanted_count = count, t->contents = t->follows = true;
    for (size_t i = 0; i < reader->count && t->source.copy >= 0; i++) {
        const pm_extent_place *old = &reader->wanted[i];
        bool paired;
        uint64_t place = pm_pages_place(t->pairs, t->pair_count, old->extent, old->length, &paired) / PM_PAGE;
        bool gone = place + pm_extent_pages(old->length) > t->loaded_pages;
        if (gone || pm_pages_wanted(t, old->extent, old->length)) continue;
        pm_page_set_clear(&t->loaded, place, place + pm_extent_table(old->length) / PM_PAGE);
    }
}

static pm_status remember(pm_reader *reader, const pm_extent_place *wanted, size_t count)
{
    pm_extent_place *copy = malloc((count + 1) * sizeof *copy);
    if (!copy) return pm_fail(PM_NO_MEMORY, "no memory for a snapshot");
    if (count) memcpy(copy, wanted, count * sizeof *copy);
    free(reader->wanted);
    reader->wanted = copy, reader->count = count;
    return PM_OK;
}

pm_status pm_reader_open(int fd, bool changing, pm_reader **out)
{
    int own = fcntl(fd, F_DUPFD_CLOEXEC, PM_FIRST_FD);
    if (own < 0) return pm_fail_errno("cannot keep the file of a store open");
    pm_reader *reader = calloc(1, sizeof *reader);
    if (!reader) {
        close(own);
        return pm_fail(PM_NO_MEMORY, "no memory to read a store");
    }
    reader->fd = own;
    reader->state.source.fd = reader->state.source.copy = -1;
    reader->state.changing = changing;
    *out = reader;
    return PM_OK;
}

bool pm_reader_hold(pm_reader *reader, bool ask)
{
    pm_pages_release(&reader->state, reader->fd);
    reader->state.held = true;
    return ask && pm_readers_ask_and_wait(reader->fd, &reader->state.asked);
}

void pm_reader_release(pm_reader *reader)
{
    pm_pages_release(&reader->state, reader->fd);
    reader->state.held = false;
}

void pm_reader_free(pm_reader *reader)
{
    if (!reader) return;
    pm_pages_end(&reader->state);
    free(reader->wanted);
    close(reader->fd);
    free(reader);
}

/* Copies what the state has into a memory file of the snapshot's own, as the state goes on. */
static pm_status copy_state(const pm_pages *t, pm_snapshot *snapshot)
{
    uint64_t words = snapshot->size / PM_PAGE / 64 + 1, pages = snapshot->size / PM_PAGE;
    const uint8_t *view = t->source.store.media.view;
    snapshot->loaded = malloc(words * sizeof *snapshot->loaded);
    snapshot->pairs = malloc((t->pair_count + 1) * sizeof *snapshot->pairs);
    uint8_t *header = malloc(PM_REGION_START);
    pm_status status = pm_source_memory(t->source.store.media.mapped, &snapshot->copy);
    if (!snapshot->loaded || !snapshot->pairs || !header) status = pm_fail(PM_NO_MEMORY, "no memory for a snapshot");
    if (status == PM_OK) {
        memcpy(snapshot->loaded, t->loaded.bits, words * sizeof *snapshot->loaded);
        if (t->pair_count) memcpy(snapshot->pairs, t->pairs, t->pair_count * sizeof *snapshot->pairs);
        snapshot->pair_count = t->pair_count;
        status = pm_page_hashes_copy(&snapshot->tables, &t->tables);
        pm_pages_header(t, header);
        if (status == PM_OK) status = pm_source_pwrite(snapshot->copy, 0, PM_REGION_START, header, FAILED);
    }
    free(header);
    for (uint64_t page = 0; status == PM_OK && (page = pm_page_set_next(&t->loaded, page, pages)) < pages;) {
        uint64_t first = page;
        page = pm_page_set_next_absent(&t->loaded, page, pages);
        uint64_t place = PM_REGION_START + first * PM_PAGE;
        status = pm_source_pwrite(snapshot->copy, place, (page - first) * PM_PAGE, view + place, FAILED);
    }
    return status;
}

pm_status pm_reader_take(pm_reader *reader, const pm_extent_place *wanted, size_t count, pm_snapshot **out)
{
    pm_snapshot *snapshot = NULL;
    let_go(reader, wanted, count);
    PM_TRY(remember(reader, wanted, count));
    PM_TRY(pm_pages_reach(&reader->state, reader->fd));
    PM_TRY(pm_snapshot_new(&reader->state, reader->fd, &snapshot));
    pm_status status = copy_state(&reader->state, snapshot);
    if (status == PM_OK) *out = snapshot;
    else pm_snapshot_free(snapshot);
    return status;
}
