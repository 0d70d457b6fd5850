"""Fingerprints: what makes two fits the same, and how a difference reads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._resume.fingerprint import (
    describe_environment,
    describe_parameters,
    differences,
    digest,
    hash_array,
    is_same,
)

KMeans = pytest.importorskip("pmstore.cluster").KMeans
RBF = pytest.importorskip("sklearn.gaussian_process.kernels").RBF


@pytest.mark.parametrize(
    "same",
    [
        lambda X: np.repeat(X, 2, axis=0)[::2],
        lambda X: X[::-1][::-1],
        lambda X: np.lib.stride_tricks.as_strided(X, X.shape, X.strides, writeable=False),
    ],
)
def test_a_hash_is_of_the_elements_not_of_their_layout(same: Any) -> None:
    X = np.random.default_rng(0).normal(size=(7, 5))
    assert hash_array(same(X)) == hash_array(X) != hash_array(X[::-1])


def test_columns_are_hashed_where_they_are() -> None:
    """And are told from rows: sums over them may be added in another order."""
    X = np.random.default_rng(0).normal(size=(7, 5))
    columns = np.asfortranarray(X)
    assert hash_array(columns) == hash_array(X.T.copy().T) == f"F {hash_array(columns.T)}"
    assert hash_array(columns[:, :1]) == hash_array(X[:, :1])  # one column is both
    assert hash_array(columns) not in (hash_array(X), hash_array(np.asfortranarray(X[::-1])))


def test_the_order_of_the_axes_in_memory_counts() -> None:
    """Gaps do not."""
    X = np.random.default_rng(0).normal(size=(7, 6, 5))
    hashes = set()
    for axes in itertools.permutations(range(3)):
        lying = X.transpose(axes).copy().transpose(np.argsort(axes))
        wide = np.zeros((9, 9, 9)).transpose(np.argsort(axes))[:7, :6, :5]
        wide[...] = X
        hashes.add(hash_array(lying))
        if axes in ((0, 1, 2), (2, 1, 0)):
            assert hash_array(wide) == hash_array(lying)
    assert len(hashes) == 6 and hash_array(X) in hashes
    assert hash_array(np.broadcast_to(X[0], X.shape)) == hash_array(np.repeat(X[:1], 7, axis=0))


def test_a_hash_is_of_all_elements() -> None:
    X = np.zeros((300, 40), dtype="f4")
    hashes = {hash_array(X)}
    for place in range(X.size):
        X.flat[place] = 1
        hashes.add(hash_array(X))
        X.flat[place] = 0
    assert len(hashes) == X.size + 1
    assert hash_array(np.empty(0)) == hash_array(np.empty(0, "i4"))


def chosen(X: Any, k: int, random_state: Any, first: int = 0) -> Any:
    return X[first : first + k] if k in {1, 2, 3} else X[:k]


class Chooser:
    """A callable with contents, which may hold itself."""

    def __init__(self, first: int) -> None:
        self.first, self.itself = first, self

    def __call__(self, X: Any, k: int, random_state: Any) -> Any:
        return X[self.first : self.first + k]

    def pick(self, X: Any, k: int, random_state: Any) -> Any:
        return X[self.first : self.first + k]


class Slotted:
    __slots__ = ("first",)

    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(self, X: Any, k: int, random_state: Any) -> Any:
        return X[self.first : self.first + k]


def around(value: Any) -> Any:
    """A function that finds a function around itself, which finds the value."""

    def inner() -> Any:
        return value

    return lambda X, k, random_state: X[inner() : inner() + k]


CALLABLES: list[Any] = [
    Chooser,
    lambda n: Chooser(n).pick,
    Slotted,
    lambda n: functools.partial(Chooser(n), k=1),
    lambda n: np.vectorize(lambda x: x + n),
    lambda n: functools.lru_cache(around(n)),
    lambda n: np.poly1d([1, n]),
    lambda n: np.random.default_rng(n).normal,
    lambda n: operator.itemgetter(n),
    lambda n: [n].count,
    around,
    lambda n: around(Chooser(n)),
    lambda n: around([n, object()]),
    lambda n: around({"n": n, "lock": threading.Lock()}),
    lambda n: around({"inside": [{"n": n}, threading.Lock()]}),
    lambda n: around({n: 1, "lock": threading.Lock()}),
    RBF,
]


@pytest.mark.filterwarnings(
    "ignore:a function, an estimator or an array holds a _thread.lock, which counts by its type only"
)
@pytest.mark.parametrize("make", CALLABLES)
def test_callables_are_told_apart_by_what_they_hold(make: Any) -> None:
    first, again, other = (describe_parameters({"p": make(n)}) for n in (1, 1, 2))
    assert is_same(first, again) and not is_same(first, other)
    assert digest(first) == digest(again) != digest(other)


def test_a_callable_that_holds_what_nobody_can_tell_apart_is_refused() -> None:
    odd = Chooser(1)
    odd.first = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"can't describe a _thread\.lock"):
        describe_parameters({"p": odd})


@pytest.mark.parametrize(("one", "other"), [(2, 2.0), (1, True), (0.0, -0.0), (0, False), ([1], [1.0])])
def test_equal_numbers_of_other_types_are_other_fits(one: Any, other: Any) -> None:
    """A fit without a name is found by its digest, which tells them apart."""

    class Counting(pmstore.Resumable):
        max_iter = 1

        def __init__(self, value: Any) -> None:
            self.value = value

        def fields(self) -> Any:
            return [pmstore.Field("n", dtype=np.int64)]

        def fingerprint(self) -> Any:
            return {"value": self.value}

        def start(self) -> None:
            pass

        def step(self) -> None:
            self.state.n += 1

    with pmstore.open(":memory:") as store:
        Counting(one).run(store, "fit")
        Counting(one).run(store, "fit")
        with pytest.raises(pmstore.FingerprintMismatchError, match=re.escape(f"value: {one} ≠ {other}")):
            Counting(other).run(store, "fit")


@pytest.mark.parametrize(
    "one, other",
    [
        (1, 2),
        (1, 1.5),
        (0.1, np.float32(0.1)),
        (0.1, np.float64(0.1)),
        (None, "None"),
        ("a", b"a"),
        (np.zeros(3), np.zeros((3, 1))),
        (np.zeros(3), np.zeros(3, "f4")),
        (np.random.RandomState(0), np.random.RandomState(1)),
        (np.random.default_rng(0), np.random.default_rng(1)),
        (np.array([1, None]), np.array([2, None])),
        (1j, 2j),
        (chosen, lambda X, k, random_state: X[:k]),
        (chosen, functools.partial(chosen, first=1)),
        (functools.partial(chosen, first=2), functools.partial(chosen, first=1)),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({1: 2}, {"1": 2}),
        (float("nan"), "nan"),
        ("nan", "NaN"),
        (np.array(["nan", 1], object), np.array([np.nan, 1], object)),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (OrderedDict(a=1), {"a": 1}),
        ({1: 2, "1": 3}, {1: 4, "1": 3}),
    ],
)
def test_different_parameters_are_told_apart(one: Any, other: Any) -> None:
    assert describe_parameters({"p": one}) != describe_parameters({"p": other})
    assert digest(describe_parameters({"p": one})) != digest(describe_parameters({"p": other}))


@pytest.mark.parametrize(
    "one, other",
    [
        (1, np.int64(1)),
        (True, np.bool_(True)),
        ((1, 2), [1, 2]),
        ({1: 2, 3: 4}, {3: 4, 1: 2}),
        (np.random.default_rng(3), np.random.default_rng(3)),
        (float("nan"), float("nan")),
        (np.random.RandomState(3), np.random.RandomState(3)),
        (functools.partial(chosen, first=1), functools.partial(chosen, first=1)),
    ],
)
def test_equal_parameters_are_the_same(one: Any, other: Any) -> None:
    assert describe_parameters({"p": one}) == describe_parameters({"p": other})


class Config:
    rate = 0.1

    class Inner:
        layers = (1, 2)


class Derived(Config):
    pass


@pytest.mark.parametrize("kind", [Config, Derived])
@pytest.mark.parametrize("make", [lambda kind: kind, around, lambda kind: [kind]])
def test_classes_count_by_their_entries(kind: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [describe_parameters({"p": make(kind)})]
    assert describe_parameters({"p": make(kind)}) == seen[0]
    monkeypatch.setattr(Config, "rate", 5.0)
    seen.append(describe_parameters({"p": make(kind)}))
    monkeypatch.setattr(Config.Inner, "layers", (1, 3))
    seen.append(describe_parameters({"p": make(kind)}))
    assert len(set(map(digest, seen))) == 3


def test_a_class_without_entries_counts_by_its_name() -> None:
    assert describe_parameters({"p": Chooser}) == {"parameter p": f"{__name__}.Chooser"}
    assert describe_parameters({"p": np.float32}) == {"parameter p": "numpy.float32"}


@pytest.mark.parametrize("dtype", ["u1", "f8"])
def test_arrays_count_with_more_than_their_elements(dtype: str) -> None:
    class Measured(np.ndarray):
        unit = "m"

    class Masked(np.ma.MaskedArray):  # type: ignore[type-arg]
        pass

    data = np.array([1, 2, 100], dtype)
    found = [np.ma.array(data, mask=mask) for mask in ([0, 0, 0], [0, 0, 1])]
    found += [one.view(Masked) for one in found]
    found += [data.view(Measured), data.view(Measured), data]
    found[-2].unit = "km"
    assert len({digest(describe_parameters({"p": one})) for one in found}) == len(found)
    assert digest(describe_parameters({"p": found[1].copy()})) == digest(describe_parameters({"p": found[1]}))


def test_an_estimator_counts_with_what_it_has_learned() -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    X = np.random.default_rng(0).normal(size=(60, 2))
    for of in (lambda model: model, lambda model: model.predict, around, lambda model: [model]):
        new, one, again, other = (cluster.KMeans(3, n_init=1, random_state=0) for _ in range(4))
        one.fit(X[:30]), again.fit(X[:30]), other.fit(X[30:])
        first, second, third, fourth = (
            digest(describe_parameters({"p": of(model)})) for model in (new, one, again, other)
        )
        assert second == third and len({first, second, fourth}) == 3
        one.itself_ = one
        assert digest(describe_parameters({"p": of(one)})) != second


def test_an_estimator_of_pmstores_counts_by_its_result_only(tmp_path: Any) -> None:
    X = np.random.default_rng(0).normal(size=(60, 2))
    seen = []
    with pmstore.open(tmp_path / "x.pm") as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # the second one is loaded
            model = KMeans(3, n_init=1, random_state=0, store=store).fit(X)
            seen.append(describe_parameters({"p": model.predict}))
    assert seen[0] == seen[1]


def test_a_store_counts_by_its_path(tmp_path: Any) -> None:
    """Its contents are those of the fit, too."""
    with pmstore.open(tmp_path / "x.pm") as store:
        seen = []
        for n in range(2):
            store["a/b"] = n
            for value in (store, store.group("a")):
                with pytest.warns(UserWarning, match="counts by its path only"):
                    seen.append(digest(describe_parameters({"p": around(value)})))
        assert seen[:2] == seen[2:] and seen[0] != seen[1]


class Frame:
    """What xarray's arrays have."""

    def __init__(self, dims: Any, coords: Any) -> None:
        self.dims, self.coords = dims, {name: Frame((name,), {}) for name in coords} | coords

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.zeros((2, 2))


