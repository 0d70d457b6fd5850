"""An estimator's attributes in a form that a store can keep: arrays, and a table of everything else. Nothing is
pickled.

Attributes refer to each other: an optimizer's moments to the arrays of a network, an array to a part of another one.
Therefore they are kept as a graph. Each object is one *node*, a list whose first element is its kind::

    ["array", name]                             an array of the store
    ["array", name, shape, strides, offset]     a view of one; in bytes
    ["numbers", "float", name, n]               a list of float or numpy.float64, the first n of an array
    ["generator", "MT19937", name]              a RandomState, as a record
    ["generator", kind, state, seeds]           a numpy Generator, without seeds if they are of another package
    ["parameter", name]                         the value of that parameter of the estimator
    ["list", items], ["tuple", items], ["dict", [[key, item], ...]], ["objects", shape, items]
    ["object", class, items]                    an instance of one of `OBJECTS`, whose __dict__ the items are
    ["set", "set" or "frozenset", values]       of plain values
    ["made", class, arguments]                  an instance of one of `MADE`, which has no __dict__

An item is a plain value, or a list of one int: the number of a node. Two tables in this module map names to classes, so
that a file can create instances of no other classes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._resume.fingerprint import state_of
from pmstore._resume.state import RANDOM_STATE, random_state_record, set_random_state
from pmstore._values.array import address_of, is_solid, root_of
from pmstore._values.generators import bit_generator, generator_of, generator_parts, set_generator_state
from pmstore._values.types import small_of
from pmstore._values.values import encode

__all__ = ["Graph", "decode", "graph_of", "view_of", "where"]

Array = npt.NDArray[Any]

_LINEAR = "sklearn.linear_model._stochastic_gradient"
_LOSSES, _OLD_LOSSES = "sklearn._loss._loss", "sklearn.linear_model._sgd_fast"

OBJECTS = {
    "AdamOptimizer": "sklearn.neural_network._stochastic_optimizers",
    "SGDOptimizer": "sklearn.neural_network._stochastic_optimizers",
    "LabelBinarizer": "sklearn.preprocessing._label",
    "LabelEncoder": "sklearn.preprocessing._label",
    "_CFNode": "sklearn.cluster._birch",
    "_CFSubcluster": "sklearn.cluster._birch",
    "_ConstantPredictor": "sklearn.multiclass",
    "SGDClassifier": _LINEAR,
    "SGDRegressor": _LINEAR,
    "SGDOneClassSVM": _LINEAR,
    "Perceptron": "sklearn.linear_model._perceptron",
    "PassiveAggressiveClassifier": "sklearn.linear_model._passive_aggressive",
    "PassiveAggressiveRegressor": "sklearn.linear_model._passive_aggressive",
    "MLPClassifier": "sklearn.neural_network._multilayer_perceptron",
    "MLPRegressor": "sklearn.neural_network._multilayer_perceptron",
    "BernoulliNB": "sklearn.naive_bayes",
    "CategoricalNB": "sklearn.naive_bayes",
    "ComplementNB": "sklearn.naive_bayes",
    "GaussianNB": "sklearn.naive_bayes",
    "MultinomialNB": "sklearn.naive_bayes",
    "csr_matrix": "scipy.sparse._csr",
    "csr_array": "scipy.sparse._csr",
    "csc_matrix": "scipy.sparse._csc",
    "csc_array": "scipy.sparse._csc",
}
"""Classes whose instances are described by their ``__dict__``, and the modules that define them."""

MADE = {
    "Hinge": _OLD_LOSSES,
    "SquaredHinge": _OLD_LOSSES,
    "ModifiedHuber": _OLD_LOSSES,
    "EpsilonInsensitive": _OLD_LOSSES,
    "SquaredEpsilonInsensitive": _OLD_LOSSES,
    "Log": _OLD_LOSSES,  # like the next two, for versions before 1.6
    "SquaredLoss": _OLD_LOSSES,
    "Huber": _OLD_LOSSES,
    "CyHalfBinomialLoss": _LOSSES,
    "CyHalfSquaredError": _LOSSES,
    "CyHuberLoss": _LOSSES,
}
"""Compiled classes whose instances are made from a few plain values, and the modules that define them."""

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_NUMBERS: dict[str, type] = {"float": float, "float64": np.float64}
_MANY = 32  # numbers; a list of so many is kept as an array, because it may grow with every batch


_Found = tuple[int, Array, str]  # the number of an array's node, the array, and the path to it


@dataclass
class Graph:
    """The graph of the attributes.

    Attributes
    ----------
    nodes : list
        The nodes. The first one is the dict of all attributes.
    arrays : dict of ndarray
        The arrays by name, which is the path to the place where the array was found first.
    places : list of tuple
        The places where arrays can be replaced: the dict or list, the key or index, and the number of the array's node.
        There is no place for an array that is also referred to from a place where it can't be replaced.
    """

    nodes: list[Any] = field(default_factory=lambda: [None])
    arrays: dict[str, Array] = field(default_factory=dict)
    places: list[tuple[Any, Any, int]] = field(default_factory=list)


def graph_of(roots: dict[str, Any], parameters: Mapping[str, Any]) -> Graph:
    """The graph of some attributes.

    Parameters
    ----------
    roots : dict
    parameters : mapping
        Objects that are kept by name only, because they will exist when the attributes are restored.

    Raises
    ------
    TypeError
        An attribute has a type that can't be kept. The message names it.
    """
    return _Walk(roots, parameters).graph


class _Walk:
    """Follows all references from the roots; not by recursion, because linked lists can be long."""

    def __init__(self, roots: dict[str, Any], parameters: Mapping[str, Any]) -> None:
        self.graph = Graph()
        self._numbers = {id(roots): 0}
        self._alive: list[Any] = []  # keeps objects alive, so that no two have the same id
        self._left: list[tuple[int, Any, str]] = []
        self._views: list[_Found] = []
        self._pinned: set[int] = set()  # nodes that are in a tuple
        for name, value in parameters.items():
            if type(value) not in _ATOMS and id(value) not in self._numbers:
                self._numbers[id(value)] = self._node(["parameter", name])
        self._left.append((0, roots, ""))
        while self._left:
            number, value, path = self._left.pop()
            self.graph.nodes[number] = self._describe(value, number, path)
        self._find_arrays()

    def _node(self, node: Any) -> int:
        self.graph.nodes.append(node)
        return len(self.graph.nodes) - 1

    def _item(self, value: Any, path: str, owner: Any = None, key: Any = None) -> Any:
        """A plain value, or a list with the number of the value's node."""
        if _is_atom(value):
            return value
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = self._node(None)
            self._left.append((number, value, path))
        if type(value) is np.ndarray:
            if owner is None:
                self._pinned.add(number)
            else:
                self.graph.places.append((owner, key, number))
        return [number]

    def _describe(self, value: Any, number: int, path: str) -> Any:
        """The node of an object; None for an array, until all arrays are known."""
        kind = type(value)
        if kind is np.ndarray and not value.dtype.hasobject:
            self._views.append((number, value, path))
            return None
        if kind is np.ndarray and value.dtype == object:
            items = value.ravel().tolist()
            return ["objects", list(value.shape), self._items(items, path, None)]
        if kind is dict:
            return ["dict", self._pairs(value, path)]
        if kind is list and len(value) >= _MANY:
            kinds = set(map(type, value))
            for name, of in _NUMBERS.items():
                if kinds == {of}:
                    room = np.zeros(1 << (len(value) - 1).bit_length())
                    room[: len(value)] = np.fromiter(value, np.float64, len(value))
                    self.graph.arrays[path] = room
                    return ["numbers", name, path, len(value)]
        if kind is list:
            return ["list", self._items(value, path, value)]
        if kind is tuple:
            return ["tuple", self._items(value, path, None)]
        if kind in (set, frozenset) and all(map(_is_atom, value)):
            return ["set", kind.__name__, sorted(value, key=encode)]
        if kind is np.random.RandomState and state_of(value)["bit_generator"] == "MT19937":
            self.graph.arrays[path] = np.array(random_state_record(value), RANDOM_STATE)
            return ["generator", "MT19937", path]
        if kind is np.random.Generator:
            try:
                parts = generator_parts(value)
            except TypeError:
                parts = [dict(value.bit_generator.state)]
            return ["generator", parts[0]["bit_generator"], *parts]
        name = kind.__name__
        if _is_in(OBJECTS, kind):
            return ["object", name, self._pairs(vars(value), path)]
        if _is_in(MADE, kind):
            made_by, arguments, *_ = value.__reduce__()
            if made_by is kind and all(type(one) in _ATOMS for one in arguments):
                return ["made", name, list(arguments)]
        raise TypeError(_cannot(value, path))

    def _items(self, values: list[Any] | tuple[Any, ...], path: str, owner: Any) -> list[Any]:
        self._alive.append(values)
        return [self._item(value, f"{path}/{i}", owner, i) for i, value in enumerate(values)]

    def _pairs(self, values: dict[Any, Any], path: str) -> list[Any]:
        pairs = []
        for i, (key, value) in enumerate(values.items()):
            if not _is_atom(key):
                raise TypeError(_cannot(key, path, "has a key that"))
            step = key if type(key) is str and key.isidentifier() else str(i)
            pairs.append([key, self._item(value, f"{path}/{step}" if path else step, values, key)])
        return pairs

    def _find_arrays(self) -> None:
        """Find arrays that share memory: they are views of one of them, or of a common base."""
        together: list[list[_Found]] = []
        end = 0
        for low, high, one in sorted(
            ((*_bounds(found[1]), found) for found in self._views), key=lambda it: (it[0], -it[1], it[2][0])
        ):
            if low == high:
                self._name([one])
                continue
            if low >= end:
                together.append([])
            together[-1].append(one)
            end = max(end, high)
        for views in sorted(together, key=lambda views: min(views)[0]):  # not by address, which varies
            self._name(views)
        nodes = self.graph.nodes
        pinned = {nodes[number][1] for number in self._pinned if nodes[number][0] == "array"}
        self.graph.places = [
            (owner, key, number)
            for owner, key, number in self.graph.places
            if nodes[number][0] == "array" and nodes[number][1] not in pinned
        ]

    def _name(self, views: list[_Found]) -> None:
        """Name arrays that share memory after the one that was found first."""
        path = min(views)[2]
        whole = max((array for _, array, _ in views), key=lambda array: array.nbytes)
        if len(views) > 1:
            low, high = _bounds(whole)
            bounds = [_bounds(array) for _, array, _ in views]
            if not is_solid(whole) or min(bounds)[0] < low or max(end for _, end in bounds) > high:
                whole = root_of(whole)
            same = all(root_of(array) is root_of(whole) and array.dtype == whole.dtype for _, array, _ in views)
            if not same or not is_solid(whole):
                names = ", ".join(sorted(_readable(path) for _, _, path in views))
                raise TypeError(f"the attributes {names} share memory in a way that can't be kept in a store")
        self.graph.arrays[path] = whole
        for number, array, _ in views:
            node: list[Any] = ["array", path]
            if where(array) != where(whole):
                node += [list(array.shape), list(array.strides), address_of(array) - address_of(whole)]
            self.graph.nodes[number] = node


