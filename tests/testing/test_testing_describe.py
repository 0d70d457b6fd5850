"""What the explorer says: phases, differences, lost pieces; and how a crash is shrunk before it is told."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import lib
from pmstore.testing import CrashExplorer, CrashFailure, CrashReport, CrashTestError
from pmstore.testing._explorer import plan
from pmstore.testing._store.coverage import CrashReport as Report
from pmstore.testing._store.describe import (
    Contents,
    Sandbox,
    States,
    commits,
    contents_text,
    differences,
    phase,
    phases,
    require_event,
    shortened,
    timeline,
    verdict_text,
    when_text,
)
from pmstore.testing._store.engine import SIZE_CELL, Cell, Found, Options, Schedule, Tally, Verdict, cells
from pmstore.testing._store.message import _indented, describe
from pmstore.testing._store.places import file_map, lost_text
from pmstore.testing._store.recording import Recorder, Recording
from pmstore.testing._store.shrink import ddmin, shrink

EVENT = struct.Struct("<QQIHHQ")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
FENCES = {lib.PM_EVENT_FENCE, lib.PM_EVENT_SYNC, lib.PM_EVENT_SYNC_RANGE}


def recorded(medium: str) -> Recording:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        with Recorder(Path(directory) / "s.pm", medium) as recorder:
            store = pmstore.open(Path(directory) / "s.pm")
            centers = store.create_array("centers", (40, 8), "f8")
            store.commit()
            for i in range(1, 3):
                with store.transaction():
                    centers[4:8] += i
                    store["epoch"] = i
            store._drop(discard=True)
    return recorder.recording


@pytest.fixture(scope="module", params=["memory", "file"])
def recording(request: pytest.FixtureRequest) -> Recording:
    if request.param == "memory" and MEMORY is None:
        pytest.skip("no /dev/shm")
    return recorded(request.param)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as sandbox:
        yield sandbox


def changed(recording: Recording, change: Callable[[list[tuple[int, ...]]], list[tuple[int, ...]]]) -> Recording:
    events = change(list(EVENT.iter_unpack(recording.events)))
    return Recording(recording.medium, recording.base, b"".join(EVENT.pack(*e) for e in events), recording.data)


# ---- phases


def test_phases_name_commits(recording: Recording) -> None:
    word = "fence" if recording.medium == "memory" else "sync"
    told = list(dict.fromkeys(phases(recording)))
    assert told == [
        "while the store was being opened",
        "before commit 1 began",
        f"after commit 1 began, before its {word}",
        f"after the {word} of commit 1, before it was acknowledged",
        "after commit 1 was acknowledged, before commit 2 began",
        f"after commit 2 began, before its {word}",
        f"after the {word} of commit 2, before it was acknowledged",
        "after commit 2 was acknowledged, before commit 3 began",
        f"after commit 3 began, before its {word}",
        f"after the {word} of commit 3, before it was acknowledged",
        "after commit 3 was acknowledged",
    ]
    assert [commit.sequence for commit in commits(recording)] == [1, 2, 3]
    assert all(phase(recording, event) == text for event, text in enumerate(phases(recording)))
    lines = timeline(recording)
    assert len(lines) == len(told) + 1
    assert lines[-1].endswith("after commit 3 was acknowledged")


def test_a_later_run_has_a_recovery_of_its_own(recording: Recording) -> None:
    twice = changed(recording, lambda events: [*events, *events[:2]])
    assert phase(twice, len(recording) + 1) == "inside the recovery of run 2"


def test_a_second_crash_is_told(recording: Recording) -> None:
    end = recording.ends()[2]
    schedule = Schedule(end, "all", (), 0, Schedule(3, "all"))
    inside = when_text(recording, schedule, Verdict("open", "", None, 2, 2))
    assert inside.startswith(
        "crash after commit 2 was acknowledged, before commit 3 began; then a second crash, in the"
    )
    after = when_text(recording, schedule, Verdict("mixed", "", 3, 3, 4))
    assert after.endswith("after the recovery and 2 more commits (3 events on)")


def test_events_that_there_are(recording: Recording) -> None:
    require_event(recording, len(recording))
    for event in (-1, len(recording) + 1):
        with pytest.raises(CrashTestError, match=f"has events 0 to {len(recording)}, and no {event}"):
            require_event(recording, event)


# ---- states and differences


def test_committed_states_are_read_from_the_recording(recording: Recording, sandbox: Sandbox) -> None:
    states = States(recording, Options(), sandbox)
    assert list(states) == [0, 1, 2, 3]
    assert states[0] == {}
    third = states[3]
    assert third is not None
    assert third["epoch"] == 2
    assert third["centers"][4, 0] == 3
    assert states[9] is None
    assert contents_text(third).endswith("epoch = 2")


class Known(dict[int, Contents]):
    """States for `differences`, made by hand."""


def array(*rows: float) -> np.ndarray[Any, Any]:
    return np.repeat(np.array(rows)[:, None], 3, axis=1)


BEFORE = {"x": array(1, 1, 1, 1), "n": 1, "gone": 0}
NOW = {"x": array(2, 2, 2, 1), "n": 2, "new": np.arange(3)}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({**NOW, "x": array(2, 1, 1, 1)}, "array 'x' rows 1–2 are older than commit 2: as in commit 1"),
        ({**NOW, "x": array(1, 2, 2, 1)}, "array 'x' row 0 is older than commit 2: as in commit 1"),
        ({**NOW, "x": array(2, 2, 2, 3)}, "array 'x' row 3 is newer than commit 2: as in commit 3"),
        (
            {**NOW, "x": array(7, 2, 7, 1)},
            "array 'x' row 0 (and 1 more up to 2) are of no commit at all: [7 7 7] is",
        ),
        ({**NOW, "x": array(9, 9, 9, 9)}, "array 'x' (all 4 rows) are of no commit at all"),
        ({**NOW, "n": 1}, "'n' is 1, as in commit 1, not 2 as in commit 2"),
        ({**NOW, "n": 77}, "'n' is 77, as in no commit at all, not 2 as in commit 2"),
        ({**NOW, "n": "x"}, "'n' is of type str, not int as in commit 2"),
        ({**NOW, "gone": 0}, "'gone' is there, which commit 2 does not have"),
        ({"x": NOW["x"], "n": 2}, "'new' of commit 2 is missing"),
        ({**NOW, "new": np.arange(4)}, "array 'new' has shape (4,), not (3,) as in commit 2"),
        ({**NOW, "new": np.arange(3, dtype="f4")}, "array 'new' has dtype float32, not int64 as in commit 2"),
    ],
)
def test_differences_in_the_users_terms(found: Contents, text: str) -> None:
    states: Any = Known({1: BEFORE, 2: NOW, 3: {**NOW, "x": array(2, 2, 2, 3)}})
    lines = differences(found, NOW, states, 2, 2)
    assert len(lines) == 1
    assert lines[0].startswith(text)
    assert not differences(NOW, NOW, states, 2, 2)


def test_the_sentence_of_the_issue() -> None:
    centers = [np.full((10, 2), float(i)) for i in range(3)]
    torn = centers[2].copy()
    torn[4:8] = centers[1][4:8]
    states: Any = Known({i: {"centers": centers[i]} for i in range(3)})
    verdict = Verdict("mixed", "", 2, 2, 3)
    [line] = verdict_text(verdict, {"centers": torn}, states)
    assert line == "array 'centers' rows 4–7 are older than acknowledged commit 2: as in commit 1"


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (Verdict("open", "bad header", None, 1, 2), "the store does not open: bad header"),
        (Verdict("sequence", "", 1, 2, 3), "commit 2, which was acknowledged, is lost: the store is back at commit 1"),
        (Verdict("sequence", "", 5, 2, 3), "the store is at commit 5, though only commit 3 had begun"),
        (Verdict("mixed", "hash", 2, 2, 3), "the store is not what commit 2 left: hash"),
        (Verdict("unsound", "a leak", 2, 2, 3), "the store is damaged: a leak"),
        (Verdict("reader", "no", 2, 2, 3), "opened read-only, the store has other contents than after recovery: no"),
        (Verdict("write", "no", 2, 2, 3), "after the recovery it can't go on: no"),
        (Verdict("check", "", 2, 2, 3), "the check failed"),
        (Verdict("else", "what", 2, 2, 3), "what"),
    ],
)
def test_verdicts_become_sentences(verdict: Verdict, text: str) -> None:
    states: Any = Known()
    states.__class__.__missing__ = lambda self, key: None  # type: ignore[attr-defined]
    assert verdict_text(verdict, None, states) == [text]


def test_values_are_shortened() -> None:
    assert shortened(np.arange(1000)) == "[ 0 1 2 ... 997 998 999]"
    assert len(shortened("x" * 1000)) == 60
    assert contents_text({}) == "empty"
    many = {f"n{i}": i for i in range(20)}
    assert contents_text(many) == "n0 = 0, n1 = 1, n2 = 2, and 17 more names"
    changed = contents_text({**many, "n7": 8}, [many, None])  # what changed is shown first
    assert changed == "n7 = 8, n0 = 0, n1 = 1, and 17 more names"
    assert len(contents_text({"x" * 900: 1})) == 44


# ---- lost pieces


def test_lost_bytes_have_names(recording: Recording, sandbox: Sandbox) -> None:
    states = States(recording, Options(), sandbox)
    image = states.image(3)
    assert image is not None
    places = file_map([image], recording.medium, sandbox)
    centers = next(extent for extent in places.extents if extent.name == "centers")
    assert centers.end - centers.first == 40 * 64
    assert places.text(centers.first + 4 * 64, 256) == "committed image of 'centers' rows 4–7"
    assert places.text(centers.first, 64) == "committed image of 'centers' row 0"
    assert places.text(0, 64) == "header copy A"
    assert places.text(4096, 64) == "header copy B"
    assert places.text(places.log, 64) == "log"
    assert places.text(8192, 64) == "committed image: metadata, or space that no name owns"
    schedule = Schedule(
        1, "random", (Cell(SIZE_CELL, 0, 0, 1), Cell(0, 0, 0, 1), Cell(centers.first, 1, 0, 3), Cell(4096, 0, 3, 1))
    )
    unit = 64 if recording.medium == "memory" else 512
    lines = lost_text(schedule, recording.medium, 512, places)
    assert lines[:2] == ["the file's new size", f"{unit} bytes at file offset 0x0 (header copy A)"]
    assert lines[2].endswith("): 1 of 3 writes on their way to it were kept")
    assert lines[3].endswith("0 of 1 write on their way to it were kept, and 2 pieces of 8 bytes of the next")


def found_in(recording: Recording, tmp_path: Path, **options: Any) -> str:
    chosen = plan("plan", budget=1000, seed=1, media=recording.medium)
    with CrashExplorer("broken", directory=tmp_path) as explorer, pytest.raises(CrashFailure) as caught:
        explorer.explore(recording, chosen)
    return str(caught.value)


def test_a_store_without_fences_is_found_and_told(recording: Recording, tmp_path: Path) -> None:
    """A guarantee of the core, broken: the fewest lost pieces are reported, by their names."""
    broken = changed(recording, lambda events: [event for event in events if event[2] not in FENCES])
    text = found_in(broken, tmp_path)
    first, lost = text.splitlines()[:2]
    assert first.startswith(("crash ", "process killed "))
    assert f"  on {recording.medium}, lost" in lost
    assert text.count(" bytes at file offset ") <= 2
    assert any(f" ({place}" in lost for place in ("header copy", "committed image", "log"))


def test_an_acknowledged_commit_that_is_lost_is_told(recording: Recording, tmp_path: Path) -> None:
    def sooner(events: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Each commit is acknowledged as soon as it begins."""
        out = []
        for event in events:
            if event[2] != lib.PM_EVENT_COMMIT_END:
                out.append(event)
            if event[2] == lib.PM_EVENT_COMMIT_BEGIN:
                out.append((*event[:2], lib.PM_EVENT_COMMIT_END, *event[3:]))
        return out

    text = found_in(changed(recording, sooner), tmp_path)
    assert "commit 1, which was acknowledged, is lost: the store is back at commit 0" in text.splitlines()[0]


