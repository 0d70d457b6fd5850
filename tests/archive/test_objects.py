"""The contract of every place of objects, and how each kind of place fails."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.archive._objects import (
    FsspecPlace,
    LocalPlace,
    MissingObjectError,
    ObjectExistsError,
    Place,
    ShortObjectError,
    place_of,
)
from pmstore.testing._files.fixture import CrashFiles
from tests.archive.conftest import Server, Target
from tests.conftest import run_in_fork
from tests.support.naming import WAYS, answer, pretend

Another = Callable[[], Place]

# ---- the contract


def test_what_is_put_is_got(place: Place) -> None:
    array = np.arange(1000.0)
    place.put("parts/0001-000001", [b"head", bytearray(b"er"), memoryview(array), b""])
    expected = b"header" + array.tobytes()
    assert place.get("parts/0001-000001") == expected
    assert place.size("parts/0001-000001") == len(expected)
    assert place.get("parts/0001-000001", 4, 10) == expected[4:14]
    assert place.get("parts/0001-000001", 4) == expected[4:]
    assert type(place.get("parts/0001-000001", 1, 2)) is bytes


def test_many_and_large_buffers(place: Place) -> None:
    pieces = [bytes([k % 251]) * (k % 7) for k in range(5000)] + [np.full(3 << 20, 7, np.uint8).tobytes()]
    place.put("many", pieces)
    assert place.get("many") == b"".join(pieces)


def test_put_replaces(place: Place) -> None:
    place.put("archive", [b"one"])
    place.put("archive", [b"longer"])
    assert place.get("archive") == b"longer" and place.size("archive") == 6
    place.put("archive", [b"2"])
    assert place.get("archive") == b"2" and place.list("") == ["archive"]


@pytest.mark.parametrize("data", [[], [b""], [b"", memoryview(np.empty((0, 3)))]])
def test_empty_objects(place: Place, data: list[Any]) -> None:
    place.put("a/empty", data)
    assert place.size("a/empty") == 0 and place.get("a/empty") == b"" == place.get("a/empty", 0, 0)
    place.create("a/new", data)
    assert place.list("a") == ["empty", "new"]
    with pytest.raises(ShortObjectError):
        place.get("a/empty", 0, 1)


def test_create_refuses_to_replace(place: Place, another: Another) -> None:
    place.create("index/000-000-0", [b"first"])
    for one in (place, another()):
        with pytest.raises(ObjectExistsError, match="'index/000-000-0' exists already") as caught:
            one.create("index/000-000-0", [b"second"])
        assert (caught.value.name, caught.value.url) == ("index/000-000-0", place.url)
    assert place.get("index/000-000-0") == b"first"
    place.delete(["index/000-000-0"])
    place.create("index/000-000-0", [b"third"])
    assert another().get("index/000-000-0") == b"third"


def test_missing_objects(place: Place) -> None:
    place.put("parts/a", [b"x"])
    for name in ("parts/b", "parts", "none/a", "parts/a/b"):
        with pytest.raises(MissingObjectError, match="is missing"):
            place.get(name)
        with pytest.raises(MissingObjectError):
            place.get(name, 1, 2)
        with pytest.raises(MissingObjectError):
            place.size(name)
    place.delete(["parts/b", "none/a", "parts/a/b"])
    place.delete([])
    assert place.get("parts/a") == b"x"


@pytest.mark.parametrize("at, count", [(0, 11), (5, 6), (10, 1), (11, None), (11, 0), (50, 50), (0, 1 << 60)])
def test_bytes_that_are_not_there(place: Place, at: int, count: int | None) -> None:
    place.put("ten", [b"0123456789"])
    with pytest.raises(ShortObjectError, match="shorter"):
        place.get("ten", at, count)
    assert place.get("ten", 10) == b"" == place.get("ten", 10, 0)
    assert place.get("ten", 9) == b"9"


@pytest.mark.parametrize("at, count", [(-1, None), (0, -1), (-5, 2)])
def test_ranges_before_the_start(place: Place, at: int, count: int | None) -> None:
    place.put("ten", [b"0123456789"])
    with pytest.raises(ValueError, match="not a range"):
        place.get("ten", at, count)


def test_lists(place: Place, another: Another) -> None:
    assert place.list("") == [] == place.list("index")
    for name in ("index/b", "index/a", "index/c/d", "indexes/e", "top", "index2"):
        place.put(name, [name.encode()])
    assert place.list("index") == ["a", "b"] and place.list("index/c") == ["d"]
    assert place.list("") == ["index2", "top"]
    assert place.sizes("index") == {name: place.size(f"index/{name}") for name in ("a", "b")}
    assert place.sizes("") == {name: place.size(name) for name in ("index2", "top")} and place.sizes("none") == {}
    assert place.list("top") == [] == place.list("index/a")
    other = another()
    assert other.list("index") == ["a", "b"]
    place.delete(["index/b", "index/b", "top"])
    place.put("index/z", [b""])
    assert other.list("index") == ["a", "z"], "what others do is seen"
    assert other.list("") == ["index2"]


HOSTILE = [
    *("", ".", "..", "/", "a/", "/a", "a//b", "../a", "a/../b", "a/..", "a/./b", ".hidden", "a/.pmstore-object-00"),
    *(
        "a b",
        "a\nb",
        "a\n",
        "a\0",
        "ä",
        "a\\b",
        "a*",
        "a?b",
        "[a]",
        "~",
        "a:b",
        "%2e%2e/a",
        "a" * 201,
        "a/" * 400 + "a",
    ),
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names(place: Place, name: str, tmp_path: Path) -> None:
    for call in (place.get, place.size, lambda n: place.put(n, [b"x"]), lambda n: place.create(n, [b"x"])):
        with pytest.raises(ValueError, match="not the name of an object"):
            call(name)
    with pytest.raises(ValueError):
        place.delete(["fine", name])
    if name:
        with pytest.raises(ValueError):
            place.list(name)
    assert place.list("") == []


def test_names_of_other_types(place: Place) -> None:
    with pytest.raises(TypeError, match="is a str, not bytes"):
        place.get(b"a")  # type: ignore[arg-type]


def test_of_creators_at_once_one_wins(another: Another) -> None:
    places = [another() for _ in range(6)]
    start = threading.Barrier(len(places))
    won, lost = [], []

    def create(k: int) -> None:
        start.wait()
        try:
            places[k].create("fence", [b"%d" % k * 100])
        except ObjectExistsError:
            lost.append(k)
        else:
            won.append(k)

    threads = [threading.Thread(target=create, args=(k,)) for k in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == len(places) - 1
    assert places[0].get("fence") == b"%d" % won[0] * 100
    assert places[0].list("") == ["fence"]


def test_places_can_be_sent_to_other_processes(place: Place) -> None:
    again = pickle.loads(pickle.dumps(place))
    assert again.url == place.url
    place.put("a", [b"x"])
    assert again.get("a") == b"x"


def test_a_forked_child_uses_the_place(place: Place, target: Target) -> None:
    if target.url.startswith("memory:"):
        pytest.skip("each process has its own memory")
    place.put("a", [b"x"])

    def child() -> None:
        assert place.get("a") == b"x"
        place.put("b", [b"y"])

    run_in_fork(child)
    assert place.list("") == ["a", "b"]


# ---- which place


def test_paths_and_urls(tmp_path: Path) -> None:
    for url in (str(tmp_path), tmp_path, f"file://{tmp_path}", tmp_path.as_uri(), f"local://{tmp_path}"):
        place = place_of(url)
        assert type(place) is LocalPlace and place.url == str(tmp_path)
    spaced = tmp_path / "a b%"
    assert place_of(spaced.as_uri()).url == str(spaced)
    assert not spaced.exists()
    assert place_of("file:///a").url == "/a"


@pytest.mark.parametrize("url", ["", "a\0b", "file://host/a", "file://"])
def test_no_paths(url: str) -> None:
    with pytest.raises(ValueError):
        place_of(url)


def test_refused_urls() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(TypeError, match="no options: key"):
        place_of("/a", key="x")
    with pytest.raises(ValueError, match="chained"):
        place_of("simplecache::memory://a")
    with pytest.raises(ValueError, match="nosuch"):
        place_of("nosuch://a/b")


def test_credentials_are_not_shown() -> None:
    pytest.importorskip("fsspec")
    place = place_of("memory://somebody:hunter2@host/a?token=abc")
    assert place.url == "memory://host/a"
    for text in (repr(place), str(pickle.loads(pickle.dumps(place)))):
        assert "hunter2" not in text and "abc" not in text
    assert isinstance(place, FsspecPlace)
    assert "hunter2" not in place._plain("refused for somebody:hunter2@host")


@pytest.mark.parametrize(
    "url, hidden, extra", [("memory://a", "fsspec", "archive"), ("s3://b/a", "s3fs", "pip install s3fs")]
)
def test_what_is_not_installed_is_named(url: str, hidden: str, extra: str) -> None:
    if hidden != "fsspec":
        pytest.importorskip("fsspec")
    code = (
        f"import sys; sys.modules[{hidden!r}] = None\nfrom pmstore.archive._objects import place_of\nplace_of({url!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: " in done.stderr.splitlines()[-1] and "pip install 'pmstore[archive]'" in done.stderr
    assert extra in done.stderr


def test_fsspec_is_imported_where_it_is_used() -> None:
    code = "import sys, pmstore, pmstore.archive._objects as o; o.place_of('/a'); print('fsspec' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# ---- a folder of this machine


def saves(directory: Path) -> None:
    place = LocalPlace(str(directory / "a" / "place"))
    place.put("parts/a", [b"1" * 700, b"1" * 600])
    print("put 1")
    place.put("parts/a", [b"2" * 2000])
    print("put 2")
    place.create("index/a", [b"3" * 1300])
    print("created")
    place.put("parts/b", [])
    print("empty")


def whole(directory: Path, said: str) -> None:
    place = LocalPlace(str(directory / "a" / "place"))
    known = {name: place.get(name) for name in ("parts/a", "index/a", "parts/b") if _has(place, name)}
    assert known.get("parts/a", b"") in (b"", b"1" * 1300, b"2" * 2000)
    assert known.get("index/a", b"") in (b"", b"3" * 1300)
    assert "put 1" not in said or "parts/a" in known
    assert "put 2" not in said or known["parts/a"] == b"2" * 2000
    assert "created" not in said or "index/a" in known
    assert "empty" not in said or known["parts/b"] == b""
    assert set(place.list("parts")) == {name[6:] for name in known if name.startswith("parts")}
    for name in ("parts/a", "index/a"):  # the next writer goes on, and sweeps
        place.put(name, [b"4"])
        assert place.get(name) == b"4"
    assert not [name for name in os.listdir(directory / "a" / "place" / "parts") if name.startswith(".")]


def _has(place: Place, name: str) -> bool:
    try:
        return place.size(name) >= 0
    except MissingObjectError:
        return False


@pytest.mark.parametrize("filesystem", ["posix", "ext4"])
def test_a_crash_leaves_no_object_or_a_whole_one(
    tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch, filesystem: str
) -> None:
    monkeypatch.setattr("pmstore.testing._base.session.directory", lambda: tmp_path / "kept")
    report = CrashFiles(tmp_path / "files").run(saves, whole, filesystem=filesystem, stale=7, budget=300)
    assert report.tally.exhaustive and report.tally.evaluated >= 20


def test_files_of_living_writers_stay(tmp_path: Path) -> None:
    """A sweep takes the temporary file of a dead writer, and none that is locked."""
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / ".pmstore-object-dead").write_bytes(b"half")
    (folder / ".other").write_bytes(b"")
    from pmstore.archive import _local

    fd, alive = _local._temporary(str(folder))
    place = LocalPlace(str(tmp_path))
    place.put("parts/a", [b"x"])
    assert sorted(os.listdir(folder)) == sorted([".other", os.path.basename(alive), "a"])
    assert place.list("parts") == ["a"]
    os.close(fd)
    LocalPlace(str(tmp_path)).create("parts/b", [b"x"])
    assert sorted(os.listdir(folder)) == [".other", "a", "b"]


def test_a_shared_file_that_is_made_anew_during_a_sweep_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sweep deletes it between its opening and its lock by this one, and its writer makes it again."""
    from pmstore.archive import _local

    place, made, lock = LocalPlace(str(tmp_path)), list[Any](), _local.flock_now
    place.prepare("parts")
    place.open_shared("parts/a", "token").close()  # its writer has no lock yet

    def late(fd: int) -> None:
        monkeypatch.undo()
        LocalPlace(str(tmp_path)).prepare("parts")
        made.append(place.open_shared("parts/a", "token"))
        lock(fd)

    monkeypatch.setattr(_local, "flock_now", late)
    LocalPlace(str(tmp_path)).prepare("parts")
    with closing(made[0]) as file:
        place.write_shared(file, "parts/a", 0, [b"bytes"])
        place.publish(["parts/a"], "token")
    assert place.get("parts/a") == b"bytes"


