"""What progress() of an import may do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.interchange.test_import import refused
from tests.store.test_attributes import seen
from tests.store.test_interrupts import raised_at


def in_a_transaction(store: pmstore.Store) -> None:
    with store.transaction():
        pass


ENDS = {
    "commit": pmstore.Store.commit,
    "roll back": pmstore.Store.rollback,
    "close": pmstore.Store.close,
    "commit in a transaction": in_a_transaction,
}


@pytest.mark.parametrize("what", ENDS)
def test_progress_does_not_end_what_is_pending(store: pmstore.Store, tmp_path: Path, what: str) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3000), b=np.arange(3000))
    store["before"] = 1
    store.commit()
    sequence, text = store.sequence, r"progress\(\) of load_into\(\) can't commit, roll back or close the store"
    refused(store, tmp_path / "x.npz", pmstore.TransactionError, text, progress=lambda *_: ENDS[what](store))
    assert store.sequence == sequence and not store.closed and store["kept"] == 1
    assert pmstore.load_into(store, tmp_path / "x.npz") == 2
    store.commit()
    assert store.sequence == sequence + 1 and store["b"][-1] == 2999


def test_progress_within_a_transaction(store: pmstore.Store, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3000))
    with store.transaction():
        store["x"] = 1
        refused(store, tmp_path / "x.npz", pmstore.TransactionError, "transaction", progress=lambda *_: store.commit())
    assert store["x"] == store["kept"] == 1 and list(store) == ["kept", "x"]


def test_another_thread_commits_after_the_import(store: pmstore.Store, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3000), b=np.arange(3000))
    threads: list[threading.Thread] = []
    seen: list[list[str]] = []

    def commit() -> None:
        store.commit()
        seen.append(list(store))

    def start(*_: int) -> None:
        if not threads:
            threads.append(threading.Thread(target=commit))
            threads[0].start()

    assert pmstore.load_into(store, tmp_path / "x.npz", progress=start) == 2
    threads[0].join()
    assert seen == [["a", "b"]] and not store.rollback() and list(store) == ["a", "b"]


@pytest.mark.parametrize("what", ["commit", "roll back", "close"])
def test_a_refusal_does_not_wait_for_a_transaction_of_another_thread(
    store: pmstore.Store, tmp_path: Path, what: str
) -> None:
    """It would wait for the import, which has the lock of the store's operations."""
    np.savez(tmp_path / "x.npz", a=np.arange(3000))
    began, go = threading.Event(), threading.Event()

    def works() -> None:
        with store.transaction():
            began.set()
            go.wait()
            store["other"] = 1

    def progress(*_: int) -> None:
        go.set()
        ENDS[what](store)

    thread = threading.Thread(target=works)
    thread.start()
    began.wait()
    with pytest.raises(pmstore.TransactionError, match="of load_into"):
        pmstore.load_into(store, tmp_path / "x.npz", progress=progress)
    thread.join()
    assert list(store) == ["other"]


def test_an_import_within_another_one(store: pmstore.Store, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3000))

    def progress(*_: int) -> None:
        if "inner/a" not in store:
            assert pmstore.load_into(store.group("inner"), tmp_path / "x.npz") == 1
        with pytest.raises(pmstore.TransactionError, match="of load_into"):
            store.commit()

    assert pmstore.load_into(store, tmp_path / "x.npz", progress=progress) == 1
    store.commit()
    assert list(store) == ["a", "inner/a"]


def test_a_fork_in_progress_closes_its_store(store: pmstore.Store, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3000))
    ends: list[int] = []

    def progress(*_: int) -> None:
        child = os.fork()
        if child == 0:
            try:
                store.close()
                os._exit(0)
            finally:
                os._exit(1)
        ends.append(os.waitpid(child, 0)[1])

    assert pmstore.load_into(store, tmp_path / "x.npz", progress=progress) == 1
    assert set(ends) == {0}


def two_interrupts(store: pmstore.Store, path: Path, event_number: int) -> bool:
    """Interrupt an import, and then at the n-th moment after that. False if there are fewer."""
    sent = []
    with contextlib.ExitStack() as second:

        def progress(done: int, total: int) -> None:
            if done == total:
                sent.append(second.enter_context(raised_at(event_number)))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pmstore.load_into(store, path, progress=progress)
    return bool(sent[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may end a generator
def test_a_second_interrupt_anywhere_leaves_no_part_of_an_import(store: pmstore.Store, tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "other.pm") as other:
        other["a"], other["g/b"], other["g/value"] = np.arange(3000), np.arange(3000), 5
        other.attrs["title"], other.attrs("g")["of"] = "theirs", "them"
        pmstore.export(other, tmp_path / "x.npz")
    store["g/mine"] = 1
    store.attrs("g")["kept"] = 1
    store.commit()
    before, count, interrupted = seen(store), 0, True
    while interrupted:
        count += 1
        interrupted = two_interrupts(store, tmp_path / "x.npz", count)
        assert (list(store), seen(store)) == (["g/mine"], before), count
    assert count > 50 and pmstore.load_into(store, tmp_path / "x.npz") == 3


def test_an_interrupt_within_a_large_array_ends_the_import(store: pmstore.Store, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3 << 20))  # 24 MiB
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        assert done < total
        signal.raise_signal(signal.SIGINT)

    refused(store, tmp_path / "x.npz", KeyboardInterrupt, None, progress=progress)
    assert len(seen) == 1
    assert pmstore.load_into(store, tmp_path / "x.npz") == 1


def test_a_handler_that_progress_has_changed_and_that_comes_back_later(store: pmstore.Store, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3000))
    found: list[Any] = []

    def progress(*_: int) -> None:
        found.append(signal.signal(signal.SIGINT, signal.SIG_IGN))

    pmstore.load_into(store, tmp_path / "x.npz", progress=progress)
    signal.signal(signal.SIGINT, lambda *_: None)  # a change of a store sees it
    store["y"] = 1
    signal.signal(signal.SIGINT, found[0])
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    store["x"] = 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


CLOSED = """
import os, sys
import numpy as np
import pmstore

def progress(*_):
    for stream in range(3):
        try:
            os.write(stream, b"progress")
        except OSError:
            pass

with pmstore.open(sys.argv[1] + "/exported.pm") as store:
    for number in range(3):
        store[f"x{number}"] = np.arange(1000.0) + number
    store.commit()
    for stream in range(3):
        os.close(stream)
    pmstore.export(store, sys.argv[1] + "/x." + sys.argv[2], progress=progress)
"""


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_prints_into_closed_streams(format: str, store: pmstore.Store, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CLOSED, str(tmp_path), format], check=True, timeout=60)
    assert pmstore.load_into(store, tmp_path / f"x.{format}") == 3
    assert np.array_equal(store["x2"], np.arange(1000.0) + 2)
    assert b"progress" not in (tmp_path / f"x.{format}").read_bytes()
