"""Derived arrays: what `Store.derive` declares, when it is computed, and what of it is stored."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import random
import weakref

import numpy as np
import pytest

import pmstore
from pmstore._catalog.declaration import Declaration
from pmstore._catalog.kinds import DERIVED, INLINE
from pmstore._core import Entry
from tests.support.derivations import CALLS, columns, doubled, table

one_medium = pytest.mark.parametrize("medium", ["memory"], indirect=True)


@pytest.fixture(autouse=True)
def calls():
    CALLS.clear()
    return CALLS


class Methods:
    @staticmethod
    def tripled(x):
        return x * 3.0

    def bound(self, x):
        return x


# ---- values


def test_I15_a_value_is_that_of_what_its_inputs_hold(store, calls):
    x = table(store)
    store["k"] = 1
    weights = np.ones(3)
    y = store.derive("y", doubled, "x")
    z = store.derive("z", columns, "y", "k", kwargs={"scale": 3})
    w = store.derive("w", np.dot, weights, "y", version=np.__version__)
    assert calls == []  # nothing is computed before it is read
    for change in (
        lambda: None,
        lambda: x.__setitem__((2, 3), -1.0),  # pending, in place
        store.commit,
        lambda: store.__setitem__("k", 2),
        lambda: store.__setitem__("x", np.full((5, 2), 0.5)),
        lambda: weights.__setitem__(0, 9.0) or store.__setitem__("x", np.eye(3)),
        lambda: store.__setitem__("x", np.eye(3, dtype="f4")),
        lambda: store.__setitem__("x", np.asfortranarray(np.arange(6.0).reshape(3, 2))),
        lambda: store.__setitem__("x", np.arange(6.0).reshape(3, 2)),
        lambda: store.__setitem__("x", np.arange(6.0).reshape(2, 3)),
        lambda: store.__setitem__("x", np.arange(6.0).reshape(2, 3).view("i8")),
    ):
        change()
        now = store["x"] * 2.0
        assert np.array_equal(store["z"], now.sum(0) * 3 + store["k"]) and np.array_equal(y, now)
        if len(now) == 3:
            assert np.array_equal(w, weights @ now)
        before = len(calls)
        assert y.valid and z.valid and store["z"] is z.value and store.get("y") is y.value
        assert len(calls) == before  # read again, nothing is computed
    again = store.derive("z", columns, "y", "k", kwargs={"scale": 4})
    assert np.array_equal(again, now.sum(0) * 4 + store["k"])


@one_medium
def test_values_are_read_only_and_stay_as_they_are(store):
    x = table(store)
    y, same = store.derive("y", doubled, "x"), store.derive("same", np.transpose, "x")
    kept, view = y.value, same.value
    for array in (kept, view):
        with pytest.raises(ValueError):
            array[0] = 0
        with pytest.raises(ValueError):
            array.flags.writeable = True
    x += 1
    assert kept[0, 1] == 2 and view[1, 0] == 1 and not np.shares_memory(view, x)
    assert y[0, 1] == 4 and len(y) == 3 and np.asarray(y, dtype="f4").dtype == "f4" and "doubled" in repr(y)
    assert np.array(y).flags.writeable and np.add(y, 1)[0, 0] == 3
    for use in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="value"):
            use(y)


def test_arrays_of_all_kinds_are_inputs_and_values(open_store):
    arrays = [
        np.zeros((0, 3)),
        np.float32(3),
        np.array(["a", "bc"]),
        np.zeros(3, [("a", "i4"), ("b" * 900, "f8")]),
        np.arange(24.0).reshape(2, 3, 4)[:, ::2],
        np.asfortranarray(np.eye(3)),
        np.array("2020-01-01", "M8[D]"),
    ]
    for life in range(2):
        with open_store() as store:
            for n, array in enumerate(arrays):
                held = store.derive(f"held{n}", np.asarray, array, policy="store", verify="hash")
                through = store.derive(f"through{n}", np.array, f"held{n}", policy="store")
                assert held.valid == (life == 1)  # in the second life it is loaded
                for found in (held.value, through.value):
                    assert (found.dtype, found.shape) == (array.dtype, array.shape)
                    assert found.tobytes() == array.tobytes()
            assert store.check().ok


def test_a_random_program_reads_what_it_would_compute(open_store):
    rng = random.Random(5)
    store, policies = None, ["auto", "recompute", "store"]
    for step in range(250):
        if store is None:
            store = open_store()
            y = store.derive("y", doubled, "x", policy=rng.choice(policies), verify="hash")
            z = store.derive("g/z", columns, "y", "k", policy=rng.choice(policies))
        action = rng.randrange(9)
        if action == 0 or "x" not in store or "k" not in store:
            store["x"], store["k"] = np.full((3, rng.choice([4, 300])), float(step)), step % 3
        elif action == 1:
            store["x"][1] = rng.randrange(3)
        elif action == 2:
            store.commit()
        elif action == 3:
            store.rollback()
        elif action == 4:
            store["k"] = rng.randrange(3)
        elif action == 5:
            y.set(store["x"] * 2)
        elif action == 6 and step % 4 == 0:
            store.close() if step % 8 else store._drop(discard=True)
            store = None
            continue
        if "y" not in store or "g/z" not in store:  # the declarations were rolled back
            y, z = store.derive("y", doubled, "x"), store.derive("g/z", columns, "y", "k")
        if "x" in store and "k" in store:
            first, second = rng.sample([y, z], 2)
            first.value, second.value  # noqa: B018
            assert np.array_equal(y, store["x"] * 2) and np.array_equal(z, (store["x"] * 2).sum(0) + store["k"])
        else:
            with pytest.raises(pmstore.DerivedArrayError, match="its input .* is not in the store"):
                z.value  # noqa: B018


# ---- errors of functions


def fails(x):
    raise ZeroDivisionError("no such luck")


def writes(x):
    x += 1
    return x


@one_medium
def test_I17_errors_name_the_array_and_change_nothing(store):
    table(store)
    for function, text, cause in (
        (fails, r"'y' has no value: .*:fails raised ZeroDivisionError: no such luck", ZeroDivisionError),
        (writes, r"'y' has no value: .*:writes raised ValueError: .*read-only", ValueError),
        (np.shape, r"'y' has no value: .*:shape gave a tuple, not a numpy array", type(None)),
        (np.isclose, r"raised TypeError", TypeError),
    ):
        y = store.derive("y", function, "x", policy="store", replace=True)
        z = store.derive("z", columns, "y")
        for handle in (y, z):  # of a chain, the one that failed
            with pytest.raises(pmstore.DerivedArrayError, match=text) as caught:
                handle.value  # noqa: B018
            assert type(caught.value.__cause__) is cause and caught.value.name == "y"
            assert not handle.valid
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert store["x"][0, 1] == 1 and "not stored" in str(store) and store.check().ok


@one_medium
def test_I17_what_the_program_gives_is_not_written_to(store):
    mine = np.ones(3)
    with pytest.raises(pmstore.DerivedArrayError, match="writes raised ValueError: .*read-only"):
        store.derive("y", writes, mine).value  # noqa: B018
    assert mine.tolist() == [1, 1, 1]


def objects(x):
    return np.array([object()])


def changes(x):
    STORES[0]["x"] += 1
    return x * 2


def reads_itself(x):
    return STORES[0]["y"]


STORES: list[pmstore.Store] = []


@one_medium
def test_I17_functions_that_break_the_rules(store, monkeypatch):
    monkeypatch.setattr(f"{__name__}.STORES", [store])
    table(store)
    store.create_list("list")
    for function, source, text in (
        (objects, "x", "an array that can't be kept: dtype object"),
        (changes, "x", "an input changed while .*:changes ran"),
        (reads_itself, "x", "'y' needs itself: .*:reads_itself reads it"),
        (doubled, "absent", "its input 'absent' is not in the store"),
        (doubled, "list", "can't be derived from 'list', a list"),
    ):
        y = store.derive("y", function, source, replace=True)
        with pytest.raises(pmstore.DerivedArrayError, match=text):
            y.value  # noqa: B018


@one_medium
def test_cycles_and_long_chains(store):
    table(store)
    store.derive("b", doubled, "a")
    store.derive("c", doubled, "b")
    for source in ("c", "a", "b"):
        with pytest.raises(pmstore.DerivedArrayError, match="'a' would need itself: 'a' needs "):
            store.derive("a", doubled, source)
    assert "a" not in store
    last = "x"
    for n in range(52):
        last = store.derive(f"n{n:02}", np.negative, last).name
    assert store["n50"][0, 1] == -1
    with pytest.raises(pmstore.DerivedArrayError, match="more than 50 derived arrays below it"):
        store["n51"]


# ---- declarations


@one_medium
def test_another_declaration_is_an_error(open_store):
    with open_store() as store:
        table(store)
        store.derive("y", doubled, "x", policy="store").value  # noqa: B018
    with open_store() as store:
        for read in (lambda: store["y"], lambda: store.get("y"), lambda: dict(store), lambda: store.pop("y")):
            with pytest.raises(
                pmstore.DerivedArrayError, match=r"'y' is derived by tests.support.derivations:doubled version 1"
            ):
                read()
        for arguments, options, text in (
            ((columns, "x"), {}, r"function: tests.support.derivations:doubled ≠ tests.support.derivations:columns"),
            ((doubled, "x"), {"version": "2"}, "version: 1 ≠ 2"),
            ((doubled, "z"), {}, r"inputs: \(x\) ≠ \(z\)"),
            ((doubled, np.ones(3)), {}, r"inputs: \(x\) ≠ \(\(given by the program\)\)"),
            ((doubled, "x"), {"kwargs": {"k": 1}}, r"arguments: \(\) ≠ \(k\)"),
        ):
            with pytest.raises(pmstore.DerivedMismatchError, match=rf"{text}. replace=True"):
                store.derive("y", *arguments, **options)
        old = store.derive("y", doubled, "x", policy="store", verify="hash")  # which don't make it another array
        new = store.derive("y", columns, "x", policy="store", replace=True)
        assert "not stored" in str(store) and new[0] == 12 and store["y"] is new.value
        with pytest.raises(pmstore.DerivedMismatchError):
            old.value  # noqa: B018
        store.rollback()  # the old declaration is back
        assert old[0, 1] == 2
        with pytest.raises(pmstore.DerivedMismatchError):
            new.value  # noqa: B018


@one_medium
def test_functions_are_known_by_their_import_path(store):
    table(store)
    for function in (lambda x: x, Methods().bound, functools.partial(doubled), [].append):
        with pytest.raises(TypeError, match="can't be the function of a derived array"):
            store.derive("y", function, "x")
    with pytest.raises(TypeError, match="function is what gives the array"):
        store.derive("y", "doubled", "x")
    assert store.derive("y", Methods.tripled, "x")[0, 1] == 3


def test_functions_of_the_main_file_are_named_by_it(child, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import pmstore, sys\ndef f(x): return x\n"
        "with pmstore.open(sys.argv[1]) as store: print(store.derive('y', f, 1))\n"
    )
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    assert "derived by train:f version 1 of (given)" in child(code, script, tmp_path / "main.pm").end()


@one_medium
def test_names_and_arguments(store):
    table(store)
    group = store.group("g")
    table(group)
    y = group.derive("y", doubled, "x")
    assert y.name == "g/y" and y[0, 1] == 2 and group["y"] is y.value
    for name in ("x", "g"):
        with pytest.raises(pmstore.NameConflictError):
            store.derive(name, doubled, "k")
    for assign in (
        lambda: group.__setitem__("y", 1),
        lambda: group.__setitem__("y", np.ones(3)),
        lambda: group.create_list("y"),
        lambda: group.create_array("y", 3),
        lambda: group.require_array("y", 3),
    ):
        with pytest.raises(pmstore.NameConflictError, match="derived by|is taken"):
            assign()
    with pytest.raises(TypeError, match="not an array but derived by"):
        store.release("g/y")
    store.release()
    for wrong in ({"policy": "never"}, {"version": 1.5}, {"kwargs": {1: 2}}, {"kwargs": {"a": object()}}):
        with pytest.raises((TypeError, ValueError)):
            store.derive("z", doubled, "x", **wrong)
    for source in (object(), np.array([None]), {object()}):
        with pytest.raises(TypeError, match="can't keep"):
            store.derive("z", doubled, source)
    with pytest.raises(pmstore.InvalidNameError):
        store.derive("a//b", doubled, "x")
    long = store.derive("n" * 764, doubled, "x", kwargs={f"k{n}" * 50: n for n in range(9)})
    assert long.name in store and store.check().ok  # the declaration takes an extent


@one_medium
def test_deleting(store):
    table(store)
    y = store.derive("y", doubled, "x", policy="store", verify="hash")
    keys = store.stats().keys
    assert y[0, 1] == 2 and list(store) == ["x", "y"] and len(store) == 2
    store.commit()
    del store["y"]
    assert list(store) == ["x"] and store.stats().keys == keys - 1
    with pytest.raises(KeyError, match="'y' in the store: this derived array was deleted"):
        y.value  # noqa: B018
    store.rollback()
    assert y[0, 1] == 2 and store["y"] is y.value
    del store["x"]
    with pytest.raises(pmstore.DerivedArrayError, match="'y' has no value: its input 'x' is not in the store"):
        store["y"]
    table(store)
    assert store.pop("y")[0, 1] == 2 and "y" not in store
    store.clear()
    store.commit()
    assert len(store) == 0 == store.stats().keys and store.check().ok


@one_medium
@pytest.mark.parametrize("deleting", ["del", "pop", "clear", "rename", "replace"])
def test_a_deleted_array_leaves_memory(store, deleting):
    table(store)
    given = np.ones((3, 4))
    input_, group = weakref.ref(given), store.group("g")
    y = group.derive("y", np.add, given, given, policy="recompute")
    value = weakref.ref(group["y"])
    del given
    store.commit()
    if deleting == "del":
        del group["y"]
    elif deleting == "pop":
        group.pop("y")
    elif deleting == "clear":
        group.clear()
    elif deleting == "rename":
        store.rename("g", "h")
    else:
        assert group.derive("y", np.negative, store["x"], replace=True)[0, 1] == -1
    assert value() is None  # its handle is there
    store.rollback()
    assert y[0, 0] == group["y"][0, 0] == 2
    value = weakref.ref(y.value)
    group.clear()
    del y
    store.commit()
    assert value() is None
    group.derive("z", doubled, store["x"])
    assert input_() is None  # no rollback brings it back


@one_medium
def test_a_rollback_brings_declarations_back(store):
    table(store)
    y = store.derive("y", doubled, "x", policy="store")
    store.commit()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), store.transaction():
            other = store.derive("y", columns, "x", policy="store", replace=True)
            assert store["y"] is other.value and len(other) == 4
            third = store.derive("y", np.negative, "x", replace=True)
            assert store["y"][0, 1] == -1
            store.rename("y", "z")
            store.derive("z", np.negative, "x")
            raise ZeroDivisionError
        assert store["y"] is y.value and y[0, 1] == 2
        for gone in (other, third):
            with pytest.raises(pmstore.DerivedMismatchError):
                gone.value  # noqa: B018
    new = store.derive("y", columns, "x", replace=True)
    store.commit()
    store.derive("z", doubled, "y")
    store.rollback()
    assert store["y"] is new.value and "z" not in store


def test_a_declaration_is_part_of_its_transaction(store):
    table(store)
    store.commit()
    z = store.derive("z", doubled, "x")
    store.rollback()
    with pytest.raises(pmstore.UnknownNameError):
        z.value  # noqa: B018
    with pytest.raises(ZeroDivisionError):
        with store.transaction():
            y = store.derive("y", doubled, "x", policy="store")
            assert y[0, 1] == 2
            raise ZeroDivisionError
    for read in (lambda: y.value, lambda: y.valid, lambda: y.set(np.ones(3)), lambda: store["y"]):
        with pytest.raises(pmstore.UnknownNameError):
            read()
    y = store.derive("y", doubled, "x", policy="store")
    before = y[0, 1]
    store.commit()
    with pytest.raises(ZeroDivisionError):
        with store.transaction():
            store["x"] += 1
            assert y[0, 1] == before + 2
            raise ZeroDivisionError
    assert y.valid and y[0, 1] == before  # the stored value is back


@one_medium
def test_check_reports_what_breaks_the_format(store, caplog):
    table(store)
    y = store.derive("y", doubled, "x", policy="store")
    assert y[0, 1] == 2 and store.check().ok
    core = store._catalog.core
    core.put(b"dy\0s", Entry(0, 0, INLINE, 0, b"\x93\1\2\3"))
    core.put(b"dz\0v", Entry(0, 0, INLINE, 0, b"\0"))
    core.put(b"nw", Entry(0, 0, DERIVED, 0, b"\x97\1\2\3\4\5\6\7"))
    hostile = Declaration("a\x1b[2J:f" + "f" * 300, "\n", (), (), "auto", None, None)
    core.put(b"nv", Entry(0, 0, DERIVED, 0, hostile.encode()))
    store.commit()
    assert [(problem.name, str(problem).partition(": ")[2][:9]) for problem in store.check()] == [
        ("w", "a damaged"),
        ("y", "a damaged"),
        ("z", "a part of"),
    ]
    assert y[0, 1] == 2 and "a damaged stamp" in caplog.text  # which is written again
    with pytest.raises(pmstore.CorruptStoreError, match="'w': a damaged declaration"):
        store["w"]
    assert "damaged" in str(store) and r"derived by a\x1b[2J:f" in str(store) and "\x1b" not in str(store)


# ---- stores that can't be written, threads, forks


@one_medium
def test_read_only_stores(open_store, calls):
    with open_store() as store:
        table(store)
        store.derive("y", doubled, "x", policy="recompute", verify="hash")
    with open_store(mode="r") as store:
        y = store.derive("y", doubled, "x")
        y.set(y.value)
        assert y[0, 1] == 2 and calls == ["doubled"]
        with pytest.raises(pmstore.ReadOnlyStoreError):
            store.derive("z", doubled, "x")
        with pytest.raises(pmstore.ReadOnlyStoreError):
            store.derive("y", columns, "x", replace=True)
    for read in (lambda: y.value, lambda: y.valid, lambda: store["y"], lambda: y.set(np.ones(3))):
        with pytest.raises(pmstore.ClosedStoreError):
            read()


def test_arrays_that_cannot_change_are_hashed_once(store, monkeypatch):
    store.create_array("X", (1000, 10), fill_value=1.0, writeable=False)
    y = store.derive("y", doubled, "X")
    hashed = []
    monkeypatch.setattr("pmstore._derived.inputs.hash_array", lambda array: hashed.append(array.nbytes) or 7)
    assert y[0, 0] == 2 and y[0, 0] == 2 and hashed == [80_000]
    del store["X"]
    store.create_array("X", (1000, 10), fill_value=2.0, writeable=False)
    monkeypatch.undo()
    assert y[0, 0] == 4
    store["X"] = np.full((1000, 10), 3.0)
    assert y[0, 0] == 6
    store.rollback()
    y = store.derive("y", doubled, "X")
    for value in (1.0, 2.0):
        store.create_array("X", (1000, 10), fill_value=value, writeable=False)
        assert y[0, 0] == 2 * value
        store.rollback()
        y = store.derive("y", doubled, "X")


@one_medium
def test_a_store_dies_with_its_last_reference(open_store, medium):
    store = pmstore.open(medium.directory / "store.pm")
    y = store.derive("y", doubled, table(store))
    assert y[0, 1] == 2
    with pytest.warns(pmstore.UncommittedChangesWarning, match="of 1 name since"):  # y can be computed again
        del store
    with pytest.raises(pmstore.ClosedStoreError):
        y.value  # noqa: B018
    gc.collect()
