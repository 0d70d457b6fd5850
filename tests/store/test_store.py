"""The store as a mapping of live arrays and values, over every medium."""

from __future__ import annotations

import copy
import dataclasses
import gc
import re
import sys
import warnings
from collections.abc import MutableMapping

import numpy as np
import pytest
import scipy.sparse

import pmstore
from pmstore._values.array import address_of


def test_the_readme_example(open_store):
    for _ in range(2):
        with open_store() as store:
            w = store.require_array("w", shape=(10, 784), dtype="f8")
            with store.transaction():
                w += 1.0
                store["epoch"] = store.get("epoch", 0) + 1
    with open_store(mode="r") as store:
        assert store["epoch"] == 2 and (store["w"] == 2).all()


def test_it_is_a_mapping(store):
    assert isinstance(store, MutableMapping)
    store.update(a=1, b=[2])
    assert dict(store) == {"a": 1, "b": [2]}
    assert list(store.items()) == [("a", 1), ("b", [2])]
    assert list(store.values()) == [1, [2]]
    assert store.setdefault("a", 5) == 1
    assert store.pop("a") == 1
    assert store.popitem() == ("b", [2])
    with pytest.raises(KeyError):
        store.popitem()
    store["x"] = 1
    store.clear()
    assert len(store) == 0 and store


def test_identity(store, open_store):
    other = open_store("other.pm")
    store["a"] = other["a"] = 1
    assert store != other and store == store and store != {"a": 1}
    assert len({store, other}) == 2
    assert store.store is store


def test_it_starts_small_and_grows(medium, open_store):
    store = open_store()
    path = medium.directory / "store.pm"
    assert path.stat().st_size <= 1 << 20
    x = store.create_array("x", 1000)
    address = address_of(x)
    x[:] = 1
    for i in range(5):
        store.create_array(f"big{i}", 2_000_000)[:] = i
        store.commit()
    assert address_of(x) == address and store["x"] is x
    x += 1
    store.close()
    assert path.stat().st_size > 80_000_000
    store = open_store(mode="r")
    assert (store["x"] == 2).all() and all((store[f"big{i}"] == i).all() for i in range(5))
    assert store.check().ok


def test_live_arrays_are_one_object(store):
    w = store.create_array("w", (3, 4))
    assert store["w"] is w and type(w) is np.ndarray and w.flags.writeable and not w.any()
    view = w[1]
    del w
    gc.collect()
    view[:] = 7
    assert (store["w"][1] == 7).all()
    assert store["w"] is view.base


def test_no_code_runs_when_an_array_goes(store):
    """An interrupt that came in it would be lost."""
    store["a"], store["s"] = np.zeros(3), scipy.sparse.eye_array(3).tocsr()
    found = [store["a"], store["s"]]
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(f"{frame.f_code.co_name} {event}"))
    found.clear()
    sys.setprofile(None)
    assert not [call for call in calls if call.endswith(" call")]
    assert store["a"].size == 3


def test_arrays_that_are_gone_are_forgotten(store):
    kept = [store.create_array(f"kept/{i}", 3) for i in range(100)]
    for i in range(500):
        store[f"gone/{i}"] = np.zeros(3)
        store[f"gone/{i}"]
    assert all(store[f"kept/{i}"] is array for i, array in enumerate(kept))
    assert len(store._catalog._live._found) < 400


def test_changes_are_found_without_a_living_array(open_store):
    with open_store() as store:
        store.create_array("w", 5)
        store.commit()
        store["w"][:] = 3
        gc.collect()
        store.commit()
        store["w"] += 1
    with open_store(mode="r") as store:
        assert (store["w"] == 4).all()


def test_assigning_copies_into_the_live_array(store):
    w = store.create_array("w", (3, 4))
    store["w"] = np.arange(12.0).reshape(3, 4)
    assert store["w"] is w and w[2, 3] == 11
    store["w"] += 1
    assert store["w"] is w and w[2, 3] == 12
    store["w"] = w[::-1]  # overlapping, and of no order of its own
    assert store["w"] is w and w[0, 3] == 12
    store["w"] = w
    assert store["w"] is w


@pytest.mark.parametrize(
    "value", [np.zeros((4, 3)), np.zeros((3, 4), "f4"), np.zeros((3, 4), ">f8"), np.zeros((4, 3)).T, 5], ids=range(5)
)
def test_assigning_something_else_takes_the_name(store, value):
    w = store.create_array("w", (3, 4), fill_value=1)
    store.commit()
    store["w"] = value
    assert store["w"] is not w
    w += 1  # detached: its own memory
    store.commit()
    assert np.array_equal(store["w"], value) and (w == 2).all()


