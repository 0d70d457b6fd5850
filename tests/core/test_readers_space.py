"""Space of constant arrays that readers map: it is not used again while a mapping lives (I9), and afterwards it is."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import re
import stat
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.conftest import run_in_fork
from tests.support import shim
from tests.support.places import offset_of

Open = Callable[..., pmstore.Store]

READER_BYTES = (1 << 62) + (1 << 61) + (1 << 60)  # one for each page: csrc/space/region_fork.c
N = 5000  # elements: over a page, and copied with a snapshot only if they are wanted


def at(directory: Path) -> Open:
    """Opens a store in a directory, on the file medium."""
    return functools.partial(pmstore.open, directory / "store.pm", media="file")


def with_constant(open_store: Open, **options: Any) -> pmstore.Store:
    """A store with the constant array x, all ones."""
    store = open_store(mode="x", max_size=64 << 20, **options)
    store.create_array("x", N, "f8", fill_value=1.0, writeable=False)
    store.commit()
    store.sync()
    return store


def fill_space(store: pmstore.Store, count: int = 4) -> None:
    """New arrays take whatever space is free."""
    for i in range(count):
        store[f"y{i}"] = np.full(N, 7.0)
        store.commit()


def test_space_is_used_again_beside_a_reader_that_was_there_before_the_writer(open_store: Open) -> None:
    """Its locks move on with each refresh, and none of the later ones is of space that the writer does not know."""
    with_constant(open_store).close()
    with open_store(mode="r") as reader:
        held = [reader["x"]]
        writer = open_store(mode="r+", max_size=64 << 20)
        sizes = []
        for i in range(40):
            writer["y"] = np.full(N + i % 2, float(i))
            writer.commit()
            reader.refresh()
            held = [reader["x"]]
            sizes.append(writer.stats().region_size)
        assert sizes[-1] == sizes[10]
        assert (held[0] == 1).all()


def test_space_is_used_again_beside_a_reader_of_another_array(open_store: Open) -> None:
    """It maps one constant array all the time. The writer deletes others, and is opened again."""
    with_constant(open_store).close()
    with open_store(mode="r") as reader:
        x = reader["x"]
        sizes = []
        for i in range(30):
            with open_store(mode="r+", max_size=64 << 20) as writer:
                for j in range(2):
                    if "y" in writer:
                        del writer["y"]
                    writer.create_array("y", N + j, "f8", fill_value=float(i), writeable=False)
                    writer.commit()
                sizes.append(writer.stats().region_size)
        assert sizes[-1] == sizes[4]
        assert (x == 1).all()


def test_the_page_behind_what_a_reader_maps_is_used_again(open_store: Open) -> None:
    """Another writer has freed both, and the next one finds the reader's lock."""
    with with_constant(open_store) as writer:
        writer["behind"], writer["last"] = np.zeros(500), np.zeros(500)
        writer.commit()
        place = offset_of(writer, "behind")
        assert place == offset_of(writer, "x") + 10 * 4096
        with open_store(mode="r") as reader:
            x = reader["x"]
        del writer["x"], writer["behind"]
        writer.commit()
    with open_store(mode="r+", max_size=64 << 20) as writer:
        for i in range(4):
            writer[f"y{i}"] = np.full(500, 7.0)
            writer.commit()
        assert place in [offset_of(writer, f"y{i}") for i in range(4)]
        assert (x == 1).all()


def test_the_page_before_what_a_reader_maps_is_used_again(open_store: Open) -> None:
    """An array that fills its pages, together with their hashes, ends there."""
    with open_store(mode="x", max_size=64 << 20) as writer:
        for name in ("before", "x"):
            writer.create_array(name, 10 * 511, "f8", fill_value=1.0, writeable=False)
        writer.commit()
        place = offset_of(writer, "before")
        assert offset_of(writer, "x") == place + 10 * 4096
        with open_store(mode="r") as reader:
            x = reader["x"]
            del writer["before"]
            writer.commit()
            fill_space(writer)
            assert place in [offset_of(writer, f"y{i}") for i in range(4)]
            assert (x == 1).all()


def test_only_a_writer_notes_what_readers_map(open_store: Open) -> None:
    """A store for reading gives no space away."""
    with_constant(open_store).close()
    with open_store(mode="r") as reader:
        x = reader["x"]
    for mode, noted in (("r", 0), ("r+", 1)):
        with open_store(mode=mode, exclusive=True) as other:
            assert other.stats().buffers == noted
    assert (x == 1).all()


