"""What readers believe of a file that is damaged, forged, half written, or left by a process that died."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import struct
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import ffi, lib
from pmstore._snapshot import Reader
from tests.conftest import Medium, run_in_fork
from tests.core.test_readers import BEGUN_BYTE, WRITER_BYTE
from tests.support import shim as shims
from tests.support.images import HEADER, MAP, MAP_LIST, NODE, PAGE, REGION, ROOT, Image
from tests.support.logs import SALT, Record, extent, marker, run, write_log
from tests.support.places import offset_of
from tests.support.shim import variable

MARKER = 2048  # the place of the durable marker: a sequence number, and its checksum
ALL_METADATA = 0xAAAAAAAAAAAAAAAA  # the kinds of 32 pages in the space map


@contextlib.contextmanager
def before_each_read(call: Callable[[], object]) -> Iterator[None]:
    """Calls a function before each time that a reader reads the file."""

    @ffi.callback("void(void *)")
    def callback(_: Any) -> None:
        call()

    lib.pm_source_pause(callback, ffi.NULL)
    try:
        yield
    finally:
        lib.pm_source_pause(ffi.NULL, ffi.NULL)


@contextlib.contextmanager
def locked(path: Path, *places: int) -> Iterator[None]:
    """Somebody holds the locks of a process that writes."""
    fd = os.open(path, os.O_RDWR)
    try:
        for place in places:
            held = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, held)
        yield
    finally:
        os.close(fd)


def test_I19_a_durable_marker_that_is_read_while_it_is_written(store: pmstore.Store) -> None:
    """Its sequence number is new, and its checksum is not: the newest commit is not that of the header."""
    store["n"] = 1
    store.commit()
    with pmstore.open(store.path, "r") as reader:
        store["n"] = 2
        store.commit()
        fd = os.open(store.path, os.O_RDWR)
        whole = os.pread(fd, 16, MARKER)
        contents = iter([whole[:8] + bytes(8)])
        with before_each_read(lambda: os.pwrite(fd, next(contents, whole), MARKER)):
            assert reader.wait(timeout=0) == (store.sequence, "commit")
        os.close(fd)


@pytest.mark.parametrize("kind", [ROOT, MAP_LIST, MAP, NODE])
def test_metadata_that_are_read_while_they_are_written(tmp_path: Path, kind: int) -> None:
    """The reader copies a page that lacks its second half, and finds all of it when it looks again."""
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["a"], store["n"] = np.arange(20_000), 1
    image = Image(path)
    page = REGION + next(image.pages(kind))
    whole = bytes(image.bytes[page : page + PAGE])
    torn = whole[:32] + bytes(PAGE - 32)
    with path.open("r+b") as file:
        for read in range(40):
            pages = chain([whole] * read, [torn], repeat(whole))
            with before_each_read(lambda pages=pages: os.pwrite(file.fileno(), next(pages), page)):  # type: ignore
                with pmstore.open(path, "r") as reader:
                    assert reader["n"] == 1 and (reader["a"] == np.arange(20_000)).all(), read
            if next(pages) is torn:
                break
        assert 3 < read < 39


def look_at_everything(path: str) -> None:
    with contextlib.suppress(pmstore.Error), pmstore.open(path, "r") as reader:
        assert not reader.check().ok


def test_a_space_map_that_describes_pages_behind_the_region(tmp_path: Path) -> None:
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.arange(20.0)
    image = Image(path)
    space_map = next(image.pages(MAP))
    for word in range(64 + 16 * 8, PAGE, 8):
        image.put(space_map, word, ALL_METADATA)
    image.save()
    run_in_fork(look_at_everything, str(path))


def test_a_file_that_is_cut_short_under_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.arange(200_000.0)
    with pmstore.open(path, "r") as reader:
        for size in (path.stat().st_size // 4, 3 * PAGE, PAGE // 8, 0):
            os.truncate(path, size)
            calls: list[Callable[[], object]] = [lambda: reader["a"], lambda: reader.read("a")]
            if size < 2 * PAGE:
                calls += [reader.refresh, lambda: reader.wait(timeout=0)]
            for call in calls:
                with pytest.raises((pmstore.CorruptStoreError, pmstore.NotAStoreError)):
                    call()


def test_a_damaged_file_that_is_cut_short_while_a_reader_copies_it(tmp_path: Path) -> None:
    """Damaged metadata are left out of the copy. A reader that could not read a page for another reason gives up."""
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.arange(3000.0)
    image = Image(path)
    image.bytes[REGION + image.tree + 200] ^= 1
    reads = 0

    def opens(cut_at: int) -> bool:
        nonlocal reads
        reads = 0

        def cut() -> None:
            nonlocal reads
            reads += 1
            if reads == cut_at:
                os.truncate(path, 4 * PAGE)

        image.save()
        with before_each_read(cut):
            try:
                pmstore.open(path, "r").close()
            except pmstore.CorruptStoreError as error:
                assert "truncated" in str(error)
                return False
        return True

    assert opens(0)
    every = reads
    opened = {at: reads for at in range(1, every + 1) if opens(at)}
    assert len(opened) < every / 2 and set(opened.values()) <= {every}, "nothing was left to be read"


@pytest.mark.parametrize("count", [20, 2000, 200_000], ids=["in a slab", "small", "large"])
def test_an_array_that_is_damaged_is_not_read(tmp_path: Path, count: int) -> None:
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.arange(float(count))
    data = bytearray(path.read_bytes())
    part = np.arange(5.0, 15.0).tobytes()
    at = data.find(part)
    while at >= 0:
        data[at] ^= 1
        at = data.find(part, at + 1)
    path.write_bytes(data)
    with pmstore.open(path, "r") as reader:
        reads: list[Callable[[], Any]] = [
            lambda: reader["a"],
            lambda: reader.read("a"),
            lambda: reader.read(("a", np.s_[4:8])),
        ]
        for read in reads:
            with pytest.raises(pmstore.CorruptStoreError):
                read()


def test_a_snapshot_without_its_own_memory_shows_nothing_else(tmp_path: Path) -> None:
    """Not even what was read before."""
    with pmstore.open(tmp_path / "store.pm", "x", media="file") as store:
        store["a"] = np.arange(20.0)
        place = offset_of(store, "a"), store["a"].nbytes
    got = ffi.new("double[20]")
    with open(tmp_path / "store.pm", "rb") as file:
        snapshot = Reader(file.fileno()).take()
    snapshot.copy(*place, 0, got, place[1])
    assert list(got) == [*range(20)]
    own = snapshot.file()
    os.ftruncate(own, PAGE)
    os.close(own)
    with pytest.raises(pmstore.CorruptStoreError, match="before the end of a snapshot"):
        snapshot.copy(*place, 0, got, place[1])


@pytest.mark.parametrize("pages", [-2, 0, 2])
def test_an_array_that_reaches_beyond_the_region_is_damaged(tmp_path: Path, pages: int) -> None:
    """It is not one that a later commit has changed, after which a program would read the next snapshot."""
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.arange(2000.0)
    image = Image(path)
    image.change_cell(b"na", offset=image.region_size + pages * PAGE)
    image.save()
    with pmstore.open(path, "r") as reader:
        for read in (lambda: reader["a"], lambda: reader.read("a"), lambda: reader.read(("a", np.s_[4:8]))):
            with pytest.raises(pmstore.CorruptStoreError):
                read()


@pytest.mark.parametrize("commits", [3, 4])
def test_a_damaged_table_of_slots_is_no_reason_to_read_the_other_slot(tmp_path: Path, commits: int) -> None:
    """It has the commit before, whose hashes are sound."""
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        x = store.create_array("x", 140_000, "f8")
        for _ in range(1 + commits):
            store.commit()
            x += 1
    image = Image(path)
    table = image.get(0, 2160)
    assert image.get(table, 80) == x.nbytes
    image.bytes[REGION + table + PAGE - 8] ^= 1
    image.save()
    with pytest.raises(pmstore.CorruptStoreError, match=f"offset {table} is damaged"):
        pmstore.open(path, "r")


@pytest.mark.parametrize("behind", [False, True])
def test_I20_a_record_declares_a_slot_before_or_behind_what_it_logs(tmp_path: Path, behind: bool) -> None:
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        x = store.create_array("x", 140_000, "f8")
        for _ in range(4):
            store.commit()
            x += 1
    image = Image(path)
    table = image.get(0, 2160)
    first, second, base = (image.get(table, 64 + at) for at in (0, 8, 24))
    bit = 1 - (image.word(88) & 1)
    declared = extent(image, first if bit == base else second, np.full(140_000, 9.0).tobytes(), slot=bit)
    items = [declared, run(0, bytes(image.bytes[REGION : REGION + PAGE]))]
    write_log(image, [Record(items[::-1] if behind else items, knows=0)])
    image.save()
    with pmstore.open(path, "r") as reader:
        assert (reader["x"] == 9).all()
    with pmstore.open(path, "r+") as store:
        assert (store["x"] == 9).all()


def test_an_array_between_pages_takes_none_with_it(tmp_path: Path) -> None:
    """Its table of hashes would end in the last page of another array's table, at another byte."""
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        for name in "abc":
            store[name] = np.arange(100_000.0)
    image = Image(path)
    place = next(cell.offset for cell in image.cells(image.tree) if cell.key == b"nb")
    for name in (b"na", b"nc"):
        image.change_cell(name, offset=place + 8)
    image.save()
    with pmstore.open(path, "r") as reader:
        assert (reader["b"] == np.arange(100_000.0)).all()
        for name in "ac":
            with pytest.raises(pmstore.CorruptStoreError):
                reader[name]


