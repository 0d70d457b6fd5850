"""pmstore.partial_fit: scikit-learn's estimators that learn batch by batch, and continue after a kill.

Each batch is one call of the estimator's own ``partial_fit``. After it, the learned state is in the estimator's
attributes. Their arrays are moved into the store when they are first seen, so that changes in place change the store.
Arrays that replace others are copied into the store.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._errors import CorruptStoreError, FingerprintMismatchError
from pmstore._interrupts import handlers
from pmstore._resume.attributes import Graph, decode, graph_of, view_of, where
from pmstore._resume.batches import Batches
from pmstore._resume.fingerprint import WITHOUT_EFFECT, Fingerprint, describe, describe_environment, describe_parameters
from pmstore._resume.fit_group import FitGroup, StoreOrPath
from pmstore._resume.learners import SETTINGS, learned_inside
from pmstore._resume.loop import Resumable
from pmstore._resume.state import (
    PROGRESS,
    RANDOM_STATE,
    Field,
    State,
    check_random_state_kind,
    random_state_record,
    set_random_state,
)
from pmstore._store.mapping import Group
from pmstore._values.array import is_solid, order_of, root_of
from pmstore._values.generators import generator_state, set_generator_state
from pmstore._values.values import encode

__all__ = ["partial_fit"]

Array = npt.NDArray[Any]


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
    """Train any estimator that has ``partial_fit`` on batches, so that it continues after a kill.

    The same call again, in another process if this one was killed, continues after the last batch that was committed.
    If all were committed, it loads the result. The result is the same, bit for bit, as that of
    ``estimator.partial_fit(*batch)`` for every batch, with the same parameters and number of threads, if the estimator
    is deterministic.

    Parameters
    ----------
    estimator : object
        An estimator of scikit-learn, or one with the same methods ``get_params`` and ``partial_fit``. If it has learned
        already, the fit starts from that state and depends on it. Give it a ``random_state``: without one, many
        estimators draw from numpy's global generator, and their results can't be reproduced.
    batches : sequence, callable or iterable
        A sequence of batches; a function that returns batch ``i`` of an epoch, from 0, and None if there is none; or an
        iterable. Batches of an iterable that were learned already are skipped. A batch is ``X``, ``(X, y)``,
        ``(X, y, sample_weight)``, or a dict of arguments of ``estimator.partial_fit``.
    store : Store, str or path-like
        The path of a store, which is created if it doesn't exist, and is open while this runs; or an open store,
        outside of any transaction. In an open store, every commit includes all other pending changes. None: plain
        memory.
    name : str, default=None
        The group of the store that holds only this fit. None: a group named by the class and by a hash of everything
        that the fit depends on; :func:`pmstore.prune` deletes the finished ones.
    epochs : int, default=1
        The number of passes over the batches. With an iterator, which returns every batch once, it must be 1.
    commit_every : int or float, default=1
        An int: commit after that many batches. A float: commit after the first batch that ends that many seconds after
        the last commit.
    **parameters
        Arguments for every call of ``estimator.partial_fit``, such as ``classes``.

    Returns
    -------
    object
        The estimator. Its arrays are plain copies, and don't refer to the store.

    Raises
    ------
    TypeError
        The estimator has no ``partial_fit``, or has an attribute that can't be kept, or learns inside of its parameters
        as a wrapper of another estimator may do. The batches since the last commit are not committed.
    ValueError
        There are no batches.
    FingerprintMismatchError
        The group `name` holds something else than an earlier attempt at this fit, with the same class and parameters of
        the estimator, state learned before, `parameters`, `epochs`, number of batches if they are a sequence, first
        batch, versions and threads. Or a batch that was learned already has changed: all batches of an iterable are
        compared, otherwise the first and the last one. Or the fit is finished, and there are more batches now. Or other
        code changed that attempt's state.
    ReadOnlyStoreError, OutOfSpaceError, TransactionError, StoreLockedError
        As for :meth:`pmstore.Resumable.run`.

    Notes
    -----
    After an exception, the estimator is as it was before the call, but for its parameters. The store holds its learned
    state up to the last commit.

    Attributes of attributes are kept too, to any depth, and so is the sharing of arrays and generators. Nothing is
    pickled: pmstore has a table of the classes that may occur. The logarithms of naive Bayes are not kept, because they
    follow from the counts.

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
    """The learned state of an estimator, which keeps itself in the store.

    Parameters
    ----------
    estimator : object

    Attributes
    ----------
    hashes : ndarray of uint64
        The hashes of the batches that were learned, and room for more.
    """

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator
        self.parameters: dict[str, Any] = estimator.get_params(deep=False)
        self.hashes: Array = np.zeros(8, np.uint64)
        self._derived, self._derive = _derived(estimator)
        self._arrays: dict[str, Array] = {}  # live arrays of the store
        self._nodes = b""  # encoded, as in the store
        self._layouts: dict[str, Any] = {}  # of the arrays, as in the store
        self._gaps: dict[str, list[Any]] = {}  # of the arrays, as the estimator made them
        self._given = self._learned_inside()
        before = self.graph()
        self._before = before.nodes, {name: (np.array(array), _gaps(array)) for name, array in before.arrays.items()}

    def describe_before(self) -> str:
        """A hash of the state before the fit, for a fingerprint."""
        import hashlib

        nodes, arrays = self._before
        described = describe({name: array for name, (array, _) in arrays.items()})
        return hashlib.sha256(encode([nodes, described])).hexdigest()[:16]

    def put_back(self) -> None:
        """Restore the state before the fit."""
        nodes, arrays = self._before
        self._restore(nodes, {name: _with_gaps(*one) for name, one in arrays.items()})

    def remember(self, number: int, of_batch: int) -> None:
        """Add the hash of a batch."""
        if number >= len(self.hashes):
            self.hashes = np.concatenate([self.hashes, np.zeros_like(self.hashes)])
        self.hashes[number] = of_batch

    # ---- the methods of a Keeper

    def capture(self, group: Group) -> None:
        """Put everything into the store that isn't there."""
        self._check_parameters()
        graph = self.graph()
        outside = {name: array for name, array in graph.arrays.items() if not _same(array, self._arrays.get(name))}
        alive = {id(array) for array in self._arrays.values()}
        for name, array in outside.items():
            self._gaps[name] = _gaps(array)
            # A view of another array in the store is copied: that array may be overwritten before the view is stored.
            outside[name] = _solid(array, copy=id(root_of(array)) in alive)
        for name in self._arrays.keys() - graph.arrays.keys():
            del self._arrays[name], self._gaps[name], group[name]
        for name, array in outside.items():
            group[name] = array
            self._arrays[name] = group[name]
        layouts = {name: _layout(array) + self._gaps[name] for name, array in self._arrays.items()}
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
        """Take up the state of an unfinished fit from the store."""
        nodes = group["nodes"]
        self._nodes = encode(nodes)
        self._layouts = group["layouts"]
        self._gaps = {name: found[3:] for name, found in self._layouts.items()}
        self._arrays = {name: group[name] for name in _names(nodes)}
        self._restore(nodes, self._arrays)

    def load(self, group: Group) -> None:
        """Take copies of the results of a finished fit from the store."""
        self._arrays = {}
        nodes, layouts = group["nodes"], group["layouts"]
        self._restore(nodes, {name: _with_gaps(group[name], layouts[name][3:]) for name in _names(nodes)})

    def check(self, fit_group: FitGroup, name: str) -> None:
        """Raise FingerprintMismatchError unless the group holds a learned state."""
        group = fit_group.group.group(name)
        try:
            nodes, layouts = group["nodes"], group["layouts"]
            arrays = {name: group[name] for name in _names(nodes)}
            if type(layouts) is not dict:
                raise ValueError("layouts are missing")
            for one, array in arrays.items():
                if not isinstance(array, np.ndarray):
                    raise ValueError(f"{one} is no array")
                if type(layouts.get(one)) is not list or layouts[one][:3] != _layout(array):
                    raise ValueError(f"{one} has shape {array.shape} and dtype {array.dtype}, and had others")
                gaps = layouts[one][3:]
                if gaps and not (len(gaps) == 1 and type(gaps[0]) is list and _is_spread(array, gaps[0])):
                    raise ValueError(f"{one} has impossible strides")
            batches = int(fit_group.group[PROGRESS]["iteration"])
            _check_roots(decode(nodes, arrays, self.parameters), self.parameters, batches)
        except CorruptStoreError:
            raise
        except (ValueError, KeyError) as error:
            raise fit_group.changed(f"{name}/nodes", f"the attributes of an estimator ({error})") from error

    # ---- attributes

    def graph(self) -> Graph:
        """The graph of all attributes that are kept."""
        skip = {*self.parameters, *SETTINGS, *self._derived}
        attributes = {name: value for name, value in vars(self.estimator).items() if name not in skip}
        generators: dict[str, Any] = {}
        for name, value in self.parameters.items():
            if isinstance(value, np.random.RandomState):
                check_random_state_kind(value)
                generators[name] = np.array(random_state_record(value), RANDOM_STATE)
            elif isinstance(value, np.random.Generator):
                generators[name] = generator_state(value)
        roots = {"attributes": attributes, "hashes": self.hashes, "generators": generators}
        graph = graph_of(roots, self.parameters)
        homes = {id(attributes): vars(self.estimator), id(roots): vars(self)}
        graph.places = [(homes.get(id(owner), owner), key, number) for owner, key, number in graph.places]
        return graph

    def _learned_inside(self) -> dict[str, Any]:
        """Learned attributes of estimators among the parameters, without those that follow from other attributes."""
        names = (name for name in self.parameters if name not in self._derived)
        return learned_inside({name: getattr(self.estimator, name, None) for name in names})

    def _check_parameters(self) -> None:
        """Raise TypeError if this call has changed an estimator among the parameters, which the store does not keep."""
        now = self._learned_inside()
        changed = [name for name in now if now[name] != self._given.get(name)]
        if changed:
            raise TypeError(
                f"partial_fit of {type(self.estimator).__name__} changes the parameter {changed[0]!r}, and what an "
                "estimator learns inside of its parameters can't be kept in a store. Train this estimator without a "
                "store, or make it resumable with pmstore.Resumable"
            )

    def _restore(self, nodes: Any, arrays: Mapping[str, Array]) -> None:
        roots = decode(nodes, arrays, self.parameters)
        attributes = vars(self.estimator)
        for name in attributes.keys() - self.parameters.keys() - set(SETTINGS):
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
    """The names of attributes that follow from others, and a function that computes them."""
    if type(estimator).__module__ == "sklearn.cluster._birch":  # it fits an estimator there anew after each batch
        return ("n_clusters",), lambda: None
    if type(estimator).__module__ != "sklearn.naive_bayes" or not hasattr(estimator, "_update_feature_log_prob"):
        return (), lambda: None

    def derive() -> None:  # the same steps as at the end of partial_fit
        estimator._update_feature_log_prob(estimator._check_alpha())
        estimator._update_class_log_prior(class_prior=estimator.class_prior)

    return ("feature_log_prob_", "class_log_prior_"), derive


