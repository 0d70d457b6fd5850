"""`transaction(only=...)`: a declared write set. Kept, violated, nested, and under every tracker."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import pmstore
from pmstore._values.array import address_of
from tests.conftest import LONGER
from tests.core.test_trackers import PAGE, Open, assert_committed, committed, fill_up, tracked, tracker  # noqa: F401
from tests.support.places import offset_of

TRACKERS = ["learned", "uffd", "pagemap", "compare"]
pytestmark = [  # the declared write set does not depend on the medium, so make long has the other pairs
    pytest.mark.usefixtures("medium", "tracker"),
    pytest.mark.parametrize(
        ("medium", "tracker"),
        [
            *(("memory", name) for name in TRACKERS),
            ("file", "learned"),
            *(pytest.param("file", name, marks=pytest.mark.long) for name in TRACKERS[1:]),
        ],
        indirect=True,
    ),
]


@pytest.mark.longer
def test_what_is_declared_is_committed(open_store: Open) -> None:
    store = open_store()
    w = tracked(store)
    small = store.create_array("small", 5)
    f = store.create_array("f", (40, 600), order="F")
    structured = store.create_array("s", 50, [("a", "f8"), ("b", "i4")])
    store.commit()
    for k in range(1 + LONGER):
        for view in (
            w[17],
            w[5:9],
            w[::-1][3:5],
            w[10:200:30, 7],
            w.T[3],
            f[:, 2],
            f[1:3, 4:9],
            small,
            small[1:2],
            structured["b"][3:9],
            structured[4:5],
            w[299, 511:],
            w.reshape(-1)[-1:],
        ):
            with store.transaction(only=[view]):
                view[...] = np.ones((), view.dtype)[()] if view.dtype.names else k + 2
                store["k"] = k
            assert_committed(store)
    with store.transaction(only=[w[3], f[:, 9]]):
        w[3] = f[:, 9] = -1
        store["new"] = np.arange(3000.0)  # a new array
        store["object"] = pmstore.Parts("lib.Thing", {"x": np.zeros(3000), "k": 1})
        store["small"] = np.full(5, 9.0)  # in place, but by the store's own hand
        store["f"] = np.full((40, 600), 3.0, order="F")
    assert_committed(store)
    with store.transaction(only=[]):  # in place, but assigned
        store["small"] += 1
        store["f"] = np.multiply(store["f"], 2, out=store["f"])
        store["object"]["x"][7] = 7
        store["object"] = store["object"]
    assert_committed(store)
    assert store.read("object")["x"][7] == 7
    with store.transaction(only=[]):
        store["k"] = "arrays have not changed"
        del store["new"]
    assert_committed(store)
    assert store.check().ok


def test_what_is_not_declared_comes_later(open_store: Open) -> None:
    store = open_store()
    w = tracked(store)
    x = tracked(store, "x")
    for k in range(4):
        w[100] = -k - 1
        x[7] = -k - 1
        gone = store["x"]
        with store.transaction(only=[w[3]]):
            w[3] = k + 10.5
        left = committed(store)
        assert (left["w"][3] == k + 10.5).all() and (left["w"][100] != -k - 1).any() and (left["x"][7] != -k - 1).any()
        del gone
        if k % 2:
            del x
        store.commit()
        assert_committed(store)
        x = store["x"]
        assert (x[7] == -k - 1).all()


def test_what_is_beside_a_declared_range_comes_later(open_store: Open) -> None:
    """A row is a page. A range at the beginning of the array, or at its end, is not all of it. Pages are noted in words
    of 64 bits: one range has all pages of a word but the last."""
    store = open_store()
    w = tracked(store)
    word = -(offset_of(store, "w") // PAGE) % 64
    ranges = [[(0, 1)], [(3, 5)], [(0, 299)], [(1, 300)], [(299, 300)], [(word, word + 63), (290, 300)]]
    for k, declared in enumerate(ranges):
        rows = [row for start, stop in declared for row in range(start, stop)]
        others = [row for pair in declared for row in (pair[0] - 1, pair[1]) if 0 <= row < len(w)]
        before = committed(store)["w"]
        with store.transaction(only=[w[slice(*pair)] for pair in declared]):
            w[rows] = w[others] = k + 0.5
        left = committed(store)["w"]
        assert (left[rows] == k + 0.5).all() and np.array_equal(left[others], before[others])
        store.commit()
        assert_committed(store)


def test_what_an_earlier_transaction_declared_is_not_declared_any_more(open_store: Open) -> None:
    """A row is a page, and this one is between those that are declared later."""
    store = open_store()
    store["before"] = np.zeros((310, 512))
    w = tracked(store)
    with store.transaction(only=[w[50]]):
        w[50] = 0.5
    with store.transaction(only=[w[3], w[100]]):
        w[3] = w[50] = w[100] = 1.5
    left = committed(store)["w"]
    assert (left[[3, 100]] == 1.5).all() and (left[50] == 0.5).all()
    store.commit()
    assert_committed(store)


def test_I10_an_array_that_died_is_not_forgotten(open_store: Open) -> None:
    """Released after it was written, while commits of declared arrays scan others."""
    store = open_store()
    w = tracked(store)
    x = tracked(store, "x")
    x[50] = 1.25
    del x
    for k in range(3):
        with store.transaction(only=[w[k]]):
            w[k] = k
    store.commit()
    store.close()
    store = open_store()
    assert (store["x"][50] == 1.25).all()


def test_a_rollback_takes_everything_back(open_store: Open) -> None:
    store = open_store()
    w = tracked(store)
    old = w.copy()
    with pytest.raises(KeyError), store.transaction(only=[w[3]]):
        w[3] = w[200] = 5
        raise KeyError
    assert np.array_equal(w, old)
    w[200] = 5
    with store.transaction(only=[w[3]]):
        w[3] = 5
    store.rollback()
    old[3] = 5
    assert np.array_equal(w, old)
    w[201] = 6
    store.commit()
    assert_committed(store)


def test_nested_declarations(open_store: Open) -> None:
    store = open_store()
    w = tracked(store)
    with store.transaction(only=[w[3]]):
        with store.transaction(only=[w[60]]):
            w[60] = 1.5
        w[3] = 1.5
        w[200] = 1.5
    left = committed(store)["w"]
    assert (left[3] == 1.5).all() and (left[60] == 1.5).all() and not (left[200] == 1.5).any()
    with store.transaction(only=[w[3]]):
        with store.transaction():
            w[100] = 2.5
        w[3] = 2.5
    assert_committed(store)
    with store.transaction(), store.transaction(only=[]):
        w[101] = 2.5
    assert_committed(store)
    with store.transaction(only=[]):
        pass
    w[102] = 2.5
    with store.transaction():  # the declaration ended with its transaction
        pass
    assert_committed(store)


def test_a_commit_of_declared_arrays_that_fails(open_store: Open) -> None:
    store = open_store(max_size=1 << 21)
    w = tracked(store, shape=(150, 512))
    w[9] = 0.5
    with pytest.raises(pmstore.OutOfSpaceError), store.transaction(only=[w[3]]):
        w[3] = 0.25
        for k in range(2000):
            store[f"filler/{k}"] = bytes(2500)
    store.group("filler").clear()
    store.commit()
    assert_committed(store)


def test_I10_a_declaration_forgets_nothing_that_a_failed_commit_found(open_store: Open) -> None:
    store = open_store(max_size=8 << 20)
    w = tracked(store, shape=(700, 512))
    old = w.copy()
    w[:] = -old - 1
    fill_up(store)
    with pytest.raises(pmstore.OutOfSpaceError):
        store.commit()
    store.group("filler").clear()
    w[:400] = old[:400]
    w[401:] = old[401:]
    with store.transaction(only=[w[3]]):
        w[3] = 0.5
    store.commit()
    assert_committed(store)


def test_I10_what_a_failed_commit_declared_is_in_the_next_one(open_store: Open) -> None:
    """Pages declared several times, far apart, until a commit has taken them; and no longer."""
    store = open_store(max_size=1 << 22)
    w, x = tracked(store, shape=(150, 512)), tracked(store, "x", shape=(150, 512))
    with pytest.raises(pmstore.OutOfSpaceError), store.transaction(only=[w[140], w[3], w[70]]):
        w[3] = w[70] = w[140] = 0.25
        for k in range(4000):
            store[f"filler/{k}"] = bytes(2500)
    store.group("filler").clear()
    for k, row in enumerate((140, 20, 70)):
        with store.transaction(only=[x[row]]):
            x[row] = 0.5
        assert_committed(store)
        w[3] = w[140] = x[row] = -1 - k
        with store.transaction(only=[x[149], x[0]]):
            x[0] = x[149] = k
        left = committed(store)
        assert (left["x"][[0, 149]] == k).all() and (left["x"][row] != -1 - k).any()
        assert (left["w"][3] != -1 - k).any() and (left["w"][140] != -1 - k).any()
        store.commit()
        assert_committed(store)


def test_what_a_deleted_array_declared_is_not_in_later_commits(open_store: Open) -> None:
    """An append declares the whole array. If it is new and deleted at once, nothing is left to be committed."""
    store = open_store()
    grown = store.create_array("grown", (0, 512), np.float64, maxshape=(64, 512))
    place = address_of(grown)
    store.append("grown", np.ones((60, 512)))
    del grown, store["grown"]
    gc.collect()
    for i in range(200):  # sweeps the list of arrays in memory
        store.create_array(f"filler/{i}", 10)
        del store[f"filler/{i}"]
    store.commit()
    x = tracked(store, "x", shape=(64, 512))
    assert address_of(x) == place
    with store.transaction(only=[x[0], x[50]]):
        x[0] = x[5] = x[40] = x[50] = 0.25
    found = committed(store)["x"]
    assert (found[[0, 50]] == 0.25).all() and (found[[5, 40]] != 0.25).all()


def test_what_may_be_declared(open_store: Open, tmp_path: object) -> None:
    store = open_store()
    w = tracked(store)
    other = open_store("other.pm").create_array("w", 1000)
    deleted = store.create_array("deleted", 1000)
    del store["deleted"]
    for bad in (np.zeros(10), w[[1, 2]], other, other[3:], deleted, w[3].copy()):
        with pytest.raises(ValueError, match="neither a live array of this store nor a view"):
            store.transaction(only=[w[0], bad])
    for wrong in (w, w[3]):
        with pytest.raises(TypeError, match=r"only=\[array\]"):
            store.transaction(only=wrong)
    for wrong in (["w"], [w, None], [1.0], [w[0, 0]]):
        with pytest.raises(TypeError, match="only is a list of arrays of the store, or views of them"):
            store.transaction(only=wrong)
    fresh = store.create_array("fresh", (3, 4))
    constant = store.create_array("constant", 5, fill_value=3, writeable=False)
    with store.transaction(only=(view for view in (w[0:0], fresh[1], constant, w[:, ::-2], np.zeros(0)))):
        fresh[1] = 4
        w[7, 3] = 4
    assert_committed(store)
    store.close()
    with pytest.raises(pmstore.ClosedStoreError):
        store.transaction(only=[w[3]])
    with pytest.raises(TypeError, match="only is a list of arrays of the store, or views of them"):
        store.transaction(only=["w"])
    nothing = store.transaction(only=[w[0:0]])
    with pytest.raises(pmstore.ClosedStoreError), nothing:
        raise AssertionError


def test_debugging_names_an_array_with_two_slots(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMSTORE_DEBUG", "1")
    store = open_store()
    w, x = tracked(store), tracked(store, "x", shape=(400, 512))  # 1.6 MB
    for value in range(5):  # from the third commit on it has two; the last one is in either of them
        x[:] = value
        store.commit()
        with pytest.raises(pmstore.TransactionError, match=r"element \[7, 33\] of 'x' did"):
            with store.transaction(only=[w[3]]):
                w[3] = value + 0.5
                x[7, 33] = 0.5
        store.rollback()
        assert (x == value).all()
    assert store.stats().bytes_direct > 2 * x.nbytes


def test_debugging_names_the_violation(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMSTORE_DEBUG", "1")
    store = open_store()
    w = tracked(store)
    f = store.create_array("group/f", (40, 600), order="F")
    store.commit()
    sequence = store.sequence
    with pytest.raises(pmstore.TransactionError, match=r"elements \[4, 2\] to \[4, 3\] of 'w' did"):
        with store.transaction(only=[w[3], w[5]]):
            w[3] = w[5] = 8.5
            w[4, 2:4] = 8.5
    assert store.sequence == sequence and (w[4, 2:4] == 8.5).all()
    store.commit()  # it was pending
    assert_committed(store)
    with pytest.raises(pmstore.TransactionError, match=r"element \[7, 33\] of 'group/f' did"):
        with store.transaction(only=[w[3]]):
            w[3] = 9.5
            f[7, 33] = 1
    store.rollback()
    assert (w[3] == 8.5).all() and not f.any()
    small, bytes_ = store.create_array("small", 5), store.create_array("bytes", 3 * 4096, "u1")
    store.commit()
    for first in (4096, 8191, 8192):
        with pytest.raises(pmstore.TransactionError, match=rf"element \[{first}\] of 'bytes' did"):
            with store.transaction(only=[w[3]]):
                bytes_[first] = 1
        store.rollback()
    for beside in (99, 110):  # the element before a declared range, and the one behind it
        with pytest.raises(pmstore.TransactionError, match=rf"element \[{beside}\] of 'bytes' did"):
            with store.transaction(only=[bytes_[100:110]]):
                bytes_[[beside, 105]] = 1
        store.rollback()
    for second, told in ((74, r"elements \[10\] to \[74\]"), (75, r"element \[10\]")):  # a line of 64 bytes in between
        with pytest.raises(pmstore.TransactionError, match=f"{told} of 'bytes' did"):
            with store.transaction(only=[w[3]]):
                bytes_[[10, second]] = 1
        store.rollback()
    with pytest.raises(pmstore.TransactionError, match=r"elements \[1\] to \[2\] of 'small' did"):
        with store.transaction(only=[w[3]]):
            small[1:3] = 1
    store.rollback()
    with store.transaction(only=[w[3], f[:, 4:9]]):
        w[3] = 10
        f[20, 5] = 10
        store["w"] = w * 1.0 + 1  # the store's own doing is no breach
        store["small"] = np.arange(5.0)
    assert_committed(store)
    with store.transaction(only=[w[3]]):
        pass
