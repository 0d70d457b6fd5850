/*
 * csrc/reader/parts.c, whose second thread is a coroutine: a seed decides which of the two goes on after each call of
 * the work that succeeds, which calls fail, and what the system refuses. Run by tests/core/test_parts.py.
 *
 *   parts FROM TO    the seeds. Prints by how many of them both threads worked, the second one was late, and the first
 *                    one waited. Exits with 1 after the first seed that breaks a rule
 *   parts PAGES      prints how many of them each call of take() gives
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

static void *allocate(size_t size);
static void release(void *memory);
#define malloc allocate
#define free release
#include "reader/parts.c"
#undef malloc
#undef free

enum { PAGES_MOST = 6000, CALLS_MOST = 1000, STACK = 256 << 10, FAILED = 1000, FREED = 0x5A };

typedef struct {
    unsigned thread;
    uint64_t first, end;
    bool failed;
} call;

/* What the seed decides. */
static unsigned long seed;
static uint64_t state;
static unsigned turns, failures[2]; /* in 16ths: how often the turn changes, and how often a thread's work fails */
static bool followed, one_processor, no_memory, no_thread;

/* What happens. */
static call calls[CALLS_MOST];
static unsigned count, allocations, waits;
static unsigned char *released;
static bool started, returned, began, ended, waiting, locked, has_condition;
static void *argument_of_work;

static unsigned long both, late, waited; /* seeds by which both threads worked, and so on */

static ucontext_t contexts[2];
static unsigned running;
static char stack[STACK];
static void *(*second_run)(void *);
static void *second_argument;

static void must(bool holds, const char *rule)
{
    if (holds) return;
    printf("seed %lu: %s\n", seed, rule);
    for (unsigned i = 0; i < count; i++)
        printf("  thread %u: [%llu, %llu)%s\n", calls[i].thread, (unsigned long long)calls[i].first,
               (unsigned long long)calls[i].end, calls[i].failed ? " failed" : "");
    exit(1);
}

