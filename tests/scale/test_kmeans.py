"""pmstore.cluster.KMeans over shards: the same bits on every engine, whichever process dies."""

from __future__ import annotations

import contextlib
import copy
import os
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
from sklearn.cluster import KMeans as SklearnKMeans  # noqa: E402
from sklearn.datasets import load_digits, make_blobs  # noqa: E402
from sklearn.exceptions import ConvergenceWarning, NotFittedError  # noqa: E402
from sklearn.utils._param_validation import InvalidParameterError  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

import pmstore  # noqa: E402
from pmstore.cluster import KMeans  # noqa: E402
from pmstore.scale import LazyParts, Processes, Serial, Shard  # noqa: E402
from pmstore.scale._messages import Lost  # noqa: E402
from tests.scale.estimators import Backwards, Stopped, Stopping, bits  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

RESULT = ("cluster_centers_", "inertia_", "n_iter_", "labels_")
DIGITS = load_digits().data
BLOBS, _ = make_blobs(500, 5, centers=6, cluster_std=3.0, random_state=1)
K = 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(1):
        yield


def parts(X: Any, count: int = 5) -> list[Any]:
    return [np.ascontiguousarray(part) for part in np.array_split(X, count)]


def far_away(X: Any) -> Any:
    """Centres, three of which lose all samples at once."""
    return np.concatenate([X[: K - 3], np.full((3, X.shape[1]), 1e4, X.dtype)])


