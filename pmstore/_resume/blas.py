"""The number of threads that BLAS computes in, which threads of a process can only have in common."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pmstore._interrupts import later

_lock = threading.Lock()
_limits: dict[object, int] = {}  # by the calls of limited_blas, the newest last
_unlimited: dict[str, tuple[Any, dict[str, Any]]] = {}  # the libraries as they were when the first thread entered


@contextmanager
def limited_blas(controller: Any, threads: int) -> Iterator[None]:
    """BLAS computes in so many threads. The limit holds for the process, so the last thread that leaves removes it.

    Parameters
    ----------
    controller : threadpoolctl.ThreadpoolController
    threads : int
    """
    mine = object()
    try:
        with later(), _lock:
            for library in controller.lib_controllers:
                if library.filepath not in _unlimited:
                    _unlimited[library.filepath] = library, library.info()
            _limits[mine] = threads
            _limit()
        yield
    finally:
        try:
            _leave(mine)
        except BaseException:  # an interrupt came before `later` was entered
            _leave(mine)
            raise


def _leave(mine: object) -> None:
    """Remove a limit, if it is there: it is not in a child that was forked inside."""
    with later(), _lock:
        _limits.pop(mine, None)
        _limit()


def unlimited(controller: Any) -> list[dict[str, Any]]:
    """The loaded libraries as ``threadpoolctl`` describes them, with the thread counts that they have outside
    limited_blas."""
    with _lock:
        known: list[dict[str, Any]] = [info for _, info in _unlimited.values()] if _limits else controller.info()
        return known


def _limit() -> None:
    """Set the newest limit; without any, the thread counts that the libraries had before."""
    for library, info in _unlimited.values():
        if info["user_api"] == "blas":
            _set(library, next(reversed(_limits.values()), info["num_threads"]))
    if not _limits:
        _unlimited.clear()


def _set(library: Any, threads: int) -> None:
    """Set the thread count of a library, from any thread. From 3.8 on threadpoolctl ignores, for OpenBLAS, all threads
    but the first one that asks, until it is told that this one is done."""
    done = getattr(library, "clear_controlling_thread", lambda *, force: None)
    done(force=True)
    library.set_num_threads(threads)
    done(force=True)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may hold the old one forever
    _limits.clear()
    _limit()


os.register_at_fork(after_in_child=_after_fork)
