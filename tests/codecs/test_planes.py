"""`pmstore.codecs.Planes`: the bytes of elements by their place, of any length, and bytes that are not planes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

numcodecs = pytest.importorskip("numcodecs")

from pmstore._core import ffi, lib  # noqa: E402
from pmstore.archive._codecs import Chain, codecs_of  # noqa: E402
from pmstore.codecs import Planes  # noqa: E402
from pmstore.codecs._planes import decode_into, encoded  # noqa: E402

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def of(data: Bytes, before: Bytes | None, size: int) -> bytes:
    return b"".join(encoded(data, before, size))


def some(seed: int, size: int, count: int, kind: str) -> Bytes:
    """Bytes of elements: random ones, some that repeat, small numbers, floats that are close to one another."""
    rng = np.random.default_rng(seed)
    made: Any
    if kind == "random":
        made = rng.integers(0, 256, size * count)
    elif kind == "repeated":
        made = np.resize(rng.integers(0, 256, 24 * size), size * count)
    else:
        numbers = rng.integers(0, 1000, count) if kind == "small" else 1 + rng.random(count) * 1e-3
        dtype = f"<u{size}" if kind == "small" else f"<f{size}"
        return np.frombuffer(numbers.astype(dtype).tobytes(), np.uint8)
    return made.astype(np.uint8)


KINDS = ["random", "repeated", "small", "close"]


@pytest.mark.parametrize("size", [2, 4, 8])
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3000), st.sampled_from(KINDS), st.booleans(), st.booleans())
def test_each_bit_comes_back(size: int, seed: int, count: int, kind: str, differs: bool, in_place: bool) -> None:
    data = some(seed, size, count, kind)
    before = some(seed + 1, size, count, kind) if differs else None
    stored = of(data, before, size)
    out = before.copy() if before is not None and in_place else np.full(len(data), 170, np.uint8)
    decode_into(stored, out if before is not None and in_place else before, size, out)
    assert (out == data).all()
    assert len(stored) < len(data) + 100


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("differs", [False, True])
def test_planes_have_the_bytes_of_one_place(size: int, differs: bool) -> None:
    """All numbers of elements around the blocks of the C functions."""
    for count in range(70):
        data, before = some(count, size, count, "random"), some(99, size, count, "random")
        planes = np.full(len(data) + 16, 170, np.uint8)
        old = ffi.from_buffer(before) if differs else ffi.NULL
        lib.pm_planes_split(ffi.from_buffer(data), old, count, size, ffi.from_buffer(planes))
        numbers = data.view(f"<u{size}") - before.view(f"<u{size}") * differs
        assert (planes[: len(data)].reshape(size, count) == numbers.view(np.uint8).reshape(count, size).T).all()
        assert (planes[len(data) :] == 170).all()
        joined = np.full(len(data) + 16, 170, np.uint8)
        start = ffi.from_buffer("uint8_t[]", planes)
        places = ffi.new("uint8_t *[]", [start + n * count for n in range(size)])
        lib.pm_planes_join(places, old, count, size, ffi.from_buffer(joined))
        assert (joined[: len(data)] == data).all() and (joined[len(data) :] == 170).all()


def test_which_planes_look_random() -> None:
    rng = np.random.default_rng(0)

    def dense(data: Any) -> int:
        planes = np.empty(data.nbytes, np.uint8)
        return int(lib.pm_planes_split(ffi.from_buffer(data), ffi.NULL, len(data), 8, ffi.from_buffer(planes)))

    assert dense(1 + rng.integers(0, 2**52, 10_000) / 2**52) == 0b00111111  # the fraction but for 4 bits
    assert dense(rng.random(10_000).astype("f4").astype("f8")) & 0b10000111 == 0  # the lowest ones are zeros
    assert dense(np.arange(10_000)) & ~1 == 0 and dense(np.zeros(10_000)) == 0
    assert not any(dense(rng.random(count)) for count in (0, 1, 100, 257, 500))  # too few


def test_random_bytes_are_stored_as_they_are() -> None:
    data = some(0, 8, 100_000, "close")
    stored = of(data, None, 8)
    assert stored[0] == 2 and stored[2] == 0 and stored[12] == 1  # two runs of planes, the first one raw
    assert data[::8].tobytes() == stored[21:][:100_000]
    shuffled = numcodecs.Zstd(1).encode(numcodecs.Shuffle(8).encode(data))
    assert len(stored) < 1.01 * len(shuffled)


def test_what_repeats_is_compressed() -> None:
    """Also where each byte is as frequent as any other."""
    data = np.tile(some(0, 8, 4096, "random"), 10)
    assert len(of(data, None, 8)) < len(data) / 5


def test_the_format_stays() -> None:
    """Bytes of an earlier version of pmstore: a run as it is, and one of zstd."""
    raw = bytes([1, 2, 0, 8, 0, 0, 0, 0, 0, 0, 0]) + bytes([1, 2, 3, 4, 0, 0, 1, 1])
    compressed = bytes([1, 2, 1, 18, 0, 0, 0, 0, 0, 0, 0]) + bytes.fromhex("28b52ffd20c84d00001005050100430a6001")
    for stored, elements in ((raw, [1, 2, 259, 260]), (compressed, [1285] * 100)):
        out = np.zeros(2 * len(elements), np.uint8)
        decode_into(stored, None, 2, out)
        assert out.view("<u2").tolist() == elements


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 40))
def test_any_bytes(stored: bytes, count: int) -> None:
    """They are refused, or decoded to something."""
    for size in (2, 4, 8):
        out = np.zeros(count, np.uint8)
        try:
            decode_into(stored, None, size, out)
        except ValueError:
            continue
        assert count % size == 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_altered_bytes(data: st.DataObject) -> None:
    contents = some(1, 8, 1000, "close")
    stored = bytearray(of(contents, None, 8))
    for _ in range(data.draw(st.integers(1, 3))):
        stored[data.draw(st.integers(0, min(60, len(stored) - 1)))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(stored)))
    for altered in (bytes(stored), bytes(stored[:cut]), bytes(stored) + b"more"):
        out = np.zeros(len(contents), np.uint8)
        try:
            decode_into(altered, None, 8, out)
        except ValueError:
            continue
        assert len(out) == len(contents)


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i4", "u2"])
def test_a_codec_of_numcodecs(dtype: str) -> None:
    array = np.random.default_rng(0).normal(size=(30, 40)).astype(dtype)
    codec = numcodecs.get_codec({"id": "pmstore.planes", "elementsize": array.itemsize})
    assert codec == Planes(array.itemsize) and isinstance(codec, Planes)
    stored = codec.encode(array)
    assert bytes(codec.decode(stored)) == array.tobytes()
    out = np.empty_like(array)
    assert codec.decode(stored, out) is not None
    assert out.tobytes() == array.tobytes()
    with pytest.raises(ValueError, match="no room"):
        codec.decode(stored, np.empty(10, np.uint8))
    with pytest.raises(ValueError, match="not planes"):
        codec.decode(b"short")


def test_parameters() -> None:
    with pytest.raises(ValueError, match="2, 4 or 8"):
        Planes(3)
    with pytest.raises(ValueError, match="whole elements of 8 bytes"):
        Planes(8).encode(np.zeros(9, np.uint8))


def test_an_archive_of_other_codecs_is_read() -> None:
    """The default of an archive was shuffle and zstd once, and may be named."""
    data, before = some(0, 8, 500, "close"), some(1, 8, 500, "close")
    for delta in (False, True):
        chain = Chain(delta, 8, ({"id": "shuffle", "elementsize": 8}, {"id": "zstd", "level": 1}))
        stored = bytes(chain.encode(data, before))
        out = before.copy()
        chain.decode(stored, len(data), out, out)
        assert (out == data).all() and (chain.decode(stored, len(data), before) == data).all()


def test_named_for_an_archive() -> None:
    """It may be named, also where the elements have another size."""
    configs = codecs_of({"id": "pmstore.planes", "elementsize": 4}).configs(b"nx")
    data = some(0, 8, 500, "close")
    for size in (4, 8):
        chain = Chain.of(configs, size, len(data), False)
        assert (chain.decode(bytes(chain.encode(data, None)), len(data), None) == data).all()
