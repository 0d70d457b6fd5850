"""The commands watch and top."""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pmstore._store.opening import local_path
from pmstore._watch.follow import Follower, View, views
from pmstore._watch.top import Summary, stores_in

__all__ = ["top", "watch"]

PASS = 2.0  # seconds from one pass over a directory to the next


def watch(path: str, names: Sequence[str], *, once: bool, as_json: bool, web: bool, port: int) -> None:
    """Show a store until an interrupt, or once."""
    with Follower(path, names) as follower:
        try:
            if web:
                from pmstore._watch.server import serve

                serve(follower, port)
            elif as_json:
                seen = views(follower, threading.Event())
                _print_lines(view.as_json(curves=False) for view in _first(_news(seen), once))
            else:
                from pmstore._watch.terminal import console_for, drawn, live, looked

                console = console_for(once)
                if once:
                    console.print(drawn(follower.view()))
                else:
                    live(console, looked(follower))
        except KeyboardInterrupt:
            pass


def top(directory: str, *, once: bool, as_json: bool) -> None:
    """Show the stores in a directory until an interrupt, or once."""
    directory = local_path(directory, "pmstore top lists a directory of this machine")
    try:
        if as_json:
            passes = ([one.as_json() for one in found] for found in _first(_passes(directory), once))
            _print_lines({"time": time.time(), "path": directory, "stores": stores} for stores in passes)
        else:
            from pmstore._watch.terminal import console_for, live, summaries

            console = console_for(once)
            if once:
                console.print(summaries(stores_in(directory)))
            else:
                live(console, map(summaries, _passes(directory)))
    except KeyboardInterrupt:
        pass


def _first(things: Iterable[Any], once: bool) -> Iterable[Any]:
    return itertools.islice(things, 1) if once else things


def _news(seen: Iterable[View]) -> Iterator[View]:
    """Views that differ from the one before by more than the time. Raises BrokenPipeError when nobody reads standard
    output any more: without news, nothing is written to it."""
    before = None
    for view in seen:
        if _nobody_reads():
            raise BrokenPipeError
        now = (view.sequence, view.writer, [fit.state for fit in view.fits])
        if now != before:
            yield view
        before = now


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has ended."""
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in output.poll(0))
    return False


def _passes(directory: str) -> Iterator[list[Summary]]:
    while True:
        begun = time.monotonic()
        yield stores_in(directory)
        took = time.monotonic() - begun
        time.sleep(max(PASS - took, 3 * took))


def _print_lines(things: Iterable[dict[str, Any]]) -> None:
    for thing in things:
        json.dump(thing, sys.stdout, allow_nan=False)
        sys.stdout.write("\n")
        sys.stdout.flush()
