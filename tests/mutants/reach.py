"""The tests and the parts of the battery that reach each function: measured, and kept in tests/mutants/cover.json.

python -m tests.mutants.reach               measures it anew (a quarter of an hour)
python -m tests.mutants.reach TEST …        these tests only: they come first in what the table has

A copy of the sources marks each statement that runs in an array that all processes of a test share. As a pytest plugin,
this module reads the array after each test.
"""

from __future__ import annotations

import ast
import json
import mmap
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.mutants.build import build
from tests.mutants.c_changes import Unit, units_of
from tests.mutants.python_changes import FUNCTIONS

ROOT = Path(__file__).resolve().parent.parent.parent

COVER = ROOT / "tests" / "mutants" / "cover.json"
BUILD = ROOT / "build" / "mutants-reach"
VARIABLE, RESULT = "PMSTORE_REACHED", "PMSTORE_REACHED_RESULT"
MOST = 1 << 15  # marks

C_FILES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "csrc").rglob("*.c")
    if path.parent.name not in ("explore", "python") and path.name != "mutant.c"
)
PYTHON_FILES = sorted(
    str(path.relative_to(ROOT))
    for package in ("_resume", "archive", "cluster", "decomposition", "mixture", "scale")
    for path in (ROOT / "pmstore" / package).glob("*.py")
    if path.name not in ("__init__.py", "_sklearn.py", "sklearn.py", "_command.py")
)

# Tests that are not tried on mutants: tests of documents, of the machinery itself, and of other programs; those that
# compile the sources themselves, and those that take minutes.
LEFT_OUT = {
    *("test_tidy", "test_docs", "test_mutants", "test_mutants_lines", "test_build", "test_benchmarks", "test_paper"),
    *("test_aarch64", "test_demo", "test_gallery", "test_power", "test_testing_docs", "test_versions", "test_kill"),
}
# The limits for a function's tests: total time, and number. Each file first contributes as many of its quickest tests
# that reach a statement, because tests of different files check different things.
SECONDS, TESTS, EACH = 60.0, 300, 6
# They reach nearly everything, and notice what others do not: memory, mappings and descriptors that are not given back.
BESIDES = "tests/core/test_leaks.py::test_each_call_gives_back_what_it_took"
# Slower parts of the battery are tried only if nothing else reaches a statement.
PART_SECONDS = 10.0

C_SOURCE = f"""\
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "mutant.h"
static unsigned char nowhere[{MOST}];
unsigned char *pm_reached = nowhere;
__attribute__((constructor)) static void choose(void)
{{
    const char *path = getenv("{VARIABLE}");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *shared = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof nowhere, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared != MAP_FAILED) pm_reached = shared;
    if (fd >= 0) close(fd);
}}
"""
C_HEADER = "#ifndef PM_MUTANT_H\n#define PM_MUTANT_H\nextern unsigned char *pm_reached;\n#endif\n"
PYTHON_SOURCE = f"""\
import mmap, os

reached = bytearray({MOST})
if os.environ.get("{VARIABLE}"):
    with open(os.environ["{VARIABLE}"], "r+b") as file:
        reached = mmap.mmap(file.fileno(), {MOST})
"""


class Mark(NamedTuple):
    """A statement and its place. at: the text of its first line."""

    file: str
    function: str
    at: str


def marked_c(file: str, text: str, marks: list[Mark]) -> str:
    out, done = [], 0
    lines = text.split("\n")

    def marked(unit: Unit) -> str:
        old = text[unit.start : unit.end]
        number = len(marks)
        marks.append(Mark(file, unit.function, lines[text.count("\n", 0, unit.start)].strip()))
        if unit.kind == "statement":
            return f"{{ pm_reached[{number}] = 1; {old} }}"
        return f"(pm_reached[{number}] = 1, ({old}))"

    for unit in units_of(text):
        out += [text[done : unit.start], marked(unit)]
        done = unit.end
    return "".join(out) + text[done:]


def marked_python(file: str, text: str, marks: list[Mark]) -> str:
    tree = ast.parse(text)
    lines = text.split("\n")

    def visit(node: ast.AST, function: str) -> None:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list):
                continue
            new: list[ast.stmt] = []
            for statement in block:
                if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
                    visit(statement, f"{function}.{statement.name}" if function else statement.name)
                elif function and not function.rpartition(".")[2][:1].isupper():
                    docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                    if not docstring:
                        new += ast.parse(f"_reached[{len(marks)}] = 1").body
                        marks.append(Mark(file, function, lines[statement.lineno - 1].strip()))
                    visit(statement, function)
                new.append(statement)
            setattr(node, field, new)
        for branch in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            visit(branch, function)

    visit(tree, "")
    out = ast.unparse(ast.fix_missing_locations(tree))
    future = "from __future__ import annotations\n"
    assert out.count(future) == 1, file
    return out.replace(future, future + "from pmstore._reached import reached as _reached\n") + "\n"


