"""crash_test, the pytest plugin, and hypothesis: what users meet first."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pmstore
import pmstore.testing
from pmstore.testing import CrashFailure, CrashTestError, load_failure
from pmstore.testing._base import session

pytest_plugins = ["pytester"]

PLUGIN = ("-p", "pytest_pmstore", "-p", "no:cacheprovider", "-p", "no:xdist")

BANK = """
import pmstore.testing

def conserved(store):
    assert store.get("a", 100) + store.get("b", 0) == 100, "money is lost"

@pmstore.testing.crash_test(check=conserved, budget=100)
def test_good(store):
    with store.transaction():
        store["a"] = 70
        store["b"] = 30

@pmstore.testing.crash_test(check=conserved)
def test_bad(store):
    store["a"] = 70
    store.commit()
    store["b"] = 30
    store.commit()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Failure files go there, and the tests of this file are no part of any pytest session."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "_config", lambda: None)
    yield tmp_path


def conserved(store: pmstore.Store) -> None:
    assert store.get("a", 100) + store.get("b", 0) == 100, "money is lost"


def careless(store: pmstore.Store, first: int = 70) -> None:
    store["a"] = first
    store.commit()
    store["b"] = 100 - first
    store.commit()


# ---- the decorator, without pytest


def test_a_decorated_function_is_just_called(here: Path) -> None:
    test = pmstore.testing.crash_test(check=conserved, budget=200)(careless)
    with pytest.raises(CrashFailure, match="money is lost") as caught:
        test()
    file = Path(str(caught.value.path))
    assert re.fullmatch(r"test_testing_plugin.careless-[0-9a-f]{8}.crash", file.name)  # of a file that is elsewhere
    assert file.parent == Path(".pmstore-crash")
    assert file.is_file()
    assert file.with_suffix(".pm").is_file()
    assert (here / ".pmstore-crash" / ".gitignore").read_text().endswith("*\n")


def test_it_may_stand_bare(here: Path) -> None:
    @pmstore.testing.crash_test
    def test(store: pmstore.Store) -> None:
        """What it does."""
        careless(store)

    assert test.__doc__ == "What it does."
    assert not inspect.signature(test).parameters


def test_further_parameters_stay(here: Path) -> None:
    seen = []

    @pmstore.testing.crash_test(check=conserved, budget=10, media="file")
    def test(store: pmstore.Store, amount: int, *, mark: str = "x") -> None:
        seen.append((amount, mark))
        with store.transaction():
            careless_in_one(store, amount)

    def careless_in_one(store: pmstore.Store, amount: int) -> None:
        store["a"] = 100 - amount
        store["b"] = amount

    assert list(inspect.signature(test).parameters) == ["amount", "mark"]
    assert "store" not in test.__annotations__
    test(5, mark="y")
    test(amount=6)
    assert seen == [(5, "y")] * 2 + [(6, "x")] * 2


def test_methods_work(here: Path) -> None:
    class TestBank:
        amount = 30

        @pmstore.testing.crash_test(check=conserved, budget=50, media="file")
        def test(self, store: pmstore.Store) -> None:
            careless(store, 100 - self.amount)

    with pytest.raises(CrashFailure, match="money is lost"):
        TestBank().test()


async def coroutine(store: pmstore.Store) -> None:
    """Not a workload."""


