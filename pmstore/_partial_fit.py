"""pmstore.partial_fit: scikit-learn's estimators that learn batch by batch, and go on where they were killed.

A batch is the estimator's own ``partial_fit``. After it, what the estimator has learned is in its attributes. Their
arrays are moved into the store when they are first seen, so that what changes them in place changes the store; arrays
that take the place of others are copied there.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._array import order_of
from pmstore._attributes import Graph, decode, graph_of, root_of, view_of, where
from pmstore._batches import Batches
from pmstore._errors import CorruptStoreError, FingerprintMismatchError
from pmstore._estimators import Slot, StoreOrPath
from pmstore._fingerprint import Fingerprint, describe, describe_environment, describe_parameters
from pmstore._mapping import Group
from pmstore._resumable import Resumable
from pmstore._state import (
    PROGRESS,
    RANDOM_STATE,
    Field,
    State,
    check_random_state_kind,
    random_state_record,
    set_generator_state,
    set_random_state,
)
from pmstore._values import encode

__all__ = ["partial_fit"]

Array = npt.NDArray[Any]

_SETTINGS = ("_metadata_request", "_sklearn_output_config")
"""Attributes that are set as parameters are."""


def partial_fit(
    estimator: Any,
    batches: Any,
    *,
    store: StoreOrPath | None,
    name: str | None = None,
    epochs: int = 1,
    commit_every: float = 1,
    **parameters: Any,
) -> Any:
    """Train any estimator that has ``partial_fit`` on batches, so that it goes on where it was killed.

    The same call again, in another process if this one was killed, goes on after the last batch that was committed;
    when all had been, it loads the result. That is the same, bit for bit, as that of ``estimator.partial_fit(*batch)``
    for every batch, with the same parameters and number of threads, as far as that is the same every time.

    Parameters
    ----------
    estimator : object
        An estimator of scikit-learn's, or one with ``get_params`` and ``partial_fit`` as those have. What it has
        learned before is its start, and a part of what the fit depends on. Give it a ``random_state``: without one,
        many estimators draw from numpy's global generator, and nobody gets their result again.
    batches : sequence, callable or iterable
        A sequence of batches; a function that returns batch ``i`` of an epoch, from 0, and None if there is none; or an
        iterable, of which those that were learned from are skipped. A batch is ``X``, ``(X, y)``,
        ``(X, y, sample_weight)``, or a dict of arguments of ``estimator.partial_fit``.
    store : Store, str or path-like
        The path of a store, which is opened, and made if it isn't there, for as long as this takes; or an open store,
        in no transaction, where every commit takes whatever else is pending along. None: plain memory.
    name : str, default=None
        The group of the store that holds this fit and no other. None: a group named by the class and by a hash of what
        the fit depends on; :func:`pmstore.prune` deletes those that are finished.
    epochs : int, default=1
        How often to go through the batches. An iterator, which gives every batch once, allows one.
    commit_every : int or float, default=1
        An int: a commit after that many batches. A float: after the first batch that ends as many seconds after the
        last commit.
    **parameters
        For every call of ``estimator.partial_fit``, such as ``classes``.

    Returns
    -------
    object
        The estimator. Its arrays are plain copies, and don't refer to the store.

    Raises
    ------
    TypeError
        The estimator has no ``partial_fit``, or an attribute of a kind that can't be kept; nothing is committed.
    ValueError
        There are no batches.
    FingerprintMismatchError
        The group `name` holds anything but an earlier attempt at this: class and parameters of the estimator, what it
        had learned, `parameters`, `epochs`, number of batches if they are a sequence, the first batch, versions and
        threads. Or a batch that was learned from is another one now: all are checked of an iterable, the first and the
        last one otherwise. Or somebody changed what that attempt left.
    ReadOnlyStoreError, OutOfSpaceError, TransactionError, StoreLockedError
        As of :meth:`pmstore.Resumable.run`.

    Notes
    -----
    After an exception, the estimator is as it was before the call; what it learned is in the store, up to the last
    commit.

    An attribute of an attribute's attribute is kept too, and who shares an array or a generator with whom. Nothing is
    pickled: classes that may be found there are in a table of pmstore's. What naive Bayes has of logarithms is not
    kept, as it follows from the counts.

    Examples
    --------
    >>> import numpy as np, pmstore
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.linear_model import SGDClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> batches = [(X[i : i + 100], y[i : i + 100]) for i in range(0, 1700, 100)]
    >>> model = pmstore.partial_fit(
    ...     SGDClassifier(random_state=0), batches, store="sgd.pm", name="sgd", epochs=3, classes=np.arange(10)
    ... )
    >>> bool(model.score(X, y) > 0.9)
    True
    """
    if not callable(getattr(estimator, "partial_fit", None)):
        raise TypeError(f"{type(estimator).__name__} has no partial_fit, and so can't learn batch by batch")
    if isinstance(epochs, bool) or not isinstance(epochs, int | np.integer) or epochs < 1:
        raise ValueError(f"epochs is an int of at least 1, not {epochs!r}")
    learned = Learned(estimator)
    try:
        PartialFit(learned, Batches(batches, int(epochs)), int(epochs), parameters).run(
            store, name, commit_every=commit_every
        )
    except BaseException:
        learned.put_back()
        raise
    return estimator


class Learned:
    """What an estimator has learned, which keeps itself in the store.

    Parameters
    ----------
    estimator : object

    Attributes
    ----------
    hashes : ndarray of uint64
        Of the batches that it learned from, and room for more.
    """

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator
        self.parameters: dict[str, Any] = estimator.get_params(deep=False)
        self.hashes: Array = np.zeros(8, np.uint64)
        self._derived, self._derive = _derived(estimator)
        self._arrays: dict[str, Array] = {}  # of the store, alive
        self._nodes = b""  # encoded, as they are in the store
        self._layouts: dict[str, Any] = {}  # of the arrays, as they are in the store
        before = self.graph()
        self._before = before.nodes, {name: np.array(array) for name, array in before.arrays.items()}

    def describe_before(self) -> str:
        """What it knew before, for a fingerprint: a hash."""
        nodes, arrays = self._before
        return hashlib.sha256(encode([nodes, describe(arrays)])).hexdigest()[:16]

    def put_back(self) -> None:
        """Have it as it was before."""
        self._arrays = {}
        self._restore(*self._before)

    def remember(self, number: int, of_batch: int) -> None:
        """The hash of a batch."""
        if number >= len(self.hashes):
            self.hashes = np.concatenate([self.hashes, np.zeros_like(self.hashes)])
        self.hashes[number] = of_batch

    # ---- as a Keeper

    def capture(self, group: Group) -> None:
        """Put into the store what isn't there."""
        graph = self.graph()
        outside = {name: array for name, array in graph.arrays.items() if not _same(array, self._arrays.get(name))}
        alive = {id(array) for array in self._arrays.values()}
        for name, array in outside.items():
            # One that took the place of another may be about to be overwritten.
            outside[name] = _solid(array, copy=id(root_of(array)) in alive)
        for name in self._arrays.keys() - graph.arrays.keys():
            del self._arrays[name], group[name]
        for name, array in outside.items():
            group[name] = array
            self._arrays[name] = group[name]
        layouts = {name: _layout(array) for name, array in self._arrays.items()}
        if layouts != self._layouts:
            group["layouts"] = self._layouts = layouts
        nodes = encode(graph.nodes)
        if nodes != self._nodes:
            group["nodes"] = graph.nodes
            self._nodes = nodes
        for owner, key, number in graph.places:
            _, name, *view = graph.nodes[number]
            if name in outside:
                owner[key] = view_of(self._arrays[name], *view)

    def resume(self, group: Group) -> None:
        """Have everything where an unfinished fit left it in the store."""
        nodes = group["nodes"]
        self._nodes = encode(nodes)
        self._layouts = group["layouts"]
        self._arrays = {name: group[name] for name in _names(nodes)}
        self._restore(nodes, self._arrays)

    def load(self, group: Group) -> None:
        """Have copies of what a finished fit left in the store."""
        self._arrays = {}
        nodes = group["nodes"]
        self._restore(nodes, {name: group[name].copy(order="K") for name in _names(nodes)})

    def check(self, slot: Slot, name: str) -> None:
        """Raise FingerprintMismatchError unless that is there."""
        group = slot.group.group(name)
        try:
            nodes, layouts = group["nodes"], group["layouts"]
            arrays = {name: group[name] for name in _names(nodes)}
            if type(layouts) is not dict:
                raise ValueError("layouts are missing")
            for one, array in arrays.items():
                if not isinstance(array, np.ndarray):
                    raise ValueError(f"{one} is no array")
                if layouts.get(one) != _layout(array):
                    raise ValueError(f"{one} has shape {array.shape} and dtype {array.dtype}, and had others")
            batches = int(slot.group[PROGRESS]["iteration"])
            _check_roots(decode(nodes, arrays, self.parameters), self.parameters, batches)
        except CorruptStoreError:
            raise
        except (ValueError, KeyError) as error:
            raise slot.changed(f"{name}/nodes", f"what an estimator has learned ({error})") from error

    # ---- attributes

    def graph(self) -> Graph:
        """All that is to be kept."""
        skip = {*self.parameters, *_SETTINGS, *self._derived}
        attributes = {name: value for name, value in vars(self.estimator).items() if name not in skip}
        generators: dict[str, Any] = {}
        for name, value in self.parameters.items():
            if isinstance(value, np.random.RandomState):
                check_random_state_kind(value)
                generators[name] = np.array(random_state_record(value), RANDOM_STATE)
            elif isinstance(value, np.random.Generator):
                generators[name] = value.bit_generator.state
        roots = {"attributes": attributes, "hashes": self.hashes, "generators": generators}
        graph = graph_of(roots, self.parameters)
        homes = {id(attributes): vars(self.estimator), id(roots): vars(self)}
        graph.places = [(homes.get(id(owner), owner), key, number) for owner, key, number in graph.places]
        return graph

    def _restore(self, nodes: Any, arrays: Mapping[str, Array]) -> None:
        roots = decode(nodes, arrays, self.parameters)
        attributes = vars(self.estimator)
        for name in attributes.keys() - self.parameters.keys() - set(_SETTINGS):
            del attributes[name]
        attributes.update(roots["attributes"])
        self.hashes = roots["hashes"]
        for name, state in roots["generators"].items():
            generator = self.parameters[name]
            if isinstance(generator, np.random.RandomState):
                set_random_state(generator, state)
            else:
                set_generator_state(generator, state)
        if "class_count_" in attributes:
            self._derive()


