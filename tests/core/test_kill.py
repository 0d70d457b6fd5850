"""Real processes, really killed, across media: in commits, in recovery, while the file grows, while it is made.

PMSTORE_KILLS says how many times, over all classes and media; tests/support/kills.py does it.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.conftest import Medium
from tests.support import shim
from tests.support.kills import CLASSES, check_changed
from tests.support.template import MODULES, python, template

KILLS = int(os.environ.get("PMSTORE_KILLS", "64"))
FROM_OUTSIDE = 6  # kills per medium of a process that is started anew each time

CHILD = """
import sys
import pmstore
from tests.support.kills import change

store = pmstore.open(sys.argv[1], "a", media=sys.argv[2])
n = store.get("n", 0)
while True:
    n += 1
    change(store, n)
    print("b", n, flush=True)
    store.commit()
    print("a", n, flush=True)
"""


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.no_sanitizer  # which is preloaded too
@pytest.mark.parametrize("kind", CLASSES)
def test_I1_a_kill_loses_nothing_that_was_acknowledged(medium: Medium, fault_library: Path, kind: str) -> None:
    """Kills come in every call to the system, and at any time between them."""
    kills = -(-KILLS // (2 * len(CLASSES)))
    said = shim.run(
        fault_library, "-m", "tests.support.kills", "worker", str(medium.directory), medium.name, kind, str(kills), "1"
    )
    counted, runs = json.loads(said)[kind]
    assert counted == kills <= runs


def run_and_kill(path: Path, medium: str, rng: random.Random) -> tuple[int, int]:
    """The last commits that the child acknowledged and began. It is killed after a random number of lines and then a
    random bit of time, opening and recovery included."""
    child = template(MODULES).start("-c", CHILD, path, medium)
    lines = b""
    wanted = rng.choice((0, 1, 2, 9, 40))
    while lines.count(b"\n") < wanted:
        chunk = os.read(child.stdout.fileno(), 4096)
        if not chunk:
            break
        lines += chunk
    # Not a wait for something to happen: the moment of the kill is what varies.
    moment = time.monotonic() + rng.random() ** 3 * (0.004 if wanted else 0.2)
    while time.monotonic() < moment and not select.select([child.stdout], [], [], 0)[0]:
        pass
    child.send_signal(signal.SIGKILL)
    rest, error = child.communicate()
    assert child.returncode == -signal.SIGKILL, error
    said = [line.split() for line in (lines.decode() + rest).split("\n")[:-1]]
    acknowledged = max((int(number) for what, number in said if what == "a"), default=0)
    begun = max((int(number) for what, number in said if what == "b"), default=0)
    return acknowledged, begun


@pytest.mark.slow
def test_I1_a_writer_that_another_process_kills(medium: Medium) -> None:
    """What it said through a pipe that it had is there."""
    rng = random.Random(1)
    path = medium.directory / "killed.pm"
    known = 0
    for _ in range(FROM_OUTSIDE):
        acknowledged, begun = run_and_kill(path, medium.name, rng)
        if not path.exists():
            continue  # killed before the store was made: creation is atomic, there is nothing
        with pmstore.open(path, "r+", media=medium.name, verify=True) as store:
            n = store.get("n", 0)
            assert max(known, acknowledged) <= n <= max(known, begun)
            if n:
                check_changed(store, n)
        known = n


def test_numpy_sees_the_same_bytes_after_a_kill(medium: Medium) -> None:
    """A row written by a kernel, not by assignment, is as safe."""
    path = medium.directory / "kernel.pm"
    code = """
import os, signal, sys
import numpy as np
import pmstore
store = pmstore.open(sys.argv[1], "a", media=sys.argv[2])
out = store.create_array("out", (200, 200))
a = np.random.default_rng(0).random((200, 200))
np.dot(a, a, out=out)
out.sort(axis=0)
store.commit()
out[:] = 0
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = python("-c", code, path, medium.name)
    assert done.returncode == -signal.SIGKILL
    a = np.random.default_rng(0).random((200, 200))
    with pmstore.open(path, media=medium.name) as store:
        np.testing.assert_array_equal(store["out"], np.sort(a @ a, axis=0))
