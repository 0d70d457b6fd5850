"""Drains and the processes that have them: kills, exits, forks, readers; and batches that are tuned."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
import threading
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore._snapshot import Reader
from pmstore.archive import _index
from pmstore.archive._archive import Archive
from pmstore.archive._capture import Seen, capture
from pmstore.archive._sources import Sources
from pmstore.archive._target import Target
from tests.archive.conftest import Server
from tests.archive.stepping import Memory, archived, drained, stepping
from tests.support.template import MODULES, template

pytest.importorskip("numcodecs")


WORK = """
import sys, numpy as np, pmstore
store = pmstore.open(sys.argv[1])
x = store.require_array("x", 20_000)
y = store.require_array("y", 20_000)
store.commit()
store.drain(sys.argv[2], part_size="64KiB")
print("begun", flush=True)
while True:
    with store.transaction():
        x += 1
        y[:] = -x
    print(store.sequence, flush=True)
"""


@pytest.mark.parametrize("after", [2, 40, 400])
def test_killed_while_it_drains(tmp_path: Path, after: int) -> None:
    """The archive has whole commits, and the next life goes on with it."""
    for _ in range(2):
        process = template(MODULES).start("-c", WORK, tmp_path / "store.pm", tmp_path / "archive")
        for _ in range(after):
            process.stdout.readline()
        process.kill()
        process.communicate()
        found = archive.open(tmp_path / "archive")
        assert found.verify().ok
        for version in filter(None, found):  # 0: nothing is in it
            x, y = found[version]["x"], found[version]["y"]
            assert (x == x[0]).all() and (y == -x[0]).all()
    with pmstore.open(tmp_path / "store.pm") as store:
        drained(store, tmp_path / "archive")
        x0 = store["x"][0]
    found = archive.open(tmp_path / "archive")
    found.restore(tmp_path / "again.pm")
    with pmstore.open(tmp_path / "again.pm", "r") as store:
        assert (store["x"] == x0).all() and store.sequence == found.latest


def test_the_end_of_a_program_archives_its_last_commit(tmp_path: Path) -> None:
    work = (
        "import sys, pmstore; store = pmstore.open(sys.argv[1]); drain = store.drain(sys.argv[2])\n"
        "for n in range(100):\n    store['n'] = n; store.commit()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", work, str(tmp_path / "store.pm"), str(tmp_path / "archive")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = archive.open(tmp_path / "archive")
    assert found.latest == 100 and found[100]["n"] == 99


def test_a_forked_child_leaves_the_drain_alone(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(tmp_path / "archive") as drain:
        store["x"] = 1
        store.commit()
        child = os.fork()
        if not child:
            try:
                drain.wait()
            except pmstore.ForkedStoreError:
                drain.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        drain.wait()
    assert archive.open(tmp_path / "archive")[1]["x"] == 1


def test_a_reader_drains_what_another_process_writes(tmp_path: Path) -> None:
    work = "import sys, pmstore; s = pmstore.open(sys.argv[1]); s['x'] = 1; s.commit(); print('x', flush=True); input()"
    command = [sys.executable, "-c", work, str(tmp_path / "store.pm")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        with pmstore.open(tmp_path / "store.pm", "r") as store:
            drained(store, tmp_path / "archive")
        process.stdin.write("\n")
        process.stdin.flush()
    assert archive.open(tmp_path / "archive")[1]["x"] == 1


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_readers_drain_takes_the_last_commit_of_a_file_that_is_replaced(on_error: str, tmp_path: Path) -> None:
    path = tmp_path / "store.pm"
    with pmstore.open(path) as store:
        store["x"], store["large"] = 1, np.zeros(500_000)
        store.commit()
        reader = pmstore.open(path, "r")
        drain = reader.drain(tmp_path / "archive", every=10, on_error=on_error)
        assert drain.wait() == 1
        del store["large"]
        store.commit()
    assert pmstore.compact(path) > 0
    with pytest.raises(pmstore.StaleSnapshotError) if on_error == "raise" else pytest.warns(match="taken the place"):
        drain.close()
    reader.close()
    assert archive.open(tmp_path / "archive").versions() == [1, 2]


@pytest.mark.parametrize("how", ["wait", "close", "thread"])
def test_a_readers_drain_when_another_file_has_taken_the_place(how: str, tmp_path: Path) -> None:
    path = tmp_path / "store.pm"
    with pmstore.open(path) as store:
        store["x"], store["large"] = 1, np.zeros(500_000)
        store.commit()
        del store["large"]
    reader = pmstore.open(path, "r")
    drain = reader.drain(tmp_path / "archive")
    assert drain.wait() == 2
    assert pmstore.compact(path) > 0
    with pmstore.open(path) as store:
        store["x"] = 2
        store.commit()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if how == "wait":
            with pytest.raises(pmstore.StaleSnapshotError, match="another store has taken the place"):
                drain.wait()
        elif how == "thread":
            for thread in threading.enumerate():
                if thread.name.startswith("pmstore-drain"):
                    thread.join(30)
            assert drain.progress().ended
            with pytest.raises(pmstore.StaleSnapshotError, match="another store has taken the place"):
                drain.wait()
        drain.close()
    assert [str(one.message) for one in told] and all("taken the place" in str(one.message) for one in told)
    reader.close()
    with pmstore.open(path, "r") as reader, reader.drain(tmp_path / "archive") as drain:
        assert drain.wait() == 3
    assert archive.open(tmp_path / "archive").versions() == [2, 3]


def test_unclosed_drains_warn_of_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pmstore.open(tmp_path / "store.pm") as store:
            store.drain(tmp_path / "archive")
            store["x"] = 1
        assert archive.open(tmp_path / "archive").latest == 1


def test_a_tuned_drain_has_batches_and_bases(tmp_path: Path) -> None:
    """The rarer failures are, the more versions share an object, and the rarer bases are."""
    flushes, bases = [], []
    for name, mtbf in (("often", 1e-3), ("rarely", 1e9)):
        place = Memory()
        with pmstore.open(tmp_path / f"{name}.pm") as store, stepping(store, place, mtbf=mtbf) as steps:
            store["x"] = np.random.default_rng(3).random(20_000)
            for step in range(60):
                store["x"][step] += 1
                store.commit()
                steps.capture()
                while steps.write():
                    pass
            steps.flush()
            while steps.write():
                pass
            state = store["x"].copy()
        found = Archive(Sources([place]))
        assert len(found) == 60 and (found[60]["x"] == state).all() and found.verify().ok
        flushes.append(sum(name.startswith("parts/") for name in place.objects))
        bases.append(sum(one.kind == "base" for one in found.log()))
    assert flushes[0] > 2 * flushes[1] and bases[0] >= bases[1]
    with pmstore.open(tmp_path / "often.pm") as store, pytest.raises(ValueError, match="mtbf"):
        store.drain(tmp_path / "archive", mtbf=0)


def test_a_tuned_drain_whose_queue_is_smaller_than_a_part(tmp_path: Path) -> None:
    """A full queue is written, although more versions could share the part."""
    with pmstore.open(tmp_path / "store.pm") as store:
        with store.drain(tmp_path / "archive", mtbf=1e9, queue_size="64KiB") as drain:
            for step in range(25):
                store["x"] = np.random.default_rng(step).random(5000)
                store.commit()
                assert drain.capture(timeout=10) == store.sequence
    assert archive.open(tmp_path / "archive").versions()[-25:] == list(range(1, 26))


class Late(Memory):
    """Another writer acts just before a drain takes its token."""

    act: Callable[[], None] | None = None

    def create(self, name: str, data: Any) -> None:
        if name.startswith("writers/") and self.act is not None:
            act, self.act = self.act, None
            act()
        super().create(name, data)


def test_a_drain_that_is_refused_ends_no_other(tmp_path: Path) -> None:
    """Neither one to several places, nor that of an old copy; it leaves nothing in a place that was empty."""
    places = [tmp_path / name for name in "abc"]
    with pmstore.open(tmp_path / "other.pm") as other:
        drained(other, places[1])
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(places[0]) as drain:
        store.backup(tmp_path / "copy.pm")
        store["x"] = 1
        store.commit()
        assert drain.wait() == 1
        for order in (places[:2], [places[2], places[1]]):
            with pytest.raises(pmstore.ArchiveConflictError, match="another store"):
                store.drain(order)
        with (
            pmstore.open(tmp_path / "copy.pm") as copy,
            pytest.raises(pmstore.ArchiveConflictError, match="taken back"),
        ):
            copy.drain(places[0])
        store["x"] = 2
        store.commit()
        assert drain.wait() == 2
    assert not places[2].exists()


@pytest.mark.parametrize("here", [True, False], ids=["this process", "another process"])
def test_a_drain_that_is_begun_again(here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of a notebook is run again: the first drain says why it stops, and nothing else."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pmstore.open(tmp_path / "store.pm") as store:
            store.drain(tmp_path / "archive").wait()
            again = store.drain(tmp_path / "archive")
            if not here:
                monkeypatch.setattr(_index, "_begun_here", set())
            store["x"] = 1
            store.commit()
            assert again.wait() == 1
    [text, *others] = [str(one.message) for one in told if one.category is pmstore.ArchiveWarning]
    begun = "a later drain or change by this process writes" if here else "another process drains"
    assert text.startswith(f"the drain stops: {begun} to {tmp_path / 'archive'} since")
    assert [other[:15] for other in others] == ([] if here else ["the drain ended"])
    assert archive.open(tmp_path / "archive").latest == 1


def test_a_drain_whose_later_one_has_ended(tmp_path: Path) -> None:
    """It tells that nobody archives what the place lacks."""
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(tmp_path / "archive") as drain:
        store.drain(tmp_path / "archive").close()
        store["x"] = 1
        store.commit()
        with pytest.warns(pmstore.ArchiveWarning, match="the drain ended: a later drain or change by this process"):
            drain.close()


def test_a_version_that_comes_while_a_drain_begins(tmp_path: Path) -> None:
    place = Late()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, Memory(place.objects)) as steps:
        archived(steps)
        store.backup(tmp_path / "copy.pm")
        store["x"] = 1
        store.commit()
        place.act = lambda: archived(steps)
        with (
            pmstore.open(tmp_path / "copy.pm") as copy,
            pytest.raises(pmstore.ArchiveConflictError, match="taken back"),
        ):
            with stepping(copy, place):
                pass


def test_the_place_of_aggregates_is_refused(tmp_path: Path) -> None:
    archive.aggregate(tmp_path / "shards", 1, {"x": np.ones(3)})
    with pmstore.open(tmp_path / "store.pm") as store:
        with pytest.raises(pmstore.ArchiveConflictError, match="aggregates.*a place of its own"):
            store.drain(tmp_path / "shards")
    archive.aggregate(tmp_path / "shards", 2, {"x": np.ones(3)})
    assert archive.latest_common([tmp_path / "shards"]) == 2


def test_the_newest_version_that_several_archives_have(tmp_path: Path) -> None:
    """Each process drains a store of its own."""
    urls = [tmp_path / f"rank-{rank}" for rank in range(3)]
    for rank, url in enumerate(urls):
        with pmstore.open(tmp_path / f"{rank}.pm") as store, store.drain(url) as drain:
            for step in range(4 + rank % 2):
                store["x"] = np.full(1000, step)
                store.commit()
                drain.wait()
    assert archive.latest_common(urls) == 4 == archive.latest_common(urls, verify=True)
    newest = archive.open(urls[0])._index.find(4)
    assert newest is not None
    (urls[0] / newest.directory.part).unlink()
    assert archive.latest_common(urls) == 3
    part = archive.open(urls[2])._index.find(3).directory.part  # type: ignore[union-attr]
    (urls[2] / part).write_bytes(bytes((urls[2] / part).stat().st_size))
    assert archive.latest_common(urls) == 3 and archive.latest_common(urls, verify=True) == 2
    assert archive.latest_common([tmp_path / "none", *urls]) is None


def test_options_for_places_that_need_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the past of a fork, whose own archive is a folder."""
    memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
    real, options = memory.__init__, {"key": "secret"}

    def needs_key(self: Any, *given: Any, key: str = "", **more: Any) -> None:
        if key != "secret":
            raise ValueError("the key is missing")
        real(self, *given, **more)

    monkeypatch.setattr(memory, "__init__", needs_key)
    trunk, branch = f"memory://{uuid.uuid4().hex}", tmp_path / "branch"
    for path, url, versions in (("a.pm", trunk, [1, 2, 3]), ("b.pm", branch, [1, 2, 3, 4])):
        with pmstore.open(tmp_path / path) as store, store.drain(url, storage_options=options) as drain:
            for _ in range(2 + (url == trunk)):
                store["x"] = np.full(1000, store.sequence)
                store.commit()
                drain.wait()
        found = archive.open(url, **options)
        assert found.versions() == versions
        if url == trunk:
            found.fork(2, tmp_path / "b.pm")
    for verify in (False, True):
        assert archive.latest_common([branch], storage_options=options, verify=verify) == 4
        assert archive.latest_common([trunk, branch], storage_options=options, verify=verify) == 3
    with pytest.raises(ValueError, match="the key is missing"):
        archive.latest_common([trunk])


