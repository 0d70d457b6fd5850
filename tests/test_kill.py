"""Real processes, really killed: SIGKILL at random moments of a writing child, across media.

The child says "b N" before commit N and "a N" after it, through a pipe. What it writes follows from N alone, so the
parent can tell exactly what a store at commit N holds: acknowledged <= N <= begun.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pmstore

from .conftest import Medium

KILLS = int(os.environ.get("PMSTORE_KILLS", "110"))  # per medium

CHILD = r"""
import sys
import numpy as np
import pmstore

out = sys.stdout
store = pmstore.open(sys.argv[1], "a", media=sys.argv[2])
n = store.get("n", 0)
small = store.require_array("small", 50, "f8")
large = store.require_array("large", (300, 50), "f8")
history = store["history"] if "history" in store else store.create_list("history")
store.commit()
while True:
    n += 1
    small[:] = n
    large[n % 300] = n
    history.append(n)
    store["n"] = n
    store[f"new/{n % 7}"] = np.full(10 + 900 * (n % 7), float(n))
    if n % 5 == 0:
        store.pop(f"new/{n * 3 % 7}", None)
    if n % 11 == 0:
        store[f"grown/{n}"] = np.full(20_000, float(n))
        store.pop(f"grown/{n - 22}", None)
    out.write(f"b {n}\n")
    out.flush()
    store.commit()
    out.write(f"a {n}\n")
    out.flush()
    if n % 3 == 0:
        large *= -1
        store["n"] = -1
        store.rollback()
"""


def names_after(n: int) -> dict[str, int]:
    """Which of the arrays that come and go there are after commit n, and their number."""
    names: dict[str, int] = {}
    for i in range(1, n + 1):
        names[f"new/{i % 7}"] = i
        if i % 5 == 0:
            names.pop(f"new/{i * 3 % 7}", None)
        if i % 11 == 0:
            names[f"grown/{i}"] = i
            names.pop(f"grown/{i - 22}", None)
    return names


def check(store: pmstore.Store, n: int) -> None:
    """The store holds commit n, whole."""
    assert store.check().ok
    if n == 0:
        return
    assert (store["small"] == n).all()
    large = store["large"]
    for row in range(300):
        last = n - (n - row) % 300
        assert (large[row] == max(last, 0)).all(), (row, last)
    assert list(store["history"]) == list(range(1, n + 1))
    assert {name for name in store if "/" in name} == names_after(n).keys()
    for name, i in names_after(n).items():
        array = store[name]
        assert array.shape == ((20_000,) if name.startswith("grown") else (10 + 900 * (i % 7),))
        assert (array == i).all()


def run_and_kill(path: Path, medium: str, rng: random.Random) -> tuple[int, int]:
    """The last commits that the child acknowledged and began. It is killed after a random number of lines and then a
    random bit of time, so that every moment of a commit is hit, opening and recovery included."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), medium],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=str(Path(pmstore.__file__).parent.parent)),
    )
    assert child.stdout is not None
    lines = b""
    wanted = rng.choice((0, 1, 2, 3, 5, 9, 20, 60))
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
    assert child.returncode == -signal.SIGKILL, error.decode()
    said = [line.split() for line in (lines + rest).decode().split("\n")[:-1]]
    acknowledged = max((int(number) for what, number in said if what == "a"), default=0)
    begun = max((int(number) for what, number in said if what == "b"), default=0)
    return acknowledged, begun


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_a_killed_writer_loses_nothing_that_it_acknowledged(medium: Medium, part: int) -> None:
    rng = random.Random(part)
    path = medium.directory / "killed.pm"
    known = 0
    for _ in range(KILLS // 2):
        acknowledged, begun = run_and_kill(path, medium.name, rng)
        if not path.exists():
            continue  # killed before the store was made: creation is atomic, there is nothing
        with pmstore.open(path, "r+", media=medium.name) as store:
            n = store.get("n", 0)
            assert max(known, acknowledged) <= n <= max(known, begun)
            check(store, n)
        known = n
        if known > 400:
            path.unlink()
            known = 0
    assert not [p for p in medium.directory.iterdir() if p.name.count(".pmstore-creating-") > 1]


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
    environment = dict(os.environ, PYTHONPATH=str(Path(pmstore.__file__).parent.parent))
    done = subprocess.run([sys.executable, "-c", code, str(path), medium.name], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    a = np.random.default_rng(0).random((200, 200))
    with pmstore.open(path, media=medium.name) as store:
        np.testing.assert_array_equal(store["out"], np.sort(a @ a, axis=0))
