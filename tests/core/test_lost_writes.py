"""Writes that the disk lost or put elsewhere: what stands there instead was valid once, and verifies by itself (I12).

The oracle: the file does not open, or `check` reports, or everything is as it was committed last.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.conftest import LONGER, Medium
from tests.support.images import HEADER, META, NODE, PAGE, REGION, SLAB, SLAB_PAGE, WORD, Image
from tests.support.snapshots import Snapshot, snapshot

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
    for i in range(50):
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
    store["many/037"] = -7
    store["arrays/010"][:] = -10
    store["text"] = "x" * 1500
    store["new/array"][0] = 5
    del store["long"]
    del store["history"][2]


class Versions:
    """A store's file after each of its commits, and the last state. crashed: the last run has not ended by closing."""

    def __init__(self, directory: Path, medium: str, crashed: bool) -> None:
        self.path = directory / "versions.pm"
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
                    if old[at : at + size] == self.image[at : at + size]:
                        continue
                    image = self.image[:at] + old[at : at + size] + self.image[at + size :]
                    if image not in seen:
                        seen.add(image)
                        yield f"{size} bytes at {at:#x} as after commit {number}", image

    def strays(self, rng: random.Random) -> Iterator[tuple[str, bytes]]:
        """The file, with a sector or page as it was before, and its new bytes in the place of another one."""
        old, new = self.images[0], self.image
        for size in (SECTOR, PAGE):
            changed = [
                at for at in range(0, min(len(old), len(new)), size) if old[at : at + size] != new[at : at + size]
            ]
            used = [at for at in range(0, len(new), size) if any(new[at : at + size])]
            for at in changed:
                to = rng.choice([place for place in used if place != at])
                image = bytearray(new)
                image[at : at + size] = old[at : at + size]
                image[to : to + size] = new[at : at + size]
                yield f"{size} bytes for {at:#x} went to {to:#x}", bytes(image)


def evaluate(path: Path, medium: str, mode: str, state: Snapshot) -> str:
    """What became of the file: "error", "found" or "harmless"; AssertionError if older data are passed over."""
    try:
        with pmstore.open(path, mode, media=medium) as store:
            report = store.check()
            if report.ok or mode == "r":
                try:
                    same = snapshot(store) == state
                except pmstore.Error:
                    same = False
                assert same or not report.ok, "older data are passed over"
            return "harmless" if report.ok else "found"
    except pmstore.Error:
        return "error"


@pytest.mark.long_on("memory")
@pytest.mark.longer
@pytest.mark.parametrize("crashed", [pytest.param(False, marks=pytest.mark.long), True], ids=["closed", "crashed"])
def test_lost_and_misdirected_writes_are_found_or_harmless(medium: Medium, crashed: bool) -> None:
    files = Versions(medium.directory, medium.name, crashed)
    path = medium.directory / "lost.pm"
    counts = dict.fromkeys(("error", "found", "harmless"), 0)
    wrong = []
    images = [*files.lost(), *files.strays(random.Random(1))]
    for what, image in images if LONGER > 1 else images[::6]:
        for mode in ("r", "r+"):
            path.write_bytes(image)
            try:
                counts[evaluate(path, medium.name, mode, files.state)] += 1
            except AssertionError as error:
                wrong.append(f"{what}, mode {mode}: {error}")
    assert not wrong, f"{len(wrong)}, {counts}: {wrong[:5]}"
    # What the log still covers, recovery writes again.
    assert counts["harmless"] and counts["error" if crashed else "found"]


def test_check_names_what_was_not_written(medium: Medium) -> None:
    files = Versions(medium.directory, medium.name, crashed=False)
    found = {}
    for _, image in files.lost():
        files.path.write_bytes(image)
        with pmstore.open(files.path, "r", media=medium.name, exclusive=True) as store:
            found.update({str(problem): problem for problem in store.check() if "committed last" in problem.text})
    assert {"small", "short", "arrays/010"} <= {problem.name for problem in found.values()}
    assert next(problem for problem in found.values() if problem.name == "small").rows == range(5)
    assert [text for text in found if "catalog node" in text]
    assert [text for text in found if "space map" in text], "other problems don't hide it"


