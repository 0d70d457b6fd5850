"""Noticing lost updates: copies of lists, dicts and arrays that were read, changed, and not assigned back.

At the next commit, each copy that was handed out is encoded again, and its hash is compared with the earlier one.
Copies that have no other reference by then, as after ``store["config"]["lr"] = 2``, are checked only this once. The
others are checked again. One or two copies that take at most about 1 KiB together are checked at every commit. More or
larger ones are checked after 2, 4, 8, ... commits, so that merely holding copies costs little. Closing the store checks
all of them.

Views of rows that have moved, because their array grew, are checked at the next commit, too (see `growing.py`).
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from pmstore._catalog import names
from pmstore._core import hash64
from pmstore._interrupts import later
from pmstore._values.array import Array
from pmstore._values.values import encode

__all__ = ["LARGEST", "Form", "Guards", "LostUpdates", "Moved"]

LARGEST = 64 << 20  # bytes encoded: larger ones would take too much memory for a warning
_EACH = 1 << 9  # bytes that take as long to encode as the fixed work of checking one copy
_AT_ONCE = _EACH + (1 << 10)  # the limit for both together, for the copies that every commit checks
_LONG = 1 << 20  # instead of the size of a form that has become one of all contents
_LOOKS = 16  # guards that a commit looks at
_SWEEP = 64, 1 << 20  # number and encoded bytes of copies handed out before unreferenced ones are forgotten
# What encoding a value raises while another thread changes it.
_OF_ENCODING = AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError
# The references to a value that only LostUpdates has: the _Seen's attribute and getrefcount's argument.
_OURS = 2


class Form(NamedTuple):
    """The form in which a change of a copy shows, if that is not its encoding.

    of: gives it of a copy. stored: it, as the store has the parts of the value; the type's `encode` may give others of
    an equal value. again: gives it of another copy of what is stored under a key. cost: bytes that take as long to
    encode as `of` takes, if that is longer.
    """

    of: Callable[[Any], bytes]
    stored: bytes
    again: Callable[[bytes], bytes]
    cost: int = 0


class _Seen:
    __slots__ = ("again", "checksum", "form", "key", "size", "stored", "value", "wait", "what")

    def __init__(self, key: bytes, what: str, value: Any, encoded: bytes, form: Form | None) -> None:
        self.key = key
        self.what = what
        self.value = value  # None: no longer checked
        self.size = len(encoded) if form is None else max(len(form.stored), form.cost)
        self.form = None if form is None else form.of
        self.again = None if form is None else form.again
        self.stored = hash64(encoded)  # of what the store has
        self.checksum = self.stored if form is None else hash64(form.stored)  # of the value when it last equalled that
        self.wait = 1  # commits between two checks


class Moved(NamedTuple):
    """Rows that have moved, of which arrays are alive: the offset of their extent, the number of bytes, their hash."""

    name: str
    offset: int
    arrays: list[weakref.ref[Array]]
    nbytes: int
    digest: int

    def changed(self) -> bool:
        """Whether a program has changed the old rows since, through a view of them."""
        alive = next((array for array in (found() for found in self.arrays) if array is not None), None)
        return alive is not None and hash64(memoryview(alive.base)[: self.nbytes]) != self.digest  # type: ignore[arg-type]


class LostUpdates:
    """The values that were handed out and can be changed in place. Falsy as long as there are none.

    `any` is false if a commit has nothing to look at, and nothing to forget.

    Not thread-safe: the caller of every method holds the store's lock. A signal handler may interrupt it, and read or
    commit.

    Parameters
    ----------
    stored : callable
        Returns the encoding that is stored under a catalog key, or None.
    """

    __slots__ = (
        *("_commits", "_due", "_new", "_new_bytes", "_of", "_stored", "_sweep_at", "_told", "_unseen"),
        *("any", "changed", "guards", "moved", "seen"),
    )

    def __init__(self, stored: Callable[[bytes], bytes | None]) -> None:
        self._stored = stored
        self._commits = 0
        self.guards = Guards()
        self.clear()

    def __bool__(self) -> bool:
        return bool(self.seen) or bool(self.changed)

    def clear(self) -> None:
        """Forget every value that was handed out."""
        self.seen: dict[int, _Seen] = {}  # by the value's id, which stays unique because the _Seen refers to the value
        self._of: dict[bytes, set[_Seen]] = {}  # by the key of the entry that they are copies of
        self._unseen: list[_Seen] = []  # that no commit has checked
        self._due: dict[int, list[_Seen]] = {}  # the others, by the commit that checks them
        self.changed: list[str] = []  # warnings
        self.moved: list[Moved] = []  # since the last commit
        self._told = 0, 0  # so many of both are in the result of `lost`
        self._new, self._new_bytes = 0, 0  # handed out since the last sweep
        self._sweep_at = _SWEEP
        self._note_any()

    def _note_any(self) -> None:
        self.any = False  # first, as a handler may hand a value out meanwhile
        if self.seen or self.changed or self.moved or self.guards:
            self.any = True

    def handed_out(self, key: bytes, what: str, value: Any, encoded: bytes, form: Form | None = None) -> None:
        """A copy of the value under key goes to the user; `what` names it in a warning. encoded: what is stored."""
        size = len(encoded if form is None else form.stored)
        if size > LARGEST:
            self.any = True  # there may be a new guard
            return
        if self._new >= self._sweep_at[0] or self._new_bytes + size >= self._sweep_at[1]:
            self._sweep()
        if (before := self.seen.get(id(value))) is not None:
            self._forget(before)
        seen = self.seen[id(value)] = _Seen(key, what, value, encoded, form)
        self._of.setdefault(_entry(key), set()).add(seen)
        self._unseen.append(seen)
        self._new += 1
        self._new_bytes += seen.size
        self.any = True  # last: a commit before would take it back

    def assigned(self, value: Any, encoded: bytes, form: Callable[[Any], bytes] | None = None) -> None:
        """The value was stored. If it had been handed out, none of its changes until now is lost. form: see `Form.of`;
        None if it is the encoding."""
        seen = self.seen.get(id(value))
        if seen is not None:
            seen.checksum = seen.stored = hash64(encoded)
            seen.form = form and (seen.form or form)  # its own one knows the arrays with which it was handed out
            if seen.form is not None:
                seen.checksum = hash64(seen.form(value))
                seen.size = max(seen.size, _LONG)
        self.guards.sweep()

    def taken(self, value: Any) -> None:
        """The value was removed from the store, and is the program's own now."""
        seen = self.seen.get(id(value))
        if seen is not None:
            self._forget(seen)

    def shifted(self, list_id: int, numbers: Collection[int]) -> None:
        """The elements of a list that had these numbers have others now, or are gone: their copies can't be found
        again."""
        keys: Iterable[bytes] = map(functools.partial(names.element_key, list_id), numbers)
        if len(self._of) < len(numbers):
            places = ((key, names.split_element(key)) for key in self._of)
            keys = [key for key, place in places if place and place[0] == list_id and place[1] in numbers]
        for key in keys:
            for seen in list(self._of.get(key, ())):
                self._forget(seen)

    def renamed(self, moved: Iterable[tuple[bytes, bytes]]) -> None:
        """Entries that had the first key of each pair have the second one now."""
        for before, after in moved:
            for seen in list(self._of.get(before, ())):
                self._of.setdefault(after, set()).add(seen)
                seen.key = after + seen.key[len(before) :]
                if after[:1] == names.NAME_PREFIX:
                    seen.what = names.name_of(after)
            self._of.pop(before, None)

    def has_moved(self, rows: Moved) -> None:
        """The next commit looks whether a program has changed these rows."""
        self.moved.append(rows)
        self.any = True

    def lost(self, *, all_of_them: bool = False) -> list[str]:
        """Warnings of the values that were changed and not assigned back, and of the rows that were changed after they
        had moved.

        Every commit calls this before, and `committed` after. all_of_them: check also values that are not due yet.
        """
        self._commits += 1
        now = [seen for at in list(self._due) if at <= self._commits for seen in self._due.pop(at, ())]
        new = self._unseen[:]
        now += new
        del self._unseen[: len(new)]
        if all_of_them:
            now, self._due = list(self.seen.values()), {}
        at_once = 0
        now.reverse()
        try:
            while now:
                seen = now[-1]
                if seen.value is not None and self._check(seen):
                    cost = _EACH + seen.size
                    if at_once + cost <= _AT_ONCE:
                        at_once += cost
                        wait = 1
                    else:
                        wait = seen.wait = 2 * seen.wait
                    self._due.setdefault(self._commits + wait, []).append(seen)
                now.pop()
        except BaseException:  # of a signal handler: there is no commit, and the next one checks the others
            again = {id(seen) for due in self._due.values() for seen in due}
            self._unseen += [seen for seen in now if id(seen) not in again]
            raise
        changed, moved = self.changed[:], self.moved[:]
        self._told = len(changed), len(moved)
        self.guards.sweep()  # now that copies without other references are gone
        return changed + [_of_moved(one.name) for one in moved if one.changed()]

    def committed(self) -> None:
        """The commit has succeeded, and what `lost` returned becomes warnings."""
        del self.changed[: self._told[0]], self.moved[: self._told[1]]
        self._note_any()

    def _sweep(self) -> None:
        """Check the values that have no other reference, and forget them."""
        for seen in list(self.seen.values()):
            if sys.getrefcount(seen.value) <= _OURS:
                self._check(seen)
        for some in [self._unseen, *self._due.values()]:
            before = some[:]
            some[: len(before)] = [seen for seen in before if seen.value is not None]
        self._new, self._new_bytes = 0, 0
        held = sum(seen.size for seen in list(self.seen.values()))
        self._sweep_at = max(_SWEEP[0], len(self.seen)), max(_SWEEP[1], held)

    def _check(self, seen: _Seen) -> bool:
        """Whether the value is unchanged and still referenced, so that it must be checked again."""
        try:
            now = self._hash(seen)
        except Exception as error:
            now = self._hash_again(seen, error)
        if now == seen.checksum:
            if sys.getrefcount(seen.value) > _OURS:
                return True
        else:
            stored = self._stored(seen.key)
            # If the store has another value by now, the program assigned it knowingly.
            if stored is not None and hash64(stored) == seen.stored:
                self.changed.append(
                    f"{seen.what!r} was read from the store and changed, but not assigned back: the change is not in "
                    f"the store. {_place(seen)} = value stores it"
                )
        self._forget(seen)  # a warning was given, another value was assigned, or no reference is left
        return False

    @staticmethod
    def _hash(seen: _Seen) -> int:
        now = hash64((seen.form or encode)(seen.value))
        if now != seen.checksum and seen.form and seen.again and now == hash64(seen.again(seen.key)):
            seen.checksum, seen.size = now, max(seen.size, _LONG)
        return now

    def _hash_again(self, seen: _Seen, error: Exception) -> int:
        """The same after an error: -1 if the value now holds something that can't be stored. If it does not, the error
        is that of a signal handler, and is raised, or it came as another thread was changing the value."""
        try:
            with later():
                now = self._hash(seen)
        except Exception:
            return -1
        if isinstance(error, _OF_ENCODING):
            return now
        raise error

    def _forget(self, seen: _Seen) -> None:
        """Don't check a copy any more."""
        self.seen.pop(id(seen.value), None)
        seen.value = None
        same = self._of.get(_entry(seen.key), set())
        same.discard(seen)
        if not same:
            self._of.pop(_entry(seen.key), None)


