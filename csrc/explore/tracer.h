/*
 * Stops a process tree at the system calls that change files, for the recorder of pmstore.testing.
 *
 * A seccomp filter picks the calls, in the kernel: every other call runs at full speed. Python decides what a call
 * means (pmstore/testing/_files/record.py); this unit knows no files.
 *
 * ptrace is used and not a preloaded library, because it sees programs that are linked statically, the C library's own
 * writes (stdio), Rust, Go and direct system calls, and it sees that a program starts threads or uses io_uring.
 *
 * All of it acts for the calling thread, and pm_tracer_next waits for any child: call it in a process of its own.
 */
#ifndef PMSTORE_TRACER_H
#define PMSTORE_TRACER_H

#include <stdint.h>

/* cffi: begin */
typedef enum {
    PM_TRACED_NOTHING = 0, /* only if not waited for */
    PM_TRACED_ENTER,       /* a thread is about to make the call `name`; it waits for pm_tracer_resume */
    PM_TRACED_LEAVE,       /* the call that pm_tracer_resume(pid, 1) let go on has returned; it waits again */
    PM_TRACED_EXIT,        /* a thread ended: `result` is its exit status, or minus the signal that killed it */
    PM_TRACED_FOREIGN,     /* a call of another architecture, such as that of a 32-bit program; it waits */
    PM_TRACED_INTERRUPTED, /* a signal came for the caller */
    PM_TRACED_NOBODY,      /* no child is left */
    PM_TRACED_FAILED       /* the kernel refused; `result` is the errno */
} pm_traced_kind;

typedef struct {
    int kind;
    int pid; /* of the thread */
    const char *name;
    int64_t result;
    uint64_t arguments[6];
} pm_traced;

/* In the child: stops it, once it is traced, at the calls of the table. Returns 0 or an errno. */
int pm_tracer_filter(void);

/* In the parent: waits until the child has stopped itself (SIGSTOP), and traces it and every process that it starts.
 * They die with the caller. Returns 0 or an errno; EPERM where tracing is not allowed, ECHILD if the child ended
 * instead. */
int pm_tracer_seize(int pid);

/* The next event; wait_for_it: also if none has come yet. The kinds that wait must be resumed. */
void pm_tracer_next(pm_traced *event, int wait_for_it);

/* Resumes a waiting thread; to_leave: until the call that it is about to make has returned. If the thread was killed
 * meanwhile, this does nothing: its exit comes as an event. */
void pm_tracer_resume(int pid, int to_leave);
/* cffi: end */

#endif
