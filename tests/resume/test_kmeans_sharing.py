"""One store for many fits: threads share it, processes take turns, and no two wait for each other."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn")

from joblib import Parallel, delayed, parallel_config  # noqa: E402
from sklearn.cluster import KMeans as SklearnKMeans  # noqa: E402
from sklearn.datasets import make_blobs  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from threadpoolctl import threadpool_info, threadpool_limits  # noqa: E402

import pmstore  # noqa: E402
from pmstore._resume import blas as _blas  # noqa: E402
from pmstore._resume import fit_group  # noqa: E402
from pmstore._resume import sklearn as _sklearn  # noqa: E402
from pmstore._store import held  # noqa: E402
from pmstore.cluster import KMeans  # noqa: E402
from pmstore.cluster._lloyd import Lloyd  # noqa: E402
from tests.conftest import run_in_fork  # noqa: E402
from tests.store.test_transactions import in_thread  # noqa: E402
from tests.support.interrupting import signalled_at  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

BLOBS, _ = make_blobs(3000, 8, centers=12, cluster_std=3.0, random_state=1)
GRID = {"n_clusters": [3, 4, 5, 6]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.pm"


def sequence(path: Path) -> int:
    with pmstore.open(path, "r") as store:
        return store.sequence


def waiting_init(*events: Callable[[], Any]) -> Callable[..., Any]:
    """An `init` that does something the first time, while the fit has its store open."""
    left = list(events)

    def init(X: Any, k: int, random_state: np.random.RandomState) -> Any:
        while left:
            left.pop(0)()
        return X[random_state.permutation(len(X))[:k]]

    return init


# ---- threads


def test_threads_that_fit_with_one_path_share_the_store(path: Path) -> None:
    """All are inside fit at the same time: none goes on before all have the store open."""
    everybody = threading.Barrier(3, timeout=60)
    fits: dict[int, Any] = {}

    def fit(k: int, where: Any) -> None:
        init = waiting_init(everybody.wait)
        with threadpool_limits(1, user_api="openmp"):  # which is the thread's own
            fits[k] = KMeans(k, init=init, n_init=3, random_state=0, store=where).fit(BLOBS)

    (path.parent / "link.pm").symlink_to(path)
    threads = [
        threading.Thread(target=fit, args=(k, where))
        for k, where in ((3, path), (4, os.path.relpath(path)), (5, path.parent / "link.pm"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in (3, 4, 5):
        reference = SklearnKMeans(k, init=waiting_init(), n_init=3, random_state=0).fit(BLOBS)
        assert fits[k].cluster_centers_.tobytes() == reference.cluster_centers_.tobytes()
    with pmstore.open(path, "r", exclusive=True) as store:  # nobody has it open any more
        assert sum(name.endswith("/finished") for name in store) == 3


def test_a_fit_that_fails_leaves_the_others_the_store(path: Path) -> None:
    both, failed = threading.Barrier(2, timeout=60), threading.Event()
    fits: list[Any] = []

    def fit() -> None:
        init = waiting_init(both.wait, lambda: failed.wait(60))
        fits.append(KMeans(4, init=init, n_init=1, random_state=0, store=path).fit(BLOBS))

    def fail() -> None:
        raise ZeroDivisionError

    thread = threading.Thread(target=fit)
    thread.start()
    with pytest.raises(ZeroDivisionError):
        KMeans(3, init=waiting_init(both.wait, fail), n_init=1, store=path).fit(BLOBS)
    failed.set()
    thread.join()
    assert len(fits) == 1
    with pmstore.open(path) as store:
        assert sum(name.endswith("/finished") for name in store) == 1


@pytest.mark.parametrize("forget", ["prune", "reset"])
def test_a_fit_is_not_forgotten_while_it_is_loaded(forget: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = KMeans(3, random_state=0, store=path).fit(BLOBS)
    forgetting = threading.Thread(target=estimator.reset if forget == "reset" else lambda: pmstore.prune(path))
    load = Lloyd._load
    asked = threading.Event()
    worked_on = fit_group.FitGroup.worked_on

    def load_when_asked_to_forget(self: Lloyd, fit_group: Any, fields: Any) -> Any:
        forgetting.start()
        assert asked.wait(60)
        return load(self, fit_group, fields)

    def ask(self: Any) -> Any:
        if threading.current_thread() is forgetting:
            asked.set()
        return worked_on(self)

    monkeypatch.setattr(Lloyd, "_load", load_when_asked_to_forget)
    monkeypatch.setattr(fit_group.FitGroup, "worked_on", ask)
    again = KMeans(3, random_state=0, store=path).fit(BLOBS)
    forgetting.join()
    assert again.labels_.tobytes() == estimator.labels_.tobytes()
    with pmstore.open(path) as store:
        assert len(store) == 0


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=[pytest.mark.long, pytest.mark.slow])])
def test_grid_search_in_parallel(backend: str, path: Path) -> None:
    estimator = KMeans(n_init=10, random_state=0, store=path)
    reference = GridSearchCV(SklearnKMeans(n_init=10, random_state=0), GRID, cv=3).fit(BLOBS)
    done = []
    for _ in range(2):
        with parallel_config(backend):
            search = GridSearchCV(estimator, GRID, cv=3, n_jobs=2, error_score="raise").fit(BLOBS)
        assert search.best_params_ == reference.best_params_
        assert search.best_estimator_.labels_.tobytes() == reference.best_estimator_.labels_.tobytes()
        np.testing.assert_allclose(search.cv_results_["mean_test_score"], reference.cv_results_["mean_test_score"])
        done.append(sequence(path))
    assert done[0] == done[1], "each fit finds its own"


def blas(libraries: Any) -> set[int]:
    return {library["num_threads"] for library in libraries if library["user_api"] == "blas"}


def test_the_limit_of_blas_ends_with_the_last_of_several_threads() -> None:
    with threadpool_limits(2):
        before = blas(threadpool_info())
        one, other = _sklearn.one_blas_thread(), _sklearn.one_blas_thread()
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)
        assert blas(threadpool_info()) == {1}
        assert blas(_sklearn.libraries()) == before  # a fingerprint doesn't depend on what other threads do
        other.__exit__(None, None, None)
        assert blas(threadpool_info()) == blas(_sklearn.libraries()) == before


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("by", ["signal", "error"])
def test_an_interrupt_leaves_no_limit_of_blas(by: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes before or after the threads are limited, or before or after they are that no longer."""
    limit, places = _blas._limit, 0

    def interrupted() -> None:
        nonlocal places
        for work in (limit, lambda: None):
            if places == at:
                places += 1
                signal.raise_signal(signal.SIGINT) if by == "signal" else signal.default_int_handler(0, None)
            places += 1
            work()

    with threadpool_limits(2):
        monkeypatch.setattr(_blas, "_limit", interrupted)
        with pytest.raises(KeyboardInterrupt), _sklearn.one_blas_thread():
            pass
        assert blas(threadpool_info()) == blas(_sklearn.libraries()) == {2}


