"""The common part of a store and a group: a mapping from names to values, under a prefix."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore._catalog import attributes, copying, growing, listing, objects
from pmstore._catalog.attributes import OwnAttributes
from pmstore._catalog.catalog import COMPUTED, MISSING, Catalog
from pmstore._catalog.kinds import OBJECT
from pmstore._catalog.lists import PersistentList
from pmstore._catalog.names import check_name, key_of
from pmstore._derived.arrays import DerivedArrays, asked
from pmstore._derived.derived import Derived
from pmstore._errors import Error
from pmstore._interrupts import later
from pmstore._store import elsewhere
from pmstore._values.array import Array, Layout
from pmstore._values.registry import Parts, made
from pmstore._values.tensors import array_of_tensor, is_tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from pmstore._display import Row
    from pmstore._store.store import Store

__all__ = ["Group", "NameMapping"]

_COMPLETIONS = 10_000

Shape = Any  # int or a sequence of int

# pmstore._watch.plot, which knows fits, too. It draws a name of a store into axes, or into new ones for None.
plotter: Callable[[Store, str, Any], Any] | None = None


class NameMapping(MutableMapping[str, Any]):
    """The names that start with a prefix, relative to it, and their values."""

    __slots__ = ("__weakref__", "_catalog", "_derived", "_prefix")

    _catalog: Catalog
    _derived: DerivedArrays
    _prefix: str  # "", or a group's name and "/"

    # ---- reading

    def __getitem__(self, name: str) -> Any:
        """The value under a name.

        The live array, which is the same object as long as a reference to it exists; a `PersistentList`; the value of a
        derived array (see `Derived`); or a plain copy of any other value. Raises UnknownNameError (a KeyError),
        CorruptStoreError, ClosedStoreError.
        """
        value = self._value(self._full(name))
        if value is MISSING:
            raise self._catalog.unknown(name, self._prefix)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """The value under a name, or the default."""
        value = self._value(self._full(name))
        return default if value is MISSING else value

    def __contains__(self, name: object) -> bool:
        """Whether there is such a name, or a group with names in it."""
        if not isinstance(name, str):
            return False
        try:
            key = key_of(self._prefix + name)
        except ValueError:
            return False
        with self._catalog.lock:
            return self._catalog.exists(key)

    def __getattr__(self, name: str) -> Any:
        hint = f"; instead: {elsewhere.METHODS[name]}" if name in elsewhere.METHODS else ""
        if not name.startswith("_"):
            with contextlib.suppress(Error):  # also of a closed store: hasattr() must go on
                hint = f"; the value of that name is store[{name!r}]" if name in self else hint
        raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}{hint}", name=name, obj=self)

    def __iter__(self) -> Iterator[str]:
        """The names, sorted by code point. Names added or deleted during the iteration may appear or not."""
        self._catalog.core.require_open()  # now, not at the first name
        return self._catalog.names(self._prefix)

    def __len__(self) -> int:
        return self._catalog.count(self._prefix)

    def __bool__(self) -> bool:
        return True  # bool() says that the store is open; len() counts names

    def _rows(self) -> Iterator[Row]:
        return listing.rows(self._catalog, self._prefix)

    def _brief(self) -> dict[str, str]:
        return attributes.brief(self._catalog, self._prefix)

    def _attributes(self) -> dict[str, dict[str, Any]]:
        names = attributes.below(self._catalog, self._prefix[:-1])
        return {
            name[len(self._prefix) :]: {
                key: attributes.readable(value) for key, value in attributes.all_of(self._catalog, name).items()
            }
            for name in names
        }

    def _layout(self, name: str) -> Layout:
        return self._catalog.layout_of(self._full(name))

    def __repr__(self) -> str:
        from pmstore._display import title_text

        return title_text(self)

    def __str__(self) -> str:
        from pmstore._display import tree_text

        return tree_text(self)

    def _ipython_key_completions_(self) -> list[str]:
        """The names that a notebook offers as completions; only the first ones of a large store."""
        try:
            return list(islice(self, _COMPLETIONS))
        except Error:
            return []

    def _repr_html_(self) -> str:
        from pmstore._display import tree_html

        return tree_html(self)

    # ---- copies

    def __copy__(self) -> Any:
        """The mapping itself: it stands for the store, as an open file stands for its contents. dict() has the live
        arrays, and `Store.read` copies values."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The mapping itself, for the same reason, so that objects that hold it can be copied."""
        return self

    # ---- changing

    def __setitem__(self, name: str, value: Any) -> None:
        """Copies a value into the store.

        An array is copied into the existing array if that has the same shape, dtype and order, so that live references
        see the change. Any other value takes over the name, and the old value is detached. An array that replaces one
        with writeable=False can't be written either. Raises TypeError with a hint for a value that can't be stored,
        NameConflictError, OutOfSpaceError (the old value stays), ReadOnlyStoreError, ClosedStoreError.
        """
        self._catalog.set(self._full(name), value)

    def __delitem__(self, name: str) -> None:
        """Deletes a name. A live array under it is detached: it keeps its bytes, and is not committed again."""
        if not self._delete(self._full(name)):
            raise self._catalog.unknown(name, self._prefix)

    def parts(self, name: str) -> Parts:
        """The parts of the value under a name, whose type was registered with `pmstore.register`.

        It is the way to the data of a value whose type is not registered here, or whose `decode` fails. Arrays are
        live, as they are in the value. Raises UnknownNameError (a KeyError), TypeError if the value has no parts,
        CorruptStoreError, ClosedStoreError.
        """
        full = self._full(name)
        found = self._catalog.parts(full)
        if found is MISSING:
            raise self._catalog.unknown(name, self._prefix)
        if not isinstance(found, Parts):
            raise TypeError(f"{full!r} is not of a registered type, and has no parts: store[name] reads it")
        return found

    def setdefault(self, name: str, default: Any = None) -> Any:
        """The stored value under a name. If there is none, the default is stored first; its stored form is returned."""
        full = self._full(name)
        with self._derived.lock, self._catalog.lock, later():
            value = self._value(full)
            if value is MISSING:
                self._catalog.set(full, default)
                value = self._value(full)
            return value

    _RAISE = object()

    def pop(self, name: str, default: Any = _RAISE) -> Any:
        """Delete a name and return its value: a detached array, or a plain list for a persistent one."""
        full = self._full(name)
        with self._derived.lock, self._catalog.lock, later():
            value = self._value(full)
            if value is MISSING:
                if default is self._RAISE:
                    raise self._catalog.unknown(name, self._prefix)
                return default
            if isinstance(value, PersistentList):
                value = list(value)
            self._delete(full)
            self._catalog.lost_updates.taken(value)
            return value

    def popitem(self) -> tuple[str, Any]:
        """Delete the first name and return it with its value. Raises KeyError if there is none."""
        with self._derived.lock, self._catalog.lock, later():
            for name in self:
                return name, self.pop(name)
        raise KeyError("there are no names")

    def clear(self) -> None:
        """Delete all names."""
        with self._catalog.lock, later():
            self._catalog.writable()
            for name in self:
                self._delete(self._prefix + name)

    def rename(self, old: str, new: str) -> None:
        """Give a name, or all names of a group, another name: ``store.rename("model", "old/model")``.

        No contents are copied: a name takes microseconds, whatever the size of its value. Arrays that were read under
        the old name stay live, and a `PersistentList` stays usable. All names change, or none of them. It is part of
        the transaction: the next commit makes it durable, and readers see the old names or the new ones.

        Derived arrays name their inputs, so the name of an input can't change alone: reading the derived array then
        raises DerivedArrayError, until the input is back or the array is declared with another one. In a group that is
        renamed, derived arrays follow inputs of the same group. `derive` has to be called with the new name.

        Raises UnknownNameError (a KeyError); NameConflictError (a ValueError) if the new name is taken, a group, below
        the old name, or below a value; InvalidNameError; DerivedArrayError if an array would depend on itself;
        CorruptStoreError or StoreIOError for damaged names; OutOfSpaceError, ReadOnlyStoreError, ClosedStoreError. The
        contents of a damaged array are not read, and stay damaged under the new name.
        """
        self.store._commits.settle_before()
        names = self._full(old), self._full(new)
        with self._derived.lock:
            for name in copying.rename(self._catalog, *names, self._derived.refuse_cycle, self._prefix):
                self._derived.forget(name)

    def copy(self, source: str, destination: str) -> None:
        """Copy the value of a name, or all names of a group, to another name.

        The copy of an array has the same dtype, order and `writeable`, the copy of a list is a list of its own. Pending
        changes are copied, too. Derived arrays are copied with their stored values; in a group, the copies are derived
        from the copies of inputs of the same group. Errors are those of `rename`, and CorruptStoreError or StoreIOError
        for damaged contents, which are not copied. Either everything is copied, or nothing is.
        """
        self.store._commits.settle_before()
        names = self._full(source), self._full(destination)
        with self._derived.lock:
            copying.copy(self._catalog, *names, self._derived.refuse_cycle, self._prefix)

    @elsewhere.explains
    def create_array(
        self,
        name: str,
        shape: Shape | None = None,
        dtype: npt.DTypeLike | None = None,
        *,
        data: npt.ArrayLike | None = None,
        order: str = "C",
        fill_value: Any = 0,
        writeable: bool = True,
        maxshape: Any = None,
    ) -> Array:
        """Create an array.

        Parameters
        ----------
        name : str
            Raises NameConflictError (a ValueError) if the name is taken.
        shape : int or sequence of int
            Lengths of the axes, in elements. With `data` it may be left out, and is the same otherwise (ValueError).
        dtype : data type
            Any dtype of numpy, except those that hold Python objects, and text without a length, such as "U"
            (TypeError). By default that of `data`, or float64.
        data : array-like, optional
            The first value, which is copied.
        order : {"C", "F"}
            The axis that is contiguous in memory: the last ("C") or the first ("F").
        fill_value : scalar, ndarray or tensor of torch
            The first value of the elements; an ndarray or a tensor is broadcast to the shape. 0 makes all bytes zero,
            like np.zeros.
        writeable : bool
            False for data that never change: they need no memory except that of the file's pages.
        maxshape : sequence of int and None, optional
            Of an array that grows along its first axis, by `append` and `resize`: the shape that it may have, None for
            any length. The other axes are those of the shape. Up to 64 MiB, a bounded maxshape gets all of its space
            now, and the array never moves. By default the array does not grow.

        Returns
        -------
        ndarray
            The live array: its changes become durable with the next commit.

        Raises
        ------
        OutOfSpaceError, TooLargeError, NameConflictError, InvalidNameError, ReadOnlyStoreError, ClosedStoreError
        """
        if data is not None:
            if not (isinstance(fill_value, int) and fill_value == 0):
                raise ValueError("create_array() takes data or fill_value, not both")
            shape, dtype, fill_value = _like(data, shape, dtype)
        elif shape is None:
            raise TypeError("create_array() needs a shape, or data=… whose shape it takes")
        return self._catalog.create_array(
            self._full(name), shape, float if dtype is None else dtype, order, fill_value, writeable, maxshape
        )

    @elsewhere.explains
    def require_array(
        self,
        name: str,
        shape: Shape,
        dtype: npt.DTypeLike = float,
        *,
        order: str = "C",
        fill_value: Any = 0,
        writeable: bool = True,
        maxshape: Any = None,
    ) -> Array:
        """The array under a name. If there is none, it is created as by `create_array`.

        Raises NameConflictError (a ValueError), whose message shows both, if the existing value has another shape or
        dtype, or can be written although writeable=False is requested. An existing array that can't be written is
        returned in any case. Its order may differ, too. With maxshape, the existing array has the same maxshape and any
        number of rows.
        """
        return self._catalog.require_array(self._full(name), shape, dtype, order, fill_value, writeable, maxshape)

    def append(self, name: str, rows: npt.ArrayLike) -> Array:
        """Append rows to an array that was created with `maxshape`.

        They are part of the transaction, like every change: `rollback` takes the old length back. It takes amortized
        constant time for each row. While the array has room, nothing moves, and an array that was read before shows the
        same memory, with its old length. Otherwise the rows move to a place with room for twice as many. Changes
        made before are moved, too. Older arrays are then detached and read-only. Views of them stay writable, but such
        writes are lost, and the next commit warns of them (LostUpdateWarning). A rollback makes the arrays live again.

        Parameters
        ----------
        name : str
            Of the array.
        rows : array-like
            Of shape (n, …), or one row; … are the array's other axes. Numbers of Python have to fit into its dtype
            (OverflowError). Others are converted as an assignment does it, if that is safe or within a kind
            (TypeError), such as float64 to float32.

        Returns
        -------
        ndarray
            The live array with its new length.

        Raises
        ------
        ValueError
            The rows have another shape, or the array would be larger than its maxshape.
        TypeError
            The value has no maxshape, or the rows can't be converted.
        UnknownNameError, CorruptStoreError, OutOfSpaceError, ReadOnlyStoreError, ClosedStoreError
            The array is as it was.
        """
        return growing.append(self._catalog, self._full(name), rows)

    def resize(self, name: str, length: int | Sequence[int]) -> Array:
        """Change the length of an array that was created with `maxshape`.

        New rows are zeros. Rows that are gone can't be read any more, but their space stays with the array, so that it
        grows without a move up to the length that it had; `compact` gives it back. The notes on moves in `append`
        apply here, too.

        Parameters
        ----------
        name : str
            Of the array.
        length : int or sequence of int
            The number of rows, or the whole shape, of which only the first axis may change.

        Returns
        -------
        ndarray
            The live array with its new length.

        Raises as `append`.
        """
        return growing.resize(self._catalog, self._full(name), length)

    def create_list(self, name: str) -> PersistentList:
        """Create an empty persistent list. Raises NameConflictError (a ValueError) if the name is taken."""
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
        """Declare an array that is a function of other values. Reading it computes it from their current contents. It
        is logged only if that is cheaper.

        Every program that reads the array calls this each time it opens the store, because the store keeps the
        function's name and no code. See docs/derived.md.

        Parameters
        ----------
        name : str
            The array's name. It must not be the name of a value that isn't derived.
        function : callable
            Called with the inputs, which it can't write to; returns an ndarray. It must return the same array for the
            same inputs. The store knows it by its import path: a function of a module, or a static or class method.
        *inputs : str, ndarray or value
            A str is a name in this store or group: of an array, a value or another derived array. Anything else is
            passed as it is: arrays by reference, other values as a copy. The derived value depends on it, but it is not
            stored.
        kwargs : dict, optional
            Keyword arguments: arrays and values as in inputs, but a str is passed as a str.
        version : int or str
            The function's version. Another version makes the stored value out of date.
        policy : {"auto", "recompute", "store"}
            "recompute": the store holds the declaration only. "store": a value that was read, or `set`, before a commit
            is committed with it, and is loaded after a recovery if it belongs to the inputs. "auto": measured times
            choose one of the two; `Derived.decision` has the choice and the reason.
        verify : {None, "hash"}, float or (float, float)
            Whether a value that is computed again for the same inputs, for example after a recovery, is compared with
            the earlier one: bit by bit ("hash"), or by a summary, within a relative or a relative and an absolute
            tolerance.
        replace : bool
            Replace another declaration that the store has under the name, and drop its value.

        Returns
        -------
        Derived

        Raises
        ------
        DerivedMismatchError
            The store has another function, version or inputs under the name.
        DerivedArrayError
            The array would depend on itself.
        NameConflictError, TypeError, ValueError, ReadOnlyStoreError, ClosedStoreError
        """
        what = asked(self._full, name, function, inputs, kwargs or {}, version=version, policy=policy, verify=verify)
        return self._derived.declare(what, replace)

    def plot(self, name: str, ax: Any = None) -> Any:
        """Draw a fit or an array with matplotlib.

        Of a fit, the objective is drawn over the iterations, with a gap between two runs and a dotted line wherever the
        fit was resumed. An array of one dimension, or a persistent list of numbers, is a line, an array of shape (rows,
        columns) a heat map.

        Parameters
        ----------
        name : str
            The name of an array or a list, or the group of a fit.
        ax : matplotlib.axes.Axes, optional
            Where to draw; None: in a new figure.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ModuleNotFoundError
            matplotlib is missing.
        TypeError
            The value is nothing that can be drawn.
        ValueError
            The fit has no objective yet.
        StaleSnapshotError, UnknownNameError, CorruptStoreError, ClosedStoreError
        """
        assert plotter is not None
        return plotter(self.store, self._full(name), ax)

    def group(self, name: str) -> Group:
        """The mapping of the names below ``name + "/"``. Nothing is created: a group exists while there are names in
        it."""
        full = self._full(name)
        check_name(full)
        return Group(self.store, full)

    @property
    def attrs(self) -> OwnAttributes:
        """The attributes of this group or store: a mapping from str to small values.

        ``attrs(name)`` are those of a name or a group in it. They are part of transactions, snapshots and copies of the
        store, follow a renamed or copied name, and go with a deleted one; a group goes with its last name. Assigning
        another value to the name keeps them. They don't appear among the names. ``units`` and ``dims``, a list of the
        names of an array's axes, have a meaning for exports.

        A call, and each use of the mapping, raise UnknownNameError (a KeyError) for a name that does not exist; see
        `Attributes` for other errors.
        """
        return OwnAttributes(self._catalog, self._prefix[:-1])

    # The names that h5py has for these.
    require_group = group
    move = rename

    @property
    @abstractmethod
    def store(self) -> Store:
        """The store itself."""

    def _value(self, full: str) -> Any:
        value = self._catalog.get(full)
        return self._derived.by_name(full).value if value is COMPUTED else value

    def _delete(self, full: str) -> bool:
        with self._catalog.lock, later():
            self._derived.forget(full)
            return self._catalog.delete(full)

    def _full(self, name: Any) -> str:
        if not isinstance(name, str):
            check_name(name)  # TypeError
        return f"{self._prefix}{name}"


