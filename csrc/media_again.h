/*
 * Calls that a signal interrupts (EINTR) are made again.
 *
 * A timer may interrupt each attempt: fallocate on tmpfs gave back what it had reserved, before Linux 6.0, and so
 * began anew for ever if the timer was quicker. So from the second attempt on the thread's signals are blocked, and are
 * delivered when the call has ended. What says EINTR all the same (a server behind FUSE) is asked PM_AGAIN_MOST times;
 * then EINTR is an error like others.
 *
 *     pm_again again = {0};
 *     do {
 *         result = fallocate(...);
 *     } while (pm_make_again(&again, result));
 *
 * A sync, too. That a failed sync is final (D7) is because the kernel tells of a page that it could not write once, and
 * may drop it. It tells by another error, and keeps that for this descriptor until a sync has returned it; EINTR says
 * only that nobody waited to the end. So the next attempt waits for the rest, and hears of what failed meanwhile.
 */
#ifndef PM_MEDIA_AGAIN_H
#define PM_MEDIA_AGAIN_H

#include <signal.h>
#include <stdbool.h>

enum { PM_AGAIN_MOST = 100 };

typedef struct {
    unsigned interrupted;
    sigset_t before; /* the thread's, once it was interrupted */
} pm_again;

/* After each attempt: true if it is to be made again. errno stays as the attempt left it. */
bool pm_make_again(pm_again *again, bool failed);

#endif
