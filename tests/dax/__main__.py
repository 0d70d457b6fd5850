"""`make test-dax`: stores in a Linux guest with emulated persistent memory, whose power is cut (docs/dax.md)."""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from . import guest
from .guest import ROOT, Guest
from .inside import CHOSEN, CONTRACT, OWN

ARGUMENTS = argparse.Namespace()

VIRTIO = "virtio" + guest.RAW

FOLDER = ROOT / "build" / "dax"


class Failed(Exception):
    """A part failed; the text has the guest's output."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.dax", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--cuts", type=int, default=None, help="of the power, on each file system; default: 3 and 2")
    parser.add_argument("--seed", type=int, default=None, help="of the moments of the cuts")
    parser.add_argument("--jobs", type=int, default=2, help="guests at once (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="prints what the tests print")
    parser.add_argument("--command", nargs=argparse.REMAINDER, help="runs Python with these arguments in a guest")
    return parser.parse_args()


# ---- tests in the guest


def tests(host: Guest, folder: Path, seed: int) -> str:
    """The part that runs tests in one guest, on each kind of mount."""
    memories = [
        guest.new_memory(folder / name, fs) for name, fs in (("ext4", "ext4"), ("xfs", "xfs"), (VIRTIO, "ext4"))
    ]
    always = "dax=always"
    phases = [
        ("ext4", "ext4", "relatime", "none", OWN[1:]),
        (VIRTIO, "ext4", always, "late", OWN[1:]),
        ("xfs", "xfs", always, "sync", ["-k", "dax and not way_of_flushing", *OWN]),
        ("ext4", "ext4", always, "sync", ["-k", CHOSEN, *CONTRACT]),
        ("ext4", "ext4", always, "sync", ["-k", "dax", *OWN]),  # its last test leaves a bad block
    ]
    boot = host.start(memories, ["-m", "tests.dax.inside", "memory", json.dumps(phases)])
    status, text = boot.end()
    if status:
        raise Failed(f"status {status}\n{text[-9000:]}\n(all of it: {folder / 'ext4.console'})")
    if ARGUMENTS.verbose:
        print(text)
    for memory in memories:
        memory.unlink()
    return "\n  " + "\n  ".join(re.findall(r"^(?:PHASE|\d+ (?:passed|failed)).*", text, re.M)) + "\n "


# ---- cuts of the power


def recovered(text: str) -> tuple[int, int] | None:
    """What the writer found: the commits of its two stores."""
    for line in text.splitlines():
        if line.startswith("RECOVERED"):
            first, second = map(int, line.split()[1:])
            return first, second
    return None


def evaluate(acknowledged: int, text: str) -> str:
    """What is wrong with what was recovered; nothing if all is right."""
    found = recovered(text)
    if found is None:
        return "the stores were not recovered, or are damaged:\n" + text[-6000:]
    for commit in found:
        if not acknowledged <= commit <= acknowledged + 1:
            return f"acknowledged {acknowledged}, recovered commits {found[0]} and {found[1]}"
    return ""


def cuts(fs: str, many: int, persist: str = "mem-ctrl", mistake: bool = False) -> Part:
    """A part that cuts the power. The guest that is booted next recovers, verifies, and is cut itself.

    mistake: after the cuts, a process acknowledges commits before it makes them. The last guest has to notice that.
    """

    def run(host: Guest, folder: Path, seed: int) -> str:
        rng = random.Random(f"{seed} {fs}")
        memory = guest.new_memory(folder / "memory", fs)
        writer = ["-m", "tests.dax.writer", "cpu_cache" if persist == "cpu" else "memory"]
        acknowledged, commits = 0, []
        count = ARGUMENTS.cuts or many
        for number in range(count + mistake):
            early = number == count
            boot = host.start([memory], [*writer, str(acknowledged), *["early"] * early], fs=fs, persist=persist)
            after = 1 if early else rng.choice((1, 3, 8, 20))  # the first of them cut growth and creation
            before = acknowledged
            for line_number, line in enumerate(boot.lines(), 1):
                acknowledged = int(line)
                if line_number == after:
                    time.sleep(rng.random() * 0.3)  # somewhere in the next commits; they go on being acknowledged
                    boot.cut()
            text = boot.end()[1]
            if acknowledged == before:
                raise Failed(f"cut {number}: no commit was acknowledged\n{text[-6000:]}")
            if number:
                expect_right(before, text)
            commits.append(acknowledged)
        boot = host.start([memory], [*writer, str(acknowledged), "check"], fs=fs, persist=persist)
        status, text = boot.end()
        if status:
            raise Failed(text[-6000:])
        if fs == "ext4" and (found := guest.check_file_system(memory)):
            raise Failed(found)
        memory.unlink()
        done = f"{count} cuts, after commits {', '.join(map(str, commits[:count]))}"
        if not mistake:
            expect_right(acknowledged, text)
            return f"{done}; at last recovered {recovered(text)}"
        wrong = evaluate(acknowledged, text)
        if not wrong.startswith("acknowledged"):
            raise Failed(f"a mutant was not noticed: {wrong or 'nothing is wrong'}")
        return f"{done}; a mutant was noticed: {wrong}"

    return run


def expect_right(acknowledged: int, text: str) -> None:
    """Raise Failed if anything is wrong with what was recovered."""
    wrong = evaluate(acknowledged, text)
    if wrong:
        raise Failed(wrong)


Part = Callable[[Guest, Path, int], str]

PARTS: dict[str, Part] = {
    "tests": tests,
    "cuts on ext4, and a mutant": cuts("ext4", 3, mistake=True),
    "cuts on xfs, with eADR": cuts("xfs", 2, "cpu"),
}


def run_part(host: Guest, name: str, seed: int) -> str:
    folder = FOLDER / "run" / re.sub(r"\W+", "-", name)
    folder.mkdir(parents=True)
    begun = time.monotonic()
    try:
        return f"{PARTS[name](host, folder, seed)} ({time.monotonic() - begun:.0f} s)"
    except Failed as failed:
        raise Failed(f"{name}, seed {seed}: {failed}") from None


def main() -> int:
    begun = time.monotonic()
    seed = ARGUMENTS.seed or random.randrange(1, 1 << 30)
    try:
        packages = guest.missing()
        if packages:
            guest.install(packages)
        host = Guest(FOLDER)
        host.compile(["-m", "tests.dax.inside"], ["-c", "import tests.dax.writer"])
    except guest.Unusable as unusable:
        print(f"tests on DAX: skipped, {unusable}")
        return 0
    shutil.rmtree(FOLDER / "run", ignore_errors=True)
    if ARGUMENTS.command:
        (FOLDER / "run").mkdir()
        status, text = host.start([guest.new_memory(FOLDER / "run/memory", "ext4")], ARGUMENTS.command).end()
        print(text)
        return status
    print(f"guest kernel {host.kernel}, seed {seed} ({time.monotonic() - begun:.0f} s)", flush=True)
    names = ARGUMENTS.only or list(PARTS)
    status = 0
    with ThreadPoolExecutor(ARGUMENTS.jobs) as pool:
        running: dict[str, Future[str]] = {name: pool.submit(run_part, host, name, seed) for name in names}
        for name, result in running.items():
            try:
                print(f"{name}: {result.result()}", flush=True)
            except Failed as failed:
                print(f"FAILED: {failed}", flush=True)
                status = 1
    if not status:
        shutil.rmtree(FOLDER / "run")
    print(f"{'failed' if status else 'passed'} in {time.monotonic() - begun:.0f} s")
    return status


if __name__ == "__main__":
    ARGUMENTS = options()
    sys.exit(main())
