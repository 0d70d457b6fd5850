"""Damage at rest that mutants must handle: see tests/mutants/battery.py."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore._core import BLOCK, hash64
from tests.support.images import crc32c, keyed_checksum
from tests.support.snapshots import snapshot


class Noticed(Exception):
    """A problem was found."""

    def __init__(self, kind: str, text: str, nested: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.nested = nested


class Evaluated:
    """The number of states that were evaluated until now."""

    states = 0


def damage(directory: Path) -> None:
    for medium in ("memory", "file"):
        for clean in (True, False):
            if not clean:
                last_record_damaged(directory / "record.pm", medium)
                header_damaged(directory / "record.pm", medium)
            images = damaged_images(directory, medium, clean)
            states = next(images)
            for image in images:
                Evaluated.states += 1
                evaluate_damaged(directory / "damaged.pm", medium, image, states)


def last_record_damaged(path: Path, medium: str) -> None:
    """Only the durable marker tells that the last record, and the places that it declares, were durable. A record
    with correct hashes may name places that do not exist.
    """
    store = pmstore.open(path, "w", media=medium)
    store["x"] = np.zeros(64)
    store.commit()
    store._catalog.core.checkpoint()
    store["x"][:] = 1.0
    stats = store.stats()
    place = stats.file_size - stats.log_size + stats.log_used
    store.commit()
    small = path.read_bytes()
    store["new"] = np.full(3000, 7.5)
    store.commit()
    store._drop(discard=True)
    image = path.read_bytes()
    new = image.index(np.full(512, 7.5).tobytes())
    for what, damaged in (
        ("a lost commit was passed over", flipped(small, place + 100)),
        ("contents that were lost were passed over", flipped(image, new + 3000)),
        ("a record that points outside the store was believed", aimed(small, place, 1 << 40)),
        ("a record that points beyond the store was believed", aimed(small, place, stats.region_size)),
    ):
        for mode in ("r", "r+"):
            path.write_bytes(damaged)
            try:
                pmstore.open(path, mode, media=medium).close()
            except pmstore.CorruptStoreError:
                continue
            raise Noticed("damage", what)


def header_damaged(path: Path, medium: str) -> None:
    pmstore.open(path, "w", media=medium).close()
    image = path.read_bytes()
    for place in (40, 4096 + 40):
        path.write_bytes(flipped(image, place))
        with pmstore.open(path, "r", media=medium, exclusive=True) as store:
            if store.check().ok:
                raise Noticed("damage", "a damaged copy of the header was passed over")


def flipped(image: bytes, place: int) -> bytes:
    return image[:place] + bytes([image[place] ^ 1]) + image[place + 1 :]


def aimed(image: bytes, place: int, target: int) -> bytes:
    """The image in which the first range of the record at a place points to another place, with correct hashes."""
    salt, _, body = struct.unpack_from("<QII", image, place + 16)
    record = bytearray(image[place : place + 64 + body])
    struct.pack_into("<Q", record, 64, target)
    value = keyed_checksum(hash64(bytes(record[64 : 64 + min(body, BLOCK)])), place + 64, salt)
    for at in range(BLOCK, body, BLOCK):
        value = (value << 7 | value >> 57) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
        value += keyed_checksum(hash64(bytes(record[64 + at : 64 + min(body, at + BLOCK)])), place + 64 + at, salt)
        value &= (1 << 64) - 1
    struct.pack_into("<Q", record, 32, value)
    struct.pack_into("<I", record, 60, crc32c(bytes(record[:60]), place & 0xFFFFFFFF))
    return image[:place] + bytes(record) + image[place + len(record) :]


def damaged_images(directory: Path, medium: str, clean: bool) -> Iterator[Any]:
    path = directory / "whole.pm"
    states = []
    images = []
    with pmstore.open(path, "w", media=medium) as store:
        store["large"] = np.random.default_rng(7).random(9000)
        store["small"] = np.arange(5.0)
        store["text"] = "y" * 9000
        store["values"] = {"name": "net", "sizes": [1, 2, 3]}
        history = store.create_list("history")
        history.extend(range(40))
        for i in range(60):
            store[f"many/{i:03}"] = i
    store = pmstore.open(path, "r+", media=medium)
    states.append(snapshot(store))
    for i in range(4):
        store["large"][i * 2000] = i
        store["many/003"] = -i
        store["new"] = np.full(2000, float(i))
        store.commit()
        states.append(snapshot(store))
        images.append(path.read_bytes())
    stats = store.stats()
    log = range(stats.file_size - stats.log_size, stats.file_size - stats.log_size + stats.log_used)
    if clean:
        store.close()
    else:
        store._drop(discard=True)
    image = path.read_bytes()
    yield states[-1:]  # also for a log: the durable marker tells that its last record was durable
    rng = random.Random(5)
    yield from lost_writes(image, images, rng)
    used = len(image.rstrip(b"\0"))
    places = [*range(0, 80, 7), *range(4096, 4176, 9), *range(2048, 2064, 3)]
    places += [rng.randrange(used) for _ in range(40)]
    for name in (b"many/030", b"values", b"history"):
        places += [found.end() + i for found in re.finditer(name, image) for i in (0, 1)]
    if not clean:
        places += [rng.choice(log) for _ in range(40)]
    for at in places:
        out = bytearray(image)
        out[at] ^= 1 << rng.randrange(8)
        yield bytes(out)
    for _ in range(50):
        out = bytearray(image)
        size = rng.choice((64, 512, 4096))
        at = rng.randrange(used) // size * size
        kind = rng.randrange(4)
        if kind == 0:
            out[at : at + size] = bytes(size)
        elif kind == 1:
            out[at : at + size] = b"\xff" * size
        elif kind == 2:
            start = rng.randrange(used) // size * size
            out[at : at + size] = image[start : start + size]
        else:
            del out[at:]
        yield bytes(out)


def lost_writes(image: bytes, images: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """The image with a sector, or a page, from before the last writes to it."""
    for size, most in ((512, 15), (4096, 30)):
        changed = [
            (at, old[at : at + size])
            for old in images
            for at in range(8192, min(len(old), len(image)), size)
            if old[at : at + size] != image[at : at + size]
        ]
        for at, old in rng.sample(changed, min(most, len(changed))):
            yield image[:at] + old + image[at + size :]


VALUES = ("text", "values")


def evaluate_damaged(path: Path, medium: str, image: bytes, states: list[dict[str, Any]]) -> None:
    path.write_bytes(image)
    for mode in ("r", "r+"):
        try:
            with pmstore.open(path, mode, media=medium) as store:
                try:
                    report = store.check()
                except pmstore.Error as error:
                    raise Noticed("damage", f"check() stumbles instead of naming the damage: {error}") from error
                try:
                    found = snapshot(store)
                    if any(found.get(name, value) != value for name, value in states[-1].items() if name in VALUES):
                        raise Noticed("damage", "a damaged value is handed out")
                except pmstore.Error:
                    if report.ok:
                        raise Noticed("damage", "a reader stumbles over what check() does not see") from None
                    continue
                if report.ok and found not in states:
                    raise Noticed("damage", "damage was passed over")
                if report.ok and mode == "r+":
                    store["after"] = np.ones(3000)
        except pmstore.Error:
            continue