def _derived(estimator: Any) -> tuple[tuple[str, ...], Callable[[], None]]:
    """Names of attributes that follow from others, and what computes them."""
    if type(estimator).__module__ != "sklearn.naive_bayes" or not hasattr(estimator, "_update_feature_log_prob"):
        return (), lambda: None

    def derive() -> None:  # as partial_fit ends
        estimator._update_feature_log_prob(estimator._check_alpha())
        estimator._update_class_log_prior(class_prior=estimator.class_prior)

    return ("feature_log_prob_", "class_log_prior_"), derive


def _names(nodes: Any) -> list[str]:
    """Of the arrays that nodes refer to; ValueError if they are no nodes."""
    names: set[str] = set()
    if type(nodes) is not list or not all(type(node) is list and node and type(node[0]) is str for node in nodes):
        raise ValueError("they are no nodes")
    for node in nodes:
        of = {"array": node[1:2], "numbers": node[2:3], "generator": node[2:3]}.get(node[0], [])
        names.update(name for name in of if type(name) is str)
    return sorted(names)


def _check_roots(roots: dict[str, Any], parameters: Mapping[str, Any], batches: int) -> None:
    hashes, generators = roots.get("hashes"), roots.get("generators")
    attributes = roots.get("attributes")
    if type(attributes) is not dict or type(generators) is not dict or generators.keys() - parameters:
        raise ValueError("attributes or generators are missing")
    if not all(type(name) is str for name in attributes):
        raise ValueError("attributes have no names")
    for name, state in generators.items():  # tried on others of the same kind
        if isinstance(parameters[name], np.random.RandomState):
            set_random_state(np.random.RandomState(0), state)
        else:
            set_generator_state(np.random.Generator(type(parameters[name].bit_generator)(0)), state)
    if not isinstance(hashes, np.ndarray) or hashes.dtype != np.uint64 or not 0 < batches <= hashes.size:
        raise ValueError("the hashes of the batches are missing")


