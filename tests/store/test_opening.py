"""Opening: modes, locks between and within processes, creation, files that aren't what they should be."""

from __future__ import annotations

import errno
import os
import pickle
import re
import signal
import stat
import struct
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore import _core
from pmstore._resume import fit_group
from tests.support.restricted import let_others_enter

HOLD = """
import sys, pmstore
store = pmstore.open(sys.argv[1], sys.argv[2], exclusive=True)
print("open", flush=True)
input()
store.close()
print("closed", flush=True)
"""


@pytest.fixture
def path(medium):
    return medium.directory / "store.pm"


def names_in(directory):
    return sorted(os.listdir(directory))


# ---- modes


def test_modes(path):
    for mode in ("r", "r+"):
        with pytest.raises(FileNotFoundError, match='mode "a" creates one'):
            pmstore.open(path, mode)
    assert not path.exists()
    with pmstore.open(path, "x") as store:
        store["a"] = 1
        assert (store.path, store.mode) == (str(path), "x")
    with pytest.raises(FileExistsError):
        pmstore.open(path, "x")
    with pmstore.open(path) as store:
        assert store["a"] == 1
        store["a"] = 2
    with pmstore.open(path, "r+") as store:
        assert store["a"] == 2
    with pmstore.open(path, "r") as store:
        assert store["a"] == 2
    with pmstore.open(path, "w") as store:
        assert len(store) == 0
    with pmstore.open(path) as store:
        assert len(store) == 0
    assert names_in(path.parent) == ["store.pm"]


def test_read_only(path):
    with pmstore.open(path) as store:
        store.create_array("w", 3)
        store["v"] = [1]
        store.create_list("items").append(1)
    before = path.read_bytes()
    with pmstore.open(path, "r") as store:
        for use in (
            lambda: store.__setitem__("v", 1),
            lambda: store.__setitem__("w", np.ones(3)),
            lambda: store.__setitem__("new", np.ones(3)),
            lambda: store.__delitem__("v"),
            lambda: store.clear(),
            lambda: store.pop("v"),
            lambda: store.setdefault("new", 1),
            lambda: store.create_array("new", 3),
            lambda: store.require_array("new", 3),
            lambda: store.create_list("new"),
            lambda: store["items"].append(1),
            lambda: store["items"].clear(),
            lambda: store.commit(),
        ):
            with pytest.raises(PermissionError, match="reading only"):
                use()
        w = store["w"]
        assert store.require_array("w", 3) is w and store.setdefault("v") == [1]
        with pytest.raises(ValueError):
            w[0] = 1
        with pytest.raises(ValueError):
            w.flags.writeable = True
        store["v"].append(2)
        assert store.check().ok
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", [str, os.fsencode, Path])
def test_kinds_of_paths(path, kind):
    with pmstore.open(kind(path)) as store:
        assert store.path == str(path)


def test_a_relative_path(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    with pmstore.open("store.pm") as store:
        monkeypatch.chdir("/")
        assert store.path == str(path)
    assert path.exists()


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (dict(mode="rw"), ValueError, "mode is one of"),
        (dict(mode=None), ValueError, "mode is one of"),
        (dict(media="tape"), ValueError, "media is one of"),
        (dict(durability="soon"), ValueError, "'sync' or 'async'"),
        (dict(sync_interval=-1), ValueError, "sync_interval is 0 or more seconds"),
        (dict(sync_interval="1"), TypeError, "sync_interval is a number of seconds"),
        (dict(timeout=-1), ValueError, "0 or more seconds"),
        (dict(timeout=float("nan")), ValueError, "0 or more seconds"),
        (dict(timeout="1"), TypeError, "number of seconds"),
        (dict(timeout=None), TypeError, "number of seconds"),
        (dict(max_size=0), ValueError, "at least 794624, the bytes of an empty store"),
        (dict(max_size=-5), ValueError, "at least 794624, the bytes of an empty store"),
        (dict(max_size=794_623), ValueError, "at least 794624, the bytes of an empty store"),
        (dict(max_size=True), TypeError, "number of bytes or None, not bool"),
        (dict(max_size=1.5), TypeError, "number of bytes"),
        (dict(max_size=1 << 70), ValueError, "at least 794624, the bytes of an empty store"),
        (dict(path=5.0), TypeError, "path is"),
        (dict(path=None), TypeError, "path is"),
        (dict(path=""), ValueError, "not a path"),
        (dict(path="a\0b"), ValueError, "not a path"),
        (dict(path="a\ud800b"), ValueError, "not a path"),
    ],
    ids=str,
)
def test_wrong_arguments(path, arguments, error, text):
    with pytest.raises(error, match=text):
        pmstore.open(**{"path": path, **arguments})
    assert names_in(path.parent) == []


