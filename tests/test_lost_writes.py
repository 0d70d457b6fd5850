"""Writes that the disk lost or put elsewhere: what stands there instead was valid once, and verifies by itself (I12).

The oracle: the file does not open, or `check` reports, or everything is as it was committed last.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore

from .conftest import Medium
from .crashes import Snapshot, snapshot
from .images import META, NODE, PAGE, REGION, SLAB, SLAB_PAGE, WORD, Image

SECTOR = 512


def fill(store: pmstore.Store) -> None:
    rng = np.random.default_rng(3)
    store["small"] = rng.random(5)
    store["short"] = rng.random(50)
    store["two/blocks"] = rng.random(900)
    store["two/large"] = rng.random(9000)
    store["two/deep/er"] = {"name": "net", "sizes": [1, 2, 3]}
    store["text"] = "y" * 1500
    store["long"] = b"z" * 9000
    store.create_list("history").extend(range(30))
    for i in range(90):
        store[f"many/{i:03}"] = i
        store[f"arrays/{i:03}"] = np.full(i % 40 + 1, float(i))


def first_change(store: pmstore.Store) -> None:
    store["small"] += 1
    store["two/large"][4000:4003] = 7
    store["many/003"] = -3
    store["history"].append("more")
    store["new/array"] = np.arange(2000.0)


def second_change(store: pmstore.Store) -> None:
    store["small"] += 1
    store["short"][3] = 0
    store["two/large"][::700] += 1
    store["many/077"] = -7
    store["arrays/010"][:] = -10
    store["text"] = "x" * 1500
    store["new/array"][0] = 5
    del store["long"]
    del store["history"][2]


class Lives:
    """A store's file after each of its commits, and the last state. crashed: the last life has not ended by closing."""

    def __init__(self, directory: Path, medium: str, crashed: bool) -> None:
        self.path = directory / "lives.pm"
        self.medium, self.images = medium, []
        with pmstore.open(self.path, media=medium) as store:
            fill(store)
        self.keep()
        store = pmstore.open(self.path, "r+", media=medium)
        for change in (first_change, second_change):
            change(store)
            store.commit()
            self.keep()
        self.state = snapshot(store)
        store._drop(discard=True) if crashed else store.close()
        self.keep()
        self.image = self.images.pop()

    def keep(self) -> None:
        self.images.append(self.path.read_bytes())

    def lost(self) -> Iterator[tuple[str, bytes]]:
        """The file, with an older version of each sector and page that changed."""
        seen = {self.image}
        for size in (SECTOR, PAGE):
            for number, old in enumerate(self.images):
                for at in range(0, min(len(old), len(self.image)), size):
                    image = self.image[:at] + old[at : at + size] + self.image[at + size :]
                    if image not in seen:
                        seen.add(image)
                        yield f"{size} bytes at {at:#x} as after commit {number}", image

    def strays(self, rng: random.Random) -> Iterator[tuple[str, bytes]]:
        """The file, with a sector or page as it was before, and its new bytes in the place of another one."""
        old, new = self.images[0], self.image
        for size in (SECTOR, PAGE):
            changed = [at for at in range(0, min(len(old), len(new)), size) if old[at : at + size] != new[at : at + size]]
            used = [at for at in range(0, len(new), size) if any(new[at : at + size])]
            for at in changed:
                to = rng.choice([place for place in used if place != at])
                image = bytearray(new)
                image[at : at + size] = old[at : at + size]
                image[to : to + size] = new[at : at + size]
                yield f"{size} bytes for {at:#x} went to {to:#x}", bytes(image)


def judge(path: Path, medium: str, mode: str, state: Snapshot) -> str:
    """What became of the file: "error", "found" or "harmless"; AssertionError if older data are passed over."""
    try:
        with pmstore.open(path, mode, media=medium) as store:
            report = store.check()
            try:
                same = snapshot(store) == state
            except pmstore.Error:
                same = False
            assert same or not report.ok, "older data are passed over"
            return "harmless" if report.ok else "found"
    except pmstore.Error:
        return "error"