def no_store(path: str) -> None:
    """Not a workload either."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (coroutine, "coroutine is async or has a yield"),
        (no_store, r"no_store\(.*the first parameter of a crash test is `store`"),
        (lambda: None, "the first parameter of a crash test is `store`"),
        (int, "crash_test is for functions"),
    ],
)
def test_what_it_cant_decorate(function: Any, message: str) -> None:
    with pytest.raises(CrashTestError, match=message):
        pmstore.testing.crash_test(check=conserved)(function)


def test_wrong_arguments_are_told_where_they_stand() -> None:
    with pytest.raises(CrashTestError, match="at least 1, not 0"):
        pmstore.testing.crash_test(budget=0)
    with pytest.raises(CrashTestError, match="check is a function"):
        pmstore.testing.crash_test(check="conserved")  # type: ignore[call-overload]
    with pytest.raises(CrashTestError, match="takes its arguments by name"):
        pmstore.testing.crash_test(5)  # type: ignore[call-overload]


# ---- hypothesis


def test_hypothesis_shrinks_the_workload(here: Path) -> None:
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    seen = []

    @hypothesis.settings(deadline=None, max_examples=30, database=None, derandomize=True, report_multiple_bugs=False)
    @hypothesis.given(amounts=st.lists(st.integers(0, 60), max_size=4))
    @pmstore.testing.crash_test(check=conserved, budget=40, media="file")
    def test(store: pmstore.Store, amounts: list[int]) -> None:
        seen.append(amounts)
        store["b"] = 0
        store.commit()
        for amount in amounts:
            careless(store, 100 - amount)

    with pytest.raises(CrashFailure):
        test()
    assert seen[-1] == [1]
    [file] = (here / ".pmstore-crash").glob("*.crash")
    failure = load_failure(file)
    assert "a = 99" in failure.message


def test_hypothesis_can_reject_an_example(here: Path) -> None:
    hypothesis = pytest.importorskip("hypothesis")

    @hypothesis.settings(deadline=None, max_examples=5, database=None)
    @hypothesis.given(n=hypothesis.strategies.integers(0, 9))
    @pmstore.testing.crash_test(budget=5, media="file")
    def test(store: pmstore.Store, n: int) -> None:
        hypothesis.assume(n > 1)
        store["n"] = n
        store.commit()

    test()


def test_given_stands_above(here: Path) -> None:
    hypothesis = pytest.importorskip("hypothesis")
    inner = hypothesis.given(n=hypothesis.strategies.integers())(lambda store, n: None)
    with pytest.raises(CrashTestError, match="put @given above @crash_test"):
        pmstore.testing.crash_test(check=conserved)(inner)


# ---- the plugin


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    if not (pytester.path / "pytest.ini").exists():
        pytester.makeini("[pytest]\n")  # otherwise the project's, where the temporary directory is inside of it
    return pytester.runpytest_inprocess(*PLUGIN, *arguments)


def test_a_failing_test_says_what_to_do(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_bank=BANK)
    result = run(pytester)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * pmstore.testing.CrashFailure: crash after commit 1 was acknowledged, before commit 2 began: money *",
            "*replay: python -m pmstore crash replay .pmstore-crash/test_bank.test_bad.crash",
            "*look: * python -m pmstore ls -l .pmstore-crash/test_bank.test_bad.pm",
            "*again: *pytest test_bank.py::test_bad --crash-seed=1 --crash-budget=2000",
        ]
    )
    result.stdout.no_fnmatch_line("*_explorer.py*")  # nothing of ours in the traceback
    assert (pytester.path / ".pmstore-crash" / "test_bank.test_bad.crash").is_file()


def test_ids_that_look_alike_have_files_of_their_own() -> None:
    alike = ["t.py::two", "t.py::two[..]", "t.py::two[.]", "t.py::two[a/b]", "t.py::two[a-b]", "t.py::two[a b]"]
    names = [session.test_name(identity) for identity in alike]
    assert len(set(names)) == len(names)
    assert names[0] == "t.two"
    assert names[4].startswith("t.two-a-b")


def test_commands_are_for_where_pytest_was_started(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    (pytester.path / "below").mkdir()
    (pytester.path / "below" / "test_bank.py").write_text(
        BANK.replace("def test_bad(store):", "def test_bad(store):\n    import os; os.chdir('/')")
    )
    (pytester.path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(pytester.path / "below")
    result = run(pytester, "test_bank.py")
    monkeypatch.chdir(pytester.path)
    result.stdout.fnmatch_lines(["*replay: python -m pmstore crash replay */.pmstore-crash/below-test_bank.*.crash"])
    result.stdout.fnmatch_lines(["*again: *pytest test_bank.py::test_bad --crash-seed=1*"])


def test_nothing_of_ours_is_in_a_traceback(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pmstore.testing

        def check(store):
            assert store.sequence != 1

        def two(store):
            store["a"] = 1
            store.commit()
            store["b"] = 1
            store.commit()

        def test_recording(crash_explorer):
            with crash_explorer.recording(check, media="file") as path, pmstore.open(path) as store:
                two(store)

        @pmstore.testing.crash_test(check=check, media="file")
        def test_decorated(store):
            two(store)

        def test_no_commit(crash_explorer):
            crash_explorer.run(lambda store: None)

        def test_bad_check(crash_explorer):
            crash_explorer.run(two, check=lambda: None)

        def test_no_crash(crash_explorer):
            with crash_explorer.recording(media="file") as path, pmstore.open(path) as store:
                pass
        """
    )
    result = run(pytester)
    result.assert_outcomes(failed=5)
    result.stdout.fnmatch_lines([">   @pmstore.testing.crash_test(check=check, media=*"])
    result.stdout.no_fnmatch_line("*pmstore/testing*")
    result.stdout.no_fnmatch_line("*contextlib.py*")


def test_options_reach_the_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_bank=BANK.replace(", budget=100", ""))
    result = run(pytester, "--crash-budget=77", "--crash-seed=9", "-rA")
    result.stdout.fnmatch_lines(["*again: *pytest test_bank.py::test_bad --crash-seed=9 --crash-budget=77"])
    result.stdout.fnmatch_lines(["*Captured crash exploration*", "explored the crashes of 1 commit*seed 9"])