def test_paths_that_lead_nowhere(path):
    path.write_bytes(b"a file")
    loop = path.with_name("loop")
    loop.symlink_to("loop")
    for bad, kind, code in (
        (path / "below", NotADirectoryError, errno.ENOTDIR),
        (path.parent / ("x" * 300), OSError, errno.ENAMETOOLONG),
        (loop, OSError, errno.ELOOP),
        (path.parent, IsADirectoryError, errno.EISDIR),
        (f"{path.parent}/new/", IsADirectoryError, errno.EISDIR),
        (f"{path.parent}/new/.", IsADirectoryError, errno.EISDIR),
    ):
        for mode in ("r", "r+", "a", "w", "x"):
            with pytest.raises(kind, match=re.escape(str(bad))) as caught:
                pmstore.open(bad, mode)
            assert isinstance(caught.value, pmstore.StoreIOError) and caught.value.errno == code
            assert isinstance(pickle.loads(pickle.dumps(caught.value)), kind)
    assert names_in(path.parent) == ["loop", "store.pm"]


def test_a_missing_directory(path):
    for mode in ("a", "w", "x"):
        with pytest.raises(FileNotFoundError, match="directory"):
            pmstore.open(path / "below" / "it", mode)


@pytest.mark.parametrize("mode", ["r", "r+", "a", "w", "x"])
def test_a_directory_or_a_pipe(path, mode):
    with pytest.raises(IsADirectoryError):
        pmstore.open(path.parent, mode)
    os.mkfifo(path)
    with pytest.raises(pmstore.NotAStoreError, match="regular"):
        pmstore.open(path, mode)


def test_symbolic_links(path):
    link = path.with_name("link")
    link.symlink_to("store.pm")
    for mode in ("a", "w"):
        with pmstore.open(link, mode) as store:
            store["a"] = 1
        assert link.is_symlink() and path.is_file() and not path.is_symlink()
    with pmstore.open(path) as store:
        with pmstore.open(link) as same:
            assert same is store and store.path == str(path)
        link.unlink()
        path.with_name("other").symlink_to("store.pm")
        assert not store.closed and pmstore.open(path.with_name("other")) is store
        store.close()


def test_permissions(path):
    with pmstore.open(path):
        pass
    path.chmod(0o640)
    with pmstore.open(path, "w"):
        pass
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_memory_on_a_disk_is_refused(tmp_path):
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True).stdout.strip()
    if kind == "tmpfs":
        pytest.skip("the temporary directory is a tmpfs")
    for media in ("memory", "trace:memory"):
        with pytest.raises(ValueError, match="needs a file on tmpfs"):
            pmstore.open(tmp_path / "s", media=media)
    assert names_in(tmp_path) == []
    pmstore.open(tmp_path / "s").close()
    with pytest.raises(ValueError, match="needs a file on tmpfs"):
        pmstore.open(tmp_path / "s", media="memory")


@pytest.mark.parametrize("media", ["trace", "trace:file", "auto", "file"])
def test_kinds_of_media(path, media):
    with pmstore.open(path, media=media) as store:
        store["a"] = 1
        store.commit()
        assert store.media in ("memory", "file", "dax")
        if media.startswith("trace"):
            assert len(store._catalog.core.trace) > 3
    with pmstore.open(path, "r") as store:
        assert store["a"] == 1


# ---- locks


