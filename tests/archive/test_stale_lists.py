"""Lists of a place that are older than its objects, as caches of file systems and proxies give them."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore.archive._archive import Archive
from pmstore.archive._sources import Sources
from pmstore.archive._steps import Steps
from tests.archive.stepping import Crash, Memory, archived, stepping

pytest.importorskip("numcodecs")


class Stale(Memory):
    """The first lists of the index are of an earlier moment."""

    def __init__(self, objects: dict[str, bytes], earlier: list[str], count: int) -> None:
        super().__init__(objects)
        self.earlier, self.count = earlier, count

    def list(self, folder: str) -> list[str]:
        if folder == "index" and self.count:
            self.count -= 1
            return self.earlier
        return super().list(folder)


class Noting(Memory):
    """Keeps each list that the index had."""

    def _change(self) -> None:
        super()._change()
        found = self.list("index")
        if not lists or lists[-1] != found:
            lists.append(found)


lists: list[list[str]] = []


def versions(store: pmstore.Store, steps: Steps, values: range) -> None:
    for value in values:
        store["x"] = np.full(10, value)
        store.commit()
        archived(steps)


@pytest.mark.parametrize("keep", [None, {"last": 10}], ids=["all", "last"])
def test_I26_a_list_that_is_older_than_a_merge_loses_no_version(tmp_path: Path, keep: object) -> None:
    """The names of flushes that were merged are free: a writer that does not see what took their place would use them
    again, and sweep the parts of all versions."""
    place = Noting()
    lists[:] = [[]]
    with pmstore.open(tmp_path / "store.pm") as store:
        with stepping(store, place, keep=keep) as steps:
            versions(store, steps, range(36))
        store["x"] = np.full(10, 36)
        store.commit()
        before = set(Archive(Sources([place])).versions())
        outcomes = set()
        for earlier, count in itertools.product(lists[:: 9 if keep else 5], [1, 1000]):
            stale = Stale(dict(place.objects), earlier, count)
            try:
                with stepping(store, stale, keep=keep) as steps:
                    archived(steps)
            except pmstore.ArchiveError as error:
                outcomes.add(type(error))
            now = Archive(Sources([Memory(stale.objects)]))
            newest = store.sequence in now.versions()
            assert newest or count == 1000
            assert before - set(now.versions()) <= ({min(before)} if keep else set())
            for version in now.versions():
                assert now[version]["x"].shape == (10,)
        assert outcomes <= {pmstore.ArchiveDamagedError, pmstore.ArchiveConflictError}
        assert pmstore.ArchiveDamagedError in outcomes


def test_a_copy_that_was_made_while_a_drain_wrote(tmp_path: Path) -> None:
    """The index was copied first, and the token after a merge."""
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store:
        with stepping(store, place) as steps:
            versions(store, steps, range(20))
            copy = Memory({name: data for name, data in place.objects.items() if name.startswith("index/")})
            versions(store, steps, range(20))
        copy.objects.update({name: data for name, data in place.objects.items() if not name.startswith("index/")})
        assert len(Archive(Sources([copy]))) == 20
        with pytest.raises(pmstore.ArchiveDamagedError, match="ends with flush 20.*delete its folder 'writers'"):
            with stepping(store, copy):
                pass
        copy.delete([f"writers/{name}" for name in copy.list("writers")])
        with stepping(store, copy) as steps:
            archived(steps)
    found = Archive(Sources([copy]))
    assert len(found) == 21 and all(found[version]["x"].shape == (10,) for version in found)


MERGED = "000000000001-000000000032-000000"


class Hooked(Memory):
    """Calls a function once, before an object of this name is created, or after it."""

    def __init__(self, objects: dict[str, bytes], name: str, before: bool, call: Callable[[], object]) -> None:
        super().__init__(objects)
        self.name, self.before, self.call = name, before, call

    def create(self, name: str, data: Sequence[bytes]) -> None:  # type: ignore[override]
        found = name.startswith(self.name)
        if found and self.before:
            self._once()
        super().create(name, data)
        if found and not self.before:
            self._once()

    def _once(self) -> None:
        call, self.call = self.call, lambda: None
        call()


def test_a_drain_that_is_refused_for_its_list_ends_no_other(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        versions(store, steps, range(33))
        for earlier in ([], [MERGED]):
            with pytest.raises(pmstore.ArchiveDamagedError, match="try again later"):
                if earlier:
                    versions(store, steps, range(33, 66))
                with stepping(store, Stale(place.objects, earlier, 1000)):
                    pass
            versions(store, steps, range(1))


def test_I26_a_merge_while_another_writer_begins(tmp_path: Path) -> None:
    """It reads the old token before the merge, and its lists are from a cache."""
    objects: dict[str, bytes] = {}
    with pmstore.open(tmp_path / "store.pm") as store:
        with stepping(store, Memory(objects)) as steps:
            versions(store, steps, range(31))

            class Cached(Hooked):
                lists: list[str] | None = None

                def list(self, folder: str) -> list[str]:
                    if folder != "index":
                        return super().list(folder)
                    self.lists = self.lists or super().list(folder)
                    return self.lists

            cached = Cached(objects, "writers/", True, lambda: versions(store, steps, range(1)))
            with pytest.raises(pmstore.ArchiveDamagedError, match="try again later"), stepping(store, cached):
                pass
    found = Archive(Sources([Memory(objects)]))
    assert len(found) == 32 and found[32]["x"].shape == (10,)


@pytest.mark.parametrize("again", [False, True], ids=["empty", "filled anew"])
def test_a_place_that_is_emptied_while_a_writer_merges(again: bool, tmp_path: Path) -> None:
    """The writer makes no token there, which would let it go on, and end the next one."""
    objects: dict[str, bytes] = {}

    def empty() -> None:
        objects.clear()
        if again:
            with stepping(store, Memory(objects)) as other:
                versions(store, other, range(3))

    with pmstore.open(tmp_path / "store.pm") as store:
        for _ in range(2):
            with stepping(store, Memory(objects)):
                pass
        with stepping(store, Hooked(objects, f"index/{MERGED}", False, empty)) as steps:
            with pytest.raises(pmstore.ArchiveDamagedError, match="was emptied"):
                versions(store, steps, range(40))
        objects.pop(f"index/{MERGED}", None)  # of the writer that ended
        with stepping(store, Memory(objects)) as steps:
            versions(store, steps, range(3))
    found = Archive(Sources([Memory(objects)]))
    assert len(found) == 3 + again * 3 and all(found[version]["x"].shape == (10,) for version in found)


def test_a_token_that_could_not_be_told_is_told_before_names_are_freed(tmp_path: Path) -> None:
    class Fails(Memory):
        fails = 0

        def put(self, name: str, data: Sequence[bytes]) -> None:  # type: ignore[override]
            if name.startswith("writers/") and name in self.objects and self.fails:
                self.fails -= 1
                raise pmstore.ArchiveUnavailableError(errno.EIO, "a fault")
            super().put(name, data)

    place = Fails()
    with pmstore.open(tmp_path / "store.pm") as store:
        with stepping(store, place) as steps:
            versions(store, steps, range(32))
        for version in Archive(Sources([place])).versions():
            Archive(Sources([place])).tag(f"t{version}", version)
        with stepping(store, place, keep=5) as steps:
            place.fails = 1
            versions(store, steps, range(8))
        with pytest.raises(pmstore.ArchiveDamagedError), stepping(store, Stale(place.objects, [MERGED], 1000)):
            pass


def test_a_flush_whose_name_a_power_cut_has_taken(tmp_path: Path) -> None:
    """A drain has seen its name before it was durable. The token does not tell of it."""
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store:
        with pytest.raises(Crash), stepping(store, place) as steps:
            versions(store, steps, range(5))
            raise Crash  # between the name of the last flush and its sync
        with stepping(store, place):
            pass
        place.delete([f"index/{place.list('index')[-1]}"])
        with stepping(store, place) as steps:
            versions(store, steps, range(2))
    found = Archive(Sources([place]))
    assert found.versions() == [1, 2, 3, 4, 6, 7] and all(found[version]["x"].shape == (10,) for version in found)


def test_readers_of_a_place_that_was_filled_anew(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store:
        with stepping(store, place) as steps:
            versions(store, steps, range(10))
        reader = Archive(Sources([place]))
        place.objects.clear()
        with stepping(store, place) as steps:
            versions(store, steps, range(3))
        reader.refresh()
        assert reader.versions() == Archive(Sources([place])).versions()