def marked() -> tuple[list[Mark], Iterator[tuple[str, str]]]:
    """All marks, and the files of the copy that contains them."""
    marks: list[Mark] = []
    files = [(file, marked_c(file, (ROOT / file).read_text(encoding="utf-8"), marks)) for file in C_FILES]
    files += [(file, marked_python(file, (ROOT / file).read_text(encoding="utf-8"), marks)) for file in PYTHON_FILES]
    assert len(marks) <= MOST
    for folder in ("csrc", "csrc/python"):  # an extension each
        files += [(f"{folder}/mutant.c", C_SOURCE), (f"{folder}/mutant.h", C_HEADER)]
    return marks, iter([*files, ("pmstore/_reached.py", PYTHON_SOURCE)])


# ---- the plugin


class Array:
    """The array that the processes of a test share."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), MOST)

    def take(self) -> set[int]:
        """The marks since the last call."""
        found = {i for i, byte in enumerate(self.map[:]) if byte}
        self.map[:] = bytes(MOST)
        return found


class Reached(NamedTuple):
    name: str
    seconds: float
    marks: list[int]


def short(node: str) -> str:
    """The name of a test without its parameters: all of them run together."""
    return "::".join(node.partition("[")[0].split("::")[:2])


class Plugin:
    def __init__(self) -> None:
        self.array = Array(os.environ[VARIABLE])
        self.seconds: dict[str, float] = {}
        self.marks: dict[str, set[int]] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        name = short(item.nodeid)
        self.array.take()
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        self.marks.setdefault(name, set()).update(self.array.take())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(short(report.nodeid))

    def pytest_sessionfinish(self) -> None:
        found = [
            Reached(name, self.seconds[name], sorted(marks))
            for name, marks in self.marks.items()
            if name not in self.failed
        ]
        Path(os.environ[RESULT]).write_text(json.dumps(found), encoding="utf-8")
        print(f"not taken, as they fail: {sorted(self.failed)}" if self.failed else "")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(RESULT):
        config.pluginmanager.register(Plugin())


# ---- the table


def environment(folder: Path) -> dict[str, str]:
    return dict(os.environ, PYTHONPATH=str(folder))


def measure(tests: Sequence[str]) -> tuple[list[Mark], list[Reached]]:
    """Runs the tests in a copy with marks. Without any, it runs all, and the parts of the battery, whose names hold no
    "::"."""
    from tests.mutants.battery import PARTS

    marks, texts = marked()
    folder = build(texts, BUILD)
    array, result = folder / "reached", folder / "reached.json"
    array.write_bytes(bytes(MOST))
    result.unlink(missing_ok=True)
    variables = {**environment(folder), VARIABLE: str(array), RESULT: str(result)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.reach"]
    command += ["-m", "not slow", "-W", "ignore", *(tests or all_tests())]
    status = subprocess.run(command, cwd=folder, env=variables, check=False).returncode
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest has not run all tests: exit status {status}")
    found = [Reached(*entry) for entry in json.loads(result.read_text(encoding="utf-8"))]
    return marks, found if tests else [*found, *battery(folder, variables, array, PARTS)]


def all_tests() -> list[str]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in paths if path.stem not in LEFT_OUT]


def battery(folder: Path, variables: dict[str, str], array: Path, parts: Sequence[str]) -> list[Reached]:
    found = []
    shared = Array(str(array))
    for part in parts:
        shared.take()
        started = time.perf_counter()
        command = [sys.executable, "-m", "tests.mutants.battery", "--quick", part]
        subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL, check=True)
        found.append(Reached(part, time.perf_counter() - started, sorted(shared.take())))
    return found


class Test(NamedTuple):
    name: str
    seconds: float
    marks: frozenset[int]

    @property
    def is_part(self) -> bool:
        """Whether a name is that of a part of the battery."""
        return "::" not in self.name


def ordered(units: set[int], found: Sequence[Test], quickly: frozenset[int]) -> list[str]:
    """The tests for a function: in rounds, each of which reaches all of it again, the quicker ones first; then BESIDES,
    and parts of the battery. found: the quickest first. quickly: marks that need no slow part.
    """
    besides = [test.name for test in found if test.name == BESIDES and units & test.marks]
    preferred: list[Test] = []
    others: list[Test] = []
    times: Counter[tuple[str, int]] = Counter()
    for test in found:
        file = test.name.partition("::")[0]
        marks = set() if test.is_part or test.seconds > SECONDS / 4 else units & test.marks
        if any(times[file, mark] < EACH for mark in marks):
            preferred.append(test)
            times.update((file, mark) for mark in marks)
        elif marks:
            others.append(test)
    chosen: list[str] = []
    left = SECONDS
    for tests in (preferred, others):
        for test in rounds(units, tests):
            if len(chosen) == TESTS or left <= 0.0:
                break
            if test.seconds <= left:
                chosen.append(test.name)
                left -= test.seconds
    parts = [test for test in found if test.is_part and units & test.marks]
    chosen += [name for name in besides if name not in chosen]
    return chosen + [part.name for part in parts if part.seconds < PART_SECONDS or not units & part.marks <= quickly]


def rounds(units: set[int], tests: Sequence[Test]) -> Iterator[Test]:
    """These tests, in the order of what they reach of the units in a second that no test of the round has reached."""
    left = {test: units & test.marks for test in tests}
    missing = set(units)
    while left:
        gains = {test: len(marks & missing) / (test.seconds + 0.02) for test, marks in left.items()}
        best = max(gains, key=lambda test: gains[test])
        if not gains[best]:
            missing = set(units)
            continue
        missing -= left.pop(best)
        yield best


def table(marks: Sequence[Mark], reached: Sequence[Reached]) -> dict[str, Any]:
    """The tests of each file and function, in order, and the function's lines that none of them reaches."""
    out: dict[str, Any] = {}
    functions: dict[tuple[str, str], set[int]] = {}
    for number, mark in enumerate(marks):
        functions.setdefault((mark.file, mark.function), set()).add(number)
    found = sorted(
        (Test(name, seconds, frozenset(some)) for name, seconds, some in reached), key=lambda one: one.seconds
    )
    every = frozenset().union(*(test.marks for test in found))
    quickly = frozenset().union(*(test.marks for test in found if test.seconds < PART_SECONDS))
    names = sorted(test.name for test in found)  # sorted, so that a new measurement changes little of the file
    numbers = {name: i for i, name in enumerate(names)}
    for (file, function), units in sorted(functions.items()):
        entry = out.setdefault(file, {"tests": {}, "never": {}})
        entry["tests"][function] = [numbers[name] for name in ordered(units, found, quickly)]
        seen = {marks[number].at for number in units & every}
        never = sorted({marks[number].at for number in units - every} - seen)
        if never:
            entry["never"][function] = never
    return {"names": names, "files": out}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old table with the tests of the new one in it: first, except those that it has, which keep their places. A
    line that any of them reaches is no line that no test reaches. New names come last, so that the numbers stay.
    """
    names = list(old["names"])
    names += [name for name in new["names"] if name not in names]
    numbers = {name: i for i, name in enumerate(names)}
    files = {file: {kind: dict(entry[kind]) for kind in ("tests", "never")} for file, entry in old["files"].items()}
    for file, entry in new["files"].items():
        into = files.setdefault(file, {"tests": {}, "never": {}})
        for function, tests in entry["tests"].items():
            found = [numbers[new["names"][test]] for test in tests]
            if not found:
                continue
            before = into["tests"].get(function)
            never = entry["never"].get(function, [])
            if before:  # a line that has changed since is not in the old table's list
                never = [line for line in into["never"].get(function, ()) if line in never]
            into["tests"][function] = [*(test for test in found if test not in (before or ())), *(before or ())]
            into["never"].pop(function, None)
            if never:
                into["never"][function] = never
    return {"names": names, "files": files}


def unreached(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old table of the functions that no test of the new one reaches: those that only other processors choose."""
    files = {}
    for file, entry in old["files"].items():
        now = new["files"].get(file, {"tests": {}})["tests"]
        tests = {function: some for function, some in entry["tests"].items() if not now.get(function, some)}
        files[file] = {"tests": tests, "never": {one: entry["never"].get(one, []) for one in tests}}
    return {"names": old["names"], "files": files}


def main() -> None:
    tests = sys.argv[1:]
    old, new = json.loads(COVER.read_text(encoding="utf-8")), table(*measure(tests))
    found = merged(old, new) if tests else merged(new, unreached(old, new))
    text = json.dumps(found, indent=0)
    text = re.sub(r"(?<=[\d\[,])\n(?=[\d\]])", "", text)  # numbers beside each other
    COVER.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