def test_I20_readers_of_a_process_that_dies_adopt_its_last_commits(tmp_path: Path) -> None:
    """durability="async": it died with commits that the durable marker does not name. They are what the next process
    that writes adopts, and nobody sees less meanwhile."""
    path = tmp_path / "store.pm"
    with pmstore.open(tmp_path / "running.pm", "x", media="file", durability="async", sync_interval=1e6) as writer:
        writer["n"] = 1
        writer.commit()
        writer.sync()
        marked = writer.sequence
        writer["n"] = 2
        writer.commit()
        path.write_bytes(Path(writer.path).read_bytes())
    with contextlib.ExitStack() as alive:
        alive.enter_context(locked(path, WRITER_BYTE, BEGUN_BYTE))
        old = pmstore.open(path, "r")
        assert (old.sequence, old["n"], old.read("n")) == (marked, 1, 1)
        assert old.wait(timeout=0).event == "timeout"
    with old:
        assert old.wait(timeout=0).event == "died"
        assert old.read("n") == 2 and old.refresh() == marked + 1 and old["n"] == 2
        with locked(path, WRITER_BYTE), pmstore.open(path, "r") as new:  # it has not recovered the store yet
            assert (new.sequence, new["n"]) == (marked + 1, 2)
            assert old.read("n") == 2 and old.refresh() == marked + 1 and old["n"] == 2


