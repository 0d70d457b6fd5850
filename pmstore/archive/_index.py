"""The list of an archive's versions: an object for each flush, merged as they become many.

    index/000000000001-000000000032-000000   32 flushes, merged
    index/000000000033-000000000033-000000   one flush
    index/000000000034-000000000034-000000   the newest: creating it is what makes its versions exist

A flush creates the next number. Only one writer can, and that is the commit of its versions. An object that has several
flushes replaces theirs, and one of a higher generation those of a lower one (I25): a crash between writing it and
deleting the others changes nothing.

A writer that another one has ended may still be in the middle of a merge. Therefore groups begin at fixed numbers, so
that two merges are never of overlapping groups; a writer merges what is due when it begins; and no object takes the
place of another one with its name: the newest writer takes the next generation instead, or, if it is a flush, the
versions of the other one.

The name of a flush is free again when it was merged. A list that is older than that, from a cache, would let a writer
create the flush anew, beside what has taken its place. So the writer's token tells up to which number names were freed,
before they are, and the next writer refuses a list that ends earlier. A writer that is closed lets its token tell of
its own flushes in the same way: if they are lost, that is noticed.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import itertools
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeVar

from pmstore._errors import MALFORMED, ArchiveConflictError, ArchiveDamagedError, ArchiveError, ArchiveUnavailableError
from pmstore.archive._format import SEGMENT, WRITER, Piece, Row, Segment, opened, wrapped, writer_of
from pmstore.archive._objects import MissingObjectError, ObjectExistsError, Place

__all__ = ["Index", "IndexWriter", "SupersededError", "told_end"]

_FAN = 32  # objects of the index that are merged into one
_ATTEMPTS = 20

T = TypeVar("T")


def _rows_of(segment: Segment, data: bytes) -> list[Any]:
    """The rows of an object, of which only the versions are checked: there may be a million."""
    found = opened(SEGMENT, segment.name, data)
    if not isinstance(found, tuple) or not all(type(row) is tuple for row in found):
        raise ArchiveDamagedError(f"{segment.name} is damaged: it is no list of versions")
    try:
        versions = [row[0] for row in found]
        increasing = all(map(int.__lt__, versions, versions[1:]))
    except MALFORMED as error:
        raise ArchiveDamagedError(f"{segment.name} is damaged: {error!r}") from error
    if not increasing or not all(type(version) is int for version in versions):
        raise ArchiveDamagedError(f"{segment.name} is damaged: its versions are not in order")
    return list(found)


class Index:
    """The versions of an archive, as of a moment. Rows are checked when they are used."""

    def __init__(self, segments: Sequence[tuple[Segment, list[Any]]]) -> None:
        self.segments = list(segments)
        self._rows = [row for _, rows in segments for row in rows]
        self._versions: list[int] = [row[0] for row in self._rows]
        self._count = len(self._rows)  # of both; more are those of a later index, which shares the lists
        self._places: Sequence[Index] = ()  # of a merged one
        _require_order(self._versions)

    def added(self, segment: Segment, rows: list[Any]) -> Index:
        """The next index, with the rows of another object."""
        _require_order([*self._versions[self._count - 1 : self._count], *(row[0] for row in rows)])
        later = copy.copy(self)
        later.segments = [*self.segments, (segment, rows)]
        if len(self._rows) != self._count:  # another one has added rows
            later._rows, later._versions = self._rows[: self._count], self._versions[: self._count]
        later._rows.extend(rows)
        later._versions.extend(row[0] for row in rows)
        later._count = self._count + len(rows)
        return later

    @classmethod
    def read(
        cls,
        place: Place,
        known: Index | None = None,
        tell: Callable[[ArchiveDamagedError], None] | None = None,
        least: int = 0,
    ) -> Index:
        """The newest state in a place.

        known: an earlier one, whose objects need not be read again. tell: called with what is damaged, which is left
        out then; without it, that is raised. least: the number of a flush that was there; a list that ends earlier is
        refused.
        """
        have = dict(known.segments) if known is not None else {}
        for _ in range(_ATTEMPTS):
            current = Segment.current(place.list("index"))
            row = [Segment(0, 0, 0), *current]
            if known is not None and row[-1].last < known.last:
                have = {}  # the place was filled anew, and objects of the same names are others
            try:
                for one in current:
                    if one not in have:
                        have[one] = _read(place, one, tell)
            except MissingObjectError:  # a writer has merged it meanwhile
                continue
            # A list that is made while a writer merges may lack the old objects and the new one; one that was kept in
            # a cache may lack the newest.
            if row[-1].last >= least and all(one.first == before.last + 1 for before, one in itertools.pairwise(row)):
                return cls([(one, have[one]) for one in current])
        text = f"objects of the index are missing in {place.url}"
        if row[-1].last < least:
            text += (
                f": it ends with flush {row[-1].last}, and flush {least} was there. A cache may give an older list: "
                "try again later. If the place is a copy that was made while a drain wrote, delete its folder 'writers'"
            )
        error = ArchiveDamagedError(text)
        if tell is None:
            raise error
        tell(error)
        return cls([(one, have[one]) for one in current if one in have])

    @classmethod
    def merged(cls, indexes: Sequence[Index]) -> tuple[Index, int | None]:
        """The index of several places, and the first version of which they have other contents, although none of them
        approximates it (I27): two copies of a store went on without each other.

        The row of a version is that of the first place that keeps the version for itself and has all that it needs, or
        else that of the first place. Of two copies, the one that has gone further comes first. Objects of two places
        differ, although they have the same names: each place has flushes of its own.
        """
        if len(indexes) == 1:
            return indexes[0], None
        rows, parted = _stacked(indexes)
        if parted is not None:
            begin = parted
            indexes = sorted(indexes, key=lambda one: (-one.newest, one.behind(begin) - len(one)))
            rows, _ = _stacked(indexes, parted)
        made = cls([(Segment(1, 1, 0), [rows[version] for version in sorted(rows)])])
        made._places = list(indexes)
        return made, parted

    def __len__(self) -> int:
        return self._count

    @property
    def versions(self) -> list[int]:
        """The numbers of all versions."""
        return self._versions[: self._count]

    @property
    def last(self) -> int:
        """The number of the newest flush, or 0."""
        return self.segments[-1][0].last if self.segments else 0

    @property
    def newest(self) -> int:
        """The newest version, or -1."""
        return self._versions[self._count - 1] if self._count else -1

    def find(self, version: int) -> Row | None:
        """The row of a version."""
        at = bisect.bisect_left(self._versions, version, 0, self._count)
        return Row.checked(self._rows[at]) if at < self._count and self._versions[at] == version else None

    def keeps(self, version: int) -> bool:
        """Whether a version is there for itself."""
        row = self.find(version)
        return row is not None and row.kept

    def behind(self, version: int) -> int:
        """The number of rows up to a version."""
        return bisect.bisect_right(self._versions, version, 0, self._count)

    def rows(self, start: int = 0) -> Iterable[Row]:
        """All rows, from a number on."""
        return map(Row.checked, self._rows[start : self._count])

    def kept(self) -> list[int]:
        """The versions that are there for themselves."""
        return [row[0] for row in self._rows[: self._count] if row[-1] is True]

    def before(self, row: Row) -> Row:
        """The version that a differential changes, as the differential's own place has it: other places may have other
        contents of its number. If it is lost there, the same drain must have written it.

        Raises ArchiveDamagedError if it is not there.
        """
        assert row.previous is not None
        places = self._places or (self,)
        for place in places:
            if place._is_listed(row):
                with contextlib.suppress(ArchiveDamagedError):  # another place may have it
                    found = place.find(row.previous)
                    if found is not None:
                        return found
        for place in places:
            found = place.find(row.previous)
            if found is not None and writer_of(found.directory.part) == writer_of(row.directory.part):
                return found
        raise ArchiveDamagedError(
            f"the archive is damaged: version {row.version} needs version {row.previous}, which is not in it"
        )

    def _lacking(self) -> set[int]:
        """The versions that need one that is not listed."""
        lacking: set[int] = set()
        listed = set(self.versions)
        for row in self._rows[: self._count]:  # what a version needs is older
            previous = row[_PREVIOUS] if len(row) == _FIELDS else row[0]
            if previous is None:
                continue
            if type(previous) is not int or previous >= row[0] or previous in lacking or previous not in listed:
                lacking.add(row[0])
        return lacking

    def _is_listed(self, row: Row) -> bool:
        at = self.behind(row.version) - 1
        if at < 0 or self._versions[at] != row.version:
            return False
        there = self._rows[at]
        return len(there) == _FIELDS and there[_DIRECTORY] == tuple(row.directory)

    def chain(self, row: Row, known: Container[Piece] = ()) -> list[Row]:
        """A version and those that its contents need, the base first. known: directories of versions that are left out,
        with those that they need. Raises ArchiveDamagedError."""
        rows = [row]
        while row.previous is not None:
            row = self.before(row)
            if row.directory in known:
                break
            rows.append(row)
        return rows[::-1]


def _stacked(indexes: Sequence[Index], until: int | None = None) -> tuple[dict[int, Any], int | None]:
    """The rows of all versions, those of the first index on top; and the first version whose contents differ, although
    nobody approximates it. Rows that have all that they need come before others; from version `until` on, only before
    others with the same contents."""
    rows: dict[int, Any] = {}
    ranks: dict[int, tuple[bool, bool]] = {}
    others: dict[tuple[int, Any], tuple[tuple[bool, bool], Any]] = {}  # by version and state, those that are beaten
    parted: int | None = None
    for index in reversed(indexes):
        lacking = index._lacking()
        for row in index._rows[: index._count]:
            version, there = row[0], rows.get(row[0])
            rank = row[-1] is True, version not in lacking
            if there is None:
                rows[version], ranks[version] = row, rank
                continue
            alike = _state(there) == _state(row)
            counted = 2 if until is None or version < until or alike else 1  # of the two attributes of a rank
            wins = rank[:counted] >= ranks[version][:counted]
            if not alike:
                beaten = (ranks[version], there) if wins else (rank, row)
                name = version, _state(beaten[1])
                others[name] = max(others.get(name, beaten), beaten, key=operator.itemgetter(0))
                if wins and (name := (version, _state(row))) in others:  # the best one with these contents
                    rank, row = max((rank, row), others[name], key=operator.itemgetter(0))
            if wins:
                rows[version], ranks[version] = row, rank
            if not alike and _is_exact(there) and _is_exact(row):
                parted = version if parted is None else min(parted, version)
    return rows, parted


def _state(row: Any) -> Any:
    return row[_STATE] if len(row) == _FIELDS else None


def _is_exact(row: Any) -> bool:
    return bool(len(row) == _FIELDS and not row[_LOSSY])


def _require_order(versions: list[int]) -> None:
    if any(map(int.__ge__, versions, versions[1:])):
        raise ArchiveDamagedError("the index of the archive is damaged: its versions are not in order")


def _read(place: Place, segment: Segment, tell: Callable[[ArchiveDamagedError], None] | None) -> list[Any]:
    try:
        return _rows_of(segment, place.get(segment.name))
    except ArchiveDamagedError as error:
        if tell is None:
            raise ArchiveDamagedError(
                f"{place.url}: {error}: copy it from another place of the archive, or give the drain a new place"
            ) from error
        tell(error)
        return []


_PREVIOUS, _DIRECTORY, _STATE, _LOSSY, _FIELDS = 2, 6, 7, 9, len(Row._fields)  # of a row as it is packed


class SupersededError(ArchiveConflictError):
    """A later writer of this process has begun."""


class IndexWriter:
    """Changes the index of one place, from `begin` on. The writer's token is the newest, or it stops."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._token = self._freed = 0
        self._added = 0  # the newest flush of this writer
        self._about: dict[str, Any] = {}
        self.index = Index.read(place, least=told_end(place))

    def begin(self, about: dict[str, Any]) -> bool:
        """Makes the newest token, which ends the work of any other writer of the place. Returns whether the index has
        changed since it was read."""
        _begun_here.add(about["by"])
        self._about = about
        self._token = self._newer_token()
        seen = self.index  # of before the token has ended other writers
        self.index = Index.read(self._place, seen, least=max(self._freed, seen.last))
        changed = [one for one, _ in seen.segments] != [one for one, _ in self.index.segments]
        self._merge()
        return changed

    def _delete(self, names: Iterable[str]) -> None:
        """Deletes objects that nothing needs. If the place refuses that, they stay."""
        with contextlib.suppress(ArchiveUnavailableError):
            self._place.once.delete(names)

    def _newer_token(self) -> int:
        for _ in range(_ATTEMPTS):
            newest = _newest_token(self._place)
            # Not the newest flush of all, if its name is not free: a power cut may take a name that was not synced yet.
            gone = (one.last for one, _ in self.index.segments if one.first < one.last or one.generation)
            self._freed = max(_freed_by(self._place, newest), *gone, 0)
            try:
                self._place.create(*self._told(newest + 1, self._freed))
            except ObjectExistsError:
                continue
            late = _freed_by(self._place, newest)  # its writer may have gone on until now
            if late > self._freed:
                self._freed = late
                self._place.put(*self._told(newest + 1, late))
            self._delete(f"writers/{old:06d}" for old in range(max(1, newest - 7), newest + 1))
            return newest + 1
        raise ArchiveConflictError(f"too many processes begin to write {self._place.url} at once")

    def _told(self, token: int, freed: int) -> tuple[str, list[bytes]]:
        """The name and the contents of a token. freed: up to which flush names were freed."""
        name = f"writers/{token:06d}"
        return name, wrapped(WRITER, name, {**self._about, "freed": freed})

    def require_newest(self, place: Place | None = None) -> None:
        """Raises ArchiveConflictError if another writer has begun, ArchiveDamagedError if the place was emptied. place:
        the same one, to be asked once."""
        newest = _newest_token(place or self._place)
        if newest < self._token:
            raise self._emptied()
        if newest > self._token:
            if _is_ours(self._place, newest):
                raise SupersededError(f"a later drain or change by this process writes to {self._place.url} since")
            raise ArchiveConflictError(
                f"another process drains to {self._place.url} since: one archive has one writer. Drain each store to "
                "a place of its own"
            )

    def _require_own(self, place: Place | None = None) -> None:
        """Raises the errors of `require_newest`, and ArchiveDamagedError if the place lacks what this writer has
        written: another disk was mounted there, or an older copy was put back. It may have a token of that number."""
        self.require_newest(place)
        place = place or self._place
        try:
            by = _about_token(place, self._token).get("by")
        except ArchiveDamagedError:  # it is the newest, and therefore ours
            by = self._about["by"]
        if by != self._about["by"] or not self._has_newest(place):
            self.require_newest(place)  # a newer writer deletes older tokens
            raise self._emptied()

    def _has_newest(self, place: Place) -> bool:
        """Whether the place has the newest flush: in its list, which may be that of a moment ago, or as an object."""
        there = Segment.current(place.list("index"))
        if (there[-1].last if there else 0) >= self.index.last:
            return True
        try:
            return place.size(self.index.segments[-1][0].name) >= 0
        except MissingObjectError:
            return False

    def _emptied(self) -> ArchiveDamagedError:
        return ArchiveDamagedError(
            f"{self._place.url} was emptied or taken away while it was written, or has the contents of another time: "
            "begin another drain, which writes everything anew"
        )

    def append(self, rows: Sequence[Row]) -> None:
        """Adds versions, durably; they are newer than all others. Those that are there are left out.

        Raises ArchiveConflictError if there are other contents of a version, or a later version without it.
        """
        while rows := self._new(rows):
            number = self.index.last + 1
            segment, packed = Segment(number, number, 0), [row.packed() for row in rows]
            index = self.index.added(segment, packed)
            self._require_own()
            try:
                self._place.create(segment.name, wrapped(SEGMENT, segment.name, packed))
            except ObjectExistsError:
                self.require_newest()
                self._take_late()
                continue
            self.require_newest()  # or else a newer writer may have merged its own object of this name away
            self.index, self._added = index, number
            self._merge()
            return

    def end(self) -> None:
        """Lets the token tell of the flushes of this writer. A later one then refuses a list that lacks them."""
        if self._added > self._freed:
            with contextlib.suppress(ArchiveError):
                self._tell_end(self._place.once, self._added)

    def _tell_end(self, place: Place, last: int) -> None:
        """Writes the token of this writer anew: the list does not end before a flush. Raises the errors of
        `_require_own`."""
        self._require_own(place)
        place.put(*self._told(self._token, last))
        self._freed = last

    def _take_late(self) -> None:
        """Takes over the versions of a flush that a writer had under way when this one began."""
        late = Index.read(self._place, self.index, least=self.index.last)
        if late.last == self.index.last:
            raise ArchiveDamagedError(
                f"{self._place.url} has something under the name of the next index object, but does not list it. If it "
                "is not a file, move it away. A cache may return an older list: then try again later"
            )
        self.index = late

    def _new(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows of versions that are not there."""
        common = [row for row in rows if row.version <= self.index.newest]
        if any((there := self.index.find(row.version)) is None or there.state != row.state for row in common):
            raise ArchiveConflictError(
                f"an earlier drain to {self._place.url} has just written a version with other contents, such as "
                "another approximation: begin the drain again"
            )
        return rows[len(common) :]

    def _merge(self) -> None:
        while (due := _due([segment for segment, _ in self.index.segments])) is not None:
            self._replace(*due, [row for _, rows in self.index.segments[slice(*due)] for row in rows])

    def change(self, changed: Callable[[Row], Row | None], earlier: Index | None = None) -> None:
        """Replaces rows by those that the function returns; None removes a row. Objects without a change stay.

        The newest object comes first: after a crash, no version is listed that needs one that is gone (I26).

        earlier: the index before the last call. Its rows are changed instead, so that some come back, the oldest first.
        """
        numbers = range(len(self.index.segments))
        for number in numbers if earlier is not None else reversed(numbers):
            rows = (earlier or self.index).segments[number][1]
            after = [row if new is None else new.packed() for row in map(Row.checked, rows) if (new := changed(row))]
            if after != self.index.segments[number][1]:
                self._replace(number, number + 1, after)

    def _replace(self, start: int, stop: int, rows: list[Any]) -> None:
        """Writes the objects start … stop anew, as one with these rows."""
        old = [segment for segment, _ in self.index.segments[start:stop]]
        generation = max(segment.generation for segment in old) + 1 if len(old) == 1 else 0
        wanted = Segment(old[0].first, old[-1].last, generation)
        merged = self._created(wanted, rows)
        old += [wanted._replace(generation=lower) for lower in range(generation, merged.generation)]
        segments = [*self.index.segments[:start], (merged, rows), *self.index.segments[stop:]]
        if rows == [row for _, old_rows in self.index.segments[start:stop] for row in old_rows]:
            self.index = copy.copy(self.index)
            self.index.segments = segments
        else:
            self.index = Index(segments)
        with contextlib.suppress(ArchiveUnavailableError):  # after a crash, too, they are beside what replaces them
            if old[-1].last > self._freed:
                self._tell_end(self._place, old[-1].last)
                self.require_newest()  # or else the newer writer may not have read it
            self._delete(segment.name for segment in old)

    def _created(self, wanted: Segment, rows: list[Any]) -> Segment:
        """Writes an object of the index. If a writer that has ended has left one of this name, the next generation."""
        for _ in range(_ATTEMPTS):
            self._require_own()
            try:
                self._place.create(wanted.name, wrapped(SEGMENT, wanted.name, rows))
                return wanted
            except ObjectExistsError:
                wanted = wanted._replace(generation=wanted.generation + 1)
        raise ArchiveConflictError(f"other processes write to the index of {self._place.url}")


def _due(segments: Sequence[Segment]) -> tuple[int, int] | None:
    """The start and the end of objects that are to become one, if there are some: those of as many flushes as a power
    of `_FAN`, from a multiple of that on. Earlier releases have made some of other flushes."""
    ends = {one.last: number for number, one in enumerate(segments)}
    width = _FAN
    while segments and width <= segments[-1].last:
        for start, one in enumerate(segments):
            if (one.first - 1) % width == 0 and ends.get(one.first - 1 + width, start) > start:
                return start, ends[one.first - 1 + width] + 1
        width *= _FAN
    return None


_begun_here: set[str] = set()
"""The writers that have begun in this process, as their tokens name them."""


def _is_ours(place: Place, token: int) -> bool:
    """Whether a writer of this process has made the token."""
    try:
        return _about_token(place, token).get("by") in _begun_here
    except ArchiveError:  # this only chooses the text of an error
        return False


def told_end(place: Place, tell: Callable[[ArchiveDamagedError], None] | None = None) -> int:
    """A flush that was there, as the newest token tells: a list that ends earlier is not whole. tell: called if the
    token is damaged, which then tells nothing."""
    return _freed_by(place, _newest_token(place), tell)


def _freed_by(place: Place, token: int, tell: Callable[[ArchiveDamagedError], None] | None = None) -> int:
    """The number up to which names of flushes were freed, or written by a drain that was closed. Earlier releases do
    not tell it."""
    try:
        freed = _about_token(place, token).get("freed")
    except ArchiveDamagedError as error:
        if tell is not None:
            tell(error)
        return 0
    return freed if type(freed) is int else 0


def _about_token(place: Place, token: int) -> dict[str, Any]:
    """The contents of a token; nothing if it is gone. Raises ArchiveDamagedError."""
    name = f"writers/{token:06d}"
    try:
        about = opened(WRITER, name, place.get(name))
    except MissingObjectError:
        return {}
    if not isinstance(about, dict):
        raise ArchiveDamagedError(f"{name} is damaged: it does not tell of a writer")
    return about


def _newest_token(place: Place) -> int:
    names = place.list("writers")  # other programs may put files of theirs there, such as Thumbs.db
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=0)
