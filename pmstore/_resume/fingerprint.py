"""The data, parameters and environment that a fit depends on, as a flat dict of plain values. Equal fingerprints give
equal results, bit for bit.

A fingerprint goes into the store beside the state of the fit. Error messages use its keys as names, so that the
differences between two fingerprints are readable: ``parameter n_clusters: 10 ≠ 8``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import platform
import re
import sys
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from numbers import Integral, Number
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._store.mapping import Group, NameMapping
from pmstore._values.array import chunks, memory_order
from pmstore._values.dtypes import value_bytes
from pmstore._values.generators import SPAWNED, generator_state
from pmstore._values.registry import HEAP_TYPE, parts_of
from pmstore._values.tensors import array_of_tensor, is_tensor
from pmstore._values.types import is_text, small_of

Fingerprint = dict[str, Any]

WITHOUT_EFFECT = ("store", "name", "commit_every", "verbose", "engine")
"""Parameters of pmstore's estimators that have no effect on the result."""

_OF_A_CALL = ("resumed_from_run_", "resumed_from_iter_", "history_", "_group_name")
"""Attributes of pmstore's estimators that tell how a result came about."""

_LABELS = ("columns", "index", "name", "dtypes", "dims", "coords")
"""Attributes of data frames and the like that say what their elements mean."""

_CATEGORIES = ("codes", "categories", "ordered")
"""Those of categories, whose elements don't tell their order."""

_NUMERICAL_PACKAGE = re.compile(r"[/\\](numpy|scipy)(\.libs)?[/\\]")


def digest(fingerprint: Fingerprint) -> str:
    """16 hexadecimal digits that identify a fingerprint."""
    text = json.dumps(fingerprint, sort_keys=True)
    return _short(text)


