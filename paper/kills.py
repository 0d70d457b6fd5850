"""What each strategy recovers to when its process is killed in the middle of a checkpoint.

A child keeps one state after another. It measures how long a checkpoint takes, sets a timer that sends it SIGKILL at a
chosen moment of the next one (from the first byte that changes in place, or is copied, to the checkpoint's return), and
takes that checkpoint. This process then loads what is there. The states are made, in the shapes of a KMeans' and a
mixture's, so that every number tells which iteration it belongs to.

A kill loses nothing that a system call has handed to the kernel. What a power cut leaves is another question, which
docs/what-crashes-leave.md answers.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from _common import Array, library, machine, parent, parser, save, scratch

from .loops import State, progress
from .strategies import CHECKPOINTS, Strategy

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "KMeans, 10 × 784": {"centers": (10, 784)},
    "GaussianMixture, 10 × 128": {"weights": (10,), "means": (10, 128), "covariances": (10, 128, 128)},
}
BEFORE = 8  # checkpoints before the one that is killed

LAST, PREVIOUS, TORN, NOTHING = "this one", "the one before", "a mixture", "nothing that can be read"
VERDICTS = (LAST, PREVIOUS, TORN, NOTHING)


def state_of(model: str, iteration: int) -> State:
    """A state of which every number tells the iteration."""
    arrays = {
        name: np.arange(np.prod(shape), dtype=float).reshape(shape) + 0.5 * iteration
        for name, shape in SHAPES[model].items()
    }
    return {**arrays, "progress": progress(iteration)}


def verdict(found: State, model: str, killed: int) -> str:
    """Which state it is, if the checkpoint of iteration `killed` was."""
    for iteration in range(killed, -1, -1):
        wanted = state_of(model, iteration)
        if found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted):
            return LAST if iteration == killed else PREVIOUS if iteration == killed - 1 else f"iteration {iteration}"
    return TORN


# ---- a timer that kills


class Event(ctypes.Structure):
    """struct sigevent of Linux, 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),  # 0: by that signal
        ("rest", ctypes.c_char * 48),
    )


class Times(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns"))


class Executioner:
    """Sends SIGKILL to this process after so many seconds, whatever it does then."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL("librt.so.1", use_errno=True)
        self._timer = ctypes.c_void_p()
        event = Event(None, signal.SIGKILL, 0, b"")
        self._check(self._c.timer_create(1, ctypes.byref(event), ctypes.byref(self._timer)))  # CLOCK_MONOTONIC

    def set(self, seconds: float) -> None:
        """Start the timer."""
        whole, part = divmod(max(1, round(seconds * 1e9)), 1_000_000_000)
        self._check(self._c.timer_settime(self._timer, 0, ctypes.byref(Times(0, 0, whole, part)), None))

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise OSError(ctypes.get_errno(), "no timer")


# ---- one kill


def live_and_die(kind: type[Strategy], directory: Path, medium: str, model: str, moment: float, pipe: int) -> None:
    """The child: keeps states, and is killed when that share of the next checkpoint has passed, or right after it."""
    executioner = Executioner()
    strategy = kind(directory, medium, state_of(model, 0))
    times = []
    for iteration in range(1, BEFORE + 1):
        state = state_of(model, iteration)
        started = perf_counter()
        strategy.place(state)
        strategy.save(state)
        times.append(perf_counter() - started)
    state = state_of(model, BEFORE + 1)
    executioner.set(moment * min(times[-3:]))
    strategy.place(state)
    strategy.save(state)
    os.write(pipe, b"done")
    os.kill(os.getpid(), signal.SIGKILL)


def kill(kind: type[Strategy], directory: Path, medium: str, model: str, moment: float) -> tuple[str, bool]:
    """What is found after a kill, and whether the checkpoint had returned before it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            live_and_die(kind, directory, medium, model, moment, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        returned = told.read() == b"done"
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise RuntimeError(f"{kind.name}: the child ended by itself, with status {status}")
    try:
        found = kind.load(directory)
    except Exception:  # whatever a reader says to half a file
        return NOTHING, returned
    return verdict(found, model, BEFORE + 1), returned


def kills(kind: type[Strategy], parent_directory: Path, medium: str, model: str, times: int) -> dict[str, Any]:
    """So many kills at moments all over the checkpoint, every other one early: what is copied is copied first."""
    dice = random.Random(0)
    inside: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for number in range(times):
        moment = ((number + dice.random()) / times) ** (1 if number % 2 else 3)
        with scratch(parent_directory) as directory:
            found, returned = kill(kind, directory, medium, model, moment)
        (after if returned else inside)[found] += 1
    return {"who": kind.name, "medium": medium, "model": model, "inside": dict(inside), "after": dict(after)}


def warmed(array: Array) -> None:
    """What children need is loaded before the first of them is forked."""
    library().flush_lines(array.ctypes.data, array.nbytes)


def main() -> None:
    """Kill."""
    options = parser(__doc__).parse_args()
    warmed(np.zeros(8))
    times = max(4, round((8 if options.quick else 32) * options.scale))
    cells = []
    for medium in options.media:
        for model in SHAPES:
            for kind in CHECKPOINTS:
                cells.append(kills(kind, parent(options, medium), medium, model, times))
                print(medium, model, kind.name, cells[-1]["inside"], "later:", cells[-1]["after"], flush=True)
    save(options.raw, "paper-kills", {"quick": options.quick, "priority": "normal priority", "cells": cells})
    print(machine())


if __name__ == "__main__":
    main()
