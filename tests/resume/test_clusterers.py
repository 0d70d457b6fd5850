"""KMeans by both algorithms and MiniBatchKMeans: killed at every commit; MiniBatchKMeans as scikit-learn's."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

theirs = pytest.importorskip("sklearn.cluster")

import scipy.sparse as sparse  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

import pmstore  # noqa: E402
import pmstore.cluster  # noqa: E402
from pmstore.cluster import MiniBatchKMeans, _sklearn  # noqa: E402
from pmstore.cluster._elkan import Elkan  # noqa: E402
from pmstore.cluster._lloyd import Lloyd  # noqa: E402
from pmstore.cluster._mini_batch import MiniBatchFit  # noqa: E402
from tests.conftest import LONGER  # noqa: E402
from tests.support.resuming import interrupted  # noqa: E402
from tests.support.template import python  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

DIGITS = load_digits().data
WEIGHTS = np.random.RandomState(2).uniform(0.1, 3.0, 300)


def assert_same(fit: Any, reference: Any) -> None:
    """All fitted attributes are equal bit for bit, and of the same types."""
    names = [name for name in vars(reference) if name.endswith("_") or name in ("_counts", "_ewa_inertia")]
    assert "cluster_centers_" in names
    for name in names:
        ours, expected = getattr(fit, name), getattr(reference, name)
        assert type(ours) is type(expected), name
        assert np.asarray(ours).dtype == np.asarray(expected).dtype, name
        assert np.asarray(ours).tobytes() == np.asarray(expected).tobytes(), name


# ---- kills

KILLS = """
import json, os, signal, sys
import pmstore.cluster, scipy.sparse, threadpoolctl
from sklearn.datasets import load_digits
from pmstore._core import Core

commit = Core.commit
digits = load_digits().data

def commit_and_die(core):
    before = core.sequence
    commit(core)
    if core.sequence != before:
        os.kill(os.getpid(), signal.SIGKILL)

for case in map(json.loads, sys.stdin):
    lives, places = 0, []
    while True:
        pid = os.fork()  # no thread but this one has run here
        if not pid:
            X = digits[: case["rows"]].astype(case["dtype"])
            X = scipy.sparse.csr_matrix(X) if case["sparse"] else X
            Core.commit = commit_and_die
            with threadpoolctl.threadpool_limits(case["threads"]):
                estimator = getattr(pmstore.cluster, case["class"])
                estimator(**case["parameters"], store=case["path"], name="fit").fit(X)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status):
            break
        with pmstore.open(case["path"]) as store:
            places.append((int(store["fit/progress"]["run"]), int(store["fit/progress"]["iteration"])))
    print(json.dumps({"status": status, "places": places}), flush=True)
"""
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "lloyd": ("KMeans", {"n_clusters": 4, "n_init": 2, "max_iter": 2, "random_state": 3}),
    "elkan": ("KMeans", {"n_clusters": 4, "n_init": 2, "max_iter": 2, "random_state": 3, "algorithm": "elkan"}),
    "mini batch": (
        "MiniBatchKMeans",
        {"n_clusters": 4, "n_init": 2, "max_iter": 1, "random_state": 3, "batch_size": 75},
    ),
}
BRIEFLY = (("lloyd", "dense", 1), ("elkan", "csr", 2), ("mini batch", "dense", 2))


@pytest.mark.long
@pytest.mark.longer
def test_killed_after_every_commit_they_are_scikit_learns(path: Path) -> None:
    """One process after the other does one commit's worth of work, until the last one finds nothing left to do."""
    cases = [
        {
            "class": kind,
            "parameters": parameters,
            "sparse": form == "csr",
            "dtype": "f4" if threads == 2 else "f8",
            "threads": threads,
            "rows": 300,  # more than a chunk of the kernels, so that two threads share the work
            "path": str(path.with_name(f"{algorithm} {form} {threads}.pm")),
        }
        for algorithm, (kind, parameters) in ALGORITHMS.items()
        for form in ("dense", "csr")
        for threads in (1, 2)
        if LONGER > 1 or (algorithm, form, threads) in BRIEFLY
    ]
    lines = "\n".join(map(json.dumps, cases))
    done = python("-c", KILLS, text=lines)
    assert not done.returncode, done.stderr
    for case, outcome in zip(cases, map(json.loads, done.stdout.splitlines()), strict=True):
        assert outcome["status"] == 0
        ends = (
            [[run, i] for run in (0, 1) for i in range(3)] if case["class"] == "KMeans" else [[0, i] for i in range(5)]
        )
        assert outcome["places"] == [*ends, ends[-1]]  # the last: finished
        X: Any = DIGITS[: case["rows"]].astype(case["dtype"])
        X = sparse.csr_matrix(X) if case["sparse"] else X
        with threadpool_limits(case["threads"]):
            reference = getattr(theirs, case["class"])(**case["parameters"]).fit(X)
            fit = getattr(pmstore.cluster, case["class"])(**case["parameters"], store=case["path"], name="fit").fit(X)
        assert (fit.resumed_from_run_, fit.resumed_from_iter_) == tuple(ends[-1])
        assert_same(fit, reference)


