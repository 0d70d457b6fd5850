"""The ways to keep the state of a training loop after every iteration, and to load it again.

A strategy gets the first state when it is made, and keeps it. After each iteration comes `place`, which is what the
algorithm does by itself where its arrays live in the strategy's memory, and then `save`, which is the checkpoint.

PyMM (github.com/IBM/pymm) is not run: its last release needs other versions of everything, and an MCAS store. It is
modelled by what it does with an array of numpy's. `shelf.save(…)` copies into the array on the shelf, which is a
mapping of persistent memory, by plain assignment; `persist()` flushes the cache line by line (CLFLUSHOPT), one array
after the other, with no log and no order between arrays. Its second way computes on the shelf, and only persists.
Here: a shared mapping of a file for each array. On tmpfs, which stands for persistent memory, CLFLUSHOPT of every line
and an sfence; on a disk, where flushing caches does nothing for durability, msync, which is what np.memmap offers. Left
out are PyMM's own costs: its metadata, its Python objects, and `wbinvd` for arrays of more than 30 MB.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from _common import Array, baseline_of, library
from _competitors import sync_path

import pmstore

from .loops import DERIVED, State


class Strategy:
    """One way to keep a state.

    Attributes
    ----------
    derived : bool
        Whether what can be computed from the rest is kept too.
    in_place : bool
        Whether the algorithm's arrays live in the strategy's memory.
    synced : bool
        Whether the checkpoint is where it is to be when `save` returns.
    """

    name = ""
    derived = False
    in_place = False
    synced = True

    def __init__(self, directory: Path, medium: str, state: State) -> None:
        self.directory = directory
        self.medium = medium
        self.start(self.of(state))

    def of(self, state: State) -> State:
        """The part of a state that this strategy keeps."""
        return {name: array for name, array in state.items() if self.derived or name not in DERIVED}

    def start(self, state: State) -> None:
        """Keep the first state."""
        self.save(state)

    def place(self, state: State) -> None:
        """Not the checkpoint: the algorithm's own writing."""

    def save(self, state: State) -> None:
        """The checkpoint."""
        raise NotImplementedError

    def settle(self) -> None:
        """Not measured: what the checkpoint left to the kernel goes out now, not while the next one is timed."""

    def close(self) -> None:
        """Let the files go."""

    @classmethod
    def load(cls, directory: Path) -> State:
        """What the files hold."""
        raise NotImplementedError


class Baseline(Strategy):
    """Not a checkpoint: the least that any program has to do (see benchmarks/README.md)."""

    name = "baseline"

    def start(self, state: State) -> None:
        self.bytes = np.concatenate([array.reshape(-1).view(np.uint8) for array in state.values()])
        self.bytes = np.concatenate([self.bytes, np.zeros(64, np.uint8)])[: self.bytes.size]  # whole lines are read
        self.baseline = baseline_of(self.medium, self.directory, self.bytes.nbytes)

    def save(self, state: State) -> None:
        self.baseline(self.bytes)


class Savez(Strategy):
    name = "np.savez"
    synced = False
    write = staticmethod(np.savez)

    def save(self, state: State) -> None:
        type(self).write(self.directory / "state.npz", **state)

    def settle(self) -> None:
        sync_path(self.directory / "state.npz")

    @classmethod
    def load(cls, directory: Path) -> State:
        with np.load(directory / "state.npz") as file:
            return {name: file[name] for name in file}


class SavezCompressed(Savez):
    name = "np.savez_compressed"
    write = staticmethod(np.savez_compressed)


class Renamed(Savez):
    name = "np.savez, fsync, rename"
    synced = True

    def save(self, state: State) -> None:
        temporary = self.directory / "temporary.npz"
        np.savez(temporary, **state)
        sync_path(temporary)
        os.replace(temporary, self.directory / "state.npz")
        sync_path(self.directory)

    def settle(self) -> None:
        pass


class PymmCopy(Strategy):
    name = "PyMM, copy and persist"

    def start(self, state: State) -> None:
        self.shelf = {
            name: np.lib.format.open_memmap(self.directory / f"{name}.npy", "w+", array.dtype, array.shape)
            for name, array in state.items()
        }
        for array in self.shelf.values():
            array.flush()  # the header
        self.copy(state)
        self.persist()

    def copy(self, state: State) -> None:
        for name, array in self.shelf.items():
            array[...] = state[name]

    def persist(self) -> None:
        for array in self.shelf.values():
            if self.medium == "memory":
                library().flush_lines(array.ctypes.data, array.nbytes)
            else:
                array.flush()

    def save(self, state: State) -> None:
        self.copy(state)
        self.persist()

    def close(self) -> None:
        del self.shelf

    @classmethod
    def load(cls, directory: Path) -> State:
        return {path.stem: np.load(path) for path in directory.glob("*.npy")}


class PymmInPlace(PymmCopy):
    name = "PyMM, in place"
    in_place = True

    def place(self, state: State) -> None:
        self.copy(state)

    def save(self, state: State) -> None:
        self.persist()


class Pmstore(Strategy):
    name = "pmstore, in place"
    in_place = True

    def start(self, state: State) -> None:
        self.store: Any = pmstore.open(self.directory / "state.pm", mode="w")
        with self.store.transaction():
            self.arrays: dict[str, Array] = {
                name: self.store.create_array(name, array.shape, array.dtype) for name, array in state.items()
            }
            self.place(state)

    def place(self, state: State) -> None:
        for name, array in self.arrays.items():
            array[...] = state[name]

    def save(self, state: State) -> None:
        self.store.commit()

    def close(self) -> None:
        del self.arrays
        self.store.close()

    @classmethod
    def load(cls, directory: Path) -> State:
        with pmstore.open(directory / "state.pm", mode="r+") as store:
            return {name: np.array(store[name]) for name in store}


def with_derived(kind: type[Strategy]) -> type[Strategy]:
    """The same, but all of scikit-learn's attributes are kept."""

    class WithDerived(kind):  # type: ignore[misc, valid-type]
        name, derived = f"{kind.name}, all attributes", True

    return WithDerived


CHECKPOINTS: tuple[type[Strategy], ...] = (Savez, SavezCompressed, Renamed, PymmCopy, PymmInPlace, Pmstore)
"""What is killed and what is measured."""
WITH_DERIVED = tuple(map(with_derived, (Savez, Renamed, Pmstore)))
"""Measured too, where something is derived."""
