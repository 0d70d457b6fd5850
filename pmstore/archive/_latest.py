"""`latest_common`: where a group of processes can go on together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from pmstore._errors import ArchiveDamagedError
from pmstore.archive._aggregated import whole
from pmstore.archive._archive import Archive
from pmstore.archive._archive import open as open_archive
from pmstore.archive._begin import places_of, urls_of
from pmstore.archive._manifest import sequences
from pmstore.archive._objects import MissingObjectError, Place

__all__ = ["latest_common"]


def latest_common(
    urls: Iterable[str | os.PathLike[str]],
    *,
    verify: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> int | None:
    """The newest version of which each of several targets has a whole copy. A group of processes can continue from it.

    Parameters
    ----------
    urls : iterable of str or path
        The archives of drained stores, such as one for each process, or the targets of aggregates: one for each
        machine or process, or one for all.
    verify : bool, default=False
        A version is whole if all its parts are there, those of aggregates with their sizes. True: all bytes are read,
        and compared with their hashes.
    storage_options : mapping, optional
        For fsspec, for those that are no folders.

    Returns
    -------
    int or None
        None: they have no version in common.

    Raises
    ------
    ArchiveUnavailableError
        A target can't be reached.
    ValueError
        There are no urls.
    """
    found = [
        _Drained(url, storage_options) if _is_drained(place) else _Aggregated(place)
        for url in urls_of(urls)
        for place in places_of(url, storage_options)
    ]
    if not found:
        raise ValueError("there are no urls")
    common = set(found[0].versions()).intersection(*(one.versions() for one in found[1:]))
    for version in sorted(common, reverse=True):
        if all(one.whole(version, verify) for one in found):
            return version
    return None


def _is_drained(place: Place) -> bool:
    try:
        return place.size("archive") >= 0
    except MissingObjectError:
        return False


class _Aggregated:
    """A target of aggregates."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def versions(self) -> list[int]:
        return sequences(self._place)

    def whole(self, version: int, verify: bool) -> bool:
        return whole(self._place, version, verify) is not None


class _Drained:
    """The archive of a store."""

    def __init__(self, url: Any, storage_options: Mapping[str, Any] | None) -> None:
        self._archive: Archive = open_archive(url, **(storage_options or {}))

    def versions(self) -> list[int]:
        return self._archive.versions()

    def whole(self, version: int, verify: bool) -> bool:
        try:
            return self._archive.is_whole(version, verify=verify)
        except (ArchiveDamagedError, MissingObjectError):
            return False
