"""Arrays that grow along their first axis: `append` and `resize`.

    the extent     │ row 0 │ row 1 │ row 2 │ spare │ spare │
    the entry      shape (3, …), capacity 5

    append, while there are spare rows: they are written, then the entry counts them      nothing moves
    append, when there are none:        a larger extent, with the old rows and the new ones, takes the name

I36  An array that grows shows the rows that its entry counts. Spare rows have no meaning, and may have any bytes: those
     of rows that are gone, or that a rollback took back. So each row is written before the entry counts it, in the same
     transaction. What a rollback, a crash or a reader sees follows from the entry and its extent, as for any array.

An array that was read before it grew is one over the same memory, with fewer rows. When the rows move, it is detached.
Earlier writes to it have moved with them. Later writes to it would be lost, so it becomes read-only, until a rollback
makes it live again. It becomes so before the entry has the new extent, as an interrupt may come in between. Views that
programs made of it can still be written: the next commit compares the old rows, and warns (`lost_updates.py`).
"""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore._catalog.kinds import ARRAY, LIST
from pmstore._catalog.lost_updates import Moved
from pmstore._catalog.names import NAME_PREFIX, key_of
from pmstore._catalog.rows import fitting, given_array
from pmstore._core import Core, Entry, hash64
from pmstore._errors import UNSOUND, FailedStoreError, OutOfSpaceError, TooLargeError, of
from pmstore._interrupts import later
from pmstore._values.array import (
    Array,
    Growth,
    Layout,
    address_of,
    decode_layout,
    layout,
    live_array,
    order_of,
    read_layout,
)
from pmstore._values.dtypes import storable_dtype

if TYPE_CHECKING:
    from pmstore._catalog.catalog import Catalog

__all__ = [
    "Grown",
    "append",
    "counted",
    "growing",
    "matches",
    "planned",
    "resize",
    "shape_text",
    "successor",
    "thaw",
    "trimmed",
    "write_spare",
]

_PAGE = 4088  # bytes of contents that fit into a page, with their hash
_RESERVED = 64 << 20  # bytes; an array that can't become larger gets all of its room at once
_PIECE = 16 << 20  # bytes that are copied in one call, which nothing interrupts
_ZEROS = bytes(1 << 20)
_KNOWN = 1000  # layouts, at most


class Grown:
    """The notes of an open store about arrays that grow.

    layouts: the last layout in an extent, by its offset; an entry may have another by now. frozen: arrays that a move
    made read-only, with the last commit before it and the offset of the extent. made: the last commit before a move,
    and the offset of the extent that rows have moved to.
    """

    __slots__ = ("frozen", "layouts", "made")

    def __init__(self) -> None:
        self.layouts: dict[int, Layout] = {}
        self.frozen: list[tuple[int, int, weakref.ref[Array]]] = []
        self.made: list[tuple[int, int]] = []


# ---- layouts


def planned(shape: Any, dtype: Any, order: str, writeable: bool, maxshape: Any) -> Layout:
    """The layout of an array to be created. See `Store.create_array`."""
    plain = layout(shape, dtype, order, writeable)
    if maxshape is None:
        return plain
    axes = plain.shape
    longest = _longest(maxshape) + storable_dtype(dtype).shape  # of a subarray dtype
    wanted = f"maxshape={longest} for an array of shape {axes}"
    if len(longest) != len(axes):
        raise ValueError(f"{wanted}: they need the same number of axes")
    if not axes:
        raise ValueError(f"{wanted}: an array without an axis can't grow")
    if longest[1:] != axes[1:]:
        raise ValueError(f"{wanted}: arrays grow along the first axis only, so the other axes are those of the shape")
    most = longest[0]
    if most is not None and most < max(1, axes[0]):
        raise ValueError(f"{wanted}: it can't be smaller than the shape, and needs room for a row")
    if most is not None and most >= 1 << 63:
        raise TooLargeError(f"{wanted}: no array has so many rows; None stands for any number")
    if order != "C":
        raise ValueError(f'{wanted}: arrays grow in order "C" only, in which rows are contiguous')
    if not writeable:
        raise ValueError(f"{wanted}: an array with writeable=False never changes, so it can't grow")
    if not plain.row:
        raise ValueError(f"{wanted} and dtype {plain.dtype}: an array whose rows have no bytes can't grow")
    return _with_rows(plain, axes[0], Growth(_room(axes[0], plain.row, most), most))


