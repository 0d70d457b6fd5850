"""Archives: mutants of drains, retention and reading, and the part of the battery that notices them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import pmstore
from pmstore.archive import _index as index
from pmstore.archive._archive import Archive
from pmstore.archive._objects import MissingObjectError
from pmstore.archive._sources import Sources
from tests.archive import test_damage, test_faults, test_lossy, test_places, test_sweeps
from tests.archive.stepping import Memory, archived, stepping
from tests.mutants.build import Mutant

CAPTURE, INDEX, RETENTION = (f"pmstore/archive/_{name}.py" for name in ("capture", "index", "retention"))
TARGET, VERSIONS, WRITING = (f"pmstore/archive/_{name}.py" for name in ("target", "versions", "writing"))

NOTICED = [
    Mutant(
        "row-before-its-parts",
        "F",
        TARGET,
        """for name, pieces in flush.parts:
            self.place.put(name, pieces)
        self.append(flush.rows)""",
        """self.append(flush.rows)
        for name, pieces in flush.parts:
            self.place.put(name, pieces)""",
        "a crash leaves a version that can't be read (I24)",
    ),
    Mutant(
        "parts-deleted-before-their-rows",
        "F",
        RETENTION,
        "writer.change(after)",
        "place.delete(sorted(part for row in index.rows() if row.version not in needed for part in row.parts))\n"
        "    writer.change(after)",
        "a crash leaves a version that can't be read (I26)",
    ),
    Mutant(
        "base-of-a-kept-version-forgotten",
        "W",
        RETENTION,
        "wanted.add(row.previous)",
        "pass",
        "a version that stays can't be read (I26)",
    ),
    Mutant(
        "nearer-place-does-not-wait-with-retention",
        "W",
        RETENTION,
        "row.version <= until",
        "True",
        "the further place never gets a version",
    ),
    Mutant(
        "old-objects-of-the-index-first",
        "F",
        INDEX,
        "self._place.put(merged.name, wrapped(SEGMENT, merged.name, rows))",
        "self._place.delete(segment.name for segment in old)\n"
        "        self._place.put(merged.name, wrapped(SEGMENT, merged.name, rows))",
        "a crash while the index is merged loses versions (I25)",
    ),
    Mutant(
        "older-writers-go-on",
        "W",
        INDEX,
        "_newest_token(self._place) > self._token",
        "False",
        "two drains write to one place",
    ),
    Mutant(
        "equal-digests-of-other-contents",
        "W",
        CAPTURE,
        "before.entry == entry and before.digest == digest",
        "before.entry == entry",
        "a version lacks what its commit changed (I23)",
    ),
    Mutant(
        "replica-not-brought-up-to-date",
        "W",
        CAPTURE,
        "_put(replica, runs, data)",
        "pass",
        "a difference is to another version than it says (I23)",
    ),
    Mutant(
        "pieces-of-parts-unverified",
        "W",
        VERSIONS,
        "len(found) != piece.length or hash64(found) != piece.checksum",
        "False",
        "damaged bytes are decoded",
        also=(
            Mutant("", "", VERSIONS, "hash64(data) == piece.checksum", "True", ""),
            Mutant("", "", VERSIONS, "hash64(decoded.data) != frame.checksum", "False", ""),
        ),
    ),
    Mutant(
        "parts-of-others-deleted-too-early",
        "W",
        TARGET,
        "self._swept = False",
        "self._swept = True\n        self._sweep()",
        "a drain that was overtaken names a part that is gone (I24)",
    ),
    Mutant(
        "lossy-difference-to-the-commit-before",
        "W",
        CAPTURE,
        "change.data[:] = contents",
        "pass",
        "a lossy difference is not to what the version before decodes to (I27)",
    ),
    Mutant(
        "state-of-the-commit-for-an-approximation",
        "W",
        CAPTURE,
        "known._replace(mark=_mark(key, known.entry, hashes), approximation=approximation)",
        "known._replace(approximation=approximation)",
        "a differential is joined to contents that it was not taken to (I27)",
    ),
    Mutant(
        "blocks-of-an-approximation-kept",
        "W",
        CAPTURE,
        "lossy is not None or before.approximation is not None",
        "lossy is not None",
        "a version that is said to be exact has approximated blocks (I28)",
    ),
    Mutant(
        "approximated-without-end",
        "W",
        WRITING,
        "change.lossy < found[1].rebase_every",
        "change.lossy >= 0",
        "an array is never written without loss again (I28)",
    ),
    Mutant(
        "another-history-joined",
        "W",
        TARGET,
        "here.state != there.state",
        "False",
        "a version has contents of two histories",
    ),
]
MUTANTS = [mutant._replace(parts=("archives",)) for mutant in NOTICED]


def archives(directory: Path) -> None:
    directory.mkdir(exist_ok=True)

    def folder(name: str) -> Path:
        (directory / name).mkdir()
        return directory / name

    with mock.patch.object(index, "_FAN", 2):
        for which in (0, 1):
            place, after = folder(f"crashes-{which}"), 1
            while test_places.crashed(place, 1, which, after):
                after += 1 + after // 12
    test_faults.test_a_crash_anywhere_in_retention(folder("retention"))
    test_places.test_places_of_copies_that_went_on_without_each_other_are_not_joined(folder("copies"))
    test_places.test_a_place_gives_nothing_up_that_the_next_one_lacks(folder("lacks"))
    two_writers(folder("writers"))
    for wait in (0, 2):
        test_sweeps.test_a_writer_that_was_overtaken_names_no_part_that_was_deleted(folder(f"sweeps-{wait}"), wait)
    for test in (
        test_lossy.test_I28_only_what_was_asked_for_is_lossy,
        test_lossy.test_other_arrays_are_kept,
        test_lossy.test_the_live_store_has_another_state,
    ):
        with pmstore.open(folder(test.__name__) / "store.pm") as store:
            test(store)
    damaged(folder("damage"))


def two_writers(directory: Path) -> None:
    place = Memory()
    with pmstore.open(directory / "store.pm") as store, stepping(store, place) as old:
        store["x"] = 1
        store.commit()
        with stepping(store, place) as new:
            archived(new)
            store["x"] = 2
            store.commit()
            with pytest.raises(pmstore.ArchiveConflictError, match="another process drains"):
                archived(old)


def damaged(directory: Path) -> None:
    place = Memory()
    with pmstore.open(directory / "store.pm") as store, stepping(store, place, codec=None) as steps:
        store["x"] = np.arange(3000.0)
        store.commit()
        archived(steps)
    part = next(name for name in place.objects if name.startswith("parts/"))
    for at in range(0, len(place.objects[part]), 997):
        data = bytearray(place.objects[part])
        data[at] ^= 1
        try:
            found = Archive(Sources([Memory(place.objects | {part: bytes(data)})]))
            assert (found[1]["x"] == np.arange(3000.0)).all(), "damaged bytes were returned"
        except (*test_damage.REFUSED, MissingObjectError):
            pass
