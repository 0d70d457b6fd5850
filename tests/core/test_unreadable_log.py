"""What records of the log refer to, on blocks that the disk can't read."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import pmstore
from tests.conftest import Medium
from tests.core.test_unreadable import disk, in_child, refused  # noqa: F401
from tests.support.bad_disk import BadDisk
from tests.support.images import HEADER, PAGE, REGION, Image
from tests.support.logs import Forged, Record, extent, flip, marker, run

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

LIST = 40 * PAGE


@pytest.mark.parametrize("what", ["a commit's list of changes", "contents", "the hashes of a new array"])
def test_D6_what_a_new_record_refers_to_is_read_with_care(disk: BadDisk, what: str) -> None:  # noqa: F811
    """A record that was acknowledged is not given up for a bad block. Of older ones only the list is needed."""
    forged = Forged(Medium("file", disk.behind))
    for durable_by in ("", "the next record", "the marker"):
        older = durable_by != ""
        forged.again()
        records = [Record([extent(forged.image, forged.at + 8 * PAGE, b"x" * 2 * PAGE)], 0, overflow=LIST)]
        if older:
            records.append(Record([run(forged.at, b"y" * 64)], int(durable_by == "the next record")))
        forged.save(records)
        if durable_by == "the marker":
            forged.image.bytes[2048:2064] = marker(forged.image, forged.image.word(HEADER["sequence"]) + 1)
            forged.image.save()
        place = {"a": LIST, "c": forged.at + 9 * PAGE, "t": forged.at + 10 * PAGE}[what[0]]
        bad = (REGION + place) // PAGE
        disk.spoil("forged.pm", bad)

        def use(adopted: bool = older and what[0] != "a", bad: int = bad) -> None:
            def opened(mode: Any, exclusive: bool) -> pmstore.Store:
                return pmstore.open(disk.mount / "forged.pm", mode, media="file", exclusive=exclusive)

            for mode, exclusive in (("r", False), ("r", True), ("r+", True)):
                if adopted:
                    with opened(mode, exclusive) as store:
                        assert store.sequence == forged.image.word(HEADER["sequence"]) + 2
                    continue
                said = refused(partial(opened, mode, exclusive))
                assert not exclusive or (what in said and f"offset {bad * PAGE} " in said)

        in_child(use)


def test_D6_without_the_marker_a_torn_record_ends_the_log(disk: BadDisk) -> None:  # noqa: F811
    """The marker is in the page of a header that can't be read, and says nothing of the first commit."""
    forged = Forged(Medium("file", disk.behind))
    forged.image.set_header(sequence=0)
    ((place, _),) = forged.save([Record([run(forged.at, b"x" * 64)], 0)])
    flip(forged.image, place + 100)
    forged.rehash(forged.image.bytes[REGION:][forged.array])
    forged.image.save()
    disk.spoil("forged.pm", 0)

    def use() -> None:
        for mode in ("r", "r+"):
            with pmstore.open(disk.mount / "forged.pm", mode, media="file", exclusive=True) as store:  # type: ignore
                assert store.sequence == 0

    in_child(use)


def test_a_reader_needs_the_log_of_a_living_store_up_to_its_last_record(disk: BadDisk) -> None:  # noqa: F811
    """It reads ahead, by more and more."""
    pmstore.open(disk.behind / "s.pm", "x", media="file").close()
    path, first = disk.mount / "s.pm", Image(disk.behind / "s.pm").log_offset // PAGE

    def use() -> None:
        with pmstore.open(path, "r+", media="file") as store:
            for i in range(8):
                disk.spoil("s.pm")
                store["n"] = i
                store.commit()
                end = first + store.stats().log_used // PAGE
                disk.spoil("s.pm", *range(end, end + 64))
                with pmstore.open(path, "r") as reader:
                    assert reader["n"] == i
            for page in (first, end - 1):
                disk.spoil("s.pm", page)
                refused(lambda: pmstore.open(path, "r"), "cannot read the log", f"offset {page * PAGE} ")
            disk.spoil("s.pm")

    in_child(use)
