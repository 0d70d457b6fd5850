"""pmstore.testing: workloads are recorded, crashed, evaluated, and what is found is told in the user's terms."""

from __future__ import annotations

import fcntl
import gc
import inspect
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.testing import Crash, CrashExplorer, CrashFailure, CrashReport, CrashTestError, crash_test, load_failure
from pmstore.testing import _explorer as module
from pmstore.testing._base.progress import terminal
from pmstore.testing._base.scratch import Scratch, sweep
from pmstore.testing._store.recording import Recorder
from tests.conftest import Medium


@pytest.fixture
def explorer(tmp_path: Path) -> Iterator[CrashExplorer]:
    with CrashExplorer("example", directory=tmp_path / "failures") as explorer:
        yield explorer


def conserved(store: pmstore.Store) -> None:
    assert store.get("a", 100) + store.get("b", 0) == 100, "money is lost"


def transfer(store: pmstore.Store) -> None:
    with store.transaction():
        store["a"] = 70
        store["b"] = 30


def careless(store: pmstore.Store) -> None:
    store["a"] = 70
    store.commit()
    store["b"] = 30
    store.commit()


# ---- what holds


def test_a_sound_workload_passes(explorer: CrashExplorer) -> None:
    report = explorer.run(transfer, check=conserved, budget=300)
    assert set(report.media) == {"memory", "file"}
    assert report.commits == 1
    assert report.evaluated >= report.distinct > 0
    assert sum(report.by_kind.values()) == report.evaluated
    assert not list(Path(explorer._directory or "").glob("*.crash"))


def test_without_a_check_recovery_is_evaluated(explorer: CrashExplorer) -> None:
    assert "no check was given" in str(explorer.run(careless, budget=50))


def test_the_same_seed_gives_the_same_states(explorer: CrashExplorer) -> None:
    seen: list[list[tuple[int, int]]] = [[], []]

    def run(into: list[tuple[int, int]]) -> CrashReport:
        def check(store: pmstore.Store, crash: Crash) -> None:
            into.append((crash.acknowledged, crash.sequence))

        return explorer.run(careless, check=check, budget=100, seed=5, media="memory")

    assert run(seen[0]).by_kind == run(seen[1]).by_kind
    assert seen[0] == seen[1]


def test_a_check_may_ask_about_the_crash(explorer: CrashExplorer) -> None:
    crashes: list[Crash] = []

    def check(store: pmstore.Store, crash: Crash) -> None:
        assert crash.acknowledged <= store.sequence == crash.sequence <= crash.started
        crashes.append(crash)

    explorer.run(careless, check=check, budget=200, media="file")
    assert {crash.sequence for crash in crashes} == {0, 1, 2}
    assert "after commit 1 was acknowledged" in {crash.when for crash in crashes}
    assert "after commit 1 began, before it was acknowledged" in {crash.when for crash in crashes}


def test_a_check_may_write_and_close(explorer: CrashExplorer) -> None:
    def check(store: pmstore.Store) -> bool:
        store["mark"] = 1
        store.close()
        return True

    explorer.run(transfer, check=check, budget=60)


def test_runs_follow_one_another(explorer: CrashExplorer) -> None:
    """What the first run did not commit is gone; the second one's recovery is crashed too."""
    seen = []

    def first(store: pmstore.Store) -> None:
        x = store.create_array("x", 100, "f8")
        store.commit()
        x += 1
        store.commit()
        x += 1  # killed

    def second(store: pmstore.Store) -> None:
        seen.append(float(store["x"][0]))
        store["x"] *= 4
        store.close()

    def check(store: pmstore.Store) -> None:
        assert store.get("x", np.zeros(1))[0] in (0, 1, 4)

    report = explorer.run(first, second, check=check, budget=400)
    assert seen == [1.0] * 4  # two media, twice
    assert report.commits == 3


def test_kinds_are_chosen(explorer: CrashExplorer) -> None:
    report = explorer.run(careless, budget=50, kinds=["prefix", "nothing"], media="file", depth=0)
    assert set(report.by_kind) <= {"prefix", "nothing"}


def test_code_that_opens_the_store_itself(explorer: CrashExplorer) -> None:
    with explorer.recording(conserved, medium="memory", budget=100) as path:
        assert path == explorer.path
        with pmstore.open(path) as store:
            transfer(store)
        with pmstore.open(path) as store:
            store["c"] = 1


