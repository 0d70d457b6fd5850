"""Versions that a drain removes while others read or tag them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore.archive._archive import Archive
from pmstore.archive._objects import Buffer
from pmstore.archive._sources import Sources
from pmstore.archive._steps import Steps
from tests.archive.stepping import Memory, archived, stepping

pytest.importorskip("numcodecs")


class Interrupted(Memory):
    """A place that somebody else works in just before an object of a folder is read."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.before: dict[str, Callable[[], None]] = {}

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        act = self.before.pop(name.split("/")[0], None)
        if act is not None:
            act()
        return super().get(name, at, count)


def next_version(store: pmstore.Store, steps: Steps) -> int:
    """A version whose differential would not be smaller than a base."""
    store["x"] = np.random.default_rng(store.sequence).normal(size=10_000)
    store.commit()
    archived(steps)
    return store.sequence


def removes(store: pmstore.Store, steps: Steps) -> None:
    """New versions, until the newest one of before is gone, and no other one needs it."""
    version = store.sequence
    while steps.targets[0].index.find(version) is not None:
        next_version(store, steps)


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[tuple[pmstore.Store, Steps, Interrupted]]:
    """A store with the steps of its drain, which keeps one version, and the same place as somebody else sees it."""
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, keep=1) as steps:
        yield store, steps, Interrupted(place.objects)


def test_a_version_that_goes_while_it_is_read(beside: tuple[pmstore.Store, Steps, Interrupted], tmp_path: Path) -> None:
    store, steps, seen = beside

    def opened() -> Archive:
        next_version(store, steps)
        seen.before["parts"] = lambda: removes(store, steps)
        return Archive(Sources([seen]))

    for read in (lambda found: found[found.latest], lambda found: found.restore(tmp_path / "a.pm", found.latest)):
        with pytest.raises(pmstore.UnknownVersionError, match="was removed meanwhile"):
            read(opened())
    found = opened()
    assert found.restore(tmp_path / "a.pm") == store.sequence
    assert np.array_equal(found[store.sequence]["x"], store["x"])


def test_a_version_that_goes_before_its_contents_are_read(
    beside: tuple[pmstore.Store, Steps, Interrupted], tmp_path: Path
) -> None:
    store, steps, seen = beside
    first = next_version(store, steps)
    Archive(Sources([seen])).tag("first", first)
    next_version(store, steps)
    found = Archive(Sources([seen]))
    old, version = found[first], found[found.latest]
    removes(store, steps)
    for read in (
        lambda: found.diff(first, version.version),
        lambda: version["x"],
        lambda: version.read("x", np.s_[:3]),
        lambda: archive.export(version, tmp_path / "x.npz"),
    ):
        with pytest.raises(pmstore.UnknownVersionError, match="was removed meanwhile"):
            read()
    assert not (tmp_path / "x.npz").exists() and old["x"].shape == (10_000,)


def test_versions_that_go_while_they_are_verified(beside: tuple[pmstore.Store, Steps, Interrupted]) -> None:
    store, steps, seen = beside
    next_version(store, steps)
    seen.before["parts"] = lambda: removes(store, steps)
    found = Archive(Sources([seen]))
    assert found.verify().ok and not seen.before


def test_versions_that_go_as_quickly_as_they_are_read(
    beside: tuple[pmstore.Store, Steps, Interrupted], tmp_path: Path
) -> None:
    store, steps, seen = beside

    def again() -> None:
        removes(store, steps)
        seen.before["parts"] = again

    next_version(store, steps)
    found = Archive(Sources([seen]))
    seen.before["parts"] = again
    with pytest.raises(pmstore.ArchiveUnavailableError, match="removed while they are read: tag one"):
        found.restore(tmp_path / "a.pm")
    assert not (tmp_path / "a.pm").exists()
    seen.before.clear()
    assert found.restore(tmp_path / "a.pm") == store.sequence


def test_an_archive_without_versions(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place):
        pass
    with pytest.raises(pmstore.UnknownVersionError, match="no version yet"):
        Archive(Sources([place])).restore(tmp_path / "a.pm")


