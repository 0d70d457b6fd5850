"""Stores as bytes, for changes that know csrc/base/format.h and set every hash correctly."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pmstore._core import ffi, hash64, lib

PAGE = 4096
REGION = 2 * PAGE
ROOT, MAP_LIST, MAP, NODE, SLAB = 0x544F4F52, 0x5453494C, 0x2050414D, 0x45444F4E, 0x42414C53
SLOTS = 0x544F4C53
FREE, DATA, META, SLAB_PAGE = range(4)  # as in the space map
HEADER = {"store_id": 16, "sequence": 40, "salt": 32, "region_size": 48, "log_offset": 56, "log_size": 64}
RECORD_MAGIC = 0x43524D50
CELL = struct.Struct("<HHBBHQQ")
WORD = (1 << 64) - 1


LOGGED, DIRECT, OVERFLOW, SLOT = 1, 2, 3, 4  # items of a record


def item(kind: int, offset: int, length: int, data: bytes) -> bytes:
    return struct.pack("<QQ", offset, kind << 56 | length) + data


def body_hash(body: bytes, place: int, salt: int) -> int:
    out = 0
    for at in range(0, len(body), PAGE):
        piece = keyed_checksum(hash64(body[at : at + PAGE]), place + at, salt)
        out = ((out << 7 | out >> 57) * 0x9E3779B97F4A7C15 + piece) & WORD
    return out


class Cell(NamedTuple):
    """An entry in a leaf; in an inner node, `offset` is the child."""

    key: bytes
    meta: bytes = b""
    offset: int = 0
    length: int = 0
    kind: int = 2


def crc32c(data: bytes, start: int = 0) -> int:
    return int(lib.pm_crc32c(ffi.from_buffer(data), len(data), start))


def keyed_checksum(value: int, place: int, key: int) -> int:
    x = (place + key * 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & WORD
    return value ^ x ^ x >> 31


class Image:
    """A store's bytes. Offsets are relative to the region."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = bytearray(path.read_bytes())
        self.store_id = self.word(16)
        self.region_size = self.word(HEADER["region_size"])
        self.log_offset = self.word(HEADER["log_offset"])
        self.log_size = self.word(HEADER["log_size"])

    def word(self, place: int) -> int:
        return int(struct.unpack_from("<Q", self.bytes, place)[0])

    def save(self) -> None:
        self.path.write_bytes(self.bytes)

    def set_header(self, clean: bool = True, **fields: int) -> None:
        for copy in (0, PAGE):
            for name, value in fields.items():
                struct.pack_into("<Q", self.bytes, copy + HEADER[name], value)
            struct.pack_into("<I", self.bytes, copy + 216, int(clean))
            struct.pack_into("<I", self.bytes, copy + 252, crc32c(bytes(self.bytes[copy : copy + 252])))

    def set_log(self, items: bytes, salt: int, length: int = 0) -> None:
        """The log holds one record with these items, which takes `length` bytes, or as few pages as it can."""
        place, length = self.log_offset, length or -(-(64 + len(items)) // PAGE) * PAGE
        self.set_header(clean=False, salt=salt)
        sequence, sound = self.word(HEADER["sequence"]) + 1, body_hash(items, place + 64, salt)
        head = struct.pack("<IHHQQIIQQQI", RECORD_MAGIC, 1, 0, sequence, salt, length, len(items), sound, 0, 0, 1)
        head += struct.pack("<I", crc32c(head, place & 0xFFFFFFFF))
        self.bytes[place : place + 64 + len(items)] = head + items

    def items(self) -> Iterator[tuple[int, int, int]]:
        """The items of all records of the log: kind, offset, length."""
        at, sequence = self.log_offset, self.word(HEADER["sequence"])
        while self.bytes[at + 8 : at + 24] == struct.pack("<QQ", sequence + 1, self.word(HEADER["salt"])):
            length, left = struct.unpack_from("<II", self.bytes, at + 24)
            cursor = at + 64
            while left:
                offset, kind = struct.unpack_from("<QQ", self.bytes, cursor)
                kind, size = kind >> 56, kind & ~(0xFF << 56)
                yield kind, offset, size
                whole = 16 + (size if kind == LOGGED else 16)
                cursor, left = cursor + whole, left - whole
            at, sequence = at + length, sequence + 1

    # ---- pages

    def get(self, page: int, at: int, form: str = "Q") -> int:
        return int(struct.unpack_from("<" + form, self.bytes, REGION + page + at)[0])

    def put(self, page: int, at: int, value: int, form: str = "Q") -> None:
        """Sets a field of a page, and its hash."""
        struct.pack_into("<" + form, self.bytes, REGION + page + at, value & (1 << 8 * struct.calcsize("<" + form)) - 1)
        self.rehash(page)

    def rehash(self, page: int) -> None:
        size = 64 if self.get(page, 16, "I") == SLAB else PAGE
        start = REGION + page
        value = keyed_checksum(hash64(bytes(self.bytes[start + 8 : start + size])), page, self.store_id)
        struct.pack_into("<Q", self.bytes, start, value)

    def pages(self, *types: int) -> Iterator[int]:
        """The pages of metadata of these types, or of any type."""
        for page in range(0, self.region_size, PAGE):
            kind = self.get(page, 16, "I")
            if self.get(page, 8) == page and (
                kind in types or (not types and kind in (ROOT, MAP_LIST, MAP, NODE, SLAB))
            ):
                yield page

    def is_leaf(self, page: int) -> bool:
        return self.get(page, 16, "I") == NODE and not self.get(page, 20, "I")

    def map_kind(self, page: int, kind: int) -> None:
        """Set the kind of a page in the space map, which has one page here."""
        place, shift = 64 + page // PAGE // 32 * 8, page // PAGE % 32 * 2
        space_map = next(self.pages(MAP))
        self.put(space_map, place, self.get(space_map, place) & ~(3 << shift) | kind << shift)

    # ---- the catalog

    @property
    def tree(self) -> int:
        return self.get(0, 24)

    def set_root(self, tree: int, keys: int) -> None:
        self.put(0, 24, tree)
        self.put(0, 32, keys)

    def cells(self, page: int) -> list[Cell]:
        out = []
        for i in range(self.get(page, 32, "H")):
            start = REGION + page + self.get(page, 64 + 2 * i, "H")
            key_length, meta_length, kind, _, _, offset, length = CELL.unpack_from(self.bytes, start)
            key = start + CELL.size
            meta = key + key_length
            out.append(
                Cell(bytes(self.bytes[key:meta]), bytes(self.bytes[meta : meta + meta_length]), offset, length, kind)
            )
        return out

    def write_node(self, page: int, level: int, cells: list[Cell], first_child: int = 0) -> None:
        slots, used = [], 0
        contents = bytearray(PAGE)
        for cell in cells:
            data = CELL.pack(len(cell.key), len(cell.meta), cell.kind, 0, 0, cell.offset, cell.length)
            data += cell.key + cell.meta
            used += (len(data) + 7) & ~7
            slots.append(PAGE - used)
            contents[PAGE - used : PAGE - used + len(data)] = data
        struct.pack_into("<QQIIQHHH", contents, 0, 0, page, NODE, level, first_child, len(cells), PAGE - used, used)
        struct.pack_into(f"<{len(slots)}H", contents, 64, *slots)
        self.bytes[REGION + page : REGION + page + PAGE] = contents
        self.rehash(page)
        self.map_kind(page, META)

    def change_cell(self, key: bytes, **fields: int | bytes) -> None:
        """Changes an entry of a catalog with one leaf."""
        cells = [cell._replace(**fields) if cell.key == key else cell for cell in self.cells(self.tree)]
        self.write_node(self.tree, 0, cells)
