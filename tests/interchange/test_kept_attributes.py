"""An import into a store whose attributes have names of the file's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _cli


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The attributes of the file, of its groups and of an array."""
    with pmstore.open(tmp_path / "other.pm") as other:
        other["w"], other["g/x"], other["h/x"] = np.arange(3), 1, 2
        other.attrs.update(title="theirs", shape=(3, 4), new=1, step=np.arange(2))
        other.attrs("g").update(title="of g", kept=True, range=np.array([0.0, 1.0]))
        other.attrs("h")["title"] = "of h"
        other.attrs("w")["title"] = "of w"
        pmstore.export(other, tmp_path / "x.npz")
    return tmp_path / "x.npz"


def described(told: Any) -> list[str]:
    return [str(one.message).partition("left out: ")[2] for one in told if one.filename == __file__]


def test_attributes_that_are_there_stay(store: pmstore.Store, path: Path) -> None:
    store["mine"], store["g/y"] = np.arange(3), 1
    store.attrs.update(shape=(3, 4), title="mine", step=np.arange(3))
    store.attrs("g").update(title="my g", kept=1, range=np.array([0.0, 1.0]))
    with pytest.warns(UserWarning) as told:
        assert pmstore.load_into(store, path) == 3
    texts = ["attributes that the store has with other values: 'title', 'step'"]
    assert described(told) == [*texts, "attributes that 'g' has with other values: 'title', 'kept'"]
    assert list(store.attrs) == ["shape", "title", "step", "new"] and store.attrs["step"].tolist() == [0, 1, 2]
    assert store.attrs["title"] == "mine" and store.attrs["new"] == 1
    assert store.attrs("g")["title"] == "my g" and store.attrs("g")["kept"] is not True
    assert store.attrs("h")["title"] == "of h" and store.attrs("w")["title"] == "of w"


def test_the_same_attributes_are_not_told_of(store: pmstore.Store, path: Path) -> None:
    pmstore.load_into(store, path)
    del store["w"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pmstore.load_into(store, path, names={"w": "w", "g/x": "g/z"}) == 2
    store.attrs["title"] = "mine"
    before = list(store)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="'title'"):
        warnings.simplefilter("error")
        pmstore.load_into(store, path, names={"w": "v"})
    assert list(store) == before and store.attrs["title"] == "mine"


def test_groups_that_become_one(store: pmstore.Store, path: Path) -> None:
    """The attributes of the first one are there when those of the second one come."""
    with pmstore.open(path.with_name("other.pm")) as other:
        other.rename("h/x", "h/z")
        other.attrs("h")["more"] = 5
        pmstore.export(other, path.with_name("y.npz"))
    with pytest.warns(UserWarning) as told:
        assert pmstore.load_into(store, path.with_name("y.npz"), names={"g": "both", "h": "both"}) == 2
    assert described(told) == ["attributes that 'both' has with other values: 'title'"]
    assert store.attrs("both")["title"] == "of g" and store.attrs("both")["more"] == 5


def test_the_command_tells_of_them(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pmstore.open(tmp_path / "run.pm") as store:
        store.attrs["title"] = "mine"
    assert _cli.main(["import", str(path), str(tmp_path / "run.pm"), "--name", "w"]) == 0
    assert "x.npz: left out: attributes that the store has with other values: 'title'\n" in capsys.readouterr().err
    with pmstore.open(tmp_path / "run.pm", "r") as store:
        assert store.attrs["title"] == "mine" and list(store) == ["w"]
