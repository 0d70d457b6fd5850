"""Files made by somebody with a purpose: metadata that contradict each other, under hashes that are right.

Whatever the file says, the process survives, no loop goes on for ever, and nothing but pmstore's errors comes out.
Every case runs in a process of its own, as what would go wrong is a crash of the interpreter.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._catalog.kinds import ARRAY, BLOB, INLINE
from pmstore._core import hash64
from pmstore._values.values import encode
from tests.conftest import run_in_fork
from tests.support.images import (
    CELL,
    DATA,
    FREE,
    MAP,
    MAP_LIST,
    NODE,
    PAGE,
    RECORD_MAGIC,
    REGION,
    SLAB,
    Cell,
    Image,
    crc32c,
    keyed_checksum,
)

ONE = encode(1)

Case = Callable[[Path], None]
CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def run(name: str, directory: str) -> None:
    globals()[name](Path(directory) / "hostile.pm")


# ---- what is done with a file


def image_of(path: Path, fill: Callable[[pmstore.Store], None] | None = None) -> Image:
    """A store's image; a catalog of one leaf, unless it is filled with a lot."""
    with pmstore.open(path, "w", media="file") as store:
        if fill:
            fill(store)
    return Image(path)


class Tried:
    """Does all that can be done with a store, and notes the errors that come out."""

    def __init__(self, store: pmstore.Store) -> None:
        self.store = store
        self.errors: set[type[BaseException]] = set()
        self.damaged = False
        self.names: list[str] = []
        try:
            self.look()
            if store.mode == "r+":
                self.change()
        finally:
            self.tries(store._drop, discard=True)

    def tries(self, action: Callable[..., object], *arguments: object, **named: object) -> object:
        try:
            return action(*arguments, **named)
        except pmstore.Error as error:
            self.errors.add(type(error))
            return None

    def look(self) -> None:
        for action in (len, repr, lambda store: self.names.extend(itertools.islice(store, 10_000))):
            self.tries(action, self.store)
        assert len(self.names) < 10_000, "the names do not end"
        for name in self.names:
            self.tries(read, self.store, name)
        report = self.tries(self.store.check)
        self.damaged = report is None or not report.ok

    def change(self) -> None:
        store, names = self.store, self.names
        for i, name in enumerate(names[:12]):
            self.tries(change, store, name, i)
        for i in range(6):
            self.tries(store.update, {f"added{i}": np.full(10 + 600 * i, 1.0)})
        self.tries(store.commit)
        self.tries(store.update, dict.fromkeys(names, "replaced"))
        for name in names:
            self.tries(store.pop, name, None)
        self.tries(store.rollback)
        self.tries(store.update, dict.fromkeys(names[::2], b"y" * 3000))
        self.tries(store.commit)
        self.tries(store.check)


def use(path: Path) -> tuple[set[type[BaseException]], bool]:
    """The errors that came out of using a file in every way, and whether check() found anything."""
    errors: set[type[BaseException]] = set()
    damaged = False
    write_anew(path)
    for mode in ("r", "r+"):
        try:
            store = pmstore.open(path, mode, media="file")
        except pmstore.Error as error:
            return {*errors, type(error)}, True
        tried = Tried(store)
        errors |= tried.errors
        damaged |= tried.damaged
    return errors, damaged


def write_anew(path: Path) -> None:
    """What is salvaged is sound, and not larger than the file; what is compacted is sound, too."""
    before, saved = path.read_bytes(), path.with_name("saved.pm")
    for target, action in ((saved, lambda: pmstore.salvage(path, saved)), (path, lambda: pmstore.compact(path))):
        with contextlib.suppress(pmstore.Error):
            action()
            with pmstore.open(target, "r", media="file", verify=True):
                assert target.stat().st_size < 2 * len(before) + (2 << 20)
    saved.unlink(missing_ok=True)
    path.write_bytes(before)


def read(store: pmstore.Store, name: str) -> None:
    value = store[name]
    if isinstance(value, np.ndarray):
        value.tobytes()
    elif isinstance(value, pmstore.PersistentList):
        len(value), list(value), repr(value)


def change(store: pmstore.Store, name: str, i: int) -> None:
    value = store[name]
    if isinstance(value, np.ndarray) and value.flags.writeable and value.size and value.dtype.kind == "f":
        value.flat[0] = i
    elif isinstance(value, pmstore.PersistentList):
        value.append(i)
        value.pop(0)
    elif i % 3 == 0:
        del store[name]
    else:
        store[name] = np.full(700, float(i))