def test_a_full_disk(small_disk: Callable[[str], Path]) -> None:
    place = LocalPlace(str(small_disk("1m")))
    place.put("a", [b"x" * 1000])
    for write in (place.put, place.create):
        with pytest.raises(pmstore.ArchiveUnavailableError, match="'b' can't be written: No space left") as caught:
            write("b", [bytes(1 << 20), bytes(1 << 20)])
        assert caught.value.errno == errno.ENOSPC and caught.value.transient
        assert isinstance(caught.value, OSError)
    with pytest.raises(pmstore.ArchiveUnavailableError):
        place.put("a", [bytes(2 << 20)])
    assert place.list("") == ["a"] and place.get("a") == b"x" * 1000
    assert os.listdir(place.url) == ["a"], "no half file takes the space"


@pytest.mark.parametrize(
    "code, transient", [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, True), (errno.EROFS, False)]
)
@pytest.mark.parametrize("call", ["pwritev", "fsync", "rename", "open"])
def test_calls_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, transient: bool, call: str
) -> None:
    place = LocalPlace(str(tmp_path / "p"))
    place.put("a", [b"old"])
    real = getattr(os, call)

    def fails(*arguments: Any, **more: Any) -> Any:
        if call == "open" and not arguments[1] & os.O_CREAT:
            return real(*arguments, **more)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        if call == "rename":
            answer(patched, pm_rename_file=code)
        with pytest.raises(pmstore.ArchiveUnavailableError) as caught:
            place.create("b", [b"new"])
    assert caught.value.errno == code and caught.value.transient is transient
    assert os.listdir(place.url) == ["a"]
    place.create("b", [b"new"])
    assert place.get("b") == b"new"