def _layout(array: Array) -> list[Any]:
    return [array.dtype.str, list(array.shape), order_of(array)]


def _same(array: Array, kept: Array | None) -> bool:
    """Whether the one array is the other, in place."""
    return kept is not None and array.dtype == kept.dtype and where(array) == where(kept)


def _solid(array: Array, copy: bool) -> Array:
    """The array without gaps, with its axes in the same order in memory."""
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return array.copy(order="K") if copy else array
    return np.array(array, order="F" if abs(array.strides[0]) < abs(array.strides[-1]) else "C")


@contextlib.contextmanager
def _interrupts_get_through() -> Iterator[None]:
    """What a signal's handler raises is raised at the end, if somebody caught it: an interrupted MLP gives up its batch
    in the middle, warns, and returns.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: list[BaseException] = []

    def handle(number: int, frame: Any) -> None:
        try:
            handler(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if raised:
        raise raised[0]


class PartialFit(Resumable):
    """Batch after batch."""

    _call = "partial_fit()"

    def __init__(self, learned: Learned, batches: Batches, epochs: int, parameters: dict[str, Any]) -> None:
        self.learned, self.batches, self.epochs, self.parameters = learned, batches, epochs, parameters
        self.max_iter = None if batches.length is None else batches.length * epochs

    @property
    def title(self) -> str:
        return type(self.learned.estimator).__name__

    def fields(self) -> Iterable[Field]:
        """Of the batch that is next, and what was learned."""
        yield Field("epoch", dtype=np.int64)
        yield Field("index", dtype=np.int64)
        yield Field("learned", keeper=self.learned)

    def fingerprint(self) -> Fingerprint:
        """Of the data, only what is at hand before they are gone through."""
        from pmstore import _sklearn

        estimator, first = self.learned.estimator, self.batches.peek()
        return {
            "estimator": f"{type(estimator).__module__}.{type(estimator).__qualname__}, version {self.version}",
            **describe_parameters(self.learned.parameters),
            "learned before": self.learned.describe_before(),
            "arguments": self.parameters,
            "epochs": self.epochs,
            "batches": self.batches.length,
            "first batch": None if first is None else f"{first.hash:016x}",
            **_sklearn.versions(),
            **describe_environment(_sklearn.openmp_threads(), _sklearn.libraries()),
        }

    def _whole_fingerprint(self) -> Fingerprint:
        return {key: describe(value) for key, value in self.fingerprint().items()}

    def start(self) -> None:
        """The first batch: what there is to keep shows then."""
        self.step()
        self.state.iteration = 1

    def step(self) -> None:
        """One batch."""
        batch, n = self.batches.take(), self.state.iteration
        with _interrupts_get_through():
            self.learned.estimator.partial_fit(*batch.positional, **{**self.parameters, **batch.named})
        self.learned.remember(n, batch.hash)
        self.state.epoch, self.state.index = self.batches.epoch, self.batches.index

    def converged(self) -> bool:
        """Whether that was the last batch."""
        return self.batches.peek() is None

    def derive(self) -> None:
        """Go to the batch that is next."""
        self._go_on(self.state)

    def _load(self, slot: Slot, fields: tuple[Field, ...]) -> State:
        state = super()._load(slot, fields)
        if self.batches.epoch == self.batches.index == 0:  # it was finished
            self._go_on(state)
        return state

    def _go_on(self, state: State) -> None:
        if not (0 <= state.epoch < self.epochs and 0 < state.index <= state.iteration):
            raise FingerprintMismatchError(
                f"the fit {self.slot_name_!r} is not as it was left: it can't be at batch {state.index} of epoch "
                f"{state.epoch}. Choose another name, or forget that fit with store.group({self.slot_name_!r}).clear()."
            )
        self.batches.go_to(state.epoch, state.index, self.learned.hashes[: state.iteration])
