"""Local states that nobody needs are deleted, and no others, whenever the process dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scale import Serial, _prune, prune_local
from tests.scale.test_local import Counted, counted
from tests.support.sharded import EPOCHS, At, Factors, Once, several


def directory(path: Path) -> Path:
    return Path(f"{path}.local")


def folders(path: Path) -> list[str]:
    return sorted(one.name for one in directory(path).iterdir())


@pytest.fixture
def expected() -> bytes:
    factors = Factors(several())
    factors.run(engine=Serial())
    return factors.bits()


@pytest.fixture
def three(path: Path, tmp_path: Path) -> tuple[str, str, str]:
    """The folders of a finished fit, of one that was killed in epoch 3, and of one that was forgotten."""
    names: list[str] = []

    def new() -> None:
        names.extend(name for name in folders(path) if name not in names)

    other = Factors(several(2))
    other.run(path, "finished", engine=Serial())
    new()
    with pytest.raises(ConnectionError):
        Factors(several(), in_update=At(3, Once(tmp_path / "once", "raise"))).run(path, "f", engine=Serial())
    new()
    Factors(several(3)).run(path, "forgotten", engine=Serial())
    new()
    with pmstore.open(path) as store:
        store.group("forgotten").clear()
    finished, killed, forgotten = names
    return finished, killed, forgotten


def test_only_states_of_no_fit_are_deleted(path: Path, three: tuple[str, str, str], expected: bytes) -> None:
    finished, killed, forgotten = three
    assert prune_local(path) == [forgotten]
    assert folders(path) == sorted([finished, killed])
    assert prune_local(path) == []
    assert counted(path) == (expected, 5 * (EPOCHS - 3))


def test_states_of_finished_fits(path: Path, three: tuple[str, str, str], expected: bytes) -> None:
    finished, killed, forgotten = three
    with pmstore.open(path) as store:
        assert prune_local(store, finished=True) == sorted([finished, forgotten])
    assert folders(path) == [killed]
    again = Counted(several(2))
    Counted.calls = 0
    again.run(path, "finished", engine=Serial())
    assert np.asarray(again.local_parts("epochs")).tolist() == [EPOCHS] * 2
    assert Counted.calls == 2 * EPOCHS
    assert counted(path) == (expected, 5 * (EPOCHS - 3))


def test_states_of_a_finished_fit_with_a_part_of_its_log(path: Path, tmp_path: Path) -> None:
    Factors(several(2)).run(path, "f", engine=Serial(), archive=tmp_path / "archive", archive_every=1)
    assert prune_local(path, finished=True) == []
    assert len(folders(path)) == 1


def test_reset_deletes_the_states(path: Path, three: tuple[str, str, str], expected: bytes) -> None:
    finished, _, _ = three
    factors = Factors(several())
    factors.reset(path, "f")
    assert folders(path) == [finished]
    assert counted(path) == (expected, 5 * EPOCHS)
    factors.reset(path.with_name("none.pm"), "f")
    assert not path.with_name("none.pm").exists()


def test_reset_by_a_link_to_the_store(path: Path, tmp_path: Path) -> None:
    """The directory of the local states is named after the path that was given."""
    pmstore.open(path).close()
    link = tmp_path / "link.pm"
    link.symlink_to(path)
    factors = Factors(several(2))
    factors.run(link, "f", engine=Serial())
    assert len(folders(link)) == 1
    factors.reset(link, "f")
    assert folders(link) == []


@pytest.mark.parametrize("given", ["~/fit.pm", "file://{}/fit.pm", b"fit.pm"])
def test_paths_of_all_kinds(given: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(path.parent))
    monkeypatch.chdir(path.parent if given == b"fit.pm" else tmp_path)
    given = given.format(path.parent) if isinstance(given, str) else given
    factors = Factors(several(2))
    factors.run(given, "f", engine=Serial())
    (folder,) = folders(path)
    assert prune_local(given, finished=True) == [folder]
    assert np.asarray(factors.local_parts("epochs")).tolist() == [EPOCHS] * 2  # from the log
    Factors(several(3)).run(given, "g", engine=Serial())
    for name in ("f", "g"):
        factors.reset(given, name)
    with pmstore.open(path) as store:
        assert len(store) == 0 and folders(path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_store_in_memory(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    factors = Factors(several())
    for use in (factors.run, factors.reset, prune_local):
        with pytest.raises(ValueError, match=r"pass the open store that pmstore.open\(\":memory:\"\) returns"):
            use(":memory:", **({} if use == prune_local else {"name": "f"}))  # type: ignore[operator]
    with pmstore.open(":memory:") as store:
        factors.run(store, "f", engine=Serial())
        assert factors.bits() == expected and not directory(Path(store.path)).exists()
        factors.reset(store, "f")
        assert len(store) == 0
    assert list(tmp_path.iterdir()) == []


def test_another_directory(path: Path, tmp_path: Path) -> None:
    Factors(several(2)).run(path, "f", engine=Serial(), local=tmp_path / "states")
    (name,) = os.listdir(tmp_path / "states")
    with pmstore.open(path) as store:
        store.group("f").clear()
    assert prune_local(path) == []
    assert prune_local(path, local=tmp_path / "states") == [name]
    assert os.listdir(tmp_path / "states") == []
    assert prune_local(path, local=tmp_path / "nowhere") == []
    directory(path).write_text("a file")
    Factors(several(2)).reset(path, "f")


def test_what_is_no_local_state_stays(path: Path, three: tuple[str, str, str]) -> None:
    _, _, forgotten = three
    place = directory(path)
    (place / forgotten / "notes.txt").write_text("mine")
    (place / forgotten / "shard-77.pm").mkdir()
    (place / "0123456789abcdef").write_text("a file")
    (place / "more").mkdir()
    (place / "00112233aabbccdd").mkdir()
    (place / "00112233aabbccdd" / "cached").write_text("by another program")
    (place / "fedcba9876543210").symlink_to(place / "more")
    assert prune_local(path) == [forgotten]
    left = {one.name for one in (place / f"{forgotten}.deleted-0").iterdir()}
    assert left == {"notes.txt", "shard-77.pm"}
    assert {"0123456789abcdef", "more", "fedcba9876543210", "00112233aabbccdd"} < set(folders(path))


@pytest.mark.parametrize("moment", ["listdir", "unlink", "rmdir"])
def test_two_calls_at_once(
    moment: str, path: Path, three: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one deletes everything in the middle of the first one, which has left the lock of the store."""
    finished, killed, forgotten = three
    true = getattr(os, moment)

    def second(place: Any) -> Any:
        if ".deleted-" in os.fspath(place):
            monkeypatch.setattr(_prune.os, moment, true)
            assert prune_local(path) == []
        return true(place)

    monkeypatch.setattr(_prune.os, moment, second)
    assert prune_local(path) == [forgotten]
    assert folders(path) == sorted([finished, killed])


