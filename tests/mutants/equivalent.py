"""Generated mutants that no test can notice: their lines, and the reasons."""

from __future__ import annotations

from typing import NamedTuple


class Equivalent(NamedTuple):
    """line: of the file, without the spaces before it; of a statement with several lines, the first one. new: a part
    of the changed text, with single spaces, if only this change of the line is equivalent.
    """

    file: str
    line: str
    why: str
    new: str = ""


# Functions that no processor of ours chooses, by file. test_versions.py compiles them into programs of their own, in
# which no mutant can be chosen: they are not drawn.
ELSEWHERE = {
    "csrc/base/compare.c": r".*_portable|choose_versions",
    "csrc/base/hash.c": r".*_portable|.*_avx2|choose_versions",
}

EQUIVALENT = [
    Equivalent(
        "csrc/space/region.c",
        "region->search_from = 0;",
        "A hint: the search for free pages begins there, and page 0, the root's, is never free.",
        "(0 + 1)",
    ),
    Equivalent(
        "csrc/space/heap.c",
        'return pm_fail(PM_CORRUPT, "an extent is damaged: it lies outside the store");',
        "What follows finds no slab at such a place, or no whole pages, and says so with other words.",
        "(void)0;",
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
        "csrc/media/file_system.c",
        "ssize_t length = readlink(link, target, sizeof target - 1);",
        "The target of such a link has some tens of bytes, and there is room for 256.",
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
]