def test_what_a_user_did_to_the_array_object_does_not_matter(store):
    w = store.create_array("w", (3, 4))
    w.flags.writeable = False
    store["w"] = np.ones((3, 4))
    assert (w == 1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        w.shape = (12,)
    again = store["w"]
    assert again.shape == (3, 4) and np.shares_memory(again, w)
    again[0, 0] = 5
    assert w[0] == 5
    r = store.create_array("r", 3, [("a", "i4")])
    store.create_array("s", 3, [("a", "i4")])
    r.dtype.names = ("b",)
    assert store["r"].dtype.names == store["s"].dtype.names == ("a",)


def test_a_deleted_array_is_detached(open_store):
    store = open_store()
    w = store.create_array("w", 1000, fill_value=5)
    store.commit()
    del store["w"]
    store.commit()
    others = [store.create_array(f"o{i}", 1000, fill_value=i) for i in range(20)]
    store.commit()
    assert (w == 5).all() and "w" not in store  # its space isn't reused while it lives
    w[:] = 9
    store.commit()
    assert all((o == i).all() for i, o in enumerate(others))
    v = store.pop("o3")
    assert (v == 3).all() and "o3" not in store
    del w, v, others
    gc.collect()
    store.commit()
    assert store.check().ok


def test_space_of_deleted_arrays_is_used_again(medium, open_store):
    store = open_store()
    for i in range(30):
        store["x"] = np.full(100_000 + i, float(i))
        store.commit()
    assert store.stats().file_size < 8_000_000
    assert store.check().ok


def test_create_array(store):
    assert store.create_array("f", (2, 3), "f4", order="F").flags.f_contiguous
    assert (store.create_array("filled", (5000,), "i2", fill_value=-3) == -3).all()
    assert store.create_array("text", 3, "U5").tolist() == ["", "", ""]
    assert store.create_array("words", 3, "U5", fill_value="ab").tolist() == ["ab"] * 3
    assert store.create_array("time", 2, "M8[D]", fill_value="2020-01-01")[1] == np.datetime64("2020-01-01")
    assert store.create_array("rows", 2, [("a", "i4"), ("b", "f8")], fill_value=(1, 2.5)).tolist() == [(1, 2.5)] * 2
    assert store.create_array("0-d", (), fill_value=7)[()] == 7
    assert store.create_array("empty", (0, 5)).shape == (0, 5)
    assert store.create_array("np.int", np.int64(4)).shape == (4,)
    assert store.create_array("broadcast", (2, 3), fill_value=np.arange(3)).tolist() == [[0, 1, 2]] * 2
    with pytest.raises(ValueError, match="taken"):
        store.create_array("f", 3)


@pytest.mark.parametrize("dtype", ["U", "S", "V0", "<U0", [("a", "i4"), ("b", "S")]], ids=str)
def test_text_without_a_length(store, dtype):
    """numpy's own np.zeros makes it "U1"; a store would lose every character, in silence."""
    for use in (store.create_array, store.require_array):
        with pytest.raises(TypeError, match=r"give a length, as '[USV]20'"):
            use("new", 3, dtype)
    assert "new" not in store
    store["existing"] = np.zeros(3, [("b", "S0")])
    assert store.require_array("existing", 3, [("b", "S0")]).tolist() == [(b"",)] * 3


def test_require_array(store):
    w = store.require_array("w", (3, 4), "f4", fill_value=2)
    assert store.require_array("w", (3, 4), np.float32) is w
    for shape, dtype in (((4, 3), "f4"), ((3, 4), "f8"), ((3, 4), ">f4")):
        with pytest.raises(ValueError, match=r"\(3, 4\) and dtype float32"):
            store.require_array("w", shape, dtype)
    store["v"] = 5
    with pytest.raises(ValueError, match="'v' is a int"):
        store.require_array("v", 3)


def test_data_sets_are_read_only(open_store):
    data = np.arange(10_000.0)
    with open_store() as store:
        x = store.create_array("x", data.shape, data.dtype, fill_value=data, writeable=False)
        assert np.array_equal(x, data)
        with pytest.raises(ValueError):
            x[0] = 1
        with pytest.raises(ValueError):
            x.flags.writeable = True
        with pytest.raises(ValueError):
            x.base.flags.writeable = True
        store.commit()
        assert store.require_array("x", data.shape) is x
    with open_store() as store:
        assert not store["x"].flags.writeable and np.array_equal(store["x"], data)
        old = store["x"]
        store["x"] = data + 1  # a new array takes the name
        assert (old == data).all() and (store["x"] == data + 1).all() and not store["x"].flags.writeable
        store["x"] = np.zeros((2, 2), "f4")
        assert not store["x"].flags.writeable
        store.create_array("w", 3)
        assert store.require_array("x", (2, 2), "f4", writeable=False) is store["x"]
        with pytest.raises(pmstore.NameConflictError, match="writeable=False is asked for, and 'w' can be written"):
            store.require_array("w", 3, writeable=False)
        del store["x"]
        store["x"] = data
        assert store["x"].flags.writeable


def test_setdefault_gives_the_stored_array(store):
    mine = np.ones(3)
    stored = store.setdefault("w", mine)
    assert stored is not mine and store["w"] is stored
    assert store.setdefault("w", np.zeros(3)) is stored and (stored == 1).all()


def test_release(store):
    w = store.create_array("w", 100_000)
    x = store.create_array("x", 100_000)
    store["v"] = 1
    w[:] = x[:] = 3
    store.commit()
    w[:5] = 4
    store.release("w")
    store.release()
    assert (w[:5] == 4).all() and (w[5:] == 3).all() and (x == 3).all()
    x[:] = 5
    store.commit()
    assert (store["x"] == 5).all() and store.check().ok
    with pytest.raises(TypeError, match="'v' is not an array but a int"):
        store.release("v")
    with pytest.raises(KeyError):
        store.release("nothing")


def test_each_figure_is_explained():
    text = pmstore.Stats.__doc__
    assert not [one.name for one in dataclasses.fields(pmstore.Stats) if not re.search(rf"\b{one.name}\b", text)]


def test_stats(medium, store):
    before = store.stats()
    assert before.medium == medium.name == store.media
    w = store.create_array("w", 1000)
    w[:] = 1
    store.commit()
    w[:] = 2
    store.commit()
    after = store.stats()
    assert after.sequence == store.sequence == before.sequence + 2
    assert after.commits == before.commits + 2
    assert after.dirty_bytes >= 8000 and after.bytes_written > before.bytes_written
    assert after.fences + after.syncs > before.fences + before.syncs
    assert after.buffers == 1 and after.keys == 1
    store.commit()  # nothing changed
    assert store.sequence == after.sequence


def test_repr(store):
    store["model/w"] = np.zeros((3, 4))
    store["epoch"] = 5
    store.create_list("log").append("x")
    for text in (str(store), store._repr_html_()):
        assert "(3, 4) float64" in text and "epoch" in text and "96 B" in text
    assert repr(store).endswith(": 3 names>")
    assert "epoch" not in str(store.group("model")) and "(3, 4)" in store.group("model")._repr_html_()
    store.close()
    assert "closed" in repr(store)


def test_check_names_what_is_damaged(medium, open_store):
    path = medium.directory / "store.pm"
    pattern = np.frombuffer(b"a rare pattern that stands nowhere else ", "S8").copy()
    with open_store() as store:
        rows = store.create_array("model/rows", (1000, 64))
        rows[700] = 5
        rows[700, :5] = pattern.view("f8")
        items = store.create_list("items")
        items.extend(["x", b"something long " * 200])
        store["big"] = "a long text indeed " * 100
        report = store.check()
        assert report.ok and len(report) == 0 and str(report) == "valid"
    for needle, name, rows in (
        (b"rare pattern", "model/rows", True),
        (b"thing long some", "items[1]", False),
        (b"text indeed a", "big", False),
    ):
        good = path.read_bytes()
        bad = bytearray(good)
        at = bad.index(needle, len(bad) // 4)
        while (again := bad.find(needle, at + 1)) >= 0 and again - at > 100_000:  # in the log's leftovers
            at = again
        bad[at] ^= 1
        path.write_bytes(bad)
        with open_store(mode="r") as store:
            report = store.check()
            assert not report.ok and len(report) == 1
            assert report[0].name == name and repr(name) in str(report)
            if rows:
                assert 700 in report[0].rows and len(report[0].rows) <= 9
            else:
                with pytest.raises(pmstore.CorruptStoreError, match=name.split("[")[0]):
                    store["big"] if name == "big" else store["items"][1]
        with pytest.raises(pmstore.CorruptStoreError, match=name.split("[")[0]):
            open_store(mode="r", verify=True)
        path.write_bytes(good)
    assert open_store(mode="r", verify=True).check().ok


# ---- closing


def test_arrays_outlive_their_store(open_store):
    store = open_store()
    w = store.create_array("w", 1000, fill_value=3)
    view = w[5:]
    store.close()
    store.close()
    assert store.closed
    assert (w == 3).all() and not w.flags.writeable
    with pytest.raises(ValueError):
        w[0] = 1
    view[:] = 9  # without effect on the file, and no signal
    assert w[5] == 9
    with open_store(mode="r") as again:
        assert (again["w"] == 3).all()


def test_a_closed_store(store):
    store["a"] = 1
    items = store.create_list("items")
    group = store.group("g")
    iterator = iter(store)
    next(iterator)
    transaction = store.transaction()
    store.close()
    for use in (
        lambda: store["a"],
        lambda: store.get("a"),
        lambda: "a" in store,
        lambda: len(store),
        lambda: iter(store),
        lambda: store.__setitem__("a", 1),
        lambda: store.__setitem__("a", np.zeros(3)),
        lambda: store.__delitem__("a"),
        lambda: store.clear(),
        lambda: store.create_array("b", 3),
        lambda: store.require_array("b", 3),
        lambda: store.create_list("b"),
        lambda: store.commit(),
        lambda: store.rollback(),
        lambda: store.sequence,
        lambda: store.stats(),
        lambda: store.check(),
        lambda: store.release(),
        lambda: store.__enter__(),
        lambda: transaction.__enter__(),
        lambda: store.transaction().__enter__(),
        lambda: items.append(1),
        lambda: len(items),
        lambda: group["a"],
        lambda: list(group),
    ):
        with pytest.raises(pmstore.ClosedStoreError):
            use()
    assert not store.in_transaction
    with pytest.raises(pmstore.ClosedStoreError):
        list(iterator)


def test_with_commits_or_rolls_back(open_store):
    with open_store() as store:
        store["a"] = 1
    with pytest.raises(ZeroDivisionError):
        with open_store() as store:
            store["a"] = 2
            raise ZeroDivisionError
    assert store.closed
    with open_store() as store:
        assert store["a"] == 1


def test_close_commits(open_store):
    store = open_store()
    store["a"] = 1
    store.close()
    assert open_store()["a"] == 1


def test_a_dropped_store_drops_what_is_pending(medium):
    path = medium.directory / "store.pm"
    store = pmstore.open(path)
    w = store.create_array("w", 10, fill_value=1)
    store.commit()
    w[:] = 2
    store["late"] = 1
    with pytest.warns(pmstore.UncommittedChangesWarning, match=r"opened at .*test_store.py:\d+, .* of 2 names"):
        del store
        gc.collect()
    assert (w == 2).all() and not w.flags.writeable
    with pmstore.open(path) as store:
        assert (store["w"] == 1).all() and "late" not in store


def test_interpreter_exit_drops_what_is_pending(medium, child):
    path = medium.directory / "store.pm"
    process = child(
        """
        import sys, pmstore
        store = pmstore.open(sys.argv[1])
        w = store.create_array("w", 10)
        store.commit()
        w[:] = 2
        """,
        path,
    )
    _, error = process.process.communicate(timeout=60)
    assert process.process.returncode == 0 and "of 1 name since" in error
    assert error.startswith("<string>:3: UncommittedChangesWarning: "), error
    with pmstore.open(path) as store:
        assert not store["w"].any()


def test_interpreter_exit_copies_no_array(medium, child):
    path = medium.directory / "store.pm"
    with pmstore.open(path) as store:
        store.create_array("data", 8 << 20, fill_value=1.0, writeable=False)
    process = child(
        """
        import atexit, re, sys

        def private():
            return int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

        def end():  # after pmstore's own, which was registered later
            print(store.closed, private() - before < 20_000, data[-1])

        atexit.register(end)
        import pmstore
        store = pmstore.open(sys.argv[1])
        data = store["data"]
        data.sum()
        before = private()
        """,
        path,
    )
    assert process.end() == "True True 1.0\n"


def test_a_store_is_copied_as_itself(store):
    group = store.group("g")
    for use in (copy.copy, copy.deepcopy):
        assert use(store) is store and use(group) is group
    assert copy.deepcopy({"store": [store]})["store"][0] is store
    assert store.__sklearn_clone__() is store


def test_an_equal_dtype_that_is_another_one(store):
    """Records, and padding as in C, make no difference to numpy's ==."""
    fields = [("a", "i4"), ("b", "f8")]
    plain = np.array([(1, 2.0)], fields)
    store["x"] = plain
    for dtype in (np.dtype((np.record, fields)), np.dtype(fields)):
        store["x"] = plain.astype(dtype)
        assert store["x"].dtype.type is dtype.type and store["x"].tolist() == [(1, 2.0)]
    loose = np.dtype({"names": ["a", "b"], "formats": ["i4", "f8"], "offsets": [0, 8]})
    assert loose == np.dtype(fields, align=True)
    store["y"] = plain.astype(loose)
    store["y"] = plain.astype(np.dtype(fields, align=True))
    assert store["y"].dtype.isalignedstruct
