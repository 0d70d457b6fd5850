"""The share of generated small changes of the code that the tests notice: a seeded sample of all changes.

python -m tests.mutants.lines               exit status 1 if the score is below --least
  --sample N --seed N     size and seed of the sample: a larger sample of the same seed contains the smaller one
  --files PATH …          files or folders instead of all
  --limit SECONDS         for the tests of one mutant, for its parts of the battery, and for the sanitizers
  --tests-only            neither the battery nor the sanitizers: quickly, before a run with --survivors
  --tests TEST …          only these tests, which need not be in cover.json
  --resume                mutants that an earlier run of this seed has tried are not tried again
  --survivors             except those that no test noticed then
  --write FILE            puts the scores between the marks of docs/mutants.md

Beside this file, c_changes.py and python_changes.py have the operators, reach.py finds the tests that reach each
function, and equivalent*.py list the mutants that change no behaviour.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.mutants import (
    c_changes,
    python_changes,
)
from tests.mutants.build import VARIABLE, Edit, build, chosen, fill, ran, written
from tests.mutants.c_changes import Change
from tests.mutants.equivalent import ELSEWHERE, EQUIVALENT
from tests.mutants.equivalent_commit import OF_COMMIT
from tests.mutants.equivalent_media import OF_MEDIA
from tests.mutants.equivalent_reader import OF_READER
from tests.mutants.equivalent_space import OF_SPACE
from tests.mutants.reach import C_FILES, COVER, PYTHON_FILES, environment

ROOT = Path(__file__).resolve().parent.parent.parent

BUILD = ROOT / "build" / "mutants-lines"
SANITIZED = ROOT / "build" / "mutants-sanitized"
SANITIZERS = "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined"
BY_SANITIZERS = "under sanitizers"
BEGIN, END = "<!-- score per file: begin -->", "<!-- score per file: end -->"
FIRST = 12  # tests that are tried by themselves: to import the files of all takes seconds
RARER, ABOUT = 3, 20  # so many times fewer tests; of each such function so many
HANGS = 20  # seconds; no chosen test takes half as long
HANG_VARIABLE = "PMSTORE_MUTANT_HANGS"


class Outcome(NamedTuple):
    """by: the test, or the part of the battery, that noticed it; "" if none did. why: the reason why none did, or
    the message."""

    key: str
    file: str
    by: str
    why: str
    seconds: float


def key(change: Change) -> str:
    return f"{change.file}:{change.line} {change.function}: {change.operator}: {change.shown()}"


def changes_of(file: str) -> list[Change]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return list((python_changes if file.endswith(".py") else c_changes).changes_of(file, text))


def drawn(files: Sequence[str], seed: int) -> list[Change]:
    """All mutants of these files, in an order that the seed determines."""
    every = [change for file in files for change in changes_of(file)]
    random.Random(seed).shuffle(every)
    return every


# ---- which changes are mutants


@cache
def compiler() -> list[str]:
    return list(runpy.run_path(str(ROOT / "csrc" / "build_core.py"))["compiler"]())


def compiled(text: str, *options: str) -> str | None:
    """The compiler's output for it: None if it does not compile."""
    command = [*compiler(), "-std=gnu11", "-O1", "-w", f"-I{ROOT / 'csrc'}", "-x", "c", "-o", "-", *options, "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


@cache
def unchanged(file: str) -> str | None:
    return compiled((ROOT / file).read_text(encoding="utf-8"), "-S")


def applied(change: Change, text: str) -> str:
    """The text with the change, in as many lines as before."""
    gap = "\n" * (change.old.count("\n") - change.new.count("\n"))
    return text[: change.start] + change.new + gap + text[change.end :]


def is_mutant(change: Change) -> bool:
    """Whether it compiles, also as a choice, and to something else than the sources."""
    text = (ROOT / change.file).read_text(encoding="utf-8")
    choice = chosen(text, [Edit(change.start, change.end, "it", 1, change.new)], change.file.endswith(".py"))
    if change.file.endswith(".py"):
        try:
            for one in (choice, applied(change, text)):
                compile(one, change.file, "exec", dont_inherit=True)
        except SyntaxError:
            return False
        return True
    assembly = compiled(applied(change, text), "-S")
    if assembly is None or assembly == unchanged(change.file):
        return False
    return compiled("extern int pm_mutant;\n" + choice, "-fsyntax-only") is not None


def equivalent(change: Change) -> bool:
    """Whether one of tests/mutants/equivalent*.py lists it."""
    return any(
        (one.file, one.line, one.function or change.function) == (change.file, change.at, change.function)
        and one.new in " ".join(change.new.split())
        for one in (*EQUIVALENT, *OF_COMMIT, *OF_MEDIA, *OF_READER, *OF_SPACE)
    )


def sample(files: Sequence[str], seed: int, size: int, jobs: int = 1) -> list[Change]:
    found: list[Change] = []
    left = iter(one for one in drawn(files, seed) if not re.fullmatch(ELSEWHERE.get(one.file, ""), one.function))
    with ThreadPoolExecutor(jobs) as pool:
        while some := list(islice(left, size - len(found))):
            found += compress(some, pool.map(is_mutant, some))
    return found


def built(sampled: Sequence[Change], sanitized: bool) -> list[str]:
    """One build of all of them, and one with sanitizers. Returns the names by which they are chosen."""
    names = [f"{number}" for number in range(1, len(sampled) + 1)]
    edits: dict[str, list[Edit]] = {}
    for number, change in enumerate(sampled, 1):
        edits.setdefault(change.file, []).append(Edit(change.start, change.end, str(number), number, change.new))
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in edits}
    files = list(written(texts, edits, names))
    build(files, BUILD)
    if sanitized:
        build(files, SANITIZED, flags=SANITIZERS)
    return names


