"""pmstore.cluster.KMeans: the same bits as scikit-learn's, whatever happens to the process."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn")

import scipy.sparse as sparse  # noqa: E402
from sklearn.cluster import KMeans as SklearnKMeans  # noqa: E402
from sklearn.datasets import load_digits, make_blobs  # noqa: E402
from sklearn.exceptions import ConvergenceWarning  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

import pmstore  # noqa: E402
from pmstore._core import Core  # noqa: E402
from pmstore.cluster import KMeans  # noqa: E402
from pmstore.cluster._lloyd import Lloyd  # noqa: E402
from tests.support.pairs import half, labelled  # noqa: E402
from tests.support.resuming import sampled  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

RESULT = ("cluster_centers_", "labels_", "inertia_", "n_iter_")
DIGITS = load_digits().data


def assert_same(fit: Any, reference: Any) -> None:
    """The fitted attributes are equal bit for bit, and of the same types."""
    for name in RESULT:
        ours, theirs = getattr(fit, name), getattr(reference, name)
        assert type(ours) is type(theirs), name
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
        assert ours.tobytes() == theirs.tobytes(), name


def chosen_rows(X: Any, k: int, random_state: np.random.RandomState) -> Any:
    """A callable for `init`."""
    rows = X[random_state.permutation(X.shape[0])[:k]]
    return rows.toarray() if sparse.issparse(rows) else rows


BLOBS, _ = make_blobs(500, 5, centers=6, cluster_std=3.0, random_state=1)
WEIGHTS = np.random.RandomState(2).uniform(0.1, 3.0, len(BLOBS))
DATA: dict[str, tuple[Any, Any]] = {
    "float64": (DIGITS[:400], None),
    "float32": (DIGITS[:400].astype("f4"), None),
    "csr": (sparse.csr_matrix(DIGITS[:300]), None),
    "csr float32": (sparse.csr_array(DIGITS[:300].astype("f4")), None),
    "weights": (BLOBS, WEIGHTS),
    "weights csr": (sparse.csr_matrix(BLOBS), WEIGHTS),
    "few distinct": (np.repeat(DIGITS[:6], 9, axis=0), None),
    "list of int": (DIGITS[:40].astype(int).tolist(), None),
    "column order": (np.asfortranarray(BLOBS), None),
    "every other row": (BLOBS[::2, ::-1], None),
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "n_init": {"n_init": 4},
    "random": {"init": "random", "n_init": 3},
    "callable": {"init": chosen_rows, "n_init": 2},
    "strict": {"tol": 0.0, "n_init": 2},
    "loose": {"tol": 0.3},
    "cut short": {"max_iter": 3, "n_init": 2},
    "one iteration": {"max_iter": 1, "n_init": 2},
    "one cluster": {"n_clusters": 1},
    "in place": {"copy_x": False, "n_init": 2},
    "elkan": {"algorithm": "elkan", "n_init": 3},
    "elkan strict": {"algorithm": "elkan", "init": "random", "tol": 0.0, "n_init": 2, "copy_x": False},
}


@pytest.fixture
def after_commits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Have something done after every commit."""
    commit = Core.commit

    def have(action: Callable[[], None]) -> None:
        def commit_and_act(core: Core) -> None:
            commit(core)
            action()

        monkeypatch.setattr(Core, "commit", commit_and_act)

    return have


# ---- the same as scikit-learn


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "data, parameters",
    half(labelled(DATA), labelled(PARAMETERS)),
)
def test_a_fit_in_a_store_is_scikit_learns(
    data: tuple[Any, Any], parameters: dict[str, Any], threads: int, path: Path
) -> None:
    X, weights = data
    parameters = {"n_clusters": 8, "random_state": 3, **parameters}
    with threadpool_limits(threads):
        reference = SklearnKMeans(**parameters).fit(copy.deepcopy(X), sample_weight=weights)
        fit = KMeans(**parameters, store=path).fit(copy.deepcopy(X), sample_weight=weights)
        again = KMeans(**parameters, store=path).fit(copy.deepcopy(X), sample_weight=weights)
    for one in (fit, again):
        assert_same(one, reference)
        assert (one.predict(X) == reference.predict(X)).all()
        assert one.n_features_in_ == reference.n_features_in_
    assert (fit.resumed_from_run_, fit.resumed_from_iter_) == (0, 0)