_NAME_AT = {"array": 1, "numbers": 2, "generator": 2}
"""The part of a node of this kind that is, or may be, the name of an array."""


def _names(nodes: Any) -> list[str]:
    """The names of the arrays that nodes refer to. Raises ValueError if they are no nodes."""
    names: set[str] = set()
    if type(nodes) is not list or not all(type(node) is list and node and type(node[0]) is str for node in nodes):
        raise ValueError("they are no nodes")
    for node in nodes:
        at = _NAME_AT.get(node[0], len(node))
        if at < len(node) and type(node[at]) is str:
            names.add(node[at])
    return sorted(names)


def _check_roots(roots: dict[str, Any], parameters: Mapping[str, Any], batches: int) -> None:
    hashes, generators = roots.get("hashes"), roots.get("generators")
    attributes = roots.get("attributes")
    if type(attributes) is not dict or type(generators) is not dict or generators.keys() - parameters:
        raise ValueError("attributes or generators are missing")
    if not all(type(name) is str for name in attributes):
        raise ValueError("attributes have no names")
    for name, state in generators.items():  # tried on other generators of the same kind
        if isinstance(parameters[name], np.random.RandomState):
            set_random_state(np.random.RandomState(0), state)
        else:
            set_generator_state(np.random.Generator(type(parameters[name].bit_generator)(0)), state)
    if not isinstance(hashes, np.ndarray) or hashes.dtype != np.uint64 or not 0 < batches <= hashes.size:
        raise ValueError("the hashes of the batches are missing")


