"""The interface of every place of objects: its methods, the names of objects, and how refusals become errors.

An object is there whole or not at all, and durable when the call that wrote it returns. Names are relative to the
place: parts of letters, digits and ``._-``, separated by single ``/``. No part begins with a dot.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from pmstore._errors import ArchiveDamagedError, ArchiveUnavailableError

Buffer: TypeAlias = bytes | bytearray | memoryview

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_LONGEST_PART, _LONGEST_NAME = 200, 800  # file systems allow 255 bytes, S3 1,024 with the prefix
TEMPORARY = ".pmstore-object-"

# What no waiting mends. A full disk and a quota are not among them: somebody may make space.
_PERMANENT = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR),
    *(errno.EINVAL, errno.EFBIG, errno.EMSGSIZE, errno.ENOSYS, errno.EOPNOTSUPP),
}
_PERMANENT_NAMES = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ParamValidationError",
    "ProfileNotFound",
    "RefreshError",
}
# Refusals by S3 that pass: the clock is set right, the credentials are renewed, the next upload arrives whole.
_PASSING_CODES = {
    *("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"),
    *("RequestExpired", "RequestTimeTooSkewed"),
    *("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"),
}


class ObjectError(Exception):
    """An error about one object of a place.

    Attributes
    ----------
    name, url : str
        The object, and the place as messages show it.
    """

    text = ""

    def __init__(self, name: str, url: str) -> None:
        super().__init__(name, url)
        self.name = name
        self.url = url

    def __str__(self) -> str:
        return f"{self.url}: {self.name!r} {self.text}"


class ObjectExistsError(ObjectError):
    """`Place.create` found an object of this name."""

    text = "exists already"


class MissingObjectError(ObjectError):
    """There is no object of this name."""

    text = "is missing"


class ShortObjectError(ObjectError):
    """The object ends before the bytes that were asked for."""

    text = "is shorter than it should be"


def code_of(error: BaseException | None) -> str | None:
    """The code of the refusal by S3 that an error came from: the HTTP status if the reply had no body."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            code: str | None = response["Error"].get("Code")
            return code
        error = error.__cause__
    return None


@functools.lru_cache(maxsize=4096)
def checked(name: str) -> str:
    """The name of an object or a folder. Raises ValueError if it breaks the rules of this module's first lines."""
    if not isinstance(name, str):
        raise TypeError(f"the name of an object is a str, not {type(name).__name__}")
    if not NAME.fullmatch(name) or len(name) > _LONGEST_NAME or max(map(len, name.split("/"))) > _LONGEST_PART:
        raise ValueError(f"not the name of an object: {name!r:.300}")
    return name


def unavailable(
    url: str,
    name: str,
    doing: str,
    error: BaseException,
    *,
    transient: bool | None = None,
    shown: Callable[[str], str] = str,
) -> ArchiveUnavailableError:
    """The public error for a target that refused, with `transient` as far as the cause tells it. shown: of the reason
    that the target gave."""
    code = getattr(error, "errno", None)
    if not isinstance(code, int):
        kinds = ((PermissionError, errno.EACCES), (FileNotFoundError, errno.ENOENT))
        code = next((code for kind, code in kinds if isinstance(error, kind)), errno.EIO)
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    made = ArchiveUnavailableError(code, f"{url}: {repr(name) + ' ' if name else ''}can't be {doing}: {shown(reason)}")
    if transient is None:
        named = {kind.__name__ for kind in type(error).__mro__} & _PERMANENT_NAMES
        transient = code not in _PERMANENT and not named and not isinstance(error, ValueError)
        transient = transient or code_of(error) in _PASSING_CODES
    made.transient = transient
    return made


class BadSectorError(ArchiveDamagedError):
    """A disk can't read bytes of an object. They stay lost."""


def too_large(url: str, name: str) -> ArchiveDamagedError:
    """The error for an object that has grown beyond what memory can hold: another place may have it whole."""
    return ArchiveDamagedError(f"{url}: {name!r} is damaged: it does not fit into memory")


def check_range(at: int, count: int | None) -> None:
    if at < 0 or (count is not None and count < 0):
        raise ValueError(f"not a range of bytes: at={at}, count={count}")


class Place(ABC):
    """A folder of objects.

    All methods raise ArchiveUnavailableError if the target can't be reached, is full or refuses, and ValueError for a
    name that breaks the rules. Threads may share a place.

    Attributes
    ----------
    url : str
        The place as messages show it, without credentials.
    near : bool
        Whether reading back is as quick as writing, and nothing else looks after the bytes: on a disk here.
    """

    url: str
    near = False

    @property
    def once(self) -> Place:
        """The same place, whose calls are not tried again."""
        return self

    @abstractmethod
    def put(self, name: str, data: Sequence[Buffer]) -> None:
        """Write an object, or replace it. It is the concatenation of C-contiguous buffers."""

    @abstractmethod
    def create(self, name: str, data: Sequence[Buffer]) -> None:
        """Write a new object. Raises ObjectExistsError if there is one."""

    @abstractmethod
    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        """Read `count` bytes of an object from byte `at` on; None: all that follow.

        Raises MissingObjectError, and ShortObjectError if the object ends before them.
        """

    def read_into(self, name: str, at: int, buffers: Sequence[memoryview]) -> None:
        """Fill writeable buffers, one after the other, from byte `at` of an object on. Raises the errors of `get`."""
        data = memoryview(self.get(name, at, sum(map(len, buffers))))
        for buffer in buffers:
            buffer[:], data = data[: len(buffer)], data[len(buffer) :]

    @abstractmethod
    def size(self, name: str) -> int:
        """The number of bytes of an object. Raises MissingObjectError."""

    @abstractmethod
    def list(self, folder: str) -> list[str]:
        """The sorted names, without the folder, of the objects in a folder ("": the place itself).

        Neither temporary files nor folders are among them. A folder that does not exist is empty.
        """

    def sizes(self, folder: str) -> dict[str, int]:
        """The objects that `list` returns, with the number of bytes of each."""
        found = {}
        for name in self.list(folder):
            with contextlib.suppress(MissingObjectError):  # deleted meanwhile
                found[name] = self.size(f"{folder}/{name}" if folder else name)
        return found

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. A missing one is no error."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"
