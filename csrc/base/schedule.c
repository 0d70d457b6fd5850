#include "base/schedule.h"

#include <sched.h>
#include <semaphore.h>
#include <stdlib.h>

struct pm_routine {
    pm_schedule *schedule;
    void *(*run)(void *);
    void *argument;
    sem_t go, back;     /* one of the two threads waits at each */
    const void *waits;  /* it waits for a wake of this place; NULL: it can run */
    uint64_t until;     /* or for this time; 0: for ever */
    bool ended;
    uint16_t number; /* the least that no other routine of the schedule has, from 1 on */
    pm_routine *next;
};

struct pm_schedule {
    pthread_mutex_t choosing;  /* held by the thread that runs something; no thread waits for it */
    pthread_mutex_t mutex; /* protects what follows, and what routines wait for; the innermost lock */
    uint64_t random, now;
    unsigned pace;
    pm_routine *routines;
    pm_scheduled_work *works;
};

static _Thread_local pm_routine *self;

pm_schedule *pm_schedule_new(uint64_t seed, unsigned pace)
{
    pm_schedule *schedule = calloc(1, sizeof *schedule);
    if (!schedule) return NULL;
    pthread_mutex_init(&schedule->choosing, NULL);
    pthread_mutex_init(&schedule->mutex, NULL);
    schedule->random = seed, schedule->pace = pace;
    schedule->now = 1;
    return schedule;
}

void pm_schedule_free(pm_schedule *schedule)
{
    free(schedule);
}

/* SplitMix64. */
uint64_t pm_schedule_choose(pm_schedule *schedule, uint64_t below)
{
    pthread_mutex_lock(&schedule->mutex);
    uint64_t z = schedule->random += UINT64_C(0x9e3779b97f4a7c15);
    pthread_mutex_unlock(&schedule->mutex);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (z ^ z >> 31) % below;
}

uint16_t pm_schedule_thread(void)
{
    return self ? self->number : 0;
}

uint64_t pm_schedule_now(const pm_schedule *schedule)
{
    return schedule->now;
}

/* ---- choosing what runs next ------------------------------------------------------------------------------------- */

static bool can_go_on(const pm_routine *routine)
{
    return !routine->ended && (!routine->waits || routine->until);
}

static pm_routine *choose_routine(pm_schedule *schedule)
{
    uint64_t count = 0;
    pthread_mutex_lock(&schedule->mutex);
    for (pm_routine *each = schedule->routines; each; each = each->next) count += can_go_on(each);
    pthread_mutex_unlock(&schedule->mutex);
    if (!count) return NULL;
    uint64_t number = pm_schedule_choose(schedule, count);
    pthread_mutex_lock(&schedule->mutex);
    pm_routine *chosen = schedule->routines;
    while (chosen && (!can_go_on(chosen) || number--)) chosen = chosen->next;
    pthread_mutex_unlock(&schedule->mutex);
    return chosen;
}

static void let_go_on(pm_routine *routine)
{
    sem_post(&routine->go);
    while (sem_wait(&routine->back)) continue; /* a signal */
}

static bool do_some_work(pm_schedule *schedule)
{
    for (pm_scheduled_work *each = schedule->works; each; each = each->next)
        if (each->do_one(each->argument)) return true;
    return false;
}

static bool let_something_go_on(pm_schedule *schedule)
{
    pm_routine *routine = choose_routine(schedule);
    bool work_first = !routine || pm_schedule_choose(schedule, 2);
    if (work_first && do_some_work(schedule)) return true;
    if (!routine) return false;
    let_go_on(routine);
    return true;
}

static void yield(void);

void pm_schedule_point(pm_schedule *schedule)
{
    if (!schedule) return;
    if (self) {
        yield();
        return;
    }
    /* Another thread of the program runs something; or this thread does, and this point is inside of it. */
    if (pthread_mutex_trylock(&schedule->choosing)) return;
    while (schedule->pace && pm_schedule_choose(schedule, 256) < schedule->pace && let_something_go_on(schedule))
        continue;
    pthread_mutex_unlock(&schedule->choosing);
}

