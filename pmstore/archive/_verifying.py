"""The full check of an archive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, overload

from pmstore._errors import ArchiveDamagedError, ArchiveError, ArchiveUnavailableError, FormatVersionError
from pmstore.archive._format import Piece, Row
from pmstore.archive._index import Index, told_end
from pmstore.archive._objects import MissingObjectError, Place, ShortObjectError
from pmstore.archive._sources import Sources
from pmstore.archive._target import about_of, removals_of, tags_of
from pmstore.archive._versions import Library

__all__ = ["Problem", "VerifyReport", "verify"]


_REFUSALS = (ArchiveError, FormatVersionError, MissingObjectError)


class Problem(NamedTuple):
    """A damaged place. url: the place; versions: those that are not whole there; text: the damage."""

    url: str
    versions: tuple[int, ...]
    text: str


class VerifyReport(Sequence[Problem]):
    """The result of `Archive.verify`. `versions` and `bytes` count the checked ones of all places. `lossy` counts the
    versions that have approximations of a lossy codec, which is not a problem."""

    def __init__(self, problems: list[Problem], versions: int, count: int, lossy: int) -> None:
        self._problems = problems
        self.versions = versions
        self.bytes = count
        self.lossy = lossy

    @property
    def ok(self) -> bool:
        """Whether every version is whole in every place."""
        return not self._problems

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        return self._problems[index]

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        if self.ok:
            lossy = f", {self.lossy} of them with approximated arrays" if self.lossy else ""
            return f"sound: {self.versions} versions{lossy}, {self.bytes} bytes"
        return "\n".join(map(_line, self._problems))


def _line(problem: Problem) -> str:
    if not problem.versions:
        return problem.text if problem.text.startswith(problem.url) else f"{problem.url}: {problem.text}"
    return f"{problem.url}: versions {', '.join(map(str, problem.versions))}: {problem.text}"


def verify(sources: Sources, progress: Callable[[int, int], object] | None) -> VerifyReport:
    """See `Archive.verify`."""
    problems: list[Problem] = []
    versions = count = lossy = 0
    for place in sources.places:
        checked = _Checked(place, problems)
        checked.run(progress)
        versions += checked.versions
        count += checked.bytes
        lossy += checked.lossy
    return VerifyReport(problems, versions, count, lossy)


def _lacks_before(index: Index, row: Row) -> str | None:
    try:
        index.before(row)
    except ArchiveDamagedError as error:
        return str(error)
    return None


class _Checked:
    """One place. Each piece is read once."""

    def __init__(self, place: Place, problems: list[Problem]) -> None:
        self._place = place
        self._problems = problems
        self._bad: dict[Piece, str | None] = {}  # of the pieces that were read, what is wrong
        self.versions = self.bytes = self.lossy = 0

    def run(self, progress: Callable[[int, int], object] | None) -> None:
        alone = Sources([self._place])
        try:
            about_of(alone)
            index = Index.read(self._place, least=told_end(self._place, self._tell))
            tags_of(alone)
            removals_of(alone)
        except _REFUSALS as error:
            self._tell(error)
            return
        library = Library(alone)
        wrong: dict[int, str] = {}
        for number, row in enumerate(index.rows()):
            self.versions += 1
            self.lossy += bool(row.lossy)
            text = self._row(library, row)
            if text is None and row.previous is not None:
                text = wrong.get(row.previous) or _lacks_before(index, row)
            if text is not None:
                wrong[row.version] = text
            if progress is not None:
                progress(number + 1, len(index))
        by_text: dict[str, list[int]] = {}
        for version in self._still_listed(index, wrong):
            by_text.setdefault(wrong[version], []).append(version)
        self._problems.extend(Problem(self._place.url, tuple(found), text) for text, found in by_text.items())

    def _tell(self, error: Exception) -> None:
        self._problems.append(Problem(self._place.url, (), str(error)))

    def _still_listed(self, index: Index, versions: Collection[int]) -> list[int]:
        """Those of the versions that no drain has removed since the index was read: their parts are deleted."""
        if not versions:
            return []
        try:
            index = Index.read(self._place, index)
        except _REFUSALS as error:
            self._tell(error)
        return [version for version in versions if index.find(version) is not None]

    def _row(self, library: Library, row: Row) -> str | None:
        """The damage of the objects that the row itself names; None if there is none."""
        text = self._piece(row.directory)
        if text is not None:
            return text
        try:
            pieces = list(library.directory(row).pieces())
        except ArchiveDamagedError as error:
            return str(error)
        for piece in pieces:
            text = self._piece(piece)
            if text is not None:
                return text
            if piece.part not in row.parts:
                return f"{piece.part} is not among the parts of version {row.version}"
        return None

    def _piece(self, piece: Piece) -> str | None:
        if piece not in self._bad:
            self._bad[piece] = self._read(piece)
            self.bytes += piece.length
        return self._bad[piece]

    def _read(self, piece: Piece) -> str | None:
        try:
            data = self._place.get(piece.part, piece.at, piece.length)
        except (MissingObjectError, ShortObjectError, ArchiveDamagedError, ArchiveUnavailableError) as error:
            return str(error)
        return None if piece.matches(data) else f"{piece.part} is damaged at byte {piece.at}"