# ---- shrinking


CELLS = tuple(Cell(64 * i, 0, 0, 1) for i in range(50))


@pytest.mark.parametrize("needed", [(), (7,), (3, 40), (0, 1, 48)])
def test_ddmin_finds_the_fewest(needed: tuple[int, ...]) -> None:
    wanted = {CELLS[i] for i in needed}
    tries: list[tuple[Cell, ...]] = []

    def fails(cells: tuple[Cell, ...]) -> bool:
        tries.append(cells)
        return wanted <= set(cells)

    assert set(ddmin(CELLS, fails)) == wanted
    assert len(tries) < 150


def test_a_crash_is_shrunk_in_every_way() -> None:
    """Fewer cells, more of them kept, nothing stale, no second crash, an earlier moment."""
    verdict = Verdict("mixed", "", 1, 1, 1)

    def evaluate(schedule: Schedule) -> Verdict | None:
        lost = [cell for cell in schedule.cells if cell.offset == 640 and cell.kept < 3]
        return verdict if lost and schedule.event >= 90 else None

    lost = tuple(Cell(64 * i, 0, 5, 4) for i in range(20))
    first = Schedule(100, "random", lost, 9, Schedule(5, "all"))
    found = shrink(Found(first, verdict), evaluate)
    assert found.schedule == Schedule(90, "lost-one", (Cell(640, 2, 0, 4),), 0, None)


