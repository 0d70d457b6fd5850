"""csrc/base has versions of hash.c and compare.c for each kind of processor: all of them give what this one gives."""

from __future__ import annotations

import ctypes
import random

import pytest

from pmstore._core import ffi, lib
from tests.support.programs import CSRC, LIBRARY, compiled

PAGE, LINE = 4096, 64


@pytest.fixture(
    scope="module",
    params=[(), pytest.param(("-DPM_NO_AVX512",), marks=pytest.mark.long), ("-DPM_PORTABLE",)],
    ids=["best", "narrow", "portable"],
)
def version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("version") / "version.so"
    sources = [CSRC / "base" / "hash.c", CSRC / "base" / "compare.c"]
    loaded = ctypes.CDLL(str(compiled(library, sources, *LIBRARY, "-O0", *request.param)))
    for function in (loaded.pm_hash64, loaded.pm_hash64_copy_page, loaded.pm_compare_changed_lines):
        function.restype = ctypes.c_uint64
    loaded.pm_compare_equal.restype = ctypes.c_bool
    loaded.pm_crc32c.restype = ctypes.c_uint32
    return loaded


def noise(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def test_H1_hashes(version: ctypes.CDLL) -> None:
    for length in [*range(300), 1023, 1024, 1025, 2048, 4095, 4096, 4097, 8192, 100_001]:
        for seed in (0, 2**63 + 5):
            data = noise(length)
            here = lib.pm_hash64(ffi.from_buffer(data), length, seed)
            assert version.pm_hash64(data, ctypes.c_size_t(length), ctypes.c_uint64(seed)) == here
        assert version.pm_crc32c(data, ctypes.c_size_t(length), 7) == lib.pm_crc32c(ffi.from_buffer(data), length, 7)


def test_H1_a_copied_page(version: ctypes.CDLL) -> None:
    page = noise(PAGE)
    copy = ctypes.create_string_buffer(PAGE)
    assert version.pm_hash64_copy_page(copy, page) == lib.pm_hash64(ffi.from_buffer(page), PAGE, 0)
    assert copy.raw == page


def test_pages_are_compared(version: ctypes.CDLL) -> None:
    page = noise(PAGE)
    other = ctypes.create_string_buffer(page, PAGE)
    assert version.pm_compare_equal(page, other)
    assert version.pm_compare_changed_lines(page, other) == 0
    for at in range(PAGE):
        flipped = page[at] ^ 1 << at % 8
        other[at] = bytes([flipped])
        assert not version.pm_compare_equal(page, other)
        assert version.pm_compare_changed_lines(page, other) == 1 << at // LINE
        other[at] = page[at : at + 1]
    for lines in [(0, 63), (1, 2, 3), tuple(range(64))]:
        for line in lines:
            other[line * LINE + 9] = bytes([page[line * LINE + 9] ^ 255])
        assert version.pm_compare_changed_lines(page, other) == sum(1 << line for line in lines)
        ctypes.memmove(other, page, PAGE)