@pytest.mark.parametrize("data", [DIGITS[:200], sparse.csr_matrix(DIGITS[:200])], ids=["dense", "csr"])
def test_an_array_of_centers_is_an_init(data: Any, path: Path) -> None:
    parameters = {"n_clusters": 5, "init": DIGITS[:5].copy(), "n_init": 2}
    with pytest.warns(RuntimeWarning, match="only one init"):
        reference = SklearnKMeans(**parameters).fit(data)
    with pytest.warns(RuntimeWarning, match="only one init"):
        fit = KMeans(**parameters, store=path).fit(data)
    assert_same(fit, reference)
    assert (parameters["init"] == DIGITS[:5]).all(), "the caller's centres were changed"
    with pytest.raises(ValueError, match="initial centers"):
        KMeans(4, init=DIGITS[:5], n_init=1, store=path, name="wrong").fit(data)


def test_a_random_state_is_left_as_scikit_learn_leaves_it(path: Path) -> None:
    theirs, ours, later = (np.random.RandomState(7) for _ in range(3))
    reference = SklearnKMeans(4, n_init=3, random_state=theirs).fit(BLOBS)
    assert_same(KMeans(4, n_init=3, random_state=ours, store=path).fit(BLOBS), reference)
    assert_same(KMeans(4, n_init=3, random_state=later, store=path).fit(BLOBS), reference)  # loads
    assert theirs.uniform() == ours.uniform() == later.uniform()
    with pytest.raises(ValueError, match="MT19937"):
        KMeans(4, random_state=np.random.RandomState(np.random.PCG64(1)), store=path).fit(BLOBS)  # type: ignore[arg-type]


def test_without_a_seed_the_first_one_drawn_is_kept(path: Path) -> None:
    first = KMeans(6, init="random", n_init=1, store=path).fit(BLOBS)
    assert_same(KMeans(6, init="random", n_init=1, store=path).fit(BLOBS), first)
    with pmstore.open(path) as store:
        (seed,) = (int(store[name]["seed"]) for name in store if name.endswith("/progress"))
    assert_same(first, SklearnKMeans(6, init="random", n_init=1, random_state=seed).fit(BLOBS))
    KMeans(6, init="random", n_init=1, random_state=seed, store=path, name="given").fit(BLOBS)
    with pmstore.open(path) as store:
        assert store["given/progress"]["seed"] == -1


def test_data_are_left_alone_or_put_back(path: Path) -> None:
    X = DIGITS[:100].copy()
    KMeans(3, store=path).fit(X)
    assert (DIGITS[:100] == X).all()
    KMeans(3, store=path, copy_x=False).fit(X)
    np.testing.assert_allclose(X, DIGITS[:100], atol=1e-12)


