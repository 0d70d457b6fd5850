"""Runs the benchmarks one after the other, keeps their raw results, and writes the report: `make bench`.

A benchmark that fails is reported and makes the exit status 1. The others run all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from _common import BUILD, HERE

NAMES = (
    "commit",
    "latency",
    "parts",
    "recovery",
    "readers",
    "aggregate",
    "archive",
    "lcdelta",
    "trackers",
    "large",
    "derived",
    "kmeans",
    "crash",
)


def command(name: str, options: argparse.Namespace) -> list[str]:
    """The command that runs one benchmark."""
    program = [sys.executable, str(HERE / f"bench_{name}.py")]
    if name == "kmeans":
        small = ["--rows", "7000", "--repeats", "2"] if options.quick else []
        return [*program, "--json", *small, *(["--dir", str(options.memory)] if options.memory else [])]
    program += ["--raw", str(options.results / f"{name}.json")]
    for place in ("memory", "disk"):
        if getattr(options, place):
            program += [f"--{place}", str(getattr(options, place))]
    if name in ("crash", "trackers", "large"):
        small = {
            "crash": ["--scale", "0.05"],
            "trackers": ["--scale", "0.1"],
            "large": ["--scale", "0.02", "--gib", "0.25"],
        }
        return [*program, *(small[name] if options.quick else [])]
    return [*program, *(["--quick"] if options.quick else [])]


def run_each(commands: dict[str, list[str]], kept: dict[str, Path]) -> NoReturn:
    """Runs commands, by name, and exits. kept: where the output of some of them goes."""
    stopped = []
    for name, arguments in commands.items():
        print(f"\n== {name} ==\n", flush=True)
        start = time.monotonic()
        with open(kept[name], "w") if name in kept else contextlib.nullcontext() as output:
            status = subprocess.run(arguments, stdout=output).returncode
        if status:
            stopped.append(name)
        print(
            f"\n{name}: {time.monotonic() - start:.0f} s{f', stopped with status {status}' if status else ''}",
            flush=True,
        )
    if stopped:
        print(f"stopped: {', '.join(stopped)}")
    raise SystemExit(1 if stopped else 0)


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a few minutes: to see that it runs")
    parser.add_argument("--memory", type=Path, help="a directory on tmpfs")
    parser.add_argument("--disk", type=Path, help="a directory on a disk")
    parser.add_argument("--results", type=Path, default=BUILD / "results", help="default: build/bench/results")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    options.results.mkdir(parents=True, exist_ok=True)
    commands = {name: command(name, options) for name in options.names or NAMES}
    kept = {"kmeans": options.results / "kmeans.json"}
    commands["report"] = [sys.executable, str(HERE / "report.py"), "--results", str(options.results)]
    run_each(commands, kept)


if __name__ == "__main__":
    main()
