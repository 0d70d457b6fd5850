"""What the golden files hold: the programs that wrote them, and what each file must read as, for ever.

Nothing here may change what it computes. A new kind of entry gets a program, and files, of its own.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import uuid
from collections import OrderedDict
from typing import Any

import numpy as np

import pmstore

DTYPES = (
    "?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16", "<M8[D]", "<m8[ms]",
    "S5", "<U3", "V4", ">i4", ">f8", "<M8[25s]",
)  # fmt: skip
RECORD = np.dtype([("id", "<u4"), ("place", "<f8", (2, 3)), ("flag", "?"), ("name", "S7")], align=True)
LONG_RECORD = np.dtype([(f"a rather long name of a field, number {i}", "<i2") for i in range(40)])


def elements(dtype: str) -> Any:
    """60 elements of a dtype, in which no byte is always zero."""
    kind = np.dtype(dtype).kind
    if kind in "SU":
        return np.array([f"{i:03}"[-3:] for i in range(60)]).astype(dtype)
    if kind == "V":
        return np.arange(7, 7 + 60 * 4, dtype="u1").view("V4")
    if kind in "Mm":
        return (np.arange(60, dtype="i8") * 10_007 - 5).view(np.dtype(dtype).newbyteorder("="))
    return (np.arange(60) * 5 - (0 if kind in "ub" else 100)).astype(dtype)


def arrays() -> dict[str, Any]:
    """Arrays, by name: of all dtypes, orders and sizes."""
    record = np.zeros(50, RECORD)
    record["id"], record["place"][:, 1, 2], record["name"] = np.arange(50), np.arange(50) / 4, b"x"
    return {
        **{f"dtypes/{dtype}": elements(dtype).reshape(3, 20) for dtype in DTYPES},
        "order F": np.asfortranarray(np.arange(24.0).reshape(4, 6)),
        "no dimension": np.array(2.5),
        "no element": np.zeros((0, 7), "<f4"),
        "record": record,
        "long record": np.full(5, 3, LONG_RECORD),
        "slab": np.arange(30, dtype="<i8"),
        "one page": np.arange(511.0),
        "pages": np.arange(3000.0).reshape(30, 100),
        "grüße/日本": np.arange(5),
    }


def values() -> dict[str, Any]:
    """Values, by name: of the types that format 1 began with and that need no other package, in the entry itself and in
    an extent."""
    return {
        "none": None,
        "bool": True,
        "int": -7,
        "long": 2**200 + 1,
        "float": 0.1,
        "infinite": float("-inf"),
        "complex": 1.5 - 2j,
        "text": "naïve \0 日本 \U0001f600",
        "bytes": b"\0\xff",
        "long text": "0123456789" * 300,
        "long bytes": b"pmstore" * 700,
        "list": [1, [2.5, "x", None], (3, (4,))],
        "dict": {"a": {"b": [1]}, 2: "two", (3, 4): b"5", None: True},
        "scalar": np.float32(0.25),
        "date scalar": np.datetime64("2024-02-29"),
        "nested array": {"w": np.arange(4, dtype="<u2").reshape(2, 2), "F": np.asfortranarray(np.eye(2))},
        "set": {1, "a", (2, 3)},
        "frozenset": frozenset({1, frozenset({2})}),
        "ordered": OrderedDict(b=1, a=[2]),
        "date": datetime.date(2024, 2, 29),
        "time": datetime.time(1, 2, 3, 4, fold=1),
        "datetime": datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=datetime.timezone.utc),
        "timedelta": datetime.timedelta(-5, 3, 7),
        "decimal": decimal.Decimal("-1.250E+7"),
        "fraction": fractions.Fraction(-7, 2**80),
        "uuid": uuid.UUID(int=2**127 + 5),
        "path": pathlib.PurePosixPath("a/b c"),
        "slice": slice(1, None, 3),
        "range": range(9, 0, -2),
        "a/b/c/deep": 1,
    }


class Point:
    """A registered type without arrays: one value."""

    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)

    __hash__ = None  # type: ignore[assignment]


class Model:
    """A registered type whose parts are live arrays and values."""

    def __init__(self, weights: Any, bias: Any, rate: float) -> None:
        self.weights, self.bias, self.rate = weights, bias, rate


def register() -> None:
    """Registers both types; once in a process."""
    pmstore.register(
        Point, lambda point: {"x": point.x, "y": point.y}, lambda parts: Point(**parts), name="golden.Point"
    )
    pmstore.register(Model, lambda model: vars(model).copy(), lambda parts: Model(**parts), name="golden.Model")


def masked() -> Any:
    return np.ma.array(np.arange(6.0), mask=[0, 1, 0, 0, 1, 0])


def text_array() -> Any:
    """An array of numpy's StringDType; None before numpy 2."""
    kind = getattr(np.dtypes, "StringDType", None)
    return None if kind is None else np.array([["a", "日"], ["", "x" * 50]], kind())


