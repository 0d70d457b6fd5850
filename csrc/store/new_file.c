/* New files: an empty store, and the name of a file. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "space/catalog.h"
#include "log/log.h"

enum { FIRST_REGION = 256 << 10, FIRST_LOG = 256 << 10, FIRST_LOG_MEMORY = 512 << 10 };

pm_status pm_format(int fd, pm_media_kind kind, pm_trace *trace)
{
    pm_media media;
    pm_status status = pm_media_open(&media, fd, kind, false, trace);
    if (status == PM_OK) pm_media_begin_new(&media);
    uint64_t log_size = media.byte_addressable ? FIRST_LOG_MEMORY : FIRST_LOG;
    uint8_t *image = NULL;
    pm_header header;
    if (status == PM_OK && media.size) status = pm_fail(PM_INVALID, "a new store needs an empty file");
    if (status == PM_OK) status = media.operations->grow(&media, PM_REGION_START + FIRST_REGION + log_size);
    if (status == PM_OK && !(image = calloc(PM_HEAP_FIRST_PAGES, PM_PAGE)))
        status = pm_fail(PM_NO_MEMORY, "no memory to make a store");
    /* Blocks are written once here, so that a record later changes nothing but their bytes. */
    if (status == PM_OK) status = pm_media_write_zeros(&media, PM_REGION_START, media.size);
    if (status == PM_OK) {
        header.store_id = pm_log_new_id(&media);
        pm_heap_format(image, header.store_id);
        pm_catalog_format(image, (PM_HEAP_FIRST_PAGES - 1) * PM_PAGE, header.store_id);
        status = pm_media_write(&media, PM_REGION_START, image, PM_HEAP_FIRST_PAGES * PM_PAGE, PM_WRITE_STREAM);
    }
    /* durable: an empty region and log → then: the header that refers to them. */
    if (status == PM_OK) status = media.operations->fence(&media);
    if (status == PM_OK) status = pm_log_format(&media, FIRST_REGION, log_size, header.store_id, pm_heap_digest(image));
    free(image);
    media.fd = -1; /* it is the caller's */
    pm_media_close(&media);
    return status;
}

uint32_t pm_file_system_type(const char *path)
{
    struct statfs fs;
    return statfs(path, &fs) ? 0 : (uint32_t)fs.f_type;
}

int pm_rename_file(const char *from, const char *to)
{
    return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) ? errno : 0;
}
