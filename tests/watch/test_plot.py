"""Store.plot: fits, lines and heat maps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.watch.conftest import Falling


@pytest.fixture
def figures() -> Any:
    """matplotlib without a display."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_a_fit(path: Path, figures: Any) -> None:
    with pmstore.open(path) as store:
        Falling().run(store, "fits/fall")
        ax = store.plot("fits/fall")
        objective, resumed = ax.lines
        assert objective.get_xdata().tolist() == list(range(1, 11))
        assert objective.get_ydata().tolist() == [2.0**i for i in range(9, -1, -1)]
        assert resumed.get_xdata() == [3.5, 3.5] and ax.get_title() == "fits/fall"
        assert store.group("fits").plot("fall", ax) is ax


def test_the_runs_of_a_fit_have_a_gap(path: Path, figures: Any) -> None:
    class Twice(Falling):
        runs, max_iter = 2, 2

    with pmstore.open(path) as store:
        Twice().run(store, "twice")
        line = store.plot("twice").lines[0]
    assert line.get_xdata().tolist() == [1, 2, 2.5, 3, 4]
    assert np.array_equal(line.get_ydata(), [512, 256, np.nan, 512, 256], equal_nan=True)


def test_arrays(path: Path, figures: Any) -> None:
    with pmstore.open(path, "r") as store:
        ax = store.plot("model/w")
        assert np.array_equal(ax.images[0].get_array(), store["model/w"])
        assert figures.figure().axes == [] and store.plot("losses").lines[0].get_ydata().tolist() == [4.0, 2.0, 1.0]
    with pmstore.open(path) as store:
        store["a$b$"] = np.arange(3)
        ax = store.plot("a$b$")
        assert ax.lines[0].get_ydata().tolist() == [0, 1, 2]
        store["masked"] = np.ma.array([1.0, 999.0, 3.0], mask=[False, True, False])
        assert store.plot("masked").lines[0].get_ydata().tolist() == [1.0, None, 3.0]
        store["a$b$"] = np.zeros(3, int)
        ax.figure.savefig(path.with_name("plot.png"))
        assert ax.lines[0].get_ydata().tolist() == [0, 1, 2], "a picture keeps its copy"


def test_what_can_not_be_drawn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Falling):
        def step(self) -> Any:
            super().step()

    with pmstore.open(path) as store:
        Silent().run(store, "silent")
        store["cube"], store["text"] = np.zeros((2, 2, 2)), np.array(["a"])
        store.create_list("words").append("a")
        store.create_list("huge").append(10**400)
        for name in ("cube", "text", "epoch", "words", "huge"):
            with pytest.raises(TypeError, match=rf"'{name}' is .* plot\(\) draws fits, and real numbers"):
                store.plot(name)
        with pytest.raises(ValueError, match="'silent' has no objective"):
            store.plot("silent")
        with pytest.raises(pmstore.UnknownNameError):
            store.plot("none")
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'pmstore\[plot\]'"):
            store.plot("model/w")
