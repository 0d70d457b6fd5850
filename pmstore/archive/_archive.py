"""`pmstore.archive.open`: the versions of a store, to look into, to restore and to fork."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pmstore._catalog.names import LINEAGE_KEY
from pmstore._core import Entry
from pmstore._errors import (
    ArchiveConflictError,
    ArchiveDamagedError,
    ArchiveError,
    ArchiveUnavailableError,
    ArchiveWarning,
    UnknownNameError,
    UnknownVersionError,
)
from pmstore._store.lineage import entry_of
from pmstore._store.new_store import Progress, refuse_taken, written_anew
from pmstore._store.opening import path_of
from pmstore.archive._begin import places_of
from pmstore.archive._differences import Difference, difference
from pmstore.archive._format import TAG, Loss, Piece, Row, tell_losses, wrapped
from pmstore.archive._objects import MissingObjectError, ObjectExistsError, Place
from pmstore.archive._retention import Keep, outside
from pmstore.archive._sources import Sources
from pmstore.archive._target import (
    Target,
    about_of,
    refuse_others,
    refuse_undescribed,
    require_same,
    tag_of,
    tags_of,
    untag,
)
from pmstore.archive._verifying import VerifyReport, verify
from pmstore.archive._versions import Entries, Library, Version

__all__ = ["Archive", "Info", "open", "restore"]

_ENTRIES = 1 << 16  # of versions, that are kept in memory, about
_ATTEMPTS = 20  # to restore a version that is not removed meanwhile
_RESTORED = "", "the archive", "a version is restored to a new file"
_TAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")

T = TypeVar("T")


class Info(NamedTuple):
    """A version, as a list of an archive shows it.

    Attributes
    ----------
    version : int
        The sequence number of the commit.
    time : float
        When it was archived, in seconds since the epoch.
    kind : str
        "base": it needs no other version; "differential": it has what has changed since the version before.
    size : int
        Bytes that were written for it.
    raw : int
        Bytes of all its contents.
    message, attributes : str or None, dict
        Of the commit: see `Store.transaction`.
    tags : tuple of str
    lossy : int
        The number of arrays that are approximations of a lossy codec; `Version.losses` has the error of each.
    loss : Loss or None
        The worst of them.
    """

    version: int
    time: float
    kind: str
    size: int
    raw: int
    message: str | None
    attributes: dict[str, Any]
    tags: tuple[str, ...]
    lossy: int = 0
    loss: Loss | None = None


class Archive(Mapping[int, Version]):
    """The versions of a store, made by `open`: a mapping from version numbers, which are sequence numbers of commits,
    to `Version`.

    It has the versions that existed when it was opened; `refresh` adds newer ones. Only one thread at a time may use
    it.
    """

    def __init__(self, sources: Sources, options: Mapping[str, Any] | None = None, forks: tuple[str, ...] = ()) -> None:
        """Only `open` calls this. options: for fsspec; forks: URLs of archives that this one is the past of."""
        self._sources = sources
        self._options, self._forks = dict(options or {}), forks
        self._about = about_of(sources)
        self._library = Library(sources)
        self._indexes = sources.index([])
        refuse_others(sources, self._about, self._indexes)
        self._index = self._sources.merged(self._indexes)
        self._read_tags(stacklevel=5)
        self._own_parent: Archive | None = None
        self._told = ""  # why the parent can't be read
        self._known: OrderedDict[Piece, Entries] = OrderedDict()  # entries of versions, by their directories

    @property
    def url(self) -> str:
        """Its first place."""
        return self._sources.url

    @property
    def parent(self) -> tuple[str, int] | None:
        """URL and version of the archive that its store was forked from; None for any other."""
        found = self._about.get("parent")
        return None if found is None else (found[0], found[1])

    @property
    def tags(self) -> dict[str, int]:
        """Its tags: names and versions."""
        return dict(self._tags)

    def __repr__(self) -> str:
        kept = self._index.kept()
        shown = f"{len(kept)} version{'s' * (len(kept) != 1)}" + (f", the newest {kept[-1]}" if kept else "")
        return f"<Archive {self.url}, {shown}>"

    def refresh(self) -> int:
        """Show versions that were added since. Returns the newest, or -1 if there is none.

        Raises ArchiveError if the archive is gone, ArchiveConflictError if another one is in its place.
        """
        indexes = self._sources.index(self._indexes)
        require_same(self._sources, self._about, indexes)
        self._indexes = indexes
        self._index = self._sources.merged(self._indexes)
        self._read_tags(stacklevel=3)
        self._known.clear()  # another place may have a version in another way
        return self.latest

    # ---- versions

    @property
    def latest(self) -> int:
        """The newest version; -1 if there is none."""
        return self.versions()[-1] if len(self) else -1

    def versions(self) -> list[int]:
        """The numbers of all versions, in order: those of the parent up to the fork, then its own."""
        archive, last = self._past()
        return ([v for v in archive.versions() if v <= last] if archive is not None else []) + self._index.kept()

    def __len__(self) -> int:
        return len(self.versions())

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self) >> 4

    def __iter__(self) -> Iterator[int]:
        return iter(self.versions())

    def __contains__(self, version: object) -> bool:
        return isinstance(version, (int, np.integer)) and not isinstance(version, bool) and version in self.versions()

    def __getitem__(self, version: int) -> Version:
        """A version as a mapping from names to values. Raises UnknownVersionError, which is a KeyError;
        ArchiveDamagedError."""
        archive, row = self._find(version)
        with archive._reading(row.version):
            return archive._opened(row)

    def log(self) -> list[Info]:
        """A list of all versions, from the index alone: no version is read."""
        tagged: dict[int, list[str]] = {}
        for name, version in sorted(self._tags.items()):
            tagged.setdefault(version, []).append(name)
        own = [
            Info(
                version=row.version,
                time=row.time,
                kind="base" if row.previous is None else "differential",
                size=row.stored,
                raw=row.raw,
                message=note.message,
                attributes=note.attributes,
                tags=tuple(tagged.get(row.version, ())),
                lossy=row.lossy,
                loss=row.loss,
            )
            for row, note in ((row, row.noted) for row in self._index.rows() if row.kept)
        ]
        archive, last = self._past()
        return ([one for one in archive.log() if one.version <= last] if archive is not None else []) + own

    def _past(self) -> tuple[Archive | None, int]:
        """The archive that a fork's archive shares its past with, and the last version that only that one has."""
        if self.parent is None:
            return None, -1
        url, last = self.parent
        if self._own_parent is None:
            try:
                self._own_parent = self._opened_parent(url)
            except (ArchiveError, ImportError, ValueError) as error:
                text = (
                    f"{self.url} was forked from {url}, which can't be read: {error}; the past before is not shown "
                    "(options of open() are those of that place, too)"
                )
                if text != self._told:
                    self._told = text
                    warnings.warn(text, ArchiveWarning, stacklevel=4)
                return None, -1
        row = self._index.find(last)  # of a drain that began before the fork's first commit
        return self._own_parent, last if row is None or not row.kept else last - 1

    def _opened_parent(self, url: str) -> Archive:
        if url == self.url or url in self._forks:
            raise ArchiveDamagedError(f"{url} can't be its own past")
        options = self._options if "://" in url else {}
        return _opened(url, options, (*self._forks, self.url))

    def _find(self, version: int) -> tuple[Archive, Row]:
        """A version, and the archive that has it: this one, or its parent."""
        version = _number(version)
        row = self._index.find(version)
        if row is not None and row.kept:
            return self, row
        archive, last = self._past()
        if archive is not None and version <= last:
            return archive._find(version)
        newest = self.latest
        text = f"version {version}; the newest is {newest}" if newest >= 0 else "version yet"
        raise UnknownVersionError(f"{self.url} has no {text}")

    def _entries(self, row: Row) -> Entries:
        found = self._known.get(row.directory)
        if found is None:
            chain = self._index.chain(row, self._known)
            before = None if chain[0].previous is None else self._known[self._index.before(chain[0]).directory]
            found = self._known[row.directory] = self._library.entries(chain, before)
            while len(self._known) > 1 and (len(self._known) - 1) * len(found) > _ENTRIES:
                self._known.popitem(last=False)
        return found

    def _opened(self, row: Row) -> Version:
        return Version(self._library, row, self._entries(row), functools.partial(self._reading, row.version))

    def diff(self, old: int, new: int) -> dict[str, Difference]:
        """Which names differ between two versions, and which elements of their arrays.

        Parameters
        ----------
        old, new : int
            Versions.

        Returns
        -------
        dict of str to Difference
            By name, in order. Contents are read only where the versions may differ.

        Raises UnknownVersionError, also if a drain removes a version meanwhile; ArchiveDamagedError.
        """
        return difference(self[old], self[new])

    # ---- tags

    def _read_tags(self, stacklevel: int) -> None:
        """A damaged tag hides no version: an ArchiveWarning tells of it."""
        self._damaged_tags: set[str] = set()
        self._tags = tags_of(self._sources, self._damaged_tags)
        for name in sorted(self._damaged_tags):
            text = f"{self.url}: the tag {name!r} is damaged, so that its version is not known: take it away with untag"
            warnings.warn(text, ArchiveWarning, stacklevel=stacklevel)

    def tag(self, name: str, version: int | None = None) -> None:
        """Name a version, by default the newest. A tagged version stays, even if a drain would remove it.

        Raises ValueError for a name that isn't letters, digits and ``._-``, ArchiveConflictError if the name is taken
        by another version, ArchiveDamagedError if the tag of this name is damaged (`untag` removes it),
        UnknownVersionError. After these errors, no place has a new tag. After ArchiveUnavailableError some places may
        have it: call it again.
        """
        if not isinstance(name, str) or not _TAG.fullmatch(name):
            raise ValueError(f"a tag has letters, digits and ._-, at most 100, and no dot in front, not {name!r:.120}")
        self.refresh()
        archive, row = self._find(self.latest if version is None else version)
        if archive is not self:
            raise ArchiveError(f"version {row.version} is in {archive.url}: tag it there")
        if self._tags.get(name, row.version) != row.version:
            raise _taken(self.url, name)
        created: list[Place] = []
        try:
            for _ in range(2):  # a drain may bring the version to a further place meanwhile
                for place, index in zip(self._sources.places, self._indexes):
                    if place in created or not (index is None or index.keeps(row.version)):
                        continue
                    try:
                        place.create(f"tags/{name}", wrapped(TAG, f"tags/{name}", row.version))
                        created.append(place)
                    except ObjectExistsError:
                        if self._tagged(place, name) != row.version:
                            raise _taken(place.url, name) from None
                self.refresh()
        except (ArchiveConflictError, ArchiveDamagedError):
            for place in created:  # without `untag`, which takes the tag away in all places
                place.delete([f"tags/{name}"])
            raise
        try:
            self._find(row.version)
        except UnknownVersionError:  # a drain has removed it meanwhile
            untag(created, name, row.version)  # another process may have made the others
            self._tags.pop(name, None)
            raise

    @staticmethod
    def _tagged(place: Place, name: str) -> int | None:
        """The version that has a tag in a place; None if it was taken away meanwhile."""
        try:
            return tag_of(Sources([place]), name)
        except MissingObjectError:
            return None

    def untag(self, name: str) -> None:
        """Take a tag away, in the places of this archive that have it. Raises KeyError if there is none.

        A drain takes it away in its further places, together with the next version. A tag that is damaged in all
        places of this archive stays in the further ones.
        """
        if name not in self._tags and name not in self._damaged_tags:
            raise UnknownNameError(name, what="tag", where=f"the archive {self.url}")
        untag(self._sources.places, name, self._tags.pop(name, None))
        self._damaged_tags.discard(name)

    # ---- to a store

    def restore(
        self, path: str | bytes | os.PathLike[Any], version: int | None = None, *, progress: Progress | None = None
    ) -> int:
        """Make a store of a version.

        All bytes are checked. If an object is missing or damaged, it is read from the next place. If no place has a
        whole copy, a call with a number raises an error; a call without a number restores the newest older version that
        is whole, with an ArchiveWarning. After a kill or a crash, the path has no file or the whole store. A store of
        the newest version can continue the archive. A store of an older version is a fork (see `fork`). An
        ArchiveWarning reports arrays that are approximations of a lossy codec.

        Parameters
        ----------
        path : str, bytes or os.PathLike
            The new store, which must not exist.
        version : int, optional
            By default the newest.
        progress : callable, optional
            Called repeatedly with the number of restored bytes and the total number.

        Returns
        -------
        int
            The version, which is the store's sequence number.

        Raises StoreExistsError, UnknownVersionError if there is no such version, or a drain removed it meanwhile;
        ArchiveDamagedError, ArchiveUnavailableError, OutOfSpaceError.
        """
        target = path_of(path)
        self.refresh()
        return self._restored_or_older(target, version, progress)

    def _restored_or_older(self, target: str, version: int | None, progress: Progress | None) -> int:
        """See `restore`; version None: the newest one that is whole."""
        if version is not None:
            self._restored(version := _number(version), target, progress, fork=False)
            return version
        if not len(self):
            raise UnknownVersionError(f"{self.url} has no version yet")
        damaged, removed = set[int](), 0  # removed: versions that went while they were read
        while removed < _ATTEMPTS:
            found = next((version for version in reversed(self.versions()) if version not in damaged), None)
            if found is None:
                raise ArchiveDamagedError(f"{self.url} has no version that is whole")
            try:
                self._restored(found, target, progress, fork=False)
            except UnknownVersionError:
                removed += 1
            except ArchiveDamagedError as error:
                damaged.add(found)
                text = f"version {found} is damaged ({error}): an older version is restored"
                warnings.warn(text, ArchiveWarning, stacklevel=3)
            else:
                return found
        raise ArchiveUnavailableError(
            f"versions of {self.url} are removed while they are read: tag one, or let the drain keep more"
        )

    def fork(self, version: int, path: str | bytes | os.PathLike[Any], *, progress: Progress | None = None) -> int:
        """Make a store that continues from a version with an archive of its own.

        The drain of the new store needs another place. The new archive also lists the versions of this archive up to
        the fork. In the archive that has the version, it gets a tag, ``fork-`` and its number, so that it stays.
        The tag stays if the store can't be made, as another fork may rely on it: `untag` takes it away. Parameters,
        return value and errors are those of `restore`.
        """
        version, target = _number(version), path_of(path)
        refuse_taken(target, *_RESTORED)
        self.refresh()
        self._find(version)[0].tag(f"fork-{version}", version)
        self._restored(version, target, progress, fork=True)
        return version

    def _restored(self, version: int, path: str, progress: Progress | None, *, fork: bool) -> None:
        """fork: the store has an archive of its own, even if it could continue this one."""
        archive, row = self._find(version)
        lineage, parent = self._about["lineage"], self.parent
        # A fork whose drain was killed may have no version of its own yet. It goes on from the one that it left.
        is_own = archive is self or (parent is not None and version == parent[1])
        if fork or not is_own or version != self.latest:
            lineage, parent = None, (archive.url, version)
        with archive._reading(version):
            archive._restore(row, path, progress, lineage, parent)

    @contextlib.contextmanager
    def _reading(self, version: int) -> Iterator[None]:
        """Around what reads a version. Raises UnknownVersionError if it is damaged because a drain has removed it."""
        try:
            yield
        except ArchiveDamagedError as error:
            self.refresh()
            row = self._index.find(version)
            if row is not None and row.kept:
                raise
            raise UnknownVersionError(f"version {version} of {self.url} was removed meanwhile") from error

    def _restore(
        self, row: Row, path: str, progress: Progress | None, lineage: str | None, parent: tuple[str, int] | None
    ) -> None:
        refuse_taken(path, *_RESTORED)
        entries = self._entries(row)
        total, done = sum(item.length for item in entries.values()), 0
        with written_anew(path, room=entries.room, sequence=row.version) as new:
            for key, item in entries.items():
                if key == LINEAGE_KEY:
                    continue
                place = Entry(8 if item.length else 0, item.length, item.kind, item.flags, item.meta)
                new.put(key, place, self._library.pieces(item))
                done += item.length
                if progress is not None:
                    progress(done, total)
            new.put(LINEAGE_KEY, entry_of(lineage, parent))
        tell_losses(path, row.version, [item.loss for item in entries.values() if item.loss], 3)

    # ---- care

    def is_whole(self, version: int, *, verify: bool = False) -> bool:
        """Whether all parts of a version are there; verify: and all its bytes match their hashes.

        Raises UnknownVersionError.
        """
        archive, row = self._find(version)
        return archive._is_whole(row, verify)

    def _is_whole(self, row: Row, verify: bool) -> bool:
        try:
            chain = self._index.chain(row)
            if verify:
                for item in self._library.entries(chain).values():
                    for _ in self._library.pieces(item):
                        pass
            for part in {part for one in chain for part in one.parts}:
                self._sources.size(part)
        except (ArchiveDamagedError, MissingObjectError):
            return False
        return True

    def verify(self, *, progress: Callable[[int, int], object] | None = None) -> VerifyReport:
        """Read and check every object of the archive, in each of its places.

        Returns
        -------
        VerifyReport
            A sequence of all problems, with the place and the versions concerned; its `ok` is true if there are none.
        """
        return verify(self._sources, progress)

    def forget(self, versions: Iterable[int] = (), *, keep: Any = None) -> list[int]:
        """Remove versions in all places. A version that others need is no longer listed, and is deleted when they are.

        No process should drain to the archive at the same time: its drain would end with an ArchiveConflictError.

        Parameters
        ----------
        versions : iterable of int
            Versions to remove. The newest and tagged ones can't be removed.
        keep
            Remove all that it does not keep: see `Store.drain`.

        Returns
        -------
        list of int
            The versions that are gone. A place that lags behind keeps its newest version and those that it has tagged.
        """
        if not isinstance(versions, Iterable):
            raise TypeError(f"forget() takes a list of versions, such as [1], not {versions!r:.80}")
        self.refresh()
        if self._damaged_tags:
            names = ", ".join(sorted(self._damaged_tags))
            raise ArchiveError(f"no version can go, as damaged tags may name it: take them away with untag: {names}")
        going = set(map(_number, versions))
        for version in going:
            archive, _ = self._find(version)
            if archive is not self:
                raise ArchiveError(f"version {version} is in {archive.url}: forget it there")
        stay = {*self._tags.values(), *self._index.kept()[-1:]}
        if going & stay:
            raise ArchiveError(f"the newest version and tagged ones stay: {', '.join(map(str, sorted(going & stay)))}")
        going |= outside(self._index, Keep.of(keep), time.time()) - stay
        if going:
            targets = [Target(place, dict(self._about)) for place in self._sources.places]
            for target in targets:
                target.begin()
                target.forget(going)
        self.refresh()
        return sorted(going.difference(self._index.kept()))


