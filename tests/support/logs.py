"""Logs that no store has written, for changes that know csrc/base/format.h, and what recovery makes of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

import pmstore
from pmstore._core import hash64
from tests.conftest import Medium
from tests.support.images import (
    DIRECT,
    HEADER,
    LOGGED,
    OVERFLOW,
    PAGE,
    RECORD_MAGIC,
    REGION,
    SLOT,
    Image,
    body_hash,
    crc32c,
    item,
    keyed_checksum,
)
from tests.support.places import offset_of

SALT = 77
PAGES = 24  # of the array of a forged store
HEAD, WHOLE_HEAD = struct.Struct("<IHHQQIIQQQI"), struct.Struct("<IHHQQIIQQQII")


class Item(NamedTuple):
    kind: int
    offset: int
    length: int
    data: bytes

    @property
    def size(self) -> int:
        """The bytes of the region that it is about."""
        return self.length if self.kind in (LOGGED, OVERFLOW) else extent_size(self.length)

    def packed(self) -> bytes:
        return item(self.kind, self.offset, self.length, self.data)


class Record(NamedTuple):
    """A record. items: its body. knows: so many of the log's records were known to be durable when it was built.
    pages: its logged ranges are whole pages. overflow: the region offset of the items; 0: they are in the record.
    head: other values for fields of its header.
    """

    items: Sequence[Item]
    knows: int
    pages: bool = False
    overflow: int = 0
    head: Mapping[str, int] = MappingProxyType({})


def run(offset: int, data: bytes) -> Item:
    return Item(LOGGED, offset, len(data), data)


def extent_size(length: int) -> int:
    return (length + 7 & ~7) + 8 * -(-length // PAGE)


def extent(image: Image, offset: int, contents: bytes, slot: int | None = None) -> Item:
    """Writes an extent to its place. Returns the item that declares it, as a slot if one is given."""
    place = REGION + offset
    blocks = range(0, len(contents), PAGE)
    hashes = [keyed_checksum(hash64(contents[at : at + PAGE]), offset + at, image.store_id) for at in blocks]
    table = struct.pack(f"<{len(hashes)}Q", *hashes)
    whole = contents + bytes(-len(contents) % 8) + table
    image.bytes[place : place + len(whole)] = whole
    sound = keyed_checksum(hash64(table), offset + len(whole) - len(table), image.store_id)
    kind = DIRECT if slot is None else SLOT
    return Item(kind, offset, len(contents), struct.pack("<QQ", sound, slot or 0))


def packed(record: Record, number: int, image: Image, place: int) -> tuple[bytes, int]:
    """The bytes of the log's record of this number, and its length with what follows them. Items that are in the region
    are written there.
    """
    body = b"".join(one.packed() for one in record.items)
    if record.overflow:
        at = REGION + record.overflow
        image.bytes[at : at + len(body)] = body
        body = item(OVERFLOW, record.overflow, len(body), struct.pack("<QQ", body_hash(body, at, SALT), 0))
    fields = {
        "magic": RECORD_MAGIC,
        "kind": 1,
        "pages": int(record.pages),
        "sequence": image.word(HEADER["sequence"]) + number,
        "salt": SALT,
        "length": -(-(64 + len(body)) // PAGE) * PAGE,
        "body": len(body),
        "hash": body_hash(body, place + 64, SALT),
        "sum": number,
        "moment": number,
        "behind": number - record.knows,
    }
    fields.update(record.head)
    head = HEAD.pack(*fields.values())
    return head + struct.pack("<I", crc32c(head, place & 0xFFFFFFFF)) + body, fields["length"]


def write_log(image: Image, records: Sequence[Record]) -> list[tuple[int, int]]:
    """Puts the records into the image's log, after the header's state. Returns the place and length of each."""
    image.set_header(clean=False, salt=SALT)
    place, out = image.log_offset, []
    for number, record in enumerate(records, 1):
        data, length = packed(record, number, image, place)
        image.bytes[place : place + len(data)] = data
        out.append((place, length))
        place += length
    return out


def declared_by(records: Sequence[Record]) -> dict[int, int]:
    """The last record that declares each page."""
    return {
        page: number
        for number, record in enumerate(records)
        for one in record.items
        if one.kind in (DIRECT, SLOT)
        for page in range(one.offset // PAGE, -(-(one.offset + one.size) // PAGE))
    }


def replayed(image: Image, records: Sequence[Record], cut: bool) -> bytes:
    """The region after these records, as docs/format.md says. cut: the rest of a page that a range ends in becomes
    zeros, if all ranges are of whole pages.
    """
    region = bytearray(image.bytes[REGION : REGION + image.region_size])
    declared = declared_by(records)
    runs = [(n, r.pages, one) for n, r in enumerate(records) for one in r.items if one.kind == LOGGED]
    cut = cut and all(not (one.offset % PAGE or (one.length % PAGE and not pages)) for _, pages, one in runs)
    for number, _, one in runs:
        at, end = one.offset, one.offset + one.length
        while at < end:
            until = min(end, at - at % PAGE + PAGE)
            if declared.get(at // PAGE, 0) <= number:
                region[at:until] = one.data[at - one.offset : until - one.offset]
                if cut:
                    region[until : -(-until // PAGE) * PAGE] = bytes(-until % PAGE)
            at = until
    return bytes(region)


def marker(image: Image, sequence: int) -> bytes:
    """The durable marker of a sequence number."""
    word = struct.pack("<Q", sequence)
    return word + struct.pack("<Q", keyed_checksum(hash64(word), SALT, image.store_id))


def flip(image: Image, place: int) -> None:
    image.bytes[place] ^= 1


class Forged:
    """A closed store with an array of noise, whose pages forged records change. `at` is the array's region offset."""

    def __init__(self, medium: Medium, name: str = "forged.pm") -> None:
        self.path, self.media = medium.directory / name, medium.name
        with pmstore.open(self.path, "x", media=medium.name) as store:
            store["w"] = np.random.default_rng(1).integers(0, 255, PAGES * PAGE, "u1")
            self.at = offset_of(store, "w")
        self.sound = self.path.read_bytes()
        self.image = Image(self.path)

    def again(self) -> Image:
        """The store as it was, for other records."""
        self.image.bytes[:] = self.sound
        return self.image

    def save(self, records: list[Record], sound: bool = True) -> list[tuple[int, int]]:
        """Saves the image with these records. If they are sound: with hashes of the array as it is after them."""
        places = write_log(self.image, records)
        if sound:
            self.rehash(replayed(self.image, records, cut=False)[self.array])
        self.image.save()
        return places

    @property
    def array(self) -> slice:
        return slice(self.at, self.at + PAGES * PAGE)

    def rehash(self, contents: bytes) -> None:
        for block in range(PAGES):
            at = self.at + block * PAGE
            value = keyed_checksum(hash64(contents[block * PAGE :][:PAGE]), at, self.image.store_id)
            struct.pack_into("<Q", self.image.bytes, REGION + self.at + PAGES * PAGE + 8 * block, value)

    def becomes(self, records: list[Record]) -> None:
        """All ways to open the store find it as these records leave it."""
        sequence = self.image.word(HEADER["sequence"]) + len(records)
        expected = replayed(self.image, records, cut=False)[self.array]
        for exclusive in (True, False):
            with pmstore.open(self.path, "r", media=self.media, exclusive=exclusive) as store:
                assert store.sequence == sequence and store["w"].tobytes() == expected, (exclusive, records)
        assert self.path.read_bytes() == bytes(self.image.bytes), "a reader changed the file"
        with pmstore.open(self.path, "r+", media=self.media) as store:
            assert store.sequence == sequence and store.stats().records_replayed == len(records)
        written = Image(self.path)
        assert [written.word(at) for at in (72, 80)] == [len(records)] * 2, "the digest of the last record"
        assert written.bytes[88:216] == slots(self.image, records)
        expected = replayed(self.image, records, cut=self.media == "file")
        assert self.path.read_bytes()[REGION:][: len(expected)] == expected, records

    def opens_with(self, expected: int | str) -> None:
        """All ways to open the store adopt so many records, or find this error."""
        self.image.save()
        for mode, exclusive in (("r", False), ("r", True), ("r+", True)):
            try:
                with pmstore.open(self.path, mode, media=self.media, exclusive=exclusive) as store:  # type: ignore
                    found: int | str = store.sequence - self.image.word(HEADER["sequence"])
            except pmstore.CorruptStoreError as error:
                found = expected if isinstance(expected, str) and expected in str(error) else str(error)
            assert found == expected, (mode, exclusive)


def slots(image: Image, records: list[Record]) -> bytes:
    """The current slots after these records, as the header has them."""
    bits = int.from_bytes(image.bytes[88:216], "little")
    for one in (one for record in records for one in record.items if one.kind == SLOT):
        _, slot = struct.unpack("<QQ", one.data)
        bits = bits & ~(1 << slot // 2) | slot % 2 << slot // 2
    return bits.to_bytes(128, "little")


def items_of(file: bytes | bytearray, place: int, length: int) -> Iterator[tuple[int, int, int, bytes]]:
    """The items of a body: kind, offset, length and the bytes that follow."""
    end = place + length
    while place < end:
        offset, kind = struct.unpack_from("<QQ", file, place)
        kind, size = kind >> 56, kind & ~(0xFF << 56)
        place += 16 + (size if kind == LOGGED else 16)
        yield kind, offset, size, bytes(file[place - (size if kind == LOGGED else 16) : place])
    assert place == end
