"""The writer in the guest: recovers two stores, verifies them, and commits to them until the power is cut.

    python -m tests.dax.writer DOMAIN FIRST [early|check]

DOMAIN is that of the guest, FIRST the number of the last acknowledged commit; 0: there may be no store. Prints
`RECOVERED n m`, the commits of the two stores, and writes each number to the serial line when both stores have that
commit. With `check`, it only verifies. `early` is the mutant: numbers are acknowledged before they are
committed.
"""

from __future__ import annotations

import os
import sys
import termios
from pathlib import Path

import pmstore
from tests.dax.guest import FILES, SERIAL
from tests.support.kills import change, check_changed, check_grown, grow

CHANGED, GROWN = FILES / "changed.pm", FILES / "grown.pm"
EARLY = 40
DOMAIN = "memory"


def state(path: Path) -> int:
    """Recover and verify a store. Returns the number of its last commit. A reader sees the same before."""
    if not path.exists():
        return 0
    with pmstore.open(path, "r") as reader:
        seen = reader.get("n", 0)
    with pmstore.open(path, "r+") as store:
        assert store.media == "dax", store.media
        assert store.stats().domain == DOMAIN, store.stats()
        n = store.get("n", 0)
        assert n == seen, f"a reader saw commit {seen}, recovery restored {n}"
        report = store.check()
        assert report.ok, report
        if n:
            (check_changed if path == CHANGED else check_grown)(store, n)
    left = [one for one in path.parent.iterdir() if ".pmstore-creating-" in one.name]
    assert len(left) <= 1, left
    return int(n)


def write(first: int, early: bool) -> None:
    serial = os.open(SERIAL, os.O_WRONLY)
    with pmstore.open(CHANGED) as changed, pmstore.open(GROWN) as grown:
        for n in range(first + 1, first + 100_000):
            if early and n % EARLY == (first + 1) % EARLY:
                os.write(serial, b"%d\n" % (n + EARLY))
                termios.tcdrain(serial)
            if changed["n"] < n if "n" in changed else True:
                change(changed, n)
                changed.commit()
            if grown["n"] < n if "n" in grown else True:
                grow(grown, n)
                grown.commit()
            if not early:
                os.write(serial, b"%d\n" % n)
                termios.tcdrain(serial)


def main(first: int, *how: str) -> None:
    states = state(CHANGED), state(GROWN)
    print("RECOVERED", *states, flush=True)
    if "check" not in how:
        write(min(states), "early" in how)


if __name__ == "__main__":
    DOMAIN = sys.argv[1]
    main(int(sys.argv[2]), *sys.argv[3:])
