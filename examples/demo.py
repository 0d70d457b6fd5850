"""A KMeans fit of handwritten digits is killed many times, and gives the same result as a fit without kills.

A child process fits. This process kills it with SIGKILL at random moments after its first commit, and starts another
child, which continues after the last commit. At the end the result is compared, bit for bit, with scikit-learn's own
fit in this process. The program never sleeps, and all printed numbers are measured in this run.

    python examples/demo.py                      the digits that come with scikit-learn (1797, 8 × 8 pixels)
    python examples/demo.py --mnist mnist.npz    MNIST from a file: .npz, or IDX (train-images-idx3-ubyte.gz)
    python examples/demo.py --openml             MNIST (mnist_784) from openml.org

Exit status: 0 if every result is the same and there were at least five kills, otherwise 1; 2 if it can't start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# OpenMP's threads wait by spinning, which makes a fit much slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

try:
    import numpy as np
    import sklearn
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from sklearn.cluster import KMeans as SklearnKMeans
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    sys.exit(f"demo: {missing.name} is missing. Install it with pmstore's extras: pip install 'pmstore[sklearn,rich]'")

from mnist import NoImages, fetch_mnist, read_mnist

import pmstore
from pmstore.cluster import KMeans

NAME = "digits"
LEAST_KILLS = 5
ALONE = "commit, in a loop"  # as the rows below it, and the basis of all
LEAST_RUNS, MOST_RUNS = 100, 999
SECONDS = 4.0  # the intended time of a fit without kills, if the number of runs isn't given
RESULT = ("cluster_centers_", "labels_", "inertia_", "n_iter_")


class CannotStart(Exception):
    """The requested data don't exist; the text has a remedy."""


# ---- data ------------------------------------------------------------------------------------------------------------


def load_images(options: argparse.Namespace) -> tuple[Any, str]:
    """The images as rows of float64, and a description."""
    if options.mnist is not None:
        images = read_mnist(options.mnist)
        return images, f"{len(images):,} images from {options.mnist}"
    if options.openml:
        images = fetch_mnist()
        return images, f"{len(images):,} images of MNIST from openml.org"
    images = load_digits().data
    return images, f"{len(images):,} handwritten digits, 8 × 8 pixels, that come with scikit-learn"


# ---- the child: fits, and reports its progress -----------------------------------------------------------------------


def tell(event: str, **details: Any) -> None:
    """Send one line of JSON to the parent, in one write."""
    os.write(1, json.dumps({"event": event, **details}).encode() + b"\n")


class TellProgress(logging.Handler):
    """Passes on pmstore's message about every commit of an iteration, at most fifty in a second.

    After each message it waits for the parent's answer, so that on a busy machine the fit doesn't finish before a slow
    parent can kill it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.perf_counter()
        if record.levelno == logging.DEBUG and now >= self._next:
            self._next = now + 0.02
            *_, run, iteration = record.args  # type: ignore[misc]
            tell("commit", run=run, iteration=iteration)
            os.read(0, 1)


def child(path: Path, data: Path, parameters: dict[str, Any]) -> None:
    """Open the store, report its contents, and fit."""
    X = np.load(data)
    commits = TimedCommits()
    started = time.perf_counter()
    with pmstore.open(path) as store:
        opened = time.perf_counter() - started
        place = store.group(NAME).get("progress")
        found = {"run": int(place["run"]), "iteration": int(place["iteration"])} if place is not None else None
        tell("open", seconds=opened, found=found)
        log = logging.getLogger("pmstore")
        log.addHandler(TellProgress())
        log.setLevel(logging.DEBUG)
        started = time.perf_counter()
        with commits:
            KMeans(**parameters, store=store, name=NAME).fit(X)
        tell("finished", fit=time.perf_counter() - started, commits=commits.seconds)


class TimedCommits:
    """Measures every commit inside its block, by replacing a function of pmstore."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __enter__(self) -> None:
        from pmstore._core import Core

        self._core, self._commit = Core, Core.commit

        def commit(core: Any, commit: Callable[[Any], None] = Core.commit) -> None:
            started = time.perf_counter()
            commit(core)
            self.seconds.append(time.perf_counter() - started)

        Core.commit = commit  # type: ignore[assignment, method-assign]

    def __exit__(self, *_: object) -> None:
        self._core.commit = self._commit  # type: ignore[method-assign]


# ---- the parent: kills -----------------------------------------------------------------------------------------------