def test_a_second_crash_that_is_needed_stays() -> None:
    verdict = Verdict("open", "", None, 1, 1)

    def evaluate(schedule: Schedule) -> Verdict | None:
        inner = schedule.then
        return verdict if inner is not None and any(cell.offset == 64 for cell in inner.cells) else None

    first = Schedule(100, "random", CELLS, 0, Schedule(50, "random", CELLS))
    found = shrink(Found(first, verdict), evaluate).schedule
    assert found.then is not None
    assert [cell.offset for cell in found.then.cells] == [64]
    assert found.cells == ()


def test_another_problem_is_not_taken_for_it() -> None:
    first = Verdict("mixed", "", 1, 1, 1)
    found = shrink(Found(Schedule(9, "random", CELLS), first), lambda schedule: Verdict("open", "", None, 1, 1))
    assert found == Found(Schedule(9, "random", CELLS), first)


def test_tries_are_bounded() -> None:
    verdict = Verdict("mixed", "", 1, 1, 1)
    tries = []

    def evaluate(schedule: Schedule) -> Verdict | None:
        tries.append(schedule)
        return verdict if len(schedule.cells) % 2 else None

    shrink(Found(Schedule(9, "random", CELLS), verdict), evaluate, tries=9)
    assert len(tries) == 9


