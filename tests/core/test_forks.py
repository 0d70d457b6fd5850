"""What a forked child goes on to see: the bytes of the fork, whatever becomes of the store (I18)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._values.array import address_of
from tests.conftest import Medium, run_in_fork
from tests.support import shim
from tests.support.restricted import filter_calls

PR_SET_CHILD_SUBREAPER = 36
LARGE = 300_000  # elements: over 1 MiB, so that the child maps it anew if it can't change


class Child:
    """A forked process that looks at something each time it is asked."""

    def __init__(self, look: Callable[[], Any], fork: Callable[[], int] = os.fork) -> None:
        asked, self._ask = os.pipe()
        self._said, saying = os.pipe()
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = fork()
        if self.pid == 0:
            os.close(self._ask)
            while question := os.read(asked, 1):
                try:
                    answer = str(look() if question == b"?" else os.execv("/bin/cat", ["cat"]))
                except BaseException:
                    answer = traceback.format_exc()
                os.write(saying, answer.encode()[:4000].ljust(4000))
            os._exit(0)
        os.close(asked)
        os.close(saying)

    def looks(self) -> str:
        os.write(self._ask, b"?")
        answer = b""
        while len(answer) < 4000 and (part := os.read(self._said, 4000 - len(answer))):
            answer += part
        return answer.decode().strip() or f"ended: {self.end()}"

    def end(self) -> int:
        # Children have each other's pipes, so that none is told by the end of its own.
        os.kill(self.pid, signal.SIGKILL)
        os.close(self._ask)
        os.close(self._said)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextlib.contextmanager
def ended_children() -> Iterator[Callable[..., Child]]:
    """Makes children, which are killed in the end."""
    children: list[Child] = []

    def fork(look: Callable[[], Any], **how: Any) -> Child:
        children.append(Child(look, **how))
        return children[-1]

    try:
        yield fork
    finally:
        for one in children:
            with contextlib.suppress(OSError):  # ended by the test
                one.end()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    with ended_children() as fork:
        yield fork


KINDS = {
    "small": (np.full(20, 2.0), {}),
    "small and fixed": (np.full(20, 2.0), {"writeable": False}),
    "pages": (np.full(5000, 2.0), {}),
    "pages, fixed": (np.full(5000, 2.0), {"writeable": False}),
    "large": (np.full(LARGE, 2.0), {}),
    "large, fixed": (np.full(LARGE, 2.0), {"writeable": False}),
}


def fill(store: pmstore.Store) -> dict[str, Any]:
    """An array of each kind, all 2.0; and the names."""
    for name, (value, how) in KINDS.items():
        store.create_array(name, value.shape, value.dtype, fill_value=2.0, **how)
    store.commit()
    return {name: store[name] for name in KINDS}


def seen(arrays: dict[str, Any]) -> Callable[[], str]:
    return lambda: ", ".join(name for name, array in arrays.items() if not (array == 2).all()) or "all of them"


def replace_everything(store: pmstore.Store) -> None:
    """All space that is free is taken, and all arrays are written.

    Many arrays live meanwhile, for then what is noted of each is sorted out.
    """
    for i in range(70):
        store[f"many{i}"] = np.full(5, 1.0)
    many = [store[f"many{i}"] for i in range(70)]
    for name in KINDS:
        if store[name].flags.writeable:
            store[name][...] = 3
    store.commit()
    for name in list(store):
        del store[name]
    store.commit()
    for i, (value, _) in enumerate(list(KINDS.values()) * 2):
        store[f"other{i}"] = np.full(value.shape, 77.0)
        store.commit()
    assert (many[69] == 1).all()


def test_I18_a_child_sees_no_commit_of_its_parent(open_store, child) -> None:
    store = open_store()
    arrays = fill(store)
    with store.transaction():
        arrays["pages"][:1024] = 2  # some pages are private, and equal
    one = child(seen(arrays))
    assert one.looks() == "all of them"
    for value in (4.0, 5.0):
        with store.transaction():
            for array in arrays.values():
                if array.flags.writeable:
                    array[...] = value
        store._catalog.core.checkpoint()
    assert one.looks() == "all of them"
    assert (arrays["large"] == 5).all() and store.check().ok


@pytest.mark.parametrize("how", ["os.fork", "C", "closing all descriptors", "rolled back"])
def test_I18_what_was_deleted_keeps_its_space_while_a_child_lives(open_store, child, how) -> None:
    store = open_store()
    arrays = fill(store)
    if how == "rolled back":
        fresh = store.create_array("fresh", LARGE, fill_value=2.0, writeable=False)
        arrays["fresh"] = fresh
    look = seen(arrays)
    if how == "closing all descriptors":
        keep = look

        def look() -> str:
            for fd in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):  # the one that lists them
                    if os.path.samestat(os.fstat(fd), os.stat(store.path)):
                        os.close(fd)
            return keep()

    libc = ctypes.PyDLL(None)
    first = child(seen({}))
    one = child(look, **({"fork": libc.fork} if how == "C" else {}))
    assert one.looks() == first.looks() == "all of them"
    first.end()
    store.rollback()
    del arrays, look
    if how == "rolled back":
        del fresh
    replace_everything(store)
    assert one.looks() == "all of them"
    assert store.check().ok


@pytest.mark.parametrize("mode", ["r", "a"])
def test_I18_after_the_parent_has_closed_the_store(open_store, child, mode) -> None:
    store = open_store()
    fill(store)
    store.close()
    store = open_store(mode=mode)
    arrays = {name: store[name] for name in KINDS}
    one = child(seen(arrays))
    store.close()
    store = open_store(mode="r+")
    replace_everything(store)
    store.close()
    with open_store(mode="r+") as store:
        replace_everything_again(store)
        assert store.check().ok
        assert one.looks() == "all of them"
        assert all((array == 2).all() for array in arrays.values())


def replace_everything_again(store: pmstore.Store) -> None:
    for name in list(store):
        store[name] = store[name] + 1


@pytest.mark.long_on("file")
def test_space_is_used_again_when_the_children_are_gone(open_store, child) -> None:
    """Workers that are forked anew, each while an array lives that is replaced afterwards. Two of them live at once."""
    store = open_store()
    store.create_array("data", 5000, fill_value=0.0, writeable=False)
    store.commit()
    sizes, workers = [], []
    for i in range(50):
        data = store["data"]
        workers.append(child(lambda data=data: data[0]))
        del store["data"]
        del data
        store.create_array("data", 5000, fill_value=i + 1.0, writeable=False)
        store.commit()
        if len(workers) > 2:
            one = workers.pop(0)
            assert i % 10 or one.looks() == str(i - 2.0)
            one.end()
        sizes.append(store.stats().region_used)
    assert sizes[-1] == sizes[10] and store.stats().file_size < 3 << 20


def test_space_is_used_again_after_reopening_when_the_children_are_gone(open_store, child) -> None:
    store = open_store()
    arrays = fill(store)
    one = child(seen(arrays))
    del arrays
    store.close()
    store = open_store()
    for name in list(store):
        del store[name]
    store.commit()
    used = store.stats().region_used
    before = store.stats().file_size
    store["kept apart"] = np.full(LARGE, 1.0)
    store.commit()
    grown = store.stats().file_size
    assert grown > before and one.looks() == "all of them"
    one.end()
    for i in range(3):
        store[f"a{i}"] = np.full(5000, 1.0)
        store.commit()
    assert store.stats().file_size == grown and store.stats().region_used > used


def test_a_grandchild_keeps_space_and_a_program_that_is_executed_does_not(open_store, child) -> None:
    store = open_store()
    store.create_array("data", LARGE, fill_value=2.0, writeable=False)
    store.commit()
    arrays = {"data": store["data"]}

    def look() -> str:
        said, saying = os.pipe()
        if not (pid := os.fork()):
            os.write(saying, b"yes" if (arrays["data"] == 2).all() else b"no")
            signal.pause()
        return f"{os.read(said, 3).decode()} {pid}"

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    executes = child(lambda: "there")
    os.write(executes._ask, b"x")
    assert os.read(executes._said, 1) == b"", "it does, and that has closed its pipe"
    one = child(look)
    answer, grandchild = one.looks().split()
    assert answer == "yes"
    one.end()
    del arrays["data"], store["data"]
    store.commit()
    try:
        store["more"] = np.zeros(LARGE)
        store.commit()
        size = store.stats().region_size
    finally:
        os.kill(int(grandchild), signal.SIGKILL)
        os.waitpid(int(grandchild), 0)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)
    store["again"] = np.zeros(LARGE - 5000)
    store.commit()
    assert store.stats().region_size == size, "the space of what was deleted"


def test_I18_where_the_parent_is_killed_and_the_store_recovered(open_store, medium: Medium, child) -> None:
    """What the log still has of an array that was there before is not written over one that is not committed."""
    asked, ask = os.pipe()
    said, saying = os.pipe()
    kept = []  # open, until the process is killed

    def parent() -> str:
        store = pmstore.open(medium.directory / "store.pm", media=medium.name)
        x = store.create_array("x", 5000)
        store.commit()
        x[:50] = 7  # logged
        store.commit()
        del x, store["x"]
        store.commit()
        pending = store.create_array("pending", 5000, fill_value=2.0, writeable=False)
        kept.append((store, pending))
        if not os.fork():
            os.close(ask)  # so that it ends with the process that asks
            os.write(saying, b"forked")
            if os.read(asked, 1):
                os.write(saying, str(np.unique(pending)).encode())
            os._exit(0)
        return os.read(said, 6).decode()

    one = child(parent)
    assert one.looks() == "forked", "the fork has given up the lock of the file"
    one.end()
    with open_store(mode="r+") as store:
        assert store.sequence == 3
        os.write(ask, b"?")
        assert os.read(said, 4000) == b"[2.]"
    for fd in (asked, ask, said, saying):
        os.close(fd)


def test_a_file_does_not_grow_with_every_opening_while_a_child_lives(open_store, child) -> None:
    store = open_store()
    arrays = fill(store)
    one = child(seen(arrays))
    del arrays
    store.close()
    sizes = []
    for i in range(8):
        with open_store(mode="r+") as store:
            store["pages"] = np.full(6000 + i, float(i))
            store.commit()
            sizes.append(store.stats().file_size)
    assert sizes[-1] == sizes[2] and one.looks() == "all of them"


def test_a_child_that_has_let_go_of_its_arrays_keeps_nothing(open_store, child) -> None:
    store = open_store()
    arrays = fill(store)

    def look() -> str:
        arrays.clear()
        return str(len(arrays))

    one = child(look)
    assert one.looks() == "0"
    arrays.clear()
    for name in KINDS:
        del store[name]
    store.commit()
    used = store.stats()
    store["large"] = np.full(LARGE - 5000, 3.0)
    store.commit()
    assert store.stats().region_size == used.region_size


def test_a_fork_while_a_store_is_being_closed(open_store, child) -> None:
    """Its core is gone, and it is still listed."""
    closing, store = open_store("closing"), open_store()
    closing.close()
    pmstore._store.store.open_stores.add(closing)

    def look() -> str:
        with pytest.raises(pmstore.ForkedStoreError):
            store.commit()
        return "fine"

    assert child(look).looks() == "fine"
    pmstore._store.store.open_stores.discard(closing)


def test_what_can_not_change_is_not_copied_whatever_read_it_before(open_store, child) -> None:
    store = open_store()
    many = [(f"a field with quite a long name, number {i}", "f8") for i in range(64)]
    store.create_array("table", 20_000, many, writeable=False)
    store.commit()
    table = store["table"]

    def anonymous() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

    before = anonymous()
    assert child(lambda: table.nbytes).looks() == str(20_000 * 512)
    assert anonymous() - before < 5000


def test_a_later_child_sees_what_took_the_place_of_a_large_array(open_store, child) -> None:
    """The large one was mapped anew in the first child, and so was no part of that fork; the other is part of this."""
    store = open_store()
    store.create_array("large", LARGE, "f8", fill_value=2.0, writeable=False)
    store.commit()
    arrays = {"large": store["large"]}
    first = child(seen(arrays))
    assert first.looks() == "all of them"
    first.end()
    place = arrays.pop("large").__array_interface__["data"][0]
    del store["large"]
    store.commit()
    kept = []
    for i in range(20):  # until one lies there
        kept.append(store.create_array(f"w{i}", LARGE // 8, "f8", fill_value=float(i)))
        store.commit()
    assert any(place <= address_of(w) < place + 8 * LARGE for w in kept)
    assert child(lambda: [float(w[0]) for w in kept]).looks() == str([float(i) for i in range(20)])


def test_the_parent_waits_for_no_child_that_is_stopped_or_killed(open_store, child) -> None:
    store = open_store()
    arrays = fill(store)
    stopped, killed = child(seen(arrays)), child(seen(arrays))
    os.kill(stopped.pid, signal.SIGSTOP)
    killed.end()
    del arrays
    replace_everything(store)
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.looks() == "all of them"


def test_forks_beside_threads_that_commit(open_store, child) -> None:
    """Whatever the child finds at first, which may be half of a write, as with any array, it finds for ever."""
    store = open_store()
    arrays = [store.create_array(f"w{i}", 20_000) for i in range(3)]
    store.commit()
    stop = threading.Event()

    def work(i: int) -> None:
        n = 0
        while not stop.is_set():
            n += 1
            with store.transaction():
                arrays[i][:] = n
                store[f"n{i}"] = n

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            first: list[bytes] = []

            def look(first: list[bytes] = first) -> bool:
                now = b"".join(array.tobytes() for array in arrays)
                first.append(now)
                return now == first[0]

            one = child(look)
            assert one.looks() == "True"
            was = store.sequence
            while store.sequence < was + 5:
                pass
            assert one.looks() == "True"
            one.end()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert store.check().ok


def test_after_a_fork_others_are_still_told_who_has_the_store(open_store, medium: Medium, child) -> None:
    store = open_store()
    arrays = fill(store)
    child(seen(arrays))
    code = f"import pmstore\ntry: pmstore.open({store.path!r})\nexcept pmstore.StoreLockedError as e: print(e.pid)"
    read, write = os.pipe()
    pid = os.posix_spawn(
        sys.executable, [sys.executable, "-c", code], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)]
    )
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read().strip() == str(os.getpid())


def test_I18_a_child_sees_the_arrays_of_a_snapshot(medium: Medium, child: Callable[..., Child]) -> None:
    """Whether they are copies, as most, or, if they never change, mappings of the store's file."""
    path = str(medium.directory / "s.pm")
    values = np.arange(float(LARGE))
    with pmstore.open(path, "w", media=medium.name) as store:
        store["changes"] = values
        store.create_array("constant", LARGE, fill_value=3, writeable=False)
        store.commit()
        with pmstore.open(path, "r") as reader:
            changes, constant = reader["changes"], reader["constant"]
            seen = child(lambda: np.array_equal(changes, values) and bool((constant == 3).all()))
            assert seen.looks() == "True"
            store.clear()
            store.commit()
            assert seen.looks() == "True"