class Crash(BaseException):
    pass


@contextlib.contextmanager
def crash_after(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process ends before its next change of a directory, after so many."""
    changes = 0

    def counting(true: Any) -> Any:
        def change(*arguments: Any) -> None:
            nonlocal changes
            changes += 1
            if changes > count:
                raise Crash
            true(*arguments)

        return change

    with monkeypatch.context() as patch:
        for name in ("rename", "unlink", "rmdir"):
            patch.setattr(_prune.os, name, counting(getattr(os, name)))
        yield


def test_I35_a_crash_at_any_change(
    path: Path, three: tuple[str, str, str], expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished, killed, _ = three
    shutil.copytree(directory(path), tmp_path / "states")
    crashes = 0
    while True:
        try:
            with crash_after(crashes, monkeypatch):
                prune_local(path)
            break
        except Crash:
            crashes += 1
        assert {finished, killed} <= set(folders(path))
        prune_local(path)
        assert folders(path) == sorted([finished, killed])
        shutil.rmtree(directory(path))
        shutil.copytree(tmp_path / "states", directory(path))
    assert crashes == 1 + 3 + 1
    assert counted(path) == (expected, 5 * (EPOCHS - 3))


def test_I35_what_was_pending_is_committed_first(
    path: Path, three: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit that is only forgotten in memory comes back with a rollback, and would lack its states then."""
    with pmstore.open(path) as store:
        for name in ("finished", "f"):
            store.group(name).clear()
        store["mine"] = 1
        true, renamed = os.rename, []

        def rename(*names: Any) -> None:
            if renamed:
                raise PermissionError(*names)
            renamed.append(names)
            true(*names)

        monkeypatch.setattr(_prune.os, "rename", rename)
        with pytest.raises(PermissionError):
            prune_local(store)
        assert renamed and dict(store) == {"mine": 1}


def test_I35_a_worker_that_outlives_its_coordinator(path: Path, three: tuple[str, str, str]) -> None:
    """It has a store open that is deleted, and makes the folder again for another shard."""
    _, _, forgotten = three
    with pmstore.open(directory(path) / forgotten / "shard-1.pm") as store:
        assert prune_local(path) == [forgotten]
        store["shard/slots"]["epoch"] = 7
        (directory(path) / forgotten).mkdir()
        (directory(path) / forgotten / "shard-2.pm").write_bytes(b"")
    assert prune_local(path) == [forgotten]
    Factors(several(3)).run(path, "forgotten", engine=Serial())
    assert forgotten in folders(path)


def test_I35_no_fit_begins_while_it_looks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that begins the fit of a folder that is being deleted waits, and gets a new one."""
    Factors(several(2)).run(path, "f", engine=Serial())
    with pmstore.open(path) as store:
        store.group("f").clear()
        store.commit()
        true, threads = _prune._needed, []

        def needed(*arguments: Any) -> Any:
            found = list(true(*arguments))
            fit = Factors(several(2)).run
            threads.append(threading.Thread(target=fit, args=(store, "f"), kwargs={"engine": Serial()}))
            threads[0].start()
            return found

        monkeypatch.setattr(_prune, "_needed", needed)
        assert len(prune_local(store)) == 1
        threads[0].join()
        assert store["f/finished"]
    assert len(list((directory(path) / folders(path)[0]).iterdir())) == 2


def test_arguments_that_make_no_sense(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        prune_local(path)
    with pytest.raises(TypeError):
        prune_local(3)  # type: ignore[arg-type]
    with pmstore.open(path) as store:
        with pytest.raises(TypeError, match="finished is True or False"):
            prune_local(store, finished=1)  # type: ignore[arg-type]
        with store.transaction(), pytest.raises(pmstore.TransactionError):
            prune_local(store)
        assert prune_local(store) == []
    with pytest.raises(pmstore.ClosedStoreError):
        prune_local(store)
    with pmstore.open(path, "r") as store, pytest.raises(pmstore.ReadOnlyStoreError, match="open for reading"):
        prune_local(store)


# ---- parts of a fit that is gone


def gone_store(path: Path) -> None:
    path.unlink()


def gone_fit(path: Path) -> None:
    with pmstore.open(path) as store:
        store.group("f").clear()


def other_fit(path: Path) -> None:
    gone_fit(path)
    Factors(several(3)).run(path, "f", engine=Serial())


def begun_again(path: Path) -> None:
    gone_fit(path)
    in_update = At(2, Once(path.with_name("once"), "raise"))
    with pytest.raises(ConnectionError):
        Factors(several(2), in_update=in_update).run(path, "f", engine=Serial())
    shutil.rmtree(directory(path))


GONE = {
    "store": (gone_store, "fit.pm does not exist any more"),
    "fit": (gone_fit, "has no fit 'f' any more"),
    "another fit": (other_fit, "is another one now"),
    "begun again": (begun_again, "was begun again, and has not ended"),
}


@pytest.mark.parametrize("what", GONE)
def test_parts_of_a_fit_that_is_gone(what: str, path: Path) -> None:
    go, message = GONE[what]
    factors = Factors(several(2))
    factors.run(path, "f", engine=Serial())
    W = factors.local_parts("W")
    whole = np.asarray(W)
    path.with_name("once").unlink(missing_ok=True)
    shutil.rmtree(directory(path))
    assert np.array_equal(W, whole)  # from the log
    go(path)
    with pytest.raises(
        pmstore.ShardError, match=rf"shard 1 is lost: .*\.local/.* does not have it.*{message}.*run\(\)"
    ):
        W[1]
    factors.run(path, "again", engine=Serial())
    assert np.array_equal(factors.local_parts("W"), whole)
