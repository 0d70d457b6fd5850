"""scikit-learn's callbacks on pmstore's estimators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

callback = pytest.importorskip("sklearn.callback")

from sklearn.base import clone  # noqa: E402
from sklearn.metrics import v_measure_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

import pmstore  # noqa: E402
from pmstore.cluster import KMeans, MiniBatchKMeans  # noqa: E402
from pmstore.decomposition import IncrementalPCA  # noqa: E402
from pmstore.mixture import BayesianGaussianMixture, GaussianMixture  # noqa: E402
from pmstore.scale import Serial  # noqa: E402
from tests.support.resuming import copied, estimators  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.usefixtures("one_thread"),
]

X = np.random.default_rng(0).normal(size=(60, 3)) + 4 * (np.arange(60) // 30)[:, None]
X -= X.min(axis=0)  # some estimators take no negative numbers
Y = np.arange(60) // 30

KINDS = {
    "lloyd": lambda **store: KMeans(3, n_init=2, max_iter=4, tol=0, random_state=0, **store),
    "elkan": lambda **store: KMeans(3, max_iter=4, tol=0, random_state=0, algorithm="elkan", copy_x=False, **store),
    "mini-batch": lambda **store: MiniBatchKMeans(3, batch_size=20, max_iter=2, random_state=0, **store),
    "mixture": lambda **store: GaussianMixture(2, n_init=2, max_iter=4, tol=0, random_state=0, **store),
    "bayes": lambda **store: BayesianGaussianMixture(n_components=2, max_iter=3, tol=0, random_state=0, **store),
    "components": lambda **store: IncrementalPCA(2, batch_size=10, **store),
}


def test_every_estimator_is_tested() -> None:
    assert {type(make()) for make in KINDS.values()} == estimators()


class Log:
    """Notes the tasks that end: their path, and what the fitted estimator makes of the data."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, ...]] = []
        self.ended: list[tuple[int, ...]] = []
        self.made: list[Any] = []

    def setup(self, estimator: Any, context: Any) -> None:
        self.torn_down = False

    def teardown(self, estimator: Any, context: Any) -> None:
        self.torn_down = True

    def on_fit_task_begin(self, estimator: Any, context: Any, *, X: Any = None) -> None:
        self.begun.append(path_of(context))

    def on_fit_task_end(self, estimator: Any, context: Any, *, X: Any = None, fitted_estimator: Any = None) -> None:
        self.ended.append(path_of(context))
        if fitted_estimator is not None:
            method = "predict" if hasattr(fitted_estimator, "predict") else "transform"
            self.made.append(getattr(fitted_estimator, method)(X))


def path_of(context: Any) -> tuple[int, ...]:
    """The ids of a task and of those above it."""
    return () if context.parent is None else (*path_of(context.parent), context.task_id)


def test_fits_over_shards_refuse_callbacks() -> None:
    with pytest.raises(NotImplementedError, match="a fit with engine calls no callbacks"):
        KMeans(3, engine=Serial()).set_callbacks(Log()).fit(X)


@pytest.mark.parametrize("kind", KINDS)
def test_each_iteration_is_a_task_also_in_a_resumed_fit(kind: str, path: Path) -> None:
    log, plain = Log(), KINDS[kind](store=path, name="plain").fit(X)
    with copied(path) as copies:
        model = KINDS[kind](store=path, name="fit").set_callbacks(log).fit(X.copy())
    history = model.history_
    one_run = history.runs == 1
    tasks = [
        (iteration - 1,) if one_run else (run, iteration - 1)
        for run, iteration in zip(history["run"].tolist(), history["iteration"].tolist())
    ]
    assert [task for task in log.ended if len(task) == len(tasks[0])] == tasks
    assert sorted(log.begun) == sorted(log.ended) and log.ended[-1] == () and log.torn_down
    assert len(log.made) == len(tasks) + 1
    method = "predict" if hasattr(model, "predict") else "transform"
    assert (log.made[-1] == getattr(plain, method)(X)).all() and (log.made[-1] == getattr(model, method)(X)).all()
    assert plain.get_params(deep=False).keys() == clone(model).get_params(deep=False).keys()

    again = Log()
    KINDS[kind](store=copies[1], name="fit").set_callbacks(again).fit(X.copy())
    assert again.ended == log.ended and 1 < len(again.made) < len(log.made)
    for one, other in zip(again.made[::-1], log.made[::-1]):
        assert (one == other).all()


class Draws(Log):
    """Draws from the generator that is the estimator's parameter."""

    def __init__(self, generator: np.random.RandomState) -> None:
        super().__init__()
        self.generator = generator

    def on_fit_task_end(self, estimator: Any, context: Any, *, X: Any = None, fitted_estimator: Any = None) -> None:
        if fitted_estimator is not None:  # no earlier process has done this
            self.generator.uniform()