@pytest.mark.parametrize(
    "of",
    [
        lambda array: array,
        lambda array: array[:],
        np.from_dlpack,
        lambda array: np.asarray(memoryview(array)),
        lambda array: np.frombuffer(array).reshape(array.shape),
        lambda array: np.ctypeslib.as_array(np.ctypeslib.as_ctypes(array)),
    ],
    ids=["array", "view", "dlpack", "memoryview", "frombuffer", "ctypes"],
)
def test_data_in_the_same_store_are_not_changed(
    of: Callable[[Any], Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Centred in place, they would be committed so."""
    reference = SklearnKMeans(4, random_state=0).fit(BLOBS)
    with pmstore.open(path) as store:
        store["X"] = BLOBS
        whenever = []
        monkeypatch.setattr(Lloyd, "_committed", lambda fit: whenever.append((store["X"] == BLOBS).all()))
        for copy_x in (True, False):
            whenever.clear()
            fit = KMeans(4, random_state=0, store=store, name=f"{copy_x}", copy_x=copy_x).fit(of(store["X"]))
            assert_same(fit, reference)
            assert whenever and all(whenever)


@pytest.mark.parametrize("algorithm", ["lloyd", "elkan"])
def test_it_prints_what_scikit_learn_prints(algorithm: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tolerance in (1e-4, 0.1):
        parameters: dict[str, Any] = {"n_clusters": 5, "n_init": 2, "random_state": 0, "tol": tolerance, "verbose": 1}
        parameters["algorithm"] = algorithm
        SklearnKMeans(**parameters).fit(BLOBS)
        theirs = capsys.readouterr().out
        KMeans(**parameters, store=path).fit(BLOBS)
        assert capsys.readouterr().out == theirs


def test_too_few_distinct_points_are_warned_of(path: Path) -> None:
    X = np.repeat(DIGITS[:3], 4, axis=0)
    for _ in range(2):  # running, loading
        with pytest.warns(ConvergenceWarning, match=r"distinct clusters \(3\) found smaller than n_clusters \(5\)"):
            KMeans(5, store=path, random_state=0).fit(X)


# ---- death


@pytest.mark.longer
@pytest.mark.parametrize(
    "kind, parameters",
    half(
        [pytest.param(kind, id=kind) for kind in ("float64", "csr float32", "weights", "few distinct")],
        labelled(PARAMETERS),
    ),
)
def test_a_fit_goes_on_from_every_commit(
    kind: str,
    parameters: dict[str, Any],
    path: Path,
    after_commits: Callable[[Callable[[], None]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of the file taken after a commit is what a kill at that moment leaves."""
    X, weights = DATA[kind]
    parameters = {"n_clusters": 6, "random_state": 3, **parameters}
    copies: list[Path] = []

    def take_copy() -> None:
        copies.append(Path(shutil.copy(path, path.with_name(f"{len(copies)}.pm"))))

    with threadpool_limits(1 if parameters.get("tol") is None else 2):
        reference = SklearnKMeans(**parameters).fit(X.copy(), sample_weight=weights)
        with pmstore.open(path) as store:
            after_commits(take_copy)
            fit = KMeans(**parameters, store=store).fit(X.copy(), sample_weight=weights)
            monkeypatch.undo()
        assert_same(fit, reference)
        assert len(copies) > reference.n_iter_
        for survivor in sampled(copies):
            assert_same(KMeans(**parameters, store=survivor).fit(X.copy(), sample_weight=weights), reference)


@pytest.mark.parametrize("when", range(1, 12))
def test_an_interrupted_fit_goes_on(when: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT inside any iteration, with the store open before and after: the caller may commit what is there."""
    parameters = {"n_clusters": 5, "n_init": 2, "random_state": 5, "copy_x": False}
    reference = SklearnKMeans(**parameters).fit(BLOBS.copy())
    iterate = Lloyd.step
    left = when

    def interrupted(self: Any, *arguments: Any) -> None:
        nonlocal left
        iterate(self, *arguments)
        left -= 1
        if not left:
            signal.raise_signal(signal.SIGINT)

    with pmstore.open(path) as store:
        store["mine"] = np.zeros(3)
        with monkeypatch.context() as patch:
            patch.setattr(Lloyd, "step", interrupted)
            X = BLOBS.copy()
            with pytest.raises(KeyboardInterrupt):
                KMeans(**parameters, store=store, name="fit").fit(X)
            np.testing.assert_allclose(X, BLOBS, atol=1e-12)
        store["mine"][0] = 1.0
        store.commit()
        fit = KMeans(**parameters, store=store, name="fit").fit(BLOBS.copy())
    assert_same(fit, reference)
    assert fit.resumed_from_run_ > 0 or fit.resumed_from_iter_ == when - 1


def test_a_finished_fit_does_no_work(path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    with pmstore.open(path) as store:
        fit = KMeans(5, n_init=2, random_state=0, store=store).fit(BLOBS)
        before = store.sequence
        for work in ("start", "derive", "step", "end_run"):
            monkeypatch.setattr(Lloyd, work, lambda _: pytest.fail("work was done"))
        with caplog.at_level(logging.INFO, "pmstore"):
            again = KMeans(5, n_init=2, random_state=0, store=store).fit(BLOBS)
        assert store.sequence == before
    assert_same(again, fit)
    assert (again.resumed_from_run_, again.resumed_from_iter_) >= (1, 1)
    assert "loading" in caplog.text


def test_a_resume_is_logged(path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, path, 3)
    with caplog.at_level(logging.INFO, "pmstore"):
        fit = KMeans(5, random_state=0, store=path).fit(BLOBS)
    assert fit.resumed_from_iter_ == 3
    assert "resuming" in caplog.text and "3 iterations done" in caplog.text


def interrupt_after(monkeypatch: pytest.MonkeyPatch, path: Path, iterations: int, **parameters: Any) -> None:
    """Leave an unfinished fit of BLOBS in the store at path."""
    parameters = {"n_clusters": 5, "random_state": 0, **parameters}
    iterate = Lloyd.step
    left = iterations

    def interrupted(self: Any, *arguments: Any) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        iterate(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Lloyd, "step", interrupted)
        KMeans(**parameters, store=path).fit(BLOBS)


# ---- which fit is in a fit group


OTHER: dict[str, tuple[dict[str, Any], Any, Any, str]] = {
    "parameter": ({"n_clusters": 6}, BLOBS, None, "parameter n_clusters: 5 ≠ 6"),
    "tol": ({"tol": 1e-3}, BLOBS, None, "parameter tol: 0.0001 ≠ 0.001"),
    "seed": ({"random_state": 1}, BLOBS, None, "parameter random_state: 0 ≠ 1"),
    "init": ({"init": BLOBS[:5]}, BLOBS, None, "parameter init: k-means"),
    "shape": ({}, BLOBS[:, :3], None, r"X shape: \[500, 5\] ≠ \[500, 3\]"),
    "dtype": ({}, BLOBS.astype("f4"), None, "X dtype: float64 ≠ float32"),
    "contents": ({}, BLOBS + np.eye(500, 5) * 1e-9, None, "X contents: [0-9a-f]{32} ≠ [0-9a-f]{32}"),
    "order of rows": ({}, BLOBS[::-1], None, "X contents"),
    "format": ({}, sparse.csr_matrix(BLOBS), None, "X format: dense ≠ csr"),
    "weights": ({}, BLOBS, WEIGHTS, "sample_weight: None ≠ [0-9a-f]{32}"),
}


@pytest.mark.parametrize("parameters, X, weights, message", OTHER.values(), ids=OTHER)
def test_another_fit_has_no_place_in_a_named_group(
    parameters: dict[str, Any], X: Any, weights: Any, message: str, path: Path
) -> None:
    first = KMeans(5, random_state=0, store=path, name="mine").fit(BLOBS)
    other = KMeans(**{"n_clusters": 5, "random_state": 0, **parameters}, store=path, name="mine")
    with pytest.raises(pmstore.FingerprintMismatchError, match=message) as caught:
        other.fit(X, sample_weight=weights)
    assert isinstance(caught.value, ValueError)
    assert_same(KMeans(5, random_state=0, store=path, name="mine").fit(BLOBS), first)
    reference = SklearnKMeans(**{"n_clusters": 5, "random_state": 0, **parameters}).fit(X, sample_weight=weights)
    assert_same(other.reset().fit(X, sample_weight=weights), reference)


def test_one_weight_or_one_index_makes_another_fit(path: Path) -> None:
    """Columns, rows and values of a sparse matrix each count."""
    data, columns, ends = np.arange(1.0, 61), np.arange(60) % 4, np.arange(61)
    weights = np.ones(60)

    def fit(data: Any, columns: Any, ends: Any, weights: Any) -> Any:
        X = sparse.csr_matrix((data, columns, ends), shape=(60, 5))
        return KMeans(3, random_state=0, store=path, name="mine").fit(X, sample_weight=weights)

    first = fit(data, columns, ends, weights)
    moved, later, other, heavier = columns.copy(), ends.copy(), data.copy(), weights.copy()
    moved[7], later[7], other[7], heavier[7] = 4, ends[6], 99, 2
    for change in (
        (data, moved, ends, weights),
        (data, columns, later, weights),
        (other, columns, ends, weights),
        (data, columns, ends, heavier),
    ):
        with pytest.raises(pmstore.FingerprintMismatchError, match=r"(X contents|sample_weight): [0-9a-f ]+ ≠"):
            fit(*change)
    assert_same(fit(data, columns, ends, weights), first)


def test_other_threads_and_versions_are_another_fit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with threadpool_limits(1):
        KMeans(5, random_state=0, store=path, name="mine").fit(BLOBS)
    with threadpool_limits(2), pytest.raises(pmstore.FingerprintMismatchError, match="OpenMP threads: 1 ≠ 2"):
        KMeans(5, random_state=0, store=path, name="mine").fit(BLOBS)
    for name, variable in (("scikit-learn", "version"), ("scipy", "scipy_version")):
        with monkeypatch.context() as patch, threadpool_limits(1):
            patch.setattr(f"pmstore._resume.sklearn.{variable}", "9.9")
            with pytest.raises(pmstore.FingerprintMismatchError, match=rf"{name}: \S+ ≠ 9.9"):
                KMeans(5, random_state=0, store=path, name="mine").fit(BLOBS)


def test_what_does_not_matter_makes_no_other_fit(path: Path) -> None:
    fit = KMeans(5, random_state=0, store=path, name="mine").fit(BLOBS)
    for same in (BLOBS.tolist(), np.asfortranarray(BLOBS), np.repeat(BLOBS, 2, axis=1)[:, ::2]):
        assert_same(KMeans(np.int64(5), random_state=np.int32(0), store=path, name="mine").fit(same), fit)


def test_callables_are_told_apart_by_code_and_closure(path: Path) -> None:
    def centers_from(first: int) -> Callable[..., Any]:
        return lambda X, k, random_state: X[first : first + k]

    KMeans(5, init=centers_from(0), n_init=1, store=path, name="mine").fit(BLOBS)
    KMeans(5, init=centers_from(0), n_init=1, store=path, name="mine").fit(BLOBS)
    others: list[Any] = [centers_from(1), chosen_rows, functools.partial(chosen_rows)]
    for other in others:
        with pytest.raises(pmstore.FingerprintMismatchError, match="parameter init"):
            KMeans(5, init=other, n_init=1, store=path, name="mine").fit(BLOBS)


def test_without_a_name_every_fit_has_its_own_group(path: Path) -> None:
    with pmstore.open(path) as store:
        for k in (3, 4, 3):
            KMeans(k, random_state=0, store=store).fit(BLOBS)
        assert sum(name.endswith("/finished") for name in store.group("kmeans")) == 2


def test_prune_drops_finished_fits_without_a_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, path, 2)
    with pmstore.open(path) as store:
        store["kmeans/mine"] = 1
        KMeans(3, store=store).fit(BLOBS)
        KMeans(4, store=store).fit(BLOBS)
        KMeans(4, store=store, name="named").fit(BLOBS)
        dropped = pmstore.prune(store)
        assert len(dropped) == 2 and not any(name.startswith(tuple(dropped)) for name in store)
        assert store["kmeans/mine"] == 1 and "named/finished" in store
    assert pmstore.prune(path) == []
    assert KMeans(5, random_state=0, store=path).fit(BLOBS).resumed_from_iter_ == 2
    assert len(pmstore.prune(str(path))) == 1
    with pytest.raises(FileNotFoundError):
        pmstore.prune(path.with_name("none"))


def test_reset_forgets_the_fit(path: Path) -> None:
    nothing = KMeans(3, store=path, name="mine").reset()
    assert not path.exists()
    nothing.fit(BLOBS).reset()
    with pmstore.open(path) as store:
        assert len(store) == 0
    unnamed = KMeans(3, store=path).fit(BLOBS)
    KMeans(4, store=path).fit(BLOBS)
    unnamed.reset()
    with pmstore.open(path) as store:
        assert sum(name.endswith("/finished") for name in store) == 1
    with pytest.raises(ValueError, match="call fit first"):
        KMeans(3, store=path).reset()
    with pytest.raises(ValueError, match="store=None"):
        KMeans(3, name="mine").reset()


def test_reset_takes_the_paths_that_fit_takes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(path.parent))
    for given in ("~/fit.pm", f"file://{path}"):
        estimator = KMeans(3, store=given, name="mine").fit(BLOBS)
        estimator.reset()
        with pmstore.open(path) as store:
            assert len(store) == 0
    for use in (lambda: KMeans(3, store=":memory:").fit(BLOBS), lambda: pmstore.prune(":memory:")):
        with pytest.raises(ValueError, match="would be gone when this call ends"):
            use()


def test_a_group_of_the_users_is_left_alone(path: Path) -> None:
    with pmstore.open(path) as store:
        store["model/weights"] = np.ones(3)
        store["w"] = 1
        store["half/fingerprint"] = "something"
        ways = {"model": r"store\.group\('model'\)\.clear\(\)", "w": r"del store\['w'\]", "half": "clear"}
        for name, way in ways.items():
            for use in (KMeans(3, store=store, name=name).fit, lambda _, n=name: KMeans(store=store, name=n).reset()):
                with pytest.raises(pmstore.FingerprintMismatchError, match=f"not the fit of an estimator.*{way}"):
                    use(BLOBS)
        assert (store["model/weights"] == 1).all() and store["w"] == 1 and store["half/fingerprint"] == "something"
        with pytest.raises(ValueError, match="name"):
            KMeans(3, store=store, name="").fit(BLOBS)


# ---- stores of every kind


def test_elkan_with_one_cluster_is_lloyd(path: Path) -> None:
    parameters = {"n_clusters": 1, "algorithm": "elkan", "random_state": 0}
    with pytest.warns(RuntimeWarning, match="single cluster"):
        reference = SklearnKMeans(**parameters).fit(BLOBS)
    with pytest.warns(RuntimeWarning, match="single cluster"):
        fit = KMeans(**parameters, store=path).fit(BLOBS)
    assert_same(fit, reference)


@pytest.mark.parametrize("bad", [{"store": 1}, {"store": b"x"}, {"name": 3, "store": "x"}], ids=str)
def test_bad_parameters(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="parameter of KMeans must be"):
        KMeans(3, **bad).fit(BLOBS)


def test_bad_data_leave_no_trace(path: Path) -> None:
    with pmstore.open(path) as store:
        for X, weights, message in (
            (BLOBS[:2], None, "n_samples=2 should be >= n_clusters=3"),
            (BLOBS * np.nan, None, "NaN"),
            (BLOBS, np.ones(3), "sample_weight"),
        ):
            with pytest.raises(ValueError, match=message):
                KMeans(3, store=store).fit(X, sample_weight=weights)
        assert store.sequence == 0 and len(store) == 0


def test_a_closed_store_is_refused(path: Path) -> None:
    with pmstore.open(path) as store:
        pass
    with pytest.raises(pmstore.ClosedStoreError):
        KMeans(3, store=store).fit(BLOBS)


def test_a_read_only_store_gives_finished_fits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, path, 2)
    fit = KMeans(3, random_state=0, store=path).fit(BLOBS)
    with pmstore.open(path, mode="r") as store:
        assert_same(KMeans(3, random_state=0, store=store).fit(BLOBS), fit)
        for k in (4, 5):  # new, unfinished
            with pytest.raises(pmstore.ReadOnlyStoreError):
                KMeans(k, random_state=0, store=store).fit(BLOBS)


def test_a_store_in_a_transaction_is_refused(path: Path) -> None:
    with pmstore.open(path) as store:
        with store.transaction():
            with pytest.raises(pmstore.TransactionError, match="inside a transaction"):
                KMeans(3, store=store).fit(BLOBS)
        KMeans(3, store=store).fit(BLOBS)


def test_a_fit_outlives_its_store(path: Path) -> None:
    with pmstore.open(path) as store:
        fit = KMeans(3, random_state=0, store=store, name="mine").fit(BLOBS)
    labels = fit.labels_.copy()
    for one in (fit, pickle.loads(pickle.dumps(fit))):
        assert (one.predict(BLOBS) == labels).all() and one.labels_.flags.writeable
    again = pickle.loads(pickle.dumps(fit))
    assert Path(again.store) == path and again.name == "mine"
    assert_same(again.fit(BLOBS), fit)  # by path: the store is closed


def test_threads_take_turns(path: Path) -> None:
    """Fits in several threads with one open store, some of them the same fit; each is scikit-learn's."""
    fits: list[Any] = []
    with pmstore.open(path) as store:

        def fit(k: int) -> None:
            with threadpool_limits(1, user_api="openmp"):  # which is the thread's own
                fits.append(KMeans(k, n_init=5, random_state=0, store=store).fit(BLOBS))

        threads = [threading.Thread(target=fit, args=(k,)) for k in (3, 4, 3, 4, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(name.endswith("/finished") for name in store) == 2
    assert sorted(len(one.cluster_centers_) for one in fits) == [3, 3, 3, 4, 4]
    for one in fits:
        assert_same(one, SklearnKMeans(one.n_clusters, n_init=5, random_state=0).fit(BLOBS))


def test_too_little_space_is_noticed_at_once_and_does_no_harm(path: Path) -> None:
    X = np.random.RandomState(0).normal(size=(200_000, 1))
    reference = SklearnKMeans(3, random_state=0).fit(X)
    with pmstore.open(path, max_size=1 << 20) as store:
        with pytest.raises(pmstore.OutOfSpaceError):
            KMeans(3, random_state=0, store=store).fit(X)
        assert len(store) == 0
    assert_same(KMeans(3, random_state=0, store=path).fit(X), reference)


def test_a_fit_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = SklearnKMeans(5, random_state=0).fit(BLOBS)
    interrupt_after(monkeypatch, tmp_path / "fit.pm", 2)
    fit = KMeans(5, random_state=0, store=tmp_path / "fit.pm").fit(BLOBS)
    assert fit.resumed_from_iter_ == 2
    assert_same(fit, reference)
