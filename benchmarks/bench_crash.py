"""How many crash states are recovered and compared in a second, on a store of about 1 MiB: in C, and with a check in
Python. The store's own code runs for each state, as a program that opens the file would run it.

And how many states of other libraries' files a Python script checks in a second: in forks of a server, and in new
processes, alternately for each state. The script reads all, and accepts everything.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from _common import machine, parser, save, scratch

import pmstore
from pmstore.testing import CrashExplorer
from pmstore.testing._files import explore as files
from pmstore.testing._files.evaluator import CommandCheck, Evaluator
from pmstore.testing._files.model import Model
from pmstore.testing._files.record import record
from pmstore.testing._store.engine import Options, Tally, explore
from pmstore.testing._store.recording import Recorder, Recording

EXAMPLES = Path(__file__).parent.parent / "examples" / "crashes"
LIBRARIES = ("shelve", "sqlite3-wal-full", "joblib.dump", "h5py")
CHECK = f"""
import contextlib, sys
from pathlib import Path
sys.path.insert(0, {str(EXAMPLES)!r})
name, directory = sys.argv[1], Path(sys.argv[2])
with contextlib.suppress(Exception):
    if name == "shelve":
        import shelve
        with shelve.open(str(directory / "run"), "r") as shelf:
            dict(shelf)
    else:
        import save
        save.SAVERS[name].load(directory)
"""
SHELVE = """
import shelve, sys
with shelve.open(sys.argv[1] + "/run") as shelf:
    for k in (1, 2):
        shelf.update({str(i): [k * i] * 100 for i in range(20)})
        shelf.sync()
        print("saved", k)
"""


def workload(store: pmstore.Store) -> None:
    """The centres of a KMeans, and single rows of a larger array, in twenty commits."""
    rng = np.random.default_rng(1)
    table = store.create_array("table", (20, 1000), "f8")
    centres = store.create_array("centres", (10, 784), "f8")
    store.commit()
    for i in range(20):
        centres += rng.random(centres.shape)
        table[rng.integers(len(table))] += 1
        store["n"] = i
        store.commit()


def recorded(directory: Path, medium: str) -> tuple[Recording, int]:
    path = directory / f"{medium}.pm"
    with Recorder(path, medium) as recorder:
        store = pmstore.open(path)
        workload(store)
        store._drop(discard=True)
    return recorder.recording, path.stat().st_size


def rate(tally: Tally) -> float:
    """Distinct images, recovered and compared, in a second."""
    return tally.distinct / tally.seconds


def with_check(budget: int) -> float:
    """The same with a check in Python, through the public interface."""

    def check(store: pmstore.Store) -> None:
        assert "n" not in store or store["centres"].shape == (10, 784)

    with CrashExplorer("bench") as explorer:
        report = explorer.run(workload, check=check, budget=budget, media=("memory",), depth=0)
    return report.distinct / report.seconds


def processor(pid: int | None = None) -> float:
    """Processor seconds of this process and its children until now; of another process and its own, if given."""
    if pid is None:
        return sum(os.times()[:4])
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def with_script(name: str, directory: Path, count: int) -> dict[str, list[float]]:
    """Seconds of each state in a fork and in a new process, and processor seconds of all."""
    check, data = directory / "check.py", directory / name
    check.write_text(CHECK)
    data.mkdir()
    save_words = [sys.executable, str(EXAMPLES / "save.py"), name]
    if name == "shelve":
        recording = record([sys.executable, "-c", SHELVE, str(data)], data)
    else:
        record([*save_words, str(data), "--prepare"], data)
        recording = record([*save_words, str(data)], data)
    search = files.Search(Model(recording, "posix", 512, 0), files.Options(budget=count + 1))
    command = CommandCheck(f"{sys.executable} {check} {name} {{dir}}", 60)
    seconds: dict[str, list[float]] = {"fork": [], "new process": []}
    used = {"fork": 0.0, "new process": 0.0}
    with Evaluator(command) as forks, Evaluator(command.alone) as alone:
        for state, image in itertools.islice(search.states(), count + 1):
            said = search.model.said(state.point)
            for each, evaluate in (("fork", forks), ("new process", alone)):
                begun, before = time.perf_counter(), processor()
                assert evaluate(image, said) is None
                seconds[each].append(time.perf_counter() - begun)
                used[each] += processor() - before
        assert command.servers is not None and command.servers.usable
        used["fork"] += sum(processor(server.process.pid) for server in command.servers.all)
    found = {each: times[1:] for each, times in seconds.items()}  # the first fork has no libraries yet
    return {**found, **{f"{each}, processor": [used[each]] for each in used}}


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    budget = int(20_000 * arguments.scale)
    raw: dict[str, Any] = {}
    print(machine())
    print("distinct crash states recovered and compared per second, five runs: median (least – most)")
    with scratch(arguments.memory) as directory:
        for medium in ("memory", "file"):
            recording, size = recorded(directory, medium)
            for workers in sorted({1, os.cpu_count() or 1}):
                for depth in (0, 1):
                    options = Options(budget=budget, workers=workers, depth=depth)
                    rates = [rate(explore(recording, options)[0]) for _ in range(5)]
                    name = f"{medium}, {size / 2**20:.2f} MiB, {workers} process{'es' * (workers > 1)}, depth {depth}"
                    raw[name] = rates
                    middle = statistics.median(rates)
                    print(f"  {name:45} {middle:7,.0f}  ({min(rates):,.0f} – {max(rates):,.0f})")
    rates = [with_check(max(100, budget // 20)) for _ in range(5)]
    raw["memory, with a check in Python, 1 process"] = rates
    middle = statistics.median(rates)
    print(f"  {'memory, with a check in Python, 1 process':45} {middle:7,.0f}  ({min(rates):,.0f} – {max(rates):,.0f})")
    scripts(arguments.memory, max(10, int(150 * arguments.scale)), raw)
    save(arguments.raw, "bench_crash", raw)


def scripts(memory: Path, count: int, raw: dict[str, Any]) -> None:
    print(f"states a second through a Python script, one after the other, {count} states: forks, new processes, ratio;")
    print("states in a second of processor time, with the server's start: forks, new processes, ratio")
    for name in LIBRARIES:
        library = name.partition(".")[0]
        if library in ("joblib", "h5py") and importlib.util.find_spec(library) is None:
            print(f"  {name:20} is not installed")
            continue
        with scratch(memory) as directory:
            seconds = with_script(name, directory, count)
        raw[f"script, {name}"] = seconds
        fork, process = (statistics.median(seconds[each]) for each in ("fork", "new process"))
        used, alone = (count / seconds[f"{each}, processor"][0] for each in ("fork", "new process"))
        ratios = f"{process / fork:7,.1f}     {used:7,.0f} {alone:7,.1f} {used / alone:7,.1f}"
        print(f"  {name:20} {1 / fork:7,.0f} {1 / process:7,.1f} {ratios}")


if __name__ == "__main__":
    main()
