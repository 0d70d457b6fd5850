"""Readers beside the process that writes: snapshots between all events of recorded runs, in an order that a seed
decides, and real processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import resource
import signal
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._catalog.names import key_of
from pmstore._core import Core, ffi, lib
from pmstore._snapshot import Reader, newest
from pmstore._trace import Trace
from pmstore.testing._store.recording import Recording
from tests.conftest import MEMORY, Medium, run_in_fork
from tests.support.crashes import OPTIONS, SEED, WORKLOADS, Workload, bulky, record
from tests.support.crashes_async import ASYNC, flipped_late, freed_late, lazily
from tests.support.places import offset_of

LONGER = int(os.environ.get("PMSTORE_LONGER", "1"))
WRITTEN = (lib.PM_EVENT_STORE, lib.PM_EVENT_STREAM, lib.PM_EVENT_WRITE)
WRITER_BYTE, BEGUN_BYTE = 1 << 62, (1 << 62) + (1 << 60) + 2
ASKING_BYTES = BEGUN_BYTE + 14  # one for each millisecond
PAUSING_BYTES = ASKING_BYTES + (1 << 59)  # the same


class Writer:
    """A process that writes, played from a recording: its events change the file one by one, long writes in parts."""

    def __init__(self, recording: Recording, path: Path, dice: random.Random, locked: bool = True) -> None:
        path.write_bytes(recording.base)
        self.fd = os.open(path, os.O_RDWR)
        if locked:
            for byte in (WRITER_BYTE, BEGUN_BYTE):
                held = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, held)
        self._dice = dice
        self._events = [recording.event(i) for i in range(len(recording))]
        self._next = 0
        self._rest: tuple[int, bytes] | None = None

    def __len__(self) -> int:
        return len(self._events) - self._next

    def _write(self, offset: int, data: bytes) -> None:
        part = self._dice.randrange(1, len(data) + 1) if len(data) > 64 and self._dice.random() < 0.3 else len(data)
        os.pwrite(self.fd, data[:part], offset)
        self._rest = (offset + part, data[part:]) if part < len(data) else None

    def step(self) -> None:
        """One event, or the rest of one."""
        if self._rest is not None:
            self._write(*self._rest)
            return
        if self._next == len(self._events):
            return
        event = self._events[self._next]
        self._next += 1
        if event.kind in WRITTEN and event.data:
            self._write(event.offset, event.data)
        elif event.kind == lib.PM_EVENT_GROW and event.offset > os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, event.offset)

    def until_it_is_a_store(self) -> None:
        while self:
            self.step()
            with contextlib.suppress(pmstore.Error):
                newest(self.fd)
                return


@contextlib.contextmanager
def beside(writer: Writer, dice: random.Random, most: int) -> Iterator[None]:
    """The writer takes some steps before each of the reader's reads: often none, seldom many."""

    def run(_: Any) -> None:
        for _ in range(dice.choice([0, 0, 1, 1, 2, dice.randrange(most + 1)])):
            writer.step()

    callback = ffi.callback("void(void *)", run)
    lib.pm_source_pause(callback, ffi.NULL)
    try:
        yield
    finally:
        lib.pm_source_pause(ffi.NULL, ffi.NULL)