def test_what_can_not_be_opened_beside_a_store_that_this_process_has_open(path):
    with pmstore.open(path) as store:
        store["a"] = 1
        for mode, options in (("w", {}), ("r", {"exclusive": True}), ("a", {"media": "trace"})):
            with pytest.raises(BlockingIOError, match=r"test_opening.py:\d+") as caught:
                pmstore.open(path, mode, **options)
            assert caught.value.errno == errno.EAGAIN and str(os.getpid()) in str(caught.value)
        with pytest.raises(FileExistsError):
            pmstore.open(path, "x")
        store["a"] = 2
    with pmstore.open(path) as store:
        assert store["a"] == 2
    with fit_group.opened(path, "a test"):  # a context manager of pmstore's, by contextlib
        with pytest.raises(BlockingIOError, match=r"at [^ ]*test_opening.py:\d+,"):
            pmstore.open(path, "w")


def test_readers_share(path):
    with pmstore.open(path) as store:
        store["a"] = np.arange(3)
    with pmstore.open(path, "r", exclusive=True) as one, pmstore.open(path, "r", exclusive=True) as two:
        assert one["a"].tolist() == two["a"].tolist() == [0, 1, 2]
        with pytest.raises(pmstore.StoreLockedError, match="for reading"):
            pmstore.open(path)
        assert pmstore.open(path, "r")["a"].tolist() == [0, 1, 2]
    pmstore.open(path).close()


def test_whose_store_it_is_stays_known_after_its_creation_and_commits(tmp_path, child):
    """Closing any descriptor of a file gives up what names the process; records have one of their own."""
    other = child(
        """
        import sys, numpy as np, pmstore
        store = pmstore.open(sys.argv[1], media="file")
        store["x"] = np.zeros(100_000)
        store.commit()
        store["x"][::500] = 1
        store.commit()
        with pmstore.open(sys.argv[1], "r") as reader:
            reader.read("x")
        print("open", flush=True)
        input()
        """,
        tmp_path / "store.pm",
    )
    assert other.line() == "open"
    with pytest.raises(pmstore.StoreLockedError, match=f"process {other.process.pid} has it open for writing"):
        pmstore.open(tmp_path / "store.pm")
    other.go()
    other.end()


def test_a_second_writer_in_another_process(path, child):
    other = child(HOLD, path, "a")
    assert other.line() == "open"
    for mode in ("a", "r+", "w", "r"):
        text = f"process {other.process.pid} has it open for writing"
        with pytest.raises(pmstore.StoreLockedError, match=text) as caught:
            pmstore.open(path, mode, exclusive=True)
        assert ("reads a snapshot beside it" in str(caught.value)) == (mode == "r")
        assert ("timeout=seconds" in str(caught.value)) == (mode != "r")
    other.go()
    assert other.line() == "closed"
    pmstore.open(path).close()


def test_the_lock_goes_with_the_process(path, child):
    other = child(HOLD, path, "a")
    other.line()
    other.process.send_signal(signal.SIGKILL)
    other.process.wait()
    pmstore.open(path).close()


def test_readers_in_another_process(path, child):
    pmstore.open(path).close()
    other = child(HOLD, path, "r")
    other.line()
    with pmstore.open(path, "r", exclusive=True), pytest.raises(pmstore.StoreLockedError):
        pmstore.open(path)
    with pytest.raises(pmstore.StoreLockedError, match=f"process {other.process.pid} has it open for reading"):
        pmstore.open(path)


def test_a_timeout_waits(path, child):
    other = child(HOLD, path, "a")
    other.line()
    with pytest.raises(pmstore.StoreLockedError):
        pmstore.open(path, timeout=0.01)
    other.go()
    with pmstore.open(path, timeout=60) as store:
        assert store.sequence == 0


def test_threads_that_open_and_close_at_once(path):
    """One opens or closes the store while the others come and go."""

    def work():
        for _ in range(10):
            with pmstore.open(path) as store, store.transaction():
                store["n"] = store.get("n", 0) + 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pmstore.open(path) as store:
        assert store["n"] == 40


def test_processes_that_create_at_once(path, child):
    code = """
    import sys, pmstore
    print("ready", flush=True)
    input()
    for i in range(20):
        with pmstore.open(sys.argv[1], sys.argv[2], timeout=60) as store:
            store["n"] = store.get("n", 0) + 1
    """
    children = [child(code, path, "a") for _ in range(3)]
    for one in children:
        one.line()
    for one in children:
        one.go()
    for one in children:
        one.end()
    with pmstore.open(path) as store:
        assert store["n"] == 60
    assert names_in(path.parent) == ["store.pm"]


