"""Two threads compare large arrays that nothing watches (csrc/commit/parallel_compare.h): all that changed is found,
and nothing else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import pmstore
from tests.conftest import LONGER, Medium
from tests.core.test_trackers import committed
from tests.store.test_threads_fork import in_fork, signals_blocked
from tests.support.places import offset_of
from tests.support.programs import CSRC, compiled

PAGE = 512  # float64
PAGES = 1500  # two threads compare 1024 pages and more, 64 at a time, as they stand in the file
Opener = Callable[..., pmstore.Store]


@pytest.fixture(autouse=True)
def nothing_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMSTORE_TRACKER", "compare")


@pytest.mark.long_on("file")
@pytest.mark.longer
@settings(max_examples=12 * LONGER, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 70),
    st.sampled_from([0, 1, 100, PAGE - 1]),
    st.lists(st.tuples(st.integers(0, PAGES), st.sampled_from([1, 2, 63, 64, 65, 700])), max_size=6),
)
@example(0, 1, [(PAGES, 1)])  # the last page, of which one word is used
@example(1, 0, [(0, 1), (PAGES - 1, 1)])
@example(0, 0, [(PAGES, 1), (0, 1)])  # behind the end, then not
@example(3, 0, [])
@example(3, 0, [(0, PAGES)])
def test_what_changed_is_found(medium: Medium, before: int, rest: int, runs: list[tuple[int, int]]) -> None:
    path = medium.directory / "large.pm"
    with pmstore.open(path, "w", media=medium.name) as store:
        if before:
            store["before"] = np.arange(before * PAGE, dtype="f8")  # so that parts begin anywhere in what follows
        w = store.create_array("w", PAGES * PAGE + rest, "f8")
        store["behind"] = np.arange(3.0 * PAGE)
        store.commit()
        expected = np.zeros_like(w)
        for number in (1, 2):
            for page, pages in runs:
                at = slice(page * PAGE, (page + pages) * PAGE, 37)
                w[at] += number
                expected[at] += number
            changed = store.sequence
            store.commit()
            assert store.sequence == changed + any(page * PAGE < w.size for page, _ in runs)
            copy = store.sequence
            store.commit()
            assert store.sequence == copy  # nothing is found that is not there
    with pmstore.open(path, "r", verify=True) as store:
        np.testing.assert_array_equal(store["w"], expected)
        np.testing.assert_array_equal(store["behind"], np.arange(3.0 * PAGE))
        assert store.check().ok


def test_more_than_a_log_takes(open_store: Opener) -> None:
    """What is found is gathered, counted as it overflows the log, and gathered again."""
    store = open_store()
    w = store.create_array("w", (PAGES, PAGE), "f8")
    store.commit()
    expected = np.zeros((PAGES, PAGE))
    for number in range(1, 4):
        w[number::2] = number
        expected[number::2] = number
        store.commit()
        np.testing.assert_array_equal(committed(store)["w"], expected)


def test_it_is_done_behind_no_ones_back(open_store: Opener) -> None:
    """A fork has no second thread; and does not wait for one."""
    store = open_store()
    w = store.create_array("w", (PAGES, PAGE), "f8")
    store.commit()

    def in_the_child() -> str:
        assert (w[number::100] == number + 1).all()
        with pytest.raises(pmstore.Error):
            store.commit()
        store.close()
        return "refused"

    for number in range(6):
        w[number::100] = number + 1
        store.commit()
        assert in_fork(in_the_child) == "refused"
    assert store.check().ok


ALONE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np, pmstore
before = len(os.listdir("/proc/self/task"))
with pmstore.open(sys.argv[1], "w") as store:
    w = store.create_array("w", (1500, 512), "f8")
    store.commit()
    w[3::100] = 1
    store.commit()
    assert len(os.listdir("/proc/self/task")) == before
with pmstore.open(sys.argv[1]) as store:
    assert store["w"].sum() == 15 * 512
"""


def test_on_one_processor_there_is_no_second_thread(medium: Medium) -> None:
    path = str(medium.directory / "alone.pm")
    subprocess.run([sys.executable, "-c", ALONE, path], check=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})


@pytest.mark.no_sanitizer  # whose own threads come and go
def test_a_second_thread_takes_no_signals_but_those_of_its_own_faults(open_store: Opener) -> None:
    """What it blocked of them would end the process without a word, where the program's handler of SIGBUS says that the
    file was cut short or can't be read.
    """
    before = signals_blocked()
    store = open_store()
    w = store.create_array("w", (PAGES, PAGE), "f8")
    store.commit()
    started = [1 << 31]
    while any(mask >> 31 & 1 for mask in started):  # the C library's own: it has not begun
        w[3::100] += 1
        store.commit()
        started = [mask for thread, mask in signals_blocked().items() if thread not in before]
    if len(os.sched_getaffinity(0)) > 1:
        assert started
    own = {signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL}
    for mask in started:
        assert not any(mask >> number - 1 & 1 for number in own)
        assert all(mask >> number - 1 & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1))


