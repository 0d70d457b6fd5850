"""A place that a drain writes to: its archive object, its index, its token and its tags.

I24  A row is appended after all parts that it names are durable in the place, and after the rows of the versions that
     it needs. So each version that an index lists can be read.

Tags are copied from place to place, and so is their removal. A tag that is missing in the place before proves nothing:
that place may be new. So `Archive.untag` leaves an object in the place, before it deletes the tag::

    the place before      untagged/5-<token>-best  ▶  delete tags/best
    a further place                                        delete tags/best  ▶  untagged/5-<token>-best

A removal counts once in each place: the further place deletes the tag if it names the same version, and then has the
removal, too. As long as the place before has the tag, its removal does not count: `untag` did not come to its end, or
the version was tagged again.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from pmstore._errors import ArchiveConflictError, ArchiveDamagedError, ArchiveError, ArchiveUnavailableError
from pmstore.archive._copying import Copying
from pmstore.archive._format import ARCHIVE, TAG, UNTAG, Row, is_part, opened, wrapped
from pmstore.archive._index import Index, IndexWriter
from pmstore.archive._manifest import sequences
from pmstore.archive._objects import MissingObjectError, ObjectExistsError, Place
from pmstore.archive._retention import Keep, forget, leaving
from pmstore.archive._sources import Sources
from pmstore.archive._writing import Flush

__all__ = [
    "Target",
    "about_of",
    "refuse_others",
    "refuse_undescribed",
    "removals_of",
    "require_same",
    "tags_of",
    "untag",
]

_REMOVAL = re.compile(r"([0-9]{1,19})-[0-9a-f]{16}-(.+)")

_UNKNOWN = 10**19 - 1  # instead of the version of a damaged tag: no tag names it
_TOGETHER = 1000  # versions that are copied in one step, at most


def about_of(sources: Sources) -> dict[str, Any]:
    """The archive object. id: of this archive, the same in all its places; lineage: of the store whose versions it has;
    parent: url and version that it was forked from, or None.

    Raises MissingObjectError if there is none, ArchiveDamagedError, FormatVersionError.
    """

    def check(data: bytes) -> dict[str, Any]:
        found = opened(ARCHIVE, "archive", data)
        if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in ("id", "lineage")):
            raise ArchiveDamagedError("the archive is damaged: its description")
        parent = found.get("parent")
        if parent is not None and not (
            isinstance(parent, tuple) and len(parent) == 2 and isinstance(parent[0], str) and type(parent[1]) is int
        ):
            raise ArchiveDamagedError("the archive is damaged: where it was forked from")
        return found

    return sources.read("archive", check)


def refuse_undescribed(place: Place | Sources) -> None:
    """Raise ArchiveDamagedError if there are versions without the archive object, which comes first."""
    if place.list("index") or place.list("writers"):
        with contextlib.suppress(MissingObjectError):  # another process has just made it, and a token then
            place.size("archive")
            return
        raise ArchiveDamagedError(
            f"{place.url}: the object 'archive', which tells whose versions are there, is missing: copy it from "
            "another place of the archive, or give the drain a new place"
        ) from None


def refuse_others(sources: Sources, about: Mapping[str, Any], indexes: list[Index | None]) -> None:
    """Raise ArchiveConflictError if a place has the archive of another store. An ArchiveWarning tells of places that
    have none, and of those that are damaged or don't answer. The index of a place that doesn't answer becomes None: it
    may be of another store."""
    first = sources.url  # of those that tell
    for place, found in _lineages(sources, indexes) if len(sources.places) > 1 else ():
        if isinstance(found, MissingObjectError):
            sources.tell(place, "archive", ArchiveError("there is no archive"))
        elif isinstance(found, Exception):
            sources.tell(place, "archive", found)
        elif found != about["lineage"]:
            raise ArchiveConflictError(f"{place.url} is not the archive of the same store as {first}")
        else:
            first = place.url


def require_same(sources: Sources, about: Mapping[str, Any], indexes: list[Index | None]) -> None:
    """Raise ArchiveError if no place that answers has the archive any more, ArchiveConflictError if one has that of
    another store. The indexes have just been read; that of a place that doesn't answer any more becomes None."""
    missing = 0
    for place, found in _lineages(sources, indexes):
        if isinstance(found, MissingObjectError):
            missing += 1
        elif isinstance(found, str) and found != about["lineage"]:  # if it is damaged, another place may have it
            raise ArchiveConflictError(f"{place.url} has the archive of another store by now: open it anew")
    if missing == len(indexes) - indexes.count(None):
        text = f"there is no archive at {sources.url} any more: it was deleted, or its disk isn't mounted"
        raise ArchiveError(text)


