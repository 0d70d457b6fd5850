/*
 * The core by itself, for a processor that has no Python here. Run by test_aarch64.py.
 *
 *   store FILE check       opens the store, which recovers it, and prints its sequence number and the problems found
 *   store FILE change N    commits N times, and prints each commit's number when it has returned. Commit i sets all
 *                          bytes of each array to i if i is odd, and the first 100 of each 4096 if it is even
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pmstore.h"

enum { ARRAYS = 16, BLOCK = 4096, SOME = 100 };

static void require(pm_status status)
{
    if (status == PM_OK) return;
    printf("status %d: %s\n", (int)status, pm_message());
    exit(1);
}

/* Opens living buffers over all arrays, and returns their number. */
static size_t arrays(pm_store *store, uint8_t **address, uint64_t *length)
{
    static uint8_t rows[65536];
    size_t used, count = 0;
    require(pm_scan(store, NULL, 0, 0, NULL, 0, rows, sizeof rows, &used));
    for (size_t at = 0; at < used;) {
        pm_row row;
        memcpy(&row, rows + at, sizeof row);
        at += row.row_length;
        pm_buffer *buffer;
        if (!row.offset || count == ARRAYS) continue;
        require(pm_buffer_open(store, row.offset, row.length, PM_BUFFER_WRITABLE, &buffer));
        address[count] = pm_buffer_address(buffer);
        length[count++] = row.length;
    }
    return count;
}

static void change(uint8_t *bytes, uint64_t length, unsigned commit)
{
    if (commit % 2) memset(bytes, (int)commit, length);
    else
        for (uint64_t at = 0; at < length; at += BLOCK)
            memset(bytes + at, (int)commit, length - at < SOME ? length - at : SOME);
}

int main(int count, char **arguments)
{
    pm_store *store;
    if (count < 3) return 2;
    int fd = open(arguments[1], O_RDWR);
    if (fd < 0) return 2;
    require(pm_open(fd, PM_MEDIA_AUTO, 0, 0, NULL, &store));
    if (!strcmp(arguments[2], "check")) {
        pm_report *report;
        require(pm_check(store, &report));
        printf("%llu %zu\n", (unsigned long long)pm_sequence(store), pm_report_count(report));
        for (size_t i = 0; i < pm_report_count(report); i++) puts(pm_report_get(report, i)->text);
    } else {
        uint8_t *address[ARRAYS];
        uint64_t length[ARRAYS];
        size_t found = arrays(store, address, length);
        unsigned commits = count > 3 ? (unsigned)atoi(arguments[3]) : 0;
        printf("%s, %s, %s\n", pm_media_name(store), pm_domain_in_use(store), pm_tracker_in_use(store));
        for (unsigned commit = 1; commit <= commits; commit++) {
            for (size_t i = 0; i < found; i++) change(address[i], length[i], commit);
            require(pm_commit(store));
            printf("%u\n", commit);
            fflush(stdout);
        }
    }
    require(pm_close(store, 0));
    return 0;
}
