"""Bad input of every kind: a clear error of its own, and the committed state stays. Damaged files crash nothing."""

from __future__ import annotations

import contextlib
import os
import pickle
import random

import msgpack
import numpy as np
import pytest

import pmstore
from pmstore._core import META_MAX, Entry

HUGE = 1 << 60


@pytest.fixture
def kept(store):
    """A store with committed contents, which are there, and alone, after the test."""
    w = store.create_array("w", (10, 10), fill_value=1)
    store["v"] = "value"
    store.commit()
    yield store
    if not store.closed:
        assert store["w"] is w and (w == 1).all() and store["v"] == "value" and sorted(store) == ["v", "w"]
        assert store.check().ok


@pytest.mark.parametrize(
    "shape, error, text",
    [
        (-1, ValueError, "negative"),
        ((3, -1), ValueError, "negative"),
        (HUGE, pmstore.TooLargeError, "address range"),
        ((HUGE, HUGE), pmstore.TooLargeError, "address range"),
        ((0, HUGE, HUGE), pmstore.TooLargeError, "address range"),
        ((1,) * 65, pmstore.TooLargeError, "64 dimensions"),
        (1.5, TypeError, "a shape is"),
        ("34", TypeError, "a shape is"),
        (None, TypeError, "a shape"),
        ((1, None), TypeError, "a shape is"),
        ((1 << 40) // 8 * 3, (pmstore.OutOfSpaceError, pmstore.TooLargeError, MemoryError), None),
        ((1 << 50) // 8, (pmstore.OutOfSpaceError, pmstore.TooLargeError, MemoryError), None),
    ],
    ids=lambda v: str(v)[:20],
)
def test_shapes(kept, shape, error, text):
    for use in (kept.create_array, kept.require_array):
        with pytest.raises(error, match=text):
            use("new", shape)
    assert "new" not in kept


DTYPES = [object, "O", [("a", "O")], [("a", [("b", "O")])], "(2,)O", "nonsense", 5]
if hasattr(np, "dtypes") and hasattr(np.dtypes, "StringDType"):
    DTYPES.append(np.dtypes.StringDType())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(kept, dtype):
    with pytest.raises(TypeError):
        kept.create_array("new", 3, dtype)
    assert "new" not in kept


def test_object_arrays(kept):
    for value in (np.array([1, None]), np.array([{}]), np.zeros(2, [("a", "O")])):
        with pytest.raises(TypeError, match="Python objects"):
            kept["new"] = value
        with pytest.raises(TypeError, match="Python objects"):
            kept["w"] = value


@pytest.mark.parametrize(
    "options, error",
    [
        (dict(order="K"), ValueError),
        (dict(order=None), ValueError),
        (dict(fill_value="text"), ValueError),
        (dict(fill_value=[1, 2]), ValueError),
        (dict(fill_value=np.zeros(4)), ValueError),
        (dict(fill_value=300, dtype="i1"), OverflowError),
        (dict(fill_value={}), TypeError),
    ],
    ids=str,
)
def test_other_arguments_of_an_array(kept, options, error):
    with pytest.raises(error):
        kept.create_array("new", 3, **options)
    assert "new" not in kept


@pytest.mark.parametrize("data, dtype", [([300], "i1"), ([[-1]], "u1"), (300, "i1"), (["x"], "i4"), ([2**70], "u8")])
def test_data_that_the_dtype_lacks(kept, data, dtype):
    with pytest.raises((OverflowError, ValueError)):
        kept.create_array("new", data=data, dtype=dtype)
    assert "new" not in kept


def test_a_value_that_can_not_be_stored_leaves_the_old_one(kept):
    for name in ("v", "w"):
        for value in (object(), {object()}, [object()], np.ma.masked, lambda: 0):
            with pytest.raises(TypeError):
                kept[name] = value
            with pytest.raises(TypeError):
                kept.setdefault("new", value)


def test_commit_inside_what_will_be_rolled_back(kept):
    with pytest.raises(pmstore.TransactionError):
        with kept.transaction():
            with contextlib.suppress(KeyError), kept.transaction():
                kept["w"][:] = 5
                raise KeyError
            kept.commit()


ERRORS = [error for error in vars(pmstore).values() if isinstance(error, type) and issubclass(error, pmstore.Error)]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_are_also_a_builtin_and_can_be_sent(kind):
    error = kind("the text")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) and "the text" in str(error)
    if kind is not pmstore.Error:
        assert any(base.__module__ == "builtins" for base in kind.__mro__[1:-3])
    if isinstance(error, OSError):
        assert error.errno and again.errno == error.errno


def test_errors_of_the_system_are_sent_with_all_that_they_tell(tmp_path):
    with pmstore.open(tmp_path / "store.pm"):
        with pytest.raises(pmstore.StoreLockedError) as caught:
            pmstore.open(tmp_path / "store.pm", max_size=1 << 30)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.pid == caught.value.pid == os.getpid()
    with pytest.raises(pmstore.StoreNotFoundError) as caught:
        pmstore.open(tmp_path / "none.pm", "r")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.filename, str(again)) == (caught.value.filename, str(caught.value))
    assert again.filename == str(tmp_path / "none.pm")


