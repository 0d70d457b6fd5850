"""How contents are encoded: lossless differences, as compressed planes, or any codec of numcodecs.

    contents ──(of a differential: minus those of the version before)──▶ codecs, one after the other ──▶ stored bytes

The difference is that of the elements' bits as unsigned integers, modulo 2 to the number of bits. So it is exact for
every dtype, and small where floats changed little. Arrays whose names match a pattern have a codec of their own. A
lossy one takes the difference of the numbers, to what the version before decodes to (I27).
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pmstore._catalog.names import NAME_PREFIX, name_of
from pmstore._errors import UNRELATED, ArchiveDamagedError, ArchiveError, memory_errors

if TYPE_CHECKING:
    from pmstore.codecs import LCDelta

__all__ = ["FRAME", "LOSSY", "Chain", "Codecs", "codecs_of", "missing"]

FRAME = 4 << 20  # bytes of contents that are encoded together, at most
MOST = 16 * FRAME  # bytes of a frame that is read, at most: of other versions of this module

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_SAME_SIZE = ("shuffle",)  # codecs whose output is as long as their input
_CODE = ("pickle",)  # codecs that may run what they decode
_LEVEL = 1
_OWN = "pmstore."  # what the names of pmstore's codecs begin with
_PLANES = "pmstore.planes"  # computes the difference in C code of its own, and decodes into the caller's array
LOSSY: tuple[dict[str, Any], ...] = ({"id": "pmstore.lcdelta"},)  # its frames tell the rest

Configs = tuple[dict[str, Any], ...] | None


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
    if str(dict(config).get("id")).startswith(_OWN):
        import pmstore.codecs  # noqa: F401 (it registers them)
    try:
        return numcodecs.get_codec(dict(config))
    except Exception as error:
        raise ArchiveError(
            f"the archive was written with the codec {dict(config)!r:.200}, which can't be made here: install the "
            f"package that registers it, or a newer one ({error})"
        ) from error


def _codec_of(config: Mapping[str, Any]) -> Any:
    try:
        return _codec(tuple(config.items()))
    except TypeError:  # a parameter is no key of a dict
        return _codec.__wrapped__(tuple(config.items()))


class Codecs:
    """The codecs of a drain, by pattern; the first one that matches an array's name counts. Contents without a
    name, and those of other values, have the last one."""

    def __init__(self, rules: Sequence[tuple[str, Configs | LCDelta]], rest: Configs) -> None:
        """A rule: a pattern of fnmatch, and configurations, None for the default, or a lossy codec."""
        self._rules = rules
        self._rest = rest
        self._found: dict[bytes, int | None] = {}

    @property
    def any_lossy(self) -> bool:
        """Whether there is a lossy one."""
        return any(_is_lossy(codec) for _, codec in self._rules)

    def _rule(self, key: bytes) -> int | None:
        if not self._rules or not key.startswith(NAME_PREFIX):
            return None
        if key not in self._found:
            if len(self._found) > _NAMES:
                self._found.clear()
            name = name_of(key)
            self._found[key] = next((n for n, (p, _) in enumerate(self._rules) if fnmatch.fnmatchcase(name, p)), None)
        return self._found[key]

    def configs(self, key: bytes) -> Configs:
        """The codecs of contents that are written without loss; None for the default, which depends on the itemsize."""
        rule = self._rule(key)
        codec: Any = self._rest if rule is None else self._rules[rule][1]
        return None if _is_lossy(codec) else codec

    def lossy(self, key: bytes) -> tuple[int, LCDelta] | None:
        """The lossy codec of an array, and the number of its rule; None: it has another one."""
        rule = self._rule(key)
        codec: Any = None if rule is None else self._rules[rule][1]
        return (rule, codec) if rule is not None and _is_lossy(codec) else None

    def approximates(self, key: bytes, dtype: np.dtype[Any]) -> bool:
        """Whether an array with this dtype may be approximated."""
        found = self.lossy(key)
        return found is not None and found[1].kind(dtype) is not None


_NAMES = 100_000  # whose rule is kept in memory


def _is_lossy(codec: Any) -> bool:
    return codec is not None and not isinstance(codec, tuple)


def codecs_of(codec: Any) -> Codecs:
    """The codecs for the argument `codec` of `Store.drain`.

    Raises TypeError, ValueError; ArchiveError if numcodecs is not installed.
    """
    if isinstance(codec, Mapping) and not isinstance(codec.get("id"), str):
        for pattern in codec:
            if not isinstance(pattern, str) or not pattern:
                raise TypeError(f"codec has patterns of names as keys, not {pattern!r:.80}")
        _codec_of({"id": "zstd"})  # of all others
        return Codecs([(pattern, _config_of(given)) for pattern, given in codec.items()], None)
    one: Any = _config_of(codec)
    return Codecs([("*", one)], None) if _is_lossy(one) else Codecs([], one)


def _config_of(codec: Any) -> Configs | LCDelta:
    """Configurations, or a lossy codec. None is the default, which "zstd" means; () is no codec, which None means."""
    if codec is None:
        return ()
    if codec == "zstd":
        _codec_of({"id": "zstd"})
        return None
    if isinstance(codec, str):
        codec = {"id": codec}
    config = codec if isinstance(codec, Mapping) else getattr(codec, "get_config", lambda: None)()
    if not isinstance(config, Mapping) or not isinstance(config.get("id"), str):
        raise TypeError(
            f"codec is 'zstd', None, a codec of numcodecs or its configuration, or a dict of these, not {codec!r:.80}"
        )
    try:
        made = _codec_of(config)
    except ArchiveError as error:
        raise ValueError(f"the codec {config['id']!r} can't be used: {error.__cause__ or error}") from error
    if config["id"] == LOSSY[0]["id"]:
        return made  # type: ignore[no-any-return]
    _refuse_lossy((dict(config),))
    return (dict(config),)


def _refuse_lossy(configs: tuple[dict[str, Any], ...]) -> None:
    """Raises ValueError for a codec that does not give every byte back. It may refuse odd numbers of bytes."""
    chain = Chain(False, 1, configs)
    for count in (4096, 4095, 7, 1):
        sample = np.random.default_rng(0).integers(0, 256, count, np.uint8)
        try:
            with np.errstate(all="ignore"):
                same = np.array_equal(chain.decode(bytes(chain.encode(sample, None)), count, None), sample)
        except Exception as error:
            if count % 2:
                continue
            raise ValueError(f"the codec {configs[0]['id']!r} does not take bytes: {error}") from error
        if not same:
            raise ValueError(
                f"the codec {configs[0]['id']!r} is lossy: an archive has every bit, but for pmstore.codecs.LCDelta, "
                "whose error it records"
            )


class Chain(NamedTuple):
    """How the contents of a frame are encoded. delta: as the difference to the version before; size: bytes of an
    element; configs: of numcodecs, in the order of encoding."""

    delta: bool
    size: int
    configs: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, configs: Configs, itemsize: int, count: int, delta: bool) -> Chain:
        """The chain for contents of `count` bytes. configs: see `Codecs.configs`."""
        size = itemsize if itemsize in (2, 4, 8) and count % itemsize == 0 else 1
        if configs is None:
            configs = ({"id": _PLANES, "elementsize": size} if size > 1 else {"id": "zstd", "level": _LEVEL},)
        return cls(delta, size, configs)

    @property
    def _lossy(self) -> bool:
        return self.delta and self.configs == LOSSY

    @property
    def _has_planes(self) -> bool:
        return self.size in (2, 4, 8) and self.configs == ({"id": _PLANES, "elementsize": self.size},)

    def _elements(self, data: Bytes) -> Any:
        return data.view(f"<u{self.size}")

    def encode(self, contents: Bytes, before: Bytes | None) -> Any:
        """The stored bytes. before: those of the version before, if delta. Both are contiguous."""
        if self._has_planes:
            from pmstore.codecs._planes import encoded

            return memoryview(b"".join(encoded(contents, before if self.delta else None, self.size)))
        data: Any = contents
        if self.delta:
            data = (self._elements(contents) - self._elements(before)).view(np.uint8)  # type: ignore[arg-type]
        for codec in map(_codec_of, self.configs):
            with memory_errors():
                data = codec.encode(data)
        if isinstance(data, np.ndarray) and np.may_share_memory(data, contents):  # the contents may change
            data = bytes(data)
        return memoryview(data).cast("B")

    def decode(self, stored: Any, count: int, before: Bytes | None, out: Bytes | None = None) -> Bytes:
        """`count` bytes of contents. Raises ArchiveDamagedError if these are not the stored contents.

        out: a place for them, which may be `before`; it has anything after an error.
        """
        if count > MOST:
            raise ArchiveDamagedError(f"the archive is damaged: a frame of {count} bytes")
        if self.delta and (self.size not in (1, 2, 4, 8) or count % self.size):
            raise ArchiveDamagedError("the archive is damaged: a difference of parts of elements")
        if self._has_planes:
            return self._decode_planes(stored, before, np.empty(count, np.uint8) if out is None else out)
        made = self._approximated(stored, count, before) if self._lossy else self._decoded(stored, count, before)
        if out is None:
            return made
        out[:] = made
        return out

    def _decode_planes(self, stored: Any, before: Bytes | None, out: Bytes) -> Bytes:
        _codec_of(self.configs[0])  # numcodecs may not be installed
        from pmstore.codecs._planes import decode_into

        try:
            decode_into(stored, before if self.delta else None, self.size, out)
        except ValueError as error:
            raise ArchiveDamagedError(f"the archive is damaged: a frame can't be decoded: {error}") from error
        return out

    def _decoded(self, stored: Any, count: int, before: Bytes | None) -> Bytes:
        data: Any = stored
        codecs = [_codec_of(config) for config in self.configs]  # a missing codec is another error than damage
        try:
            for number in range(len(codecs) - 1, -1, -1):
                known = all(config["id"] in _SAME_SIZE for config in self.configs[:number])
                # With a place for the result, a codec does not make one as large as the bytes claim.
                with memory_errors():
                    data = codecs[number].decode(data, out=np.empty(count, np.uint8) if known else None)
            out = np.frombuffer(data, np.uint8)
        except UNRELATED:
            raise
        except Exception as error:
            raise ArchiveDamagedError(f"the archive is damaged: a frame can't be decoded: {error}") from error
        if len(out) != count:
            raise ArchiveDamagedError(f"the archive is damaged: a frame has {len(out)} bytes instead of {count}")
        if not self.delta:
            return out
        return (self._elements(out) + self._elements(before)).view(np.uint8)  # type: ignore[arg-type,no-any-return]

    def _approximated(self, stored: bytes, count: int, before: Bytes | None) -> Bytes:
        _codec_of(self.configs[0])  # it may not be installed
        from pmstore.codecs._passes import decoded

        try:
            out = decoded(stored, before, count)
        except ValueError as error:
            raise ArchiveDamagedError(f"the archive is damaged: {error}") from error
        if len(out) != count:
            raise ArchiveDamagedError(f"the archive is damaged: a frame has {len(out)} bytes instead of {count}")
        return out