def test_a_lock_without_an_end_is_one_of_all_space_behind_its_beginning(open_store: Open) -> None:
    """Another program has it, such as one that copies files."""
    with with_constant(open_store) as writer:
        place = offset_of(writer, "x")
        del writer["x"]
        writer.commit()
    with open(writer.path, "rb") as other:
        lock = struct.pack("@hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, READER_BYTES + place // 4096, 0, 0)
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, lock)
        with open_store(mode="r+", max_size=64 << 20) as writer:
            fill_space(writer)
            assert place not in [offset_of(writer, f"y{i}") for i in range(4)]
    with open_store(mode="r+", max_size=64 << 20) as writer:
        fill_space(writer, 12)
        assert place in [offset_of(writer, f"y{i}") for i in range(12)]


def test_programs_that_are_started_inherit_no_descriptor(open_store: Open) -> None:
    """A program with one of them would keep the locks of space that no reader maps any more."""
    writer = with_constant(open_store)
    held = open_store(mode="r")["x"]
    ours = [
        int(one.name)
        for one in os.scandir("/proc/self/fd")
        if os.path.exists(one.path) and os.path.samefile(one.path, writer.path)
    ]
    assert len(ours) >= 3, "one of the writer, two of the reader"
    assert not any(map(os.get_inheritable, ours))
    assert (held == 1).all()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_I9_arrays_that_were_deleted_before_the_writer_was_opened(open_store: Open, order: tuple[int, ...]) -> None:
    """Readers map some of them, in any order. The space of the others is used again, and of each when it is let go."""
    names = [f"x{i}" for i in range(6)]
    with open_store(mode="x", max_size=64 << 20) as writer:
        for i, name in enumerate(names):
            writer.create_array(name, N, "f8", fill_value=float(i), writeable=False)
            writer[f"between{i}"] = np.zeros(N)
        writer.commit()
        places = [offset_of(writer, name) for name in names]
        readers = [open_store(mode="r") for _ in order]
        held = {i: readers[i][names[2 * i]] for i in order}
        for name in names:
            del writer[name]
        writer.commit()
    with open_store(mode="r+", max_size=64 << 20) as writer:
        for gone in [*order, None]:
            kept = {places[2 * i] for i in held}
            used = set()
            for k in range(12):
                writer[f"new{k}"] = np.full(N, 7.0)
                writer.commit()
                used.add(offset_of(writer, f"new{k}"))
            assert not kept & used and used >= set(places) - kept
            assert all((one == 2 * i).all() for i, one in held.items())
            for k in range(12):
                del writer[f"new{k}"]
            writer.commit()
            if gone is not None:
                del held[gone]
                readers[gone].close()
                gc.collect()


def test_I9_an_array_where_a_shorter_one_was_that_a_reader_asked_for(open_store: Open) -> None:
    """The lock for the shorter one is still there when the writer is opened, and is all that the writer finds."""
    writer = with_constant(open_store)
    writer.create_array("z", 4 * N, "f8", fill_value=1.0, writeable=False)
    writer.commit()
    with open_store(mode="r") as early:
        place = offset_of(writer, "x")
        del writer["x"], writer["z"]
        writer.commit()
        writer.create_array("y", 4 * N, "f8", fill_value=2.0, writeable=False)
        writer.commit()
        assert offset_of(writer, "y") == place
        writer.close()
        with contextlib.suppress(pmstore.StaleSnapshotError):
            early["x"]
        with open_store(mode="r+", max_size=64 << 20) as writer, open_store(mode="r") as reader:
            y = reader["y"]
            del writer["y"]
            writer.commit()
            fill_space(writer, 20)
            assert (y == 2).all()


def test_I9_an_array_before_one_that_the_writer_has_in_use(open_store: Open) -> None:
    """The one behind it is larger, and no reader maps it."""
    with with_constant(open_store) as writer:
        writer["behind"] = np.zeros(2 * N)
        writer.commit()
        assert offset_of(writer, "behind") > offset_of(writer, "x")
    with open_store(mode="r+", max_size=64 << 20) as writer, open_store(mode="r") as reader:
        behind, x = writer["behind"], reader["x"]
        del writer["x"]
        writer.commit()
        fill_space(writer)
        assert (x == 1).all() and (behind == 0).all()


def test_I9_an_array_that_another_one_replaces(open_store: Open) -> None:
    """The name is never free in between."""
    with with_constant(open_store) as writer, open_store(mode="r") as reader:
        x = reader["x"]
        writer["x"] = np.full(N, 9.0)
        writer.commit()
        fill_space(writer)
        assert (x == 1).all() and (writer["x"] == 9).all()


