"""A new store gets its name in one step, in each of the ways that file systems have for it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _core
from pmstore._store import naming
from tests.support.naming import SMB, WAYS, answer, pretend


@pytest.mark.parametrize("way", WAYS)
def test_a_new_store_replaces_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    pretend(monkeypatch, way)
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x") as store:
        store["x"] = np.ones(10)
    with pmstore.open(path) as store:
        assert store["x"].sum() == 10

    real = _core.format_file

    def format_late(*arguments: Any) -> None:
        """Another process creates the same store meanwhile."""
        real(*arguments)
        monkeypatch.setattr(_core, "format_file", real)
        with pmstore.open(tmp_path / "other.pm") as store:
            store["other"] = 1
        os.replace(tmp_path / "other.pm", tmp_path / "raced.pm")

    monkeypatch.setattr(_core, "format_file", format_late)
    with pytest.raises(pmstore.StoreExistsError):
        pmstore.open(tmp_path / "raced.pm", "x")
    with pmstore.open(tmp_path / "raced.pm", "r") as store:
        assert store["other"] == 1
    assert sorted(os.listdir(tmp_path)) == ["raced.pm", "store.pm"]


def name_new(path: Path, barrier: threading.Barrier, winners: list[int]) -> None:
    me = threading.get_ident()
    temporary = path.with_name(f".{me}")
    temporary.write_bytes(b"%d" % me)
    barrier.wait()
    try:
        naming.rename(str(temporary), str(path), replace=False)
        winners.append(me)
    except FileExistsError:
        temporary.unlink()


@pytest.mark.parametrize("way", WAYS)
def test_of_two_creators_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The other one is refused, and never left with a file that has no name."""
    pretend(monkeypatch, way)
    for turn in range(30):
        path, winners = tmp_path / f"{turn}.pm", list[int]()
        arguments = (path, threading.Barrier(2), winners)
        threads = [threading.Thread(target=name_new, args=arguments) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [int(path.read_bytes())] == winners


def test_a_directory_that_another_program_has_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new store does not wait for it for ever."""
    answer(monkeypatch, pm_rename_file=errno.EINVAL)
    monkeypatch.setattr(naming, "_TURNS", 2)
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        pmstore.open(tmp_path / "store.pm").close()
        fcntl.flock(other, fcntl.LOCK_UN)
        pmstore.open(tmp_path / "other.pm").close()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was given back
    finally:
        os.close(other)


def test_on_smb_nothing_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a rename over an open file fails, and takes the file away."""
    path = tmp_path / "store.pm"
    with pmstore.open(path) as store:
        store["x"], store["gone"] = np.ones(10), np.ones(300_000)
        store.commit()
        del store["gone"]
    answer(monkeypatch, pm_file_system_type=SMB)
    for replacing in (lambda: pmstore.open(path, "w"), lambda: pmstore.compact(path)):
        with pytest.raises(pmstore.ReadOnlyStoreError, match="on SMB"):
            replacing()
    with pmstore.open(path) as store:
        assert store["x"].sum() == 10
        store.backup(tmp_path / "backup.pm")
    assert sorted(os.listdir(tmp_path)) == ["backup.pm", "store.pm"]


def test_a_file_system_without_shared_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmappable(*_: Any) -> None:
        raise pmstore.StoreIOError("cannot map the file: why")

    monkeypatch.setattr(_core, "format_file", unmappable)
    with pytest.raises(pmstore.StoreIOError, match=r"store\.pm': cannot map the file"):
        pmstore.open(tmp_path / "store.pm")
    assert os.listdir(tmp_path) == []
