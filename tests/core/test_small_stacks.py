"""Threads with small stacks: no function of the core needs more than a few KiB of them.

`make strict` holds every frame of the core to 8 KiB; here whole operations run, one call inside another. 32 KiB is the
least that Python gives a thread. msgpack's `unpackb`, which decodes values and the layouts of arrays, needs 40 KiB by
itself, so what reads a name for the first time runs with 64 KiB here.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.conftest import Medium
from tests.core.test_build import run as run_builder

# Before Python 3.11 each call of a Python function takes some of the thread's stack, too.
SMALLEST, SMALL = (32 << 10, 64 << 10) if sys.version_info >= (3, 11) else (256 << 10, 256 << 10)


def in_thread(stack: int, function: Callable[[], None]) -> None:
    errors: list[str] = []

    def guarded() -> None:
        try:
            function()
        except BaseException:
            errors.append(traceback.format_exc())

    before = threading.stack_size(stack)
    try:
        thread = threading.Thread(target=guarded)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert not errors, errors[0]


def changes(store: pmstore.Store) -> None:
    """New arrays, slots, names, growth and rollback, without a look at what msgpack holds."""
    store["large"] = np.ones(300_000)
    store["value"] = {"k": [1, 2.5, {"z": "é"}]}
    large = store.create_array("slots", 300_000)
    store.commit()
    for _ in range(4):  # as a whole: the array gets a second slot
        with store.transaction():
            large += 1
    for i in range(300):  # the catalog's pages are split
        store[f"group/{i:03}"] = i
    store.commit()
    try:
        with store.transaction():
            large *= 2
            del store["group/003"]
            raise RuntimeError
    except RuntimeError:
        pass
    assert large[0] == 4 and "group/003" in store
    with store.transaction(only=[large[:5]]):
        large[:5] = 7
    store["grown"] = np.arange(400_000.0)
    large[::1000] = 9
    store.commit()


def everything(path: Path, media: str) -> None:
    with pmstore.open(path, "x", media=media) as store:
        changes(store)
        store.create_list("list").append(3.5)
        store.commit()
        assert store.check().ok
        killed = path.with_name("killed.pm")
        killed.write_bytes(path.read_bytes())
    with pmstore.open(killed, media=media, verify=True) as store:  # recovers
        assert store["slots"][0] == 9 and store["grown"][5] == 5 and store["value"]["k"][2] == {"z": "é"}
    with pmstore.open(killed, "r", media=media) as store:
        assert store.check().ok


@pytest.mark.no_sanitizer  # whose frames are larger
def test_arrays_are_written_with_the_smallest_stack(open_store: Callable[..., pmstore.Store]) -> None:
    store = open_store()
    in_thread(SMALLEST, lambda: changes(store))
    assert store["slots"][1000] == 9 and store.check().ok


@pytest.mark.no_sanitizer
def test_every_operation_with_a_small_stack(medium: Medium) -> None:
    in_thread(SMALL, lambda: everything(medium.directory / "store.pm", medium.name))


@pytest.mark.no_sanitizer
def test_asynchronous_commits_with_the_smallest_stack(open_store: Callable[..., pmstore.Store]) -> None:
    store = open_store(durability="async")
    w = store.create_array("w", 200_000)

    def run() -> None:
        for i in range(5):
            with store.transaction():
                w[:: i + 1] += 1
        store.sync()

    in_thread(SMALLEST, run)
    assert store.check().ok


@pytest.fixture
def stacks_that_nothing_has_room_for() -> Iterator[None]:
    """The default size, which `ulimit -s` sets, too. Threads that ask for a size of their own do not get it."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "pthread_setattr_default_np"):
        pytest.skip("the C library has no such function")
    before, huge = ctypes.create_string_buffer(256), ctypes.create_string_buffer(256)
    for attributes in (before, huge):
        assert libc.pthread_getattr_default_np(attributes) == 0
    assert libc.pthread_attr_setstacksize(huge, ctypes.c_size_t(1 << 60)) == 0
    assert libc.pthread_setattr_default_np(huge) == 0
    yield
    assert libc.pthread_setattr_default_np(before) == 0


def test_threads_of_the_core_have_small_stacks(
    stacks_that_nothing_has_room_for: None, open_store: Callable[..., pmstore.Store]
) -> None:
    with pytest.raises(RuntimeError, match="can't start new thread"):
        in_thread(0, lambda: None)
    store = open_store(durability="async")
    store["x"] = 1
    store.sync()


def test_the_compiler_refuses_large_frames() -> None:
    assert "-Wframe-larger-than=8192" in run_builder("--flags").stdout.split()
