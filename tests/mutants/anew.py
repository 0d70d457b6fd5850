"""Stores that are written anew, by compact and salvage, and notes of commits: mutants, and the part of the battery that
notices them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

import pmstore
from pmstore.testing._files.fixture import CrashFiles
from tests.mutants.build import Mutant
from tests.store import test_attributes, test_compact, test_notes, test_rename, test_salvage

COMPACT, NEW, SALVAGE, COPY, ATTRIBUTES = (
    "pmstore/_store/compacting.py",
    "pmstore/_store/new_store.py",
    "pmstore/_store/salvaging.py",
    "pmstore/_catalog/copying.py",
    "pmstore/_catalog/attributes.py",
)

NOTICED = [
    Mutant(
        "compacted-store-named-before-it-is-filled",
        "F",
        NEW,
        "yield held\n        _give_name(temporary, real, path, replaced)",
        "_give_name(temporary, real, path, replaced)\n        yield held",
        "a crash leaves a store without its contents",
    ),
    Mutant(
        "directory-of-a-compacted-store-not-synced",
        "F",
        NEW,
        "sync_directory(os.path.dirname(real))",
        "pass",
        "an acknowledged compact is undone",
    ),
    Mutant(
        "compacted-store-counts-anew",
        "F",
        NEW,
        "sequence is not None",
        "False",
        "a compacted store is at another commit",
    ),
    Mutant(
        "compacts-a-damaged-store",
        "F",
        COMPACT,
        "not report.ok",
        "False",
        "a damaged array counts as sound",
    ),
    Mutant(
        "contents-copied-unverified",
        "F",
        COPY,
        "core.contents(entry.offset, entry.length)",
        "bytearray(core.buffer(entry.offset, entry.length, False))",
        "a damaged array counts as sound",
    ),
    Mutant(
        "copies-an-unknown-kind",
        "F",
        COPY,
        "entry.kind not in (ARRAY, INLINE, BLOB)",
        "False",
        "a copy lacks the keys that belong to it",
    ),
    Mutant(
        "salvages-what-the-check-reported",
        "F",
        SALVAGE,
        "name in self.damaged",
        "False",
        "an older array counts as the last one",
        within="elif name in self.damaged",
    ),
    Mutant(
        "note-of-any-commit",
        "W",
        "pmstore/_catalog/catalog.py",
        'found[:8] == self.core.sequence.to_bytes(8, "little")',
        "found",
        "a commit has the message of an earlier one",
    ),
    Mutant(
        "note-not-written",
        "W",
        "csrc/python/transaction.c",
        "put_note(self)",
        "true",
        "a commit lacks its message",
        within="committed = put_note(self)",
    ),
    Mutant(
        "note-of-the-outer-transaction",
        "W",
        "csrc/python/transaction.c",
        "if (self->note != Py_None) take_note(lock, self->note);",
        ";",
        "a commit has the message of another transaction",
    ),
    Mutant(
        "half-renamed",
        "F",
        COPY,
        "_end_rename(catalog, declared, moved)",
        "pass",
        "an interrupt leaves both names",
        within="# it came after the call\n                _end_rename(catalog, declared, moved)",
    ),
    Mutant(
        "names-of-a-failed-rename-stay",
        "F",
        "csrc/store/entries.c",
        "PM_TRY(remove_side(store, all, made, true));",
        "",
        "two names own an extent",
    ),
    Mutant(
        "attributes-stay-behind",
        "F",
        ATTRIBUTES,
        "catalog.core.delete(attributes_key(one))",
        "pass",
        "another value gets the attributes of a deleted one",
    ),
    Mutant(
        "attributes-not-moved",
        "F",
        COPY,
        "attributes.below(catalog, old)",
        "[]",
        "a renamed name loses its attributes",
        within="described = attributes.below(catalog, old)",
    ),
]
MUTANTS = [mutant._replace(parts=("anew",)) for mutant in NOTICED]


def anew(directory: Path) -> None:
    with mock.patch("pmstore.testing._base.session.directory", lambda: directory / "kept"):
        test_compact.crash(CrashFiles(directory / "crash", budget=60))
    evaluates: tuple[Callable[..., None], ...] = (
        test_compact.test_what_fails_leaves_the_store,
        test_salvage.test_contents_of_an_earlier_commit,
        test_rename.test_the_copy_of_a_damaged_array_is_refused,
        test_rename.test_the_copy_of_an_unknown_kind_is_refused,
        test_rename.test_no_space_for_longer_names,
        test_attributes.test_I38_they_follow_and_go,
        test_notes.test_a_commit_says_what_its_transaction_was_given,
        test_notes.test_the_innermost_that_begins_last_is_committed,
    )
    for evaluate in evaluates:
        evaluate(opener(directory / evaluate.__name__))
    with pytest.MonkeyPatch.context() as patch:
        test_rename.test_an_interrupt(opener(directory / "interrupt"), patch, "delete", False)


def opener(directory: Path) -> Callable[..., pmstore.Store]:
    directory.mkdir()
    return partial(pmstore.open, directory / "store.pm")
