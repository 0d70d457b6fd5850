"""Arrays that grow, in an archive: versions, what they take, and what is restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.archive._archive import Archive
from pmstore.archive._sources import Sources
from tests.archive.stepping import Memory, archived, stepping
from tests.store.test_growing import growth_of

pytest.importorskip("numcodecs")

from pmstore.codecs import LCDelta


def numbers(first: int, count: int) -> Any:
    return np.random.default_rng(first).random((count, 50))


@pytest.mark.parametrize("codec", ["zstd", None])
def test_versions_of_an_array_that_grows(tmp_path: Path, codec: Any) -> None:
    place, expected, stored = Memory(), {}, []
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, codec=codec) as steps:
        x = store.create_array("x", (0, 50), maxshape=(None, 50))
        store["first"] = store.resize("x", 400)[0]
        for i in range(60):
            if i == 20:
                store.resize("x", 150)
            elif i == 30:
                store.append("x", numbers(i, 2))
                store.rollback()
            x = store.append("x", numbers(i, 7))
            x[i] += 1
            store.commit()
            archived(steps)
            expected[store.sequence] = np.array(x)
            stored.append(sum(map(len, place.objects.values())))
        history = Archive(Sources([place]))
        last = max(expected)
        for version, rows in expected.items():
            assert np.array_equal(history[version]["x"], rows), version
            assert np.array_equal(history[version].read("x", np.s_[3:9]), rows[3:9])
        kinds = {name: found.kind for name, found in history.diff(last - 1, last).items()}
        assert kinds == {"x": "replaced"}
        with store.transaction():  # other spare rows, and another place, are no difference
            store["x"][5] = 7
            store.resize("x", 5000)
            store.resize("x", len(x))
        archived(steps)
    found = Archive(Sources([place])).diff(last, last + 1)
    assert found["x"].kind == "changed" and found["x"].elements.tolist() == list(range(250, 300))
    steps_of = np.diff(stored)
    assert np.sort(steps_of)[len(steps_of) // 2] < 40_000  # 7 rows have 2,800 bytes, all rows 100,000 and more
    Archive(Sources([place])).restore(tmp_path / "restored.pm", last)
    with pmstore.open(tmp_path / "restored.pm") as store:
        assert np.array_equal(store["x"], expected[last]) and store.check().ok
        assert growth_of(store, "x") == (len(expected[last]), None)
        assert np.array_equal(store.append("x", numbers(1, 9))[-9:], numbers(1, 9))


def test_a_lossy_codec_leaves_every_bit(tmp_path: Path) -> None:
    """Spare rows would count in the errors that it reports."""
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, codec={"*": LCDelta(3)}) as steps:
        store.create_array("x", (41, 50), maxshape=(None, 50))
        store["y"] = np.zeros((40, 50))
        store["x"][40] = 1e20
        store.resize("x", 40)  # leaves 1e20 in a spare row
        for i in range(6):
            store["x"][:] += 0.01 * numbers(i, len(store["x"]))
            store["y"][:] += 0.01 * numbers(i, 40)
            store.commit()
            archived(steps)
            version = Archive(Sources([place]))[store.sequence]
            assert np.array_equal(version["x"], store["x"]) and "x" not in version.losses
            assert ("y" in version.losses) == (i > 0)
