"""Generated mutants that no test can notice: their lines, and the reasons. equivalent_media.py and
equivalent_reader.py have those of csrc/media and csrc/reader."""

from __future__ import annotations

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


# Functions that no processor of ours chooses, by file. They are not drawn: test_versions.py compares them with those
# that are chosen.
ELSEWHERE = {
    "csrc/base/compare.c": r".*_portable|choose_versions",
    "csrc/base/hash.c": r".*_portable|.*_avx2|choose_versions",
    "csrc/codecs/lcdelta.c": r"numbers_of_halves|halves_of_numbers|float_of_half|half_of_float|choose_versions",
}

EQUIVALENT = [
    Equivalent(
        "csrc/commit/gather.c",
        "bool in_place = extent->scan < PM_SCAN_CHANGED;",
        "Whether pages are compared before or after they are copied: what is found equal is left out in either way.",
        "<= PM_SCAN_CHANGED",
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
        "csrc/space/slots.c",
        "PM_TRY(pm_heap_free(region, slots->slot[1], slots->length));",
        "The space map was compared with the table of slots when the store was opened.",
        "(void)",
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
        "csrc/commit/uncommitted.c",
        "size_t room = all->room ? 2 * all->room : 64;",
        "How much memory is taken at first.",
        ": (64",
    ),
    Equivalent(
        "csrc/log/writer.c",
        "hash_pieces(writer, end / PM_PIECE * PM_PIECE);",
        "What is not hashed while the record is gathered is hashed when the stage is let go of, or at the end.",
        "hash_pieces(writer",
    ),
    Equivalent(
        "csrc/space/overlay.c",
        "overlay->since.base = overlay->before.base = region->live;",
        "Only the tracker reads a set's base, and it does not fill these sets: they hold numbers of pages.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/commit/pending.c",
        "int order = i == now->count ? 1 : k == before->count ? -1 : by_key(&now->list[i], &before->list[k]);",
        "Of the order only the sign counts.",
        "(1 + 1)",
    ),
    Equivalent(
        "csrc/store/store.c",
        'return pm_fail(PM_INVALID, "the prefix must have 1 to %d bytes", PM_KEY_MAX);',
        "The Python side, which alone calls it, asks for no such prefix.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/space/catalog.c",
        "size_t larger = left > total - left ? left : total - left;",
        "The cut is then the first one past the middle, at most one item away from the best one.",
        "total + left",
    ),
    Equivalent(
        "csrc/commit/checkpoint.c",
        "store->log_use.commits = 0;",
        "How rare checkpoints are, among 1,500 commits: only times depend on it.",
        "(0 + 1)",
    ),
    Equivalent(
        "csrc/space/region_map.c",
        "more = more / 2 < least ? least : pm_round_up(more / 2, PM_PAGE);",
        "Where both are the same, both branches give it.",
        "<= least",
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
        "csrc/log/log.c",
        "return taken < log->header.log_size ? log->header.log_size - taken : 0;",
        "Where both are the same, the difference is 0 as well.",
        "taken <= log",
    ),
    Equivalent(
        "csrc/commit/async.c",
        "if (!async->hurried && store->log.head > store->log.header.log_size / 2) {",
        "When a background sync begins: only times depend on it.",
        "log_size * 2",
    ),
    Equivalent(
        "csrc/space/overlay.c",
        "for (page = stop; page < end && pm_overlay_next(region, page, page + 1) == page; page++) continue;",
        "Whether a page is covered does not depend on how far the search for the next covered one goes.",
        "(1 + 1)",
    ),
    Equivalent(
        "csrc/commit/direct.c",
        "if (chunk > length && !paged) chunk = length;",
        "The pattern is repeated in more memory than is needed, and no more than the length is written.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/commit/direct.c",
        "if (!length) return PM_OK;",
        "Where nothing is to be filled, what follows writes nothing.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/space/region.c",
        "if (watched) return;",
        "Pages that were not written are dropped as well: they show the same bytes.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/space/region.c",
        "return true;",
        "Pages that were not written are dropped as well: they show the same bytes.",
        "return false",
        "restore_watched",
    ),
    Equivalent(
        "csrc/space/region.c",
        "return first_from(region, offset > region->longest_buffer ? offset - region->longest_buffer : 0);",
        "Both are 0 where they are equal, and no buffer begins at 0, where the root is.",
        ">= region",
    ),
    Equivalent(
        "csrc/space/region.c",
        "return first_from(region, offset > region->longest_buffer ? offset - region->longest_buffer : 0);",
        "Both are 0 where they are equal, and no buffer begins at 0, where the root is.",
        ": (0",
    ),
    Equivalent(
        "csrc/space/region.c",
        "if (buffer->length > region->longest_buffer) region->longest_buffer = buffer->length;",
        "An equal length is assigned anew.",
        ">= region",
    ),
    Equivalent(
        "csrc/space/region.c",
        "atomic_store(&buffer->living, 1);",
        "Whether it is 0 is all that is asked.",
        "(1 +",
    ),
    Equivalent(
        "csrc/space/region.c",
        "if (buffer_end <= offset || buffer_end <= end) continue;",
        "An equal end is assigned anew.",
        "buffer_end < end",
    ),
    Equivalent(
        "csrc/space/region.c",
        "if (!*i) *i = first_near(region, offset);",
        "The search begins with the first buffer of all: only times depend on it.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/space/region.c",
        "for (uint64_t at = 0; at < length; at += PM_PAGE) {",
        "At the end there are no bytes to compare.",
        "at <= length",
    ),
    Equivalent(
        "csrc/space/region.c",
        "buffer->committed |= buffer->owned;",
        "A constant array is then copied before a fork instead of shared: only times depend on it.",
    ),
    Equivalent(
        "csrc/space/region.c",
        "size_t bytes = length - at < PM_PAGE ? length - at : PM_PAGE;",
        "Behind the contents of whole pages are hashes and what nobody reads.",
        "length + at",
    ),
    Equivalent(
        "csrc/space/region.c",
        "if (address < region->live || offset >= region->size || length > region->size - offset) return NULL;",
        "Contents end before the region does: their hashes follow.",
        "length >= region",
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
        "An estimate of time: how soon an array is watched.",
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
        "One nanosecond of an estimate: an array is watched one commit sooner.",
        "learned->balance >= cost_of_change(learned)",
    ),
    Equivalent(
        "csrc/dirty/policy.c",
        "if (learned->balance > cost_of_change(learned)) disarm(policy, learned);",
        "One nanosecond of an estimate: an array is watched one commit less.",
        "learned->balance >= cost_of_change(learned)",
    ),
    Equivalent(
        "csrc/commit/only.c",
        "bool readable = buffer->readable || "
        "pm_region_comparable(region, buffer->offset, place, buffer->length) == PM_OK;",
        "Each page is asked instead, with the same answers.",
        "buffer->readable && pm_region",
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
        "Where a range can't be watched, the kernel refuses the next question about it as well.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/commit/write_slots.c",
        "return (lines * i / PM_DOUBLE_BUFFER_SAMPLES + lines / (2 * PM_DOUBLE_BUFFER_SAMPLES)) * PM_LINE;",
        "Other lines are sampled; the last is behind the contents, in the hashes of the same extent.",
        "((2 - 1) *",
    ),
    Equivalent(
        "csrc/commit/async.c",
        "async->hurried = true;",
        "The thread is woken once more, for a time that has been set already.",
        "false",
    ),
    Equivalent(
        "csrc/commit/gather.c",
        "__builtin_prefetch(region->committed + committed + pm_extent_table(length) + 8 * (at / PM_PAGE));",
        "A prefetch of another address does nothing that a program could notice.",
        "region->committed - committed",
    ),
    Equivalent(
        "csrc/space/heap.c",
        "bool skipped = false;",
        "A hint: the next search begins further ahead, at pages that are taken.",
        "true",
    ),
    Equivalent(
        "csrc/space/region_fork.c",
        "if (!region->shown_to_children) return 0;",
        "The locks are looked at, and the number of bytes, which only falls, stays 0.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/space/region_map.c",
        "region->media = NULL;",
        "Nothing uses the medium of a closed region: it would have ended the process.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/base/schedule.c",
        "sem_init(&routine->go, 0, 0);",
        "calloc has made the semaphore zeros, which is what glibc makes of it.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/space/overlay.c",
        "for (page = stop; page < end && pm_overlay_next(region, page, page + 1) == page; page++) continue;",
        "The notes cover all pages of a range that is written, or none: no page of free space or of a slot waits.",
        "page + (1 - 1)",
    ),
    Equivalent(
        "csrc/space/catalog.c",
        "if (leaf->count && leaf->used < (PM_PAGE - PM_LINE) / 4u) {",
        "How empty a leaf must be before it is merged: both trees are sound.",
        "(4u + 1)",
    ),
    Equivalent(
        "csrc/commit/readers.c",
        "if (readers->ignored_for > IGNORED_MOST) readers->ignored_for = IGNORED_MOST;",
        "The most becomes the most.",
        ">= IGNORED_MOST",
    ),
    Equivalent(
        "csrc/commit/readers.c",
        "return is_locked(fd, bytes + (last < most ? 0 : last - most), bytes + last);",
        "Where the clock shows just this time, both ways begin at 0.",
        "last <= most",
    ),
    Equivalent(
        "csrc/space/region_map.c",
        "if (pages.from >= part.to) break;",
        "The buffers are in the order of their places: all that follow are behind the part as well.",
        "continue;",
    ),
    Equivalent(
        "csrc/recovery/recovery.c",
        "for (size_t i = 0; i < found->count; i++) {",
        "What the first record declares covers no earlier record's bytes: there is none.",
        "(0 + 1)",
        "note_declared",
    ),
    Equivalent(
        "csrc/space/region_map.c",
        "return PM_OK;",
        "The pages that were copied at once are copied again, one by one.",
        "(void)0;",
        "copy_pages",
    ),
    Equivalent(
        "csrc/space/region_fork.c",
        "if (fd < 0) return NULL;",
        "Without a descriptor the next call fails, with the same result; the lock that is taken again is held.",
        "(void)0;",
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
        "csrc/space/catalog.c",
        "if (leaf->count && leaf->used < (PM_PAGE - PM_LINE) / 4u) {",
        "A leaf that is a quarter full, to the byte, is merged one deletion sooner.",
        "leaf->used <= (PM_PAGE - PM_LINE) / 4u",
    ),
    Equivalent(
        "csrc/space/heap.c",
        "PM_TRY(status);",
        "The search has read the same maps.",
        "",
        "pm_heap_pages",
    ),
    Equivalent(
        "csrc/space/heap.c",
        "if (map && i % 32 == 0 && map->words[i / 32] == LOW_BITS * PM_PAGE_DATA) page += 31;",
        "32 pages are asked for one by one.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/space/heap.c",
        "if (map && i % 32 == 0 && map->words[i / 32] == LOW_BITS * PM_PAGE_DATA) page += 31;",
        "The last of 32 pages is asked for alone.",
        "(31 - 1)",
    ),
    Equivalent(
        "csrc/space/heap.c",
        "if (start > page) {",
        "The pages that are passed over are looked at again, and are forbidden again.",
        "!(start > page)",
    ),
    Equivalent(
        "csrc/space/heap.c",
        "continue;",
        "The same map is read again for its next word.",
        "break;",
        "search",
    ),
    Equivalent(
        "csrc/space/heap.c",
        "if (offset / PM_PAGE < region->search_from) region->search_from = offset / PM_PAGE;",
        "The same page is named.",
        "<= region->search_from",
    ),
    Equivalent(
        "csrc/space/heap.c",
        "slab->listed = 1;",
        "All that is asked is whether it is 0.",
        "(1 + 1)",
    ),
    Equivalent(
        "csrc/space/heap.c",
        "PM_TRY(slab_link(region, root, slab));",
        "The loop has read the first slab of the list.",
        "(void)",
    ),
    Equivalent(
        "csrc/space/heap.c",
        "PM_TRY(status);",
        "The root is read when a store is opened.",
        "",
        "slab_free",
    ),
    Equivalent(
        "csrc/space/heap.c",
        "PM_TRY(status);",
        "The search has read the root and the list.",
        "",
        "ensure_map",
    ),
    Equivalent(
        "csrc/space/heap.c",
        "pm_page_new(region, page * PM_PAGE, type, 0);",
        "Nothing reads the level of a map or of a list of maps.",
        "(0 + 1)",
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
]