class Quantity(np.ndarray):
    """An array with attributes of any kind."""


@dataclasses.dataclass
class Node:
    parent: Any


pmstore.register(Node, name="tests.fingerprint.Node")


def quantity(**attributes: Any) -> Any:
    made = np.ones(3).view(Quantity)
    vars(made).update(attributes)
    return made


def test_attributes_of_an_array_may_be_anything() -> None:
    described = describe_parameters({"x": quantity(unit="m")})
    assert described == {
        "parameter x": [f"{__name__}.Quantity", *describe_parameters({"x": np.ones(3)}).values(), {"unit": "m"}]
    }
    assert described != describe_parameters({"x": quantity(unit="s")})
    assert is_same(describe_parameters({"x": quantity(of=object())}), describe_parameters({"x": quantity(of=object())}))
    with pytest.warns(UserWarning, match="an array holds a _thread.lock, which counts by its type only"):
        assert describe_parameters({"x": quantity(of=threading.Lock())}) != described


def cycles() -> Iterator[Any]:
    for one in (quantity(), quantity(unit="m")):
        one.parent, one.children = one, [one]
        yield one
    mapping: dict[str, Any] = {}
    mapping["me"] = items = [mapping]
    objects = np.empty(2, object)
    objects[0] = objects
    yield from (mapping, items, objects)
    node = Node(None)
    node.parent = node
    yield node


