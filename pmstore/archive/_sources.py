"""Reading an archive that is in several places: an object is taken from the first place that has it whole."""

from __future__ import annotations

import builtins
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

from pmstore._errors import ArchiveDamagedError, ArchiveError, ArchiveUnavailableError, ArchiveWarning
from pmstore.archive._index import Index
from pmstore.archive._objects import MissingObjectError, Place, ShortObjectError

__all__ = ["Sources"]

T = TypeVar("T")


class Sources:
    """Places that hold the same archive, those to be asked first in front.

    A place that does not answer may take minutes for that. It is asked last from then on, until the index is read
    anew.
    """

    SLOW = 1.0  # seconds: while an archive is opened, a place that took as long to fail is not asked again

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)
        self._away: set[Place] = set()  # those that did not answer
        self._slow: dict[Place, ArchiveUnavailableError] = {}  # of these, those that took long for it
        self._told: set[tuple[str, str]] = set()
        self._told_parted = False

    @property
    def url(self) -> str:
        """The URL of the first place."""
        return self.places[0].url

    def answering(self) -> builtins.list[Place]:
        """The places that have not failed to answer since the index was read."""
        return [place for place in self.places if place not in self._away]

    def list(self, folder: str) -> list[str]:
        """The names of the objects in a folder, of all places that answer."""
        names: set[str] = set()
        failed: list[ArchiveError] = []
        for number, place in enumerate(self._in_order()):
            if place in self._away and len(failed) < number:  # another one has answered
                break
            try:
                names.update(place.list(folder))
            except ArchiveError as error:
                failed.append(error)
                self.tell(place, folder, error)
        if len(failed) == len(self.places):
            raise failed[0]
        return sorted(names)

    def read(self, name: str, check: Callable[[bytes], T], at: int = 0, count: int | None = None) -> T:
        """The result of `check` for an object, or a part of it. `check` raises ArchiveDamagedError for wrong bytes.

        Raises MissingObjectError if no place has the object, else the error of the first place that lacks it whole.
        """
        errors: dict[Place, Exception] = {}
        for number, place in enumerate(self._in_order()):
            began = time.monotonic()
            try:
                found = check(place.get(name, at, count))
            except (MissingObjectError, ShortObjectError, ArchiveDamagedError, ArchiveUnavailableError) as error:
                errors[place] = error
                if isinstance(error, ArchiveUnavailableError) and time.monotonic() - began >= self.SLOW:
                    self._slow[place] = error
                    self._away.add(place)
                if number + 1 < len(self.places) and not isinstance(error, MissingObjectError):
                    self.tell(place, name, error)
                continue
            return found
        lacking = [errors[place] for place in self.places]
        first = next((error for error in lacking if not isinstance(error, MissingObjectError)), lacking[0])
        raise ArchiveDamagedError(str(first)) if isinstance(first, ShortObjectError) else first

    def index(self, known: Sequence[Index | None]) -> builtins.list[Index | None]:
        """The index of each place; None: it does not answer. known: earlier ones, or none: then a slow place is not
        asked again, unless all are.

        What is damaged is left out, with an ArchiveWarning: the other places may have it.
        """
        found: builtins.list[Index | None] = []
        failed: builtins.list[ArchiveUnavailableError] = []
        for number, place in enumerate(self.places):

            def tell(error: ArchiveDamagedError, place: Place = place) -> None:
                warnings.warn(f"{place.url}: {error}: its versions are not listed there", ArchiveWarning, stacklevel=2)

            if not known and place in self._slow and len(self._slow) < len(self.places):
                found.append(None)
                failed.append(self._slow[place])
                continue
            self._away.discard(place)
            self._slow.pop(place, None)
            try:
                found.append(Index.read(place, known[number] if known else None, tell))
            except ArchiveUnavailableError as error:
                failed.append(error)
                found.append(None)
                self.tell(place, "index", error)
        if len(failed) == len(self.places):
            raise failed[0]
        return found

    def merged(self, found: Sequence[Index | None]) -> Index:
        """The index of all places. An ArchiveWarning tells of places that have other contents of a version."""
        index, parted = Index.merged([one for one in found if one is not None])
        if parted is not None and not self._told_parted:
            self._told_parted = True
            warnings.warn(
                f"{', '.join(place.url for place in self.places)}: these places have other contents of version "
                f"{parted}: two copies of a store went on without each other, or it was compacted in between. The one "
                "that has gone further is shown. To see all versions of a place, open it alone",
                ArchiveWarning,
                stacklevel=2,
            )
        return index

    def size(self, name: str) -> int:
        """Bytes of an object, in the first place that has it. Raises MissingObjectError."""
        *others, last = self._in_order()
        for place in others:
            try:
                return place.size(name)
            except (MissingObjectError, ArchiveDamagedError):
                pass
            except ArchiveUnavailableError:
                self._away.add(place)
        return last.size(name)

    def _in_order(self) -> builtins.list[Place]:
        return sorted(self.places, key=lambda place: place in self._away)

    def tell(self, place: Place, name: str, error: Exception) -> None:
        """An ArchiveWarning, once for each place and object, if there are other places. A place that does not answer is
        asked last from now on."""
        if isinstance(error, ArchiveUnavailableError):
            self._away.add(place)
        if len(self.places) > 1 and (place.url, name) not in self._told:
            self._told.add((place.url, name))
            warnings.warn(f"{place.url}: {error}: the other places are asked", ArchiveWarning, stacklevel=2)
