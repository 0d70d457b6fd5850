/* A part of faults.c: a clock that goes on only where the code sleeps whose requests for memory count. */
int fault_clock_ahead; /* seconds by which the monotonic clock is ahead, as behind a stop of the process */
long fault_clock;      /* nanoseconds; 0: the true one */
long fault_naps;       /* how often the code has slept */
long fault_waits;      /* how often it has waited for a commit */
int fault_wakes;       /* the next wait ends at once, as waits may; errno is that of another call */
long fault_woken;      /* how often it has woken those that wait for a commit */
unsigned fault_woken_at; /* the value that they wait for a change of */
void (*fault_looks)(void); /* called when the code looks at the coarse clock, once */
void (*fault_sleeps)(void); /* called whenever the code has slept */
void (*fault_asks)(void); /* called before the code asks who has a lock, once */

int clock_gettime(clockid_t clock, struct timespec *time)
{
    NEXT(clock_gettime);
    int result = next(clock, time);
    if (fault_clock && OF_THE_CODE) {
        *time = (struct timespec){fault_clock / 1000000000, fault_clock % 1000000000};
        void (*looks)(void) = clock == CLOCK_MONOTONIC_COARSE ? fault_looks : NULL;
        if (looks) fault_looks = NULL, looks();
    } else if (!result && clock == CLOCK_MONOTONIC) {
        time->tv_sec += fault_clock_ahead;
    }
    return result;
}

int nanosleep(const struct timespec *time, struct timespec *left)
{
    NEXT(nanosleep);
    if (!fault_clock || !OF_THE_CODE) return next(time, left);
    fault_naps++;
    fault_clock += time->tv_sec * 1000000000 + time->tv_nsec;
    if (fault_sleeps) fault_sleeps();
    return 0;
}

int fcntl(int fd, int command, ...)
{
    NEXT(fcntl);
    va_list rest;
    va_start(rest, command);
    long argument = va_arg(rest, long);
    va_end(rest);
    void (*asks)(void) = command == F_OFD_GETLK && OF_THE_CODE ? fault_asks : NULL;
    if (asks) fault_asks = NULL, asks();
    return next(fd, command, argument);
}

/* a: the arguments of futex, here and below. */
static void note_wake(const long *a)
{
    if (a[1] != FUTEX_WAKE) return;
    fault_woken++;
    fault_woken_at = *(unsigned *)a[0];
}

/* Nobody wakes it: the time passes. */
static long sleep_until_woken(long (*call)(long, ...), const long *a)
{
    struct timespec none = {0, 0}, asked = *(struct timespec *)a[3];
    fault_waits++;
    errno = EFAULT;
    if (fault_wakes) return fault_wakes = 0;
    long result = call(SYS_futex, a[0], a[1], a[2], &none, a[4], a[5]);
    if (result && errno == ETIMEDOUT) fault_clock += asked.tv_sec * 1000000000 + asked.tv_nsec;
    return result;
}
