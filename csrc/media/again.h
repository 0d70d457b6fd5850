/*
 * Calls that a signal interrupts (EINTR) are made again.
 *
 * A timer may interrupt every attempt. Before Linux 6.0, fallocate on tmpfs gave back what it had reserved, so it could
 * begin anew for ever. So from the second attempt on, the thread's signals are blocked; they are delivered when the
 * call has ended. A call that returns EINTR all the same (from a server behind FUSE) is made PM_AGAIN_MOST times. Then
 * EINTR is an error like others.
 *
 *     pm_again again = {0};
 *     do {
 *         result = fallocate(...);
 *     } while (pm_again_make(&again, result));
 *
 * This holds for a sync, too. A failed sync is final (D7), because the kernel reports a page that it could not write
 * once, and may drop the page. It reports that by another error, which it keeps for the descriptor until a sync has
 * returned it. EINTR says only that no sync has waited to the end. So the next attempt waits for the rest, and reports
 * what failed.
 */
#ifndef PM_AGAIN_H
#define PM_AGAIN_H

#include <signal.h>
#include <stdbool.h>

enum { PM_AGAIN_MOST = 100 };

typedef struct {
    unsigned interrupted;
    sigset_t before; /* the thread's signal mask, once it was interrupted */
} pm_again;

/* After each attempt: true if it must be made again. errno stays as the attempt left it. */
bool pm_again_make(pm_again *again, bool failed);

#endif