def test_an_estimator_is_explored(explorer: CrashExplorer) -> None:
    pytest.importorskip("sklearn")
    from pmstore.cluster import KMeans

    data = np.random.default_rng(0).normal(size=(60, 3))
    with explorer.recording(budget=60) as path:
        KMeans(n_clusters=3, n_init=1, max_iter=3, random_state=0, store=path).fit(data)


def test_a_workload_that_reads_what_it_commits(medium: Medium, explorer: CrashExplorer, tmp_path: Path) -> None:
    """A recorded store is read like any other, and what is recorded does not depend on that."""

    def work(store: pmstore.Store, look: Callable[[pmstore.Store, pmstore.Store, int], None]) -> None:
        large = store.create_array("large", 100_000, "i8")
        store["n"] = 0
        store.commit()
        with pmstore.open(store.path, "r") as reader:
            for n in range(1, 13):
                with store.transaction():
                    large.fill(n)
                    store["n"] = n
                look(store, reader, n)

    def reading(store: pmstore.Store, reader: pmstore.Store, n: int) -> None:
        assert store.read("n") == n
        assert (store.read("large") == n).all()
        assert reader.refresh() == store.sequence
        assert reader["n"] == n and (reader["large"] == n).all()
        assert reader.wait(timeout=0) == (store.sequence, "timeout")
        copy = tmp_path / f"{n}-{len(os.listdir(tmp_path))}.pm"
        assert store.backup(copy) == store.sequence
        with pmstore.open(copy, "r") as found:
            assert found["n"] == n

    explorer.run(partial(work, look=reading), check=lambda store: None, budget=20, media=medium.name)
    recordings = []
    for number, look in enumerate((reading, lambda *_: None)):
        with Recorder(medium.directory / f"{number}.pm", medium.name, 7) as recorder, pmstore.open(recorder.path) as s:
            work(s, look)
        recordings.append(recorder.recording)
    assert recordings[0] == recordings[1]


def test_directories_are_of_their_own_and_go(tmp_path: Path) -> None:
    paths = []
    for _ in range(2):
        with CrashExplorer("same", directory=tmp_path) as explorer:
            explorer.run(lambda store: (paths.append(store.path), transfer(store)), budget=5, media="file")
            assert os.path.exists(os.path.dirname(paths[-1]))
    assert len(set(paths)) == 2
    left_open = CrashExplorer("open", directory=tmp_path)
    left_open.run(lambda store: (paths.append(store.path), transfer(store)), budget=5, media="file")
    del left_open
    gc.collect()
    assert not any(os.path.exists(os.path.dirname(path)) for path in paths)