def test_a_drain_says_where_it_writes_and_how_far_it_is(tmp_path: Path) -> None:
    places = [tmp_path / "near", tmp_path / "far"]
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(places) as drain:
        store["x"] = 1
        store.commit()
        drain.wait()
        assert repr(drain) == f"<Drain to {places[0]}, {places[1]}, at version 1>"
    assert repr(drain) == f"<Drain to {places[0]}, {places[1]}, closed>"


def test_a_version_is_encoded_without_a_pause_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I21: the pause covers the copies. Only when `write` copies contents, too, and these have changed, it goes on."""
    monkeypatch.setattr("pmstore._snapshot._TRIES_ALONE", 0)
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x") as store:
        store["x"] = np.ones(100_000)
    asking = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, (1 << 62) + (1 << 60) + 16, 1 << 59, 0)
    asked = []
    with path.open("rb") as file, path.open("rb") as look:

        def write(changes: Any) -> int:
            kind: int = struct.unpack_from("@h", fcntl.fcntl(look, fcntl.F_OFD_GETLK, asking))[0]
            asked.append(kind != fcntl.F_UNLCK)
            if len(asked) == 1:
                raise pmstore.StaleSnapshotError
            return int(changes.sequence)

        assert capture(Reader(file.fileno()), Seen(1 << 20), write) == 1
    assert asked == [False, True]


def test_a_place_that_is_emptied_while_a_drain_begins() -> None:
    place, about = Memory(), {"id": "a", "lineage": "a"}
    Target(place, about).begin()
    target = Target(place, about)
    place.objects.clear()
    target.begin()
    assert "archive" in place.objects


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mtbf": "x"}, TypeError, "mtbf is a number of seconds"),
        ({"mtbf": float("nan")}, ValueError, "mtbf is a number of seconds"),
        ({"storage_options": 5}, TypeError, "storage_options is a dict"),
        ({"storage_options": [("key", 1)]}, TypeError, "storage_options is a dict"),
    ],
)
def test_options_of_another_type(tmp_path: Path, options: Any, error: type[Exception], text: str) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        with pytest.raises(error, match=text):
            store.drain(tmp_path / "archive", **options)
        assert not (tmp_path / "archive").exists()


ENDS = """
import json, sys, pmstore
store = pmstore.open(sys.argv[1])
store["x"] = 1
store.commit()
store.drain(sys.argv[2], storage_options=json.loads(sys.argv[3])).wait()
store["x"] = 2
store.commit()
"""


def test_the_last_commit_of_a_program_that_just_ends_reaches_s3(s3: Server, tmp_path: Path) -> None:
    """Python has ended all executors by then, and a new connection looks up a name in one."""
    target = s3.target()
    options = {**target.options, "endpoint_url": target.options["endpoint_url"].replace("127.0.0.1", "localhost")}
    # As after some seconds without a request.
    options["config_kwargs"] = {"connector_args": {"keepalive_timeout": 1e-6, "use_dns_cache": False}}
    command = [sys.executable, "-c", ENDS, str(tmp_path / "store.pm"), target.url, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert archive.open(target.url, **target.options)[2]["x"] == 2
