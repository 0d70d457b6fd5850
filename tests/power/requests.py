"""The requests of a recording: when each was queued and done, its flags, and the bytes that it wrote.

Times are places in the kernel's trace, which holds the requests and the workload's lines in one order. The bytes come
from the device. A sector's writes arrive there in the order in which they were queued, because no file system has two
of them in flight at once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .fuse import WRITTEN

SECTOR = 512
NEVER = 1 << 60

_LINE = re.compile(r"^\s*.+-(\d+)\s+\[\d+\]\s+\S+\s+(\d+): (\w+): (.*)$")
_QUEUE = re.compile(r"^\d+,\d+ (\S+) (\d+) \+ (\d+) ")
_DONE = re.compile(r"^\d+,\d+ (\S+) \(.*?\) (\d+) \+ (\d+) .*\[(-?\d+)\]$")


@dataclass
class Request:
    """A write or a flush, as the file system requested it. Sectors are of 512 bytes; a separate flush has none.

    queued, done: the places of both. preflush: everything done before it was queued is durable before it begins.
    durable_at: the place where it is durable by itself, as with FUA. data: its bytes.
    """

    queued: int
    sector: int
    sectors: int
    preflush: bool
    fua: bool
    process: int
    done: int = NEVER
    durable_at: int = NEVER
    data: bytes = b""
    left: int = 0  # sectors that are not done

    @property
    def end(self) -> int:
        return self.sector + self.sectors


@dataclass
class Direct:
    """A write past the page cache that is durable when it returns (iomap)."""

    process: int
    begun: int
    ended: int = NEVER


@dataclass
class Recording:
    """requests: in the order in which they were queued. said: places and lines of the workload.

    end: the place behind everything. single: writes that a disk makes durable by FUA, and that this kernel made durable
    by a flush.
    """

    requests: list[Request] = field(default_factory=list)
    said: list[tuple[int, str]] = field(default_factory=list)
    end: int = 0
    single: int = 0


def parse(text: str) -> Recording:
    """The kernel's trace as requests, without their bytes."""
    made = Recording()
    on_their_way: list[Request] = []
    direct: list[Direct] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        process, event, rest = int(match[1]), match[3], match[4]
        made.end += 1
        if event == "block_bio_queue":
            _queued(made, on_their_way, process, rest)
        elif event == "block_rq_complete":
            _completed(made.end, on_their_way, rest)
        elif event == "tracing_mark_write":
            made.said.append((made.end, rest))
        elif event == "iomap_dio_rw_begin" and "DSYNC" in rest:
            direct.append(Direct(process, made.end))
        elif event == "iomap_dio_complete" and "DSYNC" in rest:
            for one in direct:
                if one.process == process and one.ended == NEVER:
                    one.ended = made.end
    made.end += 1
    _take_flushes_for_fua(made, direct)
    return made


def _queued(made: Recording, on_their_way: list[Request], process: int, rest: str) -> None:
    match = _QUEUE.match(rest)
    assert match, rest
    asked, sector, sectors = match[1], int(match[2]), int(match[3])
    operation = asked.lstrip("F")[:1] or "F"
    if operation == "R":
        return
    if operation not in "WF":
        raise ValueError(f"a request that the model does not know: {rest}")
    behind = asked.lstrip("F")[1:]
    request = Request(made.end, sector, sectors, asked.startswith("F"), "F" in behind, process, left=sectors)
    made.requests.append(request)
    on_their_way.append(request)


def _completed(at: int, on_their_way: list[Request], rest: str) -> None:
    """A request for a flush is reported as done twice: when its bytes were taken and, with no sectors, when all is
    done."""
    match = _DONE.match(rest)
    assert match, rest
    asked, sector, sectors, failed = match[1], int(match[2]), int(match[3]), int(match[4])
    if asked.startswith(("R", "FF")):
        return
    if failed:
        raise ValueError(f"a request failed: {rest}")
    for request in list(on_their_way):
        flushing = request.preflush or request.fua or not request.sectors
        if sectors:
            shared = min(request.end, sector + sectors) - max(request.sector, sector)
            request.left -= max(shared, 0)
            done = not request.left and not flushing and shared > 0
        else:
            done = flushing and request.sector == sector and not request.left
        if done:
            request.done = at
            request.durable_at = at if request.fua else NEVER
            on_their_way.remove(request)
            if not sectors:
                return


def _take_flushes_for_fua(made: Recording, direct: list[Direct]) -> None:
    """A loop device has no FUA, so the kernel writes and then flushes. A disk that has FUA makes only that write
    durable, so the flush covers only the write. If the journal was written meanwhile, such a disk is flushed too.
    """
    for write in direct:
        meanwhile = [request for request in made.requests if write.begun < request.queued < write.ended]
        flushes = [r for r in meanwhile if not r.sectors and r.process == write.process]
        journal = [r for r in meanwhile if r.sectors and (r.preflush or r.fua)]
        if len(flushes) != 1 or journal:
            continue
        made.requests.remove(flushes[0])
        made.single += 1
        for request in meanwhile:
            if request.process == write.process and request.sectors and request.queued < flushes[0].queued:
                request.durable_at = flushes[0].done


# ---- bytes


def written(folder: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each write that arrived at the device."""
    index, data = (folder / "writes").read_bytes(), memoryview((folder / "data").read_bytes())
    at = 0
    for offset, length in WRITTEN.iter_unpack(index):
        yield offset, data[at : at + length]
        at += length


def fill(made: Recording, writes: Iterator[tuple[int, bytes]]) -> None:
    """Give each request its bytes. Raises ValueError if the device has seen other writes than the trace."""
    arrived: dict[int, list[memoryview]] = defaultdict(list)
    for offset, contents in writes:
        view = memoryview(contents)
        for at in range(0, len(contents), SECTOR):
            arrived[(offset + at) // SECTOR].append(view[at : at + SECTOR])
    taken: dict[int, int] = defaultdict(int)
    for request in made.requests:
        pieces = []
        for sector in range(request.sector, request.end):
            if taken[sector] >= len(arrived[sector]):
                raise ValueError(f"sector {sector} was written {taken[sector]} times, and queued more often")
            pieces.append(arrived[sector][taken[sector]])
            taken[sector] += 1
        request.data = b"".join(pieces)
    for sector, pieces in arrived.items():
        if taken[sector] != len(pieces):
            raise ValueError(f"sector {sector} was written {len(pieces)} times, and queued {taken[sector]} times")


def sectors_of(data: bytes) -> np.ndarray:
    """Its sectors, one per row."""
    return np.frombuffer(data, np.uint8).reshape(-1, SECTOR)
