"""Damaged files: a flipped, cut or spliced byte anywhere never crashes the process and is never passed over.

The oracle: if a damaged file opens and `check` finds nothing, it holds exactly what it held, or (with commits in the
log, whose newest can't be told from one that a crash tore) an earlier commit.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore

from .conftest import Medium
from .snapshots import Snapshot, snapshot

ROUNDS = int(os.environ.get("PMSTORE_DAMAGE_ROUNDS", "1200"))


def fill(store: pmstore.Store) -> None:
    rng = np.random.default_rng(7)
    store["large"] = rng.random(9000)
    store["small"] = rng.random(5)
    store["model/weights"] = rng.random((60, 70)).astype("f4")
    store["model/config"] = {"name": "net", "sizes": [1, 2, 3]}
    store["text"] = "y" * 9000
    history = store.create_list("history")
    history.extend(range(40))
    for i in range(150):
        store[f"many/{i:03}"] = i


def made(path: Path, medium: str, clean: bool) -> list[Snapshot]:
    """A store in `path`; every state that it may be taken back to."""
    states = []
    store = pmstore.open(path, "x", media=medium)
    fill(store)
    store.commit()
    store.close()
    store = pmstore.open(path, "r+", media=medium)
    states.append(snapshot(store))
    for i in range(4):
        store["large"][i * 2000] = i
        store["many/003"] = -i
        store["new"] = np.full(2000, float(i))
        store.commit()
        states.append(snapshot(store))
    if clean:
        store.close()
        return states[-1:]
    store._drop(discard=True)
    return states


def damages(image: bytes, other: bytes, rng: random.Random, rounds: int) -> Iterator[bytes]:
    used = len(image.rstrip(b"\0"))
    for _ in range(rounds):
        damaged = bytearray(image)
        kind = rng.randrange(6)
        at = rng.randrange(used)
        if kind <= 2:  # one bit
            damaged[at] ^= 1 << rng.randrange(8)
        elif kind == 3:  # a sector that was lost, or filled with one byte
            sector = at // 512 * 512
            damaged[sector : sector + 512] = bytes([rng.choice((0, 255))]) * 512
        elif kind == 4:  # a sector or page from elsewhere, or from another store
            size = rng.choice((64, 512, 4096))
            source = rng.choice((image, other))
            start = rng.randrange(len(source) // size) * size
            place = at // size * size
            damaged[place : place + size] = source[start : start + size]
        else:  # cut short
            del damaged[at:]
        yield bytes(damaged)


def judge(image: bytes, path: Path, medium: str, states: list[Snapshot]) -> str:
    """What became of it: "error", "found" or "harmless"; AssertionError if damage was passed over."""
    path.write_bytes(image)
    try:
        with pmstore.open(path, "r+", media=medium) as store:
            report = store.check()
            try:
                found = snapshot(store)
            except pmstore.Error:
                assert not report.ok, "a reader stumbles over what check() does not see"
                return "found"
            if not report.ok:
                return "found"
            assert found in states, "damage was passed over"
            store["after"] = np.ones(3000)
            store.commit()
        return "harmless"
    except pmstore.Error:
        return "error"


def batch(directory: str, medium: str, clean: bool, seed: int, rounds: int) -> None:
    """One process's share; its own exit status says whether it survived."""
    path = Path(directory)
    states = made(path / "whole.pm", medium, clean)
    made(path / "other.pm", medium, clean)
    image, other = (path / "whole.pm").read_bytes(), (path / "other.pm").read_bytes()
    counts = dict.fromkeys(("error", "found", "harmless"), 0)
    for damaged in damages(image, other, random.Random(seed), rounds):
        counts[judge(damaged, path / "damaged.pm", medium, states)] += 1
    print(counts)
    assert counts["error"] and counts["found"] and counts["harmless"]


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "log"])
def test_damage_is_found_or_harmless(medium: Medium, clean: bool) -> None:
    arguments = f"{str(medium.directory)!r}, {medium.name!r}, {clean}, 3, {ROUNDS // 4}"
    code = f"from tests.test_damage import batch; batch({arguments})"
    root = Path(__file__).parent.parent
    environment = dict(os.environ, PYTHONPATH=f"{root}{os.pathsep}{Path(pmstore.__file__).parent.parent}")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def flipped(path: Path, needle: bytes) -> None:
    """Flips a bit in the place where the file holds these bytes; they stand there once."""
    image = bytearray(path.read_bytes())
    at = image.find(needle)
    assert at >= 0
    image[at + len(needle) // 2] ^= 4
    path.write_bytes(image)


def test_check_names_the_array_and_its_rows(medium: Medium) -> None:
    path = medium.directory / "named.pm"
    data = np.random.default_rng(1).random((1000, 16))
    with pmstore.open(path, media=medium.name) as store:
        store["data"] = data
        store["other"] = data[::-1].copy()
    flipped(path, data[500].tobytes())
    with pmstore.open(path, "r", media=medium.name) as store:
        report = store.check()
        assert not report.ok
        assert [problem.name for problem in report] == ["data"]
        assert "480" in str(report) or "row" in str(report)
        np.testing.assert_array_equal(store["other"], data[::-1])
    with pytest.raises(pmstore.CorruptStoreError, match="data"):
        pmstore.open(path, "r+", media=medium.name, verify=True)


def test_damage_in_a_value_is_found_when_it_is_read(medium: Medium) -> None:
    path = medium.directory / "value.pm"
    with pmstore.open(path, media=medium.name) as store:
        store["blob"] = b"0123456789" * 1000
        store["fine"] = 1
    image = bytearray(path.read_bytes())
    at = image.find(b"0123456789" * 900)
    image[at + 5000] ^= 1
    path.write_bytes(image)
    with pmstore.open(path, media=medium.name) as store:
        with pytest.raises(pmstore.CorruptStoreError, match="blob"):
            store["blob"]
        assert store["fine"] == 1


def test_one_damaged_header_copy_is_mended(medium: Medium) -> None:
    for copy in (0, 4096):
        path = medium.directory / f"header{copy}.pm"
        with pmstore.open(path, media=medium.name) as store:
            store["x"] = np.arange(5)
        image = bytearray(path.read_bytes())
        image[copy + 40] ^= 1
        path.write_bytes(image)
        with pmstore.open(path, "r", media=medium.name) as store:
            assert not store.check().ok
        with pmstore.open(path, media=medium.name) as store:
            assert store.check().ok
            assert store["x"].tolist() == [0, 1, 2, 3, 4]


def test_a_lost_record_that_was_durable_is_an_error(medium: Medium) -> None:
    """A bad record in the middle of the log is damage, not its end (D6)."""
    path = medium.directory / "log.pm"
    store = pmstore.open(path, media=medium.name)
    marker = np.frombuffer(b"0123456789abcdef" * 8, "u1")
    store["x"] = np.zeros(128, "u1")
    store.commit()
    store["x"] = marker
    store.commit()
    for i in range(3):
        store["y"] = i
        store.commit()
    log_size = store.stats().log_size
    store._drop(discard=True)
    image = bytearray(path.read_bytes())
    at = image.find(marker.tobytes(), len(image) - log_size)
    assert at > 0
    image[at + 9] ^= 1
    path.write_bytes(image)
    with pytest.raises(pmstore.CorruptStoreError, match="durable"):
        pmstore.open(path, media=medium.name)
