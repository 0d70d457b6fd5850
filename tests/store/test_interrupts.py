"""Transactions that are interrupted, left while they are left, or die inside: what a signal handler can do."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import operator
import signal
import sys
import threading
import weakref

import numpy as np
import pytest

import pmstore
from pmstore._store.commits import Commits
from tests.store.test_transactions import Stop, in_thread


@contextlib.contextmanager
def signal_at(event_number, handler):
    """`raised_at` with this handler."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        with raised_at(event_number) as sent:
            yield sent
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def raised_at(event_number):
    """A signal comes at the n-th moment when the interpreter would run its handler, which is when a Python function of
    pmstore is entered, or a C function returns to one. Gives a list that is empty if there are fewer."""
    seen = 0
    sent = []
    directory = pmstore.__path__[0]

    def profile(frame, event, argument):
        nonlocal seen
        if not frame.f_code.co_filename.startswith(directory) or sent:
            return
        if event in ("call", "c_return"):
            seen += 1
            if seen == event_number:
                sent.append(seen)
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    gc.disable()  # the end of another test's store is no moment of this function
    sys.setprofile(profile)
    try:
        yield sent
    finally:
        sys.setprofile(None)
        gc.enable()


def interrupted_at(event_number, function):
    """Runs the function and interrupts it at the n-th of these moments. False if there are fewer."""
    with signal_at(event_number, signal.default_int_handler) as sent:
        try:
            function()
        except KeyboardInterrupt:
            assert sent
        else:
            assert not sent  # it was swallowed: pytest says where
    return bool(sent)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("failing", [False, True])
def test_an_interrupt_anywhere_leaves_no_transaction_behind(store, nested, failing, declared):
    w = store.create_array("w", 3)
    store.commit()
    only = [w[::2], w] if declared else None

    def body():
        w[:] += 1
        if failing:
            raise Stop

    def run():
        with contextlib.suppress(Stop), store.transaction(only=only):
            if nested:
                with store.transaction(only=only):
                    body()
            else:
                body()

    n = 0
    finished = False
    while not finished:
        n += 1
        before, sequence = w[0], store.sequence
        finished = not interrupted_at(n, run)
        assert not store.in_transaction
        assert w[0] == before + (store.sequence - sequence)  # the commit happened, or it didn't
        thread, out = in_thread(store.rollback)  # the transaction lock is free for others
        thread.join(10)
        assert out == [None]
        thread, out = in_thread(lambda: "w" in store)  # and so are the names
        thread.join(10)
        assert out == [True]
    assert n > 5
    assert store.sequence > 1 or failing


def test_an_interrupt_while_the_hint_of_an_unknown_name_is_made(tmp_path):
    class Interrupted(pmstore.UnknownNameError):
        def __str__(self):
            raise KeyboardInterrupt

    path = tmp_path / "store.pm"
    with pytest.raises(KeyboardInterrupt), pmstore.open(path) as store:
        store["new"] = 1
        raise Interrupted("x")
    assert store.closed
    with pmstore.open(path) as store:
        assert list(store) == []


def test_a_handler_that_replaces_itself_at_any_moment(store):
    def second(*_):
        pass

    n, there = 0, [1]
    while there:
        n += 1
        with signal_at(n, lambda *_: signal.signal(signal.SIGINT, second)) as there:
            store["x"] = n
            now = signal.getsignal(signal.SIGINT)
        assert now is second or not there, n
    assert n > 10


def test_an_interrupt_at_any_moment_leaves_the_handler(store):
    n, there = 0, [1]
    while there:
        n += 1
        with signal_at(n, signal.default_int_handler) as there:
            with contextlib.suppress(KeyboardInterrupt):
                store["x"] = n
            now = signal.getsignal(signal.SIGINT)
        assert now is signal.default_int_handler, n
    assert n > 10


def test_an_array_that_a_handler_reads_while_others_are_forgotten(store):
    store.update(one=np.zeros(3), other=np.zeros(3))
    for moment in itertools.count(1):
        held = []
        store._catalog._live._room = 0  # what is gone is forgotten by the next reading
        with signal_at(moment, lambda *_, held=held: held.append([store["one"], store["other"]])) as sent:
            other = store["other"]
        if not sent:
            break
        assert store["one"] is held[0][0] and store["other"] is held[0][1]
        del other
    assert moment > 10