# ---- processes

FIT = """
import logging, sys
import numpy as np
from sklearn.datasets import make_blobs
from threadpoolctl import threadpool_limits
from pmstore._resume import fit_group
from pmstore._store import held
from pmstore.cluster import KMeans

path, clusters, pause = sys.argv[1], int(sys.argv[2]), sys.argv[3]
X, _ = make_blobs(3000, 8, centers=12, cluster_std=3.0, random_state=1)
said = lambda *words: print(*words, flush=True)

class Say(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.INFO:
            said(record.getMessage())

logging.getLogger("pmstore").addHandler(Say())
logging.getLogger("pmstore").setLevel(logging.INFO)

def init(X, k, random_state):
    if pause == "pause":
        said("inside")
        input()
    return X[:k]

if pause == "look":
    look = held.is_leased
    fit_group._BETWEEN_LOOKS, fit_group._LOOKS = 0.01, 3
    def tell(path):
        found = look(path)
        said("leased" if found else "not leased")
        return found
    held.is_leased = tell
with threadpool_limits(1):
    fit = KMeans(clusters, init=init, n_init=1, store=path).fit(X)
said("done", fit.n_iter_)
"""


def test_processes_take_turns(path: Path, child: Callable[..., Any]) -> None:
    """The second says whom it waits for, and goes on when the first has finished."""
    first = child(FIT, path, 3, "pause")
    assert first.line() == "inside"
    second = child(FIT, path, 4, "")
    assert second.line() == f"waiting for process {first.process.pid}, which has the store {path} open"
    first.go()
    assert first.end().startswith("done") and second.end().startswith("done")
    with pmstore.open(path) as store:
        assert sum(name.endswith("/finished") for name in store) == 2


