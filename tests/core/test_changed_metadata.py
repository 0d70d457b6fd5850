"""Files whose metadata somebody changed at random, under hashes that are right: an error or a store, never a signal.

Each seed runs in a process of its own. test_hostile.py has the cases that somebody thought of.
"""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.conftest import LONGER, run_in_fork
from tests.core.test_hostile import use
from tests.support.images import MAP, MAP_LIST, NODE, PAGE, Image

FUZZED = 80 * LONGER


def base(path: Path, rng: random.Random) -> bytes:
    """A store with a bit of everything, and a log in half of the cases."""
    store = pmstore.open(path, "w", media="file")
    for i in range(rng.choice((5, 40))):
        store[f"a{i:02}" + "k" * rng.choice((0, 0, 200))] = np.arange(
            float(rng.choice((0, 1, 12, 120, 230, 700, 3000)))
        )
    for i in range(rng.choice((3, 30))):
        store[f"v{i:02}"] = rng.choice((i, "text" * 50, [1, {"k": np.arange(3)}], b"b" * 5000, b"c" * 900))
    store["group/fortran"] = np.asfortranarray(np.ones((9, 11)))
    store["group/record"] = np.zeros(5, [("x", "f4"), ("y", "S5"), ("z", "u1", (2, 2))])
    store.create_list("list").extend([1, "two", b"3" * 900, [4]])
    store.commit()
    for i in range(0, 5, 2):
        store.pop(f"a{i:02}", None)
    store.commit()
    store._drop(discard=rng.random() < 0.5)
    return path.read_bytes()


def mutate(image: Image, rng: random.Random) -> None:
    """Changes fields of metadata pages, and sets their hashes."""
    pages = list(image.pages())
    for _ in range(rng.choice((1, 1, 2, 4))):
        page = rng.choice(pages)
        kind = image.get(page, 16, "I")
        at = rng.randrange(16, 64)
        if kind == NODE and rng.random() < 0.8:
            count = image.get(page, 32, "H")
            slot = rng.randrange(max(1, count % 2000))
            cell = image.get(page, 64 + 2 * slot, "H") % (PAGE - 32)
            at = rng.choice((64 + 2 * slot, cell + rng.randrange(24), cell + 24 + rng.randrange(8), 24, 32, 34, 36))
        elif kind in (MAP, MAP_LIST) and rng.random() < 0.9:
            at = 64 + rng.randrange(40)
        elif page == 0:
            at = rng.randrange(24, 24 + 8 * 14)
        form = rng.choice("BBBBHIQQQ")
        at = at // struct.calcsize(form) * struct.calcsize(form)
        old = image.get(page, at, form)
        values = (0, 1, PAGE * rng.randrange(70), rng.choice(pages), image.region_size, 1 << 42, 1 << 63, (1 << 64) - 1)
        value = rng.choice((old ^ 1 << rng.randrange(8), rng.randrange(256), rng.choice(values)))
        image.put(page, at, value, form)


def fuzz(directory: str, seed: int, rounds: int) -> None:
    path = Path(directory) / "fuzzed.pm"
    through = 0
    for i in range(seed, seed + rounds):
        rng = random.Random(i)
        if i % 20 == 0 or i == seed:
            sound = base(path, random.Random(i // 20))
        path.write_bytes(sound)
        image = Image(path)
        mutate(image, rng)
        image.save()
        print(i, flush=True)  # the last one is the seed of a crash
        errors, _ = use(path)
        through += not errors
        with contextlib.suppress(pmstore.Error):
            pmstore.open(path, "r+", media="file", verify=True).close()
    assert 0 < through < rounds, "the changes were all harmless, or none was"


@pytest.mark.longer
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_changed_metadata_give_errors_and_no_more(tmp_path: Path, part: int) -> None:
    run_in_fork(fuzz, str(tmp_path), part * 100_000, FUZZED // 2)
