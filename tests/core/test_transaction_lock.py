"""A commit beside a transaction that begins: at every instruction of one, as far into the other as locks let it go."""

from __future__ import annotations

import contextlib
import sys
import threading

import pytest

import pmstore
from pmstore._catalog.catalog import Catalog


class Stop(Exception):
    pass


class Watched:
    """A lock of the store's that calls `blocked` before a thread waits for it."""

    def __init__(self, lock, blocked):
        self.lock = lock
        self.blocked = blocked

    def acquire(self, blocking=True):
        if self.lock.acquire(False):
            return True
        if blocking:
            self.blocked(True)
            self.lock.acquire()
            self.blocked(False)
        return blocking

    __enter__ = acquire

    def __exit__(self, *error):
        self.lock.release()

    def call(self, function, *arguments):
        with self:
            return function(*arguments)

    def __getattr__(self, name):
        return getattr(self.lock, name)


class Other:
    """A thread that runs a function as far as it can while this one stands still.

    arrived: it is where it wants to be, or waits for a lock. go: this thread has done what it was at, or waits for one.
    """

    def __init__(self, store, function):
        self.arrived, self.go = threading.Event(), threading.Event()
        self.errors = []
        self.waits = False
        self.thread = threading.Thread(target=self._run, args=(function,))
        catalog, lock = store._catalog, store._commits.lock
        self.real = catalog.lock, lock.inner
        self.store = store
        catalog.lock = catalog.core.lock = Watched(catalog.lock, self._blocked)
        lock.inner = Watched(lock.inner, self._blocked)

    def _blocked(self, blocked):
        if threading.current_thread() is self.thread:
            self.waits = blocked
            self.arrived.set()
        else:
            assert not (blocked and self.waits), "both threads wait"
            self.go.set()

    def _run(self, function):
        try:
            with contextlib.suppress(Stop):
                function(self)
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.arrived.set()

    def start(self):
        self.thread.start()
        self.arrived.wait()

    def stay(self):
        """Keep the thread at this place until the test lets it go on."""
        self.arrived.set()
        self.go.wait()

    def end(self):
        self.go.set()
        self.thread.join()
        catalog = self.store._catalog
        catalog.lock, self.store._commits.lock.inner = self.real
        catalog.core.lock = catalog.lock
        assert not self.errors, self.errors[0]


def at_instruction(number, function, action):
    """Runs the function, and the action before its n-th instruction in pmstore. False if there are fewer.

    Python 3.12 and later report a function's instructions only if it was traced when it last ran: number 0, which none
    has, does that.
    """
    directory = pmstore.__path__[0]
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        if not frame.f_code.co_filename.startswith(directory):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        seen += event == "opcode"
        if event == "opcode" and seen == number:
            action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return seen >= number


@pytest.mark.parametrize("handler", [None, "commit", "transaction"])
def test_no_half_of_a_transaction_is_in_a_commit_beside_it(store, handler):
    """handler: what a signal handler does that runs there, before the other thread comes."""
    mine, others = store.create_array("mine", 3), store.create_array("others", 3)
    store.commit()

    def change(other):
        with store.transaction():
            others[:] = 1
            other.stay()
            raise Stop

    def action(other):
        if handler == "commit":
            store.commit()
        elif handler == "transaction":
            with store.transaction():
                pass
        other.start()

    number = 0
    reached = True
    while reached:
        number += 1
        mine += 1
        at_instruction(0, store.commit, None)
        mine += 1
        other = Other(store, change)
        reached = at_instruction(number, store.commit, lambda other=other: action(other))
        if not reached:
            other.start()
        other.end()
        assert not others.any(), f"at instruction {number}"
        store.commit()
    assert number > 20


def test_a_signal_handler_inside_a_commit_may_have_a_transaction(store):
    """Although another thread asks for one at that moment."""
    store["mine"] = store["others"] = number = 0
    reached = True

    def change(other):
        with store.transaction():
            store["others"] = number
            other.stay()

    def action(other):
        other.start()
        with store.transaction():
            store["mine"] = number

    while reached:
        number += 1
        at_instruction(0, store.commit, None)
        other = Other(store, change)
        reached = at_instruction(number, store.commit, lambda other=other: action(other))
        if not reached:
            other.start()
        other.end()
        assert store["others"] == number and store["mine"] == number - (not reached)
    assert number > 20


def committing_elsewhere(store):
    """Another thread, in the middle of a commit."""
    core = type(store._catalog.core).commit.__code__

    def commit(other):
        def profile(frame, event, argument):
            if event == "call" and frame.f_code is core:
                sys.setprofile(None)
                other.stay()

        sys.setprofile(profile)
        try:
            store.commit()
        finally:
            sys.setprofile(None)

    other = Other(store, commit)
    other.start()
    return other


def interrupted_waiting(store, function):
    """Runs the function, which is interrupted when it waits for a lock."""

    def interrupt(blocked):
        raise KeyboardInterrupt

    locks = store._catalog.lock, store._commits.lock.inner
    blocked = locks[0].blocked
    for lock in locks:
        lock.blocked = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            function()
    finally:
        for lock in locks:
            lock.blocked = blocked


def test_an_interrupted_commit_leaves_the_one_that_it_waited_for_alone(store):
    w = store.create_array("w", 3)
    store.commit()
    other = committing_elsewhere(store)
    interrupted_waiting(store, store.commit)
    with contextlib.suppress(Stop), store.transaction():
        w[:] = 1
        other.end()
        raise Stop
    assert not w.any()


def test_a_transaction_beside_a_close_waits_for_it_and_is_refused(store, monkeypatch):
    close = Catalog.close
    refused = []

    def enter(other):
        with pytest.raises(pmstore.ClosedStoreError), store.transaction():
            raise AssertionError
        refused.append(True)

    def closing(catalog, **how):
        other.start()
        close(catalog, **how)

    monkeypatch.setattr(Catalog, "close", closing)
    other = Other(store, enter)
    store.close()
    other.end()
    assert refused


def test_a_transaction_interrupted_while_it_waits_for_a_commit_has_not_begun(store):
    store["a"] = 1
    other = committing_elsewhere(store)
    stack = contextlib.ExitStack()
    interrupted_waiting(store, lambda: stack.enter_context(store.transaction()))
    other.end()
    assert not store.in_transaction and store["a"] == 1
    with store.transaction():
        store["a"] = 2
    assert store.sequence == 2
