"""Each request of the core for memory is refused, once or from then on: the call raises OutOfMemoryError and nothing is
lost, or it does without. The refusals come from tests/support/faults.c, preloaded into a child process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import hash64
from pmstore.testing._store.recording import Recorder
from tests.conftest import LONGER, MEMORY
from tests.core.test_trackers import committed
from tests.support import shim as shims
from tests.support.images import (
    DIRECT,
    HEADER,
    LOGGED,
    MAP,
    NODE,
    OVERFLOW,
    PAGE,
    REGION,
    ROOT,
    Image,
    body_hash,
    item,
    keyed_checksum,
)
from tests.support.places import offset_of
from tests.support.shim import FROM_THEN, ONCE, begin_memory, count, hits
from tests.support.snapshots import Snapshot, difference, snapshot

WRITER_BYTE, BEGUN_BYTE = 1 << 62, (1 << 62) + (1 << 60) + 2
MARKER = 2048  # the durable marker, in the file

pytestmark = pytest.mark.no_sanitizer  # which is preloaded too

MOST = 400  # requests in one workload; far more than there are
ALL = 20  # of so many first ones each is refused, of the others, which come from arrays that are alike, every eighth

CONFIGURATIONS = [("file", "sync"), ("memory", "sync"), ("file", "async")]

# Each is a list of steps; after each of them comes a commit.
Step = Callable[[pmstore.Store], object]


def change(name: str, value: float, first: int = 0, last: int | None = None, every: int = 1) -> Step:
    def step(store: pmstore.Store) -> None:
        store[name][first:last:every] = value

    return step


def put(name: str, value: Any) -> Step:
    return lambda store: store.__setitem__(name, value)


def many(value: float) -> Step:
    """More candidates, new extents and living arrays than there is room for at first."""

    def step(store: pmstore.Store) -> None:
        for i in range(70):
            store[f"many/{i}"] = np.full(1 + 7 * i, value)

    return step


def some_only(store: pmstore.Store) -> None:
    with store.transaction(only=[store["large"][100:200]]):
        store["large"][100:200] = 8


def looks_for_changes(store: pmstore.Store) -> None:
    """Find an array's changes, as is done for a store that was forgotten."""
    store["large"].fill(3)
    assert len(store._catalog.core.pending()) == 1


WORKLOADS: dict[str, list[Step]] = {
    "values": [
        put("value", {"k": 2}),
        put("text", "y" * 20_000),
        lambda store: store.create_list("list").extend(range(300)),
        lambda store: store.pop("value"),
    ],
    "many": [many(1), many(2), lambda store: [store.pop(f"many/{i}") for i in range(0, 70, 2)], many(3)],
    "whole": [
        change("huge", 1.0),
        change("huge", 2.0),
        change("huge", 3.0),
        put("large", np.ones(3000)),
        change("huge", 4.0, 0, 9),
    ],
    "pages": [
        change("huge", 1.0, every=700),
        some_only,
        change("huge", 2.0, every=512),
        put("grown", np.arange(300_000.0)),
        change("grown", 5.0, every=3),
    ],
    "looks": [
        lambda store: store.check(),
        looks_for_changes,
        lambda store: store.release(),
        change("large", 4.0),
    ],
}


def prepare(path: Path, medium: str) -> None:
    """A store with a log to replay."""
    with pmstore.open(path, "x", media=medium) as store:  # type: ignore[call-overload]
        store["large"] = np.arange(3000.0)
        store["huge"] = np.zeros(150_000)
        store["value"] = {"k": 1}
    store = pmstore.open(path, "r+", media=medium)  # type: ignore[call-overload]
    store["large"][5] = -5
    store["huge"][::900] = -5
    store["new"] = np.arange(9000.0)
    store.commit()
    store._drop(discard=True)


