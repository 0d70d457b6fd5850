"""Cuts of all workloads on all file systems, counted."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shlex
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from .cuts import Cut, plan, state
from .evaluate import Disk, evaluate
from .file_systems import BY_NAME
from .record import Recorded, WorkloadFailed, keep, record
from .system import PR_SET_PDEATHSIG, ROOT, libc, scratch
from .workloads import WORKLOADS

KEPT = ROOT / "build" / "power"
NESTED = 8  # cuts of a recovery
BRIEF = ("rows", "whole", "growth", "async")  # workloads
MOST_KEPT = 3  # recordings with failures that are kept for each workload


@dataclass
class Task:
    """So many cuts of a workload on a file system. lies: the calls of the workload's process that are prevented."""

    system: str
    workload: str
    cuts: int
    seed: int
    nested: bool = True
    honest: bool = True
    preload: str = ""
    lies: str = ""

    def seed_of(self, what: str) -> int:
        """The seed of one of its choices."""
        text = f"{self.seed} {self.system} {self.workload} {what}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")


@dataclass
class Tally:
    """Counts. open: cuts at which writes could be lost. refused: the kernel's reasons. mounted: includes file
    systems that were mounted after their check, because they have no journal or the kernel refused. gave_up: cuts
    where that check gave up blocks of a file. lost: stores without an acknowledged state where the check gave up
    blocks or the kernel refused, which is the file system's own loss. single: writes taken for FUA. requests:
    recorded ones.
    """

    cuts: int = 0
    open: int = 0
    mounted: int = 0
    checked: int = 0
    nested: int = 0
    gave_up: int = 0
    requests: int = 0
    single: int = 0
    commits: int = 0
    states: set[tuple[str, int]] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(mine, (Counter, set)):
                mine.update(value)
            else:
                setattr(self, name, mine + value)


def perform(task: Task) -> Tally:
    """Record, cut, evaluate; in a process of its own, which removes its temporary files."""
    tally = Tally()
    if task.lies:
        os.environ["PMSTORE_LIES"] = task.lies
    with scratch() as folder:
        try:
            recorded = record(BY_NAME[task.system], task.workload, folder / "run", preload=task.preload)
        except WorkloadFailed as error:
            tally.failures.append(f"{task.system}, {task.workload}: the workload stopped without a power cut: {error}")
            return tally
        finally:
            os.environ.pop("PMSTORE_LIES", None)
        tally.requests, tally.single = len(recorded.recording.requests), recorded.recording.single
        tally.commits = len(recorded.states)
        cuts = plan(recorded.recording, task.cuts, task.seed_of("cuts"))
        inside = cuts[task.seed_of("nested") % len(cuts)] if task.nested and cuts else None
        _cut(task, tally, recorded, folder / "run", cuts, inside)
    return tally


def _cut(task: Task, tally: Tally, recorded: Recorded, directory: Path, cuts: list[Cut], inside: Cut | None) -> None:
    """inside: the cut after which recovery is recorded, and cut as well."""
    image, point = directory / "cut", directory / "left"
    point.mkdir()
    disk = Disk(image, recorded, task.honest)
    kept = 0
    for cut in cuts:
        disk.become(cut)
        if cut == inside:
            _nest(task, tally, recorded, cut, image, directory)
            disk.become(cut)
        verdict = evaluate(recorded, cut, image, point)
        tally.cuts += 1
        tally.open += bool(state(recorded.recording, cut.at, task.honest).open)
        if verdict.refused:
            tally.refused[verdict.refused] += 1
        tally.mounted += verdict.mounted
        tally.gave_up += bool(verdict.lost)
        if verdict.found >= 0:
            tally.checked += 1
            tally.states.add((recorded.workload, verdict.found))
        if verdict.failure and (verdict.refused or verdict.lost):
            tally.lost[f"{recorded.workload}: {verdict.failure} ({verdict.lost or verdict.refused})"] += 1
        elif verdict.failure:
            kept += 1
            tally.failures.append(_failure(task, recorded, cut, verdict.failure, directory, kept <= MOST_KEPT))


