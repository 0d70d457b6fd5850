"""The checksums of the file format against independent implementations: XXH3-64 (D5) and CRC-32C.

The extension runs the version that suits this CPU; each version gives the same values (H1 in csrc/base/hash.c).
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pmstore._core import ffi, lib

xxhash = pytest.importorskip("xxhash")

SEEDS = st.integers(0, 2**64 - 1)
CRCS = st.integers(0, 2**32 - 1)

# One byte to either side of every change of algorithm, of stripe (64) and of round (1024).
EDGES = (1, 4, 9, 17, 33, 65, 97, 129, 241, 1024, 2048, 4096, 8192)
LENGTHS = sorted({edge + delta for edge in EDGES for delta in (-1, 0, 1)})


def noise(length, salt=0):
    """Bytes without a pattern, the same in every run."""
    words = range(salt, salt + length // 8 + 1)
    return b"".join(xxhash.xxh64_digest(b"noise", seed=word) for word in words)[:length]


def hash64(data, seed=0):
    return lib.pm_hash64(ffi.from_buffer(data), len(data), seed)


def crc32c(data, crc=0):
    return lib.pm_crc32c(ffi.from_buffer(data), len(data), crc)


def crc32c_by_bits(data, crc=0):
    """The definition: divide by the polynomial 0x1EDC6F41, bits reflected, one bit at a time."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("seed", [0, 1, 0x0123456789ABCDEF, 2**64 - 1])
def test_hash_of_every_length(seed):
    data = memoryview(noise(5000))
    wrong = [n for n in range(5001) if hash64(data[:n], seed) != xxhash.xxh3_64_intdigest(data[:n], seed=seed)]
    assert not wrong


@pytest.mark.parametrize("length", LENGTHS)
def test_hash_at_every_alignment(length):
    data = noise(length, salt=length)
    room = bytearray(length + 64)
    for at in range(64):
        room[:] = b"\xff" * len(room)  # what surrounds the bytes must not count
        room[at : at + length] = data
        assert hash64(memoryview(room)[at : at + length]) == xxhash.xxh3_64_intdigest(data)


@given(data=st.binary(max_size=600), seed=SEEDS)
@example(data=b"", seed=0)
def test_hash_of_any_bytes(data, seed):
    assert hash64(data, seed) == xxhash.xxh3_64_intdigest(data, seed=seed)


@given(length=st.integers(241, 300_000), salt=st.integers(0, 2**32), seed=st.just(0) | SEEDS)
def test_hash_of_long_bytes(length, salt, seed):
    data = noise(4096, salt) * (length // 4096 + 1)
    data = data[:length]
    assert hash64(data, seed) == xxhash.xxh3_64_intdigest(data, seed=seed)


def test_hash_sees_every_bit_of_a_block():
    block = bytearray(noise(lib.PM_BLOCK))
    seen = {hash64(block)}
    for bit in range(8 * len(block)):
        block[bit // 8] ^= 1 << bit % 8
        seen.add(hash64(block))
        block[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * len(block) + 1


def test_nothing_may_be_null():
    assert lib.pm_hash64(ffi.NULL, 0, 0) == 0x2D06800538D394C2
    assert lib.pm_crc32c(ffi.NULL, 0, 0) == 0
    assert lib.pm_crc32c(ffi.NULL, 0, 0xE3069283) == 0xE3069283


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0xE3069283),
        # RFC 3720, B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (
            bytes.fromhex(
                "01c00000 00000000 00000000 00000000 14000000 00000400"
                "00000014 00000018 28000000 00000000 02000000 00000000"
            ),
            0xD9963A56,
        ),
    ],
)
def test_crc32c_of_published_vectors(data, crc):
    assert crc32c(data) == crc
    assert crc32c_by_bits(data) == crc


def test_crc32c_of_every_length_and_alignment():
    data = noise(600)
    for length in range(300):
        at = length % 17
        assert crc32c(memoryview(data)[at : at + length]) == crc32c_by_bits(data[at : at + length])


@given(data=st.binary(max_size=300), crc=CRCS)
def test_crc32c_of_any_bytes(data, crc):
    assert crc32c(data, crc) == crc32c_by_bits(data, crc)


@given(data=st.binary(max_size=3000), crc=CRCS, cut=st.integers(0, 3000))
def test_crc32c_can_be_chained(data, crc, cut):
    assert crc32c(data[cut:], crc32c(data[:cut], crc)) == crc32c(data, crc)