@pytest.mark.parametrize("kind", ["lloyd", "mixture"])
def test_a_resumed_fit_goes_on_with_the_generator_as_callbacks_left_it(kind: str, path: Path) -> None:
    """The steps of these fits draw nothing themselves."""

    def fit(store: Path) -> Any:
        generator = np.random.RandomState(0)
        model = KINDS[kind](store=store, name="fit").set_params(random_state=generator)
        return model.set_callbacks(Draws(generator)).fit(X), generator.uniform()

    with copied(path) as copies:
        _, drawn = fit(path)
    for copy in copies[:-1]:
        assert fit(copy)[1] == drawn


@pytest.mark.parametrize("kind", KINDS)
def test_the_history_has_the_figures_of_each_iteration(kind: str, path: Path) -> None:
    plain = KINDS[kind](store=path, name="plain").fit(X.copy()).history_
    history = KINDS[kind](store=path, name="fit").set_callbacks(Log()).fit(X.copy()).history_
    assert history.keys() == plain.keys() and len(plain["iteration"])
    for name in plain.keys() - {"time", "seconds"}:
        np.testing.assert_array_equal(history[name], plain[name], name)


class Made(Log):
    """Notes what the fitted estimator of each iteration makes of the data, not rounded to labels."""

    def on_fit_task_end(self, estimator: Any, context: Any, *, X: Any = None, fitted_estimator: Any = None) -> None:
        if fitted_estimator is not None:
            self.made.append(unrounded(fitted_estimator, X))


def unrounded(model: Any, data: Any) -> Any:
    return model.transform(data) if hasattr(model, "transform") else model.predict_proba(data)


@pytest.mark.parametrize("kind", ["lloyd", "elkan", "mixture", "bayes"])
def test_callbacks_see_the_estimator_as_if_the_iteration_were_the_last(kind: str, path: Path) -> None:
    log, data = Made(), np.random.default_rng(1).normal(size=(200, 3))
    model = KINDS[kind](store=path).set_params(n_init=1).set_callbacks(log).fit(data.copy())
    assert len(log.made) == model.n_iter_ + 1 == model.max_iter + 1
    for i in range(model.max_iter):
        shorter = KINDS[kind]().set_params(n_init=1, max_iter=i + 1).fit(data.copy())
        np.testing.assert_array_equal(log.made[i], unrounded(shorter, data), str(i))


def test_without_a_store_the_callbacks_see_the_iterations_too() -> None:
    log = Log()
    model = KMeans(3, max_iter=4, tol=0, random_state=0).set_callbacks(log).fit(X)
    reference = KMeans(3, max_iter=4, tol=0, random_state=0).fit(X)
    assert (model.cluster_centers_ == reference.cluster_centers_).all() and len(log.made) == model.n_iter_ + 1


@pytest.mark.parametrize("model", [StandardScaler(), MiniBatchKMeans(3, random_state=0)], ids=["theirs", "ours"])
def test_callbacks_stay_with_an_estimator_that_learns_by_partial_fit(model: Any, path: Path) -> None:
    """They are settings, which the store does not keep."""
    log, batches = Log(), [X[:20], X[20:]]
    for _ in range(2):  # learns, loads
        fit = pmstore.partial_fit(clone(model).set_callbacks(log), batches, store=path, name="fit")
        assert fit._skl_callbacks == [log]


def test_scikit_learns_own(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = callback.ScoringMonitor(scoring="v_measure_score")
    model = KMeans(2, n_init=2, max_iter=4, random_state=0, store=path).set_callbacks(monitor).fit(X, Y)
    scores = [row["v_measure_score"] for row in monitor.get_logs().data]
    assert v_measure_score(Y, model.labels_) in scores and len(scores) == len(model.history_["run"]) + 1
    pytest.importorskip("rich")
    pipeline = make_pipeline(StandardScaler(), GaussianMixture(2, random_state=0, store=path))
    pipeline.set_callbacks(callback.ProgressBar(max_propagation_depth=None)).fit(X)
    assert "GaussianMixture" in capsys.readouterr().out


def test_an_exception_of_a_callback_leaves_the_last_commit(path: Path) -> None:
    class Impatient(Log):
        def on_fit_task_end(self, estimator: Any, context: Any, *, X: Any = None, fitted_estimator: Any = None) -> None:
            if path_of(context) == (2,):
                raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        GaussianMixture(2, tol=0, max_iter=5, random_state=0, store=path).set_callbacks(Impatient()).fit(X)
    again = GaussianMixture(2, tol=0, max_iter=5, random_state=0, store=path).fit(X)
    assert again.resumed_from_iter_ == 2
