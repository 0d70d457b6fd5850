/*
 * main() where there is no libFuzzer: the same mutations without guidance by coverage. Understands the few of its
 * options that run.py uses: -runs=, -seed=, -artifact_prefix=, and names of inputs to replay.
 */
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

#include "fuzz.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed);
size_t LLVMFuzzerCustomCrossOver(const uint8_t *a, size_t a_size, const uint8_t *b, size_t b_size, uint8_t *out,
                                 size_t room, unsigned seed);
int __lsan_do_recoverable_leak_check(void);

/* HANG_SECONDS of processor time: a machine may be busy. An execution that sleeps is stopped after IDLE_SECONDS. */
enum { KEPT = 256, HANG_SECONDS = 25, IDLE_SECONDS = 600, LEAKS_EVERY = 1000 };

typedef struct {
    uint8_t data[FUZZ_MOST];
    size_t size;
} input;

static input kept[KEPT], current;
static uint64_t random_state;
static const char *prefix = "./";

/* Called when the process is about to die. */
static void save_current(void)
{
    static bool saved;
    char name[1024];
    if (saved) return;
    saved = true;
    snprintf(name, sizeof name, "%scrash-%016llx", prefix,
             (unsigned long long)pm_hash64(current.data, current.size, 0));
    FILE *file = fopen(name, "wb");
    if (!file) return;
    fwrite(current.data, 1, current.size, file);
    fclose(file);
    fprintf(stderr, "Test unit written to %s\n", name);
}

static void on_signal(int number)
{
    if (number == SIGALRM || number == SIGPROF) fputs("fuzz: an execution does not end\n", stderr);
    save_current();
    signal(number, SIG_DFL);
    signal(SIGABRT, SIG_DFL);
    abort();
}

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room)
{
    (void)room;
    uint64_t r = fuzz_random(&random_state);
    if (size) data[r % size] ^= (uint8_t)(1 << (r >> 32) % 8);
    return size;
}

static void run_current(void)
{
    setitimer(ITIMER_PROF, &(struct itimerval){.it_value.tv_sec = HANG_SECONDS}, NULL);
    alarm(IDLE_SECONDS);
    LLVMFuzzerTestOneInput(current.data, current.size);
    alarm(0);
    setitimer(ITIMER_PROF, &(struct itimerval){0}, NULL);
}

static bool replay(const char *name)
{
    FILE *file = fopen(name, "rb");
    if (!file) {
        fprintf(stderr, "fuzz: cannot open %s\n", name);
        return false;
    }
    current.size = fread(current.data, 1, sizeof current.data, file);
    fclose(file);
    run_current();
    fprintf(stderr, "Executed %s\n", name);
    return true;
}

static void next_input(void)
{
    uint64_t r = fuzz_random(&random_state);
    current = kept[r % KEPT];
    if (r >> 8 & 15) {
        current.size = LLVMFuzzerCustomMutator(current.data, current.size, sizeof current.data, (unsigned)(r >> 16));
    } else {
        const input *other = &kept[(r >> 48) % KEPT], one = current;
        current.size = LLVMFuzzerCustomCrossOver(one.data, one.size, other->data, other->size, current.data,
                                                 sizeof current.data, (unsigned)(r >> 16));
    }
    /* Long inputs are damaged beyond use: most begin anew. */
    if (current.size > 300 && r >> 12 & 3) current.size = sizeof(fuzz_head);
    kept[(r >> 40) % KEPT] = current;
}

int main(int argc, char **argv)
{
    unsigned long long runs = 1000, seed = 1, files = 0;
    LLVMFuzzerInitialize(&argc, &argv);
    __sanitizer_set_death_callback(save_current);
    signal(SIGABRT, on_signal);
    signal(SIGALRM, on_signal);
    signal(SIGPROF, on_signal);
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "-runs=", 6)) runs = strtoull(argv[i] + 6, NULL, 10);
        else if (!strncmp(argv[i], "-seed=", 6)) seed = strtoull(argv[i] + 6, NULL, 10);
        else if (!strncmp(argv[i], "-artifact_prefix=", 17)) prefix = argv[i] + 17;
        else if (argv[i][0] != '-' && ++files && !replay(argv[i])) return 2;
    }
    if (files) return 0;
    random_state = seed;
    for (size_t i = 0; i < KEPT; i++) {
        kept[i].data[0] = (uint8_t)(i / fuzz_base_count), kept[i].data[1] = (uint8_t)i;
        kept[i].size = sizeof(fuzz_head);
    }
    for (unsigned long long i = 1; i <= runs; i++) {
        next_input();
        run_current();
        if (i % 5000 == 0 || i == runs) fprintf(stderr, "#%llu\n", i);
        if ((i % LEAKS_EVERY == 0 || i == runs) && __lsan_do_recoverable_leak_check()) {
            save_current();
            return 1;
        }
    }
    fprintf(stderr, "Done %llu runs\n", runs);
    return 0;
}