# ---- trying one mutant


class Cover:
    """The tests that reach each function, from tests/mutants/cover.json, without tests that no longer exist."""

    def __init__(self, given: Sequence[str] = ()) -> None:
        """given: tests that are tried instead."""
        self.given = list(given)
        table = json.loads(COVER.read_text(encoding="utf-8"))
        self.names: list[str] = table["names"]
        self.files: dict[str, Any] = table["files"]
        self.missing = {number for number, name in enumerate(self.names) if not self.exists(name)}
        self.noticed: Counter[tuple[str, str]] = Counter()  # of this run: by function and test

    @staticmethod
    @cache
    def text(file: str) -> str:
        path = ROOT / file
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def exists(self, name: str) -> bool:
        file, _, function = name.partition("::")
        return not function or re.search(rf"\b{re.escape(function)}\b", self.text(file)) is not None

    def tests(self, change: Change) -> tuple[list[str], list[str]]:
        """Tests, and parts of the battery. For a new function, those of its file. The tests that noticed most mutants
        of this function so far come first."""
        if self.given:
            return self.given, []
        functions = self.files.get(change.file, {"tests": {}})["tests"]
        numbers = functions.get(change.function)
        if numbers is None:
            numbers = sorted({number for some in functions.values() for number in some[:4]})
        else:
            numbers = list(dict.fromkeys([*numbers[:FIRST], *self.about(functions.values(), len(numbers)), *numbers]))
        names = [self.names[number] for number in numbers if number not in self.missing]
        tests = [name for name in names if "::" in name]
        tests.sort(key=lambda name: -self.noticed[change.function, name])
        return tests, [name for name in names if "::" not in name]

    @staticmethod
    def about(functions: Iterable[list[int]], count: int) -> list[int]:
        """Tests of the functions of a file that far fewer than `count` tests reach. These tests are about the file; of
        a function that hundreds reach, the table has those that pass through it."""
        few = sorted((some for some in functions if len(some) < count / RARER), key=len)
        return list(dict.fromkeys(number for some in few for number in some[:ABOUT]))[: 5 * ABOUT]

    def note(self, change: Change, by: str) -> None:
        self.noticed[change.function, by.partition("[")[0]] += 1

    def never(self, change: Change) -> bool:
        return not self.given and change.at in self.files.get(change.file, {"never": {}})["never"].get(
            change.function, ()
        )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """A hook for the tests that are tried: a test that does not end has noticed something."""
    if os.environ.get(HANG_VARIABLE):
        faulthandler.dump_traceback_later(float(os.environ[HANG_VARIABLE]), exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@cache
def preloaded() -> str:
    """The libraries that a sanitized extension needs before Python starts."""
    asked = [[*compiler(), f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so.6")]
    found = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for command in asked]
    return " ".join(found)


def variables_of(folder: Path) -> dict[str, str]:
    """The environment of a process that runs the copy in this folder."""
    if folder != SANITIZED:
        return environment(folder)
    options = "detect_leaks=0:allocator_may_return_null=1:abort_on_error=1:use_sigaltstack=0"
    return {**environment(folder), "LD_PRELOAD": preloaded(), "ASAN_OPTIONS": options}


def run_mutant(command: list[str], folder: Path, name: str, limit: float) -> tuple[int | None, str]:
    """Exit status (None: it did not end) and output."""
    scratch = folder / f"scratch-{name}"
    scratch.mkdir(exist_ok=True)
    variables = {**variables_of(folder), VARIABLE: name, "TMPDIR": str(scratch), HANG_VARIABLE: str(HANGS)}
    variables = {variable: value for variable, value in variables.items() if value}
    try:
        return ran(command, folder, variables, max(limit, 1.0))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def tests_command(tests: Sequence[str], marked: str = "not slow") -> list[str]:
    options = shlex.split("-x -q -p no:cacheprovider -p tests.mutants.lines -W ignore --tb=no")
    return [sys.executable, "-m", "pytest", *options, "-m", marked, *tests]


class Verdict(NamedTuple):
    """by: the test that noticed a mutant; "": none did."""

    by: str
    why: str = ""


PASSES = Verdict("", "all pass")


def of_tests(folder: Path, tests: Sequence[str], name: str, limit: float) -> Verdict:
    sanitized = folder == SANITIZED
    command = tests_command(tests, "not slow and not no_sanitizer" if sanitized else "not slow")
    status, out = run_mutant(command, folder, name, limit)
    if status is None and re.search(r"^[.sxX]*[FE]", out, re.MULTILINE):
        return Verdict("a test that fails, and does not end")
    if status is None:
        return Verdict("", f"the tests did not end in {limit:.0f} s")
    if status in (3, 4) and run_mutant(command, folder, "", limit)[0] in (3, 4):
        raise SystemExit(f"pytest fails, or a test of {COVER.name} is no more:\n{out[-2000:]}")
    if status in (0, 5):
        return PASSES
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", out, re.MULTILINE)
    ended = f"exit status {status}" if status != 1 else "a test that does not end"
    return Verdict(found[1] if found else ended, BY_SANITIZERS if sanitized else "")


def of_battery(parts: Sequence[str], name: str, limit: float) -> Verdict:
    def run(parts: Sequence[str], limit: float) -> tuple[int | None, dict[str, str]]:
        command = [sys.executable, "-m", "tests.mutants.battery", "--quick", *parts]
        status, out = run_mutant(command, BUILD, name, limit)
        return status, (json.loads(out.strip().splitlines()[-1])["caught"] or {}) if status == 0 else {}

    status, caught = run(parts, limit)
    if caught and caught["kind"] == "running":  # something else may have failed
        status, caught = run([caught["part"]], limit)
    if status is None:
        return Verdict("", f"the battery did not end in {limit:.0f} s")
    if status:
        return Verdict(f"battery: exit status {status}")
    return Verdict(f"{caught['part']}: {caught['kind']}", caught["text"][:200]) if caught else PASSES


def evaluated(change: Change, name: str, cover: Cover, limit: float, tests_only: bool = False) -> Outcome:
    """Tries one mutant on the tests that reach its function, then on the parts of the battery that do, then, for C,
    on the tests again, under sanitizers. limit: seconds for each.
    """
    started = time.perf_counter()
    tests, parts = cover.tests(change)
    if tests_only:
        parts = []
    if cover.never(change):
        verdict = Verdict("", "no test reaches it")
    elif not tests and not parts:
        verdict = Verdict("", "no test reaches its function")
    else:
        verdict = of_tests(BUILD, tests[:FIRST], name, limit) if tests else PASSES
        if verdict == PASSES and tests[FIRST:]:
            verdict = of_tests(BUILD, tests[FIRST:], name, limit)
        if verdict == PASSES and parts:
            verdict = of_battery(parts, name, limit)
        if not verdict.by and tests and change.file.endswith(".c") and not tests_only:
            again = of_tests(SANITIZED, tests, name, limit)
            verdict = again if again.by else verdict
    cover.note(change, verdict.by)
    return Outcome(key(change), change.file, *verdict, round(time.perf_counter() - started, 1))


# ---- the whole sample


def run(
    sampled: Sequence[Change],
    jobs: int,
    limit: float,
    known: dict[str, Outcome],
    keep: Path,
    tests_only: bool = False,
    given: Sequence[str] = (),
) -> list[Outcome]:
    """Outcomes in the sample's order. known: outcomes that need not be tried again. given: tests, instead of those of
    the table."""
    left = [change for change in sampled if key(change) not in known and not equivalent(change)]
    names = dict(zip(map(key, left), built(left, sanitized=not tests_only)))
    cover = Cover(given)

    def one(change: Change) -> Outcome:
        if equivalent(change):
            return Outcome(key(change), change.file, "", "equivalent", 0.0)
        outcome = known.get(key(change)) or evaluated(change, names[key(change)], cover, limit, tests_only)
        if key(change) not in known:
            with keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome) + "\n")
        return outcome

    outcomes = []
    with ThreadPoolExecutor(jobs) as pool:
        for change, outcome in zip(sampled, pool.map(one, sampled)):
            outcomes.append(outcome)
            what = f"noticed by {outcome.by} {outcome.why}" if outcome.by else f"SURVIVES, {outcome.why}"
            if outcome.why == "equivalent":
                what = "equivalent"
            print(f"{key(change)}\n    {what}  ({outcome.seconds:.0f} s)", flush=True)
    return outcomes


