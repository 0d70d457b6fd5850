"""Lists of a place that are older than its objects, as caches of file systems and proxies give them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore.archive._archive import Archive
from pmstore.archive._sources import Sources
from pmstore.archive._steps import Steps
from tests.archive.stepping import Memory, archived, stepping

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
