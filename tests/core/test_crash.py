"""Crashes, explored: at every event, with any of what was not ordered lost, inside recovery, and after it.

PMSTORE_CRASH_BUDGET sets how many crash states a test evaluates; PMSTORE_CRASH_SEED the random choices.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import ffi, lib
from pmstore.testing._store.engine import Found
from pmstore.testing._store.marks import events_of
from pmstore.testing._store.recording import Recorder, Recording
from tests.conftest import Medium
from tests.support.crashes import (
    BUDGET,
    LARGE,
    NOT_STALE,
    OPTIONS,
    SEED,
    WORKLOADS,
    Workload,
    again,
    arrays,
    assert_survives,
    closed,
    explored,
    full,
    growth,
    limits,
    names,
    overflow,
    record,
    record_failed_sync,
    record_torn_header,
    reuse,
    wide,
)
from tests.support.crashes_new import explored_creation, explored_renumbering
from tests.support.crashes_slots import flips, slots, slots_again, slots_shut
from tests.support.crashes_threads import commits_by_other_threads
from tests.support.pairs import MEDIA, half, named


@pytest.mark.parametrize("medium, workload", half(MEDIA, named(WORKLOADS)), indirect=["medium"])
def test_I1_every_crash_leaves_a_whole_commit(medium: Medium, workload: Workload) -> None:
    recording = record(medium.directory / "store.pm", medium.name, workload, **OPTIONS.get(workload, {}))
    assert max(recording.states) >= 4
    depth = 2 if medium.name == "file" or BUDGET > 1000 else 1  # a crash in the recovery of a recovery is the dearest
    assert_survives(recording, **limits(workload, BUDGET, depth))


@pytest.mark.parametrize("workload", [names, reuse, growth], ids=lambda workload: workload.__name__)
def test_I1_commits_by_other_threads(medium: Medium, workload: Workload) -> None:
    if medium.name != "memory":
        pytest.skip("the flush of a disk counts for all threads")
    with commits_by_other_threads():
        recording = record(medium.directory / "store.pm", "memory", workload)
    assert len(set(events_of(recording)["thread"]) - {1, 2, 3}) == 3
    assert_survives(recording, **limits(workload, BUDGET, 1))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("workload", LARGE, ids=lambda workload: workload.__name__)
def test_I1_with_many_megabytes(medium: Medium, workload: Workload) -> None:
    if workload is wide and medium.name == "file":
        pytest.skip("its space map is the same, and every state takes seconds")
    recording = record(medium.directory / "store.pm", medium.name, workload)
    # Crashes in and after recoveries are hundreds of these states: .ci/run, which has a larger budget, evaluates them.
    options = {"budget": max(8, BUDGET // 100), "depth": int(BUDGET > 1000), "kinds": NOT_STALE}
    tally, found = explored(recording, **options)
    assert found is None, found
    assert tally.evaluated


def test_I1_memory_whose_caches_are_durable(medium: Medium) -> None:
    if medium.name != "memory":
        pytest.skip("disks have no eADR")
    assert_survives(record(medium.directory / "store.pm", medium.name, names), eadr=True)


@pytest.mark.parametrize("workload", [names, growth, full, overflow], ids=lambda workload: workload.__name__)
def test_I1_file_systems_that_sync_whole_files(tmp_path: Path, workload: Workload) -> None:
    options = OPTIONS.get(workload, {})
    assert_survives(
        record(tmp_path / "store.pm", "file", workload, ranges=False, **options), **limits(workload, BUDGET, 1)
    )


def test_I1_disks_with_sectors_of_4096_bytes(medium: Medium) -> None:
    if medium.name != "file":
        pytest.skip("memory has no sectors")
    assert_survives(record(medium.directory / "store.pm", medium.name, names), sector=4096)


@pytest.mark.parametrize("workload", [names, growth], ids=lambda workload: workload.__name__)
def test_I1_over_several_runs(medium: Medium, workload: Workload) -> None:
    """Killed, opened, changed, closed, opened, changed, killed."""
    recording = record(medium.directory / "store.pm", medium.name, workload, again, closed, again)
    assert_survives(recording, **limits(workload, BUDGET, 1))


@pytest.mark.parametrize("workload", [arrays, names], ids=lambda workload: workload.__name__)
def test_I4_crashes_of_recoveries_again_and_again(medium: Medium, workload: Workload) -> None:
    """Crashes in and after the recovery of a crash in and after a recovery. Each of these runs has background work, in
    an order that its seed decides, and some have commits that become durable later (I14).
    """
    recording = record(medium.directory / "store.pm", medium.name, workload)
    for seed in range(SEED, SEED + (24 if BUDGET > 1000 else 2)):
        tally, found = explored(recording, seed=seed, budget=24, depth=3)
        assert found is None, f"{medium.name}, seed {seed}: {found}"
        assert tally.nested >= 100


def test_I9_slots_over_several_runs(medium: Medium) -> None:
    """Memory lies over whichever slot was current when the store was opened."""
    runs = (slots, slots_again, slots_shut, slots_again)
    assert_survives(record(medium.directory / "store.pm", medium.name, *runs), **limits(slots, BUDGET))


def test_a_crash_while_a_store_is_made_leaves_no_half_of_one(medium: Medium) -> None:
    tally, found = explored_creation(medium.directory / "new.pm", medium.name, budget=300)
    assert found is None, found
    assert tally.evaluated >= 100


@pytest.mark.long_on("memory")
def test_I3_a_crash_while_a_new_number_is_written_leaves_one_of_the_two(medium: Medium) -> None:
    tally, found = explored_renumbering(medium.directory / "store.pm", medium.name, budget=BUDGET // 2)
    assert found is None, found
    assert tally.evaluated >= min(50, BUDGET // 2)


@pytest.mark.parametrize("workload", [arrays, reuse, flips], ids=lambda workload: workload.__name__)
def test_I3_recovery_makes_durable_what_it_adopts(tmp_path: Path, workload: Workload) -> None:
    """Found by the explorer: a process died in a commit, with the record in the page cache only; the next one took
    it for durable and copied it into the committed image; a power cut then left half of the committed image, and no
    record. Here every sync fails once (M5).
    """
    for number in itertools.count(1):
        recording = record_failed_sync(tmp_path / f"{number}.pm", workload, number)
        if recording is None:
            assert number > 5
            break
        assert_survives(recording, budget=min(150, BUDGET // 6), depth=0)


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


def test_the_explorer_notices_an_image_written_before_the_record(medium: Medium) -> None:
    """I3: each commit's record is moved behind its writes to the committed image."""

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


