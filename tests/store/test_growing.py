"""Arrays that grow: `create_array(maxshape=…)`, `append`, `resize`. What moves, stays live, and is refused."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._values.array import Growth, address_of, read_layout
from tests.support.places import entry_of

Open = Callable[..., pmstore.Store]


def growth_of(store: pmstore.Store, name: str) -> Growth:
    growth = read_layout(store._catalog.core, entry_of(store, name)).growth
    assert growth is not None
    return growth


def rows(first: int, count: int, width: int = 5) -> Any:
    return np.arange(first * width, (first + count) * width, dtype="f8").reshape(count, width)


def made(store: pmstore.Store, count: int = 0, most: int | None = None, name: str = "x") -> Any:
    """An array of `count` rows of 5 numbers."""
    return store.create_array(name, data=rows(0, count), maxshape=(most, 5))


# ---- append and resize


def test_I36_rows_are_appended_and_committed(open_store: Open) -> None:
    store = open_store()
    x = made(store)
    assert x.shape == (0, 5) and x is store["x"]
    for i in range(400):
        before = store["x"]
        x = store.append("x", rows(i, 1)[0])
        assert x.shape == (i + 1, 5) and store["x"] is x and x is not before
        if i % 7 == 0:
            store.commit()
    x = store.append("x", rows(400, 3000))
    assert np.array_equal(x, rows(0, 3400))
    x[17] += 1
    store.close()
    with open_store(mode="r") as reader:
        found = reader["x"]
        assert np.array_equal(np.delete(found, 17, 0), np.delete(rows(0, 3400), 17, 0)) and found[17, 0] == 86
        assert reader.check().ok
    store = open_store()
    assert store.append("x", [rows(3400, 1)[0].tolist()]).shape == (3401, 5)
    assert store.check().ok


def test_a_row_takes_amortized_constant_time(store: pmstore.Store) -> None:
    """The bytes that are written are a small multiple of those that are appended."""
    made(store)
    store.commit()
    before, moves, place = store.stats(), 0, 0
    for i in range(3000):
        x = store.append("x", rows(i, 1))
        moves += address_of(x) != place
        place = address_of(x)
        if i % 100 == 99:
            store.commit()
    after = store.stats()
    assert moves <= 10
    written = sum(getattr(after, field) - getattr(before, field) for field in ("bytes_logged", "bytes_direct"))
    assert written < 8 * x.nbytes  # whole pages, on a disk
    assert growth_of(store, "x").capacity < 2 * len(x)


def test_without_a_move_addresses_stay(store: pmstore.Store) -> None:
    made(store, 3)
    first = store["x"]
    view = first[1:]
    x = store.append("x", rows(3, 1))
    assert address_of(x) == address_of(first) and len(first) == 3
    first[0] = -1
    view[0] = -2
    assert x[0, 0] == -1 and x[1, 0] == -2
    store.commit()
    first[2] = -3  # an array of the old length is live, too
    store.commit()
    store.rollback()
    assert x[2, 0] == -3
    store.close()
    assert not first.flags.writeable and not x.flags.writeable


@pytest.mark.parametrize("rest", [None, 500])
def test_changes_before_a_move_move_too(store: pmstore.Store, rest: int | None) -> None:
    made(store, 100, rest)
    old = store["x"]
    store.resize("x", 60)
    store.commit()
    short = store["x"]
    view = short[10:]
    short[3] = -1
    view[0] = -2
    moved = store.append("x", rows(60, 440))
    if rest is None:
        assert address_of(moved) != address_of(short)
        for array in (short, old):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
        view[1] = -3  # of a view this is no error: the change is lost
    assert moved[3, 0] == -1 and moved[10, 0] == -2 and len(moved) == 500
    assert moved[11, 0] == 55
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        store.commit()
        store["n"] = 1
        store.commit()
    assert [str(one.message)[:13] for one in told] == ["'x' has moved"] * (rest is None)
    assert all(one.category is pmstore.LostUpdateWarning and one.filename == __file__ for one in told)
    assert np.array_equal(store["x"], moved) and store.check().ok


def test_a_warning_that_is_an_error_loses_nothing(open_store: Any) -> None:
    with open_store() as store:
        made(store, 100)
        store.commit()
        view = store["x"][:1]
        store["important"] = 1
        store.append("x", rows(100, 3000))
        view[0] = 9
        with warnings.catch_warnings(), pytest.raises(pmstore.LostUpdateWarning):
            warnings.simplefilter("error")
            store.close()
    with open_store() as store:
        assert store["important"] == 1 and np.array_equal(store["x"], rows(0, 3100))


def test_assignment_writes_no_spare_rows(store: pmstore.Store) -> None:
    store.create_array("x", data=np.ones((500, 784)), maxshape=(5000, 784))
    store.commit()
    before = store.stats().bytes_written
    store["x"] = np.full((500, 784), 2.0)
    store.commit()
    assert store["x"].max() == 2 and store.stats().bytes_written - before < 3 * 500 * 784 * 8


def test_no_warning_without_a_change(store: pmstore.Store) -> None:
    """Old rows are not warned of if no view shows them, they changed before the move, or a rollback makes them live."""
    made(store, 100)
    view = store["x"][:]
    view[0] = 5
    store.append("x", rows(100, 100))
    with store.transaction():
        store["x"][1] = 7
    view[1] = 8  # after that commit nobody looks
    with store.transaction():
        store.append("x", rows(200, 500))
    old = store["x"][:]
    store.append("x", rows(700, 5000))
    old[0] = 9
    store.rollback()
    old[0] = 9
    store.commit()
    assert store["x"][0, 0] == 9
    store.append("x", rows(700, 5000))
    old[0] = 10
    with pytest.warns(pmstore.LostUpdateWarning, match="'x' has moved"):
        store.close()


def test_a_rollback_takes_an_append_back(store: pmstore.Store) -> None:
    made(store, 4)
    store.commit()
    old = store["x"]
    old[0] = -1
    longer = store.append("x", rows(4, 2))
    store.rollback()
    assert store["x"].shape == (4, 5) and np.array_equal(store["x"], rows(0, 4))
    assert np.array_equal(old, rows(0, 4)) and len(longer) == 6
    assert not longer[4:].any()  # the spare rows of the last commit, valid memory
    longer[4:] = 9  # what has no row is in no array
    old[1] = 2
    store.commit()
    assert np.array_equal(store["x"], old) and store.check().ok
    assert np.array_equal(store.append("x", rows(4, 1))[4], rows(4, 1)[0])
    assert not store.resize("x", 6)[5].any()


def test_a_rollback_takes_a_move_back(store: pmstore.Store) -> None:
    made(store, 100)
    store.commit()
    old = store["x"]
    old[0] = -1
    moved = store.append("x", rows(100, 50))
    assert address_of(moved) != address_of(old) and not old.flags.writeable
    again = store.append("x", rows(150, 3000))  # once more: the place between was never committed
    assert not moved.flags.writeable
    store.rollback()
    assert store["x"] is old and old.flags.writeable and np.array_equal(old, rows(0, 100))
    assert np.array_equal(again[100:], rows(100, 3050)) and np.array_equal(moved[100:], rows(100, 50))
    assert not again.flags.writeable and not moved.flags.writeable  # their rows are in no array
    old[0] = 7
    store.commit()
    assert store["x"][0, 0] == 7
    moved = store.append("x", rows(100, 9))
    store.commit()
    store.rollback()
    assert not old.flags.writeable and store["x"] is moved


def test_an_exception_takes_everything_back(store: pmstore.Store) -> None:
    with pytest.raises(KeyboardInterrupt), store.transaction():
        made(store, 4)
        store.append("x", rows(4, 1000))
        raise KeyboardInterrupt
    assert "x" not in store
    made(store, 4)
    store.commit()
    with pytest.raises(ZeroDivisionError), store.transaction():
        store.append("x", rows(4, 1000))
        store.resize("x", 2)
        store["x"][:] = 1
        raise ZeroDivisionError
    assert np.array_equal(store["x"], rows(0, 4)) and store.check().ok


def test_resize(store: pmstore.Store) -> None:
    x = made(store, 8)
    capacity = growth_of(store, "x").capacity
    assert store.resize("x", 8) is x
    short = store.resize("x", (3, 5))
    assert np.array_equal(short, rows(0, 3)) and address_of(short) == address_of(x)
    store.commit()
    longer = store.resize("x", 10)
    assert np.array_equal(longer[:3], rows(0, 3)) and not longer[3:].any()  # rows that are gone don't come back
    assert growth_of(store, "x").capacity == capacity
    longest = store.resize("x", np.int64(5000))
    assert np.array_equal(longest[:3], rows(0, 3)) and not longest[3:].any()
    assert store.resize("x", 0).shape == (0, 5) and store["x"].shape == (0, 5)
    store.commit()
    assert address_of(store.resize("x", 4000)) == address_of(longest)  # the room stays
    assert not store["x"].any() and store.check().ok


def test_a_bounded_array_never_moves(store: pmstore.Store) -> None:
    x = store.create_array("x", (0, 784), maxshape=(1000, 784))
    assert growth_of(store, "x") == (1000, 1000)
    first = address_of(x)
    for i in range(1000):
        x = store.append("x", np.full(784, float(i), "f4"))
        assert address_of(x) == first
    with pytest.raises(ValueError, match=r"maxshape \(1000, 784\)"):
        store.append("x", np.zeros(784))
    with pytest.raises(ValueError, match="1,001 rows"):
        store.resize("x", 1001)
    assert len(store["x"]) == 1000
    large = store.create_array("large", (0, 784), maxshape=(10**9, 784))  # too much to reserve
    assert growth_of(store, "large").capacity == 1 and large.shape == (0, 784)
    assert store.create_array("larger", (0, 4), maxshape=((1 << 63) - 1, 4)).shape == (0, 4)
    assert growth_of(store.group("g").create_array("x", 3, maxshape=(3,)).base and store, "g/x") == (3, 3)
    assert store.resize("g/x", 1).shape == (1,)
    with pytest.raises(ValueError, match="maxshape"):
        store.group("g").append("x", [1.0, 2.0, 3.0])


def test_in_a_group_and_with_one_axis(store: pmstore.Store) -> None:
    group = store.group("model")
    group.create_array("losses", 0, "f4", maxshape=None)
    with pytest.raises(TypeError, match="fixed shape"):
        group.append("losses", 1)
    del group["losses"]
    group.create_array("losses", 0, "f4", maxshape=(None,))
    assert group.append("losses", 3.25).tolist() == [3.25]
    assert group.append("losses", [1, 2]).tolist() == [3.25, 1, 2]
    assert group.append("losses", np.float64(0.1)).dtype == "f4"
    assert group.resize("losses", 2).tolist() == [3.25, 1] == store["model/losses"].tolist()


def test_require_array_finds_one_that_has_grown(open_store: Open) -> None:
    with open_store() as store:
        store.require_array("x", (0, 5), maxshape=(None, 5))
        store.append("x", rows(0, 7))
    with open_store() as store:
        x = store.require_array("x", (0, 5), maxshape=(None, 5))
        assert x.shape == (7, 5) and x is store["x"] is store.require_array("x", (7, 5))
        for arguments in ((0, 4), "f8", (None, 4)), ((0, 5), "f4", (None, 5)), ((0, 5), "f8", (9, 5)):
            shape, dtype, most = arguments
            with pytest.raises(pmstore.NameConflictError, match=r"maxshape \(None, 5\)"):
                store.require_array("x", shape, dtype, maxshape=most)
        with pytest.raises(pmstore.NameConflictError, match="maxshape"):
            store.require_array("x", (2, 5))
        store["plain"] = np.zeros((3, 5))
        with pytest.raises(pmstore.NameConflictError, match=r"shape \(3, 5\)"):
            store.require_array("plain", (3, 5), maxshape=(None, 5))


# ---- what is appended


@pytest.mark.parametrize(
    ("dtype", "given", "found"),
    [
        ("f8", [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ("f4", np.ones((2, 2), "f8"), [[1, 1], [1, 1]]),
        (">i2", [1, 2], [[1, 2]]),
        ("u1", [[1, 255]], [[1, 255]]),
        ("u8", [1, 2**63 + 5], [[1, 2**63 + 5]]),
        ("f8", [1, 2**70], [[1, 2.0**70]]),
        ("i8", np.ones((1, 2), "i4"), [[1, 1]]),
        ("?", [True, 0], [[True, False]]),
        ("c8", [1, 2j], [[1, 2j]]),
        ("U3", ["ab", "c"], [["ab", "c"]]),
        ("i2", np.array([1, -300]), [[1, -300]]),
        ("u1", np.array([1, 255], "u8"), [[1, 255]]),
        ("U3", np.array(["ab", "abc "[:3]], "U9"), [["ab", "abc"]]),
        ("S2", ["ab", "c"], [[b"ab", b"c"]]),
        ("M8[D]", [datetime.date(2026, 1, 2), None], np.array([["2026-01-02", "NaT"]], "M8[D]").tolist()),
        ("M8[D]", ["NaT", "NaT"], [[None, None]]),
        ("M8[D]", [1, 2], np.array([[1, 2]], "M8[D]").tolist()),
        ("m8[s]", [1, datetime.timedelta(0, 2)], np.array([[1, 2]], "m8[s]").tolist()),
        ("m8[s]", [1, 2], np.array([[1, 2]], "m8[s]").tolist()),
        ("M8[D]", np.array(["2026-01-02T00", "NaT"], "M8[h]"), np.array([["2026-01-02", "NaT"]], "M8[D]").tolist()),
        ("M8[D]", ["2026-01-02", "2026-01-03"], np.array([["2026-01-02", "2026-01-03"]], "M8[D]").tolist()),
        ("f8", np.asfortranarray([[1.0, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ("f8", np.arange(8.0).reshape(2, 4)[:, ::2], [[0, 2], [4, 6]]),
        ("f8", [], []),
        ("f8", np.zeros((0, 2)), []),
        ("f8", range(2), [[0, 1]]),
    ],
    ids=str,
)
@pytest.mark.parametrize("move", [False, True])
def test_what_is_converted(store: pmstore.Store, dtype: str, given: Any, found: Any, move: bool) -> None:
    x = store.create_array("x", (0, 2), dtype, maxshape=(None, 2))
    if move:
        x = store.resize("x", growth_of(store, "x").capacity)
    appended = store.append("x", given)
    assert appended.dtype == np.dtype(dtype) and appended[len(x) :].tolist() == found
    assert store.check().ok


@pytest.mark.parametrize(
    ("dtype", "given", "error", "text"),
    [
        ("i8", [1.0, 2.0], TypeError, "float64 can't be appended to 'x' of dtype int64 without loss"),
        ("i8", np.ones((2, 2)), TypeError, "astype"),
        ("f8", [1j, 2], TypeError, "complex128"),
        ("u1", [1, 256], OverflowError, "can't hold"),
        ("u8", [1, 2**64], OverflowError, "can't hold"),
        ("u8", [-1, 2**63], OverflowError, "can't hold"),
        ("f8", [1, 10**400], OverflowError, "can't hold"),
        ("u1", [-1, 2], OverflowError, "uint8"),
        ("?", [1, 2], OverflowError, "bool"),
        ("u1", np.array([1, 300], "u2"), OverflowError, "can't hold"),
        ("i4", [np.int64(1), np.int64(2**40)], OverflowError, "can't hold"),
        ("i4", np.array([1, 2**40]), OverflowError, "can't hold"),
        ("u8", np.array([1, -1]), TypeError, "without loss"),
        ("u8", [1, -1], OverflowError, "can't hold"),
        ("i8", [1, 2**63], OverflowError, "can't hold"),
        ("i8", [2**63, 2**64 - 1], OverflowError, "can't hold"),
        ("i8", np.array([1, 2**63], "u8"), OverflowError, "can't hold"),
        ("M8[D]", [datetime.datetime(2026, 1, 2), datetime.datetime(2026, 1, 2, 12)], TypeError, "without loss"),
        ("M8[D]", ["2026-01-02", "2026-01-02T12:30"], TypeError, "without loss"),
        ("M8[ns]", np.array(["2026-01-02", "3000-01-02"], "M8[D]"), TypeError, "without loss"),
        ("m8[s]", [datetime.timedelta(1), datetime.timedelta(0, 0, 1)], TypeError, "without loss"),
        ("U3", ["abc", "abcd"], TypeError, "<U4 can't be appended to 'x' of dtype <U3 without loss"),
        ("U3", np.array(["abc", "abcd"]), TypeError, "without loss"),
        ("S1", np.array([b"a", b"ab"]), TypeError, "without loss"),
        ("M8[D]", np.array(["2026-01-02T00", "2026-01-02T12"], "M8[h]"), TypeError, "without loss"),
        ("f8", ["a", "b"], TypeError, "<U1"),
        ("f4", [1, 1e300], OverflowError, "can't hold"),
        ("f4", np.array([1, 1e300]), OverflowError, "can't hold"),
        ("f2", [1, 70000], OverflowError, "can't hold"),
        ("f2", [1, 10**30], OverflowError, "can't hold"),
        ("f4", [1, 10**39], OverflowError, "can't hold"),
        ("c8", [1, complex(np.inf, 1e300)], OverflowError, "can't hold"),
        ("V4", [b"1234", b"123456"], TypeError, "takes 4 bytes at most"),
        ("c8", [1, 1e300j], OverflowError, "can't hold"),
        ("U8", ["a", None], TypeError, "takes text, not None"),
        ("U8", ["a", 1.5], TypeError, "takes text, not 1.5"),
        ("U8", np.array([1, 2]), TypeError, "int64"),
        ("V4", np.array([b"12345678"] * 2, "V8"), TypeError, "without loss"),
        ("f8", [None, 1], TypeError, "object"),
        ("f8", [1, 2, 3], ValueError, r"rows of shape \(3,\).*takes rows of shape \(2,\)"),
        ("f8", 1.0, ValueError, r"shape \(\)"),
        ("f8", np.zeros((1, 1, 2)), ValueError, r"\(1, 1, 2\)"),
        ("f8", [[1], [2, 3]], ValueError, "shape"),
        ("f8", np.ma.masked_array([1.0, 2.0], [True, False]), TypeError, "masked"),
    ],
    ids=str,
)
def test_what_is_refused(store: pmstore.Store, dtype: str, given: Any, error: type[Exception], text: str) -> None:
    x = store.create_array("x", (1, 2), dtype, maxshape=(None, 2))
    store.commit()
    with pytest.raises(error, match=text):
        store.append("x", given)
    assert store["x"] is x and len(x) == 1 and store.stats().dirty_bytes >= 0


def test_records(store: pmstore.Store) -> None:
    store.create_array("x", 0, [("a", "i4"), ("b", "f8", (2,))], maxshape=(None,))
    store.append("x", (1, [2, 3]))
    store.append("x", [(4, [5, 6]), (7, [8, 9])])
    x = store.append("x", store["x"][:1])
    assert x["a"].tolist() == [1, 4, 7, 1] and x["b"].tolist() == [[2, 3], [5, 6], [8, 9], [2, 3]]
    x = store.create_array("y", 2, ("f8", (3,)), maxshape=(None,))
    assert x.shape == (2, 3) and store.append("y", [1, 2, 3]).shape == (3, 3)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ([(2**40, "ab", (0.5, 1))], OverflowError, r"'x\[a\]', of dtype int32, can't hold"),
        ([(1, "ab", (0.5, 1)), (1.5, "ab", (0.5, 1))], TypeError, r"float64 can't be appended to 'x\[a\]'"),
        ((1, "abcd", (0.5, 1)), TypeError, r"'x\[t\]' of dtype <U3"),
        ([(1, "ab", (0.5, 300))], OverflowError, r"'x\[n\]\[n\]'"),
        ([(1, "ab")], TypeError, "is a tuple with the fields a, t, n, not"),
        ([1, 2], TypeError, "is a tuple with the fields"),
        ("ab", TypeError, "is a tuple with the fields"),
        (np.zeros(2), TypeError, "give them the same fields"),
        (np.zeros(2, [("a", "i4"), ("t", "U3")]), TypeError, "give them the same fields"),
        (np.ones(2, [("a", "f8"), ("t", "U3"), ("n", [("f", "f4"), ("n", "u1")])]), TypeError, r"'x\[a\]'"),
        (np.full(2, 300, [("a", "i4"), ("t", "U3"), ("n", [("f", "f4"), ("n", "u2")])]), OverflowError, r"\[n\]\[n\]"),
        (np.ones(2, [("a", "i4", 2), ("t", "U3"), ("n", [("f", "f4"), ("n", "u1")])]), TypeError, "another shape"),
    ],
    ids=str,
)
def test_records_that_are_refused(store: pmstore.Store, given: Any, error: type[Exception], text: str) -> None:
    x = store.create_array("x", 1, [("a", "i4"), ("t", "U3"), ("n", [("f", "f4"), ("n", "u1")])], maxshape=(None,))
    with pytest.raises(error, match=text):
        store.append("x", given)
    assert store["x"] is x and len(x) == 1


def test_fields_go_to_those_of_the_same_name(store: pmstore.Store) -> None:
    x = store.create_array("x", 0, [("a", "f8"), ("b", "i8"), ("n", [("p", "f8"), ("q", "f8")])], maxshape=(None,))
    other = np.array([((4, 3), 2, 1)], [("n", [("q", "f4"), ("p", "f4")]), ("b", "i2"), ("a", "f8")])
    for given in (other, list(other), other[0]):
        x = store.append("x", given)
    assert x.tolist() == [(1, 2, (3, 4))] * 3


def test_an_array_is_appended_to_itself(store: pmstore.Store) -> None:
    made(store, 2)
    for _ in range(10):
        x = store.append("x", store["x"])
    assert np.array_equal(x, np.tile(rows(0, 2), (1024, 1)))
    old = store.resize("x", 20)[10:]
    store.resize("x", 12)
    assert np.array_equal(store.append("x", old)[10:], np.concatenate([rows(0, 2), rows(0, 2)] * 3)[:12])


@pytest.mark.parametrize(
    ("shape", "arguments", "text"),
    [
        ((5, 4), {"maxshape": (None, None)}, "first axis only"),
        ((5, 4), {"maxshape": (None, 5)}, "first axis only"),
        ((5, 4), {"maxshape": (None,)}, "the same number of axes"),
        ((5, 4), {"maxshape": (None, 4, 1)}, "the same number of axes"),
        ((5, 4), {"maxshape": (4, 4)}, "smaller than the shape"),
        ((0, 4), {"maxshape": (0, 4)}, "room for a row"),
        ((5, 4), {"maxshape": (-1, 4)}, "smaller"),
        ((5, 4), {"maxshape": (None, 4), "order": "F"}, 'order "C" only'),
        ((5, 4), {"maxshape": (None, 4), "writeable": False}, "writeable=False"),
        ((5, 0), {"maxshape": (None, 0)}, "no bytes"),
        ((5,), {"maxshape": (None,), "dtype": "S0"}, "no bytes|length"),
        ((), {"maxshape": ()}, "without an axis"),
        ((0, 4), {"maxshape": (1 << 63, 4)}, "None stands for any"),
    ],
)
def test_bad_maxshapes(store: pmstore.Store, shape: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        store.create_array("x", shape, **arguments)
    for wrong in ("ab", 1.5, ((),), {"a"}):
        with pytest.raises(TypeError, match="maxshape is a tuple"):
            store.create_array("x", shape, maxshape=wrong)
    assert "x" not in store


def test_other_values_do_not_grow(open_store: Open) -> None:
    store = open_store()
    store.update({"plain": np.zeros(3), "value": 1})
    store.create_list("list")
    made(store, 1)
    for change in (store.append, store.resize):
        with pytest.raises(TypeError, match=r"fixed shape \(3,\).*maxshape"):
            change("plain", 1)
        with pytest.raises(TypeError, match="'value' is a int|an int"):
            change("value", 1)
        with pytest.raises(pmstore.UnknownNameError):
            change("missing", 1)
        with pytest.raises(pmstore.InvalidNameError):
            change("", 1)
    with pytest.raises(TypeError, match=r'store\["list"\].append'):
        store.append("list", 1)
    for wrong in (-1, (2, 4), (2,), (2, 5, 1), (-2, 5)):
        with pytest.raises(ValueError, match="negative|only its first axis"):
            store.resize("x", wrong)
    for wrong in (1.5, "2", None, (1.5, 5)):
        with pytest.raises(TypeError):
            store.resize("x", wrong)
    with pytest.raises(pmstore.OutOfSpaceError):
        store.resize("x", 1 << 48)
    with pytest.raises(pmstore.TooLargeError):
        store.resize("x", 1 << 60)
    assert np.array_equal(store["x"], rows(0, 1))
    with pytest.raises(pmstore.TooLargeError, match="dtype this long"):
        store.create_array("long", 1, [("n" * 800, "f8")], maxshape=(None,))
    store.close()
    with pytest.raises(pmstore.ClosedStoreError):
        store.append("x", rows(0, 1))
    with open_store(mode="r") as reader, pytest.raises(pmstore.ReadOnlyStoreError):
        reader.resize("x", 0)


def test_a_description_that_becomes_too_long(store: pmstore.Store) -> None:
    """Numbers of many digits take more bytes in a description."""
    for length in range(700, 760):
        try:
            store.create_array("x", 0, [("n" * length, "u1")], maxshape=(None,))
        except pmstore.TooLargeError:
            break
        store.resize("x", 100)
        try:
            assert len(store.resize("x", 1000)) == 1000
        except pmstore.TooLargeError:
            assert len(store["x"]) == 100
        del store["x"]
    else:
        raise AssertionError("no description was too long")


class Changing:
    """A row, or a length, whose first conversion changes the store."""

    def __init__(self, change: Callable[[], object], length: int = 0) -> None:
        self.change, self.length = change, length

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.convert()
        return np.full(5, 9.0)

    def __index__(self) -> int:
        self.convert()
        return self.length

    def convert(self) -> None:
        change, self.change = self.change, lambda: None
        change()


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("count", [2, 600])
def test_the_conversion_of_rows_appends_rows(store: pmstore.Store, many: bool, count: int) -> None:
    made(store, 3)
    row = Changing(lambda: store.append("x", rows(3, count)))
    x = store.append("x", [row, np.zeros(5)] if many else row)
    assert np.array_equal(x[: 3 + count], rows(0, 3 + count)) and (x[3 + count] == 9).all()
    assert len(x) == 4 + count + many and store["x"] is x
    y = store.resize("x", Changing(lambda: store.append("x", rows(0, count)), 4 + 3 * count))
    assert np.array_equal(y[: len(x)], x) and np.array_equal(y[len(x) : len(x) + count], rows(0, count))
    assert len(y) == 4 + 3 * count and not y[len(x) + count :].any()
    store.commit()
    assert store.check().ok


def test_the_conversion_of_rows_replaces_or_deletes_the_array(store: pmstore.Store) -> None:

    def replace() -> None:
        del store["x"]
        store.create_array("x", (1, 5), "f4", maxshape=(None, 5))

    for use in (lambda: store.append("x", [Changing(replace)]), lambda: store.resize("x", Changing(replace, 9))):
        made(store, 3)
        with pytest.raises(RuntimeError, match="'x' was replaced by another array while"):
            use()
        assert store["x"].dtype == "f4" and len(store["x"]) == 1
        del store["x"]
    made(store, 3)
    with pytest.raises(KeyError):
        store.append("x", [Changing(lambda: store.pop("x"))])
