"""Opening where a directory, an option or the file itself is at its limit, and what the error then tells the user."""

from __future__ import annotations

import errno
import os

import pytest

import pmstore
from pmstore._store.entrance import _LEAST
from tests.conftest import Medium


def names_in(medium: Medium) -> list[str]:
    return sorted(os.listdir(medium.directory))


def test_a_directory_from_which_nothing_can_be_removed(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    path = medium.directory / "store.pm"

    def refuse(*names: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", *names[:1])

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        patch.setattr(os, "replace", refuse)
        with pytest.warns(UserWarning, match="complete, but its temporary name .* can't be removed") as told:
            store = pmstore.open(path, "x")
        assert told[0].filename == __file__
        with store:
            store["a"] = 1
        assert len(names_in(medium)) == 2
        with pytest.raises(pmstore.ReadOnlyStoreError, match="can't be replaced: its directory .* stays there"):
            pmstore.open(path, "w")
        copy = path.with_name("copy.pm")
        with pmstore.open(path, "r") as store, pytest.warns(UserWarning, match="temporary name"):
            store.backup(copy)
        assert len(names_in(medium)) == 6
    with pmstore.open(copy, "r", verify=True) as store:
        assert store["a"] == 1
    pmstore.open(path.with_name("other.pm"), "x").close()  # sweeps
    assert names_in(medium) == ["copy.pm", "other.pm", "store.pm"]
    with pmstore.open(path, "r", verify=True) as store:
        assert store["a"] == 1


def test_the_smallest_max_size_holds_a_new_store(medium: Medium) -> None:
    path = medium.directory / "store.pm"
    with pmstore.open(path, "w", media=medium.name, max_size=_LEAST) as store:
        store["a"] = 1
        store.commit()
        with pytest.raises(pmstore.OutOfSpaceError, match="max_size"):
            store["b"] = bytes(1 << 20)
    assert path.stat().st_size <= _LEAST
    assert path.stat().st_size == _LEAST or medium.name == "file"
    with pmstore.open(path) as store:
        store["b"] = bytes(1 << 20)
    with pmstore.open(path, max_size=_LEAST) as store:  # it is larger already
        assert store["a"] == 1
