"""pmstore.partial_fit of estimators whose parameters are objects: those that learn are refused."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
        if sparse.issparse(self.base):
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


class Late(Wrapper):
    """Learns in another estimator from the second batch on."""

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Any:
        self.n_ = getattr(self, "n_", 0) + 1
        return super().partial_fit(X, y, classes) if self.n_ > 1 else self


class Locked(SGDClassifier):
    """Can't be pickled."""

    def __init__(self, random_state: int = 0) -> None:
        super().__init__(random_state=random_state)
        self.lock_ = threading.Lock()

    def __getstate__(self) -> Any:
        raise TypeError("not to be pickled")


def learned(store: Any, model: Any) -> Any:
    return pmstore.partial_fit(model, BATCHES, store=store, name="fit", **CLASSES)


def test_an_estimator_that_learns_inside_of_its_parameters_later(path: Path) -> None:
    """The first batch is committed, but no batch that would be lost."""
    for _ in range(2):
        with pytest.raises(TypeError, match="changes the parameter 'base'.*Resumable"):
            learned(path, Late(SGDClassifier(random_state=0)))
        assert len(pmstore.history(path, "fit")["iteration"]) == 1


@pytest.mark.parametrize("base", [Locked, lambda: (None, Locked()), lambda: {"one": Wrapper(Locked())}])
def test_an_estimator_that_learns_inside_of_what_cannot_be_pickled(base: Callable[[], Any], path: Path) -> None:
    class Last(Wrapper):
        def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Any:
            base = self.base[-1] if isinstance(self.base, tuple) else self.base
            (base["one"] if isinstance(base, dict) else base).partial_fit(X, y, classes=classes)
            return self

    with warnings.catch_warnings(), pytest.raises(TypeError, match="changes the parameter 'base'"):
        warnings.simplefilter("ignore")  # a fingerprint warns of a lock
        learned(path, Last(base()))


class Reports(BaseEstimator):
    """Tells callbacks and loggers of its batches, and lets another estimator draw."""

    def __init__(self, callback: Any = None, logger: Any = None, draw: Any = None, inner: Any = None) -> None:
        self.callback, self.logger, self.draw, self.inner = callback, logger, draw, inner

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Any:
        for inside in (self, self.inner):
            inside.callback(X)
            inside.logger["rows"].append(len(X))
            inside.draw()
        self.inner.matrix_.sort_indices()
        self.n_ = getattr(self, "n_", 0) + len(X)
        return self


class Counter:
    n = 0

    def __call__(self, *_: Any) -> None:
        self.n += 1


class Odd:
    """No pickle of it can be made, not even one of its type."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return 5


class Picky:
    """Has a method that can't be read."""

    @property
    def fit(self) -> Any:
        raise KeyError("fit")


def test_a_parameter_whose_method_cannot_be_read_is_no_estimator() -> None:
    model = Frozen(sparse.csr_matrix((1, 1)), StandardScaler().fit(X), [lambda x: x, Picky()])
    assert learned(None, model).sum_ == pytest.approx(0, abs=1e-9)


def test_an_estimator_with_contents_that_cannot_be_compared(path: Path) -> None:
    base = StandardScaler().fit(X)
    base.odd_ = Odd()
    with warnings.catch_warnings(), pytest.raises(TypeError, match="changes the parameter 'base'"):
        warnings.simplefilter("ignore")  # a fingerprint warns of it
        learned(path, Frozen(base, StandardScaler().fit(X), [lambda x: x]))


def reporting(inner: Any = None) -> Any:
    return Reports(Counter(), {"rows": []}, functools.partial(np.random.default_rng(0).normal, size=2), inner)


def test_callbacks_and_loggers_and_generators_are_settings(path: Path) -> None:
    def made() -> Any:
        inner = reporting()
        inner.generator_, inner.lock_, inner.function_ = np.random.RandomState(0), threading.Lock(), lambda: 0
        inner.matrix_ = sparse.csr_matrix((np.ones(2), [1, 0], [0, 2]), shape=(1, 2))
        inner.draw = inner.generator_.normal
        return reporting(inner)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with copied(path) as copies:
            model = learned(path, made())
        assert model.callback.n == len(model.inner.logger["rows"]) == len(BATCHES)
        for store in copies:
            assert learned(store, made()).n_ == model.n_ == len(X)


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


@pytest.mark.parametrize("kind", [sparse.dok_array, sparse.dok_matrix])
@pytest.mark.parametrize("around", [lambda X: X, lambda X: (X,), lambda X: {"X": X}])
def test_batches_that_are_dicts_of_elements(kind: Any, around: Callable[[Any], Any], path: Path) -> None:
    """The elements of these matrices are those of a dict, which lacks the shape."""

    def learned(store: Any, rows: int) -> Any:
        X = kind(sparse.coo_matrix(([1.0, 2.0], ([0, 1], [0, 1])), (rows, 3)))
        return pmstore.partial_fit(StandardScaler(with_mean=False), [around(X)], store=store, name="scaler")

    assert learned(path, 4).n_samples_seen_ == learned(path, 4).n_samples_seen_ == 4
    with pytest.raises(pmstore.FingerprintMismatchError):
        learned(path, 40)