def _is_atom(value: Any) -> bool:
    """Whether it is a value that an item can be: it can't be changed, and refers to nothing."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, np.generic):
        return True
    small = small_of(kind)
    return small is not None and not small.mutable and not small.holds


def _cannot(value: Any, path: str, what: str = "is or holds something that") -> str:
    kind = type(value)
    return (
        f"the attribute {_readable(path)} {what} can't be kept in a store, a {kind.__module__}.{kind.__qualname__}: "
        "attributes may be made of numpy arrays and scalars, plain Python values, tuples, lists, dicts, sets, random "
        "generators, and some classes of scikit-learn's own. Train this estimator without a store, or make it "
        "resumable with pmstore.Resumable"
    )


def _readable(path: str) -> str:
    """A path in Python's notation; its first step is the dict that holds all attributes."""
    _, *steps = path.split("/")
    return "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in steps).lstrip(".") or path


def _bounds(array: Array) -> tuple[int, int]:
    """Addresses of the first byte, and of the byte after the last one."""
    low = high = address_of(array)
    if not array.size:
        return low, low
    for n, stride in zip(array.shape, array.strides):
        low += min(0, stride * (n - 1))
        high += max(0, stride * (n - 1))
    return low, high + array.itemsize


def where(array: Array) -> Any:
    """The place of an array: two arrays at the same place have the same key. Empty arrays have no place."""
    return (array.shape, array.strides, address_of(array)) if array.size else array.shape


