"""pmstore.partial_fit: an estimator that learns batch by batch goes on where it was, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn")

import scipy.sparse as sparse  # noqa: E402
from sklearn.base import BaseEstimator  # noqa: E402
from sklearn.cluster import Birch, MiniBatchKMeans  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from sklearn.decomposition import (  # noqa: E402
    IncrementalPCA,
    LatentDirichletAllocation,
    MiniBatchDictionaryLearning,
    MiniBatchNMF,
)
from sklearn.linear_model import Perceptron, SGDClassifier, SGDOneClassSVM, SGDRegressor  # noqa: E402
from sklearn.multiclass import OneVsRestClassifier  # noqa: E402
from sklearn.naive_bayes import BernoulliNB, CategoricalNB, ComplementNB, GaussianNB, MultinomialNB  # noqa: E402
from sklearn.neural_network import BernoulliRBM, MLPClassifier, MLPRegressor  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

import pmstore  # noqa: E402
from pmstore._resume import partial_fit  # noqa: E402
from tests.support.resuming import assert_same, copied, sampled  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

X, Y = load_digits(return_X_y=True)
X, Y = X[:200, 10:30] / 16, Y[:200] % 4


class Named(BaseEstimator):
    """Its parameters have names that pmstore's own estimators have for something else."""

    def __init__(self, engine: str = "sgd", name: str = "mean", verbose: int = 0) -> None:
        self.engine, self.name, self.verbose = engine, name, verbose

    def partial_fit(self, X: Any, y: Any = None) -> Named:
        self.coef_ = getattr(self, "coef_", 0.0) + len(self.engine) * len(self.name) * X.sum(axis=0)
        return self


NAMES = np.array(["zero", "one", "two", "three"])
CLASSES = {"classes": np.arange(4)}
BATCHES = [(X[i : i + 40], Y[i : i + 40]) for i in range(0, 200, 40)]


def with_weights(batch: tuple[Any, Any]) -> dict[str, Any]:
    return {"X": sparse.csr_matrix(batch[0]), "y": batch[1], "sample_weight": batch[1] + 0.5}


def weighted(batch: tuple[Any, Any]) -> tuple[Any, Any, Any]:
    return (*batch, batch[1] + 1.0)