def _layout(array: Array) -> list[Any]:
    return [array.dtype.str, list(array.shape), order_of(array)]


def _same(array: Array, kept: Array | None) -> bool:
    """Whether two arrays are the same array in memory."""
    return kept is not None and array.dtype == kept.dtype and where(array) == where(kept)


def _gaps(array: Array) -> list[Any]:
    """The strides of an array with gaps, such as the first rows of one in Fortran order; nothing for any other.

    Products with such an array are added in another order. In the store it has no gaps, so that it takes less space.
    """
    return [list(array.strides)] if not is_solid(array) and _is_spread(array, array.strides) else []


def _is_spread(array: Array, strides: Any) -> bool:
    """Whether elements with these strides do not overlap."""
    if len(strides) != array.ndim or not all(type(stride) is int and 0 < stride < 1 << 46 for stride in strides):
        return False
    least = array.itemsize
    for stride, count in sorted(zip(strides, array.shape)):
        if stride < least:
            return False
        least = stride * count
    return True


def _with_gaps(array: Array, gaps: list[Any]) -> Array:
    """A copy with the gaps that `_gaps` found, if any."""
    if not gaps:
        return np.array(array)
    (strides,) = gaps
    end = sum(stride * (count - 1) for stride, count in zip(strides, array.shape)) + array.itemsize
    try:
        space = np.empty(end, np.uint8)
    except MemoryError:  # other code has changed the gaps
        return np.array(array)
    made: Array = np.ndarray(array.shape, array.dtype, space, strides=strides)
    made[...] = array
    return made