def test_nothing_of_python_runs_after_a_transaction_was_left(store):
    """An interrupt in what runs when an object dies is reported and lost."""
    last = None

    def profile(frame, event, argument):
        nonlocal last
        if event in ("call", "return") and frame.f_code.co_filename.startswith(pmstore.__path__[0]):
            last = event, frame.f_code.co_name

    for failing in (False, True):
        sys.setprofile(profile)
        try:
            with contextlib.suppress(Stop), store.transaction():
                if failing:
                    raise Stop
        finally:
            sys.setprofile(None)
        assert last == ("return", "roll_back_now" if failing else "commit_now")


@pytest.mark.parametrize("passing", [False, True])
def test_a_transaction_that_dies_inside_is_rolled_back(store, passing):
    """An ExitStack that entered it may have been interrupted before it knew. passing: the interrupt is caught."""
    w = store.create_array("w", 3)
    store.commit()

    def lose():
        transaction = store.transaction()
        transaction.__enter__()
        w[:] = 1
        if passing:
            raise Stop

    with pytest.warns(pmstore.AbandonedTransactionWarning):
        with pytest.raises(Stop) if passing else contextlib.nullcontext():
            lose()
    assert not w.any() and not store.in_transaction
    thread, out = in_thread(store.commit)
    thread.join(10)
    assert out == [None]
    outer, inner = store.transaction(), store.transaction()
    outer.__enter__(), inner.__enter__()
    w[:] = 1
    del inner
    with pytest.raises(pmstore.TransactionError, match="had left an inner"):
        outer.__exit__(None, None, None)
    assert not w.any() and not store.in_transaction


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError, MemoryError])
@pytest.mark.parametrize("interrupts", [1, 3, sys.maxsize])
def test_interrupts_while_it_rolls_back(store, monkeypatch, interrupts, kind, failing):
    """One after the other: it is rolled back, unless interrupts never end. The transaction lock is free for others."""
    w = store.create_array("w", 3)
    store.commit()
    commit, roll_back = Commits.commit_now, Commits.roll_back_now
    left = interrupts

    def interrupt(commits, *_):
        nonlocal left
        if left:
            left -= 1
            raise kind
        roll_back(commits)

    if not failing:
        monkeypatch.setattr(Commits, "commit_now", interrupt)
    monkeypatch.setattr(Commits, "roll_back_now", interrupt)
    with pytest.raises(kind), store.transaction():
        w[:] = 1
        if failing:
            raise Stop
    kept = interrupts == sys.maxsize or (not failing and kind is not KeyboardInterrupt)  # a commit failed: pending
    assert w.any() == kept and not store.in_transaction
    monkeypatch.setattr(Commits, "commit_now", commit)
    thread, out = in_thread(store.commit)
    thread.join(10)
    assert out == [None]


def test_an_alarm_as_the_block_fails(store, request):
    """Its handler raises an exception like any other, in the first instruction of the rollback."""

    def alarm(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, alarm)
    request.addfinalizer(lambda: signal.signal(signal.SIGALRM, before))
    kill = ctypes.CDLL(None)["raise"]  # unlike signal.raise_signal it does not run the handler itself
    w = store.create_array("w", 3)
    store.commit()
    with pytest.raises((TimeoutError, ZeroDivisionError)), store.transaction():
        w[:] = 1
        list(map(kill, map(operator.floordiv, [int(signal.SIGALRM), 1], [1, 0])))  # in C, to the error
    assert not w.any()
    store["a"] = 1
    store.commit()
    assert not w.any()


def test_a_doomed_transaction_left_while_it_is_left(store, monkeypatch):
    """A signal handler might do that."""
    transaction = store.transaction()
    transaction.__enter__()
    with contextlib.suppress(Stop), store.transaction():
        store["a"] = 1
        raise Stop
    roll_back = Commits.roll_back_now

    def leave_and_roll_back(commits):
        monkeypatch.setattr(Commits, "roll_back_now", roll_back)
        with pytest.raises(pmstore.TransactionError, match="had left an inner"):
            transaction.__exit__(None, None, None)
        roll_back(commits)

    monkeypatch.setattr(Commits, "roll_back_now", leave_and_roll_back)
    with pytest.raises(pmstore.TransactionError, match="had left an inner"):
        transaction.__exit__(None, None, None)
    assert not store.in_transaction and "a" not in store


