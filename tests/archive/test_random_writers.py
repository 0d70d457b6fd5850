"""Several writers of one place, one operation at a time, in an order that a seed gives."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.archive import _index
from pmstore.archive._archive import Archive
from pmstore.archive._sources import Sources
from tests.archive.stepping import Crash, Memory, archived, stepping

pytest.importorskip("numcodecs")


class Turns:
    """Lets one of several threads do its next operations; the others wait."""

    def __init__(self, generator: random.Random, threads: Iterable[int]) -> None:
        self._generator, self._alive = generator, set(threads)
        self._changed = threading.Condition()
        self._turn, self._left = -1, 0

    def run(self, work: Callable[[int], None]) -> None:
        """Calls `work` in each thread, until all have ended."""

        def ended(me: int) -> None:
            try:
                with self._changed:
                    self._wait(me)
                work(me)
            finally:
                with self._changed:
                    self._alive.discard(me)
                    self._choose()

        threads = [threading.Thread(target=ended, args=(me,)) for me in self._alive]
        with self._changed:
            self._choose()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    def wait(self, me: int) -> None:
        """Returns when it is this thread's turn again."""
        with self._changed:
            self._choose()
            self._wait(me)

    def _wait(self, me: int) -> None:
        assert self._changed.wait_for(lambda: self._turn == me, 60)

    def _choose(self) -> None:
        if self._alive and (self._left <= 0 or self._turn not in self._alive):
            self._turn = self._generator.choice(sorted(self._alive))
            self._left = int(self._generator.expovariate(1 / 6))
        self._left -= 1
        self._changed.notify_all()


class Taking(Memory):
    """A writer's view of the place. It crashes before an operation, and its lists of the index may be old ones."""

    def __init__(self, objects: dict[str, bytes], wait: Callable[[], None], generator: random.Random) -> None:
        super().__init__(objects)
        self.wait, self.generator = wait, generator
        self.left = generator.choice([-1, -1, generator.randrange(1, 80)])  # operations until the crash
        self.is_cached, self.cached = generator.random() < 0.7, super().list("index")

    def _operation(self) -> None:
        self.wait()
        if self.left == 0:
            raise Crash
        self.left -= 1

    def put(self, name: str, data: Sequence[Any]) -> None:
        self._operation()
        super().put(name, data)

    def create(self, name: str, data: Sequence[Any]) -> None:
        self._operation()
        Memory(self.objects).create(name, data)

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        self._operation()
        return super().get(name, at, count)

    def list(self, folder: str) -> list[str]:
        self._operation()
        if folder != "index":
            return super().list(folder)
        if not self.is_cached or self.generator.random() < 0.6:
            self.cached = super().list(folder)
        return self.cached

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.objects:
                self._operation()
                self.objects.pop(name, None)


def archives(store: pmstore.Store, place: Memory, commits: int, durable: set[int], keep: int | None) -> None:
    """Commits, each archived by a drain of its own steps, or until another writer has ended it."""
    with stepping(store, place, keep=keep) as steps:
        for _ in range(commits):
            store["x"] = np.full(20, store.sequence)
            store.commit()
            archived(steps)
            durable.add(steps.targets[0].last)


def loses_nothing(seed: int, path: Path) -> None:
    """Writers work, and at last one alone. All versions that were durable are there then, whole."""
    generator = random.Random(seed)
    keeps = [None] if seed % 3 else [None, 1, 2, 3]
    objects: dict[str, bytes] = {}
    durable: set[int] = set()
    unexpected: list[BaseException] = []
    with pmstore.open(path) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of versions that another writer has removed
        store["x"] = np.zeros(20)
        store.commit()
        archives(store, Memory(objects), generator.randrange(9), durable, None)
        turns = Turns(generator, range(generator.choice([2, 2, 3, 4])))

        def work(me: int) -> None:
            place = Taking(objects, lambda: turns.wait(me), generator)
            try:
                for _ in range(generator.randrange(5)):
                    turns.wait(me)
                archives(store, place, generator.randrange(1, 8), durable, generator.choice(keeps))
            except (Crash, pmstore.ArchiveError):
                pass
            except BaseException as error:
                unexpected.append(error)

        turns.run(work)
        assert not unexpected, f"seed {seed}: {unexpected}"
        archives(store, Memory(objects), 1, durable, None)
        found = Archive(Sources([Memory(objects)]))
        assert found.verify().ok, f"seed {seed}"
        assert store.sequence in found, f"seed {seed}"
        assert keeps != [None] or durable <= set(found.versions()), f"seed {seed}"


@pytest.mark.parametrize("part", range(8))
def test_I26_no_order_of_writers_loses_a_version(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_index, "_FAN", 2)
    monkeypatch.setattr(_index, "_ATTEMPTS", 3)
    for seed in range(40 * part, 40 * part + 40):
        loses_nothing(seed, tmp_path / f"{seed}.pm")