@pytest.mark.parametrize("way", WAYS)
def test_the_ways_of_file_systems_to_name_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    pretend(monkeypatch, way)
    for turn in range(20):
        test_of_creators_at_once_one_wins(partial(LocalPlace, str(tmp_path / f"{turn}")))


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        target, refused = Path("/proc/self/fdinfo"), "can't be"
    else:
        target, refused = tmp_path / "fixed", "Permission denied"
        target.mkdir()
        target.chmod(0o500)
    place = LocalPlace(str(target))
    with pytest.raises(pmstore.ArchiveUnavailableError, match=refused):
        place.put("a", [b"x"])


def test_permissions_are_permanent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    place = LocalPlace(str(tmp_path))
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(pmstore.ArchiveUnavailableError, match="'a' can't be deleted: Permission denied") as caught:
        place.delete(["a"])
    assert not caught.value.transient
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and not again.transient and again.errno == errno.EACCES


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    """What is written next must not land on the disk below."""
    place = LocalPlace(str(tmp_path / "disk"))
    place.put("parts/a", [b"x"])
    os.rename(tmp_path / "disk", tmp_path / "gone")
    with pytest.raises(pmstore.ArchiveUnavailableError, match="has gone") as caught:
        place.put("parts/b", [b"y"])
    assert caught.value.transient and not (tmp_path / "disk").exists()
    (tmp_path / "disk").mkdir()
    with pytest.raises(pmstore.ArchiveUnavailableError, match="another one"):
        place.put("parts/b", [b"y"])
    os.rmdir(tmp_path / "disk")
    os.rename(tmp_path / "gone", tmp_path / "disk")
    place.put("parts/b", [b"y"])
    assert place.list("parts") == ["a", "b"]