def derived(store: pmstore.Store) -> Any:
    """Two derived arrays, which every program that reads them declares."""
    return (
        store.derive("derived/stored", np.negative, "arrays/pages", policy="store", version="1", verify="hash"),
        store.derive("derived/computed", np.transpose, "arrays/order F", policy="recompute", version="1"),
    )


# ---- the programs


def entries(store: pmstore.Store) -> None:
    """Every kind of entry. The store is closed."""
    for name, array in arrays().items():
        store[f"arrays/{name}"] = array
    for name, value in values().items():
        store[f"values/{name}"] = value
    store["text array"] = text_array()
    items = store.create_list("list")
    items.extend([0, "one", [2], np.arange(3), b"4" * 5000])
    store.create_list("empty list")
    del items[3]
    store["point"], store["points"] = Point(1, 2), [Point(3, 4)]
    store["model"] = Model(np.arange(12.0).reshape(3, 4), np.ones(600), 0.5)
    store["masked"] = masked()
    store.attrs("arrays/slab")["units"] = "m"
    store.attrs("arrays").update(count=5, scale=np.float64(2.5))
    store.attrs("").update(title="golden", list=[1, 2])
    store.create_array("growing", data=np.arange(10.0).reshape(5, 2), maxshape=(None, 2))
    store.create_array("bounded", data=np.arange(4, dtype="<i4"), maxshape=(9,))
    store.commit()
    store.append("growing", np.arange(2000.0).reshape(1000, 2))
    stored, _ = derived(store)
    assert stored.value[0, 5] == -5
    store["deleted"], store["renamed"] = np.ones(900), np.arange(7.0)
    store.commit()
    del store["deleted"]
    store.rename("renamed", "new name")
    with store.transaction(message="the last", attributes={"loss": 0.25, "step": 7}):
        store["arrays/pages"][1, :] = -1


def dense(store: pmstore.Store) -> int:
    """The length of the shortest float64 array, approximately, that commits write as a whole."""
    return 131_500 if store.media == "file" else 1000


def log(store: pmstore.Store) -> None:
    """Commits that stay in the log: logged ranges, an array written directly, one with two slots."""
    n = dense(store)
    sparse = store.create_array("sparse", 4000, "<f8")
    whole = store.create_array("whole", n, "<f8")
    spare = store.create_array("spare", (3, n), "<f8")
    store.commit()
    for i in range(4):
        whole += i + 1
        store.commit()
    del spare, store["spare"]
    store.commit()
    store._catalog.core.checkpoint()
    sparse[5], store["epoch"] = 1.5, 1
    store.commit()
    whole += 5
    sparse[3000:3002] = 2.5
    store.commit()
    whole[9] = -1
    store["direct"] = np.full(20_000, 7.0)
    store.commit()
    store["direct"][1] = 8
    store["epoch"] = 2
    store.commit()
    store["never"] = whole[0] = 99


def later(store: pmstore.Store) -> None:
    """Commits that are in the log, and perhaps not durable."""
    x = store.create_array("x", 1000, "<i8")
    store.commit()
    store.sync()
    for i in range(5):
        x[i] = i + 1
        store[f"step {i}"] = np.full(700, i)
        store.commit()
    store["never"] = 1


STEPS = 6


def versions(store: pmstore.Store, url: str) -> None:
    """An archive: every kind of entry, and six versions with small changes; the fourth has a tag."""
    entries(store)
    weights = store.create_array("weights", (40, 100), "<f8")
    with store.drain(url) as drain:
        for i in range(STEPS):
            with store.transaction(message=f"step {i}", attributes={"loss": 1 / (i + 1)}):
                weights[i] += i + 1
                store["step"] = i
            drain.capture()
            drain.wait()
    pmstore.archive.open(url).tag("chosen", store.sequence - 2)


OVERFLOW_SIZE = 2_800_000  # max_size, so that the log can't grow


def overflow(store: pmstore.Store) -> None:
    """A commit that fits into no log: its items are in free pages."""
    store["filler"] = np.ones(130_000)
    base = store.create_array("base", 100_000, "<f8")
    store.commit()
    del store["filler"]
    store.commit()
    base[:68_000] += 1  # less than most of it, which would give it a second slot
    store["also"] = np.full(600, 1.0)
    store.commit()


def large(store: pmstore.Store) -> None:
    """A store to compact, which gives it a lineage; with a catalog of three levels."""
    for i in range(400):
        store[f"a name of some length, so that a node has few of them/{'x' * 300}/{i:04}"] = i
    store["gone"] = np.ones(200_000)
    store.commit()
    del store["gone"]


