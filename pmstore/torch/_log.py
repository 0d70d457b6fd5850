"""The durable side of a gradient log: full states, batches of rows, and the replay that leads from one to the other.

The group of a training is a fit group (`pmstore.history` and ``pmstore watch`` know it) with::

    head            full: the iteration of the full state; logged: the last iteration of the log; batches: the
                    number of rows in each batch since the full state, from batch 0
    full/…          the full state (_full.py), with the buffers and the rest; with top-k also full/residual/<parameter>
    log/<number>    a batch: uint8 of shape (count, row_bytes) (_layout.py), written once, straight to its place
    buffers/…       the buffers after the last iteration of the log
    rest            generators, schedulers, … after the last iteration of the log

I29: One commit changes the head together with all that it refers to. A row that the head does not count is not read.
I30: The full state, and the rows of the batches in order, each through one step of the optimizer, are the state after
the iteration `logged`, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from pmstore._errors import TransactionError
from pmstore._resume.fit_group import FitGroup
from pmstore._resume.history import Rows as History
from pmstore._resume.history import at_work, check_history
from pmstore.archive._tuning import Tuner
from pmstore.torch._full import BUFFERS, FULL, Names, put, read_buffers, read_full, stored, write_buffers, write_full
from pmstore.torch._layout import Layout, Rows, give, set_numbers
from pmstore.torch._replica import step_alone
from pmstore.torch._topk import Compression

__all__ = ["Log"]

_MOST_BATCH_BYTES = 256 << 20
_MOST_BATCH = 1 << 10


class Log:
    """The gradient log in a fit group.

    Parameters
    ----------
    fit_group : FitGroup
    names : Names
    optimizer : torch.optim.Optimizer
    layout : Layout
    compression : Compression or None
    batch, full_every : int or None
        Iterations in a batch and between full states; None: a tuner chooses.
    mtbf : float
        Seconds.
    max_iter : int or None
        For the history.

    Attributes
    ----------
    iteration : int
        The number of iterations that are done.
    durable : int
        The number of those that a crash does not lose.
    """

    def __init__(
        self,
        fit_group: FitGroup,
        names: Names,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        compression: Compression | None,
        batch: int | None,
        full_every: int | None,
        mtbf: float,
        max_iter: int | None,
    ) -> None:
        self._fit, self._group, self._store = fit_group, fit_group.group, fit_group.store
        self._names, self._optimizer, self._layout, self._compression = names, optimizer, layout, compression
        self._batch, self._full_every, self._max_iter = batch, full_every, max_iter
        self._most = max(1, min(_MOST_BATCH, _MOST_BATCH_BYTES // layout.row_bytes))  # iterations in a batch
        self._tuner = Tuner(mtbf, batch_most=self._most)
        self._clock = float if self._store.recorded else time.perf_counter  # a crash test compares the commits of runs
        self._work = ExitStack()
        self._history: History | None = None
        self._told: list[tuple[float, int, float, Mapping[str, float]]] = []  # rows of the history, with their times
        self._times: list[float] = []  # that of the next row of the history
        self._rows = layout.empty(self._capacity())
        self._first = 0  # the iterations before the first row
        self._only_full = False  # rows were lost, so that the next commit is of a full state
        self._head: dict[str, Any] | None = None  # as it was committed last
        self.iteration = self.durable = 0

    # ---- begin and resume

    def begin(self, fingerprint: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Write the first full state."""
        try:
            with self._store.transaction():
                self._fit.begin(dict(fingerprint))
                self.write(rest, full=True)
        except BaseException:
            self._head = None  # it may be called again
            raise
        self._start_history()

    def resume(self, replay: bool) -> dict[str, Any]:
        """Bring model and optimizer to the last iteration of the log, or only to that of the full state.

        Returns the rest of that state. Raises CorruptStoreError, FingerprintMismatchError.
        """
        self._fit.check_sound()
        check_history(self._fit)
        head = self._sound_head()
        read_full(self._fit, self._names, self._optimizer)
        for name, residual in self._residuals():
            residual.copy_(stored(self._fit, f"{FULL}/residual/{name}", residual))
        self._head = head
        if replay:
            self._replay(head["batches"])
        else:
            self._only_full = bool(head["batches"])
        self.iteration = self.durable = head["logged" if replay else "full"]
        self._new_batch()
        read_buffers(self._fit, self._names, BUFFERS if replay else f"{FULL}/{BUFFERS}")
        self._start_history()
        return self._sound_rest("rest" if replay else f"{FULL}/rest")

    def _sound_head(self) -> dict[str, Any]:
        head = self._group.get("head")
        if isinstance(head, dict) and isinstance(head.get("batches"), list):
            numbers = [head.get("full"), head.get("logged"), *head["batches"]]
            if all(type(one) is int and one >= 0 for one in numbers) and head["full"] + sum(numbers[2:]) == numbers[1]:
                for number, count in enumerate(head["batches"]):
                    self._fit.require(f"log/{number}", (count, self._layout.row_bytes), np.uint8)
                return dict(head)
        raise self._fit.changed("head", "the numbers of iterations")

    def _sound_rest(self, name: str) -> dict[str, Any]:
        rest = self._group.get(name)
        kinds = {"generators": list, "settings": list, "kept": dict, "torch": str, "threads": int}
        if (
            not isinstance(rest, dict)
            or not rest.get("generators")
            or any(type(rest.get(key)) is not kind for key, kind in kinds.items())
        ):
            raise self._fit.changed(name, "the generators, the settings and the states of the kept objects")
        if len(rest["settings"]) != len(self._layout.settings) or any(
            type(one) is not float for one in rest["settings"]
        ):
            raise self._fit.changed(name, f"one with {len(self._layout.settings)} settings")
        return rest

    def _replay(self, batches: list[int]) -> None:
        if not batches:
            return
        began = self._clock()
        with self._layout.without_gradients():
            for number, count in enumerate(batches):
                rows = self._layout.rows(torch.from_numpy(np.array(self._group[f"log/{number}"])))
                for row in range(count):
                    if rows.stepped[row]:
                        self._take(rows, row)
                        step_alone(self._optimizer)  # what hooks do is in the rows
        self._tuner.merged(max(self._clock() - began, 1e-9), len(batches))

    def _take(self, rows: Rows, row: int) -> None:
        """Give the optimizer the gradients and the settings of a row."""
        if self._compression is None:
            give(self._optimizer, self._layout.settings, self._layout.parameters, rows, row)
            return
        set_numbers(self._optimizer, self._layout.settings, rows.numbers[row].tolist())
        for number, parameter in enumerate(self._layout.parameters):
            if not rows.present[row, number]:
                parameter.grad = None
            else:
                kept, chosen = (one.to(parameter.device) for one in rows.kept(row, number))
                if len(chosen) and not (int(chosen.min()) >= 0 and int(chosen.max()) < parameter.numel()):
                    raise self._fit.changed("log", f"indices of {parameter.numel()} elements", "something else")
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                self._compression.replay(number, parameter.grad, chosen.long(), kept)

    # ---- rows

    def lose(self) -> None:
        """The rows since the last commit do not lead to the state as it is: the next commit is of a full state."""
        self._only_full = True

    def row(self) -> tuple[Rows, int]:
        """The rows and the index that the next iteration is written to. If a full batch could not be committed, rows
        are lost."""
        row, last = self.iteration - self._first, len(self._rows.array) - 1
        if row > last:
            self.lose()
        return self._rows, min(row, last)

    def take(self, found: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Let the row of the next iteration have these gradients, by the numbers of the parameters."""
        rows, row = self.row()
        if found:
            wanted = [rows.gradient(row, number) for number, _ in found]
            torch._foreach_copy_(wanted, [one for _, one in found], non_blocking=True)  # until `arrived`

    def add(self, figures: Mapping[str, float], seconds: float, stepping: float) -> bool:
        """The iteration whose row was written is done. Returns whether the batch is full.

        figures: of the history. seconds: of the iteration, stepping: of the optimizer in it.
        """
        self.iteration += 1
        self._told.append((0.0 if self._store.recorded else time.time(), self.iteration, seconds, figures))
        self._tuner.committed(max(seconds, 1e-9), self._layout.row_bytes)
        self._tuner.merged(stepping * len(self._rows.array))
        return self.left <= 0

    def write(self, rest: Mapping[str, Any], *, full: bool = False, wait: bool = True) -> None:
        """Commit the iterations that were done since the last commit. It always waits for the commit.

        If that fails, the iterations are not lost: the next call writes a full state. An exception of a signal handler
        may come behind the commit.
        """
        began = self._clock()
        if not full and self.iteration == self.durable:
            return
        self._check_head()
        self._names.check()
        head = self._head or {"full": 0, "batches": []}
        full = full or self._only_full or self.iteration - head["full"] >= self._interval()
        before = None
        try:
            with self._store.transaction():
                new, written = self._write_full(rest) if full else self._write_rows(head)
                self._write_newest(rest)
                self._write_head(new)
                before = self._store.sequence
            self._written(new)
        except BaseException:
            if before is not None and self._is_past(before, new):
                self._written(new)
            else:
                self._first, self._only_full = self.iteration, True
                if not self._store.closed:
                    self._start_history()
            raise
        self._tuner.wrote(written, max(self._clock() - began, 1e-9))

    def _written(self, head: dict[str, Any]) -> None:
        """A commit has all iterations that are done."""
        self._only_full = False
        self._committed(head)
        self._told.clear()
        self._new_batch()

    def _check_head(self) -> None:
        """Raise TransactionError if the log is not the one that was committed last."""
        if self._head is not None and self._group.get("head") != self._head:
            raise TransactionError(
                f"other code has changed the log {self._fit.name!r} in {self._store.path}, perhaps another GradLog: "
                "resume() of a new one goes on with what the log is now"
            )

    def _is_past(self, before: int, head: dict[str, Any]) -> bool:
        """Whether a transaction that an exception has ended behind its last change was committed.

        before: the sequence number then; head: what it has written. If it was not committed, nothing of it stays
        pending, so that a later one begins anew.
        """
        if self._store.closed or self._store.in_transaction:
            return False
        if self._store.sequence > before:  # of another thread, perhaps
            return bool(self._group.get("head") == head)
        self._store.rollback()
        return False

    def _write_newest(self, rest: Mapping[str, Any]) -> None:
        """Write what is as of the last iteration of the log, and not of that of the full state."""
        write_buffers(self._group, self._names, BUFFERS)
        self._group["rest"] = dict(rest)

    def _write_head(self, head: Mapping[str, Any]) -> None:
        """Write the head, and the rows of the history up to its iteration."""
        self._group["finished"] = False
        self._group["head"] = dict(head)
        for now, iteration, seconds, figures in self._told:
            if self.durable < iteration <= head["logged"]:
                assert self._history is not None
                self._times.append(now)
                self._history.add(0, iteration, seconds, figures)

    def _committed(self, head: dict[str, Any]) -> None:
        """A commit has made a head durable."""
        self._head, self.durable = head, head["logged"]
        if self._history is not None:
            self._history.committed = self._history.count

    def finish(self) -> None:
        """Mark the training as finished."""
        with self._store.transaction():
            self._fit.finish()

    def close(self) -> None:
        """Other threads see all rows of the history from now on."""
        self._work.close()

    @property
    def rest(self) -> dict[str, Any]:
        """The rest of the last durable iteration."""
        return dict(self._group["rest"])

    @property
    def left(self) -> int:
        """The number of iterations until the batch is full."""
        return len(self._rows.array) - (self.iteration - self._first)

    @property
    def where(self) -> tuple[int, int, int]:
        """The iterations that are done and durable, and those until the batch is full: for `Follower.begin_at`."""
        return self.iteration, self.durable, self.left

    def _new_batch(self) -> None:
        self._first = self.iteration
        capacity = self._capacity()
        if capacity != len(self._rows.array):
            self._rows = self._layout.empty(capacity)

    def _capacity(self) -> int:
        """The number of iterations in the next batch."""
        batch = self._batch or self._tuner.choice().batch
        return min(batch, self._full_every or batch, self._most)

    def _interval(self) -> int:
        return self._full_every or self._tuner.choice().base_interval

    def _write_rows(self, head: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        self._layout.arrived()
        rows = self._rows.array[: self.iteration - self._first]
        number = len(head["batches"])
        self._group.create_array(f"log/{number}", rows.shape, rows.dtype, fill_value=rows, writeable=False)
        return {**head, "logged": self.iteration, "batches": [*head["batches"], len(rows)]}, rows.nbytes

    def _write_full(self, rest: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        self._store.group(f"{self._group.name}/log").clear()
        written = write_full(self._group, self._names, self._optimizer)
        for name, residual in self._residuals():
            written += put(self._group, f"{FULL}/residual/{name}", residual)
        write_buffers(self._group, self._names, f"{FULL}/{BUFFERS}")
        self._group[f"{FULL}/rest"] = dict(rest)
        self._tuner.based(written)
        return {"full": self.iteration, "logged": self.iteration, "batches": []}, written

    def _residuals(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._compression is not None:
            for (name, _), residual in zip(self._names.stepped, self._compression.residuals, strict=True):
                yield name, residual

    def _start_history(self) -> None:
        self._work.close()
        # The store knows the history as long as it is open, and the history must not know the model.
        self._history = History(self._group, self._max_iter, 1, self._times.pop)
        self._work.enter_context(at_work(self._store, self._fit.name, self._history))
