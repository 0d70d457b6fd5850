"""pmstore's estimators as scikit-learn's: its own checks, clones, pipelines, grid search."""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sklearn = pytest.importorskip("sklearn")

import joblib  # noqa: E402
from sklearn import decomposition, mixture  # noqa: E402
from sklearn.base import clone  # noqa: E402
from sklearn.cluster import KMeans as SklearnKMeans  # noqa: E402
from sklearn.cluster import MiniBatchKMeans as SklearnMiniBatchKMeans  # noqa: E402
from sklearn.datasets import make_blobs  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import Pipeline, make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

import pmstore  # noqa: E402
from pmstore.cluster import KMeans, MiniBatchKMeans  # noqa: E402
from pmstore.decomposition import IncrementalPCA  # noqa: E402
from pmstore.mixture import BayesianGaussianMixture, GaussianMixture  # noqa: E402
from tests.support.resuming import estimators  # noqa: E402

BLOBS, _ = make_blobs(500, 5, centers=6, cluster_std=3.0, random_state=1)
BLOBS -= BLOBS.min(axis=0)  # some estimators take no negative numbers

KINDS = [
    (KMeans, SklearnKMeans),
    (MiniBatchKMeans, SklearnMiniBatchKMeans),
    (GaussianMixture, mixture.GaussianMixture),
    (BayesianGaussianMixture, mixture.BayesianGaussianMixture),
    (IncrementalPCA, decomposition.IncrementalPCA),
]
OURS = [kind for kind, _ in KINDS]


def test_every_estimator_is_tested() -> None:
    assert estimators() == set(OURS)


