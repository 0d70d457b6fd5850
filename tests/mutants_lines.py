"""How many small changes of the code, which nobody chose, do the tests notice? A seeded sample of all there are.

python tests/mutants_lines.py               exit status 1 if the score is below --least
  --sample N --seed N     how many, and which: a larger sample of the same seed holds the smaller one
  --files PATH …          files or folders instead of all
  --limit SECONDS         for the tests of one mutant
  --resume                what an earlier run of this seed has tried is not tried again
  --survivors             but for what nothing noticed then
  --write FILE            puts the scores between the marks of docs/mutants.md

tests/mutants_c.py and tests/mutants_python.py have the operators, tests/mutants_reach.py says which tests reach what,
tests/mutants_equivalent.py which mutants are none.
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
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import mutants_c, mutants_python  # noqa: E402
from tests.mutants_build import VARIABLE, Edit, build, chosen, fill, small_files, written  # noqa: E402
from tests.mutants_c import Change  # noqa: E402
from tests.mutants_equivalent import ELSEWHERE, EQUIVALENT  # noqa: E402
from tests.mutants_reach import C_FILES, COVER, PYTHON_FILES, environment  # noqa: E402

BUILD = ROOT / "build" / "mutants-lines"
BEGIN, END = "<!-- score per file: begin -->", "<!-- score per file: end -->"
HANGS = 20  # seconds; no test that is chosen takes half as long
HANG_VARIABLE = "PMSTORE_MUTANT_HANGS"


class Outcome(NamedTuple):
    """by: the test, or the part of the battery, that noticed it; "" if none did. why: not; or what it said."""

    key: str
    file: str
    by: str
    why: str
    seconds: float


def key(change: Change) -> str:
    return f"{change.file}:{change.line} {change.function}: {change.operator}: {change.shown()}"


def changes_of(file: str) -> list[Change]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return list((mutants_python if file.endswith(".py") else mutants_c).changes_of(file, text))


def drawn(files: Sequence[str], seed: int) -> list[Change]:
    """All mutants of these files, in an order that the seed decides."""
    every = [change for file in files for change in changes_of(file)]
    random.Random(seed).shuffle(every)
    return every


# ---- which of them are mutants


@cache
def compiler() -> list[str]:
    core = runpy.run_path(str(ROOT / "csrc" / "build_core.py"))
    return [*core["compiler"](), "-std=gnu11", "-O1", "-w", f"-I{ROOT / 'csrc'}", "-x", "c", "-o", "-"]


def compiled(text: str, *options: str) -> str | None:
    done = subprocess.run([*compiler(), *options, "-"], input=text, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


@cache
def unchanged(file: str) -> str | None:
    return compiled((ROOT / file).read_text(encoding="utf-8"), "-S")


def applied(change: Change, text: str) -> str:
    """The text with the change, in as many lines as before."""
    gap = "\n" * (change.old.count("\n") - change.new.count("\n"))
    return text[: change.start] + change.new + gap + text[change.end :]


def is_mutant(change: Change) -> bool:
    """It compiles, also as a choice, and to something else than the sources."""
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
    """As tests/mutants_equivalent.py says."""
    return any(
        (one.file, one.line) == (change.file, change.at) and one.new in " ".join(change.new.split())
        for one in EQUIVALENT
    )


def sample(files: Sequence[str], seed: int, size: int) -> list[Change]:
    found: list[Change] = []
    for change in drawn(files, seed):
        if len(found) == size:
            break
        if not re.fullmatch(ELSEWHERE.get(change.file, ""), change.function) and is_mutant(change):
            found.append(change)
    return found


def built(sampled: Sequence[Change], folder: Path) -> list[str]:
    """One build of all of them. Their names, by which one is chosen."""
    names = [f"{number}" for number in range(1, len(sampled) + 1)]
    edits: dict[str, list[Edit]] = {}
    for number, change in enumerate(sampled, 1):
        edits.setdefault(change.file, []).append(Edit(change.start, change.end, str(number), number, change.new))
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in edits}
    build(written(texts, edits, names), folder)
    return names


# ---- what is tried on one


class Cover:
    """Which tests reach a function, as tests/mutants_cover.json says, without those that are no more."""

    def __init__(self) -> None:
        table = json.loads(COVER.read_text(encoding="utf-8"))
        self.names: list[str] = table["names"]
        self.files: dict[str, Any] = table["files"]
        self.missing = {number for number, name in enumerate(self.names) if not self.exists(name)}

    @staticmethod
    @cache
    def text(file: str) -> str:
        path = ROOT / file
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def exists(self, name: str) -> bool:
        file, _, function = name.partition("::")
        return not function or re.search(rf"\b{re.escape(function)}\b", self.text(file)) is not None

    def tests(self, change: Change) -> tuple[list[str], list[str]]:
        """Tests, and parts of the battery. Of a new function, those of its file."""
        functions = self.files.get(change.file, {"tests": {}})["tests"]
        numbers = functions.get(change.function)
        if numbers is None:
            numbers = sorted({number for some in functions.values() for number in some[:4]})
        names = [self.names[number] for number in numbers if number not in self.missing]
        return [name for name in names if "::" in name], [name for name in names if "::" not in name]

    def never(self, change: Change) -> bool:
        return change.at in self.files.get(change.file, {"never": []})["never"]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """As a plugin of the tests that are tried: a test that does not end has noticed something."""
    if os.environ.get(HANG_VARIABLE):
        faulthandler.dump_traceback_later(float(os.environ[HANG_VARIABLE]), exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def ran(command: list[str], folder: Path, name: str, limit: float) -> tuple[int | None, str, int]:
    """Exit status (None: it did not end), output and process."""
    scratch = folder / f"scratch-{name}"
    scratch.mkdir(exist_ok=True)
    variables = {**environment(folder), VARIABLE: name, "TMPDIR": str(scratch), HANG_VARIABLE: str(HANGS)}
    variables = {variable: value for variable, value in variables.items() if value}
    with subprocess.Popen(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True, preexec_fn=small_files,
    ) as process:  # fmt: skip
        try:
            out = process.communicate(timeout=max(limit, 1.0))[0]
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            status, out = None, ""
        try:
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        except ProcessLookupError:
            pass
    shutil.rmtree(scratch, ignore_errors=True)
    for left in Path("/dev/shm").glob(f"pmstore-mutant-{process.pid}-*"):
        shutil.rmtree(left, ignore_errors=True)
    return status, out, process.pid


def tests_command(tests: Sequence[str]) -> list[str]:
    options = shlex.split("-x -q -p no:cacheprovider -p tests.mutants_lines -W ignore --tb=no -m 'not slow'")
    return [sys.executable, "-m", "pytest", *options, *tests]


def battery(folder: Path, name: str, parts: Sequence[str], limit: float) -> tuple[int | None, dict[str, str]]:
    """Exit status, and what the battery has caught."""
    command = [sys.executable, "-m", "tests.mutants_battery", "--quick", *parts]
    status, out, _ = ran(command, folder, name, limit)
    return status, (json.loads(out.strip().splitlines()[-1])["caught"] or {}) if status == 0 else {}


def judged(folder: Path, change: Change, name: str, cover: Cover, limit: float) -> Outcome:
    """Tries one mutant on the tests that reach its function, then on the parts of the battery that do."""
    started = time.perf_counter()

    def outcome(by: str, why: str = "") -> Outcome:
        return Outcome(key(change), change.file, by, why, round(time.perf_counter() - started, 1))

    if cover.never(change):
        return outcome("", "no test reaches it")
    tests, parts = cover.tests(change)
    if not tests and not parts:
        return outcome("", "no test reaches its function")
    if tests:
        status, out, _ = ran(tests_command(tests), folder, name, limit)
        if status is None:
            return outcome("", f"the tests did not end in {limit:.0f} s")
        if status in (3, 4) and ran(tests_command(tests), folder, "", limit)[0] in (3, 4):
            raise SystemExit(f"pytest fails, or a test of {COVER.name} is no more:\n{out[-2000:]}")
        if status not in (0, 5):
            found = re.search(r"^(?:FAILED|ERROR) (\S+)", out, re.MULTILINE)
            ended = f"exit status {status}" if status != 1 else "a test that does not end"
            return outcome(found[1] if found else ended)
    if parts:
        left = limit - (time.perf_counter() - started)
        status, caught = battery(folder, name, parts, left)
        if caught and caught["kind"] == "running":  # it may have been something else that failed
            status, caught = battery(folder, name, [caught["part"]], limit)
        if status is None:
            return outcome("", f"the battery did not end in {limit:.0f} s")
        if status:
            return outcome(f"battery: exit status {status}")
        if caught:
            return outcome(f"{caught['part']}: {caught['kind']}", caught["text"][:200])
    return outcome("", "all pass")


# ---- the whole


def run(sampled: Sequence[Change], jobs: int, limit: float, known: dict[str, Outcome], keep: Path) -> list[Outcome]:
    """Outcomes in the sample's order. known: what need not be tried again."""
    left = [change for change in sampled if key(change) not in known and not equivalent(change)]
    names = dict(zip(map(key, left), built(left, BUILD)))
    cover = Cover()

    def one(change: Change) -> Outcome:
        if equivalent(change):
            return Outcome(key(change), change.file, "", "equivalent", 0.0)
        outcome = known.get(key(change)) or judged(BUILD, change, names[key(change)], cover, limit)
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
    """What the tests that noticed something say of the sources as they are: "", if they pass."""
    tests = sorted({outcome.by.partition("[")[0] for outcome in outcomes if "::" in outcome.by})
    status, out, _ = ran(tests_command(tests), BUILD, "", 600) if tests else (0, "", 0)
    return "" if status == 0 else f"the tests fail without a mutant:\n{out[-2000:]}"


def score(outcomes: Sequence[Outcome]) -> float:
    """Percent, of those that are not equivalent."""
    real = [outcome for outcome in outcomes if outcome.why != "equivalent"]
    return 100 * sum(bool(outcome.by) for outcome in real) / len(real) if real else 100.0


def scores(outcomes: Sequence[Outcome]) -> str:
    """A table."""
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
    parser.add_argument("--limit", type=float, default=75.0)
    parser.add_argument("--least", type=float, default=0.0, help="percent")
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
    sampled = sample(files, options.seed, options.sample)
    print(f"{len(sampled)} mutants drawn in {time.perf_counter() - started:.0f} s", flush=True)
    outcomes = run(sampled, options.jobs, options.limit, known, keep)
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
