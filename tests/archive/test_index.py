"""The list of an archive's versions: few objects, however many versions there are."""

from __future__ import annotations

from pathlib import Path

import pytest

import pmstore
from pmstore.archive import _index as index
from pmstore.archive._archive import Archive
from pmstore.archive._format import Segment
from pmstore.archive._sources import Sources
from tests.archive.stepping import Memory, archived, stepping

pytest.importorskip("numcodecs")


def flushes(place: Memory) -> list[int]:
    """The numbers of flushes of the objects, the oldest first."""
    return [one.last - one.first + 1 for one in Segment.current(place.list("index"))]


def digits(number: int, base: int) -> list[int]:
    """Powers of a base that add up to a number, as few as possible, the largest first."""
    power = 1
    found: list[int] = []
    while number:
        number, digit = divmod(number, base)
        found = digit * [power] + found
        power *= base
    return found


@pytest.mark.parametrize("fan", [2, 3])
def test_I25_equal_objects_are_merged(fan: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The objects of the index are the digits of the number of flushes."""
    monkeypatch.setattr(index, "_FAN", fan)
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        for count in range(1, 30):
            store["count"] = count
            store.commit()
            archived(steps)
            assert flushes(place) == digits(count, fan)
            assert len(place.list("index")) == len(flushes(place)), "what was merged is gone"
            found = Archive(Sources([place]))
            assert found.versions() == list(range(1, count + 1)) and found[count]["count"] == count