def test_the_table_of_the_documentation_is_what_is_stored() -> None:
    path = Path(__file__).resolve().parent.parent.parent / "docs" / "estimators.md"
    if not path.is_file():
        pytest.skip("no docs/")
    rows = path.read_text().partition("<!-- state -->")[2].partition("<!-- /state -->")[0].strip().splitlines()
    said = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in (rows[0], *rows[2:])]
    columns = {name: dict(zip((row[0] for row in said[1:]), cells)) for name, *cells in zip(*said) if name != "field"}
    for name, algorithm in (("KMeans, lloyd", Lloyd), ("KMeans, elkan", Elkan), ("MiniBatchKMeans", MiniBatchFit)):
        estimator: Any = (MiniBatchKMeans if algorithm is MiniBatchFit else pmstore.cluster.KMeans)(3)
        estimator._n_init = estimator._n_threads = 1
        estimator._batch_size = 5
        options: dict[str, Any] = (
            {"weighted": False} if algorithm is MiniBatchFit else {"weighted": False, "in_place": False}
        )
        table: Any = algorithm(estimator, DIGITS[:9], np.ones(9), "random", **options)
        fields = {
            field.name: "generator" if field.generator else field.role
            for field in table.fields()
            if field.shape or field.generator
        }
        assert columns[name] == {row[0]: fields.pop(row[0], "–") for row in said[1:]} | {
            "progress": "one record of all numbers"
        }
        assert not fields


# ---- MiniBatchKMeans

PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "until the centres rest": {"tol": 1e-3, "n_init": 3},
    "no labels": {"compute_labels": False, "n_init": 1},
    "random": {"init": "random", "n_init": 2, "max_no_improvement": None, "max_iter": 4},
    "array": {"init": DIGITS[:8].copy(), "n_init": 1, "verbose": 1},
    "reassigning": {"reassignment_ratio": 0.5, "init_size": 30, "batch_size": 37, "verbose": 1},
}


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("kind", ["float64", "float32", "csr"])
@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_mini_batches_are_scikit_learns(
    parameters: dict[str, Any], kind: str, weights: Any, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    X: Any = DIGITS[:300].astype("f4" if kind == "float32" else "f8")
    X = sparse.csr_matrix(X) if kind == "csr" else X
    parameters = {"n_clusters": 8, "batch_size": 50, "random_state": 3, **parameters}
    reference = theirs.MiniBatchKMeans(**parameters).fit(X, sample_weight=weights)
    printed = capsys.readouterr().out
    fit = MiniBatchKMeans(**parameters, store=path, commit_every=3).fit(X, sample_weight=weights)
    assert capsys.readouterr().out == printed and bool(printed) == ("verbose" in parameters)
    again = MiniBatchKMeans(**parameters, store=path).fit(X, sample_weight=weights)
    for one in (fit, again):
        assert_same(one, reference)
        assert (one.predict(X) == reference.predict(X)).all()
    assert (fit.resumed_from_iter_, again.resumed_from_iter_) == (0, reference.n_steps_)
    reference.partial_fit(X[:50])
    assert_same(again.partial_fit(X[:50]), reference)


def test_mini_batches_without_a_store_are_scikit_learns() -> None:
    parameters = {"n_clusters": 8, "batch_size": 50, "random_state": 3}
    reference = theirs.MiniBatchKMeans(**parameters).fit(DIGITS[:300], sample_weight=WEIGHTS)
    fit = MiniBatchKMeans(**parameters, store=None).fit(DIGITS[:300], sample_weight=WEIGHTS)
    assert_same(fit, reference)


def test_mini_batches_go_on_with_the_callers_generator(path: Path) -> None:
    one, other = np.random.RandomState(7), np.random.RandomState(7)
    parameters = {"n_clusters": 4, "batch_size": 64}
    reference = theirs.MiniBatchKMeans(**parameters, random_state=one).fit(DIGITS)
    with interrupted(MiniBatchFit, 3):
        MiniBatchKMeans(**parameters, random_state=np.random.RandomState(7), store=path, name="mine").fit(DIGITS)
    fit = MiniBatchKMeans(**parameters, random_state=other, store=path, name="mine").fit(DIGITS)
    assert fit.resumed_from_iter_ == 3
    assert_same(fit, reference)
    assert one.uniform() == other.uniform()
    for attribute in (fit.cluster_centers_, fit.labels_, fit._counts):
        attribute[...] = 0  # copies
    assert pickle.loads(pickle.dumps(fit)).n_steps_ == fit.n_steps_
    with pytest.raises(pmstore.FingerprintMismatchError, match="parameter batch_size: 64 ≠ 65"):
        MiniBatchKMeans(4, batch_size=65, random_state=np.random.RandomState(7), store=path, name="mine").fit(DIGITS)
    with pytest.raises(pmstore.FingerprintMismatchError, match="estimator: MiniBatchKMeans"):
        pmstore.cluster.KMeans(4, store=path, name="mine").fit(DIGITS)


@pytest.mark.parametrize("name", ["mine", None])
def test_an_interrupted_fit_leaves_the_callers_generator_as_it_was(name: str | None, path: Path) -> None:
    """The same model is the same fit again."""
    reference = theirs.MiniBatchKMeans(4, batch_size=64, random_state=np.random.RandomState(7)).fit(DIGITS)
    model = MiniBatchKMeans(4, batch_size=64, random_state=np.random.RandomState(7), store=path, name=name)
    for steps in (2, 3):  # starts, resumes
        with interrupted(MiniBatchFit, steps):
            model.fit(DIGITS)
    assert model.fit(DIGITS).resumed_from_iter_ == 5
    assert_same(model, reference)
    assert model.random_state.uniform() == reference.random_state.uniform()


@pytest.mark.parametrize("missing", ["mini_batch_step", "SklearnMiniBatchKMeans"])
def test_a_scikit_learn_of_other_parts_is_refused(missing: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sklearn, missing, None)
    with pytest.raises(NotImplementedError, match="scikit-learn .* lacks .* store=None"):
        MiniBatchKMeans(4, store=path).fit(DIGITS)
    assert not path.exists()


def test_bad_data_and_parameters_leave_no_trace(path: Path) -> None:
    bad: list[tuple[dict[str, Any], Any, str]] = [
        ({}, DIGITS * np.nan, "NaN"),
        ({}, DIGITS[:3], "n_samples=3 should be >= n_clusters=4"),
        ({}, DIGITS[:0], "0 sample"),
        ({"commit_every": 0}, DIGITS, "commit_every"),
        ({"store": 3}, DIGITS, "store"),
    ]
    for parameters, X, message in bad:
        for estimator in (MiniBatchKMeans, pmstore.cluster.KMeans):
            with pytest.raises(ValueError, match=message):
                estimator(**{"n_clusters": 4, "store": path, **parameters}).fit(X)
    for estimator in (MiniBatchKMeans, pmstore.cluster.KMeans):
        for store in (None, path):
            with pytest.raises(TypeError, match="commit_every"):
                estimator(4, commit_every=True, store=store).fit(DIGITS)
    assert not path.exists()