def page_faults() -> dict[str, int]:
    """How many pages each thread was the first to touch."""
    stats = {one.name: (Path(one) / "stat").read_text() for one in os.scandir("/proc/self/task")}
    return {thread: int(stat.rpartition(")")[2].split()[7]) for thread, stat in stats.items()}


@pytest.mark.no_sanitizer  # whose own threads touch pages
def test_a_second_thread_compares_a_part(tmp_path: Path) -> None:
    """A single commit may be over before it is awake."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is no second thread")
    before = page_faults()
    with pmstore.open(tmp_path / "s.pm", media="file") as store:
        w = store.create_array("w", (PAGES, PAGE), "f8")
        store.commit()
        for number in range(1000):
            store.release()  # the next to read a page is the first to touch it
            w[3::100] = number
            store.commit()
            if sum(count for thread, count in page_faults().items() if thread not in before) > 10:
                return
    raise AssertionError("it did nothing")


def test_what_is_withdrawn_has_ended_or_never_begins(tmp_path: Path) -> None:
    """The comparison's state may be gone then."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is no second thread")
    sources = [
        Path(__file__).with_name("helper.c"),
        *(CSRC / f"base/{one}.c" for one in ("helper", "thread", "schedule")),
    ]
    program = compiled(tmp_path / "helper", sources, "-pthread")
    done = subprocess.run([program, "200"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 100 < int(done.stdout) < 590


def test_pages_of_ones_that_change(store: pmstore.Store) -> None:
    """Bytes of 255, as -1 or a mask has them, are compared like others."""
    x = store.create_array("x", (PAGES, 8 * PAGE), "u1", fill_value=255)
    store.commit()
    x[::7, 5] = 7
    store.commit()
    x[1::7] = 3
    store.commit()
    assert np.array_equal(committed(store)["x"], x)


def test_an_array_of_over_64_mib(store: pmstore.Store) -> None:
    """Its parts have 128 pages: there are never more than 256 parts."""
    pages = 256 * 64 + 200
    w = store.create_array("w", (pages, PAGE), "f8")
    store.commit()
    changed = [0, 63, 64, 127, 128, 9999, pages - 129, pages - 1]
    w[changed, 5] = 1
    store.commit()
    sequence = store.sequence
    store.commit()
    assert store.sequence == sequence  # nothing is found that is not there
    found = committed(store)["w"][:, 5]
    assert np.flatnonzero(found).tolist() == changed


@pytest.fixture
def store_by_pagemap(open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> pmstore.Store:
    monkeypatch.setenv("PMSTORE_TRACKER", "pagemap")
    try:
        return open_store()
    except pmstore.StoreIOError as error:
        pytest.skip(str(error))


def test_the_array_behind_one_with_two_slots(store_by_pagemap: pmstore.Store) -> None:
    """Its pages are not compared with what stands behind the second slot of the other."""
    store = store_by_pagemap
    w = store.create_array("w", (PAGES, PAGE), "f8")
    x = store.create_array("behind", (70, PAGE), "f8")
    store.commit()
    for number in range(1, 6):
        w[:] = number
        store.commit()
    store["behind the slot"] = np.full((70, PAGE), 7.0)
    store.commit()
    first, second, third = (offset_of(store, name) for name in ("w", "behind", "behind the slot"))
    assert third - second > second - first > 0, "the second slot lies between them"
    x[:] = 7
    w[: PAGES // 3] = -1
    store.commit()
    assert (committed(store)["behind"] == 7).all()


def test_the_array_before_one_with_two_slots(store_by_pagemap: pmstore.Store) -> None:
    """Its pages are not compared with what stands before the second slot of the other: more than a log takes is
    gathered twice, and the second time finds the changes that are left.
    """
    store = store_by_pagemap
    x = store.create_array("before", (70, PAGE), "f8")
    w = store.create_array("w", (PAGES, PAGE), "f8")
    store["before the slot"] = np.full((70, PAGE), 7.0)
    store.commit()
    for number in range(1, 6):
        w[:] = number
        store.commit()
    store["behind the slot"] = np.ones(PAGE)
    store.commit()
    first, second, third = (offset_of(store, name) for name in ("w", "before the slot", "behind the slot"))
    assert third - second > second - first > 0, "the second slot lies between them"
    x[:] = 7
    w[::2] = -1
    store.commit()
    assert (committed(store)["before"] == 7).all()
