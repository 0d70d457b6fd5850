#include "explore/tracer.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/ptrace.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__x86_64__)
#define OWN_ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define OWN_ARCHITECTURE AUDIT_ARCH_AARCH64
#endif

/* The third argument of a filter's answer tells the two kinds of stop apart. */
enum { STOP_CALL = 0, STOP_FOREIGN = 1 };

/* Bits of one argument without which a call can't change a file: it is let through at once. The values are the
 * kernel's. */
enum {
    /* O_WRONLY, O_RDWR, O_CREAT, O_TRUNC; O_TMPFILE needs one of the first two */
    OPEN_CHANGES = 0x1 | 0x2 | 0x40 | 0x200,
    MAP_CHANGES = 0x1                        /* MAP_SHARED, also in MAP_SHARED_VALIDATE */
};

struct call {
    long number;
    const char *name;
    int argument; /* -1, or the argument whose `bits` decide */
    unsigned bits;
};

#define CALL(name) {SYS_##name, #name, -1, 0}

/* aarch64 lacks the calls that take no directory. */
static const struct call CALLS[] = {
#ifdef SYS_open
    {SYS_open, "open", 1, OPEN_CHANGES},
    CALL(creat),
    CALL(rename),
    CALL(link),
    CALL(symlink),
    CALL(unlink),
    CALL(rmdir),
    CALL(mkdir),
    CALL(dup2),
#endif
#ifdef SYS_renameat
    CALL(renameat),
#endif
    {SYS_openat, "openat", 2, OPEN_CHANGES},
#ifdef SYS_openat2
    CALL(openat2),
#endif
    {SYS_mmap, "mmap", 3, MAP_CHANGES},
    CALL(renameat2),
    CALL(linkat),
    CALL(symlinkat),
    CALL(unlinkat),
    CALL(mkdirat),
    CALL(close),
    CALL(dup3),
    CALL(exit_group),
#ifdef SYS_close_range
    CALL(close_range),
#endif
    CALL(write),
    CALL(pwrite64),
    CALL(writev),
    CALL(pwritev),
    CALL(pwritev2),
    CALL(truncate),
    CALL(ftruncate),
    CALL(fallocate),
    CALL(copy_file_range),
    CALL(sendfile),
    CALL(splice),
    CALL(fsync),
    CALL(fdatasync),
    CALL(sync_file_range),
    CALL(sync),
    CALL(syncfs),
    CALL(msync),
#ifdef SYS_io_uring_setup
    CALL(io_uring_setup),
#endif
};

enum { CALL_COUNT = sizeof CALLS / sizeof *CALLS };

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned)offsetof(struct seccomp_data, field))
#define ANSWER(value) BPF_STMT(BPF_RET | BPF_K, (value))

int pm_tracer_filter(void)
{
#ifndef OWN_ARCHITECTURE
    return ENOSYS;
#else
    struct sock_filter code[7 + CALL_COUNT * 5];
    unsigned short n = 0;
    code[n++] = (struct sock_filter)LOAD(arch);
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, OWN_ARCHITECTURE, 1, 0);
    code[n++] = (struct sock_filter)ANSWER(SECCOMP_RET_TRACE | STOP_FOREIGN);
    code[n++] = (struct sock_filter)LOAD(nr);
    for (size_t i = 0; i < CALL_COUNT; i++) {
        const struct call *call = &CALLS[i];
        if (call->argument < 0) {
            code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call->number, 0, 1);
        } else {
            code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call->number, 0, 4);
            /* The low half of the argument; both architectures are little-endian. */
            code[n++] = (struct sock_filter)LOAD(args[call->argument]);
            code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, call->bits, 1, 0);
            code[n++] = (struct sock_filter)ANSWER(SECCOMP_RET_ALLOW);
        }
        code[n++] = (struct sock_filter)ANSWER(SECCOMP_RET_TRACE | STOP_CALL);
    }
    /* Linux's older asynchronous I/O can't be seen, so the kernel pretends to have none. Programs that use it know such
     * kernels, and have another way. */
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)SYS_io_setup, 0, 1);
    code[n++] = (struct sock_filter)ANSWER(SECCOMP_RET_ERRNO | ENOSYS);
    code[n++] = (struct sock_filter)ANSWER(SECCOMP_RET_ALLOW);
    struct sock_fprog program = {n, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) != 0)
        return errno;
    return 0;
