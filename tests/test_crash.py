"""Crashes, explored: at every event, with any of what was not ordered lost, inside recovery, and after it.

PMSTORE_CRASH_BUDGET sets how many crash states a test judges; PMSTORE_CRASH_SEED the random choices.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore._core import ffi, lib
from pmstore.testing._engine import Found
from pmstore.testing._recording import Recorder, Recording

from .conftest import Medium
from .crashes import BUDGET, SEED, WORKLOADS, Workload, arrays, explored, growth, names, record, reuse, spill


def options_of(workload: Workload) -> dict[str, Any]:
    return {"max_size": 2_800_000} if workload is spill else {}


def assert_survives(recording: Recording, **options: Any) -> None:
    tally, found = explored(recording, **options)
    assert found is None, f"{recording.medium}, seed {SEED}: {found}"
    assert tally.judged >= min(options.get("budget", BUDGET), 100) // 2


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_I1_every_crash_leaves_a_whole_commit(medium: Medium, workload: Workload) -> None:
    recording = record(medium.directory / "store.pm", medium.name, workload, **options_of(workload))
    assert max(recording.states) >= 4
    assert_survives(recording, depth=2)


def test_I1_memory_whose_caches_are_durable(medium: Medium) -> None:
    if medium.name != "memory":
        pytest.skip("disks have no eADR")
    assert_survives(record(medium.directory / "store.pm", medium.name, names), eadr=True)


def test_I1_disks_with_sectors_of_4096_bytes(medium: Medium) -> None:
    if medium.name != "file":
        pytest.skip("memory has no sectors")
    assert_survives(record(medium.directory / "store.pm", medium.name, names), sector=4096)


@pytest.mark.parametrize("workload", [names, growth], ids=lambda workload: workload.__name__)
def test_I1_over_several_lives(medium: Medium, workload: Workload) -> None:
    """Killed, opened, changed, closed, opened, changed, killed."""

    def closed(store: pmstore.Store) -> None:
        reuse(store)
        store.close()

    def again(store: pmstore.Store) -> None:
        for value in store.values():
            if hasattr(value, "dtype") and value.dtype.kind == "f":
                value += 1
        store.commit()

    assert_survives(record(medium.directory / "store.pm", medium.name, workload, again, closed, again))


@pytest.mark.parametrize("workload", [arrays, reuse], ids=lambda workload: workload.__name__)
def test_I3_recovery_makes_durable_what_it_adopts(tmp_path: Path, workload: Workload) -> None:
    """Found by the explorer: a process died in a commit, with the record in the page cache only; the next one took it
    for durable and copied it home; a power cut then left half of home, and no record. Here every sync fails once (M5).
    """
    for number in itertools.count(1):
        path = tmp_path / f"{number}.pm"
        with Recorder(path, "file") as recorder:
            store = pmstore.open(path)
            recorder.trace.fail(lib.PM_OPERATION_SYNC, number, errno.EIO)
            with contextlib.suppress(pmstore.Error):
                workload(store)
            _, failed = recorder.trace.operations()
            recorder.trace.fail(0, 0, 0)
            store._drop(discard=True)
            with pmstore.open(path) as store:
                store["after"] = number
        if not failed:
            assert number > 5
            break
        assert_survives(recorder.recording, budget=150, depth=0)


# ---- the explorer itself: what it must notice


def raw(events: list[Any]) -> bytes:
    return b"".join(bytes(ffi.buffer(ffi.addressof(event))) for event in events)


def without(recording: Recording, *kinds: int) -> Recording:
    """The recording without events of some kinds."""
    events = ffi.from_buffer("pm_event[]", recording.events)
    return replace(recording, events=raw([event for event in events if event.kind not in kinds]))


def changed(recording: Recording, change: Any) -> Recording:
    """The recording with events that `change` gives for a list of them."""
    array = bytearray(recording.events)
    events = change(list(ffi.from_buffer("pm_event[]", array)))
    return replace(recording, events=raw(events))


def found_in(recording: Recording) -> Found:
    _, found = explored(recording, budget=4000, depth=0)
    assert found is not None, "nothing was noticed"
    return found


@pytest.mark.parametrize("workload", [arrays, names], ids=lambda workload: workload.__name__)
def test_the_explorer_notices_missing_fences(medium: Medium, workload: Workload) -> None:
    recording = record(medium.directory / "store.pm", medium.name, workload)
    found_in(without(recording, lib.PM_EVENT_FENCE, lib.PM_EVENT_SYNC, lib.PM_EVENT_SYNC_RANGE))


def test_the_explorer_notices_home_written_before_the_record(medium: Medium) -> None:
    """I3: each commit's record is moved behind its home writes."""

    def late(events: list[Any]) -> list[Any]:
        out, held, begun = [], [], False
        for event in events:
            begun = begun or event.kind == lib.PM_EVENT_COMMIT_BEGIN
            in_log = event.kind in (lib.PM_EVENT_STREAM, lib.PM_EVENT_WRITE) and event.offset >= 8192 + (256 << 10)
            if event.kind == lib.PM_EVENT_COMMIT_END:
                out += held
                held = []
            (held if begun and in_log else out).append(event)
        return out

    found_in(changed(record(medium.directory / "store.pm", medium.name, arrays), late))


def test_the_explorer_notices_a_lost_acknowledged_commit(medium: Medium) -> None:
    def early(events: list[Any]) -> list[Any]:
        """Every commit is acknowledged before it begins to be written."""
        out = []
        for event in events:
            if event.kind == lib.PM_EVENT_COMMIT_BEGIN:
                out.append(event)
                event = ffi.new("pm_event *", event)[0]
                event.kind = lib.PM_EVENT_COMMIT_END
            out.append(event)
        return out

    assert (
        found_in(changed(record(medium.directory / "store.pm", medium.name, arrays), early)).verdict.problem
        == "sequence"
    )


@pytest.mark.parametrize("damaged", [0, 4096])
def test_I4_recovery_does_not_touch_the_only_sound_header_first(medium: Medium, damaged: int) -> None:
    """Found by the explorer: a crash tore copy B, and another one, inside recovery, then tore copy A."""
    path = medium.directory / "header.pm"
    with pmstore.open(path, "x", media=medium.name) as store:
        store["x"] = 1
    image = bytearray(path.read_bytes())
    image[damaged + 16] ^= 1
    path.write_bytes(image)
    recording = record(path, medium.name, lambda store: None)
    events = [recording.event(number) for number in range(len(recording))]
    written = [event.offset for event in events if event.data and event.offset in (0, 4096)]
    assert written == [damaged, 4096 - damaged]