def _failure(task: Task, recorded: Recorded, cut: Cut, failure: str, directory: Path, keeping: bool) -> str:
    """A text with the command that reproduces the failure, from a recording that is kept."""
    text = f"{task.system}, {recorded.workload}, seed {task.seed}, {cut.kind} at {cut.at}: {failure}"
    if not keeping or task.lies or not task.honest:
        return text
    target = KEPT / f"{task.system}-{task.workload}-{recorded.workload}-{task.seed}"
    if not target.exists():
        keep(directory, target)
    return f"{text}\n    make power REPLAY={shlex.quote(f'{target.relative_to(ROOT)}:{cut.at}:{cut.kind}:{cut.seed}')}"


def _nest(task: Task, tally: Tally, recorded: Recorded, cut: Cut, image: Path, directory: Path) -> None:
    """Record the recovery of an image, including the kernel's recovery of its journal, and cut it."""
    least, most = recorded.bounds(cut.at)
    system = BY_NAME[task.system]
    if least < 0 or not system.journal:
        return
    before = recorded.states[least : most + 1]
    nested = directory / "nested"
    try:
        again = record(system, "recover", nested, base=image, before=before)
    except (WorkloadFailed, OSError):
        return  # the image's own verdict reports its problem
    inner = Tally()
    cuts = plan(again.recording, NESTED, task.seed_of("inside"))
    _cut(task, inner, again, nested, cuts, None)
    inner.nested, inner.states = inner.cuts, set()
    tally.add(inner)
    shutil.rmtree(nested)


def replay(folder: Path, cut: Cut, target: Path) -> tuple[Recorded, Path]:
    """Load a kept recording, and build the image that a cut of it leaves, in a folder."""
    from .record import load

    recorded = load(folder)
    image = target / "cut"
    Disk(image, recorded).become(cut)
    return recorded, image


# ---- all of them


def tasks(systems: list[str], workloads: list[str], cuts: int, seed: int, nested: bool) -> list[Task]:
    """Tasks with so many cuts in total, rounded up by less than one each."""
    each = -(-cuts // (len(systems) * len(workloads)))
    return [Task(system, name, each, seed, nested) for name in workloads for system in systems]


CONTROLS = {
    "the disk ignores flushes": {"honest": False},
    "every sync is left out": {"lies": "fdatasync fsync RWF_DSYNC sync_file_range"},
    "RWF_DSYNC is left out": {"lies": "RWF_DSYNC"},
    "fdatasync is left out": {"lies": "fdatasync"},
    "sync_file_range is left out": {"lies": "sync_file_range"},
}
"""Mistakes that must be noticed: the harness would be useless otherwise."""


def control_tasks(name: str, cuts: int, seed: int, liar: str, brief: bool) -> list[Task]:
    """Tasks on the two main file systems of pmstore, with workloads whose commits use all ways. brief: one workload."""
    how = CONTROLS[name]
    preload = liar if "lies" in how else ""
    return [
        Task(system, workload, cuts, seed, nested=False, preload=preload, **how)
        for system in ("ext4-ordered", "xfs")
        for workload in (("rows",) if brief else ("rows", "whole", "new"))
    ]


def perform_all(todo: list[Task], jobs: int) -> Iterator[tuple[Task, Tally]]:
    """Each task with its tally, in the order in which they end."""
    with ProcessPoolExecutor(jobs, initializer=_until_told_to_end) as pool:
        running = {pool.submit(_perform, task): task for task in todo}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _perform(task: Task) -> Tally:
    """Ends this process on request: the pool would continue with the next task."""
    try:
        return perform(task)
    except KeyboardInterrupt:
        os._exit(1)


def _until_told_to_end() -> None:
    """The process that started this one handles interrupts. If that process dies, this one ends, and cleans up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def names(given: list[str] | None, known: dict[str, object], what: str) -> list[str]:
    """The chosen names. Raises ValueError if one isn't known."""
    for name in given or []:
        if name not in known:
            raise ValueError(f"no {what} is called {name!r}: {', '.join(known)}")
    return given or list(known)


WORKLOAD_NAMES: dict[str, object] = dict(WORKLOADS)
SYSTEM_NAMES: dict[str, object] = dict(BY_NAME)