@pytest.mark.parametrize("kind", OURS)
def test_a_group_is_no_store_and_the_error_says_how_to_name_a_fit_in_it(kind: Any, tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        group = store.group("exp/a")
        with pytest.raises(ValueError, match=r"must be a pmstore\.Store, a path .* Got .*name='exp/a', or a name in"):
            kind(store=group).fit(BLOBS)
        with pytest.raises(TypeError, match="store is a Store or a path, not a Group.*name='exp/a'"):
            pmstore.partial_fit(MiniBatchKMeans(3), [BLOBS], store=group, name="a")
    with pytest.raises(ValueError, match="'store' parameter .* Got 5 instead.$"):
        kind(store=5).fit(BLOBS)


@pytest.mark.parametrize("kind, theirs", [(KMeans, SklearnKMeans), (MiniBatchKMeans, SklearnMiniBatchKMeans)])
def test_clones_and_meta_estimators(kind: Any, theirs: Any, tmp_path: Path) -> None:
    grid = {"cluster__n_clusters": [2, 4]}
    steps = [("scale", StandardScaler()), ("cluster", theirs(random_state=0, max_iter=10))]
    reference = GridSearchCV(Pipeline(steps), grid, cv=2).fit(BLOBS)
    with pmstore.open(tmp_path / "open.pm") as store:
        for where in (tmp_path / "own.pm", store):
            model = kind(random_state=0, max_iter=10, store=where)
            pipeline = Pipeline([("scale", StandardScaler()), ("cluster", model)])
            assert clone(pipeline)[-1].store == where
            for _ in range(2):
                search = GridSearchCV(pipeline, grid, cv=2, n_jobs=1).fit(BLOBS)
                assert search.best_params_ == reference.best_params_
                assert (search.cv_results_["mean_test_score"] == reference.cv_results_["mean_test_score"]).all()


@pytest.mark.parametrize("kind", OURS)
def test_fit_returns_the_estimator_and_other_methods_their_result(kind: Any, tmp_path: Path) -> None:
    """Also of a finished fit, which is loaded."""
    given: dict[str, Any] = {"random_state": 0, "max_iter": 5}
    given = {name: value for name, value in given.items() if name in kind().get_params()}
    assert type(kind(**given).fit(BLOBS)) is kind
    for _ in range(2):
        model = kind(store=tmp_path / "o.pm", **given)
        assert model.fit(BLOBS) is model
        for method in ("fit_predict", "fit_transform"):
            if hasattr(model, method):
                found, expected = (getattr(one, method)(BLOBS) for one in (model, kind(**given)))
                assert type(found) is type(expected) and (found == expected).all()


@pytest.mark.parametrize("changed_only", [True, False])
def test_an_open_store_is_shown_by_its_path(changed_only: bool, tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "o.pm") as store, sklearn.config_context(print_changed_only=changed_only):
        for i in range(50):
            store[f"some/name/{i}"] = i
        alone = KMeans(3, store=store)
        pipeline = make_pipeline(StandardScaler(), alone)
        for estimator in (alone, pipeline, GridSearchCV(pipeline, {"kmeans__n_clusters": [2, 3]})):
            text, html = repr(estimator), estimator._repr_html_()
            assert f"store=<pmstore.Store '{tmp_path / 'o.pm'}'>" in text.replace("\n", "")
            assert "50 names" not in text + html and "─ name" not in text + html
            assert clone(estimator).get_params()[f"{estimator_prefix(estimator)}store"] is store
        assert alone.get_params()["store"] is store


@pytest.mark.parametrize("kind", OURS)
def test_copies_and_hashes_beside_an_open_store(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "o.pm"
    with pmstore.open(path) as store, pmstore.open(tmp_path / "other.pm") as other:
        model = kind(store=store, name="fit")
        for copied in (copy.copy(model), copy.deepcopy(model), clone(model)):
            assert copied.store is store and copied is not model and copied.get_params() == model.get_params()
        assert copy.deepcopy(model.fit(BLOBS)).n_features_in_ == 5
        before = joblib.hash(store)
        store["more"] = 1
        assert joblib.hash(store) == before == joblib.hash({"store": store}["store"]) != joblib.hash(other)
        assert joblib.hash(store.group("g")) != joblib.hash(other.group("g")) != joblib.hash(other.group("h"))
        assert pickle.loads(pickle.dumps(model)).store == str(path)


def estimator_prefix(estimator: Any) -> str:
    """The prefix of the parameters of the KMeans in it."""
    return next(name for name in estimator.get_params() if name.endswith("n_clusters")).removesuffix("n_clusters")


# ---- scikit-learn's own checks


def outcomes(estimator: Any) -> set[tuple[str, str]]:
    """Checks that the estimator doesn't pass."""
    try:
        results = check_estimator(estimator, on_fail=None, on_skip=None)
        return {(result["check_name"], result["status"]) for result in results if result["status"] != "passed"}
    except TypeError:  # before 1.6
        failed = set()
        for one, check in check_estimator(estimator, generate_only=True):
            try:
                check(one)
            except Exception as problem:
                kind = "skipped" if type(problem).__name__ == "SkipTest" else "failed"
                failed.add((getattr(check, "func", check).__name__, kind))
        return failed


# Those that copy, hash, set or pickle parameters. The others do to an open store what they do to a path.
OF_PARAMETERS = (
    "check_dict_unchanged",
    "check_estimator_cloneable",
    "check_estimator_get_tags_default_keys",
    "check_estimators_overwrite_params",
    "check_estimators_pickle",
    "check_get_params_invariance",
    "check_set_params",
)


def checks(estimator: Any) -> Iterator[tuple[Any, Any]]:
    try:
        from sklearn.utils.estimator_checks import estimator_checks_generator
    except ImportError:  # before 1.6
        yield from check_estimator(estimator, generate_only=True)
    else:
        yield from estimator_checks_generator(estimator)


@pytest.mark.parametrize("kind", OURS)
def test_scikit_learns_checks_of_parameters_with_an_open_store(kind: Any, tmp_path: Path) -> None:
    done = []
    with warnings.catch_warnings(), pmstore.open(tmp_path / "checks.pm") as store:
        warnings.simplefilter("ignore")
        for estimator, check in checks(kind(store=store)):
            name = getattr(check, "func", check).__name__
            if name in OF_PARAMETERS:
                check(estimator)
                done.append(name)
    assert {"check_set_params", "check_estimators_overwrite_params", "check_estimators_pickle"} <= set(done)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, theirs", [KINDS[0], *(pytest.param(*kinds, marks=pytest.mark.long) for kinds in KINDS[1:])]
)
def test_scikit_learns_checks_pass_where_its_own_do(kind: Any, theirs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = outcomes(theirs())
        assert outcomes(kind()) == expected
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=memory) as directory:
            assert outcomes(kind(store=os.path.join(directory, "checks.pm"))) == expected
