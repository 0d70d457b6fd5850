"""pmstore.mixture: the same bits as scikit-learn's, whatever happens to the process."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import pickle
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

theirs = pytest.importorskip("sklearn.mixture")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import make_blobs  # noqa: E402
from sklearn.exceptions import ConvergenceWarning  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

import pmstore.mixture  # noqa: E402
from pmstore._core import Core  # noqa: E402
from pmstore.mixture import BayesianGaussianMixture, GaussianMixture  # noqa: E402
from pmstore.mixture._em import EM  # noqa: E402
from tests.support.pairs import half  # noqa: E402
from tests.support.resuming import interrupted  # noqa: E402
from tests.support.template import python  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

X, _ = make_blobs(120, 3, centers=4, cluster_std=2.5, random_state=1)
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "maximum likelihood": ("GaussianMixture", {}),
    "Dirichlet process": ("BayesianGaussianMixture", {}),
    "Dirichlet": ("BayesianGaussianMixture", {"weight_concentration_prior_type": "dirichlet_distribution"}),
}
COVARIANCES = ("full", "tied", "diag", "spherical")
SHAPES = {"full": (3, 3, 3), "tied": (3, 3), "diag": (3, 3), "spherical": (3,)}


def of_shape(kind: str, value: float) -> Any:
    """Covariances or precisions for three components of three features."""
    return value * (np.ones(SHAPES[kind]) if kind in ("diag", "spherical") else np.ones(SHAPES[kind]) * np.eye(3))


def parts(value: Any) -> list[tuple[Any, ...]]:
    """Types, dtypes, shapes and bytes of an attribute."""
    if isinstance(value, tuple | list):
        return [(type(value), len(value)), *itertools.chain(*map(parts, value))]
    array = np.asarray(value)
    return [(type(value), array.dtype, array.shape, array.tobytes())]


def assert_same(fit: Any, reference: Any) -> None:
    """All that scikit-learn's fit left, priors included, bit for bit and of the same types."""
    ours = {"resumed_from_run_", "resumed_from_iter_", "history_"}
    names = [name for name in vars(reference) if name.endswith("_") and name not in ours]
    assert {"means_", "covariances_", "precisions_cholesky_", "precisions_", "lower_bound_"} <= set(names)
    for name in names:
        assert parts(getattr(fit, name)) == parts(getattr(reference, name)), name


# ---- the same as scikit-learn

BOTH: dict[str, dict[str, Any]] = {
    "default": {},
    "n_init": {"n_init": 3, "init_params": "random_from_data"},
    "k-means++": {"init_params": "k-means++", "n_init": 2, "max_iter": 5},
    "random": {"init_params": "random", "tol": 1e-1, "reg_covar": 1e-3},
    "long": {"tol": 0.0, "max_iter": 20},  # longer than the first array of lower bounds
    "no iteration": {"max_iter": 0, "n_init": 2},
    "one component": {"n_components": 1},
}
GIVEN: dict[str, Callable[[str], dict[str, Any]]] = {
    "weights": lambda _: {"weights_init": [0.2, 0.3, 0.5], "n_init": 2},
    "means": lambda _: {"means_init": X[:3].tolist()},
    "precisions": lambda kind: {"precisions_init": of_shape(kind, 0.5), "init_params": "random"},
    "all": lambda kind: {
        "weights_init": np.float32([0.25, 0.25, 0.5]),
        "means_init": np.asfortranarray(X[:3]),
        "precisions_init": of_shape(kind, 0.3),
    },
}
PRIORS: dict[str, Callable[[str], dict[str, Any]]] = {
    "priors": lambda kind: {
        "mean_prior": np.zeros(3),
        "mean_precision_prior": 0.5,
        "degrees_of_freedom_prior": 4.5,
        "weight_concentration_prior": 0.1,
        "covariance_prior": {"full": np.eye(3), "tied": np.eye(3), "diag": np.ones(3), "spherical": 2.0}[kind],
    }
}