void pm_schedule_go_on(pm_schedule *schedule)
{
    if (self) {
        yield();
        return;
    }
    bool something = !pthread_mutex_trylock(&schedule->choosing);
    if (something) {
        something = let_something_go_on(schedule);
        pthread_mutex_unlock(&schedule->choosing);
    }
    if (!something) sched_yield(); /* the caller waits for another thread of the program */
}

void pm_schedule_add(pm_schedule *schedule, pm_scheduled_work *work)
{
    work->next = schedule->works;
    schedule->works = work;
}

void pm_schedule_remove(pm_schedule *schedule, pm_scheduled_work *work)
{
    pm_scheduled_work **at = &schedule->works;
    while (*at && *at != work) at = &(*at)->next;
    if (*at) *at = work->next;
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

static bool has_number(const pm_schedule *schedule, uint16_t number)
{
    const pm_routine *each = schedule->routines;
    while (each && each->number != number) each = each->next;
    return each;
}

pm_routine *pm_schedule_routine_new(pm_schedule *schedule, void *(*run)(void *), void *argument)
{
    pm_routine *routine = calloc(1, sizeof *routine);
    if (!routine) return NULL;
    routine->schedule = schedule, routine->run = run, routine->argument = argument;
    sem_init(&routine->go, 0, 0);
    sem_init(&routine->back, 0, 0);
    pthread_mutex_lock(&schedule->mutex);
    for (routine->number = 1; has_number(schedule, routine->number);) routine->number++;
    routine->next = schedule->routines;
    schedule->routines = routine;
    pthread_mutex_unlock(&schedule->mutex);
    return routine;
}

void pm_schedule_routine_free(pm_routine *routine)
{
    pm_schedule *schedule = routine->schedule;
    pthread_mutex_lock(&schedule->mutex);
    pm_routine **at = &schedule->routines;
    while (*at != routine) at = &(*at)->next;
    *at = routine->next;
    pthread_mutex_unlock(&schedule->mutex);
    sem_destroy(&routine->go);
    sem_destroy(&routine->back);
    free(routine);
}

static void wait_to_go_on(pm_routine *routine)
{
    while (sem_wait(&routine->go)) continue;
}

void *pm_schedule_routine_run(void *argument)
{
    self = argument;
    wait_to_go_on(self);
    self->run(self->argument);
    self->ended = true;
    sem_post(&self->back);
    return NULL;
}

bool pm_schedule_routine_ended(const pm_routine *routine)
{
    return routine->ended;
}

static void yield(void)
{
    sem_post(&self->back);
    wait_to_go_on(self);
}

void pm_schedule_lock(pm_schedule *schedule, pthread_mutex_t *mutex)
{
    while (pthread_mutex_trylock(mutex)) {
        if (self) yield();
        else pm_schedule_go_on(schedule);
    }
}

void pm_schedule_unlock(pthread_mutex_t *mutex)
{
    pthread_mutex_unlock(mutex);
    if (self) yield();
}

static void wait_in_routine(pm_schedule *schedule, const void *place, pthread_mutex_t *mutex, uint64_t until)
{
    pthread_mutex_lock(&schedule->mutex);
    self->waits = place, self->until = until;
    pthread_mutex_unlock(&schedule->mutex);
    pthread_mutex_unlock(mutex);
    yield();
    /* This thread was woken, or its time has come. */
    pthread_mutex_lock(&schedule->mutex);
    if (self->waits && until > schedule->now) schedule->now = until;
    self->waits = NULL;
    pthread_mutex_unlock(&schedule->mutex);
    pm_schedule_lock(schedule, mutex);
}

void pm_schedule_wait(pm_schedule *schedule, const void *place, pthread_mutex_t *mutex, uint64_t until)
{
    if (self) {
        wait_in_routine(schedule, place, mutex, until);
        return;
    }
    pthread_mutex_unlock(mutex);
    pm_schedule_go_on(schedule);
    pm_schedule_lock(schedule, mutex);
}

void pm_schedule_wake(pm_schedule *schedule, const void *place)
{
    pthread_mutex_lock(&schedule->mutex);
    for (pm_routine *each = schedule->routines; each; each = each->next)
        if (each->waits == place) each->waits = NULL;
    pthread_mutex_unlock(&schedule->mutex);
}