def test_progress_is_told(explorer: CrashExplorer) -> None:
    told: list[tuple[int, int]] = []
    explorer.run(careless, budget=3000, media="file", progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert terminal("x") is None  # standard error is no terminal here


# ---- what is found


def fails(explorer: CrashExplorer, *runs: Any, **options: Any) -> CrashFailure:
    with pytest.raises(CrashFailure) as caught:
        explorer.run(*runs, **options)
    return caught.value


def test_two_commits_where_one_was_needed(explorer: CrashExplorer) -> None:
    failure = fails(explorer, careless, check=conserved)
    text = str(failure)
    first = text.splitlines()[0]
    assert first.startswith(
        "crash after commit 1 was acknowledged, before commit 2 began: money is lost  (test_testing_"
    )
    assert "recovered to commit 1 (acknowledged 1, begun 1): a = 70" in text
    assert "nothing that was written is lost" in text
    assert "has to change in one `with store.transaction():`" in text
    assert "replay: python -m pmstore crash replay " in text
    assert isinstance(failure.__cause__, AssertionError)
    assert failure.report.commits == 2


def test_the_crash_image_can_be_opened(explorer: CrashExplorer) -> None:
    failure = fails(explorer, careless, check=conserved)
    assert failure.path is not None
    with pmstore.open(Path(failure.path).with_suffix(".pm"), "r") as store:
        assert dict(store) == {"a": 70}
    assert load_failure(failure.path).image() == Path(failure.path).with_suffix(".pm").read_bytes()


def test_any_exception_of_a_check_counts(explorer: CrashExplorer) -> None:
    def check(store: pmstore.Store) -> None:
        if "a" in store:
            store["b"]

    text = str(fails(explorer, careless, check=check))
    assert "before commit 2 began: UnknownNameError: " in text
    assert "hint: commit 1 alone leaves this" in text


def test_pytest_fail_in_a_check_counts(explorer: CrashExplorer) -> None:
    def check(store: pmstore.Store) -> None:
        if store.sequence == 1:
            pytest.fail("told so")

    assert "told so" in str(fails(explorer, careless, check=check))


def test_a_bare_assertion_shows_its_line(explorer: CrashExplorer) -> None:
    namespace: dict[str, Any] = {}
    exec(compile("def check(store):\n    assert store.sequence != 1\n", "nowhere.py", "exec"), namespace)
    assert "AssertionError  (nowhere.py:2)" in str(fails(explorer, careless, check=namespace["check"]))


def test_a_check_that_forgets_the_empty_store_is_told(explorer: CrashExplorer) -> None:
    def check(store: pmstore.Store) -> None:
        assert store["a"] + store["b"] == 100

    text = str(fails(explorer, transfer, check=check))
    assert text.startswith("crash before commit 1 began: UnknownNameError")
    assert "hint: the workload's first commit is not there: a check has to accept the store as it was" in text


def test_a_check_that_is_not_deterministic_is_noted(explorer: CrashExplorer) -> None:
    calls = itertools.count()

    def check(store: pmstore.Store) -> None:
        assert next(calls) != 3, "the fourth call"

    text = str(fails(explorer, careless, check=check, media="file"))
    assert "the fourth call" in text
    assert "note: evaluated once more, this state passed: the check is not deterministic" in text


# ---- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget is how many crash states to evaluate on each medium, at least 1, not 0"),
        ({"budget": -1}, "at least 1, not -1"),
        ({"budget": 1.5}, "budget is a whole number, not 1.5"),
        ({"budget": True}, "budget is a whole number, not True"),
        ({"seed": "x"}, "seed is a whole number"),
        ({"seed": -1}, "seed is a number from 0"),
        ({"depth": -1}, "depth is how many crashes may follow one another"),
        ({"sector": 100}, "sector is 512 or 4096 bytes, not 100"),
        ({"media": "dax"}, 'media is any of "memory" and "file", not \'dax\''),
        ({"media": ()}, 'media is any of "memory" and "file"'),
        ({"kinds": ["lost"]}, "kinds is any of .*lost-one.*, not lost"),
        ({"kinds": []}, "kinds is any of .*, not none"),
        ({"check": 5}, "check is a function that gets the recovered store, not 5: pass the function itself"),
        ({"check": "module:check"}, "check is a function"),
        ({"check": lambda: None}, r"can't be called as check\(store\)"),
        ({"check": lambda a, b, c: None}, r"can't be called as check\(store\)"),
    ],
)
def test_arguments_are_checked(explorer: CrashExplorer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CrashTestError, match=message):
        explorer.run(transfer, **options)


async def coroutine(store: pmstore.Store) -> None:
    """Not a workload."""


def generator(store: pmstore.Store) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ((), "nothing to run"),
        ((5,), "a run is a function of the open store, not 5"),
        ((lambda: None,), "can't be called with the open store alone.*explorer.recording"),
        ((lambda a, b: None,), "can't be called with the open store alone"),
        ((coroutine,), "coroutine is async or has a yield"),
        ((generator,), "generator is async or has a yield"),
        ((lambda store: None,), "made no commit.*store.transaction"),
        ((lambda store: store.close(),), "made no commit"),
    ],
)
def test_workloads_are_checked(explorer: CrashExplorer, runs: tuple[Any, ...], message: str) -> None:
    with pytest.raises(CrashTestError, match=message):
        explorer.run(*runs, budget=10)


def test_a_workload_that_raises(explorer: CrashExplorer) -> None:
    def broken(store: pmstore.Store) -> None:
        store["x"] = 1
        raise LookupError("no such thing")

    with pytest.raises(
        CrashTestError, match="the workload .*broken raised LookupError, without any crash: no such"
    ) as e:
        explorer.run(broken)
    assert isinstance(e.value.__cause__, LookupError)
    explorer.run(transfer, budget=5)  # and it can go on


def nondeterministic(change: Callable[[pmstore.Store, int], None]) -> Callable[[pmstore.Store], None]:
    """A workload that knows which of its runs it is."""
    runs = itertools.count()

    def workload(store: pmstore.Store) -> None:
        store["x"] = np.zeros(20)
        store["n"] = 5
        store.commit()
        change(store, next(runs))
        store.commit()

    return workload


def other_bytes(store: pmstore.Store, run: int) -> None:
    store["x"][3:6] = run + 1


def other_value(store: pmstore.Store, run: int) -> None:
    store["n"] = f"run {run}"


