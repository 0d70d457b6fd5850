"""The support of tests of fits over shards: an algorithm, and accidents of workers, each of them once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import pmstore

EPOCHS = 6


class Walk(pmstore.MapReduce):
    """Moves centres towards the means of noisy shards: all that a result depends on is in it, random numbers too.

    `accident` is called by every map, and by every update with the number of the epoch.
    """

    max_iter = EPOCHS

    def __init__(self, shards: Any, accident: Any = None, in_update: Any = None) -> None:
        self.shards, self.accident, self.in_update = shards, accident, in_update

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("centers", (3, 4)), pmstore.Field("shift")]

    def fingerprint(self) -> Mapping[str, Any]:
        return {}

    def start(self) -> None:
        self.state.centers = np.arange(12.0).reshape(3, 4)

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        if self.accident is not None:
            self.accident(shard)
        near = ((shard[:, None] - shared["centers"]) ** 2).sum(2).argmin(1)
        sums = np.zeros((3, 4))
        np.add.at(sums, near, shard + 1e-3 * rng.normal(size=shard.shape))
        return {"sums": sums, "counts": np.bincount(near, minlength=3)}

    def update(self, total: Mapping[str, Any]) -> Mapping[str, float]:
        if self.in_update is not None:
            self.in_update(self.state.epoch)
        means = total["sums"] / np.maximum(total["counts"], 1)[:, None]
        self.state.shift = float(np.abs(means - self.state.centers).max())
        self.state.centers += 0.5 * (means - self.state.centers)
        return {"objective": self.state.shift}


def rows(seed: int, count: int = 40) -> Any:
    return np.random.default_rng(seed).normal(size=(count, 4)) * 3


def several(count: int = 5) -> list[Any]:
    """Shards of different sizes."""
    return [rows(i, 30 + 7 * i) for i in range(count)]


class Once:
    """Does something to the process that calls it, the first time that any process does so.

    Parameters
    ----------
    marker : Path
        A file that does not exist.
    what : {"kill", "stop", "raise"}
    shard : ndarray, optional
        Only for this shard.
    """

    def __init__(self, marker: Path, what: str, shard: Any = None) -> None:
        self.marker, self.what, self.shard = str(marker), what, shard

    def __call__(self, shard: Any = None) -> None:
        if self.shard is not None and not np.array_equal(shard, self.shard):
            return
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        if self.what == "raise":
            raise ConnectionError("the line is down")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.what])


class SilentError(Exception):
    """An exception whose text can't be had."""

    def __str__(self) -> str:
        raise RuntimeError("there is no text")


class Unreadable:
    """What raises such an exception when a pickle of it is read in another process."""

    def __reduce__(self) -> Any:
        return _unreadable, (os.getpid(),)


def _unreadable(made_in: int) -> Unreadable:
    if os.getpid() != made_in:
        raise SilentError
    return Unreadable()


class Always:
    """Does the same as `Once`, every time."""

    def __init__(self, what: str, shard: Any = None) -> None:
        self.what, self.shard = what, shard

    def __call__(self, shard: Any = None) -> None:
        if self.shard is not None and not np.array_equal(shard, self.shard):
            return
        if self.what == "raise":
            raise ValueError("this shard is bad")
        if self.what == "raise silently":
            raise SilentError
        if self.what == "exit":
            raise SystemExit(3)
        if self.what == "interrupt":
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGKILL)


class At:
    """An algorithm that calls a function in the update of one epoch."""

    def __init__(self, epoch: int, once: Once) -> None:
        self.epoch, self.once = epoch, once

    def __call__(self, epoch: int) -> None:
        if epoch == self.epoch:
            self.once()


def load_once_broken(once: Once, path: str) -> Any:
    """A loader that fails as `Once` says."""
    once()
    return np.load(path)


def killed(work: Callable[[], Any]) -> None:
    """Do the work in a child process, in the middle of which it is killed."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def result(state: pmstore.State) -> bytes:
    """All that must have the same bits."""
    return np.asarray(state.centers).tobytes() + np.float64(state.shift).tobytes() + bytes([state.iteration])


class Factors(pmstore.MapReduce):
    """X ≈ W H, with noise: H is the state, and the rows of W and a count of epochs are local states of the shards.

    `accident` is called by every map, and by every update with the number of the epoch.
    """

    max_iter = EPOCHS

    def __init__(self, shards: Any, accident: Any = None, in_update: Any = None) -> None:
        self.shards, self.accident, self.in_update = shards, accident, in_update

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("H", (2, self.described[0]["shape"][1])), pmstore.Field("error")]

    def local_fields(self, i: int) -> list[pmstore.Field]:
        return [pmstore.Field("W", (self.described[i]["shape"][0], 2)), pmstore.Field("epochs", 1, "i4")]

    def fingerprint(self) -> Mapping[str, Any]:
        return {}

    def start(self) -> None:
        self.state.H = np.random.default_rng(1).uniform(0.1, 1, self.state.H.shape)

    def local_start(self, shard: Any, local: Any, rng: np.random.Generator) -> None:
        local.W = rng.uniform(0.1, 1, local.W.shape)

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator, local: Any) -> Mapping[str, Any]:
        if self.accident is not None:
            self.accident(shard)
        X, H, W = np.abs(shard), shared["H"], local.W
        W *= (X @ H.T) / (W @ (H @ H.T) + 1e-9)
        W += 1e-3 * rng.uniform(size=W.shape)
        local.epochs += 1
        return {"WX": W.T @ X, "WW": W.T @ W, "error": np.square(X - W @ H).sum(), "epochs": local.epochs}

    def update(self, total: Mapping[str, Any]) -> Mapping[str, float]:
        if self.in_update is not None:
            self.in_update(self.state.epoch)
        assert total["epochs"][0] == len(self.described) * (self.state.iteration + 1)
        self.state.H *= total["WX"] / (total["WW"] @ self.state.H + 1e-9)
        self.state.error = float(total["error"])
        return {"objective": self.state.error}

    def bits(self) -> bytes:
        """All that must be the same."""
        states = [self.state.H, self.state.error, self.state.epoch]
        parts = [part for name in ("W", "epochs") for part in self.local_parts(name)]
        return b"".join(np.asarray(one).tobytes() for one in (*states, *parts))


class Runs(Factors):
    """Two runs, of which the best one is the first or the second."""

    max_iter = 3
    runs = 2

    def __init__(self, shards: Any, best: int, in_update: Any = None) -> None:
        super().__init__(shards, in_update=in_update)
        self.best = best

    def fingerprint(self) -> Mapping[str, Any]:
        return {"best": self.best}

    def fields(self) -> list[pmstore.Field]:
        return [*super().fields(), pmstore.Field("best_H", (2, 4), role="best")]

    def start(self) -> None:
        super().start()
        self.state.H = self.state.H + self.state.run

    def better(self) -> bool:
        return bool(self.state.run == self.best)

    def keep(self) -> None:
        self.state.best_H = self.state.H

    def result(self) -> bytes:
        return b"".join(np.asarray(one).tobytes() for one in (self.state.best_H, *self.local_parts("W")))