def test_the_transaction_lock_is_released_once(store, monkeypatch):
    """Also where the transaction was left while it was left, and another thread has the lock by then."""
    inside, go = threading.Event(), threading.Event()

    def other():
        with store.transaction():
            inside.set()
            go.wait()
            return store.in_transaction

    transaction = store.transaction()
    transaction.__enter__()
    store["a"] = 1
    commit = Commits.commit_now

    def commit_and_leave(commits, only):
        monkeypatch.setattr(Commits, "commit_now", commit)
        commit(commits, only)
        transaction.__exit__(None, None, None)
        thread.append(in_thread(other))
        inside.wait()

    thread = []
    monkeypatch.setattr(Commits, "commit_now", commit_and_leave)
    transaction.__exit__(None, None, None)
    assert not store._commits.lock.inner.acquire(False)
    go.set()
    thread[0][0].join()
    assert thread[0][1] == [True]


def test_a_transaction_in_a_cycle_is_collected(medium):
    store = pmstore.open(medium.directory / "s")
    store["items"] = []
    store.commit()
    gone = weakref.ref(store)
    items = store["items"]
    items.append(store.transaction())
    with pytest.warns(ResourceWarning):
        del store, items
        gc.collect()
    assert gone() is None


def test_only_stores_make_transactions():
    with pytest.raises(TypeError):
        pmstore._store.store.Transaction()


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals")
def test_sigint_in_the_last_call_of_the_block(store, request):
    """The handler runs at the first instruction of what leaves the block, before any try."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    w = store.create_array("w", 3)
    store.commit()
    for _ in range(20):
        try:
            with store.transaction():
                w[:] = 1
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            kept = error  # and with it, the traceback
            assert not w.any() and not store.in_transaction
            assert store.sequence == 1
        else:
            raise AssertionError("no KeyboardInterrupt")
    del kept


def test_a_storm_of_timers_interrupts_nothing(open_store):
    """Profilers set such timers. test_faults.py tests the errors of calls that the system interrupts."""
    store = open_store()
    rang = []
    before = (
        signal.signal(signal.SIGALRM, lambda *_: rang.append(1)),
        signal.signal(signal.SIGPROF, lambda *_: rang.append(1)),
    )
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    signal.setitimer(signal.ITIMER_PROF, 1e-3, 1e-3)
    try:
        grown = store.create_array("grown", 2_000_000)
        for i in range(3):
            grown[:: i + 1] += 1
            store.commit()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGPROF, before[1])
    assert rang and grown.sum() == 2_000_000 + 1_000_000 + 666_667 and store.check().ok
    assert signal.SIGALRM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("resized", [False, True])
def test_I36_an_interrupt_anywhere_loses_no_writes_to_rows_that_move(store, resized):
    """The array that a program has is live, or read-only because the rows have left it."""
    x = store.create_array("x", 600, maxshape=(None,))  # more than a page, so that the next row needs another extent
    store.commit()
    change = (lambda: store.resize("x", 601)) if resized else (lambda: store.append("x", np.ones(1)))
    event_number, moves = 0, 0
    while interrupted_at(event_number := event_number + 1, change):
        now = store["x"]
        assert x.flags.writeable == (now is x), event_number
        if now is x:
            x[0] += 1
            store.commit()  # and no warning of a lost update
        else:
            moves += 1
            assert len(now) == 601 and now.flags.writeable
            store.rollback()
            assert store["x"] is x and x.flags.writeable and not now.flags.writeable
    assert x[0] == event_number - 1 - moves and moves > 1 and not x.flags.writeable and store.check().ok


@pytest.mark.long_on("file")
@pytest.mark.parametrize("change", ["del", "pop", "rename", "rename a group", "import"])
def test_I38_an_interrupt_anywhere_leaves_no_attributes_behind(store, tmp_path, change):
    with pmstore.open(":memory:") as other:
        other["d/f"] = np.arange(5.0)
        other.attrs("d").update(t=2, u=3)
        other.attrs("d/f")["v"] = 4
        pmstore.export(other, tmp_path / "x.npz")
    store["d/e"] = store["d/deep/e"] = 1
    for name in ("d", "d/e", "d/deep", "d/deep/e"):
        store.attrs(name)["t"] = 1
    store.commit()
    changes = {
        "del": lambda: store.__delitem__("d/deep/e"),
        "pop": lambda: store.pop("d/deep/e"),
        "rename": lambda: store.rename("d/deep/e", "e"),
        "rename a group": lambda: store.rename("d/deep", "deep"),
        "import": lambda: pmstore.load_into(store, tmp_path / "x.npz"),
    }
    event_number = 1
    while interrupted_at(event_number, changes[change]):
        assert store.check().ok, event_number
        if "d/f" not in store:
            assert dict(store.attrs("d")) == {"t": 1}
        store.rollback()
        event_number += 1
    assert event_number > 5