class Run:
    """A workload in which one request for memory is refused, and which goes on where it was stopped."""

    def __init__(self, path: Path, options: dict[str, Any], steps: list[Step]) -> None:
        self.path, self.options, self.steps = path, options, steps
        self.image = path.read_bytes()
        self.states: list[Snapshot] = []
        begin_memory(ONCE, 1 << 30)
        with self.opened() as store:
            self.opening = count()
            shims.end()
            self.states.append(snapshot(store))
            for step in steps:
                step(store)
                store.commit()
                self.states.append(snapshot(store))

    @contextmanager
    def opened(self) -> Iterator[pmstore.Store]:
        self.path.write_bytes(self.image)
        with pmstore.open(self.path, "r+", **self.options) as store:
            yield store

    def tries(self, manner: int, at: int) -> bool:
        """False if there are not so many requests."""
        self.path.write_bytes(self.image)
        begin_memory(manner, at)
        refused = 0
        while True:
            try:
                store = pmstore.open(self.path, "r+", **self.options)
                break
            except pmstore.OutOfMemoryError:
                refused += 1
                shims.end()
        done = 0
        for number, step in enumerate(self.steps, 1):
            begun = False
            while done < number:
                try:
                    if not begun:
                        step(store)
                    begun = True
                    store.commit()
                    done = number
                except pmstore.OutOfMemoryError:
                    refused += 1
                    shims.end()
                    if not begun:  # the step may have been left in the middle
                        store.rollback()
                        self.same(store, done)
                    elif at % 2:  # or what is pending still is, and is committed by the next turn of the loop
                        store.rollback()
                        self.same(store, done)
                        begun = False
            self.same(store, done)
        while True:
            try:
                store.close()
                break
            except pmstore.OutOfMemoryError:
                refused += 1
                shims.end()
        happened = hits() > 0
        shims.end()
        assert refused <= 1, "a request was refused that the call before had made good"
        with pmstore.open(self.path, "r", verify=True, media=self.options["media"]) as store:
            self.same(store, len(self.steps))
            assert store.check().ok
        return happened

    def same(self, store: pmstore.Store, number: int) -> None:
        with shims.paused():
            found = snapshot(store)
        assert found == self.states[number], difference(found, self.states[number])


