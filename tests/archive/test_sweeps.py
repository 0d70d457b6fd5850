"""What killed drains leave behind goes with the next one; tags come to further places."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore.archive._archive import Archive
from pmstore.archive._objects import Buffer, ObjectExistsError
from pmstore.archive._sources import Sources
from pmstore.archive._steps import Steps
from tests.archive.stepping import Crash, Memory, archived, stepping

pytest.importorskip("numcodecs")


def parts(place: Memory) -> set[str]:
    return {name for name in place.objects if name.startswith("parts/")}


def named(found: Archive) -> set[str]:
    return {part for row in found._index.rows() for part in row.parts}


def changes(store: pmstore.Store, step: int) -> None:
    store["x"] = np.random.default_rng(step).random(3000)
    store["step"] = step
    store.commit()


def test_parts_without_a_row_go(tmp_path: Path) -> None:
    """A drain is killed at each change of the place; the next one deletes what no version needs."""
    left = 0
    for after in range(3, 30):
        place = Memory(after=after)
        with pmstore.open(tmp_path / f"{after}.pm") as store:
            try:
                with stepping(store, place, part_size=10_000) as steps:
                    for step in range(5):
                        changes(store, step)
                        archived(steps)
            except Crash:
                pass
            place = Memory(place.objects)
            before = Archive(Sources([place])) if "archive" in place.objects else None
            left += before is not None and parts(place) != named(before)
            with stepping(store, place) as steps:
                changes(store, 99)
                archived(steps)
            found = Archive(Sources([place]))
            assert found.latest == store.sequence and found.verify().ok
            assert parts(place) == named(found)
            assert before is None or set(before) <= set(found)
    assert left > 3, "no drain was killed between a part and its row"


class Interrupted(Memory):
    """Another process acts before some of the changes of this one: acts has functions by the number of the
    change."""

    def __init__(self, objects: dict[str, bytes], acts: dict[int, list[Callable[[], None]]]) -> None:
        super().__init__(objects)
        self.acts = acts

    def _step(self) -> None:
        self.changes += 1
        for act in self.acts.pop(self.changes, []):
            act()

    def _change(self) -> None:
        pass

    def put(self, name: str, data: Sequence[Buffer]) -> None:
        self._step()
        super().put(name, data)

    def create(self, name: str, data: Sequence[Buffer]) -> None:
        self._step()
        if name in self.objects:
            raise ObjectExistsError(name, self.url)
        super().put(name, data)

    def delete(self, names: Iterable[str]) -> None:
        self._step()
        super().delete(names)


def begins(store: pmstore.Store, objects: dict[str, bytes], others: list[Steps], opened: contextlib.ExitStack) -> None:
    changes(store, 1000)
    others.append(opened.enter_context(stepping(store, Memory(objects))))


def goes_on(others: list[Steps]) -> None:
    with contextlib.suppress(pmstore.ArchiveConflictError):
        archived(others[-1])


@pytest.mark.parametrize("wait", [0, 1, 2, 3])
def test_a_writer_that_was_overtaken_names_no_part_that_was_deleted(tmp_path: Path, wait: int) -> None:
    """A second drain begins between any two changes of the first one, and goes on after some more. The first one looks
    at the tokens just before the second one begins."""
    begun = 0
    for at in range(4, 16):  # the changes before are those of its beginning
        objects: dict[str, bytes] = {}
        others: list[Steps] = []
        with pmstore.open(tmp_path / f"{at}.pm") as store, contextlib.ExitStack() as opened:
            begin = functools.partial(begins, store, objects, others, opened)
            go_on = functools.partial(goes_on, others)
            place = Interrupted(objects, {})
            with contextlib.suppress(pmstore.ArchiveConflictError), stepping(store, place) as steps:
                writer = steps.targets[0]._writer
                writer.require_newest = writer._require_own = lambda place=None: None  # type: ignore[method-assign]
                place.acts.update({at: [begin]})
                place.acts.setdefault(at + wait, []).append(go_on)
                for step in range(4):
                    changes(store, step)
                    archived(steps)
            if others:
                go_on()
                begun += 1
            found = Archive(Sources([Memory(objects)]))
            assert found.verify().ok and named(found) <= parts(Memory(objects))
    assert begun > 8


class Puts(Memory):
    """The names of the tags that were created."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def put(self, name: str, data: Sequence[Buffer]) -> None:
        super().put(name, data)
        if name.startswith("tags/"):
            self.tags.append(name)


def test_tags_come_to_further_places(tmp_path: Path) -> None:
    near, far = Memory(), Puts()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, near, far, keep=1) as steps:
        first = Archive(Sources([near])) if "archive" in near.objects else None
        for step in range(8):
            changes(store, step)
            steps.capture()
            steps.flush()
            steps.write()
            first = Archive(Sources([near]))
            if step in (2, 4):
                first.tag(f"at-{step}")  # before the further place has the version
            while steps.copy(1):
                pass
        first.tag("newest")
        steps.copy_tags(1)
        steps.copy_tags(1)
    found = Archive(Sources([far]))
    assert found.tags == {"at-2": 3, "at-4": 5, "newest": 8} and list(found) == [3, 5, 8]
    assert sorted(far.tags) == ["tags/at-2", "tags/at-4", "tags/newest"]
    assert found[3]["step"] == 2 and found.verify().ok


def test_tags_that_do_not_come_to_a_further_place(tmp_path: Path) -> None:
    near, far = Memory(), Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, near, far) as steps:
        changes(store, 0)
        archived(steps)
        Archive(Sources([far])).tag("best", 1)
        changes(store, 1)
        archived(steps)
        Archive(Sources([near])).tag("best", 2)
        steps.copy_tags(1)
        near.objects["tags/damaged"] = b"damaged"  # nor one under another name, nor one for another version
        near.objects["tags/of-another"] = near.objects["tags/best"]
        steps.copy_tags(1)
    assert Archive(Sources([far])).tags == {"best": 1}


def test_a_tag_of_the_last_version_comes_when_the_drain_closes(tmp_path: Path) -> None:
    places = [tmp_path / "near", tmp_path / "far"]
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(places) as drain:
        changes(store, 0)
        drain.wait()
        archive.open(places[0]).tag("last")
    assert archive.open(places[1]).tags == {"last": 1}
