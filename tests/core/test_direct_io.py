"""Writes past the page cache: which of them are made, and what they leave behind. test_faults.py lets them fail."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import pmstore
from tests.conftest import run_in_fork
from tests.support import shim
from tests.support.shim import FROM_THEN, ONCE, Fault, direct_io, faults, pretend_ext4, variable

XFS_SUPER_MAGIC = 0x58465342

pytestmark = pytest.mark.no_sanitizer  # which is preloaded, as the shim is


def in_child(fault_library: Path, function: Callable[[str], None], directory: Path) -> None:
    if not direct_io(directory):
        pytest.skip("this file system has no writes past the page cache")
    shim.call(fault_library, function, directory)


def number(name: str) -> int:
    return int(variable(f"fault_{name}", ctypes.c_long).value)


def new(directory: str, name: str) -> pmstore.Store:
    """A store with an array whose column is a record of several parts, and one whose record is a page."""
    path = Path(directory) / f"{name}.pm"
    store = pmstore.open(path, "x", media="file")
    assert second_descriptors(path) == 0, "none is opened before it is needed"
    store.create_array("wide", (250, 512)), store.create_array("small", 3)
    store.commit()
    return store


def column(store: pmstore.Store) -> int:
    """The number of writes that the commit of a column begins."""
    before = number("begun")
    store["wide"][:, 3] += 1
    store.commit()
    return number("begun") - before


def page(store: pmstore.Store) -> int:
    """The number of durable writes past the page cache that the commit of a page makes."""
    before = number("past_cache")
    store["small"][0] += 1
    store.commit()
    return number("past_cache") - before


def second_descriptors(path: Path) -> int:
    """The number of this process's descriptors of the file that go past the page cache."""
    found = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            found += os.path.samestat(os.fstat(fd), os.stat(path)) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT > 0
        except OSError:  # of the list itself
            continue
    return found


def whole_pages(directory: str) -> None:
    pretend_ext4(True)
    with new(directory, "pages") as store:
        for _ in range(2):
            assert column(store) > 1 and page(store) == 1
            store._catalog.core.checkpoint()  # writes headers, which are no pages
    with pmstore.open(Path(directory) / "pages.pm", media="file") as store:
        assert column(store) > 1 and page(store) == 1
    assert number("unaligned") == 0


def test_they_are_whole_pages(directory: Path, fault_library: Path) -> None:
    in_child(fault_library, whole_pages, directory)


def let_go(directory: str) -> None:
    pretend_ext4(True)
    store = new(directory, "used")
    path = Path(directory) / "used.pm"
    for _ in range(2):
        column(store)
        assert (second_descriptors(path), number("contexts")) == (1, 1)

    arrays = [store["wide"], store["small"]]

    def child() -> None:
        assert second_descriptors(path) == 0
        others = {os.open("/dev/null", os.O_RDONLY) for _ in range(20)}
        arrays.clear()  # with the last array of its parent, the child lets go of the rest
        gc.collect()
        assert others | {0} <= set(map(int, os.listdir("/proc/self/fd"))), "its numbers may be in use again"

    run_in_fork(child)
    store.close()
    assert (second_descriptors(path), number("contexts"), number("direct")) == (0, 0, 1)
    store = pmstore.open(path, media="file")
    page(store)
    assert (second_descriptors(path), number("contexts")) == (1, 0)
    store.close()
    assert second_descriptors(path) == 0


def test_what_they_need_is_let_go(directory: Path, fault_library: Path) -> None:
    in_child(fault_library, let_go, directory)


def has_number_0(path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(0), os.stat(path))
    except OSError:  # it is free
        return False


def descriptor_0(directory: str) -> None:
    """A program without a standard input: what it opens next may get the number 0, and the store does not keep it."""
    pretend_ext4(True)
    store = new(directory, "zero")
    path = Path(directory) / "zero.pm"
    os.close(0)
    for _ in range(2):
        assert page(store) == 1 and column(store) > 1
        assert not has_number_0(path) and number("direct") == 1

    def child() -> None:
        assert second_descriptors(path) == 0

    run_in_fork(child)
    store.close()
    assert second_descriptors(path) == 0
    with pmstore.open(path, media="file") as store:
        assert not has_number_0(path) and page(store) == 1