#endif
}

/* Makes the system call directly: the C libraries' headers for it conflict with the kernel's, and some lack newer
 * requests. */
static long request(long what, pid_t pid, long address, void *data)
{
    return syscall(SYS_ptrace, what, (long)pid, address, data);
}

int pm_tracer_seize(int pid)
{
    int status;
    pid_t got;
    do
        got = waitpid(pid, &status, WUNTRACED | __WALL);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return errno;
    if (!WIFSTOPPED(status))
        return ECHILD;
    long options = PTRACE_O_TRACESECCOMP | PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_TRACECLONE |
                   PTRACE_O_TRACEEXEC | PTRACE_O_EXITKILL | PTRACE_O_TRACESYSGOOD;
    if (request(PTRACE_SEIZE, pid, 0, (void *)options) != 0)
        return errno;
    return kill(pid, SIGCONT) == 0 ? 0 : errno;
}

static const char *name_of(uint64_t number)
{
    for (size_t i = 0; i < CALL_COUNT; i++)
        if ((uint64_t)CALLS[i].number == number)
            return CALLS[i].name;
    return "?";
}

/* Resumes after a stop that concerns only the kernel and this file. */
static void go_on(pid_t pid, long how, long signal_number)
{
    request(how, pid, 0, (void *)signal_number);
}

/* ESRCH: the thread has been killed meanwhile, which is an event of its own. EIO: a kernel before 5.3. */
static int refused(pm_traced *event)
{
    if (errno == ESRCH)
        return 0;
    event->kind = PM_TRACED_FAILED;
    event->result = errno;
    return 1;
}

/* True if the stop is an event for the caller. */
static int describe_stop(pid_t pid, int status, pm_traced *event)
{
    int happening = status >> 16, signal_number = WSTOPSIG(status);
    struct ptrace_syscall_info info;
    memset(&info, 0, sizeof info);
    if (happening == PTRACE_EVENT_SECCOMP) {
        if (request(PTRACE_GET_SYSCALL_INFO, pid, sizeof info, &info) <= 0)
            return refused(event);
        event->kind = info.seccomp.ret_data == STOP_FOREIGN ? PM_TRACED_FOREIGN : PM_TRACED_ENTER;
        event->name = name_of(info.seccomp.nr);
        memcpy(event->arguments, info.seccomp.args, sizeof event->arguments);
        return 1;
    }
    if (signal_number == (SIGTRAP | 0x80)) {
        if (request(PTRACE_GET_SYSCALL_INFO, pid, sizeof info, &info) <= 0)
            return refused(event);
        if (info.op != PTRACE_SYSCALL_INFO_EXIT) {
            go_on(pid, PTRACE_SYSCALL, 0);
            return 0;
        }
        event->kind = PM_TRACED_LEAVE;
        event->result = info.exit.rval;
        return 1;
    }
    if (happening == PTRACE_EVENT_STOP) {
        int stops = signal_number == SIGSTOP || signal_number == SIGTSTP || signal_number == SIGTTIN
                    || signal_number == SIGTTOU;
        go_on(pid, stops ? PTRACE_LISTEN : PTRACE_CONT, 0);
    } else {
        go_on(pid, PTRACE_CONT, happening ? 0 : signal_number);
    }
    return 0;
}

void pm_tracer_next(pm_traced *event, int wait_for_it)
{
    memset(event, 0, sizeof *event);
    event->name = "";
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, __WALL | (wait_for_it ? 0 : WNOHANG));
        event->pid = pid;
        if (pid == 0)
            return;
        if (pid < 0) {
            event->result = errno;
            event->kind = errno == ECHILD  ? PM_TRACED_NOBODY
                          : errno == EINTR ? PM_TRACED_INTERRUPTED
                                           : PM_TRACED_FAILED;
            return;
        }
        if (WIFEXITED(status) || WIFSIGNALED(status)) {
            event->kind = PM_TRACED_EXIT;
            event->result = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
            return;
        }
        if (WIFSTOPPED(status) && describe_stop(pid, status, event))
            return;
    }
}

void pm_tracer_resume(int pid, int to_leave)
{
    go_on(pid, to_leave ? PTRACE_SYSCALL : PTRACE_CONT, 0);
}
