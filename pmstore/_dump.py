"""``pmstore dump``: values, as text or as JSON, or one array for numpy.load."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

import numpy as np

import pmstore
from pmstore._display import full_text, name_text
from pmstore._errors import UNSOUND, DecodeError, StoreExistsError
from pmstore._store.naming import rename
from pmstore._store.reading import consistently, verify
from pmstore._values.as_json import print_json, to_json
from pmstore._values.types import is_text

__all__ = ["dump"]

Failure = Callable[[str], Exception]


class Found(NamedTuple):
    """The names that were asked for, as one commit has them.

    names: those to print. derived: by name, what a derived array is. damaged: by name, the damage, or why it can't be
    decoded here. kept: by name, the values that can't be read a second time, because another process writes the store.
    """

    names: Sequence[str]
    derived: dict[str, str]
    damaged: dict[str, str]
    kept: dict[str, Any]

    def value(self, store: pmstore.Store, name: str) -> Any:
        """A value that is not damaged."""
        return self.kept[name] if name in self.kept else _value(store, name)


def dump(chosen: argparse.Namespace, failure: Failure, complain: Callable[[str], object]) -> bool:
    """Print values, or write one array to an .npy file. False: something in what is to be printed is damaged.

    failure: makes an exception that the user sees in one line. complain: prints such a line.
    """
    with pmstore.open(chosen.path, "r") as store:
        found = consistently(lambda: _found(store, chosen.names, failure), store.refresh)
        for text in found.damaged.values():
            complain(f"{chosen.path}: {text}")
        if found.damaged and (chosen.names or chosen.json):
            return False
        sound = [name for name in found.names if name not in found.damaged]
        if chosen.npy is not None:
            array = found.value(store, sound[0]) if len(found.names) == len(sound) == 1 else None
            if not isinstance(array, np.ndarray):
                raise failure("--npy takes the name of one array")
            if is_text(array.dtype):
                raise failure(f"{sound[0]!r} is of StringDType, which an .npy file can't hold: use --json, or export")
            _save(Path(chosen.npy), array)
        elif chosen.json:
            shown = {} if chosen.names else {name: {"derived": text} for name, text in found.derived.items()}
            print_json({name: to_json(found.value(store, name)) for name in sound} | shown)
        else:
            for name in sound:
                _print_value(name, found.value(store, name), alone=len(found.names) == 1)
            for name, text in found.derived.items() if not chosen.names else ():
                print(f"{name_text(name)}: {text}")
    return not found.damaged


def _found(store: pmstore.Store, asked: Sequence[str], failure: Failure) -> Found:
    """Reads, and so verifies, the values."""
    rows = {row[0]: row for row in store._rows()}
    derived = {name: row[5] for name, row in rows.items() if row[1] == "derived"}
    found = Found(asked or [name for name in rows if name not in derived], derived, {}, {})
    beside = store.written
    for name in found.names:
        if name not in rows:
            raise failure(_what_is_missing(store, name))
        if name in derived:
            raise failure(f"{name!r} is {derived[name]}: only a program that declares it can read it")
        try:
            value = _value(store, name)
        except UNSOUND as error:
            found.damaged[name] = f"damaged: {error}"
        except DecodeError as error:  # an element of a list, such as a time of a zone that this machine does not know
            found.damaged[name] = str(error)
        else:
            if beside:
                found.kept[name] = value
    return found


def _what_is_missing(store: pmstore.Store, name: str) -> str:
    group = name.strip("/")
    if group and any(True for _ in store.group(group)):
        return f"{group!r} is a group: give the names of what is in it, which ls prints"
    return f"no name {name!r} in it"


def _value(store: pmstore.Store, name: str) -> Any:
    """A value; of a registered type, its parts, because it is the program's own."""
    parts = store._catalog.parts(name)
    value = store[name] if parts is None else parts
    verify(store._catalog, name)
    return list(value) if isinstance(value, pmstore.PersistentList) else value


def _save(file: Path, array: Any) -> None:
    """Write an array for numpy.load to a new file, completely or not at all: under a temporary name, then renamed.

    A device or a pipe is written directly. A link to a file that does not exist is followed.
    """
    target = Path(os.path.realpath(file))
    special = target.exists() and not target.is_file() and not target.is_dir()
    try:
        if special:
            with target.open("wb") as out:
                _write(out, array)
            return
        if os.path.lexists(target):
            raise FileExistsError
        temporary = target.with_name(f".{secrets.token_hex(8)}.npy")
        try:
            with temporary.open("xb") as out:
                _write(out, array)
            rename(str(temporary), str(target), replace=False)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
    except FileExistsError:
        raise StoreExistsError(errno.EEXIST, f"{str(file)!r} exists: --npy writes a new file", str(file)) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), os.fspath(file)) from error


def _write(out: BinaryIO, array: Any) -> None:
    """Write an array. numpy writes one into a real file by a function whose error does not tell of a full disk."""
    np.save(SimpleNamespace(write=out.write), array, allow_pickle=False)


def _print_value(name: str, value: Any, *, alone: bool) -> None:
    text = full_text(value, str if isinstance(value, np.ndarray) else repr)
    if alone:
        print(text)
    elif "\n" in text:
        print(f"{name_text(name)} =\n{text}")
    else:
        print(f"{name_text(name)} = {text}")