def _longest(maxshape: Any) -> tuple[int | None, ...]:
    try:
        return (operator.index(maxshape),)
    except TypeError:
        try:
            return tuple(None if most is None else operator.index(most) for most in maxshape)
        except TypeError:
            raise TypeError(f"maxshape is a tuple of int and None, not {maxshape!r:.80}") from None


def _with_rows(described: Layout, rows: int, growth: Growth) -> Layout:
    return layout((rows, *described.shape[1:]), described.dtype, "C", True, growth)


def _room(rows: int, row: int, most: int | None, capacity: int = 0) -> int:
    """The capacity of an array that has so many rows, of `row` bytes each, and had room for `capacity` rows."""
    if most is not None and most * row <= _RESERVED:
        return most
    wanted = max(rows, 2 * capacity, _PAGE // row, 1)
    return wanted if most is None else min(wanted, most)


def matches(described: Layout, wanted: Layout) -> bool:
    """Whether an array is one that `require_array` asks for. One that is asked for with maxshape may have grown."""
    if wanted.growth is not None:
        return (described.maxshape, described.dtype) == (wanted.maxshape, wanted.dtype)
    return (described.shape, described.dtype) == (wanted.shape, wanted.dtype)


def shape_text(described: Layout) -> str:
    """The shape of an array in messages, or its maxshape."""
    return f"shape {described.shape}" if described.growth is None else f"maxshape {described.maxshape}"


def successor(described: Layout | None, value: Array, writeable: bool) -> Layout:
    """The layout of an array that replaces another one, of another shape or dtype. It grows as that one, if it can be
    one of its shapes."""
    if described is not None and described.growth is not None and value.dtype == described.dtype and value.ndim:
        most, count = described.growth.most, len(value)
        if value.shape[1:] == described.shape[1:] and (most is None or count <= most):
            return _with_rows(described, count, Growth(_room(count, described.row, most), most))
    return layout(value.shape, value.dtype, order_of(value), writeable)


def growing(entry: Entry) -> Layout | None:
    """The layout in the entry of an array that grows; None for another entry, or if it contradicts its extent."""
    if entry.kind != ARRAY or not entry.offset:
        return None
    described = decode_layout(entry.meta)
    if not isinstance(described, Layout) or described.growth is None or described.length != entry.length:
        return None
    return described


def counted(entry: Entry) -> int:
    """The bytes of an extent that an entry counts: all but spare rows."""
    described = growing(entry)
    return entry.length if described is None else described.nbytes


def trimmed(entry: Entry) -> Entry:
    """The entry of a copy: an array that grows keeps its maxshape, and no spare rows, as far as possible."""
    described = growing(entry)
    if described is None or described.growth is None:
        return entry
    growth = described.growth
    least = min(growth.capacity, max(1, described.shape[0]))
    made = _with_rows(described, described.shape[0], growth._replace(capacity=least))
    return entry._replace(length=made.length, meta=made.meta)


def write_spare(core: Core, offset: int, at: int, end: int) -> None:
    """Writes zeros into the end of a new extent: all of it has to be written."""
    if not at:
        core.fill(offset, end, b"\0")  # quicker, but from the beginning only
        return
    for done in range(at, end, len(_ZEROS)):
        core.write(offset, done, _ZEROS, min(len(_ZEROS), end - done))


# ---- growing


def append(catalog: Catalog, name: str, rows: Any) -> Array:
    """See `Store.append`."""
    given = given_array(rows)
    with catalog.lock, later():
        key, entry, described = _found(catalog, name, "append")
        new = fitting(given, rows, name, described)
        if given is None:
            key, entry, described = _again(catalog, name, "append", described)
        if not len(new):
            return catalog._array(entry, described)
        return _resized(catalog, key, name, entry, described, described.shape[0] + len(new), new)


def resize(catalog: Catalog, name: str, length: Any) -> Array:
    """See `Store.resize`."""
    with catalog.lock, later():
        key, entry, described = _found(catalog, name, "resize")
        count = _length(length, name, described)
        if type(length) is not int:
            key, entry, described = _again(catalog, name, "resize", described)
        if count == described.shape[0]:
            return catalog._array(entry, described)
        return _resized(catalog, key, name, entry, described, count, None)


def _found(catalog: Catalog, name: str, what: str) -> tuple[bytes, Entry, Layout]:
    """Key, entry and layout of an array that grows."""
    key = key_of(name)
    catalog.writable()
    entry = catalog.core.get(key)
    if entry is None:
        raise catalog.unknown(name)
    if entry.kind != ARRAY:
        is_list = what == "append" and entry.kind == LIST
        hint = f'; store["{name}"].append() appends to a list' if is_list else ""
        raise TypeError(f"{what}() is for arrays, and {name!r} is {catalog._what(key, entry)}{hint}")
    known = catalog.grown.layouts.get(entry.offset)
    if known is not None and known.meta == entry.meta and known.length == entry.length:
        return key, entry, known
    try:
        described = read_layout(catalog.core, entry)
    except UNSOUND as error:
        raise of(name, error) from error
    if described.growth is None:
        raise TypeError(
            f"{name!r} has the fixed shape {described.shape}: create_array(…, maxshape=(None, …)) makes an array that "
            "grows"
        )
    return key, entry, described


def _again(catalog: Catalog, name: str, what: str, before: Layout) -> tuple[bytes, Entry, Layout]:
    """What `_found` returns, after a conversion that may have run code of the program, such as `__array__` of a row.
    That code may have changed the array, too."""
    found = _found(catalog, name, what)
    now = found[2]
    if (now.dtype, now.shape[1:]) != (before.dtype, before.shape[1:]):
        raise RuntimeError(f"{name!r} was replaced by another array while the arguments of {what}() were converted")
    return found


def _length(length: Any, name: str, described: Layout) -> int:
    try:
        count = operator.index(length)
    except TypeError:
        try:
            shape = tuple(map(operator.index, length))
        except TypeError:
            raise TypeError(f"the length of {name!r} is an int, or a shape, not {length!r}") from None
        if len(shape) != len(described.shape) or shape[1:] != described.shape[1:]:
            raise ValueError(
                f"{name!r} has shape {described.shape}, and can't get shape {shape}: only its first axis changes"
            ) from None
        count = shape[0]
    if count < 0:
        raise ValueError(f"an array can't have a negative length: {count}")
    return count


def _resized(
    catalog: Catalog, key: bytes, name: str, entry: Entry, described: Layout, count: int, new: Array | None
) -> Array:
    """The live array with so many rows. new: those behind the old ones; None: zeros."""
    assert described.growth is not None
    capacity, most = described.growth
    if most is not None and count > most:
        raise ValueError(f"{name!r} has maxshape {described.maxshape}, so it can't have {count:,} rows")
    if count > capacity:
        return _moved(catalog, key, name, entry, described, count, new)
    made = described.with_rows(count)
    if made.nbytes > described.nbytes:
        try:
            catalog.core.require_readable(entry.offset, entry.length, described.nbytes, made.nbytes - described.nbytes)
        except UNSOUND as error:
            raise of(name, error) from error
    array = _beside(catalog, entry, made)
    if new is not None:
        np.copyto(array[described.shape[0] :], new, casting="unsafe")
    elif count > described.shape[0]:
        _clear(array[described.shape[0] :])
    catalog.core.mark(entry.offset, entry.length)
    catalog.core.put(key, entry._replace(meta=made.meta))
    _show(catalog, entry.offset, array)
    if len(catalog.grown.layouts) >= _KNOWN:
        catalog.grown.layouts.clear()
    catalog.grown.layouts[entry.offset] = made
    return array


def _clear(rows: Array) -> None:
    """Makes all bytes zero. Those that are zero are not written, so that no commit looks at them."""
    flat = rows.reshape(-1).view(np.uint8)
    for at in range(0, len(flat), len(_ZEROS)):
        part = flat[at : at + len(_ZEROS)]
        if part.any():
            part[...] = 0


def _beside(catalog: Catalog, entry: Entry, described: Layout) -> Array:
    """An array over an extent, beside the one that programs may have."""
    array = catalog._live.get(entry.offset)
    return catalog._fresh(entry, described) if array is None else live_array(array.base, described, True)


def _show(catalog: Catalog, offset: int, array: Array) -> None:
    """Makes this the live array of an extent."""
    old = catalog._live.get(offset)
    if old is not None:
        catalog._shadowed.add(offset)
        catalog._live[-id(old)] = old  # close() and `_freeze` still have to find it
    catalog._live[offset] = array


def _moved(
    catalog: Catalog, key: bytes, name: str, entry: Entry, described: Layout, count: int, new: Array | None
) -> Array:
    """Does what `_resized` does, in a larger extent."""
    assert described.growth is not None
    capacity, most = described.growth
    try:
        # A damaged block would get a new hash, and count as sound. Spare rows are not copied.
        catalog.core.verify(entry.offset, entry.length, described.nbytes)
    except UNSOUND as error:
        raise of(name, error) from error
    if new is not None:
        new = np.ascontiguousarray(new, described.dtype)
    room = _room(count, described.row, most, capacity)
    for rows in dict.fromkeys((room, count)):  # if there is no space to spare, only what is needed
        made = _with_rows(described, count, Growth(rows, most))
        try:
            moved = _move(catalog, key, name, entry, described, made, new)
            break
        except OutOfSpaceError:
            if rows == count:
                raise
    return catalog._array(moved, made)


def _move(
    catalog: Catalog, key: bytes, name: str, entry: Entry, described: Layout, made: Layout, new: Array | None
) -> Entry:
    core = catalog.core
    old = np.frombuffer(core.buffer(entry.offset, entry.length, False), np.uint8)  # with pending changes
    with catalog.new_extent(made.length) as offset:
        _write(core, offset, 0, old[: described.nbytes])
        if new is not None:
            _write(core, offset, described.nbytes, new)
        write_spare(core, offset, described.nbytes + (0 if new is None else new.nbytes), made.length)
        moved = entry._replace(offset=offset, length=made.length, meta=made.meta)
        try:
            # Before the rows leave: after an interrupt in between, writes to the old array would be lost.
            _freeze(catalog, name, entry.offset, old, described.nbytes)
            catalog.grown.made.append((core.sequence, offset))
            core.put(key, moved)
        except BaseException:
            now = core.get(key)
            if now is None or now.offset != offset:  # the exception may come after the put
                _unfreeze(catalog, entry.offset, offset)
            raise
    return moved


def _write(core: Core, offset: int, at: int, source: Array) -> None:
    for done in range(0, source.nbytes, _PIECE):
        core.write(offset, at + done, address_of(source) + done, min(_PIECE, source.nbytes - done))


# ---- arrays over memory that the rows have left


def _freeze(catalog: Catalog, name: str, offset: int, old: Array, nbytes: int) -> None:
    """Makes the arrays over an extent read-only. `thaw` finds them until the next commit."""
    sequence, start, found = catalog.core.sequence, address_of(old), []
    catalog.grown.frozen = [one for one in catalog.grown.frozen if one[0] == sequence]
    catalog.grown.made = [one for one in catalog.grown.made if one[0] == sequence]
    for array in catalog._live.all():
        if start <= address_of(array) < start + len(old):
            found.append(weakref.ref(array))
            if array.flags.writeable:
                catalog.grown.frozen.append((sequence, offset, found[-1]))
                array.flags.writeable = False
    if found and nbytes:
        catalog.lost_updates.has_moved(Moved(name, offset, found, nbytes, hash64(old[:nbytes].data)))


def _unfreeze(catalog: Catalog, offset: int, made: int) -> None:
    """Takes `_freeze` back: the rows stay."""
    grown, lost = catalog.grown, catalog.lost_updates
    for _, at, found in grown.frozen:
        array = found()
        if at == offset and array is not None:
            array.flags.writeable = True
    grown.frozen = [one for one in grown.frozen if one[1] != offset]
    grown.made = [one for one in grown.made if one[1] != made]
    lost.moved = [one for one in lost.moved if one.offset != offset]


def thaw(catalog: Catalog) -> None:
    """Makes arrays whose rows a rollback has brought back writeable again, and those read-only that show rows which it
    has taken away. All of them are read-only in a store that has failed, or whose names can't be read."""
    grown = catalog.grown
    if grown.frozen or grown.made:
        try:
            offsets = {row.entry.offset for row in catalog.core.scan(NAME_PREFIX)}
        except (FailedStoreError, *UNSOUND):
            offsets = set()
        for sequence, offset, found in grown.frozen:
            array = found()
            if array is not None and sequence == catalog.core.sequence and offset in offsets:
                array.flags.writeable = True
        for sequence, offset in grown.made:
            array = catalog._live.get(offset)
            if array is not None and sequence == catalog.core.sequence and offset not in offsets:
                array.flags.writeable = False
    grown.frozen.clear()
    grown.made.clear()
