"""Mutants that nobody chose, and that no test could notice: the line where they stand, and why."""

from __future__ import annotations

from typing import NamedTuple


class Equivalent(NamedTuple):
    """line: of the file, without the spaces before it; where a statement has several, the first one. new: a part of
    what it becomes, with single spaces, if only this change of the line is none.
    """

    file: str
    line: str
    why: str
    new: str = ""


# Functions that no processor of ours chooses, by file. tests/test_versions.py compiles them into programs of their own,
# in which no mutant can be chosen: they are not drawn.
ELSEWHERE = {
    "csrc/compare.c": r".*_portable|choose_versions",
    "csrc/hash.c": r".*_portable|.*_avx2|choose_versions",
}

EQUIVALENT = [
    Equivalent(
        "csrc/region.c",
        "region->search_from = 0;",
        "A hint: the search for free pages begins there, and page 0, the root's, is never free.",
        "(0 + 1)",
    ),
    Equivalent(
        "csrc/heap.c",
        'return pm_fail(PM_CORRUPT, "an extent is damaged: it lies outside the store");',
        "What follows finds no slab at such a place, or no whole pages, and says so with other words.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/verify.c",
        "if (!cell->length || cell->length > PM_REGION_LIMIT",
        "An extent as large as the limit does not fit into a region, which holds the root as well.",
        "cell->length >= PM_REGION_LIMIT",
    ),
    Equivalent(
        "csrc/transaction.c",
        "size_t room = store->fresh_room ? 2 * store->fresh_room : 64;",
        "How much memory is taken at first.",
        ": (64",
    ),
    Equivalent(
        "csrc/log.c",
        "hash_pieces(writer, end / PM_PIECE * PM_PIECE);",
        "What is not hashed while the record is gathered is hashed when the stage is let go of, or at the end.",
        "hash_pieces(writer",
    ),
    Equivalent(
        "csrc/region_unsettled.c",
        "unsettled->since.base = unsettled->before.base = region->live;",
        "Only the tracker reads a set's base, and it does not fill these sets: they hold numbers of pages.",
        "(void)0;",
    ),
    Equivalent(
        "csrc/media_fs.c",
        "ssize_t length = readlink(link, target, sizeof target - 1);",
        "The target of such a link has some tens of bytes, and there is room for 256.",
    ),
    Equivalent(
        "csrc/pending.c",
        "int order = i == now->count ? 1 : k == before->count ? -1 : by_key(&now->list[i], &before->list[k]);",
        "Of the order only the sign counts.",
        "(1 + 1)",
    ),
    Equivalent(
        "csrc/store.c",
        'return pm_fail(PM_INVALID, "the prefix must have 1 to %d bytes", PM_KEY_MAX);',
        "The Python side, which alone calls it, asks for no such prefix.",
        "(void)0;",
    ),
]
