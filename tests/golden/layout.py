"""A reader of a store's file in pure Python, written after docs/format.md alone.

It shares no code with pmstore. So it fails where the core writes something other than the page says, and where the page
lacks something that is needed to read a file. It verifies every checksum, follows the log as recovery does, and returns
the catalog's entries with their contents. Only XXH3 comes from a package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

PAGE, WORD = 4096, (1 << 64) - 1
FREE, CONTENTS, METADATA, SLAB = range(4)
LOGGED, DIRECT, OVERFLOW, SLOT = range(1, 5)
BLOCK_SIZES = (64, 128, 192, 256, 384, 512, 768, 1344, 2016)

Digest = tuple[int, int]


class LayoutError(Exception):
    """The file is not as docs/format.md says."""


def require(condition: Any, text: str) -> None:
    if not condition:
        raise LayoutError(text)


def _table() -> list[int]:
    out = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        out.append(value)
    return out


_CRC = _table()


def crc32c(data: bytes, start: int = 0) -> int:
    crc = ~start & 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    return ~crc & 0xFFFFFFFF


def xxh3(data: bytes) -> int:
    import xxhash

    return int(xxhash.xxh3_64_intdigest(data))


def mixed(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    return (x ^ x >> 27) * 0x94D049BB133111EB & WORD


def keyed(value: int, place: int, key: int) -> int:
    x = mixed((place + key * 0x9E3779B97F4A7C15) & WORD)
    return value ^ x ^ x >> 31


def body_hash(body: bytes, place: int, salt: int) -> int:
    out = 0
    for at in range(0, len(body), PAGE):
        piece = keyed(xxh3(body[at : at + PAGE]), place + at, salt)
        out = ((out << 7 | out >> 57) * 0x9E3779B97F4A7C15 + piece) & WORD
    return out


def contribution(place: int, value: int) -> int:
    x = (value + place * 0x9E3779B97F4A7C15) & WORD
    x = (x ^ x >> 32) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 29) * 0x94D049BB133111EB & WORD
    return x ^ x >> 32


# ---- header


class Header(NamedTuple):
    version: int
    features: tuple[int, int, int]
    store_id: int
    generation: int
    salt: int
    sequence: int
    region_size: int
    log_offset: int
    log_size: int
    digest: Digest
    slots: int
    flags: int


def header_of(page: bytes) -> Header:
    """A copy of the header. Raises LayoutError if it is not valid."""
    require(page[:8] == b"PMSTORE\x1a", "no magic")
    version, must = struct.unpack_from("<II", page, 8)
    store_id, generation, salt, sequence, region_size, log_offset, log_size, total, moment = struct.unpack_from(
        "<9Q", page, 16
    )
    slots, flags = int.from_bytes(page[88:216], "little"), struct.unpack_from("<I", page, 216)[0]
    require(version in (0, 1), f"version {version}")
    end = 252 if version else 220
    require(struct.unpack_from("<I", page, end)[0] == crc32c(page[:end]), "the header's checksum")
    require(not any(page[end + 4 : 2048]) and not any(page[2064:PAGE]), "the rest of the header's page")
    others = struct.unpack_from("<II", page, 220) if version else (0, 0)
    require(not version or not any(page[228:252]), "what is reserved in the header")
    return Header(
        version, (must, *others), store_id, generation, salt, sequence, region_size, log_offset, log_size,
        (total, moment), slots, flags,
    )  # fmt: skip


# ---- log


class Item(NamedTuple):
    """data: the logged bytes. hash, slot: of the others."""

    kind: int
    offset: int
    length: int
    data: bytes
    hash: int = 0
    slot: int = 0


class Record(NamedTuple):
    sequence: int
    length: int
    pages: int
    behind: int
    digest: Digest
    items: list[Item]


def items_of(body: bytes) -> Iterator[Item]:
    at = 0
    while at < len(body):
        offset, word = struct.unpack_from("<QQ", body, at)
        kind, length = word >> 56, word & (1 << 56) - 1
        require(LOGGED <= kind <= SLOT, f"an item of kind {kind}")
        if kind == LOGGED:
            yield Item(kind, offset, length, body[at + 16 : at + 16 + length])
            require(at + 16 + length <= len(body), "an item that ends behind its body")
            at += 16 + length
        else:
            yield Item(kind, offset, length, b"", *struct.unpack_from("<QQ", body, at + 16))
            at += 32


def records_of(data: bytes, header: Header) -> Iterator[Record]:
    at, sequence, end = header.log_offset, header.sequence, header.log_offset + header.log_size
    while at + 64 <= end:
        head = data[at : at + 64]
        magic, kind, pages, number, salt, length, size, sound, total, moment, behind, crc = struct.unpack(
            "<IHHQQIIQQQII", head
        )
        if magic != 0x43524D50 or salt != header.salt or number != sequence + 1:
            return
        require(crc == crc32c(head[:60], at & 0xFFFFFFFF) and kind == 1 and pages in (0, 1), "a record's header")
        require(length % (4096 if pages else 64) == 0 and size <= length - 64, "a record's length")
        require(1 <= behind <= number, "a record's distance to what was durable")
        body = data[at + 64 : at + 64 + size]
        require(sound == body_hash(body, at + 64, salt), "a record's hash")
        require(not any(data[at + 64 + size : at + length]), "a record's padding")
        items = list(items_of(body))
        if items and items[0].kind == OVERFLOW:
            require(len(items) == 1, "an overflow beside other items")
            place = 8192 + items[0].offset
            free = data[place : place + items[0].length]
            require(items[0].hash == body_hash(free, place, salt), "the hash of items in free pages")
            items.extend(items_of(free))
        sequence = number
        yield Record(number, length, pages, behind, (total, moment), items)
        at += length


# ---- the state


class Entry(NamedTuple):
    """An entry of the catalog. contents: None if it has no extent."""

    kind: int
    flags: int
    meta: bytes
    contents: bytes | None


class Store:
    """The state of a file, as recovery finds it.

    header, records, entries: as the file has them. Raises LayoutError wherever the file breaks the format.
    """

    def __init__(self, data: bytes) -> None:
        valid: list[Header] = []
        for copy in (0, PAGE):
            try:
                valid.append(header_of(data[copy : copy + PAGE]))
            except LayoutError:
                continue
        require(valid, "no valid header")
        self.header = max(valid, key=lambda header: header.generation)
        require(self.header.log_offset == 8192 + self.header.region_size, "the log's place")
        require(self.header.log_offset + self.header.log_size <= len(data), "a file that is too short")
        self.records = [] if self.header.flags & 1 else list(records_of(data, self.header))
        self.marker = self._marker(data)
        self.region = bytearray(data[8192 : self.header.log_offset])
        self.slots = self.header.slots
        self._apply()
        self.digest = self.records[-1].digest if self.records else self.header.digest
        self.sequence = self.records[-1].sequence if self.records else self.header.sequence
        self._total = self._moment = 0
        self.map = self._space_map()
        self.pairs = self._pairs()
        self.entries = dict(self._leaves(self._word(24), None))
        require(len(self.entries) == self._word(32), "the number of keys")
        for page, kind in self.map.items():
            if kind in (METADATA, SLAB):
                self._add(page * PAGE, self._page(page * PAGE, 64 if kind == SLAB else PAGE))
        require((self._total, self._moment) == self.digest, "the digest of the state")

    def _marker(self, data: bytes) -> int:
        sequence, checksum = struct.unpack_from("<QQ", data, 2048)
        key = keyed(xxh3(data[2048:2056]), self.header.salt, self.header.store_id)
        if checksum != key:
            return 0
        newest = self.records[-1].sequence if self.records else self.header.sequence
        require(sequence <= newest, "a durable record that the log lacks")
        return int(sequence)

    def _apply(self) -> None:
        declared: dict[int, int] = {}
        for number, record in enumerate(self.records):
            for item in record.items:
                if item.kind in (DIRECT, SLOT):
                    pages = -(-self._extent_size(item.length) // PAGE)
                    declared.update(dict.fromkeys(range(item.offset // PAGE, item.offset // PAGE + pages), number))
        for number, record in enumerate(self.records):
            for item in record.items:
                for at in range(0, len(item.data), 64):
                    place = item.offset + at
                    if declared.get(place // PAGE, 0) <= number:
                        piece = item.data[at : at + 64]
                        self.region[place : place + len(piece)] = piece
                if item.kind == SLOT:
                    bit = 1 << item.slot // 2
                    self.slots = self.slots | bit if item.slot % 2 else self.slots & ~bit

    # ---- pages

    def _word(self, place: int, form: str = "Q") -> int:
        return int(struct.unpack_from("<" + form, self.region, place)[0])

    def _page(self, page: int, size: int = PAGE, kind: bytes = b"") -> int:
        """Verifies a page of metadata and returns its checksum."""
        sound, place = struct.unpack_from("<QQ", self.region, page)
        require(place == page, f"the page at {page} is of another place")
        value = keyed(xxh3(bytes(self.region[page + 8 : page + size])), page, self.header.store_id)
        require(sound == value, f"the checksum of the page at {page}")
        require(not kind or self.region[page + 16 : page + 20] == kind, f"the type of the page at {page}")
        return int(sound)

    def _add(self, place: int, value: int) -> None:
        x = contribution(place, value)
        self._total, self._moment = (self._total + x) & WORD, (self._moment + x * (place // 64)) & WORD

    def _space_map(self) -> dict[int, int]:
        """The kind of each page that is used."""
        self._page(0, kind=b"ROOT")
        kinds: dict[int, int] = {}
        first = 0  # page of a map
        for place in struct.unpack_from("<256Q", self.region, 112):
            if not place:
                continue
            self._page(place, kind=b"LIST")
            for space_map in struct.unpack_from("<504Q", self.region, place + 64):
                if space_map:
                    self._page(space_map, kind=b"MAP ")
                    for i, byte in enumerate(self.region[space_map + 64 : space_map + PAGE]):
                        if byte:
                            kinds |= {first + 4 * i + j: byte >> 2 * j & 3 for j in range(4) if byte >> 2 * j & 3}
                first += 16_128
        require(max(kinds) < self.header.region_size // PAGE, "pages that are used behind the region")
        return kinds

    def _pairs(self) -> dict[int, tuple[int, int]]:
        """The current slot of extents with two, and the length of their contents."""
        out = {}
        for number, page in enumerate(struct.unpack_from("<8Q", self.region, 2160)):
            if not page:
                continue
            self._page(page, kind=b"SLOT")
            for i in range(126):
                extent, other, length, base = struct.unpack_from("<4Q", self.region, page + 64 + 32 * i)
                if extent:
                    out[extent] = (extent if self.slots >> number * 126 + i & 1 == base else other, length)
        return out

    def _leaves(self, node: int, level: int | None) -> Iterator[tuple[bytes, Entry]]:
        self._page(node, kind=b"NODE")
        height = self._word(node + 20, "I")
        require(level in (None, height), "the height of a node")
        if height:
            yield from self._leaves(self._word(node + 24), height - 1)
        previous = b""
        for i in range(self._word(node + 32, "H")):
            cell = node + self._word(node + 64 + 2 * i, "H")
            key_size, meta_size, kind, flags, zero, offset, length = struct.unpack_from("<HHBBHQQ", self.region, cell)
            key = bytes(self.region[cell + 24 : cell + 24 + key_size])
            require(key > previous and not zero, "the order of keys")
            previous = key
            if height:
                yield from self._leaves(offset, height - 1)
            else:
                meta = bytes(self.region[cell + 24 + key_size : cell + 24 + key_size + meta_size])
                yield key, Entry(kind, flags, meta, self._contents(offset, length) if offset else None)

    @staticmethod
    def _extent_size(length: int) -> int:
        return (length + 7) // 8 * 8 + 8 * -(-length // PAGE)

    def _contents(self, extent: int, length: int) -> bytes:
        size, kind = self._extent_size(length), self.map.get(extent // PAGE, FREE)
        require(kind == (SLAB if size <= 2016 else CONTENTS), "the kind of an extent's page")
        if kind == SLAB:
            page = extent // PAGE * PAGE
            self._page(page, 64, kind=b"SLAB")
            block = BLOCK_SIZES[self._word(page + 20, "I")]
            index, rest = divmod(extent - page - 64, block)
            require(not rest and size <= block and self._word(page + 24) >> index & 1, "a block of a slab")
        place, paired = self.pairs.get(extent, (extent, length))
        require(paired == length, "the length of an extent with two slots")
        table = place + (length + 7) // 8 * 8
        for number, at in enumerate(range(0, length, PAGE)):
            block = bytes(self.region[place + at : place + min(at + PAGE, length)])
            value = self._word(table + 8 * number)
            require(value == keyed(xxh3(block), place + at, self.header.store_id), f"the contents at {place + at}")
            self._add(place + at, value)
        return bytes(self.region[place : place + length])