def samples() -> Any:
    """200 points of three groups, without a random generator, whose numbers another numpy might change."""
    i = np.arange(200)
    grid = np.stack([i % 14, i * 7 % 15, i * 11 % 13, i * 3 % 17], 1) / 5.0
    return grid + 4.0 * (i % 3)[:, None] * np.array([1.0, -1.0, 0.5, 0.0])


def first_centers() -> Any:
    return samples()[[0, 2, 4]] * 0.9


# ---- what is there


def same(found: Any, expected: Any) -> bool:
    """Equal, of the same type, down to the elements' bytes, their order and dtype."""
    if isinstance(expected, np.ndarray):
        if expected.dtype.kind == "T":
            return str(found.dtype) == str(expected.dtype) and found.tolist() == expected.tolist()
        return (
            (found.dtype, found.shape) == (expected.dtype, expected.shape)
            and found.tobytes() == expected.tobytes()
            and (found.flags.f_contiguous, found.flags.c_contiguous)
            == (expected.flags.f_contiguous, expected.flags.c_contiguous)
        )
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def assert_entries(store: pmstore.Store) -> None:
    for name, array in arrays().items():
        if name == "pages":
            array[1, :] = -1
        assert same(np.asarray(store[f"arrays/{name}"]), array), name
    for name, value in values().items():
        assert same(store[f"values/{name}"], value), name
    text = text_array()
    if text is not None:
        assert same(store["text array"], text)
    items = store["list"]
    assert len(items) == 4 and items[0] == 0 and items[1] == "one" and items[2] == [2] and items[3] == b"4" * 5000
    assert len(store["empty list"]) == 0
    assert store["point"] == Point(1, 2) and store["points"] == [Point(3, 4)]
    model = store["model"]
    assert type(model) is Model and model.rate == 0.5 and same(np.asarray(model.bias), np.ones(600))
    assert same(np.asarray(model.weights), np.arange(12.0).reshape(3, 4))
    expected = masked()  # first: it imports numpy.ma, without which the store shows its parts
    found = store["masked"]
    assert np.array_equal(found.mask, expected.mask) and np.array_equal(np.asarray(found.data), expected.data)
    assert store.attrs("arrays/slab")["units"] == "m"
    assert dict(store.attrs("arrays")) == {"count": 5, "scale": 2.5}
    assert type(store.attrs("arrays")["scale"]) is np.float64
    assert dict(store.attrs("")) == {"title": "golden", "list": [1, 2]}
    growing = np.concatenate([np.arange(10.0).reshape(5, 2), np.arange(2000.0).reshape(1000, 2)])
    assert same(np.asarray(store["growing"]), growing)
    assert same(np.asarray(store["bounded"]), np.arange(4, dtype="<i4"))
    pages = arrays()["pages"]
    pages[1, :] = -1
    stored, computed = derived(store)
    assert np.array_equal(stored.value, -pages)
    assert np.array_equal(computed.value, arrays()["order F"].T)
    assert "deleted" not in store and "renamed" not in list(store)
    assert same(np.asarray(store["new name"]), np.arange(7.0))
    if store.sequence == 3:  # the note is of the last commit
        assert store.commit_note() == pmstore.CommitNote("the last", {"loss": 0.25, "step": 7})


def assert_log(store: pmstore.Store) -> None:
    assert set(store) == {"sparse", "whole", "direct", "epoch"} and store["epoch"] == 2
    sparse = np.zeros(4000)
    sparse[5], sparse[3000:3002] = 1.5, 2.5
    assert same(np.asarray(store["sparse"]), sparse)
    whole = np.full(len(store["whole"]), 15.0)
    whole[9] = -1
    assert len(whole) in (1000, 131_500) and same(np.asarray(store["whole"]), whole)
    direct = np.full(20_000, 7.0)
    direct[1] = 8
    assert same(np.asarray(store["direct"]), direct)


def assert_later(store: pmstore.Store) -> None:
    assert set(store) == {"x", *(f"step {i}" for i in range(5))}
    x = np.zeros(1000, "<i8")
    x[:5] = range(1, 6)
    assert same(np.asarray(store["x"]), x)
    for i in range(5):
        assert same(np.asarray(store[f"step {i}"]), np.full(700, i))


def assert_overflow(store: pmstore.Store) -> None:
    assert set(store) == {"base", "also"}
    base = np.zeros(100_000)
    base[:68_000] = 1
    assert same(np.asarray(store["base"]), base) and same(np.asarray(store["also"]), np.full(600, 1.0))


def assert_large(store: pmstore.Store) -> None:
    assert list(store.values()) == list(range(400))


def assert_version(version: Any, step: int) -> None:
    """The weights of a version of the archive, or of a store that was made of it."""
    weights = np.zeros((40, 100))
    for i in range(step + 1):
        weights[i] = i + 1
    assert same(np.asarray(version["weights"]), weights) and version["step"] == step
