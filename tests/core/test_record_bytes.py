"""The bytes of a record on their way to the log: gathered in one piece, in parts, or by way of a small stage."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._core import lib
from pmstore.testing._store.recording import Recorder, Recording
from tests.conftest import Medium
from tests.support.images import HEADER, OVERFLOW, PAGE, RECORD_MAGIC, REGION, body_hash, crc32c
from tests.support.logs import WHOLE_HEAD, items_of

WRITES = (lib.PM_EVENT_WRITE, lib.PM_EVENT_STREAM, lib.PM_EVENT_STORE)


class Written:
    """A commit's record after a header of the store, and how often each byte was written for it."""

    def __init__(self, file: bytearray, header: dict[str, int], place: int, times: np.ndarray) -> None:
        self.file, self.header, self.place, self.times = file, header, place, times
        names = "magic kind pages sequence salt length body hash sum moment behind crc"
        self.head = dict(zip(names.split(), WHOLE_HEAD.unpack_from(file, place), strict=True))
        self.items = list(items_of(file, place + 64, self.head["body"]))
        self.overflow = self.items[0][0] == OVERFLOW

    def is_whole(self, unit: int, behind: int) -> None:
        """Its fields and hashes are right, and no byte was written twice or not at all."""
        file, head, place, salt = self.file, self.head, self.place, self.header["salt"]
        body, length = place + 64, head["length"]
        assert head["hash"] == body_hash(bytes(file[body : body + head["body"]]), body, salt)
        assert head["crc"] == crc32c(bytes(file[place : place + 60]), place)
        assert (head["magic"], head["kind"], head["salt"]) == (RECORD_MAGIC, 1, salt)
        assert head["pages"] == (unit == PAGE) and length == -(-(64 + head["body"]) // unit) * unit
        assert 1 <= head["behind"] <= min(behind, head["sequence"] - self.header["sequence"])
        assert not any(file[body + head["body"] : place + length]), "behind the body are zeros"
        assert (self.times[place : place + length] == 1).all()
        if self.overflow:
            ((_, offset, size, data),) = self.items
            at = REGION + offset
            items = bytes(file[at : at + size])
            assert int.from_bytes(data, "little") == body_hash(items, at, salt)
            assert (self.times[at : at + size] == 1).all()


def commits(recording: Recording) -> Iterator[Written]:
    """The record of each commit, when it has returned."""
    file, times = bytearray(recording.base), np.zeros(1 << 24, "u1")
    head, header = 0, {}
    for number in range(len(recording)):
        event = recording.event(number)
        if event.kind == lib.PM_EVENT_GROW:
            file += bytes(event.offset - len(file))
        elif event.kind == lib.PM_EVENT_COMMIT_BEGIN:
            header = {name: int.from_bytes(file[at : at + 8], "little") for name, at in HEADER.items()}
        elif event.kind == lib.PM_EVENT_COMMIT_END:
            written = Written(file, header, header["log_offset"] + head, times)
            assert written.head["sequence"] == event.offset
            yield written
            head += written.head["length"]
            times[: header["log_offset"]] = 0
            header = {}
        elif event.kind in WRITES:
            file[event.offset : event.offset + event.length] = event.data
            times[event.offset : event.offset + event.length] += 1
        if not header and event.kind in WRITES and event.offset in (0, PAGE):  # another log begins
            times[:] = head = 0


def changed(rng: random.Random, array: np.ndarray) -> None:
    """Changes some pages of the array, a few elements of each or all; sometimes those beside each other."""
    first = rng.randrange(len(array))
    rows = rng.choice(([first], range(first, len(array)), range(0, len(array), rng.randint(1, 9))))
    for row in rows:
        array[row, rng.randrange(512) if rng.random() < 0.3 else slice(rng.randrange(512), None)] += 1


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_I6_a_record_is_written_once_with_the_bytes_that_are_hashed(medium: Medium, durability: str) -> None:
    if durability == "async" and medium.name == "memory":
        pytest.skip("there every commit is durable")
    for seed in range(1, 7):
        rng = random.Random(seed)
        path = medium.directory / f"{seed}.pm"
        with Recorder(path, medium.name, seed=seed, pace=0) as recorder:
            recorder.trace.sync_ranges(True)
            store = pmstore.open(path, durability=durability)  # type: ignore[arg-type]
            array = store.create_array("x", (64, 512))
            store.commit()
            for _ in range(12):
                changed(rng, array)
                store.commit()
            expected = array.copy()
            store._drop(discard=True)
        found = 0
        for written in commits(recorder.recording):
            written.is_whole(PAGE if medium.name == "file" else 64, 1 if durability == "sync" else 13)
            found += 1
        assert found == 13
        with pmstore.open(path, "r+", media=medium.name, verify=True) as store:  # type: ignore[call-overload]
            assert np.array_equal(store["x"], expected)


def test_what_a_failed_sync_leaves_in_the_file_is_recorded(tmp_path: Path) -> None:
    """The kernel has the bytes, and may write them to the disk at any time."""
    for number in range(1, 20):
        path = tmp_path / f"{number}.pm"
        with Recorder(path, "file", pace=0) as recorder:
            recorder.trace.sync_ranges(True)
            store = pmstore.open(path)
            recorder.trace.fail(lib.PM_OPERATION_SYNC, number, errno.EIO)
            with contextlib.suppress(pmstore.StoreIOError):
                for value in range(4):
                    store["x"] = np.full(700, value)
                    store.commit()
            failed = recorder.trace.operations()[1]
            recorder.trace.fail(0, 0, 0)
            store._drop(discard=True)
        file = bytearray(recorder.recording.base)
        for event in map(recorder.recording.event, range(len(recorder.recording))):
            if event.kind in WRITES:
                file[len(file) :] = bytes(max(0, event.offset - len(file)))
                file[event.offset : event.offset + event.length] = event.data
        found = path.read_bytes()
        assert found == file + bytes(len(found) - len(file)), number
        if not failed:
            break
    assert number > 4


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_I6_a_body_in_free_pages_is_written_once_with_the_bytes_that_are_hashed(
    medium: Medium, durability: str
) -> None:
    """The log can't grow for it: the file has its largest size."""
    for seed in (1, 2, 3):
        path = medium.directory / f"{seed}.pm"
        with pmstore.open(path, media=medium.name) as store:  # type: ignore[call-overload]
            store["x"] = np.zeros((250, 512))
            store["space"] = np.zeros(200_000)
            store.commit()
            del store["space"]
        size = path.stat().st_size
        with Recorder(path, medium.name, seed=seed, pace=0) as recorder:
            recorder.trace.sync_ranges(True)
            store = pmstore.open(path, durability=durability, max_size=size)  # type: ignore[arg-type]
            array = store["x"]
            for number in range(4):
                array[number:170, :] += 1
                array[180 + number, 7] = number
                store.commit()
            expected = array.copy()
            store._drop(discard=True)
        overflows = 0
        for written in commits(recorder.recording):
            overflows += written.overflow
            written.is_whole(PAGE if medium.name == "file" else 64, 1)
        assert overflows == 4
        with pmstore.open(path, "r+", media=medium.name, verify=True) as store:  # type: ignore[call-overload]
            assert np.array_equal(store["x"], expected)


def test_ranges_that_touch_are_one_item(medium: Medium) -> None:
    """Also over the end of a page. A range that does not begin where the one before it ends is another one."""
    path = medium.directory / "store.pm"
    with Recorder(path, medium.name, pace=0) as recorder:
        store = pmstore.open(path)
        array = store.create_array("x", (64, 512))
        store.commit()
        array[3, -8:] = array[4, :8] = 1
        store.commit()
        array[10, -8:] = array[12, :8] = 1
        store.commit()
        store._drop(discard=True)
    unit = 64 if medium.name == "memory" else PAGE
    sizes = [[size for _, _, size, _ in written.items] for written in commits(recorder.recording)]
    table = 512 if medium.name == "file" else 64
    assert sizes[1:] == [[2 * unit, table], [unit, unit, table]]
