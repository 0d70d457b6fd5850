"""`pmstore.codecs.LCDelta`: one difference, of any floats, and bytes that are not one."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

numcodecs = pytest.importorskip("numcodecs")

from pmstore._core import ffi, hash64  # noqa: E402
from pmstore.codecs import LCDelta, _passes  # noqa: E402
from pmstore.codecs._passes import BRAIN, DOUBLE, FLOAT, HALF, Buckets, Coder, decoded  # noqa: E402
from tests.support.programs import CSRC, LIBRARY, compiled  # noqa: E402

KINDS = {"float64": DOUBLE, "float32": FLOAT, "float16": HALF, "bfloat16": BRAIN}
SMALLEST = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}


def numbers(raw: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Bytes as doubles."""
    with np.errstate(all="ignore"):
        if name == "bfloat16":
            return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype("f8")
        return raw.view(name).astype("f8")


def array(raw: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    return raw.view([("bfloat16", "<u2")]) if name == "bfloat16" else raw.view(name)


@st.composite
def patterns(draw: Any, name: str) -> np.ndarray[Any, Any]:
    """Any bits: of all numbers alike, of those around some exponents, and special ones among them."""
    size = KINDS[name].size
    count, seed = draw(st.integers(1, 400)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    if draw(st.booleans()):
        raw = rng.integers(0, 256, count * size, np.uint8)
    else:
        spread = draw(st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]))
        with np.errstate(all="ignore"):
            x = rng.normal(size=count) * np.exp2(rng.integers(-6, 7, count)) * spread
            raw = ((x.astype("<f4").view("<u4") >> 16).astype("<u2") if name == "bfloat16" else x.astype(name)).view(
                np.uint8
            )
    raw = raw.copy()
    bits = raw.view(f"<u{size}")
    for at in rng.integers(0, count, draw(st.integers(0, 9))).tolist():
        top = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "float16": 0x1F << 10, "bfloat16": 0xFF << 7}[name]
        bits[at] = draw(st.sampled_from([0, 1, top, top | 1, top | top >> 1 | 3, top - 1]))
        bits[at] |= bits.dtype.type(draw(st.integers(0, 1)) << (8 * size - 1))
    return raw


def require_bounds(raw: Any, base: Any, out: Any, name: str) -> None:
    """Special numbers are exact, and the others no farther than before, but for the last bit of the type."""
    bits = f"<u{KINDS[name].size}"
    with np.errstate(all="ignore"):
        x, before, got = (numbers(one, name) for one in (raw, base, out))
        special = ~np.isfinite(x) | (np.abs(x) < SMALLEST[name])
        assert np.array_equal(raw.view(bits)[special], out.view(bits)[special])
        assert np.isfinite(got[~special]).all()
        steps = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[name]
        known = ~special & np.isfinite(before)
        bound = np.abs(x - before) * (1 + 1e-6) + np.maximum(np.abs(x), np.abs(got)) * steps
        assert (np.abs(x - got) <= bound)[known].all()


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data(), bits=st.integers(1, 8))
@settings(deadline=None)
def test_any_bits(name: str, data: Any, bits: int) -> None:
    raw = data.draw(patterns(name))
    codec = LCDelta(bits)
    made = codec.encode(array(raw, name))
    assert len(made) <= len(raw) + 24
    out = codec.decode(made)
    require_bounds(raw, np.zeros_like(raw), out, name)
    assert np.array_equal(codec.decode(made, np.empty(len(raw), np.uint8)), out)


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data(), bits=st.integers(1, 8))
@settings(deadline=None)
def test_I27_a_difference_to_what_was_there(name: str, data: Any, bits: int) -> None:
    raw, base, kind = data.draw(patterns(name)), data.draw(patterns(name)), KINDS[name]
    count = min(len(raw), len(base))
    raw, base, buckets = raw[:count].copy(), base[:count].copy(), Buckets()
    changes = buckets.add(kind, raw, base)
    made, out, errors = Coder().coded(kind, bits, buckets.kept(bits), changes, raw, base)
    require_bounds(raw, base, out, name)
    assert np.array_equal(decoded(made, base, count), out), "what is recorded is not what is decoded"
    with np.errstate(all="ignore"):
        x, got = numbers(raw, name), numbers(out, name)
        finite = np.isfinite(x)
        error = np.abs(x - got)[finite]
        assert errors.absolute == max(error, default=0.0)
        total, squares = float((x[finite] ** 2).sum()), float((error**2).sum())
    if 0 < total < np.inf and 0 < squares < np.inf:
        assert errors.relative == pytest.approx((squares / total) ** 0.5)
    assert errors.relative == 0 or errors.absolute > 0


