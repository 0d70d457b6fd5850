"""The hashes of a snapshot's blocks, and the digests of its tables of hashes: which contents have changed."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._catalog.names import key_of
from pmstore._core import BLOCK, Core, Entry, ffi, lib
from pmstore._snapshot import Reader, Snapshot
from tests.conftest import Medium
from tests.core.test_readers import Writer, beside
from tests.support.crashes import SEED, bulky, record
from tests.support.images import REGION

LONGER = int(os.environ.get("PMSTORE_LONGER", "1"))


def hashes_of(contents: Any) -> list[int]:
    """XXH3 of each block."""
    parts = (bytes(contents[at : at + BLOCK]) for at in range(0, len(contents), BLOCK))
    return [lib.pm_hash64(ffi.from_buffer(part), len(part), 0) for part in parts]


def entries(snapshot: Snapshot) -> tuple[Core, dict[bytes, Entry]]:
    core = Core.of_snapshot(snapshot)
    return core, {row.key: row.entry for row in core.scan(b"") if row.entry.offset}


def place(snapshot: Snapshot, name: str) -> tuple[int, int]:
    core, found = entries(snapshot)
    core.close()
    entry = found[key_of(name)]
    return entry.offset, entry.length


def assert_tells_what_changed(reader: Reader, before: dict[bytes, Any], changed: set[str]) -> dict[bytes, Any]:
    """Compares with an earlier snapshot, and returns what the next one compares with."""
    snapshot = reader.take()
    core, found = entries(snapshot)
    now = {}
    for key, (offset, length, *_) in found.items():
        contents = core.contents(offset, length)
        hashes, digest = snapshot.block_hashes(offset, length), snapshot.digest(offset, length)
        assert hashes.tolist() == hashes_of(contents)
        now[key] = offset, length, digest, contents
        if key in before and before[key][:2] == (offset, length):
            assert (before[key][2] == digest) == (key[1:].decode() not in changed), key
            assert (before[key][3] == contents) == (key[1:].decode() not in changed), key
    core.close()
    return now


def test_I20_hashes_and_digests_tell_what_changed(medium: Medium) -> None:
    dice = random.Random(SEED)
    path = medium.directory / "store.pm"
    sizes = {"small": 20, "most": 240, "page": 600, "copied": 20_000, "large": 100_000, "larger": 400_000, "odd": 3331}
    with pmstore.open(path, "x", media=medium.name) as store:  # type: ignore[arg-type]
        arrays = {name: store.create_array(name, n, "f8") for name, n in sizes.items()}
        store.create_array("constant", 70_000, fill_value=1.0, writeable=False)
        store["text"] = "text" * 3000
        store.commit()
        fd = os.open(path, os.O_RDONLY)
        follower, before = Reader(fd), dict[bytes, Any]()
        for k in range(1, 20):
            changed = {name for name in sizes if dice.random() < 0.3}
            for name in changed:
                at = dice.randrange(sizes[name])
                arrays[name][at : at + dice.choice([1, 1, 600])] = k
            store.commit()
            if k % 5 == 0:
                store._catalog.core.checkpoint()
            reader = dice.choice([follower, Reader(fd), Reader(fd, changing=True)])
            before = assert_tells_what_changed(reader, before, changed)
        os.close(fd)


def test_contents_in_another_slot_have_the_same_hashes_and_another_digest(medium: Medium) -> None:
    path = medium.directory / "store.pm"
    with pmstore.open(path, "x", media=medium.name) as store:  # type: ignore[arg-type]
        a = store.create_array("a", 200_000, "i8")
        fd = os.open(path, os.O_RDONLY)
        reader = Reader(fd)
        hashes, digests = dict[int, list[int]](), dict[int, set[int]]()
        for k in range(12):
            a[:] = k % 3  # whole, so that it is soon in two slots
            store.commit()
            snapshot = reader.take()
            extent = place(snapshot, "a")
            digests.setdefault(k % 3, set()).add(snapshot.digest(*extent))
            found = snapshot.block_hashes(*extent).tolist()
            assert hashes.setdefault(k % 3, found) == found == hashes_of(a.tobytes())
        assert [len(found) for found in digests.values()] == [2, 2, 2]
        os.close(fd)


def test_small_contents_in_one_page_have_digests_of_their_own(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm", "x") as store:
        a, b = store.create_array("a", 9), store.create_array("b", 9)
        store.commit()
        with open(store.path, "rb") as file:
            reader = Reader(file.fileno())
            one = reader.take()
            a[3] = 1
            store.commit()
            two = reader.take()
        places = {name: place(one, name) for name in "ab"}
        assert one.digest(*places["a"]) != two.digest(*places["a"])
        assert one.digest(*places["b"]) == two.digest(*places["b"]) and not b.any()
        assert all(one.block_hashes(*extent).tolist() == hashes_of(bytes(72)) for extent in places.values())


def test_a_digest_is_not_read_from_the_file_and_hashes_of_a_later_commit_are_refused(medium: Medium) -> None:
    path = medium.directory / "store.pm"
    with pmstore.open(path, "x", media=medium.name) as store:  # type: ignore[arg-type]
        a = store.create_array("a", 200_000)
        store.create_array("same", 200_000)
        store.commit()
        fd = os.open(path, os.O_RDONLY)
        snapshot = Reader(fd).take()
        extent, same = place(snapshot, "a"), place(snapshot, "same")
        digest = snapshot.digest(*extent)
        expected = snapshot.block_hashes(*same).tolist()
        a[::1000] = 1
        store.commit()
        store._catalog.core.checkpoint()
        with pytest.raises(pmstore.StaleSnapshotError):
            snapshot.block_hashes(*extent)
        assert snapshot.digest(*extent) == digest and snapshot.block_hashes(*same).tolist() == expected
        assert Reader(fd).take().digest(*extent) != digest
        os.close(fd)
    reads = 0

    def count(_: Any) -> None:
        nonlocal reads
        reads += 1

    callback = ffi.callback("void(void *)", count)
    lib.pm_source_pause(callback, ffi.NULL)
    try:
        os.truncate(path, 0)
        assert snapshot.digest(*extent) == digest and reads == 0
        with pytest.raises(pmstore.CorruptStoreError, match="truncated: it ends at 0, "):
            snapshot.block_hashes(*same)
        assert reads == 1
    finally:
        lib.pm_source_pause(ffi.NULL, ffi.NULL)


@pytest.mark.parametrize(("offset", "length"), [(1 << 40, 100_000), (4096, 1 << 41), (4100, 100_000), (0, 0)])
def test_an_extent_that_can_not_be_there_is_an_error(tmp_path: Path, offset: int, length: int) -> None:
    with pmstore.open(tmp_path / "store.pm", "x") as store:
        store.create_array("a", 20_000)
    with open(store.path, "rb") as file:
        snapshot = Reader(file.fileno()).take()
    with pytest.raises(pmstore.CorruptStoreError):
        snapshot.digest(offset, length)
    if length < 1 << 40:  # nobody has memory for the hashes of more
        with pytest.raises(pmstore.CorruptStoreError):
            snapshot.block_hashes(offset, length)
        with open(tmp_path / "copy.pm", "wb") as copy, pytest.raises(pmstore.CorruptStoreError):
            snapshot.copy_contents(copy.fileno(), offset, length, 0, length, snapshot.hashes(length))


def assert_hashes_are_of_a_commit(recording: Any, path: Path, seed: int, most: int) -> int:
    """Check a run: hashes are of the contents, or stale, and contents with an earlier digest are the earlier ones.
    Returns how many contents had the digest of an earlier snapshot."""
    dice = random.Random(seed)
    writer = Writer(recording, path, dice)
    writer.until_it_is_a_store()
    fd = os.open(path, os.O_RDONLY)
    reader, known, again = Reader(fd), dict[tuple[int, int, int], bytes](), 0
    while writer:
        with beside(writer, dice, most):
            snapshot = reader.take()
            core, found = entries(snapshot)
            for offset, length, *_ in found.values():
                key = offset, length, snapshot.digest(offset, length)
                with contextlib.suppress(pmstore.StaleSnapshotError):
                    contents = core.read(offset, length)
                    again += key in known
                    assert known.setdefault(key, contents) == contents, f"seed {seed}"
                    assert snapshot.block_hashes(offset, length).tolist() == hashes_of(contents), f"seed {seed}"
            core.close()
        for _ in range(dice.randrange(max(2, len(recording) // 40))):
            writer.step()
    os.close(fd)
    os.close(writer.fd)
    return again


def test_I20_equal_digests_are_of_equal_contents_whatever_happens_meanwhile(medium: Medium) -> None:
    recording = record(medium.directory / "store.pm", medium.name, bulky, readers=False)
    for seed in range(SEED, SEED + 3 * LONGER):
        assert assert_hashes_are_of_a_commit(recording, medium.directory / "played.pm", seed, 10) > 10


def test_arrays_that_end_where_another_one_begins(open_store: Any) -> None:
    """Such a table ends with its page, and the next page is the next array with a table of its own. There are more of
    them than are copied with a snapshot.
    """
    writer = open_store(max_size=64 << 20)
    for i in range(600, 0, -1):
        writer[f"{i:03}"] = np.full(511, i, "f8")
    writer.commit()
    with open_store(mode="r") as reader:
        for name, array in reader.items():
            assert (array == int(name)).all()


def test_a_store_of_more_tables_than_are_read_at_once(medium: Medium) -> None:
    """A reader hashes at most 1,024 pages of tables before it looks for more; the first arrays are copied whole."""
    arrays = {f"{i}": np.full(500, i, "f8") for i in range(1500)}
    with pmstore.open(medium.directory / "store.pm", "x", media=medium.name) as store:
        store.update(arrays)
    with pmstore.open(medium.directory / "store.pm", "r") as store:
        assert all(np.array_equal(store[name], array) for name, array in arrays.items())


def test_a_page_of_a_table_whose_own_hash_is_0(tmp_path: Path) -> None:
    """It is one that could be read. The last of 513 hashes is alone in its page."""
    nothing = bytes.fromhex("42d568e138d727ff")
    assert lib.pm_hash64(ffi.from_buffer(nothing), 8, 0) == 0
    path = tmp_path / "s.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.arange(513 * BLOCK, dtype="u1")
    with path.open("r+b") as file:
        reader = Reader(file.fileno())
        offset, length = place(reader.take(), "a")
        os.pwrite(file.fileno(), nothing, REGION + offset + length + 512 * 8)
        before = reader.take().digest(offset, length)
        assert Reader(file.fileno()).take().digest(offset, length) != before
