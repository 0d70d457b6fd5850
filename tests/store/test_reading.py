"""Mode "r" beside a writer, as users see it: refresh, read and wait."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _cli, _dump
from pmstore._snapshot import Snapshot
from pmstore._store import following, reading
from pmstore._values import values
from tests.conftest import run_in_fork
from tests.support.interrupting import signalled_at

Open = Callable[..., pmstore.Store]


@pytest.fixture
def writer(store: pmstore.Store) -> pmstore.Store:
    """A store with arrays in C order, in Fortran's order, and without axes."""
    store["a"] = np.arange(24.0).reshape(4, 3, 2)
    store["f"] = np.asfortranarray(store["a"])
    store["one"] = np.array(7.0)
    store.commit()
    return store


@pytest.fixture
def reader(writer: pmstore.Store) -> Iterator[pmstore.Store]:
    """The same store in mode "r"."""
    with pmstore.open(writer.path, "r") as reader:
        yield reader


PARTS = {
    "a list": [0, 2],
    "an array of indices": np.array([3, 0, 3]),
    "an array of one index": np.array([2]),
    "an index in an array": np.array(1),
    "a mask": np.array([True, False, True, False]),
    "a number": 2,
    "a negative number": np.int64(-1),
    "True": True,
    "a slice": np.s_[1:3],
    "a slice with a step": np.s_[::-2],
    "an ellipsis": ...,
    "a new axis": np.newaxis,
    "rows and columns": np.s_[1:3, 0],
    "two numbers": (1, 2),
    "indices of two axes": (np.array([0, 2]), np.array([1, 1])),
    "a number and indices": (1, np.array([2, 0])),
    "nothing": (),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_read_takes_the_same_part_as_numpy(reader: pmstore.Store, part: Any) -> None:
    expected = np.arange(24.0).reshape(4, 3, 2)[part]
    for found in reader.read(("a", part), ("f", part)):
        assert np.array_equal(found, expected) and np.shape(found) == expected.shape


def test_read_takes_parts_of_an_array_without_axes(reader: pmstore.Store) -> None:
    scalar, array = reader.read(("one", ()), ("one", ...))
    assert scalar == array == 7.0 and isinstance(scalar, np.floating) and isinstance(array, np.ndarray)
    assert reader.read(("one", np.newaxis)).shape == (1,)
    with pytest.raises(IndexError):
        reader.read(("one", 0))


def test_refresh_in_the_middle_of_an_iteration(writer: pmstore.Store, reader: pmstore.Store) -> None:
    """It goes on with the names of the commit with which it began."""
    for i in range(100):
        writer[f"n{i:02}"] = i
    writer.commit()
    reader.refresh()
    before, names = list(reader), iter(reader)
    first = next(names)
    del writer["n50"]
    writer.commit()
    assert reader.refresh() == writer.sequence and "n50" not in reader
    assert [first, *names] == before


def test_wait_where_nothing_can_come(writer: pmstore.Store, reader: pmstore.Store) -> None:
    for after in (2**63, 2**64, 10**30):
        assert reader.wait(after, timeout=0) == (writer.sequence, "timeout")
    assert reader.wait(-1, timeout=0) == (writer.sequence, "commit")
    with pytest.raises(TypeError, match=r"after is a sequence number, not 0\.5: wait\(timeout=0\.5\) waits"):
        reader.wait(0.5)  # type: ignore[arg-type]
    reader.close()
    for after in (None, 0, writer.sequence):
        with pytest.raises(pmstore.ClosedStoreError):
            reader.wait(after, timeout=0)


@pytest.mark.parametrize("which", ["writer", "reader"])
def test_signals_end_a_wait(
    writer: pmstore.Store, reader: pmstore.Store, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their handlers run while it lasts, and not only between two slices of it."""
    monkeypatch.setattr(following, "_SLICE", 600.0)
    seen: list[int] = []

    def handle(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) == 10:
            raise KeyboardInterrupt

    store = writer if which == "writer" else reader
    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        with pytest.raises(KeyboardInterrupt):
            store.wait(timeout=5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert store.wait(timeout=0) == (writer.sequence, "timeout")


def in_a_fork(store: pmstore.Store, sequence: int) -> None:
    assert store.refresh() == sequence and store.wait(0, timeout=0) == (sequence, "commit")
    assert (store.read("a") == store["a"]).all() and store.written


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_forked_store_reads_beside_its_parent(writer: pmstore.Store, reader: pmstore.Store, mode: str) -> None:
    run_in_fork(in_a_fork, reader if mode == "r" else writer, writer.sequence)


def test_a_file_that_lost_its_name_is_read_as_before(writer: pmstore.Store, reader: pmstore.Store) -> None:
    os.unlink(writer.path)
    writer["n"] = 1
    writer.commit()
    assert reader.refresh() == writer.sequence and reader["n"] == 1


def test_others_are_told_who_writes_after_this_process_has_read(writer: pmstore.Store, child: Any) -> None:
    """Closing any descriptor of the file, as readers do, drops the lock that carries the process id."""
    other = child(
        """
        import sys, pmstore
        while True:
            input()
            try:
                pmstore.open(sys.argv[1], "r+")
            except pmstore.StoreLockedError as error:
                print(error.pid, flush=True)
        """,
        writer.path,
    )

    def told() -> int:
        other.go()
        return int(other.line())

    writer.create_array("fixed", 5000, "i8", writeable=False)
    writer["large"] = np.zeros(100_000)
    writer.commit()
    reader = pmstore.open(writer.path, "r")
    uses: list[Callable[[], object]] = [
        lambda: reader["fixed"],
        lambda: writer.read("a"),
        lambda: writer["large"].fill(1) or writer.commit() or reader.refresh(),
        lambda: reader["large"],
        lambda: reader.wait(timeout=0),
        reader.close,
        gc.collect,
    ]
    for use in uses:
        use()
        assert told() == os.getpid()
    with contextlib.suppress(pmstore.StaleSnapshotError), pmstore.open(writer.path, "r") as stale:
        writer["large"].fill(2)
        writer.commit()
        stale["large"]  # asks for a later snapshot, and gives it up
    assert told() == os.getpid()


def test_many_readers(writer: pmstore.Store) -> None:
    """Each has six descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = max(soft, 4096) if hard == resource.RLIM_INFINITY else max(soft, min(hard, 4096))
    with contextlib.ExitStack() as open_readers:
        open_readers.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
        readers = [open_readers.enter_context(pmstore.open(writer.path, "r")) for _ in range(200)]
        first = writer.sequence
        for k in range(3):
            writer["n"] = k
            writer.commit()
            for reader in readers[k::3]:
                assert reader.refresh() == first + k + 1 and reader["n"] == k
        assert {reader.sequence for reader in readers} == {first + 1, first + 2, first + 3}
        assert all(reader.read("n") == 2 for reader in readers[::40])
    assert writer.check().ok


def test_a_reader_without_descriptors(writer: pmstore.Store) -> None:
    run_in_fork(_descriptors_run_out, writer.path)


def _refusals(call: Callable[[], object]) -> list[str]:
    """The messages while each descriptor that a call takes is missing once."""
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    refusals = []
    for limit in range(4, 1000):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, kept[1]))
        try:
            call()
        except pmstore.StoreIOError as error:
            assert error.errno == errno.EMFILE
            refusals.append(str(error))
        else:
            break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, kept)
    assert 0 < len(refusals) < 990
    return refusals