def found_corrupt(path: Path) -> None:
    """Reading says so, and so does check()."""
    errors, damaged = use(path)
    assert pmstore.CorruptStoreError in errors and damaged, (errors, damaged)


# ---- the catalog


@case
def overlapping_cells(path: Path) -> None:
    """A cell inside the meta of another: a change of that meta would change its lengths."""
    image = image_of(path)
    inner = CELL.pack(2, len(ONE), INLINE, 0, 0, 0, 0) + b"nb" + ONE
    inner += bytes(-len(inner) % 8)
    meta = encode(b"." * 60 + inner + b"." * 60)
    meta_at = CELL.size + 3
    shift = -(meta_at + meta.index(inner)) % 8  # so that it stands at a multiple of 8
    meta = encode(b"." * (60 + shift) + inner + b"." * 60)
    image.write_node(image.tree, 0, [Cell(b"nax", meta)])
    outer, used = image.get(image.tree, 64, "H"), image.get(image.tree, 36, "H")
    image.put(image.tree, 66, outer + meta_at + meta.index(inner), "H")
    image.put(image.tree, 32, 2, "H")
    image.put(image.tree, 34, outer - 64, "H")  # there seems to be room for both
    image.put(image.tree, 36, used + len(inner), "H")
    assert [cell.key for cell in image.cells(image.tree)] == [b"nax", b"nb"]
    image.set_root(image.tree, 2)
    image.save()
    found_corrupt(path)


@case
def keys_out_of_order(path: Path) -> None:
    """The right leaf begins below its separator: a scan that goes on behind its last key would come by again."""
    image = image_of(path)
    left, right = 4 * PAGE, 5 * PAGE
    image.write_node(left, 0, [Cell(b"na", ONE), Cell(b"nb", ONE)])
    image.write_node(right, 0, [Cell(b"na0", ONE)])
    image.write_node(image.tree, 1, [Cell(b"nm", offset=right)], first_child=left)
    image.set_root(image.tree, 3)
    image.save()
    found_corrupt(path)


@case
def shared_empty_leaves(path: Path) -> None:
    """Every child of a node is the same node: 101 to the power of 5 ways to one empty leaf."""
    image = image_of(path)
    image.write_node(4 * PAGE, 0, [])
    for level in range(1, 6):
        child = (3 + level) * PAGE
        image.write_node(child + PAGE, level, [Cell(b"n%03d" % i, offset=child) for i in range(100)], child)
    image.set_root(9 * PAGE, 0)
    image.save()
    found_corrupt(path)


@case
def one_leaf_named_twice(path: Path) -> None:
    """Deleting from it would merge it with itself."""
    image = image_of(path)
    image.write_node(4 * PAGE, 0, [Cell(b"na", ONE), Cell(b"nb", ONE), Cell(b"nc", ONE)])
    image.write_node(image.tree, 1, [Cell(b"nb", offset=4 * PAGE)], first_child=4 * PAGE)
    image.set_root(image.tree, 3)
    image.save()
    with pmstore.open(path, "r+") as store:
        assert not store.check().ok
        for name in "abc":
            with contextlib.suppress(pmstore.Error):
                del store[name]


@case
def levels_in_a_loop(path: Path) -> None:
    for level, child in ((1, 3 * PAGE), (1, 4 * PAGE), (23, 3 * PAGE), (24, 4 * PAGE), (1 << 31, 3 * PAGE)):
        image = image_of(path)
        assert image.tree == 3 * PAGE
        image.write_node(4 * PAGE, 1, [Cell(b"nz", offset=3 * PAGE)], 3 * PAGE)
        image.write_node(3 * PAGE, level, [Cell(b"nk", offset=child)], child)
        image.set_root(3 * PAGE, 1)
        image.save()
        found_corrupt(path)


@case
def references_outside(path: Path) -> None:
    def fill(store: pmstore.Store) -> None:
        store["a"] = np.arange(3000.0)
        store["s"] = np.arange(9.0)

    for outside in (1 << 40, (1 << 64) - PAGE, 8, 63 * PAGE, 64 * PAGE):
        for field in ("tree", "list", "map", "slab"):
            image = image_of(path, fill)
            lists, maps = next(image.pages(MAP_LIST)), next(image.pages(MAP))
            slabs = [40 + 8 * i for i in range(9) if image.get(0, 40 + 8 * i)]
            place = {"tree": (0, 24), "list": (0, 112), "map": (lists, 64), "slab": (0, slabs[0])}[field]
            assert image.get(*place) in (image.tree, lists, maps, *image.pages(SLAB)), field
            image.put(*place, outside)
            image.save()
            errors, damaged = use(path)
            assert field == "slab" or pmstore.CorruptStoreError in errors, (field, outside)
            assert field == "slab" or damaged, (field, outside)


