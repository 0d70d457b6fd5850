/*
 * The instructions of aarch64 that the core uses: CRC-32C, and the flushes of lines. Run by test_aarch64.py under
 * user-mode emulation, which executes them, but has no caches: that a flush reaches memory is not shown.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/hash.c"
#include "media/lines.c"

static void fail(const char *what, size_t offset, size_t length)
{
    printf("%s: %zu bytes at %zu\n", what, length, offset);
    exit(1);
}

static sigjmp_buf unknown;

static void illegal(int number)
{
    (void)number;
    siglongjmp(unknown, 1);
}

static void flush(const char *name)
{
    static uint8_t bytes[3 * PM_PAGE] __attribute__((aligned(4096)));
    bool known;
    pm_lines_flush *function = pm_lines_find_flush(name, &known);
    if (!known || !function) fail(name ? name : "the best one", 0, 0);
    for (uint64_t lines = 0; lines < 100; lines++) {
        memset(bytes, (int)lines, sizeof bytes);
        function(bytes + PM_LINE, lines);
        pm_lines_order(lines % 2);
        for (size_t i = 0; i < sizeof bytes; i++)
            if (bytes[i] != lines) fail("a flush changed bytes", i, lines);
    }
}

/* Prints XXH3 and CRC-32C of bytes of a pattern, for all lengths up to 5,000 and one beyond. */
int main(void)
{
    static uint8_t bytes[100001];
    uint64_t state = 1;
    for (size_t i = 0; i < sizeof bytes; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        bytes[i] = (uint8_t)(state >> 56);
    }
    if (crc32c == crc32c_portable) fail("the processor's CRC is not used", 0, 0);
    for (size_t offset = 0; offset < 16; offset++)
        for (size_t length = 0; length < 300; length++)
            if (crc32c(bytes + offset, length, 7) != crc32c_portable(bytes + offset, length, 7))
                fail("another CRC", offset, length);
    flush("cvac");
    /* Some emulators say that they have it, and have not. */
    signal(SIGILL, illegal);
    if (sigsetjmp(unknown, 1)) {
        puts("no cvap");
    } else {
        flush("cvap");
        flush(NULL);
        puts("cvap");
    }
    bool known;
    if (pm_lines_find_flush("clwb", &known) || known) fail("clwb", 0, 0);
    for (size_t length = 0; length <= 5000; length++)
        printf("%llx %x\n", (unsigned long long)pm_hash64(bytes, length, length % 3), pm_crc32c(bytes, length, 0));
    printf("%llx %x\n", (unsigned long long)pm_hash64(bytes, sizeof bytes, 0), pm_crc32c(bytes, sizeof bytes, 0));
    return 0;
}