@pytest.mark.parametrize("crashed", [False, True], ids=["closed", "crashed"])
def test_lost_and_misdirected_writes_are_found_or_harmless(medium: Medium, crashed: bool) -> None:
    lives = Lives(medium.directory, medium.name, crashed)
    path = medium.directory / "lost.pm"
    counts = dict.fromkeys(("error", "found", "harmless"), 0)
    wrong = []
    for what, image in [*lives.lost(), *lives.strays(random.Random(1))]:
        for mode in ("r", "r+"):
            path.write_bytes(image)
            try:
                counts[judge(path, medium.name, mode, lives.state)] += 1
            except AssertionError as error:
                wrong.append(f"{what}, mode {mode}: {error}")
    assert not wrong, f"{len(wrong)}, {counts}: {wrong[:5]}"
    # What the log still covers, recovery writes again.
    assert counts["harmless"] and counts["error" if crashed else "found"]


def test_check_names_what_is_older(medium: Medium) -> None:
    lives = Lives(medium.directory, medium.name, crashed=False)
    found = {}
    for _, image in lives.lost():
        lives.path.write_bytes(image)
        with pmstore.open(lives.path, "r", media=medium.name) as store:
            found.update({str(problem): problem for problem in store.check() if "older version" in problem.text})
    assert {"small", "short", "arrays/010"} <= {problem.name for problem in found.values()}
    assert next(problem for problem in found.values() if problem.name == "small").rows == range(5)
    assert [text for text in found if "catalog node" in text]
    assert [text for text in found if "space map" in text], "other problems don't hide it"


def test_several_older_pages_are_found_too(medium: Medium) -> None:
    lives = Lives(medium.directory, medium.name, crashed=False)
    old, image = lives.images[0], bytearray(lives.image)
    nodes = [page for page in Image(lives.path).pages(NODE) if old[REGION + page :][:PAGE] != image[REGION + page :][:PAGE]]
    slabs = [page for page in Image(lives.path).pages(SLAB) if old[REGION + page :][:PAGE] != image[REGION + page :][:PAGE]]
    assert slabs, nodes
    for page in slabs:  # contents, not the header
        image[REGION + page + SECTOR : REGION + page + PAGE] = old[REGION + page + SECTOR : REGION + page + PAGE]
    lives.path.write_bytes(image)
    with pmstore.open(lives.path, "r", media=medium.name) as store:
        assert not store.check().ok
    with pytest.raises(pmstore.CorruptStoreError):
        pmstore.open(lives.path, "r+", media=medium.name, verify=True)


# ---- the digest is right after whatever has happened