static uint64_t draw(uint64_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

static const call *first_failure(unsigned thread)
{
    for (unsigned i = 0; i < count; i++)
        if (calls[i].thread == thread && calls[i].failed) return &calls[i];
    return NULL;
}

/* ---- what parts.c uses ------------------------------------------------------------------------------------------- */

static void *allocate(size_t size)
{
    if (no_memory) return NULL;
    allocations++;
    void *memory = malloc(size);
    return memory ? memset(memory, 0xA5, size) : NULL;
}

static void release(void *memory)
{
    must(allocations > 0 && !released, "memory is freed twice");
    allocations--;
    released = memset(memory, FREED, sizeof(parts)); /* until the call is checked, to see writes to it */
}

static void free_released(void)
{
    for (size_t i = 0; released && i < sizeof(parts); i++)
        must(released[i] == FREED, "memory is used after it is freed");
    free(released);
    released = NULL;
}

static void go_on_with(unsigned thread)
{
    unsigned before = running;
    running = thread;
    swapcontext(&contexts[before], &contexts[thread]);
}

static void run_second(void)
{
    began = true;
    second_run(second_argument);
    ended = true;
    const parts *p = second_argument;
    must(released || p->next >= p->end || first_failure(1), "the second thread ends before all pages are taken");
    go_on_with(0);
}

static void next_turn(void)
{
    if (started && !ended && draw(16) < turns) go_on_with(1 - running);
}

bool pm_thread_start_alone(void *(*run)(void *), void *argument)
{
    if (no_thread) return false;
    started = true;
    second_run = run, second_argument = argument;
    getcontext(&contexts[1]);
    contexts[1].uc_stack.ss_sp = stack, contexts[1].uc_stack.ss_size = STACK;
    makecontext(&contexts[1], run_second, 0);
    next_turn();
    return true;
}

void pm_thread_wait(pm_condition *condition, pm_mutex *mutex)
{
    (void)condition;
    must(running == 0 && !ended && !waiting && has_condition, "a wait for nothing");
    waits++;
    waiting = true;
    pm_thread_unlock(mutex);
    go_on_with(1); /* which may come back before its end: a wait may return without a reason */
    must(!ended || !waiting, "the first thread is not woken");
    waiting = false;
    pm_thread_lock(mutex);
}

void pm_thread_wake(pm_condition *condition, pm_mutex *mutex)
{
    (void)condition, (void)mutex;
    must(running == 1 && locked && has_condition, "a wake without the mutex");
    waiting = false;
}

/* With a schedule, the two functions below lock and unlock. */
void pm_thread_mutex_init(pm_mutex *mutex, pm_schedule *schedule)
{
    must(!schedule, "there is a schedule");
    mutex->schedule = (pm_schedule *)&locked;
}

void pm_schedule_lock(pm_schedule *schedule, pthread_mutex_t *mutex)
{
    (void)schedule, (void)mutex;
    must(!locked, "the mutex is locked twice");
    locked = true;
}

void pm_schedule_unlock(pthread_mutex_t *mutex)
{
    (void)mutex;
    must(locked, "the mutex is not locked");
    locked = false;
}

void pm_thread_condition_init(pm_condition *condition)
{
    (void)condition;
    has_condition = true;
}
bool pm_source_is_followed(void) { return followed; }
bool pm_thread_one_processor(void) { return one_processor; }

static pm_status work(void *argument, unsigned thread, uint64_t first, uint64_t end)
{
    must(!returned, "work after the call has returned");
    must(!locked, "work with the mutex");
    must(argument == argument_of_work && thread == running, "work with another argument or thread");
    must(count < CALLS_MOST, "too many calls");
    bool failed = draw(16) < failures[thread];
    calls[count++] = (call){thread, first, end, failed};
    if (failed) return (pm_status)(FAILED + first);
    next_turn();
    return PM_OK;
}

/* ---- the rules --------------------------------------------------------------------------------------------------- */

static void check(uint64_t first, uint64_t end, pm_status status)
{
    static unsigned char done[PAGES_MOST];
    const call *of_first = first_failure(0), *of_second = first_failure(1), *last = NULL;
    memset(done, 0, sizeof done);
    for (unsigned i = 0; i < count; i++) {
        const call *c = &calls[i];
        must(c->first >= first && c->first < c->end && c->end <= end, "pages that nobody asked for");
        must(c->end - c->first <= PM_PARTS_PAGES, "too many pages at once");
        for (uint64_t page = c->first; page < c->end && !c->failed; page++) must(!done[page]++, "a page is done twice");
        must(c->thread != 0 || !of_first || c <= of_first, "the first thread goes on after its failure");
        if (c->thread == 0) continue;
        must(!of_second || c <= of_second, "the second thread goes on after its failure");
        if (of_first && c > of_first) must(last && c->first == last->end, "pages are taken after a failure");
        last = c;
    }
    must(status == (of_first ? (pm_status)(FAILED + of_first->first) : PM_OK), "the wrong status");
    for (uint64_t page = first; page < end && status == PM_OK; page++) must(done[page], "a page is not done");
}

static void call_with(void)
{
    static const uint64_t counts[] = {0, 1, 64, 65, SHARED_FROM - 1, SHARED_FROM, SHARED_FROM + 1, 4096};
    state = seed, count = allocations = waits = 0;
    started = returned = began = ended = waiting = locked = has_condition = false;
    uint64_t first = draw(300), which = draw(16);
    uint64_t end = first + (which < 8 ? counts[which] : draw(5000));
    followed = !draw(12), one_processor = !draw(12), no_memory = !draw(12), no_thread = !draw(12);
    turns = (unsigned)draw(17);
    for (unsigned thread = 0; thread < 2; thread++) failures[thread] = draw(2) ? 0 : (unsigned)draw(4);
    argument_of_work = &calls[draw(CALLS_MOST)];

    pm_status status = pm_parts_do(first, end, work, argument_of_work);
    returned = true;
    bool alone = end - first < SHARED_FROM || followed || one_processor;
    must(started == !(alone || no_memory || no_thread), "a second thread without need, or none");
    must(!began || ended, "the call returns before the second thread has ended");
    check(first, end, status);
    unsigned worked = 0;
    for (unsigned i = 0; i < count; i++) worked |= 1u << calls[i].thread;
    both += worked == 3, late += started && !began, waited += waits > 0;
    if (started && !began) {
        must(allocations == 1, "memory of a late thread is freed");
        go_on_with(1);
    }
    must(started == ended && !locked && !allocations, "memory or the mutex is kept");
    free_released();
}

int main(int argc, char **argv)
{
    if (argc == 2) {
        parts p = {.end = strtoull(argv[1], NULL, 0)};
        for (uint64_t first = 0, end = 0, at = 0; take(&p, &first, &end); at = end) {
            must(first == at && p.next == end, "the pages taken don't follow each other");
            printf("%llu\n", (unsigned long long)(end - first));
        }
        return 0;
    }
    for (seed = strtoul(argv[1], NULL, 0); seed < strtoul(argv[2], NULL, 0); seed++) call_with();
    printf("%lu %lu %lu\n", both, late, waited);
    return 0;
}
