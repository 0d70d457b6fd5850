"""The purpose of the bytes in a store's file: header, log, or the committed image of a name's rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pmstore
from pmstore._catalog.kinds import ARRAY, OBJECT
from pmstore._catalog.names import (
    ATTRIBUTES_PREFIX,
    DERIVED_PREFIX,
    NAME_PREFIX,
    name_of,
    object_prefix,
    owner_of,
    owner_of_attributes,
)
from pmstore._catalog.objects import head_of
from pmstore._core import Core, Entry
from pmstore._display import count_text
from pmstore._store import hooks
from pmstore._values.array import read_layout
from pmstore.testing._store.describe import Sandbox
from pmstore.testing._store.engine import SIZE_CELL, Schedule

__all__ = ["Places", "file_map", "lost_text"]

HEADER_PAGE = 4096
REGION = 2 * HEADER_PAGE  # file offset of the region (docs/format.md)


class _Extent(NamedTuple):
    first: int  # file offsets
    end: int
    name: str
    row: int  # bytes of a row; 0 if it isn't an array
    noun: str


class Places(NamedTuple):
    """The purposes of the bytes of a file."""

    log: int
    log_end: int
    extents: list[_Extent]

    def text(self, offset: int, length: int) -> str:
        if offset < HEADER_PAGE:
            return "header copy A"
        if offset < REGION:
            return "header copy B"
        if self.log <= offset < self.log_end:
            return "log"
        for extent in self.extents:
            if extent.first < offset + length and offset < extent.end:
                if not extent.row:
                    return f"committed image of {extent.name!r}"
                first = max(0, offset - extent.first) // extent.row
                last = (min(offset + length, extent.end) - 1 - extent.first) // extent.row
                rows = f"{extent.noun} {first}" if first == last else f"{extent.noun}s {first}–{last}"
                return f"committed image of {extent.name!r} {rows}"
        return "committed image: metadata, or space that no name owns"


def file_map(images: Sequence[bytes], medium: str, sandbox: Sandbox) -> Places:
    """The purposes of the bytes of a file, from its header and from the catalogs of several of its states."""
    log = log_end = 0
    extents: dict[tuple[int, int], _Extent] = {}
    for image in images:
        head = image if image[:7] == b"PMSTORE" else image[HEADER_PAGE:]
        log, size = int.from_bytes(head[56:64], "little"), int.from_bytes(head[64:72], "little")
        log_end = log + size
        with contextlib.suppress(pmstore.Error), sandbox.store(image, medium) as store:
            core = hooks.core_of(store)
            for name, entry in _owned(core):
                if not entry.offset:
                    continue
                row, noun, length = 0, "row", entry.length
                if entry.kind == ARRAY:
                    layout = read_layout(core, entry)
                    count = layout.shape[0] if layout.shape and layout.order == "C" else 1
                    row, length = max(1, layout.nbytes // max(1, count)), layout.nbytes
                    noun = "row" if len(layout.shape) > 1 else "element"
                first = REGION + entry.offset
                extents.setdefault((first, length), _Extent(first, first + length, name, row, noun))
    return Places(log, log_end, list(extents.values()))


def _owned(core: Core) -> Iterator[tuple[str, Entry]]:
    """Entries, and the names that they belong to."""
    for key, entry in core.scan(NAME_PREFIX):
        yield name_of(key), entry
        if entry.kind == OBJECT:
            for part in core.scan(object_prefix(head_of(entry).id)):
                yield name_of(key), part.entry
    for key, entry in core.scan(DERIVED_PREFIX):
        yield name_of(owner_of(key) or key), entry
    for key, entry in core.scan(ATTRIBUTES_PREFIX):
        yield f"attributes of {owner_of_attributes(key) or 'the store'}", entry


def lost_text(schedule: Schedule, medium: str, sector: int, places: Places) -> list[str]:
    """One line for each piece that the crash loses: "64 bytes at file offset 0x2040 (log)"."""
    unit = 64 if medium == "memory" else sector
    out = []
    for cell in schedule.cells:
        if cell.offset == SIZE_CELL:
            out.append("the file's new size")
            continue
        kept = ""
        if cell.kept or cell.torn:
            kept = f": {cell.kept} of {count_text(cell.of, 'write')} on their way to it were kept"
        if cell.torn:
            kept += f", and {count_text(bin(cell.torn).count('1'), 'piece')} of 8 bytes of the next"
        out.append(f"{unit} bytes at file offset {cell.offset:#x} ({places.text(cell.offset, unit)}){kept}")
    return out
