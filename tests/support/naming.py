"""File systems whose ways to name a new file the one of the tests does not need."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from pmstore import _core
from pmstore._store import naming

NFS, SMB, FUSE = 0x6969, 0xFE534D42, 0x65735546
WAYS = {  # the type of the file system, the error of renaming, the error of linking
    "renamed": (0, 0, errno.EIO),
    "linked": (NFS, errno.EINVAL, 0),
    "linked, in a sandbox": (0, errno.EPERM, 0),
    "in turn": (FUSE, errno.EINVAL, errno.EIO),
    "in turn, without links": (NFS, errno.EINVAL, errno.EPERM),
}


def pretend(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Give new files their names as on one of the file systems of WAYS."""
    kind, renaming, linking = WAYS[way]
    if renaming:
        answer(monkeypatch, pm_rename_file=renaming, pm_file_system_type=kind)
    if linking:
        monkeypatch.setattr(os, "link", refuse(linking))


def answer(monkeypatch: pytest.MonkeyPatch, **answers: int) -> None:
    """Let functions of the C interface give what they are told."""
    monkeypatch.setattr(naming, "lib", _Answered(answers))


def refuse(code: int) -> Callable[..., None]:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return refused


class _Answered:
    def __init__(self, answers: dict[str, int]) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: self.answers[name]) if name in self.answers else getattr(_core.lib, name)
