"""The results of `Store.check` and `Store.stats`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, overload

from pmstore._catalog import attributes, objects
from pmstore._catalog import names as _names
from pmstore._catalog.catalog import Catalog
from pmstore._catalog.declaration import Declaration, Stamp
from pmstore._catalog.kinds import ARRAY, DERIVED, INLINE, LIST, OBJECT
from pmstore._core import BLOCK, GAP, Core, Entry, Row
from pmstore._errors import UNSOUND, CorruptStoreError
from pmstore._store.lineage import parent_of
from pmstore._store.notes import decoded
from pmstore._values.array import read_layout
from pmstore._values.values import decode

__all__ = ["CheckReport", "Problem", "Stats", "Waited", "check"]


class Waited(NamedTuple):
    """The result of `Store.wait`: the sequence number of the newest durable commit, and why the wait has ended.

    event: "commit", there is a newer one; "timeout"; "closed", the process that wrote the store has closed it; "died",
    it ended without.
    """

    sequence: int
    event: str


@dataclass(frozen=True)
class Stats:
    """Figures of an open store. Sizes are in bytes. Counts start at this opening, except `sequence` and `keys`.

    medium is "memory", "file" or "dax". tracker is the method that finds changed pages: "uffd", "pagemap" or "compare"
    (docs/architecture.md).

    domain is the persistence domain: what commits do for their medium (docs/guarantees.md). "process": memory that
    ends with the machine; "cpu_cache", "memory": persistent memory, where a power cut keeps the processor's caches, or
    loses them; "disk". PMSTORE_DOMAIN and media= may force another domain than that of the file system.

    bytes_logged, bytes_direct and bytes_home were written to the medium: to the log, as new contents directly to their
    place, and to the committed image. fences counts ordering points, syncs the calls that
    make the kernel or the disk write. log_size is the room for records, log_used the part that has records since the
    last checkpoint.

    file_size is the length of the file. It contains the log and the region, which has all contents: region_size is the
    size of the region, region_used the part that is in use. max_size is the argument of `pmstore.open`, 0 for none.

    commits counts commits. checkpoints counts how often the log was emptied, after its records were applied to the
    committed image. records_replayed counts the records that the opening found in the log and applied.

    durable_sequence is the last commit that is known to be durable: with durability="sync" the last commit, with
    "async" the last one that a sync has covered. dirty_bytes is the size of the changes in the last commit. buffers
    counts live arrays, and detached ones that still have references.
    """

    medium: str
    domain: str
    tracker: str
    sequence: int
    commits: int
    checkpoints: int
    records_replayed: int
    durable_sequence: int
    bytes_logged: int
    bytes_direct: int
    bytes_home: int
    fences: int
    syncs: int
    dirty_bytes: int
    file_size: int
    region_size: int
    region_used: int
    log_size: int
    log_used: int
    buffers: int
    keys: int
    max_size: int

    @property
    def bytes_written(self) -> int:
        """All bytes written to the medium."""
        return self.bytes_logged + self.bytes_direct + self.bytes_home


@dataclass(frozen=True)
class Problem:
    """One damaged or inconsistent place.

    name is the name of the array, value or list element, or None if no name owns the place. offset and length give the
    place in the file's region. block is the first bad block of 4096 bytes of the contents. rows is the range of the
    array's first axis (of its last one, if its order is "F") that the block covers, or None.
    """

    text: str
    name: str | None = None
    offset: int = 0
    length: int = 0
    block: int | None = None
    rows: range | None = None
    axis: int = 0

    def __str__(self) -> str:
        text = self.text if self.name is None else f"{self.name!r}: {self.text}"
        if self.rows is not None:
            axis = "rows" if self.axis == 0 else f"places of axis {self.axis}"
            text += f" ({axis} {self.rows.start} to {self.rows.stop - 1})"
        return text


class CheckReport(Sequence[Problem]):
    """The problems that were found, as a sequence, which is empty if the store is valid."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems = tuple(problems)

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self._problems

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Problem, ...]: ...
    def __getitem__(self, index: int | slice) -> Problem | tuple[Problem, ...]:
        return self._problems[index]

    def __str__(self) -> str:
        if self.ok:
            return "valid"
        return "\n".join(["1 problem:" if len(self) == 1 else f"{len(self)} problems:", *map(str, self)])

    def __repr__(self) -> str:
        return f"<CheckReport: {self}>"


_UNKNOWN = "is of an unknown kind; perhaps a newer pmstore wrote it"

Owners = dict[int, tuple[str, objects.Head]]  # by the object's id, its name and head