def test_the_second_descriptor_does_not_have_the_number_0(directory: Path, fault_library: Path) -> None:
    in_child(fault_library, descriptor_0, directory)


def refusals(directory: str) -> None:
    pretend_ext4(True)
    store = new(directory, "first")
    with faults(Fault("io_setup", ONCE, errno.EAGAIN)):
        assert column(store) == 0
    store._drop(discard=True)  # as by a kill: the record is in the log
    with new(directory, "setup") as store:
        shim.begin(shim.IO_SETUP, FROM_THEN, errno.ENOSYS, 1)
        assert [column(store) for _ in range(3)] == [0, 0, 0]
        assert shim.count() == 1 and page(store) == 1
        shim.end()
    with new(directory, "getevents") as store:
        shim.begin(shim.IO_GETEVENTS, FROM_THEN, errno.EPERM, 1)
        assert [column(store) for _ in range(3)] == [0, 0, 0]
        assert shim.count() == 1 and page(store) == 1 and number("contexts") == 0
        shim.end()
        other = new(directory, "other")  # it may get a context of the same number
        assert column(other) > 1 and number("contexts") == 1
        store.close()
        assert number("contexts") == 1 and column(other) > 1 and page(other) == 1
        other.close()
    with new(directory, "later") as store:
        assert column(store) > 1
        shim.begin(shim.IO_GETEVENTS, FROM_THEN, errno.EPERM, 1)
        assert column(store) > 1 and number("contexts") == 0, "the kernel was asked to end them"
        assert [column(store) for _ in range(2)] == [0, 0]
        assert shim.count() == 1 and page(store) == 1
        shim.end()
    with new(directory, "submit") as store:
        shim.begin(shim.IO_SUBMIT, ONCE, errno.EAGAIN, 1)
        assert [column(store) for _ in range(3)] == [0, 0, 0]
        assert shim.count() == 1 and page(store) == 1
        shim.end()
    with new(directory, "write") as store, faults(Fault("pwritev2", ONCE, errno.EINVAL)):
        assert [page(store) for _ in range(3)] == [1, 0, 0] and column(store) == 0
    with new(directory, "result") as store:
        with faults(Fault("a write's end", ONCE, errno.EIO)):
            assert column(store) > 1
        assert column(store) > 1 and page(store) == 1, "this was an error of the disk, and no refusal"
    with new(directory, "open") as store:
        variable("fault_no_direct").value = errno.EMFILE
        before = number("direct")
        assert [page(store) for _ in range(3)] == [0, 0, 0] and column(store) == 0
        assert number("direct") == before + 1
    variable("fault_magic", ctypes.c_long).value = XFS_SUPER_MAGIC  # with blocks that files share
    with new(directory, "open-again") as store:
        before = number("direct")
        assert [page(store) for _ in range(3)] == [0, 0, 0] and column(store) == 0
        assert number("direct") == before
    assert number("contexts") == 0
    for path in Path(directory).glob("*.pm"):
        with pmstore.open(path, "r+", media="file", verify=True) as store:
            assert (store["wide"][:, 3] > 0).all() and (path.stem == "first" or store["small"][0] > 0)


def fewer_parts(directory: str) -> None:
    """The last part of a record fails. It is written through the cache, and not again with the next record, which has
    fewer parts."""
    pretend_ext4(True)
    store = new(directory, "fewer")

    def begun(rows: int) -> int:
        before = number("begun")
        store["wide"][:rows, 3] += 1
        store.commit()
        return number("begun") - before

    parts = begun(250)
    fewer = next(rows for rows in range(240, 10, -10) if begun(rows) == parts - 1)
    expected = store["wide"][:, 3] + 1
    with faults(Fault("a write's end", ONCE, errno.EIO, parts)):
        assert begun(250) == parts
    expected[:fewer] += 1
    assert begun(fewer) == parts - 1
    store._drop(discard=True)  # as by a kill: the log holds it all
    with pmstore.open(Path(directory) / "fewer.pm", "r+", media="file", verify=True) as store:
        assert (store["wide"][:, 3] == expected).all() and store.check().ok


def test_a_part_that_failed_is_written_once_more_and_not_twice(directory: Path, fault_library: Path) -> None:
    in_child(fault_library, fewer_parts, directory)


def test_what_refuses_them_is_not_asked_again(directory: Path, fault_library: Path) -> None:
    in_child(fault_library, refusals, directory)
