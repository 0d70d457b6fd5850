"""The explorer against a reference: a model of the media that is meant to be obviously right, not fast. At every event
it lists all that a crash may leave, cell by cell, prefix by prefix, piece by piece. docs/crash-model.md has the rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pmstore._core import lib
from pmstore.testing._store import engine
from pmstore.testing._store.engine import Options, explore
from tests.conftest import LONGER
from tests.testing.test_crash_model import Step, recorded

PAGE = 4096
LINE = 64
THREADS = range(6)
ANY = len(THREADS)  # what is sure for it is durable at any thread's fence
NOW = -1  # no thread: what is sure for it needs no fence
MOST_STATES = 1000  # at a crash point: the explorer evaluates all of no more (EXHAUSTIVE in engine.py)

States = dict[tuple[int, int], set[bytes]]  # what crashes leave, by bounds: acknowledged, started


@dataclass
class Write:
    """What one event writes into one cell. sure: the threads at whose next fence it is durable."""

    offset: int
    data: bytes
    sure: set[int] = field(default_factory=set)


@dataclass
class Machine:
    """What is durable (`disk`, `size`), and what is on its way to each cell, in order."""

    medium: str
    cell: int
    eadr: bool
    disk: bytearray
    size: int
    seen: int
    cells: dict[int, list[Write]] = field(default_factory=dict)
    sizes: list[tuple[int, bool]] = field(default_factory=list)  # growth that is on its way; and whether it is sure
    abandoned: set[int] = field(default_factory=set)  # cells
    storing: set[int] = field(default_factory=set)  # eADR: cells of the store that happened last

    # ---- rules

    def grow(self, size: int) -> None:
        """M4: growth may be lost on a file; on memory it is durable."""
        if size <= self.seen:
            return
        self.seen = size
        if self.medium == "memory":
            self.size = size
        else:
            self.sizes.append((size, False))

    def write(self, step: Step) -> None:
        """M1, M5: a cell has its writes in order; a page that is written again is written back whole."""
        assert step.data is not None
        self.grow(step.offset + len(step.data))
        for number in range(step.offset // self.cell, (step.offset + len(step.data) - 1) // self.cell + 1):
            begin = max(step.offset, number * self.cell)
            end = min(step.offset + len(step.data), (number + 1) * self.cell)
            writes = self.cells.setdefault(number, [])
            writes.append(Write(begin, step.data[begin - step.offset : end - step.offset]))
            if step.kind == lib.PM_EVENT_STREAM:
                for write in writes:  # of a cell, the first writes are kept: with this one, those before
                    write.sure.add(self.thread(step))
            pages = {begin // PAGE, (end - 1) // PAGE}
            self.abandoned = {one for one in self.abandoned if one * self.cell // PAGE not in pages}
            if self.eadr and step.kind == lib.PM_EVENT_STORE:
                for write in writes:
                    write.sure.add(NOW)
                self.storing.add(number)

    def make_durable(self, number: int, thread: int) -> None:
        """Make the writes of one cell durable that are sure for a thread."""
        left = self.cells.pop(number, [])
        while left and left[0].sure & {thread, ANY}:
            write = left.pop(0)
            self.disk[write.offset : write.offset + len(write.data)] = write.data
        if left:
            self.cells[number] = left

    def thread(self, step: Step) -> int:
        """Whose fence counts for a step: a disk is flushed for all threads."""
        return step.thread if self.medium == "memory" else 0

    def hand(self, begin: int, end: int, thread: int) -> None:
        """What the cells from begin to end hold now is sure at the next fence of a thread."""
        for number, writes in self.cells.items():
            if number * self.cell < end and (number + 1) * self.cell > begin and number not in self.abandoned:
                for write in writes:
                    write.sure.add(thread)

    def fence(self, thread: int) -> None:
        """M3: what is sure for the thread is durable."""
        for number in list(self.cells):
            if number not in self.abandoned:
                self.make_durable(number, thread)
        while self.sizes and self.sizes[0][1]:
            self.size = self.sizes.pop(0)[0]

    def hand_sizes(self) -> None:
        self.sizes = [(size, True) for size, _ in self.sizes]

    def failed(self, begin: int, end: int) -> None:
        """M5: of the pages from begin to end, nothing that was written is covered by a later sync."""
        for number, writes in self.cells.items():
            if number * self.cell // PAGE in range(begin // PAGE, (end - 1) // PAGE + 1):
                self.abandoned.add(number)
                for write in writes:
                    write.sure = set()

    def hand_over(self, threads: Collection[int]) -> None:
        """M3: what these threads streamed and flushed is sure at a fence of any."""
        for write in itertools.chain(*self.cells.values()):
            if write.sure & set(threads) and self.medium == "memory":
                write.sure.add(ANY)

    def happen(self, step: Step) -> None:
        """One event. With eADR a store is durable once it has happened, and may be torn while it happens."""
        for number in self.storing:
            self.make_durable(number, NOW)
        self.storing = set()
        if step.kind in (lib.PM_EVENT_STORE, lib.PM_EVENT_STREAM, lib.PM_EVENT_WRITE):
            self.write(step)
        elif step.kind == lib.PM_EVENT_FLUSH:
            self.hand(step.offset, step.offset + step.length, self.thread(step))
        elif step.kind == lib.PM_EVENT_FENCE:
            self.fence(self.thread(step))
        elif step.kind == lib.PM_EVENT_HAND_OVER:
            self.hand_over([step.thread])
        elif step.kind == lib.PM_EVENT_OPEN:
            self.hand_over(THREADS)
        elif step.kind == lib.PM_EVENT_SYNC_RANGE:
            self.hand(step.offset, step.offset + step.length, 0)
            if step.offset + step.length > self.size:
                self.hand_sizes()
            self.fence(0)
        elif step.kind == lib.PM_EVENT_SYNC:
            self.hand(0, self.seen, 0)
            self.hand_sizes()
            self.fence(0)
        elif step.kind == lib.PM_EVENT_SYNC_FAILED:
            self.failed(step.offset, step.offset + step.length if step.length else max(self.seen, 1))
        elif step.kind == lib.PM_EVENT_GROW:
            self.grow(step.offset)

    # ---- what a crash leaves

    def ways(self, number: int) -> list[list[tuple[int, bytes]]]:
        """What a crash may keep of one cell: its first writes, and on memory any pieces of the next."""
        writes = [(write.offset, write.data) for write in self.cells[number]]
        out = []
        for kept in range(len(writes) + 1):
            whole = writes[:kept]
            if self.medium == "file" or kept == len(writes):
                out.append(whole)
                continue
            offset, data = writes[kept]
            starts = sorted({offset, *(at for at in range(offset, offset + len(data)) if at % 8 == 0)})
            pieces = [
                (at, data[at - offset : end - offset]) for at, end in zip(starts, [*starts[1:], offset + len(data)])
            ]
            for count in range(len(pieces) + 1):
                out += [[*whole, *some] for some in itertools.combinations(pieces, count)]
        return out

    def number_of_ways(self) -> int:
        out = 1 + len(self.sizes)
        for number in self.cells:
            out *= len(self.ways(number))
        return out

    def images(self) -> set[bytes]:
        """All that a crash may leave."""
        out = set()
        sizes = [self.size, *(size for size, _ in self.sizes)]
        for choice in itertools.product(*(self.ways(number) for number in self.cells)):
            disk = bytearray(self.disk)
            for offset, data in itertools.chain(*choice):
                disk[offset : offset + len(data)] = data
            out |= {bytes(disk[:size]) for size in sizes}
        return out


def expected(medium: str, cell: int, eadr: bool, base: bytes, program: list[Step]) -> States | None:
    """The images that crashes may leave, by bounds; None if there are too many to list."""
    largest = max([len(base), *(s.offset + s.length for s in program)])
    machine = Machine(medium, cell, eadr, bytearray(base) + bytearray(largest + cell - len(base)), len(base), len(base))
    out: States = {}
    bounds = (1, 1)
    for step in [*program, None]:
        if machine.number_of_ways() > MOST_STATES:
            return None
        out.setdefault(bounds, set()).update(machine.images())
        if step is None:
            break
        machine.happen(step)
        if step.kind == lib.PM_EVENT_COMMIT_BEGIN:
            bounds = (bounds[0], max(bounds[1], step.offset))
        if step.kind in (lib.PM_EVENT_COMMIT_END, lib.PM_EVENT_RECOVERED):
            bounds = (step.offset, step.offset)
    return out


def explored(medium: str, sector: int, eadr: bool, base: bytes, program: list[Step]) -> States:
    """The images that the explorer hands out, by bounds."""
    out: States = {}

    def note(image: bytes, acknowledged: int, started: int) -> None:
        out.setdefault((acknowledged, started), set()).add(image)

    recording = recorded(medium, base, program)
    explore(recording, Options(budget=10**6, sector=sector, eadr=eadr, kinds=KINDS), note, raw=True)
    return out


def wrote(at: int) -> Step:
    """A write of one word."""
    return Step(lib.PM_EVENT_WRITE, at, 8, bytes(8))


FAILED = Step(lib.PM_EVENT_SYNC_FAILED)
KINDS = frozenset({"exhaustive", "prefix", "all", "nothing", "lost-one", "kept-one", "pair", "torn", "random"})
KINDS_OF_STEPS = ("store", "store", "stream", "flush", "fence", "fence", "hand", "open", "mark", "grow")
BASE = bytes(range(1, 65)) * (PAGE // 64)


@st.composite
def marks(draw: st.DrawFn, sequence: list[int]) -> Step:
    """A commit begins, or ends."""
    kind = draw(st.sampled_from((lib.PM_EVENT_COMMIT_BEGIN, lib.PM_EVENT_COMMIT_END)))
    sequence[0] += kind == lib.PM_EVENT_COMMIT_BEGIN
    return Step(kind, sequence[0])


@st.composite
def memory_programs(draw: st.DrawFn) -> list[Step]:
    """Programs over a few lines."""
    out: list[Step] = []
    sequence = [1]
    for number in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(KINDS_OF_STEPS))
        thread = draw(st.sampled_from((0, 0, 1, 3, 5)))
        at = draw(st.sampled_from((0, 8, 16, 48, 56, 60, 64, 120, 4088)))
        length = draw(st.sampled_from((1, 4, 8, 12, 16, 24)))
        length = min(length, PAGE - at)
        data = bytes([200 + number]) * length
        if kind == "store":
            out.append(Step(lib.PM_EVENT_STORE, at, length, data, thread))
        elif kind == "stream":
            out.append(Step(lib.PM_EVENT_STREAM, at, length, data, thread))
        elif kind == "flush":
            length = LINE * draw(st.integers(1, 2))
            out.append(Step(lib.PM_EVENT_FLUSH, at // LINE * LINE, length, thread=thread))
        elif kind == "fence":
            out.append(Step(lib.PM_EVENT_FENCE, thread=thread))
        elif kind == "hand":
            out.append(Step(lib.PM_EVENT_HAND_OVER, thread=thread))
        elif kind == "open":
            out.append(Step(lib.PM_EVENT_OPEN))
        elif kind == "grow":
            out.append(Step(lib.PM_EVENT_GROW, PAGE * draw(st.integers(1, 2))))
        else:
            out.append(draw(marks(sequence)))
    return out


@st.composite
def file_programs(draw: st.DrawFn) -> list[Step]:
    """Programs over two pages, and growth."""
    out: list[Step] = []
    sequence = [1]
    places = st.sampled_from((0, 504, 512, 1024, 3584, 4000, 4096, 4608, 8000))
    lengths = st.sampled_from((1, 8, 16, 512, 520, 1024))
    for number in range(draw(st.integers(1, 8))):
        kind = draw(
            st.sampled_from(
                ("write", "write", "write", "range", "sync", "failed", "failed range", "flush", "grow", "mark")
            )
        )
        at, length = draw(places), draw(lengths)
        if kind == "write":
            out.append(Step(lib.PM_EVENT_WRITE, at, length, bytes([200 + number]) * length))
        elif kind == "range":
            out.append(Step(lib.PM_EVENT_SYNC_RANGE, at, length))
        elif kind == "flush":
            out.append(Step(lib.PM_EVENT_FLUSH, at, length))
        elif kind == "sync":
            out.append(Step(lib.PM_EVENT_SYNC))
        elif kind == "failed":
            out.append(Step(lib.PM_EVENT_SYNC_FAILED))
        elif kind == "failed range":
            out.append(Step(lib.PM_EVENT_SYNC_FAILED, at, length))
        elif kind == "grow":
            out.append(Step(lib.PM_EVENT_GROW, draw(st.sampled_from((4096, 4608, 8192, 8704)))))
        else:
            out.append(draw(marks(sequence)))
    return out


def compare(medium: str, cell: int, eadr: bool, program: list[Step]) -> None:
    """Twice: as it is, where states of several events have the same bounds, and with a commit between any two events,
    so that those of each are compared by themselves.
    """
    apart = [one for i, step in enumerate(program) for one in (step, Step(lib.PM_EVENT_COMMIT_END, 10 + i))]
    for steps in (program, apart):
        allowed = expected(medium, cell, eadr, BASE, steps)
        if allowed is None:
            return
        # Commit 1 is acknowledged before: then no image is left out because it was handed out with other bounds.
        recorded = [Step(lib.PM_EVENT_RECOVERED, 1), *steps]
        sector = 512 if medium == "memory" else cell
        found = explored(medium, sector, eadr, BASE, recorded)
        assert found.keys() == allowed.keys()
        for bounds in allowed:
            assert not found[bounds] - allowed[bounds], f"{bounds}: the explorer builds what the model forbids"
            assert not allowed[bounds] - found[bounds], f"{bounds}: the explorer never builds what the model allows"
        with mock.patch.object(engine, "EXHAUSTIVE", 0):
            for bounds, some in explored(medium, sector, eadr, BASE, recorded).items():
                assert some <= allowed[bounds], f"{bounds}: a chosen state is one that the model forbids"


@pytest.mark.longer
@settings(max_examples=100 * LONGER)
@given(memory_programs())
def test_memory_is_as_the_reference_says(program: list[Step]) -> None:
    compare("memory", LINE, False, program)


@pytest.mark.longer
@settings(max_examples=60 * LONGER)
@example([Step(lib.PM_EVENT_STORE, 56, 16, bytes(16))])
@given(memory_programs())
def test_memory_whose_caches_are_durable_is_as_the_reference_says(program: list[Step]) -> None:
    compare("memory", LINE, True, program)


@pytest.mark.longer
@pytest.mark.parametrize("sector", [512, 4096])
@settings(max_examples=80 * LONGER)
@example([wrote(0), wrote(512), Step(lib.PM_EVENT_SYNC_FAILED, 512, 8), Step(lib.PM_EVENT_SYNC)])
@example([wrote(0), FAILED, Step(lib.PM_EVENT_SYNC), wrote(512), wrote(4096), Step(lib.PM_EVENT_SYNC_RANGE, 4096, 8)])
@given(file_programs())
def test_disks_are_as_the_reference_says(sector: int, program: list[Step]) -> None:
    compare("file", sector, False, program)
