"""Trainings of Lightning that are interrupted and killed end with the bits of undisturbed ones."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn

import pmstore
from pmstore.torch import BatchSampler
from pmstore.torch.lightning import GradLogCallback

SAMPLES, BATCH, EPOCHS = 70, 16, 4  # five batches in an epoch, the last one smaller
BATCHES = 5


class Net(LightningModule):
    """BatchNorm and Dropout, a scheduler of steps or of epochs, a validation that draws random numbers."""

    def __init__(
        self, interval: str = "step", manual: bool = False, plateau: bool = False, draws: bool = False
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.interval, self.plateau = interval, plateau
        self.draws, self.noise = draws, torch.zeros(())
        self.automatic_optimization = not manual

    def on_train_epoch_start(self) -> None:
        if self.draws:
            self.noise = torch.rand(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x.to(self.net[0].weight.dtype)), y) * (1 + self.noise)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("noise", torch.rand(()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        if self.plateau:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "noise"}}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 if self.interval == "epoch" else 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class Averaged(WeightAveraging):  # type: ignore[misc]
    """A derived one, which Lightning's documentation recommends."""


class Stop(Callback):
    """Ends training in a batch, as Ctrl-C does, or a kill."""

    def __init__(self, after: int, kill: bool = False) -> None:
        self.left, self.kill = after, kill

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.left -= 1
        if self.left < 0:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("stopped here")


def fit(path: Path, stop: Stop | None = None, net: dict[str, Any] | None = None, batch: int = 3, **options: Any) -> str:
    """Train, and return a digest of model, optimizer, scheduler and history; and the number of steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draws = np.random.RandomState(1)
    x, y = torch.tensor(draws.randn(SAMPLES, 6), dtype=torch.float32), torch.tensor(draws.randint(0, 3, SAMPLES))
    data = BatchSampler(SAMPLES, BATCH, seed=5)
    dataset = torch.utils.data.TensorDataset(x, y)
    train = torch.utils.data.DataLoader(dataset, batch_sampler=data, generator=data.generator)
    with warnings.catch_warnings(), pmstore.open(path) as store:
        warnings.simplefilter("ignore")
        model = Net(**(net or {}))
        callbacks: list[Any] = [GradLogCallback(store, data=data, batch=batch, full_every=6), *([stop] if stop else [])]
        given = {"max_epochs": EPOCHS, **options}
        given["callbacks"] = [*callbacks, *given.get("callbacks", [])]
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = Trainer(accelerator="auto", devices=1, default_root_dir=path.parent, **quiet | given)
        trainer.fit(model, train, torch.utils.data.DataLoader(dataset, batch_size=40))
        losses = np.array(pmstore.history(store, "training")["objective"])
        assert len(losses) == trainer.global_step and np.isfinite(losses).all()
        moments = trainer.optimizers[0].state_dict()["state"]
        parts = [
            *model.state_dict().values(),
            *(moments[at][key] for at in sorted(moments) for key in sorted(moments[at])),
        ]
        parts += [torch.tensor(losses), torch.tensor(trainer.optimizers[0].param_groups[0]["lr"], dtype=torch.float64)]
    digest = hashlib.sha256(b"".join(part.detach().cpu().contiguous().numpy().tobytes() for part in parts))
    return f"{digest.hexdigest()} {trainer.global_step}"


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "epochs": {"net": {"interval": "epoch"}},
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
    "float64": {"precision": "64-true"},
    "max_steps": {"max_epochs": -1, "max_steps": 17},
    "validated": {"val_check_interval": 2},
    "saved": {"enable_checkpointing": True, "logger": True},
}
DRAWN: dict[str, dict[str, Any]] = {  # at the start of an epoch
    "drawn": {"net": {"draws": True}},
    "drawn, not validated": {"net": {"draws": True}, "limit_val_batches": 0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_interrupted_fit_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole.pm", **SETTINGS[name])
    for after in (0, 2, BATCHES, 7):
        with pytest.raises(RuntimeError, match="stopped here"):
            fit(tmp_path / "cut.pm", Stop(after), **SETTINGS[name])
    assert fit(tmp_path / "cut.pm", **SETTINGS[name]) == whole


@pytest.mark.parametrize("name", ["plain", "epochs", "validated", *DRAWN])
@pytest.mark.parametrize("after", [BATCHES, 2 * BATCHES])
def test_a_fit_that_stops_at_the_end_of_an_epoch(name: str, after: int, tmp_path: Path) -> None:
    """Each iteration is durable at once, so that the log ends there."""
    options = (SETTINGS | DRAWN)[name]
    whole = fit(tmp_path / "whole.pm", batch=1, **options)
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path / "cut.pm", Stop(after), batch=1, **options)
    assert fit(tmp_path / "cut.pm", batch=1, **options) == whole


@pytest.mark.parametrize("unit", ["max_steps", "max_epochs"])
def test_a_finished_fit_goes_further(unit: str, tmp_path: Path) -> None:
    few, many = ({"max_epochs": -1, unit: 7}, {"max_epochs": -1, unit: 17}) if unit == "max_steps" else ({unit: 2}, {})
    whole = fit(tmp_path / "whole.pm", **many)
    fit(tmp_path / "cut.pm", **few)
    assert fit(tmp_path / "cut.pm", **many) == whole
    assert fit(tmp_path / "cut.pm", **many) == whole, "there is nothing left to do"


def test_a_killed_fit_ends_with_the_same_bits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.frameworks.test_lightning", str(tmp_path / "killed.pm")]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    assert len(pmstore.history(tmp_path / "killed.pm", "training")["objective"]) == BATCHES + 3, "nine were done"
    assert fit(tmp_path / "killed.pm") == fit(tmp_path / "whole.pm")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"net": {"manual": True}}, "manual optimization"),
        ({"net": {"plateau": True}}, "ReduceLROnPlateau"),
        ({"precision": "bf16-true"}, "precision='bf16-true'"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
        ({"callbacks": [Averaged()]}, "Averaged: it changes weights"),
        ({"limit_train_batches": 2}, "limit_train_batches"),
    ],
)
def test_what_can_not_be_kept_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path / "refused.pm", **options)


def test_an_order_that_is_not_kept_is_refused(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "refused.pm") as store:
        with pytest.raises(TypeError, match="data is the"):
            GradLogCallback(store, data=None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="scheduler is the Trainer's"):
            GradLogCallback(store, data=BatchSampler(4, 2), scheduler=None)
        dataset = torch.utils.data.TensorDataset(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))
        callback = GradLogCallback(store, data=BatchSampler(4, 2))
        trainer = Trainer(accelerator="auto", devices=1, max_epochs=1, logger=False, callbacks=[callback])
        with pytest.raises(ValueError, match="the order of the data is not kept"):
            trainer.fit(Net(), torch.utils.data.DataLoader(dataset, batch_size=2))


if __name__ == "__main__":
    fit(Path(sys.argv[1]), Stop(9, kill=True))
