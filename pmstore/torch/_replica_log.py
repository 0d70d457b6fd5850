"""The durable side of a training that keeps a replica: "LowDiff+" of LowDiff (arXiv 2509.04084).

    the training                                     the log's thread
    backward of a layer ── copies its gradient ──┐
    optimizer.step()   ── compares, completes ───┤
    scheduler.step()                             ▼
    step() returns     ── hands over ──▶ a row of the queue ── steps the replica ──▶ one commit of all rows that wait
    forward, backward, …                         ▲                                                  │
                                                 └────────────────── the row is free ◀──────────────┘

The group of a training is that of a gradient log (_log.py) in which each commit has a full state, and no batches. The
replica's tensors lie in the arrays of that full state. The training waits only if all rows are in use.

I39: A transaction of the thread has whole iterations, in order, each exactly once: the step of all parameters, with the
buffers, the rest and the head of the last one. The replica does not change outside of it.
I40: The replica gets the bits that the optimizer got. A row is not written again before its iteration is committed or
given up; after one was given up, the next commit copies the training's state.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pmstore._errors import Error, TransactionError
from pmstore._resume.fit_group import FitGroup
from pmstore.torch._full import BUFFERS, FULL, Names, put_buffers
from pmstore.torch._layout import Layout, Rows
from pmstore.torch._log import Log
from pmstore.torch._replica import Replica, same_bits
from pmstore.torch._worker import Inline, Worker

__all__ = ["ReplicaLog"]

_ROWS = 8  # of the queue, if the caller leaves the choice
_TINY = torch.tensor(1e-40)  # not a normal number


class Done(NamedTuple):
    """An iteration of the training that the thread is to take. flushes, threads: how the training computed."""

    iteration: int
    rest: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    flushes: bool
    threads: int


class ReplicaLog(Log):
    """The replica of a training in a fit group.

    Parameters
    ----------
    fit_group : FitGroup
    names : Names
    optimizer : torch.optim.Optimizer
    layout : Layout
        Dense.
    rows : int or None
        Those of the queue: the most iterations that the training is ahead of the store. None: 8, and fewer for large
        gradients.
    max_iter : int or None
        For the history.
    early : bool
        Copy gradients during backward. With several ranks they are not final there.
    """

    def __init__(
        self,
        fit_group: FitGroup,
        names: Names,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        rows: int | None,
        max_iter: int | None,
        early: bool,
    ) -> None:
        super().__init__(fit_group, names, optimizer, layout, None, rows or _ROWS, 1, 1.0, max_iter)
        self._worker = Inline() if fit_group.store.recorded else Worker()
        self._pid = os.getpid()
        self._replica: Replica | None = None
        self._at = 0  # the iteration of the replica
        self._waiting: deque[Done] = deque()
        self._given = 0  # the last iteration that was given to the thread
        self._free = 0  # the last iteration whose row may be written again
        self._failure: BaseException | None = None  # of the thread
        self._early: set[int] = set()  # the gradients that backward has copied into the row of this iteration
        self._taken = False  # that row has the gradients of the optimizer's step
        self._hooks = self._watch() if early else []

    # ---- what Log does, with a replica

    def resume(self, replay: bool) -> dict[str, Any]:
        """Give model and optimizer the state of the replica, and continue with it. Returns the rest."""
        rest = super().resume(replay=False)
        self._bind()
        return rest

    def _capacity(self) -> int:
        return min(self._batch or _ROWS, max(2, self._most))

    def _write_newest(self, rest: Mapping[str, Any]) -> None:
        """The full state is that of the last iteration."""

    @property
    def rest(self) -> dict[str, Any]:
        return dict(self._group[f"{FULL}/rest"])

    @property
    def left(self) -> int:
        """Each iteration is given to the thread at once."""
        return 0

    def row(self) -> tuple[Rows, int]:
        """The rows, and the index of this iteration's. Waits until the thread has freed it."""
        self._wait_for_row()
        return self._rows, self.iteration % len(self._rows.array)

    def take(self, found: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Let the row of this iteration have the gradients that the optimizer is about to use (I40)."""
        rows, row = self.row()
        early, self._early, self._taken = self._early, set(), True
        super().take(
            [
                (number, one)
                for number, one in found
                if number not in early or not same_bits(rows.gradient(row, number), one)
            ]
        )

    def add(self, figures: Mapping[str, float], seconds: float, stepping: float) -> bool:
        """The iteration is done, and is now given to the thread."""
        self._taken = False
        return super().add(figures, seconds, stepping)

    def write(self, rest: Mapping[str, Any], *, full: bool = False, wait: bool = True) -> None:
        """Give the iteration that was done to the thread. wait: until all are committed.

        Commits a copy of the training's state instead if other code changed it, or if iterations were given up.
        Raises the thread's error, if there is one. The iterations are not lost: the next call copies the state.
        """
        self._refuse_fork()
        self._raise_failure()
        if self.iteration == self._given + 1 and not (full or self._only_full or self._replica is None):
            self._names.check()
            self._give(rest)
            if not wait:
                return
        self._settle()
        before = self._head
        try:
            super().write(rest, full=full)
        finally:
            if self._head is not before:
                self._bind()

    def close(self) -> None:
        """Commit the iterations that the thread has, and end it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._pid == os.getpid():
            self._worker.end(wait=not self._store.in_transaction)  # for which the thread would wait
        super().close()

    def _bind(self) -> None:
        """Make the replica of the full state, which is that of the training now."""
        self._replica = Replica(self._group, self._names, self._optimizer)
        self._at = self._given = self._free = self.iteration

    # ---- the training's thread

    def _watch(self) -> list[Any]:
        """Copy each gradient when backward has accumulated it. A parameter refers to the log only weakly."""
        me = weakref.ref(self)
        return [
            one.register_post_accumulate_grad_hook(functools.partial(_copy_early, me, number))
            for number, (_, one) in enumerate(self._names.stepped)
            if one.requires_grad
        ]

    def _copy_early(self, number: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient. `take` compares it, and copies what it must, so that leaving one out is no error."""
        if self._taken or self._replica is None or self._store.closed or self._store.in_transaction:
            return
        if self._pid != os.getpid():
            return
        dtype = self._layout.dtypes[number]
        if gradient is not None and gradient.layout is torch.strided and gradient.dtype == dtype:
            rows, row = self.row()
            rows.gradient(row, number).copy_(gradient.detach())
            self._early.add(number)

    def _give(self, rest: Mapping[str, Any]) -> None:
        """Give the iteration that was done to the thread."""
        self._told = [one for one in self._told if one[1] > self.durable]
        buffers = {name: one.detach().clone() for name, one in self._names.buffers.items()}
        flushes = (_TINY * 1).item() == 0
        done = Done(self.iteration, dict(rest), buffers, flushes, torch.get_num_threads())
        self._given = self.iteration  # before the thread may have it, so that `_settle` waits after an interrupt
        self._waiting.append(done)
        self._worker.do(self._take_all)

    def _wait_for_row(self) -> None:
        rows = len(self._rows.array)
        if self.iteration - self._free < rows:
            return
        self._refuse_fork()
        self._worker.wait(lambda: self.iteration - self._free < rows)
        if self.iteration - self._free >= rows:  # an interrupt came before an iteration was given to the thread
            self._free, self._only_full = self.iteration, True

    def _settle(self) -> None:
        """Wait until the thread has done what it was given, and raise its error."""
        if self._given > self.durable or self._waiting:
            if self._store.in_transaction:
                raise TransactionError("a GradLog commits by itself: use it outside of store.transaction()")
            self._worker.wait()
        self._waiting.clear()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is None:
            return
        self._worker.wait()
        self._waiting.clear()
        failure, self._failure, self._only_full = self._failure, None, True
        if not self._store.closed:
            self._start_history()
        if isinstance(failure, Error):
            raise failure
        raise TransactionError(
            f"the thread of the replica failed: {type(failure).__name__}: {failure}. No iteration is lost: the next "
            "commit copies the state of the training"
        ) from failure

    def _refuse_fork(self) -> None:
        if self._pid != os.getpid():
            raise TransactionError("a GradLog with a replica works in the process that made it, not in a forked child")

    # ---- the log's thread

    def _take_all(self) -> None:
        """Take all iterations that wait, in one commit."""
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not taken:
            return
        try:
            if self._failure is None:
                self._commit(taken)
        except BaseException as error:
            self._failure = error
        self._free = taken[-1].iteration

    def _commit(self, taken: Sequence[Done]) -> None:
        """Step the replica with iterations, and commit it with the rest of the last one (I39)."""
        last = taken[-1]
        before = None
        try:
            with self._store.transaction():
                self._check_head()
                if last.iteration <= self.durable:  # the store has them, or a newer state of the training
                    return
                for one in taken:
                    self._step(one)
                self._replica_now().write()
                put_buffers(self._group, last.buffers, f"{FULL}/{BUFFERS}")
                self._group[f"{FULL}/rest"] = last.rest
                head = {"full": last.iteration, "logged": last.iteration, "batches": []}
                self._write_head(head)
                before = self._store.sequence
        except BaseException:
            if before is not None and self._is_past(before, head):
                self._committed(head)
            raise
        self._committed(head)

    def _step(self, one: Done) -> None:
        if one.iteration <= self._at:
            return
        if one.iteration > self._at + 1:
            raise TransactionError(f"iteration {self._at + 1} was interrupted before the replica had it")
        if torch.get_num_threads() != one.threads:
            torch.set_num_threads(one.threads)
        torch.set_flush_denormal(one.flushes)
        self._replica_now().step(self._layout, self._rows, (one.iteration - 1) % len(self._rows.array))
        self._at = one.iteration

    def _replica_now(self) -> Replica:
        assert self._replica is not None
        return self._replica


def _copy_early(me: weakref.ref[ReplicaLog], number: int, parameter: torch.Tensor) -> None:
    """Torch calls this when backward has accumulated the gradient of a parameter."""
    log = me()
    if log is not None:
        with torch.no_grad():
            log._copy_early(number, parameter.grad)
