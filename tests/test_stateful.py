"""A model of a store, and hypothesis to find steps after which the two differ."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import pmstore

NAMES = st.sampled_from(["a", "b", "group/c", "group/d", "group/deeper/e", "very long name " * 20])
SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 5), (64, 8), (513,), (40, 50), (3000,), (9, 11, 13)])
DTYPES = st.sampled_from(["f8", ">f4", "i2", "c16", "?", "S5", "U3", "M8[s]", [("x", "f8"), ("y", "u1", (2,))]])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=30),
    st.binary(max_size=3000),
    st.lists(st.integers(), max_size=5),
    st.dictionaries(st.text(max_size=3), st.tuples(st.integers(), st.text(max_size=3)), max_size=3),
)


class Failure(Exception):
    pass


def filled(shape: tuple[int, ...], dtype: Any, seed: int, order: str = "C") -> np.ndarray:
    """An array of any dtype with bytes that follow from the seed."""
    out = np.zeros(shape, dtype, order=order)
    kind = out.dtype.kind
    if kind in "fiucb":
        out[...] = np.random.default_rng(seed).integers(0, 2 if kind == "b" else 100, shape)
    elif kind in "SU":
        out[...] = str(seed % 1000)
    elif kind == "M":
        out[...] = np.datetime64(seed, "s")
    else:
        out["x"] = seed
        out["y"] = seed % 7
    return out


class StoreModel(RuleBasedStateMachine):
    """`now` is what the store must hold, `committed` what it must go back to; `live` are arrays that are held on to."""

    medium = "memory"

    def __init__(self) -> None:
        super().__init__()
        parent = "/dev/shm" if self.medium == "memory" else None
        self.directory = Path(tempfile.mkdtemp(prefix="pmstore-model-", dir=parent))
        self.path = self.directory / "model.pm"
        self.store = self.open()
        self.now: dict[str, Any] = {}
        self.committed: dict[str, Any] = {}
        self.live: dict[str, np.ndarray] = {}
        self.detached: list[tuple[np.ndarray, np.ndarray]] = []

    def open(self) -> pmstore.Store:
        return pmstore.open(self.path, media=self.medium)

    def teardown(self) -> None:
        if not self.store.closed:
            self.store.rollback()
            self.store.close()
        shutil.rmtree(self.directory)

    # ---- helpers

    def detach(self, name: str) -> None:
        """The array under this name is about to lose it; it must keep its bytes."""
        array = self.live.pop(name, None)
        if array is not None and array.nbytes:
            self.detached.append((array, array.copy()))

    def array_names(self) -> list[str]:
        return sorted(name for name, value in self.now.items() if isinstance(value, np.ndarray))

    def pick(self, data: Any, names: list[str]) -> str | None:
        return data.draw(st.sampled_from(names)) if names else None

    # ---- names

    @rule(name=NAMES, shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 999), order=st.sampled_from("CF"))
    def assign_array(self, name: str, shape: tuple[int, ...], dtype: Any, seed: int, order: str) -> None:
        value = filled(shape, dtype, seed, order)
        old = self.now.get(name)
        in_place = (
            isinstance(old, np.ndarray)
            and (old.shape, old.dtype) == (value.shape, value.dtype)
            and (
                old.flags.c_contiguous == value.flags.c_contiguous or old.flags.f_contiguous == value.flags.f_contiguous
            )
        )
        if not in_place:
            self.detach(name)
        self.store[name] = value
        self.now[name] = value
        self.live[name] = self.store[name]

    @rule(name=NAMES, shape=SHAPES, fill=st.integers(0, 9))
    def create_array(self, name: str, shape: tuple[int, ...], fill: int) -> None:
        if name in self.now:
            try:
                self.store.create_array(name, shape, "f8", fill_value=fill)
            except ValueError:
                return
            raise AssertionError("a name was taken twice")
        self.live[name] = self.store.create_array(name, shape, "f8", fill_value=fill)
        self.now[name] = np.full(shape, float(fill))

    @rule(name=NAMES, value=VALUES)
    def assign_value(self, name: str, value: Any) -> None:
        self.detach(name)
        self.store[name] = value
        self.now[name] = copy.deepcopy(value)

    @rule(data=st.data())
    def delete(self, data: Any) -> None:
        name = self.pick(data, sorted(self.now))
        if name is not None:
            self.detach(name)
            del self.store[name]
            del self.now[name]

    @rule()
    def clear_group(self) -> None:
        for name in [name for name in self.now if name.startswith("group/")]:
            self.detach(name)
            del self.now[name]
        self.store.group("group").clear()

    # ---- contents

    @rule(data=st.data(), seed=st.integers(0, 999))
    def write_slice(self, data: Any, seed: int) -> None:
        name = self.pick(data, self.array_names())
        if name is None:
            return
        array, model = self.store[name], self.now[name]
        if model.ndim and model.shape[0]:
            start = data.draw(st.integers(0, model.shape[0] - 1))
            part = filled(model[start::2].shape, model.dtype, seed)
            array[start::2] = part
            model[start::2] = part
        else:
            array[...] = model[...] = filled(model.shape, model.dtype, seed)

    @rule(data=st.data())
    def ufunc(self, data: Any) -> None:
        name = self.pick(data, [name for name in self.array_names() if self.now[name].dtype.kind in "fiuc"])
        if name is not None:
            array = self.live.get(name)
            if array is None:
                array = self.store[name]
            np.multiply(array, 3, out=array, casting="unsafe")
            np.multiply(self.now[name], 3, out=self.now[name], casting="unsafe")

    @rule(data=st.data())
    def drop_reference(self, data: Any) -> None:
        name = self.pick(data, sorted(self.live))
        if name is not None:
            del self.live[name]

    @rule()
    def forget_detached(self) -> None:
        self.detached.clear()

    @rule()
    def write_detached(self) -> None:
        """Writes to detached arrays go nowhere."""
        for array, expected in self.detached:
            if array.dtype.kind == "f" and array.flags.writeable:
                array += 1
                expected += 1

    @rule()
    def release(self) -> None:
        self.store.release(*self.array_names())

    # ---- transactions

    @rule()
    def commit(self) -> None:
        self.store.commit()
        self.committed = copy.deepcopy(self.now)

    def roll_back_model(self) -> None:
        for name in list(self.live):
            old, new = self.committed.get(name), self.now.get(name)
            # Restored in place if the array is the one of the last commit; which one it is, only the store knows.
            if not isinstance(old, np.ndarray) or not isinstance(new, np.ndarray):
                self.live.pop(name)
        self.now = copy.deepcopy(self.committed)
        # Arrays that were deleted since the last commit are back; ones created since keep their bytes.
        self.detached.clear()
        self.live = {name: self.store[name] for name in self.live if name in self.store}

    @rule()
    def rollback(self) -> None:
        self.store.rollback()
        self.roll_back_model()

    @rule(name=NAMES, value=VALUES, inner_fails=st.booleans(), outer_fails=st.booleans())
    def transaction(self, name: str, value: Any, inner_fails: bool, outer_fails: bool) -> None:
        self.detach(name)
        try:
            with self.store.transaction():
                self.store[name] = value
                try:
                    with self.store.transaction():
                        self.store["in the inner one"] = 1
                        if inner_fails:
                            raise Failure
                except Failure:
                    pass
                if outer_fails:
                    raise Failure
        except (Failure, pmstore.TransactionError) as error:
            assert outer_fails or inner_fails
            assert isinstance(error, Failure) == outer_fails
            self.roll_back_model()
        else:
            assert not inner_fails
            assert not outer_fails
            self.now[name] = copy.deepcopy(value)
            self.now["in the inner one"] = 1
            self.committed = copy.deepcopy(self.now)

    # ---- lives

    def reopened(self) -> None:
        self.live.clear()
        self.detached.clear()
        self.store = self.open()

    @rule()
    def close_and_reopen(self) -> None:
        self.store.close()
        for array in self.live.values():
            assert not array.flags.writeable or not array.nbytes
        self.committed = copy.deepcopy(self.now)
        self.reopened()

    @rule()
    def crash_and_reopen(self) -> None:
        """What a kill leaves: all that was written, nothing that was not."""
        self.store._drop(discard=True)
        self.now = copy.deepcopy(self.committed)
        self.reopened()

    # ---- what must hold

    @invariant()
    def holds_the_model(self) -> None:
        assert sorted(self.store) == sorted(self.now)
        for name, expected in self.now.items():
            found = self.store[name]
            assert type(found) is type(expected)
            if isinstance(expected, np.ndarray):
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)
                if name in self.live and expected.nbytes:  # one without bytes has no place, so no identity
                    assert found is self.live[name]
            else:
                assert found == expected

    @invariant()
    def detached_arrays_keep_their_bytes(self) -> None:
        for array, expected in self.detached:
            np.testing.assert_array_equal(array, expected)

    @rule()
    def is_sound(self) -> None:
        report = self.store.check()
        assert report.ok, str(report)


class FileModel(StoreModel):
    medium = "file"


SETTINGS = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)

TestMemory = StoreModel.TestCase
TestMemory.settings = SETTINGS
TestFile = FileModel.TestCase
TestFile.settings = SETTINGS
