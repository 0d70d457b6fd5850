"""How contents are encoded: lossless differences, shuffled and compressed, or any codec of numcodecs.

    contents ──(of a differential: minus those of the version before)──▶ codecs, one after the other ──▶ stored bytes

The difference is that of the elements' bits as unsigned integers, modulo 2 to the number of bits. So it is exact for
every dtype, and small where floats changed little.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pmstore._errors import ArchiveDamagedError, ArchiveError

__all__ = ["FRAME", "Chain", "chosen", "missing"]

FRAME = 4 << 20  # bytes of contents that are encoded together, at most
MOST = 16 * FRAME  # bytes of a frame that is read, at most: of other versions of this module

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_SAME_SIZE = ("shuffle",)  # codecs whose output is as long as their input
_CODE = ("pickle",)  # codecs that may run what they decode
_LEVEL = 1


def missing(error: ImportError) -> ArchiveError:
    """The error for an extra that is not installed."""
    return ArchiveError(f"the archive needs {error.name or 'a package'}: pip install 'pmstore[archive]'")


@functools.lru_cache(maxsize=256)
def _codec(config: tuple[tuple[str, Any], ...]) -> Any:
    try:
        import numcodecs
    except ImportError as error:
        raise missing(error) from error
    if dict(config).get("id") in _CODE:
        raise ArchiveError(f"the codec {dict(config)['id']!r} is not used: what it decodes may run code")
    try:
        return numcodecs.get_codec(dict(config))
    except Exception as error:
        name = dict(config).get("id")
        raise ArchiveError(
            f"the archive was written with the codec {name!r}, which numcodecs does not have here: install the package "
            f"that registers it ({error})"
        ) from error


def _made(config: Mapping[str, Any]) -> Any:
    try:
        return _codec(tuple(config.items()))
    except TypeError:  # a parameter is no key of a dict
        return _codec.__wrapped__(tuple(config.items()))


def chosen(codec: Any) -> tuple[dict[str, Any], ...] | None:
    """What `Store.drain` is given as codec: configurations; None for the default, which depends on the elements' size.

    Raises TypeError, ValueError; ArchiveError if numcodecs is not installed.
    """
    if codec is None:
        return ()
    if codec == "zstd":
        _made({"id": "zstd"})
        return None
    if isinstance(codec, str):
        codec = {"id": codec}
    config = codec if isinstance(codec, Mapping) else getattr(codec, "get_config", lambda: None)()
    if not isinstance(config, Mapping) or not isinstance(config.get("id"), str):
        raise TypeError(f"codec is 'zstd', None, or a codec of numcodecs or its configuration, not {codec!r:.80}")
    try:
        _made(config)
    except ArchiveError as error:
        raise ValueError(f"there is no codec {config['id']!r}: {error.__cause__ or error}") from error
    _try((dict(config),))
    return (dict(config),)


def _try(configs: tuple[dict[str, Any], ...]) -> None:
    """Raises ValueError for a codec that does not give every byte back."""
    sample = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    chain = Chain(False, 1, configs)
    try:
        with np.errstate(all="ignore"):
            same = np.array_equal(chain.decode(bytes(chain.encode(sample, None)), len(sample), None), sample)
    except Exception as error:
        raise ValueError(f"the codec {configs[0]['id']!r} does not take bytes: {error}") from error
    if not same:
        raise ValueError(f"the codec {configs[0]['id']!r} is lossy: an archive has every bit")


class Chain(NamedTuple):
    """How the contents of a frame are encoded. delta: as the difference to the version before; size: bytes of an
    element; configs: of numcodecs, in the order of encoding."""

    delta: bool
    size: int
    configs: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, configs: tuple[dict[str, Any], ...] | None, itemsize: int, count: int, delta: bool) -> Chain:
        """For contents of so many bytes. configs: of `chosen`."""
        size = itemsize if itemsize in (2, 4, 8) and count % itemsize == 0 else 1
        if configs is None:
            shuffled: tuple[dict[str, Any], ...] = ({"id": "shuffle", "elementsize": size},) if size > 1 else ()
            configs = (*shuffled, {"id": "zstd", "level": _LEVEL})
        return cls(delta, size, configs)

    def _elements(self, data: Bytes) -> Any:
        return data.view(f"<u{self.size}")

    def encode(self, contents: Bytes, before: Bytes | None) -> Any:
        """The stored bytes. before: those of the version before, if delta. Both are contiguous."""
        data: Any = contents
        if self.delta:
            data = (self._elements(contents) - self._elements(before)).view(np.uint8)  # type: ignore[arg-type]
        for config in self.configs:
            data = _made(config).encode(data)
        if isinstance(data, np.ndarray) and np.may_share_memory(data, contents):  # the contents may change
            data = bytes(data)
        return memoryview(data).cast("B")

    def decode(self, stored: bytes, count: int, before: Bytes | None) -> Bytes:
        """So many bytes of contents. Raises ArchiveDamagedError if that is not what was stored."""
        if count > MOST:
            raise ArchiveDamagedError(f"the archive is damaged: a frame of {count} bytes")
        if self.delta and (self.size not in (1, 2, 4, 8) or count % self.size):
            raise ArchiveDamagedError("the archive is damaged: a difference of parts of elements")
        data: Any = stored
        codecs = [_made(config) for config in self.configs]  # a missing codec is another error than damage
        try:
            for number in range(len(codecs) - 1, -1, -1):
                known = all(config["id"] in _SAME_SIZE for config in self.configs[:number])
                # With a place for the result, a codec does not make one as large as the bytes claim.
                data = codecs[number].decode(data, out=np.empty(count, np.uint8) if known else None)
            out = np.frombuffer(data, np.uint8)
        except Exception as error:
            raise ArchiveDamagedError(f"the archive is damaged: a frame can't be decoded: {error}") from error
        if len(out) != count:
            raise ArchiveDamagedError(f"the archive is damaged: a frame has {len(out)} bytes instead of {count}")
        if not self.delta:
            return out
        return (self._elements(out) + self._elements(before)).view(np.uint8)  # type: ignore[arg-type,no-any-return]
