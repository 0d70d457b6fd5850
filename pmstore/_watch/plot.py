"""Pictures of fits and arrays with matplotlib, for `Store.plot`."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._catalog.lists import PersistentList
from pmstore._resume.fit_group import FitGroup
from pmstore._resume.history import history
from pmstore._store.store import Store

__all__ = ["plot"]

NUMBERS = "biuf"  # kinds of dtypes


def plot(store: Store, name: str, ax: Any) -> Any:
    """Draw a fit or an array; see `NameMapping.plot`."""
    is_fit = FitGroup(store, name).fingerprint is not None
    shown = None if is_fit else _numbers(name, store[name])
    points = _objective(store, name) if is_fit else None
    if ax is None:
        try:
            from matplotlib import pyplot
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "plot() draws with matplotlib, which is missing: pip install 'pmstore[plot]'", name="matplotlib"
            ) from error
        ax = pyplot.subplots()[1]
    if points is not None:
        x, objective, resumed = points
        ax.plot(x, objective)
        for place in resumed:
            ax.axvline(place, color="0.7", linestyle=":", zorder=0)
        ax.set(xlabel="iteration", ylabel="objective")
    elif shown is not None and shown.ndim == 2:
        ax.figure.colorbar(ax.imshow(shown, aspect="auto", interpolation="nearest"), ax=ax)
    else:
        ax.plot(shown)
    ax.set_title(name.replace("$", r"\$"))  # a name is no formula
    return ax


def _numbers(name: str, value: Any) -> npt.NDArray[Any]:
    """A copy of an array that can be drawn. Raises TypeError for anything else."""
    what = f"a {type(value).__name__}"
    if isinstance(value, np.ndarray):
        what = f"an array of shape {value.shape} and dtype {value.dtype}"
    array: npt.NDArray[Any]
    if isinstance(value, np.ma.MaskedArray):
        array = value.copy()  # matplotlib draws no masked elements
    else:
        array = np.array(value) if isinstance(value, np.ndarray) else _as_array(value)
    if array.ndim not in (1, 2) or array.dtype.kind not in NUMBERS:
        raise TypeError(f"{name!r} is {what}: plot() draws fits, and real numbers in one or two dimensions")
    return array


def _as_array(value: Any) -> npt.NDArray[Any]:
    """A persistent list of numbers as floats; any other value in an array without dimensions."""
    if isinstance(value, PersistentList) and all(type(item) in (bool, int, float) for item in value):
        with contextlib.suppress(OverflowError):  # an int beyond floats
            return np.array(list(value), float)
    return np.zeros((), object)


def _objective(store: Store, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any], list[float]]:
    """The iterations of all runs, numbered from 1, and their objectives, with a gap between two runs; and the places at
    which the fit was resumed. Raises ValueError if there is nothing to draw."""
    rows = history(store, name)
    objective = rows["objective"]
    if not np.isfinite(objective).any():
        others = [key for key in list(rows)[3:] if key not in ("seconds", "time", "attempt")]
        hint = f"; pmstore.history has {', '.join(others)}" if others else ""
        raise ValueError(f"the fit {name!r} has no objective to draw{hint}")
    count = np.arange(1.0, len(objective) + 1)
    ends = np.flatnonzero(np.diff(rows["run"])) + 1
    resumed = np.flatnonzero(np.diff(rows["attempt"])) + 1.5
    return np.insert(count, ends, ends + 0.5), np.insert(objective, ends, np.nan), resumed.tolist()