def check(catalog: Catalog, gaps: list[bytes] | None = None) -> CheckReport:
    """Let the core verify structures and hashes, then verify names, layouts, values and lists, which the core does not
    know. gaps: for salvage, gets pairs of keys between which others may be missing,
    one after the other."""
    with catalog.lock:
        lists: dict[int, str] = {}
        owners: Owners = {}
        problems = _structure(catalog, lists, owners)
        damaged = {problem.name for problem in problems}
        for offset, length, block, key, text in catalog.core.check():
            if block == GAP and gaps is not None:
                gaps.append(key)
                continue
            found = _problem(catalog, lists, owners, offset, length, block, key, text)
            if found.name is not None and found.name in damaged:  # the core reports the place
                problems = [problem for problem in problems if problem.name != found.name]
            elif key[:1] == _names.ATTRIBUTES_PREFIX:
                problems = [problem for problem in problems if (problem.name, problem.offset) != (None, offset)]
            problems.append(found)
    return CheckReport(problems)


def _structure(catalog: Catalog, lists: dict[int, str], owners: Owners) -> list[Problem]:
    lengths: dict[int, int] = {}
    steps = chain(  # names come first: elements and parts are checked against them
        _failing(catalog, _names.NAME_PREFIX, partial(_check_named, lists, owners), _name),
        _failing(
            catalog, _names.LIST_PREFIX, partial(_check_element, lists, lengths), partial(_name_of_element, lists)
        ),
        (_at(row, text, name) for name, row, text in objects.check_parts(catalog, owners)),
        _failing_note(catalog),
        _failing_lineage(catalog),
        _failing_attributes(catalog),
        _failing(catalog, _names.DERIVED_PREFIX, _check_derived, _derived_name),
        (_at(row, f"the key {row.key!r:.80} {_UNKNOWN}", None) for row in _unknown(catalog.core)),
    )
    problems = []
    try:
        for problem in steps:
            problems.append(problem)  # those that were found before an error stay
    except UNSOUND as error:
        problems.append(Problem(str(error)))
    return problems


def _at(row: Row, text: str, name: str | None) -> Problem:
    return Problem(text, name, row.entry.offset, row.entry.length)


def _failing(
    catalog: Catalog, prefix: bytes, check: Callable[[Catalog, Row], None], name: Callable[[bytes], str | None]
) -> Iterator[Problem]:
    """The problems of the rows under a prefix. check: raises one of UNSOUND. name: gives the name to a key."""
    for row in catalog.core.scan(prefix):
        try:
            check(catalog, row)
        except UNSOUND as error:
            yield _at(row, str(error), name(row.key))


def _failing_attributes(catalog: Catalog) -> Iterator[Problem]:
    for row in catalog.core.scan(_names.ATTRIBUTES_PREFIX):
        try:
            _check_attributes(catalog, row.key, row.entry)
        except UNSOUND as error:
            yield _of_attributes(row.key, str(error), row.entry.offset, row.entry.length)


def _failing_note(catalog: Catalog) -> Iterator[Problem]:
    try:
        if (note := catalog.note()) is not None:
            decoded(note)
    except UNSOUND as error:
        yield Problem(f"the note of the last commit: {error}")


def _failing_lineage(catalog: Catalog) -> Iterator[Problem]:
    try:
        parent_of(catalog.core)
    except UNSOUND as error:
        yield Problem(str(error))


def _check_named(lists: dict[int, str], owners: Owners, catalog: Catalog, row: Row) -> None:
    """Check the entry of a name, and note the owners of elements and parts."""
    name = _names.name_of(row.key)
    if row.entry.kind == LIST:
        _check_owner(lists.setdefault(catalog.list_id(row.entry), name), name, "elements")
    elif row.entry.kind == OBJECT:
        head = objects.head_of(row.entry)
        owner, _ = owners.setdefault(head.id, (name, head))
        _check_owner(owner, name, "parts")
        objects.rows(catalog, row.entry)
    else:
        _check_entry(catalog, row.entry)


def _check_element(lists: dict[int, str], lengths: dict[int, int], catalog: Catalog, row: Row) -> None:
    """Check an element of a list. lengths: the number of the next one, by the list's id. Of elements that follow one
    another behind a gap, or that are of no list, the first is told."""
    place = _names.split_element(row.key)
    expected = 0 if place is None else lengths.get(place[0], 0)
    if place is not None:
        lengths[place[0]] = place[1] + 1
        if place[0] not in lists and expected:
            return
    if place is None or place[0] not in lists or place[1] != expected or row.entry.kind == ARRAY:
        raise CorruptStoreError("an element of a list is out of its place")
    _check_entry(catalog, row.entry)


