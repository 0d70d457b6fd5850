"""A gradient log for PyTorch Lightning: `GradLogCallback`. It needs the package ``lightning`` (docs/training.md)."""

from __future__ import annotations

import copy
from typing import Any

from pmstore._store.store import Store
from pmstore.torch._gradlog import GradLog
from pmstore.torch._rest import generators, set_generators
from pmstore.torch._sampler import BatchSampler

try:
    from lightning.pytorch import Callback, callbacks
except ImportError:
    try:
        from pytorch_lightning import Callback, callbacks
    except ImportError as error:
        raise ImportError("pmstore.torch.lightning needs PyTorch Lightning: pip install lightning") from error

__all__ = ["GradLogCallback"]

_PRECISIONS = ("32-true", "64-true", "bf16-mixed")
_CHANGING = tuple(
    getattr(callbacks, name)
    for name in ("StochasticWeightAveraging", "WeightAveraging", "GradientAccumulationScheduler")
    if hasattr(callbacks, name)  # older versions lack one
)
"""Callbacks, with those derived from them, that change weights or steps beside the optimizer."""


class _Loops:
    """The position of Lightning's loops, at the end of the last recorded batch."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._noted: dict[str, Any] = copy.deepcopy(trainer.fit_loop.state_dict())

    def note(self) -> None:
        """Take the position of now."""
        found = copy.deepcopy(self._trainer.fit_loop.state_dict())
        found["state_dict"].pop("combined_loader", None)
        if self._trainer.is_last_batch:  # the end of an epoch is not repeated: the next one begins
            batches, epochs = found["epoch_loop.batch_progress"], found["epoch_progress"]
            batches["total"]["completed"] = batches["total"]["processed"]
            batches["current"] = dict.fromkeys(batches["current"], 0)
            batches["is_last_batch"] = False
            for which in ("total", "current"):
                epochs[which]["processed"] = epochs[which]["completed"] = epochs[which]["ready"]
        self._noted = found

    def state_dict(self) -> dict[str, Any]:
        return self._noted

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state)
        self._noted = copy.deepcopy(state)


class GradLogCallback(Callback):
    """`pmstore.torch.GradLog` in a Trainer of Lightning: ``trainer.fit`` goes on where the log ends.

    Parameters
    ----------
    store : Store
        Open for writing.
    data : BatchSampler
        The sampler of the DataLoader: ``DataLoader(…, batch_sampler=data, generator=data.generator)``.
    **options
        Of `pmstore.torch.GradLog`, but for `scheduler`, `scaler`: the Trainer's schedulers are kept.

    Attributes
    ----------
    gradlog : GradLog or None
        While and after `fit`.

    Raises
    ------
    TypeError, ValueError
        From `fit`: a setting of the Trainer can't be resumed with the same bits. The message names it. All errors of
        `GradLog` are possible, too.

    Examples
    --------
    >>> trainer = Trainer(max_epochs=5, callbacks=[GradLogCallback(store, data=sampler)])  # doctest: +SKIP
    >>> trainer.fit(model, DataLoader(X, batch_sampler=sampler, generator=sampler.generator))  # doctest: +SKIP
    """

    def __init__(self, store: Store, *, data: BatchSampler, **options: Any) -> None:
        super().__init__()
        if not isinstance(data, BatchSampler):
            raise TypeError(f"data is the pmstore.torch.BatchSampler of the DataLoader, not {type(data).__name__}")
        taken = [key for key in ("scheduler", "scaler") if key in options]
        if taken:
            raise TypeError(f"{taken[0]} is the Trainer's: leave it out")
        self._store, self._data, self._options = store, data, options
        self.gradlog: GradLog | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take model, optimizer, schedulers, generators and the position of the loops from the log."""
        _check(trainer, pl_module)
        if self.gradlog is not None:
            self._abandon()
        self._loops = _Loops(trainer)
        schedulers = {f"scheduler {n}": one.scheduler for n, one in enumerate(trainer.lr_scheduler_configs)}
        options = {**self._options, "keep": {**(self._options.get("keep") or {}), **schedulers, "loops": self._loops}}
        self.gradlog = GradLog(pl_module, trainer.optimizers[0], self._store, data=self._data, **options)
        self.gradlog.resume()
        self._data.end_epoch()
        self._steps, self._batches = trainer.global_step, 0
        self._drawn, self._again = generators(), True
        if self._steps != self.gradlog.iteration:
            raise ValueError(
                f"the log has {self.gradlog.iteration} iterations, but the Trainer is at step {self._steps}: "
                "one callback has one Trainer"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a DataLoader whose order is not kept."""
        loader = trainer.train_dataloader
        if getattr(loader, "batch_sampler", None) is not self._data or loader.generator is not self._data.generator:
            raise ValueError(
                "the order of the data is not kept: use DataLoader(…, batch_sampler=data, generator=data.generator) "
                "with the BatchSampler that GradLogCallback has as data"
            )
        if trainer.num_training_batches != len(self._data):
            raise ValueError("limit_train_batches and overfit_batches leave batches out: give data the samples to use")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """The start of an epoch draws the numbers that follow the last batch. A resume draws the same ones: it has the
        generators of that moment, and none of a validation."""
        set_generators(self._drawn)
        self._again = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Training draws the numbers that it would draw without a validation or the start of an epoch."""
        if self._again:
            set_generators(self._drawn)
        self._again = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the iteration, if the optimizer was stepped."""
        assert self.gradlog is not None
        self._batches += 1
        if trainer.global_step != self._steps:
            self._loops.note()
            loss = outputs.get("loss") if isinstance(outputs, dict) else None
            value = float("nan") if loss is None else float(loss) * trainer.accumulate_grad_batches
            self.gradlog.record(value, batches=self._batches)
            self._steps, self._batches = trainer.global_step, 0
        self._drawn = generators()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """See `on_train_batch_start`."""
        self._again = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the last state."""
        assert self.gradlog is not None
        set_generators(self._drawn)
        self.gradlog.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop logging. Iterations that were not committed are trained again."""
        self._abandon()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop logging."""
        if stage == "fit":
            self._abandon()

    def _abandon(self) -> None:
        if self.gradlog is not None:
            self.gradlog.__exit__(RuntimeError, None, None)


def _check(trainer: Any, module: Any) -> None:
    """Raises ValueError for settings with which training would not resume with the same bits."""
    changing = [type(one).__name__ for one in trainer.callbacks if isinstance(one, _CHANGING)]
    for wrong, text in (
        (
            not module.automatic_optimization,
            "manual optimization: use pmstore.torch.GradLog in training_step if there is one optimizer, and "
            "pmstore.torch.persist if there are several, with a transaction for all of a step",
        ),
        (len(trainer.optimizers) != 1, f"{len(trainer.optimizers)} optimizers: a log follows one"),
        (
            type(trainer.strategy).__name__ != "SingleDeviceStrategy" or trainer.world_size != 1,
            f"the strategy {type(trainer.strategy).__name__}: use Trainer(devices=1)",
        ),
        (
            str(trainer.precision) not in _PRECISIONS,
            f"precision={trainer.precision!r}: use one of {', '.join(map(repr, _PRECISIONS))}",
        ),
        (
            any(one.reduce_on_plateau for one in trainer.lr_scheduler_configs),
            "ReduceLROnPlateau: its metric is not kept",
        ),
        (bool(changing), f"{', '.join(changing)}: it changes weights or steps beside the optimizer"),
        (bool(trainer.ckpt_path), "fit(ckpt_path=…): the log has the state to go on with"),
        (
            bool(trainer.reload_dataloaders_every_n_epochs),
            "reload_dataloaders_every_n_epochs: the sampler's position would be lost",
        ),
    ):
        if wrong:
            raise ValueError(f"GradLogCallback can't keep a training with {text}")
