/*
 * The core's calls from many threads at once, under ThreadSanitizer: two write into living arrays, one commits and
 * rolls back, one uses the catalog, one opens and lets go of buffers, one looks. What programs write to their arrays
 * may race with a commit, which lands in whichever commit takes it: those stores are hidden from the sanitizer. Run by
 * tests/core/test_threads_race.py.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pmstore.h"

enum { ARRAYS = 6 };

static pm_store *store;
static uint64_t lengths[ARRAYS] = {64, 1500, 5000, 60000, 300000, 5000000};
static uint64_t offsets[ARRAYS];
static pm_buffer *buffers[ARRAYS];
static atomic_int left;
static unsigned rounds; /* each thread does so many things */

static void must(pm_status status, const char *what)
{
    if (status == PM_OK || status == PM_NOT_FOUND) return;
    printf("%s: status %d: %s\n", what, status, pm_message());
    exit(1);
}
#define MUST(call) must(call, #call)

/* As numpy would: the sanitizer does not see it. */
__attribute__((no_sanitize("thread"))) static void scribble(volatile uint8_t *bytes, uint64_t length, unsigned seed)
{
    uint64_t step = seed % 3 ? 4096 : 61;
    for (uint64_t i = seed % 97; i < length; i += step) bytes[i]++;
}

static void *write_arrays(void *number)
{
    for (unsigned i = 0; atomic_load(&left) > 0; i++) {
        unsigned a = (i * 2 + (unsigned)(uintptr_t)number) % ARRAYS;
        scribble(pm_buffer_address(buffers[a]), lengths[a], i);
        usleep(100); /* the processors are for the others */
    }
    return NULL;
}

static void *commit(void *unused)
{
    for (unsigned i = 0; i < rounds; i++) {
        pm_range range = {(uint64_t)(uintptr_t)pm_buffer_address(buffers[i % ARRAYS]), lengths[i % ARRAYS]};
        if (i % 11 == 10) MUST(pm_rollback(store));
        else if (i % 7 == 6) MUST(pm_commit_only(store, &range, 1));
        else MUST(pm_commit(store));
        if (i % 25 == 24) MUST(pm_checkpoint(store));
    }
    atomic_fetch_sub(&left, 1);
    return unused;
}

static void *use_catalog(void *unused)
{
    uint8_t meta[PM_META_MAX], key[4] = "k";
    for (unsigned i = 0; i < rounds; i++) {
        pm_entry entry = {.meta_length = 8};
        key[1] = (uint8_t)i;
        MUST(pm_put(store, key, 2, &entry, meta, NULL, 0, NULL, 0));
        MUST(pm_get(store, key, 2, &entry, meta));
        if (i % 3 == 0) MUST(pm_delete(store, key, 2, NULL, 0));
    }
    atomic_fetch_sub(&left, 1);
    return unused;
}

static void *open_buffers(void *unused)
{
    for (unsigned i = 0; i < rounds; i++) {
        pm_buffer *buffer;
        unsigned a = i % ARRAYS;
        MUST(pm_buffer_open(store, offsets[a], lengths[a], i % 2, &buffer));
        pm_buffer_release(buffer, NULL);
    }
    atomic_fetch_sub(&left, 1);
    return unused;
}

static void *look(void *unused)
{
    for (unsigned i = 0; i < rounds / 10; i++) {
        pm_statistics statistics;
        pm_report *report;
        pm_range range;
        unsigned a = i % ARRAYS;
        MUST(pm_stats(store, &statistics));
        if (!pm_holds(store, pm_buffer_address(buffers[a]), lengths[a], &range, 0)) {
            printf("an array is not the store's\n");
            exit(1);
        }
        MUST(pm_check(store, &report));
        if (pm_report_count(report)) {
            printf("check: %s\n", pm_report_get(report, 0)->text);
            exit(1);
        }
        pm_report_free(report);
    }
    atomic_fetch_sub(&left, 1);
    return unused;
}

int main(int count, char **arguments)
{
    if (count != 4) return 2;
    rounds = (unsigned)atoi(arguments[3]);
    int fd = open(arguments[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
    pm_media_kind kind = strcmp(arguments[2], "memory") ? PM_MEDIA_FILE : PM_MEDIA_MEMORY;
    MUST(pm_format(fd, kind, NULL));
    MUST(pm_open(dup(fd), kind, 0, 0, NULL, &store));
    for (unsigned a = 0; a < ARRAYS; a++) {
        uint8_t key[2] = {'a', (uint8_t)('0' + a)}, zero = 0;
        MUST(pm_alloc(store, lengths[a], &offsets[a]));
        MUST(pm_fill(store, offsets[a], lengths[a], &zero, 1));
        pm_entry entry = {.offset = offsets[a], .length = lengths[a]};
        MUST(pm_put(store, key, 2, &entry, &zero, NULL, 0, NULL, 0));
        MUST(pm_buffer_open(store, offsets[a], lengths[a], 1, &buffers[a]));
    }
    MUST(pm_commit(store));
    pthread_t threads[6];
    atomic_store(&left, 4);
    pthread_create(&threads[0], NULL, commit, NULL);
    pthread_create(&threads[1], NULL, use_catalog, NULL);
    pthread_create(&threads[2], NULL, open_buffers, NULL);
    pthread_create(&threads[3], NULL, look, NULL);
    pthread_create(&threads[4], NULL, write_arrays, (void *)0);
    pthread_create(&threads[5], NULL, write_arrays, (void *)1);
    for (int i = 0; i < 6; i++) pthread_join(threads[i], NULL);
    /* What was written last is what is found again. */
    MUST(pm_commit(store));
    uint64_t before, after;
    MUST(pm_state_hash(store, &before));
    for (unsigned a = 0; a < ARRAYS; a++) pm_buffer_release(buffers[a], NULL);
    MUST(pm_close(store, 0));
    MUST(pm_open(fd, kind, 0, 0, NULL, &store));
    MUST(pm_state_hash(store, &after));
    MUST(pm_close(store, 0));
    if (before != after) {
        printf("a write of a thread was lost\n");
        return 1;
    }
    return 0;
}
