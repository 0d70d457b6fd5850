/*
 * libpmemobj beside the baseline, each repetition paired, with the same clock.
 *
 *     pmemobj DIRECTORY memory|disk BYTES ROWS CHANGED tx|publish SECONDS LEAST MOST
 *
 * An array of BYTES, or (ROWS > 0) of ROWS rows of BYTES each, of which CHANGED random ones are written. `tx` writes in
 * place, inside a transaction, each range added by tx_add_range; `publish` writes a fresh object (for rows: one per
 * row) and publishes it by an atomic swap of its offset. At the end the pool is closed, opened anew and compared with
 * what was written. Prints the seconds of all repetitions as JSON.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <libpmemobj.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "baseline.h"

enum { MOST_ROWS = 8192, WARM_UP = 3 };

typedef struct {
    PMEMoid array, row[MOST_ROWS];
} root_object;

static PMEMobjpool *pool;
static root_object *root;
static size_t bytes, rows, changed, all;
static struct pobj_action *actions;

static void die(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, pmemobj_errormsg());
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void attach(void)
{
    PMEMoid oid = pmemobj_root(pool, sizeof(root_object));
    if (OID_IS_NULL(oid)) die("root");
    root = pmemobj_direct(oid);
}

static void write_in_place(const char *source, const int64_t *which)
{
    char *array = pmemobj_direct(root->array);
    TX_BEGIN(pool)
    {
        for (size_t i = 0; i < (rows ? changed : 1); i++) {
            char *place = array + (rows ? (size_t)which[i] * bytes : 0);
            pmemobj_tx_add_range_direct(place, bytes);
            memcpy(place, source + i * bytes, bytes);
        }
    }
    TX_ONABORT
    {
        die("transaction");
    }
    TX_END
}

static void publish(const char *source, const int64_t *which)
{
    size_t n = 0;
    for (size_t i = 0; i < (rows ? changed : 1); i++) {
        PMEMoid *old = rows ? &root->row[which[i]] : &root->array;
        PMEMoid fresh = pmemobj_reserve(pool, &actions[n++], bytes, 1);
        if (OID_IS_NULL(fresh)) die("reserve");
        pmemobj_memcpy(pool, pmemobj_direct(fresh), source + i * bytes, bytes, PMEMOBJ_F_MEM_NODRAIN);
        pmemobj_set_value(pool, &actions[n++], &old->off, fresh.off);
        pmemobj_defer_free(pool, *old, &actions[n++]);
    }
    pmemobj_drain(pool);
    if (pmemobj_publish(pool, actions, n)) die("publish");
}

static bool same(const char *expected, bool apart)
{
    if (!apart) return !memcmp(pmemobj_direct(root->array), expected, all);
    for (size_t i = 0; i < rows; i++)
        if (memcmp(pmemobj_direct(root->row[i]), expected + i * bytes, bytes)) return false;
    return true;
}

/* The first `changed` places of a shuffled order are a random sample; ascending, as all that is measured gets them. */
static int ascending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}
static void choose(int64_t *order, int64_t *which)
{
    for (size_t i = 0; i < changed; i++) {
        size_t j = i + (size_t)random() % (rows - i);
        int64_t kept = order[i];
        order[i] = order[j], order[j] = kept;
        which[i] = order[i];
    }
    qsort(which, changed, sizeof *which, ascending);
}

static void *room(size_t size)
{
    void *memory = aligned_alloc(4096, (size + 8191) / 4096 * 4096);
    if (!memory) die("memory");
    return memory;
}

int main(int count, char **arguments)
{
    if (count != 10) {
        fprintf(stderr, "pmemobj DIRECTORY memory|disk BYTES ROWS CHANGED tx|publish SECONDS LEAST MOST\n");
        return 2;
    }
    bool memory = !strcmp(arguments[2], "memory"), publishing = !strcmp(arguments[6], "publish");
    bytes = strtoull(arguments[3], NULL, 10), rows = strtoull(arguments[4], NULL, 10),
    changed = strtoull(arguments[5], NULL, 10);
    double seconds = atof(arguments[7]);
    size_t least = strtoull(arguments[8], NULL, 10) + WARM_UP, most = strtoull(arguments[9], NULL, 10) + WARM_UP;
    all = bytes * (rows ? rows : 1);
    size_t part = bytes * (rows ? changed : 1);
    if (rows > MOST_ROWS || changed > rows || !part) return 2;
    bool apart = rows && publishing;

    char path[4096];
    snprintf(path, sizeof path, "%s/pool", arguments[1]);
    pool = pmemobj_create(path, "bench", (64 << 20) + 4 * all, 0600);
    if (!pool) die("create");
    attach();
    if (!apart && pmemobj_zalloc(pool, &root->array, all, 1)) die("array");
    for (size_t i = 0; apart && i < rows; i++)
        if (pmemobj_zalloc(pool, &root->row[i], bytes, 1)) die("row");
    actions = room(3 * (changed + 1) * sizeof *actions);

    snprintf(path, sizeof path, "%s/baseline", arguments[1]);
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    char *source = room(part), *baseline_source = room(part), *expected = room(all), *place = NULL;
    memset(expected, 0, all), memset(source, 0, part), memset(baseline_source, 0, part);
    if (fd < 0 || write(fd, expected, all) != (ssize_t)all || ftruncate(fd, (off_t)(all + 4096)) || fsync(fd))
        die("baseline");
    if (memory) {
        place = mmap(NULL, all + 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (place == MAP_FAILED) die("map");
        memset(place, 1, all + 4096);
    }
    int64_t order[MOST_ROWS], which[MOST_ROWS];
    for (size_t i = 0; i < MOST_ROWS; i++) order[i] = (int64_t)i;
    srandom(1);

    double *times = room(most * sizeof *times), *baselines = room(most * sizeof *baselines), end = now() + seconds;
    size_t n = 0;
    for (; n < least || (n < most && now() < end); n++) {
        if (rows) choose(order, which);
        for (size_t i = 0; i < part / sizeof(double); i++) ((double *)baseline_source)[i] += 1;
        baselines[n] = !memory ? baseline_disk(fd, baseline_source, part, NULL)
                    : rows  ? baseline_memory_rows(place, baseline_source, bytes, which, changed)
                            : baseline_memory(place, baseline_source, part);
        for (size_t i = 0; i < part / sizeof(double); i++) ((double *)source)[i] += 1;
        double start = now();
        if (publishing) publish(source, which);
        else write_in_place(source, which);
        times[n] = now() - start;
        for (size_t i = 0; i < (rows ? changed : 1); i++)
            memcpy(expected + (rows ? (size_t)which[i] * bytes : 0), source + i * bytes, bytes);
    }
    pmemobj_close(pool);
    snprintf(path, sizeof path, "%s/pool", arguments[1]);
    pool = pmemobj_open(path, "bench");
    if (!pool) die("open");
    attach();
    printf("{\"verified\": %s, \"times\": [", same(expected, apart) ? "true" : "false");
    for (size_t i = WARM_UP; i < n; i++) printf("%s%.9f", i > WARM_UP ? ", " : "", times[i]);
    printf("], \"baselines\": [");
    for (size_t i = WARM_UP; i < n; i++) printf("%s%.9f", i > WARM_UP ? ", " : "", baselines[i]);
    printf("]}\n");
    pmemobj_close(pool);
    return 0;
}