def _solid(array: Array, copy: bool) -> Array:
    """The array without gaps, with its axes in the same order in memory."""
    if is_solid(array):
        return array.copy(order="K") if copy else array
    return np.array(array, order="F" if abs(array.strides[0]) < abs(array.strides[-1]) else "C")


@contextlib.contextmanager
def _interrupts_get_through() -> Iterator[None]:
    """Raise an exception of a signal handler at the end if the estimator caught it. An interrupted MLP gives up its
    batch in the middle, warns, and returns.
    """
    main = threading.current_thread() is threading.main_thread()
    before = handlers() if main else {}
    raised: list[BaseException] = []

    def handle(number: int, frame: Any) -> None:
        try:
            before[number](number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if raised:
        raise raised[0]


class PartialFit(Resumable):
    """The fit: one batch per iteration."""

    _call = "partial_fit()"

    def __init__(self, learned: Learned, batches: Batches, epochs: int, parameters: dict[str, Any]) -> None:
        self.learned, self.batches, self.epochs, self.parameters = learned, batches, epochs, parameters
        self.max_iter = None if batches.length is None else batches.length * epochs

    @property
    def title(self) -> str:
        return type(self.learned.estimator).__name__

    def fields(self) -> Iterable[Field]:
        """The position of the next batch, and the learned state."""
        yield Field("epoch", dtype=np.int64)
        yield Field("index", dtype=np.int64)
        yield Field("learned", keeper=self.learned)

    def fingerprint(self) -> Fingerprint:
        """The fingerprint. Of the data, it includes only those that are known before the first batch."""
        from pmstore._resume import sklearn

        estimator, first = self.learned.estimator, self.batches.peek()
        without = WITHOUT_EFFECT if getattr(estimator, "is_in_store", False) else ("verbose",)
        return {
            "estimator": f"{type(estimator).__module__}.{type(estimator).__qualname__}, version {self.version}",
            **describe_parameters(self.learned.parameters, without),
            "learned before": self.learned.describe_before(),
            "arguments": self.parameters,
            "epochs": self.epochs,
            "batches": self.batches.length,
            "first batch": None if first is None else f"{first.hash:016x}",
            **sklearn.versions(),
            **describe_environment(sklearn.openmp_threads(), sklearn.libraries()),
        }

    def _whole_fingerprint(self) -> Fingerprint:
        return {key: describe(value) for key, value in self.fingerprint().items()}

    def start(self) -> Mapping[str, float]:
        """Learn the first batch: then it is known which attributes must be kept."""
        figures = self.step()
        self.state.iteration = 1
        return figures

    def step(self) -> Mapping[str, float]:
        """One batch. The objective is the loss or the inertia, if the estimator has one as an attribute."""
        batch, n = self.batches.take(), self.state.iteration
        with _interrupts_get_through():
            self.learned.estimator.partial_fit(*batch.positional, **{**self.parameters, **batch.named})
        self.learned.remember(n, batch.hash)
        self.state.epoch, self.state.index = self.batches.epoch, self.batches.index
        learned = vars(self.learned.estimator)
        objective = learned.get("loss_", learned.get("inertia_"))
        return {"objective": float(objective) if isinstance(objective, Real) else math.nan, "epoch": self.batches.epoch}

    def converged(self) -> bool:
        """Whether the last batch was learned."""
        return self.batches.peek() is None

    def derive(self) -> None:
        """Go to the next batch."""
        self._go_on(self.state)

    def _load(self, fit_group: FitGroup, fields: tuple[Field, ...]) -> State:
        state = super()._load(fit_group, fields)
        if self.batches.epoch == self.batches.index == 0:  # the fit was finished
            self._go_on(state)
            if self.batches.peek() is not None:
                raise FingerprintMismatchError(
                    f"the fit {self.slot_name_!r} is finished, and there is a batch {self.batches.index} of epoch "
                    f"{self.batches.epoch} now, which it has not learned. Pass the same batches, or train the fitted "
                    "model on the other ones under another name."
                )
        return state

    def _go_on(self, state: State) -> None:
        if not (0 <= state.epoch < self.epochs and 0 < state.index <= state.iteration):
            raise FingerprintMismatchError(
                f"the fit {self.slot_name_!r} was changed by other code: it can't be at batch {state.index} of "
                f"epoch {state.epoch}. Choose another name, or forget that fit with "
                f"store.group({self.slot_name_!r}).clear()."
            )
        self.batches.go_to(state.epoch, state.index, self.learned.hashes[: state.iteration])
