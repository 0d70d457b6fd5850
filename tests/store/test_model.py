"""A store against a model of it: hypothesis looks for a sequence of operations after which the two differ."""

from __future__ import annotations

import contextlib
import copy
import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pmstore
from pmstore._catalog.names import parents
from tests.conftest import LONGER

NAMES = st.sampled_from(["a", "b", "g/c", "g/d", "g/h/e"])
# In lines, pages and several pages; on the edges of both.
SIZES = st.sampled_from([0, 1, 7, 8, 511, 512, 513, 1500, 9000])
DTYPES = st.sampled_from([">f4", "i2", "c16", "?", "S5", "U3", "M8[s]", [("x", "f8"), ("y", "u1", (2,))]])
SHAPES = st.sampled_from([(), (1,), (3, 5), (64, 8), (9, 11, 13)])
# The last two are objects, with arrays of their own (I37).
THINGS = [pmstore.Parts("lib.Thing", {"x": np.arange(float(size)), "k": [size]}) for size in (3, 600)]
VALUES = st.sampled_from([0, "text", ("t", [1]), "long " * 200, b"b" * 9000, {"k": 1}, *THINGS])


# Of names and of groups, to rename and to copy.
PAIRS = st.sampled_from(
    [("a", "b"), ("b", "g/c"), ("g/c", "g/d"), ("g/d", "a"), ("g/h/e", "a"), ("g", "k"), ("k", "g"), ("g/h", "k/h")]
)


class Stop(Exception):
    pass


def copied(model):
    return {name: copy.copy(value) for name, value in model.items()}


