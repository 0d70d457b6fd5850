/*
 * One execution: a damaged or hostile file is opened for reading, then for writing, used in every way, changed, closed
 * and opened again.
 *
 * The oracle for all of them: no crash, no hang, no leak. For damage also: either an error says so, or pm_check does,
 * or the store holds what it held; and then everything works, and what is committed now is there later.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "log/log.h"
#include "fuzz.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { LOOK_FOR_LEAKS = 512, SECONDS_MOST = 1 };
#define RESERVED (UINT64_C(48) << 30) /* a store reserves more than this */

typedef struct {
    const fuzz_base *base;
    fuzz_head head;
    bool strict;  /* the state must be right */
    bool opened;  /* for writing */
    bool lost_evidence; /* nothing is left that knows of the newest commits, as after a crash before them */
    uint64_t size, oldest; /* oldest: the sequence that the store may be taken back to */
} execution;

static int work;       /* the file */
static uint8_t *bytes; /* its bytes, FUZZ_ROOM of them */
static fuzz_view found, model, saved;
static size_t executions;
static struct {
    size_t hostile, refused, found, harmless, lost;
} outcomes;

/* ---- the file
 * ----------------------------------------------------------------------------------------------------- */

static void resize(uint64_t size)
{
    if (ftruncate(work, (off_t)size)) fuzz_fail("cannot set the size of the file");
}

/* In plain loops: what the fuzzer learns from calls of memcmp should come from the core. */
__attribute__((no_sanitize("address", "undefined"))) static bool same_page(const uint8_t *a, const uint8_t *b)
{
    const uint64_t *x = (const void *)a, *y = (const void *)b;
    uint64_t differ = 0;
    for (size_t i = 0; i < PM_PAGE / sizeof *x; i++) differ |= x[i] ^ y[i];
    return !differ;
}

static void restore(const fuzz_base *base)
{
    resize(base->size);
    resize(FUZZ_ROOM);
    for (uint64_t at = 0; at < base->size; at += PM_PAGE)
        if (!same_page(bytes + at, base->bytes + at)) memcpy(bytes + at, base->bytes + at, PM_PAGE);
}

static bool changed(const execution *x, fuzz_range range)
{
    return range.start + range.length > x->size
           || memcmp(bytes + range.start, x->base->bytes + range.start, range.length);
}

/* What the damage allows. A commit may be lost if everything that names it is damaged: the durable marker, and the
 * records from it on. */
static void weigh(execution *x)
{
    const fuzz_base *base = x->base;
    uint64_t newest = base->states[base->state_count - 1].sequence;
    x->oldest = newest;
    bool marker = changed(x, (fuzz_range){PM_DURABLE_MARKER_PLACE, sizeof(pm_durable_marker)});
    bool outside = false, records = false;
    for (size_t i = 0; i < base->outside_count; i++) outside |= changed(x, base->outside[i]);
    for (size_t i = 0; i < base->record_count; i++) records |= changed(x, base->records[i]);
    if (!marker || !(records || outside) || !base->record_count) return;
    /* Record i holds commit newest - count + 1 + i. The committed image may hold what a lost record changed in the
     * contents that the one before declares: then that one is taken for torn as well. */
    bool lost = false;
    for (size_t i = base->record_count; i-- > 0; x->oldest = newest - (base->record_count - i), lost = true)
        if (!changed(x, base->records[i]) && !(outside && i + 1 == base->record_count)
            && !(lost && base->outside_count))
            break;
    x->lost_evidence = x->oldest < newest;
}

/* ---- the oracle
 * ------------------------------------------------------------------------------------------------------ */

static void describe(const execution *x, const char *when)
{
    fprintf(stderr, "fuzz: base \"%s\" (%s), opened as %s: %s\n", x->base->name,
            x->base - fuzz_bases < (ptrdiff_t)fuzz_base_count / 2 ? "memory" : "file",
            x->head.flags & FUZZ_FILE ? "file" : "memory", when);
}

/* True if the store is taken for sound. */
static bool evaluate(execution *x, pm_store *store, const char *when)
{
    size_t problems;
    fuzz_walk(store, &found, true);
    pm_status status = fuzz_check(store, &problems, false);
    if (!x->strict || status != PM_OK || problems) return false;
    if (found.status != PM_OK) {
        describe(x, when);
        fuzz_fail("a reader stumbles over what pm_check does not see: %s", pm_message());
    }
    for (size_t i = 0; i < x->base->state_count; i++) {
        const fuzz_state *state = &x->base->states[i];
        if (state->sequence == found.sequence && state->digest == found.digest && state->sequence >= x->oldest)
            return true;
    }
    describe(x, when);
    fuzz_fail("damage was passed over: the store is taken for sound at commit %llu, digest %016llx; oldest allowed: "
              "commit %llu",
              (unsigned long long)found.sequence, (unsigned long long)found.digest, (unsigned long long)x->oldest);
}

