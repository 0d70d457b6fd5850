"""Which versions of an archive stay, and which parts nothing needs any more.

I26  A version is removed only when no version that stays needs it, and a part is deleted only when no row names it.
     Both happen after the newest versions are durable in the place, rows first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from pmstore.archive._format import Row
from pmstore.archive._index import Index, IndexWriter
from pmstore.archive._objects import Place
from pmstore.archive._sizes import count_of

__all__ = ["Keep", "forget", "leaving", "outside"]


class Keep(NamedTuple):
    """Which versions stay. The newest version and tagged ones always stay. Without any attribute, all stay.

    Attributes
    ----------
    last : int or None
        The number of the newest versions that stay.
    every : int or None
        Versions whose number is a multiple of it stay, too.
    age : float or None
        Versions that are at most so many seconds old stay, too.
    """

    last: int | None = None
    every: int | None = None
    age: float | None = None

    @classmethod
    def of(cls, given: Any) -> Keep:
        """Internal: the rules for the argument `keep` of `Store.drain`. Raises TypeError, ValueError."""
        if given is None:
            return cls()
        if isinstance(given, dict):
            if not given.keys() <= {"last", "every", "age"}:
                raise ValueError(f"keep has the keys 'last', 'every' and 'age', not {', '.join(map(repr, given))}")
            made = cls(**given)
        elif isinstance(given, cls):
            made = given
        else:
            made = cls(last=given)
        for name, number in (("last", made.last), ("every", made.every)):
            if number is not None:
                count_of(number, f"keep: {name} is a number of versions")
        try:
            age = None if made.age is None else float(made.age)
        except (TypeError, ValueError):
            raise TypeError(f"keep: age is a number of seconds, not {made.age!r:.80}") from None
        if age is not None and not age >= 0:
            raise ValueError(f"keep: age is a number of seconds, not {made.age!r}")
        return made._replace(age=age)

    def stays(self, number: int, row: Row, now: float) -> bool:
        """Internal: whether a listed version stays. number: of the listed ones that are newer."""
        if self == Keep():
            return True
        by_number = self.last is not None and number < self.last
        by_step = self.every is not None and row.version % self.every == 0
        return by_number or by_step or (self.age is not None and now - row.time <= self.age)


def outside(index: Index, keep: Keep, now: float) -> set[int]:
    """The listed versions that the rules of `keep` do not keep."""
    listed = [row for row in index.rows() if row.kept]
    return {row.version for number, row in enumerate(reversed(listed)) if not keep.stays(number, row, now)}


def leaving(index: Index, keep: Keep, tagged: Collection[int], now: float, until: int) -> set[int]:
    """The versions that go by the rules of `keep`; none as long as they are few. until: versions above it stay, as
    another place lacks them."""
    kept = index.kept()
    stay = {*kept[-1:], *tagged}
    going = {version for version in outside(index, keep, now) - stay if version <= until}
    return going if len(going) * 16 >= len(kept) else set()  # in one go, so that each version costs little


def forget(
    writer: IndexWriter,
    place: Place,
    going: set[int],
    tagged: Callable[[], Iterable[int]],
    unneeded: set[str],
    needed: Collection[str] = (),
) -> None:
    """Remove versions from the list, and delete the parts that no other version needs. None of them had a tag before
    this call; tagged: reads which ones have one now. unneeded: parts that an earlier call could not delete; it gets
    those of this call if it raises ArchiveUnavailableError. needed: parts that later rows may name, although none does
    now.

    `Archive.tag` makes the tag, and then looks whether the version is still listed::

        tag       make the tag                                  ▶  is it listed?
        forget    read the tags  ▶  write the list without it   ▶  read the tags again  ▶  put it back, or delete

    If it saw the version, its tag is there when the tags are read again. Only a process that is killed, or whose
    writer is ended by another one, between its last two steps leaves such a tag without its version.

    Another writer may have begun before the new list was there. It then lists the versions as before, and needs the
    parts. One that begins later reads the new list::

        write the list  ▶  is this the newest writer?  ▶  delete the parts
    """
    if not going:
        return
    before = writer.index
    unneeded.update(part for row in before.rows() for part in row.parts)  # perhaps; also if a step below fails
    writer.change(_without(before, going))
    late = going.intersection(tagged())
    if late:
        writer.change(_without(before, going - late), before)
    unneeded.difference_update(part for row in writer.index.rows() for part in row.parts)
    unneeded.difference_update(needed)
    writer.require_newest()
    place.once.delete(sorted(unneeded))
    unneeded.clear()


def _without(index: Index, going: set[int]) -> Callable[[Row], Row | None]:
    """What becomes of each row."""
    needed = _needed(index, going)

    def after(row: Row) -> Row | None:
        if row.version not in needed:
            return None
        return row._replace(kept=False) if row.version in going else row

    return after


def _needed(index: Index, going: set[int]) -> set[int]:
    """Versions that stay, and those that they need. The newest is needed: the next one may be its differential."""
    needed: set[int] = set()
    rows = list(index.rows())
    wanted = {rows[-1].version} if rows else set()
    for row in reversed(rows):  # what a version needs is older
        if row.version in wanted or (row.kept and row.version not in going):
            needed.add(row.version)
            if row.previous is not None:
                wanted.add(row.previous)
    return needed
