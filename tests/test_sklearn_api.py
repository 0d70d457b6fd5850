"""pmstore's estimators as scikit-learn's: its own checks, clones, pipelines, grid search."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # OpenMP's threads wait by spinning, and tests run side by side
sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.cluster import KMeans as SklearnKMeans  # noqa: E402
from sklearn.datasets import make_blobs  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

import pmstore  # noqa: E402
from pmstore.cluster import KMeans  # noqa: E402

BLOBS, _ = make_blobs(500, 5, centers=6, cluster_std=3.0, random_state=1)


def test_clones_and_meta_estimators(tmp_path: Path) -> None:
    grid = {"kmeans__n_clusters": [2, 3, 4]}
    reference = GridSearchCV(make_pipeline(StandardScaler(), SklearnKMeans(random_state=0)), grid, cv=3).fit(BLOBS)
    with pmstore.open(tmp_path / "open.pm") as store:
        for where in (tmp_path / "own.pm", store):
            pipeline = make_pipeline(StandardScaler(), KMeans(random_state=0, store=where))
            assert clone(pipeline)[-1].store == where
            for _ in range(2):
                search = GridSearchCV(pipeline, grid, cv=3, n_jobs=1).fit(BLOBS)
                assert search.best_params_ == reference.best_params_
                assert (search.cv_results_["mean_test_score"] == reference.cv_results_["mean_test_score"]).all()


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


@pytest.mark.slow
def test_scikit_learns_checks_pass_where_its_own_kmeans_does() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = outcomes(SklearnKMeans())
        assert outcomes(KMeans()) == expected
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=memory) as directory:
            assert outcomes(KMeans(store=os.path.join(directory, "checks.pm"))) == expected