def _descriptors_run_out(path: str) -> None:
    assert all(path in text for text in _refusals(lambda: pmstore.open(path, "r").close()))
    with pmstore.open(path, "r") as reader:
        refusals = _refusals(lambda: reader.wait(timeout=0))
        assert "can't be opened" in refusals[0] and "keep the file of a store open" in refusals[-1]
        reader.wait(timeout=0)


def test_readers_need_no_space_on_the_disk(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("4m")
    with pmstore.open(disk / "s.pm") as store:
        store["a"] = np.ones(100_000)
        store.commit()
        with open(disk / "filled", "wb", buffering=0) as filled, contextlib.suppress(OSError):
            while True:
                filled.write(bytes(4096))
        with pmstore.open(store.path, "r") as reader:
            store["a"][0] = 2
            store.commit()
            assert reader.refresh() == store.sequence and reader["a"][0] == 2 and reader.read("a").sum() == 100_001


def test_read_takes_fields(writer: pmstore.Store, reader: pmstore.Store) -> None:
    rows = np.array([(1, 2.5), (3, 4.5)], [("id", "i4"), ("value", "f8")])
    writer["rows"] = rows
    writer.commit()
    for fields in ("id", ["value"], ["value", "id"]):
        found = reader.read(("rows", fields))
        assert (found == rows[fields]).all() and found.dtype.names == rows[fields].dtype.names
    with pytest.raises(ValueError, match="no field"):
        reader.read(("rows", "other"))


@pytest.mark.parametrize("name", ["a", "f"])
def test_parts_keep_no_more_than_themselves(writer: pmstore.Store, reader: pmstore.Store, name: str) -> None:
    """Nor do several parts of an array share memory."""
    parts = [np.s_[1:2], np.s_[:, 0], np.s_[1], np.s_[1:2], np.s_[:], np.s_[...]]
    found = reader.read(*((name, part) for part in parts))
    for one, part in zip(found, parts):
        assert (one == writer[name][part]).all()
        assert one.base is None or one.base.nbytes == one.nbytes
        one[...] = -1
    assert (reader.read(name) == writer[name]).all()


def test_parts_in_fortran_order_are_parts_of_one_copy(
    writer: pmstore.Store, reader: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    copy = Snapshot.copy
    monkeypatch.setattr(Snapshot, "copy", lambda *arguments: (copies.append(arguments[-1]), copy(*arguments)))
    found = reader.read(*(("f", np.s_[row : row + 1]) for row in range(4)))
    assert (np.concatenate(found) == writer["a"]).all() and copies == [writer["f"].nbytes]


@pytest.mark.parametrize("how", ["w", "compact", "moved"])
def test_a_reader_is_told_that_another_file_has_taken_the_place(
    writer: pmstore.Store, reader: pmstore.Store, how: str
) -> None:
    writer["large"] = np.zeros(1 << 17)
    writer.commit()
    del writer["large"]
    writer.close()
    reader.refresh()
    assert reader.read("one") == 7 and reader.wait(timeout=0).event == "closed"
    if how == "w":
        pmstore.open(writer.path, "w").close()
    elif how == "compact":
        assert pmstore.compact(writer.path) > 0
    else:
        pmstore.open(f"{writer.path}2").close()
        os.replace(f"{writer.path}2", writer.path)
    backup = f"{writer.path}-backup"
    for ask in (
        lambda: reader.read("one"),
        lambda: reader.wait(timeout=0),
        reader.refresh,
        lambda: reader.backup(backup),
    ):
        with pytest.raises(pmstore.StaleSnapshotError, match="another store has taken the place"):
            ask()
    assert reader["one"] == 7 and not os.path.exists(backup)


# ---- what has nothing to do with the file


class _Rang(Exception):
    """What a signal handler of the program raises."""


@pytest.mark.parametrize("error", [TimeoutError, RecursionError, _Rang, MemoryError])
def test_what_comes_from_elsewhere_is_no_damage(
    writer: pmstore.Store, reader: pmstore.Store, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    writer["value"] = {"a": (1, 2)}
    writer.commit()
    reader.refresh()

    def rings(self: Any, code: int, data: Any) -> Any:
        raise error("elsewhere")

    monkeypatch.setattr(values._Decoder, "extension", rings)
    for read in (lambda: reader["value"], lambda: reader.read("value"), reader.check):
        with pytest.raises(error) as raised:
            read()
        assert not isinstance(raised.value, ValueError)
    if error is MemoryError:
        assert isinstance(raised.value, pmstore.OutOfMemoryError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_interrupts_leave_no_descriptors(writer: pmstore.Store) -> None:
    """Wherever they come: right after the C function that opens a snapshot, nobody has it yet."""
    path = writer.path

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def reads() -> None:
        with pmstore.open(path, "r") as store:
            store.read("one")
            store.wait(timeout=0)

    reads()
    before, number = descriptors(), 0
    while signalled_at(number := number + 1, reads):
        assert descriptors() == before, number
    assert number > 100


@pytest.mark.parametrize("words", [["check"], ["dump"], ["dump", "--json", "a"]], ids=" ".join)
def test_commands_beside_a_writer_that_is_too_quick(
    writer: pmstore.Store, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They begin again with the newest commit, and give up at last. Their message names no methods of Python."""
    writer["a"] = np.zeros(1 << 17)
    writer.commit()
    left = 3

    def hasty(look: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            for _ in range(3 if left >= 0 else 0):
                writer["a"][...] += 1
                writer.commit()
            return look(*arguments)

        return changed

    monkeypatch.setattr(pmstore.Store, "check", hasty(pmstore.Store.check))
    monkeypatch.setattr(_dump, "_found", hasty(_dump._found))
    command = [words[0], str(writer.path), *words[1:]]
    assert _cli.main(command) == 0 and left == -1
    capsys.readouterr()
    left = 3
    monkeypatch.setattr(reading, "_ATTEMPTS", left)
    assert _cli.main(command) == 2 and left == 0
    text = f"pmstore: {writer.path}: the store changes too quickly: try again when fewer commits come\n"
    assert capsys.readouterr() == ("", text)


def test_a_snapshot_that_was_read_goes_at_once(writer: pmstore.Store, reader: pmstore.Store) -> None:
    """It needs no collection of garbage, which a program may have switched off."""
    counts = []
    gc.disable()
    try:
        for number in range(12):
            writer["a"] += 1
            writer.commit()
            reader.refresh()
            assert reader["a"].sum() == reader.read("a").sum()
            reader.read("one", ("f", 1))
            counts.append(len(os.listdir("/proc/self/fd")) if number >= 2 else 0)
    finally:
        gc.enable()
    assert len(set(counts[2:])) == 1, counts
