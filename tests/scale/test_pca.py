"""pmstore.decomposition.IncrementalPCA over shards."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from sklearn.decomposition import PCA  # noqa: E402
from sklearn.decomposition import IncrementalPCA as SklearnIncrementalPCA  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

import pmstore  # noqa: E402
from pmstore.decomposition import IncrementalPCA  # noqa: E402
from pmstore.scale import LazyParts, Processes, Serial  # noqa: E402
from tests.scale.estimators import Backwards, Stopped, Stopping, bits  # noqa: E402

RESULT = (
    "components_",
    "explained_variance_",
    "explained_variance_ratio_",
    "singular_values_",
    "mean_",
    "var_",
    "noise_variance_",
    "n_components_",
    "n_samples_seen_",
    "batch_size_",
)
X = load_digits().data + np.random.RandomState(0).normal(size=(1797, 64))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(1):
        yield


def parts(data: Any = X, count: int = 5) -> list[Any]:
    return [np.ascontiguousarray(part) for part in np.array_split(data, count)]


@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize(
    "given", [{}, {"n_components": 7}, {"n_components": 7, "batch_size": 2000}, {"batch_size": 50}]
)
def test_one_shard_gives_the_bits_of_one_machine(given: dict[str, Any], dtype: str) -> None:
    theirs = SklearnIncrementalPCA(**given).fit(X.astype(dtype))
    ours = IncrementalPCA(**given, engine=Serial()).fit([X.astype(dtype)])
    assert bits(ours, RESULT) == bits(theirs, RESULT)
    assert np.array_equal(ours.transform(X), theirs.transform(X))
    assert ours.components_.strides == theirs.components_.strides  # transform adds in an order that follows from them
    assert ours.n_features_in_ == 64


def test_one_shard_in_f_order_gives_the_bits_of_one_machine() -> None:
    data = np.asfortranarray(X)
    theirs = SklearnIncrementalPCA(7).fit(data)
    for engine in (Serial(), 1):
        ours = IncrementalPCA(7, engine=engine).fit([data])
        assert bits(ours, RESULT) == bits(theirs, RESULT)


@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_many_shards_are_close_to_the_whole(dtype: str) -> None:
    whole = PCA(5).fit(X)
    ours = IncrementalPCA(5, engine=Serial()).fit(X.astype(dtype))
    assert ours.components_.shape == (5, 64) and ours.n_samples_seen_ == 1797
    np.testing.assert_allclose(ours.mean_, whole.mean_, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ours.var_, X.var(axis=0), rtol=1e-4)
    np.testing.assert_allclose(ours.explained_variance_ratio_, whole.explained_variance_ratio_, rtol=0.02)
    np.testing.assert_allclose(abs((ours.components_ * whole.components_).sum(axis=1)), 1, atol=0.05)
    assert ours.noise_variance_ == pytest.approx(whole.noise_variance_, rel=0.02)
    assert ours.history_["objective"][0] == pytest.approx(ours.explained_variance_ratio_.sum())


def test_all_components_lose_nothing() -> None:
    whole = PCA(64).fit(X)
    ours = IncrementalPCA(engine=Serial()).fit(parts())
    np.testing.assert_allclose(ours.explained_variance_, whole.explained_variance_, rtol=1e-9)
    np.testing.assert_allclose(ours.inverse_transform(ours.transform(X)), X)
    assert ours.noise_variance_ == 0


def test_shards_with_few_rows() -> None:
    ours = IncrementalPCA(10, engine=Serial()).fit([X[:3], X[3:8], X[8:1000], X[1000:]])
    np.testing.assert_allclose(ours.explained_variance_, PCA(10).fit(X).explained_variance_, rtol=0.02)
    narrow = IncrementalPCA(7, batch_size=10, engine=Serial()).fit(parts())  # a summary has more rows than a batch
    np.testing.assert_allclose(narrow.explained_variance_, PCA(7).fit(X).explained_variance_, rtol=0.05)
    assert narrow.batch_size_ == 10
    small = IncrementalPCA(6, engine=Serial()).fit([X[:3], X[3:7]])
    np.testing.assert_allclose(small.explained_variance_, PCA(6).fit(X[:7]).explained_variance_, rtol=1e-7)
    small = IncrementalPCA(3, engine=Serial()).fit([X[:3], X[3:7]])
    assert small.noise_variance_ == pytest.approx(PCA(3).fit(X[:7]).noise_variance_, rel=1e-7)


def test_the_engine_does_not_matter() -> None:
    one = IncrementalPCA(5, engine=Serial()).fit(parts())
    assert bits(IncrementalPCA(5, engine=Backwards()).fit(parts()), RESULT) == bits(one, RESULT)


@pytest.mark.long
def test_a_killed_coordinator_and_processes(path: Path, child: Callable[..., Any], tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", X)
    code = """
    import sys, numpy as np
    from pmstore.decomposition import IncrementalPCA
    from tests.scale.estimators import Killing
    shards = np.array_split(np.load(sys.argv[2]), 5)
    IncrementalPCA(5, store=sys.argv[1], name="fit", engine=Killing(8)).fit(shards)
    """
    assert child(code, path, tmp_path / "X.npy").process.wait() == -signal.SIGKILL
    reference = IncrementalPCA(5, engine=Serial()).fit(parts())
    fit = IncrementalPCA(5, store=path, name="fit", engine=Processes(2)).fit(parts())
    assert bits(fit, RESULT) == bits(reference, RESULT)
    again = IncrementalPCA(5, store=path, name="fit", engine=Stopping(5)).fit(parts())  # loads
    assert bits(again, RESULT) == bits(reference, RESULT)
    with pytest.raises(Stopped):
        IncrementalPCA(5, store=path, name="other", engine=Stopping(8)).fit(parts())


def test_transforms_are_computed_when_asked_for() -> None:
    fit = IncrementalPCA(5, whiten=True, engine=Serial()).fit(parts())
    lazy = fit.transform(parts())
    assert isinstance(lazy, LazyParts)
    np.testing.assert_allclose(np.asarray(lazy), fit.transform(X))
    np.testing.assert_allclose(np.asarray(fit.inverse_transform(list(lazy))), fit.inverse_transform(fit.transform(X)))
    lazy = IncrementalPCA(5, whiten=True, engine=Serial()).fit_transform(parts())
    np.testing.assert_allclose(np.asarray(lazy), fit.transform(X))


def test_dask_arrays() -> None:
    array = pytest.importorskip("dask.array")
    data = array.from_array(X, chunks=(500, 20))
    fit = IncrementalPCA(5, engine=Serial()).fit(data)
    lazy = fit.transform(data)
    assert lazy.shape == (1797, 5) and lazy.dtype == np.float64
    np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), fit.transform(X))
    np.testing.assert_allclose(
        fit.inverse_transform(lazy).compute(scheduler="synchronous"), fit.inverse_transform(fit.transform(X))
    )


def test_the_engine_is_a_parameter() -> None:
    engine = Serial()
    model = IncrementalPCA(5, engine=engine)
    assert clone(model).engine is engine and pickle.loads(pickle.dumps(model)).engine is None


def test_bad_input() -> None:
    def refused(match: str, data: Any, error: type[Exception] = ValueError, **given: Any) -> None:
        with pytest.raises(error, match=match):
            IncrementalPCA(**given, engine=Serial()).fit(data)

    refused("invalid for n_features=64", X, n_components=65)
    refused("number of samples 7", [X[:3], X[3:7]], n_components=8)
    refused("batch number of samples 20", [X], n_components=30, batch_size=20)
    refused("contains infinity", [X, np.full((3, 64), np.inf)], pmstore.ShardError)