def assert_snapshots_are_commits(recording: Recording, path: Path, seed: int, most: int) -> tuple[int, int]:
    """How many snapshots were taken, and how many of them were compared with the state of their commit."""
    dice = random.Random(seed)
    writer = Writer(recording, path, dice)
    writer.until_it_is_a_store()
    fd = os.open(path, os.O_RDONLY)
    reader = Reader(fd)
    states, taken, compared, last = recording.states, 0, 0, 0
    while writer:
        before = newest(writer.fd)
        asked: list[tuple[int, int]] = []
        with beside(writer, dice, most):
            if dice.random() < 0.2:
                reader = Reader(fd)
            core = Core.of_snapshot(reader.take(asked))
            try:
                found = core.state_hash()
            except pmstore.StaleSnapshotError:
                found = None
        taken += 1
        assert max(before, last) <= core.sequence <= newest(writer.fd)
        last = core.sequence
        if found is not None and last in states:
            assert found == states[last], f"commit {last}, seed {seed}, {len(writer)} events before the end"
            compared += 1
        core.close()
        for _ in range(dice.randrange(max(2, len(recording) // 40))):
            writer.step()
    os.close(fd)
    os.close(writer.fd)
    return taken, compared


@pytest.mark.long_on("memory")
@pytest.mark.longer
@pytest.mark.parametrize("workload", [bulky, *WORKLOADS], ids=lambda workload: workload.__name__)
def test_I19_a_snapshot_is_a_commit_whatever_happens_meanwhile(medium: Medium, workload: Workload) -> None:
    recording = record(medium.directory / "store.pm", medium.name, workload, readers=False, **OPTIONS.get(workload, {}))
    compared = 0
    for seed in range(SEED, SEED + 2 * LONGER):
        for most in (2, 60):
            compared += assert_snapshots_are_commits(recording, medium.directory / "played.pm", seed, most)[1]
    assert compared >= 4


@pytest.mark.parametrize("workload", [lazily, freed_late, flipped_late], ids=lambda workload: workload.__name__)
def test_I19_commits_that_are_durable_later(tmp_path: Path, workload: Workload) -> None:
    recording = record(tmp_path / "store.pm", "file", workload, readers=False, **ASYNC)
    compared = sum(
        assert_snapshots_are_commits(recording, tmp_path / "played.pm", seed, 10)[1]
        for seed in range(SEED, SEED + 2 * LONGER)
    )
    assert compared >= 4


@pytest.mark.parametrize("workload", WORKLOADS[:4], ids=lambda workload: workload.__name__)
def test_I20_a_reader_of_what_a_kill_left_adopts_what_recovery_adopts(medium: Medium, workload: Workload) -> None:
    """The process is killed at any event: nobody holds the lock."""
    recording = record(medium.directory / "store.pm", medium.name, workload, readers=False, **OPTIONS.get(workload, {}))
    dice = random.Random(SEED)
    path = medium.directory / "killed.pm"
    writer = Writer(recording, path, dice, locked=False)
    writer.until_it_is_a_store()
    while writer:
        for _ in range(dice.randrange(1, len(recording) // 8)):
            writer.step()
        core = Core.of_snapshot(Reader(writer.fd).take())
        copy = medium.directory / "copy.pm"
        copy.write_bytes(path.read_bytes())
        with pmstore.open(copy, "r+", media=medium.name) as store:  # type: ignore[arg-type]
            assert (core.sequence, core.state_hash()) == (store.sequence, store._catalog.core.state_hash())
        core.close()
    os.close(writer.fd)


def test_large_contents_that_a_record_in_the_log_changes(medium: Medium) -> None:
    """They are there, although the committed image may not have them yet; and when the log has been emptied."""
    path = medium.directory / "store.pm"
    with pmstore.open(path, "x") as store:
        a = store.create_array("a", 100_000)
        store.commit()
        fd = os.open(path, os.O_RDONLY)
        readers = [Reader(fd), Reader(fd, changing=True)]
        for k in range(6):
            a[k * 15_000] = k + 1
            store.commit()
            if k % 3 == 2:
                for reader in readers:  # otherwise they miss the end of the log
                    reader.take()
                store._catalog.core.checkpoint()
            snapshots = [Core.of_snapshot(reader.take()) for reader in (Reader(fd), *readers)]
            for core in snapshots:
                entry = core.get(key_of("a"))
                assert entry is not None and (np.frombuffer(core.contents(entry.offset, entry.length)) == a).all()
                core.close()
        os.close(fd)


def test_metadata_behind_the_pages_of_the_first_map_are_in_the_snapshot(store: pmstore.Store) -> None:
    pages = (4096 - 64) * 4
    store._catalog.core.alloc(pages * (4096 - 8))
    store["small"], store["large"] = np.arange(3), np.arange(2000)
    store.commit()
    assert min(offset_of(store, name) for name in ("small", "large")) > pages * 4096
    with pmstore.open(store.path, "r") as reader:
        assert reader.check().ok, reader.check()
        assert reader["small"].sum() == 3 and reader["large"][1999] == 1999


def test_all_contents_that_are_wanted_are_in_the_snapshot(medium: Medium) -> None:
    with pmstore.open(medium.directory / "store.pm", "x") as store, open(store.path, "rb") as file:
        names = ["a", "b", "c"]
        store.update({name: np.arange(100_000.0) + i for i, name in enumerate(names)})
        store.commit()
        reader = Reader(file.fileno())
        first = Core.of_snapshot(reader.take())
        places = [first.get(key_of(name)) for name in names]
        first.close()
        core = Core.of_snapshot(reader.take([(place.offset, place.length) for place in places if place]))
        for name in names:
            store[name][:] = -1
        store.commit()
        store._catalog.core.checkpoint()
        for i, place in enumerate(places):
            assert place is not None
            assert (np.frombuffer(core.contents(place.offset, place.length)) == np.arange(100_000.0) + i).all()
        core.close()


def test_small_arrays_are_of_the_snapshot_whatever_follows(medium: Medium) -> None:
    """They are copied with it, as far as they take a mebibyte together: one after another, and no large one."""
    with pmstore.open(medium.directory / "store.pm", "x", media=medium.name) as store:
        store.update({f"{i}": np.zeros(100_000, "u1") for i in range(15)}, large=np.zeros(1 << 19, "u1"))
        store.commit()
        with pmstore.open(store.path, "r") as reader:
            for name in store:
                store[name][0] = 1
            store.commit()
            store._catalog.core.checkpoint()
            shown = []
            for name in reader:
                with contextlib.suppress(pmstore.StaleSnapshotError):
                    assert (reader[name] == 0).all()
                    shown.append(name)
    assert "large" not in shown and len(shown) == (1 << 20) // 100_000


def test_the_process_that_writes_reads_its_own_commits(medium: Medium) -> None:
    with pmstore.open(medium.directory / "store.pm") as store:
        for k in range(5):
            store["n"] = k
            store.commit()
            assert store.read("n") == k and store.wait(timeout=0).event == "timeout" and store.written
            store["n"] = -1  # pending
            assert store.read("n") == k
            store.rollback()


def waits_in_a_commit(path: Path, asked: int) -> int:
    """How often a commit sleeps, beside a reader that asked for a pause so many milliseconds ago."""
    with pmstore.open(path, "x", media="file") as store:  # a store of its own, as commits look for readers rarely
        store["n"] = 1
        fd = os.open(path, os.O_RDONLY)
        byte = ASKING_BYTES + time.monotonic_ns() // 1_000_000 - asked
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0))
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        store.commit()
        found = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
        os.close(fd)
    return found


def test_I21_a_reader_that_was_stopped_while_it_asked_for_a_pause_is_soon_forgotten(directory: Path) -> None:
    """Otherwise requests of other readers would go unheard: what nobody ends is ignored for a while."""
    if not directory.is_relative_to(MEMORY):
        pytest.skip("a commit waits for a sync")
    for asked, waits in ((10, True), (10_000, False)):
        found = min(waits_in_a_commit(directory / f"{asked}-{i}.pm", asked) for i in range(3))
        assert (found > 0) == waits


# ---- real processes

MIXED = """
import sys, numpy as np, pmstore
store = pmstore.open(sys.argv[1], "r+")
a, b = store["a"], store["b"]
print("ready", flush=True)
for k in range(1, 10**9):
    with store.transaction():
        a[:] = k                                   # written whole: two slots
        b[k % len(b)] = b[0] = k                   # a part of it
        store["n"] = k
        if k % 20 == 0:
            store["x"] = np.full(700 + k % 3000, k)
        if k % 30 == 0 and "fixed" in store:
            del store["fixed"]
        if k % 30 == 15:
            store.create_array("fixed", 5000, "i8", fill_value=k, writeable=False)
"""


def make(path: Path) -> None:
    with pmstore.open(path, "x") as store:
        store.create_array("a", 8000, "i8")
        store.create_array("b", 60_000, "i8")
        store["n"] = 0


def assert_one_commit(store: pmstore.Store) -> tuple[int, np.ndarray[Any, Any] | None]:
    """The commit that a store shows, and a constant array of it."""
    n = store["n"]
    assert (store["a"] == n).all() and store["b"][0] == n and (store["b"] <= n).all()
    fixed = store.get("fixed")
    assert fixed is None or (fixed == fixed[0]).all()
    return n, fixed


def test_no_mixed_state_beside_a_writer_at_work(medium: Medium, child: Any) -> None:
    path = medium.directory / "store.pm"
    make(path)
    other = child(MIXED, path)
    assert other.line() == "ready"
    last, kept, shown = 0, [], 0
    with pmstore.open(path, "r") as store:
        while shown < 60 * LONGER or not kept:
            store.refresh()
            with contextlib.suppress(pmstore.StaleSnapshotError):
                n, fixed = assert_one_commit(store)
                assert n >= last
                last, shown = n, shown + 1
                if fixed is not None:
                    kept.append((fixed, int(fixed[0])))
            n, a = store.read("n", "a")
            assert (a == n).all() and n >= last
            part = store.read(("b", np.s_[10:20]))
            assert part.shape == (10,)
        assert store.written and store.wait(timeout=60).event == "commit"
        other.process.send_signal(signal.SIGKILL)
        other.process.wait()
        store.refresh()
        assert store.wait(timeout=60).event == "died" and not store.written
        assert assert_one_commit(store)[0] >= last
    assert all((array == value).all() for array, value in kept), "space of a mapped array was used again"
    with pmstore.open(path) as store:
        assert store.check().ok


QUICK = """
import sys, pmstore
with pmstore.open(sys.argv[1], "r+") as store:
    a = store["a"]
    print("ready", flush=True)
    for k in range(1, 10**9):
        a[:] = k
        store["n"] = k
        store.commit()
        store["between"] = k
        store.commit()
"""


def test_I21_arrays_written_whole_are_copied_however_quickly(medium: Medium, child: Any) -> None:
    """A copy takes longer than two of the commits."""
    path = medium.directory / "store.pm"
    with pmstore.open(path, "x") as store:
        store.create_array("a", 300_000, "i8")
        store["n"] = 0
    other = child(QUICK, path)
    assert other.line() == "ready"
    with pmstore.open(path, "r") as store:
        last = 0
        for _ in range(10):
            n, a = store.read("n", "a")
            assert (a == n).all() and n >= last
            last = n
        copy = path.with_name("copy.pm")
        sequence = store.backup(copy)
        assert store.written
    with pmstore.open(copy, "r") as found:
        assert (found["a"] == found["n"]).all() and found["n"] >= last and found.sequence == sequence


def is_locked(fd: int, first: int, count: int) -> bool:
    """True if another open file has a lock on one of some bytes."""
    asked = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
    kind: int = struct.unpack_from("@h", fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


@pytest.mark.parametrize(("read_only", "traced"), [(False, False), (True, False), (False, True)])
def test_which_stores_tell_readers_that_they_are_recovered(medium: Medium, read_only: bool, traced: bool) -> None:
    """Commits of one that is only read are found as recovery would find them."""
    path = medium.directory / "store.pm"
    pmstore.open(path, "x").close()
    with path.open("r+b") as look:
        trace = Trace(1) if traced else None
        core = Core(os.open(path, os.O_RDWR), medium.name, read_only=read_only, trace=trace, max_size=0)
        assert is_locked(look.fileno(), BEGUN_BYTE, 1) == (not read_only)
        core.close()


def test_I21_for_a_few_commits_no_reader_asks_for_a_pause(medium: Medium) -> None:
    with pmstore.open(medium.directory / "store.pm", "x") as store:
        a = store.create_array("a", 200_000, "i8")
        with open(store.path, "rb") as file, open(store.path, "rb") as look:
            reader = Reader(file.fileno())
            for k in range(8):
                a[:] = k  # whole, so that it is soon in two slots
                store.commit()
                lib.pm_reader_hold(reader._reader, False)
                reader.take()
                assert not is_locked(look.fileno(), ASKING_BYTES, 1 << 59)
                lib.pm_reader_release(reader._reader)


def test_I21_a_pause_covers_the_snapshot_and_the_copies(medium: Medium, child: Any) -> None:
    """A pause is short, and the next ones come ever more rarely: on a loaded machine, a reader can miss them all."""
    if medium.name == "dax":
        pytest.skip("pauses are the same on every medium, and in the emulated guest Python is slower than one")
    path = medium.directory / "store.pm"
    with pmstore.open(path, "x") as store:
        store.create_array("a", 1000, "i8")
    assert child(QUICK, path).line() == "ready"
    with path.open("rb") as file, path.open("rb") as look:
        reader = Reader(file.fileno())
        asked = []

        def attempt() -> None:
            asked.append(is_locked(look.fileno(), ASKING_BYTES, 1 << 59))
            reader.take()
            if not is_locked(look.fileno(), PAUSING_BYTES, 1 << 59):
                raise pmstore.StaleSnapshotError

        for again in range(10):
            while is_locked(look.fileno(), PAUSING_BYTES, 1 << 59):  # the pause of the round before
                os.sched_yield()
            asked.clear()
            with contextlib.suppress(pmstore.StaleSnapshotError):
                reader.patiently(attempt)
                if len(asked) > 2:  # otherwise the process answers, late, what the round before asked for
                    break
            assert again < 9, "no snapshot was covered by a pause"
        assert not asked[0] and all(asked[2:])
        assert not is_locked(look.fileno(), ASKING_BYTES, 1 << 59)


def test_I21_what_a_fork_keeps_of_a_pause_is_no_pause(medium: Medium) -> None:
    """The process that paused was killed; a fork of it has the file mapped, and so the lock."""
    path = medium.directory / "store.pm"
    with pmstore.open(path, "x") as store:
        store["n"] = 1
    with path.open("rb") as file, path.open("rb") as fork:
        byte = PAUSING_BYTES + time.monotonic_ns() // 1_000_000 - 10_000
        fcntl.fcntl(fork, fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0))
        reader = Reader(file.fileno())
        assert not lib.pm_reader_hold(reader._reader, True)
        lib.pm_reader_release(reader._reader)


def test_I21_a_reader_ends_no_request_of_another_one(medium: Medium) -> None:
    """The two have the same open file, as those of one store have."""
    path = medium.directory / "store.pm"
    with pmstore.open(path, "x") as store:
        store["n"] = 1
    with path.open("rb") as file, path.open("rb") as look:
        first, second = Reader(file.fileno()), Reader(file.fileno())
        for reader in (first, second):
            lib.pm_reader_hold(reader._reader, True)
        for reader in (second, first):
            assert is_locked(look.fileno(), ASKING_BYTES, 1 << 59)
            lib.pm_reader_release(reader._reader)
        assert not is_locked(look.fileno(), ASKING_BYTES, 1 << 59)


class GivesUp:
    """The core, but that each snapshot is given up, as if commits came too quickly for seconds."""

    def __init__(self) -> None:
        self.taken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def pm_reader_take(self, *_: Any) -> int:
        self.taken += 1
        return int(lib.PM_STALE)


def test_a_snapshot_that_was_given_up_is_not_taken_again(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    """`take` has waited for seconds. Copies of contents are tried anew many times."""
    path = medium.directory / "store.pm"
    with pmstore.open(path, "x") as store:
        store["n"] = 1
    with path.open("rb") as file:
        reader, core = Reader(file.fileno()), GivesUp()
        monkeypatch.setattr("pmstore._snapshot._PATIENCE", 0.0)
        monkeypatch.setattr("pmstore._snapshot.lib", core)
        with pytest.raises(pmstore.StaleSnapshotError):
            reader.patiently(reader.take)
    assert core.taken == 1


def test_waiting_wakes_with_the_commit_and_tells_of_the_end(medium: Medium, child: Any) -> None:
    path = medium.directory / "store.pm"
    make(path)
    other = child(
        """
        import sys, pmstore
        store = pmstore.open(sys.argv[1], "r+")
        print("ready", flush=True)
        while input():
            store["n"] += 1
            store.commit()
        store.close()
        print("closed", flush=True)
        """,
        path,
    )
    assert other.line() == "ready"
    with pmstore.open(path, "r") as store:
        assert store.wait(timeout=0).event == "timeout"
        for i in range(3):
            other.process.stdin.write("go\n")
            other.process.stdin.flush()
            waited = store.wait(timeout=60)
            assert waited == (store.sequence + 1, "commit")
            assert store["n"] == i and store.refresh() == waited.sequence and store["n"] == i + 1
        other.process.stdin.write("\n")
        other.process.stdin.flush()
        assert other.line() == "closed"
        assert store.wait(timeout=60).event == "closed"


def headers_mapped(path: str) -> int:
    """The number of this process's mappings of the first page of a file alone."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in lines if line[5:] == [path]]
    return sum(end - begin == 4096 for begin, end in ranges)


def test_waiting_again_in_several_threads_after_a_fork_and_after_the_end(store: pmstore.Store) -> None:
    """A reader keeps what a wait needs until it is closed."""
    store["n"] = 0
    store.commit()
    before, mapped = len(os.listdir("/proc/self/fd")), headers_mapped(store.path)
    with pmstore.open(store.path, "r") as reader:
        assert reader.wait(timeout=0).event == "timeout"
        events: list[str] = []
        threads = [threading.Thread(target=lambda: events.append(reader.wait(timeout=60).event)) for _ in range(3)]
        for thread in threads:
            thread.start()
        store["n"] = 1
        store.commit()
        for thread in threads:
            thread.join()
        assert events == ["commit"] * 3

        def child() -> None:
            assert reader.wait(after=known, timeout=60) == (known + 1, "commit")
            reader.refresh()
            assert reader.wait(timeout=0).event == "timeout"

        known = reader.sequence
        run_in_fork(child)
        assert reader.wait(timeout=0) == (known + 1, "commit")
        assert headers_mapped(store.path) == mapped + 1
    with pytest.raises(pmstore.ClosedStoreError):
        reader.wait(timeout=0)
    assert len(os.listdir("/proc/self/fd")) <= before and headers_mapped(store.path) == mapped