def test_the_largest_exponents_are_kept() -> None:
    d = np.array([8.0, 9.0, -8.5, 4.0, 5.0, 4.5, -4.25, 2.0, -2.0, 1.0] * 4, "f4")
    out = LCDelta(2).decode(LCDelta(2).encode(d)).view("f4")
    assert np.array_equal(out[:10], np.array([8.5, 8.5, -8.5, 4.5, 4.5, 4.5, 0, 0, 0, 0], "f4"))


def test_codes_take_few_bytes() -> None:
    d = np.random.default_rng(0).normal(size=100_000).astype("f4")
    sizes = {bits: len(LCDelta(bits).encode(d)) for bits in range(1, 9)}
    assert sizes[1] < sizes[2] < sizes[3] < sizes[4] and d.nbytes / sizes[3] > 12 and d.nbytes / sizes[2] > 60


def test_what_it_decodes_to_is_the_same_everywhere() -> None:
    """Archives have hashes of it."""
    x = ((np.arange(5000, dtype="u8") * 2654435761 % (1 << 21)).astype("f8") * 2.0**-18 - 4).astype("f4")
    for name, wanted in GOLDEN.items():
        raw = ((x.view("<u4") >> 16).astype("<u2") if name == "bfloat16" else x.astype(name)).view(np.uint8)
        assert hash64(LCDelta().decode(LCDelta().encode(array(raw, name))).data) == wanted, name


GOLDEN = {
    "float64": 16750097885057647004,
    "float32": 9815506789424290080,
    "float16": 6269086238266304268,
    "bfloat16": 12628497600546466851,
}


def scrambled(count: int, seed: int) -> np.ndarray[Any, Any]:
    """Random numbers of 64 bits, the same with every version of numpy (splitmix64)."""
    x = np.arange(1, count + 1, dtype="u8") * 0x9E3779B97F4A7C15 + np.uint64(seed << 32)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9
    x = (x ^ x >> 27) * 0x94D049BB133111EB
    return np.asarray(x ^ x >> 31)


def golden_pairs(name: str, count: int) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Elements and those before: of any bits, of small changes with special numbers among them, and small alone."""
    unsigned = np.dtype(f"<u{KINDS[name].size}")
    any_bits, noise, base = (scrambled(count, seed).astype(unsigned) for seed in (1, 2, 3))
    sign, low = unsigned.type(1 << (8 * unsigned.itemsize - 1)), unsigned.type(63)
    top = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "float16": 0x1F << 10, "bfloat16": 0xFF << 7}[name]
    one = {"float64": 0x3FF << 52, "float32": 0x7F << 23, "float16": 15 << 10, "bfloat16": 0x7F << 7}[name]
    yield any_bits, base
    near = (base & ~unsigned.type(top) & ~sign) | unsigned.type(one) | (base & sign)
    moved = near ^ (noise & (unsigned.type((1 << (noise.itemsize * 4 - 2)) - 1)))
    special = np.array([0, 1, top, top | 1, top | top >> 1 | 3, top - 1, 1 << 3], unsigned)
    moved[any_bits & low == 5] = special[(any_bits[any_bits & low == 5] >> 6) % 7] | (base[any_bits & low == 5] & sign)
    near[base & low == 9] = special[(base[base & low == 9] >> 6) % 7]
    yield moved, near
    tiny = ~unsigned.type(top & top << 2)
    yield any_bits & tiny, base & tiny


class Portable:
    """The passes that run on any processor, in place of those that run here."""

    def __init__(self, folder: Path) -> None:
        source = CSRC / "codecs" / "lcdelta.c"
        self._library = ctypes.CDLL(str(compiled(folder / "portable.so", [source], *LIBRARY, "-DPM_PORTABLE")))

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        function.restype = ctypes.c_uint64
        return lambda *given: function(*[ctypes.c_uint64(int(ffi.cast("uintptr_t", one))) for one in given])


@pytest.mark.parametrize("portable", [False, True], ids=["here", "portable"])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_encoded_is_the_same_in_every_release(
    name: str, portable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And on every processor. Without what zstd does to it, which is free to change."""
    if portable:
        monkeypatch.setattr(_passes, "lib", Portable(tmp_path))
    made = bytearray()
    for count in (1, 3, 64, 1000, 4099):
        for x, before in golden_pairs(name, count):
            for bits in (1, 3, 8):
                raw, base, buckets = x.view(np.uint8), before.view(np.uint8), Buckets()
                changes = buckets.add(KINDS[name], raw, base)
                coded, out, errors = Coder().coded(KINDS[name], bits, buckets.kept(bits), changes, raw, base)
                made += coded[:24] + bytes(numcodecs.Zstd().decode(coded[24:])) + out.tobytes()
                made += struct.pack("<d", errors.absolute)
                assert np.array_equal(decoded(coded, base), out)
    assert hash64(bytes(made)) == GOLDEN_DIFFERENCES[name]