def other_names(store: pmstore.Store, run: int) -> None:
    store["once" if run else "twice"] = 1


def more_commits(store: pmstore.Store, run: int) -> None:
    for i in range(run):
        store["more"] = i
        store.commit()
    store["end"] = 1


def raises_later(store: pmstore.Store, run: int) -> None:
    store["end"] = 1
    if run:
        raise ValueError("used up")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_bytes, "commit 2 wrote other bytes to array 'x' elements 3–5 in the second run: 2.0 instead of 1.0"),
        (other_value, "commit 2 wrote 'run 1' to 'n' in the second run, and 'run 0' in the first"),
        (other_names, "commit 2 stored 'once' in the second run only"),
        (more_commits, "commit 2 stored|its first run made 2 commits, its second run 3 commits"),
        (raises_later, "its second run raised ValueError: used up; the first did not"),
    ],
)
def test_a_workload_that_is_not_deterministic(explorer: CrashExplorer, change: Any, message: str) -> None:
    with pytest.raises(CrashTestError, match=f"the workload is not deterministic: {message}") as caught:
        explorer.run(nondeterministic(change), budget=10)
    assert change is raises_later or "seed its random generators, let no threads race" in str(caught.value)


def test_a_check_that_is_taken_for_a_run(explorer: CrashExplorer) -> None:
    with pytest.raises(CrashTestError, match="conserved changed nothing.*: if it is the check, write check=conserved"):
        explorer.run(careless, conserved)

    def killed(store: pmstore.Store) -> None:
        store["a"] = 5  # never committed

    explorer.run(careless, killed, lambda store: store.close(), budget=10)


def test_a_run_that_evaluates_nothing(explorer: CrashExplorer) -> None:
    with pytest.raises(CrashTestError, match="no crash was evaluated: kinds=torn has none here within a budget of 3"):
        explorer.run(careless, kinds="torn", budget=3)


@pytest.mark.parametrize("where", ["workload", "check", "recording"])
def test_sys_exit_is_no_verdict(explorer: CrashExplorer, where: str) -> None:
    def leave(store: pmstore.Store) -> None:
        sys.exit("done")

    with pytest.raises(
        CrashTestError, match=r"the workload .*leave raised SystemExit|called sys.exit\('done'\)|raised"
    ) as e:
        if where == "recording":
            with explorer.recording():
                leave(explorer)  # type: ignore[arg-type]
        else:
            explorer.run(*([leave] if where == "workload" else [careless]), check=leave if where == "check" else None)
    assert isinstance(e.value.__cause__, SystemExit)


def test_one_medium_has_two_names(explorer: CrashExplorer) -> None:
    for given in ({"media": "memory"}, {"medium": "memory"}, {"media": ("memory",)}):
        with explorer.recording(budget=5, **given) as path, pmstore.open(path) as store:  # type: ignore[arg-type]
            assert store.media == "memory"
            store["x"] = 1
    with pytest.raises(CrashTestError, match="two names for the same"):
        explorer.recording(media="file", medium="file")
    with pytest.raises(CrashTestError, match="the code runs once, on one medium"):
        explorer.recording(media=("file", "memory"))


def test_what_a_check_says_is_bounded(explorer: CrashExplorer) -> None:
    def check(store: pmstore.Store) -> None:
        if store.sequence == 1:
            raise ValueError("y" * 3000 + "\nand more")

    first, second, third = str(fails(explorer, careless, check=check)).splitlines()[:3]
    assert 200 < len(first) < 300
    assert first.endswith("y…")
    assert second == "    and more"
    assert third.startswith("    (test_testing_explorer.py:")