def test_only_one_of_many_creates(path, child):
    code = """
    import sys, pmstore
    print("ready", flush=True)
    input()
    try:
        pmstore.open(sys.argv[1], "x").close()
        print("created")
    except FileExistsError:
        print("exists")
    """
    children = [child(code, path) for _ in range(4)]
    for one in children:
        one.line()
    for one in children:
        one.go()
    assert sorted(one.end().strip() for one in children) == ["created", "exists", "exists", "exists"]


def test_mode_w_replaces_under_the_lock(path, child):
    code = """
    import sys, pmstore
    for i in range(15):
        with pmstore.open(sys.argv[1], "w", timeout=60) as store:
            assert len(store) == 0
            store["mine"] = sys.argv[2]
            store.commit()
            assert store["mine"] == sys.argv[2]
    """
    for one in [child(code, path, i) for i in range(3)]:
        one.end()
    with pmstore.open(path) as store:
        assert store["mine"] in ("0", "1", "2")


def test_what_a_dead_creator_left_is_swept(path):
    stale = path.with_name(".pmstore-creating-0123456789abcdef")
    stale.write_bytes(b"half a store")
    pmstore.open(path).close()
    assert names_in(path.parent) == ["store.pm"]


def test_failed_openings_let_go(path):
    path.write_bytes(b"no store at all" * 1000)
    for _ in range(3):
        with pytest.raises(pmstore.NotAStoreError):
            pmstore.open(path)
    with pmstore.open(path, "w") as store:  # what "w" is for
        store["a"] = 1
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(pmstore.StoreLockedError), pmstore.open(path):
            pmstore.open(path, "w")
    assert len(os.listdir("/proc/self/fd")) <= count


def test_readers_let_go(path):
    with pmstore.open(path) as store:
        store["a"] = 1
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pmstore.open(path, "r") as store:
            assert store["a"] == 1
    assert len(os.listdir("/proc/self/fd")) <= count


# ---- files that aren't what they should be


@pytest.mark.parametrize("contents", [b"", b"x", b"PMSTORE", b"#!/bin/sh\n" * 2000, bytes(100_000)], ids=len)
@pytest.mark.parametrize("mode", ["r", "r+", "a"])
def test_not_a_store(path, contents, mode):
    path.write_bytes(contents)
    with pytest.raises(pmstore.NotAStoreError) as caught:
        pmstore.open(path, mode)
    assert isinstance(caught.value, ValueError) and repr(str(path)) in str(caught.value)
    advice = 'the file is empty, not a store (delete it, or let mode "w" replace it)'
    assert str(caught.value).endswith(advice) == (not contents)
    assert path.read_bytes() == contents


def test_a_newer_format(path):
    with pmstore.open(path) as store:
        store["a"] = 1
    data = bytearray(path.read_bytes())
    for copy in (0, 4096):
        struct.pack_into("<I", data, copy + 8, 7)
        header = bytes(data[copy : copy + 252])
        struct.pack_into("<I", data, copy + 252, _core.lib.pm_crc32c(header, 252, 0))
    path.write_bytes(data)
    for mode in ("r", "r+", "a"):
        with pytest.raises(pmstore.FormatVersionError, match="7") as caught:
            pmstore.open(path, mode)
        assert repr(str(path)) in str(caught.value)
    assert path.read_bytes() == data


