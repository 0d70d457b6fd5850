"""Processes that are really killed, at a chosen system call or after a chosen time, in all of their phases.

`python -m tests.support.kills 2000` makes so many kills, and reports how many hit which phase:

    commit    while it changes and commits
    recovery  while it opens a store whose last process was killed
    growth    while the file grows, and the log moves
    creation  while there is no store yet, or only a moment

on memory, on a disk, and ("async") on a disk with commits that become durable later.

A process with pmstore loaded forks the processes that are killed, so that a kill takes milliseconds. The contents of a
store follow from the number of its last commit. The surviving process verifies that this number is between the last
acknowledged commit and the last one that had begun.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from tests.support import shim

CLASSES = ("commit", "recovery", "growth", "creation")
ACKNOWLEDGED, BEGUN, PHASE, CALLS, TIME = range(5)  # indices on the board
BEFORE, INSIDE, AFTER = range(3)  # phases
MEMORY = Path("/dev/shm")
LARGEST = 24 << 20

# ---- the writes


def change(store: pmstore.Store, n: int) -> None:
    """Make all changes of commit n, without committing."""
    small = store.require_array("small", 50, "f8")
    large = store.require_array("large", (300, 50), "f8")
    history = store["history"] if "history" in store else store.create_list("history")
    small[:] = n
    large[n % 300] = n
    if n % 3 == 0:  # a few bytes of 129 pages: on disks, such a record is written in parts
        store.require_array("wide", 90_000, "f8")[::700] = n
    history.append(n)
    store[f"new/{n % 7}"] = np.full(10 + 900 * (n % 7), float(n))
    if n % 5 == 0:
        store.pop(f"new/{n * 3 % 7}", None)
    store["n"] = n


def grow(store: pmstore.Store, n: int) -> None:
    """The same, with a growing number of bytes: the last four arrays stay."""
    store[f"more/{n}"] = np.full(9000 * (1 + n % 5), float(n))
    if n > 4 and n % 9:
        store.pop(f"more/{n - 4}", None)
    store.require_array("small", 50, "f8")[:] = n
    store["n"] = n


def names_after(n: int) -> dict[str, int]:
    """The temporary arrays that exist after commit n of `change`, and their number."""
    names: dict[str, int] = {}
    for i in range(1, n + 1):
        names[f"new/{i % 7}"] = i
        if i % 5 == 0:
            names.pop(f"new/{i * 3 % 7}", None)
    return names


def check_changed(store: pmstore.Store, n: int) -> None:
    large = store["large"]
    for row in range(300):
        assert (large[row] == max(n - (n - row) % 300, 0)).all(), row
    assert list(store["history"]) == list(range(1, n + 1))
    assert n < 3 or (store["wide"][::700] == n // 3 * 3).all()
    names = names_after(n)
    assert {name for name in store if "/" in name} == names.keys()
    for name, i in names.items():
        assert store[name].shape == (10 + 900 * (i % 7),)
        assert (store[name] == i).all()


def check_grown(store: pmstore.Store, n: int) -> None:
    names = {i for i in range(1, n + 1) if i > n - 4 or not (i + 4) % 9}
    assert {name for name in store if "/" in name} == {f"more/{i}" for i in names}
    for i in names:
        assert store[f"more/{i}"].shape == (9000 * (1 + i % 5),)
        assert (store[f"more/{i}"] == i).all()


# ---- dying


class Board:
    """Numbers that outlive a killed process, in shared memory; one store each."""

    def __init__(self) -> None:
        self.numbers = np.frombuffer(mmap.mmap(-1, 4096), "i8")

    def clear(self) -> None:
        self.numbers[:] = 0

    def __getitem__(self, which: int) -> int:
        return int(self.numbers[which])

    def __setitem__(self, which: int, number: int) -> None:
        self.numbers[which] = number


class _Event(ctypes.Structure):  # struct sigevent, the fields that are needed
    _fields_ = [("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("_", ctypes.c_int * 12)]


class _Times(ctypes.Structure):  # struct itimerspec
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "s", "ns")]


def kill_after(nanoseconds: int) -> None:
    """Kill this process with SIGKILL by a timer."""
    libc = ctypes.CDLL(None, use_errno=True)
    timer = ctypes.c_void_p()
    event = _Event(None, signal.SIGKILL, 0)
    assert not libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer))
    times = _Times(0, 0, nanoseconds // 10**9, nanoseconds % 10**9 or 1)
    assert not libc.timer_settime(timer, 0, ctypes.byref(times), None)


class Death:
    """The moment when a process dies: at its system call number `at`, or after so many ns; `at` 0: the time is
    measured."""

    def __init__(self, calls: bool, at: int, manner: int) -> None:
        self._calls, self._at, self._manner = calls, at, manner

    def begin(self, board: Board) -> None:
        board[PHASE] = INSIDE
        self._begun = time.monotonic_ns()
        if self._at and not self._calls:
            shim.begin(shim.EVERY, shim.KILL, 0, 0)
            kill_after(self._at)
        else:
            shim.begin(shim.EVERY, self._manner, 0, self._at)

    def end(self, board: Board) -> None:
        board[PHASE] = AFTER
        board[CALLS], board[TIME] = shim.count(), time.monotonic_ns() - self._begun


def media_of(medium: str) -> str:
    return "file" if medium == "async" else medium


def live(kind: str, path: Path, medium: str, board: Board, death: Death) -> None:
    """One run, in a process of its own."""
    if kind in ("recovery", "creation"):
        death.begin(board)
    durable_later = {"durability": "async", "sync_interval": 0.0005} if medium == "async" else {}
    store = pmstore.open(path, "x" if kind == "creation" else "a", media=media_of(medium), **durable_later)
    if kind == "recovery":
        death.end(board)
    n = store.get("n", 0)
    if kind in ("commit", "growth"):
        death.begin(board)
    for _ in range({"commit": 6, "growth": 4}.get(kind, 1)):
        n += 1
        (grow if kind == "growth" else change)(store, n)
        board[BEGUN] = n
        store.commit()
        board[ACKNOWLEDGED] = n
        if kind == "commit" and n % 3 == 0:
            store["small"][:] = -1
            store["n"] = -1
            store.rollback()
    death.end(board)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- surviving


class Killer:
    """Kills processes of one class that work on one store after the other, and verifies the remaining file."""

    def __init__(self, kind: str, directory: Path, medium: str, seed: int) -> None:
        self.kind, self.medium = kind, medium
        self.path = directory / f"{kind}.pm"
        self._rng = random.Random(f"{kind} {medium} {seed}")
        self._board = Board()
        self._clean = True
        self._first = self._last = 0  # commits that the file may be at
        self._calls = self._time = 0
        self.kills = self.runs = 0

    def kill(self) -> None:
        """One more run. Its kill counts if it hit the phase of the class, and not a later one."""
        rng = self._rng
        if self.kind == "creation" or (self.path.exists() and self.path.stat().st_size > LARGEST):
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            self._first = self._last = 0
        elif self.kind == "recovery" and (self._clean or rng.random() < 0.3):
            self._run("commit", Death(True, rng.randrange(4, 40), shim.KILL))  # leaves something to recover
            self._learn()
        at = 0
        by_call = self._calls > 0 and rng.random() < (0.25 if self.medium == "memory" else 0.75)
        if self._time:
            at = rng.randint(1, self._calls) if by_call else rng.randint(1, self._time)
        self._run(self.kind, Death(by_call, at, rng.choice((shim.KILL, shim.KILL_HALF, shim.KILL_AFTER))))
        self.kills += self._board[PHASE] == INSIDE
        if self._board[PHASE] == AFTER:
            self._calls = self._board[CALLS]
            self._time = min(self._time or self._board[TIME], self._board[TIME])
        self._learn()
        self._evaluate(rng.random() < 0.5)

    def _run(self, kind: str, death: Death) -> None:
        self._board.clear()
        self.runs += 1
        pid = os.fork()
        if not pid:
            try:
                live(kind, self.path, self.medium, self._board, death)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == -signal.SIGKILL, f"the process ended with {status}"

    def _learn(self) -> None:
        self._first = max(self._first, self._board[ACKNOWLEDGED])
        self._last = max(self._last, self._board[BEGUN])

    def _evaluate(self, leave: bool) -> None:
        """leave: verify a copy, and leave the recovery to the next process."""
        first, last = self._first, self._last
        if not self.path.exists():
            assert self.kind == "creation" or not last, "the store is gone"
            assert not self._board[ACKNOWLEDGED]
            return
        path = self.path.with_name("copy.pm") if leave else self.path
        if leave:
            shutil.copyfile(self.path, path)
        with pmstore.open(path, "r+", media=media_of(self.medium)) as store:
            report = store.check()
            assert report.ok, report
            n = store.get("n", 0)
            assert first <= n <= last, f"commit {n}; {first} was acknowledged, {last} had begun"
            if n:
                assert (store["small"] == n).all()
                (check_grown if self.kind == "growth" else check_changed)(store, n)
            else:
                assert not len(store)
        self._first = self._last = n
        self._clean = not leave
        leftovers = [p for p in self.path.parent.iterdir() if ".pmstore-creating-" in p.name]
        assert len(leftovers) <= 1, leftovers


def worker(directory: str, medium: str, kinds: str, kills: int, seed: int) -> None:
    """Make so many kills inside of each class, and print the results."""
    out: dict[str, Any] = {}
    for kind in kinds.split(","):
        killer = Killer(kind, Path(directory), medium, seed)
        while killer.kills < kills:
            try:
                killer.kill()
            except BaseException as error:
                kept = shutil.copy(killer.path, tempfile.gettempdir()) if killer.path.exists() else "no file"
                raise AssertionError(
                    f"{kind} on {medium}, seed {seed}, kill {killer.kills}: {error} ({kept})"
                ) from error
        out[kind] = [killer.kills, killer.runs]
    print(json.dumps(out))


def main(kills: int, seed: int = 1) -> None:
    """The command: all classes, on all media at once."""
    share = -(-kills // (3 * len(CLASSES)))
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory() as other,
        tempfile.TemporaryDirectory(dir=MEMORY) as memory,
    ):
        library = shim.build(Path(directory))
        assert library is not None, "no C compiler"
        places = {"file": directory, "memory": memory, "async": other}
        workers = {
            medium: subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.kills",
                    "worker",
                    place,
                    medium,
                    ",".join(CLASSES),
                    str(share),
                    str(seed),
                ],
                env=shim.environment(library),
                stdout=subprocess.PIPE,
                text=True,
            )
            for medium, place in places.items()
        }
        answers = {medium: process.communicate()[0] for medium, process in workers.items()}
    assert not any(process.returncode for process in workers.values()), "a kill lost something: see above"
    total = 0
    for medium, answer in answers.items():
        for kind, (number, runs) in json.loads(answer).items():
            total += number
            print(f"{medium:>6}  {kind:<8}  {number:>5} kills of {runs:>5} runs")
    print(f"{total} kills in {time.monotonic() - begun:.0f} s, and nothing that was acknowledged was lost")


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(*sys.argv[2:5], *map(int, sys.argv[5:]))  # type: ignore[misc]
    else:
        main(int(sys.argv[1]), *map(int, sys.argv[2:]))
