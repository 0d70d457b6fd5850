"""Opening where a directory, an option or the file itself is at its limit, and what the error then tells the user."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._store import naming
from pmstore._store.entrance import _LEAST
from tests.conftest import Medium, run_in_fork
from tests.core.test_address_space import MIB, limit_addresses


def names_in(medium: Medium) -> list[str]:
    return sorted(os.listdir(medium.directory))


def test_a_directory_from_which_nothing_can_be_removed(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    path = medium.directory / "store.pm"

    def refuse(*names: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", *names[:1])

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        patch.setattr(os, "replace", refuse)
        patch.setattr(
            naming, "lib", SimpleNamespace(pm_rename_file=lambda *_: errno.EPERM, pm_file_system_type=lambda _: 0)
        )
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


def test_a_file_that_lost_a_part_of_its_empty_log(medium: Medium) -> None:
    path = medium.directory / "my store.pm"
    with pmstore.open(path, "w", media=medium.name) as store:
        store["a"] = 1
    size = path.stat().st_size
    log = 512 << 10 if medium.name != "file" else 256 << 10
    for cut in (1, 4096, log):
        os.truncate(path, size - cut)
        for use in (
            lambda: pmstore.open(path, "r"),
            lambda: pmstore.open(path, "r", exclusive=True),
            lambda: pmstore.open(path, "r+"),
            lambda: pmstore.salvage(path, path.with_name("new.pm")),
        ):
            with pytest.raises(pmstore.CorruptStoreError, match="truncated: .* `truncate -s .*` mends") as caught:
                use()
        assert path.stat().st_size == size - cut
        (command,) = re.findall("`(.*)`", str(caught.value))
        assert command == f"truncate -s {size} '{path}'"
        os.truncate(path, size)
        with pmstore.open(path, "r", verify=True) as store:
            assert store["a"] == 1


def test_a_file_that_lost_more_is_not_to_be_mended(medium: Medium) -> None:
    path, copy = medium.directory / "store.pm", medium.directory / "copy.pm"
    with pmstore.open(path, "w", media=medium.name) as store:
        store["a"] = 1
        store.commit()
        copy.write_bytes(path.read_bytes()[:-4096])  # the log has a commit
    with pytest.raises(pmstore.CorruptStoreError, match=r"truncated: .* needs \d+$"):
        pmstore.open(copy, "r")
    copy.write_bytes(path.read_bytes()[: 8192 + 4096])  # a part of the region is missing
    with pytest.raises(pmstore.CorruptStoreError, match=r"truncated: .* needs \d+$"):
        pmstore.open(copy, "r")


@pytest.mark.parametrize("mode", ["a", "r"])
@pytest.mark.parametrize("part", ["Catalog", "DerivedArrays", "Commits", "Undo"])
def test_an_opening_without_memory_lets_the_file_go(
    medium: Medium, mode: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is told of the store that was not made."""
    path = medium.directory / "store.pm"
    ignored: list[Any] = []
    with pmstore.open(path) as store:
        store["x"] = 1

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(f"pmstore._store.store.{part}", fails)
        patched.setattr(sys, "unraisablehook", ignored.append)
        with pytest.raises(MemoryError):
            pmstore.open(path, mode)
        gc.collect()
    assert not ignored
    with pmstore.open(path) as store:
        assert dict(store) == {"x": 1} and store.check().ok


@pytest.mark.no_sanitizer
def test_growth_beyond_the_limit_of_addresses_names_the_limit(medium: Medium) -> None:
    run_in_fork(_grows_beyond_the_limit, medium)


def _grows_beyond_the_limit(medium: Medium) -> None:
    limit_addresses(600 * MIB)
    with pmstore.open(medium.directory / "s", media=medium.name) as store:
        store["a"] = np.ones(MIB)
        store.commit()
        with pytest.raises(
            pmstore.OutOfSpaceError, match=r"\d+ MiB are needed, and the address space .* \(ulimit -v\)"
        ):
            store.create_array("b", 1 << 30, "u1")
        store["a"][:] = 2
        store.commit()
        assert list(store) == ["a"]


@pytest.mark.no_sanitizer
def test_an_error_names_the_limit_of_memory(medium: Medium) -> None:
    """A snapshot copies the array into memory."""
    path = medium.directory / "store.pm"

    def child() -> None:
        (used,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        resource.setrlimit(resource.RLIMIT_DATA, (int(used) * 1024 + 40 * MIB, resource.RLIM_INFINITY))
        with pytest.raises(pmstore.OutOfMemoryError, match=r"64 MiB are needed.*limited to \d+ MiB.*ulimit -d"):
            pmstore.open(path, "r")["x"].sum()

    with pmstore.open(path, "x") as store:
        store.create_array("x", 8 * MIB, fill_value=1)
        store.commit()
        run_in_fork(child)