def _like(data: Any, shape: Any, dtype: Any) -> tuple[Any, Any, np.ndarray[Any, Any]]:
    """Shape, dtype and contents of an array that is created from data."""
    if isinstance(data, np.ma.MaskedArray):
        raise TypeError("data is a masked array: store its data and its mask as two arrays")
    array = array_of_tensor(data) if is_tensor(data) else data
    if hasattr(type(array), "__array__"):  # which may take no dtype
        array = np.asarray(array)
    inner = () if dtype is None else np.dtype(dtype).shape  # of a subarray dtype, which adds its axes to the shape
    if inner or not isinstance(array, np.ndarray):  # numpy refuses a number that the dtype lacks only here
        array = np.asarray(array, dtype)
    outer = array.shape[: array.ndim - len(inner)]
    if shape is not None and tuple(np.atleast_1d(shape).tolist()) != outer:
        raise ValueError(f"data has the shape {outer}, and shape is {shape!r}")
    return outer, array.dtype if dtype is None else dtype, array


def _own_array(value: Any) -> Any:
    return np.array(value) if isinstance(value, np.ndarray) else value


class Group(NameMapping):
    """The names of a store below ``name + "/"``, relative to it. Iteration includes the names of groups inside it.

    `group` of a store or a group returns it. Two groups are equal if they stand for the same names of the same store.
    """

    __slots__ = ("_name", "_store")

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._catalog = store._catalog
        self._derived = store._derived
        self._prefix = name + "/"

    @property
    def store(self) -> Store:
        """The store that the group belongs to."""
        return self._store

    @property
    def name(self) -> str:
        """The full name, without a "/" at its end."""
        return self._name

    def _own_value(self, name: str) -> Any:
        """The value under a name, or None: as `decode` of its type makes it, but with arrays that are not in the
        store."""
        catalog, full = self._catalog, self._full(name)
        with catalog.lock:
            entry = catalog.core.get(key_of(full))
            found = objects.parts(catalog, full, entry, raw=False) if entry and entry.kind == OBJECT else None
        if found is not None:
            return made(found.type_name, {part: _own_array(one) for part, one in found.items()})
        value = _own_array(self.get(name))
        catalog.lost_updates.taken(value)
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self._store is other._store and self._name == other._name

    def __hash__(self) -> int:
        return hash((Group, id(self._store), self._name))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the store and the name of the group. The store is a snapshot in another process."""
        return Group, (self._store, self._name)