static void expect(const execution *x, pm_store *store, const fuzz_view *wanted, const char *when)
{
    size_t problems;
    if (!x->strict) return;
    fuzz_walk(store, &found, false);
    pm_status status = fuzz_check(store, &problems, true);
    if (found.status == PM_OK && status == PM_OK && !problems && found.digest == wanted->digest
        && found.count == wanted->count)
        return;
    describe(x, when);
    fuzz_fail("status %d, check %d, %zu problems, %zu keys with digest %016llx instead of %zu with %016llx: %s",
              (int)found.status, (int)status, problems, found.count, (unsigned long long)found.digest, wanted->count,
              (unsigned long long)wanted->digest, pm_message());
}

/* ---- one execution
 * ------------------------------------------------------------------------------------------------- */

static pm_media_kind medium_of(const execution *x, bool other)
{
    return !(x->head.flags & FUZZ_FILE) == other ? PM_MEDIA_FILE : PM_MEDIA_MEMORY;
}

static pm_status open_work(const execution *x, unsigned flags, bool other, pm_store **store)
{
    return pm_open(dup(work), medium_of(x, other), flags, x->base->size + FUZZ_EXTEND, NULL, store);
}

/* Returns true if the store was taken for sound. */
static bool read_only(execution *x)
{
    pm_store *store;
    if (open_work(x, PM_OPEN_READ_ONLY, false, &store) != PM_OK) return false;
    bool valid = evaluate(x, store, "for reading");
    pm_close(store, 0);
    return valid;
}

static void rollback(execution *x, pm_store *store, uint64_t *random)
{
    saved = model;
    fuzz_change(store, &model, random, 3, x->strict);
    model = saved;
    fuzz_rolled_back();
    if (pm_rollback(store) != PM_OK && x->strict) fuzz_fail("pm_rollback failed: %s", pm_message());
    expect(x, store, &model, "after a rollback");
}

static void commit(execution *x, pm_store *store, uint64_t *random)
{
    saved = model;
    fuzz_change(store, &model, random, 2 + fuzz_random(random) % 5, x->strict);
    pm_status status = pm_commit(store);
    if (status == PM_OK) return;
    if (x->strict && status != PM_NO_SPACE) fuzz_fail("pm_commit failed on a sound store: %s", pm_message());
    pm_rollback(store);
    fuzz_rolled_back();
    model = saved;
}

static void change(execution *x, pm_store *store)
{
    pm_buffer *kept = NULL;
    uint64_t random = x->head.seed;
    if (fuzz_random(&random) % 4 == 0) rollback(x, store, &random);
    commit(x, store, &random);
    if (fuzz_random(&random) % 4 == 0) commit(x, store, &random);
    if (fuzz_random(&random) % 8 == 0 && pm_checkpoint(store) != PM_OK && x->strict)
        fuzz_fail("pm_checkpoint failed: %s", pm_message());
    if (fuzz_random(&random) % 4 == 0) rollback(x, store, &random);
    expect(x, store, &model, "after changes");
    const pm_entry *entry = x->head.flags & FUZZ_KEEP_BUFFER && model.count ? &model.rows[0].entry : NULL;
    if (entry && entry->offset && pm_buffer_open(store, entry->offset, entry->length, 1, &kept) != PM_OK) kept = NULL;
    if (!(x->head.flags & FUZZ_KEEP_BUFFER)) fuzz_let_go(x->strict);
    pm_status status = pm_close(store, x->head.flags & FUZZ_DISCARD ? PM_CLOSE_DISCARD : 0);
    if (x->strict && status != PM_OK) fuzz_fail("pm_close failed on a sound store: %s", pm_message());
    fuzz_let_go(x->strict);
    if (!kept) return;
    memset(pm_buffer_address(kept), 1, entry->length);
    pm_buffer_release(kept, NULL);
}

static void again(execution *x)
{
    pm_store *store;
    size_t problems;
    pm_status status = open_work(x, 0, x->head.flags & FUZZ_OTHER_MEDIUM, &store);
    if (status != PM_OK) {
        if (x->strict) fuzz_fail("the changed store does not open: %s", pm_message());
        return;
    }
    expect(x, store, &model, "opened again");
    if (!x->strict) fuzz_walk(store, &found, true), fuzz_check(store, &problems, false);
    pm_close(store, 0);
}

