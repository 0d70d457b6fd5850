/*
 * csrc/base/helper.c, whose thread takes turns with the program's as a seed decides. Run by
 * tests/core/test_parallel_compare.py.
 *
 *   helper SEEDS     prints how often the helper took one of the three works of each. Exits with 1 after the first
 *                    seed that breaks a rule
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/helper.h"

static unsigned begun, ended;

static void work(void *schedule)
{
    begun++;
    for (int i = 0; i < 3; i++) pm_schedule_point(schedule);
    ended++;
}

static void must(bool holds, unsigned seed, const char *rule)
{
    if (holds) return;
    printf("seed %u: %s\n", seed, rule);
    exit(1);
}

int main(int count, char **arguments)
{
    if (count != 2) return 2;
    unsigned taken = 0, seeds = (unsigned)atoi(arguments[1]);
    for (unsigned seed = 1; seed <= seeds; seed++) {
        pm_schedule *schedule = pm_schedule_new(seed, 128);
        pm_helper helper = {0};
        pm_helper_init(&helper, schedule);
        must(pm_helper_can_share(&helper), seed, "there is no second thread");
        for (unsigned offer = 0; offer < 3; offer++) {
            begun = ended = 0;
            pm_helper_offer(&helper, work, schedule);
            for (unsigned turns = seed % 8; turns; turns--) pm_schedule_go_on(schedule);
            pm_helper_withdraw(&helper);
            must(begun == ended, seed, "the helper was still at work that was withdrawn");
            must(begun <= 1, seed, "the helper did the work twice");
            unsigned before = begun;
            taken += begun;
            for (unsigned turns = 8; turns; turns--) pm_schedule_go_on(schedule);
            must(begun == before, seed, "the helper began work that was withdrawn");
        }
        pm_helper_stop(&helper);
        pm_schedule_free(schedule);
    }
    printf("%u\n", taken);
    return 0;
}
