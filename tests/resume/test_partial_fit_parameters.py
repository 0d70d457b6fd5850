"""pmstore.partial_fit of estimators whose parameters are objects: those that learn are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # OpenMP's threads wait by spinning, and tests run side by side
sklearn = pytest.importorskip("sklearn")

import scipy.sparse as sparse  # noqa: E402
from sklearn.base import BaseEstimator  # noqa: E402
from sklearn.cluster import AgglomerativeClustering, Birch  # noqa: E402
from sklearn.linear_model import SGDClassifier  # noqa: E402
from sklearn.pipeline import Pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

import pmstore  # noqa: E402
from tests.support.resuming import assert_same, copied  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

X = np.random.default_rng(0).normal(size=(200, 4)) * [1, 10, 100, 1] + 5
Y = X[:, 1] > 5
BATCHES = [(X[i : i + 50], Y[i : i + 50]) for i in range(0, 200, 50)]
CLASSES = {"classes": [False, True]}


class Wrapper(BaseEstimator):
    """Learns in another estimator, after it has scaled the data with a third one."""

    def __init__(self, base: Any = None, scaler: Any = None, also: Any = None) -> None:
        self.base, self.scaler, self.also = base, scaler, also

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Wrapper:
        X = X if self.scaler is None else self.scaler.transform(X)
        learns = self.base if isinstance(self.base, SGDClassifier) else self.base[0]
        learns.partial_fit(X, y, classes=classes)
        return self


class Online(Pipeline):
    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Online:
        for _, step in self.steps[:-1]:
            X = step.partial_fit(X).transform(X)
        self.steps[-1][1].partial_fit(X, y, classes=classes)
        return self


class Frozen(Wrapper):
    """Learns nothing inside of its parameters."""

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Frozen:
        self.sum_ = getattr(self, "sum_", 0.0) + self.also[0](self.scaler.transform(X)).sum()
        self.base.sort_indices()
        return self


LEARNS_INSIDE: dict[str, Callable[[], Any]] = {
    "base": lambda: Wrapper(SGDClassifier(random_state=0)),
    "base of two": lambda: Wrapper([SGDClassifier(random_state=0), lambda: 0]),
    "base, learned before": lambda: Wrapper(SGDClassifier(random_state=0).fit(X, Y), StandardScaler().fit(X)),
    "steps": lambda: Online([("sgd", SGDClassifier(random_state=0))]),
    "steps of two": lambda: Online([("scale", StandardScaler()), ("sgd", SGDClassifier(random_state=0))]),
}


@pytest.mark.parametrize("case", LEARNS_INSIDE)
def test_an_estimator_that_learns_inside_of_its_parameters(case: str, path: Path) -> None:
    with pmstore.open(path) as store:
        with pytest.raises(TypeError, match=f"changes the parameter '{case.split()[0].strip(',')}'.*Resumable"):
            pmstore.partial_fit(LEARNS_INSIDE[case](), BATCHES, store=store, **CLASSES)
        assert store.sequence == 0 and len(store) == 0
    assert pmstore.partial_fit(LEARNS_INSIDE[case](), BATCHES, store=None, **CLASSES) is not None


def test_parameters_that_do_not_learn(path: Path) -> None:
    """Fitted estimators, functions, and a sparse matrix, which remembers that its indices are sorted."""

    def made() -> Any:
        unsorted = sparse.csr_matrix((np.ones(2), [1, 0], [0, 2]), shape=(1, 2))
        return Frozen(unsorted, StandardScaler().fit(X), [lambda x: x + 1])

    with copied(path) as copies:
        whole = pmstore.partial_fit(made(), BATCHES, store=path, name="fit", **CLASSES)
    for store in copies:
        assert pmstore.partial_fit(made(), BATCHES, store=store, name="fit", **CLASSES).sum_ == whole.sum_


def test_birch_fits_its_parameter_anew_after_each_batch(path: Path) -> None:
    def learned(store: Path) -> Any:
        model = Birch(threshold=20.0, n_clusters=AgglomerativeClustering(2))
        return pmstore.partial_fit(model, [batch for batch, _ in BATCHES], store=store, name="fit")

    with copied(path) as copies:
        whole = learned(path)
    for model in map(learned, copies):
        assert_same(model.predict(X), whole.predict(X))
