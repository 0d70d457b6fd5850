"""A writer begins while another one is at any of its operations: nothing that it does late changes anything."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore.archive import _index
from pmstore.archive._archive import Archive
from pmstore.archive._objects import Buffer
from pmstore.archive._sources import Sources
from pmstore.archive._steps import Steps
from tests.archive.stepping import Memory, archived, stepping

pytest.importorskip("numcodecs")


class Watched(Memory):
    """A place that calls a function before each operation, with its name and the object's."""

    def __init__(self, objects: dict[str, bytes], before: Callable[[str], None]) -> None:
        super().__init__(objects)
        self.before = before

    def put(self, name: str, data: Sequence[Buffer]) -> None:
        self.before(f"put {name}")
        super().put(name, data)

    def create(self, name: str, data: Sequence[Buffer]) -> None:
        self.before(f"create {name}")
        if name in self.objects:
            Memory(self.objects).create(name, data)
        super().put(name, data)

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        self.before(f"get {name}")
        return super().get(name, at, count)

    def list(self, folder: str) -> list[str]:
        self.before(f"list {folder}")
        return super().list(folder)

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        self.before(f"delete {names}")
        super().delete(names)


def changes(store: pmstore.Store) -> None:
    store["x"] = np.random.default_rng(store.sequence).random(
        1000
    )  # so many that bases follow one another, and parts go
    store["step"] = store.sequence
    store.commit()


def flush(store: pmstore.Store, steps: Steps, count: int = 1) -> int:
    """Versions, each in a flush of its own. Returns the newest that the place has, as the drain says."""
    for _ in range(count):
        changes(store)
        archived(steps)
    return steps.targets[0].last


def require_whole(objects: dict[str, bytes], versions: Iterable[int]) -> Archive:
    found = Archive(Sources([Memory(objects)]))
    report = found.verify()
    assert report.ok, str(report)
    assert set(versions) <= set(found)
    for version in found:
        assert found[version]["step"] == version - 1
    return found


def test_I25_merges_that_an_earlier_release_shifted_are_read_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed before it merged, and merged the last flushes then, whichever numbers they had."""
    monkeypatch.setattr(_index, "_FAN", 100)
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store:
        with stepping(store, place) as steps:
            flush(store, steps, 4)
            monkeypatch.setattr(_index, "_FAN", 3)
            writer = steps.targets[0]._writer
            writer._replace(1, 4, [row for _, rows in writer.index.segments[1:] for row in rows])
        with stepping(store, place) as steps:
            flush(store, steps, 4)
            assert [name[10:25] for name in place.list("index")] == [
                "01-000000000001", "02-000000000004", "05-000000000005", "06-000000000006", "07-000000000007",
                "08-000000000008",
            ]  # fmt: skip
            flush(store, steps)
        assert place.list("index") == ["000000000001-000000000009-000000"]
    require_whole(place.objects, range(1, 10))


def test_I26_a_tagged_version_that_an_older_writer_lists_again_has_its_parts(tmp_path: Path) -> None:
    """The tag comes while the older writer removes the version. It lists the version again so late that a newer writer
    has begun, and has swept the parts that no row named."""
    objects: dict[str, bytes] = {}
    hooks: dict[str, Callable[[], None]] = {}

    def before(operation: str) -> None:
        if (hook := hooks.pop(operation, None)) is not None:
            hook()

    with pmstore.open(tmp_path / "store.pm") as store, contextlib.ExitStack() as opened:
        name = "create index/000000000004-000000000004-00000"
        hooks[name + "1"] = lambda: Archive(Sources([Memory(objects)])).tag("best", 4)
        hooks[name + "2"] = lambda: flush(store, opened.enter_context(stepping(store, Memory(objects))), 2) and None
        older = opened.enter_context(stepping(store, Watched(objects, before), keep=2))
        with pytest.raises(pmstore.ArchiveConflictError):
            flush(store, older, 20)
        assert not hooks
        with stepping(store, Memory(objects)) as again:
            flush(store, again, 2)
    assert require_whole(objects, [4]).tags == {"best": 4}


def taken_over(tmp_path: Path, first: int, second: int, keep: tuple[int | None, int | None]) -> int:
    """A newer writer begins before an operation of the older one, which waits until the newer one has done some, and
    then goes on. Returns the number of operations of the older writer. A third one begins at the end."""
    objects: dict[str, bytes] = {}
    counts = [0, 0]
    held, go = threading.Event(), threading.Event()
    durable: set[int] = set()

    def in_older(operation: str) -> None:
        counts[0] += 1
        if counts[0] == first:
            held.set()
            assert go.wait(60)

    def in_newer(operation: str) -> None:
        counts[1] += 1
        if counts[1] == second:
            release()

    with pmstore.open(tmp_path / f"{first}-{second}.pm") as store:

        def older() -> None:
            with (
                contextlib.suppress(pmstore.ArchiveConflictError),
                stepping(store, Watched(objects, in_older), keep=keep[0]) as steps,
            ):
                for _ in range(5):
                    durable.add(flush(store, steps))
            held.set()

        def release() -> None:
            go.set()
            thread.join()

        thread = threading.Thread(target=older)
        thread.start()
        assert held.wait(60)
        with (
            contextlib.suppress(_index.SupersededError),  # the other one may begin later; nothing else ends this one
            stepping(store, Watched(objects, in_newer), keep=keep[1]) as steps,
        ):
            for _ in range(4):
                durable.add(flush(store, steps))
        release()
        if keep == (None, None):
            require_whole(objects, durable)
        elif "archive" in objects:
            require_whole(objects, [])
        with stepping(store, Memory(objects)) as steps:
            durable.add(flush(store, steps))
        require_whole(objects, durable if keep == (None, None) else [store.sequence])
    return counts[0]


@pytest.mark.parametrize("keep", [(None, None), (1, None), (1, 3)], ids=str)
def test_I24_I25_I26_a_takeover_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: tuple[int | None, int | None]
) -> None:
    monkeypatch.setattr(_index, "_FAN", 2)
    first = total = 1
    while first <= total:
        for second in (1000, 1, 7, 16):
            total = taken_over(tmp_path, first, second, keep)
        first += 1
    assert first > 40
