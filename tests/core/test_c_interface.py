"""What the C interface refuses, which Python never asks it for: keys, entries and extents past their limits."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import META_MAX, Core, Entry, ffi, lib
from tests.conftest import Medium, run_in_fork
from tests.support.images import NODE, REGION, Image

KEY_MAX = 768
PAGE = 4096
ONE_PAGE = 4000  # an extent of one page, with its hash


@pytest.fixture
def core(open_store: Callable[..., pmstore.Store]) -> Iterator[Core]:
    store = open_store()
    store["w"] = bytes(100_000)
    store.commit()
    yield store._catalog.core
    store.rollback()
    assert len(store) == 1 and store.check().ok


def test_a_descriptor_that_is_not_open() -> None:
    assert lib.pm_open(-1, lib.PM_MEDIA_AUTO, 0, 0, ffi.NULL, ffi.new("pm_store **")) == lib.PM_IO
    assert ffi.string(lib.pm_message()) == b"cannot look at the file: Bad file descriptor"


def test_a_descriptor_of_something_else_than_a_file() -> None:
    read, write = os.pipe()
    assert lib.pm_format(write, lib.PM_MEDIA_AUTO, ffi.NULL) == lib.PM_NOT_A_STORE
    assert ffi.string(lib.pm_message()) == b"not a regular file"
    assert lib.pm_open(read, lib.PM_MEDIA_AUTO, 0, 0, ffi.NULL, ffi.new("pm_store **")) == lib.PM_NOT_A_STORE
    assert ffi.string(lib.pm_message()) == b"not a regular file"


def test_a_child_lets_the_file_of_descriptor_0_go(medium: Medium) -> None:
    """Python gives the core no such number."""
    path = medium.directory / "s.pm"
    pmstore.open(path, media=medium.name).close()

    def program() -> None:
        os.dup2(os.open(path, os.O_RDWR), 0)
        media = lib.PM_MEDIA_FILE if medium.name == "file" else lib.PM_MEDIA_AUTO
        assert lib.pm_open(0, media, 0, 0, ffi.NULL, ffi.new("pm_store **")) == lib.PM_OK
        run_in_fork(child)

    def child() -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)

    run_in_fork(program)


@pytest.mark.parametrize("key", [b"", bytes(KEY_MAX + 1)])
def test_keys_have_a_length(core: Core, key: bytes) -> None:
    core.put(b"k", Entry(0, 0, 1, 0, b""))
    refused = [
        lambda: core.get(key),
        lambda: core.delete(key),
        lambda: core.put(key, Entry(0, 0, 1, 0, b"")),
        lambda: core.rename([(key, b"new")]),
        lambda: core.rename([(b"k", key)]),
    ]
    for call in refused:
        with pytest.raises((pmstore.InternalError, pmstore.TooLargeError), match=r"an empty key|over the limit of 768"):
            call()


def test_no_rows_are_looked_for_by_keys_over_the_limit(core: Core) -> None:
    key = bytes(KEY_MAX + 1)
    for rows in (core.scan(key), core.scan(b"", after=key), core.scan(b"", start=key)):
        with pytest.raises(pmstore.TooLargeError, match="a key is over the limit"):
            next(rows)


def test_a_call_copies_out_all_rows_that_fit(core: Core) -> None:
    for number in range(200):
        core.put(b"s%03d" % number, Entry(0, 0, 1, 0, b"x" * 50))
    rows, used = ffi.new("uint8_t[]", 50_000), ffi.new("size_t *")

    def copied_out(room: int) -> int:
        assert lib.pm_scan(core._store, b"s", 1, 0, b"s", 1, rows, room, used) == lib.PM_OK
        return int(used[0])

    row = copied_out(50_000) // 200
    assert row >= 54, "each has its key and 50 bytes"
    for fit in (60, 199, 200):
        assert [copied_out(fit * row + more) for more in (0, row - 1)] == [fit * row] * 2


def test_the_longest_key_is_a_key(core: Core) -> None:
    key = b"k" * KEY_MAX
    core.put(key, Entry(0, 0, 1, 0, b"v" * META_MAX))
    assert core.get(key) == Entry(0, 0, 1, 0, b"v" * META_MAX)
    assert [row.key for row in core.scan(key)] == [key]
    assert core.delete(key) and core.get(key) is None


def test_the_longest_key_is_found_again(open_store: Any) -> None:
    """A node that is read from the file is checked first."""
    entry = Entry(0, 0, 1, 0, b"v" * META_MAX)
    store = open_store()
    store._catalog.core.put(b"k" * KEY_MAX, entry)
    store.commit()
    store.close()
    assert open_store(mode="r+")._catalog.core.get(b"k" * KEY_MAX) == entry


def test_an_entry_carries_so_much_itself(core: Core) -> None:
    with pytest.raises(pmstore.TooLargeError, match="a meta of 769 bytes is over the limit of 768"):
        core.put(b"k", Entry(0, 0, 1, 0, bytes(META_MAX + 1)))
    assert core.get(b"k") is None


def value(text: bytes) -> Entry:
    return Entry(0, 0, 1, 0, text)


def sequence(core: Core, prefix: bytes = b"s") -> list[bytes]:
    """The meta of the members; the keys are those of 0 and the numbers after it."""
    rows = list(core.scan(prefix))
    assert [row.key for row in rows] == [prefix + i.to_bytes(8, "big") for i in range(len(rows))]
    return [row.entry.meta for row in rows]


def test_a_sequence_changes_as_a_whole_or_not(core: Core) -> None:
    core.splice(b"s", 0, 0, [value(b"%d" % i) for i in range(500)])
    expected = sequence(core)
    owned = core.get(next(core.scan(b"n")).key)
    assert owned is not None and owned.offset
    refused: list[tuple[tuple[bytes, int, int, list[Entry | int]], str]] = [
        ((b"s", 501, 0, [value(b"new")]), "lacks a member"),
        ((b"s", 499, 2, []), "lacks a member"),
        ((b"s", 500, 1, []), "lacks a member"),
        ((b"s", 1 << 63, 0, []), "no such numbers"),
        ((b"s", 3, 1 << 63, []), "lacks a member"),
        ((b"s", 3, 2, [value(b"new"), 5]), "a member moves that is not removed"),
        ((b"s", 3, 2, [2]), "a member moves that is not removed"),
        ((b"s", 3, 2, [4, value(b"new"), 4]), "moves twice"),
        ((b"s", 3, 2, [4, 3, value(b"new"), owned]), "no owner"),
        ((b"s", 3, 2, [value(bytes(META_MAX + 1))]), "over the limit"),
        ((b"", 0, 0, [value(b"new")]), "an empty key"),
        ((b"p" * (KEY_MAX - 7), 0, 0, [value(b"new")]), "too long for numbers"),
    ]
    for arguments, text in refused:
        with pytest.raises((pmstore.InternalError, pmstore.CorruptStoreError, pmstore.TooLargeError), match=text):
            core.splice(*arguments)
        assert sequence(core) == expected
    core.splice(b"s", 3, 2, [4, value(b"new"), 3, value(b"")])
    expected[3:5] = [expected[4], b"new", expected[3], b""]
    assert sequence(core) == expected
    core.splice(b"p" * (KEY_MAX - 8), 0, 0, [value(b"new")])
    assert sequence(core, b"p" * (KEY_MAX - 8)) == [b"new"]


def test_an_entry_is_put_with_those_that_get_new_keys_or_not_at_all(core: Core) -> None:
    for key in (b"a", b"b", b"taken"):
        core.put(key, value(key))
    owned = core.get(next(core.scan(b"n")).key)
    assert owned is not None
    refused: list[tuple[Entry, list[tuple[bytes, bytes]], str]] = [
        (value(b"new"), [(b"a", b"x"), (b"b", b"taken")], "is taken"),
        (value(b"new"), [(b"a", b"x"), (b"b", b"")], "an empty key"),
        (owned, [(b"a", b"x"), (b"b", b"y")], "no owner"),
        (value(b"new"), [(b"a", b"x"), (b"k", b"y")], "replaced in the same call"),
    ]
    for entry, moved, text in refused:
        with pytest.raises(pmstore.InternalError, match=text):
            core.put(b"k", entry, b"", moved)
        assert core.get(b"a") == value(b"a") and core.get(b"b") == value(b"b")
        assert core.get(b"k") is core.get(b"x") is core.get(b"y") is None
    core.put(b"k", value(b"new"), b"taken", [(b"a", b"x"), (b"b", b"y")])
    assert [core.get(key) for key in (b"a", b"b", b"taken")] == [None] * 3
    assert (core.get(b"x"), core.get(b"y"), core.get(b"k")) == (value(b"a"), value(b"b"), value(b"new"))


def test_an_extent_that_has_an_owner_is_not_freed(core: Core) -> None:
    offset = core.alloc(5000)
    core.fill(offset, 5000, b"x")
    core.put(b"k", Entry(offset, 5000, 1, 0, b""))
    for length in (5000, 4999):
        with pytest.raises(pmstore.InternalError, match="without an owner"):
            core.free(offset, length)
    other = core.alloc(5000)
    with pytest.raises(pmstore.InternalError, match="without an owner"):
        core.free(other, 4999)
    core.free(other, 5000)
    assert core.contents(offset, 5000) == b"x" * 5000


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
def test_a_number_that_would_overflow_is_no_member(core: Core, number: int) -> None:
    core.splice(b"s", 0, 0, [value(b"%d" % i) for i in range(3)])
    core.put(b"s" + number.to_bytes(8, "big"), value(b"far"))
    if number == 1 << 63:
        core.splice(b"s", 1, 1, [value(b"a"), value(b"b")])
    else:
        with pytest.raises(pmstore.CorruptStoreError, match="a key has no place in its sequence"):
            core.splice(b"s", 1, 1, [value(b"a"), value(b"b")])
    assert core.get(b"s" + bytes(7) + b"\0").meta == b"0"  # type: ignore[union-attr]


@pytest.mark.parametrize("rest", [b"", b"\0" * 3, b"\0" * 7 + b"\1" * 2])
def test_a_key_without_a_number_is_no_member(core: Core, rest: bytes) -> None:
    """A damaged file may have one between the members. The others do not get numbers that are not theirs."""
    members = [value(b"%d" % i) for i in range(5)]
    core.splice(b"s", 0, 0, members)
    core.put(b"s" + rest, value(b"no member"))
    with pytest.raises(pmstore.CorruptStoreError, match="a key has no place in its sequence"):
        core.splice(b"s", 0, 1, [value(b"a"), value(b"b"), value(b"c")])
    assert [core.get(b"s" + bytes(7) + bytes([i])) for i in range(5)] == members
    assert core.get(b"s" + rest) == value(b"no member")


def leaves_of_a_sequence(store: pmstore.Store) -> tuple[Image, list[int]]:
    """The image of a closed store, and the pages of its catalog with the 500 members of b"s", in order."""
    store._catalog.core.splice(b"s", 0, 0, [value(b"%020d" % i) for i in range(500)])
    store.commit()
    store.close()
    image = Image(Path(store.path))
    return image, sorted(filter(image.is_leaf, image.pages(NODE)), key=image.cells)


@pytest.mark.parametrize("end", [0, -1])
def test_a_member_in_another_leaf_than_its_own(open_store: Callable[..., pmstore.Store], end: int) -> None:
    """A damaged file has the last member of a leaf in the next one, too, or the first one in that before."""
    image, leaves = leaves_of_a_sequence(open_store())
    cells = image.cells(leaves[2])
    number = int.from_bytes(cells[end].key[1:], "big") + (1 if end else -1)
    cells[end] = cells[end]._replace(key=b"s" + number.to_bytes(8, "big"))
    image.write_node(leaves[2], 0, cells)
    image.save()
    core = open_store(mode="r+")._catalog.core
    with pytest.raises(pmstore.CorruptStoreError, match="a key has no place in its sequence"):
        core.splice(b"s", 0, 0, [value(b"new")])


def test_a_member_that_is_still_there_when_it_was_removed(open_store: Callable[..., pmstore.Store]) -> None:
    """A damaged file has the last member of a leaf in the next one, too. Removing others brings it into a leaf where it
    has its place.
    """
    image, leaves = leaves_of_a_sequence(open_store())
    *_, before, last = image.cells(leaves[-3])
    image.write_node(leaves[-3], 0, [before, last])
    image.write_node(leaves[-2], 0, [cell._replace(meta=b"") for cell in (last, *image.cells(leaves[-2]))])
    image.save()
    store = open_store(mode="r+")
    at = int.from_bytes(last.key[1:], "big")
    with pytest.raises(pmstore.CorruptStoreError, match="a key has no place in its sequence"):
        store._catalog.core.splice(b"s", at, 500 - at, [])
    store._drop(discard=True)


def test_the_last_of_a_prefix_where_the_next_key_stands_twice(open_store: Callable[..., pmstore.Store]) -> None:
    """A damaged file has the first key behind the prefix at the end of the leaf before, too."""
    image, leaves = leaves_of_a_sequence(open_store())
    before, last = image.cells(leaves[-2]), image.cells(leaves[-1])
    behind = last[0]._replace(key=b"t")
    image.write_node(leaves[-2], 0, [*before[:-1], behind])
    image.write_node(leaves[-1], 0, [behind])
    image.save()
    with pytest.raises(pmstore.CorruptStoreError):
        open_store(mode="r+")._catalog.core.last(b"s")


def test_nothing_is_appended_where_what_follows_is_damaged(open_store: Callable[..., pmstore.Store]) -> None:
    """The page may have further members."""
    image, leaves = leaves_of_a_sequence(open_store())
    *cells, last = image.cells(leaves[-2])
    image.write_node(leaves[-2], 0, cells)
    image.bytes[REGION + leaves[-1] + 100] ^= 1
    image.save()
    store = open_store(mode="r+")
    with pytest.raises(pmstore.CorruptStoreError):
        store._catalog.core.splice(b"s", int.from_bytes(last.key[1:], "big"), 0, [value(b"new")])
    assert store._catalog.core.get(last.key) is None
    store._drop(discard=True)


@pytest.mark.parametrize("prefix", [b"", bytes(KEY_MAX + 1)])
def test_the_last_of_a_prefix(core: Core, prefix: bytes) -> None:
    with pytest.raises(pmstore.InternalError, match="the prefix must have 1 to 768 bytes"):
        core.last(prefix)


@pytest.mark.parametrize("last", [b"\xff", b"\xff" * 5, b"\xff" * KEY_MAX])
def test_the_last_of_a_prefix_that_has_no_next_one(core: Core, last: bytes) -> None:
    core.put(last, Entry(0, 0, 1, 0, b"1"))
    found = core.last(last[:1])
    assert found is not None and found.key == last


@pytest.mark.parametrize(("at", "length"), [(0, PAGE + 1), (PAGE, 1), (1, PAGE), (2**63, 1)])
def test_a_write_stays_in_its_extent(core: Core, at: int, length: int) -> None:
    offset = core.alloc(PAGE)
    with pytest.raises(pmstore.InternalError, match="a write beyond the end of an extent"):
        core.write(offset, at, bytes(PAGE + 1), length)
    core.write(offset, 0, b"x" * PAGE, PAGE)
    core.free(offset, PAGE)


def test_a_pattern_fits_into_its_extent(core: Core) -> None:
    offset = core.alloc(PAGE)
    with pytest.raises(pmstore.InternalError, match="a write beyond the end of an extent"):
        core.fill(offset, PAGE + 8, b"12345678")
    for pattern in (b"123", b""):
        with pytest.raises(pmstore.InternalError, match="a pattern that does not fit into the extent"):
            core.fill(offset, PAGE, pattern)
    core.fill(offset, PAGE, b"12345678")
    core.free(offset, PAGE)


def test_an_extent_has_one_owner(core: Core) -> None:
    owned = core.get(next(iter(core.scan(b"")), None).key)  # type: ignore[union-attr]
    assert owned is not None and owned.offset
    with pytest.raises(pmstore.InternalError, match="only an extent without an owner is freed by hand"):
        core.free(owned.offset, owned.length)
    with pytest.raises(pmstore.InternalError, match="only an extent allocated since the last commit"):
        core.write(owned.offset, 0, b"x", 1)
    with pytest.raises(pmstore.InternalError, match="an entry takes an extent that has no owner"):
        core.put(b"another", owned)
    with pytest.raises(pmstore.InternalError, match="an extent of no bytes"):
        core.alloc(0)


def test_an_extent_keeps_its_length(core: Core) -> None:
    row = next(iter(core.scan(b"")))
    with pytest.raises(pmstore.InternalError, match="an extent keeps its length"):
        core.put(row.key, row.entry._replace(length=row.entry.length - 1))
    assert core.get(row.key) == row.entry


@pytest.fixture
def full(open_store: Callable[..., pmstore.Store]) -> Iterator[tuple[Core, list[int]]]:
    """A store whose last free page is taken, and the pages that were taken by hand: ascending."""
    core = open_store(max_size=8 << 20)._catalog.core
    core.put(b"k", Entry(0, 0, 1, 0, b""))
    taken = []
    with pytest.raises(pmstore.OutOfSpaceError):
        while True:
            taken.append(core.alloc(ONE_PAGE))
    yield core, sorted(taken)


def test_in_a_full_store_an_entry_takes_what_a_page_of_the_catalog_has_left(full: tuple[Core, list[int]]) -> None:
    core, _ = full
    for meta in (b"longer", b"shorter"[:3], bytes(META_MAX)):
        core.put(b"k", Entry(0, 0, 1, 0, meta))
        assert core.get(b"k") == Entry(0, 0, 1, 0, meta)


def test_the_page_before_a_larger_extent_is_found_again(full: tuple[Core, list[int]]) -> None:
    core, taken = full
    single, first = taken[10], next(at for at in taken[20:] if at + PAGE in taken)
    for offset in (single, first, first + PAGE):
        core.free(offset, ONE_PAGE)
    assert core.alloc(PAGE) == first and core.alloc(ONE_PAGE) == single


def test_space_under_an_array_is_found_when_the_array_is_gone(open_store: Callable[..., pmstore.Store]) -> None:
    store = open_store(max_size=8 << 20)
    core = store._catalog.core
    array = store.create_array("w", ONE_PAGE // 8)
    store.commit()
    del store["w"]
    store.commit()
    with pytest.raises(pmstore.OutOfSpaceError):
        while True:
            core.alloc(ONE_PAGE)
    del array
    core.alloc(ONE_PAGE)


def changing(handle: Any) -> list[int]:
    """The statuses of all calls that change something, but for a rollback."""
    out = ffi.new("uint64_t[8]")
    at = ffi.cast("uint8_t *", out)
    return [
        lib.pm_commit(handle),
        lib.pm_commit_only(handle, ffi.NULL, 0),
        lib.pm_mark(handle, 0, 0),
        lib.pm_mark_dirty(handle, at, 1, ffi.new("int *")),
        lib.pm_violation(handle, ffi.NULL, 0, ffi.new("pm_broken *")),
        lib.pm_checkpoint(handle),
        lib.pm_renumber(handle, 1),
        lib.pm_put(handle, b"k", 1, ffi.new("pm_entry *"), b"", ffi.NULL, 0, b"", 0),
        lib.pm_delete(handle, b"k", 1, ffi.NULL, 0),
        lib.pm_rename(handle, ffi.NULL, 0),
        lib.pm_splice(handle, b"s", 1, 0, 0, ffi.NULL, 0),
        lib.pm_alloc(handle, 1, out),
        lib.pm_free(handle, 0, 1),
        lib.pm_write(handle, 0, 0, at, 1),
        lib.pm_fill(handle, 0, 1, at, 1),
    ]


def test_each_call_that_changes_something_is_refused_in_a_store_for_reading(core: Core, medium: Medium) -> None:
    """None of them gets as far as its arguments."""
    path = medium.directory / "another.pm"
    pmstore.open(path, media=medium.name).close()  # type: ignore[call-overload]
    with pmstore.open(path, "r", exclusive=True) as store:
        handle = store._catalog.core._store
        calls = [*changing(handle), lib.pm_rollback(handle)]
        assert calls == [lib.PM_READ_ONLY] * len(calls)
        assert store.check().ok


def test_each_call_is_refused_in_a_store_that_has_failed(directory: Path) -> None:
    store = pmstore.open(directory / "failed.pm", media="trace:file")
    store["w"] = np.zeros(1000)
    core = store._catalog.core
    core.trace.fail(lib.PM_OPERATION_WRITE | lib.PM_OPERATION_SYNC, 1, errno.EIO)
    with pytest.raises(pmstore.StoreIOError):
        store.commit()
    core.trace.fail(0, 0, 0)
    handle, out = core._store, ffi.new("uint8_t[8192]")
    number = ffi.cast("uint64_t *", out)
    calls = [
        *changing(handle),
        lib.pm_commit_async(handle, 1),
        lib.pm_sync(handle),
        lib.pm_get(handle, b"k", 1, ffi.new("pm_entry *"), out),
        lib.pm_scan(handle, b"", 0, 0, b"", 0, out, 8192, ffi.new("size_t *")),
        lib.pm_last(handle, b"k", 1, out),
        lib.pm_read(handle, PAGE, 1, out),
        lib.pm_check_contents(handle, PAGE, 1, 1),
        lib.pm_buffer_open(handle, PAGE, 1, 0, ffi.new("pm_buffer **")),
        lib.pm_count_keys(handle, number),
        lib.pm_check(handle, ffi.new("pm_report **")),
    ]
    assert calls == [lib.PM_FAILED] * len(calls)
    store._drop(discard=True)


def test_each_new_member_of_a_list_is_checked(core: Core) -> None:
    members = ffi.new("pm_member[]", 3)
    members[2].entry.meta_length = META_MAX + 1
    assert lib.pm_splice(core._store, b"s", 1, 0, 0, members, 3) == lib.PM_TOO_LONG


def flipped(store: pmstore.Store) -> np.ndarray[Any, Any]:
    """An array of which the last commit has made the second slot current."""
    x = store.create_array("x", 140_000)
    for value in range(1, 5):
        direct = store.stats().bytes_direct
        x[:] = value
        store.commit()
    assert store.stats().bytes_direct > direct
    return x


def test_commits_go_on_from_a_new_number(medium: Medium, open_store: Callable[..., pmstore.Store]) -> None:
    """Slots that an old number made current are durable now, and the header says that no record follows. Later ones are
    found by a recovery.
    """
    store = open_store()
    x = flipped(store)
    core = store._catalog.core
    before = store.stats().checkpoints
    core.renumber(1)
    assert core.sequence == store.stats().durable_sequence == 1
    for value in range(5, 8):
        x[:] = value
        store.commit()
    assert core.sequence == 4 and store.stats().checkpoints >= before + 2
    del x
    store._drop(discard=True)
    store = open_store(mode="r+", verify=True)
    stats = store.stats()
    assert store.sequence == stats.durable_sequence == 4 and stats.records_replayed == 3
    store._catalog.core.renumber(70)
    store._drop(discard=True)
    store = open_store(mode="r+", verify=True)
    assert store.sequence == 70 and (store["x"] == 7).all() and store.check().ok


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_number_that_is_not_durable_is_not_taken(directory: Path, error: int) -> None:
    kinds = lib.PM_OPERATION_WRITE | (lib.PM_OPERATION_SYNC if error == errno.EIO else 0)
    for number in itertools.count(1):
        store = pmstore.open(directory / f"{number}.pm", media="trace:file")
        flipped(store)
        core = store._catalog.core
        before = core.sequence
        core.trace.fail(kinds, number, error)
        try:
            core.renumber(70)
            assert core.sequence == 70
        except pmstore.Error:
            assert core.sequence == before
        failures = core.trace.operations()[1]
        assert failures or core.sequence == 70
        core.trace.fail(0, 0, 0)
        if error == errno.ENOSPC:
            store["x"][:] = 9
            store.commit()
            assert core.sequence in (before + 1, 71)
        store._drop(discard=True)
        with pmstore.open(directory / f"{number}.pm", "r", verify=True) as again:
            assert again.sequence in (before, before + 1, 70, 71)
        if not failures:
            break
    assert number > 1
