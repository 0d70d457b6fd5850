"""The learned attributes of estimators that are parameters of another one, such as the steps of a pipeline.

`partial_fit` does not keep parameters. It compares what is learned there before and after each commit, and refuses a
change. Only objects with ``fit``, ``partial_fit`` or ``get_params`` count. A parameter of any other kind may change: a
callback counts its calls, a list gets a program's messages, a generator draws.

Contents are compared as a pickle that is never read. What can't be pickled counts by its attributes, or else by its
type, so that a lock does not hide what is learned beside it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pmstore._values.values import contents_of

__all__ = ["SETTINGS", "learned_inside"]

SETTINGS = ("_metadata_request", "_skl_callbacks", "_sklearn_output_config")
"""Attributes that are set like parameters."""

_CONTAINERS = frozenset({list, tuple, dict})
_METHODS = ("fit", "partial_fit", "get_params")
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, np.ndarray})


def learned_inside(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of each parameter that holds an estimator, by name. They are equal as long as it learns nothing."""
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        learned = list(_learned(value, {}))
        if learned:
            found[name] = _contents(learned)
    return found


def _learned(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """The class and the learned attributes of each estimator in a value. seen: by id, what was looked at."""
    if type(value) in _PLAIN or id(value) in seen:
        return
    seen[id(value)] = value
    if type(value) in _CONTAINERS:
        inside = value.values() if type(value) is dict else value
        if not _PLAIN.issuperset(map(type, inside)):
            for one in inside:
                yield from _learned(one, seen)
    elif _is_estimator(value):
        parameters = value.get_params(deep=False) if hasattr(value, "get_params") else {}
        without = {*parameters, *SETTINGS}
        yield type(value), {key: one for key, one in getattr(value, "__dict__", {}).items() if key not in without}
        yield from _learned(parameters, seen)


def _is_estimator(value: Any) -> bool:
    with contextlib.suppress(Exception):  # of a program's __getattr__
        return not isinstance(value, type) and any(callable(getattr(value, name, None)) for name in _METHODS)
    return False


def _contents(value: Any) -> Any:
    """Contents to compare. If there are none, they equal no others: what is learned must not be lost in silence."""
    out, arrays = io.BytesIO(), list[Any]()

    def hashed(buffer: pickle.PickleBuffer) -> None:
        arrays.append(contents_of(np.asarray(buffer.raw())))

    try:
        _Pickler(out, 5, buffer_callback=hashed).dump(value)
    except Exception:
        return object()
    return out.getvalue(), arrays


class _Pickler(pickle.Pickler):
    """Functions, classes, generators, and what can't be pickled, are their names."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray or value is str:
            return NotImplemented
        if isinstance(value, type | types.FunctionType):
            return str, (f"{value.__module__}.{value.__qualname__}",)
        if isinstance(value, np.random.RandomState | np.random.Generator):  # draws, and learns nothing
            return str, (kind.__qualname__,)
        if hasattr(value, "tocsr"):  # it remembers whether it is sorted
            value = value.tocsr(copy=True)
            value.sort_indices()
            return str, (kind.__qualname__,), [value.shape, value.data, value.indices, value.indptr]
        try:
            reduced = value.__reduce_ex__(5)
        except Exception:
            return str, (kind.__qualname__,), getattr(value, "__dict__", None)
        return (str, (reduced,)) if isinstance(reduced, str) else reduced