@pytest.mark.parametrize("lost", [1, 2])
def test_D6_a_later_record_tells_that_an_earlier_one_was_durable(medium: Medium, lost: int) -> None:
    """The durable marker tells too, but a power cut may lose that. Of two commits in the log one is damaged."""
    path = medium.directory / "records.pm"
    store = pmstore.open(path, "x", media=medium.name)
    store["x"] = np.zeros(64)
    store.commit()
    store._catalog.core.checkpoint()
    log = store.stats().file_size - store.stats().log_size
    places = []
    for i in (1, 2):
        places.append(log + store.stats().log_used)
        store["x"][:] = float(i)
        store.commit()
    store._drop(discard=True)
    image = bytearray(path.read_bytes())
    image[2048 : 2048 + 16] = bytes(16)
    image[places[lost - 1] + 100] ^= 1
    path.write_bytes(image)
    if lost == 1:
        with pytest.raises(pmstore.CorruptStoreError, match="durable"):
            pmstore.open(path, media=medium.name)
    else:
        with pmstore.open(path, media=medium.name) as store:
            assert store["x"][0] == 1.0 and store.check().ok


@pytest.mark.parametrize("lost", ["contents", "nothing"])
def test_D6_a_record_behind_a_torn_one_tells_that_contents_were_durable(tmp_path: Path, lost: str) -> None:
    """A new array is durable, and of two commits behind it the first is torn: the second knows of the array."""
    path = tmp_path / "records.pm"
    store = pmstore.open(path, "x", media="file", durability="async")
    store["x"] = np.zeros(64)
    store.commit()
    store.sync()
    store._catalog.core.checkpoint()
    log = store.stats().file_size - store.stats().log_size
    store["new"] = new = np.arange(10_000.0)
    store.commit()
    store.sync()
    torn = log + store.stats().log_used
    for i in (1, 2):
        store["x"][:] = float(i)
        store.commit()
    store._drop(discard=True)
    image = bytearray(path.read_bytes())
    image[2048 : 2048 + 16] = bytes(16)
    image[torn + 100] ^= 1
    if lost == "contents":
        place = image.index(new[5000:5010].tobytes())
        image[place : place + 80] = bytes(80)
    path.write_bytes(image)
    if lost == "contents":
        with pytest.raises(pmstore.CorruptStoreError, match="lost its contents"):
            pmstore.open(path, media="file")
    else:
        with pmstore.open(path, media="file") as store:
            assert np.array_equal(store["new"], new) and not store["x"].any()


@pytest.mark.parametrize("damaged", [0, 4096])
def test_I4_recovery_does_not_touch_the_only_sound_header_first(medium: Medium, damaged: int) -> None:
    """Found by the explorer: a crash tore copy B, and another one, inside recovery, then tore copy A."""
    recording = record_torn_header(medium.directory / "header.pm", medium.name, damaged)
    tally, found = explored(recording, budget=20_000, depth=2)
    assert found is None and (tally.exhaustive or tally.evaluated > 80) and tally.nested > 300, found
    events = [recording.event(number) for number in range(len(recording))]
    written = [event.offset for event in events if event.data and event.offset in (0, 4096)]
    assert written == [damaged, 4096 - damaged]


def test_a_trace_may_go_before_its_store(medium: Medium) -> None:
    """Garbage collectors free both in any order. The trace was used after it was freed."""
    path = medium.directory / "store.pm"
    with Recorder(path, medium.name) as recorder:
        store = pmstore.open(path)
        ffi.release(recorder.trace.pointer)
        store["a"] = 1
        store.close()
        recorder._base = None  # nothing to read any more
    with pmstore.open(path, "r", media=medium.name) as store:
        assert store["a"] == 1
