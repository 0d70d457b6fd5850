"""The two copies of the header: which one counts, what is refused, and what a checkpoint writes."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._store.header import NEWEST
from tests.conftest import Medium
from tests.support.images import HEADER, PAGE, REGION, Image, crc32c

GENERATION, DIGEST, SLOTS, FLAGS = 24, 72, 88, 216
WAYS = (("r", False), ("r", True), ("r+", True))


@pytest.fixture
def image(medium: Medium) -> Image:
    path = medium.directory / "store.pm"
    with pmstore.open(path, "x", media=medium.name) as store:  # type: ignore[call-overload]
        store["x"] = np.arange(1000.0)
    return Image(path)


def set_copy(image: Image, copy: int, fields: dict[int, int], sound: bool = True) -> None:
    """Changes fields of one copy, by their places. sound: its checksum is right."""
    start = copy * PAGE
    for place, value in fields.items():
        struct.pack_into("<Q", image.bytes, start + place, value)
    crc = crc32c(bytes(image.bytes[start : start + 252])) ^ (not sound)
    struct.pack_into("<I", image.bytes, start + 252, crc)


def opened(image: Image, mode: str, exclusive: bool) -> int | str:
    """The number of the last commit, or the error."""
    try:
        store = pmstore.open(image.path, mode, exclusive=exclusive)  # type: ignore[call-overload]
    except pmstore.Error as error:
        return f"{type(error).__name__}: {error}"
    sequence = store.sequence
    store._drop(discard=True) if mode == "r+" else store.close()
    return sequence


def opens(image: Image, error: str = "") -> None:
    """All ways to open the store do so, or find this error."""
    for mode, exclusive in WAYS:
        found = opened(image, mode, exclusive)
        right = bool(error) and error in found if isinstance(found, str) else not error
        assert right, (mode, exclusive, found)


@pytest.mark.parametrize(
    "generations, broken, used",
    [
        ((5, 6), None, 1),
        ((6, 5), None, 0),
        ((5, 5), None, 0),
        ((1 << 40, 5), None, 0),
        ((5, 6), 1, 0),
        ((6, 5), 0, 1),
        ((6, 5), 1, 0),
        ((5, 6), 0, 1),
    ],
)
def test_the_newer_sound_copy_counts(image: Image, generations: tuple[int, int], broken: int | None, used: int) -> None:
    """A writer makes the other copy like it before anything else."""
    for how in ("checksum", "magic"):
        for copy in (0, 1):
            fields = {GENERATION: generations[copy], HEADER["sequence"]: 10 * copy + 10}
            if copy == broken and how == "magic":
                fields[0] = 7
            set_copy(image, copy, fields, sound=copy != broken or how == "magic")
        for mode, exclusive in WAYS:
            image.save()
            assert opened(image, mode, exclusive) == 10 * used + 10, (how, mode, exclusive)
            if mode == "r":
                assert image.path.read_bytes() == image.bytes
        after = image.path.read_bytes()
        assert after[:256] == after[PAGE : PAGE + 256] and after[REGION:] == image.bytes[REGION:]
        assert struct.unpack_from("<QQQ", after, GENERATION)[::2] == (generations[used] + 1, 10 * used + 10)
        assert after[FLAGS] == 1
        image.bytes[:] = after
        set_copy(image, 0, {0: struct.unpack("<Q", b"PMSTORE\x1a")[0]})


def test_equal_copies_are_left_alone(image: Image) -> None:
    """An opening without a commit does not write."""
    for mode, exclusive in WAYS:
        assert isinstance(opened(image, mode, exclusive), int)
        assert image.path.read_bytes() == image.bytes


@pytest.mark.parametrize(
    "versions, error",
    [
        ((2, 2), "FormatVersionError"),
        ((999, 999), "FormatVersionError"),
        ((1000, 1000), "both copies of the header are damaged"),
        ((2, 3), "both copies of the header are damaged"),
        ((1, 1), "both copies of the header are damaged"),
        ((0, 0), "both copies of the header are damaged"),
    ],
)
def test_a_later_format_may_have_another_checksum(image: Image, versions: tuple[int, int], error: str) -> None:
    for copy in (0, 1):
        set_copy(image, copy, {8: versions[copy]}, sound=False)
    image.save()
    opens(image, error)


def test_a_file_that_ends_too_early(image: Image) -> None:
    size = len(image.bytes)
    ends = {
        0: "empty",
        1: "not a pmstore store",
        7: "not a pmstore store",
        8: "its headers are cut off",
        256: "its headers are cut off",
        PAGE: "its headers are cut off",
        REGION - 1: "its headers are cut off",
        REGION: f"truncated: it has {REGION} bytes, and its header needs {size}",
        size - PAGE: "truncated",
        size - 1: "truncated",
        size: "",
        size + 1: "",
    }
    for end, error in ends.items():
        image.path.write_bytes(image.bytes[:end].ljust(end, b"\0"))
        opens(image, error)
    image.bytes[:8] = b"nonsense"  # only copy B tells that it is a store
    for end, error in ((REGION - 1, "not a pmstore store"), (REGION, "truncated"), (size, "")):
        image.path.write_bytes(image.bytes[:end])
        opens(image, error)
    image.bytes[PAGE : PAGE + 8] = b"nonsense"
    image.save()
    opens(image, "not a pmstore store")


def test_the_least_and_the_largest_log_and_region(image: Image) -> None:
    least, most = 4 * PAGE, 128 << 20
    for size, error in ((least, ""), (least - PAGE, "impossible log"), (most, ""), (most + PAGE, "impossible log")):
        image.set_header(log_size=size)
        image.save()
        os.truncate(image.path, image.log_offset + size)
        opens(image, error)
    image.save()
    for wrong in (-PAGE, PAGE):
        image.set_header(log_size=least, log_offset=image.log_offset + wrong)
        image.save()
        opens(image, "impossible log")
    for size, error in ((1 << 42, "truncated"), ((1 << 42) + PAGE, "impossible region size")):
        image.set_header(region_size=size, log_offset=REGION + size)
        image.save()
        opens(image, error)
    for pages, error in ((4, ""), (3, "impossible region size")):
        image.set_header(log_size=least, region_size=pages * PAGE, log_offset=REGION + pages * PAGE)
        image.save()
        opens(image, error)


def fields(path: Path) -> dict[str, int]:
    """The fields of the header, whose copies are equal."""
    data = path.read_bytes()
    assert data[:256] == data[PAGE : PAGE + 256]
    places = {**HEADER, "generation": GENERATION, "sum": DIGEST, "moment": DIGEST + 8}
    return {name: struct.unpack_from("<Q", data, place)[0] for name, place in places.items()} | {"flags": data[FLAGS]}


def test_python_and_the_core_have_the_same_newest_format(tmp_path: Path) -> None:
    """PM_FORMAT_VERSION is in each file that the core writes."""
    path = tmp_path / "store.pm"
    pmstore.open(path, "x").close()
    assert int.from_bytes(path.read_bytes()[8:12], "little") == NEWEST


def test_a_new_store_and_its_checkpoints(medium: Medium) -> None:
    """Each empties the log by a new salt, and has the state after the last commit."""
    path = medium.directory / "store.pm"
    pmstore.open(path, "x", media=medium.name).close()  # type: ignore[call-overload]
    first = fields(path)
    size = path.stat().st_size
    assert (first["generation"], first["sequence"], first["flags"]) == (1, 0, 1) and first["salt"]
    assert first["log_offset"] == REGION + first["region_size"] == size - first["log_size"]
    assert path.read_bytes()[SLOTS:FLAGS] == bytes(FLAGS - SLOTS) and path.read_bytes()[FLAGS + 4 : 252] == bytes(32)
    with pmstore.open(path, media=medium.name) as store:  # type: ignore[call-overload]
        salts = {first["salt"]}
        for number in range(1, 4):
            store["x"] = np.full(10, number)
            store.commit()
            record = path.read_bytes()[first["log_offset"] :][:64]
            before = fields(path)
            store._catalog.core.checkpoint()
            after = fields(path)
            assert after["generation"] == before["generation"] + 1 and after["salt"] not in salts
            assert (after["sequence"], after["flags"]) == (number, 0)
            assert (after["sum"], after["moment"]) == struct.unpack_from("<QQ", record, 40)
            salts.add(after["salt"])
    assert fields(path)["flags"] == 1 and fields(path)["sequence"] == 3