def case(label: str, covariance: str, more: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Class, parameters."""
    kind, fixed = CLASSES[label]
    few = {"n_components": 3, "random_state": 3, "max_iter": 6, "covariance_type": covariance}
    return kind, {**few, **fixed, **more}


def cases() -> Iterator[Any]:
    for label, covariance in itertools.product(CLASSES, COVARIANCES):
        more = GIVEN if label == "maximum likelihood" else PRIORS
        for name, parameters in [*BOTH.items(), *((name, make(covariance)) for name, make in more.items())]:
            yield pytest.param(*case(label, covariance, parameters), id=f"{label}, {covariance}, {name}")


def pair(kind: str, parameters: dict[str, Any], path: Path, **more: Any) -> tuple[Any, Any]:
    """scikit-learn's and ours, with nothing in common."""
    ours, others = copy.deepcopy(parameters), copy.deepcopy(parameters)
    return getattr(theirs, kind)(**others), getattr(pmstore.mixture, kind)(**ours, store=path, **more)


DTYPES = [pytest.param("f8", id="f8"), pytest.param("f4", id="f4")]


@pytest.mark.parametrize("kind, parameters, dtype", half(cases(), DTYPES))
def test_a_fit_in_a_store_is_scikit_learns(kind: str, parameters: dict[str, Any], dtype: str, path: Path) -> None:
    data = X.astype(dtype)
    reference, fit = pair(kind, parameters, path)
    try:
        labels = reference.fit_predict(data)
    except ValueError as error:  # before 1.7, of some in float32
        with pytest.raises(ValueError, match=str(error)[:50]):
            fit.fit_predict(data)
        return
    assert parts(fit.fit_predict(data)) == parts(labels)
    assert_same(fit, reference)
    _, again = pair(kind, parameters, path)
    assert_same(again.fit(data), reference)  # loads
    assert (fit.resumed_from_run_, fit.resumed_from_iter_) == (0, 0)


@pytest.mark.parametrize("data", [np.asfortranarray(X), X.tolist(), X[::2, ::-1], np.asfortranarray(X)[::2]])
def test_data_as_they_lie_in_memory(data: Any, path: Path) -> None:
    for kind in ("GaussianMixture", "BayesianGaussianMixture"):
        reference, fit = pair(kind, {"n_components": 3, "random_state": 0, "max_iter": 4}, path)
        assert_same(fit.fit(data), reference.fit(data))


def test_a_layout_is_a_part_of_the_fit(path: Path) -> None:
    GaussianMixture(2, random_state=0, store=path, name="fit").fit(np.ascontiguousarray(X[::2]))
    for other, message in ((np.asfortranarray(X[::2]), "X contents"), (X[::2], "X strides: absent")):
        with pytest.raises(pmstore.FingerprintMismatchError, match=message):
            GaussianMixture(2, random_state=0, store=path, name="fit").fit(other)


def test_a_random_state_is_left_as_scikit_learn_leaves_it(path: Path) -> None:
    states = [np.random.RandomState(7) for _ in range(3)]
    options = {"n_components": 3, "n_init": 2, "max_iter": 3}
    reference = theirs.GaussianMixture(**options, random_state=states[0]).fit(X)
    for state in states[1:]:  # runs, loads
        assert_same(GaussianMixture(**options, random_state=state, store=path).fit(X), reference)
    assert len({state.uniform() for state in states}) == 1


class Drawing(GaussianMixture):
    """Its steps draw from the generator that is its parameter. An interrupt comes before one of them."""

    steps = 0  # before the interrupt

    def _m_step(self, data: Any, log_resp: Any, **options: Any) -> None:
        if not Drawing.steps:
            raise KeyboardInterrupt
        Drawing.steps -= 1
        super()._m_step(data, log_resp + 0.3 * self.random_state.uniform(size=log_resp.shape), **options)


def test_the_steps_of_a_subclass_may_draw(path: Path) -> None:
    def fit(store: Path, steps: int) -> GaussianMixture:
        Drawing.steps = steps
        generator = np.random.RandomState(0)
        return Drawing(3, random_state=generator, store=store, name="f", max_iter=9, tol=0).fit(X)

    reference = fit(path.with_name("undisturbed.pm"), 100)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            fit(path, 2)
    assert_same(fit(path, 100), reference)


def test_without_a_seed_the_first_one_drawn_is_kept(path: Path) -> None:
    options = {"n_components": 4, "init_params": "random", "max_iter": 3}
    first = GaussianMixture(**options, store=path, name="fit").fit(X)
    assert_same(GaussianMixture(**options, store=path, name="fit").fit(X), first)
    with pmstore.open(path) as store:
        seed = int(store["fit/progress"]["seed"])
    assert_same(first, theirs.GaussianMixture(**options, random_state=seed).fit(X))


def test_it_prints_what_scikit_learn_prints(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tolerance, every in ((1e-1, 2), (1e-9, 1)):
        parameters = {"n_components": 3, "n_init": 2, "random_state": 0, "tol": tolerance, "max_iter": 12}
        reference, fit = pair("GaussianMixture", {**parameters, "verbose": 1, "verbose_interval": every}, path)
        reference.fit(X)
        expected = capsys.readouterr().out
        fit.fit(X)
        assert capsys.readouterr().out == expected and "converge" in expected


def test_it_warns_as_scikit_learn_does(path: Path) -> None:
    for _ in range(2):  # running, loading
        with pytest.warns(ConvergenceWarning, match="Best performing initialization did not converge"):
            GaussianMixture(3, max_iter=2, random_state=0, store=path).fit(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GaussianMixture(3, max_iter=0, random_state=0, store=path).fit(X)
        GaussianMixture(1, random_state=0, store=path).fit(X)


# ---- death


@pytest.fixture
def copies(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Copies of the file at `path`, taken after each commit of this process, as a kill at that moment leaves it."""
    commit, taken = Core.commit, []

    def commit_and_copy(core: Core) -> None:
        commit(core)
        taken.append(Path(shutil.copy(path, path.with_name(f"{len(taken)}.pm"))))

    monkeypatch.setattr(Core, "commit", commit_and_copy)
    return taken


KILLED = [
    pytest.param(label, covariance, more, id=f"{label}, {covariance}{', more' if more else ''}")
    for label, covariance, more in (
        *((label, covariance, {}) for label in CLASSES for covariance in COVARIANCES),
        *(("maximum likelihood", covariance, GIVEN["all"](covariance)) for covariance in COVARIANCES),
        *(("maximum likelihood", covariance, GIVEN["precisions"](covariance)) for covariance in ("full", "diag")),
        ("Dirichlet process", "diag", PRIORS["priors"]("diag")),
    )
]


KILLED_IN = [pytest.param(1, "f4", id="1-f4"), pytest.param(2, "f8", id="2-f8")]


@pytest.mark.parametrize("label, covariance, more, threads, dtype", half(KILLED, KILLED_IN))
def test_a_fit_goes_on_from_every_commit(
    label: str,
    covariance: str,
    more: dict[str, Any],
    threads: int,
    dtype: str,
    path: Path,
    copies: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = X.astype(dtype)
    kind, parameters = case(label, covariance, {"n_init": 3 - threads, "max_iter": 2, "init_params": "random", **more})
    with threadpool_limits(threads):
        reference, fit = pair(kind, parameters, path)
        reference.fit(data)
        assert_same(fit.fit(data), reference)
        monkeypatch.undo()
        places = []
        for survivor in copies:
            _, again = pair(kind, parameters, survivor)
            assert_same(again.fit(data), reference)
            places.append((again.resumed_from_run_, again.resumed_from_iter_))
    every = itertools.product(range(parameters["n_init"]), range(parameters["max_iter"] + 1))
    assert list(dict.fromkeys(places)) == list(every)


KILLS = """
import json, os, signal, sys
import pmstore.mixture, threadpoolctl
from sklearn.datasets import make_blobs
from pmstore._core import Core

commit, (X, _) = Core.commit, make_blobs(120, 3, centers=4, cluster_std=2.5, random_state=1)

def commit_and_die(core):
    before = core.sequence
    commit(core)
    if core.sequence != before:
        os.kill(os.getpid(), signal.SIGKILL)

for kind, parameters, threads, path in json.load(sys.stdin):
    places = []
    while True:
        pid = os.fork()  # no thread but this one has run here
        if not pid:
            Core.commit = commit_and_die
            with threadpoolctl.threadpool_limits(threads):
                getattr(pmstore.mixture, kind)(**parameters, store=path, name="fit").fit(X)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status):
            break
        with pmstore.open(path) as store:
            places.append((int(store["fit/progress"]["run"]), int(store["fit/progress"]["iteration"])))
    print(json.dumps([status, places]), flush=True)
"""


@pytest.mark.long
def test_killed_after_every_commit_it_is_scikit_learns(path: Path) -> None:
    """One process after the other does one commit's worth of work, until the last one finds nothing left to do."""
    parameters = {"n_components": 3, "n_init": 2, "max_iter": 1, "random_state": 3, "init_params": "random"}
    fits = [
        (kind, {**parameters, "covariance_type": covariance}, threads, str(path.with_name(f"{kind} {covariance}.pm")))
        for kind, covariance, threads in (
            ("GaussianMixture", "full", 2),
            ("GaussianMixture", "diag", 1),
            ("BayesianGaussianMixture", "tied", 1),
        )
    ]
    done = python("-c", f"import warnings\nwarnings.simplefilter('ignore')\n{KILLS}", text=json.dumps(fits))
    assert done.returncode == 0, done.stderr
    for (kind, given, threads, where), said in zip(fits, done.stdout.splitlines(), strict=True):
        assert json.loads(said) == [0, [[0, 0], [0, 1], [1, 0], [1, 1], [1, 1]]]
        with threadpool_limits(threads):
            assert_same(
                getattr(pmstore.mixture, kind)(**given, store=where, name="fit").fit(X),
                getattr(theirs, kind)(**given).fit(X),
            )


@pytest.mark.parametrize("kind", ["GaussianMixture", "BayesianGaussianMixture"])
def test_an_interrupted_fit_goes_on(kind: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference, fit = pair(kind, {"n_components": 3, "random_state": 0, "max_iter": 8, "verbose": 2}, path)
    with interrupted(EM, 5):
        fit.fit(X)
    assert not hasattr(fit, "means_")
    with caplog.at_level(logging.INFO, "pmstore"):
        assert_same(fit.fit(X), reference.fit(X))
    assert fit.resumed_from_iter_ == 5 and "5 iterations done" in caplog.text


def test_a_finished_fit_does_no_work(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pmstore.open(path) as store:
        fit = GaussianMixture(3, random_state=0, store=store).fit(X)
        before = store.sequence
        for work in ("start", "derive", "step", "end_run"):
            monkeypatch.setattr(EM, work, lambda _: pytest.fail("work was done"))
        monkeypatch.setattr(GaussianMixture, "_e_step", lambda *_, **__: pytest.fail("work was done"))
        assert_same(GaussianMixture(3, random_state=0, store=store).fit(X), fit)
        assert store.sequence == before


# ---- the state


@pytest.mark.parametrize("n_init", [1, 2])
def test_precisions_are_stored_only_where_they_do_not_follow(n_init: int, path: Path) -> None:
    """And the best run only where there are several."""
    options = {"n_components": 3, "random_state": 0, "n_init": n_init, "max_iter": 3, "store": path, "name": "fit"}
    for given, found in ((None, type(None)), (of_shape("full", 0.5), np.ndarray)):
        fit = GaussianMixture(**options, precisions_init=given)
        with interrupted(EM, 0):
            fit.fit(X)
        with pmstore.open(path, "r") as store:
            assert isinstance(store["fit/precisions_cholesky_"], found)
            assert (store["fit/covariances_"] is None) == (given is not None)
        with interrupted(EM, 1):
            fit.fit(X)
        with pmstore.open(path, "r") as store:
            assert store["fit/precisions_cholesky_"] is None
            assert store["fit/covariances_"].shape == (3, 3, 3)
            assert ("fit/best/covariances_" in store) == (n_init > 1)
        fit.fit(X)
        with pmstore.open(path, "r") as store:
            large = [name for name in store if getattr(store[name], "shape", None) == (3, 3, 3)]
            assert large == ["fit/covariances_" if n_init == 1 else "fit/best/covariances_"]
        fit.reset()


def test_no_array_of_the_store_is_handed_out(path: Path) -> None:
    means = X[:3].copy()
    with pmstore.open(path) as store:
        fit = GaussianMixture(3, means_init=means, max_iter=0, store=store, name="fit").fit(X)
        fit.means_ += 1
        fit.covariances_ += 1
        assert (means == X[:3]).all() and (store["fit/means_"] == means).all()
        again = GaussianMixture(3, means_init=means, max_iter=0, store=store, name="fit").fit(X)
        assert (again.means_ == means).all() and (again.covariances_ != fit.covariances_).all()


# ---- warm starts


@pytest.mark.parametrize("label, covariance", [*zip(CLASSES, COVARIANCES), ("maximum likelihood", "tied")])
def test_a_warm_start_goes_on_where_the_last_fit_ended(label: str, covariance: str, path: Path) -> None:
    """A program of three fits, killed in the second one and in the third."""
    more = {"warm_start": True, "n_init": 2, "max_iter": 4, "tol": 1e-9, "init_params": "random"}
    kind, parameters = case(label, covariance, more)
    reference, _ = pair(kind, parameters, path)
    data = (X, X, X[:100].astype("f4"))
    references = [copy.deepcopy(reference.fit(part)) for part in data]
    assert parts(references[1].means_) != parts(references[0].means_)
    for killed in (1, 2, 3):
        _, fit = pair(kind, parameters, path)
        for part, expected in zip(data[:killed], references):
            assert_same(fit.fit(part), expected)
        if killed < len(data):
            with interrupted(EM, 2):
                fit.fit(data[killed])
            again = copy.deepcopy(fit)  # which the interrupted fit left alone
            assert_same(again.fit(data[killed]), references[killed])
            assert again.resumed_from_iter_ == 2


def test_a_warm_start_is_another_fit(path: Path) -> None:
    fit = GaussianMixture(3, warm_start=True, random_state=0, max_iter=2, store=path, name="fit").fit(X)
    with pytest.raises(pmstore.FingerprintMismatchError, match="warm start: absent ≠"):
        fit.fit(X)
    reference = theirs.GaussianMixture(3, warm_start=True, random_state=0, max_iter=2).fit(X)
    assert_same(fit.reset().fit(X), reference.fit(X))
    assert_same(fit.set_params(max_iter=0).reset().fit(X), reference.set_params(max_iter=0).fit(X))


def test_a_start_that_does_not_follow_is_kept_too(path: Path) -> None:
    """Precisions of a fit before this one that are not those of its covariances, or covariances that don't matter."""
    reference, fit = pair("GaussianMixture", {"n_components": 2, "random_state": 0, "warm_start": True}, path)
    for one in (reference, fit):
        one.fit(X).precisions_cholesky_ *= 1.5
    for change in ({"max_iter": 2}, {"n_components": 3, "precisions_init": of_shape("full", 0.5), "warm_start": False}):
        reference.set_params(**change)
        with interrupted(EM, 0):
            fit.set_params(**change).fit(X)
        assert_same(fit.fit(X), reference.fit(X))


# ---- what goes wrong


@pytest.mark.parametrize("kind", ["GaussianMixture", "BayesianGaussianMixture"])
@pytest.mark.parametrize(
    "data, parameters, message",
    [
        (X * np.nan, {}, "NaN"),
        (X[:0], {}, "0 sample"),
        (X[:1], {}, "minimum of 2 is required"),
        (X[:2], {}, "Expected n_samples >= n_components but got n_components = 3, n_samples = 2"),
        (X[0], {}, "2D array"),
        (X, {"n_components": 0}, "n_components"),
        (X, {"commit_every": 0}, "commit_every"),
        (X, {"name": 3}, "name"),
        # Zeros: of ones, rounding makes a covariance that some iterations can take, from one random start in forty.
        (np.zeros((9, 2)), {"reg_covar": 0.0}, "ill-defined empirical covariance"),
    ],
)
def test_bad_input_leaves_no_trace(kind: str, data: Any, parameters: Any, message: str, path: Path) -> None:
    with pmstore.open(path) as store:
        make = getattr(pmstore.mixture, kind)
        with pytest.raises(ValueError, match=message):
            make(**{"n_components": 3, "init_params": "random", "store": store, **parameters}).fit(data)
        assert store.sequence == 0 and len(store) == 0


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"means_init": X[:2]}, "means"),
        ({"weights_init": [0.5, 0.5, 0.5]}, "normalized"),
        ({"precisions_init": -np.ones((3, 3, 3))}, "positive-definite"),
        ({"precisions_init": of_shape("full", 1.0), "max_iter": 0}, "leaves no covariances"),
        ({"random_state": np.random.RandomState(np.random.PCG64(1))}, "MT19937"),
    ],
)
def test_bad_parameters_leave_no_trace(parameters: dict[str, Any], message: str, path: Path) -> None:
    with pmstore.open(path) as store:
        with pytest.raises(ValueError, match=message):
            GaussianMixture(3, **parameters, store=store).fit(X)
        assert len(store) == 0


def test_a_fit_that_breaks_off_keeps_its_last_iteration(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A component may collapse, or a disk fill up."""
    reference, fit = pair("GaussianMixture", {"n_components": 3, "random_state": 0, "max_iter": 6}, path)
    reference.fit(X)

    def fail_after(what: Any, name: str, times: int, error: Exception) -> None:
        work, left = getattr(what, name), times

        def fails(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise error
            return work(*arguments)

        with monkeypatch.context() as patch, pytest.raises(type(error), match=str(error.args[-1])):
            patch.setattr(what, name, fails)
            fit.fit(X)

    fail_after(EM, "step", 2, ValueError("ill-defined"))
    fail_after(Core, "commit", 2, pmstore.OutOfSpaceError(28, "no space left"))
    assert_same(fit.fit(X), reference)
    assert fit.resumed_from_iter_ == 4


@pytest.mark.parametrize(
    "name, value",
    [
        ("covariances_", None),
        ("covariances_", np.zeros((3, 2, 2))),
        ("covariances_", -np.ones((3, 3, 3))),
        ("covariances_", np.full((3, 3, 3), np.nan)),
        ("means_", "gone"),
        ("means_", ...),
        ("weight_concentration_", (np.ones(3), np.ones(2))),
        ("degrees_of_freedom_", np.ones(2)),
        ("mean_precision_", np.ones(2)),
        ("lower_bounds", np.zeros(16)),
        ("lower_bounds", ...),
        ("progress", np.zeros(3)),
        ("random_state", ...),
    ],
)
def test_a_state_that_somebody_changed(name: str, value: Any, path: Path) -> None:
    options = {"n_components": 3, "random_state": 0, "max_iter": 4, "store": path, "name": "fit"}
    fit = BayesianGaussianMixture(**options)
    for finished in (False, True):
        if finished:
            fit.reset().fit(X)
        else:
            with interrupted(EM, 2):
                fit.fit(X)
        with pmstore.open(path) as store:
            del store[f"fit/{name}"]
            if value is not ...:
                store[f"fit/{name}"] = value
        with pytest.raises(pmstore.FingerprintMismatchError, match=rf"'fit'.*'{name}'.*reset\(\)"):
            BayesianGaussianMixture(**options).fit(X)


def test_a_fit_group_of_another_estimator(path: Path) -> None:
    with interrupted(EM, 2):
        GaussianMixture(3, store=path, name="fit").fit(X)
    with pytest.raises(pmstore.FingerprintMismatchError, match="GaussianMixture, version 1 ≠ BayesianGaussianMixture"):
        BayesianGaussianMixture(n_components=3, store=path, name="fit").fit(X)
    with pytest.raises(pmstore.FingerprintMismatchError, match="parameter covariance_type: full ≠ diag"):
        GaussianMixture(3, covariance_type="diag", store=path, name="fit").fit(X)
    assert GaussianMixture(3, store=path, name="fit").fit(X).resumed_from_iter_ == 2


def test_a_read_only_store_gives_finished_fits(path: Path) -> None:
    with interrupted(EM, 2):
        GaussianMixture(2, random_state=0, store=path).fit(X)
    fit = GaussianMixture(3, random_state=0, store=path).fit(X)
    with pmstore.open(path, mode="r") as store:
        assert_same(GaussianMixture(3, random_state=0, store=store).fit(X), fit)
        for k in (2, 4):  # unfinished, new
            with pytest.raises(pmstore.ReadOnlyStoreError):
                GaussianMixture(k, random_state=0, store=store).fit(X)


def test_two_fits_of_one_name_take_turns(path: Path) -> None:
    fits: list[Any] = []

    def fit() -> None:
        fits.append(GaussianMixture(3, random_state=0, max_iter=5, store=path, name="fit").fit(X))

    threads = [threading.Thread(target=fit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.resumed_from_iter_ > 0 for one in fits) == [False, True, True]
    for one in fits:
        assert_same(one, theirs.GaussianMixture(3, random_state=0, max_iter=5).fit(X))


# ---- scikit-learn's customs


@pytest.mark.parametrize("kind", ["GaussianMixture", "BayesianGaussianMixture"])
def test_clones_pickles_and_searches(kind: str, path: Path) -> None:
    grid = {"n_components": [1, 2, 3]}
    reference, one = pair(kind, {"random_state": 0, "max_iter": 5}, path)
    search = GridSearchCV(reference, grid, cv=2).fit(X)
    for _ in range(2):
        again = GridSearchCV(one, grid, cv=2).fit(X)
        assert (again.cv_results_["mean_test_score"] == search.cv_results_["mean_test_score"]).all()
        assert_same(again.best_estimator_, search.best_estimator_)
    with pmstore.open(path) as store:
        fit = clone(one).set_params(store=store).fit(X)
        loaded = pickle.loads(pickle.dumps(fit))
        assert_same(loaded, fit)
        assert Path(loaded.store) == path and (loaded.predict(X) == fit.predict(X)).all()
        assert len(pmstore.prune(store)) == 8 and len(store) == 0
    assert type(one)().fit(X).resumed_from_iter_ == 0