# ---- extents


@case
def absurd_lengths(path: Path) -> None:
    for kind in (BLOB, ARRAY):
        for length in (1 << 63, (1 << 64) - 1, 200 << 30, 1 << 42, (1 << 42) + 1, 0, 1 << 17):
            image = image_of(path, lambda store: store.update(x=b"y" * 9000, a=np.arange(2000.0)))
            image.change_cell(b"na" if kind == ARRAY else b"nx", length=length)
            image.save()
            found_corrupt(path)
    for offset in (0, 8, PAGE + 8, 1 << 63, (1 << 64) - PAGE, 0xFFFF * PAGE):
        image = image_of(path, lambda store: store.update(x=b"y" * 9000, small=np.arange(3.0)))
        image.change_cell(b"nx", offset=offset)
        image.change_cell(b"nsmall", offset=offset)
        image.save()
        found_corrupt(path)


@case
def overlapping_extents(path: Path) -> None:
    """Two arrays in one place, or in half of one: nobody can tell, but check() does."""
    for shift in (0, PAGE):
        image = image_of(path, lambda store: store.update(a=np.arange(3000.0), b=np.arange(2000.0)))
        first = next(cell for cell in image.cells(image.tree) if cell.key == b"na")
        image.change_cell(b"nb", offset=first.offset + shift)
        image.save()
        _, damaged = use(path)
        assert damaged
        image.save()
        store = pmstore.open(path, "r+", media="file")
        held = [store["a"], store["b"]]
        for value in held:
            value[:] = 1
        for action in (store.commit, store["a"].sum, store.rollback, store.commit, store.clear, store.commit):
            with contextlib.suppress(pmstore.Error):
                action()
            with contextlib.suppress(pmstore.Error):
                store["c"] = np.zeros(3000)
        store._drop(discard=True)


@case
def contents_as_metadata(path: Path) -> None:
    """An array over the root, the space map, the catalog's node; in the map too."""
    for page in (0, PAGE, 2 * PAGE, 3 * PAGE):
        for kind in (DATA, None):
            image = image_of(path, lambda store: store.update(a=np.arange(500.0)))
            image.change_cell(b"na", offset=page)
            if kind is not None:
                image.map_kind(page, kind)
                image.map_kind(page + PAGE, kind)
            image.save()
            found_corrupt(path) if page == 0 else use(path)
            assert use(path)[1]


@case
def free_metadata(path: Path) -> None:
    """The space map says that pages in use are free: the next allocation gets them; or that a slab is contents."""
    for page in range(5):
        image = image_of(path, lambda store: store.update(a=np.arange(500.0), s=np.arange(9.0)))
        image.map_kind(page * PAGE, FREE)
        image.save()
        _, damaged = use(path)
        assert damaged
    image.map_kind(next(image.pages(SLAB)), DATA)
    image.save()
    with pmstore.open(path, "r+") as store, pytest.raises(pmstore.CorruptStoreError, match="no slab at region"):
        store["s"]


@case
def slabs_in_a_loop(path: Path) -> None:
    def fill(store: pmstore.Store) -> None:
        for i in range(40):
            store[f"s{i}"] = np.full(100, float(i))

    for field, value in ((32, 0), (40, 0), (32, 5 * PAGE), (48, 0), (24, (1 << 64) - 1), (20, 8), (20, 9), (24, 0)):
        image = image_of(path, fill)
        for slab in list(image.pages(SLAB)):
            form = "I" if field == 20 else "Q"
            image.put(slab, field, value or (slab if field in (32, 40) else 0), form)
        image.save()
        use(path)


# ---- lists


@case
def a_list_with_a_far_element(path: Path) -> None:
    """The last element says how long a list is: 2**60 elements need more than all memory."""

    def fill(store: pmstore.Store) -> None:
        store.create_list("l").extend([1, 2, 3])

    for index in (1 << 60, (1 << 64) - 1, 1 << 33, 3, 1000):
        image = image_of(path, fill)
        cells = image.cells(image.tree)
        last = max(i for i, cell in enumerate(cells) if cell.key.startswith(b"l"))
        cells[last] = cells[last]._replace(key=cells[last].key[:9] + struct.pack(">Q", index))
        image.write_node(image.tree, 0, cells)
        image.save()
        for mode in ("r", "r+"):
            with pmstore.open(path, mode, media="file") as store:
                assert "<PersistentList" in repr(store["l"])
                str(store), store._repr_html_() if hasattr(store, "_repr_html_") else None
                for action in (list, lambda items: items[:], lambda items: items.index(9), lambda items: items[2]):
                    with pytest.raises(pmstore.CorruptStoreError):
                        action(store["l"])
                if mode == "r+":
                    with contextlib.suppress(pmstore.CorruptStoreError):
                        store["l"].append(1)
                    with contextlib.suppress(pmstore.CorruptStoreError):
                        store["l"].clear()
                    del store["l"]
                    assert list(store) == [] and len(store) == 0
                    assert store.stats().keys == 1  # where the next list's id stands