def named(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """Targets with classes that have names, as objects."""
    return batch[0], NAMES.astype(object)[batch[1]]


CASES: dict[str, tuple[Any, Callable[[Any], Any], dict[str, Any]]] = {
    "SGDClassifier": (SGDClassifier(random_state=0), with_weights, CLASSES),
    "SGDClassifier log_loss": (SGDClassifier("log_loss", random_state=0), named, {"classes": NAMES.astype(object)}),
    "SGDClassifier average": (SGDClassifier(random_state=0, average=60), tuple, CLASSES),
    "SGDClassifier binary": (
        SGDClassifier(average=60, random_state=0),
        lambda b: (b[0], b[1] > 1),
        {"classes": [0, 1]},
    ),
    "SGDRegressor": (SGDRegressor(random_state=np.random.RandomState(3), average=60), weighted, {}),
    "SGDOneClassSVM": (SGDOneClassSVM(random_state=0), lambda batch: batch[0], {}),
    "Perceptron": (Perceptron(random_state=0), named, {"classes": NAMES}),
    "MLPClassifier": (MLPClassifier((9, 5), random_state=0), named, {"classes": NAMES}),
    "MLPRegressor": (
        MLPRegressor(hidden_layer_sizes=(7,), solver="sgd", random_state=np.random.RandomState(3)),
        tuple,
        {},
    ),
    "GaussianNB": (GaussianNB(), lambda b: {"X": b[0], "y": b[1], "sample_weight": b[1] + 1.0}, CLASSES),
    "MultinomialNB": (MultinomialNB(), tuple, CLASSES),
    "BernoulliNB": (BernoulliNB(binarize=0.3), tuple, CLASSES),
    "ComplementNB": (ComplementNB(norm=True), tuple, CLASSES),
    "CategoricalNB": (CategoricalNB(min_categories=17), lambda b: ((b[0] * 16).astype(int), b[1]), CLASSES),
    "MiniBatchDictionaryLearning": (MiniBatchDictionaryLearning(3, random_state=0), lambda batch: batch[0], {}),
    "MiniBatchNMF": (MiniBatchNMF(3, random_state=0), lambda batch: batch[0], {}),
    "LatentDirichletAllocation": (LatentDirichletAllocation(3, random_state=0), lambda batch: batch[0], {}),
    "IncrementalPCA": (IncrementalPCA(4), lambda batch: batch[0].astype("f4"), {}),
    "BernoulliRBM": (BernoulliRBM(3, random_state=0), lambda batch: batch[0], {}),
    "MiniBatchKMeans": (MiniBatchKMeans(4, random_state=0, n_init=1), lambda batch: batch[0], {}),
    "Birch": (Birch(threshold=0.9, branching_factor=4, n_clusters=None), lambda batch: batch[0], {}),
    "StandardScaler": (StandardScaler(), lambda batch: batch[0].tolist(), {}),
    "OneVsRestClassifier": (OneVsRestClassifier(SGDClassifier(random_state=0)), tuple, CLASSES),
}


def learn(estimator: Any, batches: Any, **parameters: Any) -> Any:
    """The loop that nobody interrupts."""
    estimator = copy.deepcopy(estimator)
    for batch in batches:
        if isinstance(batch, dict):
            estimator.partial_fit(**batch, **parameters)
        elif isinstance(batch, tuple):
            estimator.partial_fit(*batch, **parameters)
        else:
            estimator.partial_fit(batch, **parameters)
    return estimator


def predictions(estimator: Any) -> Any:
    for method in ("predict", "transform"):
        if hasattr(estimator, method):
            return getattr(estimator, method)((X * 16).astype(int) if isinstance(estimator, CategoricalNB) else X)
    return None


@pytest.mark.longer
@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_after_every_commit(case: str, path: Path) -> None:
    estimator, batch_of, parameters = CASES[case]
    batches = list(map(batch_of, BATCHES))
    reference = learn(estimator, batches, **parameters)
    with copied(path) as copies:
        fit = pmstore.partial_fit(copy.deepcopy(estimator), batches, store=path, name="fit", **parameters)
    assert_same(fit, reference)
    assert_same(predictions(fit), predictions(reference))
    assert len(copies) == len(batches) + 2  # one for each, the end, and closing the store
    for store in sampled(copies):
        fit = pmstore.partial_fit(copy.deepcopy(estimator), batches, store=store, name="fit", **parameters)
        assert_same(fit, reference)
        assert_same(predictions(fit), predictions(reference))


def test_arrays_with_gaps_have_them_again(path: Path) -> None:
    """The components are the first rows of an array in Fortran order. Products with them are added in that order."""
    data = np.random.RandomState(0).normal(size=(400, 50))
    batches = [data[at : at + 100] for at in range(0, 400, 100)]
    reference = learn(IncrementalPCA(3), batches)
    before = learn(IncrementalPCA(3), batches[:2])
    for start, of in ((IncrementalPCA(3), batches), (before, batches[2:])):
        with copied(path) as copies:
            fits = [pmstore.partial_fit(copy.deepcopy(start), of, store=path, name=f"{len(of)}")]
        fits += [pmstore.partial_fit(copy.deepcopy(start), of, store=store, name=f"{len(of)}") for store in copies]
        for fit in fits:
            assert_same(fit, reference)
            assert fit.components_.strides == reference.components_.strides
            assert_same(fit.transform(data), reference.transform(data))
    with pytest.raises(ValueError, match="features"):
        pmstore.partial_fit(before, [batches[2], batches[3][:, :7]], store=path, name="fails")
    assert_same(before.transform(data), learn(IncrementalPCA(3), batches[:2]).transform(data))


def test_an_attribute_that_is_a_parameter_is_that_parameter_again(path: Path) -> None:
    def learned(store: Path) -> Any:
        model = MiniBatchKMeans(4, random_state=np.random.RandomState(5), n_init=1)
        return pmstore.partial_fit(model, [batch[0] for batch in BATCHES], store=store, name="fit")

    with copied(path) as copies:
        whole = learned(path)
    for model in (whole, *map(learned, copies)):
        assert model._random_state is model.random_state
        assert_same(model, whole)


@pytest.mark.longer
@pytest.mark.parametrize("case", ["MultinomialNB", "BernoulliNB", "ComplementNB"])
def test_what_follows_from_other_attributes_is_not_stored(case: str, path: Path) -> None:
    estimator, batch_of, parameters = CASES[case]
    pmstore.partial_fit(copy.deepcopy(estimator), map(batch_of, BATCHES), store=path, name="fit", **parameters)
    with pmstore.open(path, "r") as store:
        names = {name.rpartition("/")[2] for name in store}
        nodes = str(store["fit/learned/nodes"])
    assert "feature_count_" in names
    for derived in ("feature_log_prob_", "class_log_prior_"):
        assert derived not in names and derived not in nodes


@pytest.mark.longer
@pytest.mark.parametrize("case", ["MLPClassifier", "MiniBatchKMeans", "IncrementalPCA"])
def test_with_two_threads(case: str, path: Path) -> None:
    estimator, batch_of, parameters = CASES[case]
    batches = list(map(batch_of, BATCHES))
    with threadpool_limits(2):
        reference = learn(estimator, batches, **parameters)
        with copied(path) as copies:
            pmstore.partial_fit(copy.deepcopy(estimator), iter(batches), store=path, name="fit", **parameters)
        fit = pmstore.partial_fit(copy.deepcopy(estimator), iter(batches), store=copies[2], name="fit", **parameters)
        assert_same(fit, reference)
    with pytest.raises(pmstore.FingerprintMismatchError, match="threads: 2 ≠ 1"):
        pmstore.partial_fit(copy.deepcopy(estimator), iter(batches), store=copies[2], name="fit", **parameters)


def test_a_process_that_is_killed_again_and_again(path: Path, child: Callable[..., Any]) -> None:
    code = """
        import os, signal, sys
        import numpy as np
        import pmstore
        from sklearn.neural_network import MLPClassifier
        from threadpoolctl import threadpool_limits

        update = MLPClassifier._update_no_improvement_count

        def killed(self, *arguments):
            update(self, *arguments)
            if self.t_ == int(sys.argv[3]):
                os.kill(os.getpid(), signal.SIGKILL)

        MLPClassifier._update_no_improvement_count = killed
        X, y = np.load(sys.argv[2])["X"], np.load(sys.argv[2])["y"]
        with threadpool_limits(1):
            pmstore.partial_fit(
                MLPClassifier((9, 5), random_state=0), [(X[i : i + 40], y[i : i + 40]) for i in range(0, 200, 40)],
                store=sys.argv[1], epochs=20, classes=np.arange(4),
            )
    """
    data = path.with_suffix(".npz")
    np.savez(data, X=X, y=Y)
    for samples in (1200, 2360):
        process = child(code, path, data, samples).process
        assert process.wait() == -signal.SIGKILL, process.communicate()
    seen: list[int] = []
    batches = Noted(BATCHES, seen)
    model = MLPClassifier((9, 5), random_state=0)
    fit = pmstore.partial_fit(model, batches, store=path, epochs=20, **CLASSES)
    assert_same(fit, learn(MLPClassifier((9, 5), random_state=0), BATCHES * 20, **CLASSES))
    # the first one for the fingerprint, the last one to know it again, and those that are left
    assert fit is model and seen == [0, 2, *[3, 4], *[0, 1, 2, 3, 4] * 8]


class Noted(list[Any]):
    """Batches, and which of them were asked for."""

    def __init__(self, batches: Any, seen: list[int]) -> None:
        super().__init__(batches)
        self.seen = seen

    def __getitem__(self, i: Any) -> Any:
        self.seen.append(i)
        return super().__getitem__(i)


class Stops(Exception):
    """An exception that stops a fit as an interrupt does."""


def stopping(batches: Any, after: int) -> Iterator[Any]:
    """That many batches, and then an exception."""
    for number, batch in enumerate(batches):
        if number == after:
            raise Stops
        yield batch


SOURCES: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "iterator": iter,
    "generator": lambda batches: (batch for batch in batches),
    "function": lambda batches: lambda i: batches[i] if i < len(batches) else None,
    "array": lambda batches: np.stack([batch for batch, _ in batches]),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("commit_every", [1, 2, 1e9])
def test_batches_come_from_anywhere(source: str, commit_every: float, path: Path) -> None:
    batches, estimator = SOURCES[source](BATCHES), MiniBatchNMF(3, random_state=0)
    if source != "array":
        batches = SOURCES[source]([batch for batch, _ in BATCHES])
    fit = pmstore.partial_fit(estimator, batches, store=path, commit_every=commit_every)
    assert_same(fit, learn(MiniBatchNMF(3, random_state=0), [batch for batch, _ in BATCHES]))
    assert pmstore.prune(path)


@pytest.mark.parametrize("source", ["function", "iterator"])
@pytest.mark.parametrize("name", ["fit", None])
def test_a_finished_fit_refuses_more_batches(source: str, name: str | None, path: Path) -> None:
    pmstore.partial_fit(GaussianNB(), SOURCES[source](BATCHES[:2]), store=path, name=name, **CLASSES)
    pmstore.partial_fit(GaussianNB(), SOURCES[source](BATCHES[:2]), store=path, name=name, **CLASSES)
    with pytest.raises(pmstore.FingerprintMismatchError, match="is finished, and there is a batch 2 of epoch 0 now"):
        pmstore.partial_fit(GaussianNB(), SOURCES[source](BATCHES), store=path, name=name, **CLASSES)


def test_a_generator_that_fails(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was learned is in the store; the estimator is as it was; what was learned from is known again."""
    model = SGDClassifier(random_state=0)
    before = copy.deepcopy(vars(model))
    with pytest.raises(Stops):
        pmstore.partial_fit(model, stopping(BATCHES, 3), store=path, name="sgd", **CLASSES)
    assert_same(vars(model), before)
    others = [(X[80:120] + 1e-9, Y[80:120]) if n == 2 else batch for n, batch in enumerate(BATCHES)]
    with pytest.raises(pmstore.FingerprintMismatchError, match="batch 2 of epoch 0 is another one"):
        pmstore.partial_fit(model, iter(others), store=path, name="sgd", **CLASSES)
    with pytest.raises(pmstore.FingerprintMismatchError, match="batch 1 of epoch 0 is missing"):
        pmstore.partial_fit(model, iter(BATCHES[:1]), store=path, name="sgd", **CLASSES)
    with caplog.at_level(logging.INFO, "pmstore"):
        fit = pmstore.partial_fit(model, iter(BATCHES), store=path, name="sgd", **CLASSES)
    assert_same(fit, learn(SGDClassifier(random_state=0), BATCHES, **CLASSES))
    assert f"SGDClassifier: resuming 'sgd' in {path}, at run 0 of 1, 3 iterations done" in caplog.messages
    again = pmstore.partial_fit(SGDClassifier(random_state=0), iter(BATCHES), store=path, name="sgd", **CLASSES)
    assert_same(again, fit)
    with pytest.raises(pmstore.FingerprintMismatchError, match="batch 2 of epoch 0 is another one"):
        pmstore.partial_fit(SGDClassifier(random_state=0), iter(others), store=path, name="sgd", **CLASSES)


@pytest.mark.parametrize("after", [2, 5, 7])
def test_epochs_of_a_list(after: int, path: Path) -> None:
    """How many iterations there will be is known, and stands in the history."""

    class Batches(list[Any]):
        """It stops after so many batches of all epochs."""

        left = after

        def __getitem__(self, index: Any) -> Any:
            if not self.left:
                raise Stops
            self.left -= 1
            return super().__getitem__(index)

    batches = Batches(BATCHES)
    with pytest.raises(Stops):
        pmstore.partial_fit(SGDClassifier(random_state=0), batches, store=path, name="sgd", epochs=2, **CLASSES)
    history = pmstore.history(path, "sgd")
    assert (history.max_iter, history.finished) == (2 * len(BATCHES), False)
    batches.left = 100
    fit = pmstore.partial_fit(SGDClassifier(random_state=0), batches, store=path, name="sgd", epochs=2, **CLASSES)
    assert_same(fit, learn(SGDClassifier(random_state=0), BATCHES * 2, **CLASSES))
    history = pmstore.history(path, "sgd")
    assert len(history["objective"]) == history.max_iter == 2 * len(BATCHES) and history.finished


@pytest.mark.parametrize("after", [2, 5, 7])
def test_epochs(after: int, path: Path) -> None:
    class Again:
        """An iterable, which stops after so many batches of all epochs."""

        left = after

        def __iter__(self) -> Iterator[Any]:
            for batch in BATCHES:
                if not self.left:
                    raise Stops
                self.left -= 1
                yield batch

    batches = Again()
    model = SGDClassifier(random_state=0, average=True)
    with pytest.raises(Stops):
        pmstore.partial_fit(model, batches, store=path, name="sgd", epochs=2, **CLASSES)
    batches.left = 100
    fit = pmstore.partial_fit(model, batches, store=path, name="sgd", epochs=2, **CLASSES)
    assert_same(fit, learn(SGDClassifier(random_state=0, average=True), BATCHES * 2, **CLASSES))
    # from the second epoch on, those of the first one aren't gone through again, but for one for the fingerprint
    assert batches.left == 100 - (10 if after <= 5 else 6)


def test_an_interrupt_inside_a_batch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that are changed in place are as they were at the last commit, in the store and in the estimator."""
    fitted = learn(MLPClassifier((9, 5), random_state=0), BATCHES, **CLASSES)
    model, left = copy.deepcopy(fitted), 3

    def interrupted(self: Any, *arguments: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            signal.raise_signal(signal.SIGINT)

    with pmstore.open(path) as store:
        warned = pytest.warns(UserWarning, match="interrupted by user")  # an MLP takes it for its end
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), warned:
            patch.setattr(MLPClassifier, "_update_no_improvement_count", interrupted)
            pmstore.partial_fit(model, BATCHES, store=store, name="mlp", **CLASSES)
        assert store["mlp/progress"]["iteration"] == 2
        assert_same(model, fitted)
        fit = pmstore.partial_fit(model, BATCHES, store=store, name="mlp", **CLASSES)
        assert any(name.endswith("/coefs_/0") for name in store)
        assert_same(fit, learn(fitted, BATCHES, **CLASSES))


def test_a_list_of_numbers_grows_in_place(path: Path) -> None:
    """The losses of an MLP, of which there is one per batch."""
    batches = BATCHES * 20
    with pytest.raises(Stops):
        pmstore.partial_fit(
            MLPRegressor(hidden_layer_sizes=(2,), random_state=0), stopping(batches, 70), store=path, name="mlp"
        )
    fit = pmstore.partial_fit(
        MLPRegressor(hidden_layer_sizes=(2,), random_state=0), iter(batches), store=path, name="mlp"
    )
    assert_same(fit, learn(MLPRegressor(hidden_layer_sizes=(2,), random_state=0), batches))
    with pmstore.open(path) as store:
        assert store["mlp/learned/attributes/loss_curve_"].shape == (128,)
        assert store["mlp/learned/hashes"].shape == (128,)


def test_a_list_of_numbers_has_no_more_room_than_it_needs(path: Path) -> None:
    batches = BATCHES * 20
    for count, room in ((33, 64), (64, 64), (65, 128)):
        model = MLPRegressor(hidden_layer_sizes=(2,), random_state=0)
        with pmstore.open(path) as store:
            fit = pmstore.partial_fit(model, iter(batches[:count]), store=store, name=f"mlp{count}")
            assert len(fit.loss_curve_) == count
            assert store[f"mlp{count}/learned/attributes/loss_curve_"].shape == (room,)


class Odd(BaseEstimator):
    """Attributes of every kind, some of which share an array."""

    def __init__(self, extra: Any = None, generator: Any = None) -> None:
        self.extra = extra
        self.generator = generator

    def partial_fit(self, X: Any, y: Any = None) -> Odd:
        if not hasattr(self, "whole_"):
            self.whole_ = np.zeros((4, 5), order="F")
            self.row_, self.column_ = self.whole_[1], self.whole_[1:, 2]
            self.pair_ = (self.row_, "of a pair")
            self.again_ = [self.pair_, {"whole": self.whole_, 3: None, 1.5: {"deep": [self.whole_.T]}}]
            self.ring_: list[Any] = [1]
            self.ring_.append(self.ring_)
            self.empty_, self.scalar_, self.big_ = np.zeros((0, 3)), np.array(2.5), 1 << 80
            self.objects_ = np.array([["a", None], [1, (2, [3])]], dtype=object)
            self.random_ = [np.random.RandomState(3), np.random.default_rng(4)]
            self.first_, self.second_ = np.arange(3.0), -np.arange(3.0)
            self.scaler_ = None
            self.kind_: Any = None
        self.kind_ = X[0].copy() if isinstance(self.kind_, list) else [X[0].copy(), X[1].copy()]
        self.whole_[1] += X[0, 0]
        self.column_ *= 1.5
        self.first_, self.second_ = self.second_, self.first_
        self.first_ += self.random_[0].uniform() + self.random_[1].uniform()
        self.ring_[0] += 1
        if self.generator is not None:
            self.scalar_[...] = self.generator.uniform()
        if self.extra is not None:
            self.scaler_ = {"one": [self.extra]}
        return self


def test_attributes_of_every_kind(path: Path) -> None:
    batches = [X[:2], X[3:5], X[7:9], X[9:11]]
    reference = learn(Odd(generator=np.random.default_rng(1)), batches)
    with copied(path) as copies:
        fit = pmstore.partial_fit(Odd(generator=np.random.default_rng(1)), batches, store=path, name="odd")
    for store in [path, *copies]:
        fit = pmstore.partial_fit(Odd(generator=np.random.default_rng(1)), batches, store=store, name="odd")
        assert_same(fit, reference)
        assert fit.ring_[1] is fit.ring_ and fit.again_[0] is fit.pair_
        fit.whole_[1, 2] = 77
        assert fit.row_[2] == fit.column_[0] == fit.pair_[0][2] == fit.again_[1][1.5]["deep"][0][2, 1] == 77
        assert fit.generator.uniform() == copy.deepcopy(reference.generator).uniform()
        fit.partial_fit(X)  # all of it in plain memory


@pytest.mark.parametrize("extra", [{(1, 2)}, lambda x: x, np.zeros(3).view(np.matrix), object(), np.ma.zeros(2)])
def test_an_attribute_that_cannot_be_kept(extra: Any, path: Path) -> None:
    class Bad(Odd):
        def partial_fit(self, X: Any, y: Any = None) -> Odd:
            self.scaler_ = {"one": [extra]}
            return self

    model = Bad()
    with pmstore.open(path) as store:
        with pytest.raises(TypeError, match=rf"attribute scaler_\.one\[0\] .*{type(extra).__name__}: .*Resumable"):
            pmstore.partial_fit(model, [X], store=store)
        assert store.sequence == 0 and len(store) == 0
    assert not hasattr(model, "scaler_")
    pmstore.partial_fit(model, [X], store=None)


def test_what_makes_another_fit(path: Path) -> None:
    def fit(model: Any = None, batches: Any = BATCHES, **parameters: Any) -> Any:
        parameters = {**CLASSES, **parameters}
        return pmstore.partial_fit(
            model or SGDClassifier(random_state=0), batches, store=path, name="fit", **parameters
        )

    model = fit()
    for change, message in (
        ({"model": SGDClassifier(random_state=1)}, "random_state: 0 ≠ 1"),
        ({"model": Perceptron(random_state=0)}, "estimator: .*SGDClassifier, version 1 ≠ .*Perceptron"),
        ({"model": model}, "learned before: [0-9a-f]{16} ≠ [0-9a-f]{16}"),
        ({"batches": BATCHES[:4]}, "batches: 5 ≠ 4"),
        ({"batches": BATCHES[::-1]}, "first batch: [0-9a-f]{16} ≠ [0-9a-f]{16}"),
        ({"batches": [*BATCHES[:4], BATCHES[0]]}, "batch 4 of epoch 0 is another one"),
        ({"epochs": 2}, "epochs: 1 ≠ 2"),
        ({"classes": np.arange(5)}, "arguments: "),
    ):
        with pytest.raises(pmstore.FingerprintMismatchError, match=message):
            fit(**change)
    fit(SGDClassifier(random_state=0, verbose=0))


@pytest.mark.parametrize(
    "batches, options, error, message",
    [
        ([], {}, ValueError, "no batch in epoch 0"),
        (lambda i: None, {}, ValueError, "no batch in epoch 0"),
        ([(X[:0], Y[:0])], CLASSES, ValueError, "0 sample"),
        ([(X, Y, Y, Y)], CLASSES, TypeError, "not a tuple of 4"),
        (X, CLASSES, TypeError, "not one .*ndarray"),
        ({"X": X}, CLASSES, TypeError, "not one .*dict"),
        (7, CLASSES, TypeError, "not 7"),
        (iter(BATCHES), {"epochs": 2, **CLASSES}, ValueError, "gives every batch once"),
        (BATCHES, {"epochs": 0, **CLASSES}, ValueError, "epochs"),
        (BATCHES, {"commit_every": 0, **CLASSES}, ValueError, "commit_every"),
        (BATCHES, {}, ValueError, "classes must be passed"),
    ],
)  # fmt: skip
def test_bad_input_leaves_no_trace(
    batches: Any, options: Any, error: type[Exception], message: str, path: Path
) -> None:
    model = SGDClassifier(random_state=0)
    with pmstore.open(path) as store:
        with pytest.raises(error, match=message):
            pmstore.partial_fit(model, batches, store=store, **options)
        assert store.sequence == 0 and not hasattr(model, "coef_")
    with pytest.raises(ValueError, match="MT19937"):
        old: Any = np.random.PCG64(1)
        pmstore.partial_fit(SGDClassifier(random_state=np.random.RandomState(old)), BATCHES, store=path, **CLASSES)
    with pytest.raises(TypeError, match="int has no partial_fit"):
        pmstore.partial_fit(3, BATCHES, store=path)


@pytest.mark.parametrize(
    "nodes",
    [
        None,
        7,
        [["dict", []]],
        [["list", []]],
        [["tuple", [[0]]]],
        [["dict", [["attributes", [1]], ["generators", [1]], ["hashes", [2]]]], ["dict", []], ["array", "none"]],
        [["dict", [["attributes", [1]]]], ["object", "Popen", []]],
        [["dict", [["attributes", [1]]]], ["made", "AdamOptimizer", []]],
        [["dict", [["attributes", [1]]]], ["made", "Hinge", [[1]]]],
        [["dict", [["attributes", [1]]]], ["array", "hashes", [9], [8], 0]],
        [["dict", [["attributes", [1]]]], ["generator", "Popen", {}]],
        [["dict", [["attributes", [1]]]], ["array"], ["numbers", "float"]],
        [["dict", [["attributes", [1]]]], ["thing", 0]],
        [
            ["dict", [["attributes", [1]], ["generators", [1]], ["hashes", [2]]]],
            ["dict", []],
            ["array", "hashes", [1], [8], 0],
        ],
    ],
)
def test_a_state_that_somebody_changed(nodes: Any, path: Path) -> None:
    pmstore.partial_fit(StandardScaler(), [X[:50], X[50:]], store=path, name="fit")
    with pmstore.open(path) as store:
        store["fit/learned/nodes"] = nodes
    model = StandardScaler()
    with pytest.raises(pmstore.FingerprintMismatchError, match="by other code: its entry 'learned/nodes' must be "):
        pmstore.partial_fit(model, [X[:50], X[50:]], store=path, name="fit")
    assert not hasattr(model, "mean_")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_batch_at_once(number: signal.Signals) -> None:
    """Also if the handler is that of another signal, and the estimator catches the exception, as an MLP does."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        for caught in (False, True):
            with pytest.raises(KeyboardInterrupt), partial_fit._interrupts_get_through():
                with contextlib.suppress(*[KeyboardInterrupt] if caught else []):
                    signal.raise_signal(number)
                    raise AssertionError("the batch goes on")
            assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_parameters_of_others_count(path: Path) -> None:
    batches = [batch[0] for batch in BATCHES]
    pmstore.partial_fit(Named(), batches, store=path, name="fit")
    pmstore.partial_fit(Named(verbose=1), batches, store=path, name="fit")
    for other in (Named(engine="sign"), Named(name="median")):
        with pytest.raises(pmstore.FingerprintMismatchError, match="parameter (engine|name): "):
            pmstore.partial_fit(other, batches, store=path, name="fit")
