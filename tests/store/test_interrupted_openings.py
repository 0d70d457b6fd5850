"""Interrupts of opening and closing, which leave no lock behind, and how handlers are put off."""

from __future__ import annotations

import functools
import gc
import signal
import sys

import numpy as np
import pytest

import pmstore
from pmstore import _interrupts as interrupts
from tests.conftest import run_in_fork
from tests.store.test_transactions import Stop, in_thread
from tests.support.interrupting import signalled_at


def opens_and_closes(path):
    with pmstore.open(path):
        pass


def opens_and_fails(path):
    try:
        with pmstore.open(path):
            raise Stop
    except Stop:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pmstore.AbandonedTransactionWarning")  # in which a with statement rolls back
@pytest.mark.parametrize(
    "uses, joined, number",
    [
        (opens_and_closes, False, signal.SIGXCPU),
        (opens_and_closes, True, signal.SIGINT),
        (opens_and_fails, True, signal.SIGINT),
    ],
)
def test_an_interrupt_anywhere_leaves_no_lock_behind(open_store, uses, joined, number, request):
    """The interrupts come in opening and closing. The locks of an opening go with it, and an open store stays open."""
    before = signal.signal(number, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(number, before))
    store = open_store()
    path = store.path

    if not joined:
        store.close()
    gc.collect()
    event_number = 0
    while signalled_at(event_number := event_number + 1, functools.partial(uses, path), number):
        gc.collect(0)
        thread, out = in_thread(lambda: pmstore.open(path).close())
        thread.join(10)
        assert out == [None]
        if joined:
            assert not store.closed and store.openings <= 2  # an interrupt before the with statement is entered
            while store.openings > 1:
                store.close()
    assert event_number > 100


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("uses, step, keeps", [(pmstore.compact, 5, False), (pmstore.upgrade, 1, True)])
def test_an_interrupt_leaves_no_file_locked(tmp_path, uses, step, keeps):
    """keeps: the errors, with their tracebacks, as a notebook keeps the last one. Those of compact() would keep the
    temporary files."""
    path = tmp_path / "store.pm"
    with pmstore.open(path) as store:
        store["array"] = np.arange(1000)
    kept = []

    def use():
        try:
            uses(path)
        except KeyboardInterrupt as error:
            kept.extend([error] if keeps else [])
            raise

    event_number = 0
    while event_number < 1000 and signalled_at(event_number := event_number + step, use):
        thread, out = in_thread(lambda: pmstore.open(path).close())
        thread.join(10)
        assert out == [None]
    assert event_number > 100


def test_handlers_of_all_signals_run_later(request: pytest.FixtureRequest) -> None:
    came = []
    others = ("KILL", "STOP", "SEGV", "BUS", "FPE", "ILL", "ABRT")  # faulthandler has all but two
    numbers = sorted(signal.valid_signals() - {signal.Signals[f"SIG{name}"] for name in others})
    for number in numbers:
        before = signal.signal(number, lambda number, _: came.append(number))
        request.addfinalizer(functools.partial(signal.signal, number, signal.SIG_DFL if before is None else before))
    with interrupts.later():
        for number in numbers:
            signal.raise_signal(number)
        assert came == []
    assert came == numbers


def test_handlers_run_later_after_a_recursion_that_was_too_deep(store, request: pytest.FixtureRequest) -> None:
    """Each of the last frames that Python has room for begins a change, which finds room for some of its calls."""

    def change(depth):
        if depth == 0:
            store["array"] = np.ones(3)
        else:
            change(depth - 1)

    def handler(number, _):
        came.append(number)

    came, refused = [], 0
    request.addfinalizer(functools.partial(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, handler)))
    for depth in range(sys.getrecursionlimit()):
        try:
            change(depth)
        except RecursionError:
            refused += 1
    assert refused > 10
    with interrupts.later():
        signal.raise_signal(signal.SIGUSR1)
        assert came == []
    assert came == [signal.SIGUSR1] and signal.getsignal(signal.SIGUSR1) is handler