# ---- decoding


def decode(nodes: Any, arrays: Mapping[str, Array], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that nodes describe. The nodes are not trusted. Raises ValueError if they describe none.

    Parameters
    ----------
    nodes : list
        As in `Graph`.
    arrays : mapping of ndarray
        As in `Graph`. Attributes refer to these arrays themselves.
    parameters : mapping
        As in `graph_of`.
    """
    try:
        roots = _Builder(nodes, arrays, parameters).thing(0)
    except ValueError:
        raise
    except (ArithmeticError, AttributeError, ImportError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error
    if type(roots) is not dict:
        raise ValueError("no attributes")
    return roots


class _Builder:
    """Creates all objects that may refer to each other in a ring first, empty, and then fills them."""

    def __init__(self, nodes: Any, arrays: Mapping[str, Array], parameters: Mapping[str, Any]) -> None:
        self._nodes, self._arrays, self._parameters = nodes, arrays, parameters
        self._things: dict[int, Any] = {}
        for number, node in enumerate(nodes):
            empty = self._empty(node)
            if empty is not None:
                self._things[number] = empty
        for number, thing in list(self._things.items()):
            kind, *rest = nodes[number]
            if kind == "list":
                thing.extend(map(self._item, rest[0]))
            else:
                pairs = {key: self._item(item) for key, item in rest[-1]}
                (thing if kind == "dict" else vars(thing)).update(pairs)

    def _empty(self, node: Any) -> Any:
        if node[0] == "list":
            return []
        if node[0] == "dict":
            return {}
        return object.__new__(_class(OBJECTS, node[1])) if node[0] == "object" else None

    def _item(self, item: Any) -> Any:
        return self.thing(*item) if type(item) is list else item

    def thing(self, number: int) -> Any:
        """The object that a node describes."""
        if number not in self._things:
            kind, *rest = self._nodes[number]
            self._things[number] = getattr(self, f"_make_{kind}")(*rest)
        return self._things[number]

    def _make_tuple(self, items: list[Any]) -> Any:
        return tuple(map(self._item, items))

    def _make_objects(self, shape: list[int], items: list[Any]) -> Any:
        array = np.empty(len(items), object)
        for i, item in enumerate(items):
            array[i] = self._item(item)
        return array.reshape(shape)

    def _make_array(self, name: str, *view: Any) -> Any:
        return view_of(self._arrays[name], *view)

    def _make_numbers(self, kind: str, name: str, n: int) -> Any:
        return list(map(_NUMBERS[kind], self._arrays[name][:n].tolist()))

    def _make_parameter(self, name: str) -> Any:
        return self._parameters[name]

    def _make_generator(self, kind: str, state: Any, *seeds: Any) -> Any:
        if seeds:
            return generator_of([state, *seeds])
        if type(state) is not str:
            generator = np.random.Generator(bit_generator(kind)(0))
            set_generator_state(generator, state)
            return generator
        random_state = np.random.RandomState(0)
        set_random_state(random_state, self._arrays[state])
        return random_state

    def _make_set(self, kind: str, items: list[Any]) -> Any:
        return {"set": set, "frozenset": frozenset}[kind](items)

    def _make_made(self, name: str, arguments: list[Any]) -> Any:
        if not all(type(one) in _ATOMS for one in arguments):
            raise ValueError(f"a {name} is made of plain values")
        return _class(MADE, name)(*arguments)


def _is_in(table: Mapping[str, str], kind: type) -> bool:
    """Whether a module defines a class. Its ``__module__`` does not tell: that of a compiled class need not be the
    module's full name."""
    return getattr(sys.modules.get(table.get(kind.__name__, "")), kind.__name__, None) is kind


def _class(table: Mapping[str, str], name: str) -> Any:
    return getattr(importlib.import_module(table[name]), name)


def view_of(array: Array, shape: Any = None, strides: Any = None, offset: int = 0) -> Array:
    """The array itself, or a view of it. Raises ValueError if the view would leave the array."""
    if shape is None:
        return array
    buffer: Any = array if array.flags.c_contiguous else array.T
    view: Array = np.ndarray(tuple(shape), array.dtype, buffer, offset, tuple(strides))
    return view
