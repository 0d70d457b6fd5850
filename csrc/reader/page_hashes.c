#include "reader/page_hashes.h"

#include <stdlib.h>
#include <string.h>

#include "base/format.h"
#include "base/hash.h"

enum { SIZE_FIRST = 64 };

uint64_t pm_page_hashes_of(const void *bytes, size_t count)
{
    uint64_t hash = pm_hash64(bytes, count, 0);
    return hash ? hash : 1;
}

/* The slot of a page, or the unused one in which to put it. */
static pm_page_hash *slot_of(const pm_page_hashes *hashes, uint64_t page)
{
    size_t at = (size_t)(page * UINT64_C(0x9e3779b97f4a7c15) >> 20) & (hashes->size - 1);
    while (hashes->slots[at].page && hashes->slots[at].page != page) at = (at + 1) & (hashes->size - 1);
    return &hashes->slots[at];
}

static pm_status grow(pm_page_hashes *hashes)
{
    size_t size = hashes->size ? 2 * hashes->size : SIZE_FIRST;
    pm_page_hashes grown = {.slots = calloc(size, sizeof *grown.slots), .size = size, .used = hashes->used};
    if (!grown.slots) return pm_fail(PM_NO_MEMORY, "no memory for a snapshot");
    for (size_t i = 0; i < hashes->size; i++)
        if (hashes->slots[i].page) *slot_of(&grown, hashes->slots[i].page) = hashes->slots[i];
    free(hashes->slots);
    *hashes = grown;
    return PM_OK;
}

pm_status pm_page_hashes_add(pm_page_hashes *hashes, pm_page_hash one)
{
    if (2 * (hashes->used + 1) > hashes->size) PM_TRY(grow(hashes));
    pm_page_hash *slot = slot_of(hashes, one.page);
    hashes->used += !slot->page;
    *slot = one;
    return PM_OK;
}

void pm_page_hashes_remove(pm_page_hashes *hashes, uint64_t page)
{
    if (hashes->size) slot_of(hashes, page)->hash = 0;
}

uint64_t pm_page_hashes_at(const pm_page_hashes *hashes, uint64_t page)
{
    return hashes->size ? slot_of(hashes, page)->hash : 0;
}

bool pm_page_hashes_fit(const pm_page_hashes *hashes, uint64_t page, const void *bytes, size_t count)
{
    return pm_page_hashes_at(hashes, page) == pm_page_hashes_of(bytes, count);
}

pm_status pm_page_hashes_copy(pm_page_hashes *to, const pm_page_hashes *from)
{
    *to = *from;
    if (!from->size) return PM_OK;
    to->slots = malloc(from->size * sizeof *to->slots);
    if (!to->slots) return pm_fail(PM_NO_MEMORY, "no memory for a snapshot");
    memcpy(to->slots, from->slots, from->size * sizeof *to->slots);
    return PM_OK;
}

void pm_page_hashes_free(pm_page_hashes *hashes)
{
    free(hashes->slots);
    *hashes = (pm_page_hashes){0};
}
