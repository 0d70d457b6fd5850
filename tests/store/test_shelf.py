"""`pmstore.shelf`: the verbs of PyMM on a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pmstore
import pmstore.testing


def test_values_are_attributes(tmp_path: Path) -> None:
    with pmstore.shelf(tmp_path / "s.pm") as s:
        s.x = np.arange(4.0)
        x = s.x
        s.x += 1
        assert s.x is x
        s.epoch, s.name_of_run = 3, "first"
        assert s.items == ["epoch", "name_of_run", "x"]
        assert {"x", "epoch", "erase"} <= set(dir(s))
        assert repr(s) == f"<shelf {str(tmp_path / 's.pm')!r}: epoch, name_of_run, x>"
        s.store["model/w"] = np.ones(2)
    with pmstore.shelf(tmp_path / "s.pm") as s:
        assert s.x.tolist() == [1, 2, 3, 4]
        assert (s.epoch, s.name_of_run, s.store["model/w"].sum()) == (3, "first", 2)
        del s.x
        s.erase("epoch")
        assert not hasattr(s, "x")
        assert s.items == ["model/w", "name_of_run"]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pmstore.shelf(tmp_path / "s.pm") as s:
        s.weights = np.zeros(3)
        with pytest.raises(AttributeError, match="near it: 'weights'"):
            _ = s.weight
        for verb, instead in {
            "close": r"s\.store\.close\(\)",
            "get_item_names": r"s\.items",
            "inspect": r"print\(s\.store\)",
            "used": r"s\.store\.stats\(\)",
        }.items():
            with pytest.raises(AttributeError, match=f"instead: {instead}"):
                getattr(s, verb)
        with pytest.raises(AttributeError, match="weight"):
            del s.weight
        with pytest.raises(KeyError):
            s.erase("weight")
        for name in ("_x", "items", "store", "persist", "_transactions"):
            s.store[name] = 7
            for change in (lambda name=name: setattr(s, name, 1), lambda name=name: delattr(s, name)):
                with pytest.raises(AttributeError, match=rf"s.store\['{name}'\]"):
                    change()
            assert s.store.pop(name) == 7
        with pytest.raises(AttributeError, match="_ipython"):
            _ = s._ipython_display_
        with pytest.raises(TypeError):
            s.x = object()
        with pytest.raises(pmstore.TransactionError, match="tx_begin"):
            s.tx_end()
    with pytest.raises(pmstore.ClosedStoreError):
        _ = s.weights
    with pmstore.shelf(tmp_path / "s.pm", "r") as s:
        with pytest.raises(pmstore.ReadOnlyStoreError):
            s.x = 1
        with pytest.raises(pmstore.ReadOnlyStoreError):
            s.tx_begin()
        with pytest.raises(pmstore.TransactionError, match="none|no transaction"):
            s.tx_end()


def test_what_leaves_by_an_exception_is_rolled_back(tmp_path: Path) -> None:
    with pmstore.shelf(tmp_path / "s.pm") as s:
        s.x = np.zeros(2)
        s.persist()
        with pytest.raises(ArithmeticError), s.transaction():
            s.x += 1
            raise ArithmeticError
        assert s.x.tolist() == [0, 0]
        with s.transaction():
            s.x += 1
        s.tx_begin([s.x])
        s.tx_begin()
        s.x += 1
        s.tx_end()
        assert s.store.in_transaction
        s.tx_end()
        assert s.store.sequence == pmstore.open(tmp_path / "s.pm", "r").sequence
    with pytest.raises(KeyboardInterrupt), pmstore.shelf(tmp_path / "s.pm") as s:
        s.x[:] = 9
        raise KeyboardInterrupt
    with pmstore.shelf(tmp_path / "s.pm") as s:
        assert s.x.tolist() == [2, 2]


def test_a_closed_shelf_has_a_repr(tmp_path: Path) -> None:
    with pmstore.shelf(tmp_path / "s.pm") as s:
        s.x = 1
    assert repr(s) == f"<closed shelf {str(tmp_path / 's.pm')!r}>"
    assert "erase" in dir(s) and "x" not in dir(s)


def test_a_forgotten_tx_end(tmp_path: Path) -> None:
    s = pmstore.shelf(tmp_path / "s.pm")
    with (
        pytest.raises(pmstore.TransactionError, match=r"with statement comes between .* call s\.tx_end\(\), and then"),
        s,
    ):
        s.tx_begin()
        s.x = 1
        with pytest.raises(pmstore.TransactionError, match=r"persist\(\) comes between .*: tx_end\(\) commits"):
            s.persist()
        with pytest.raises(pmstore.TransactionError, match=r"close\(\) inside a transaction: .*or call tx_end\(\)"):
            s.store.close()
    s.tx_end()
    s.store.close()
    with pmstore.shelf(tmp_path / "s.pm") as s:
        assert s.x == 1
    with pytest.raises(ZeroDivisionError), pmstore.shelf(tmp_path / "s.pm") as s:
        s.tx_begin()
        s.x = 2
        raise ZeroDivisionError
    assert s.store.closed


def agree(store: pmstore.Store) -> None:
    """Both arrays are there, and of the same step, or neither is."""
    assert ("n" in store) == ("m" in store)
    if "n" in store:
        assert (store["m"] == 3 * store["n"]).all()


@pmstore.testing.crash_test(check=agree, budget=100)
def test_both_change_together(store: pmstore.Store) -> None:
    s = pmstore.Shelf(store)
    with s.transaction():
        s.n, s.m = np.zeros(100), np.zeros(100)
    for _ in range(3):
        s.tx_begin()
        s.n += 1
        s.m += 3
        s.tx_end()
