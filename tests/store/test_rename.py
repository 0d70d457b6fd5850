"""Rename and copy of names and groups within a store; test_model.py mixes them with everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import Core, Entry
from tests.core.test_damage import flipped
from tests.support.derivations import CALLS, columns, doubled
from tests.support.snapshots import snapshot

pytestmark = pytest.mark.parametrize("medium", ["memory"], indirect=True)
Open = Callable[..., pmstore.Store]


def fill(store: pmstore.Store) -> None:
    store["g/f"] = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    store.create_array("g/fixed", 3, fill_value=7, writeable=False)
    store["g/empty"] = np.zeros((0, 3), "i2")
    store["g/deep/long"] = b"long" * 1000
    store["g/deep/config"] = {"k": [1]}
    store.create_list("g/list").extend([1, "b" * 5000, {"c": 2}])
    store["x"] = np.ones(5)


def below(store: pmstore.Store, group: str) -> dict[str, object]:
    return {name[len(group) + 1 :]: value for name, value in snapshot(store).items() if name.startswith(group + "/")}


def test_a_group(open_store: Open) -> None:
    with open_store() as store:
        fill(store)
        store["g/f"][0, 0] = 5  # pending changes, too
        before = below(store, "g")
        store.copy("g", "new/copy")
        store["g/f"][0, 0] = 6
        store["g/list"].append(4)
        assert below(store, "new/copy") == before != below(store, "g")
        assert not store["new/copy/fixed"].flags.writeable
        before = below(store, "g")
        store.group("new").rename("copy", "other")
        store.rename("g", "h")
        assert below(store, "h") == before and "x" in store and not any(name.startswith("g/") for name in store)
    with open_store(verify=True) as store:
        assert below(store, "h") == before and "new/other/deep/config" in store and "new/copy/f" not in store


def test_a_transaction_takes_them_back(open_store: Open) -> None:
    store = open_store()
    fill(store)
    store.commit()
    before, array, items = snapshot(store), store["x"], store["g/list"]
    with pytest.raises(ZeroDivisionError), store.transaction():
        store.rename("x", "y")
        store.rename("g", "h")
        assert items.name == "h/list" and items[0] == 1
        store.copy("y", "g")
        store["g"][:] = 9
        raise ZeroDivisionError
    assert snapshot(store) == before and items.name == "g/list" and items[0] == 1
    assert store["x"] is array
    array[0] = 3
    store.commit()
    assert store["x"][0] == 3


def test_what_was_read_before(open_store: Open) -> None:
    """Lists stay usable, arrays stay live, and a changed copy of a value is still noticed."""
    store = open_store()
    fill(store)
    array, items, config = store["x"], store["g/list"], store["g/deep/config"]
    store.rename("x", "y")
    store.rename("g", "h")
    array[0] = 8
    items.append("last")
    config["k"] = 2
    with pytest.warns(pmstore.LostUpdateWarning, match=r"store\['h/deep/config'\]"):
        store.commit()
    assert store["y"] is array and store["h/list"][-1] == "last"
    array[1] = 9
    store["x"] = np.zeros(5)  # the old name is free, and the array has nothing to do with it
    store.close()
    with open_store(verify=True) as store:
        assert store["y"].tolist() == [8, 9, 1, 1, 1] and store["x"].tolist() == [0] * 5


def test_no_contents_move(open_store: Open) -> None:
    """A rename writes no contents, whatever the arrays' size, and frees none."""
    with open_store(max_size=12 << 20) as store:
        store["g/x"] = np.ones(1 << 20)
        store.commit()
        before, address = store.stats().bytes_written, store["g/x"].ctypes.data
        for old, new in (("g", "h"), ("h/x", "y")):
            store.rename(old, new)
            store.commit()
        assert store["y"].ctypes.data == address
        assert store.stats().bytes_written - before < 1 << 16
    with open_store(verify=True) as store:
        assert list(store) == ["y"] and store["y"].sum() == 1 << 20