def _short(text: str) -> str:
    import hashlib  # with OpenSSL, which takes long

    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_same(stored: Any, wanted: Any) -> bool:
    """Whether two fingerprints, or two of their values, are equal, with their types: 2 is not 2.0, and 0.0 not -0.0."""
    return json.dumps(stored, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The differences between two fingerprints, one ``key: stored ≠ wanted`` each, in the order of `wanted`."""
    keys = [*wanted, *(key for key in stored if key not in wanted)]
    return [
        f"{key}: {stored.get(key, 'absent')} ≠ {wanted.get(key, 'absent')}"
        for key in keys
        if key not in stored or key not in wanted or not is_same(stored[key], wanted[key])
    ]


def changed_entries(stored: Any, wanted: Any) -> Iterator[str]:
    """The entries of classes that differ between two descriptions: "app.Model.made"."""
    if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
        for key in stored.keys() & wanted.keys():
            yield from changed_entries(stored[key], wanted[key])
    elif isinstance(stored, list) and isinstance(wanted, list) and len(stored) == len(wanted):
        if len(stored) == 2 and isinstance(stored[0], str) and stored[0] == wanted[0] and isinstance(wanted[1], dict):
            names = _entries_of_class(stored[0])
            for key in wanted[1] if isinstance(stored[1], dict) else ():
                if (names is None or key in names) and not is_same(stored[1].get(key), wanted[1][key]):
                    yield f"{stored[0]}.{key}"
        for one, other in zip(stored, wanted):
            yield from changed_entries(one, other)


def _entries_of_class(name: str) -> set[str] | None:
    """The names in a class, own or inherited, by the class's name; none of anything else; None if it can't be found."""
    module, _, qualname = name.rpartition(".")
    found = getattr(sys.modules.get(module), qualname, None)
    if found is None:
        return None
    return {key for base in found.__mro__ for key in vars(base)} if isinstance(found, type) else set()


def hash_array(array: npt.NDArray[Any]) -> str:
    """XXH3 (128 bits) of an array's elements, as 32 hexadecimal digits, with an F in front if they are in F order.

    Nothing large is copied. Elements of an array whose axes are in F order, with gaps or without, are hashed in that
    order, because sums over the array may be added in that order too. All other arrays are hashed in C order; if their
    axes are in neither order, the strides stand in front. Padding of elements counts as zeros. Raises
    ModuleNotFoundError without the package xxhash.
    """
    try:
        import xxhash
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "pmstore hashes data with the package xxhash, which is not installed: pip install xxhash, "
            "or pip install 'pmstore[sklearn]' for all that the estimators need",
            name=error.name,
        ) from error
    order = memory_order(array)
    hashed = xxhash.xxh3_128()
    for piece in chunks(array, order or "C"):
        hashed.update(value_bytes(piece).data)
    if order is None:
        return f"strides {list(array.strides)} {hashed.hexdigest()}"
    return f"{'F ' if order == 'F' else ''}{hashed.hexdigest()}"


def state_of(random_state: np.random.RandomState) -> dict[str, Any]:
    """The whole state of a generator of any kind."""
    state: Any = random_state.get_state(legacy=False)
    return dict(state)


def describe_data(X: Any) -> Fingerprint:
    """Shape, dtype and a hash of the contents of a dense array or a sparse matrix."""
    described: Fingerprint = {"X shape": list(X.shape), "X dtype": str(X.dtype)}
    if isinstance(X, np.ndarray):
        return {"X format": "dense", **described, "X contents": hash_array(X)}
    rows = X.tocsr()
    stored = int(rows.indptr[-1])  # the arrays may be longer than that
    parts = (rows.indptr, rows.indices[:stored], rows.data[:stored])
    return {"X format": X.format, **described, "X contents": " ".join(map(hash_array, parts))}


def describe_weights(weights: npt.NDArray[Any] | None) -> Fingerprint:
    """A hash of the sample weights; None if there are none."""
    return {"sample_weight": None if weights is None else hash_array(weights)}


def describe_parameters(parameters: Mapping[str, Any], without: Container[str] = WITHOUT_EFFECT) -> Fingerprint:
    """The description of an estimator's parameters, without those that have no effect on the result."""
    described = sorted(name for name in parameters if name not in without)
    return {f"parameter {name}": describe(parameters[name]) for name in described}


def describe_environment(threads: int, libraries: Iterable[Mapping[str, Any]]) -> Fingerprint:
    """Threads and numerical libraries: other thread counts or other kernels add sums in another order.

    Parameters
    ----------
    threads : int
        The number of OpenMP threads that the fit will use.
    libraries : iterable of dict
        The loaded libraries, as ``threadpoolctl`` describes them. BLAS libraries that are part of neither numpy nor
        scipy are ignored, unless there are no others.
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
    """A JSON value that is equal for two objects if, and as far as possible only if, they give the same results.

    Arrays are hashed, callables are identified by name, code and what they hold, generators by their current state.
    """
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, np.generic):
        return f"{value.dtype} {value.item()!r}"  # float32(0.1) is not the float 0.1
    if isinstance(value, str | float):
        return "nan" if value != value else "str nan" if value == "nan" else value  # "nan" equals itself
    if isinstance(value, bytes | complex | np.dtype):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, np.random.RandomState):
        return f"RandomState {_hash_state(state_of(value))}"
    if isinstance(value, np.random.Generator):
        return f"Generator {_hash_state(_with_children(value))}"
    if isinstance(value, np.ndarray) and not isinstance(value, np.memmap) and type(value) is not np.ndarray:
        return _describe_subclass(value)
    if isinstance(value, np.ndarray) and is_text(value.dtype):
        return [f"{value.dtype!r} array", list(value.shape), describe(value.ravel().tolist())]
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype} array {list(value.shape)} {hash_array(value)}"
    if isinstance(value, NameMapping):
        return _describe_place(value)
    if is_tensor(value):
        return ["Tensor", describe(array_of_tensor(value))]  # its std() is not that of an array
    if hasattr(value, "tocsr") and not isinstance(value, type):  # some of them are dicts
        return [type(value).__name__, describe_data(value.tocsr())]
    if isinstance(value, Mapping | list | tuple):
        return _once(value, lambda: _describe_items(value))
    if isinstance(value, set | frozenset):
        return [type(value).__name__, *sorted((describe(item) for item in value), key=json.dumps)]
    if isinstance(value, slice):
        return ["slice", describe(value.start), describe(value.stop), describe(value.step)]
    if small_of(type(value)) is not None:  # dates, Decimal, paths, ...: their repr says all
        return f"{type(value).__name__} {value!r}"
    if callable(value):
        return _describe_callable(value)
    if isinstance(value, np.ndarray):  # an array of objects
        return _once(value, lambda: ["array", list(value.shape), describe(value.ravel().tolist())])
    if hasattr(value, "__array__"):
        return _describe_frame(value)
    if hasattr(value, "get_params"):
        return [_name_of(value), _once(value, lambda: _describe_estimator(value))]
    found = parts_of(value)
    if found is not None:
        return _once(value, lambda: [found[0], describe(found[1])])
    raise TypeError(
        f"a fingerprint can't describe a {type(value).__module__}.{type(value).__qualname__}: "
        "a fingerprint is made of arrays, plain values, functions and random generators"
    )


def _describe_items(value: Any) -> Any:
    """The description of a mapping, a list or a tuple. The order of a mapping does not count, but for OrderedDict."""
    if not isinstance(value, Mapping):
        return [describe(item) for item in value]
    if isinstance(value, OrderedDict):
        return ["OrderedDict", *([describe(key), describe(item)] for key, item in value.items())]
    if all(type(key) is str for key in value):
        return {key: describe(item) for key, item in value.items()}
    pairs = [[describe(key), describe(item)] for key, item in value.items()]
    return ["dict", *sorted(pairs, key=json.dumps)]


def _describe_subclass(array: npt.NDArray[Any]) -> Any:
    """The parts of an array with more than elements, such as a mask; for an unknown class, its attributes."""
    found = parts_of(array)
    if found is not None:
        return [found[0], describe(found[1])]
    return [_name_of(array), describe(array.view(np.ndarray)), _describe_surrounding(getattr(array, "__dict__", {}))]


def _describe_place(value: NameMapping) -> Any:
    """The path of a store, and the name of a group in it. Its contents would be those of the fit, too."""
    warnings.warn(
        f"a fingerprint has a {type(value).__name__}, which counts by its path only. If the result depends on its "
        "contents, make them parameters",
        UserWarning,
        stacklevel=2,
    )
    return [type(value).__name__, value.store.path, *([value.name] if isinstance(value, Group) else [])]


def _describe_frame(value: Any) -> Any:
    """A data frame or the like: its parts, or else the elements and the labels of its axes."""
    try:
        found = parts_of(value)
    except (TypeError, RecursionError):  # a column of a dtype that a store can't keep; attributes with the frame itself
        found = None
    if found is not None:
        return [found[0], _describe_surrounding(found[1])]  # its attributes may be anything
    labels = {name: _describe_label(getattr(value, name, None)) for name in _LABELS}
    if all(hasattr(value, name) for name in _CATEGORIES):
        labels |= {name: describe(np.asarray(getattr(value, name))) for name in _CATEGORIES}
    elements = describe(np.asarray(value))
    return [_name_of(value), elements, labels] if any(labels.values()) else elements


def _describe_label(value: Any) -> Any:
    if value is None or callable(value):
        return None
    if isinstance(value, Mapping):  # to frames, which have themselves as labels
        return {str(key): _describe_label(np.asarray(item)) for key, item in value.items()}
    return _short(repr(np.asarray(value).tolist() if hasattr(value, "__array__") else value))


def _describe_estimator(value: Any) -> Any:
    """The parameters, and then, if there are any, the other attributes, in which an estimator keeps what it learned."""
    parameters = value.get_params(deep=False)
    without = (*parameters, *_OF_A_CALL)
    learned = {name: one for name, one in getattr(value, "__dict__", {}).items() if name not in without}
    if getattr(value, "is_in_store", False):
        parameters = {name: one for name, one in parameters.items() if name not in WITHOUT_EFFECT}
    return [describe(parameters), _describe_surrounding(learned)] if learned else describe(parameters)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, text, a date or the like, all of which `describe` tells apart."""
    return value is None or isinstance(value, Number | np.generic | str | bytes) or small_of(type(value)) is not None


def has_plain_elements(array: npt.NDArray[Any]) -> bool:
    """Whether the elements of an array are numbers, text or other plain values, so that `describe` covers them."""
    if array.dtype == object:
        return all(map(is_plain, array.flat))
    return not array.dtype.hasobject or is_text(array.dtype)


def _with_children(generator: np.random.Generator) -> dict[str, Any]:
    """The state of a generator. The number of children is left out if it has none: older fingerprints lack it."""
    return {key: value for key, value in generator_state(generator).items() if key != SPAWNED or value}


def _hash_state(state: Mapping[str, Any]) -> str:
    """A hash of the state of a generator."""
    return _short(repr(_plain(state)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


_described = threading.local()  # ids: the objects that are being described, which may refer to themselves


def _describe_callable(function: Any) -> Any:
    """Name, code, and what the function holds: defaults, closure, the object that it is bound to, attributes. Globals
    that it reads are not included."""
    if isinstance(function, functools.partial):
        return ["partial", *map(describe, (function.func, function.args, function.keywords))]
    if isinstance(function, types.FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        around = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]
        held = _once(function, lambda: [_describe_surrounding(value) for value in around])
        return [_name_of(function), _hash_code(function.__code__), held]
    owner = getattr(function, "__self__", None)
    if isinstance(function, types.MethodType):
        described = ["method", describe(function.__func__), type(owner).__qualname__]
        return described if isinstance(owner, type) else [*described, _describe_held(owner)]
    if isinstance(function, types.BuiltinFunctionType | types.MethodWrapperType):
        is_bound = not isinstance(owner, type | types.ModuleType | None)
        return [_name_of(function), _describe_held(owner)] if is_bound else _name_of(function)
    if isinstance(function, type):
        return _describe_class(function)
    if isinstance(function, np.ufunc) or type(function).__module__ == "builtins":
        return _name_of(function)
    call = getattr(type(function).__call__, "__code__", None)
    return [_name_of(function), _hash_code(call) if call else "", _describe_held(function)]


def _describe_class(kind: type) -> Any:
    """The name of a class, and those of its entries, own or inherited, that can be described. Methods, properties and
    the like are not included."""
    entries: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__flags__ & HEAP_TYPE:
            entries.update(vars(base))

    def described() -> dict[str, Any]:
        found = {}
        for name, entry in entries.items():
            if not (name.startswith("__") or hasattr(entry, "__get__")):
                with contextlib.suppress(TypeError):
                    found[name] = describe(entry)
        return found

    found = _once(kind, described)
    return [_name_of(kind), found] if found else _name_of(kind)


def _describe_held(value: Any) -> Any:
    """The contents of an object, as its class gives them to a pickle; what a function wraps is part of them."""
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None:
        return _once(value, lambda: describe(wrapped))
    if not callable(value):
        try:
            return describe(value)
        except TypeError:  # by its contents
            pass
    if hasattr(value, "get_params"):
        return _once(value, lambda: _describe_estimator(value))
    try:
        reduced = value.__reduce_ex__(2)
    except (TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"a fingerprint can't describe a {_name_of(type(value))}, which can't be pickled: {error}"
        ) from error
    if isinstance(reduced, str):  # the name of a global object
        return reduced
    return _once(value, lambda: [describe(list(one) if isinstance(one, Iterator) else one) for one in reduced[1:]])


def _once(value: Any, description: Callable[[], Any]) -> Any:
    """The description of what an object holds, unless that is the object itself."""
    ids = _described.__dict__.setdefault("ids", set())
    if id(value) in ids:
        return "itself"
    ids.add(id(value))
    try:
        return description()
    finally:
        ids.remove(id(value))


def _describe_surrounding(value: Any) -> Any:
    """The description of what a function finds around itself, which may be anything. A list or a dict counts by its
    parts. An object that can't be described counts by its type, and a warning says so: its contents may be a clock,
    with which no fit would be found again, or what the result depends on."""
    try:
        return describe(value)
    except TypeError:  # the type can't be described
        pass
    name = _name_of(type(value))
    if isinstance(value, list | tuple):
        return _once(value, lambda: [name, *map(_describe_surrounding, value)])
    if isinstance(value, Mapping | set | frozenset):
        items = value.items() if isinstance(value, Mapping) else value
        return _once(value, lambda: [name, *sorted(map(_describe_surrounding, items), key=json.dumps)])
    try:
        return [name, _describe_held(value)]
    except TypeError as error:
        text = f"a function, an estimator or an array holds a {name}, which counts by its type only: {error}"
        warnings.warn(f"{text}. If the result depends on its contents, make them parameters", UserWarning, stacklevel=2)
        return [name]


def _name_of(function: Any) -> str:
    kind = function if hasattr(function, "__qualname__") else type(function)
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__  # the same in a spawned process
    return f"{module}.{kind.__qualname__}"


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _hash_code(code: types.CodeType) -> str:
    constants = [_constant(value) for value in code.co_consts]
    return _short(repr((code.co_code, code.co_names, constants)))


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _hash_code(value)
    if isinstance(value, frozenset):  # its order differs between processes
        return repr(sorted(map(repr, value)))
    return repr(value)
