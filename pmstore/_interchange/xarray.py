"""The engine "pmstore" of xarray: a group of a store as a dataset. xarray loads this module by its entry point."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from pmstore._catalog.names import key_of
from pmstore._errors import UNSOUND, StaleSnapshotError, UnknownNameError, of
from pmstore._interchange.source import free
from pmstore._store.entrance import open_to_read
from pmstore._store.lineage import lineage_of
from pmstore._store.reading import Selection, copy_array
from pmstore._store.store import Store
from pmstore._values.array import Layout

__all__ = ["PmstoreBackend"]

_backends: Any = importlib.import_module("xarray.backends")
_indexing: Any = importlib.import_module("xarray.core.indexing")
_xarray: Any = importlib.import_module("xarray")

_SCALARS = (bool, int, float, complex, str, np.generic)


class PmstoreBackend(_backends.BackendEntrypoint):  # type: ignore[misc]
    """``xarray.open_dataset("run.pm", engine="pmstore", group="model")``: arrays of the group, read when they are used.

    The attribute `dims` of an array, a list of str, names its axes; others are called after the array, with "_" behind
    it if a name or an axis of the group is called so. An array of one axis with its name is an index. Numbers and text
    become variables without axes; values of other types, and names in groups of the group, are left out. Attributes,
    also those of the group, become attributes, and are decoded by CF's conventions like those of other engines.
    ``concat_characters=True`` also joins bytes of length 1 along the last axis, as CF does in files that have no text.

    The dataset shows one commit. Reading an array that a later commit has changed raises StaleSnapshotError: `load()`
    reads all at once. Datasets may be used by several threads, and be pickled. A process that gets one opens the store
    anew; if there has been another commit by then, reading any array there raises StaleSnapshotError.
    """

    description = "Stores of pmstore"
    open_dataset_parameters = ("filename_or_obj", "drop_variables", "group")
    supports_groups = True

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        return isinstance(filename_or_obj, (str, os.PathLike)) and os.fspath(filename_or_obj).endswith(".pm")

    def open_dataset(
        self,
        filename_or_obj: Any,
        *,
        mask_and_scale: bool = True,
        decode_times: Any = True,
        concat_characters: bool = False,
        decode_coords: Any = True,
        drop_variables: str | Iterable[str] | None = None,
        use_cftime: bool | None = None,
        decode_timedelta: Any = None,
        group: str | None = None,
    ) -> Any:
        decoding = {
            "mask_and_scale": mask_and_scale,
            "decode_times": decode_times,
            "concat_characters": concat_characters,
            "decode_coords": decode_coords,
            "drop_variables": drop_variables,
            "use_cftime": use_cftime,
            "decode_timedelta": decode_timedelta,
        }
        store, datasets = _opened(filename_or_obj, group, decoding, inner=False)
        datasets["/"].set_close(store.close)
        return datasets["/"]

    def open_groups_as_dict(self, filename_or_obj: Any, *, group: str | None = None, **decoding: Any) -> dict[str, Any]:
        """The datasets of a group and of the groups in it, by their paths, all of one commit.

        group and decoding: as for `open_dataset`. The store is closed with the last of the datasets.
        """
        store, datasets = _opened(filename_or_obj, group, decoding, inner=True)
        left = set(datasets)
        for path, dataset in datasets.items():
            dataset.set_close(_Close(store, path, left))
        return datasets

    def open_datatree(self, filename_or_obj: Any, *, group: str | None = None, **decoding: Any) -> Any:
        """These datasets as a tree. Raises ValueError if an index or the length of an axis is another one in a group
        than in the group around it."""
        store, datasets = _opened(filename_or_obj, group, decoding, inner=True)
        try:
            tree = _xarray.DataTree.from_dict(datasets)
        except BaseException:
            store.close()
            raise
        tree.set_close(store.close)
        return tree


class _Close:
    """Closes one of several datasets, and with the last of them the store. In another process, each has its own."""

    def __init__(self, store: Store, path: str, left: set[str]) -> None:
        self._store, self._path, self._left = store, path, left

    def __call__(self) -> None:
        self._left.discard(self._path)
        if not self._left:
            self._store.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Close, (self._store, self._path, {self._path})


def _opened(path: Any, group: str | None, decoding: dict[str, Any], inner: bool) -> tuple[Store, dict[str, Any]]:
    """A store, and the dataset of a group in it, as "/", and with `inner` those of the groups in that group."""
    store = open_to_read(path)
    try:
        top = store.group(group) if group else store
        if group and not len(top):
            raise UnknownNameError(group, what="group")
        given = {name: value for name, value in decoding.items() if value is not None}
        groups = {"/": top}
        if inner:
            groups |= {f"/{name}": top.group(name) for name in _groups_in(top)}
        decode = _xarray.conventions.decode_cf
        return store, {path: decode(_Group(store, mapping), **given) for path, mapping in groups.items()}
    except BaseException:
        store.close()
        raise


def _groups_in(mapping: Any) -> Iterable[str]:
    """Their names. A group stands before those in it."""
    found: dict[str, None] = {}
    for name, *_ in mapping._rows():
        parts = name.split("/")[:-1]
        found.update(dict.fromkeys("/".join(parts[: n + 1]) for n in range(len(parts))))
    return found


class _Group(_backends.common.AbstractDataStore):  # type: ignore[misc]
    """The variables and attributes that xarray decodes."""

    def __init__(self, store: Store, mapping: Any) -> None:
        self._store, self._mapping = store, mapping

    def load(self) -> tuple[dict[str, Any], dict[str, Any]]:
        prefix, mapping = self._mapping._prefix, self._mapping
        about = mapping._attributes()
        variables = {}
        rows = [(name, kind) for name, kind, *_ in mapping._rows() if "/" not in name]
        arrays = {name: mapping._layout(name) for name, kind in rows if kind == "array"}
        named = {
            name: dims
            for name, described in arrays.items()
            if _names_axes(dims := about.get(name, {}).get("dims"), len(described.shape))
        }
        taken = {name for name, _ in rows}.union(*named.values())
        for name, kind in rows:
            attributes = dict(about.get(name, {}))
            if kind == "array":
                described = arrays[name]
                attributes.pop("dims", None)
                dims = named.get(name) or [free(f"{name}_{axis}", taken) for axis in range(len(described.shape))]
                data = _indexing.LazilyIndexedArray(_Array(self._store, prefix + name, described))
                variables[name] = _xarray.Variable(dims, data, attributes)
            elif kind == "value" and isinstance(value := mapping[name], _SCALARS):
                variables[name] = _xarray.Variable((), value, attributes)
        return variables, about.get("", {})

    def close(self) -> None:
        self._store.close()


def _names_axes(dims: Any, axes: int) -> bool:
    return isinstance(dims, (list, tuple)) and len(dims) == axes == len(set(dims)) and all(type(d) is str for d in dims)


def _commit_of(store: Store) -> tuple[str, int]:
    return lineage_of(store._catalog.core), store.sequence


class _Array(_backends.BackendArray):  # type: ignore[misc]
    """An array that is read when it is used: of one in C order, only the rows that are asked for. In another process,
    the store is opened anew; other parts of the dataset went there as they were."""

    def __init__(self, store: Store, name: str, described: Layout) -> None:
        self._store, self._name, self._layout, self._commit = store, name, described, _commit_of(store)
        self.shape, self.dtype = described.shape, described.dtype

    def __getitem__(self, key: Any) -> Any:
        support = _indexing.IndexingSupport.OUTER
        return _indexing.explicit_indexing_adapter(key, self.shape, support, self._read)

    def _read(self, key: tuple[Any, ...]) -> Any:
        described = self._layout
        with self._store._catalog.lock:
            if _commit_of(self._store) != self._commit:
                text = "the store has another commit than the dataset that was sent here: open the dataset anew"
                raise StaleSnapshotError(f"{self._name!r}: {text}, or load() it before it is sent")
            if self.shape and described.order == "C" and described.nbytes:
                rows = np.arange(self.shape[0])[key[0]]
                first, last = (int(np.min(rows)), int(np.max(rows)) + 1) if np.size(rows) else (0, 0)
                array = self._rows(described, first, last)
                key = (rows - first, *key[1:])
            else:
                array = self._store[self._name]
        for axis in reversed(range(len(key))):  # each array of indices stands for its own axis
            array = array[(slice(None),) * axis + (key[axis],)]
        return np.array(array)

    def _rows(self, described: Layout, first: int, last: int) -> Any:
        core = self._store._catalog.core
        entry = core.get(key_of(self._name))
        width = described.nbytes // self.shape[0]
        if entry is None or core.snapshot is None or (last - first) * width < 4096:
            return self._store[self._name][first:last]
        try:
            return copy_array(core, entry, Selection(self._name, np.s_[first:last], whole=False), [])
        except UNSOUND as error:
            raise of(self._name, error) from error
