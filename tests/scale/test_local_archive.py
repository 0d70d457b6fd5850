"""Copies of local states in an archive: the log is short, and lost states begin with a copy."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scale import Serial
from tests.scale.test_local import counted, folder
from tests.support.sharded import EPOCHS, At, Factors, Once, Runs, Walk, several

EVERY = 1


@pytest.fixture
def stopped(path: Path, tmp_path: Path) -> Path:
    """The archive of a fit that was stopped before the decision of its epoch 5, and whose local states are lost."""
    archive = tmp_path / "archive"
    in_update = At(5, Once(tmp_path / "once", "raise"))
    with pytest.raises(ConnectionError):
        Factors(several(), in_update=in_update).run(path, "f", engine=Serial(), archive=archive, archive_every=EVERY)
    shutil.rmtree(folder(path))
    return archive


@pytest.fixture(scope="module")
def undisturbed() -> bytes:
    factors = Factors(several())
    factors.run(engine=Serial())
    return factors.bits()


def copies(archive: Path, shard: int) -> list[int]:
    (run,) = archive.iterdir()
    return sorted(int(one.name.partition("-")[2]) for one in run.iterdir() if one.name.startswith(f"{shard}-"))


def log(path: Path) -> tuple[int, set[str]]:
    """The first epoch of the log, and the epochs that are in it."""
    with pmstore.open(path, "r") as store:
        return int(store["f/progress"]["log_from"]), {name.split("/")[2] for name in store if "/broadcasts/" in name}


def test_the_log_goes_back_to_the_second_newest_copies(path: Path, stopped: Path) -> None:
    assert [copies(stopped, i) for i in range(5)] == [[2, 3, 4, 5]] * 5
    assert log(path) == (2, {"2", "3", "4"})  # in epoch 4, each shard had copies of 1, 2 and 3


def test_shards_are_copied_in_turns(path: Path, tmp_path: Path) -> None:
    Factors(several(3)).run(path, "f", engine=Serial(), archive=tmp_path / "archive", archive_every=2)
    assert [copies(tmp_path / "archive", i) for i in range(3)] == [[2, 4], [1, 3, 5], [2, 4]]
    assert log(path)[0] == 0  # in epoch 4, shard 0 had one copy


def test_I35_lost_states_begin_with_a_copy(path: Path, stopped: Path, undisturbed: bytes) -> None:
    assert counted(path, archive=stopped, archive_every=EVERY) == (undisturbed, 5)


def test_a_damaged_copy_is_not_taken(path: Path, stopped: Path, undisturbed: bytes) -> None:
    (run,) = stopped.iterdir()
    flipped = bytearray((run / "0-5").read_bytes())
    flipped[40] ^= 1
    (run / "0-5").write_bytes(flipped)
    (run / "1-5").write_bytes(b"short")
    (run / "notes").write_text("of another kind")
    assert counted(path, archive=stopped, archive_every=EVERY) == (undisturbed, 5 + 2)


def test_states_without_a_copy_are_lost(path: Path, stopped: Path) -> None:
    (run,) = stopped.iterdir()
    for file in run.glob("2-*"):
        file.unlink()
    with pytest.raises(pmstore.ShardError, match=r"local state of shard 2 of 5.* before epoch 5 is lost.*archive"):
        counted(path, archive=stopped, archive_every=EVERY)
    shutil.rmtree(stopped)
    with pytest.raises(pmstore.ShardError, match=r"before epoch 5 is lost"):
        counted(path)  # and without an archive


@pytest.mark.parametrize("every", [2, 3])
def test_I35_copies_are_of_decided_states(every: int, path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    archive = tmp_path / "archive"
    in_update = At(5, Once(tmp_path / "once", "raise"))
    options = {"archive": archive, "archive_every": EVERY, "commit_every": every}
    with pytest.raises(ConnectionError):
        Factors(several(), in_update=in_update).run(path, "f", engine=Serial(), **options)
    assert [copies(archive, i) for i in range(5)] == [list(range(every, 6, every))] * 5
    shutil.rmtree(folder(path))
    decided = 5 // every * every
    assert counted(path, **options) == (undisturbed, 5 * (EPOCHS - decided))


def test_the_copies_of_the_best_run_stay(path: Path, tmp_path: Path) -> None:
    class Long(Runs):
        max_iter = 5

    undisturbed = Long(several(3), 0)
    undisturbed.run(engine=Serial())
    runs = Long(several(3), 0)
    runs.run(path, "f", engine=Serial(), archive=tmp_path / "archive", archive_every=1)
    first, epochs = log(path)
    assert first > 0 and epochs == {str(epoch) for epoch in range(first, 5)}
    assert all({3, 4} <= set(copies(tmp_path / "archive", i)) for i in range(3))
    shutil.rmtree(folder(path))
    assert runs.result() == undisturbed.result()


def test_parts_that_were_lost_begin_with_a_copy(path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    factors = Factors(several())
    factors.run(path, "f", engine=Serial(), archive=tmp_path / "archive", archive_every=1)
    assert log(path)[0] == EPOCHS - 3
    assert all(len(copies(tmp_path / "archive", i)) <= 4 for i in range(5))
    shutil.rmtree(folder(path))
    assert factors.bits() == undisturbed
    shutil.rmtree(tmp_path / "archive")
    with pytest.raises(pmstore.ShardError, match=f"shard 1 is lost.*begins with epoch {EPOCHS - 3}"):
        factors.local_parts("W")[1]


def test_an_archive_in_an_object_store(path: Path, undisturbed: bytes) -> None:
    fsspec = pytest.importorskip("fsspec")
    factors = Factors(several())
    factors.run(path, "f", engine=Serial(), archive="memory://bucket/fit", archive_every=EVERY)
    shutil.rmtree(folder(path))
    assert factors.bits() == undisturbed
    assert fsspec.filesystem("memory").find("/bucket/fit")


def test_reset_deletes_the_copies(path: Path, stopped: Path) -> None:
    Factors(several(2)).run(path, "other", engine=Serial(), archive=stopped, archive_every=EVERY)
    (run,) = (one for one in stopped.iterdir() if (one / "4-5").exists())
    (run / "notes.txt").write_text("mine")
    shutil.copytree(path.parent, path.parent / "before", ignore=shutil.ignore_patterns("before", "archive"))
    factors = Factors(several())
    factors.reset(path, "f")
    assert (run / "4-5").exists()
    for _ in range(2):  # as if a crash had come before the fit was forgotten
        shutil.copyfile(path.parent / "before" / path.name, path)
        factors.reset(path, "f", archive=stopped)
        assert [one.name for one in run.iterdir()] == ["notes.txt"]
        with pmstore.open(path, "r") as store:
            assert not any(name.startswith("f/") for name in store) and "other/finished" in store
    (other,) = (one for one in stopped.iterdir() if one != run)
    assert (other / f"1-{EPOCHS - 1}").exists()
    factors.reset(path, "f", archive=stopped)  # there is none


def test_reset_spares_copies_that_another_group_needs(path: Path, tmp_path: Path) -> None:
    factors, options = Factors(several(2)), {"engine": Serial(), "archive": tmp_path / "archive", "archive_every": 1}
    for name in ("a", "b"):
        factors.run(path, name, **options)
    found = copies(tmp_path / "archive", 0)
    factors.reset(path, "a", archive=tmp_path / "archive")
    assert copies(tmp_path / "archive", 0) == found != []
    factors.reset(path, "b", archive=tmp_path / "archive")
    assert copies(tmp_path / "archive", 0) == []


def test_an_archive_that_refuses_keeps_the_fit(
    path: Path, stopped: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        with pmstore.open(path) as store:
            store["pending"] = 1
            with pytest.raises(pmstore.ArchiveUnavailableError, match="can't be deleted: Permission denied"):
                Factors(several()).reset(store, "f", archive=stopped)
            assert store["pending"] == 1
    assert counted(path, archive=stopped, archive_every=EVERY) == (undisturbed, 5)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_arguments_that_make_no_sense(every: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="archive_every"):
        Factors(several(2)).run(engine=Serial(), archive=tmp_path, archive_every=every)
    with pytest.raises(ValueError, match="Walk has no local_fields"):
        Walk(several(2)).run(engine=Serial(), archive=tmp_path)
    with pytest.raises(ValueError, match="Walk has no local_fields"):
        Walk(several(2)).run(engine=Serial(), local=tmp_path)
    with pytest.raises(ValueError, match="Walk has no local_fields"):
        Walk(several(2)).reset(tmp_path / "s.pm", "f", archive=tmp_path)


def test_an_archive_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "archive").write_text("a file")
    with pytest.raises(pmstore.ShardError, match="(?s)epoch 1.*ArchiveUnavailableError.*archive"):
        Factors([np.ones((3, 4))]).run(engine=Serial(), archive=tmp_path / "archive", archive_every=1)