def _name(key: bytes) -> str | None:
    with contextlib.suppress(CorruptStoreError):
        return _names.name_of(key)
    return None


def _name_of_element(lists: dict[int, str], key: bytes) -> str | None:
    place = _names.split_element(key)
    return None if place is None else _element_name(lists, place)


def _check_owner(owner: str, name: str, what: str) -> None:
    if owner != name:  # if one of them were deleted, the other would lose them (I37)
        raise CorruptStoreError(f"its {what} are those of {owner!r}, too")


def _unknown(core: Core) -> Iterator[Row]:
    """The first row of each unknown prefix, and the first unknown one of the store's own keys."""
    start = b""
    while (row := next(core.scan(b"", start=start), None)) is not None:
        if row.key in _names.HIDDEN_KEYS:
            start = row.key + b"\0"
            continue
        if not row.key.startswith(_names.PREFIXES):
            yield row
        if row.key[0] == 0xFF:
            return
        start = bytes([row.key[0] + 1])


def _check_derived(catalog: Catalog, row: Row) -> None:
    """Check the stamp or the stored value of a derived array."""
    key, entry = row.key, row.entry
    owner = _names.owner_of(key)
    declared = None if owner is None else catalog.core.get(owner)
    if declared is None or declared.kind != DERIVED:
        raise CorruptStoreError("a part of a derived array that isn't declared")
    if entry.kind != (INLINE if key.endswith(b"s") else ARRAY):
        raise CorruptStoreError("a part of a derived array is of the wrong kind")
    if entry.kind == ARRAY:
        read_layout(catalog.core, entry)
    else:
        Stamp.decode(entry.meta)


def _check_attributes(catalog: Catalog, key: bytes, entry: Entry) -> None:
    name = _names.owner_of_attributes(key)
    attributes.decoded(catalog, entry)
    if name and not catalog.exists(_names.key_of(name)):
        raise CorruptStoreError("there is nothing of that name")  # I38


def _of_attributes(key: bytes, text: str, offset: int, length: int, block: int | None = None) -> Problem:
    """A problem of attributes. It has no name: what they belong to is sound."""
    owner = key[1:].decode("utf-8", "backslashreplace").rstrip("\0")
    return Problem(f"the attributes of {attributes.what_of(owner)}: {text}", None, offset, length, block)


def _derived_name(key: bytes) -> str | None:
    owner = _names.owner_of(key)
    return None if owner is None else owner[1:].decode("utf-8", "backslashreplace")


def _check_entry(catalog: Catalog, entry: Entry) -> None:
    if entry.kind == ARRAY:
        read_layout(catalog.core, entry)
    elif entry.kind == DERIVED:
        Declaration.decode(catalog.encoded(entry))
    else:
        decode(catalog.encoded(entry), raw=True)


def _element_name(lists: dict[int, str], place: tuple[int, int]) -> str | None:
    name = lists.get(place[0])
    return None if name is None else f"{name}[{place[1]}]"


def _problem(
    catalog: Catalog,
    lists: dict[int, str],
    owners: Owners,
    offset: int,
    length: int,
    block: int,
    key: bytes,
    text: str,
) -> Problem:
    if not key:
        return Problem(text, None, offset, length)
    if key[:1] == _names.ATTRIBUTES_PREFIX:
        return _of_attributes(key, text, offset, length, block)
    name: str | None = None
    place = _names.split_element(key)
    if place is not None:
        name = _element_name(lists, place)
    elif (part := _names.split_part(key)) is not None:
        name = f"{owners[part[0]][0]}[{part[2]}]" if part[0] in owners else None
    elif key[:1] == _names.NAME_PREFIX:
        name = key[1:].decode("utf-8", "backslashreplace")
    else:
        name = _derived_name(key)
    rows, axis = None, 0
    try:
        entry = catalog.core.get(key)
        if entry is not None and entry.kind == ARRAY:
            described = read_layout(catalog.core, entry)
            axis = len(described.shape) - 1 if described.order == "F" else 0
            rows = _rows(described.nbytes, described.shape[axis] if described.shape else 1, block)
    except UNSOUND:
        pass
    return Problem(text, name, offset, length, block, rows, axis)


def _rows(nbytes: int, count: int, block: int) -> range | None:
    """The range of parts that a block covers, if nbytes bytes are divided into count equal parts."""
    first, last = block * BLOCK, min((block + 1) * BLOCK, nbytes) - 1
    if first >= nbytes:
        return None
    size = nbytes // count
    return range(first // size, last // size + 1)
