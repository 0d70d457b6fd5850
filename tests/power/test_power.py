"""The parts of tests/power that need no root: requests of a trace, the states after a cut, images, the protocol."""

from __future__ import annotations

import os
import struct
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.power import fuse
from tests.power.cuts import KINDS, Cut, Images, choose, plan, state
from tests.power.file_systems import lost_blocks
from tests.power.record import Recorded
from tests.power.requests import NEVER, SECTOR, Recording, Request, fill, parse

TRACE = """\
# tracer: nop
          python-20    [000] .....            3: block_bio_queue: 7,0 RM 2 + 2 [python]
     ksoftirqd/1-22    [001] ..s..            4: block_rq_complete: 7,0 RM () 2 + 2 be,0,4 [0]
          python-20    [001] ...1.            5: tracing_mark_write: ack 0
          python-20    [001] .....            6: block_bio_queue: 7,0 W 8 + 8 [python]
          python-20    [001] .....            7: block_bio_queue: 7,0 W 16 + 8 [python]
     ksoftirqd/1-22    [001] ..s..            8: block_rq_complete: 7,0 W () 8 + 16 be,0,4 [0]
          python-20    [000] .....            9: block_bio_queue: 7,0 FWS 0 + 0 [python]
     ksoftirqd/1-22    [001] ..s..           10: block_rq_complete: 7,0 FF () 18446744073709551615 + 0 none,0,0 [0]
     ksoftirqd/1-22    [001] d.s1.           11: block_rq_complete: 7,0 WS () 0 + 0 be,0,4 [0]
    jbd2/loop0-8-24    [000] .....           12: block_bio_queue: 7,0 FWFSM 192 + 8 [jbd2/loop0-8]
     ksoftirqd/0-14    [000] ..s..           13: block_rq_complete: 7,0 FF () 18446744073709551615 + 0 none,0,0 [0]
     ksoftirqd/0-14    [000] ..s..           14: block_rq_complete: 7,0 WSM () 192 + 8 be,0,3 [0]
     ksoftirqd/0-14    [000] ..s..           15: block_rq_complete: 7,0 FF () 18446744073709551615 + 0 none,0,0 [0]
     ksoftirqd/0-14    [000] d.s1.           16: block_rq_complete: 7,0 WSM () 192 + 0 be,0,3 [0]
"""
DIRECT = """\
          python-20    [001] .....            1: iomap_dio_rw_begin: dev 7:0 ino 0xc flags DSYNC|DIRECT aio 0
          python-20    [001] .....            2: block_bio_queue: 7,0 WS 40 + 8 [python]
     ksoftirqd/1-22    [001] ..s..            3: block_rq_complete: 7,0 WS () 40 + 8 be,0,4 [0]
{between}
          python-20    [001] .....            6: block_bio_queue: 7,0 FWS 0 + 0 [python]
     ksoftirqd/1-22    [001] d.s1.            7: block_rq_complete: 7,0 WS () 0 + 0 be,0,4 [0]
          python-20    [001] .....            8: iomap_dio_complete: dev 7:0 ino 0xc flags DSYNC|DIRECT aio 0
"""
JOURNAL = "    jbd2/loop0-8-24    [000] .....            4: block_bio_queue: 7,0 FWFSM 192 + 8 [jbd2/loop0-8]"


def test_the_trace_tells_when_each_request_was_queued_and_done() -> None:
    """Two writes may be done as one; a flushing request is done when it is reported for the second time."""
    made = parse(TRACE)
    assert [(r.sector, r.sectors, r.queued, r.done, r.preflush, r.fua) for r in made.requests] == [
        (8, 8, 4, 6, False, False),
        (16, 8, 5, 6, False, False),
        (0, 0, 7, 9, True, False),
        (192, 8, 10, 14, True, True),
    ]
    assert made.said == [(3, "ack 0")] and made.requests[3].durable_at == 14 and made.single == 0