def _number(version: Any) -> int:
    """The number of a version. Raises TypeError."""
    if not isinstance(version, (int, np.integer)) or isinstance(version, bool):
        raise TypeError(f"a version is a number, not {type(version).__name__}")
    return int(version)


def _taken(url: str, name: str) -> ArchiveConflictError:
    return ArchiveConflictError(f"{url} has the tag {name!r} for another version: use another name, or untag it first")


def open(url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], **storage_options: Any) -> Archive:
    """Open an archive, to look into its versions and to restore them.

    Parameters
    ----------
    url : str or path-like, or a sequence of these
        The place that `Store.drain` was given, or a list of places of the same archive: each object is read from the
        first one whose copy is whole. An ArchiveWarning tells of a place that has no archive.
    **storage_options
        For fsspec, such as ``key`` and ``secret``; or all of them in a dict, as ``storage_options={…}``.

    Raises
    ------
    ArchiveError
        There is no archive.
    ArchiveConflictError
        The places have archives of different stores.
    ArchiveDamagedError, ArchiveUnavailableError, FormatVersionError
    """
    return _opened(url, {**(storage_options.pop("storage_options", None) or {}), **storage_options}, ())


def _opened(url: Any, options: Mapping[str, Any], forks: tuple[str, ...]) -> Archive:
    sources = Sources(places_of(url, options))
    try:
        return Archive(sources, options, forks)
    except MissingObjectError:
        refuse_undescribed(sources)
        raise ArchiveError(f"there is no archive at {sources.url}: Store.drain begins one") from None


def restore(
    path: str | bytes | os.PathLike[Any],
    version: int | None = None,
    *,
    sources: Sequence[str | os.PathLike[str]],
    progress: Progress | None = None,
    **storage_options: Any,
) -> int:
    """Restore a version of the archive in these places to a new store. `path`, `version`, `progress` and the returned
    value are those of `Archive.restore`. Raises its errors, and those of `open`.

    Parameters
    ----------
    sources : sequence of str or path-like
        The places, in the order in which they are asked. Places that can't be reached are left out.
    **storage_options
        As for `open`.
    """
    return open(sources, **storage_options)._restored_or_older(path_of(path), version, progress)
