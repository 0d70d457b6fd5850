#define _GNU_SOURCE
#include "commit/readers.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* The bytes behind those of pmstore/_store/held.py, and before those of space/region_fork.c. */
#define WAITING_BYTE ((INT64_C(1) << 62) + (INT64_C(1) << 60) + 1)
#define BEGUN_BYTE (WAITING_BYTE + 1)
/* A request for a pause is on the byte of its millisecond, so that one of a reader that was stopped is soon old. So is
 * a pause: a fork of a process that was killed while it paused keeps that lock, as it has the mappings of the file. */
#define ASKING_BYTES (WAITING_BYTE + 15)
#define PAUSING_BYTES (ASKING_BYTES + (INT64_C(1) << 59))

#define MILLISECOND UINT64_C(1000000)
#define POLL_INTERVAL (10 * MILLISECOND)
#define PAUSE_MOST (2 * MILLISECOND)
#define IGNORED_FIRST (20 * MILLISECOND)
#define IGNORED_MOST (1000 * MILLISECOND)
enum { NAP = 100000 };
enum { ASKED_MOST = 5000, PAUSED_MOST = 3 }; /* milliseconds that a request, or the lock of a pause, counts */

static uint64_t now(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000 * MILLISECOND + (uint64_t)time.tv_nsec;
}

static bool is_locked(int fd, int64_t first, int64_t last)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = first, .l_len = last - first + 1};
    return !fcntl(fd, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK;
}

static void change_lock(int fd, short kind, int64_t byte)
{
    struct flock lock = {.l_type = kind, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    (void)fcntl(fd, F_OFD_SETLK, &lock);
}

static void set_lock(int fd, int64_t byte)
{
    change_lock(fd, F_RDLCK, byte);
}

static int64_t milliseconds(void)
{
    return (int64_t)(now(CLOCK_MONOTONIC) / MILLISECOND);
}

/* True if another open file has a lock on the byte of one of the last milliseconds. */
static bool is_locked_since(int fd, int64_t bytes, int64_t most)
{
    int64_t last = milliseconds();
    return is_locked(fd, bytes + (last < most ? 0 : last - most), bytes + last);
}

uint64_t pm_readers_time(void)
{
    return now(CLOCK_MONOTONIC);
}

void pm_readers_nap(void)
{
    const struct timespec nap = {.tv_nsec = NAP};
    nanosleep(&nap, NULL);
}

/* ---- the process that writes ---------------------------------------------------------------------------------- */

static bool is_asked(int fd)
{
    return is_locked_since(fd, ASKING_BYTES, ASKED_MOST);
}

/* Waits for readers that have asked for it. */
static void pause_for(pm_readers *readers, int fd)
{
    uint64_t begun = now(CLOCK_MONOTONIC);
    if (begun < readers->ignored_until) return;
    bool asked = true;
    int64_t pausing = PAUSING_BYTES + milliseconds();
    set_lock(fd, pausing);
    while (asked && now(CLOCK_MONOTONIC) - begun < PAUSE_MOST) {
        pm_readers_nap();
        asked = is_asked(fd);
    }
    change_lock(fd, F_UNLCK, pausing);
    if (!asked) {
        readers->ignored_for = 0;
        return;
    }
    readers->ignored_for = readers->ignored_for ? 2 * readers->ignored_for : IGNORED_FIRST;
    if (readers->ignored_for > IGNORED_MOST) readers->ignored_for = IGNORED_MOST;
    readers->ignored_until = now(CLOCK_MONOTONIC) + readers->ignored_for;
}

void pm_readers_poll(pm_store *store)
{
    pm_readers *readers = &store->readers;
    if (store->media.trace) return;
    /* The clock is asked last: a look of another thread meanwhile would be later than this time. */
    uint64_t polled = atomic_load(&readers->polled), time = now(CLOCK_MONOTONIC_COARSE);
    if (time - polled < POLL_INTERVAL) return;
    /* Of several threads, one looks. */
    if (!atomic_compare_exchange_strong(&readers->polled, &polled, time)) return;
    int fd = store->media.fd;
    atomic_store_explicit(&readers->waiting, is_locked(fd, WAITING_BYTE, WAITING_BYTE), memory_order_relaxed);
    if (is_asked(fd)) pause_for(readers, fd);
}

void pm_readers_begin(pm_store *store)
{
    if (!store->media.read_only) set_lock(store->media.fd, BEGUN_BYTE); /* no event: a recording is the same */
}

bool pm_readers_begun(int fd)
{
    return is_locked(fd, BEGUN_BYTE, BEGUN_BYTE);
}

void pm_readers_told(pm_store *store, uint64_t sequence)
{
    store->region.told = sequence;
    if (!atomic_load_explicit(&store->readers.waiting, memory_order_relaxed)) return;
    syscall(SYS_futex, store->media.view + PM_DURABLE_MARKER_PLACE, FUTEX_WAKE, INT_MAX);
}

/* ---- readers ---------------------------------------------------------------------------------------------------- */

int64_t pm_readers_ask(int fd)
{
    int64_t byte = ASKING_BYTES + milliseconds();
    set_lock(fd, byte);
    return byte;
}

void pm_readers_ask_no_more(int fd, int64_t byte)
{
    change_lock(fd, F_UNLCK, byte);
}

/* Waits until the process that writes pauses, or does not. False: it did not come to that. */
static bool await(int fd, bool pausing, uint64_t most)
{
    uint64_t begun = now(CLOCK_MONOTONIC);
    while (is_locked_since(fd, PAUSING_BYTES, PAUSED_MOST) != pausing) {
        if (now(CLOCK_MONOTONIC) - begun >= most) return false;
        pm_readers_nap();
    }
    return true;
}

bool pm_readers_ask_and_wait(int fd, int64_t *byte)
{
    /* Too little may be left of a pause that is on. If it was for this reader only, it ends now, because the reader has
     * ended its request; so the next one is not refused. */
    await(fd, false, PAUSE_MOST);
    *byte = pm_readers_ask(fd);
    return await(fd, true, POLL_INTERVAL + PAUSE_MOST);
}

uint8_t *pm_readers_map(int fd)
{
    uint8_t *page = mmap(NULL, PM_PAGE, PROT_READ, MAP_SHARED, fd, 0);
    return page == MAP_FAILED ? NULL : page + PM_DURABLE_MARKER_PLACE;
}

void pm_readers_unmap(uint8_t *marker)
{
    if (marker) munmap(marker - PM_DURABLE_MARKER_PLACE, PM_PAGE);
}

int pm_readers_wait(int fd, uint8_t *marker, uint32_t seen, uint64_t nanoseconds)
{
    const struct timespec time = {.tv_nsec = (long)nanoseconds};
    set_lock(fd, WAITING_BYTE);
    return syscall(SYS_futex, marker, FUTEX_WAIT, seen, &time) ? errno : 0;
}