def _lineages(sources: Sources, indexes: list[Index | None]) -> Iterator[tuple[Place, str | Exception]]:
    """Each place that has an index, with the lineage of its store, or with the error if it is missing or damaged.

    A place that doesn't answer loses its index. Raises ArchiveUnavailableError if no other has one.
    """
    for number, place in enumerate(sources.places):
        if indexes[number] is None:
            continue
        try:
            found: str | Exception = about_of(Sources([place]))["lineage"]
        except (MissingObjectError, ArchiveDamagedError) as error:
            found = error
        except ArchiveUnavailableError as error:
            indexes[number] = None
            if all(one is None for one in indexes):
                raise
            sources.tell(place, "archive", error)
            continue
        yield place, found


def tag_of(sources: Sources, name: str) -> int:
    """The version that a tag names. Raises MissingObjectError, ArchiveDamagedError."""

    def check(data: bytes) -> int:
        version = opened(TAG, f"tags/{name}", data)
        if type(version) is not int:
            raise ArchiveDamagedError(f"the tag {name} is damaged")
        return version

    return sources.read(f"tags/{name}", check)


def tags_of(sources: Sources, damaged: set[str] | None = None) -> dict[str, int]:
    """The tags of an archive: names and versions. The names of damaged ones are added to a set, if there is one.

    Raises ArchiveDamagedError otherwise.
    """
    found = {}
    for name in sources.list("tags"):
        try:
            found[name] = tag_of(sources, name)
        except MissingObjectError:  # it was taken away meanwhile
            pass
        except ArchiveDamagedError:
            if damaged is None:
                raise
            damaged.add(name)
    return found


def untag(places: Sequence[Place], name: str, version: int | None) -> None:
    """Take the tag of a version away, in each place that has it, so that further places learn of it.

    version: None if it is not known, as the tag is damaged; then no further place takes its own tag away.
    """
    token = secrets.token_hex(8)
    for place in places:
        try:
            found: int | None = tag_of(Sources([place]), name)
        except MissingObjectError:
            continue
        except ArchiveDamagedError:
            found = version
        _put_removal(place, f"{_UNKNOWN if found is None else found}-{token}-{name}")
        place.delete([f"tags/{name}"])


def removals_of(sources: Sources) -> list[str]:
    """The removals of tags in a place, as names of objects. Raises ArchiveDamagedError."""

    def check(data: bytes) -> None:
        opened(UNTAG, f"untagged/{name}", data)

    names = sources.list("untagged")
    for name in names:
        sources.read(f"untagged/{name}", check)
    return names


def _listed(versions: Collection[int]) -> str:
    first, last = min(versions), max(versions)
    if first == last:
        return f"version {first}"
    return f"{'some of ' if len(versions) <= last - first else ''}versions {first} to {last}"


def _put_removal(place: Place, removal: str) -> None:
    place.put(f"untagged/{removal}", wrapped(UNTAG, f"untagged/{removal}", None))