class Guards:
    """Objects in pandas' accounts of arrays, where blocks have gone whose arrays others use (see `frames.guarded`).

    Falsy as long as there are none, and no blocks that one may be placed for. No Python code runs when a block goes:
    CPython ignores what a handler of a signal raises there.
    """

    __slots__ = ("_gone", "_placed", "_watched")

    def __init__(self) -> None:
        self._watched: set[_Watched] = set()
        self._gone: deque[_Gone] = deque()  # of blocks whose guard was placed
        self._placed: deque[_Watched] = deque()

    def __bool__(self) -> bool:
        return bool(self._watched) or bool(self._placed)

    def watch(self, block: Any, account: Any, blocks: Callable[[], Collection[Any]]) -> None:
        """Place a guard when the block is gone. blocks: those of the frame now, which may be new ones for the same
        arrays, as after ``del frame["x"]``."""
        guard = _Guard()
        watched = _Watched(block, operator.methodcaller("place", guard))
        if watched in self._watched:
            return
        gone = _Gone(block, self._gone.append)
        watched.account, watched.blocks, watched.guard, watched.gone = account, blocks, guard, gone
        watched.place = account.add_index_reference  # which takes any object
        gone.watched = watched
        self._watched.add(watched)

    def sweep(self) -> None:
        """Forget some guards that nobody needs any more: the others are gone, or are the block of the frame itself."""
        while self._gone:
            watched = self._gone.popleft().watched
            self._watched.discard(watched)
            self._placed.append(watched)
        for _ in range(min(len(self._placed), _LOOKS)):
            watched = self._placed.popleft()
            account, guard = watched.account, watched.guard
            users = [user for found in account.referenced_blocks if (user := found()) is not None and user is not guard]
            if len(users) == 1 and any(block is users[0] for block in watched.blocks()):
                account.referenced_blocks.remove(weakref.ref(guard))
                self.watch(users[0], account, watched.blocks)
            elif users:
                self._placed.append(watched)


class _Guard:
    __slots__ = ("__weakref__",)


class _Watched(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("account", "blocks", "gone", "guard", "place")

    account: Any
    blocks: Callable[[], Collection[Any]]
    gone: _Gone
    guard: _Guard
    place: Callable[[Any], None]


class _Gone(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("watched",)

    watched: _Watched


def _entry(key: bytes) -> bytes:
    """The key of the entry: that of an attribute is followed by the attribute's name."""
    return key[: key.index(0) + 1] if key[:1] == names.ATTRIBUTES_PREFIX else key


def _of_moved(name: str) -> str:
    return (
        f"{name!r} has moved because it grew, and a view of its old rows was changed since: the change is not in the "
        "store. Make views of the array that append() or resize() returned"
    )


def _place(seen: _Seen) -> str:
    """The left side of a statement that assigns the value."""
    if seen.key[:1] == names.ATTRIBUTES_PREFIX:
        return f"store.attrs({seen.key[1:].partition(bytes(1))[0].decode()!r})[{seen.what!r}]"
    element = names.split_element(seen.key)
    if element is None:
        return f"store[{seen.what!r}]"
    return f"store[{seen.what.rpartition('[')[0]!r}][{element[1]}]"
