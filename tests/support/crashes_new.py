"""Crashes while a store is made, and while the last commit of a new store gets another number."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore._core import format_file
from pmstore._trace import Trace
from pmstore.testing._store.engine import Found, Options, Tally, explore
from pmstore.testing._store.recording import Recorder, Recording
from tests.support.crashes import BUDGET, SEED


def explored_creation(path: Path, medium: str, **options: Any) -> tuple[Tally, Found | None]:
    """Explore the creation of an empty store: a crash leaves no store, or a valid empty one."""
    trace = Trace(SEED)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        format_file(fd, medium, trace)
    finally:
        os.close(fd)

    def check(left: bytes, acknowledged: int, started: int) -> str | None:
        path.write_bytes(left)
        try:
            with pmstore.open(path, "r+", media=medium) as store:
                report = store.check()
                if not report.ok or len(store):
                    return f"half a store opens: {report}"
                store["first"] = np.ones(1000)
        except pmstore.NotAStoreError:
            return None
        except pmstore.CorruptStoreError as error:
            # The header is written last, when the rest is durable.
            return None if "header" in str(error) else f"half a store has a header: {error}"
        return None

    recording = Recording(medium, b"", *trace.raw())
    return explore(recording, Options(**{"budget": BUDGET, "seed": SEED, **options}), check, raw=True)


def explored_renumbering(path: Path, medium: str, **options: Any) -> tuple[Tally, Found | None]:
    """Explore a store whose last commit gets other numbers: a crash leaves a whole commit with one of its numbers."""
    known = set[tuple[int, int]]()
    with Recorder(path, medium, SEED) as recorder:
        store = pmstore.open(path)
        core = store._catalog.core

        def note() -> None:
            known.add((core.sequence, core.state_hash()))

        note()
        array = store.create_array("array", 40_000)
        for i, number in enumerate((None, None, 1000, None, 0, None), 1):
            array[:] = i  # whole, so that it is soon in two slots
            store.commit()
            note()
            if number is not None:
                core.renumber(number)
                note()
            store["i"] = i
            store.commit()
            note()
        core.renumber(7)
        note()
        store.close()

    def check(left: bytes, acknowledged: int, started: int) -> str | None:
        path.write_bytes(left)
        with pmstore.open(path, "r+", media=medium) as store:  # type: ignore[arg-type]
            report = store.check()
            if not report.ok:
                return f"not valid: {report}"
            if (store.sequence, store._catalog.core.state_hash()) not in known:
                return f"commit {store.sequence} never was like this"
            before = store.sequence
            store["after"] = 1
            store.commit()
            store._drop(discard=True)
        with pmstore.open(path, "r") as store:
            return None if store.sequence == before + 1 and store["after"] == 1 else "the next commit is lost"

    return explore(recorder.recording, Options(**{"budget": BUDGET, "seed": SEED, **options}), check, raw=True)