# ---- damage beside what is changed


@case
def replacing_beside_a_damaged_slab(path: Path) -> None:
    """The old array's space can't be freed, as its slab is damaged: the change is done, or not at all."""
    for action in ("put", "delete", "list"):

        def fill(store: pmstore.Store) -> None:
            store["a"] = np.arange(12.0)
            store["b"] = 1
            store.create_list("l").extend([b"z" * 1000, b"z" * 1100])

        image = image_of(path, fill)
        for slab in image.pages(SLAB):
            image.bytes[REGION + slab + 30] ^= 1  # and no new hash
        image.save()
        with pmstore.open(path, "r+", media="file") as store:
            keys = store.stats().keys
            name = "l" if action == "list" else "a"
            try:
                if action == "put":
                    store["a"] = np.full(2000, 5.0)
                else:
                    del store[name]
            except pmstore.CorruptStoreError:
                assert name in store and store.stats().keys == keys
            else:
                assert (store["a"] == 5).all() if action == "put" else name not in store
                assert store.stats().keys == keys - {"put": 0, "delete": 1, "list": 3}[action]
            store["b"] = 2
            store.commit()
            done = name in store
            assert not store.check().ok
        with pmstore.open(path, "r+", media="file") as store:
            assert (name in store) == done and store["b"] == 2
            assert not store.check().ok


@case
def deleting_beside_a_damaged_leaf(path: Path) -> None:
    def fill(store: pmstore.Store) -> None:
        for i in range(24):
            store[f"{i:02}"] = bytes([i]) * 600

    image = image_of(path, fill)
    root = image.tree
    assert image.get(root, 20, "I") == 1
    leaves = [image.get(root, 24), *(cell.offset for cell in image.cells(root))]
    inside = [[int(cell.key[1:]) for cell in image.cells(leaf) if cell.key[:1] == b"n"] for leaf in leaves]
    image.bytes[REGION + leaves[1] + 2000] ^= 1
    image.save()
    refused = []
    with pmstore.open(path, "r+", media="file") as store:
        keys = store.stats().keys
        for i in inside[0] + inside[2]:
            try:
                del store[f"{i:02}"]
                keys -= 1
            except pmstore.CorruptStoreError:
                refused.append(i)
                assert store[f"{i:02}"] == bytes([i]) * 600
            assert store.stats().keys == keys
        store.commit()
        assert not store.check().ok
    with pmstore.open(path, "r+", media="file") as store:
        assert store.stats().keys == keys
        assert all(store[f"{i:02}"] == bytes([i]) * 600 for i in refused)
        with pytest.raises(pmstore.CorruptStoreError):
            store[f"{inside[1][0]:02}"]


@case
def a_deleted_array_beside_a_damaged_slab(path: Path) -> None:
    """An array that outlives its name is nobody's any more, also if its space could not be freed: what is written to it
    is in no commit, and in no other array."""

    def fill(store: pmstore.Store) -> None:
        for i in range(5):
            store[f"s{i}"] = np.full(200, float(i))

    image = image_of(path, fill)
    for slab in image.pages(SLAB):
        image.put(slab, 40, 0)
        image.put(slab, 32, 40 * PAGE)  # the next one in the list is none
    image.save()
    store = pmstore.open(path, "r+", media="file")
    held = [store[f"s{i}"] for i in range(5)]
    for i in range(5):
        with contextlib.suppress(pmstore.CorruptStoreError):
            del store[f"s{i}"]
    gone = [array for i, array in enumerate(held) if f"s{i}" not in store]
    assert gone
    store.commit()
    for round_ in range(3):
        before = store.sequence
        for array in gone:
            array[:] = -1 - round_
        store.commit()
        assert store.sequence == before, "a write to a deleted array was committed"
    new = []
    for i in range(20):
        with contextlib.suppress(pmstore.CorruptStoreError):
            new.append(store.create_array(f"new{i}", 200, fill_value=7))
            store.commit()
    for array in gone:
        array[:] = -9
    assert all((array == 7).all() for array in new)
    store._drop(discard=True)


