"""pmstore.testing: every call to the system fails, one after the other, and what of it must be noticed.

PMSTORE_FAULTS says how many cases of each workload are tried; "all" for all.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _core
from pmstore.testing import Crash, CrashExplorer, CrashFailure, CrashTestError
from pmstore.testing._faults.explore import explore_faults
from pmstore.testing._faults.fault import MANNERS, Fault
from pmstore.testing._store.recording import Recorder
from tests.conftest import Medium
from tests.support.crashes import WORKLOADS, Workload, overflow
from tests.support.pairs import MEDIA, half, named

CASES = os.environ.get("PMSTORE_FAULTS", "4")
BUDGET = None if CASES == "all" else int(CASES)


def some(store: pmstore.Store) -> None:
    x = store.create_array("x", 700, "f8")
    store.commit()
    for i in range(2):
        x += i + 1
        store["name"] = f"commit {i}"
        store.commit()


def busy(store: pmstore.Store) -> None:
    """Names replaced, checkpoints, a rollback, transactions, a close in the end."""
    store["large"] = np.arange(3000.0)
    store["small"] = np.arange(20.0)
    store.create_list("list").extend(range(10))
    store.commit()
    store["large"] = np.ones(700)
    store["small"] = "z" * 9000
    with store.transaction():
        del store["list"]
        store["list"] = np.arange(40)
    store._catalog.core.checkpoint()
    store["list"][:] = 7
    store["gone"] = np.ones(90_000)
    store.rollback()
    store["kept"] = np.ones(3000)
    store.close()


# ---- the core


@pytest.mark.longer
@pytest.mark.parametrize("medium, workload", half(MEDIA, named([*WORKLOADS, busy])), indirect=["medium"])
def test_I1_D7_whatever_call_fails(medium: Medium, workload: Workload) -> None:
    """The commit is wholly absent and the store goes on, or it refuses to; nothing acknowledged is lost."""
    # States of megabytes take longer.
    budget = BUDGET and (BUDGET // 3 if workload.__name__ in ("growth", "overflow", "slots", "cooled") else BUDGET)
    limit = 2_800_000 if workload is overflow else None
    report = explore_faults(workload, medium=medium.name, budget=budget, max_size=limit)
    assert report.evaluated == (report.possible if budget is None else min(budget, report.possible))
    assert report.crashes > report.evaluated
    if medium.name == "file":
        assert report.possible > 200
        assert report.outcomes["refused"] or report.evaluated < 30  # few may all be harmless


def grows(store: pmstore.Store) -> None:
    """The rows move with the second and the third step."""
    store.create_array("rows", (0, 7), "i8", maxshape=(None, 7))
    for step in range(3):
        with store.transaction():
            store.append("rows", np.full((40 * step + 1, 7), step))


def test_I11_rows_that_moved_are_rolled_back_after_a_failed_write() -> None:
    """A store that refuses to go on also refuses to look for the former place of the rows."""
    assert explore_faults(grows, medium="file", seed=1).outcomes["refused"] > 10


def test_arrays_of_a_workload_that_failed_keep_no_space() -> None:
    """Its frames hang on the error. What it had taken would be too much for a store of this size."""
    report = explore_faults(overflow, medium="file", max_size=2_800_000, only=Fault("write", 14, "ENOSPC", False))
    assert report.outcomes == {"went on": 1}


@pytest.mark.longer
def test_I4_faults_in_the_recoveries_of_several_runs(medium: Medium) -> None:
    def again(store: pmstore.Store) -> None:
        store["x"] *= 2
        store.commit()
        store["x"] *= 2  # killed

    report = explore_faults([some, again], medium=medium.name, budget=BUDGET)
    assert report.commits == 4


# ---- what it is told by


def test_a_report_says_of_how_many(medium: Medium) -> None:
    report = explore_faults(some, medium=medium.name, budget=3, seed=5)
    assert not report.exhaustive and "3 of" in str(report) and "chosen by seed 5" in str(report)
    assert sum(report.outcomes.values()) == sum(report.by_operation.values()) == 3


def test_all_ways_of_failing_are_tried() -> None:
    seen: list[tuple[int, int]] = []
    report = explore_faults(some, medium="memory", progress=lambda done, total: seen.append((done, total)))
    assert report.exhaustive and "these are all" in str(report)
    assert seen == [(i, report.evaluated) for i in range(report.evaluated)]
    assert set(MANNERS) == {"write", "sync", "grow", "map"}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault("write", 7, "ENOSPC"), "the 7th write failed with ENOSPC"),
        (Fault("sync", 1, "EIO", True), "the 1st sync and all after it failed with EIO"),
        (Fault("write", 12, "short"), "the 12th write fell short"),
        (Fault("grow", 22, "EINTR"), "the 22nd growth of the file was interrupted (EINTR)"),
    ],
)
def test_a_fault_in_words(fault: Fault, text: str) -> None:
    assert str(fault) == text


# ---- what it notices


def test_a_workload_that_swallows_the_error_is_refused() -> None:
    """Which is right: the store does not forget it."""

    def deaf(store: pmstore.Store) -> None:
        x = store.create_array("x", 700, "f8")
        for i in range(3):
            x[:] = i
            try:
                store.commit()
            except pmstore.Error:
                pass

    report = explore_faults(deaf, medium="file", budget=60)
    assert report.outcomes["refused"] > 5


def test_an_acknowledged_commit_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: after an error an older version of the file takes its place."""
    older: list[bytes] = []
    failed: list[Exception] = []
    real = pmstore.Store._drop

    def restoring(store: pmstore.Store) -> None:
        failed.clear()
        x = store.create_array("x", 700, "f8")
        store.commit()
        with open(store.path, "rb") as file:
            older[:] = [file.read()]
        x[:] = 2
        store.commit()
        try:
            x[:] = 3
            store.commit()
        except pmstore.Error as error:
            failed.append(error)
            raise

    def drop(self: pmstore.Store, **options: bool) -> None:
        real(self, **options)
        if failed:
            failed.clear()
            with open(self.path, "r+b") as file:
                file.write(older[0])

    monkeypatch.setattr(pmstore.Store, "_drop", drop)
    with pytest.raises(CrashFailure) as caught:
        explore_faults(restoring, medium="file")
    text = str(caught.value)
    # Without space commit 3 is refused at first: the explorer then tries again, and it is commit 3 that goes.
    assert re.search(
        "in commit 3, and commit [23], which was acknowledged, was gone after reopen", text.splitlines()[0]
    )
    fault = eval(text.partition("only=")[2], {"Fault": Fault})
    with pytest.raises(CrashFailure, match="was gone"):
        explore_faults(restoring, medium="file", only=fault)


