"""Somebody changed in the store what a fit left there: an error that says what, and nothing else happens."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import sklearn.mixture
from sklearn.linear_model import SGDClassifier

import pmstore
import pmstore.mixture
from pmstore.cluster import KMeans, MiniBatchKMeans
from pmstore.decomposition import IncrementalPCA
from pmstore.mixture import BayesianGaussianMixture, GaussianMixture
from tests.support.resuming import copied, estimators, in_memory

pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.usefixtures("one_thread"),  # test_history goes on with the same unfinished fits
]

X = np.random.default_rng(0).normal(size=(60, 3))
Y = X[:, 0] > 0
BATCHES = [(X[i : i + 10], Y[i : i + 10]) for i in range(0, 60, 10)]


class Walk(pmstore.Resumable):
    """A random one."""

    max_iter = 5

    def __init__(self, bits: Any) -> None:
        self.rng = np.random.Generator(bits)

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("place"), pmstore.Field("rng", generator=self.rng)]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self.state.place = 0

    def step(self) -> None:
        self.state.place += self.rng.normal()


FITS: dict[str, Callable[[Path], Any]] = {
    "lloyd": lambda path: KMeans(3, n_init=2, random_state=0, tol=0, store=path, name="fit").fit(X),
    "elkan": lambda path: KMeans(3, random_state=0, tol=0, algorithm="elkan", store=path, name="fit").fit(X),
    "mini-batch": lambda path: MiniBatchKMeans(
        3, batch_size=10, max_iter=2, max_no_improvement=None, random_state=0, store=path, name="fit"
    ).fit(X),
    "mixture": lambda path: GaussianMixture(2, random_state=0, tol=1e-9, max_iter=3, store=path, name="fit").fit(X),
    "bayes": lambda path: BayesianGaussianMixture(
        n_components=2, random_state=0, tol=1e-9, max_iter=3, store=path, name="fit"
    ).fit(X),
    "components": lambda path: IncrementalPCA(2, batch_size=10, store=path, name="fit").fit(X),
    "learned": lambda path: pmstore.partial_fit(
        SGDClassifier(random_state=np.random.RandomState(0)), BATCHES, store=path, name="fit", classes=[False, True]
    ),
    "philox": lambda path: Walk(np.random.Philox(0)).run(path, "fit"),
    "twister": lambda path: Walk(np.random.MT19937(0)).run(path, "fit"),
}


def test_every_estimator_is_tested() -> None:
    assert {one.__name__ for one in estimators()} <= {name for fit in FITS.values() for name in fit.__code__.co_names}


@functools.cache
def unfinished(fit: str) -> bytes:
    """A store as a kill before the last commit left it."""
    with tempfile.TemporaryDirectory() as directory, in_memory(Path(directory)) as memory:
        with copied(memory / "fit.pm") as copies:
            FITS[fit](memory / "fit.pm")
        for copy in reversed(copies):
            left = copy.read_bytes()
            with pmstore.open(copy, "r") as store:
                if not store["fit/finished"]:
                    return left
    raise AssertionError("there was only one commit")


def record(**values: Any) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        changed = np.array(value)
        for name, number in values.items():
            changed[name] = number
        return changed

    return change


def entry(*path: str, value: Any) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        at = state
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        return state

    return change


def with_strides(*strides: Any) -> Callable[[Any], Any]:
    return lambda layouts: {name: [*found[:3], *strides] for name, found in layouts.items()}


@pytest.mark.parametrize(
    ("fit", "name", "change"),
    [
        ("lloyd", "random_state", record(pos=10**8)),  # of a buffer of 624
        ("lloyd", "random_state", record(pos=-(10**8))),
        ("lloyd", "progress", record(run=-1)),
        ("lloyd", "progress", record(run=2)),
        ("lloyd", "progress", record(best_run=1)),
        ("lloyd", "progress", record(best_run=-1)),
        ("lloyd", "best/labels", lambda labels: labels + 10**6),
        ("lloyd", "centers/0", np.asfortranarray),
        ("elkan", "labels", lambda labels: labels - 10**6),
        ("mini-batch", "progress", record(iteration=10**6)),  # which nothing stops
        ("mixture", "progress", record(iteration=-1)),
        ("mixture", "means_", lambda means: None),
        ("mixture", "weights_", lambda weights: np.array([1, 0])),
        ("bayes", "means_", lambda means: None),
        ("components", "n_samples_seen", lambda n: "many"),
        ("learned", "learned/attributes/coef_", lambda coefficients: np.zeros((1, 4))),
        ("learned", "learned/attributes/coef_", lambda coefficients: coefficients.astype("f4")),
        ("learned", "learned/attributes/coef_", lambda coefficients: "many"),
        ("learned", "learned/generators/random_state", record(pos=10**8)),
        ("learned", "learned/layouts", lambda layouts: None),
        ("learned", "learned/layouts", with_strides([8])),
        ("learned", "learned/layouts", with_strides([-80, 8])),
        ("learned", "learned/layouts", with_strides([8, 8])),
        ("learned", "learned/layouts", with_strides("no", "list")),
        ("learned", "progress", record(index=-1)),
        ("philox", "rng", entry("buffer_pos", value=10**8)),
        ("philox", "rng", lambda state: {"bit_generator": "Philox", "buffer_pos": 4}),
        ("philox", "rng", lambda state: 7),
        ("twister", "rng", entry("state", "pos", value=-(10**8))),
    ],
)
def test_an_unfinished_fit(fit: str, name: str, change: Callable[[Any], Any], path: Path) -> None:
    path.write_bytes(unfinished(fit))
    with pmstore.open(path) as store:
        store[f"fit/{name}"] = change(store[f"fit/{name}"])
    with pytest.raises(pmstore.FingerprintMismatchError, match="'fit'.* was changed by other code: "):
        FITS[fit](path)
    with pmstore.open(path, "r") as store:
        assert store["fit/finished"] is False
    with pmstore.open(path) as store:
        store.group("fit").clear()
    FITS[fit](path)  # and what the message says helps


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.zeros((2, 3)), r"an array of shape \(2, 3\) and dtype float64"),
        (np.asfortranarray(np.zeros((3, 3))), "one in F order"),
        ("text", "a value of type str"),
        (None, "missing"),
    ],
)
def test_the_error_says_what_is_there(value: Any, found: str, path: Path) -> None:
    path.write_bytes(unfinished("lloyd"))
    with pmstore.open(path) as store:
        del store["fit/centers/0"]
        if value is not None:
            store["fit/centers/0"] = value
    with pytest.raises(pmstore.FingerprintMismatchError, match=f"'centers/0' must be .*, and is {found}\\. "):
        FITS["lloyd"](path)


def test_a_finished_mixture_with_more_iterations_than_bounds(path: Path) -> None:
    FITS["mixture"](path)
    with pmstore.open(path) as store:
        store["fit/progress"]["best_iterations"] = -5
    with pytest.raises(pmstore.FingerprintMismatchError, match="'progress'"):
        FITS["mixture"](path)


@pytest.mark.parametrize("best", [-1, 2])
def test_a_finished_fit_whose_best_run_does_not_exist(best: int, path: Path) -> None:
    FITS["lloyd"](path)
    with pmstore.open(path) as store:
        store["fit/progress"]["best_run"] = best
    with pytest.raises(pmstore.FingerprintMismatchError, match="the progress of a fit of 2 runs"):
        FITS["lloyd"](path)


def test_no_fit_inside_another_ones_group(path: Path) -> None:
    """It would go when the other is forgotten."""
    FITS["lloyd"](path)
    with pytest.raises(pmstore.FingerprintMismatchError, match="inside of 'fit'"):
        KMeans(3, random_state=0, store=path, name="fit/of/mine").fit(X)
    KMeans(3, random_state=0, store=path, name="fits/mine").fit(X)


def test_the_group_of_all_fits_without_a_name_is_no_name(path: Path) -> None:
    KMeans(3, random_state=0, store=path).fit(X)
    with pytest.raises(pmstore.FingerprintMismatchError, match=r"fits without a name\. Choose another name\.$"):
        KMeans(3, random_state=0, store=path, name="kmeans").fit(X)
    assert len(pmstore.prune(path)) == 1
    KMeans(3, random_state=0, store=path, name="kmeans").fit(X)
    with pytest.raises(pmstore.FingerprintMismatchError, match="Choose another name for one of the two"):
        KMeans(3, random_state=0, store=path).fit(X)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("of", ["GaussianMixture", "BayesianGaussianMixture"])
@pytest.mark.parametrize("change", ["n_components", "width", "nothing"])
def test_a_warm_start_with_other_components_is_not_a_changed_fit(of: str, change: str, path: Path) -> None:
    """It is scikit-learn's, or has its error, also if the fit is in the store already."""

    def fitted(kind: Any, **store: Any) -> Any:
        model = kind(n_components=2, random_state=0, warm_start=True, max_iter=3, **store).fit(X)
        if change == "n_components":
            model.set_params(n_components=3)
        try:
            return model.fit(X[:, :1] if change == "width" else X).means_.tolist()
        except (ValueError, IndexError) as error:
            return str(error)

    ours, expected = getattr(pmstore.mixture, of), fitted(getattr(sklearn.mixture, of))
    assert fitted(ours, store=path) == fitted(ours, store=path) == expected
