"""pmstore.decomposition.IncrementalPCA: the same bits as scikit-learn's, whatever happens to the process."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn")

import scipy.sparse as sparse  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from sklearn.decomposition import IncrementalPCA as SklearnIncrementalPCA  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

import pmstore  # noqa: E402
from pmstore.decomposition import IncrementalPCA  # noqa: E402
from pmstore.decomposition._incremental_pca import PCAFit  # noqa: E402
from tests.support.pairs import half, labelled  # noqa: E402
from tests.support.resuming import assert_same, copied, interrupted  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

X = load_digits().data[:160, 2:22]
DATA: dict[str, Any] = {
    "float64": X,
    "float32": X.astype("f4"),
    "column order": np.asfortranarray(X),
    "every other row": X[::2, ::-1],
    "csr": sparse.csr_matrix(X),
    "csc": sparse.csc_array(X),
    "lil float32": sparse.lil_matrix(X.astype("f4")),
    "list of int": X[:50].astype(int).tolist(),
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "all components": {"batch_size": 35},
    "few": {"n_components": 4, "batch_size": 30},
    "whiten": {"n_components": 20, "batch_size": 30, "whiten": True, "copy": False},
}


def assert_fits_are_the_same(fit: Any, reference: Any, data: Any = X) -> None:
    theirs = vars(reference)
    assert_same({name: vars(fit)[name] for name in theirs}, theirs)
    assert_same(fit.transform(data), reference.transform(data))
    assert_same(fit.get_covariance(), reference.get_covariance())


@pytest.mark.parametrize(
    "data, parameters",
    half(labelled(DATA), labelled(PARAMETERS)),
)
def test_a_fit_in_a_store_is_scikit_learns(data: Any, parameters: dict[str, Any], path: Path) -> None:
    reference = SklearnIncrementalPCA(**parameters).fit(copy.deepcopy(data))
    given = copy.deepcopy(data)
    with copied(path) as copies:
        fit = IncrementalPCA(**parameters, store=path, name="pca").fit(given)
    assert_same(*(one if isinstance(one, np.ndarray | list) else one.toarray() for one in (given, data)))
    assert_fits_are_the_same(fit, reference, data)
    batches = -(-reference.n_samples_seen_ // reference.batch_size_)
    assert batches <= len(copies) <= batches + 2  # small batches at the end are one; the end, and closing the store
    for n, store in enumerate(copies):
        again = IncrementalPCA(**parameters, store=store, name="pca").fit(data)
        assert again.resumed_from_iter_ == min(n + 1, len(copies) - 2)
        assert_fits_are_the_same(again, reference, data)


@pytest.mark.parametrize("rows, batch_size", [(17, None), (5, None), (20, 6)])
def test_products_with_the_components_are_scikit_learns(rows: int, batch_size: int | None, path: Path) -> None:
    """Which also depend on where the components are in memory, for some data."""
    data = np.random.default_rng(43).normal(size=(rows, 8))
    reference = SklearnIncrementalPCA(2, batch_size=batch_size).fit(data)
    for _ in range(2):  # the second time it loads
        fit = IncrementalPCA(2, batch_size=batch_size, store=path, name="pca").fit(data)
        assert fit.components_.strides == reference.components_.strides
        assert_fits_are_the_same(fit, reference, data)


def test_two_threads(path: Path) -> None:
    parameters = {"n_components": 5, "batch_size": 40}
    with threadpool_limits(2):
        reference = SklearnIncrementalPCA(**parameters).fit(X)
        with copied(path) as copies:
            IncrementalPCA(**parameters, store=path, name="pca").fit(X)
        for store in copies[:3]:
            again = IncrementalPCA(**parameters, store=store, name="pca").fit(X)
            assert_fits_are_the_same(again, reference)
    with pytest.raises(pmstore.FingerprintMismatchError, match="threads: 2 ≠ 1"):
        IncrementalPCA(**parameters, store=path, name="pca").fit(X)


def test_a_process_that_is_killed(path: Path, child: Callable[..., Any]) -> None:
    code = """
        import os, signal, sys
        import numpy as np
        from threadpoolctl import threadpool_limits
        from pmstore.decomposition import IncrementalPCA
        from pmstore.decomposition._incremental_pca import PCAFit

        step = PCAFit.step

        def killed(self):
            step(self)
            if self.state.iteration == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        PCAFit.step = killed
        with threadpool_limits(1):
            IncrementalPCA(4, batch_size=30, store=sys.argv[1]).fit(np.load(sys.argv[2]))
    """
    np.save(path.with_suffix(".npy"), X)
    process = child(code, path, path.with_suffix(".npy")).process
    assert process.wait() == -signal.SIGKILL, process.communicate()
    fit = IncrementalPCA(4, batch_size=30, store=path).fit(X)
    assert fit.resumed_from_iter_ == 3
    assert_fits_are_the_same(fit, SklearnIncrementalPCA(4, batch_size=30).fit(X))


def test_partial_fit_is_scikit_learns_own(path: Path) -> None:
    fit, reference = IncrementalPCA(4, store=path), SklearnIncrementalPCA(4)
    for one in (fit, reference):
        one.partial_fit(X[:50]).partial_fit(X[50:])
    assert_same(fit.components_, reference.components_)
    assert not path.exists()


def test_what_makes_another_fit(path: Path) -> None:
    IncrementalPCA(4, batch_size=30, store=path, name="pca").fit(X)
    for parameters, data, message in (
        ({"n_components": 5}, X, "n_components: 4 ≠ 5"),
        ({"batch_size": 31}, X, "batch_size: 30 ≠ 31"),
        ({}, X + np.eye(*X.shape), "X contents"),
        ({}, sparse.csc_matrix(X), "X format: dense ≠ csc"),
    ):
        other = IncrementalPCA(**{"n_components": 4, "batch_size": 30, **parameters}, store=path, name="pca")
        with pytest.raises(pmstore.FingerprintMismatchError, match=message):
            other.fit(data)


def test_bad_input_leaves_no_trace(path: Path) -> None:
    with pmstore.open(path) as store:
        for parameters, data, message in (
            ({}, X * np.nan, "NaN"),
            ({}, X[:0], "0 sample"),
            ({"n_components": 21}, X, "n_components=21"),
            ({"batch_size": 0}, X, "batch_size"),
            ({"commit_every": 0}, X, "commit_every"),
        ):
            with pytest.raises(ValueError, match=message):
                IncrementalPCA(**parameters, store=store).fit(data)
        assert len(store) == 0 and store.sequence == 0


def test_an_exception_leaves_the_last_batch(path: Path) -> None:
    with interrupted(PCAFit, 2):
        IncrementalPCA(4, batch_size=30, store=path, name="pca").fit(X)
    fit = IncrementalPCA(4, batch_size=30, store=path, name="pca").fit(X)
    assert fit.resumed_from_iter_ == 2
    assert_fits_are_the_same(fit, SklearnIncrementalPCA(4, batch_size=30).fit(X))


def test_only_what_cannot_be_computed_is_stored(path: Path) -> None:
    with pmstore.open(path) as store:
        IncrementalPCA(4, batch_size=30, store=store, name="pca").fit(X)
        values = {name: value for name, value in store.group("pca").items() if not name.startswith("history/")}
    arrays = {name: value.shape for name, value in values.items() if isinstance(value, np.ndarray)}
    assert arrays == {"components": (4, 20), "singular_values": (4,), "mean": (20,), "var": (20,), "progress": ()}