@pytest.mark.parametrize("name", KINDS)
def test_sums_of_many_changes(name: str) -> None:
    """More than C adds up before it empties what it counts with, and no whole number of blocks."""
    x = (1 + np.arange((1 << 22) + 1001) % 7 / 8) * np.where(np.arange((1 << 22) + 1001) % 3, 1, -2)
    brain = (x.astype("<f4").view("<u4") >> 16).astype("<u2")
    raw = (brain if name == "bfloat16" else x.astype(name)).view(np.uint8)
    found = Buckets().add(KINDS[name], raw, np.zeros_like(raw))
    assert found.buckets.tolist() == [1023, 2048 + 1024]
    assert found.numbers.tolist() == [int((x > 0).sum()), int((x < 0).sum())]
    assert found.sums.tolist() == [float(x[x > 0].sum()), float(x[x < 0].sum())]


GOLDEN_DIFFERENCES = {
    "float64": 16126730870363017146,
    "float32": 14825770397189207449,
    "float16": 17726089787830432641,
    "bfloat16": 15369926902197871517,
}


@pytest.mark.parametrize(
    "given",
    [
        np.arange(100),
        np.arange(50, dtype=">f4"),
        np.arange(100, dtype="c16"),
        np.array(["a", "bc"]),
        np.zeros((0, 3), "f4"),
        np.array([1.5, np.nan], "f4"),
        np.array(3.25),
        b"some bytes",
        np.random.default_rng(0).integers(0, 1 << 16, 1000, "u2"),
        np.arange(10).astype("M8[s]"),
    ],
)
def test_other_bytes_are_kept(given: Any) -> None:
    made = LCDelta().encode(given)
    raw = given if isinstance(given, bytes) else given.tobytes()
    assert bytes(LCDelta().decode(made)) == raw and len(made) <= len(raw) + 24


@pytest.mark.parametrize("dtype", ["<f8", "<i4"])
def test_a_masked_array_has_all_its_elements(dtype: str) -> None:
    given = np.arange(1000).astype(dtype)
    masked = np.ma.masked_array(given, mask=np.arange(1000) % 3 == 0)
    assert LCDelta().encode(masked) == LCDelta().encode(given)


def test_a_type_that_is_asked_for() -> None:
    d = np.random.default_rng(0).normal(size=1000)
    assert np.array_equal(LCDelta().decode(LCDelta(dtype="float32").encode(d)).view("f8"), d)
    brain = (d.astype("<f4").view("<u4") >> 16).astype("<u2")
    lossy = LCDelta(dtype="bfloat16").encode(brain)
    assert len(lossy) < brain.nbytes / 4 and len(LCDelta().encode(brain)) > brain.nbytes / 2
    assert np.array_equal(
        LCDelta().decode(lossy), LCDelta().decode(LCDelta().encode(brain.view([("bfloat16", "<u2")])))
    )