def test_a_child_lets_the_file_go_whatever_the_number_of_its_descriptor(medium: Medium) -> None:
    """A program without a standard input has 0 free."""
    path = str(medium.directory / "s.pm")

    def program() -> None:
        os.close(0)
        with pmstore.open(path, media=medium.name):
            assert not os.path.exists("/proc/self/fd/0")
            run_in_fork(child)

    def child() -> None:
        with contextlib.suppress(OSError):
            assert not os.path.samestat(os.fstat(0), os.stat(path))

    run_in_fork(program)


def test_without_a_way_to_keep_space_a_child_gets_copies(open_store, child) -> None:
    """No descriptor is left for the lock that children keep."""
    import resource

    store = open_store()
    arrays = fill(store)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    asked, ask = os.pipe()
    said, saying = os.pipe()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        pid = os.fork()
        if pid == 0:
            os.read(asked, 1)
            os.write(saying, seen(arrays)().encode())
            os._exit(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del arrays
    replace_everything(store)
    os.write(ask, b"?")
    assert os.read(said, 4000) == b"all of them"
    os.waitpid(pid, 0)
    for fd in (asked, ask, said, saying):
        os.close(fd)


def test_where_no_lock_is_found_again_a_child_gets_copies(medium: Medium) -> None:
    """A mapping may be one of another file, which keeps no lock of this one (overlayfs)."""

    def program() -> None:
        try:
            filter_calls(look_at_locks=errno.EINVAL)
        except OSError as error:
            print(f"not here: {error}")
            return
        with pmstore.open(medium.directory / "s.pm", media=medium.name) as store, ended_children() as child:
            arrays = fill(store)
            one, other = child(seen(arrays)), child(seen(arrays))
            del arrays
            replace_everything(store)
            assert one.looks() == other.looks() == "all of them"
            assert store.check().ok

    run_in_fork(program)


def test_I18_where_a_mapping_keeps_no_lock_a_child_gets_copies(overlay: Path, child) -> None:
    store = pmstore.open(overlay / "store.pm", media="file")
    arrays = fill(store)

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(overlay.parent))

    before = mappings()
    one = child(seen(arrays))
    assert mappings() == before > 0
    del arrays
    replace_everything(store)
    assert one.looks() == "all of them"
    store.close()


def unpopulated(path: str) -> None:
    """Run in a child with the shim: madvise brings no pages into memory."""
    store = pmstore.open(path)
    arrays = fill(store)
    with ended_children() as child:
        shim.variable("fault_populate").value = errno.EINVAL
        one = child(seen(arrays))
        shim.variable("fault_populate").value = errno.ENOMEM
        nothing = child(seen(arrays))
        shim.variable("fault_populate").value = 0
        other = child(seen(arrays))
        with store.transaction():
            for array in arrays.values():
                if array.flags.writeable:
                    array[...] = 3
        store._catalog.core.checkpoint()
        assert one.looks() == other.looks() == "all of them"
        assert nothing.looks() == f"ended: {-signal.SIGSEGV}"
        assert seen(arrays)() == "small, pages, large" and store.check().ok
    store.close()


@pytest.mark.no_sanitizer  # which is preloaded too
def test_I18_without_a_way_to_bring_pages_into_memory(medium: Medium, fault_library: Path) -> None:
    """An older kernel knows none: the child sees the bytes of the fork all the same. Without memory for them, it gets a
    signal and never other bytes."""
    shim.call(fault_library, unpopulated, medium.directory / "store.pm")
