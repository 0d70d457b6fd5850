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
from tests.archive import (
    test_copying,
    test_damage,
    test_faults,
    test_histories,
    test_lossy,
    test_places,
    test_removed,
    test_shortages,
    test_sweeps,
)
from tests.archive.stepping import Memory, archived, stepping
from tests.mutants.build import Mutant

CAPTURE, COPYING, INDEX = (f"pmstore/archive/_{name}.py" for name in ("capture", "copying", "index"))
PAST, RETENTION, TARGET = (f"pmstore/archive/_{name}.py" for name in ("past", "retention", "target"))
VERSIONS, WRITING = (f"pmstore/archive/_{name}.py" for name in ("versions", "writing"))

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
        "writer.change(_without(before, going))",
        "needed = _needed(before, going)\n"
        "    place.delete(sorted(part for row in before.rows() if row.version not in needed for part in row.parts))\n"
        "    writer.change(_without(before, going))",
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
        "version <= until",
        "True",
        "the further place never gets a version",
    ),
    Mutant(
        "old-objects-of-the-index-first",
        "F",
        INDEX,
        "merged = self._created(wanted, rows)",
        "self._place.delete(segment.name for segment in old)\n        merged = self._created(wanted, rows)",
        "a crash while the index is merged loses versions (I25)",
    ),
    Mutant(
        "older-writers-go-on",
        "W",
        INDEX,
        "newest > self._token",
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
        "not piece.matches(found)",
        "False",
        "damaged bytes are decoded",
        also=(
            Mutant("", "", VERSIONS, "piece.matches(data)", "True", ""),
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
        "known._replace(mark=mark(key, known.entry, contents), approximation=approximation)",
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
    Mutant(
        "another-copy-goes-on",
        "W",
        PAST,
        "rest % (1 << 63) == 0",
        "True",
        "a version counts as durable, and the archive has another one",
    ),
    Mutant(
        "tags-not-read-again",
        "W",
        RETENTION,
        "late = going.intersection(tagged())",
        "late: set[int] = set()",
        "a version goes after it was tagged",
    ),
    Mutant(
        "tags-never-read-again",
        "W",
        TARGET,
        "removals != self._removals_here",
        "False",
        "a version goes, as its tag was another's before",
    ),
    Mutant(
        "previous-version-of-another-place",
        "W",
        INDEX,
        "place._is_listed(row)",
        "True",
        "a version is read on top of the contents of another history",
    ),
    Mutant(
        "previous-version-of-another-drain",
        "W",
        INDEX,
        "writer_of(found.directory.part) == writer_of(row.directory.part)",
        "True",
        "a version is read on top of the contents of another history",
    ),
    Mutant(
        "cut-part-of-an-object-store-whole",
        "W",
        COPYING,
        "not piece.is_within(self._sizes)",
        "False",
        "a version counts as durable, and its part is cut",
    ),
    Mutant(
        "last-whole-piece-overwritten",
        "W",
        COPYING,
        "there is not None",
        "False",
        "a version is lost in both places, and the further one had it whole",
    ),
    Mutant(
        "other-contents-of-a-late-flush",
        "W",
        INDEX,
        "there.state != row.state",
        "False",
        "a version is a differential to one that the list has with other contents",
    ),
    Mutant(
        "parts-of-a-failed-capture-named",
        "W",
        WRITING,
        "part < first or writer_of(part) != self._writer",
        "True",
        "a version names a part that is not written",
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
    test_copying.test_a_part_that_was_lost_or_cut_in_a_further_object_store(folder("cut"), False, 1000)
    test_copying.test_a_part_that_takes_the_place_of_another_one_has_what_only_that_has(folder("pieces"))
    test_histories.test_a_compacted_copy_with_other_contents("also", folder("compacted"))
    test_histories.test_a_version_whose_previous_one_only_another_copy_has(folder("copy"), False)
    test_histories.test_two_drains_of_other_exactness_at_once(folder("exactness"))
    test_histories.test_a_flush_that_was_under_way_is_taken_for_the_versions_that_it_has(folder("late"), "newest")
    with pytest.MonkeyPatch.context() as patch:
        test_shortages.test_parts_of_failed_captures_do_not_pile_up(folder("failed"), patch, True)
    test_removed.test_a_version_that_is_tagged_while_it_goes(True, 2, folder("tagged"))
    test_removed.test_a_tag_is_read_once(folder("tags"))
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
            with pytest.raises(pmstore.ArchiveConflictError, match="a later drain"):
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