def test_I9_the_hashes_of_an_array_that_a_reader_maps_keep_their_page(open_store: Open) -> None:
    """They have a page of their own. A check of the snapshot reads them."""
    with open_store(mode="x", max_size=64 << 20) as writer:
        writer.create_array("x", 63 * 512, "f8", fill_value=3.0, writeable=False)
        writer.commit()
        with open_store(mode="r") as reader:
            x = reader["x"]
            del writer["x"]
            writer.commit()
            for i in range(20):
                writer[f"y{i}"] = np.full(512 * (1 + i % 4), 7.0)
                writer.commit()
            assert reader.check().ok and (x == 3).all()


def test_I9_a_reader_of_many_arrays_has_few_locks(open_store: Open) -> None:
    """Each lock costs all that use the file. Of many arrays, it locks what lies between, too."""
    count = 150
    with open_store(mode="x", max_size=64 << 20) as writer:
        for i in range(count):
            writer.create_array(f"x{i}", 600, "f8", fill_value=float(i), writeable=False)
            writer[f"between{i}"] = np.zeros(600 + 512 * (i % 3))
        writer.commit()
        places = {offset_of(writer, f"x{i}") for i in range(count)}
        with open_store(mode="r") as reader:
            order = np.random.default_rng(3).permutation(count)
            held = {i: reader[f"x{i}"] for i in order}
            inode = f":{os.stat(writer.path).st_ino} "
            locks = [line for line in Path("/proc/locks").read_text().splitlines() if inode in line and "READ" in line]
            assert 64 <= len(locks) < 80
            for i in range(count):
                del writer[f"x{i}"]
            writer.commit()
            for opened in range(2):
                for i in range(80):
                    writer[f"new{opened}/{i}"] = np.full(600, 7.0)
                    writer.commit()
                    assert offset_of(writer, f"new{opened}/{i}") not in places
                assert all((x == i).all() for i, x in held.items())
                writer.close()
                writer = open_store(mode="r+", max_size=64 << 20)
            held.clear()
        gc.collect()
        for i in range(count):
            writer[f"last/{i}"] = np.full(600, 7.0)
            writer.commit()
        assert places & {offset_of(writer, f"last/{i}") for i in range(count)}
        writer.close()


def test_I20_another_array_with_the_same_bytes_in_the_place_of_a_constant_one(open_store: Open) -> None:
    """It may change, so that it is not mapped for the constant one."""
    writer = with_constant(open_store)
    with open_store(mode="r") as reader:
        before = offset_of(writer, "x")
        del writer["x"]
        writer.commit()
        writer["y"] = np.ones(N)
        writer.commit()
        assert offset_of(writer, "y") == before
        with contextlib.suppress(pmstore.StaleSnapshotError):
            x = reader["x"]
            for value in (5.0, 6.0):
                writer["y"][:] = value
                writer.commit()
            assert (x == 1).all()


def test_I9_space_that_was_freed_by_a_commit_that_readers_do_not_see_yet(tmp_path: Path) -> None:
    """durability="async": the deletion is committed and not durable, so that a reader maps the array after it."""
    writer = with_constant(at(tmp_path), durability="async", sync_interval=1e6)
    with writer, pmstore.open(writer.path, "r") as reader:
        del writer["x"]
        for i in range(130):
            writer[f"small{i}"] = i * np.ones(4)
        writer.commit()
        held = [writer[f"small{i}"] for i in range(130)]  # with so many arrays, those that are gone are sorted out
        x = reader["x"]
        writer.sync()
        fill_space(writer)
        writer.sync()
        assert (x == 1).all() and len(held) == 130


def test_I9_a_reader_maps_an_array_between_its_deletion_and_the_commit(tmp_path: Path) -> None:
    """Meanwhile, there are so many new arrays that those that are gone are sorted out."""
    with_constant(at(tmp_path)).close()
    with at(tmp_path)(mode="r+", max_size=64 << 20) as writer, pmstore.open(writer.path, "r") as reader:
        del writer["x"]
        held = [writer.create_array(f"small{i}", 4) for i in range(300)]
        x = reader["x"]
        writer.commit()
        fill_space(writer)
        assert (x == 1).all() and len(held) == 300


RECOVERY_IS_STOPPED = """
import os, signal, sys
from pathlib import Path
import numpy as np
import pmstore
from tests.conftest import run_in_fork
from tests.support import shim

path, died = Path(sys.argv[1]), Path(sys.argv[2])
reader = pmstore.open(path, "r")
with path.open("r+b") as file:
    file.write(died.read_bytes())
pid = os.fork()
if not pid:
    shim.begin(shim.EVERY, shim.STOP, 0, 1, path)
    store = pmstore.open(path, "r+", media="file")
    shim.end()
    print("x" in store, flush=True)
    for i in range(4):
        store[f"y{i}"] = np.full(5000, 7.0)
        store.commit()
    os._exit(0)
print(os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]))
x = reader["x"]
sys.stdout.flush()
os.kill(pid, signal.SIGCONT)
os.waitpid(pid, 0)
print((x == 1).all())
"""


