"""`export` of a version: as of a store, with a warning about approximations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pmstore._interchange.exporting import export as _export
from pmstore.archive._format import tell_losses
from pmstore.archive._versions import Version

__all__ = ["export"]


def export(
    mapping: Mapping[str, Any],
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    names: Iterable[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> int:
    """Write a version, a store or a group in another format: see `pmstore.export`, with the same arguments and errors.

    An ArchiveWarning tells of arrays of a version that a lossy codec has approximated. Raises UnknownVersionError, too,
    if a drain removes the version meanwhile.
    """
    if isinstance(mapping, str | bytes | os.PathLike):
        raise TypeError(f"export() takes a version, not {mapping!r:.80}: archive.open(url)[version] is one")
    if hasattr(mapping, "latest"):  # an Archive, which is above this module
        raise TypeError("export() takes a version, not an archive: archive[archive.latest] is the newest one")
    count = _export(mapping, path, format, names=names, progress=progress)
    version = getattr(mapping, "store", mapping)  # of a group, too
    if isinstance(version, Version):
        tell_losses(os.path.abspath(os.fspath(path)), version.version, version.losses.values(), 2)
    return count