static void execute(execution *x)
{
    pm_store *store;
    bool readable = read_only(x);
    if (open_work(x, 0, false, &store) != PM_OK) {
        if (readable) fuzz_fail("opens for reading and is sound, but does not open for writing: %s", pm_message());
        return;
    }
    uint64_t sequence = found.sequence;
    x->opened = true;
    x->strict = evaluate(x, store, "for writing");
    if (readable && !x->strict) fuzz_fail("sound for reading, damaged for writing");
    if (readable && sequence != found.sequence)
        fuzz_fail("for reading it is commit %llu, for writing commit %llu", (unsigned long long)sequence,
                  (unsigned long long)found.sequence);
    model = found;
    change(x, store);
    again(x);
}

/* ---- what an execution leaves behind
 * ---------------------------------------------------------------------------------- */

/* Of the file only: a fuzzer has descriptors of its own. */
static size_t count_descriptors(void)
{
    size_t count = 0;
    char target[64];
    const struct dirent *entry;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && (entry = readdir(folder))) {
        ssize_t length = readlinkat(dirfd(folder), entry->d_name, target, sizeof target - 1);
        if (length > 0 && (target[length] = 0, strstr(target, "memfd:pmstore"))) count++;
    }
    if (folder) closedir(folder);
    return count;
}

static uint64_t address_space(void)
{
    unsigned long long pages = 0;
    FILE *sizes = fopen("/proc/self/statm", "r");
    if (!sizes || fscanf(sizes, "%llu", &pages) != 1) fuzz_fail("no statm in /proc");
    fclose(sizes);
    return pages * PM_PAGE;
}

static void look_for_leaks(void)
{
    static uint64_t first;
    uint64_t reserved = address_space();
    size_t count = count_descriptors();
    if (!first) first = reserved;
    if (count != 1) fuzz_fail("%zu descriptors of the file are left open", count - 1);
    if (reserved > first + RESERVED)
        fuzz_fail("an address range is left: %llu bytes", (unsigned long long)(reserved - first));
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void count_outcome(const execution *x, bool hostile)
{
    if (hostile) outcomes.hostile++;
    else if (x->lost_evidence) outcomes.lost++;
    else if (x->strict && x->opened) outcomes.harmless++;
    else if (x->opened) outcomes.found++;
    else outcomes.refused++;
}

static void print_outcomes(void)
{
    fprintf(stderr,
            "fuzz: %zu executions: %zu hostile; damage: %zu refused, %zu found by pm_check, %zu harmless, "
            "%zu without evidence\n",
            executions, outcomes.hostile, outcomes.refused, outcomes.found, outcomes.harmless, outcomes.lost);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    fuzz_make_bases();
    work = memfd_create("pmstore-fuzz", MFD_CLOEXEC);
    if (work < 0) fuzz_fail("no memfd");
    atexit(print_outcomes);
    resize(FUZZ_ROOM);
    bytes = mmap(NULL, FUZZ_ROOM, PROT_READ | PROT_WRITE, MAP_SHARED, work, 0);
    if (bytes == MAP_FAILED) fuzz_fail("cannot map the file");
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    execution x = {0};
    fuzz_edit edits[FUZZ_EDITS];
    if (size > FUZZ_MOST) return 0;
    if (size) memcpy(&x.head, data, size < sizeof x.head ? size : sizeof x.head);
    size_t count = size < sizeof x.head ? 0 : (size - sizeof x.head) / sizeof *edits;
    if (count) memcpy(edits, data + sizeof x.head, count * sizeof *edits);
    double start = seconds();
    bool hostile = x.head.flags & FUZZ_HOSTILE;
    fuzz_reset_ids(pm_hash64(data, size, 0));
    x.base = &fuzz_bases[x.head.base % fuzz_base_count];
    restore(x.base);
    x.size = fuzz_apply(x.base, hostile, edits, count, bytes);
    resize(FUZZ_ROOM);
    if (!hostile) weigh(&x);
    x.strict = !hostile;
    resize(x.size);
    execute(&x);
    count_outcome(&x, hostile);
    if (executions++ % LOOK_FOR_LEAKS == 0) look_for_leaks();
    double took = seconds() - start;
    if (took > SECONDS_MOST) fuzz_fail("one execution took %.1f s of processor time", took);
    return 0;
}