def digest(image: Image) -> tuple[int, int]:
    """As docs/format.md has it, of a closed store."""
    total = moment = 0

    def add(place: int, value: int) -> None:
        nonlocal total, moment
        x = (value + place * 0x9E3779B97F4A7C15) & WORD
        x = ((x ^ x >> 32) * 0xBF58476D1CE4E5B9) & WORD
        x = ((x ^ x >> 29) * 0x94D049BB133111EB) & WORD
        x ^= x >> 32
        total, moment = (total + x) & WORD, (moment + x * (place // 64)) & WORD

    space_map = image.get(0, 112)
    space_map = image.get(space_map, 64)
    for page in range(image.region_size // PAGE):
        if image.get(space_map, 64 + page // 32 * 8) >> page % 32 * 2 & 3 in (META, SLAB_PAGE):
            add(page * PAGE, image.get(page * PAGE, 0))
    for node in image.pages(NODE):
        for cell in image.cells(node) if image.get(node, 20, "I") == 0 else []:
            for block in range((cell.length + PAGE - 1) // PAGE if cell.offset else 0):
                add(cell.offset + block * PAGE, image.get(cell.offset, (cell.length + 7 & ~7) + 8 * block))
    return total, moment


def test_the_header_holds_the_digest_that_the_format_describes(medium: Medium) -> None:
    lives = Lives(medium.directory, medium.name, crashed=False)
    image = Image(lives.path)
    for copy in (0, PAGE):
        assert (image.word(copy + 72), image.word(copy + 80)) == digest(image)


class Life:
    """Random operations on a store; `sound` after each that ends a transaction or a life."""

    def __init__(self, path: Path, medium: str, seed: int) -> None:
        self.path, self.medium, self.rng = path, medium, random.Random(seed)
        self.held: list[np.ndarray] = []
        self.open()

    def open(self) -> None:
        self.store = pmstore.open(self.path, media=self.medium, max_size=6 << 20)
        self.sound()

    def sound(self) -> None:
        report = self.store.check()
        assert report.ok, report

    def name(self) -> str:
        return self.rng.choice(("", "g/", "g/h/", "x/")) + f"n{self.rng.randrange(12)}"

    def array(self) -> np.ndarray:
        size = self.rng.choice((0, 1, 8, 100, 250, 251, 511, 512, 513, 1500, 9000, self.rng.randrange(3000)))
        return np.full(size, self.rng.random())

    # ---- operations

    def assign(self) -> None:
        value = self.rng.choice((self.array(), self.array(), 7, "v" * self.rng.randrange(3000), {"a": [1, 2]}))
        self.store[self.name()] = value

    def write(self) -> None:
        value = self.store.get(self.name())
        if isinstance(value, np.ndarray) and value.size:
            at = self.rng.randrange(value.size)
            value[at : at + self.rng.choice((1, 100, 9000))] += 1
            if self.rng.random() < 0.3:
                self.held.append(value)

    def delete(self) -> None:
        self.store.pop(self.name(), None)

    def clear(self) -> None:
        self.store.group(self.rng.choice(("g", "x"))).clear()

    def change_list(self) -> None:
        name = "list" + str(self.rng.randrange(2))
        items = self.store[name] if name in self.store else self.store.create_list(name)
        for _ in range(self.rng.randrange(40)):
            items.append(self.rng.choice((1, "b" * 900, b"c" * 3000)))
        if items and self.rng.random() < 0.5:
            del items[self.rng.randrange(len(items))]

    def let_go(self) -> None:
        self.held.clear()

    def unowned(self) -> None:
        """As if an interrupt had come between an allocation and its name."""
        core = self.store._catalog.core
        core.alloc(self.rng.choice((8, 900, 5000, 70000)))

    def too_much(self) -> None:
        try:
            self.store[self.name()] = np.ones(800_000)
        except pmstore.OutOfSpaceError:
            self.sound()

    def spill(self) -> None:
        """Every page of much, so that the log is too small for it."""
        for value in self.store.values():
            if isinstance(value, np.ndarray):
                value += 1

    def commit(self) -> None:
        try:
            self.store.commit()
        except pmstore.OutOfSpaceError:
            self.sound()
            self.store.rollback()
        self.sound()

    def roll_back(self) -> None:
        self.store.rollback()
        self.sound()

    def checkpoint(self) -> None:
        self.store._catalog.core.checkpoint()
        self.sound()

    def reopen(self) -> None:
        crash = self.rng.random() < 0.6
        self.held.clear()
        self.store._drop(discard=True) if crash else self.end()
        if crash and self.rng.random() < 0.5:
            with pmstore.open(self.path, "r", media=self.medium) as reader:
                assert reader.check().ok, reader.check()
        self.open()

    def end(self) -> None:
        self.commit()
        self.store.close()

    def step(self) -> None:
        often = (self.assign,) * 6 + (self.write,) * 6 + (self.delete,) * 3 + (self.commit,) * 4
        seldom = (self.clear, self.change_list, self.let_go, self.unowned, self.spill, self.roll_back, self.reopen)
        rarely = (self.checkpoint, self.too_much) if self.rng.random() < 0.3 else ()
        try:
            self.rng.choice((*often, *seldom, *rarely))()
        except (pmstore.NameConflictError, pmstore.OutOfSpaceError):
            pass


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_operations_leave_a_sound_store(medium: Medium, seed: int) -> None:
    life = Life(medium.directory / "life.pm", medium.name, seed)
    try:
        for _ in range(1200 if medium.name == "memory" else 400):
            life.step()
    finally:
        life.store._drop(discard=True)
        shutil.rmtree(medium.directory, ignore_errors=True)
