"""The results of estimators for data in shards: arrays, whatever else scikit-learn is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn")
pytest.importorskip("sklearn.pipeline")

import pmstore  # noqa: E402
from pmstore.cluster import KMeans  # noqa: E402
from pmstore.decomposition import IncrementalPCA  # noqa: E402
from pmstore.scale import LazyParts, Processes, Serial, Shard  # noqa: E402

X = np.random.default_rng(0).normal(size=(60, 3))
PARTS = [X[:20], X[20:]]
MODELS = [KMeans(2, random_state=0, engine=Serial()), IncrementalPCA(2, engine=Serial())]


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("model", MODELS, ids=["kmeans", "pca"])
def test_shards_give_arrays_whatever_set_output_says(model: Any, everywhere: bool) -> None:
    model = sklearn.clone(model)
    expected = model.fit_transform(PARTS)
    with sklearn.config_context(transform_output="pandas" if everywhere else "default"):
        if not everywhere:
            model.set_output(transform="pandas")
        for lazy in (model.transform(PARTS), model.fit_transform(PARTS), model.transform([Shard(np.copy, X)])):
            assert isinstance(lazy, LazyParts)
            assert all(type(part) is np.ndarray for part in lazy)
            np.testing.assert_allclose(np.asarray(lazy), np.asarray(expected))


@pytest.mark.parametrize("model", MODELS, ids=["kmeans", "pca"])
def test_arrays_become_tables(model: Any) -> None:
    pandas = pytest.importorskip("pandas")
    model = sklearn.clone(model).set_output(transform="pandas")
    for table in (model.fit_transform(X), model.transform(X)):
        assert isinstance(table, pandas.DataFrame)
        assert list(table.columns) == list(model.get_feature_names_out())


@pytest.mark.parametrize("model", MODELS, ids=["kmeans", "pca"])
def test_set_output_and_dask(model: Any) -> None:
    data = pytest.importorskip("dask.array").from_array(X, chunks=(20, 3))
    model = sklearn.clone(model).set_output(transform="pandas")
    lazy = model.fit_transform(data)
    assert lazy.shape == (60, 2) and type(lazy.compute(scheduler="synchronous")) is np.ndarray


@pytest.mark.parametrize("model", MODELS, ids=["kmeans", "pca"])
def test_shards_that_are_no_arrays(model: Any) -> None:
    model = sklearn.clone(model).fit(PARTS)
    scipy = pytest.importorskip("scipy.sparse")
    for data in (scipy.csr_matrix(X), {"X": X}, [1.0, 2.0]):
        with pytest.raises(TypeError, match="a shard for a prediction is an array, not a "):
            np.asarray(model.transform([Shard(lambda data=data: data)]))


def test_operators_and_functions_of_numpy_take_all_parts() -> None:
    fit = KMeans(2, random_state=0, engine=Serial()).fit(PARTS)
    labels = np.asarray(fit.labels_)
    ones = fit.labels_ == 1
    assert isinstance(ones, np.ndarray) and np.array_equal(ones, labels == 1) and 0 < ones.sum() < 60
    assert np.array_equal(X[fit.labels_ != 1], X[labels != 1])
    assert np.array_equal(1 - fit.labels_, 1 - labels) and np.array_equal(np.unique(fit.labels_), [0, 1])
    assert np.array_equal(fit.labels_ < fit.predict(PARTS), np.zeros(60, bool))
    assert np.sum(labels, where=fit.labels_ == 1) == np.sum(labels, where=fit.predict(PARTS).__ne__(0)) == ones.sum()
    assert not np.any(fit.labels_ == "a") and np.all(fit.labels_ == fit.predict(PARTS))
    with pytest.raises(TypeError):
        np.add(labels, 1, out=fit.labels_)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        fit.labels_ += 1


def test_an_estimator_fits_the_results_of_another(tmp_path: Path) -> None:
    pipeline = sklearn.pipeline.make_pipeline(
        IncrementalPCA(2, engine=Serial()), KMeans(2, random_state=0, engine=Processes(2))
    )
    labels = pipeline.fit_predict(PARTS)
    scores = [np.array(part) for part in pipeline[0].transform(PARTS)]
    plain = KMeans(2, random_state=0, engine=Serial()).fit(scores)
    assert np.array_equal(pipeline[1].cluster_centers_, plain.cluster_centers_)
    assert np.array_equal(labels, plain.labels_) and np.array_equal(pipeline.predict(PARTS), labels)
    wide = np.random.default_rng(0).normal(size=(2000, 513))
    again = sklearn.pipeline.make_pipeline(
        IncrementalPCA(37, engine=Serial()), KMeans(2, random_state=0, engine=Serial(), max_iter=2)
    )
    again.fit([wide[:1000], wide[1000:]])  # with BLAS in all threads, other bits of the results of the first
    assert np.asarray(again[1].labels_).shape == (2000,)
    with pmstore.open(tmp_path / "a.pm") as store:
        kept = KMeans(2, random_state=0, engine=Serial(), store=store, name="fit").fit(pipeline[0].transform(PARTS))
        again = KMeans(2, random_state=0, engine=Serial(), store=store, name="fit").fit(pipeline[0].transform(PARTS))
    assert again.resumed_from_iter_ > 0 and np.array_equal(again.labels_, kept.labels_)