def test_array_rows_are_not_assigned_by_mistake(kept):
    with pytest.raises(ValueError):
        kept["w"][:] = np.ones(3)
    with pytest.raises(IndexError):
        kept["w"][50] = 1


# ---- entries that a hostile file may hold, hashes and all

ENTRIES = {
    "an unknown kind": Entry(0, 0, 77, 0, b""),
    "an empty value": Entry(0, 0, 2, 0, b""),
    "a damaged value": Entry(0, 0, 2, 0, b"\xc1"),
    "a blob without bytes": Entry(0, 0, 3, 0, b"list"),
    "a list without an id": Entry(0, 0, 4, 0, b""),
    "an array without a layout": Entry(0, 0, 1, 0, b""),
    "a layout that is a number": Entry(0, 0, 1, 0, b"\x05"),
    "a layout of objects": Entry(0, 0, 1, 0, msgpack.packb(["|O", [0], "C", True])),
    "a layout of nonsense": Entry(0, 0, 1, 0, msgpack.packb([{"fields": 5}, [0], "C", True])),
    "a negative shape": Entry(0, 0, 1, 0, msgpack.packb(["<f8", [-1], "C", True])),
    "a huge shape": Entry(0, 0, 1, 0, msgpack.packb(["<f8", [2**40, 2**40], "C", True])),
    "a shape without bytes": Entry(0, 0, 1, 0, msgpack.packb(["<f8", [10], "C", True])),
    "a strange order": Entry(0, 0, 1, 0, msgpack.packb(["<f8", [0], "K", True])),
    "a shape of text": Entry(0, 0, 1, 0, msgpack.packb(["<f8", "ab", "C", True])),
    "a tail without bytes": Entry(0, 0, 1, 0, msgpack.packb([8, 500, 1])),
    "a negative tail": Entry(0, 0, 1, 0, msgpack.packb([8, -500, 1])),
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_hostile_entries(store, entry):
    store["good"] = 1
    core = store._catalog.core
    core.put(b"nbad", entry)
    for use in (lambda: store["bad"], lambda: store.get("bad"), lambda: list(store.values())):
        with pytest.raises(pmstore.CorruptStoreError, match="bad"):
            use()[0]
    assert list(store) == ["bad", "good"] and "bad" in str(store)
    store.commit()
    report = store.check()
    assert [problem.name for problem in report] == ["bad"]
    if entry.kind != 4:
        store["bad"] = np.arange(3)
        assert store.check().ok
        core.put(b"nbad", entry)
        del store["bad"]
        assert dict(store) == {"good": 1}


def test_hostile_extents(store):
    """The layout says one thing, the extent another."""
    store.create_array("a", 100)
    core = store._catalog.core
    entry = core.get(b"na")
    for meta in (
        msgpack.packb(["<f8", [101], "C", True]),
        msgpack.packb(["<f8", [99], "C", True]),
        msgpack.packb(["<f8", [0], "C", True]),
        msgpack.packb([792, 8, 5]),
        msgpack.packb([0, 800, 5]),
        msgpack.packb([2**63, 800, 5]),
    ):
        core.put(b"na", entry._replace(meta=meta))
        with pytest.raises(pmstore.CorruptStoreError, match="'a'"):
            store["a"]


@pytest.mark.parametrize("key", [b"k", b"k" * 700, b"m", b"mnew", b"\0", b"\xff"])
def test_keys_of_an_unknown_kind(store, key):
    """A newer pmstore may have written them."""
    store["a"] = 1
    store.create_list("l").append(2)
    with store.transaction(message="a note"):
        pass
    core = store._catalog.core
    assert store.check().ok
    for more in (b"", b"\1", b"\2"):
        core.put(key + more, Entry(0, 0, 2, 0, b"\x01"))
    store.commit()
    [problem] = store.check()
    assert problem.name is None and problem.text.startswith(f"the key {key!r:.80} is of an unknown kind")
    for more in (b"", b"\1", b"\2"):
        core.delete(key + more)
    assert store.check().ok
    core.put(key, Entry(0, 0, 2, 0, b"\x01"))
    store.close()
    with pytest.raises(pmstore.CorruptStoreError, match="unknown kind"):
        pmstore.compact(store.path)


@pytest.mark.parametrize("key", [b"n", b"n/", b"na//b", b"n\xff", b"n\x00"])
def test_hostile_names(store, key):
    store._catalog.core.put(key, Entry(0, 0, 2, 0, b"\x01"))
    with pytest.raises(pmstore.CorruptStoreError, match="damaged name"):
        list(store)
    store.commit()
    assert not store.check().ok


@pytest.mark.parametrize("length, index", [(1, b"l"), (9, b""), (2, b"\0" * 7 + b"\1" + b"\0" * 7 + b"\5")])
def test_hostile_lists(store, length, index):
    items = store.create_list("items")
    items.append(1)
    store._catalog.core.put(b"l" + index + b"x" * (length - 1 if length != 2 else 0), Entry(0, 0, 2, 0, b"\x01"))
    store.commit()
    assert not store.check().ok
    with contextlib.suppress(pmstore.CorruptStoreError):
        list(items)


def test_entries_at_the_limit(open_store):
    with open_store() as store:
        for n in range(META_MAX - 6, META_MAX + 3):
            store[f"v{n}"] = b"x" * n
            store[f"a{n}"] = np.zeros(1, [("f" * n, "f8")])
    with open_store(mode="r", verify=True) as store:
        for n in range(META_MAX - 6, META_MAX + 3):
            assert len(store[f"v{n}"]) == n and store[f"a{n}"].dtype.names == ("f" * n,)


# ---- damaged files


def contents(store):
    """Everything in the store, as far as it can be read: {name: bytes, or the error}."""
    out = {}
    for name in store:
        try:
            value = store[name]
            if isinstance(value, pmstore.PersistentList):
                value = list(value)
            out[name] = value.tobytes() if isinstance(value, np.ndarray) else repr(value)
        except pmstore.CorruptStoreError as error:
            out[name] = error
    return out


@pytest.fixture
def sample(medium, open_store):
    """A small store's path, bytes and contents; closed as by a kill, so that its log is not empty."""
    path = medium.directory / "store.pm"
    with open_store() as store:
        for i in range(40):
            store[f"group{i % 4}/value{i}"] = "text " * i
        store["array"] = np.arange(3000.0)
        store.create_list("items").extend(["x" * 10, "y" * 2000])
    store = open_store()
    with store.transaction():
        store["array"] += 1
        store["group0/value0"] = "changed"
    good = contents(store)
    store._drop(discard=True)
    return path, path.read_bytes(), good


def damages(data, rng, count):
    for i in range(count):
        bad = bytearray(data)
        at = rng.choice([rng.randrange(len(bad)), rng.randrange(min(len(bad), 60_000))])
        kind = i % 5
        if kind < 2:
            bad[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            length = rng.choice([1, 8, 64, 4096])
            bad[at : at + length] = rng.randbytes(len(bad[at : at + length]))
        elif kind == 3:  # spliced: bytes from another place
            length = rng.choice([8, 64, 4096, 8192])
            source = rng.randrange(len(bad) - length)
            target = rng.choice([at, at & ~4095])
            bad[target : target + length] = bad[source : source + length][: len(bad) - target]
        else:
            del bad[at:]
        yield kind, at, bytes(bad[: len(data)])


@pytest.mark.long_on("memory")
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_damaged_file_is_an_error_and_never_a_crash(sample, open_store, mode):
    path, data, good = sample
    rng = random.Random(5)
    outcomes = {"refused": 0, "told": 0, "harmless": 0}
    for kind, at, bad in damages(data, rng, 250):
        path.write_bytes(bad)
        try:
            store = open_store(mode=mode)
        except pmstore.Error:
            outcomes["refused"] += 1
            continue
        try:
            try:
                found = contents(store)
                report = store.check()
            except pmstore.CorruptStoreError:
                outcomes["told"] += 1
                continue
            if report.ok:
                # The last commit may be gone with its record's bytes: then it is the state before, whole.
                assert found == good or (found.keys() == good.keys() and found["group0/value0"] == "''"), (kind, at)
                outcomes["harmless"] += 1
            else:
                assert str(report)
                outcomes["told"] += 1
        finally:
            with contextlib.suppress(pmstore.Error):
                store._drop(discard=True)
    assert all(outcomes.values()), outcomes


@pytest.mark.long_on("memory")
def test_a_damaged_file_can_be_written_to_without_a_crash(sample, open_store):
    path, data, _ = sample
    rng = random.Random(6)
    for _, _, bad in damages(data, rng, 150):
        path.write_bytes(bad)
        with contextlib.suppress(pmstore.Error, OSError):
            store = open_store()
            try:
                for name in list(store)[::3]:
                    with contextlib.suppress(pmstore.CorruptStoreError):
                        del store[name]
                for i in range(20):
                    store[f"new{i}"] = np.full(rng.randrange(1, 2000), i)
                    store[f"text{i}"] = "x" * rng.randrange(2000)
                store.create_list("more").extend(range(50))
                store.commit()
                store["new1"] += 1
                store.rollback()
                store.commit()
            finally:
                store._drop(discard=True)


def test_verify_finds_what_opening_does_not(sample, open_store):
    path, data, _ = sample
    value = np.arange(3000.0).tobytes()[8000:8064]
    at = data.index(value) + 3
    bad = bytearray(data)
    bad[at] ^= 0x40
    # Both generations of the array are in the file; only the committed one counts.
    path.write_bytes(bad)
    with contextlib.suppress(pmstore.CorruptStoreError), open_store(mode="r", verify=True) as store:
        assert store["array"][1000] == 1001


@pytest.mark.parametrize("mode", ["a", "r"])
def test_a_store_whose_descriptors_the_program_has_closed(tmp_path, mode):
    path = tmp_path / "store.pm"
    with pmstore.open(path) as store:
        store["x"] = np.ones(10)
    store = pmstore.open(path, mode)
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == str(path):
                os.close(int(fd))
    with pytest.raises(pmstore.StoreIOError, match="the program has closed it"):
        store.close()
    assert store.closed
    store.close()
    with pmstore.open(path) as again:
        assert again["x"].sum() == 10