def test_a_folder_that_goes_away_in_mid_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = LocalPlace(str(tmp_path / "disk"))
    place.put("parts/a", [b"x"])
    pwritev = os.pwritev

    def write(*arguments: Any) -> int:
        os.rename(tmp_path / "disk", tmp_path / "gone")
        return pwritev(*arguments)

    monkeypatch.setattr(os, "pwritev", write)
    with pytest.raises(pmstore.ArchiveUnavailableError):
        place.create("parts/b", [b"y" * 1000])
    assert LocalPlace(str(tmp_path / "gone")).list("parts") == ["a"]


def test_things_that_are_no_objects(tmp_path: Path) -> None:
    """Links, pipes and folders in an archive from elsewhere are not followed, nor waited for."""
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "objects"
    (folder / "folder").mkdir(parents=True)
    os.symlink(tmp_path / "secret", folder / "link")
    os.mkfifo(folder / "pipe")
    place = LocalPlace(str(folder))
    assert place.list("") == []
    with pytest.raises(pmstore.ArchiveUnavailableError):
        place.get("link")
    for name in ("pipe", "folder"):
        with pytest.raises(MissingObjectError):
            place.get(name)
    for name in ("pipe", "folder", "link"):
        with pytest.raises(MissingObjectError):
            place.size(name)
        with pytest.raises(ObjectExistsError):
            place.create(name, [b"x"])
    with pytest.raises(pmstore.ArchiveUnavailableError):
        place.put("folder", [b"x"])
    place.put("link", [b"x"])
    assert (tmp_path / "secret").read_bytes() == b"secret" and place.list("") == ["link"]


