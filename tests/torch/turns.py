"""A replica whose thread takes its steps in an order that a test chooses, and in the same order in every run."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

import pmstore
from pmstore.torch import _replica, _replica_log
from pmstore.torch._layout import Layout, Rows, give

__all__ = ["Turns", "in_turns"]

_STEPS = (0, 0, 1, 1, 2, 3)  # in a turn


class Turns(_replica_log.Worker):
    """The thread of a replica. It runs only while the training waits for it, and stops after each layer.

    seed: of the number of steps in each turn; None: no steps but those that the training waits for.
    """

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._jobs: deque[Callable[[], None]] = deque()
        self._busy = self._ended = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.waits = 0  # how often the training waited
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # ---- the training's thread

    def turn(self) -> None:
        """The thread takes some steps."""
        for _ in range(self._random.choice(_STEPS) if self._random else 0):
            self._take_step()

    def outside(self, store: pmstore.Store) -> None:
        """The thread takes steps until it is in no transaction. A commit would wait for that."""
        while not store._commits.lock.idle:
            self._take_step()

    def do(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self.turn()

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        self.waits += 1
        while not until() and (self._busy or self._jobs):
            self._take_step()

    def end(self, wait: bool = True) -> None:
        while self._busy or self._jobs:
            self._take_step()
        self._ended = True
        self._go.release()
        self._thread.join()

    def _take_step(self) -> None:
        if self._busy or self._jobs:
            self._go.release()
            self._stopped.acquire()

    # ---- the thread

    def stop(self) -> None:
        """The thread waits for its next turn."""
        self._stopped.release()
        self._go.acquire()

    def _run(self) -> None:
        self._go.acquire()
        while not self._ended:
            self._busy = True
            self._jobs.popleft()()
            self._busy = False
            self.stop()


def in_turns(patch: pytest.MonkeyPatch, seed: int | None) -> list[Turns]:
    """Let all replicas use `Turns`, which the list gets, and step layer by layer."""
    made: list[Turns] = []

    def worker() -> Turns:
        made.append(Turns(seed))
        return made[-1]

    def step(self: Any, layout: Layout, rows: Rows, row: int) -> None:
        if not rows.stepped[row]:
            return
        parameters = [one for _, one in self.stepped]
        give(self._optimizer, layout.settings, parameters, rows, row)
        gradients = [one.grad for one in parameters]
        for chosen, gradient in zip(parameters, gradients, strict=True):
            for one in parameters:
                one.grad = gradient if one is chosen else None
            _replica.step_alone(self._optimizer)
            made[-1].stop()

    patch.setattr(_replica_log, "Worker", worker)
    patch.setattr(_replica_log, "Inline", worker)
    patch.setattr(_replica.Replica, "step", step)
    return made