def test_directories_of_the_dead_are_removed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead = int(done.stdout)
    for name in (f"pmstore-crash-{dead}-x", f"pmstore-crash-{dead}-held", f"pmstore-crash-{os.getpid()}-x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / f"pmstore-crash-{dead}-x" / "store.pm").touch()
    held = os.open(tmp_path / f"pmstore-crash-{dead}-held", os.O_RDONLY)  # by a process of another container
    fcntl.flock(held, fcntl.LOCK_SH)
    sweep(str(tmp_path))
    os.close(held)
    left = {f"pmstore-crash-{dead}-held", f"pmstore-crash-{os.getpid()}-x", "other"}
    assert {path.name for path in tmp_path.iterdir()} == left
    with Scratch(tmp_path) as directory:
        assert Path(directory).name.startswith(f"pmstore-crash-{os.getpid()}-")
    assert not Path(directory).exists()


def test_a_check_that_fails_without_a_crash(explorer: CrashExplorer) -> None:
    def check(store: pmstore.Store) -> None:
        assert store.get("a") == 5, "a is not five"

    with pytest.raises(CrashTestError, match="fails without any crash.*no crash was tried. It said: a is not five"):
        explorer.run(transfer, check=check)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (False, "write `assert condition, what_is_wrong` rather than `return condition`"),
        (np.bool_(False), "rather than `return condition`"),
        (0, "to return None if not"),
    ],
)
def test_a_check_that_returns_something(explorer: CrashExplorer, answer: Any, hint: str) -> None:
    with pytest.raises(CrashTestError, match=f"returned {answer!r}: .*{hint}".replace("(", r"\(").replace(")", r"\)")):
        explorer.run(transfer, check=lambda store: answer)


def test_another_store_is_opened(explorer: CrashExplorer, tmp_path: Path) -> None:
    def workload(store: pmstore.Store) -> None:
        with pmstore.open(tmp_path / "other.pm") as other:
            other["x"] = 1
        store["x"] = 1

    with pytest.raises(CrashTestError, match="other.pm.* for writing"):
        explorer.run(workload)


def test_a_store_that_was_open_before_is_written(explorer: CrashExplorer, tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "other.pm") as other:

        def workload(store: pmstore.Store) -> None:
            other["x"] = 1
            other.commit()
            transfer(store)

        with pytest.raises(CrashTestError, match="committed to the store .*other.pm', which was opened outside"):
            explorer.run(workload)
        explorer.run(transfer, budget=5)  # that it is open is no harm


def test_two_explorers_at_once(explorer: CrashExplorer) -> None:
    def workload(store: pmstore.Store) -> None:
        with CrashExplorer("inner") as inner:
            inner.run(transfer)

    with pytest.raises(CrashTestError, match="two crash explorers at once"):
        explorer.run(workload)

    def check(store: pmstore.Store) -> None:
        with CrashExplorer("inner") as inner:
            inner.run(transfer)

    with pytest.raises(CrashTestError, match="two crash explorers at once"):
        explorer.run(transfer, check=check)


def test_two_explorers_in_two_threads(explorer: CrashExplorer) -> None:
    problems: list[BaseException] = []

    def other() -> None:
        try:
            with CrashExplorer("other") as another:
                another.run(transfer, budget=5)
        except BaseException as error:
            problems.append(error)

    def workload(store: pmstore.Store) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        transfer(store)

    explorer.run(workload, budget=5, media="file")
    assert problems
    assert all("two crash explorers at once" in str(problem) for problem in problems)


def test_memory_without_a_tmpfs(explorer: CrashExplorer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "MEMORY", tmp_path / "missing")
    with pytest.raises(CrashTestError, match=r'the medium "memory" needs a tmpfs.*media=\("file",\)'):
        explorer.run(transfer)
    explorer.run(transfer, media="file", budget=5)


def test_the_path_is_known_while_it_runs(explorer: CrashExplorer) -> None:
    with pytest.raises(CrashTestError, match="path is known while a workload runs"):
        explorer.path  # noqa: B018


def test_failures_that_cant_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with CrashExplorer("x", directory=tmp_path / "file") as explorer:
        failure = fails(explorer, careless, check=conserved)
    text = str(failure)
    assert "money is lost" in text.splitlines()[0]
    assert failure.path is None
    assert f"  not kept: {tmp_path / 'file'} can't be written: File exists" in text
    assert "replay:" not in text
    assert "look:" not in text


def test_signatures_list_all_options(explorer: CrashExplorer) -> None:
    options = ["check", "budget", "seed", "media", "depth", "sector", "eadr", "kinds"]
    for function in (CrashExplorer.run, CrashExplorer.recording, crash_test):
        signature = inspect.signature(function)
        assert set(options) <= set(signature.parameters) and "options" not in signature.parameters
        assert signature.parameters["depth"].default == 1 and signature.parameters["depth"].annotation == "int"
    names = [name for name in inspect.signature(crash_test).parameters if name != "function"]
    assert names == options
    calls: list[Callable[..., Any]] = [partial(explorer.run, lambda store: None), explorer.recording, crash_test]
    for call, name in zip(calls, ("CrashExplorer.run", "CrashExplorer.recording", "crash_test")):
        with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'budgte'"):
            call(budgte=3)
