"""The replica's thread is one, after an interrupt too, and never goes back (I39, I40)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pmstore
from pmstore.torch import GradLog
from pmstore.torch._replica_log import Done, ReplicaLog
from pmstore.torch._worker import Worker
from tests.store.test_transactions import in_thread
from tests.support.interrupting import interrupted_at
from tests.torch.test_gradlog import backward, linear
from tests.torch.test_replica import check_bits


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("pmstore-replica")]


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(60)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the main thread once, while it waits for a thread that it has started."""
    start = threading.Thread.start
    signals = [signal.SIGINT]

    def interrupted_start(self: threading.Thread) -> None:
        start(self)
        if threading.current_thread() is threading.main_thread() and signals:
            signal.raise_signal(signals.pop())

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)


def test_I39_an_interrupt_while_the_thread_starts_leaves_one_thread(
    tmp_path: Path, interrupted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, gate = ReplicaLog._commit, threading.Event()

    def wait_and_commit(self: ReplicaLog, taken: Sequence[Done]) -> None:
        assert_set(gate)
        commit(self, taken)

    monkeypatch.setattr(ReplicaLog, "_commit", wait_and_commit)
    net, optimizer = linear(torch.optim.AdamW)
    with pmstore.open(tmp_path / "log.pm") as store, GradLog(net, optimizer, store, "replica", batch=4) as log:
        log.resume()
        backward(net)
        with pytest.raises(KeyboardInterrupt):
            log.step()
        while log.iteration < 3:
            backward(net)
            log.step()
        assert len(threads()) == 1
        gate.set()
        check_bits(log, net)
    assert not threads()


def test_an_interrupted_worker_is_ended_with_its_thread(interrupted: None) -> None:
    worker, gate = Worker(), threading.Event()
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.do(lambda: assert_set(gate))
        threading.Thread(target=gate.set).start()
        worker.end()
        assert not threads()
    finally:
        gate.set()


def test_several_may_wait_at_once() -> None:
    """A handler of a signal waits while the main thread does, for example."""
    worker, gate = Worker(), threading.Event()
    worker.do(lambda: assert_set(gate))
    waiting = [in_thread(worker.wait) for _ in range(3)]
    gate.set()
    for thread, out in waiting:
        thread.join(20)
        assert out == [None], "it hangs"
    worker.end()


def test_an_interrupt_anywhere_leaves_a_worker_that_goes_on() -> None:
    moment, goes_on = 0, True
    while goes_on:
        worker, done = Worker(), list[str]()

        def work(worker: Worker = worker, done: list[str] = done) -> None:
            for name in ("first", "second"):
                worker.do(lambda name=name: done.append(name))  # type: ignore[misc]
                worker.wait()

        goes_on = interrupted_at(moment := moment + 1, work)
        worker.do(lambda done=done: done.append("last"))  # type: ignore[misc]
        waiting, out = in_thread(worker.wait)
        waiting.join(20)
        assert out == [None], "it hangs"
        assert done in (["last"], ["first", "last"], ["first", "second", "last"])
        worker.end()
        assert not threads()
    assert moment > 50


def test_I40_iterations_that_the_store_has_are_not_committed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, seen = ReplicaLog._commit, []

    def noted(self: ReplicaLog, taken: Sequence[Done]) -> None:
        seen.append(list(taken))
        commit(self, taken)

    monkeypatch.setattr(ReplicaLog, "_commit", noted)
    net, optimizer = linear(torch.optim.AdamW)
    with pmstore.open(tmp_path / "log.pm") as store, GradLog(net, optimizer, store, "replica", batch=4) as log:
        log.resume()
        for _ in range(3):
            backward(net)
            log.step()
        check_bits(log, net)
        side: Any = log._side
        head = dict(store["training/head"])
        commit(side, seen[0][:1])
        assert (store["training/head"], log.durable) == (head, 3)
        check_bits(log, net)