def test_a_direct_write_that_is_durable_by_itself_makes_nothing_else_durable() -> None:
    """It acts like FUA, which a loop device doesn't have; not if the journal was written meanwhile."""
    alone = parse(DIRECT.format(between=""))
    assert [(r.sector, r.done, r.durable_at) for r in alone.requests] == [(40, 3, 5)] and alone.single == 1
    journal = parse(DIRECT.format(between=JOURNAL))
    assert len(journal.requests) == 3 and journal.single == 0


@pytest.mark.parametrize(
    "old, new",
    [("7,0 W 8 + 8 [", "7,0 D 8 + 8 ["), ("+ 16 be,0,4 [0]", "+ 16 be,0,4 [-5]")],
    ids=["discard", "failure"],
)
def test_requests_that_the_model_does_not_know_are_errors(old: str, new: str) -> None:
    with pytest.raises(ValueError, match="does not know|failed"):
        parse(TRACE.replace(old, new))


def recording(*requests: tuple[int, int, int, int, str], end: int = 100) -> Recording:
    """A recording of requests, each given as: queued, done, sector, sectors, and of "pf": preflush, FUA. Its bytes
    are its number, from 1."""
    made = Recording(end=end)
    for n, (queued, done, sector, sectors, asked) in enumerate(requests, 1):
        fua = "f" in asked
        durable = done if fua else NEVER
        data = bytes([n]) * (sectors * SECTOR)
        made.requests.append(Request(queued, sector, sectors, "p" in asked, fua, 1, done, durable, data))
    return made


def left(made: Recording, at: int, sectors: int = 4, honest: bool = True) -> set[tuple[int, ...]]:
    """The images that cuts at a place leave, by the number in each sector; 0: the contents before."""
    out = set()
    for kind, seed in product(KINDS, range(25)):
        image = Images(made, np.zeros(sectors * SECTOR, np.uint8), honest).image(Cut(at, kind, seed))
        out.add(tuple(image.reshape(-1, SECTOR)[:, 0].tolist()))
    return out


def test_writes_are_lost_kept_and_torn_at_every_sector() -> None:
    made = recording((1, 2, 0, 2, ""), (3, NEVER, 2, 1, ""))
    assert left(made, 10) == {(a, b, c, 0) for a in (0, 1) for b in (0, 1) for c in (0, 2)}
    assert left(made, 3) == {(a, b, 0, 0) for a in (0, 1) for b in (0, 1)}, "the second one was not queued yet"


def test_a_flush_covers_what_was_done_before_it_was_asked_for() -> None:
    made = recording((1, 2, 0, 1, ""), (3, 6, 1, 1, ""), (4, 8, 0, 0, "p"))
    assert left(made, 8) == {(a, b, 0, 0) for a in (0, 1) for b in (0, 2)}, "it has not ended"
    assert left(made, 9) == {(1, 0, 0, 0), (1, 2, 0, 0)}, "the second write was on its way when it was asked for"
    assert left(made, 9, honest=False) == left(made, 8)


def test_fua_makes_durable_itself_only() -> None:
    made = recording((1, 2, 0, 1, ""), (3, 4, 1, 1, "f"))
    assert left(made, 5) == {(0, 2, 0, 0), (1, 2, 0, 0)}


def test_a_write_behind_its_own_flush_is_not_there_without_what_it_covers() -> None:
    made = recording((1, 2, 0, 1, ""), (3, NEVER, 1, 2, "pf"))
    found = left(made, 5)
    assert {(0, 0, 0, 0), (1, 0, 0, 0), (1, 2, 2, 0), (1, 2, 0, 0), (1, 0, 2, 0)} == found


def test_the_later_of_two_writes_wins_if_it_is_kept() -> None:
    made = recording((1, 2, 0, 1, ""), (3, 4, 0, 1, ""), (5, 6, 0, 1, "f"), (7, 8, 0, 1, ""))
    assert left(made, 5) == {(0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0)}
    assert left(made, 9) == {(3, 0, 0, 0), (4, 0, 0, 0)}, "nothing older than what is durable"


