"""Each call gives back what it took, also if it fails for a lack of memory: blocks of the core's memory, mappings and
descriptors. tests/support/faults.c, preloaded into a child process, counts the blocks, and refuses some.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore.testing._store.recording import Recorder
from tests.conftest import LONGER, Medium
from tests.core.test_out_of_memory import overflowed
from tests.support import shim
from tests.support.crashes_slots import double_buffered_length
from tests.support.shim import MAPPINGS, MEMORY, ONCE, begin_memory, blocks_held, end, hits, watch_memory

pytestmark = [pytest.mark.long, pytest.mark.no_sanitizer]  # which is preloaded too

PAGE = 4096
MOST = 2000  # requests of a case; far more than there are
EVERY = 1 if LONGER > 2 else 2 if LONGER == 2 else 6  # other ones on the other medium
PART = np.arange(600.0, 700).tobytes()  # of an array


class Files:
    """Stores for the cases, and a name for a new one."""

    def __init__(self, folder: Path, media: str) -> None:
        self.media = media
        names = ("sound", "damaged", "rootless", "dead", "late", "new")
        self.sound, self.damaged, self.rootless, self.dead, self.late, self.new = (folder / name for name in names)
        overflowed(self.late)
        with self.open(self.sound, "x") as store:
            fill(store)
        contents = self.sound.read_bytes()
        assert contents.count(PART) == 1
        self.damaged.write_bytes(contents.replace(PART, bytes(len(PART))))
        self.rootless.write_bytes(contents[: 2 * PAGE] + bytes(PAGE) + contents[3 * PAGE :])
        with self.open(self.new, "x") as store:
            fill(store)
            store["larger"] = np.ones(1 << 18)
            store.commit()
            store["larger"][5] = 2
            store["a"][7] = 1
            store.commit()
            self.dead.write_bytes(self.new.read_bytes())

    def open(self, path: Path, mode: str, **options: object) -> pmstore.Store:
        return pmstore.open(path, mode, media=self.media, **options)  # type: ignore[arg-type]


def fill(store: pmstore.Store) -> None:
    store["a"] = np.arange(9000.0)
    store["text"] = "x" * 3000
    store.create_array("constant", 5000, "i4", writeable=False)
    for i in range(80):
        store[f"many/{i}"] = np.full(10 + i, i)
    store["large"] = np.arange(40_000.0) + 0.5
    twice = store.create_array("twice", double_buffered_length(store), "f8")
    for i in range(6):  # it gets a second slot, which has the last commit
        twice[:] = i
        store.commit()


def nothing(files: Files) -> None:
    with files.open(files.sound, "r+") as store:
        assert (store["twice"] == 5).all()


def commits(files: Files) -> None:
    with files.open(files.sound, "r+") as store:
        for i in range(5):
            store["a"][i :: 3 * i + 1] = i
            store["twice"][:] = -i
            store[f"new/{i}"] = np.full(100 << 3 * i, i)
            store.commit()
        store.group("new").clear()
        store.create_array("growing", (0, 2), "f8", maxshape=(None, 2))
        for i in range(1, 40):
            store.append("growing", np.full((i, 2), i))
        del store["growing"]


def rollbacks(files: Files) -> None:
    with files.open(files.sound, "r+") as store:
        store["a"][:] = 0
        store["b"] = np.ones(5000)
        assert store._has_pending()
        store.rollback()
        with contextlib.suppress(KeyError), store.transaction():
            store["a"][0] = 5
            raise KeyError


def late(files: Files) -> None:
    with pmstore.open(files.sound, "r+", media=files.media, durability="async") as store:
        for i in range(5):
            store["a"][i] += 1
            store["many/3"][:] += 1
            store.commit()
        store.sync()


def second_slots(files: Files) -> None:
    with files.open(files.sound, "r+") as store:
        for name in ("first", "second"):
            array = store.create_array(name, double_buffered_length(store), "f8")
            for i in range(6):
                array[:] = i
                store.commit()
            del array, store[name]
            store.commit()
        twice = store["twice"]
        for _ in range(40):  # it gives its second slot back
            twice[7] += 1
            store.commit()


def declared(files: Files) -> None:
    with files.open(files.sound, "r+") as store, store.transaction(only=[store["a"][5:9]]):
        store["a"][5:9] += 1


def children(files: Files) -> None:
    with files.open(files.sound, "r+") as store:
        for i in range(2):
            a = store["a"]
            child = os.fork()
            if not child:
                os._exit(0)
            store["larger"] = np.full(1 << 16, i)
            a[i] += 1
            store.commit()
            assert os.waitpid(child, 0)[1] == 0
            del store["larger"]
            store.commit()


def readers(files: Files) -> None:
    with files.open(files.sound, "r+") as store, pmstore.open(files.sound, "r") as snapshot:
        for i in range(3):
            store["a"][i] += 1
            store["large"][i] += 1
            store["twice"][:] += 1
            store["text"] = "y" * (3000 + i)
            store.commit()
            assert snapshot.wait(after=snapshot.sequence, timeout=60)
            snapshot.refresh()
            assert snapshot["a"][i] == store["a"][i] and snapshot.read(("a", np.s_[100:200])).size == 100
            assert snapshot.read(("large", np.s_[:100]))[i] == store["large"][i]
            assert snapshot["constant"].size == 5000 and len(snapshot["text"]) == 3000 + i


def stale(files: Files) -> None:
    with files.open(files.sound, "r+") as store, pmstore.open(files.sound, "r") as snapshot:
        store["large"][:] += 1
        store.commit()
        store._catalog.core.checkpoint()
        with pytest.raises(pmstore.StaleSnapshotError):
            snapshot["large"]


def zero_copy(files: Files) -> None:
    with pmstore.open(files.sound, "r", exclusive=True) as store:
        assert store["a"].size == 9000 and store["text"]


def verified(files: Files) -> None:
    for path in (files.sound, files.damaged):
        for how in (True, False):
            with pmstore.open(path, "r", exclusive=how) as store:
                assert store.check().ok == (path == files.sound)
    with pytest.raises(pmstore.CorruptStoreError):
        pmstore.open(files.damaged, "r", verify=True)


def copies(files: Files) -> None:
    files.new.unlink(missing_ok=True)
    with files.open(files.sound, "r+") as store:
        store.backup(files.new)
    pmstore.compact(files.new)
    for path in (files.sound, files.damaged, files.rootless):
        files.new.unlink(missing_ok=True)
        pmstore.salvage(path, files.new)


def recovery(files: Files) -> None:
    for mode in ("r", "r+"):
        files.new.write_bytes(files.dead.read_bytes())
        with files.open(files.new, mode) as store:
            assert store["larger"][5] == 2 and store["a"][7] == 1
    with files.open(files.late, "r") as store:
        assert (store["a"] == 1).all()


def refusals(files: Files) -> None:
    files.new.write_bytes(b"no store" * 1000)
    for mode in ("r", "r+"):
        with pytest.raises(pmstore.NotAStoreError):
            files.open(files.new, mode)
    files.new.write_bytes(files.sound.read_bytes()[: 5 * PAGE])
    for mode in ("r", "r+"):
        with pytest.raises(pmstore.CorruptStoreError):
            files.open(files.new, mode)
    with files.open(files.sound, "r+") as store:
        for wrong in ("a/b", "text"):
            with pytest.raises(pmstore.NameConflictError):
                store.create_array(wrong, 3, "f8")
        with pytest.raises(pmstore.OutOfSpaceError):
            store.create_array("huge", 1 << 44, "u1")
        store.rename("many", "few")
        store.rename("few", "many")


def recorded(files: Files) -> None:
    """Only tests record a store, and they have memory."""
    files.new.write_bytes(files.sound.read_bytes())
    with Recorder(files.new, files.media), pmstore.open(files.new, "r+") as store:
        store["a"][3] = -1
        store.commit()


CASES: list[Callable[[Files], None]] = [
    nothing, commits, rollbacks, late, second_slots, declared, children, readers, stale, zero_copy, verified, copies,
    recovery, refusals,
]  # fmt: skip


def held() -> tuple[int, int, int]:
    """Blocks of memory, mappings of files, and descriptors. Waits for threads that go on after a call."""
    gc.collect()
    while len(os.listdir("/proc/self/task")) > 1:
        os.sched_yield()
    maps = [line.partition("/")[2] for line in Path("/proc/self/maps").read_text().splitlines()]
    files = sum(name != "" and ".so" not in name for name in maps)  # also of files in memory
    return blocks_held(), files, len(os.listdir("/proc/self/fd"))


def each_case(folder: str, media: str) -> None:
    files = Files(Path(folder), media)
    watch_memory()
    for case in CASES + [recorded] * (media != "dax"):
        case(files)
        case(files)
        before = held()
        for _ in range(3):
            case(files)
        assert held() == before, case.__name__


def each_refusal(folder: str, media: str, calls: int) -> None:
    """Refuses calls of this kind, one at a time. A case goes on without, or ends with an error. Nothing is lost."""
    files = Files(Path(folder), media)
    sound = files.sound.read_bytes()
    watch_memory()
    for case in CASES:
        files.sound.write_bytes(sound)
        case(files)
        before = held()
        for at in range(1 + (media == "file") * (EVERY // 2), MOST, EVERY):
            files.sound.write_bytes(sound)
            begin_memory(ONCE, at, calls)
            try:
                case(files)
            except pmstore.Error as error:
                no_thread = isinstance(error, OSError) and error.errno == errno.EAGAIN
                assert isinstance(error, MemoryError) or no_thread, (case.__name__, at, error)
            refused = hits()
            end()
            assert held() == before, (case.__name__, at)
            with files.open(files.sound, "r+") as store:
                assert store.check().ok and store["many/7"].sum() >= 7 * 17, (case.__name__, at)
            if not refused:
                break
        else:
            raise AssertionError(f"no end of requests: {case.__name__}")
        print(at)


@pytest.mark.longer
@pytest.mark.parametrize("calls", [MEMORY, MAPPINGS], ids=["memory", "mappings"])
def test_a_refused_request_takes_nothing(calls: int, medium: Medium, fault_library: Path) -> None:
    said = shim.call(fault_library, each_refusal, medium.directory, medium.name, calls)
    assert sum(map(int, said.split())) > 100


def test_each_call_gives_back_what_it_took(medium: Medium, fault_library: Path) -> None:
    shim.call(fault_library, each_case, medium.directory, medium.name)
