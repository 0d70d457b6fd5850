#define _GNU_SOURCE
#include "explore/sandbox.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/format.h"
#include "base/status.h"
#include "media/trace.h"

pm_status pm_sandbox_init(pm_sandbox *sandbox, uint64_t capacity, pm_media_kind media)
{
    *sandbox = (pm_sandbox){.fd = -1, .media = media, .capacity = capacity + PM_PAGE};
    if (!(sandbox->trace = pm_trace_new(0))) return pm_fail(PM_NO_MEMORY, "no memory for a trace");
    sandbox->fd = memfd_create("crash image", MFD_CLOEXEC);
    if (sandbox->fd < 0) return pm_fail_errno("cannot make a file in memory");
    void *image = mmap(NULL, sandbox->capacity, PROT_READ | PROT_WRITE, MAP_SHARED, sandbox->fd, 0);
    if (image == MAP_FAILED) return pm_fail_errno("cannot map a crash image");
    sandbox->image = image;
    pm_trace_lend_view(sandbox->trace, image, sandbox->capacity);
    return PM_OK;
}

void pm_sandbox_free(pm_sandbox *sandbox)
{
    if (sandbox->image) munmap(sandbox->image, sandbox->capacity);
    /* a zeroed struct is a valid sandbox too, and 0 is a descriptor */
    if (sandbox->trace && sandbox->fd >= 0) close(sandbox->fd);
    pm_trace_free(sandbox->trace);
    *sandbox = (pm_sandbox){.fd = -1};
}

pm_status pm_sandbox_fit(pm_sandbox *sandbox, uint64_t size, const uint8_t *source)
{
    if (size == sandbox->size) return PM_OK;
    if (size > sandbox->capacity || ftruncate(sandbox->fd, (off_t)size))
        return pm_fail_errno("cannot set the size of a crash image");
    if (size > sandbox->size) memcpy(sandbox->image + sandbox->size, source + sandbox->size, size - sandbox->size);
    sandbox->size = size;
    return PM_OK;
}

void pm_sandbox_restore(pm_sandbox *sandbox, uint64_t size, const uint8_t *source)
{
    const pm_event *events = pm_trace_events(sandbox->trace);
    bool grown = false;
    for (size_t i = 0; i < pm_trace_count(sandbox->trace); i++) {
        uint64_t offset = events[i].offset, end = offset + events[i].length;
        if (events[i].kind == PM_EVENT_GROW) grown = true;
        if (!events[i].has_data || offset >= size) continue;
        memcpy(sandbox->image + offset, source + offset, (end < size ? end : size) - offset);
    }
    if (grown) PM_CHECK(!ftruncate(sandbox->fd, (off_t)sandbox->size));
    pm_trace_clear(sandbox->trace);
}
