"""A gradient log for the Trainer of Transformers: `GradLogCallback`. It needs the packages ``transformers`` and
``accelerate`` (docs/training.md)."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from pmstore._resume.fit_group import FitGroup
from pmstore._resume.history import history
from pmstore._store.store import Store
from pmstore.torch._gradlog import GradLog
from pmstore.torch._rest import generators, set_generators
from pmstore.torch._tensors import state_dict

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("pmstore.torch.transformers needs Transformers: pip install transformers accelerate") from error

__all__ = ["GradLogCallback"]


class _Order:
    """The settings that the Trainer's order of the data depends on. The position in it is the number of iterations.

    Attributes
    ----------
    generators : dict or None
        The states of the random generators at the start of the epoch.
    """

    def __init__(self, args: Any, batches: int) -> None:
        self._order = {
            "seed": args.seed,
            "data_seed": args.data_seed,
            "batch size": args.per_device_train_batch_size,
            "accumulated batches": args.gradient_accumulation_steps,
            "batches of an epoch": batches,
            "sampling": str(getattr(args, "train_sampling_strategy", "random")),
        }
        self.generators: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**self._order, "generators": self.generators}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        other = [f"{key}: {state.get(key)!r} ≠ {own!r}" for key, own in self._order.items() if state.get(key) != own]
        if other:
            raise ValueError(f"the order of the data is another one; stored ≠ now: {', '.join(other)}")
        self.generators = state.get("generators")


class GradLogCallback(TrainerCallback):
    """`pmstore.torch.GradLog` in the Trainer of Transformers: training goes on where the log ends.

    The Trainer only skips batches for a checkpoint on the disk, so `checkpoint` makes one that has the position.

    Parameters
    ----------
    store : Store
        Open for writing.
    **options
        Of `pmstore.torch.GradLog`, but for `scheduler`, `scaler` and `data`: the Trainer's are kept.

    Attributes
    ----------
    log : GradLog or None
        While and after `train`.

    Raises
    ------
    TypeError, ValueError
        From `train`: a setting of the Trainer can't be resumed with the same bits, or `checkpoint` was left out. The
        message names it. All errors of `GradLog` are possible, too.

    Examples
    --------
    >>> log = GradLogCallback(store)  # doctest: +SKIP
    >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[log])  # doctest: +SKIP
    >>> trainer.train(resume_from_checkpoint=log.checkpoint())  # doctest: +SKIP
    """

    def __init__(self, store: Store, **options: Any) -> None:
        taken = [key for key in ("scheduler", "scaler", "data") if key in options]
        if taken:
            raise TypeError(f"{taken[0]} is the Trainer's: leave it out")
        self._store, self._options = store, options
        self.log: GradLog | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._hook: Any = None
        self._batch_size = 0
        self._model: Any = None
        self._stateful: dict[str, Any] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Keep what `checkpoint` and a later save need: the batch size, the model, the states of the callbacks."""
        self._batch_size, self._model = args.train_batch_size, given.get("model")
        self._stateful = state.stateful_callbacks

    def checkpoint(self) -> str | None:
        """A folder for ``Trainer.train(resume_from_checkpoint=…)``, which has the position of the log, and weights that
        `on_train_begin` replaces. None if the log is empty. The folder is removed when training begins."""
        name = self._options.get("name", "training")
        if FitGroup(self._store, name).fingerprint is None:
            return None
        steps = len(history(self._store, name)["objective"])
        self._folder = tempfile.TemporaryDirectory(prefix="pmstore-")
        folder = Path(self._folder.name)
        if self._model is None:
            groups = (self._store.group(f"{name}/{one}") for one in ("full/model", "full/buffers", "buffers"))
            weights = {key: one for group in groups for key, one in state_dict(group).items()}
        else:
            weights = self._model.state_dict()
        torch.save(weights, folder / "pytorch_model.bin")
        position = {"global_step": steps, "log_history": [], "train_batch_size": self._batch_size}
        (folder / "trainer_state.json").write_text(json.dumps(position))
        return str(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take model, optimizer, scheduler and generators from the log."""
        scheduler = given["lr_scheduler"]
        _check(args, scheduler)
        self.close()
        optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])
        if isinstance(getattr(given["train_dataloader"], "dataset", None), IterableDataset):
            raise ValueError("GradLogCallback can't keep a training with an IterableDataset: its position is not kept")
        batches = len(given["train_dataloader"])
        self._order = _Order(args, batches)
        keep = {**(self._options.get("keep") or {}), "scheduler of the Trainer": scheduler, "order": self._order}
        self._make = partial(GradLog, given["model"], optimizer, self._store, **{**self._options, "keep": keep})
        self.log = self._make()
        done = self.log.resume()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        if done != state.global_step:
            self.close()
            raise ValueError(
                f"the log has {done} iterations, but the Trainer begins at step {state.global_step}: call "
                "train(resume_from_checkpoint=callback.checkpoint())"
            )
        for kind, one in {**self._stateful, type(control).__name__: control.state()}.items():
            state.stateful_callbacks.setdefault(kind, one)  # the Trainer adds to them when it saves
        self._is_finished = done >= state.max_steps
        self._in_epoch = done % max(1, -(-batches // args.gradient_accumulation_steps)) > 0
        self._loss = torch.tensor(float("nan"))
        self._hook = given["model"].register_forward_hook(self._note_loss)
        self._drawn, self._again = generators(), True

    def _note_loss(self, module: Any, inputs: Any, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else None
        if module.training and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._loss = loss.detach()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The start of an epoch draws the numbers that follow the last step of the epoch before. After a resume in the
        middle of an epoch, the Trainer starts it again, and the same numbers are drawn. See `on_step_begin`."""
        if not self._in_epoch or self._order.generators is None:
            self._order.generators = self._drawn
        set_generators(self._order.generators)
        self._in_epoch, self._again = False, True

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """See `on_step_begin`."""
        self._again = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Training draws the numbers that it would draw without an evaluation or a new epoch, as after a resume."""
        if self._again:
            set_generators(self._drawn)
        self._again = False

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Record the iteration. The Trainer does one more of a training that has all its steps: undo that."""
        assert self.log is not None
        if self._is_finished:
            self.log = self._make()
            state.global_step = self.log.resume()
            control.should_training_stop = True
            control.should_save = control.should_evaluate = control.should_log = False
            return
        self.log.record(float(self._loss))
        self._drawn = generators()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Write the last state."""
        assert self.log is not None
        set_generators(self._drawn)
        self.log.finish()
        self.close()

    def close(self) -> None:
        """Stop logging, as after an exception in ``train``. Iterations that were not committed are trained again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self.log is not None:
            self.log.__exit__(RuntimeError, None, None)


def _check(args: Any, scheduler: Any) -> None:
    """Raises ValueError for settings with which training would not resume with the same bits."""
    kind = type(scheduler).__name__
    for wrong, text in (
        (args.fp16, "fp16=True: use bf16"),
        (args.world_size != 1 or args.n_gpu > 1, "several processes or devices"),
        (args.deepspeed or args.fsdp, "deepspeed or fsdp"),
        (args.ignore_data_skip, "ignore_data_skip=True: a resume would use other batches"),
        (args.load_best_model_at_end, "load_best_model_at_end=True: the last state is that of the log"),
        (args.auto_find_batch_size, "auto_find_batch_size=True: the batch size belongs to the order of the data"),
        (kind in ("ReduceLROnPlateau", "GreedyLR"), f"{kind}: its metric is not kept"),
    ):
        if wrong:
            raise ValueError(f"GradLogCallback can't keep a training with {text}")
