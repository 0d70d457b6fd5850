"""Generated mutants that no test can notice: their lines, and the reasons. equivalent_commit.py,
equivalent_media.py, equivalent_reader.py and equivalent_space.py have those of csrc/commit and csrc/log, csrc/media,
csrc/reader and csrc/space."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Equivalent(NamedTuple):
    """line: of the file, without the spaces before it; of a statement with several lines, the first one. new: a part
    of the changed text, with single spaces, if only this change of the line is equivalent. function: if others have the
    same line.
    """

    file: str
    line: str
    why: str
    new: str = ""
    function: str = ""


# Functions that this processor does not choose, by file. They are not drawn: test_versions.py compares them with those
# that are chosen.
_HAS_AVX512 = re.search(r"\bavx512f\b", Path("/proc/cpuinfo").read_text(encoding="utf-8")) is not None
ELSEWHERE = {
    "csrc/base/compare.c": r"choose_versions|" + (r".*_portable" if _HAS_AVX512 else r".*_avx512"),
    "csrc/base/hash.c": r"choose_versions|.*_portable|" + (r".*_avx2" if _HAS_AVX512 else r".*_avx512"),
    "csrc/codecs/lcdelta.c": r"numbers_of_halves|halves_of_numbers|float_of_half|half_of_float|choose_versions",
}

EQUIVALENT = [
    Equivalent(
        "csrc/media/trace.c",
        "return id ? id : 1;",
        "One of 2^64 checksums is 0, and any other number is as good.",
        "(1 + 1)",
    ),
    Equivalent(
        "csrc/dirty/page_set.c",
        "for (; page < end && page % 64; page++) count += pm_page_set_has(set, page);",
        "It counts the pages of the first word down from there; the number only decides whether two threads compare.",
        "page--",
    ),
    Equivalent(
        "csrc/dirty/page_set.c",
        "for (; page < end; page++) count += pm_page_set_has(set, page);",
        "The number only decides whether two threads compare an extent.",
        "(void)0;",
        "pm_page_set_count",
    ),
    Equivalent(
        "csrc/log/log.c",
        "if (getrandom(&value, sizeof value, 0) != sizeof value) {",
        "GRND_NONBLOCK: it differs only before the kernel has seeded its generator, in the first moments of a machine.",
        "(0 + 1)",
    ),
    Equivalent(
        "csrc/commit/async.c",
        "if (store->media.trace) pm_trace_add(store->media.trace, PM_EVENT_DURABLE, store->log.durable, 0, NULL);",
        "Nobody reads the length of this event.",
        "(0 + 1)",
    ),
    Equivalent(
        "csrc/commit/parallel_compare.c",
        "s->part = (s->to - s->first * WORD) / WORD / PARTS + 1;",
        "The parts are longer: all of the extent is compared, in fewer parts.",
        "s->to + s->first",
    ),
    Equivalent(
        "csrc/base/thread.c",
        "pthread_condattr_destroy(&clock);",
        "In glibc and musl the attributes of a condition hold nothing, and this does nothing.",
    ),
    Equivalent(
        "csrc/dirty/page_set.c",
        "for (; page < end && page % 64; page++) count += pm_page_set_has(set, page);",
        "The number only decides whether two threads compare an extent.",
        "page / 64",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "pm_policy_forget(policy, offset, PM_PAGE);",
        "Only in a damaged file. The extent is compared in full with and without it.",
        "(void)0;",
        "pm_policy_scan",
    ),
    Equivalent(
        "csrc/dirty/tracker.c",
        "return scan(tracker, from, length, how, NULL) >= 0;",
        "Where all pages are in memory, none is filled. Later scans then also ask for that, which only takes longer.",
        "> 0",
        "pm_tracker_fill",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "pm_page_set_clear(&policy->dirty, learned->offset / PM_PAGE, end / PM_PAGE);",
        "The first commit of a new array in the place writes it whole, and clears its pages in the set.",
        "(void)0;",
        "pm_policy_forget",
    ),
    Equivalent(
        "csrc/base/helper.c",
        "for (int i = 0; i < GLANCES && helper->state == TAKEN; i++) continue;",
        "The wait below decides. Before it come 20,000 glances in vain, which is some microseconds, or none.",
        "helper->state != TAKEN",
        "pm_helper_withdraw",
    ),
    Equivalent(
        "csrc/dirty/page_set.c",
        "for (; page + 64 <= end; page += 64) set->bits[page / 64] = 0;",
        "The next loop clears the pages of a last word one by one.",
        "(64 + 1)",
        "pm_page_set_clear",
    ),
    Equivalent(
        "csrc/dirty/tracker.c",
        "return scan(tracker, from, length, how, NULL) >= 0;",
        "Where all pages are in memory, none is filled. Later scans then also ask for that, which only takes longer.",
        ">= (0 + 1)",
        "pm_tracker_fill",
    ),
    Equivalent(
        "csrc/codecs/lcdelta.c",
        "const uint8_t *from = n - at < 64 ? memcpy(last, codes + at, n - at) : codes + at;",
        "A last block of 64 codes is copied before it is read.",
        "n - at <= 64",
        "pm_lcdelta_pack",
    ),
    Equivalent(
        "csrc/codecs/lcdelta.c",
        "const uint8_t *from = n - at < 64 ? memcpy(last, codes + at, n - at) : codes + at;",
        "A last block of 64 codes is copied before it is read.",
        "(64 + 1)",
        "pm_lcdelta_pack",
    ),
    Equivalent(
        "csrc/base/schedule.c",
        "pm_routine *routine = calloc(1, sizeof *routine);",
        "More memory than is needed.",
        "(1 + 1)",
    ),
    Equivalent(
        "csrc/recovery/verify.c",
        "if (!cell->length || cell->length > PM_REGION_LIMIT",
        "An extent as large as the limit does not fit into a region, which holds the root as well.",
        "cell->length >= PM_REGION_LIMIT",
    ),
    Equivalent(
        "csrc/store/store.c",
        'return pm_fail(PM_INVALID, "the prefix must have 1 to %d bytes", PM_KEY_MAX);',
        "The Python side, which alone calls it, asks for no such prefix.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "uint64_t in_vain = learned->scanned > changed ? learned->scanned - changed : 0;",
        "One page more in an estimate of time.",
        "(0 + 1)",
    ),
    Equivalent(
        "pmstore/_resume/partial_fit.py",
        "self._nodes = nodes",
        "What the store has already is written again: only times depend on it.",
    ),
    Equivalent(
        "pmstore/_resume/loop.py",
        "if now - self._told >= BETWEEN_REPORTS:",
        "One instant of a clock.",
        "> BETWEEN",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "learned->balance -= (int64_t)learned->pages * FAULT;",
        "An estimate of time: how soon an array is armed.",
        "+= (int64_t)",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "policy->list[kept++] = *learned;",
        "What was learned of other arrays is learned anew: only times depend on it.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "size_t room = policy->room ? 2 * policy->room : 16;",
        "How much memory is taken at first.",
        "(16 + 1)",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "size_t room = policy->room ? 2 * policy->room : 16;",
        "How much more memory is taken each time: the list has room for one more.",
        "(2 + 1)",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "return policy->tracker.forced || learned->balance > cost_of_change(learned) * HYSTERESIS;",
        "One nanosecond of an estimate: an array is armed one commit sooner.",
        "learned->balance >= cost_of_change(learned)",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "if (learned->balance > cost_of_change(learned)) disarm(policy, learned);",
        "One nanosecond of an estimate: an array is armed one commit less.",
        "learned->balance >= cost_of_change(learned)",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "learned->balance = 0;",
        "One nanosecond of an estimate, which only costs of 20 µs and more are compared with.",
        "(0 + 1)",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "learned->present = 0;",
        "Nothing reads it once the pages are protected; where the kernel refused that, each commit tries it again.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/dirty/tracker.c",
        "for (uint64_t i = 0; i < part; i++) {",
        "One page more is compared.",
        "i <= part",
    ),
    Equivalent(
        "csrc/dirty/tracker.c",
        "if (pm_tracker_arm(tracker, test->pages, TEST_PAGES * PM_PAGE) != 2) return false;",
        "Where a range can't be armed, the kernel refuses the next question about it as well.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/base/schedule.c",
        "sem_init(&routine->go, 0, 0);",
        "calloc has made the semaphore zeros, which is what glibc makes of it.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/recovery/recovery.c",
        "for (size_t i = 0; i < found->count; i++) {",
        "What the first record declares covers no earlier record's bytes: there is none.",
        "(0 + 1)",
        "note_declared",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "learned->asking = 0;",
        "An estimate of time: what a question cost before counts again in a commit that does not ask.",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "fill_if_worthwhile(policy, learned);",
        "How quickly the kernel lists written pages: only times depend on it.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "learned->present += learned->scanned;",
        "When pages that are not in memory are protected, too: only times depend on it.",
    ),
    Equivalent(
        "csrc/base/schedule.c",
        "sem_init(&routine->go, 0, 0);",
        "A semaphore that processes may share works in one process as well.",
        "go, (0 + 1)",
    ),
    Equivalent(
        "csrc/base/schedule.c",
        "sem_init(&routine->back, 0, 0);",
        "A semaphore that processes may share works in one process as well.",
        "back, (0 + 1)",
    ),
    Equivalent(
        "csrc/base/schedule.c",
        "while (sem_wait(&routine->go)) continue;",
        "The thread blocks all signals but those of its own faults: nothing interrupts its wait.",
        "break;",
    ),
    Equivalent(
        "pmstore/archive/_archive.py",
        "return None, -1",
        "Nobody looks at the number where there is no archive of the past.",
        "2",
        "Archive._past",
    ),
    Equivalent(
        "pmstore/archive/_archive.py",
        "return None, -1",
        "Nobody looks at the number where there is no archive of the past.",
        "0",
        "Archive._past",
    ),
    Equivalent(
        "pmstore/archive/_manifest.py",
        "table = np.frombuffer(written.pieces, _COLUMN).reshape(-1, 5).copy()",
        "numpy takes any negative length as the one that it has to find.",
        "2",
    ),
    Equivalent(
        "pmstore/archive/_tuning.py",
        "break",
        "The rounds after this one change nothing.",
        "continue",
        "_inside",
    ),
    Equivalent(
        "pmstore/scale/_dask.py",
        "if self._pickled[0] is not function:",
        "The same function is pickled for each question, to the same bytes: only the time differs.",
        "1",
    ),
    Equivalent(
        "pmstore/scale/_holder.py",
        "return False",
        "The descriptions of two shards have other names, so that they are never added.",
        function="Describe.adds",
    ),
    Equivalent(
        "csrc/recovery/verify.c",
        "size_t room = report->room ? 2 * report->room : 16;",
        "How much memory is taken at first.",
        "(16 - 1)",
    ),
    Equivalent(
        "csrc/recovery/verify.c",
        "size_t room = report->room ? 2 * report->room : 16;",
        "How much memory is taken for more problems.",
        "(2 + 1)",
    ),
    Equivalent(
        "csrc/recovery/verify.c",
        "size_t room = report->room ? 2 * report->room : 16;",
        "How much memory is taken at first.",
        "(16 + 1)",
    ),
    Equivalent(
        "csrc/recovery/verify.c",
        ".report = calloc(1, sizeof *c.report),",
        "More memory than is used, for the time of a check.",
        "calloc((1 + 1)",
    ),
    Equivalent(
        "csrc/recovery/verify.c",
        ".kinds = calloc(pages, 1),",
        "More memory than is used, for the time of a check.",
        "calloc(pages, (1 + 1))",
    ),
    Equivalent(
        "csrc/recovery/verify.c",
        "if (!difference.sum) return UINT64_MAX;",
        "Without it the place is 0, which only a difference without a moment confirms: that is no difference.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/recovery/verify.c",
        "pm_key key = i < node->count ? (pm_key){0} : to, before = from;",
        "The key of a cell takes the place of the empty one.",
        "{(0 + 1)}",
    ),
    Equivalent(
        "csrc/recovery/verify.c",
        "for (int i = 0; i < 5; i++) inverse *= 2 - odd * inverse;",
        "An inverse that is right in all bits stays so in a further step.",
        "i <= 5",
    ),
    Equivalent(
        "csrc/recovery/verify.c",
        "for (int i = 0; i < 5; i++) inverse *= 2 - odd * inverse;",
        "An inverse that is right in all bits stays so in a further step.",
        "(5 + 1)",
    ),
    Equivalent(
        "csrc/recovery/recovery.c",
        "size_t room = found->room ? 2 * found->room : 64;",
        "How much memory is taken at first.",
        ": (64",
    ),
    Equivalent(
        "csrc/recovery/recovery.c",
        "size_t room = found->room ? 2 * found->room : 64;",
        "How much memory is taken for more records.",
        "(2 + 1)",
    ),
    Equivalent(
        "csrc/recovery/recovery.c",
        "for (uint64_t at = place, end = place + length; at < end; at += PM_PAGE) {",
        "Where whole pages are written again, a write of no bytes follows.",
        "at <= end",
    ),
    Equivalent(
        "csrc/recovery/recovery.c",
        "uint8_t whole[PM_PAGE] = {0};",
        "The first byte is one of those that are copied: a page that is cut has at least one.",
        "(0 + 1)",
    ),
    Equivalent(
        "csrc/recovery/recovery.c",
        "if (!found->declared) return write_committed(store, item->offset, item->bytes, item->length);",
        "Where no record declares anything, the same bytes are written page by page.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/recovery/recovery.c",
        "uint64_t end = (item.offset + pm_extent_size(item.length) + PM_PAGE - 1) / PM_PAGE;",
        "The size of an extent is a multiple of 8 bytes.",
        "(1 + 1)",
    ),
    Equivalent(
        "csrc/recovery/recovery.c",
        "found->recorded = log->sequence;",
        "Each record knows that the header's commit was durable, and without a record nothing is made durable.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/recovery/recovery.c",
        "if (knows > found->recorded) found->recorded = knows;",
        "A number becomes itself.",
        ">= found",
    ),
    Equivalent(
        "csrc/recovery/recovery.c",
        "if (knows > found->durable) found->durable = knows;",
        "A number becomes itself.",
        ">= found",
    ),
    Equivalent(
        "csrc/recovery/recovery.c",
        "pages.groups = calloc(count / GROUP + 1, sizeof *pages.groups);",
        "More memory than is needed.",
        "(1 + 1)",
    ),
    Equivalent(
        "csrc/base/status.c",
        "return status;",
        "Its only caller does not look at what it returns.",
        "return PM_OK;",
        "pm_status_explain",
    ),
    Equivalent(
        "csrc/store/store.c",
        "pm_write_back_open(store);",
        "calloc has made the conditions zeros, which glibc takes for sound ones, and no wait for them needs a clock.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "policy->tracker = (pm_tracker){.uffd = -1, .pagemap = -1};",
        "Only the sign of a descriptor that is not open matters.",
        "-(1 + 1)",
    ),
    Equivalent(
        "csrc/store/store.c",
        "out->keys = root ? root->keys : 0;",
        "Without a root the call fails, and nobody looks at the numbers.",
        "(0 + 1)",
    ),
    Equivalent(
        "csrc/base/hash.c",
        "_mm_prefetch(bytes + ahead, _MM_HINT_T0);",
        "A prefetch of another address does nothing that a program could notice.",
        "bytes - ahead",
    ),
    Equivalent(
        "csrc/dirty/tracker.c",
        "if (regions < 0 && errno == EINTR && how.walk_end > how.start) regions = 0;",
        "What is set to 0 is 0 already.",
        "regions < (0 + 1)",
    ),
    Equivalent(
        "csrc/dirty/page_set.c",
        "for (; page < end && page % 64; page++) count += pm_page_set_has(set, page);",
        "Pages up to the next multiple of 64, whose bits are in the same word, count, too. The number only decides "
        "whether a second thread compares.",
        "||",
        "pm_page_set_count",
    ),
    Equivalent(
        "csrc/codecs/lcdelta.c",
        "four_bits larger = error > all->most[i];",
        "An error is a result of fabs, and the largest one before is such a result, or 0: equal ones have equal bits.",
        ">= all->most[i]",
    ),
    Equivalent(
        "csrc/base/helper.c",
        "for (int i = 0; i < GLANCES && helper->state == TAKEN; i++) continue;",
        "One of 20,000 glances fewer before the wait, which decides.",
        "(0 + 1)",
        "pm_helper_withdraw",
    ),
    Equivalent(
        "csrc/dirty/tracker.c",
        "if (regions < 0 || how.walk_end <= how.start) return -1;",
        "Unless it reports an error, Linux goes on by at least one page: the list has room for one.",
        "how.walk_end < how.start",
    ),
    Equivalent(
        "csrc/dirty/tracker.c",
        "how.walk_end = 0;",
        "It is only compared with addresses of mappings, which are larger.",
        "(0 + 1)",
    ),
    Equivalent(
        "csrc/dirty/page_set.c",
        "for (; page + 64 <= end; page += 64) count += (uint64_t)__builtin_popcountll(set->bits[page / 64]);",
        "Two more words are counted at most, which are in the same memory: other notes follow (space/region_map.c). "
        "The number only decides whether a second thread compares.",
        "page - 64",
        "pm_page_set_count",
    ),
    Equivalent(
        "csrc/base/schedule.c",
        "bool work_first = !routine || pm_schedule_choose(schedule, 2);",
        "Work is done first in two of three cases instead of in one of two: every order remains possible.",
        "(2 + 1)",
    ),
]