@pytest.mark.parametrize("moment", ["inside", "leaving"])
def test_a_child_of_another_thread_has_its_handlers(request: pytest.FixtureRequest, moment: str) -> None:
    """The other thread may fork while the main one gives the handlers back."""

    def child():
        assert signal.getsignal(signal.SIGUSR1) is handler
        signal.raise_signal(signal.SIGUSR1)
        with interrupts.later():
            signal.raise_signal(signal.SIGUSR1)
            assert came == [signal.SIGUSR1]
        assert came == 2 * [signal.SIGUSR1]

    came, out = [], []

    def handler(number, _):
        came.append(number)

    def fork():
        thread, result = in_thread(lambda: run_in_fork(child))
        thread.join()
        out.extend(result)

    def profile(frame, event, argument):
        if frame.f_code is interrupts._restore.__code__:
            sys.setprofile(None)
            fork()

    before = signal.signal(signal.SIGUSR1, handler)
    request.addfinalizer(functools.partial(signal.signal, signal.SIGUSR1, before))
    with interrupts.later():
        if moment == "inside":
            fork()
        else:
            sys.setprofile(profile)
    assert out == [None] and not came


def test_the_handlers_of_all_signals_run_whatever_one_of_them_raises(request: pytest.FixtureRequest) -> None:
    def handler(number, _):
        came.append(number)
        raise Stop

    came, numbers = [], [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2]
    for number in numbers:
        request.addfinalizer(functools.partial(signal.signal, number, signal.signal(number, handler)))
    with pytest.raises(Stop), interrupts.later():
        for number in numbers:
            signal.raise_signal(number)
    assert came == numbers


def test_a_handler_that_equals_the_one_before_is_another_one(request: pytest.FixtureRequest) -> None:
    class Handler:
        def __init__(self):
            self.calls = 0

        def __call__(self, *_):
            self.calls += 1

        def __eq__(self, other):
            return isinstance(other, Handler)

        __hash__ = object.__hash__

    class Hostile(Handler):
        def __eq__(self, other):
            raise Stop

        __hash__ = object.__hash__

    one, other, hostile = Handler(), Handler(), Hostile()
    request.addfinalizer(functools.partial(signal.signal, signal.SIGUSR1, signal.getsignal(signal.SIGUSR1)))
    for handler in (one, other, signal.SIG_DFL, hostile, signal.SIG_IGN, one):
        signal.signal(signal.SIGUSR1, handler)
        with interrupts.later():
            if handler is not signal.SIG_DFL:
                signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is handler
    assert (one.calls, other.calls, hostile.calls) == (2, 1, 1)


def test_handlers_come_back_whatever_one_of_them_raises(request: pytest.FixtureRequest) -> None:
    """A handler that is back may run before the others are. Whatever line it interrupts, all come back in the end."""

    class Ring(Exception):
        pass

    def alarm(*_):
        raise Ring

    numbers = [signal.SIGINT, signal.SIGALRM, signal.SIGUSR2]
    for number in numbers:
        request.addfinalizer(functools.partial(signal.signal, number, signal.signal(number, alarm)))
    at, rang = 0, True
    while rang:
        at, left, rang = at + 1, at, False

        def trace(frame, event, argument):
            nonlocal left, rang
            ours = frame.f_code.co_filename.endswith(("_interrupts.py", "contextlib.py")) and event == "line"
            if ours and not rang and any(signal.getsignal(number) is alarm for number in numbers):
                left -= 1
                if left < 0:
                    rang = True
                    raise Ring
            return trace

        try:
            with interrupts.later():
                sys.settrace(trace)
        except Ring:
            pass
        finally:
            sys.settrace(None)
        with interrupts.later():
            pass
        assert [signal.getsignal(number) for number in numbers] == [alarm] * 3
        with pytest.raises(Ring):
            signal.raise_signal(signal.SIGINT)
        interrupts.deliver()
    assert at > 3
