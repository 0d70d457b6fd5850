"""`make power`: cuts the power of real file systems under pmstore, on a block device of our own (docs/power.md)."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from . import run, system
from .cuts import Cut
from .evaluate import evaluate
from .file_systems import BY_NAME, missing

HEADS = (
    "file system",
    "cuts",
    "with writes to lose",
    "in recovery",
    "mounted",
    "refused at first",
    "stores checked",
    "lost by the file system",
    "failures",
)
SOURCE = Path(__file__).with_name("liar.c")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.power", description=__doc__)
    parser.add_argument("--cuts", type=int, default=2400, help="over all workloads and file systems (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fs", nargs="+", help=f"of {', '.join(BY_NAME)}; default: all")
    parser.add_argument("--workload", nargs="+", help=f"of {', '.join(run.WORKLOADS)}; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--brief", action="store_true", help="four workloads, one control, no cut recoveries")
    parser.add_argument("--replay", metavar="FOLDER:AT:KIND:SEED", help="one cut of a recording that was kept")
    return parser.parse_args()


def skip(reason: str) -> None:
    print(f"power cuts: skipped, {reason}")
    raise SystemExit(0)


def install(packages: list[str]) -> None:
    print(f"Installing {' '.join(packages)} …", flush=True)
    try:
        subprocess.run(["apt-get", "install", "-qq", "-y", *packages], check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        skip(f"as {' '.join(packages)} can't be installed")


def try_one(name: str) -> None:
    """Raises Unusable if a file system can't be mounted here: some containers allow everything else."""
    one = BY_NAME[name]
    try:
        with system.scratch() as folder:
            (folder / "mounted").mkdir()
            one.made(folder / "image")
            with system.loop(folder / "image") as device:
                with system.mounted(device, folder / "mounted", one.kind, one.options):
                    pass
    except OSError as error:
        raise system.Unusable(f"{name} can't be mounted: {error}") from None


def table(tallies: dict[str, run.Tally]) -> str:
    lines = ["| " + " | ".join(HEADS) + " |", "|" + " --- |" * len(HEADS)]
    for name, t in tallies.items():
        own = (sum(t.refused.values()), t.checked, sum(t.lost.values()))
        cells = (name, t.cuts, t.open, t.nested, t.mounted, *own, len(t.failures))
        lines.append("| " + " | ".join(f"{c:,}" if isinstance(c, int) else c for c in cells) + " |")
    return "\n".join(lines)


def details(tallies: dict[str, run.Tally]) -> None:
    for name, t in tallies.items():
        print(
            f"\n{name}: {t.requests:,} requests of {t.commits} commits recorded, {t.single} of them a single write that"
            f" FUA makes durable; {len(t.states)} different states found"
        )
        for reason, count in t.refused.most_common():
            print(f"    {count} refused: {reason}")
        if t.gave_up:
            print(f"    {t.gave_up} times its check gave up blocks of a file, for its own map of them was torn or lost")
        for reason, count in t.lost.most_common():
            print(f"    {count} lost by the file system itself: {reason}")
        for failure in t.failures:
            print(f"    FAILURE {failure}")


def cut_all(chosen: argparse.Namespace, systems: list[str], workloads: list[str]) -> bool:
    """Cut all workloads; whether there was no failure."""
    todo = run.tasks(systems, workloads, chosen.cuts, chosen.seed, nested=not chosen.brief)
    tallies = {name: run.Tally() for name in systems}
    for n, (task, tally) in enumerate(run.perform_all(todo, chosen.jobs), 1):
        tallies[task.system].add(tally)
        if sys.stdout.isatty():
            print(f"\r{n} of {len(todo)}: {task.workload} on {task.system}      ", end="", flush=True)
    print("\r" + table(tallies), flush=True)
    details(tallies)
    return not any(t.failures for t in tallies.values())


def controls(chosen: argparse.Namespace, folder: Path) -> bool:
    """Whether each mutant was noticed."""
    liar = folder / "liar.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(liar), "-ldl"], check=True)
    names = ["every sync is left out"] if chosen.brief else list(run.CONTROLS)
    todo, of = [], {}
    for name in names:
        for task in run.control_tasks(name, 6 if chosen.brief else 24, chosen.seed, str(liar), chosen.brief):
            of[id(task)] = name
            todo.append(task)
    seen, cuts = defaultdict(int), defaultdict(int)
    for task, tally in run.perform_all(todo, chosen.jobs):
        seen[of[id(task)]] += len(tally.failures)
        cuts[of[id(task)]] += tally.cuts
    print("\nControls, which have to fail:")
    for name in names:
        print(f"    {name}: {seen[name]} failures in {cuts[name]} cuts{'' if seen[name] else ': NOT NOTICED'}")
    return all(seen[name] for name in names)


def replay(text: str) -> bool:
    folder, at, kind, seed = text.rsplit(":", 3)
    cut = Cut(int(at), kind, int(seed))
    with system.scratch() as scratch:
        recorded, image = run.replay(Path(folder), cut, scratch)
        (scratch / "left").mkdir()
        verdict = evaluate(recorded, cut, image, scratch / "left")
    print(f"{recorded.workload} on {recorded.system}, {cut}: states {recorded.bounds(cut.at)} are allowed")
    print(f"refused: {verdict.refused or 'no'}\nlost by the file system: {verdict.lost or 'nothing'}")
    print(f"failure: {verdict.failure or 'none'}\nstate: {verdict.found}")
    return not verdict.failure


def main() -> None:
    chosen = options()
    try:
        systems = run.names(chosen.fs, run.SYSTEM_NAMES, "file system")
        few = list(run.BRIEF) if chosen.brief else None
        workloads = run.names(chosen.workload or few, run.WORKLOAD_NAMES, "workload")
    except ValueError as error:
        raise SystemExit(f"power cuts: {error}") from None
    reason = system.missing()
    if reason:
        skip(reason)
    packages = missing([BY_NAME[name] for name in systems])
    if packages:
        install(packages)
    try:
        system.prepare()
        try_one(systems[0])
    except system.Unusable as error:
        skip(str(error))
    if chosen.replay:
        raise SystemExit(not replay(chosen.replay))
    for told_to_end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(told_to_end, signal.default_int_handler)
    begun = time.monotonic()
    with system.scratch() as folder:
        sound = cut_all(chosen, systems, workloads)
        noticed = controls(chosen, folder)
    told = "No failure." if sound else "FAILURES, see above."
    print(f"\nSeed {chosen.seed}, {time.monotonic() - begun:.0f} s. {told}")
    raise SystemExit(not (sound and noticed))


if __name__ == "__main__":
    main()
