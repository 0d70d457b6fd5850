"""The archive: what a drain costs the program that commits, and what reading costs.

Pairs take turns in one run, with and without a drain, so that the drift of the machine cancels. Icechunk is beside it
if it is installed (pip install icechunk zarr): both make each change of 10 × 784 doubles a durable version.

    fits       KMeans on 70,000 × 784 doubles, every iteration drained with zstd
    mixtures   a Gaussian mixture on the same data, in the same way
    commits    10 × 784 doubles, back to back
    versions   a version for each commit: the program waits until each is durable, or in memory
    reading    restoring, one array of one version, listing 100,000 versions
"""

from __future__ import annotations

import os
import shutil
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from _common import MEDIA, file_system, no_collection, parent, parser, save, scratch
from sklearn.exceptions import ConvergenceWarning

import pmstore
from pmstore import archive
from pmstore.archive._format import ARCHIVE, Piece, Row, part_name, wrapped
from pmstore.archive._index import IndexWriter
from pmstore.archive._objects import place_of
from pmstore.cluster import KMeans
from pmstore.mixture import GaussianMixture

ROWS, COLUMNS, CENTRES = 70_000, 784, 10
LISTED = 100_000

Cell = dict[str, Any]


def data(rows: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    means = rng.random((CENTRES, COLUMNS))
    return np.asarray(means[rng.integers(0, CENTRES, rows)] + rng.normal(0, 0.35, (rows, COLUMNS)))


def kmeans(X: Any, store: pmstore.Store) -> None:
    KMeans(CENTRES, init="random", n_init=2, max_iter=10, tol=0, random_state=3, store=store).fit(X)


def mixture(X: Any, store: pmstore.Store) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # it ends after so many iterations
        GaussianMixture(
            CENTRES, covariance_type="diag", init_params="random_from_data", max_iter=6, tol=0, random_state=3,
            store=store,
        ).fit(X)  # fmt: skip


def fit(folder: Path, name: str, X: Any, fits: Callable[..., None], drains: bool) -> tuple[float, int, int]:
    """Seconds, commits, and versions that were archived."""
    with pmstore.open(folder / f"{name}.pm") as store:
        if drains:
            store.drain(folder / name)
        begun = perf_counter()
        fits(X, store)
        elapsed, commits = perf_counter() - begun, store.sequence
    versions = len(archive.open(folder / name)) if drains else 0
    shutil.rmtree(folder / name, ignore_errors=True)
    os.unlink(folder / f"{name}.pm")
    return elapsed, commits, versions


def fits(folder: Path, quick: bool, fits: Callable[..., None] = kmeans, turns: int = 15) -> Cell:
    X = data(2000 if quick else ROWS)
    cell: Cell = {"without": [], "with": [], "commits": 0, "versions": []}
    for turn in range(1 if quick else turns):
        for drains in (turn % 2 == 0, turn % 2 == 1):
            elapsed, cell["commits"], versions = fit(folder, f"fit-{turn}-{drains}", X, fits, drains)
            cell["with" if drains else "without"].append(elapsed)
            if drains:
                cell["versions"].append(versions)
    return cell


def mixtures(folder: Path, quick: bool) -> Cell:
    return fits(folder, quick, mixture, 7)


def commits(folder: Path, quick: bool) -> Cell:
    """Seconds of rounds of commits, and of each commit."""
    number, rounds = (50, 2) if quick else (500, 30)
    stores = {way: pmstore.open(folder / f"{way}.pm") for way in ("without", "with")}
    arrays = {way: store.create_array("w", (CENTRES, COLUMNS)) for way, store in stores.items()}
    change = np.random.default_rng(1).random((CENTRES, COLUMNS)) * 1e-6
    drain = stores["with"].drain(folder / "archive")
    cell: Cell = {"without": [], "with": [], "rounds without": [], "rounds with": []}
    for turn in range(rounds):
        for way in ("without", "with") if turn % 2 else ("with", "without"):
            store, w, times = stores[way], arrays[way], cell[way]
            with no_collection():
                begun = perf_counter()
                for _ in range(number):
                    w += change
                    before = perf_counter()
                    store.commit()
                    times.append(perf_counter() - before)
                cell[f"rounds {way}"].append(perf_counter() - begun)
    drain.wait()
    for store in stores.values():
        store.close()
    cell["commits"] = number * rounds
    cell["versions"] = len(archive.open(folder / "archive"))
    return cell


def versions(folder: Path, quick: bool) -> Cell:
    """Seconds of a commit that becomes a version, in rounds. waited: the program waits until each is durable; captured:
    until each is in memory, and at the end until the last is durable; icechunk: each is a commit of Icechunk."""
    rounds, number = (1, 10) if quick else (6, 100)
    change = np.random.default_rng(1).random((CENTRES, COLUMNS)) * 1e-6
    cell: Cell = {"waited": [], "captured": []}
    for turn in range(rounds):
        for way, many in (("waited", number), ("captured", 5 * number)):
            with pmstore.open(folder / f"{way}-{turn}.pm") as store, store.drain(folder / f"{way}-{turn}") as drain:
                w = store.create_array("w", (CENTRES, COLUMNS))
                store.commit()
                drain.wait()
                begun = perf_counter()
                for _ in range(many):
                    w += change
                    store.commit()
                    if way == "waited":
                        drain.wait()
                    else:
                        drain.capture()
                drain.wait()
                cell[way].append((perf_counter() - begun) / many)
            if len(archive.open(folder / f"{way}-{turn}")) != many + 1:
                raise AssertionError("a commit has no version")
        beside = icechunk(folder / f"icechunk-{turn}", change, number)
        if beside is not None:
            cell.setdefault("icechunk", []).append(beside / number)
    return cell


def icechunk(folder: Path, change: Any, number: int) -> float | None:
    try:
        import icechunk as ic
        import zarr
    except ImportError:
        return None
    repository = ic.Repository.create(ic.local_filesystem_storage(str(folder)))
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="w", shape=change.shape, chunks=change.shape, dtype="f8")
    session.commit("begin")
    w = np.zeros_like(change)
    begun = perf_counter()
    for turn in range(number):
        session = repository.writable_session("main")
        w += change
        zarr.open_array(session.store, path="w")[:] = w
        session.commit(f"{turn}")
    return perf_counter() - begun