# ---- reports


def test_reports_say_what_was_covered() -> None:
    def tally(**fields: Any) -> Tally:
        return Tally(**{**dict.fromkeys(Tally._fields, 0), **fields})

    small = tally(points=3, evaluated=20, distinct=18, possible=1.3, exhaustive=True, seconds=0.01, by_kind={"all": 20})
    large = tally(points=3, evaluated=2000, distinct=1800, nested=400, possible=40.2, seconds=0.5)
    large = large._replace(by_kind={"random": 1500, "all": 500})
    report: CrashReport = Report({"memory": large, "file": small}, 4, True, 7)
    assert (report.points, report.evaluated, report.distinct, report.nested) == (6, 2020, 1818, 400)
    assert not report.exhaustive
    assert report.by_kind == {"random": 1500, "all": 520}
    assert str(report).splitlines() == [
        "explored the crashes of 4 commits, evaluated by recovery and the check, seed 7",
        "  memory: 2,000 states at 3 moments, 1,800 distinct, and 400 more in or after recovery; a sample of about "
        "10^40 possible states; 4,000 a second",
        "  file:   20 states at 3 moments, 18 distinct; exhaustive: these are all; 2,000 a second",
        "  of the kinds random 1,500, all 520",
    ]
    failed = Report({"memory": large}, failed="memory", untried=("file",))
    assert str(failed).splitlines()[1:3] == [
        "  memory: 2,000 states at 3 moments, 1,800 distinct, and 400 more in or after recovery; stopped at the first "
        "failure; 4,000 a second",
        "  file:   not tried",
    ]
    assert "a sample of more than 10^100 possible states;" in str(Report({"memory": large._replace(possible=947728.0)}))
    assert "a sample of about 2,512 possible states;" in str(Report({"memory": large._replace(possible=3.4)}))

    class Small(Tally):
        left_out = 17

    few = str(Report({"memory": Small(*large._replace(points=37, evaluated=80, nested=0))}))
    assert "80 states at 20 moments" in few
    assert "; the budget left out 17 of 37 moments;" in few
    assert Report({"file": small}).exhaustive
    assert not Report({}).exhaustive
    assert report.seconds == pytest.approx(0.51)


def test_what_two_crashes_lose_is_told(recording: Recording, sandbox: Sandbox) -> None:
    """The states after a recovery are those of no recording: they are not compared with commits of the same number."""
    moments = ((event, cells(recording, event, Options())) for event in range(recording.ends()[2], len(recording)))
    event, pieces = next((event, found) for event, found in moments if found)
    schedule = Schedule(event, "lost-one", tuple(pieces[:1]), 0, Schedule(0, "stale", (), 3))
    lines = describe(recording, Found(schedule, Verdict("mixed", "other bytes", 9, 9, 9)), Options(), sandbox, None)
    assert "the store is not what commit 9 left: other bytes" in lines[0]
    assert lines[-2].startswith(f"  on {recording.medium}, lost by crash 1: ")
    assert lines[-1] == "  space that was never written holds other bytes than zeros there"


def test_many_lost_pieces_are_counted() -> None:
    lines = _indented("  lost: ", [str(i) for i in range(20)])
    assert lines[0] == "  lost: 0"
    assert lines[-1] == "        and 12 more pieces"
    assert len(lines) == 9
