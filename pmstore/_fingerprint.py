"""What a fit depends on, as a flat dict of plain values: equal fingerprints give equal results, bit for bit.

A fingerprint goes into the store beside the state of the fit. Its keys are what an error message calls the thing,
so the differences between two fingerprints read as they are: ``parameter n_clusters: 10 ≠ 8``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import types
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._array import chunks, order_of

Fingerprint = dict[str, Any]

_WITHOUT_EFFECT = ("store", "name", "commit_every", "verbose")
_NUMERICAL_PACKAGE = re.compile(r"[/\\](numpy|scipy)(\.libs)?[/\\]")


def digest(fingerprint: Fingerprint) -> str:
    """16 hexadecimal digits that name a fingerprint."""
    text = json.dumps(fingerprint, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints, one ``key: stored ≠ wanted`` each, in the order of `wanted`."""
    keys = [*wanted, *(key for key in stored if key not in wanted)]
    return [
        f"{key}: {stored.get(key, 'absent')} ≠ {wanted.get(key, 'absent')}"
        for key in keys
        if key not in stored or key not in wanted or stored[key] != wanted[key]
    ]


def hash_array(array: npt.NDArray[Any]) -> str:
    """XXH3 (128 bits) of an array's elements, as 32 hexadecimal digits, with an F in front if they are in F order.

    Nothing large is copied: elements of an array in F order are hashed in that order, in which sums over it may be
    added too, and those of any other array in C order. ModuleNotFoundError without the package xxhash.
    """
    try:
        import xxhash
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "pmstore hashes data with the package xxhash, which is not installed: pip install xxhash, "
            "or pip install 'pmstore[sklearn]' for all that the estimators need",
            name=error.name,
        ) from error
    order = order_of(array)
    hashed = xxhash.xxh3_128()
    for piece in chunks(array, order):
        hashed.update(piece.view(np.uint8).data)
    return f"{'F ' if order == 'F' else ''}{hashed.hexdigest()}"


def state_of(random_state: np.random.RandomState) -> dict[str, Any]:
    """The whole state of a generator, whatever its kind."""
    state: Any = random_state.get_state(legacy=False)
    return dict(state)


def describe_data(X: Any) -> Fingerprint:
    """Shape, dtype and contents of a dense array or a sparse matrix, all of it hashed."""
    described: Fingerprint = {"X shape": list(X.shape), "X dtype": str(X.dtype)}
    if isinstance(X, np.ndarray):
        return {"X format": "dense", **described, "X contents": hash_array(X)}
    rows = X.tocsr()
    stored = int(rows.indptr[-1])  # there may be room for more
    parts = (rows.indptr, rows.indices[:stored], rows.data[:stored])
    return {"X format": X.format, **described, "X contents": " ".join(map(hash_array, parts))}


def describe_weights(weights: npt.NDArray[Any] | None) -> Fingerprint:
    """Contents of the sample weights; None for none."""
    return {"sample_weight": None if weights is None else hash_array(weights)}


def describe_parameters(parameters: Mapping[str, Any]) -> Fingerprint:
    """An estimator's parameters, described, but for those that have no effect on what it learns."""
    described = sorted(name for name in parameters if name not in _WITHOUT_EFFECT)
    return {f"parameter {name}": describe(parameters[name]) for name in described}


def describe_environment(threads: int, libraries: Iterable[Mapping[str, Any]]) -> Fingerprint:
    """Threads and numerical libraries: sums are added in another order by more threads or other kernels.

    Parameters
    ----------
    threads : int
        OpenMP threads that the fit will use.
    libraries : iterable of dict
        What ``threadpoolctl`` knows of the loaded libraries. BLAS libraries that came neither with numpy nor with
        scipy don't count, unless there are no others.
    """
    blas = [library for library in libraries if library["user_api"] == "blas"]
    blas = [library for library in blas if _NUMERICAL_PACKAGE.search(library["filepath"])] or blas
    kinds = {f"{lib['internal_api']} {lib['version']} {lib.get('architecture') or ''}".strip() for lib in blas}
    return {
        "numpy": np.__version__,
        "BLAS": ", ".join(sorted(kinds)),
        "machine": platform.machine(),
        "OpenMP threads": threads,
        "BLAS threads": max((lib["num_threads"] for lib in blas), default=1),
    }


def describe(value: Any) -> Any:
    """A JSON value that two things share if, and as far as can be told only if, they give the same results.

    Arrays are hashed, callables told apart by name and code, generators by the state that they are in.
    """
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, np.generic):
        return f"{value.dtype} {value.item()!r}"  # float32(0.1) is not the float 0.1
    if isinstance(value, str | float):
        return "nan" if value != value else value  # which equals itself
    if isinstance(value, bytes | complex | np.dtype):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, np.random.RandomState):
        return f"RandomState {_hash_state(state_of(value))}"
    if isinstance(value, np.random.Generator):
        return f"Generator {_hash_state(value.bit_generator.state)}"
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype} array {list(value.shape)} {hash_array(value)}"
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if callable(value):
        return _describe_callable(value)
    if hasattr(value, "tocsr"):
        return [type(value).__name__, describe_data(value.tocsr())]
    if isinstance(value, np.ndarray):  # of objects
        return ["array", list(value.shape), describe(value.ravel().tolist())]
    if hasattr(value, "__array__"):  # a data frame, say
        return describe(np.asarray(value))
    if hasattr(value, "get_params") and not isinstance(value, type):
        return [_name_of(value), describe(value.get_params(deep=False))]
    raise TypeError(
        f"nobody can tell what depends on a {type(value).__module__}.{type(value).__qualname__}: "
        "a fingerprint is made of arrays, plain values, functions and random generators"
    )


def _hash_state(state: Mapping[str, Any]) -> str:
    """Of a generator."""
    return hashlib.sha256(repr(_plain(state)).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def _describe_callable(function: Any) -> Any:
    """Name, code, defaults and closure of a function; what it reads elsewhere can't be seen."""
    if isinstance(function, functools.partial):
        return ["partial", *map(describe, (function.func, function.args, function.keywords))]
    if isinstance(function, types.MethodType):
        return ["method", describe(function.__func__), type(function.__self__).__qualname__]
    if not isinstance(function, types.FunctionType):
        return _name_of(function)
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    around = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]
    return [_name_of(function), _hash_code(function.__code__), [_describe_surrounding(value) for value in around]]


def _describe_surrounding(value: Any) -> Any:
    if isinstance(value, types.FunctionType):  # not deeper: functions may refer to each other
        return [_name_of(value), _hash_code(value.__code__)]
    try:
        return describe(value)
    except TypeError:  # nobody can tell
        return [_name_of(type(value)), *map(_describe_surrounding, value if isinstance(value, list | tuple) else ())]


def _name_of(function: Any) -> str:
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _hash_code(code: types.CodeType) -> str:
    constants = [_constant(value) for value in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()[:16]


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _hash_code(value)
    if isinstance(value, frozenset):  # its order is another in every process
        return repr(sorted(map(repr, value)))
    return repr(value)