def best(function: Callable[[], object], turns: int) -> list[float]:
    times = []
    for _ in range(turns):
        begun = perf_counter()
        function()
        times.append(perf_counter() - begun)
    return times


def reading(folder: Path, quick: bool) -> Cell:
    """Seconds: restoring, beside copying the objects' bytes to a new file that is synced; one array; listing."""
    turns = 2 if quick else 9
    rng = np.random.default_rng(2)
    with pmstore.open(folder / "read.pm") as store, store.drain(folder / "read") as drain:
        store["large"] = rng.random(100_000 if quick else 8_000_000)
        w = store.create_array("w", (CENTRES, COLUMNS))
        for _ in range(20):
            w += rng.random(w.shape) * 1e-6
            store.commit()
            drain.wait()
    found = archive.open(folder / "read")
    objects = [path for path in (folder / "read").rglob("*") if path.is_file()]

    def copy() -> None:
        with open(folder / "copy", "wb") as file:
            for path in objects:
                file.write(path.read_bytes())
            file.flush()
            os.fsync(file.fileno())

    def restore() -> None:
        (folder / "restored.pm").unlink(missing_ok=True)
        found.restore(folder / "restored.pm")

    cell: Cell = {"bytes": sum(path.stat().st_size for path in objects)}
    ways = ("copy", "restore", "read", "array", "needed", "again", "large", "large needed")
    cell |= {way: [] for way in ways}
    for _ in range(turns):
        cell["copy"] += best(copy, 1)
        cell["restore"] += best(restore, 1)
        cell["read"] += best(lambda: [path.read_bytes() for path in objects], 1)
        for name, key, count in (("w", "array", 5), ("large", "large", 1)):
            needed = _pieces(found, name)
            place = found._library.sources.places[0]
            for _ in range(count):  # each time an archive that has read nothing but its index
                fresh = archive.open(folder / "read")
                cell[key] += best(lambda fresh=fresh, name=name: fresh[fresh.latest][name], 1)  # type: ignore[misc]
                cell["needed" if key == "array" else "large needed"] += best(
                    lambda place=place, needed=needed: [place.get(*piece[:3]) for piece in needed],  # type: ignore[misc]
                    1,
                )
        cell["again"] += best(lambda: found[found.latest]["w"], 5)
    cell["listed"], cell["list"] = listing(folder / "listed", 1000 if quick else LISTED, turns)
    return cell


def _pieces(found: archive.Archive, name: str) -> list[Piece]:
    """What reading an array of the newest version needs: the directories, and the frames of its contents."""
    rows = found._index.chain(found._find(found.latest)[1])
    frames = [frame.piece for frame, _ in found[found.latest]._core._entries[f"n{name}".encode()].frames]
    return [*(row.directory for row in rows), *frames]


def listing(folder: Path, number: int, turns: int) -> tuple[int, list[float]]:
    place = place_of(folder)
    place.create("archive", wrapped(ARCHIVE, "archive", {"id": "listed", "lineage": "listed"}))
    writer = IndexWriter(place)
    writer.begin({"by": "this benchmark"})
    for flush in range(number // 100):
        part = part_name("0" * 16, flush)
        pieces = (Piece(part, 100 * n, 100, n) for n in range(100))
        writer.append(
            [Row(100 * flush + n, 1e9 + n, None, 1000, 500, (part,), p, 0, None) for n, p in enumerate(pieces)]
        )
    return number, best(lambda: archive.open(folder).log(), turns)


MEASURES = {"fits": fits, "mixtures": mixtures, "commits": commits, "versions": versions, "reading": reading}


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    results: dict[str, Any] = {"quick": options.quick, "priority": "normal priority", "cells": []}
    for medium in options.media:
        place = parent(options, medium)
        place.mkdir(parents=True, exist_ok=True)
        cell: Cell = {"medium": medium, "file system": file_system(place), "pmstore medium": MEDIA[medium]}
        for name, measure in MEASURES.items():
            with scratch(place) as folder:
                cell[name] = measure(folder, options.quick)
                print(medium, name, {k: summed(v) for k, v in cell[name].items()}, flush=True)
        results["cells"].append(cell)
    save(options.raw, "archive", results)


def summed(value: Any) -> Any:
    if isinstance(value, list):
        return f"{statistics.median(value):.4g}"
    return f"{value:.4g}" if isinstance(value, float) else value


if __name__ == "__main__":
    main()