class Model(RuleBasedStateMachine):
    """names: what the store should hold now; committed: at the last commit.

    Every array that is created gets a number. ids: the number of each array by name, now and at the last commit.
    held: live arrays that "the user" refers to, by number. detached: arrays that have no name, with the bytes that
    they should keep. about: the attributes of names, groups and the store.
    """

    media: str
    parent: Path | None = None

    @initialize()
    def start(self):
        self.directory = Path(tempfile.mkdtemp(prefix="pmstore-test-", dir=self.parent))
        self.store = self.open()
        self.names, self.committed = {}, {}
        self.about, self.committed_about = {}, {}
        self.ids, self.committed_ids, self.numbers = {}, {}, itertools.count()
        self.held, self.detached = {}, {}

    def open(self):
        return pmstore.open(self.directory / "s", media=self.media)

    def teardown(self):
        if hasattr(self, "store"):
            self.store._drop()
            shutil.rmtree(self.directory)

    # ---- what the model does

    def detach(self, number):
        if number in self.held:
            array = self.held.pop(number)
            self.detached[number] = array, array.copy()

    def took(self, name, value):
        self.detach(self.ids.pop(name, None))
        self.names[name] = value
        if isinstance(value, np.ndarray):
            self.ids[name] = next(self.numbers)

    def was_committed(self):
        self.committed = copied(self.names)
        self.committed_ids = self.ids.copy()
        self.forget_what_is_gone()
        self.committed_about = self.about.copy()

    def forget_what_is_gone(self):
        self.about = {one: k for one, k in self.about.items() if not one or self.below(one)}

    def below(self, one):
        return [name for name in self.names if f"{name}/".startswith(f"{one}/")]

    def was_rolled_back(self):
        self.names = copied(self.committed)
        self.ids, self.about = self.committed_ids.copy(), self.committed_about.copy()
        for number in set(self.held) - set(self.ids.values()):
            self.detach(number)
        for number in set(self.detached) & set(self.ids.values()):  # deleted or replaced since: live again
            self.held[number] = self.detached.pop(number)[0]

    # ---- rules

    @rule(name=NAMES, size=SIZES, fill=st.integers(1, 9))
    def create(self, name, size, fill):
        if name in self.names:
            with pytest.raises(pmstore.NameConflictError):
                self.store.create_array(name, size)
            return
        array = self.store.create_array(name, size, fill_value=fill)
        self.took(name, np.full(size, float(fill)))
        if size:
            self.held[self.ids[name]] = array

    @rule(name=NAMES, size=SIZES, fill=st.integers(1, 9), hold=st.booleans())
    def assign(self, name, size, fill, hold):
        value = np.arange(float(size)) * fill
        old = self.names.get(name)
        in_place = isinstance(old, np.ndarray) and (old.shape, old.dtype) == (value.shape, value.dtype)
        self.store[name] = value
        if in_place:
            old[:] = value
        else:
            self.took(name, value)
        if hold:
            self.hold(name)

    @rule(name=NAMES, value=VALUES)
    def assign_value(self, name, value):
        self.store[name] = value
        self.took(name, value)

    @rule(name=NAMES, dtype=DTYPES, shape=SHAPES, order=st.sampled_from("CF"), bits=st.integers(0, 1))
    def assign_other(self, name, dtype, shape, order, bits):
        """Assign an array of any dtype, in any order, with any bytes that are values of it."""
        value = np.zeros(shape, dtype, order=order)
        if value.dtype.kind != "U":
            value[...] = np.frombuffer(bytes([bits]) * value.itemsize, value.dtype)[0]
        if name in self.names:
            self.delete(name)
        self.store[name] = value
        self.took(name, value)

    @rule()
    def clear_group(self):
        self.store.group("g").clear()
        for name in [name for name in self.names if name.startswith("g/")]:
            self.took(name, None)
            del self.names[name]

    @rule(name=NAMES)
    def hold(self, name):
        if isinstance(self.names.get(name), np.ndarray):
            array = self.store[name]
            assert array.size == 0 or self.held.setdefault(self.ids[name], array) is array

    @rule(name=NAMES)
    def let_go(self, name):
        self.held.pop(self.ids.get(name), None)

    @rule()
    def let_go_of_detached(self):
        self.detached.clear()

    @rule(
        name=NAMES,
        at=st.integers(0, 9000),
        length=st.integers(1, 3000),
        value=st.integers(0, 99),
        through=st.booleans(),
    )
    def write(self, name, at, length, value, through):
        model = self.names.get(name)
        if not isinstance(model, np.ndarray) or model.dtype != "f8" or model.ndim != 1:
            return
        array = self.held.get(self.ids[name]) if through else None
        if array is None:
            array = self.store[name]
        array[at : at + length] += value
        model[at : at + length] += value

    @rule(name=NAMES)
    def delete(self, name):
        if name in self.names:
            del self.store[name]
            self.took(name, None)
            del self.names[name]
            self.forget_what_is_gone()
        else:
            with pytest.raises(KeyError):
                del self.store[name]

    @rule(pair=PAIRS, move=st.booleans())
    def rename_or_copy(self, pair, move):
        old, new = pair
        change = self.store.rename if move else self.store.copy
        moved = self.below(old)
        if not moved or any(f"{name}/".startswith(f"{new}/") for name in self.names):
            with pytest.raises(pmstore.NameConflictError if moved else KeyError):
                change(old, new)
            return
        change(old, new)
        for name in moved:
            other = new + name[len(old) :]
            if not move:
                self.took(other, copy.copy(self.names[name]))
                continue
            self.names[other] = self.names.pop(name)
            if name in self.ids:  # what the user holds stays live
                self.ids[other] = self.ids.pop(name)
        for one in [one for one in self.about if f"{one}/".startswith(f"{old}/")]:
            self.about[new + one[len(old) :]] = self.about.pop(one) if move else self.about[one]

    @rule(one=st.one_of(NAMES, st.sampled_from(["", "g", "g/h", "k"])), k=st.integers(0, 9), long=st.booleans())
    def describe(self, one, k, long):
        if one and not self.below(one):
            with pytest.raises(KeyError):
                self.store.attrs(one)
            return
        self.about[one] = {**self.about.get(one, {}), "k": k, "long": long * 3000 * f"{k}"}
        self.store.attrs(one).update(self.about[one])

    @rule(name=NAMES)
    def make_list(self, name):
        if name not in self.names:
            self.store.create_list(name)
            self.names[name] = []

    @rule(name=NAMES, value=VALUES, at=st.integers(-3, 3), what=st.sampled_from(["append", "insert", "set", "delete"]))
    def change_list(self, name, value, at, what):
        model = self.names.get(name)
        if not isinstance(model, list):
            return
        for items in (model, self.store[name]):
            if what == "append":
                items.append(value)
            elif what == "insert":
                items.insert(at, value)
            else:
                with contextlib.suppress(IndexError):
                    if what == "set":
                        items[at] = value
                    else:
                        del items[at]

    @rule()
    def commit(self):
        self.store.commit()
        self.was_committed()

    @rule()
    def roll_back(self):
        self.store.rollback()
        self.was_rolled_back()

    @rule(name=NAMES, fails=st.booleans(), doomed=st.booleans())
    def transact(self, name, fails, doomed):
        try:
            with self.store.transaction():
                with contextlib.suppress(Stop), self.store.transaction():
                    self.write(name, 0, 100, 1, True)
                    if doomed:
                        raise Stop
                self.delete(name)
                if fails:
                    raise KeyError
        except (KeyError, pmstore.TransactionError):
            assert fails or doomed
            self.was_rolled_back()
        else:
            assert not fails and not doomed
            self.was_committed()

    @rule()
    def release(self):
        self.store.release()

    @rule(crash=st.booleans())
    def reopen(self, crash):
        for number in list(self.held):
            self.detach(number)
        if crash:
            self.store._drop(discard=True)
            self.names, self.ids, self.about = copied(self.committed), self.committed_ids, self.committed_about.copy()
        else:
            self.store.close()
        self.store = self.open()
        self.ids = {name: next(self.numbers) for name in self.ids}
        self.was_committed()

    # ---- what must hold

    @invariant()
    def same(self):
        if not hasattr(self, "store"):
            return
        assert list(self.store) == sorted(self.names) and len(self.store) == len(self.names)
        for name, model in self.names.items():
            value = self.store[name]
            if isinstance(model, np.ndarray):
                assert (value.shape, value.dtype) == (model.shape, model.dtype), name
                assert value.flags.f_contiguous == model.flags.f_contiguous, name
                assert np.array_equal(value, model), name
                assert value.size == 0 or self.held.get(self.ids[name], value) is value
            else:
                assert value == model, name
        self.forget_what_is_gone()
        for one in ("", *(part for name in self.names for part in (*parents(name), name))):
            assert self.store.attrs(one) == self.about.get(one, {}), one
        for array, kept in self.detached.values():
            assert np.array_equal(array, kept)

    @precondition(lambda self: hasattr(self, "store"))
    @rule()
    def check(self):
        report = self.store.check()
        assert report.ok, report


class OnMemory(Model):
    media = "memory"
    parent = Path("/dev/shm")


class OnFile(Model):
    media = "file"


LIMITS = settings(max_examples=30 * LONGER, stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestMemory = pytest.mark.longer(
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")(OnMemory.TestCase)
)
TestFile = pytest.mark.longer(OnFile.TestCase)
TestMemory.settings = TestFile.settings = LIMITS
