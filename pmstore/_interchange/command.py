"""``pmstore export`` and ``pmstore import``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator

from pmstore._display import count_text, lines_text, name_text, size_text
from pmstore._errors import Error, StaleSnapshotError, StoreExistsError
from pmstore._interchange.exporting import export
from pmstore._interchange.importing import load_into, source_of
from pmstore._interchange.source import Progress
from pmstore._interchange.target import scratch
from pmstore._store.entrance import open as open_store
from pmstore._store.store import Store
from pmstore._values.as_json import print_json

__all__ = ["export_", "import_"]

Failure = Callable[[str], Exception]


@contextlib.contextmanager
def _progress(chosen: argparse.Namespace, what: str) -> Iterator[Progress | None]:
    """Shows the progress on a terminal: a bar of rich if it is there, otherwise a line. Both are gone at the end."""
    if chosen.json or not sys.stderr.isatty():
        yield None
        return
    try:
        console, bars = importlib.import_module("rich.console"), importlib.import_module("rich.progress")
    except ImportError:

        def tell(done: int, total: int) -> None:
            print(f"\r\033[K{what}: {size_text(done)} of {size_text(total)}", end="", file=sys.stderr, flush=True)

        try:
            yield tell
        finally:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console.Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=None, start=True)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def export_(chosen: argparse.Namespace, failure: Failure) -> int:
    """Writes the names of one commit in another format, and prints how many. failure: makes errors for the user."""

    def write(path: str, progress: Progress | None) -> int:
        with open_store(path, "r") as store:
            shown = store.group(chosen.group) if chosen.group else store
            if chosen.group and not len(shown):
                raise failure(_missing(store, chosen.group))
            return export(shown, chosen.destination, chosen.format, names=chosen.name, progress=progress)

    with _progress(chosen, chosen.path) as progress, _told(failure), _left_out() as left_out:
        try:
            count = write(chosen.path, progress)
        except StaleSnapshotError:  # commits are quicker: a copy of one changes no more
            directory = os.path.dirname(os.path.abspath(chosen.destination))
            with scratch(directory) as copies:
                with open_store(chosen.path, "r") as store:
                    store.backup(os.path.join(copies, "store.pm"))
                count = write(os.path.join(copies, "store.pm"), progress)
    _tell(chosen, left_out)
    if chosen.json:
        about = {"path": chosen.path, "destination": chosen.destination, "names": count, "left_out": left_out}
        print_json(about)
    else:
        print(f"{name_text(chosen.destination)}: {count_text(count, 'name')} of {name_text(chosen.path)}")
    return 0


def _missing(store: Store, name: str) -> str:
    return f"no group {name!r} in it" if name.strip("/") not in store else f"{name!r} is a value, and no group"


def import_(chosen: argparse.Namespace, failure: Failure) -> int:
    """Reads a file of another format into a store, in one commit, and prints how many names came."""
    names = _renamed(chosen.name, failure) if chosen.name else None
    with _progress(chosen, chosen.path) as progress, _told(failure):
        try:  # before a store is made
            os.lstat(source_of(chosen.path))
        except (FileNotFoundError, NotADirectoryError):
            raise failure("there is no such file") from None
        with _destination(chosen.destination) as store, _left_out() as left_out:
            target = store.group(chosen.group) if chosen.group else store
            count = load_into(target, chosen.path, chosen.format, names=names, progress=progress)
    _tell(chosen, left_out)
    if chosen.json:
        about = {"path": chosen.path, "destination": chosen.destination, "names": count, "left_out": left_out}
        print_json(about)
    else:
        where = name_text(chosen.destination)
        if chosen.group:
            where = f"group {chosen.group!r} of {where}"
        print(f"{where}: {count_text(count, 'name')} of {name_text(chosen.path)}")
    return 0


@contextlib.contextmanager
def _left_out() -> Iterator[list[str]]:
    """The texts of the block's warnings of what is left out. Others, such as a library's own, are passed on."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield told
    for one in caught:
        if text := str(one.message).partition("left out: ")[2]:
            told.append(text)
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _tell(chosen: argparse.Namespace, left_out: list[str]) -> None:
    for text in left_out:
        print(f"pmstore: {lines_text(f'{chosen.path}: left out: {text}')}", file=sys.stderr)


@contextlib.contextmanager
def _destination(path: str) -> Iterator[Store]:
    """The store that an import goes to. If it is new and the block fails, its file is deleted while it is locked:
    another process can't have it."""
    try:
        store, new = open_store(path, "x"), True
    except StoreExistsError:
        store, new = open_store(path), False
    with store:
        try:
            yield store
        except BaseException:
            if new:  # it is empty
                with contextlib.suppress(OSError):
                    os.unlink(store.path)
            raise


def _renamed(texts: list[str], failure: Failure) -> dict[str, str]:
    """The new name of each name in options."""
    names: dict[str, str] = {}
    for text in texts:
        old, equals, new = text.partition("=")
        if not old or (equals and not new):
            raise failure(f"--name takes NAME or NAME=NEW, not {text!r}")
        new = new or old
        if names.setdefault(old, new) != new:
            raise failure(f"--name gives {old!r} two names, {names[old]!r} and {new!r}")
    return names


@contextlib.contextmanager
def _told(failure: Failure) -> Iterator[None]:
    """Errors that are not the store's own are told in one line, too."""
    try:
        yield
    except Error:
        raise
    except (ImportError, TypeError, ValueError) as error:
        raise failure(str(error)) from error
