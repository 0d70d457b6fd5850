"""Runs the parts of the experiment one after the other, keeps their raw results, and writes the report: `make paper`.

PYTHONPATH=benchmarks python -m paper [checkpoints] [estimators] [kills] [--quick] [--mnist FILE | --openml]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from _common import HERE
from run import run_each

from . import data
from .report import RESULTS

NAMES = ("checkpoints", "estimators", "kills")


def main() -> None:
    """Run them. What stops is reported; the others run all the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="about two minutes: to see that it runs")
    parser.add_argument("--memory", type=Path, help="a directory on tmpfs")
    parser.add_argument("--disk", type=Path, help="a directory on a disk")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    data.add_options(parser)
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    options.results.mkdir(parents=True, exist_ok=True)
    shared = ["--quick"] if options.quick else []
    for place in ("memory", "disk"):
        if getattr(options, place):
            shared += [f"--{place}", str(getattr(options, place))]
    source = ["--mnist", str(options.mnist)] if options.mnist else ["--openml"] if options.openml else []
    commands = {}
    for name in options.names or NAMES:
        raw = options.results / f"paper-{name}.json"
        from_where = [] if name == "kills" else source
        commands[name] = [sys.executable, "-m", f"paper.{name}", "--raw", str(raw), *shared, *from_where]
    commands["report"] = [sys.executable, "-m", "paper.report", "--results", str(options.results)]
    run_each(commands, {})


if __name__ == "__main__":
    main()