def test_several_older_pages_are_found_too(medium: Medium) -> None:
    files = Versions(medium.directory, medium.name, crashed=False)
    old, image = files.images[0], bytearray(files.image)
    nodes = [
        page for page in Image(files.path).pages(NODE) if old[REGION + page :][:PAGE] != image[REGION + page :][:PAGE]
    ]
    slabs = [
        page for page in Image(files.path).pages(SLAB) if old[REGION + page :][:PAGE] != image[REGION + page :][:PAGE]
    ]
    assert slabs, nodes
    for page in slabs:  # contents, not the header
        image[REGION + page + SECTOR : REGION + page + PAGE] = old[REGION + page + SECTOR : REGION + page + PAGE]
    files.path.write_bytes(image)
    with pmstore.open(files.path, "r", media=medium.name, exclusive=True) as store:
        assert not store.check().ok
    with pytest.raises(pmstore.CorruptStoreError):
        pmstore.open(files.path, "r+", media=medium.name, verify=True)


# ---- the digest is right after whatever has happened


def digest(image: Image) -> tuple[int, int]:
    """The digest of a closed store, computed as docs/format.md says."""
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
    files = Versions(medium.directory, medium.name, crashed=False)
    image = Image(files.path)
    for copy in (0, PAGE):
        assert (image.word(copy + 72), image.word(copy + 80)) == digest(image)


class RandomRun:
    """Random operations on a store; `sound` after each that ends a transaction or a run."""

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

    def many(self) -> None:
        """Enough names for several leaves of the catalog, and so few then that they merge or go."""
        first = self.rng.randrange(300)
        for i in range(first, first + 150):
            self.store[f"many/{i:03}" + "k" * 100] = i
        for i in range(first, first + 150):
            if self.rng.random() < 0.1:
                self.store.pop(f"many/{i:03}" + "k" * 100)

    def fewer(self) -> None:
        names = [name for name in self.store if name.startswith("many/")]
        first = self.rng.randrange(len(names) + 1)
        for name in names[first : first + self.rng.randrange(90)]:
            del self.store[name]

    def unowned(self) -> None:
        """Allocate without a name, as if an interrupt had come before it."""
        core = self.store._catalog.core
        core.alloc(self.rng.choice((8, 900, 5000, 70000)))

    def too_much(self) -> None:
        try:
            self.store[self.name()] = np.ones(800_000)
        except pmstore.OutOfSpaceError:
            self.sound()

    def write_all(self) -> None:
        for value in self.store.values():
            if isinstance(value, np.ndarray):
                value += 1

    def commit(self) -> None:
        try:
            self.store.commit()
        except pmstore.OutOfSpaceError:
            self.sound()
            self.delete()  # tried again, or given up
            with contextlib.suppress(pmstore.OutOfSpaceError):
                self.store.commit()
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
        seldom = (self.clear, self.change_list, self.let_go, self.unowned, self.write_all, self.roll_back, self.reopen)
        rarely = (self.checkpoint, self.too_much, self.many, self.fewer) if self.rng.random() < 0.4 else ()
        with contextlib.suppress(pmstore.NameConflictError, pmstore.OutOfSpaceError):
            self.rng.choice((*often, *seldom, *rarely))()


@pytest.mark.long_on("file")
@pytest.mark.longer
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_operations_leave_a_sound_store(medium: Medium, seed: int) -> None:
    run = RandomRun(medium.directory / "run.pm", medium.name, seed)
    try:
        for _ in range((400 if medium.name == "memory" else 150) * LONGER):
            run.step()
    finally:
        run.store._drop(discard=True)
        shutil.rmtree(medium.directory, ignore_errors=True)


def test_nodes_that_merge_take_their_contributions_along(store: pmstore.Store) -> None:
    """Also those that nothing had changed since the last commit."""
    for i in range(400):
        store[f"{i:03}" + "k" * 150] = i
    store.commit()
    for i in range(0, 400, 2):
        del store[f"{i:03}" + "k" * 150]
        store.commit()
        assert store.check().ok
    store.clear()
    store.commit()
    assert store.check().ok


