"""Arguments of a wrong type: errors name the argument, and the right kind of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
import pmstore.scale
import pmstore.testing
from pmstore._cli import main


class Wrong(pmstore.Resumable):
    max_iter = 1

    def fields(self) -> list[pmstore.Field]:
        return []

    def fingerprint(self) -> Any:
        return 5

    def start(self) -> None:
        pass

    def step(self) -> None:
        pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: pmstore.export(store.path, "x.npz"), r"export\(\) takes a store, .*: pmstore.open\(path, 'r'\)"),
        (lambda store: pmstore.export(5, "x.npz"), r"export\(\) takes a store, .*or a dict, not 5$"),  # type: ignore
        (lambda store: store.transaction(only=5), "only is a list of arrays of the store"),
        (lambda store: store.derive("d", np.cumsum, "w", kwargs=5), "kwargs is a dict of keyword arguments, not 5"),
        (lambda store: Wrong().run(store), r"fingerprint\(\) returns a dict of arrays and values, not 5"),
        (lambda store: pmstore.scale.Dask(None), "Dask takes a dask.distributed.Client, not None"),
    ],
)
def test_errors_name_the_argument(call: Callable[[pmstore.Store], Any], message: str, tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "s.pm") as store:
        store["w"] = np.arange(3.0)
        with pytest.raises(TypeError, match=message):
            call(store)


def test_a_mapreduce_is_explored_by_a_function_that_makes_it() -> None:
    with pytest.raises(pmstore.testing.CrashTestError, match="make is a function that returns .*, not 5"):
        pmstore.testing.explore_mapreduce(5)  # type: ignore[arg-type]


def test_crash_files_take_a_path_as_text(tmp_path: Path) -> None:
    assert pmstore.testing.CrashFiles(str(tmp_path / "new")).dir == tmp_path / "new"
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    "call",
    [
        pmstore.compact,
        pmstore.upgrade,
        pmstore.prune,
        pmstore.scale.prune_local,
        lambda path: pmstore.salvage(path, "new.pm"),
        lambda path: pmstore.history(path, "fit"),
    ],
)
def test_no_mode_is_advised_for_a_call_that_has_none(call: Callable[[str], Any], tmp_path: Path) -> None:
    path = str(tmp_path / "none.pm")
    with pytest.raises(pmstore.StoreNotFoundError) as caught:
        call(path)
    assert str(caught.value) == f"there is no store at {path!r}" and caught.value.filename == path
    with pytest.raises(pmstore.StoreNotFoundError, match='mode "a" creates one'):
        pmstore.open(path, "r")


def test_a_store_without_a_file_has_no_history() -> None:
    with pytest.raises(ValueError, match=r'":memory:" is always a new store'):
        pmstore.history(":memory:", "fit")


@pytest.mark.parametrize("wrong", [1.5, "rows", (2.0,), None])
def test_a_length_is_an_int_or_a_shape(wrong: Any) -> None:
    with pmstore.open(":memory:") as store:
        store.create_array("rows", 3, maxshape=(None,))
        with pytest.raises(TypeError, match="the length of 'rows' is an int, or a shape, not "):
            store.resize("rows", wrong)


def test_a_field_has_a_name_and_a_shape() -> None:
    with pytest.raises(TypeError, match="the name of a field is a str, not int: 1"):
        pmstore.Field(1, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a shape is an int or a sequence of int"):
        pmstore.Field("w", 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative length"):
        pmstore.Field("w", (2, -1))


def test_the_command_drain_names_the_store_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numcodecs")
    assert main(["archive", "drain", str(tmp_path / "a"), str(tmp_path / "none.pm")]) == 2
    assert capsys.readouterr().err == f"pmstore: {tmp_path / 'none.pm'}: there is no such file\n"


def test_a_new_array_needs_a_shape_that_its_elements_have() -> None:
    with pmstore.open(":memory:") as store:
        with pytest.raises(TypeError, match=r"create_array\(\) needs a shape, or data="):
            store.create_array("x")
        for create in (store.create_array, store.require_array):
            with pytest.raises(ValueError, match=r"fill_value has the shape \(4, 4\), .* the array's, \(3, 2\)"):
                create("x", (3, 2), fill_value=np.ones((4, 4)))
        assert not len(store)


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_name_that_ends_a_with_statement_is_explained_afterwards(mode: Any, tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        store["weights"] = 1.0
    with pytest.raises(KeyError) as caught, pmstore.open(tmp_path / "store.pm", mode) as store:
        store["wieghts"]
    assert store.closed and "'weights'" in str(caught.value)