class Target:
    """An archive in one place, to be written from `begin` on. Only one thread uses it; others may read `index`."""

    def __init__(self, place: Place, new: dict[str, Any]) -> None:
        """Looks at the place, and writes nothing. new: the archive object, if there is none yet.

        Raises ArchiveConflictError if the place has the archive of another store, or aggregates; ArchiveDamagedError.
        """
        self.place = place
        self.writer = secrets.token_hex(8)  # a number would come twice: places go on without each other
        self._new = new
        self._look()
        self._writer = IndexWriter(place)
        self._copying: Copying | None = None  # of parts from the place before
        self._lost: dict[int, str] = {}  # versions there that can't be copied, and the damage
        self.lost: tuple[int, ArchiveDamagedError] | None = None  # the newest version there, if it is one of them
        self._tags: set[str] = set()  # names of tags that need not be copied any more
        self._tagged: dict[str, int] = {}  # tags and their versions, when versions were removed last,
        self._removals_here: list[str] = []  # and the removals of tags then
        self._removals: set[str] = set()  # of tags, that count here no more
        self._waiting: set[int] = set()  # versions whose tags can't be copied, as the place keeps older ones
        self._swept = False
        self._put: set[str] = set()  # parts of this drain that no row names yet
        self._left_out: set[str] = set()  # parts of rows of this drain that are not listed. Later rows may name them
        self._unneeded: set[str] = set()  # parts that could not be deleted

    def _look(self) -> None:
        """Raise ArchiveConflictError if the place has the archive of another store, or aggregates."""
        try:
            about = about_of(Sources([self.place]))
        except MissingObjectError:
            if sequences(self.place):
                raise ArchiveConflictError(
                    f"{self.place.url} has aggregates of many processes: give the drain a place of its own"
                ) from None
            refuse_undescribed(self.place)
            return
        if about["lineage"] != self._new["lineage"]:
            raise ArchiveConflictError(
                f"{self.place.url} is the archive of another store, or of a fork of this one: give each store a place "
                "of its own"
            )

    def begin(self) -> bool:
        """Ends the work of any other writer of the place. Returns whether it has written since this one looked."""
        try:
            self.place.create("archive", wrapped(ARCHIVE, "archive", self._new))
        except ObjectExistsError:  # it was there, or another process has just made it
            self._look()
        return self._writer.begin({"time": time.time(), "by": self.writer})

    @property
    def index(self) -> Index:
        """The index after the last step."""
        return self._writer.index

    @property
    def last(self) -> int:
        """The newest version, or -1."""
        return self.index.newest

    def end(self) -> None:
        """The last step: the list of this place does not end before the versions that this drain has added."""
        self._writer.end()

    def has_now(self, version: int) -> bool:
        """Whether the place has the version, or a newer one, from whichever writer."""
        try:
            return Index.read(self.place, self.index).newest >= version
        except ArchiveError:
            return False

    def write(self, flush: Flush) -> None:
        """Makes versions part of the archive (I24)."""
        self._put.update(name for name, _ in flush.parts)
        for name, pieces in flush.parts:
            self.place.put(name, pieces)
        self.append(flush.rows)
        self._delete_unnamed(flush)

    def _delete_unnamed(self, flush: Flush) -> None:
        """Deletes the parts that captures have left that failed. A version names no part that was filled before those
        of an older one, unless that names it, too."""
        named = {part for row in flush.rows for part in row.parts}
        newest = max(self._put & named, default="")
        done = {name for name in self._put if name <= newest}
        if flush.useful is not None:
            done |= self._put - flush.useful
        self._put -= done
        with contextlib.suppress(ArchiveUnavailableError):  # the next drain sweeps
            self.place.once.delete(sorted(done - named))

    def append(self, rows: Sequence[Row]) -> None:
        """The rows of versions whose parts are there. Those that were added already are left out."""
        if rows:
            self._writer.append(rows)
            for row in rows:
                there = self.index.find(row.version)
                if there is None or there.directory != row.directory:  # another writer's row with the same contents
                    self._left_out.update(row.parts)
            if not self._swept:
                self._swept = True
                self._sweep()
                if self._copying is not None:
                    self._copying.look()

    def _sweep(self) -> None:
        """Deletes the parts that killed drains left without a row.

        No row can name them later: a writer that began before and is still at it would create the object of the index
        that this one has just created, and stops. A writer that begins later puts its parts after the list was made,
        or this one stops.

            the other one puts a part ▶ this one takes a token, reads the index, appends ▶ deletes the part
                                      ▶ the other one can't append
            the other one puts a part, appends ▶ this one can't append, and deletes nothing
            this one lists the parts ▶ is it the newest writer? ▶ deletes parts of that list
        """
        there = [f"parts/{name}" for name in self.place.list("parts")]
        named = {part for row in self.index.rows() for part in row.parts}
        own = f"parts/{self.writer}-"  # of a version whose row comes later
        gone = [name for name in there if is_part(name) and name not in named and not name.startswith(own)]
        # The versions are there, and another drain tries again.
        with contextlib.suppress(ArchiveUnavailableError, ArchiveConflictError, ArchiveDamagedError):
            if not set(self._read_tagged()) <= set(self.index.versions):
                return  # an older writer may be about to list a tagged version again (`forget`)
            self._writer.require_newest()
            self.place.once.delete(gone)

    def copy(self, near: Index, source: Place, tell: Callable[[str], object]) -> bool:
        """Copies versions that another place has. near: its index. tell: called with the text of a warning, if some of
        them are damaged. They are not tried again. False if there are no more to copy.
        """
        if self._copying is None:
            self._copying = Copying(source, self.place, near, self.index)
        copied: list[Row] = []
        damaged, lost = False, dict(self._lost)
        begin = max(self.last, next(reversed(self._lost), -1))
        for row in near.rows(near.behind(begin)):
            error = None if row.previous is None else lost.get(row.previous)
            if error is None:
                if not copied:
                    self._refuse_other_past(near, row)
                try:
                    self._copying.take(row, (near, self.index))
                    copied.append(row)
                except ArchiveDamagedError as found:
                    error = str(found)
                    damaged = True
            if error is not None:
                lost[row.version] = error
            if len(copied) == _TOGETHER:
                break
        self._copying.rest()
        if damaged:
            tell(self._lost_text(lost))
        self.append(copied)
        if copied or len(lost) > len(self._lost):
            lost = {version: error for version, error in lost.items() if version > self.last}
            newest = next(reversed(lost), None)
            self.lost = None if newest is None else (newest, ArchiveDamagedError(self._lost_text(lost)))
            self._lost = lost
        return bool(copied)

    def _lost_text(self, lost: dict[int, str]) -> str:
        return (
            f"{self.place.url} can't have {_listed(lost)}: {next(iter(lost.values()))}. The next base, or the next "
            "drain, has anew what the store still has"
        )

    @property
    def damaged(self) -> set[str]:
        """Parts of the place before that were found damaged."""
        return set() if self._copying is None else self._copying.damaged

    def copy_tags(self, source: Place) -> None:
        """Copies tags of versions that are here from another place, but for damaged ones, and removals of tags. A tag
        that names another version here stays. If it could not be taken away here, the version that waits for its name
        stays as well."""
        refused = self._copy_removals(source)  # before it looks for tags: one may take the place of another
        waiting = set()
        for name in source.list("tags"):
            if name in self._tags:
                continue
            with contextlib.suppress(MissingObjectError, ArchiveDamagedError):
                version = tag_of(Sources([source]), name)
                if not self.index.keeps(version):
                    continue
                if name in refused:
                    waiting.add(version)
                    continue
                with contextlib.suppress(ObjectExistsError):
                    self.place.create(f"tags/{name}", wrapped(TAG, f"tags/{name}", version))
                self._tags.add(name)
        self._waiting = waiting

    def _copy_removals(self, source: Place) -> set[str]:
        """Takes away the tags that were taken away in another place. Returns those that the place here does not let
        go."""
        refused = set()
        new = [removal for removal in source.list("untagged") if removal not in self._removals]
        here = self.place.list("untagged") if new else []
        for removal in new:
            match = _REMOVAL.fullmatch(removal)
            if match is None:
                continue
            version, name = int(match[1]), match[2]
            if removal in here:
                self._removals.add(removal)
                self._tags.discard(name)  # the place before may have the name for another version now
                continue
            try:
                if tag_of(Sources([source]), name) == version:
                    continue  # tagged again, or not taken away yet
            except ArchiveDamagedError:
                continue
            except MissingObjectError:
                pass
            try:
                if tag_of(Sources([self.place]), name) == version:
                    self.place.once.delete([f"tags/{name}"])
            except ArchiveUnavailableError:
                refused.add(name)  # the next versions try again
                self._tags.discard(name)
                continue
            except (MissingObjectError, ArchiveDamagedError):
                pass
            self._tags.discard(name)
            _put_removal(self.place, removal)
            self._removals.add(removal)
        return refused

    def _refuse_other_past(self, near: Index, row: Row) -> None:
        """Raises ArchiveConflictError if a differential is to a version that is another one here."""
        first = row.previous
        if first is None:
            return
        here, there = self.index.find(first), near.find(first)
        if here is None:
            raise ArchiveConflictError(
                f"{self.place.url} lacks version {first}, and the place before it needs that for version "
                f"{row.version}: two drains wrote to them by turns. Name {self.place.url} first in the next drain"
            )
        if there is None or here.state != there.state:
            raise ArchiveConflictError(
                f"{self.place.url} has another history than the place before it, from version {first} or earlier: two "
                "copies of a store went on without each other. Give one of them a place of its own"
            )

    def retain(self, keep: Keep, until: int) -> None:
        """Removes versions that do not stay. until: the newest that this place and all further ones have."""
        if keep != Keep() and len(self.index):
            now = time.time()
            if leaving(self.index, keep, {*self._tagged.values(), *self._waiting}, now, until):
                self._forget(leaving(self.index, keep, self._read_tagged(), now, until))

    def forget(self, going: set[int]) -> None:
        """Removes versions, except for the newest one and tagged ones here, and parts that other versions need."""
        self._forget(going.difference(self.index.kept()[-1:], self._read_tagged()))

    def _forget(self, going: set[int]) -> None:
        try:
            forget(self._writer, self.place, going, self._read_tagged, self._unneeded, self._left_out)
        except ArchiveUnavailableError as error:
            if not error.transient:
                self._unneeded.clear()  # the next drain tries again
            raise
        finally:
            if self._copying is not None:
                self._copying.look()

    def _read_tagged(self) -> Collection[int]:
        """The versions that have a tag here, or wait for one. A tag is read once: none changes, unless it is taken away
        first."""
        removals = self.place.list("untagged")
        if removals != self._removals_here:
            self._removals_here, self._tagged = removals, {}
        known, self._tagged = self._tagged, {}
        for name in self.place.list("tags"):
            with contextlib.suppress(MissingObjectError):  # it was taken away meanwhile
                self._tagged[name] = known[name] if name in known else self._tag_of(name)
        return {*self._tagged.values(), *self._waiting}

    def _tag_of(self, name: str) -> int:
        try:
            return tag_of(Sources([self.place]), name)
        except ArchiveDamagedError as error:
            raise ArchiveDamagedError(
                f"{self.place.url}: the tag {name!r} is damaged, so that its version is not known: take it away with "
                "untag"
            ) from error