def test_buffers_that_are_not_contiguous(tmp_path: Path) -> None:
    place = LocalPlace(str(tmp_path))
    with pytest.raises(TypeError):
        place.put("a", [memoryview(np.arange(10)[::2])])
    assert os.listdir(tmp_path) == []


# ---- S3


@contextmanager
def cut_after(server: Server, count: int) -> Iterator[int]:
    """The port of a relay that ends each connection after so many bytes of the client."""

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=relay, args=(client,), daemon=True).start()

    def relay(client: socket.socket) -> None:
        with closing(client), closing(socket.create_connection((server.host, server.port))) as behind:
            threading.Thread(target=back, args=(behind, client), daemon=True).start()
            left = count
            while left > 0 and (data := client.recv(min(left, 65536))):
                behind.sendall(data)
                left -= len(data)
            for end in (client, behind):
                end.shutdown(socket.SHUT_RDWR)

    def back(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("call", ["put", "create"])
def test_s3_disappears_in_mid_object(s3: Server, call: str) -> None:
    with cut_after(s3, 20_000) as port:
        target = s3.target(port)
        place = target.place()
        place._connect()[0].retries = 1  # type: ignore[attr-defined]
        with pytest.raises(pmstore.ArchiveUnavailableError, match="'parts/a' can't be") as caught:
            getattr(place, call)("parts/a", [b"x" * 1_000_000])
        assert caught.value.transient and "a secret" not in str(caught.value)
    assert place_of(target.url, **s3.options()).list("parts") == []


def test_s3_can_not_be_reached(s3: Server) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    place = s3.target(port).place()
    place._connect()[0].retries = 1  # type: ignore[attr-defined]
    for call in (
        lambda: place.put("a", [b"x"]),
        lambda: place.get("a"),
        lambda: place.list(""),
        lambda: place.size("a"),
    ):
        with pytest.raises(pmstore.ArchiveUnavailableError) as caught:
            call()
        assert caught.value.transient


def test_s3_without_its_bucket(s3: Server) -> None:
    place = place_of("s3://no-such-bucket/a", **s3.options())
    for write in (place.put, place.create):
        with pytest.raises(pmstore.ArchiveUnavailableError) as caught:
            write("a", [b"x"])
        assert not caught.value.transient
    assert place.list("") == []
    with pytest.raises(MissingObjectError):
        place.get("a")


def test_s3_objects_of_several_requests(s3: Server) -> None:
    """s3fs uploads objects of 100 MiB and more in pieces."""
    place = s3.target().place()
    data = np.random.default_rng(0).bytes(101 << 20)
    place.create("large", [data[: 1 << 20], memoryview(data)[1 << 20 :]])
    assert place.size("large") == len(data) and place.get("large", 99 << 20, 1000) == data[99 << 20 :][:1000]
    with pytest.raises(ObjectExistsError):
        place.create("large", [data])


def test_s3_deletes_many(s3: Server) -> None:
    place = s3.target().place()
    names = [f"parts/{k}" for k in range(30)]
    for name in names:
        place.put(name, [b"x"])
    place.delete([*names[:29], "parts/none"])
    assert place.list("parts") == ["29"]
