/*
 * The memory in which a store gathers its commits: some MiB for every store that commits. Under ASan a fresh block of
 * that size costs much, so log/writer.c is compiled to take it from here, where it is kept.
 */
#include <sanitizer/asan_interface.h>
#include <stdlib.h>

#include "fuzz.h"

int fuzz_memalign(void **out, size_t alignment, size_t size);
void fuzz_free(void *block);

enum { BLOCKS = 2, POISONED = 64 << 10 };

static struct {
    void *bytes;
    size_t size;
    bool used;
} blocks[BLOCKS];

int fuzz_memalign(void **out, size_t alignment, size_t size)
{
    for (unsigned i = 0; i < BLOCKS; i++) {
        if (blocks[i].used || (blocks[i].bytes && blocks[i].size != size)) continue;
        if (!blocks[i].bytes && posix_memalign(&blocks[i].bytes, alignment, size)) fuzz_fail("no memory");
        blocks[i].size = size, blocks[i].used = true;
        ASAN_UNPOISON_MEMORY_REGION(blocks[i].bytes, POISONED);
        *out = blocks[i].bytes;
        return 0;
    }
    fuzz_fail("a writer is left");
}

void fuzz_free(void *block)
{
    if (!block) return;
    for (unsigned i = 0; i < BLOCKS; i++) {
        if (blocks[i].bytes != block) continue;
        if (!blocks[i].used) fuzz_fail("a writer is freed twice");
        blocks[i].used = false;
        ASAN_POISON_MEMORY_REGION(block, POISONED);
        return;
    }
    fuzz_fail("a writer is freed that is none");
}
