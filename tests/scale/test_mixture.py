"""pmstore.mixture.GaussianMixture over shards: scikit-learn's results, and the same bits on every engine."""

from __future__ import annotations

import copy
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import make_blobs  # noqa: E402
from sklearn.exceptions import ConvergenceWarning  # noqa: E402
from sklearn.mixture import GaussianMixture as SklearnGaussianMixture  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

import pmstore  # noqa: E402
from pmstore.mixture import GaussianMixture  # noqa: E402
from pmstore.scale import LazyParts, Processes, Serial  # noqa: E402
from tests.scale.estimators import Backwards, Stopped, Stopping, bits  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

RESULT = ("weights_", "means_", "covariances_", "precisions_", "lower_bound_", "lower_bounds_", "n_iter_", "converged_")
X = make_blobs(500, 5, centers=6, cluster_std=3.0, random_state=1)[0] + 50
K, D = 4, 5
KINDS = ("full", "tied", "diag", "spherical")
PRECISIONS = {
    "full": np.array([np.eye(D) * 0.1] * K),
    "tied": np.eye(D) * 0.1,
    "diag": np.full((K, D), 0.1),
    "spherical": np.full(K, 0.1),
}
STARTS: dict[str, dict[str, Any]] = {
    "kmeans": {},
    "several": {"n_init": 3},
    "k-means++": {"init_params": "k-means++"},
    "weights": {"weights_init": [0.1, 0.2, 0.3, 0.4]},
    "means": {"means_init": X[:K]},
    "precisions": {"precisions_init": PRECISIONS},
    "all": {"weights_init": [0.1, 0.2, 0.3, 0.4], "means_init": X[:K], "precisions_init": PRECISIONS},
    "no iterations": {"max_iter": 0},
    "few iterations": {"max_iter": 2},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(1):
        yield


def parts(count: int = 5) -> list[Any]:
    return [np.ascontiguousarray(part) for part in np.array_split(X, count)]


def parameters(start: str, kind: str) -> dict[str, Any]:
    given = {"covariance_type": kind, "random_state": 0, **STARTS[start]}
    if "precisions_init" in given:
        given["precisions_init"] = PRECISIONS[kind]
    return given


def assert_close(ours: Any, theirs: Any, rtol: float) -> None:
    for name in ("weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_", "lower_bound_"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=rtol, atol=rtol, err_msg=name)
    assert (ours.n_iter_, ours.converged_) == (theirs.n_iter_, theirs.converged_)


# ---- the result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", STARTS)
def test_one_shard_is_close_to_scikit_learn(start: str, kind: str) -> None:
    given = parameters(start, kind)
    theirs = SklearnGaussianMixture(K, **given).fit(X)
    ours = GaussianMixture(K, **given, engine=Serial()).fit([X])
    assert_close(ours, theirs, 1e-7)
    assert len(ours.lower_bounds_) == ours.n_iter_ and type(ours.lower_bound_) is float and ours.n_features_in_ == D


@pytest.mark.parametrize("kind", KINDS)
def test_many_shards_are_close_to_scikit_learn(kind: str) -> None:
    given = {"covariance_type": kind, "means_init": X[:K], "precisions_init": PRECISIONS[kind]}
    given["weights_init"] = np.full(K, 1 / K)
    theirs = SklearnGaussianMixture(K, **given).fit(X)
    assert_close(GaussianMixture(K, **given, engine=Serial()).fit(parts()), theirs, 1e-7)
    single = GaussianMixture(K, **given, engine=Serial()).fit([part.astype("f4") for part in parts()])
    assert single.means_.dtype == single.covariances_.dtype == np.float32
    assert_close(single, theirs, 1e-3)


MORE = [pytest.param(start, marks=pytest.mark.long) for start in ("k-means++", "random_from_data")]


@pytest.mark.parametrize("start", ["kmeans", "random", *MORE])
def test_the_engine_does_not_matter(start: str) -> None:
    for kind in KINDS:
        given = {"covariance_type": kind, "random_state": 0, "init_params": start, "n_init": 2, "max_iter": 20}
        one = GaussianMixture(K, **given, engine=Serial()).fit(parts())
        other = GaussianMixture(K, **given, engine=Backwards()).fit(parts())
        assert bits(one, RESULT) == bits(other, RESULT)
        theirs = SklearnGaussianMixture(K, **{**given, "n_init": 8}).fit(X)
        assert one.lower_bound_ == pytest.approx(theirs.lower_bound_, rel=0.1)


@pytest.mark.parametrize("start", ["kmeans", "k-means++", "random", "random_from_data"])
def test_random_state_decides_where_a_run_starts(start: str) -> None:
    fits = [
        GaussianMixture(K, init_params=start, max_iter=0, random_state=seed, engine=Serial()).fit(parts())
        for seed in (1, 2, 1)
    ]
    assert bits(fits[0], RESULT) == bits(fits[2], RESULT)
    assert not np.array_equal(fits[0].means_, fits[1].means_)


def test_data_far_from_the_origin() -> None:
    """Sums of squares around the origin would have no digits left there."""
    near = GaussianMixture(K, random_state=0, engine=Serial()).fit(parts())
    far = GaussianMixture(K, random_state=0, engine=Serial()).fit([part + 1e7 for part in parts()])
    np.testing.assert_allclose(far.covariances_, near.covariances_, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(far.means_ - 1e7, near.means_, rtol=1e-4)


def test_a_component_without_samples() -> None:
    means = np.concatenate([X[: K - 1], [[1e6] * D]])
    fit = GaussianMixture(K, means_init=means, max_iter=5, random_state=0, engine=Serial()).fit(parts())
    assert np.isfinite(fit.covariances_).all() and fit.weights_.min() < 1e-10


def test_a_fit_that_did_not_converge_tells() -> None:
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        GaussianMixture(K, max_iter=2, random_state=0, engine=Serial()).fit(parts())


def test_history() -> None:
    fit = GaussianMixture(K, random_state=0, engine=Serial()).fit(parts())
    bounds = fit.history_["objective"]
    assert bounds[np.isfinite(bounds)].tolist() == fit.lower_bounds_


# ---- kills


@pytest.mark.parametrize("given", [{"n_init": 2}, {"init_params": "random", "covariance_type": "diag"}])
def test_a_coordinator_that_stops_anywhere_goes_on(given: dict[str, Any], path: Path) -> None:
    given = {"random_state": 0, "max_iter": 6, **given}
    reference = GaussianMixture(K, **given, engine=Serial()).fit(parts(3))
    epochs = len(reference.history_["iteration"])
    for replies in range(3, 3 * (epochs + 1), 17):
        with pytest.raises(Stopped):
            GaussianMixture(K, **given, store=path, name=f"{replies}", engine=Stopping(replies)).fit(parts(3))
        fit = GaussianMixture(K, **given, store=path, name=f"{replies}", engine=Backwards()).fit(parts(3))
        assert bits(fit, RESULT) == bits(reference, RESULT)
    again = GaussianMixture(K, **given, store=path, name=f"{replies}", engine=Stopping(3)).fit(parts(3))  # loads
    assert bits(again, RESULT) == bits(reference, RESULT)


@pytest.mark.long
def test_a_killed_coordinator_and_processes(path: Path, child: Callable[..., Any], tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", X)
    code = """
    import sys, numpy as np
    from pmstore.mixture import GaussianMixture
    from tests.scale.estimators import Killing
    shards = np.array_split(np.load(sys.argv[2]), 5)
    GaussianMixture(4, random_state=0, store=sys.argv[1], name="fit", engine=Killing(100)).fit(shards)
    """
    assert child(code, path, tmp_path / "X.npy").process.wait() == -signal.SIGKILL
    reference = GaussianMixture(K, random_state=0, engine=Serial()).fit(parts())
    fit = GaussianMixture(K, random_state=0, store=path, name="fit", engine=Processes(2)).fit(parts())
    assert 0 < fit.resumed_from_iter_ < len(reference.history_["iteration"])
    assert bits(fit, RESULT) == bits(reference, RESULT)


# ---- predictions, parameters, bad input


def test_predictions_are_computed_when_asked_for() -> None:
    fit = GaussianMixture(K, random_state=0, engine=Serial()).fit(parts())
    for method in ("predict", "predict_proba", "score_samples"):
        lazy, whole = getattr(fit, method)(parts()), getattr(fit, method)(X)
        assert isinstance(lazy, LazyParts) and isinstance(whole, np.ndarray)
        np.testing.assert_allclose(np.asarray(lazy), whole, rtol=1e-10)
        assert lazy[0].dtype == whole.dtype
    for method in ("score", "bic", "aic"):
        assert getattr(fit, method)(parts()) == pytest.approx(getattr(fit, method)(X), rel=1e-12)
        with pytest.raises(ValueError, match="no rows"):
            getattr(fit, method)([X[:0]])
    again = GaussianMixture(K, random_state=0, engine=Serial())
    assert np.array_equal(np.asarray(again.fit_predict(parts())), fit.predict(X))
    labels = again.fit_predict(X)
    assert isinstance(labels, np.ndarray) and np.array_equal(labels, again.predict(X))


def test_dask_arrays() -> None:
    array = pytest.importorskip("dask.array")
    data = array.from_array(X, chunks=(150, 2))
    fit = GaussianMixture(K, random_state=0, engine=Serial()).fit(data)
    same = GaussianMixture(K, random_state=0, engine=Serial()).fit([X[:150], X[150:300], X[300:450], X[450:]])
    assert bits(fit, RESULT) == bits(same, RESULT)
    for method in ("predict", "predict_proba", "score_samples"):
        lazy, whole = getattr(fit, method)(data), getattr(fit, method)(X)
        assert (lazy.shape, lazy.dtype) == (whole.shape, whole.dtype)
        np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), whole)


def test_the_engine_is_a_parameter() -> None:
    engine = Serial()
    model = GaussianMixture(K, engine=engine)
    for copied in (clone(model), copy.deepcopy(model)):
        assert copied.engine is engine
    assert pickle.loads(pickle.dumps(model)).engine is None and "engine" in model.get_params()


def test_bad_input() -> None:
    def refused(error: type[Exception], match: str, data: Any, **given: Any) -> None:
        with pytest.raises(error, match=match), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            GaussianMixture(**{"n_components": 3, "engine": Serial(), **given}).fit(data)

    refused(ValueError, "warm_start", X, warm_start=True)
    refused(ValueError, "max_iter=0 with precisions_init", X, max_iter=0, precisions_init=[1.0, 1, 1])
    refused(ValueError, "weights", X, weights_init=[1.0, 1, 1])
    refused(ValueError, "means", X, means_init=X[:2])
    refused(ValueError, "n_samples = 2", X[:2])
    refused(pmstore.ShardError, "contains NaN", [X, np.full((3, D), np.nan)])
    refused(ValueError, "reg_covar", np.repeat(X[:3], 4, axis=0), reg_covar=0.0)
