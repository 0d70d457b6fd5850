"""The number of mutants that the crash explorer and the other parts of the battery notice: all of them, and no control.

python -m tests.mutants.score [name …]     all, or some; fails if one is missed, or a control is taken for one
  --jobs N            processes at once
  --kinds             also the mutants that each kind of crash state notices by itself (some minutes)
  --quick             one of the controls instead of all, with fewer crashes: each takes the whole battery, and
                      tests/core/test_crash.py explores the same recordings in a build without mutants
  --write             puts the tables between the marks of docs/crash-model.md

The case that noticed a mutant last time, according to the table there, is tried first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutants.battery import PARTS
from tests.mutants.build import VARIABLE, Mutant, build, fill, generated, remove
from tests.mutants.table import CONTROLS, MUTANTS
from tests.support.template import Template

ROOT = Path(__file__).resolve().parent.parent.parent

LIMIT = 240.0  # seconds for one mutant
LONGER = 5  # times as long for a control, which takes the whole battery
COMMAND = "make mutants"
TABLE = ROOT / "docs" / "crash-model.md"
BEGIN, END = "<!-- mutation score: begin -->", "<!-- mutation score: end -->"
LATER = ("tests.store.test_model",)  # modules that the battery imports when it needs them
FORK = "import sys; from tests.mutants.battery import forked; forked(*sys.argv[1:])"
FINE = Mutant("control-no-mutation", "-", "", "", "", "")


class Outcome(NamedTuple):
    """The outcome of a mutant. by: "" if nothing noticed it; one that does not end in time counts as not noticed,
    because a slow machine would raise the score otherwise. kinds: of crash states that each notice it alone.
    """

    mutant: Mutant
    by: str
    text: str
    states: int
    seconds: float
    kinds: tuple[str, ...] = ()
    ended: bool = True


def _is_control(mutant: Mutant) -> bool:
    return mutant.name.startswith("control-")


def _limit(mutant: Mutant) -> float:
    return LIMIT * (LONGER if _is_control(mutant) else 1)


@cache
def _template(folder: Path) -> Template:
    """A process that has imported the battery of this build: that takes two seconds, and a fork of it none."""
    return Template(["tests.mutants.battery", *LATER], {"PYTHONPATH": str(folder), VARIABLE: ""}, folder)


def close(folder: Path) -> None:
    """End the template of this build, so that this process is charged for what its forks used."""
    _template(folder).close()
    _template.cache_clear()


def _run(folder: Path, mutant: Mutant, *arguments: str) -> tuple[int | None, str]:
    """Exit status (None: it hung) and the last line of output. No module runs a mutant's code when it is imported
    (tests/mutants/test_mutants.py), so the mutant is chosen afterwards.
    """
    name, limit = "" if mutant is FINE else mutant.name, _limit(mutant)
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        started = time.monotonic()
        process = _template(folder).start("-c", FORK, name, output.name, *arguments, directory=folder)
        process.communicate(limit)
        remove(process.pid)
        hung = process.returncode == -signal.SIGKILL and time.monotonic() - started >= limit
        return None if hung else process.returncode, (output.read().strip().splitlines() or [""])[-1]


def noticed_before() -> dict[str, str]:
    """Mutants, and the part or the case of the battery that noticed each of them when the table was written."""
    return dict(
        re.findall(r"^\| ([\w-]+) \| [A-Z]+ \| [^|]* \| ([^|:*]+):", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    )


def evaluate(folder: Path, mutant: Mutant, kinds: bool = False, parts: Sequence[str] = ()) -> Outcome:
    """Run one mutant through the battery, or through parts of it; the first may be "--quick"."""
    started = time.perf_counter()
    status, line = _run(folder, mutant, *(parts or mutant.parts))
    seconds = time.perf_counter() - started
    if status is None:
        return Outcome(mutant, "", f"did not end in {_limit(mutant):.0f} s: run it alone", 0, seconds, ended=False)
    if status:
        return Outcome(mutant, f"{line}: abort", f"exit status {status}", 0, seconds)
    answer: dict[str, Any] = json.loads(line)
    caught = answer["caught"]
    if caught is None:
        return Outcome(mutant, "", "", answer["states"], seconds)
    alone: tuple[str, ...] = ()
    if kinds and caught["part"].startswith("crash/"):
        kind_status, kind_line = _run(folder, mutant, "--kinds")
        alone = tuple(json.loads(kind_line)) if kind_status == 0 else ("running",)
    by = f"{caught['part']}: {caught['kind']}" + (", nested" if caught["nested"] else "")
    return Outcome(mutant, by, caught["text"], answer["states"], seconds, alone)


def run(mutants: Sequence[Mutant], jobs: int, kinds: bool = False, quick: bool = False) -> list[Outcome]:
    """Build, and run these mutants. quick: controls have fewer crashes."""
    folder = build(generated([*MUTANTS, *CONTROLS]))
    first = noticed_before()
    outcomes = []

    def evaluated(mutant: Mutant) -> Outcome:
        every = mutant.parts or PARTS
        hint = [first[mutant.name]] if mutant.name in first else []
        fewer = ["--quick"] if quick and _is_control(mutant) else []
        parts = [*fewer, *hint, *(part for part in every if part not in hint)]
        return evaluate(folder, mutant, kinds and mutant in MUTANTS, parts)

    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(evaluated, mutants):
            outcomes.append(outcome)
            print(
                f"{outcome.mutant.name:46} {outcome.by or 'nothing noticed it':28} {outcome.states:6} states "
                f"{outcome.seconds:6.1f} s  {outcome.text[:100]} {' '.join(outcome.kinds)}",
                flush=True,
            )
    close(folder)
    return outcomes


def wrong(outcomes: Sequence[Outcome]) -> list[str]:
    """Mutants that were missed, controls that were not, and those of both that did not end."""
    return [
        outcome.mutant.name
        for outcome in outcomes
        if not outcome.ended or bool(outcome.by) == _is_control(outcome.mutant)
    ]


def tables(outcomes: Sequence[Outcome]) -> str:
    """The tables of docs/crash-model.md."""
    bugs = [outcome for outcome in outcomes if not _is_control(outcome.mutant)]
    controls = [outcome for outcome in outcomes if _is_control(outcome.mutant)]
    caught = sum(bool(outcome.by) for outcome in bugs)
    lines = [
        f"This run noticed {caught} of {len(bugs)} mutants, and {sum(bool(o.by) for o in controls)} of {len(controls)} "
        f"controls. `{COMMAND}` also tries those that were added since.",
        "",
        "| mutant | class | a test has to see | noticed by | states | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for outcome in bugs:
        mutant = outcome.mutant
        lines.append(
            f"| {mutant.name} | {mutant.kinds} | {mutant.sees} | {outcome.by or '**nothing**'} | {outcome.states} "
            f"| {outcome.seconds:.1f} |"
        )
    lines += ["", "| control | noticed by | states | seconds |", "|---|---|---|---|"]
    for outcome in controls:
        lines.append(
            f"| {outcome.mutant.name} | {outcome.by or 'nothing'} | {outcome.states} | {outcome.seconds:.1f} |"
        )
    if any(outcome.kinds for outcome in bugs):
        by_kind = Counter(kind for outcome in bugs for kind in outcome.kinds)
        crashed = sum(bool(outcome.kinds) for outcome in bugs)
        lines += [
            "",
            "Of the bugs that the crash explorer notices, so many are noticed by a single kind of state, 200 of each:",
            "",
        ]
        lines += ["| kind of crash state, by itself | mutants that it notices |", "|---|---|"]
        lines += [f"| {kind} | {count} of {crashed} |" for kind, count in by_kind.most_common()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kinds", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    every = [*MUTANTS, *(CONTROLS[:1] if options.quick else [*CONTROLS, FINE])]
    chosen = [mutant for mutant in every if not options.names or mutant.name in options.names]
    unknown = set(options.names) - {mutant.name for mutant in every}
    if unknown:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
    started = time.perf_counter()
    outcomes = run(chosen, options.jobs, options.kinds, options.quick)
    if options.write:
        fill(TABLE, BEGIN, END, tables(outcomes))
    missed = wrong(outcomes)
    print(
        f"{len(outcomes) - len(missed)} of {len(outcomes)} as they should be, in {time.perf_counter() - started:.0f} s"
    )
    if missed:
        raise SystemExit(f"not so: {', '.join(missed)}")


if __name__ == "__main__":
    main()
