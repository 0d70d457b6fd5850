"""Logistic regression over shards by L-BFGS: an algorithm of one's own, on several processes.

    python examples/logistic_regression.py             fit, and compare with scikit-learn
    python examples/logistic_regression.py --kill      kill a worker and the program on the way; then run it again

An epoch evaluates the loss and its gradient at one point. The coordinator chooses the next point: it follows the
direction of L-BFGS (Liu and Nocedal, "On the limited memory BFGS method for large scale optimization", 1989), and
halves the step until the loss decreases enough. All that it remembers is in the store, so that a killed run goes on in
the middle of a line search.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

import pmstore

PAIRS = 8  # steps and changes of the gradient that the direction is made from
LEAST_DECREASE = 1e-4  # of what the gradient promises, for a step to count
ENOUGH = 1e-6  # the largest element of the gradient at the end


class LogisticRegression(pmstore.MapReduce):
    """Binary logistic regression with an L2 penalty.

    Parameters
    ----------
    shards : as for MapReduce
        Rows of features, the last of which is the label: 0 or 1.
    penalty : float
        Of the squared weights; the intercept has none.
    """

    max_iter = 500

    def __init__(self, shards: Any, penalty: float = 1.0) -> None:
        self.shards, self.penalty = shards, penalty

    def fields(self) -> list[pmstore.Field]:
        size = self.described[0]["shape"][1]  # the features and the intercept
        return [
            pmstore.Field("point", size),  # where the next epoch evaluates
            pmstore.Field("weights", size),  # the best point
            pmstore.Field("gradient", size, role="working"),
            pmstore.Field("loss"),
            pmstore.Field("direction", size, role="working"),
            pmstore.Field("step"),
            pmstore.Field("steps", (PAIRS, size), role="working"),
            pmstore.Field("changes", (PAIRS, size), role="working"),
            pmstore.Field("pairs", dtype=int),
        ]

    def fingerprint(self) -> Mapping[str, Any]:
        return {"penalty": self.penalty}

    def start(self) -> None:
        self.state.loss = np.inf

    def shared(self) -> Mapping[str, Any]:
        return {"point": self.state.point}

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        X, y = shard[:, :-1], shard[:, -1]
        score = X @ shared["point"][:-1] + shared["point"][-1]
        wrong = 1 / (1 + np.exp(-score)) - y
        return {"gradient": np.append(wrong @ X, wrong.sum()), "loss": np.logaddexp(0, score).sum() - y @ score}

    def update(self, total: Mapping[str, Any]) -> Mapping[str, float]:
        state = self.state
        weights = np.append(state.point[:-1], 0)
        loss = float(total["loss"] + 0.5 * self.penalty * weights @ weights)
        gradient = total["gradient"] + self.penalty * weights
        promised = state.step * float(state.gradient @ state.direction)
        if loss <= state.loss + LEAST_DECREASE * promised or state.step < 1e-12:
            if np.isfinite(state.loss):
                self._remember(state.point - state.weights, gradient - state.gradient)
            state.weights, state.gradient, state.loss = state.point, gradient, loss
            state.direction = self._direction(gradient)
            state.step = 1.0 if state.pairs else min(1.0, 1.0 / np.abs(gradient).sum())
        else:
            state.step /= 2
        state.point = state.weights + state.step * state.direction
        return {"objective": state.loss}

    def _remember(self, step: Any, change: Any) -> None:
        """Keep a step and the change of the gradient along it, if the loss is convex there."""
        state = self.state
        if step @ change > 1e-10 * (change @ change):
            state.steps[state.pairs % PAIRS], state.changes[state.pairs % PAIRS] = step, change
            state.pairs += 1

    def _direction(self, gradient: Any) -> Any:
        """The two loops of L-BFGS."""
        state, direction = self.state, -gradient
        newest_first = [i % PAIRS for i in range(state.pairs - 1, max(state.pairs - PAIRS, 0) - 1, -1)]
        factors = {}
        for i in newest_first:
            factors[i] = (state.steps[i] @ direction) / (state.steps[i] @ state.changes[i])
            direction = direction - factors[i] * state.changes[i]
        for i in newest_first[:1]:
            direction *= (state.steps[i] @ state.changes[i]) / (state.changes[i] @ state.changes[i])
        for i in reversed(newest_first):
            along = (state.changes[i] @ direction) / (state.steps[i] @ state.changes[i])
            direction += (factors[i] - along) * state.steps[i]
        return direction

    def converged(self) -> bool:
        return bool(np.abs(self.state.gradient).max() < ENOUGH)


class Killed(LogisticRegression):
    """Kills itself in the tenth epoch of its first attempt."""

    def update(self, total: Mapping[str, Any]) -> Mapping[str, float]:
        if self.state.attempt == 1 and self.state.epoch == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update(total)

    @property
    def title(self) -> str:
        return "LogisticRegression"


def data() -> tuple[Any, Any]:
    """Whether a tumour is benign, from 30 measurements of 569 (scikit-learn's copy of the Wisconsin data)."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.preprocessing import StandardScaler

    X, y = load_breast_cancer(return_X_y=True)
    return StandardScaler().fit_transform(X), y


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--store", default="logistic.pm")
    options.add_argument("--engine", type=int, default=2, help="the number of processes")
    options.add_argument("--kill", action="store_true", help="kill the program after ten epochs")
    given = options.parse_args()
    X, y = data()
    algorithm = (Killed if given.kill else LogisticRegression)(np.column_stack([X, y]))
    state = algorithm.run(store=given.store, name="cancer", engine=given.engine)
    from sklearn.linear_model import LogisticRegression as Theirs

    theirs = Theirs(C=1.0, tol=1e-8, max_iter=10_000).fit(X, y)
    difference = np.abs(np.append(theirs.coef_[0], theirs.intercept_) - state.weights).max()
    right = np.mean((X @ state.weights[:-1] + state.weights[-1] > 0) == y)
    print(f"{state.epoch} epochs in {state.attempt} attempts, loss {state.loss:.6f}, {right:.1%} right")
    print(f"largest difference from scikit-learn's weights: {difference:.1e}")
    return int(difference > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