def test_readers_see_the_old_names_or_the_new_ones(open_store: Open) -> None:
    """A snapshot keeps the old names, and its arrays, also those that it maps (I19, I20)."""
    store = open_store()
    fill(store)
    store["g/large"] = np.arange(100_000.0)
    store.create_array("g/constant", 100_000, fill_value=3, writeable=False)
    store.commit()
    with pmstore.open(store.path, "r") as reader, pmstore.open(store.path, "r") as mapped:
        names, constant = list(reader), mapped["g/constant"]
        store.rename("g", "h")
        store.commit()
        assert list(reader) == names and reader["g/large"][7] == 7 and reader["g/constant"][-1] == 3
        assert reader.read("h/large").sum() == store["h/large"].sum()
        with pytest.raises(pmstore.UnknownNameError):
            reader.read("g/large")
        for one in (reader, mapped):
            one.refresh()
            assert below(one, "h") == below(store, "h") and "g/large" not in one
        del store["h/constant"]
        store.commit()
        store["taken"] = np.full(100_000, 4.0)
        store.commit()
        assert (constant == 3).all()


@pytest.mark.parametrize(
    "names, error, text",
    [
        (("none", "a"), pmstore.UnknownNameError, "no name 'none' in the store"),
        (("x", "x"), pmstore.NameConflictError, "'x' is 'x' itself"),
        (("x", "x/y"), pmstore.NameConflictError, "itself, or below it"),
        (("g", "g/deep/g"), pmstore.NameConflictError, "itself, or below it"),
        (("g/f", "x"), pmstore.NameConflictError, "'x' is taken"),
        (("x", "g"), pmstore.NameConflictError, "it is a group"),
        (("g/f", "g"), pmstore.NameConflictError, "it is a group"),
        (("g", "x/g"), pmstore.NameConflictError, "'x' is a value"),
        (("x", "a//b"), pmstore.InvalidNameError, "empty part"),
        (("g", "n" * 758), pmstore.InvalidNameError, "at most 764 bytes"),
        (("x", 5), TypeError, "a name is a str"),
    ],
)
def test_refused(open_store: Open, names: tuple[str, str], error: type[Exception], text: str) -> None:
    store = open_store()
    fill(store)
    store.commit()
    before, sequence = snapshot(store), store.sequence
    for change in (store.rename, store.copy):
        with pytest.raises(error, match=text):
            change(*names)
    store.commit()
    assert snapshot(store) == before and store.sequence == sequence


def test_refused_in_a_store_that_can_not_be_written(open_store: Open) -> None:
    with open_store() as store:
        fill(store)
    with open_store(mode="r") as store:
        for change in (store.rename, store.copy):
            with pytest.raises(pmstore.ReadOnlyStoreError):
                change("x", "y")
    with pytest.raises(pmstore.ClosedStoreError):
        store.rename("x", "y")


def test_no_space(open_store: Open) -> None:
    """All or nothing, also without a transaction; what was pending stays pending."""
    store = open_store(max_size=2 << 20)
    store["g/a"] = 1
    store["g/b"] = np.ones(100_000)
    store.create_list("g/c").append(1)
    store.commit()
    store["pending"] = 1
    before = snapshot(store)
    with pytest.raises(pmstore.OutOfSpaceError):
        store.copy("g", "h")
    assert snapshot(store) == before and len(store["g/c"]) == 1
    store.rename("g", "h")  # takes no space for contents
    assert len(store["h/b"]) == 100_000
    store.commit()
    assert store.check().ok


def test_no_space_for_longer_names(open_store: Open) -> None:
    store = open_store(max_size=1 << 20)
    for i in range(60):
        store[f"g/{i:02}"] = np.full(3, i)
    store.commit()
    with pytest.raises(pmstore.OutOfSpaceError):
        for i in range(1000):
            store[f"taken/{i}"] = bytes(4000)
    before = snapshot(store)
    with pytest.raises(pmstore.OutOfSpaceError):
        store.rename("g", "h" * 700)
    assert snapshot(store) == before
    store.commit()
    assert snapshot(store) == before and store.check().ok


def interrupted(method: Callable[..., Any], before: bool) -> Callable[..., Any]:
    """The method, but a signal comes before or behind its first call."""
    errors = iter([KeyboardInterrupt])

    def interrupt(core: Core, keys: Sequence[Any], *arguments: Any) -> Any:
        if before:
            for error in errors:
                raise error
        result = method(core, keys, *arguments)
        for error in errors:
            raise error
        return result

    return interrupt


