"""Failures that are kept: a directory with the crash image, the program's output, and the file that replays it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import NamedTuple

import msgpack

from pmstore.testing._base import session
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._files.evaluator import write_image
from pmstore.testing._files.explore import Found, Options, State
from pmstore.testing._files.model import Model
from pmstore.testing._files.recording import MAGIC, Recording, load, save

__all__ = ["Kept", "is_files_replay", "keep", "load_kept", "require_free"]

REPLAY = "replay"
PARTS = ("image", "said", REPLAY)
MOST_NAME = 80


class Kept(NamedTuple):
    """A failure that was kept."""

    model: Model
    found: Found
    check: str
    """The command, or empty if it was a function."""
    place: list[str]
    """The place of a function: module, name and file. Empty if it can't be imported."""


def keep(
    model: Model, found: Found, options: Options, target: Path | None, check: str = "", place: list[str] | None = None
) -> Path:
    """Writes a failure, completely or not at all, and returns its directory. Raises OSError if it can't be written."""
    state = found.state
    if target is None:
        parent = session.directory()
        parent.mkdir(parents=True, exist_ok=True)
        if not (parent / ".gitignore").exists():
            (parent / ".gitignore").write_text("# made by pmstore.testing\n*\n")
        target = parent / f"{_name(model.recording)}-{_digest(found)}"
    target.parent.mkdir(parents=True, exist_ok=True)
    new = _aside(target)
    try:
        new.mkdir()
        _write(model, state, new)
        more = {
            "state": [state.point, sorted(state.lost), state.kind],
            "options": list(options),
            "text": found.text,
            "check": check,
            "place": place or [],
        }
        save(new / REPLAY, model.recording, **more)
        _put(new, target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return target


def require_free(target: Path) -> None:
    """Raises CrashTestError if the path has contents that are not a failure of this module, and would be
    overwritten."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise CrashTestError(f"--keep: {target} is there, and no directory: a failure is kept in one of its own")
    if any(target.iterdir()) and not is_files_replay(target):
        raise CrashTestError(
            f"--keep: {target} holds something else than a failure that was kept: name a directory that is "
            "not there yet"
        )


def is_files_replay(path: Path) -> bool:
    """Whether this is a failure that `keep` wrote: its directory, or the file in it."""
    try:
        with (path / REPLAY if path.is_dir() else path).open("rb") as file:
            return MAGIC.encode() in file.read(64)
    except OSError:
        return False


def load_kept(path: Path) -> Kept:
    """Reads a failure of `keep`, and writes its image to its place again. `path`: the directory, or the file in it."""
    path = path / REPLAY if path.is_dir() else path
    recording, more = load(path)
    try:
        point, lost, kind = more["state"]
        options = Options(*more["options"]).verified()
        found = Found(State(point, frozenset(lost), kind), more["text"])
        kept = Kept(Model(recording, *options[:3]), found, more["check"], more.get("place", []))
    except (KeyError, TypeError, ValueError) as error:
        raise CrashTestError(f"{path} holds no failure to replay: {error!r}") from None
    if point >= kept.model.points or any(n >= len(kept.model.pieces) for n in lost):
        raise CrashTestError(f"{path} is damaged: its crash is not one of its recording")
    # Elsewhere, a directory "image" beside the file may be the user's. If nothing can be written, the replay works
    # without it.
    if path.name == REPLAY and (path.parent / "said").is_file():
        with contextlib.suppress(OSError):
            shutil.rmtree(path.parent / "image", ignore_errors=True)
            _write(kept.model, found.state, path.parent)
    return kept


def _write(model: Model, state: State, folder: Path) -> None:
    (folder / "image").mkdir()
    write_image(model.image(state.point, state.lost), folder / "image")
    (folder / "said").write_bytes(model.said(state.point))


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}")


def _put(new: Path, target: Path) -> None:
    """Renames a finished directory to its name, over an older one of the same failure."""
    for _ in range(10):
        try:
            os.rename(new, target)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        require_free(target)
        if _others(target):  # files of the user beside ours
            for part in PARTS:
                old = _aside(target)
                with contextlib.suppress(FileNotFoundError):
                    os.rename(target / part, old)
                os.rename(new / part, target / part)
                _remove(old)
            return
        old = _aside(target)
        with contextlib.suppress(FileNotFoundError):  # another worker was faster
            os.rename(target, old)
        _remove(old)


def _others(target: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return any(entry.name not in PARTS for entry in target.iterdir())
    return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _digest(found: Found) -> str:
    return hashlib.blake2b(
        msgpack.packb([sorted(found.state.lost), found.state.point, found.text], unicode_errors="surrogateescape"),
        digest_size=4,
    ).hexdigest()


def _name(recording: Recording) -> str:
    """The running test, or else the program, as a file name."""
    test = session.test_id()
    if test is not None:
        return session.test_name(test)
    words = recording.command
    script = next((word for word in words[1:] if os.path.isfile(word)), words[0])
    return re.sub(r"[^\w.]+", "-", Path(script).stem).strip("-.")[:MOST_NAME] or "files"