def test_what_refers_to_itself() -> None:
    described = [digest(describe_parameters({"x": one})) for one in cycles()]
    assert described == [digest(describe_parameters({"x": one})) for one in cycles()]
    assert len(set(described)) == len(described)


@pytest.mark.parametrize("kind", ["dok_array", "dok_matrix", "coo_array", "lil_matrix"])
def test_sparse_matrices_count_with_their_shape(kind: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    first, same, other = (getattr(sparse, kind)(sparse.coo_matrix(([1.0], ([0], [1])), (n, 3))) for n in (4, 4, 9))
    first, same, other = (describe_parameters({"p": one}) for one in (first, same, other))
    assert is_same(first, same) and not is_same(first, other)
    assert describe_parameters({"p": getattr(sparse, kind)})["parameter p"][0].endswith(kind)  # the class itself


@pytest.mark.parametrize("attribute", [lambda frame: frame, lambda _: object(), lambda _: threading.Lock()])
def test_attributes_of_a_frame_may_be_anything(attribute: Callable[[Any], Any]) -> None:
    pandas = pytest.importorskip("pandas")
    frames = [pandas.DataFrame({"a": [1.0, last]}) for last in (2, 2, 3)]
    for frame in frames:
        frame.attrs["x"] = attribute(frame)
    first, same, other = (describe_parameters({"x": frame}) for frame in frames)
    assert is_same(first, same) and not is_same(first, other)


class Counting:
    made = 0
    also = 1


@pytest.mark.parametrize("counting", [Counting, type("Other", (), {"made": 0, "also": 1})])
def test_a_counter_of_a_class_is_named(counting: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a class that can't be found by its name."""

    class Fit(pmstore.Resumable):
        max_iter = 2

        def fields(self) -> Any:
            return [pmstore.Field("x", 2)]

        def fingerprint(self) -> dict[str, Any]:
            return {"factory": {"class": [counting, 1]}, "other": [RBF(self.scale)]}

        def start(self) -> None:
            pass

        step = start
        scale = 1

    Fit().run(tmp_path / "x.pm", "fit")
    monkeypatch.setattr(Fit, "scale", 2)
    with pytest.raises(pmstore.FingerprintMismatchError) as no_class:
        Fit().run(tmp_path / "x.pm", "fit")
    assert "The entry" not in str(no_class.value)
    monkeypatch.setattr(counting, "made", 3)
    with pytest.raises(
        pmstore.FingerprintMismatchError, match=rf"The entry .*{counting.__name__}\.made differs.*cache"
    ):
        Fit().run(tmp_path / "x.pm", "fit")


def test_labels_count() -> None:
    given = [(("x", "y"), {"x": np.arange(2)}), (("y", "x"), {"x": np.arange(2)}), (("x", "y"), {"x": np.arange(1, 3)})]
    assert len({digest(describe_parameters({"p": Frame(*one)})) for one in given}) == 3
    assert describe_parameters({"p": Frame(*given[0])}) == describe_parameters({"p": Frame(*given[0])})


def test_generators_are_described_as_by_older_versions() -> None:
    """The description stands in the stores of fits that are not finished."""
    assert describe_parameters({"p": np.random.default_rng(0)}) == {"parameter p": "Generator bf33c53e2fd3064d"}
    assert describe_parameters({"p": np.random.RandomState(0)}) == {"parameter p": "RandomState cacbbf7a434fb771"}


def test_what_nobody_can_tell_apart_is_refused() -> None:
    with pytest.raises(TypeError, match="a fingerprint can.t describe a builtins.object"):
        describe_parameters({"p": [object()]})
    for around in ([object()], {"a": object()}, {1: (2, {3: object()})}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            describe_parameters({"p": lambda around=around: around})  # a function may need anything


def test_an_object_around_a_function_that_nobody_can_describe() -> None:
    """It counts by its type, as it may hold a clock, but not silently."""

    def make(n: int) -> Any:
        odd = Chooser(n)
        odd.lock = threading.Lock()  # type: ignore[attr-defined]
        return around(odd)

    with pytest.warns(
        UserWarning,
        match="a function, an estimator or an array holds a .*Chooser, which counts by its type only: .*_thread.lock",
    ):
        assert describe_parameters({"p": make(1)}) == describe_parameters({"p": make(2)})


def test_differences_read_as_they_are() -> None:
    stored = {"estimator": "KMeans", "parameter n_clusters": 10, "gone": 1}
    wanted = {"estimator": "KMeans", "parameter n_clusters": 8, "new": None}
    assert differences(stored, wanted) == ["parameter n_clusters: 10 ≠ 8", "new: absent ≠ None", "gone: 1 ≠ absent"]
    assert differences(stored, stored) == []


def test_libraries_that_do_not_compute_here_do_not_count() -> None:
    own = {"user_api": "blas", "internal_api": "openblas", "version": "0.3", "num_threads": 2, "architecture": "Zen"}
    own["filepath"] = "/site-packages/numpy.libs/libopenblas.so"
    other = {**own, "internal_api": "mkl", "num_threads": 9, "filepath": "/site-packages/torch/lib/libmkl.so"}
    openmp = {**own, "user_api": "openmp"}
    described = describe_environment(4, [own, other, openmp])
    assert described == describe_environment(4, [own])
    assert (described["OpenMP threads"], described["BLAS threads"]) == (4, 2)
    assert described["BLAS"] == "openblas 0.3 Zen"
    assert describe_environment(1, [other])["BLAS"] == "mkl 0.3 Zen"
    assert describe_environment(1, [])["BLAS threads"] == 1