def every_refusal(folder: str, workload: str, medium: str, durability: str) -> None:
    path = Path(folder) / "store.pm"
    prepare(path, medium)
    run = Run(path, {"media": medium, "durability": durability}, WORKLOADS[workload])
    first = 1 if workload == "values" or LONGER > 1 else run.opening + 1  # all workloads open the same store
    # In make test each file refuses every third request, and the three of a workload together refuse all; from then on
    # every ninth, and the three together every third.
    begin = 0 if LONGER > 1 else CONFIGURATIONS.index((medium, durability))
    for manner, step in ((ONCE, 1), (FROM_THEN, 1)) if LONGER > 1 else ((ONCE, 3), (FROM_THEN, 9)):
        for at in [*range(first, run.opening + ALL), *range(run.opening + ALL, MOST, 8)][begin * step // 3 :: step]:
            try:
                if not run.tries(manner, at):
                    break
            except BaseException as error:
                raise AssertionError(f"{workload}, {medium}, {durability}, manner {manner}: request {at}") from error
        else:
            raise AssertionError("no end of requests")
        print(at)


@pytest.mark.longer
@pytest.mark.parametrize(("medium", "durability"), CONFIGURATIONS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_whatever_request_for_memory_is_refused(
    workload: str,
    medium: str,
    durability: str,
    fault_library: Path,
    directory: Path,
) -> None:
    if medium == "memory" and not MEMORY.is_dir():
        pytest.skip("no /dev/shm")
    said = shims.call(fault_library, every_refusal, directory, workload, medium, durability)
    once, from_then = map(int, said.split())  # the first requests that there were not
    assert once > 8 and from_then > 8 // (1 if LONGER > 1 else 2)


def overflowed(path: Path) -> None:
    """A store at work whose log has one record, with its items in free pages: they make ones of zeros."""
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.zeros(1000)
    before = Image(path)
    with pmstore.open(path, "r+", media="file") as store:
        store["a"][:] = 1
    after, place = Image(path), before.region_size - 16 * PAGE
    images = [bytes(image.bytes[REGION:]) for image in (before, after)]
    pages = [[image[at : at + PAGE] for at in range(0, place, PAGE)] for image in images]
    changes = [(i * PAGE, new) for i, (old, new) in enumerate(zip(*pages, strict=True)) if old != new]
    items = b"".join(item(LOGGED, at, PAGE, new) for at, new in changes)
    before.bytes[REGION + place : REGION + place + len(items)] = items
    sound = body_hash(items, REGION + place, 77)
    before.set_log(item(OVERFLOW, place, len(items), struct.pack("<QQ", sound, 0)), 77)
    newest = struct.pack("<Q", before.word(HEADER["sequence"]) + 1)
    before.bytes[MARKER : MARKER + 16] = newest + struct.pack("<Q", keyed_checksum(hash64(newest), 77, before.store_id))
    before.save()


def each_request(least: int) -> Iterator[int]:
    """Numbers from 1 on. The caller refuses the request for memory that has the number. The last number, more than
    `least`, is the first that no request had."""
    for at in range(1, MOST):
        yield at
        if not hits():
            break
    assert least < at < MOST - 1, at


def refused_to_a_reader(folder: str) -> None:
    late, whole = Path(folder) / "overflowed.pm", Path(folder) / "slots.pm"
    overflowed(late)
    writer = os.open(late, os.O_RDWR)
    for byte in (WRITER_BYTE, BEGUN_BYTE):
        fcntl.fcntl(writer, fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    with pmstore.open(whole, "x", media="file") as store:
        a = store.create_array("a", 140_000)
        for _ in range(4):  # it has two slots, and the second one is current
            store.commit()
            a += 0.25
    for path in (late, whole):
        for at in each_request(4):
            begin_memory(ONCE, at)
            with contextlib.suppress(pmstore.OutOfMemoryError), pmstore.open(path, "r") as store:
                assert (store.read("a") == 1).all(), (path.name, at)
                store.wait(timeout=0)
            shims.end()


def test_a_reader_that_lacks_memory_shows_no_earlier_commit(fault_library: Path, directory: Path) -> None:
    shims.call(fault_library, refused_to_a_reader, directory)


def refused_to_a_late_reader(folder: str) -> None:
    path = Path(folder) / "late.pm"
    with pmstore.open(path, "x", media="file") as store:
        store.create_array("a", 100_000, fill_value=1.0, writeable=False)
    with pmstore.open(path, "r+", media="file") as store:
        for at in each_request(4):
            with pmstore.open(path, "r") as reader:
                store["b"] = at
                store.commit()
                begin_memory(ONCE, at)
                with contextlib.suppress(pmstore.OutOfMemoryError):
                    assert (reader["a"] == 1).all()
                shims.end()


def test_a_reader_that_comes_late_and_lacks_memory_says_so(fault_library: Path, directory: Path) -> None:
    """It looks whether a later commit still has the array that it maps."""
    shims.call(fault_library, refused_to_a_late_reader, directory)


def refused_to_a_recorder(folder: str, durability: Any) -> None:
    path = Path(folder) / "recorded.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.zeros(20_000)
        store.commit()
        store["a"][:] = -1
        store.commit()
        killed = path.read_bytes()
    for at in each_request(12):
        path.write_bytes(killed)
        begin_memory(ONCE, at)
        with contextlib.suppress(pmstore.OutOfMemoryError):
            with Recorder(path, "file") as recorder:
                store = pmstore.open(path, "r+", durability=durability)
                try:
                    store["a"][:] = at
                    store.commit()
                finally:
                    store._drop(discard=True)
            assert np.full(512, float(at)).tobytes() in recorder.recording.data
        shims.end()


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_a_recording_that_lacks_memory_says_so(fault_library: Path, directory: Path, durability: str) -> None:
    shims.call(fault_library, refused_to_a_recorder, directory, durability)


REPLACEMENTS: list[Callable[[pmstore.Store], object]] = [
    lambda store: store.update({"g/x": 5}),
    lambda store: store.pop("g/x"),
    lambda store: store.group("g").clear(),
]


def refused_beside_a_reader(folder: str) -> None:
    for number, replace in enumerate(REPLACEMENTS):
        for at in each_request(1):
            path = Path(folder) / f"{number}-{at}.pm"
            with pmstore.open(path, "x", media="file") as store:
                store.create_array("g/x", 5000, fill_value=1.0, writeable=False)
            with pmstore.open(path, "r+", media="file") as store, pmstore.open(path, "r") as reader:
                x = reader["g/x"]
                begin_memory(ONCE, at)
                try:
                    replace(store)
                except pmstore.OutOfMemoryError:
                    assert (store["g/x"] == 1).all(), (number, at)
                shims.end()
                for i in range(4):  # new arrays take whatever space is free
                    store.commit()
                    store[f"y{i}"] = np.full(5000, 7.0)
                store.commit()
                assert (x == 1).all(), (number, at)


def test_I9_what_readers_map_stays_when_memory_to_note_it_is_refused(fault_library: Path, directory: Path) -> None:
    shims.call(fault_library, refused_beside_a_reader, directory)


def refused_with_a_declaration(folder: str) -> None:
    for at in each_request(1):
        path = Path(folder) / f"{at}.pm"
        with pmstore.open(path, "x", media="file") as store:
            store.update(a=np.zeros(9000), b=np.zeros(9000))
        with pmstore.open(path, "r+", media="file") as store:
            a, b = store["a"], store["b"]
            begin_memory(ONCE, at)
            with contextlib.suppress(pmstore.OutOfMemoryError), store.transaction(only=[a]):
                a[:] = 1
            shims.end()
            with store.transaction(only=[b]):
                b[:] = 2
            store._drop(discard=True)
        with pmstore.open(path, "r") as store:
            assert (store["a"] == 1).all() and (store["b"] == 2).all(), at


def test_what_a_refused_commit_declared_is_in_the_next(fault_library: Path, directory: Path) -> None:
    shims.call(fault_library, refused_with_a_declaration, directory)


def refused_to_many(folder: str) -> None:
    """A commit of more arrays than any before lacks memory. They are taken back, and the next one has few changes."""
    for at in each_request(1):
        with pmstore.open(Path(folder) / f"{at}.pm", "x", media="file") as store:
            held = [store.create_array(f"few/{i}", 600) for i in range(10)]
            store.commit()
            more = [store.create_array(f"more/{i}", 600) for i in range(40)]
            begin_memory(ONCE, at)
            with contextlib.suppress(pmstore.OutOfMemoryError):
                store.commit()
            shims.end()
            store.rollback()
            del more
            for i, array in enumerate(held):
                array[:] = i
            store.commit()
            assert all((store[f"few/{i}"] == i).all() for i in range(10)), at


def test_a_small_commit_after_a_large_one_that_lacked_memory(fault_library: Path, directory: Path) -> None:
    shims.call(fault_library, refused_to_many, directory)


def refused_to_late_syncs(folder: str) -> None:
    path = Path(folder) / "late.pm"
    pmstore.open(path, "x", media="file").close()
    shims.watch_memory()
    for at in each_request(4):
        begin_memory(ONCE, at)
        with contextlib.suppress(pmstore.OutOfMemoryError):
            store = pmstore.open(path, "r+", media="file", durability="async", sync_interval=float("inf"))
            shims.end()
            store["n"] = at
            store.commit()
            assert store.stats().durable_sequence < store.sequence, at
            store.close()
            del store
        shims.end()
        assert shims.blocks_held() == 0, at


def test_a_store_that_lacks_memory_for_late_syncs_is_not_opened(fault_library: Path, directory: Path) -> None:
    shims.call(fault_library, refused_to_late_syncs, directory)


def refused_to_two_threads(folder: str) -> None:
    """Two threads compare an array of so many pages, most of which have changed."""
    os.environ["PMSTORE_TRACKER"] = "compare"
    with pmstore.open(Path(folder) / "store.pm", "x", media="file") as store:
        w = store.create_array("w", (1500, PAGE // 8))
        store.commit()
        for at in each_request(1):
            w[::2, 0] = at
            begin_memory(ONCE, at)
            with contextlib.suppress(pmstore.OutOfMemoryError):
                store.commit()
            shims.end()
            store.commit()
            np.testing.assert_array_equal(committed(store)["w"], w, str(at))


def test_a_comparison_by_two_threads_that_lacks_memory_changes_nothing(fault_library: Path, directory: Path) -> None:
    shims.call(fault_library, refused_to_two_threads, directory)


def refused_to_a_mark(folder: str) -> None:
    with pmstore.open(Path(folder) / "store.pm", "x", media="file") as store:
        w = store.create_array("w", 9000)
        store.commit()
        for at in each_request(1):
            begin_memory(ONCE, at)
            with contextlib.suppress(pmstore.OutOfMemoryError):
                store.mark_dirty(w)
                assert not hits(), at  # a mark that was not made
            shims.end()


def test_a_mark_without_memory_to_note_it_is_an_error(fault_library: Path, directory: Path) -> None:
    shims.call(fault_library, refused_to_a_mark, directory)


def refused_to_a_reversal(folder: str) -> None:
    with pmstore.open(Path(folder) / "store.pm", "x", media="file") as store:
        numbers = store.create_list("numbers")
        numbers.extend(range(9))
        for at in each_request(1):
            expected = list(numbers)
            begin_memory(ONCE, at)
            with contextlib.suppress(pmstore.OutOfMemoryError):
                numbers.reverse()
                expected.reverse()
            shims.end()
            assert numbers == expected, at


def test_a_list_keeps_its_order_where_memory_to_reverse_it_is_refused(fault_library: Path, directory: Path) -> None:
    shims.call(fault_library, refused_to_a_reversal, directory)


def killed(path: Path, medium: str) -> dict[str, Any]:
    """A store with a log to replay, in which contents were written directly between changes of the same pages. Returns
    its contents."""
    with pmstore.open(path, "x", media=medium) as store:  # type: ignore[call-overload]
        store["old"] = np.zeros(9000)
        store["kept"] = np.zeros(9000)
    store = pmstore.open(path, "r+", media=medium)  # type: ignore[call-overload]

    before = offset_of(store, "old")
    store["old"][5] = store["kept"][5] = -5
    store.commit()
    del store["old"]
    store.commit()
    store["new"] = np.arange(9000.0)
    store.commit()
    assert offset_of(store, "new") == before
    store["new"][4500] = -5  # in another page
    store.commit()
    contents = {name: np.array(array) for name, array in store.items()}
    store._drop(discard=True)
    assert [kind for kind, offset, _ in Image(path).items() if offset // PAGE == before // PAGE] == [LOGGED, DIRECT]
    return contents


def refused_to_a_recovery(folder: str, medium: str, how: str) -> None:
    path = Path(folder) / "killed.pm"
    contents = killed(path, medium)
    image = path.read_bytes()
    mode, exclusive = how.partition(" ")[::2]
    options: dict[str, Any] = {"mode": mode, "media": medium} | ({"exclusive": True} if exclusive else {})
    for at in each_request(3):
        path.write_bytes(image)
        begin_memory(ONCE, at)
        with contextlib.suppress(pmstore.OutOfMemoryError), pmstore.open(path, **options) as store:
            shims.end()
            same(store, contents)
        shims.end()
        with pmstore.open(path, **options) as store:
            same(store, contents)
            assert store.check().ok


def same(store: pmstore.Store, contents: dict[str, Any]) -> None:
    assert set(store) == set(contents)
    for name, array in contents.items():
        for found in (store[name], store.read(name)):
            np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("medium", ["file", "memory"])
@pytest.mark.parametrize("how", ["r+", "r exclusive", "r"])
def test_a_recovery_that_lacks_memory_mixes_no_commits(
    how: str, medium: str, fault_library: Path, directory: Path
) -> None:
    if medium == "memory" and not MEMORY.is_dir():
        pytest.skip("no /dev/shm")
    shims.call(fault_library, refused_to_a_recovery, directory, medium, how)


def refused_to_a_salvage(folder: str, kinds: tuple[int, ...]) -> None:
    """kinds: of the pages that are damaged."""
    path, target = Path(folder) / "store.pm", Path(folder) / "new.pm"
    with pmstore.open(path, "x", media="memory") as store:
        store.update({f"{i:04}" + "x" * 300: i for i in range(700)})
        store["array"] = np.arange(100)
    image = Image(path)
    for page in [page for page in image.pages(*kinds) if not image.is_leaf(page)]:
        image.bytes[REGION + page + 40] ^= 1
    image.save()
    for at in each_request(9):
        begin_memory(ONCE, at)
        with contextlib.suppress(pmstore.OutOfMemoryError, MemoryError):
            pmstore.salvage(path, target)
        shims.end()
        if target.exists():
            with pmstore.open(target, "r") as store:
                assert len(store) == 701 and store.check().ok, at
            target.unlink()


@pytest.mark.parametrize("kinds", [(NODE,), (ROOT,), (MAP,)], ids=str)
def test_a_salvage_that_lacks_memory_leaves_nothing_out(
    fault_library: Path, directory: Path, kinds: tuple[int, ...]
) -> None:
    shims.call(fault_library, refused_to_a_salvage, directory, kinds)