@pytest.mark.parametrize(
    "method, before", [("rename", True), ("rename", False), ("delete", False)], ids=["before", "behind", "at the end"]
)
def test_an_interrupt(open_store: Open, monkeypatch: pytest.MonkeyPatch, method: str, before: bool) -> None:
    """All names change, or none; declarations of derived arrays are no exception."""
    store = open_store()
    fill(store)
    store.derive("g/twice", doubled, "g/f", policy="store")
    store.derive("g/again", doubled, "x")
    names, values = list(store), {name: store[f"g/{name}"].copy() for name in ("f", "twice", "again")}
    with monkeypatch.context() as patch:
        patch.setattr(Core, method, interrupted(getattr(Core, method), before))
        with pytest.raises(KeyboardInterrupt):
            store.rename("g", "h")
    group = "g" if before else "h"
    assert sorted(store) == sorted(name.replace("g/", f"{group}/") for name in names)
    store.derive(f"{group}/twice", doubled, f"{group}/f", policy="store")
    store.derive(f"{group}/again", doubled, "x")
    assert all((store[f"{group}/{name}"] == value).all() for name, value in values.items())
    store.commit()
    assert store.check().ok


def test_the_copy_of_a_damaged_array_is_refused(open_store: Open) -> None:
    data = np.random.default_rng(0).random(5000)
    with open_store() as store:
        path = Path(store.path)
        store["g/bad"] = data
        store["g/a"] = 1
    flipped(path, data[2000:2100].tobytes())
    with open_store() as store:
        with pytest.raises(pmstore.CorruptStoreError, match="'g/bad'"):
            store.copy("g", "h")
        assert list(store) == ["g/a", "g/bad"]
        store.rename("g", "h")
        store.commit()
        assert [problem.name for problem in store.check()] == ["h/bad"]  # its hashes moved with it


def test_the_copy_of_an_unknown_kind_is_refused(open_store: Open) -> None:
    """A newer pmstore may have written it, with keys that belong to it, as the elements of a list do."""
    with open_store() as store:
        store["g/a"] = 1
        store._catalog.core.put(b"ng/new", Entry(0, 0, 77, 0, b""))
        for old in ("g", "g/new"):
            with pytest.raises(pmstore.CorruptStoreError, match="'g/new': an entry of the unknown kind 77"):
                store.copy(old, "h")
            assert list(store) == ["g/a", "g/new"]
        del store["g/new"]
        assert store.check().ok


def test_derived_arrays(open_store: Open) -> None:
    """They follow the inputs of their group, with their stored values; otherwise they name an input that is gone
    (I15)."""
    store = open_store()
    CALLS.clear()
    store["g/x"] = np.ones((3, 4))
    assert store.group("g").derive("y", doubled, "x", policy="store")[0, 0] == 2
    store.copy("g", "copy")
    store.rename("g", "h")
    for group in ("copy", "h"):
        y = store.group(group).derive("y", doubled, "x", policy="store")
        assert y.valid and y[0, 0] == 2 and CALLS == ["doubled"]
    store["copy/x"][:] = 3
    assert store["copy/y"][0, 0] == 6 and store["h/y"][0, 0] == 2
    store.rename("h/x", "z")
    with pytest.raises(pmstore.DerivedArrayError, match="its input 'h/x' is not in the store"):
        store["h/y"]
    with pytest.raises(pmstore.DerivedMismatchError, match="inputs"):
        store.derive("h/y", doubled, "z", policy="store")
    assert store.derive("h/y", doubled, "z", policy="store", replace=True)[0, 0] == 2
    store.rename("h/y", "w")
    with pytest.raises(pmstore.DerivedArrayError, match="declare it with store.derive"):
        store["w"]
    assert store.derive("w", doubled, "z", policy="store")[0, 0] == 2
    store.commit()
    assert store.check().ok


def test_no_derived_array_comes_to_need_itself(open_store: Open) -> None:
    store = open_store()
    store.derive("a", doubled, "b")
    store.derive("c", columns, "a")
    for change in (store.rename, store.copy):
        with pytest.raises(pmstore.DerivedArrayError, match="would need itself: 'b' needs 'a' needs 'b'"):
            change("c", "b")
    assert list(store) == ["a", "c"]
