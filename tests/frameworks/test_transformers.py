"""Trainings of Transformers that are interrupted and killed end with the bits of undisturbed ones."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import pmstore
from pmstore.torch.transformers import GradLogCallback

SAMPLES, BATCH, EPOCHS = 70, 16, 4  # five batches in an epoch, the last one smaller
BATCHES = 5


class Net(nn.Module):
    """BatchNorm and Dropout; in an evaluation it draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.noise = torch.zeros(())

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        if not self.training:
            torch.rand(())
        out = self.net(x)
        return {"loss": nn.functional.cross_entropy(out, labels) * (1 + self.noise), "logits": out}


class Draw(TrainerCallback):
    """Draws a number at the start of each epoch, which its losses depend on."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        given["model"].noise = torch.rand(())


class Stop(TrainerCallback):
    """Ends training before a step, as Ctrl-C does, or a kill."""

    def __init__(self, after: int, kill: bool = False) -> None:
        self.left, self.kill = after, kill

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.left -= 1
        if self.left < 0:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("stopped here")


def tied() -> nn.Module:
    """A language model of the library, whose first and last layer have the same weight, with Dropout."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=6, n_embd=8, n_layer=1, n_head=2, n_inner=8))


def fit(
    path: Path,
    stop: Stop | None = None,
    batch: int = 3,
    resume: bool = True,
    language: bool = False,
    draw: bool = False,
    replica: bool = False,
    added: bool = False,
    **options: Any,
) -> str:
    """Train, and return a digest of model, optimizer, scheduler and history; and the number of steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draws = np.random.RandomState(1)
    rows: list[Any] = [
        {"x": torch.tensor(draws.randn(6), dtype=torch.float32), "labels": int(draws.randint(0, 3))}
        for _ in range(SAMPLES)
    ]
    if language:
        words = torch.tensor(draws.randint(0, 11, (SAMPLES, 6)))
        rows = [{"input_ids": row, "labels": row} for row in words]
    given = {"num_train_epochs": EPOCHS, "per_device_train_batch_size": BATCH, "learning_rate": 0.01, **options}
    fixed = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(path.parent / "out"), **fixed | given)
    with pmstore.open(path) as store:
        mode: dict[str, Any] = {"mode": "replica"} if replica else {"full_every": 6}
        log = GradLogCallback(store, batch=batch, **mode)
        torch.manual_seed(0)
        model = tied() if language else Net()
        callbacks = [*([] if added else [log]), *([stop] if stop else []), *([Draw()] if draw else [])]
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:20], callbacks=callbacks)
        if added:
            trainer.add_callback(log)
        try:
            trainer.train(resume_from_checkpoint=log.checkpoint() if resume else None)
        finally:
            log.close()
        losses = np.array(pmstore.history(store, "training")["objective"])
        assert len(losses) == trainer.state.global_step and np.isfinite(losses).all()
        moments = trainer.optimizer.state_dict()["state"]
        parts = [
            *model.state_dict().values(),
            *(moments[at][key] for at in sorted(moments) for key in sorted(moments[at])),
        ]
        parts += [torch.tensor(losses), torch.tensor(trainer.lr_scheduler.get_last_lr(), dtype=torch.float64)]
    digest = hashlib.sha256(b"".join(part.detach().cpu().contiguous().numpy().tobytes() for part in parts))
    return f"{digest.hexdigest()} {trainer.state.global_step}"


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not clipped": {"max_grad_norm": 0.0},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True, "use_cpu": True},
    "max_steps": {"max_steps": 17},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2},
    "evaluated after epochs": {"eval_strategy": "epoch"},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 4},
    "sgd": {"optim": "sgd"},
    "language": {"language": True},
    "drawn": {"draw": True, "eval_strategy": "epoch"},
    "saved": {"save_strategy": "steps", "save_steps": 8},
    "saved after epochs": {"save_strategy": "epoch"},
    "drawn order": {"accelerator_config": {"use_seedable_sampler": False}},
    "replica": {"replica": True},
    "added later": {"added": True, "save_strategy": "epoch"},
    "replica, added later": {"replica": True, "added": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_interrupted_training_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole.pm", **SETTINGS[name])
    for after in (0, 2, BATCHES, 4):
        with pytest.raises(RuntimeError, match="stopped here"):
            fit(tmp_path / "cut.pm", Stop(after), **SETTINGS[name])
    assert fit(tmp_path / "cut.pm", **SETTINGS[name]) == whole


@pytest.mark.parametrize("name", ["plain", "evaluated after epochs", "drawn", "max_steps", "saved"])
@pytest.mark.parametrize("after", [BATCHES, 2 * BATCHES])
def test_a_training_that_stops_at_the_end_of_an_epoch(name: str, after: int, tmp_path: Path) -> None:
    """Each iteration is durable at once, so that the log ends there. A finished one stays as it is."""
    options = SETTINGS[name]
    whole = fit(tmp_path / "whole.pm", batch=1, **options)
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path / "cut.pm", Stop(after), batch=1, **options)
    assert fit(tmp_path / "cut.pm", batch=1, **options) == whole
    assert fit(tmp_path / "cut.pm", batch=1, **options) == whole, "there is nothing left to do"


def test_a_killed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.frameworks.test_transformers", str(tmp_path / "killed.pm")]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    assert len(pmstore.history(tmp_path / "killed.pm", "training")["objective"]) == 6
    assert fit(tmp_path / "killed.pm") == fit(tmp_path / "whole.pm")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "ReduceLROnPlateau"),
    ],
)
def test_what_can_not_be_kept_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path / "refused.pm", **options)


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


def test_data_without_a_position_are_refused(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), max_steps=3, report_to=[], disable_tqdm=True)
    with pmstore.open(tmp_path / "refused.pm") as store:
        trainer = Trainer(Net(), arguments, train_dataset=Endless(), callbacks=[GradLogCallback(store)])
        with pytest.raises(ValueError, match="an IterableDataset: its position is not kept"):
            trainer.train()


class Batches:
    """All that the Trainer asks of a DataLoader."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Any:
        return iter(self._batches)


def test_a_loader_without_a_dataset(tmp_path: Path) -> None:
    loader = Batches([{"x": torch.full((2, 6), float(n)), "labels": torch.tensor([0, 1])} for n in range(3)])
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), max_steps=3, report_to=[], disable_tqdm=True)
    with pmstore.open(tmp_path / "x.pm") as store:
        log = GradLogCallback(store)
        trainer = Trainer(Net(), arguments, train_dataset=[1], callbacks=[log])
        trainer.get_train_dataloader = lambda: loader  # type: ignore[method-assign]
        trainer.train()
        assert len(pmstore.history(store, "training")["objective"]) == 3


def test_another_order_or_position_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path / "cut.pm", Stop(7))
    with pytest.raises(ValueError, match="call train"):
        fit(tmp_path / "cut.pm", resume=False)
    with pytest.raises(ValueError, match="seed: 42 ≠ 7"):
        fit(tmp_path / "cut.pm", seed=7)
    assert fit(tmp_path / "cut.pm") == fit(tmp_path / "whole.pm"), "nothing is lost"


if __name__ == "__main__":
    fit(Path(sys.argv[1]), Stop(8, kill=True))