def test_every_snapshot_can_be_disturbed(store: pmstore.Store) -> None:
    """What the tests above rely on: a function is called before each read."""
    calls: list[int] = []
    with pmstore.open(store.path, "r") as reader:
        store["n"] = 1
        store.commit()
        with before_each_read(lambda: calls.append(1)):
            reader.refresh()
    assert calls


@pytest.mark.parametrize("read", range(6))
def test_I19_the_log_is_emptied_while_its_newest_record_is_looked_for(store: pmstore.Store, read: int) -> None:
    """The reader begins anew: the commit was durable before, so it may not be missing."""
    reads = iter(range(100))

    def empty() -> None:
        if next(reads) == read:
            store._catalog.core.checkpoint()
            store["m"] = "over the old record"
            store.commit()

    store["n"] = 0
    store.commit()
    with pmstore.open(store.path, "r") as reader:
        store["n"] = 1
        store.commit()
        with before_each_read(empty):
            reader.refresh()
        assert reader["n"] == 1


def test_I19_a_durable_commit_that_the_log_has_lost_is_missed(medium: Medium) -> None:
    """A process that writes may be emptying the log. Without one, the log is damaged."""
    path = medium.directory / "store.pm"
    with pmstore.open(path, "x", media=medium.name) as store:  # type: ignore[arg-type]
        store["n"] = 1
        store.commit()
        old = Image(path)
        store["n"] = 2
        store.commit()
        store._drop(discard=True)
    image = Image(path)
    log = slice(image.log_offset, image.log_offset + image.log_size)
    assert image.bytes[log] != old.bytes[log]
    image.bytes[log] = old.bytes[log]
    image.save()
    with pytest.raises(pmstore.CorruptStoreError, match="commit 2 was durable, and can't be read any more"):
        pmstore.open(path, "r")
    with locked(path, WRITER_BYTE, BEGUN_BYTE), pytest.raises(pmstore.StaleSnapshotError, match="too quickly"):
        pmstore.open(path, "r")


def read_without_standard_input(path: Path) -> None:
    with pmstore.open(path, "x") as store:
        store["n"] = 1
    streams = iter([0])
    with before_each_read(lambda: [os.close(fd) for fd in streams]), pmstore.open(path, "r") as reader:
        assert reader["n"] == 1
        assert not os.path.exists("/proc/self/fd/0"), "the snapshot does not take the first free descriptor"


def test_a_reader_needs_no_standard_input(tmp_path: Path) -> None:
    run_in_fork(read_without_standard_input, tmp_path / "store.pm")


