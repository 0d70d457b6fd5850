"""A tag that was taken away in one place is taken away in further ones, and no other tag is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore import archive
from pmstore.archive._archive import Archive
from pmstore.archive._sources import Sources
from pmstore.archive._steps import Steps
from tests.archive.stepping import Crash, Memory, archived, stepping


def at(*places: Memory) -> Archive:
    return Archive(Sources(places))


def next_version(store: pmstore.Store, steps: Steps) -> int:
    store["x"] = store.get("x", 0) + 1
    store.commit()
    archived(steps)
    return store.sequence


@pytest.fixture
def store(tmp_path: Path) -> Iterator[pmstore.Store]:
    with pmstore.open(tmp_path / "store.pm") as opened:
        yield opened


def test_a_drain_passes_it_on(tmp_path: Path) -> None:
    places = [tmp_path / "near", tmp_path / "far"]
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(places, keep=1) as drain:
        for value in range(5):
            store["x"] = value
            store.commit()
            drain.wait()
            if value == 1:
                archive.open(places[0]).tag("best")
            if value == 3:
                assert archive.open(places[1]).tags == {"best": 2}
                archive.open(places[0]).untag("best")
    for place in places:
        found = archive.open(place)
        assert found.tags == {} and found.versions() == [5] and found.verify().ok


@pytest.mark.parametrize("again", [False, True])
def test_each_further_place_learns_of_it(again: bool, store: pmstore.Store) -> None:
    places = [Memory(), Memory(), Memory()]
    with stepping(store, *places) as steps:
        next_version(store, steps)
        at(places[0]).tag("best")
        at(places[0]).tag("second")
        next_version(store, steps)
        assert [at(place).tags for place in places] == [{"best": 1, "second": 1}] * 3
        if not again:
            at(places[0]).untag("best")
            next_version(store, steps)
    if again:  # while nothing drains
        at(places[0]).untag("best")
        with stepping(store, *places) as steps:
            next_version(store, steps)
    assert [at(place).tags for place in places] == [{"second": 1}] * 3
    assert all(at(place).verify().ok for place in places)


def test_a_name_that_goes_to_another_version(store: pmstore.Store) -> None:
    near, far = Memory(), Memory()
    with stepping(store, near, far) as steps:
        for _ in range(4):
            version = next_version(store, steps)
            if "best" in at(near).tags:
                at(near).untag("best")
            at(near).tag("best", version)
        next_version(store, steps)
        assert at(near).tags == at(far).tags == {"best": 4}
        at(near).untag("best")
        at(near).tag("best", 4)  # the same version again
        next_version(store, steps)
        assert at(far).tags == {"best": 4}
        at(near).untag("best")
        next_version(store, steps)
    assert at(near).tags == at(far).tags == {}


def test_a_name_that_goes_to_another_version_after_it_was_taken_away_in_all_places(store: pmstore.Store) -> None:
    near, far = Memory(), Memory()
    with stepping(store, near, far) as steps:
        next_version(store, steps)
        at(near).tag("best")
        next_version(store, steps)
        at(near, far).untag("best")
        at(near).tag("best", 2)
        next_version(store, steps)
        assert at(near).tags == at(far).tags == {"best": 2}


def test_tags_that_stay(store: pmstore.Store) -> None:
    near, far = Memory(), Memory()
    with stepping(store, near, far) as steps:
        next_version(store, steps)
        next_version(store, steps)
        at(far).tag("best", 1)  # of another version than in the place before
        at(far).tag("here", 1)
        at(near).tag("best", 2)
        at(near).tag("kept", 2)
        next_version(store, steps)
        at(near).untag("best")
        next_version(store, steps)
        assert at(far).tags == {"best": 1, "here": 1, "kept": 2}
        at(near, far).untag("kept")
        at(far).tag("kept", 2)  # after it was taken away in both places
        next_version(store, steps)
        assert at(far).tags == {"best": 1, "here": 1, "kept": 2}


def test_a_name_that_another_version_has_in_one_place(store: pmstore.Store) -> None:
    """Neither place has another tag afterwards."""
    near, far = Memory(), Memory()
    with stepping(store, near, far) as steps:
        for _ in range(2):
            next_version(store, steps)
    at(far).tag("best", 1)
    both = at(near, far)
    with pytest.raises(pmstore.ArchiveConflictError, match="the tag 'best' for another version: use another name"):
        both.tag("best", 2)
    assert both.tags == at(near, far).tags == at(far).tags == {"best": 1} and not at(near).tags


class Refuses(Memory):
    """A place that takes no tags."""

    def create(self, name: str, data: Any) -> None:
        raise pmstore.ArchiveUnavailableError(13, f"{name} is refused")


def test_a_tag_that_one_place_refuses(store: pmstore.Store) -> None:
    """The call can be repeated. Until then, the tags of other places stay, and so do their versions."""
    places = Memory(), Memory(), Memory()
    with stepping(store, *places) as steps:
        for _ in range(2):
            next_version(store, steps)
    at(*places[1:]).tag("best", 1)
    with pytest.raises(pmstore.ArchiveUnavailableError, match="refused"):
        at(*places[:2], Refuses(places[2].objects)).tag("best", 1)
    with stepping(store, *places, keep=1) as steps:
        next_version(store, steps)
    for place in places[1:]:
        assert at(place).tags == {"best": 1} and at(place).versions() == [1, 3]
    at(*places).tag("best", 1)
    assert [at(place).tags for place in places] == [{"best": 1}] * 3


def test_a_new_first_place_takes_no_tag_away(store: pmstore.Store) -> None:
    far = Memory()
    for _ in range(2):
        with stepping(store, Memory(), far) as steps:
            next_version(store, steps)
            if not at(far).tags:
                at(steps.targets[0].place).tag("best")  # type: ignore[arg-type]
            next_version(store, steps)
    assert at(far).tags == {"best": 1}


def test_damage(store: pmstore.Store) -> None:
    near, far = Memory(), Memory()
    with stepping(store, near, far) as steps:
        next_version(store, steps)
        for name in ("one", "two", "three"):
            at(near).tag(name)
        next_version(store, steps)
        at(near).untag("one")
        at(near).tag("one", 1)
        near.objects["tags/one"] = b"damaged"  # perhaps it is there again
        with pytest.warns(pmstore.ArchiveWarning, match="tags/one is damaged"):
            both = at(near, far)
        near.objects["tags/two"] = b"damaged"
        both.untag("two")
        near.objects["untagged/notes"] = b"of another kind"
        next_version(store, steps)
    assert at(far).tags == {"one": 1, "three": 1}
    assert at(far).verify().ok
    del near.objects["tags/one"]
    assert "untagged/notes is damaged" in str(at(near).verify())


def test_a_crash_at_any_change(store: pmstore.Store) -> None:
    near, far = Memory(), Memory()
    with stepping(store, near, far) as steps:
        next_version(store, steps)
        at(near).tag("best")
        at(near).tag("kept")
        next_version(store, steps)
    crashes = 0
    for after in itertools.count():
        ends, copy = Memory(dict(near.objects)), Memory(dict(far.objects))
        ends.after = after
        try:
            at(ends).untag("best")
        except Crash:
            crashes += 1
        else:
            break
        with stepping(store, Memory(ends.objects), copy) as steps:
            next_version(store, steps)
            tags = at(Memory(ends.objects)).tags
            assert at(copy).tags == tags == {"best": 1, "kept": 1}  # the call did not return
            at(Memory(ends.objects)).untag("best")
            next_version(store, steps)
        assert at(copy).tags == {"kept": 1}
    assert crashes == 2
    near = Memory(ends.objects)
    for after in itertools.count():
        copy = Memory(dict(far.objects), after)
        finished = _copied(store, near, copy)
        assert at(copy).tags in ({"best": 1, "kept": 1}, {"kept": 1})
        assert _copied(store, near, Memory(copy.objects))
        assert at(copy).tags == {"kept": 1} and at(copy).verify().ok
        if finished:
            break
    assert after > 3


def _copied(store: pmstore.Store, near: Memory, far: Memory) -> bool:
    """Drain with what is there until there is nothing to do. Returns whether the process did not end before."""
    steps: Any
    try:
        with stepping(store, Memory(near.objects), far) as steps:
            archived(steps)
            steps.copy_tags(1)
    except Crash:
        return False
    return True


def test_a_damaged_tag_hides_no_version(store: pmstore.Store, tmp_path: Path) -> None:
    near, far = Memory(), Memory()
    with stepping(store, near, far) as steps:
        next_version(store, steps)
        at(near).tag("best")
        at(near).tag("second")
        for _ in range(2):
            next_version(store, steps)
    for place in (near, far):
        place.objects["tags/best"] = place.objects["tags/best"][:-1]
    with pytest.warns(pmstore.ArchiveWarning, match="the tag 'best' is damaged.*untag"):
        found = at(near)
    assert found.tags == {"second": 1} and found.versions() == [1, 2, 3]
    with pytest.warns(pmstore.ArchiveWarning):
        found.restore(tmp_path / "old.pm", 1)
    with pytest.warns(pmstore.ArchiveWarning):
        found.tag("second", 1)  # that is its version already
    with pytest.warns(pmstore.ArchiveWarning), pytest.raises(pmstore.ArchiveDamagedError, match="best"):
        found.tag("best", 2)
    assert not found.verify().ok
    with pytest.warns(pmstore.ArchiveWarning), pytest.raises(pmstore.ArchiveError, match="untag: best"):
        found.forget([2])
    found.untag("best")
    with pytest.raises(KeyError):
        found.untag("best")
    assert found.forget([2]) == [2] and found.verify().ok