@case
def an_array_over_the_list_of_maps(path: Path) -> None:
    """The program that writes to it takes the space map away: nodes that become empty can't be freed."""

    def fill(store: pmstore.Store) -> None:
        for i in range(24):
            store[f"{i:02}"] = bytes([i]) * 600
        store["a"] = np.zeros(PAGE // 8)

    image = image_of(path, fill)
    place, maps = 40 * PAGE, image.get(next(image.pages(MAP_LIST)), 64)
    image.bytes[REGION + place : REGION + place + PAGE] = bytes(PAGE)
    for at, value, form in ((8, place, "Q"), (16, MAP_LIST, "I"), (64, maps, "Q")):
        image.put(place, at, value, form)
    image.put(0, 112, place)
    for page in (place, place + PAGE):
        image.map_kind(page, DATA)
    sound = hash64(bytes(image.bytes[REGION + place : REGION + place + PAGE]))
    struct.pack_into("<Q", image.bytes, REGION + place + PAGE, keyed_checksum(sound, place, image.store_id))
    leaf = next(page for page in image.pages(NODE) if any(cell.key == b"na" for cell in image.cells(page)))
    cells = [cell._replace(offset=place) if cell.key == b"na" else cell for cell in image.cells(leaf)]
    image.write_node(leaf, 0, cells)
    image.save()
    store = pmstore.open(path, "r+", media="file")
    names = [name for name in store if name != "a"]
    store["a"][64 // 8] = 0
    errors = []
    for name in names:
        try:
            del store[name]
        except pmstore.CorruptStoreError as error:
            errors.append(str(error))
    assert any("a page has no map" in error for error in errors), errors
    store._drop(discard=True)


# ---- header and log


@case
def impossible_logs(path: Path) -> None:
    sound = image_of(path, lambda store: store.update(a=1)).bytes
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]  # processes of mutants have one
    most = 1 << 34 if limit == resource.RLIM_INFINITY else min(limit, 1 << 34)
    for size in (4096, 8192, 12288, 4097, 0, 1 << 33, 1 << 41, (1 << 64) - PAGE, (128 << 20) + PAGE):
        path.write_bytes(sound)
        image = Image(path)
        image.set_header(log_size=size)
        image.save()
        if image.log_offset + size < most:
            os.truncate(path, image.log_offset + size)
        with pytest.raises(pmstore.CorruptStoreError):
            pmstore.open(path, "r+", media="file", max_size=max(794_624, path.stat().st_size))
    for size in (0, PAGE, 3 * PAGE, 5 * PAGE + 64, (1 << 64) - REGION, 1 << 62):
        path.write_bytes(sound)
        image = Image(path)
        image.set_header(region_size=size, log_offset=(REGION + size) % (1 << 64))
        image.save()
        with pytest.raises(pmstore.CorruptStoreError, match="impossible region size"):
            pmstore.open(path, "r+", media="file")
    for clean in (True, False):
        path.write_bytes(sound)
        image = Image(path)
        image.set_header(clean, region_size=image.region_size + PAGE)
        image.save()
        with pytest.raises(pmstore.CorruptStoreError):
            pmstore.open(path, "r+", media="file")


@case
def many_false_records(path: Path) -> None:
    """Each line of the log is the sound header of a record that reaches to the log's end, and whose body is not sound:
    to hash the body of each takes hours."""
    image = image_of(path, lambda store: store.update(a=np.arange(100.0)))
    size = 32 << 20
    del image.bytes[image.log_offset :]
    image.bytes += bytes(size)
    image.set_header(clean=False, log_size=size, salt=77)
    whole = struct.Struct("<IHHQQIIQQQI")
    for at in range(64, size, 64):
        place = image.log_offset + at
        record = whole.pack(RECORD_MAGIC, 1, 0, 1 << 40, 77, size - at, size - at - 64, 1, 0, 0, 1)
        image.bytes[place : place + 60] = record
        struct.pack_into("<I", image.bytes, place + 60, crc32c(record, place & 0xFFFFFFFF))
    image.save()
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    with pmstore.open(path, "r+", media="file") as store:
        assert store["a"].tolist() == list(range(100))
        assert store.check().ok


@pytest.mark.parametrize("name", [function.__name__ for function in CASES])
def test_a_hostile_file(tmp_path: Path, name: str) -> None:
    run_in_fork(run, name, str(tmp_path))


# ---- at random