def test_a_process_that_is_killed_lets_go(path: Path, child: Callable[..., Any]) -> None:
    first = child(FIT, path, 3, "pause")
    assert first.line() == "inside"
    second = child(FIT, path, 4, "")
    assert second.line().startswith("waiting for process")
    first.process.kill()
    assert second.end().startswith("done")


def test_a_parent_that_fits_is_waited_for(path: Path, child: Callable[..., Any]) -> None:
    inside, go = threading.Event(), threading.Event()
    init = waiting_init(inside.set, lambda: go.wait(60))
    thread = threading.Thread(target=lambda: KMeans(3, init=init, n_init=1, store=path).fit(BLOBS))
    thread.start()
    try:
        assert inside.wait(60)
        waiting = child(FIT, path, 4, "look")
        lines = [waiting.line() for _ in range(8)]  # more than the looks that it takes to give up
        assert lines.count("leased") == 7 and f"waiting for process {os.getpid()}" in lines[1]
    finally:
        go.set()
        thread.join()
    assert "done" in waiting.end()


def test_a_fit_is_leased_until_its_store_is_closed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that waits gives up where there is no lease, and closing can take long."""
    drop = pmstore.Store._drop
    leased = []

    def watched(store: pmstore.Store) -> None:
        leased.append(held.is_leased(store.path))
        drop(store)

    monkeypatch.setattr(pmstore.Store, "_drop", watched)
    KMeans(3, n_init=1, store=path).fit(BLOBS)
    assert leased == [True] and not held.is_leased(str(path))


def test_a_store_is_not_leased_for_a_fork(path: Path) -> None:
    """A child that waits would not give up. Constant arrays that are alive at a fork need a lock of their own."""
    with pmstore.open(path) as store:
        x = store.create_array("x", 1000, fill_value=1.0, writeable=False)
        store.commit()
        run_in_fork(x.sum)
        assert not held.is_leased(store.path)
        with store._leased():
            assert held.is_leased(store.path)
        assert not held.is_leased(store.path)


def test_a_parent_that_has_the_store_open_is_not_waited_for(path: Path, child: Callable[..., Any]) -> None:
    with pmstore.open(path):
        waiting = child(FIT, path, 4, "look")
        out, error = waiting.process.communicate(timeout=60)
    assert waiting.process.returncode == 1
    last = error.splitlines()[-1]
    assert "StoreLockedError" in last and f"process {os.getpid()}" in last
    assert "pass the path instead of the open store to estimators, or use n_jobs=1 or threads" in last
    assert out.count("not leased") == 3


def fit_elsewhere(estimator: Any) -> Any:
    return estimator.fit(BLOBS)


@pytest.mark.long
@pytest.mark.slow
def test_an_open_store_given_to_other_processes_is_refused(path: Path) -> None:
    with pmstore.open(path) as store:
        with pytest.raises(pmstore.StoreLockedError, match="pass the path instead of the open store"):
            Parallel(n_jobs=2, backend="loky")(delayed(fit_elsewhere)(KMeans(k, store=store)) for k in (2, 3))
        fits = Parallel(n_jobs=2, backend="threading")(delayed(fit_elsewhere)(KMeans(k, store=store)) for k in (2, 3))
        assert len(fits) == 2


def test_who_has_it_open_for_something_else_is_warned_of(
    path: Path, child: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import pmstore, sys; s = pmstore.open(sys.argv[1]); print('open', flush=True); input(); s.close()"
    other = child(code, path)
    assert other.line() == "open"
    monkeypatch.setattr(fit_group, "_BETWEEN_LOOKS", 0.01)

    class Free(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.WARNING:
                other.go()

    logger, handler = logging.getLogger("pmstore"), Free()
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "pmstore"):
            KMeans(3, store=path).fit(BLOBS)
    finally:
        logger.removeHandler(handler)
    waited = [record for record in caplog.records if "waiting" in record.getMessage()]
    assert [record.levelname for record in waited] == ["INFO", "WARNING"]
    assert f"process {other.process.pid}" in waited[1].getMessage()


def test_a_path_that_this_process_has_open(path: Path) -> None:
    """This happens in a notebook. A thread that waits for a fit of another process waits as long as the fit takes."""
    with pmstore.open(path, durability="async", max_size=1 << 24) as store:
        store["mine"] = 1
        fit = KMeans(3, random_state=0, store=path, name="fit").fit(BLOBS)
        assert not store.closed and store["fit/finished"] and store["mine"] == 1 and not held.is_leased(path)
        again = KMeans(3, random_state=0, store=store, name="fit").fit(BLOBS)
        assert again.resumed_from_iter_ and again.cluster_centers_.tobytes() == fit.cluster_centers_.tobytes()
        with store.transaction():
            store["mine"] = 2
            with pytest.raises(pmstore.TransactionError, match="inside a transaction"):
                KMeans(4, store=path).fit(BLOBS)
        assert fit.reset() is fit and len(store.group("fit")) == 0 and store["mine"] == 2
    with (
        pmstore.open(path, "r", exclusive=True),
        pytest.raises(pmstore.StoreLockedError, match="first, or pass that open store"),
    ):
        KMeans(3, store=path).fit(BLOBS)


def test_a_fork_shares_nothing(path: Path) -> None:
    with fit_group.opened(path, "this commits") as store:
        store["x"] = 1
        pid = os.fork()
        if not pid:
            os._exit(0 if store.mode == "r" else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert held.is_leased(path)
    pmstore.open(path).close()


# ---- what else may be in the way


BROKEN = {
    "progress": None,
    "progress of another type": 7,
    "progress of another shape": np.zeros(2),
    "random_state": None,
    "best/centers": np.zeros((2, 2)),
    "best/labels": np.zeros(3),
    "centers/1": None,
    "mean": "no array",
}


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("case", BROKEN)
def test_a_fit_group_that_somebody_changed(
    case: str, finished: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, value = case.partition(" ")[0], BROKEN[case]
    if finished and part in ("centers/1", "mean"):
        return
    estimator = KMeans(3, n_init=2, random_state=0, store=path, name="mine")
    if finished:
        estimator.fit(BLOBS)
    else:
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr("pmstore.cluster._lloyd.Lloyd.step", lambda _: 1 / 0)
            estimator.fit(BLOBS)
    with pmstore.open(path) as store:
        del store[f"mine/{part}"]
        if value is not None:
            store[f"mine/{part}"] = value
    with pytest.raises(pmstore.FingerprintMismatchError, match=rf"the fit 'mine' in .*'{part}'.*reset\(\)") as caught:
        estimator.fit(BLOBS)
    assert ("is missing" in str(caught.value)) == (value is None)
    assert estimator.reset().fit(BLOBS).resumed_from_iter_ == 0


def test_reset_and_prune_say_why_not_inside_a_transaction(path: Path) -> None:
    with pmstore.open(path) as store:
        estimator = KMeans(3, random_state=0, store=store).fit(BLOBS)
        with store.transaction():
            with pytest.raises(pmstore.TransactionError, match=r"reset\(\) commits and can't do so inside"):
                estimator.reset()
            with pytest.raises(pmstore.TransactionError, match=r"prune\(\) commits and can't do so inside"):
                pmstore.prune(store)
            with pytest.raises(pmstore.TransactionError, match=r"fit\(\) commits after every iteration"):
                estimator.fit(BLOBS)
        assert len(pmstore.prune(store)) == 1


def test_without_scikit_learn(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError('No module named sklearn', name='sklearn')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pmstore.cluster"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith(
        "Error: pmstore.cluster needs scikit-learn: pip install 'pmstore[sklearn]'"
    )


def test_a_kept_interrupt_keeps_no_fit(tmp_path: Path) -> None:
    """A notebook keeps the traceback of the last error, which keeps the frames, and generators in them."""
    kept: list[BaseException] = []

    def work() -> None:
        try:
            with fit_group.FitGroup(store, "fit").worked_on():
                pass
        except KeyboardInterrupt as error:
            kept.append(error)
            raise

    def others() -> None:
        with fit_group.FitGroup(store, "fit").worked_on():
            pass

    with pmstore.open(tmp_path / "store.pm") as store:
        event_number = 1
        while signalled_at(event_number, work):
            event_number += 1
            thread, _ = in_thread(others)
            thread.join(10)
            assert not thread.is_alive()
    assert kept