@pytest.mark.parametrize(
    "parameters",
    [{"bits": 0}, {"bits": 9}, {"bits": True}, {"rebase_every": 0}, {"rebase_every": False}, {"dtype": "f4"}],
)
def test_wrong_parameters(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(parameters))):
        LCDelta(**parameters)
    with pytest.raises(TypeError):
        LCDelta("3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="objects"):
        LCDelta().encode(np.array([object()]))


def test_numcodecs_knows_it() -> None:
    codec = LCDelta(2, 10, "float32")
    assert numcodecs.get_codec(codec.get_config()) == codec
    assert codec.get_config() == {"id": "pmstore.lcdelta", "bits": 2, "rebase_every": 10, "dtype": "float32"}


@pytest.mark.parametrize("given", ["f4", "f8", "raw", "shuffled"])
def test_damaged_bytes_end_in_an_error(given: str) -> None:
    rng = np.random.default_rng(1)
    data = {
        "f4": rng.normal(size=300).astype("f4"),
        "f8": np.where(rng.random(300) < 0.1, np.nan, rng.normal(size=300)),
        "raw": rng.integers(0, 256, 99, np.uint8),
        "shuffled": np.arange(100),
    }[given]
    made = bytearray(LCDelta().encode(data))
    for at in range(len(made)):
        for change in (1, 0x80, 0xFF):
            bad = bytearray(made)
            bad[at] ^= change
            try:
                assert len(LCDelta().decode(bad, np.empty(data.nbytes, np.uint8))) <= data.nbytes
            except ValueError:
                pass
    for end in (0, 3, 15, 16, len(made) // 2, len(made) - 1):
        with pytest.raises(ValueError, match="damaged"):
            LCDelta().decode(made[:end])


def test_sizes_that_lie_ask_for_no_memory() -> None:
    header = struct.Struct("<BBBBIQQ")
    body = numcodecs.Zstd().encode(bytes(100))
    for count in (1 << 62, (1 << 64) - 1, 1 << 32):
        for found in (
            header.pack(1, 1, 3, 7, 0, count, count),
            header.pack(1, 1, 3, 7, (1 << 32) - 1, count, 9),
            header.pack(2, 4, 0, 0, 0, count, 0),
            header.pack(3, 4, 0, 0, 0, count, 0),
        ):
            with pytest.raises(ValueError, match="damaged"):
                LCDelta().decode(found + body)
    for wrong in (
        header.pack(1, 9, 3, 7, 0, 10, 9),  # a type that there is not
        header.pack(1, 1, 9, 7, 0, 10, 9),  # bits
        header.pack(1, 1, 2, 7, 0, 10, 9),  # more values than codes
        header.pack(1, 1, 3, 7, 11, 10, 9),  # more exact elements than elements
        header.pack(1, 1, 3, 7, 0, 10, 11),  # more codes than elements
        header.pack(4, 1, 3, 7, 0, 10, 9),
        header.pack(2, 0, 0, 0, 0, 10, 9),
    ):
        with pytest.raises(ValueError, match="damaged"):
            LCDelta().decode(wrong + body)


@pytest.mark.parametrize("name", KINDS)
def test_sums_are_rounded_once_as_numpy_rounds_them(name: str) -> None:
    """All numbers of 16 bits, and as many others."""
    size, kind = KINDS[name].size, KINDS[name]
    raw = np.arange(1 << 16, dtype="u8")
    base = (raw * 0x9E3779B97F4A7C15 if size > 2 else raw).astype(f"<u{size}").view(np.uint8)
    for value in (1.0, -0.75, 3e-8, -6.1e-5, 1e-3, 65519.0, 1e30):
        packed = bytes([1] * (1 << 16))
        head = struct.pack("<BBBBIQQ", 1, kind.number, 3, 1, 0, 1 << 16, len(packed))
        body = packed + np.array(value, kind.value).tobytes() + b"\xa5"
        got = decoded(head + numcodecs.Zstd().encode(body), base)
        with np.errstate(all="ignore"):
            if name == "bfloat16":
                total = ((raw.astype("u4") << 16).view("f4") + np.float32(value)).view("u4").astype("u8")
                wanted = ((total + 0x7FFF + (total >> 16 & 1)) >> 16).astype("u2")
            else:
                wide = "f4" if size == 2 else name
                wanted = (base.view(name).astype(wide) + np.array(value, wide)).astype(name).view(f"u{size}")
        number = np.isfinite(numbers(base, name))
        assert np.array_equal(got.view(f"u{size}")[number], wanted[number]), value


def test_a_bomb_is_not_unpacked() -> None:
    made = LCDelta().encode(np.zeros(1 << 22, "f8"))
    assert len(made) < 10_000
    with pytest.raises(ValueError, match="its size"):
        LCDelta().decode(made, np.empty(1000, np.uint8))


def test_hostile_codes_and_places() -> None:
    header, end = struct.Struct("<BBBBIQQ"), b"\xa5"

    def made(values: int, exact: int, packed: bytes, rest: bytes = b"") -> bytes:
        head = header.pack(1, 1, 3, values, exact, 10, len(packed))
        return head + bytes(numcodecs.Zstd().encode(packed + rest + end))

    zeros, value = bytes([9 << 3]), struct.pack("<f", 1.0)
    assert not LCDelta().decode(made(0, 0, zeros)).any()
    found = LCDelta().decode(made(1, 0, bytes([2 << 3 | 1, 6 << 3]), value)).view("f4")
    assert found.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    for codes in ([9 << 3 | 7], [10 << 3], [8 << 3], [5 << 3, 5 << 3], [31 << 3] * 10, []):
        with pytest.raises(ValueError, match="its codes"):
            LCDelta().decode(made(1, 0, bytes(codes), value))
    for places in ((10,), (5, 5), (1, (1 << 32) - 1)):
        rest = struct.pack(f"<{len(places)}I", *places) + bytes(4 * len(places))
        with pytest.raises(ValueError, match="its exact elements"):
            LCDelta().decode(made(0, len(places), zeros, rest))
    for rest in (bytes(1), bytes(9)):
        with pytest.raises(ValueError, match="damaged"):
            LCDelta().decode(made(0, 0, zeros, rest))
