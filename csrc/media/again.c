#define _GNU_SOURCE
#include "media/again.h"

#include <errno.h>
#include <pthread.h>
#include <stddef.h>

/* Signals of the thread's own faults are not blocked: a blocked one would end the process without a message from the
 * program's handler. */
static void block_signals(sigset_t *before)
{
    static const int own[] = {SIGBUS, SIGSEGV, SIGILL, SIGFPE};
    sigset_t all;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&all, own[i]);
    pthread_sigmask(SIG_BLOCK, &all, before);
}

bool pm_again_make(pm_again *again, bool failed)
{
    int error = errno;
    bool interrupted = failed && error == EINTR && again->interrupted < PM_AGAIN_MOST;
    if (interrupted && again->interrupted == 0) block_signals(&again->before);
    if (!interrupted && again->interrupted > 0) pthread_sigmask(SIG_SETMASK, &again->before, NULL);
    again->interrupted = interrupted ? again->interrupted + 1 : 0;
    errno = error;
    return interrupted;
}