def twice(X: Any) -> Any:
    """Centres that are there twice."""
    return np.concatenate([X[: K // 2], X[: K // 2]])


DATA = {"digits": DIGITS[:400], "blobs": BLOBS, "few distinct": np.repeat(DIGITS[:6], 9, axis=0)}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "n_init": {"n_init": 4},
    "random": {"init": "random", "n_init": 3},
    "strict": {"tol": 0.0, "n_init": 2},
    "loose": {"tol": 0.3},
    "centres": {"init": far_away},
    "equal centres": {"init": twice, "tol": 0.0},
    "few iterations": {"max_iter": 2},
}


def parameters(name: str, X: Any) -> dict[str, Any]:
    given = dict(PARAMETERS[name])
    if callable(given.get("init")):
        given["init"] = given["init"](X)
    return given


# ---- the result


@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", PARAMETERS)
def test_one_shard_gives_the_bits_of_one_machine(name: str, data: str, dtype: str) -> None:
    X = DATA[data].astype(dtype)
    given = parameters(name, X)
    theirs = SklearnKMeans(K, random_state=3, **given).fit(X)
    ours = KMeans(K, random_state=3, engine=Serial(), **given).fit([X])
    assert bits(ours, RESULT) == bits(theirs, RESULT)
    assert type(ours.inertia_) is float and type(ours.n_iter_) is int


def test_one_shard_gives_the_bits_of_a_fit_in_a_store(path: Path) -> None:
    generators = [np.random.RandomState(5) for _ in range(2)]
    alone = KMeans(K, n_init=2, random_state=generators[0], store=path).fit(DIGITS)
    shard = KMeans(K, n_init=2, random_state=generators[1], store=path, engine=Serial()).fit([DIGITS])
    assert bits(shard, RESULT) == bits(alone, RESULT)


STARTS: dict[str, Any] = {"k-means++": "k-means++", "k-means||": "k-means||", "random": "random", "centres": BLOBS[:K]}


@pytest.mark.parametrize("start", STARTS)
def test_the_engine_does_not_matter(start: str) -> None:
    given = {"init": STARTS[start], "random_state": 0} | ({"n_init": 2} if isinstance(STARTS[start], str) else {})
    one = KMeans(K, engine=Serial(), **given).fit(parts(BLOBS))
    other = KMeans(K, engine=Backwards(), **given).fit(parts(BLOBS))
    assert bits(one, RESULT) == bits(other, RESULT)


@pytest.mark.slow
def test_processes_give_the_same_bits_also_without_memory_and_from_files(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.npy" for i in range(4)]
    for file, part in zip(files, parts(DIGITS, 4), strict=True):
        np.save(file, part)
    shards = [Shard(np.load, os.fspath(file)) for file in files]
    given: dict[str, Any] = {"init": "k-means||", "n_init": 2, "random_state": 0}
    serial = KMeans(10, engine=Serial(), **given).fit(parts(DIGITS, 4))
    two = KMeans(10, engine=Processes(2, memory=1), **given).fit(shards)
    assert bits(two, RESULT) == bits(serial, RESULT)


@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_many_shards_are_close_to_one_machine(dtype: str) -> None:
    X = BLOBS.astype(dtype)
    init = far_away(X)
    theirs = SklearnKMeans(K, init=init, n_init=1).fit(X)
    ours = KMeans(K, init=init, n_init=1, engine=Serial()).fit(X)  # an array: its rows in 16 shards
    assert ours.cluster_centers_.dtype == X.dtype and ours.labels_.dtype == np.int32
    np.testing.assert_allclose(ours.cluster_centers_, theirs.cluster_centers_, rtol=1e-4, atol=1e-4)
    assert ours.inertia_ == pytest.approx(theirs.inertia_, rel=1e-5)
    assert (ours.labels_ == theirs.labels_).mean() > 0.999
    assert ours.n_features_in_ == 5


@pytest.mark.parametrize("init", ["k-means++", "k-means||"])
def test_starts_over_shards_are_as_good_as_scikit_learns(init: str) -> None:
    X, _ = make_blobs(2000, 4, centers=20, cluster_std=0.3, random_state=0)
    theirs = [SklearnKMeans(20, n_init=1, random_state=i).fit(X).inertia_ for i in range(4)]
    ours = [KMeans(20, init=init, random_state=i, engine=Serial()).fit(parts(X)).inertia_ for i in range(4)]
    assert np.mean(ours) < 1.3 * np.mean(theirs)


def test_epochs_of_the_starts() -> None:
    """KMeans' documentation tells them."""
    for init, epochs in {"k-means++": 2 * K - 1, "k-means||": 7, "random": 1}.items():
        fit = KMeans(K, init=init, n_init=1, random_state=0, engine=Serial()).fit(parts(BLOBS))
        objective = fit.history_["objective"]
        assert np.isnan(objective[: 2 + epochs]).all() and np.isfinite(objective[2 + epochs])
        assert len(objective) == 2 + epochs + fit.n_iter_ + 1
        assert (np.diff(objective[2 + epochs : -1]) <= 0).all()
        assert objective[-2] == pytest.approx(fit.inertia_, rel=1e-6)


def test_random_centres_are_samples() -> None:
    X = np.arange(40.0).reshape(40, 1)
    chosen = set()
    for seed in range(20):
        fit = KMeans(3, init="random", n_init=1, max_iter=1, tol=0, random_state=seed, engine=Serial()).fit(parts(X, 7))
        chosen.add(fit.cluster_centers_.tobytes())
    assert len(chosen) > 10


def test_mixed_dtypes_are_float64() -> None:
    mixed = [BLOBS[:100].astype("f4"), BLOBS[100:200], (10 * BLOBS[200:300]).astype("i4")]
    fit = KMeans(3, random_state=0, engine=Serial()).fit(mixed)
    same = KMeans(3, random_state=0, engine=Serial()).fit([part.astype("f8") for part in mixed])
    assert bits(fit, RESULT) == bits(same, RESULT)


def test_a_first_run_is_compared_with_no_other(path: Path) -> None:
    """That it has the clusters of the best run so far is true of later runs only."""
    with pmstore.open(path) as store:
        KMeans(K, n_init=1, random_state=0, store=store, name="km", engine=Serial()).fit(parts(BLOBS))
        assert not store["km/progress"]["same"]


def test_few_distinct_samples_are_told() -> None:
    with pytest.warns(ConvergenceWarning, match=r"distinct clusters \(6\) found smaller than n_clusters \(8\)"):
        KMeans(K, random_state=0, init="k-means||", engine=Serial()).fit(parts(DATA["few distinct"]))


# ---- kills


@pytest.mark.parametrize(
    "given",
    [
        {"init": "k-means++", "n_init": 2},
        {"n_clusters": 2, "init": "k-means++", "n_init": 4},  # each run begins with one row found, another one
        {"init": "k-means||"},
        {"init": far_away(BLOBS)},
    ],
)
def test_a_coordinator_that_stops_anywhere_goes_on(given: dict[str, Any], path: Path) -> None:
    shards = parts(BLOBS, 3)
    given = {"n_clusters": K, "random_state": 0, "n_init": 1, **given}
    reference = KMeans(engine=Serial(), **given).fit(shards)
    epochs = len(reference.history_["iteration"])
    for replies in range(3, 3 * (epochs + 1), 13):
        with pytest.raises(Stopped):
            KMeans(store=path, name=f"{replies}", engine=Stopping(replies), **given).fit(shards)
        fit = KMeans(store=path, name=f"{replies}", engine=Backwards(), **given).fit(shards)
        assert bits(fit, RESULT) == bits(reference, RESULT)
        assert len(fit.history_["iteration"]) == epochs
    again = KMeans(store=path, name=f"{replies}", engine=Stopping(3), **given).fit(shards)  # loads
    assert bits(again, RESULT) == bits(reference, RESULT)
    assert again.resumed_from_iter_ > 0


def test_a_fit_that_keeps_stopping(path: Path) -> None:
    shards = parts(DIGITS[:300], 4)
    reference = KMeans(K, random_state=0, engine=Serial()).fit(shards)
    for _ in range(1000):
        try:  # four replies describe the shards, four are an epoch
            fit = KMeans(K, random_state=0, store=path, engine=Stopping(4 + 9)).fit(shards)
            break
        except Stopped:
            pass
    assert bits(fit, RESULT) == bits(reference, RESULT)
    assert set(fit.history_["attempt"]) == set(range(1, 1 + len(fit.history_["attempt"]) // 2 + 1))


@pytest.mark.long
def test_a_killed_coordinator_and_killed_workers(path: Path, child: Callable[..., Any], tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", DIGITS)
    code = """
    import sys, numpy as np
    from pmstore.cluster import KMeans
    from tests.scale.estimators import Killing
    KMeans(10, random_state=0, store=sys.argv[1], name="fit", engine=Killing(200)).fit(np.load(sys.argv[2]))
    """
    coordinator = child(code, path, tmp_path / "X.npy")
    assert coordinator.process.wait() == -signal.SIGKILL
    reference = KMeans(10, random_state=0, engine=Serial()).fit(DIGITS)
    fit = KMeans(10, random_state=0, store=path, name="fit", engine=Mortal(2)).fit(DIGITS)
    assert 0 < fit.resumed_from_iter_ < len(reference.history_["iteration"])
    assert sum(fit.history_["lost"]) > 0
    assert bits(fit, RESULT) == bits(reference, RESULT)


class Mortal(Processes):
    """The first worker is killed with a question, after the 40th reply, until one is lost."""

    _replies = 0
    _has_lost = False

    def completed(self, timeout: float | None) -> Any:
        place = self._places[0]
        place.send()
        if self._replies >= 40 and not self._has_lost and place._is_there and place._has:
            os.kill(place._process.pid, signal.SIGKILL)
        messages = super().completed(timeout)
        self._replies += len(messages)
        self._has_lost |= any(isinstance(message, Lost) for message in messages)
        return messages


def test_a_generator_that_other_code_changed_is_refused(path: Path) -> None:
    """numpy would read outside of its buffer."""
    with pytest.raises(Stopped):
        KMeans(K, random_state=0, store=path, name="fit", engine=Stopping(3)).fit([BLOBS])
    with pmstore.open(path) as store:
        state = np.array(store["fit/rows"])
        state[624] = 1e6  # the place in the buffer
        store["fit/rows"] = state
    with pytest.raises(pmstore.ShardError, match="of its buffer"):
        KMeans(K, random_state=0, store=path, name="fit", engine=Serial()).fit([BLOBS])


def test_the_fit_is_recognized(path: Path) -> None:
    shards = parts(BLOBS)
    model = KMeans(3, store=path, name="fit", random_state=None, engine=Serial()).fit(shards)
    again = KMeans(3, store=path, name="fit", random_state=None, engine=Backwards()).fit(shards)
    assert bits(again, RESULT) == bits(model, RESULT)
    other = [*shards[:-1], shards[-1] + 1]
    with pytest.raises(pmstore.FingerprintMismatchError, match="shard 4: "):
        KMeans(3, store=path, name="fit", random_state=None, engine=Serial()).fit(other)
    with pytest.raises(pmstore.FingerprintMismatchError, match="parameter tol: "):
        KMeans(3, store=path, name="fit", tol=0.1, random_state=None, engine=Serial()).fit(shards)
    model.reset()
    KMeans(3, store=path, name="fit", engine=Serial()).fit(other)


def test_reset_forgets_the_fit_that_the_estimator_worked_on_last(path: Path) -> None:
    model = KMeans(3, store=path, random_state=0, engine=Stopping(8))
    with pytest.raises(ValueError, match="call fit first"):
        model.reset()
    for engine, done in ((Stopping(8), False), (Serial(), True)):
        model.engine = engine
        with contextlib.nullcontext() if done else pytest.raises(Stopped):
            model.fit(parts(BLOBS, 3))
        with pmstore.open(path, "r") as store:
            assert len(store) > 0
        model.reset()
        with pmstore.open(path, "r") as store:
            assert len(store) == 0
    assert model.resumed_from_iter_ == 0


# ---- predictions


def test_predictions_are_computed_when_asked_for(tmp_path: Path) -> None:
    for i, part in enumerate(parts(DIGITS, 3)):
        np.save(tmp_path / f"{i}.npy", part)
    files = [Shard(np.load, os.fspath(tmp_path / f"{i}.npy")) for i in range(3)]
    fit = KMeans(K, random_state=0, engine=Serial()).fit(files)
    labels, predicted, distances = fit.labels_, fit.predict(files), fit.transform(files)
    assert all(isinstance(lazy, LazyParts) and len(lazy) == 3 for lazy in (labels, predicted, distances))
    assert [len(part) for part in labels] == [599, 599, 599]
    assert np.array_equal(predicted[1], fit.predict(DIGITS[599:1198])) and predicted[0].dtype == np.int32
    assert (np.asarray(labels) == np.concatenate(list(predicted))).mean() > 0.999
    each = [fit.transform(part) for part in parts(DIGITS, 3)]  # BLAS may round those of all rows together differently
    assert np.array_equal(np.asarray(distances), np.concatenate(each)) and distances[-1].shape == (599, K)
    assert np.allclose(np.asarray(distances), fit.transform(DIGITS), rtol=1e-12)
    assert np.array_equal(np.asarray(distances[1:], "f4"), np.concatenate(each[1:]).astype("f4"))
    assert repr(labels) == "<LazyParts of 3 shards, by labels_of>"
    assert fit.score(files) == pytest.approx(fit.score(DIGITS), rel=1e-12)
    assert fit.score([*files, np.zeros((0, DIGITS.shape[1]))]) == fit.score(files)
    with pytest.raises(ValueError, match="takes no sample_weight"):
        fit.score(files, sample_weight=np.ones(len(DIGITS)))
    before = np.asarray(predicted)
    fit.fit([-DIGITS])
    assert np.array_equal(np.asarray(predicted), before)  # the model of that time
    assert isinstance(fit.predict([os.fspath(tmp_path / "0.npy")]), LazyParts)
    assert isinstance(fit.predict(parts(DIGITS)), LazyParts)
    assert isinstance(fit.predict(DIGITS[:3].tolist()), np.ndarray)
    (tmp_path / "0.npy").unlink()
    with pytest.raises(FileNotFoundError):
        labels[0]
    assert len(labels[1]) == 599


@pytest.mark.parametrize("dtypes", [("f8", "f4"), ("f4", "f8"), ("f4", "f2"), ("f2", "f4"), ("f4", "i4"), ("f4", "f4")])
def test_shards_of_two_dtypes(dtypes: tuple[str, str]) -> None:
    shards = [part.astype(dtype) for part, dtype in zip(parts(DIGITS, 2), dtypes, strict=True)]
    fit = KMeans(K, random_state=0, engine=Serial()).fit(shards)
    dtype = "f4" if dtypes == ("f4", "f4") else "f8"
    assert fit.cluster_centers_.dtype == dtype
    others = [*shards, DIGITS]  # and those that the fit has not seen
    same = [part.astype(dtype) for part in others]
    for predicted, alone, data in zip(fit.predict(others), others, same, strict=True):
        assert np.array_equal(predicted, SklearnKMeans.predict(fit, data))
        assert np.array_equal(predicted, fit.predict(alone))
    assert fit.score(others) == sum(float(SklearnKMeans.score(fit, data)) for data in same)


@pytest.mark.parametrize("engine", [Serial(), 1], ids=["serial", "processes"])
@pytest.mark.parametrize("loaded", [False, True], ids=["a path", "a shard"])
def test_labels_of_a_file_that_was_replaced(loaded: bool, engine: Any, tmp_path: Path) -> None:
    path, other = tmp_path / "x.npy", tmp_path / "other.npy"
    np.save(path, BLOBS)
    fit = KMeans(K, random_state=0, engine=engine).fit(Shard(np.load, os.fspath(path)) if loaded else path)
    labels = np.asarray(fit.labels_)
    for replaced in (BLOBS[:10], BLOBS + 1, BLOBS.astype("f4"), np.asfortranarray(BLOBS)):
        np.save(other, replaced)
        os.replace(other, path)
        with pytest.raises(
            pmstore.ShardError, match=r"shard 0, Shard\(.* is not what it was when the fit began"
        ) as told:
            np.asarray(fit.labels_)
        assert told.value.shard == 0
    np.save(path, BLOBS)
    assert len(labels) == len(BLOBS) and np.array_equal(fit.labels_, labels)


def test_labels_of_an_array_that_was_changed() -> None:
    shards = parts(BLOBS, 2)
    fit = KMeans(K, random_state=0, engine=Serial()).fit(shards)
    labels = np.asarray(fit.labels_)
    shards[1][0] += 1
    assert np.array_equal(fit.labels_[0], labels[: len(shards[0])])
    with pytest.raises(pmstore.ShardError, match=r"shard 1, .* is not what it was"):
        fit.labels_[1:][0]


def test_labels_of_an_array_are_an_array() -> None:
    fit = KMeans(K, random_state=0, engine=Serial())
    labels = fit.fit_predict(DIGITS)
    assert isinstance(labels, np.ndarray) and labels is fit.labels_ and labels.shape == (len(DIGITS),)
    assert (labels == fit.predict(DIGITS)).mean() > 0.999
    assert np.array_equal(KMeans(K, random_state=0, engine=Serial()).fit_transform(DIGITS), fit.transform(DIGITS))


def test_predictions_before_a_fit() -> None:
    with pytest.raises(NotFittedError):
        KMeans(engine=2).predict(parts(BLOBS))
    with pytest.raises(NotFittedError):
        KMeans(engine=2).score(parts(BLOBS))


def test_dask_arrays() -> None:
    array = pytest.importorskip("dask.array")
    X = array.from_array(DIGITS, chunks=(500, 20))
    fit = KMeans(K, random_state=0, engine=Serial()).fit(X)
    same = KMeans(K, random_state=0, engine=Serial()).fit([DIGITS[i : i + 500] for i in range(0, 1797, 500)])
    assert bits(fit, RESULT) == bits(same, RESULT)
    labels, predicted, distances = fit.labels_, fit.predict(X), fit.transform(X)
    assert labels.chunks == predicted.chunks == ((500, 500, 500, 297),) and labels.dtype == predicted.dtype == np.int32
    assert distances.shape == (1797, K) and distances.dtype == np.float64
    assert np.array_equal(predicted.compute(scheduler="synchronous"), fit.predict(DIGITS))
    each = [fit.transform(DIGITS[i : i + 500]) for i in range(0, 1797, 500)]
    assert np.array_equal(distances.compute(scheduler="synchronous"), np.concatenate(each))
    assert not hasattr(pickle.loads(pickle.dumps(fit)), "labels_")
    other = X.map_blocks(lambda block: block.astype("f4"), dtype="f8")  # the blocks are not of the dtype that it tells
    for data in (other, X.astype("f4")):
        assert np.array_equal(fit.predict(data).compute(scheduler="synchronous"), fit.predict(DIGITS))
        assert fit.score(data) == fit.score(X)
    single = KMeans(K, random_state=0, engine=Serial()).fit(other)
    assert single.cluster_centers_.dtype == np.float32
    predicted = single.predict(other).compute(scheduler="synchronous")
    assert np.array_equal(predicted, single.predict(DIGITS.astype("f4")))
    with pytest.raises(ValueError, match="two axes, not 1"):
        fit.predict(X[:, 0])
    some = X[X[:, 2] > 5]  # chunks of unknown size
    assert np.array_equal(fit.predict(some).compute(scheduler="synchronous"), fit.predict(some.compute()))


# ---- the parameter


def test_the_engine_is_a_parameter() -> None:
    engine = Serial()
    model = KMeans(3, engine=engine, random_state=0)
    assert model.get_params()["engine"] is engine and "engine=" in repr(model)
    for copied in (clone(model), copy.copy(model), copy.deepcopy(model)):
        assert copied.engine is engine and copied.get_params() == model.get_params()
    assert pickle.loads(pickle.dumps(model)).engine is None
    assert pickle.loads(pickle.dumps(KMeans(engine=2))).engine == 2
    model.fit(parts(BLOBS))
    loaded = pickle.loads(pickle.dumps(model))
    assert not hasattr(loaded, "labels_") and np.array_equal(loaded.predict(BLOBS), model.predict(BLOBS))
    assert len(pickle.dumps(model)) < BLOBS.nbytes / 2


def test_shards_have_no_names_of_features() -> None:
    """Those of an earlier fit to a frame are forgotten."""
    model = KMeans(3, random_state=0).fit(BLOBS)
    model.feature_names_in_ = np.array(list("abcde"), object)
    model.set_params(engine=Serial()).fit(parts(BLOBS))
    assert not hasattr(model, "feature_names_in_") and model.n_features_in_ == 5


@pytest.mark.parametrize("engine", [0, -1, "two", 1.5])
def test_other_engines_are_refused(engine: Any) -> None:
    with pytest.raises(InvalidParameterError, match="engine"):
        KMeans(engine=engine).fit(BLOBS)


# ---- bad input


def refused(error: type[Exception], match: str, X: Any, *, weights: Any = None, **given: Any) -> None:
    with pytest.raises(error, match=match), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        KMeans(**{"n_clusters": 3, "engine": Serial(), **given}).fit(X, sample_weight=weights)


def test_what_an_engine_does_not_do() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    refused(ValueError, "sample_weight", BLOBS, weights=np.ones(500))
    refused(ValueError, "elkan", BLOBS, algorithm="elkan")
    refused(ValueError, "callable", BLOBS, init=lambda X, k, random_state: X[:k])
    refused(TypeError, "sparse data with engine=None", sparse.csr_matrix(BLOBS))
    refused(pmstore.ShardError, "dense", [Shard(sparse.csr_matrix, BLOBS)])
    refused(TypeError, "shards are made of", {"X": BLOBS})
    refused(ValueError, "give an engine", BLOBS, init="k-means||", engine=None)
    with pytest.raises(TypeError, match="engine"):
        pmstore.cluster.MiniBatchKMeans(engine=2)  # type: ignore[call-arg]


def test_shards_that_do_not_fit() -> None:
    bad = BLOBS[:5].copy()
    bad[3, 1] = np.nan
    refused(pmstore.ShardError, "shard 1 of 2, .* contains NaN", [BLOBS, bad])
    bad[3, 1] = np.inf
    refused(pmstore.ShardError, "shard 1 of 2, .* contains infinity", [BLOBS, bad])
    refused(ValueError, "shard 1 of 2, .* has 3 features, and shard 0 5", [BLOBS, BLOBS[:, :3]])
    refused(ValueError, "shard 1 of 3, .* is empty", [BLOBS, BLOBS[:0], BLOBS])
    refused(ValueError, "shard 0 of 1, .* of shape", [BLOBS[0]])
    refused(ValueError, "shard 0 of 1, .* is no array", [Shard(dict, X=BLOBS)])
    refused(ValueError, "real numbers", [BLOBS.astype(complex)])
    refused(ValueError, "no features", [BLOBS[:, :0]])
    refused(ValueError, "n_samples=500 should be >= n_clusters=501", parts(BLOBS), n_clusters=501)
    refused(ValueError, "shape of the initial centers", parts(BLOBS), init=BLOBS[:2])
    refused(pmstore.ShardError, "can't be loaded", [BLOBS, Shard(np.load, "nowhere.npy")])


def test_an_explicit_start_has_one_run() -> None:
    with pytest.warns(RuntimeWarning, match="only one init"):
        KMeans(2, init=BLOBS[:2], n_init=3, engine=Serial()).fit(BLOBS)
