#define _GNU_SOURCE
#include "media/direct_io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/descriptor.h"
#include "base/format.h"
#include "base/status.h"

void pm_direct_io_init(pm_dio *dio, int file, int synced)
{
    *dio = (pm_dio){.file = file, .fd = -1, .synced = synced};
}

bool pm_direct_io_open(pm_dio *dio)
{
    if (dio->fd >= 0 || dio->refused || dio->file < 0) return dio->fd >= 0;
    char name[32];
    snprintf(name, sizeof name, "/proc/self/fd/%d", dio->file);
    dio->fd = pm_descriptor_above_standard(open(name, O_RDWR | O_DIRECT | O_CLOEXEC));
    dio->refused = dio->fd < 0;
    return !dio->refused;
}

static bool takes(pm_dio *dio, const void *source, size_t length, uint64_t offset)
{
    if (!length || (offset | length | (uintptr_t)source) % PM_PAGE || dio->refused) return false;
    return dio->schedule || pm_direct_io_open(dio);
}

void pm_direct_io_close(pm_dio *dio)
{
    pm_direct_io_wait(dio);
    if (dio->context) syscall(SYS_io_destroy, dio->context);
    if (dio->fd >= 0) close(dio->fd);
    pm_direct_io_init(dio, -1, 0);
}

void pm_direct_io_forked(pm_dio *dio)
{
    if (dio->fd >= 0) close(dio->fd);
    pm_direct_io_init(dio, -1, 0);
}

ssize_t pm_direct_io_write(pm_dio *dio, const void *source, size_t length, uint64_t offset)
{
    if (dio->schedule || !takes(dio, source, length, offset)) {
        errno = EINVAL; /* opening it may have set another */
        return -1;
    }
    struct iovec part = {(void *)(uintptr_t)source, length};
    ssize_t done = pwritev2(dio->fd, &part, 1, (off_t)offset, dio->synced);
    if (done < 0 && errno == EINVAL) dio->refused = true;
    return done;
}

/* Gets a context, which begins writes and waits for them. A sandbox that forbids system calls may forbid either. */
static bool get_context(pm_dio *dio)
{
    struct timespec now = {0, 0};
    struct io_event none;
    if (syscall(SYS_io_setup, PM_DIO_MOST, &dio->context)) {
        dio->waits = true;
    } else if (syscall(SYS_io_getevents, dio->context, 0, 1, &none, &now)) {
        syscall(SYS_io_destroy, dio->context);
        dio->context = 0;
        dio->waits = true;
    }
    return !dio->waits;
}

bool pm_direct_io_begin(pm_dio *dio, const void *source, size_t length, uint64_t offset)
{
    if (!takes(dio, source, length, offset) || dio->waits || dio->begun == PM_DIO_MOST) return false;
    if (!dio->schedule && !dio->context && !get_context(dio)) return false;
    struct iocb *next = &dio->writes[dio->begun];
    dio->done[dio->begun] = false;
    *next = (struct iocb){.aio_lio_opcode = IOCB_CMD_PWRITE, .aio_fildes = (uint32_t)dio->fd,
                          .aio_buf = (uintptr_t)source, .aio_nbytes = length, .aio_offset = (int64_t)offset};
    if (!dio->schedule && syscall(SYS_io_submit, dio->context, 1, &next) != 1) {
        dio->waits = true;
        return false;
    }
    dio->begun++;
    return true;
}

static unsigned not_done(const pm_dio *dio)
{
    unsigned count = 0;
    for (unsigned i = 0; i < dio->begun; i++) count += !dio->done[i];
    return count;
}

int pm_direct_io_next(pm_dio *dio)
{
    unsigned count = not_done(dio);
    if (!count) return -1;
    unsigned number = (unsigned)pm_schedule_choose(dio->schedule, count), i = 0;
    while (dio->done[i] || number--) i++;
    return (int)i;
}

void pm_direct_io_done(pm_dio *dio, int number, int64_t result)
{
    dio->done[number] = true;
    dio->results[number] = result;
}

/* The program has forbidden itself to ask for results. Destroying the context waits until the disk fetches no bytes any
 * more. Whether the writes have succeeded is unknown, so they count as failed. */
static void give_up_context(pm_dio *dio)
{
    PM_CHECK(!syscall(SYS_io_destroy, dio->context));
    dio->context = 0;
    dio->waits = true;
    for (unsigned i = 0; i < dio->begun; i++)
        if (!dio->done[i]) pm_direct_io_done(dio, (int)i, -ECANCELED);
}

/* Waits until the kernel has done one write or several. */
static void wait_for_kernel(pm_dio *dio)
{
    struct io_event events[PM_DIO_MOST];
    long done = syscall(SYS_io_getevents, dio->context, 1, not_done(dio), events, NULL);
    if (done <= 0 && errno != EINTR) {
        give_up_context(dio);
        return;
    }
    for (long i = 0; i < done; i++) {
        const struct iocb *write = (const void *)(uintptr_t)events[i].obj;
        pm_direct_io_done(dio, (int)(write - dio->writes), events[i].res);
    }
}

unsigned pm_direct_io_wait(pm_dio *dio)
{
    while (not_done(dio) > 0) {
        if (dio->schedule) pm_schedule_go_on(dio->schedule);
        else wait_for_kernel(dio);
    }
    unsigned failed = 0;
    for (unsigned i = 0; i < dio->begun; i++) {
        if (dio->results[i] == -EINVAL) dio->refused = true;
        if (dio->results[i] != (int64_t)dio->writes[i].aio_nbytes) dio->writes[failed++] = dio->writes[i];
    }
    dio->begun = 0;
    return failed;
}