@dataclass
class Life:
    """The history of one child."""

    opened: float = 0.0  # seconds to open the store, recovery included
    found: dict[str, int] | None = None  # the progress of the fit then
    last: dict[str, int] | None = None  # the last progress that the child reported
    after: float = 0.0  # seconds from its first commit to the kill
    killed: bool = False
    fit: float = 0.0
    commits: list[float] = field(default_factory=list)


class Victim:
    """A child process and its history so far."""

    def __init__(self, path: Path, data: Path, parameters: dict[str, Any]) -> None:
        command = [sys.executable, __file__, "--child", str(path), str(data), json.dumps(parameters)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.life = Life()
        self.waits = False  # for `go_on`, after it reported a commit
        self._rest = b""

    def listen(self, seconds: float | None) -> bool:
        """Wait for a report of the child, at most so long; False at the end of its output."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return True
        told = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + told).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(told)

    def _take(self, news: dict[str, Any]) -> None:
        match news.pop("event"):
            case "open":
                self.life.opened, self.life.found = news["seconds"], news["found"]
            case "commit":
                self.life.last, self.waits = news, True
            case "finished":
                self.life.fit, self.life.commits = news["fit"], news["commits"]

    def go_on(self) -> None:
        """Let a waiting child continue."""
        assert self.process.stdin is not None
        self.waits = False
        with contextlib.suppress(BrokenPipeError):  # another process killed it
            os.write(self.process.stdin.fileno(), b"\n")

    def kill(self) -> None:
        """Send SIGKILL; the child may have ended in the meantime."""
        self.process.kill()
        self.process.wait()
        while self.listen(None):
            pass
        self.life.killed = self.process.returncode == -signal.SIGKILL

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # no child is left behind, whatever happened here
        self.process.__exit__(None, None, None)


@dataclass
class Moment:
    """The moment to kill a child: so many seconds after it reported the start of this run."""

    run: int
    delay: float


def live(victim: Victim, moment: Moment | None, show: Callable[[Life], None]) -> Life:
    """Let a child work until the moment to kill it; None: to its end."""
    life = victim.life
    first = deadline = left = None
    while left is None or left > 0:
        if not victim.listen(left):
            break
        if victim.waits:
            assert life.last is not None
            show(life)
            now = time.perf_counter()
            first = first or now
            if deadline is None and moment is not None and life.last["run"] >= moment.run:
                deadline = now + moment.delay
            victim.go_on()
        left = None if deadline is None else deadline - time.perf_counter()
    else:
        life.after = time.perf_counter() - (first or 0.0)
        victim.kill()
    if victim.process.wait() and not life.killed:
        raise RuntimeError(f"the child failed with status {victim.process.returncode}; its message is above")
    return life


@dataclass
class Fate:
    """Chooses the moments of kills: at random, and early enough that all kills come before the fit is finished.

    It chooses the run, not the time until it comes, because the speed of a child on a busy machine is unknown. Within
    the run any moment is equally likely: inside an iteration, inside a commit, between two runs.
    """

    kills: int
    runs: int
    seconds: float  # the time of the fit without kills
    dice: random.Random

    def moment(self, lives: list[Life]) -> Moment | None:
        """The moment to kill the next child; None: not at all."""
        kills = self.kills - len(lives)
        if kills == 0:
            return None
        done = lives[-1].last["run"] if lives and lives[-1].last else 0
        run = done + int(self.dice.uniform(0, (self.runs - done) / (kills + 1)))
        return Moment(run, self.dice.uniform(0, self.seconds / self.runs))


def fit_and_kill(path: Path, data: Path, parameters: dict[str, Any], fate: Fate, progress: Progress) -> list[Life]:
    """Children work on one fit until all kills were made and the last child finishes the fit."""
    lives: list[Life] = []
    task = progress.add_task("fitting", total=parameters["n_init"])

    def show(life: Life) -> None:
        if life.last is not None:
            progress.update(task, completed=life.last["run"], description=f"process {len(lives) + 1}")

    while True:
        with Victim(path, data, parameters) as victim:
            lives.append(live(victim, fate.moment(lives), show))
        progress.console.print(describe(len(lives), lives[-1]))
        if not lives[-1].killed:
            return lives


def describe(number: int, life: Life) -> str:
    """Two lines about one child."""
    if life.found is None:
        began = "started"
    else:
        began = f"resumed at {place_of(life.found)}"
    if life.killed:
        assert life.last is not None
        ended = f"[bold red]SIGKILL[/] {life.after:.2f} s after its first commit, near {place_of(life.last)}"
    else:
        ended = f"[bold green]finished[/], {life.fit:.2f} s later"
    return f"process {number}  {began} (store opened in {milliseconds(life.opened)})\n        {ended}"


def place_of(news: dict[str, int]) -> str:
    """The progress of a fit, as text."""
    return f"run {news['run']}, iteration {news['iteration']}"


# ---- cost ------------------------------------------------------------------------------------------------------------


def costs(directory: Path, centers: Any) -> dict[str, list[float]]:
    """Seconds to make one iteration's state durable: by a commit, by np.savez, by write–fsync–rename."""
    new, counters = centers.copy(), np.zeros(8, dtype=np.int64)

    with pmstore.open(directory / "cost.pm", mode="w") as store:
        with store.transaction():
            slots = [store.require_array(f"centers/{i}", centers.shape, centers.dtype) for i in range(2)]
            place = store.require_array("progress", counters.shape, counters.dtype)

        def work(i: int) -> None:
            np.add(centers, i, out=new)
            counters[0] = i

        def commit(i: int) -> None:
            slots[i % 2][...] = new
            place[...] = counters
            store.commit()

        def savez(_: int) -> None:
            np.savez(directory / "cost.npz", centers=new, counters=counters)

        def replace(_: int) -> None:
            with (directory / "cost.tmp").open("wb") as file:
                file.write(new.tobytes() + counters.tobytes())
                file.flush()
                os.fsync(file.fileno())
            os.replace(directory / "cost.tmp", directory / "cost.bin")
            sync_directory(directory)

        actions = {ALONE: commit, "np.savez, not synced": savez, "write, fsync, rename, fsync": replace}
        times: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(4):  # in alternation, because the load of the machine varies
            for name, action in actions.items():
                end = time.perf_counter() + 0.1
                while time.perf_counter() < end:
                    work(len(times[name]))
                    started = time.perf_counter()
                    action(len(times[name]))
                    times[name].append(time.perf_counter() - started)
        return times


def sync_directory(directory: Path) -> None:
    """Make a rename durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def cost_table(where: str, table: dict[str, list[float]], inside: list[float]) -> Table:
    """The costs of making one iteration's state durable, in one place."""
    shown = Table(title=f"Cost of making one iteration durable, {where}", title_justify="left")
    for column in ("", "median", "95 %", "× commit, in a loop", "times"):
        shown.add_column(column, justify="left" if not column else "right")
    basis = statistics.median(table[ALONE])
    for name, times in {"commit, during the fit above": inside, **table}.items():
        if not times:
            continue
        ordered = sorted(times)
        middle, late = statistics.median(ordered), ordered[int(0.95 * len(ordered))]
        shown.add_row(name, microseconds(middle), microseconds(late), f"{middle / basis:.1f}", f"{len(times):,}")
    return shown


# ---- all of it -------------------------------------------------------------------------------------------------------


def differences(fit: Any, reference: Any) -> list[str]:
    """The fitted attributes that aren't the same bit for bit."""
    different = []
    for name in RESULT:
        ours, theirs = np.asarray(getattr(fit, name)), np.asarray(getattr(reference, name))
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape or ours.tobytes() != theirs.tobytes():
            different.append(name)
    return different


def show_off(
    directory: Path, X: Any, n_init: int, options: argparse.Namespace, dice: random.Random, console: Console
) -> tuple[int, bool]:
    """The whole demonstration in one directory: the number of kills, and whether the result was the same."""
    parameters = {"n_clusters": options.clusters, "n_init": n_init, "random_state": options.seed}
    data, path = directory / "images.npy", directory / "demo.pm"
    np.save(data, X)
    with pmstore.open(path) as store:
        where = f"{directory.parent} (media: {store.media})"
    console.rule(where, align="left")
    started = time.perf_counter()
    reference = SklearnKMeans(**parameters).fit(X)
    undisturbed = time.perf_counter() - started
    console.print(f"Without kills, scikit-learn {sklearn.__version__}: {undisturbed:.2f} s for n_init = {n_init} runs")

    name, count = TextColumn("{task.description}"), MofNCompleteColumn()
    columns = SpinnerColumn(), name, BarColumn(), count, TextColumn("runs"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        fate = Fate(options.kills, n_init, undisturbed, dice)
        lives = fit_and_kill(path, data, parameters, fate, progress)
    struck, last = sum(life.killed for life in lives), lives[-1]
    with pmstore.open(path) as store:
        before, started = store.sequence, time.perf_counter()
        fit = KMeans(**parameters, store=store, name=NAME).fit(X)
        loaded, worked = time.perf_counter() - started, store.sequence != before
    how = "with a commit" if worked else "without a commit"
    console.print(f"The same fit again loads the result in {milliseconds(loaded)}, {how}")
    different = differences(fit, reference)
    if different:
        console.print(f"[bold red]DIFFERENT[/] from the fit without kills: {', '.join(different)}")
    else:
        console.print(f"[bold green]identical[/], bit for bit, to the fit without kills: {', '.join(RESULT)}")
    console.print(cost_table(where, costs(directory, np.asarray(reference.cluster_centers_)), last.commits))
    if last.commits:
        share = sum(last.commits) / last.fit
        console.print(
            f"Commits took {share:.1%} of the last process's {last.fit:.2f} s ({len(last.commits):,} of them)\n"
        )
    return struck, not different and not worked


def enough_runs(X: Any, options: argparse.Namespace) -> int:
    """A number of runs, in the hundreds, such that a fit without kills takes some seconds on this machine."""
    for runs in (1, 10, 100):
        started = time.perf_counter()
        SklearnKMeans(options.clusters, n_init=runs, random_state=options.seed).fit(X)
        seconds = time.perf_counter() - started
        if seconds > 0.2:
            break
    return min(max(LEAST_RUNS, round(SECONDS * runs / seconds)), MOST_RUNS)


@contextlib.contextmanager
def places(options: argparse.Namespace) -> Iterator[list[tuple[Path, float]]]:
    """Directories to work in, each with its part of the runs: memory if there is any, then, shorter, a disk."""
    chosen = [(path, 1.0) for path in options.dir]
    if not chosen:
        memory = [Path("/dev/shm")] if os.access("/dev/shm", os.W_OK) else []
        chosen = [*((path, 1.0) for path in memory), (Path(tempfile.gettempdir()), 0.3 if memory else 1.0)]
    made: list[tuple[Path, float]] = []
    try:
        for path, part in chosen:
            made.append((Path(tempfile.mkdtemp(prefix="pmstore-demo-", dir=path)), part))
        yield made
    except FileNotFoundError as error:
        raise CannotStart(f"there is no directory {Path(error.filename).parent}") from error
    finally:
        for path, _ in made:
            shutil.rmtree(path, ignore_errors=True)


def milliseconds(seconds: float) -> str:
    """A time as text."""
    return f"{seconds * 1e3:.1f} ms"


def microseconds(seconds: float) -> str:
    """A short time as text."""
    return f"{seconds * 1e6:,.1f} µs"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--mnist", type=Path, metavar="FILE", help="MNIST's images: .npz, or IDX, gzipped or not")
    source.add_argument("--openml", action="store_true", help="fetch MNIST from openml.org")
    parser.add_argument(
        "--dir",
        type=Path,
        action="append",
        default=[],
        help="where to work; again for one more (/dev/shm, and a disk)",
    )
    parser.add_argument("--n-init", type=int, default=None, help="runs of the fit (100 to 999, to take some seconds)")
    parser.add_argument("--clusters", type=int, default=10, help="number of clusters (10)")
    parser.add_argument("--kills", type=int, default=LEAST_KILLS, help=f"kills in each directory ({LEAST_KILLS})")
    parser.add_argument("--seed", type=int, default=0, help="of the fit and of the moments of the kills (0)")
    options = parser.parse_args(arguments)
    if min(options.kills, options.clusters, 1 if options.n_init is None else options.n_init) < 1:
        parser.error("--kills, --clusters and --n-init must be at least 1")
    return options


def main(arguments: list[str]) -> int:
    """Run the demo; returns the exit status."""
    options = parse(arguments)
    console = Console()
    dice = random.Random(options.seed)
    try:
        X, what = load_images(options)
        console.print(f"[bold]pmstore[/]: KMeans with {options.clusters} clusters on {what}")
        n_init = options.n_init or enough_runs(X, options)
        with places(options) as directories:
            outcomes = [
                show_off(path, X, max(min(n_init, LEAST_RUNS), round(n_init * part)), options, dice, console)
                for path, part in directories
            ]
    except (CannotStart, NoImages) as problem:
        print(f"demo: {problem}", file=sys.stderr)
        return 2
    struck = sum(kills for kills, _ in outcomes)
    if struck < LEAST_KILLS:
        console.print(f"[bold red]Only {struck} kills struck before the fit was finished[/]: try a larger --n-init")
    same = all(same for _, same in outcomes)
    verdict = "[bold green]Every result was identical.[/]" if same else "[bold red]Something differed.[/]"
    console.print(f"{struck} kills. {verdict}")
    return 0 if same and struck >= LEAST_KILLS else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        sys.exit(main(sys.argv[1:]))
