"""The contents of a file of another format: names, described without reading the contents."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

from pmstore._catalog.attributes import check_attribute_name
from pmstore._errors import Error, InterchangeError, InvalidNameError, OutOfMemoryError
from pmstore._interchange.forms import Hints, MaxShape

__all__ = ["Found", "Stored", "Unsupported", "damage", "require"]

Pieces = Iterator[np.ndarray[Any, Any]]


class Unsupported(TypeError):
    """A sound file has a type that a store lacks. Other TypeErrors come from damaged files."""


class Stored(NamedTuple):
    """An array in a file. pieces: all elements, in `order`, in contiguous arrays. maxshape: of an array that grows."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: str
    pieces: Callable[[], Pieces]
    maxshape: MaxShape = None


@dataclass
class Found:
    """values, attributes: readable forms, which `hints` make exact. left_out: names, and what a store has no place for
    there. refused: names and groups that can't be imported, with the error of each."""

    arrays: list[Stored] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    hints: Hints = field(default_factory=lambda: Hints.read(None))
    left_out: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, Exception] = field(default_factory=dict)

    @contextlib.contextmanager
    def member(self, path: str | os.PathLike[str], name: str) -> Iterator[None]:
        """Keep an error of one name in `refused`: the other names can be imported without it."""
        try:
            with damage(path, name):
                yield
        except (Error, Unsupported) as error:
            self.refused[name] = error

    def describe(self, name: str, attributes: dict[str, Any]) -> None:
        """Take the attributes of a name; "": of the file. Those whose names no store takes are left out."""
        taken = self.attributes[name] = {}
        for key, value in attributes.items():
            try:
                check_attribute_name(key)
                taken[key] = value
            except InvalidNameError as error:
                self.left_out.append((name, f"an attribute of {repr(name) if name else 'the file'}: {error}"))


@contextlib.contextmanager
def damage(path: str | os.PathLike[str], what: str = "") -> Iterator[None]:
    """Anything that a damaged or hostile file provokes is an InterchangeError."""
    try:
        yield
    except (Error, Unsupported, ImportError):
        raise
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        _raise_named(error, path)
    except MemoryError as error:
        raise OutOfMemoryError(f"no memory for {what or os.fspath(path)!r}") from error
    except TimeoutError:  # of a signal handler
        raise
    except Exception as error:  # zipfile, h5py, zarr and its codecs have many kinds
        if isinstance(error, FileNotFoundError) and not os.path.exists(path):
            _raise_named(error, path)
        where = f"{os.fspath(path)!r}{f', {what!r}' if what else ''}"
        raise InterchangeError(f"{where} can't be read: {str(error) or type(error).__name__}") from error


def _raise_named(error: OSError, path: str | os.PathLike[str]) -> NoReturn:
    """Raise an error of the system that has the name of the file. h5py gives HDF5's text, and no name."""
    if error.filename is None and error.errno is not None:
        raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error
    raise error


def require(condition: object, text: str) -> None:
    """Raise ValueError unless what a file says is so."""
    if not condition:
        raise ValueError(text)
