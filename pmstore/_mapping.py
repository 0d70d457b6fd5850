"""What a store and a group have in common: a mapping from names to values, under a prefix."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from pmstore._array import Array
from pmstore._catalog import MISSING, Catalog
from pmstore._derived import Derived, declare
from pmstore._list import PersistentList
from pmstore._names import check_name, key_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from pmstore._display import Row
    from pmstore._store import Store

__all__ = ["Group", "NameMapping"]

Shape = Any  # int or a sequence of int


class NameMapping(MutableMapping[str, Any]):
    """The names that start with a prefix, relative to it, and their values."""

    __slots__ = ("__weakref__", "_catalog", "_prefix")

    _catalog: Catalog
    _prefix: str  # "" or a group's name and "/"

    # ---- reading

    def __getitem__(self, name: str) -> Any:
        """The value under a name.

        The live array, always the same object as long as one refers to it; a `PersistentList`; the value of a derived
        array, as of `Derived`; or a plain copy of any other value. UnknownNameError (a KeyError), CorruptStoreError,
        ClosedStoreError.
        """
        value = self._catalog.get(self._full(name))
        if value is MISSING:
            raise self._catalog.unknown(name, self._prefix)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """The value under a name, or the default."""
        value = self._catalog.get(self._full(name))
        return default if value is MISSING else value

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        try:
            key = key_of(self._prefix + name)
        except ValueError:
            return False
        with self._catalog.lock:
            return self._catalog.core.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        """The names, sorted by code point. What is added or deleted meanwhile may or may not show."""
        self._catalog.core.require_open()  # now, and not at the first name
        return self._catalog.names(self._prefix)

    def __len__(self) -> int:
        return self._catalog.count(self._prefix)

    def __bool__(self) -> bool:
        return True  # an open store, not a question about names; len() is that

    def _rows(self) -> Iterator[Row]:
        return self._catalog.rows(self._prefix)

    def __repr__(self) -> str:
        from pmstore._display import title_text

        return title_text(self)

    def __str__(self) -> str:
        from pmstore._display import tree_text

        return tree_text(self)

    def _repr_html_(self) -> str:
        from pmstore._display import tree_html

        return tree_html(self)

    # ---- copies

    def __copy__(self) -> Any:
        """Itself: it stands for the store, as an open file stands for its contents. dict() copies what it holds."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Itself, for the same reason, so that what holds it can be copied."""
        return self

    # ---- changing

    def __setitem__(self, name: str, value: Any) -> None:
        """Copies a value into the store.

        An array goes into the existing one if that has the same shape, dtype and order, so that live references see
        it; any other value takes the name, and what had it before is detached. An array that takes the place of one
        with writeable=False can't be written either. TypeError with a hint for what can't be stored;
        NameConflictError, OutOfSpaceError (the old value stays), ReadOnlyStoreError, ClosedStoreError.
        """
        self._catalog.set(self._full(name), value)

    def __delitem__(self, name: str) -> None:
        """Deletes a name. An array that was handed out is detached: it keeps its bytes, and is not committed again."""
        if not self._catalog.delete(self._full(name)):
            raise self._catalog.unknown(name, self._prefix)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """The value under a name, which is set to the default first if there is none: the stored one, not the
        default.
        """
        full = self._full(name)
        with self._catalog.deriving, self._catalog.lock:
            value = self._catalog.get(full)
            if value is MISSING:
                self._catalog.set(full, default)
                value = self._catalog.get(full)
            return value

    _RAISE = object()

    def pop(self, name: str, default: Any = _RAISE) -> Any:
        """Delete a name and give back its value: a detached array, a plain list for a persistent one."""
        full = self._full(name)
        with self._catalog.deriving, self._catalog.lock:
            value = self._catalog.get(full)
            if value is MISSING:
                if default is self._RAISE:
                    raise self._catalog.unknown(name, self._prefix)
                return default
            if isinstance(value, PersistentList):
                value = list(value)
            self._catalog.delete(full)
            return value

    def popitem(self) -> tuple[str, Any]:
        """Delete the first name and give back it and its value. KeyError if there is none."""
        with self._catalog.deriving, self._catalog.lock:
            for name in self:
                return name, self.pop(name)
        raise KeyError("there are no names")

    def clear(self) -> None:
        """Delete all names."""
        with self._catalog.lock:
            self._catalog.writable()
            for name in self:
                self._catalog.delete(self._prefix + name)

    def create_array(
        self,
        name: str,
        shape: Shape,
        dtype: npt.DTypeLike = float,
        *,
        order: str = "C",
        fill_value: Any = 0,
        writeable: bool = True,
    ) -> Array:
        """Create an array.

        Parameters
        ----------
        name : str
            Must not be taken: NameConflictError (a ValueError).
        shape : int or sequence of int
            Lengths of the axes, in elements.
        dtype : data type
            Any that numpy has but those that hold Python objects, or text of no length, as "U" (TypeError).
        order : {"C", "F"}
            Which axis is contiguous in memory: the last or the first.
        fill_value : scalar or ndarray
            What the elements are at first; an ndarray is broadcast to the shape. 0 makes all bytes zero, as np.zeros.
        writeable : bool
            False for data that stay as they are created: they cost no memory but that of the file's pages.

        Returns
        -------
        ndarray
            The live array: changes of it become durable with the next commit.

        Raises
        ------
        OutOfSpaceError, TooLargeError, NameConflictError, InvalidNameError, ReadOnlyStoreError, ClosedStoreError
        """
        return self._catalog.create_array(self._full(name), shape, dtype, order, fill_value, writeable)

    def require_array(
        self,
        name: str,
        shape: Shape,
        dtype: npt.DTypeLike = float,
        *,
        order: str = "C",
        fill_value: Any = 0,
        writeable: bool = True,
    ) -> Array:
        """The array under a name, which is created as by `create_array` if there is none.

        NameConflictError (a ValueError), which shows both, if what is there has another shape or dtype, or can be
        written and writeable=False is asked for. One that can't be written is given in any case; its order may be
        another too.
        """
        return self._catalog.require_array(self._full(name), shape, dtype, order, fill_value, writeable)

    def create_list(self, name: str) -> PersistentList:
        """Create an empty persistent list. NameConflictError (a ValueError) if the name is taken."""
        return self._catalog.create_list(self._full(name))

    def derive(
        self,
        name: str,
        function: Callable[..., Any],
        *inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        version: int | str = 1,
        policy: str = "auto",
        verify: Any = None,
        replace: bool = False,
    ) -> Derived:
        """Declare an array that is a function of others: computed when it is read, for what they hold then, and not
        logged unless that is cheaper.

        To be called by every program that reads the array, each time it opens the store: the store keeps the function's
        name and nothing of its code. See docs/derived.md.

        Parameters
        ----------
        name : str
            Of the array; must not be taken by what isn't derived.
        function : callable
            Called with the inputs, which it can't write to; returns an ndarray. It has to give the same for the same
            inputs, and is known by its import path: a function of a module, or a static or class method.
        *inputs : str, ndarray or value
            A str is a name, of this store or group: an array, a value, another derived array. Anything else is passed
            as it is, and is part of what the value depends on, but not of the store: arrays by reference, other values
            as a copy.
        kwargs : dict, optional
            Keyword arguments: arrays and values as of inputs, but a str is a str.
        version : int or str
            Of the function: another one makes the value another one.
        policy : {"auto", "recompute", "store"}
            "recompute": the store has the declaration alone. "store": what was read, or `set`, before a commit is
            committed with it, and loaded after a recovery if it is that of the inputs. "auto": one of them, decided by
            measured times; `Derived.decision` says which and why.
        verify : {None, "hash"}, float or (float, float)
            Whether a value that is computed again for the same inputs, after a recovery say, is compared with what it
            was: bit by bit, or within a relative, or a relative and an absolute tolerance by a summary of it.
        replace : bool
            Accept that the store has another declaration under the name, whose value is dropped.

        Returns
        -------
        Derived

        Raises
        ------
        DerivedMismatchError
            The store has another function, version or inputs under the name.
        DerivedArrayError
            The array would need itself.
        NameConflictError, TypeError, ValueError, ReadOnlyStoreError, ClosedStoreError
        """
        return declare(self, name, function, inputs, kwargs, version, policy, verify, replace)

    def group(self, name: str) -> Group:
        """The mapping of the names below ``name + "/"``. Nothing is created: a group is there while it holds names."""
        full = self._full(name)
        check_name(full)
        return Group(self.store, full)

    @property
    @abstractmethod
    def store(self) -> Store:
        """The store itself."""

    def _full(self, name: Any) -> str:
        if not isinstance(name, str):
            check_name(name)  # TypeError
        return f"{self._prefix}{name}"


class Group(NameMapping):
    """The names of a store below ``name + "/"``, relative to it; iteration gives those of groups in it too.

    Made by `group` of a store or a group. Two groups are equal if they are the same names of the same store.
    """

    __slots__ = ("_name", "_store")

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._catalog = store._catalog
        self._prefix = name + "/"

    @property
    def store(self) -> Store:
        """The store that the group is of."""
        return self._store

    @property
    def name(self) -> str:
        """The full name, without a "/" at its end."""
        return self._name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self._store is other._store and self._name == other._name

    def __hash__(self) -> int:
        return hash((Group, id(self._store), self._name))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a Group of an open store can't be pickled; dict(group) copies what it holds")