def test_images_of_several_cuts_are_those_of_each_by_itself() -> None:
    rng = np.random.default_rng(1)
    places, lasts = rng.integers(6, size=30).tolist(), rng.integers(4, size=30).tolist()
    writes = [(2 * n + 1, 2 * n + 2 + lasts[n], places[n], 2, ("", "f", "p", "pf")[n % 4]) for n in range(30)]
    made = recording(*writes)
    cuts = plan(made, 40, 3)
    together = Images(made, np.zeros(8 * SECTOR, np.uint8))
    for cut in cuts:
        alone = Images(made, np.zeros(8 * SECTOR, np.uint8))
        assert (together.image(cut) == alone.image(cut)).all()


def test_cuts_follow_from_the_seed() -> None:
    made = recording((1, 2, 0, 2, ""), (3, 4, 2, 1, "pf"))
    assert plan(made, 30, 5) == plan(made, 30, 5) != plan(made, 30, 6)
    cut = Cut(4, "torn", 8)
    first, second = (choose(made, state(made, 4), cut) for _ in range(2))
    assert all((first[i] == second[i]).all() for i in first)


def test_what_a_cut_may_leave_of_the_workload_is_from_the_last_acknowledged_state_to_the_next() -> None:
    made = Recording(said=[(5, "ack 0"), (9, "state 1"), (12, "state 2"), (20, "ack 2")], end=30)
    recorded = Recorded("xfs", "async", made, np.zeros(0, np.uint8), ["a", "b", "c", "d"])
    assert [recorded.bounds(at) for at in (5, 6, 10, 13, 21)] == [(-1, 0), (0, 1), (0, 2), (0, 3), (2, 3)]
    recovering = Recorded("xfs", "recover", made, np.zeros(0, np.uint8), list("abcd"), acknowledged=0, committed=1)
    assert recovering.bounds(5) == (0, 2), "what was left may be in any of three states"


def test_what_a_file_system_s_check_gave_up_is_told_from_what_it_only_counted_again() -> None:
    harmless = "Inode 12 extent tree (at level 1) could be shorter.  Optimize? yes\nInode bitmap differences:  +12\n"
    assert lost_blocks(harmless) == ""
    torn = "Inode 12 has out of order extents\n\t(invalid logical block 822)\nClear? yes\n"
    assert lost_blocks(harmless + torn) == "Inode 12 has out of order extents"
    assert lost_blocks("Inode 12, i_blocks is 3688, should be 0.  Fix? yes\n")


def test_the_device_keeps_each_write_in_its_order(tmp_path: Path) -> None:
    for name in ("image", "writes", "data"):
        (tmp_path / name).write_bytes(bytes(8 * SECTOR) if name == "image" else b"")
    files = [os.open(tmp_path / name, os.O_RDWR) for name in ("image", "writes", "data")]
    try:
        server = fuse.Server(*files)

        def ask(operation: int, *fields: int, contents: bytes = b"") -> tuple[int, bytes]:
            body = fuse.TRANSFER.pack(*fields, 0, 0, 0, 0) if fields else b""
            return server.answer(operation, fuse.HEADER.pack(0, operation, 1, 1, 0, 0, 0, 0) + body + contents)

        for number, sector in ((1, 0), (2, 3), (3, 3)):
            said = ask(fuse.WRITE, 0, sector * SECTOR, SECTOR, contents=bytes([number]) * SECTOR)
            assert said == (0, struct.pack("<II", SECTOR, 0))
        assert ask(fuse.READ, 0, 3 * SECTOR, 2)[1] == b"\x03\x03"
        assert ask(fuse.FSYNC) == (0, b"") and ask(43)[0], "FALLOCATE is unknown"
        assert struct.unpack_from("<Q", ask(fuse.GETATTR)[1], 24)[0] == 8 * SECTOR
    finally:
        for file in files:
            os.close(file)
    from tests.power.requests import written

    made = recording((1, 2, 0, 1, ""), (3, 4, 3, 1, ""), (5, 6, 3, 1, ""))
    fill(made, written(tmp_path))
    assert [r.data[0] for r in made.requests] == [1, 2, 3]
    made.requests.pop()
    with pytest.raises(ValueError, match="written 2 times"):
        fill(made, written(tmp_path))