@pytest.mark.no_sanitizer
def test_I9_a_reader_that_maps_an_array_while_a_recovery_deletes_it(tmp_path: Path, fault_library: Path) -> None:
    path, died = tmp_path / "store.pm", tmp_path / "died.pm"
    with with_constant(at(tmp_path), durability="async", sync_interval=1e6) as writer:
        before = path.read_bytes()
        del writer["x"]
        writer.commit()  # the durable marker does not name it: the next process that writes adopts it
        died.write_bytes(path.read_bytes())
    path.write_bytes(before)
    said = shim.run(fault_library, "-c", RECOVERY_IS_STOPPED, str(path), str(died))
    assert said.split() == ["True", "False", "True"]


def test_I9_where_a_mapping_keeps_no_lock_arrays_are_copied(overlay: Path) -> None:
    with with_constant(at(overlay)) as writer:
        reader = pmstore.open(writer.path, "r")
        x = reader["x"]
        reader.close()
        del reader
        gc.collect()
        del writer["x"]
        writer.commit()
        fill_space(writer)
        assert (x == 1).all()


def test_I9_threads_that_find_out_at_once_whether_a_mapping_keeps_a_lock(overlay: Path) -> None:
    with with_constant(at(overlay)) as writer:

        def held(_: int) -> list[Any]:
            found = []
            for _ in range(60):
                with pmstore.open(writer.path, "r") as reader:
                    found.append(reader["x"])
            return found

        with ThreadPoolExecutor(4) as pool:
            found = [x for some in pool.map(held, range(4)) for x in some]
        del writer["x"]
        writer.commit()
        fill_space(writer)
        assert all((x == 1).all() for x in found)


def mappings(path: str) -> int:
    return Path("/proc/self/maps").read_text().count(path)


STEPS = 6


def without_standard_input(directory: Path, number: int) -> None:
    """Descriptor 0 is free from one step on: the next file that is opened gets it."""

    def step(n: int) -> None:
        if n == number:
            os.close(0)

    step(0)
    writer = with_constant(at(directory))
    step(1)
    writer["y"] = np.ones(N)
    writer.create_array("z", N, fill_value=2.0, writeable=False)
    writer.commit()
    step(2)
    reader = pmstore.open(writer.path, "r")
    step(3)
    before = mappings(writer.path)
    x, z = reader["x"], reader["z"]
    assert mappings(writer.path) == before + 2, "they are not copied"
    step(4)
    del writer["x"]
    writer.commit()
    fill_space(writer)
    assert (x == 1).all() and (z == 2).all()
    assert reader.refresh() == writer.sequence and (reader["y3"] == 7).all()
    step(5)
    for store in (writer, reader):
        with store._opened_again() as fd:
            assert fd > 2
    reader.backup(directory / "backup.pm")
    with pmstore.open(directory / "backup.pm", "r", verify=True) as copy:
        assert (copy["y"] == 1).all() and len(copy) == 6
    reader.close()
    writer.close()
    del x, z, reader
    gc.collect()
    with contextlib.suppress(OSError):
        assert not stat.S_ISREG(os.fstat(0).st_mode)


@pytest.mark.parametrize("number", range(STEPS))
def test_a_process_without_a_standard_input(tmp_path: Path, number: int) -> None:
    run_in_fork(without_standard_input, tmp_path, number)


def past_the_cache(store: pmstore.Store) -> int:
    """How many descriptors of its file write past the page cache."""
    found = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    own = [link.name for link in found if link.is_symlink() and os.path.samestat(os.stat(store.path), link.stat())]
    flags = [re.search(r"flags:\s*(\d+)", Path(f"/proc/self/fdinfo/{name}").read_text()) for name in own]
    return sum(int(one[1], 8) & os.O_DIRECT != 0 for one in flags if one)


def stores_without_standard_input(directory: Path) -> None:
    os.close(0)
    stores = [pmstore.open(directory / name, "x", media="file") for name in ("first", "second")]
    for store in stores:
        x = store.create_array("x", 3)
        for value in range(3):  # small commits go past the cache
            x[:] = value
            store.commit()
    assert past_the_cache(stores[0]) == past_the_cache(stores[1])


def test_a_store_without_standard_input_writes_past_the_cache(tmp_path: Path) -> None:
    """No file system need take such writes: a second store is the measure."""
    run_in_fork(stores_without_standard_input, tmp_path)
