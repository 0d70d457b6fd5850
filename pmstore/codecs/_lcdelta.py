"""`LCDelta`: the lossy difference as a codec of numcodecs, and the methods that `Store.drain` calls."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numcodecs.abc import Codec
from numcodecs.compat import ensure_contiguous_ndarray, ndarray_copy
from numcodecs.registry import register_codec

from pmstore.codecs._passes import Buckets, Coder, Kind, decoded, kind_of, plain

__all__ = ["LCDelta"]

_NAMES = ("float16", "bfloat16", "float32", "float64")
_FEW = 8  # elements; fewer are kept without loss


class LCDelta(Codec):
    """A lossy codec for the change of weights between two versions (LC-Checkpoint, ICML 2020).

    Changes are sorted into buckets by sign and exponent. The 2^bits - 1 buckets of the largest exponents are kept, with
    one value each, the mean; smaller changes become 0. Zeros, denormals, infinities and NaN come back bit for bit. Of
    anything but floats, each bit comes back.

    Used alone, it encodes one difference. In ``store.drain(url, codec={"weights/*": LCDelta()})`` the archive takes
    each difference to what the version before decodes to, so that errors do not add up, and records the error of each
    array with each version.

    Parameters
    ----------
    bits : int
        1 to 8.
    rebase_every : int
        In an archive, each array is written without loss after so many lossy versions; at least 1.
    dtype : str, optional
        "float16", "bfloat16", "float32" or "float64": only elements of this type are lossy. "bfloat16" means arrays of
        uint16 and of the structured dtype ``[("bfloat16", "<u2")]``, which needs no parameter.

    Raises
    ------
    TypeError, ValueError
        A parameter is wrong.
    """

    codec_id = "pmstore.lcdelta"

    def __init__(self, bits: int = 3, rebase_every: int = 50, dtype: str | None = None) -> None:
        for name, given in (("bits", bits), ("rebase_every", rebase_every)):
            if not hasattr(given, "__index__"):
                raise TypeError(f"{name} is an int, not {given!r:.80}")
        if isinstance(bits, bool) or not 1 <= operator.index(bits) <= 8:
            raise ValueError(f"bits is a number from 1 to 8, not {bits!r}")
        if isinstance(rebase_every, bool) or operator.index(rebase_every) < 1:
            raise ValueError(f"rebase_every is a number of versions, at least 1, not {rebase_every!r}")
        if dtype is not None and dtype not in _NAMES:
            raise ValueError(f"dtype is one of {', '.join(map(repr, _NAMES))}, not {dtype!r}")
        self.bits = operator.index(bits)
        self.rebase_every = operator.index(rebase_every)
        self.dtype = dtype

    def kind(self, dtype: np.dtype[Any]) -> Kind | None:
        """The type of elements that it is lossy for; None: arrays of this dtype keep each bit."""
        return kind_of(dtype, self.dtype)

    def encode(self, buf: Any) -> bytes:
        """The bytes of one difference.

        Parameters
        ----------
        buf : ndarray, or any object with a buffer
            Of any shape.
        """
        given = np.asarray(buf if isinstance(buf, np.ndarray) else memoryview(buf))  # of a masked array, all elements
        if given.dtype.hasobject:
            raise TypeError("LCDelta does not encode objects")
        kind = self.kind(given.dtype)
        data = np.frombuffer(np.ravel(given, order="A").tobytes(), np.uint8)
        if kind is None or len(data) < _FEW * kind.size:
            return plain(data, given.dtype.itemsize if given.dtype.itemsize in (1, 2, 4, 8) else 1)
        zeros, buckets = np.zeros(len(data), np.uint8), Buckets()
        changes = buckets.add(kind, data, zeros)
        made, _, _ = Coder().coded(kind, self.bits, buckets.kept(self.bits), changes, data, zeros)
        return made if len(made) < len(data) else plain(data, kind.size)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """The difference, as bytes, in `out` if that is given.

        Raises ValueError if `encode` did not make it, or if it is larger than `out` or 2 GiB.
        """
        stored = ensure_contiguous_ndarray(buf).view(np.uint8)
        if out is None:
            return decoded(stored, None)
        target = ensure_contiguous_ndarray(out)
        return ndarray_copy(decoded(stored, None, target.nbytes), out)


register_codec(LCDelta)