def without_a_mutant(outcomes: Sequence[Outcome]) -> str:
    """The failures of the tests that noticed something, on unchanged sources: "", if they pass."""
    for folder in (BUILD, SANITIZED):
        noticed = [one for one in outcomes if (one.why == BY_SANITIZERS) == (folder == SANITIZED)]
        tests = sorted({one.by.partition("[")[0] for one in noticed if "::" in one.by})
        status, out = run_mutant(tests_command(tests), folder, "", 600) if tests else (0, "")
        if status != 0:
            return f"the tests fail without a mutant, in {folder}:\n{out[-2000:]}"
    return ""


def score(outcomes: Sequence[Outcome]) -> float:
    """The score in percent, without equivalent mutants."""
    real = [outcome for outcome in outcomes if outcome.why != "equivalent"]
    return 100 * sum(bool(outcome.by) for outcome in real) / len(real) if real else 100.0


def scores(outcomes: Sequence[Outcome]) -> str:
    """The scores as a table."""
    lines = ["| file | tried | noticed | equivalent | score |", "|---|---|---|---|---|"]
    by_file = {outcome.file: [other for other in outcomes if other.file == outcome.file] for outcome in outcomes}
    for file, some in [*sorted(by_file.items()), ("all", list(outcomes))]:
        noticed, same = sum(bool(one.by) for one in some), sum(one.why == "equivalent" for one in some)
        percent = f"{score(some):.0f} %" if len(some) > same else "-"
        lines.append(f"| {file} | {len(some)} | {noticed} | {same} | {percent} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", nargs="+", default=["csrc", "pmstore"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=180.0)
    parser.add_argument("--least", type=float, default=0.0, help="percent")
    parser.add_argument("--tests-only", action="store_true")
    parser.add_argument("--tests", nargs="+", default=[])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--survivors", action="store_true")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    wanted = [file.rstrip("/") for file in options.files]
    files = [file for file in (*C_FILES, *PYTHON_FILES) if any(f"{file}/".startswith(f"{one}/") for one in wanted)]
    if not files:
        parser.error("none of these files is mutated")
    BUILD.mkdir(parents=True, exist_ok=True)
    keep = BUILD / f"seed-{options.seed}.jsonl"
    known: dict[str, Outcome] = {}
    if (options.resume or options.survivors) and keep.exists():
        outcomes = [Outcome(*json.loads(line)) for line in keep.read_text(encoding="utf-8").splitlines()]
        known = {outcome.key: outcome for outcome in outcomes if outcome.by or not options.survivors}
    started = time.perf_counter()
    sampled = sample(files, options.seed, options.sample, options.jobs)
    print(f"{len(sampled)} mutants drawn in {time.perf_counter() - started:.0f} s", flush=True)
    outcomes = run(sampled, options.jobs, options.limit, known, keep, options.tests_only, options.tests)
    problem = without_a_mutant(outcomes)
    if problem:
        raise SystemExit(problem)
    command = f"make mutants-lines ARGS='--sample {options.sample} --seed {options.seed} --files {' '.join(wanted)}'"
    text = f"`{command}`, {options.limit:.0f} s at most for each:\n\n{scores(outcomes)}"
    if options.write:
        fill(options.write, BEGIN, END, text)
    print(f"\n{text}\n\n{time.perf_counter() - started:.0f} s; not noticed:")
    for outcome in outcomes:
        if not outcome.by and outcome.why != "equivalent":
            print(f"  {outcome.key}\n    {outcome.why}")
    if score(outcomes) < options.least:
        raise SystemExit(f"{score(outcomes):.0f} % are noticed, and {options.least:.0f} % should be")


if __name__ == "__main__":
    main()