def read_between_stops(path: str) -> None:
    """Run in another process, under the shim: while a reader is stopped for long, processes write the store and die."""

    def live(n: int) -> None:
        if os.fork() == 0:
            store = pmstore.open(path)
            for k in range(3):
                store["x"] = np.full(100_000, n + k)
                store.commit()
            os._exit(0)
        assert os.wait()[1] == 0

    def stop() -> None:
        nonlocal reads
        reads += 1
        if reads == read:
            live(10 * read)
            variable("fault_clock_ahead").value += 1000

    live(0)
    for read in range(1, 12):
        reads = 0
        with before_each_read(stop), pmstore.open(path, "r") as reader:
            assert (reader["x"] == (10 * read + 2 if reads >= read else reader["x"][0])).all()
    print("read")


@pytest.mark.no_sanitizer  # which is preloaded too
def test_a_reader_that_was_stopped_for_long_reads_on(medium: Medium, fault_library: Path) -> None:
    """Its patience is with commits that come too quickly. It once said that the log is damaged."""
    path = medium.directory / "store.pm"
    assert shims.call(fault_library, read_between_stops, path) == "read\n"


def read_what_changes_too_quickly(path: str) -> None:
    """Run in another process, under the shim: a commit comes before each read."""
    store = pmstore.open(path, "x")
    store["x"] = np.zeros(100_000)
    store.commit()
    commits, last, ahead = 0, 60, variable("fault_clock_ahead")

    def commit() -> None:
        nonlocal commits
        if commits < last:
            commits += 1
            store["x"] = np.full(100_000, commits)
            store.commit()
            ahead.value += last > 60

    reader = pmstore.open(path, "r")
    with before_each_read(commit):
        assert reader.refresh() == store.sequence and commits == last, "it is patient for some seconds"
        last = 10_000  # and each takes a second
        for look in (reader.refresh, lambda: pmstore.open(path, "r")):
            with pytest.raises(pmstore.StaleSnapshotError, match="too quickly"):
                look()
    assert reader.refresh() == store.sequence and (reader["x"] == commits).all()


@pytest.mark.no_sanitizer  # which is preloaded too
def test_a_reader_of_what_changes_too_quickly_gives_up(medium: Medium, fault_library: Path) -> None:
    shims.call(fault_library, read_what_changes_too_quickly, medium.directory / "store.pm")


def read_impossible_nodes(directory: str) -> None:
    """Run in a child with the shim: pages that can't be touched are behind the copy that a reader makes of metadata."""
    path = Path(directory) / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.arange(2000.0)
    sound = path.read_bytes()
    variable("fault_fences").value = 1
    for at, value in ((32, 65535), (64, 65528), (64, 4088)):  # the number of cells, and the place of the first one
        path.write_bytes(sound)
        image = Image(path)
        last = image.region_size - PAGE
        image.write_node(last, 0, image.cells(image.tree))
        image.set_root(last, 1)
        image.put(last, at, value, "H")
        image.set_header(log_size=4 * PAGE)  # it is copied behind the region
        image.save()
        with pmstore.open(path, "r") as reader:
            assert not reader.check().ok
            with pytest.raises(pmstore.CorruptStoreError, match="catalog"):
                reader["a"]


@pytest.mark.no_sanitizer  # which is preloaded too
def test_a_node_whose_cells_lie_behind_the_region(tmp_path: Path, fault_library: Path) -> None:
    shims.call(fault_library, read_impossible_nodes, tmp_path)


def read_behind_a_full_log(directory: str) -> None:
    """Run in a child with the shim, as above: somebody writes, and more is durable than the log has room for."""
    path = Path(directory) / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = 1
    image = Image(path)
    image.set_log(b"", SALT, image.log_size)
    image.bytes[MARKER : MARKER + 16] = marker(image, image.word(HEADER["sequence"]) + 2)
    image.save()
    variable("fault_fences").value = 1
    with locked(path, WRITER_BYTE, BEGUN_BYTE), pytest.raises(pmstore.StaleSnapshotError, match="too quickly"):
        pmstore.open(path, "r")


@pytest.mark.no_sanitizer  # which is preloaded too
def test_a_log_without_room_for_the_record_that_is_looked_for(tmp_path: Path, fault_library: Path) -> None:
    shims.call(fault_library, read_behind_a_full_log, tmp_path)


def test_a_file_that_is_cut_short_for_a_moment_is_read_again(tmp_path: Path) -> None:
    """It is not said to be none of a store, although nothing of its header was there."""
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x") as store:
        store["n"] = 1
    contents = path.read_bytes()
    reads = itertools.count(1)

    def cut() -> None:
        number = next(reads)
        if number == 1:
            os.truncate(path, 0)
        elif number == 4:  # both copies, then each alone
            path.write_bytes(contents)

    with open(path, "rb") as file, before_each_read(cut):
        Reader(file.fileno()).take()
    assert next(reads) > 4