def test_a_overflowed_commit_has_the_digest_of_its_last_attempt(medium: Medium) -> None:
    path = medium.directory / "overflow.pm"
    with pmstore.open(path, media=medium.name, max_size=3_000_000) as store:
        store["filler"] = np.ones(130_000)
        base = store.create_array("base", 100_000, "f8")
        store.commit()
        del store["filler"]
        store.commit()
        for i in range(2):
            before = store.stats()
            base[:68_000] += i + 1
            store["also"] = np.full(600, float(i))
            store.commit()
            after = store.stats()
            assert after.bytes_logged - before.bytes_logged > after.log_size == before.log_size
            assert store.check().ok
    with pmstore.open(path, media=medium.name, verify=True) as store:
        assert store.check().ok


def test_threads_that_write_meanwhile(store: pmstore.Store) -> None:
    arrays = [store.create_array(f"a{size}", size, "u1") for size in (60, 1500, 4096, 9001, 300_000)]
    store.commit()
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            for array in arrays:
                array += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for i in range(200):
            store["i"] = i
            store.commit()
            assert store.check().ok
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("table", [False, True])
def test_what_was_damaged_can_be_deleted(medium: Medium, table: bool) -> None:
    """check() is silent about the digest if the hashes were right; otherwise the right bytes are unknown."""
    path = medium.directory / "damaged.pm"
    with pmstore.open(path, media=medium.name) as store:
        for i in range(3):
            store[f"g/{i}"] = np.arange(2000.0) + i
        store["other"] = 1
    image = bytearray(path.read_bytes())
    at = image.find((np.arange(2000.0) + 1).tobytes())
    image[at + (16_000 if table else 5000)] ^= 1
    path.write_bytes(image)
    with pmstore.open(path, media=medium.name) as store:
        assert [problem.name for problem in store.check()] == ["g/1"]
        store.group("g").clear()
        store.commit()
        texts = [problem.text for problem in store.check()]
        assert len(texts) == table
        assert not table or "deleted" in texts[0]


def test_an_image_that_is_newer_than_the_log_is_found(medium: Medium) -> None:
    """The newest record is lost, and the durable marker with it: the store opens at the commit before, and check() sees
    that there was another one."""
    path = medium.directory / "image.pm"
    store = pmstore.open(path, media=medium.name)
    store["x"] = np.zeros(50)
    store.commit()
    store._catalog.core.checkpoint()
    before = path.read_bytes()
    store["x"] += 1
    store.commit()
    log = store.stats().file_size - store.stats().log_size
    sequence = store.sequence
    store._drop(discard=True)
    image = bytearray(path.read_bytes())
    image[log:], image[2048:PAGE] = before[log:], before[2048:PAGE]
    path.write_bytes(image)
    with pmstore.open(path, "r", media=medium.name) as store:
        assert store.sequence == sequence - 1
        assert [problem.name for problem in store.check()] == ["x"]


@pytest.mark.parametrize("lost", [0, 1])
def test_either_copy_of_the_header_may_be_an_old_one(medium: Medium, lost: int) -> None:
    """The newest copy counts, also where the write of the other one was lost."""
    path = medium.directory / "s.pm"
    for n in range(3):
        old = path.read_bytes()[lost * PAGE :][:PAGE] if n else b""
        with pmstore.open(path, media=medium.name) as store:
            store["n"] = n
    with open(path, "r+b") as file:
        file.seek(lost * PAGE)
        assert file.read(PAGE) != old
        file.seek(lost * PAGE)
        file.write(old)
    for mode in ("r", "r+"):
        with pmstore.open(path, mode, media=medium.name) as store:  # type: ignore[call-overload]
            assert store["n"] == 2 and store.check().ok


def test_every_life_of_a_log_has_an_id_of_its_own(medium: Medium) -> None:
    """Otherwise records of an earlier run, or of another store, would be taken for records of this one."""
    ids, salts = set(), []
    for name in ("one", "two"):
        path = medium.directory / name
        for n in range(3):
            with pmstore.open(path, media=medium.name) as store:
                store["n"] = n
            salts.append(path.read_bytes()[HEADER["salt"] :][:8])
        ids.add(path.read_bytes()[HEADER["store_id"] :][:8])
    assert len(ids) == 2 and len(set(salts)) == len(salts)