class Tagging(Memory):
    """A place in which a version gets a tag at the moment in which it goes: before or after a put to the index."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before, self.version = before, -1
        self.told: bool | None = None  # whether `tag` said that it worked

    def put(self, name: str, data: Sequence[Buffer]) -> None:
        if self.version in self.versions(name, data) or self.version < 0:
            super().put(name, data)
            return
        if self.before:
            self.tag()
        super().put(name, data)
        if not self.before:
            self.tag()

    def versions(self, name: str, data: Sequence[Buffer]) -> list[int]:
        """The listed ones after a put of an object of the index."""
        if not name.startswith("index/"):
            return [self.version]
        return Archive(Sources([Memory({**self.objects, name: b"".join(map(bytes, data))})])).versions()

    def tag(self) -> None:
        version, self.version = self.version, -1
        try:
            Archive(Sources([Memory(self.objects)])).tag("best", version)
            self.told = True
        except pmstore.UnknownVersionError:
            self.told = False


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("number", range(6))
def test_a_version_that_is_tagged_while_it_goes(before: bool, number: int, tmp_path: Path) -> None:
    """Retention has read the tags already. A version stays if `tag` said that it has one."""
    place, contents = Tagging(before), dict[int, Any]()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, keep=2) as steps:
        for step in range(30):
            version = next_version(store, steps)
            contents[version] = np.array(store["x"])
            if step == number:
                place.version = version
    found = Archive(Sources([Memory(place.objects)]))
    assert place.told is not None and place.told == before
    assert found.tags == ({"best": number + 1} if before else {})
    assert (number + 1 in found) == before and found.verify().ok
    for version in found:
        assert np.array_equal(found[version]["x"], contents[version])
    assert len(place.list("parts")) < 8, "the others are gone"


class Counting(Memory):
    """A place that counts how often tags are read."""

    tags_read = 0

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        self.tags_read += name.startswith("tags/")
        return super().get(name, at, count)


def test_a_tag_is_read_once(tmp_path: Path) -> None:
    """Unless a tag was taken away since: its name may be another version's now."""
    place = Counting()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, keep=1) as steps:
        found = Archive(Sources([Memory(place.objects)]))
        for number in range(5):
            next_version(store, steps)
            found.tag(f"t{number}")
        for _ in range(100):
            next_version(store, steps)
        assert place.tags_read == 5
        found.untag("t4")
        found.tag("t4", 4)
        for _ in range(50):
            next_version(store, steps)
        assert place.tags_read == 10
        found.untag("t1")
        for _ in range(50):
            next_version(store, steps)
    found = Archive(Sources([place]))
    assert found.versions() == [1, 3, 4, found.latest]


def test_a_damaged_tag_that_another_one_replaced(tmp_path: Path) -> None:
    """The drain knows the damaged one's version from before."""
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, keep=2) as steps:
        first = next_version(store, steps)
        Archive(Sources([Memory(place.objects)])).tag("best")
        for _ in range(20):
            second = next_version(store, steps)
        place.objects["tags/best"] = b"damaged"
        with pytest.warns(pmstore.ArchiveWarning, match="damaged"):
            found = Archive(Sources([Memory(place.objects)]))
        found.untag("best")
        found.tag("best", second)
        for _ in range(40):
            next_version(store, steps)
    found = Archive(Sources([place]))
    assert found.tags == {"best": second} and second in found and first not in found


def test_a_tag_that_comes_too_late_leaves_that_of_another_process(tmp_path: Path) -> None:
    class Gone(Memory):
        """The version goes when the second process finds the tag of the first one."""

        def create(self, name: str, data: Any) -> None:
            try:
                super().create(name, data)
            finally:
                for one in self.list("index"):
                    del self.objects[f"index/{one}"]

    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        version = next_version(store, steps)
    Archive(Sources([Memory(place.objects)])).tag("best", version)
    with pytest.raises(pmstore.UnknownVersionError):
        Archive(Sources([Gone(place.objects)])).tag("best", version)
    assert place.list("tags") == ["best"] and not place.list("untagged")