def test_reports_are_shown_when_asked_for_only(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_bank=BANK)
    result = run(pytester, "-k", "good")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.no_fnmatch_line("*explored the crashes*")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--crash-budget=0", "*--crash-budget is how many crash states a test evaluates on each medium, at least 1*"),
        ("--crash-budget=-5", "*--crash-budget is how many*"),
        ("--crash-budget=many", "*invalid int value: 'many'*"),
        ("--crash-seed=-1", "*--crash-seed is a number from 0*"),
    ],
)
def test_options_are_checked(pytester: pytest.Pytester, option: str, message: str) -> None:
    pytester.makepyfile(test_bank=BANK)
    result = run(pytester, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_the_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_runs="""
        import pmstore, pytest

        def first(store):
            store["n"] = 1
            store.commit()

        def second(store):
            store["n"] += 1
            store.commit()

        def check(store):
            assert store.get("n", 0) in (0, 1)

        def test_runs(crash_explorer):
            crash_explorer.run(first, second, check=lambda store: None, budget=50)

        @pytest.mark.parametrize("n", [1, 2], ids=["a/b", "x" * 300])
        def test_fails(crash_explorer, n):
            def check(store):
                assert store.get("n", 0) != 1
            crash_explorer.run(first, second, check=check, media="file")

        def test_recording(crash_explorer):
            with crash_explorer.recording(budget=20) as path, pmstore.open(path) as store:
                store["n"] = 1
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=2, failed=2)
    names = sorted(path.stem for path in (pytester.path / ".pmstore-crash").glob("*.crash"))
    assert re.fullmatch(r"test_runs\.test_fails-a-b-[0-9a-f]{8}", names[0])
    assert 90 < len(names[1]) < 110


def test_fixtures_and_the_decorator(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pmstore.testing, pytest

        @pytest.fixture
        def amount():
            return 30

        class TestBank:
            @pytest.mark.parametrize("extra", [1, 2])
            @pmstore.testing.crash_test(budget=20, media="file")
            def test_it(self, store, amount, extra):
                store["n"] = amount + extra
                store.commit()

        @pmstore.testing.crash_test(budget=20)
        def test_skipped(store):
            pytest.skip("not today")
        """
    )
    run(pytester).assert_outcomes(passed=2, skipped=1)


@pytest.mark.slow
@pytest.mark.long
def test_with_xdist(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(test_bank=BANK, test_other=BANK)
    result = pytester.runpytest_subprocess("-p", "pytest_pmstore", "-p", "no:cacheprovider", "-n", "2")
    result.assert_outcomes(passed=2, failed=2)
    names = sorted(path.name for path in (pytester.path / ".pmstore-crash").glob("*.crash"))
    assert names == ["test_bank.test_bad.crash", "test_other.test_bad.crash"]
    result.stdout.fnmatch_lines(["*pytest test_bank.py::test_bad --crash-seed=1*"])


ROOT = Path(pmstore.__file__).parent.parent


def in_process(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_the_plugin_loads_nothing_that_a_session_does_not_use(tmp_path: Path) -> None:
    """Nor does it need the extension."""
    (tmp_path / "test_x.py").write_text("def test_x():\n    pass\n")
    code = (
        "import sys, pytest\n"
        "sys.modules['pmstore._pmcore'] = None\n"  # as if it could not be loaded
        "status = pytest.main(['-q', '-p', 'pytest_pmstore', '-p', 'no:cacheprovider', *sys.argv[1:]])\n"
        "print('loaded:', [name for name in ('pmstore', 'numpy', 'cffi') if name in sys.modules])\n"
        "sys.exit(status)"
    )
    done = in_process(code, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded: []" in done.stdout


def test_importing_pmstore_does_not_load_the_explorer() -> None:
    done = in_process("import sys, pmstore, pmstore._cli; print([m for m in sys.modules if 'pmstore.testing' in m])")
    assert done.stdout.strip() == "[]", done.stderr


def test_pytest_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None; sys.modules['hypothesis'] = None\n"
        "import pmstore.testing\n"
        "@pmstore.testing.crash_test(budget=5, media='file')\n"
        "def workload(store):\n"
        "    store['x'] = 1; store.commit()\n"
        "workload()\n"
        "print('fine')"
    )
    done = in_process(code)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("name", pmstore.testing.__all__)
def test_public_names_have_docstrings(name: str) -> None:
    thing = getattr(pmstore.testing, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for attribute, value in vars(thing).items():
            documented = inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
            assert attribute.startswith("_") or not documented or inspect.getdoc(getattr(thing, attribute)), attribute
