"""Training that logs its gradients: `GradLog`."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from pmstore._errors import ClosedStoreError, FingerprintMismatchError, TransactionError
from pmstore._resume.fingerprint import differences
from pmstore._resume.fit_group import FitGroup
from pmstore._store.store import Store
from pmstore.torch._changes import Changes
from pmstore.torch._checks import (
    all_finite,
    check_copied,
    check_gradient,
    check_groups,
    check_numbers,
    count,
    fingerprint_of,
    inner,
    kept,
    refuse_compiled,
    skips,
    supported,
    unscale,
)
from pmstore.torch._extra import extra_states
from pmstore.torch._full import Names
from pmstore.torch._layout import Layout, numbers_of, settings_of
from pmstore.torch._log import Log
from pmstore.torch._ranks import Follower, Ranks
from pmstore.torch._replica_log import ReplicaLog
from pmstore.torch._sampler import BatchSampler
from pmstore.torch._states import States
from pmstore.torch._topk import Compression

__all__ = ["GradLog"]

logger = logging.getLogger("pmstore")

_MODES = ("dense", "topk", "replica")

_following: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[GradLog]] = weakref.WeakKeyDictionary()


class GradLog:
    """A log of the gradients of each iteration, so that a training survives a crash: resuming replays them.

    The gradients lead from one state of a training to the next one, and training computes them anyway (LowDiff, arXiv
    2509.04084). A store holds a full state (parameters, buffers, the optimizer's state, random generators, schedulers,
    the position in the data) and, since then, one row for each iteration. Rows are committed in batches. A crash loses
    at most the iterations of the batch that was not committed, fewer than `batch`.

    Parameters
    ----------
    model : torch.nn.Module
        Also one in DistributedDataParallel.
    optimizer : torch.optim.Optimizer
        One of torch's Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD. One log follows
        it: a new GradLog takes the place of the one before.
    store : Store or None
        Open for writing. With torch.distributed, the store of rank 0; the other ranks have None.
    mode : {"dense", "topk", "replica"}, default="dense"
        "dense" logs all gradients, and a resumed training ends with the same bits. "topk" lets only the largest
        elements of each gradient take effect, adds the others to the next gradient (error feedback), and logs the
        indices and values. **"topk" changes training.** A resumed training has the same parameters and optimizer state
        as before the crash, but has lost the parts of gradients that were left out since the full state. It does not
        continue with the same bits, unless `resume` gets ``replay=False``.
        "replica" logs no gradients. The store has a copy of parameters and optimizer, which a thread steps with the
        gradients of each iteration while the training goes on, and commits. Resuming loads the copy, to the same bits,
        and replays nothing. The model must be on the CPU.
    name : str, default="training"
        The group of the store.
    ratio : float, default=0.01
        The share of each gradient's elements that "topk" keeps; at least one element.
    batch : int or "auto", default="auto"
        Iterations in a commit. For "replica", the most iterations that wait for the thread, which takes all of them in
        one commit; a crash loses at most so many. "auto" is 8 then, and fewer if the gradients are large.
    full_every : int or "auto", default="auto"
        Iterations between full states, which are written at the end of a batch. "auto" weighs the work that a crash
        loses against the cost of writing, by measured times (docs/archive-tuning.md). Not for "replica".
    mtbf : float, default=21600.0
        The mean time between failures in seconds, for "auto".
    scheduler : torch.optim.lr_scheduler.LRScheduler, optional
        `step` steps it after the optimizer. A scheduler that the loop steps itself, say after each epoch, belongs into
        `keep`.
    scaler : torch.amp.GradScaler, optional
        `step` steps the optimizer with it.
    data : BatchSampler, optional
        `step` counts its batches.
    keep : dict, optional
        Other objects with state_dict() and load_state_dict(), by name, that the loop itself changes.
    max_iter : int, optional
        The number of iterations that the training will have, for ``pmstore watch``.
    finite : bool, default=True
        Refuse gradients with NaN or infinities before the optimizer sees them.

    Attributes
    ----------
    iteration : int
        The number of iterations that are done.
    durable : int
        The number of iterations that a crash does not lose. In a store with ``durability="async"`` a power cut may lose
        some of them; after `Store.sync` it does not.

    Raises
    ------
    TypeError, ValueError
        A parameter is none of the above, or the optimizer, one of its settings, a buffer or a gradient is of a kind
        that can't be logged or replayed.

    Examples
    --------
    >>> import torch, pmstore
    >>> from pmstore.torch import GradLog
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> with pmstore.open("training.pm") as store, GradLog(model, optimizer, store) as log:
    ...     for iteration in range(log.resume(), 100):
    ...         optimizer.zero_grad()
    ...         loss = model(torch.randn(8, 3)).square().mean()
    ...         loss.backward()
    ...         _ = log.step(loss.item())
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        store: Store | None,
        mode: str = "dense",
        *,
        name: str = "training",
        ratio: float = 0.01,
        batch: int | str = "auto",
        full_every: int | str = "auto",
        mtbf: float = 21600.0,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        keep: Mapping[str, Any] | None = None,
        max_iter: int | None = None,
        finite: bool = True,
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode is one of {', '.join(map(repr, _MODES))}, not {mode!r}")
        check_numbers(ratio, mtbf)
        if mode == "replica" and full_every != "auto":
            raise ValueError("full_every is for logs of gradients: each commit of a replica has the full state")
        every = count(batch, "batch"), count(full_every, "full_every")
        self._ranks = Ranks()
        self._optimizer = supported(optimizer)
        module = inner(model)
        self._names = names = Names(module, optimizer)
        if mode == "replica":
            check_copied(names, optimizer)
        self._settings = settings_of(optimizer)
        self._layout = layout = Layout(
            [one for _, one in names.stepped], self._settings, ratio if mode == "topk" else None
        )
        self._compression = Compression(layout) if mode == "topk" else None
        self._scheduler, self._scaler, self._data, self._finite = scheduler, scaler, data, finite
        own = {"scheduler": scheduler, "scaler": scaler, "data": data, **extra_states(module)}
        objects = kept(own, keep or {})
        self._states = States(optimizer, self._settings, names, layout, objects, self._ranks.rank, self._ranks.count)
        self._changes = Changes(names, optimizer)
        self._fingerprint = fingerprint_of(names, self._optimizer, self._settings, objects, mode, ratio)
        self._fit: FitGroup | None = None
        self._side: Log | Follower
        if self._ranks.rank:
            if store is not None:
                raise ValueError(f"rank {self._ranks.rank} gets store=None: rank 0 has the one log of all ranks")
            self._side = Follower(layout)
        else:
            if not isinstance(store, Store):
                raise TypeError(f"the log needs a store, which pmstore.open returns, not {type(store).__name__}")
            self._fit = FitGroup(store, name, of_estimator=False)
            self._fit.check_writable()
            self._side = (
                ReplicaLog(self._fit, names, optimizer, layout, every[0], max_iter, early=self._ranks.count == 1)
                if mode == "replica"
                else Log(self._fit, names, optimizer, layout, self._compression, *every, float(mtbf), max_iter)
            )
        self._logged: list[tuple[torch.Tensor, int]] = []  # the gradients of this step, and their versions
        self._told = False  # that parameters were changed
        self._begun = False
        self._is_last = True  # no other hook comes between the row and the step
        self._captured_at = -1  # the number of iterations when gradients were taken last
        self._stepping = False  # the optimizer has not returned since
        self._seen: tuple[Any, int] | None = None  # a gradient that was logged, and its version
        self._before = self._stepped_at = 0.0
        before = _following.get(optimizer, lambda: None)()
        if before is not None:
            before._stop()
        _following[optimizer] = weakref.ref(self)
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(lambda _: self._side.lose()),
        ]

    @property
    def iteration(self) -> int:
        """The number of iterations that are done."""
        return self._side.iteration

    @property
    def _captured(self) -> bool:
        """Whether the gradients of an iteration were taken that is not done."""
        return self._captured_at == self.iteration

    @property
    def durable(self) -> int:
        """The number of iterations that a crash does not lose."""
        return self._side.durable

    # ---- the public calls of a loop

    def resume(self, replay: bool = True) -> int:
        """Continue after the last iteration of the log, or begin a log.

        Model, optimizer, random generators and all kept objects get their states from the log; an empty log takes their
        states. Call it once, after all of them are made and before the first iteration.

        Parameters
        ----------
        replay : bool, default=True
            False: go back to the last full state, and do the iterations since again. With "topk", only this continues
            with the bits of an uninterrupted training. The history has such iterations twice, with another attempt.

        Returns
        -------
        int
            The number of iterations that are done.

        Raises
        ------
        FingerprintMismatchError
            The log is of another model, optimizer, mode or set of kept objects; the message names the differences.
        CorruptStoreError
            A part of the log is damaged.
        ValueError
            The data has another order.
        """
        self._check_open()
        if self._begun:
            raise TransactionError("resume() is called once, before the first step()")
        self._begin(replay)
        return self.iteration

    def step(self, loss: float = math.nan, *, batches: int = 1) -> int:
        """One iteration: step the optimizer with the gradients that backward() has left, then the scheduler, and log.

        The store commits if the batch is full.

        Parameters
        ----------
        loss : float, optional
            For the history (`pmstore.history`, ``pmstore watch``).
        batches : int, default=1
            The batches of `data` since the last step, more than one if gradients are accumulated.

        Returns
        -------
        int
            The number of iterations that are done.

        Raises
        ------
        ClosedStoreError
            The store was closed. The optimizer was not stepped.
        ValueError
            No parameter has a gradient, or none since the last step, or one is not finite; the optimizer has got other
            parameters or settings, such as by add_param_group(), since the log was made; or the epoch of `data` has
            fewer batches left. The optimizer was not stepped.
        TransactionError
            The optimizer was stepped by other code (see `record`) or interrupted in its step, a transaction of the
            store is going on, or resume() was not called and the store has a training. On other ranks than 0, an error
            of rank 0's commit.
        OutOfSpaceError, StoreIOError
            The commit failed. The optimizer was stepped, and the iteration is done. The next commit includes it. All
            other changes of the store since its last commit are rolled back.
        Exception
            An error of the scheduler's step. The optimizer was stepped, and the iteration is done.
        """
        self._check_between()
        loss = float(loss)
        if isinstance(self._data, BatchSampler):
            self._data._check(batches)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        if self._scheduler is not None:
            try:
                self._scheduler.step()
            except Exception:  # the optimizer was stepped, so that the iteration is done
                self._done(loss, batches)
                raise
        return self._done(loss, batches)

    def record(self, loss: float = math.nan, *, batches: int = 1) -> int:
        """Log an iteration of a loop that steps the optimizer and the scheduler itself, as frameworks do.

        Parameters, returned value and errors are those of `step`. Also raises ValueError if the optimizer was not
        stepped, unless there is a scaler.
        """
        self._check_begun()
        if not self._captured and self._scaler is None:
            raise ValueError("record() is called after optimizer.step(), which was not called since the last time")
        return self._done(float(loss), batches)

    def flush(self) -> None:
        """Commit the iterations that are not durable yet. Call it between two iterations, and on all ranks.

        Raises TransactionError between optimizer.step() and `record`, and the errors of a commit (`step`).
        """
        self._check_between()
        self._write()

    def finish(self) -> None:
        """Write the last state as a full state, and mark the training as finished. Gradients are not part of it.

        `resume` still finds that state. The errors are those of `flush`. Call it on all ranks.
        """
        self._check_between()
        self._write()
        self._write(full=True)
        if isinstance(self._side, Log):
            self._side.finish()
        self.close()

    def close(self) -> None:
        """Stop logging, after a `flush` if there is something to commit. The optimizer can be stepped freely again.
        Call it on all ranks, while rank 0 has the store open.

        Between optimizer.step() and `record` it commits nothing, with a warning in pmstore's log.
        """
        if not self._hooks:
            return
        try:
            if self._begun and self._captured:
                logger.warning(
                    "GradLog: closed after optimizer.step() and before record(): the store has %d iterations, and "
                    "what was trained since then is lost",
                    self.durable,
                )
            elif self._begun and not (self._fit and self._fit.store.closed):
                self._write()
        finally:
            self._stop()

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._layout.put_back()  # after a step that was interrupted
        if isinstance(self._side, Log):
            self._side.close()

    def __enter__(self) -> GradLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`close`. After an exception it commits nothing, as generators may have moved on since the last iteration."""
        if kind is not None:
            self._begun = False
        self.close()

    def __repr__(self) -> str:
        where = f"{self._fit.name!r} in {self._fit.store.path}" if self._fit else f"rank {self._ranks.rank}"
        return f"<GradLog {where}, {self.iteration} iterations, {self.durable} of them durable>"

    # ---- an iteration

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Log the gradients that the optimizer is about to use: torch calls this at the beginning of its step().

        A closure is called here, and its gradients are logged. The optimizer gets one that returns the same loss.
        """
        refuse_compiled()
        self._check_begun()
        if self._captured:
            raise TransactionError("the optimizer was stepped again, without GradLog.step() or record() in between")
        if skips(optimizer):
            return None
        self._come_first_after()
        self._is_last = self._hooks[0].id == next(reversed(optimizer._optimizer_step_pre_hooks))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._capture(optimizer)
            return None
        with torch.enable_grad():
            loss = closure()
        self._capture(optimizer)
        return (args[0],), {**kwargs, "closure": lambda: loss}

    def _capture(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the gradients and the settings into the row of this iteration."""
        found = self._layout.gradients()
        self._check_gradients(found)
        check_groups(optimizer, self._layout)
        found = self._layout.replaced(found, self._layout.in_order)
        if self._compression is not None:
            found = self._layout.replaced(found, self._compression.resolved)
        unscale(optimizer, [one for _, one in found])
        if self._changes.found():
            self._lose()
        rows, row = self._side.row()
        self._captured_at, self._stepping = self.iteration, True
        rows.present[row] = 0
        rows.present[row, [number for number, _ in found]] = 1
        rows.numbers[row] = numbers_of(optimizer, self._settings)
        rows.stepped[row] = 1
        if self._compression is not None:
            self._compression.compress(rows, row)
        elif isinstance(self._side, Log):
            self._side.take(found)
        self._logged = [(one, one._version) for _, one in found]
        self._stepped_at = time.perf_counter()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Torch calls this at the end of the optimizer's step()."""
        self._stepping = False
        if not self._is_last or any(one._version != version for one, version in self._logged):
            self._lose()  # a hook that torch called after this one may have changed anything
        self._come_last_before()
        self._logged.clear()
        self._layout.put_back()
        last = next((one.grad for one in reversed(self._layout.parameters) if one.grad is not None), None)
        self._seen = None if last is None else (weakref.ref(last), last._version)
        self._changes.remember()

    def _come_last_before(self) -> None:
        """Let what other hooks do before a step be in its row."""
        self._optimizer._optimizer_step_pre_hooks.move_to_end(self._hooks[0].id)

    def _come_first_after(self) -> None:
        """Let what other hooks do after a step be a change by other code."""
        self._optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[1].id, last=False)

    def _check_gradients(self, found: list[tuple[int, torch.Tensor]]) -> None:
        if not found:
            raise ValueError("no parameter of the optimizer has a gradient: call loss.backward() before step()")
        last = found[-1][1]
        if self._seen is not None and self._seen[0]() is last and self._seen[1] == last._version:
            raise ValueError(
                "the gradients are those of the last step(): call backward() between two steps, and zero_grad(); torch "
                "does not tell of writes to parameter.grad.data, so write to parameter.grad"
            )
        for number, gradient in found:
            check_gradient(self._names.stepped[number][0], gradient, self._layout.dtypes[number])
        if self._finite and not all_finite([one for _, one in found]):
            odd = next(number for number, one in found if not bool(one.isfinite().all()))
            raise ValueError(
                f"the gradient of {self._names.stepped[odd][0]} has NaN or infinite elements, and was not used; "
                "GradLog(…, finite=False) lets the optimizer have it"
            )

    def _done(self, loss: float, batches: int) -> int:
        """An iteration is done: count it, and commit if the batch is full."""
        if self._data is not None:
            self._data.advance(batches)
        stepping = time.perf_counter() - self._stepped_at
        if not self._captured:  # a scaler has skipped the step
            rows, row = self._side.row()
            rows.stepped[row] = 0
            stepping = 0.0
        began, self._before = self._before, time.perf_counter()
        figures = {"objective": loss, "lr": float(self._optimizer.param_groups[0]["lr"])}
        full = self._side.add(figures, self._before - began, stepping)
        if full or self._epoch_is_done():
            self._write(wait=False)
        return self.iteration

    def _epoch_is_done(self) -> bool:
        """Whether code at the end of an epoch comes next, which a resume runs again: the log has what was before."""
        return isinstance(self._data, BatchSampler) and self._data.position == len(self._data)

    # ---- durable state

    def _begin(self, replay: bool = True) -> None:
        """Take the state from the log, or begin it."""
        prints, states = self._ranks.gather(self._fingerprint), self._gathered_states()

        def begin() -> dict[str, Any] | None:
            assert isinstance(self._side, Log) and self._fit is not None
            for rank, other in enumerate(prints):
                if other != self._fingerprint:
                    raise FingerprintMismatchError(
                        f"rank {rank} trains something else than rank 0: {'; '.join(differences(prints[0], other))}"
                    )
            found = self._fit.admit(self._fingerprint)
            rest = self._side.resume(replay) if found else None
            if rest is None:
                self._side.begin(self._fingerprint, self._states.together(states))
            return rest

        rest = self._on_first(begin)
        if rest is not None:
            self._ranks.share(self._names, self._optimizer, self._compression)
            self._states.take(rest)
        self._begun = True
        self._come_last_before()
        self._changes.remember(durable=True)
        self._before = time.perf_counter()

    def _write(self, *, full: bool = False, wait: bool = True) -> None:
        """Commit the iterations that are not durable yet. wait: for a thread that does it, too."""
        if self._changes.found() or self._changes.found_of_others():
            self._lose()
        states = self._gathered_states()

        def write() -> None:
            side = self._side
            assert isinstance(side, Log)
            is_known = full and side.iteration == side.durable and self._epoch_is_done()
            side.write(side.rest if is_known else self._states.together(states), full=full, wait=wait)

        self._on_first(write)
        self._changes.remember(durable=True)

    def _gathered_states(self) -> list[dict[str, Any]]:
        hashes = self._states.hashes()
        return self._ranks.gather(self._states.own(hashes, self._ranks.tell(hashes)))

    def _lose(self) -> None:
        """Parameters have changed, and no row has it."""
        if not self._told:
            self._told = True
            logger.warning(
                "GradLog: other code than the optimizer changes parameters, the optimizer's state, or gradients in its "
                "step, which a replay can't do again: each commit that follows such a change writes a full state"
            )
        self._side.lose()

    def _on_first(self, action: Callable[[], Any]) -> Any:
        """Do it on rank 0. All ranks get the result, or an error, and then follow the log as it is."""
        if self._ranks.count == 1:
            return action()
        result = failure = where = None
        if isinstance(self._side, Log):
            try:
                result = action()
            except BaseException as error:
                failure = error
            where = self._side.where
        result, text, where = self._ranks.tell((result, failure and f"{type(failure).__name__}: {failure}", where))
        if isinstance(self._side, Follower):
            self._side.begin_at(*where)
        if failure is not None:
            raise failure
        if text is not None:
            raise TransactionError(f"rank 0 could not use the log: {text}")
        return result

    def _check_open(self) -> None:
        if not self._hooks:
            raise ClosedStoreError("the log is closed: make a new GradLog")
        if self._fit is not None and self._fit.store.closed:
            raise ClosedStoreError(f"{self._fit.store.path} is closed, and nothing would be logged: open it again")
        if self._fit is not None and self._fit.store.in_transaction:
            raise TransactionError("a GradLog commits by itself: use it outside of store.transaction()")

    def _check_between(self) -> None:
        """Raise TransactionError in the middle of an iteration."""
        self._check_begun()
        if self._captured:
            raise TransactionError(
                "optimizer.step() was called, and its iteration is not done: call GradLog.step() instead of it, or "
                "record() after it"
            )

    def _check_begun(self) -> None:
        self._check_open()
        if self._stepping:
            raise TransactionError(
                "the optimizer was interrupted in the middle of a step, so that the parameters are those of no "
                "iteration: make a new GradLog, and call resume()"
            )
        if self._begun:
            return
        if self._fit is not None and self._fit.fingerprint is not None:
            raise TransactionError(
                f"{self._fit.name!r} in {self._fit.store.path} holds a training: call resume() to go on with it, or "
                f"store.group({self._fit.name!r}).clear() to forget it"
            )
        self._begin()