def test_I11_a_rollback_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core.Core, "rollback", lambda self: None)
    with pytest.raises(CrashFailure, match="rollback did not take"):
        explore_faults(some, medium="file")


@pytest.mark.parametrize("operation", [pytest.param("write", marks=pytest.mark.long), "sync"])
def test_I11_a_rollback_that_is_refused_for_no_reason(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """A mutant: after any failure. Accepted is only what the store refuses by itself, as the committed image is not
    the last commit.
    """
    honest = _core.Core.rollback
    refused: list[int] = []

    def noting(self: _core.Core) -> None:
        try:
            honest(self)
        except pmstore.FailedStoreError:
            refused.append(number)
            raise

    def refusing(self: _core.Core) -> None:
        honest(self)
        self.stats()  # raises, after a failure

    reported = []
    excused = []  # the first write of a record's part, right behind a commit, is taken for one of the committed image's
    for number in itertools.count(1):
        fault = Fault(operation, number, "EIO")
        monkeypatch.setattr(_core.Core, "rollback", noting)
        try:
            outcomes = explore_faults(some, medium="file", only=fault).outcomes
        except CrashTestError as none:
            assert "has no case" in str(none)
            break
        monkeypatch.setattr(_core.Core, "rollback", refusing)
        try:
            explore_faults(some, medium="file", only=fault)
        except CrashFailure as failure:
            assert "refuses to roll back, though the committed image is commit" in str(failure)
            assert "refused" in outcomes
            reported.append(number)
        else:
            if number not in refused and "refused" in outcomes:
                excused.append(number)
    assert len(excused) < 3
    assert not set(reported) & set(refused)
    assert len(reported) > 5 and bool(refused) == (operation == "write")


def test_other_contents_without_a_word() -> None:
    """A mutant: the workload itself does something else under the fault."""
    runs: list[int] = []

    def counting(store: pmstore.Store) -> None:
        runs.append(1)
        store["x"] = np.full(700, float(len(runs) > 4))  # four runs are without faults
        store.commit()

    with pytest.raises(
        CrashFailure, match="no error was raised, but the workload ended at commit 1 with other contents"
    ):
        explore_faults(counting, medium="file", only=Fault("write", 3, "EINTR"))


def test_a_descriptor_that_leaks() -> None:
    leaked: list[int] = []

    def leaking(store: pmstore.Store) -> None:
        try:
            some(store)
        except pmstore.Error:
            leaked.append(os.open(store.path, os.O_RDONLY))
            raise

    try:
        with pytest.raises(CrashFailure, match="descriptor was left open"):
            explore_faults(leaking, medium="file")
    finally:
        for fd in leaked:
            os.close(fd)


def test_a_descriptor_in_garbage_does_not_leak() -> None:
    """Whenever the garbage is collected: here in every second run, in the last of those without faults too."""

    class Garbage:
        def __init__(self) -> None:
            self.itself = self
            self.descriptor = os.open(os.devnull, os.O_RDONLY)

        def __del__(self) -> None:
            os.close(self.descriptor)

    runs: list[int] = []

    def leaving_garbage(store: pmstore.Store) -> None:
        runs.append(1)
        if len(runs) % 2:
            Garbage()
        else:
            gc.collect()
        some(store)

    assert explore_faults(leaving_garbage, medium="file", budget=6).evaluated == 6


def test_the_check_is_asked_about_what_is_left() -> None:
    def check(store: pmstore.Store) -> None:
        assert store.get("name") != "commit 0", "the first name is refused"

    hint = "hint: the check also fails without any fault: commit 2 alone leaves this; what belongs together has to"
    with pytest.raises(CrashFailure, match=rf"(said|wrong): the first name is refused(.|\n)*{hint}"):
        explore_faults(some, check, medium="file")


def test_a_check_that_always_fails_is_no_fault(medium: Medium) -> None:
    def check(store: pmstore.Store) -> None:
        assert "y" in store, "there is no y"

    seen: list[int] = []
    text = "fails without any fault, on what the workload leaves at its end: .*no fault was tried. It said: there is no"
    for only in (None, Fault("grow", 1, "EINTR")):
        with pytest.raises(CrashTestError, match=text):
            explore_faults(some, check, medium=medium.name, only=only, progress=lambda done, total: seen.append(done))
    assert not seen


def test_a_check_that_needs_the_first_commit_is_no_fault() -> None:
    def check(store: pmstore.Store) -> None:
        store["x"]

    with pytest.raises(CrashFailure, match="hint: the check also fails without any fault: the workload's first commit"):
        explore_faults(some, check, medium="memory")


def test_a_fault_that_is_to_blame_has_no_hint() -> None:
    runs: list[int] = []

    def check(store: pmstore.Store) -> None:
        runs.append(1)
        assert len(runs) == 1 or len(runs) > 2, "only the second store"

    with pytest.raises(CrashFailure, match="only the second store") as caught:
        explore_faults(some, check, medium="memory")
    assert "hint" not in str(caught.value)


def test_the_hint_asks_about_the_commits_of_the_refused_store_only(medium: Medium) -> None:
    """Not about each commit of the workload, which may be thousands."""
    runs: list[int] = []

    def many(store: pmstore.Store) -> None:
        for number in range(40):
            store["number"] = number
            store.commit()

    def check(store: pmstore.Store) -> None:
        runs.append(store.sequence)
        assert len(runs) != 2, "only the second store"

    with pytest.raises(CrashFailure, match="only the second store"):
        explore_faults(many, check, medium=medium.name, budget=1)
    assert 2 < len(runs) < 5 and abs(runs[2] - runs[1]) <= 1


@pytest.mark.parametrize("wrong", [lambda: False, lambda: sys.exit(3)])
def test_a_check_that_is_wrong_replaces_no_failure(wrong: Callable[[], object]) -> None:
    """It is asked for a hint once more, after the failure was found."""
    runs: list[int] = []

    def check(store: pmstore.Store) -> object:
        runs.append(1)
        assert len(runs) != 2, "a real loss"
        return wrong() if len(runs) > 2 else None

    with pytest.raises(CrashFailure, match="a real loss"):
        explore_faults(some, check, medium="file")
    assert len(runs) == 3


def test_the_check_sees_only_what_the_workload_did(medium: Medium) -> None:
    """The explorer's own commits, which prove that the store goes on, are in none of its stores."""
    begun: list[int] = []
    returned: list[int] = []
    acknowledged: list[int] = []

    def counting(store: pmstore.Store) -> None:
        begun.clear()
        returned.clear()
        x = store.require_array("x", 40_000, "f8")
        for n in range(1, 4):
            begun.append(n)
            with store.transaction():
                x[:] = store["n"] = n
            returned.append(store.sequence)

    def check(store: pmstore.Store, crash: Crash) -> None:
        names = {"x", "n"} if store.sequence else set()
        assert set(store) == names and len(store) == len(names)
        assert store.get("n", 0) == store.sequence
        # A commit that failed may be found by the recovery that the check's store has had, which acknowledges it.
        assert crash.acknowledged <= len(begun) and crash.acknowledged <= store.sequence <= crash.started
        acknowledged.append(crash.acknowledged)

    budget = 30 if medium.name == "file" else None
    report = explore_faults(counting, check, medium=medium.name, budget=budget)
    assert report.outcomes["went on"] > 2 and report.crashes > 2 * report.evaluated
    acknowledged.clear()
    report = explore_faults(counting, check, medium=medium.name, only=Fault("map", 5, "ENOMEM"))
    assert report.outcomes == {"went on": 1}
    assert len(begun) == len(returned) + 1, "it failed in a commit, which the explorer tried again"
    assert acknowledged[0] == 3, "the run without faults comes first"
    assert max(acknowledged[1:]) == len(returned)


def test_a_workload_that_stumbles_over_what_it_was_not_told() -> None:
    """A mutant: it depends on something that a fault changes."""
    runs: list[int] = []

    def counting(store: pmstore.Store) -> None:
        some(store)
        runs.append(1)
        if len(runs) > 4:  # four runs are without faults
            raise KeyError("lost")

    with pytest.raises(CrashFailure, match="raised KeyError .*, which it does not without faults"):
        explore_faults(counting, medium="file", only=Fault("write", 3, "EINTR"))


# ---- what can't be tried


def raising(store: pmstore.Store) -> None:
    raise LookupError("nothing there")


def idle(store: pmstore.Store) -> None:
    pass


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((raising,), {}, "the workload raising raised LookupError, without any crash: nothing there"),
        ((idle,), {}, "made no commit"),
        ((some,), {"budget": 0}, "a budget of 0 tries nothing"),
        ((some,), {"medium": "tape"}, 'medium is "memory" or "file", not \'tape\''),
        ((some, "check"), {}, "check is a function"),
        ((3,), {}, "a run is a function"),
        (([],), {}, "nothing to run"),
        ((some,), {"only": Fault("write", 9999, "EIO")}, "has no case"),
        ((some,), {"only": "write"}, "only is a fault such as .*Fault.*, not 'write'"),
        ((some,), {"only": tuple(Fault("write", 7, "ENOSPC"))}, r"only is a fault such as .*Fault.*, not \('write', 7"),
        ((some,), {"seed": -1}, "seed is a number"),
        ((some,), {"directory": "/no/such/place"}, "is no directory"),
    ],
)
def test_bad_input(arguments: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(CrashTestError, match=text):
        explore_faults(*arguments, **{"medium": "file", **options})


def test_a_workload_that_is_not_deterministic() -> None:
    runs: list[int] = []

    def different(store: pmstore.Store) -> None:
        runs.append(1)
        store["x"] = len(runs)
        store.commit()

    with pytest.raises(CrashTestError, match="not deterministic"):
        explore_faults(different, medium="file")


def test_not_inside_another_recording(medium: Medium) -> None:
    with Recorder(medium.directory / "other.pm", medium.name):
        with pytest.raises(CrashTestError, match="another store is being recorded"):
            explore_faults(some, medium=medium.name)


def test_the_explorer_does_both(tmp_path: Path) -> None:
    with CrashExplorer("both", directory=tmp_path / "failures") as explorer:
        reports = explorer.faults(some, budget=4)
        assert {medium: report.evaluated for medium, report in reports.items()} == {"memory": 4, "file": 4}
        with pmstore.open(tmp_path / "store.pm") as store:
            some(store)
        assert explorer.damage(tmp_path / "store.pm", budget=20).evaluated == 20
        with pytest.raises(CrashTestError, match="media is any of"):
            explorer.faults(some, media="tape")


def test_the_explorer_tries_one_case_again(tmp_path: Path) -> None:
    """A failure says how: with only=, on its medium."""

    def check(store: pmstore.Store) -> None:
        assert store.get("name") == "commit 1", "another name"

    with CrashExplorer("again", directory=tmp_path / "failures") as explorer:
        with pytest.raises(CrashFailure, match="again: the same call, on file alone, with only=") as caught:
            explorer.faults(some, check=check, media="file")
        fault = eval(str(caught.value).partition("only=")[2], {"Fault": Fault})
        with pytest.raises(CrashFailure, match="another name"):
            explorer.faults(some, check=check, media="file", only=fault)
        report = explorer.faults(some, media="file", only=fault)["file"]
        assert report.evaluated == 1 < report.possible
        with pytest.raises(CrashTestError, match='only= tries a fault on one medium: add media="memory" or media="fil'):
            explorer.faults(some, only=fault)


def test_a_check_in_the_place_of_a_run(tmp_path: Path) -> None:
    def change(store: pmstore.Store) -> None:
        store["a"] = 1
        store.commit()

    def check(store: pmstore.Store) -> None:
        assert store.get("a") in (None, 1)

    with pytest.raises(CrashTestError, match="changed nothing"):
        explore_faults([change, check], medium="file", directory=tmp_path, budget=3)


def test_a_workload_that_leaves_the_interpreter(tmp_path: Path) -> None:
    def leaves(store: pmstore.Store) -> None:
        raise SystemExit(3)

    with pytest.raises(CrashTestError):
        explore_faults(leaves, medium="file", directory=tmp_path, budget=3)
