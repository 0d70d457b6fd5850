"""What records of the log refer to, on blocks that the disk can't read."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.conftest import Medium
from tests.core.test_unreadable import disk, in_child, page_of, refused  # noqa: F401
from tests.support import shim
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


def lost_before_a_sync(directory: str) -> None:
    """Run in a child with the shim. A commit whose changes are listed in free pages is stopped before one of its syncs,
    while the disk loses the list.
    """
    losing = BadDisk(Path(directory))
    path, name = losing.behind / "store.pm", losing.mount / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["x"], store["space"] = np.zeros((250, 512)), np.zeros(200_000)
        store.commit()
        free = page_of(store, "space")
        del store["space"]
    before, size = path.read_bytes(), path.stat().st_size

    def commit(sync: int) -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        store = pmstore.open(name, "r+", media="file", durability="async", max_size=size)
        store["x"] += 1
        shim.begin(shim.FDATASYNC, shim.STOP, 0, sync)
        refused(store.commit, "a commit's list of changes", "offset")

    try:
        ended = []
        for sync in range(1, 9):
            path.write_bytes(before)
            child = os.fork()
            if not child:
                with contextlib.suppress(AssertionError, pytest.fail.Exception):
                    commit(sync)
                    os._exit(0)
                os._exit(1)
            assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
            with open(name, "r+b") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            losing.spoil("store.pm", *range(free, free + 200))
            os.kill(child, signal.SIGCONT)
            ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            losing.spoil("store.pm")
            if ended[-1] != 1:
                break
        assert ended[-1] == 0, ended
    finally:
        losing.close()


@pytest.mark.no_sanitizer  # which is preloaded too
def test_D7_a_list_of_changes_is_lost_before_it_is_applied(
    disk: BadDisk,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
    fault_library: Path,
) -> None:
    shim.call(fault_library, lost_before_a_sync, tmp_path_factory.mktemp("lost"))