def test_truncated(path):
    with pmstore.open(path) as store:
        store["a"] = np.arange(100_000)
        store["b"] = "text"
    data = path.read_bytes()
    for length in sorted({1, 79, 4095, 4096, 4176, 8191, 8192, 12288, len(data) // 2, len(data) - 4096, len(data) - 1}):
        path.write_bytes(data[:length])
        for mode in ("r", "a"):
            with pytest.raises(pmstore.CorruptStoreError, match=re.escape(repr(str(path)))):
                with pmstore.open(path, mode, verify=True):
                    pass
    path.write_bytes(data)
    with pmstore.open(path, verify=True) as store:
        assert store["b"] == "text"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_file_of_someone_else(path, child):
    with pmstore.open(path) as store:
        store["a"] = 5
    path.chmod(0o444)
    let_others_enter(path)
    code = """
    import os, sys, pmstore
    os.setuid(65534)
    try:
        pmstore.open(sys.argv[1])
    except pmstore.ReadOnlyStoreError as error:
        assert isinstance(error, PermissionError) and 'mode="r"' in str(error), error
    try:
        pmstore.open(sys.argv[1] + ".new")
    except PermissionError as error:
        assert "can't be created" in str(error), error
    for mode in ("r", "a"):
        try:
            pmstore.open(sys.argv[2], mode)
        except pmstore.StoreIOError as error:
            assert isinstance(error, PermissionError) and sys.argv[2] in str(error), error
    with pmstore.open(sys.argv[1], "r") as store:
        print(store["a"])
    """
    closed = path.with_name("closed")
    closed.mkdir(0o700)
    assert child(code, path, closed / "s").end().strip() == "5"


# ---- space


def test_max_size(path):
    with pmstore.open(path, max_size=2 << 20) as store:
        w = store.create_array("w", 10_000, fill_value=1)
        store["v"] = 1
        store.commit()
        with pytest.raises(pmstore.OutOfSpaceError, match="max_size is 2097152 .a larger one can be given") as caught:
            store["big"] = np.ones(10_000_000)
        assert isinstance(caught.value, OSError) and caught.value.errno == errno.ENOSPC
        for i in range(100):
            try:
                store["v"] = bytes(100_000 + i)
                store[f"x{i}"] = np.full(10_000, i)
                store.commit()
            except pmstore.OutOfSpaceError:
                break
        else:
            raise AssertionError("2 MiB held 8 MB")
        assert (w == 1).all() and "big" not in store
        store.rollback()
        assert store.check().ok
        for i in range(100):
            store.pop(f"x{i}", None)
        store["v"] = 2
        store.commit()
        w[:] = 2
    assert path.stat().st_size <= 2 << 20
    with pmstore.open(path, "r", verify=True) as store:
        assert store["v"] == 2 and (store["w"] == 2).all()


def test_a_full_disk(small_disk):
    mount = small_disk("8m")
    for media in ("memory", "file"):
        path = mount / media
        with pmstore.open(path, media=media) as store:
            w = store.create_array("w", 50_000)
            store.commit()
            for i in range(1000):
                try:
                    with store.transaction():
                        w[:] = i
                        store[f"x{i}"] = np.full(100_000, i)
                except pmstore.OutOfSpaceError as error:
                    disk = os.statvfs(mount)
                    left = disk.f_bavail * disk.f_frsize // 1024
                    told = rf"the file can't grow by \d+ KiB: {mount}/ has {left} KiB left \(make room"
                    assert re.search(told, str(error))
                    break
            assert 1 <= i < 12 and (w == i - 1).all() and len(store) == i + 1
            w[:] = -1  # a store into an array is never a signal
            store.commit()
            assert store.check().ok
        with pmstore.open(path, "r", verify=True) as store:
            assert (store["w"] == -1).all() and len(store) == i + 1
        path.unlink()
    (mount / "filler").write_bytes(bytes(7_900_000))
    with pytest.raises(pmstore.OutOfSpaceError, match=rf"new' can't be created: .* {mount}/ has \d+ KiB left"):
        pmstore.open(mount / "new")
    assert names_in(mount) == ["filler"]


def test_a_later_version_is_believed_only_if_both_copies_of_the_header_have_it(path: Path) -> None:
    """And if it is one that there may once be."""
    pmstore.open(path).close()
    old = path.read_bytes()
    for first, second in ((8, 8), (8, 9), (999, 999), (1000, 1000)):
        data = bytearray(old)
        for copy, version in ((0, first), (4096, second)):  # with checksums that this version can't know
            struct.pack_into("<I", data, copy + 8, version)
        path.write_bytes(data)
        if first == second < 1000:
            with pytest.raises(pmstore.FormatVersionError, match=f"format version {first}"):
                pmstore.open(path)
        else:
            with pytest.raises(pmstore.CorruptStoreError, match="both copies of the header are damaged"):
                pmstore.open(path)
