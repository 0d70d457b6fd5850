"""Aggregates: the shards of many processes in few files, beside a file for each shard.

Two worker processes stand for N processes, each with half of the shards. A file for each shard, written in two ways,
`pmstore.archive.aggregate`, and one file, which is the least work, take turns in one run, so that the drift of the disk
cancels.

    plain files   open, write, fdatasync: a crash may leave half a file, or none where one was said to be
    whole files   a temporary name, write, fsync, rename, fsync of the folder: each file is whole or absent
    aggregate     one part for each 128 MiB, and a manifest: all shards whole or absent, together
    one file      each worker writes its half of one file, and fdatasync: no names, hashes or manifest

The order rotates. Files of one repetition are deleted before the next one, which is not timed: a file system may pass
deletions on to the disk, which is then busy with them. Reading is from the page cache; the
files are read with np.fromfile; the aggregate's reader verifies the hash of each shard, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from _common import (
    MEDIA,
    file_system,
    machine,
    no_collection,
    parent,
    parser,
    ratio,
    real_time,
    save,
    scratch,
)
from _targets import AGGREGATE_WAYS as WAYS

from pmstore.archive import LocalGroup, aggregate, open_aggregate
from pmstore.archive._shared import write_all

WORKERS = 2
SHARDS = {64: 4 << 20, 256: 1 << 20, 1024: 64 << 10, 4096: 16 << 10}  # number: bytes of each
REPETITIONS = 9

Step = Callable[[int], None]
Read = dict[str, np.ndarray[Any, Any]]


def plain(folder: Path, names: list[str], data: np.ndarray[Any, Any]) -> Step:
    def write(turn: int) -> None:
        for name in names:
            fd = os.open(folder / f"{turn}-{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.write(fd, data)
            os.fdatasync(fd)
            os.close(fd)

    return write


def whole(folder: Path, names: list[str], data: np.ndarray[Any, Any]) -> Step:
    def write(turn: int) -> None:
        for name in names:
            temporary = folder / f".{turn}-{name}"
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            os.write(fd, data)
            os.fsync(fd)
            os.close(fd)
            os.rename(temporary, folder / f"{turn}-{name}")
            fd = os.open(folder, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    return write


def together(folder: Path, names: list[str], data: np.ndarray[Any, Any], group: LocalGroup) -> Step:
    shards = dict.fromkeys(names, data)
    return lambda turn: void(aggregate(folder, turn, shards, group))


def one_file(folder: Path, names: list[str], data: np.ndarray[Any, Any], rank: int) -> Step:
    def write(turn: int) -> None:
        fd = os.open(folder / str(turn), os.O_WRONLY | os.O_CREAT, 0o666)
        write_all(fd, [data] * len(names), rank * len(names) * len(data))
        os.fdatasync(fd)
        os.close(fd)

    return write


def void(result: object) -> None:
    """Nothing."""


def read_files(folder: Path, names: list[str], turn: int) -> Read:
    return {name: np.fromfile(folder / f"{turn}-{name}", np.uint8) for name in names}


def read_one_file(folder: Path, names: list[str], each: int, rank: int, turn: int) -> Read:
    count = len(names) * each
    return dict(zip(names, np.fromfile(folder / str(turn), np.uint8, count, offset=rank * count).reshape(-1, each)))


def work(rank: int, folders: dict[str, Path], meeting: Path, turns: int, number: int, barrier: Any, told: Any) -> None:
    """One worker: every way in turn. The leader tells the times, [way, writing, reading, files]."""
    priority = real_time()
    group = LocalGroup(meeting, rank, WORKERS, barrier)
    names = [str(k) for k in range(number * rank // WORKERS, number * (rank + 1) // WORKERS)]
    data = np.random.default_rng(rank).integers(0, 255, SHARDS[number], np.uint8)
    steps = {
        "plain files": plain(folders["plain files"], names, data),
        "whole files": whole(folders["whole files"], names, data),
        "aggregate": together(folders["aggregate"], names, data, group),
        "one file": one_file(folders["one file"], names, data, rank),
    }
    reads: dict[str, Callable[[int], Read]] = {
        "plain files": partial(read_files, folders["plain files"], names),
        "whole files": partial(read_files, folders["whole files"], names),
        "aggregate": lambda turn: open_aggregate(folders["aggregate"], turn).shards(rank),
        "one file": partial(read_one_file, folders["one file"], names, len(data), rank),
    }
    with no_collection():
        for turn in range(turns):
            for k in range(len(WAYS)):
                way = WAYS[(turn + k) % len(WAYS)]
                step = steps[way]
                barrier.wait()
                start = perf_counter()
                step(turn)
                barrier.wait()
                middle = perf_counter()
                read = reads[way](turn)
                barrier.wait()
                end = perf_counter()
                assert len(read) == len(names)
                del read
                if rank == 0:
                    left = sum(path.is_file() for path in folders[way].rglob("*"))
                    told.put([way, middle - start, end - middle, left])
            if rank == 0:
                for folder in folders.values():
                    for path in [path for path in folder.rglob("*") if path.is_file()]:
                        path.unlink()
                os.sync()
            barrier.wait()
    if rank == 0:
        told.put(priority)


def cell(directory: Path, medium: str, number: int, turns: int) -> dict[str, Any]:
    """The times of all ways, with one warm-up that does not count."""
    context = multiprocessing.get_context("fork")
    barrier, told = context.Barrier(WORKERS), context.Queue()
    with scratch(directory) as folder, scratch(Path("/dev/shm")) as meeting:
        folders = {way: folder / way.replace(" ", "-") for way in WAYS}
        for path in folders.values():
            path.mkdir()
        arguments = (folders, meeting, turns + 1, number, barrier, told)
        processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(WORKERS)]
        for process in processes:
            process.start()
        found = [told.get() for _ in range((turns + 1) * len(WAYS))][len(WAYS) :]
        priority = told.get()
        for process in processes:
            process.join()
    made: dict[str, Any] = {"medium": medium, "shards": number, "bytes": SHARDS[number], "priority": priority}
    for way in WAYS:
        writing, reading, files = zip(*(times[1:] for times in found if times[0] == way))
        made[way] = {"write": list(writing), "read": list(reading), "files": files[0]}
    return made


def rate(known: dict[str, Any], way: str, what: str) -> float:
    """MB/s, from the median."""
    return float(known["shards"] * known["bytes"] / statistics.median(known[way][what]) / 1e6)


def show(known: dict[str, Any]) -> None:
    """One line."""
    rates = ", ".join(f"{way} {rate(known, way, 'write'):,.0f}" for way in WAYS)
    files, aggregates = known[WAYS[0]], known["aggregate"]
    gains = " and ".join(f"{ratio(known[way]['write'], aggregates['write']):.1f} ×" for way in WAYS[:2])
    reading = f"{ratio(files['read'], aggregates['read']):.2f} ×"
    print(
        f"{known['medium']}, {known['shards']:,} × {known['bytes'] >> 10:,} KiB: {rates} MB/s; {gains}; "
        f"reading {reading}; {aggregates['files']} files",
        flush=True,
    )


def main() -> None:
    """Measure, print, keep."""
    options: argparse.Namespace = parser(__doc__.splitlines()[0]).parse_args()
    turns = 2 if options.quick else max(3, round(REPETITIONS * options.scale))
    cells = []
    for medium in options.media:
        for number in SHARDS:
            cells.append(cell(parent(options, medium), medium, number, turns))
            show(cells[-1])
    systems = {medium: file_system(parent(options, medium)) for medium in MEDIA}
    known = {"quick": options.quick, "priority": cells[0]["priority"], "cells": cells, "file systems": systems}
    print(machine())
    save(options.raw, "aggregate", known)


if __name__ == "__main__":
    main()
