"""Addresses, mappings and locked memory: how much of them a store takes, and what happens where they are limited."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import os
import re
import resource
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._store.commits import Commits
from tests.conftest import Medium, run_in_fork
from tests.store.test_threads_fork import in_fork
from tests.support import shim
from tests.support.shim import MAPPINGS, ONCE
from tests.support.template import python

MAP_FIXED_NOREPLACE = 0x100000
MIB = 1 << 20
LARGER_THAN_A_PART = 17 * MIB // 8  # elements: arrays that outlive their store are moved in parts of 16 MiB


def addresses() -> int:
    """Bytes of address space that this process has taken."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def limit_addresses(more: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (addresses() + more, resource.RLIM_INFINITY))


def mappings(of: str = "") -> int:
    return sum(of in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.long
@pytest.mark.parametrize("medium", ["memory"], indirect=True)
def test_thousands_of_stores_are_open_for_reading(medium: Medium) -> None:
    path = medium.directory / "s"
    with pmstore.open(path, media=medium.name) as store:
        store["x"] = np.arange(1000.0)
    size = os.path.getsize(path)

    def child() -> str:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        number = min(2000, (most - 100) // 2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        before = addresses()
        stores = [pmstore.open(path, "r", media=medium.name) for _ in range(number)]
        arrays = [store["x"] for store in stores]
        each = (addresses() - before) / number
        assert all(array[999] == 999 for array in arrays)
        assert each < 3 * size + MIB, each
        for store in stores:
            store.close()
        assert all(array[999] == 999 for array in arrays)
        return "fine"

    assert in_fork(child) == "fine"


@pytest.mark.no_sanitizer
def test_a_store_for_writing_takes_few_addresses(open_store) -> None:
    before = addresses()
    for i in range(20):
        open_store(f"s{i}")
    assert addresses() - before < 20 * 5 << 30


def test_a_store_that_grows_shows_its_file_and_no_more(open_store) -> None:
    """The addresses behind it may be those of others."""
    store = open_store()
    for i in range(3):
        store.create_array(f"a{i}", 3 * MIB, fill_value=i)
        store.commit()
    file, shown = os.stat(store.path), 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        range_, _, offset, _, inode, *_ = line.split()
        if int(inode) == file.st_ino:
            begin, end = range_.split("-")
            shown = max(shown, int(offset, 16) + int(end, 16) - int(begin, 16))
    assert 0 < shown <= file.st_size


@pytest.mark.long_on("file")
@pytest.mark.no_sanitizer
def test_a_store_outgrows_the_addresses_that_it_kept(medium: Medium) -> None:
    def child() -> str:
        limit_addresses(700 * MIB)  # so few are kept at first
        other = pmstore.open(medium.directory / "other", media=medium.name)  # which is open as well
        with pmstore.open(medium.directory / "s", media=medium.name) as store:
            w = store.create_array("w", 1000, fill_value=1)
            place = w.ctypes.data
            for i in range(4):
                store.create_array(f"a{i}", 3 * MIB, fill_value=i)
                w += 1
                store.commit()
            assert store.stats().region_size > 96 * MIB
            assert store["w"].ctypes.data == place and (w == 5).all() and store.check().ok
        other.close()
        with pmstore.open(medium.directory / "s", "r", media=medium.name) as store:
            assert all((store[f"a{i}"] == i).all() for i in range(4)) and (store["w"] == 5).all()
        return "fine"

    assert in_fork(child) == "fine"


FIRST = """
import sys
import pmstore
from tests.core.test_address_space import MIB, limit_addresses
path, medium = sys.argv[1:]
limit_addresses(700 * MIB)
with pmstore.open(path, media=medium) as store:
    for i in range(4):
        store.create_array(f"a{i}", 3 * MIB, fill_value=i)
        store.commit()
print("fine")
"""


@pytest.mark.long_on("file")
@pytest.mark.no_sanitizer
def test_the_first_store_of_a_process_outgrows_them_too(medium: Medium) -> None:
    done = python("-c", FIRST, medium.directory / "s", medium.name)
    assert done.stdout == "fine\n", done.stdout + done.stderr


TAKEN = """
import ctypes, mmap, resource, sys
from pathlib import Path
import pmstore
from tests.core.test_address_space import MIB, limit_addresses
path, medium, halves = sys.argv[1:]
pmstore.open(path, media=medium).close()  # it has its name from now on
limit_addresses(700 * MIB)
store = pmstore.open(path, media=medium)
store["a"] = 1
store.commit()
lines = Path("/proc/self/maps").read_text().splitlines()
at = next(i for i, line in enumerate(lines) if path in line and "rw-p" in line)
end = int(lines[at + 1].split("-")[1].split()[0], 16)  # of what is kept behind what is mapped
kept = end - int(lines[at].split("-")[0], 16)
place = end + kept // 2 * int(halves) // mmap.PAGESIZE * mmap.PAGESIZE + mmap.PAGESIZE
take = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
assert take(("mmap", ctypes.CDLL(None)))(place, 1, 0, 0x100000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0) == place
try:
    store.create_array("large", kept * 7 // 5, "u1")  # two fifths behind it
except pmstore.OutOfSpaceError as error:
    print(error)
store.rollback()
store["b"] = 2
store.close()
with pmstore.open(path, media=medium) as store:
    store.create_array("c", 3 * MIB)
    print(store["b"])
"""


@pytest.mark.long_on("file")
@pytest.mark.no_sanitizer
@pytest.mark.parametrize(("halves", "says"), [(0, ".*open it again.*2\n"), (1, "2\n")])
def test_where_the_addresses_behind_are_taken_the_error_says_so(medium: Medium, halves: int, says: str) -> None:
    """The process has no threads: their memory may lie beside a store's, and look like a part of it."""
    done = python("-c", TAKEN, medium.directory / "s", medium.name, halves)
    assert re.fullmatch(says, done.stdout, re.DOTALL), done.stdout + done.stderr


@pytest.mark.long_on("file")
@pytest.mark.no_sanitizer
def test_a_store_opens_where_few_addresses_are_left(medium: Medium) -> None:
    """It keeps a part of the limit for its growth, and here less is left than that."""

    def child() -> str:
        taken = mmap.mmap(-1, 4 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, 0)  # MAP_NORESERVE
        limit_addresses(64 * MIB)
        for i in range(3):
            with pmstore.open(medium.directory / "s", media=medium.name) as store:
                store[f"a{i}"] = np.full(MIB // 8, i)
        taken.close()
        with pmstore.open(medium.directory / "s", "r", media=medium.name) as store:
            return "fine" if all((store[f"a{i}"] == i).all() for i in range(3)) else "lost"

    assert in_fork(child) == "fine"


@pytest.mark.long_on("file")
@pytest.mark.no_sanitizer
@pytest.mark.parametrize("mode", ["r", "a"])
def test_an_error_names_the_limit_of_addresses(medium: Medium, mode) -> None:
    path = medium.directory / "s"
    with pmstore.open(path, media=medium.name) as store:
        store.create_array("x", 8 * MIB)

    def child() -> str:
        limit_addresses(40 * MIB)
        with pytest.raises(pmstore.OutOfMemoryError, match=r"limited to \d+ MiB.*ulimit -v") as raised:
            pmstore.open(path, mode, media=medium.name)
        needed = re.search(r"(\d+) MiB are needed", str(raised.value))
        assert needed and 8 <= int(needed[1]) <= 8192
        np.empty(4 * MIB)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        pmstore.open(path, mode, media=medium.name).close()
        return "fine"

    assert in_fork(child) == "fine"


@pytest.mark.long_on("file")
@pytest.mark.no_sanitizer
def test_without_memory_for_living_arrays_a_store_stays_open(medium: Medium) -> None:
    def child() -> str:
        path = medium.directory / "s"
        pmstore.open(path, media=medium.name).close()
        store = pmstore.open(path, media=medium.name)
        w = store.create_array("w", 8 * MIB, fill_value=1)
        store.commit()
        assert mappings(str(path))
        w[0] = 2
        limit_addresses(MIB)
        for leave in (store.close, lambda: store.__exit__(None, None, None)):
            with pytest.raises(pmstore.OutOfMemoryError, match="still alive"):
                leave()
            assert not store.closed and store["w"] is w and store.sequence == 2
        w[1] = 3
        store.commit()
        assert pmstore.open(path) is store  # as often as before
        store.close()
        assert not store.closed
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        store.close()
        assert w[:3].tolist() == [2, 3, 1] and not mappings(str(path))
        with pmstore.open(path, "r") as store:
            assert store["w"][:3].tolist() == [2, 3, 1]
        return "fine"

    assert in_fork(child) == "fine"


@pytest.mark.no_sanitizer
def test_a_store_that_could_not_be_closed_syncs_in_the_background_again(tmp_path: Path) -> None:
    def child() -> str:
        store = pmstore.open(tmp_path / "s", durability="async")
        w = store.create_array("w", 8 * MIB, fill_value=1)
        store.commit()
        threads = len(os.listdir("/proc/self/task"))
        limit_addresses(MIB)
        with pytest.raises(pmstore.OutOfMemoryError):
            store.close()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert len(os.listdir("/proc/self/task")) == threads and w[0] == 1
        store.close()
        return "fine"

    assert in_fork(child) == "fine"


@pytest.mark.no_sanitizer
def test_a_store_without_memory_for_late_syncs_goes_on_as_before(tmp_path: Path) -> None:
    """Whatever lacks: a further mapping of the file, or a stack for the thread."""

    def child() -> str:
        store = pmstore.open(tmp_path / "s", media="file")
        w = store.create_array("w", 20_000, fill_value=0)
        for more in range(0, 64 * MIB, 16 << 10):
            limit_addresses(more)
            try:
                store._catalog.core.commit_async(1.0)
                break
            except (MemoryError, pmstore.StoreIOError):
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            w[:9] += 1
            store.commit()
            assert store.check().ok
        assert w[0] > 0
        return "fine"

    assert in_fork(child) == "fine"


@pytest.mark.no_sanitizer
def test_a_store_with_late_syncs_gives_its_addresses_back(directory: Path) -> None:
    def child() -> str:
        taken = []
        for _ in range(5):
            for i in range(60):
                with pmstore.open(directory / "s", media="file", durability="async") as store:
                    store["n"] = i
            taken.append(addresses())
        more = [after - before for before, after in itertools.pairwise(taken)]
        assert min(more) < 30 * mmap.PAGESIZE, more  # the allocator takes some now and then
        return "fine"

    assert in_fork(child) == "fine"


def syncs_late_without(path: str) -> None:
    """Each request for a mapping is refused in turn, and one for a thread."""
    pmstore.open(path, "x", media="file").close()
    for at in itertools.count(1):
        shim.begin_memory(ONCE, at, MAPPINGS)
        try:
            with pmstore.open(path, "r+", media="file", durability="async") as store:
                store["n"] = at
                store.commit()
                store.sync()
        except (pmstore.OutOfMemoryError, pmstore.StoreIOError):
            assert shim.hits()
        refused = shim.hits()
        shim.end()
        with pmstore.open(path, "r", verify=True) as store:
            assert store.check().ok and (refused or store["n"] == at)
        if not refused:
            break
    assert at > 5


@pytest.mark.no_sanitizer
def test_a_store_for_late_syncs_where_mappings_are_refused(directory: Path, fault_library: Path) -> None:
    """It is not opened, or does without."""
    shim.call(fault_library, syncs_late_without, directory / "s")


def test_a_commit_in_close_that_lacks_memory_leaves_all_pending(open_store, monkeypatch) -> None:
    store = open_store()
    store["a"] = 1

    def refused(self: object, only: object = None, *, closing: bool = False) -> None:
        raise pmstore.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Commits, "commit_now", refused)
        with pytest.raises(pmstore.OutOfMemoryError):
            store.close()
    assert not store.closed and store["a"] == 1 and store.sequence == 0
    store.close()
    assert open_store(mode="r")["a"] == 1


@pytest.mark.long_on("file")
@pytest.mark.no_sanitizer
def test_a_store_that_is_collected_without_memory_for_its_arrays_stays_locked(medium: Medium) -> None:
    """They go on to show the file, so that nobody else may change it."""

    def child() -> str:
        path = medium.directory / "s"
        store = pmstore.open(path, media=medium.name)
        w = store.create_array("w", 8 * MIB, fill_value=1)
        store.commit()
        limit_addresses(MIB)
        with pytest.warns(ResourceWarning):
            del store
            gc.collect()
        with pytest.raises(pmstore.StoreLockedError):
            pmstore.open(path)
        return "fine" if w.min() == w.max() == 1 else "changed"  # there is no memory for an array of truth values

    assert in_fork(child) == "fine"


def test_arrays_that_outlive_their_store_take_one_mapping(open_store) -> None:
    """The system allows a process some 65,000."""
    store = open_store()
    for i in range(300):
        store[f"a{i}"] = np.full(600, i)  # pages of their own
        store[f"s{i}"] = i * np.ones(5)
    store.create_array("large", 5 * MIB, fill_value=7.0, writeable=False)
    store.close()
    store = open_store()  # by the name that its mappings have from now on
    arrays = {name: store[name] for name in store}
    assert mappings(store.path)
    before = mappings()
    store.close()
    assert mappings() <= before + 8 and not mappings(store.path)
    with open_store(mode="r+") as store:
        for name in list(store):
            store[name] = store[name] - 1000
    os.truncate(store.path, 0)
    large = arrays.pop("large")
    assert (large == 7).all() and all((array == int(name[1:])).all() for name, array in arrays.items())


def test_a_child_that_lets_go_of_a_store_unmaps_nothing_of_its_own(open_store) -> None:
    """The file is not mapped in the child: what the child has mapped in its place stays there."""
    open_store().close()
    store = open_store()  # by the name that its mappings have from now on
    arrays = [store.create_array("x", 1000)]
    store.commit()
    lines = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if store.path in line]
    places = [[int(end, 16) for end in line.split("-")] for line in lines]

    def child() -> None:
        memory = [own for start, end in places if (own := mapped_at(start, end - start))]
        assert memory, "nothing of the file is missing here"
        for own in memory:
            own[:] = b"\7" * len(own)
        arrays.clear()
        store.close()
        gc.collect()
        assert all(own[:] == b"\7" * len(own) for own in memory)

    run_in_fork(child)
    store.close()


def mapped_at(start: int, size: int) -> ctypes.Array[ctypes.c_char] | None:
    """Memory at an address; None: something is there already."""
    how = MAP_FIXED_NOREPLACE | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    call = ctypes.CDLL(None).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    at = call(start, size, mmap.PROT_READ | mmap.PROT_WRITE, how, -1, 0)
    return (ctypes.c_char * size).from_address(start) if at == start else None


@pytest.mark.long_on("file")
@pytest.mark.parametrize("durability", ["sync", "async"])
def test_memory_may_be_locked(medium: Medium, durability) -> None:
    def child() -> str:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mlockall(1):
            return f"no mlockall: {os.strerror(ctypes.get_errno())}"
        libc.munlockall()
        for before, after in ((3, 0), (0, 1)):  # MCL_CURRENT | MCL_FUTURE, and MCL_CURRENT
            libc.mlockall(before) if before else None
            store = pmstore.open(medium.directory / "s", "w", media=medium.name, durability=durability)
            w, rows = store.create_array("w", 100_000), store.create_array("rows", (1000, 128))
            store.commit()
            libc.mlockall(after) if after else None
            for i in range(1, 5):
                with store.transaction():
                    w += 1
                    rows[i] = i
                    store["n"] = i
                rows[7] = w[:128] = -1
                del store["n"]
                store.rollback()
                store["new"] = np.full(50_000, i)
            store.release()
            store.sync()
            assert (w == 4).all() and store["n"] == 4 and rows[:5, 0].tolist() == [0, 1, 2, 3, 4] and not rows[5:].any()
            assert store.check().ok
            store.close()
            libc.munlockall()
        return "fine"

    answer = in_fork(child)
    if answer.startswith("no mlockall"):
        pytest.skip(answer)
    assert answer == "fine"


def locked_on_an_older_kernel(path: str, media: str) -> None:
    """Run in a child with the shim. A rollback drops what was written."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(3):
        print(f"no mlockall: {os.strerror(ctypes.get_errno())}", end="")
        return
    shim.variable("fault_no_drop_locked").value = 1
    with pmstore.open(path, "x", media=media) as store:  # type: ignore[call-overload]
        w = store.create_array("w", 100_000)
        for i in range(1, 4):
            w += 1
            store.commit()
            w[::100] = -1
            store.rollback()
            assert (w == i).all()
    print("fine", end="")


@pytest.mark.long_on("file")
@pytest.mark.no_sanitizer
def test_memory_may_be_locked_before_linux_5_18(medium: Medium, fault_library: Path) -> None:
    answer = shim.call(fault_library, locked_on_an_older_kernel, medium.directory / "s", medium.name)
    if answer.startswith("no mlockall"):
        pytest.skip(answer)
    assert answer == "fine"


LIMITED = """
import resource, sys
import numpy as np
import pmstore
path, media, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
stores = []
for i in range(2):
    store = pmstore.open(f"{path}{i}", "x", media=media)
    store["a"] = np.arange(3_000_000.0)
    store.commit()
    store["a"][:] = 1
    store["b"] = np.ones(100_000)
    store.commit()
    assert store.check().ok
    store.close()
    stores.append(pmstore.open(f"{path}{i}", "r", media=media))
assert all(store["a"].sum() == 3_000_000 for store in stores)
"""


@pytest.mark.long_on("file")
@pytest.mark.no_sanitizer
@pytest.mark.parametrize(
    "gibibytes", [1, 20, 64.5, 200, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 33, 70, 129))]
)
def test_stores_open_where_address_space_is_limited(medium: Medium, child, gibibytes):
    limit = int(gibibytes * (1 << 30))
    child(LIMITED, medium.directory / "s", medium.name, limit).end()


AT_EXIT = """
import atexit, resource, sys
import numpy as np

def report():
    anonymous = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    print(int(anonymous[0].split()[1]) - before, flush=True)

atexit.register(report)  # runs after pmstore's own
import pmstore
store = pmstore.open(sys.argv[1], "x", media=sys.argv[2])
a = store.create_array("a", 8_000_000)
store.commit()
store.release()
a.sum()
before = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")][0]
"""


def test_a_process_that_ends_copies_no_arrays(medium: Medium, child):
    """Arrays of a store that is left open need no memory of their own at exit: that could be all that there is."""
    more = int(child(AT_EXIT, Path(medium.directory) / "exit.pm", medium.name).end())
    assert more < 20_000  # kB, of an array of 64 MB


def closed_without(folder: str, media: str) -> None:
    """Run in a child with the shim, which refuses each request of close() for mappings in turn."""
    path = f"{folder}/s"
    with pmstore.open(path, "x", media=media) as store:  # type: ignore[call-overload]
        store.create_array("large", LARGER_THAN_A_PART)
    errors = []
    for at in range(1, 5):
        before = addresses()
        store = pmstore.open(path, "r+", media=media)  # type: ignore[call-overload]
        large = store["large"]
        large[0] = large[-1] = at
        store.commit()
        shim.begin_memory(ONCE, at, MAPPINGS)
        try:
            store.close()
        except (pmstore.OutOfMemoryError, pmstore.StoreIOError) as error:
            assert "still alive" in str(error)
            errors.append(type(error))
        shim.end()
        if not store.closed:
            assert store["large"] is large
            store.close()
        with pmstore.open(path, "r+", media=media, verify=True) as store:  # type: ignore[call-overload]
            assert store["large"][[0, 5, -1]].tolist() == [at, 0, at]
            store["large"][:] = -1
            store.commit()
            store["large"][:] = 0
        assert large[0] == at and (large[-1] == at or at == 3)
        del large
        gc.collect()
        assert not mappings(path) and addresses() < before + 16 * MIB, "of 17 that the array has"
    assert errors == [pmstore.OutOfMemoryError] * 2 + [pmstore.StoreIOError]


@pytest.mark.long_on("file")
@pytest.mark.no_sanitizer
def test_arrays_that_outlive_their_store_where_mappings_are_refused(medium: Medium, fault_library: Path) -> None:
    """The store stays open until their first part has been moved. Then it is closed, and the rest of them may show the
    file."""
    shim.call(fault_library, closed_without, medium.directory, medium.name)


def waits_without(path: str) -> None:
    """A reader that can't map the page of the file that tells of commits. What is there already needs no wait."""
    with pmstore.open(path, "x") as writer, pmstore.open(path, "r") as reader:
        writer["x"] = 1
        writer.commit()
        shim.begin_memory(ONCE, 1, MAPPINGS)
        assert reader.wait(0, timeout=60) == (1, "commit")
        with pytest.raises(pmstore.StoreIOError, match="can't be waited for: .* without shared mappings"):
            reader.wait(1, timeout=1)
        shim.end()


@pytest.mark.long_on("file")
@pytest.mark.no_sanitizer
def test_commits_that_can_not_be_waited_for(medium: Medium, fault_library: Path) -> None:
    shim.call(fault_library, waits_without, medium.directory / "store.pm")
