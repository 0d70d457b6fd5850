"""Generated mutants of csrc/reader that no test can notice."""

from __future__ import annotations

from tests.mutants.equivalent import Equivalent

OF_READER = [
    Equivalent(
        "csrc/reader/pages.c",
        "while (first < end && t->added < AT_ONCE) {",
        "One more run of pages is copied before the records are read again.",
        "t->added <= AT_ONCE",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "if (first < t->unapplied_from) t->unapplied_from = first;",
        "It sets what it already is.",
        "first <= t->unapplied_from",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "if (to > t->unapplied_to) t->unapplied_to = to;",
        "It sets what it already is.",
        "to >= t->unapplied_to",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "first = to;",
        "The pages are loaded now, so that the loop passes them one by one.",
        "(void)0;",
        "need",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "t->unapplied_from = t->unapplied_to = 0;",
        "The set has no page in this range any more: only looking for some takes longer.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "t->unapplied_from = t->unapplied_to = 0;",
        "Of an empty range all that is asked is whether its ends are the same: the next page sets both.",
        "(0 + 1)",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "t->complete = t->added < AT_ONCE && t->queued < QUEUED_MOST;",
        "One more pass finds nothing to copy, and is the last one.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "if (status == PM_OK && t->complete && !t->missed) break;",
        "One more pass finds nothing to copy, and is the last one; one that missed a commit ends in either way.",
        "missed",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "uint64_t words = t->loaded_pages / 64 + 1;",
        "Larger sets than are needed.",
        "* 64",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "bool late = false;",
        "It is set before it is looked at.",
        "true",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "*t = (pm_pages){.source = {.fd = -1, .copy = -1},",
        "Any negative number says that there is no such descriptor.",
        "-(1 + 1)",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "PM_TRY(valid_page(t, map, PM_TYPE_MAP, &skip));",
        "The same pass has looked at the same page before, in need_described.",
        "(void)",
        "need_extents",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "for (unsigned list = 0; list < PM_ROOT_LISTS; list++)",
        "The field behind the lists names the first page of the table of slots, which is copied anyway.",
        "list <= PM_ROOT_LISTS",
        "need_lists",
    ),
    Equivalent(
        "csrc/reader/parts.c",
        "if (count > TAKEN_MOST) count = TAKEN_MOST;",
        "If they are equal, the assignment changes nothing.",
        "count >= TAKEN_MOST",
    ),
    Equivalent(
        "csrc/reader/parts.c",
        "if (count < PM_PARTS_PAGES) count = PM_PARTS_PAGES;",
        "If they are equal, the assignment changes nothing.",
        "count <= PM_PARTS_PAGES",
    ),
    Equivalent(
        "csrc/reader/page_hashes.c",
        "size_t at = (size_t)(page * UINT64_C(0x9e3779b97f4a7c15) >> 20) & (hashes->size - 1);",
        "Where the search for a slot begins: only times depend on it.",
        "<< 20",
    ),
    Equivalent(
        "csrc/reader/source.c",
        "if (head.magic != PM_RECORD_MAGIC || head.length > log->header.log_size - log->head) return PM_OK;",
        "The writer leaves a page of the log free behind each record (pm_log_room).",
        "head.length >= log->header.log_size",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "bool many = passes++ > PASSES_MOST, quick = t->flips > FLIPS_MOST || many;",
        "The process that writes is asked for a pause one flip sooner: only the time differs.",
        "t->flips >= FLIPS_MOST || many",
    ),
    Equivalent(
        "csrc/reader/follow.c",
        "pm_extent_place *copy = malloc((count + 1) * sizeof *copy);",
        "glibc has memory for no bytes as well, and nothing reads behind the last place.",
        "(1 - 1)",
    ),
    Equivalent(
        "csrc/reader/source.c",
        "if (first != PM_OK) memset(pages, 0, PM_PAGE);",
        "Ones in all bytes are no valid copy either, and no valid marker.",
        "(0 + 1)",
    ),
    Equivalent(
        "csrc/reader/page_hashes.c",
        "uint64_t hash = pm_hash64(bytes, count, 0);",
        "Such hashes are compared only with each other, in one process.",
        "(0 + 1)",
    ),
    Equivalent(
        "csrc/reader/source.c",
        "if (done < 0 && errno == EINTR) continue;",
        "A write of no bytes is tried again either way.",
        "done <= 0",
        "pm_source_pwrite",
    ),
    Equivalent(
        "csrc/reader/pages.c",
        "t->seen += wanted && (fixed || t->contents);",
        "It matters only whether the number is 0.",
        "t->seen -=",
    ),
    Equivalent(
        "csrc/reader/snapshot.c",
        'if (fd < 0) return pm_fail_errno("cannot open the file of a store again");',
        "Without a descriptor the trial fails, and any failure means that the array is copied.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/reader/snapshot.c",
        "t->source.copy = -1, t->loaded.bits = NULL, t->pairs = NULL, t->tables = (pm_page_hashes){0};",
        "Any negative number means that there is no file.",
        "-(1 + 1)",
    ),
    Equivalent(
        "csrc/reader/snapshot.c",
        "if (snapshot->locked >= 0) close(snapshot->locked);",
        "The core takes no descriptor below 3.",
        "locked > 0",
    ),
    Equivalent(
        "csrc/reader/snapshot.c",
        "if (snapshot->locked < 0) PM_TRY(open_locked(snapshot));",
        "The core takes no descriptor below 3.",
        "locked <= 0",
        "lock_pages",
    ),
]
