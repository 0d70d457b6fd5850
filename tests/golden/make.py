"""Writes the golden files of the format that this pmstore writes: ``python -m tests.golden.make``.

Files of earlier formats stay as they are: they were written by the pmstore of their time, with the same programs. Nor
are those of this format written again, without ``--again``: what is released must be read for ever.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore.testing._store.engine import Options, Schedule, image
from pmstore.testing._store.recording import Recorder
from tests.golden import contents, layout

HERE = Path(__file__).parent
KNOWN = HERE / "known.json"
MEMORY = Path("/dev/shm")

Program = Callable[[pmstore.Store], None]


def killed(path: Path, program: Program, **options: Any) -> None:
    """Runs a program on a new store in a process that is killed before it closes the store."""
    pid = os.fork()
    if not pid:
        try:
            store = pmstore.open(path, "x", **options)
            program(store)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status), "the program failed"


def overflowed(path: Path, medium: str) -> None:
    """The crash that leaves a log whose last record is in free pages: a moment later it is empty."""
    with Recorder(path, medium, seed=1) as recorder:
        store = pmstore.open(path, max_size=contents.OVERFLOW_SIZE)
        contents.overflow(store)
        store._drop(discard=True)
    recording = recorder.recording
    for event in range(len(recording), 0, -1):
        data = image(recording, Schedule(event, "all"), Options())
        log_offset = struct.unpack_from("<Q", data, 56)[0]
        salt = data[32:40]
        magic, _, _, _, record_salt, _, body = struct.unpack_from("<IHHQ8sII", data, log_offset)
        newest = magic == 0x43524D50 and record_salt == salt and data[:256] == data[4096 : 4096 + 256]
        if newest and body == 32 and data[log_offset + 64 + 15] == 3:
            path.write_bytes(data)
            return
    raise AssertionError("no crash leaves such a log")


def fits(path: Path, medium: Any) -> None:
    """Two fits that are finished, and one of each kind that was killed on its way."""
    from pmstore._core import Core

    with pmstore.open(path, "x", media=medium) as store:
        for estimator in estimators(store, "whole"):
            estimator.fit(contents.samples())
    commit = Core.commit
    for number in range(2):

        def stopping(store: pmstore.Store, number: int = number) -> None:
            first = store.sequence

            def commit_and_die(core: Core) -> None:
                commit(core)
                if core.sequence == first + 3:
                    os.kill(os.getpid(), signal.SIGKILL)

            Core.commit = commit_and_die  # type: ignore[method-assign]
            estimators(store, "stopped")[number].fit(contents.samples())

        pid = os.fork()
        if not pid:
            with pmstore.open(path, "r+", media=medium) as store:
                stopping(store)
            os._exit(1)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "the fit was not killed"


def estimators(store: pmstore.Store, name: str) -> list[Any]:
    """KMeans and GaussianMixture, which commit each iteration to the store."""
    from pmstore.cluster import KMeans
    from pmstore.mixture import GaussianMixture

    centers = contents.first_centers()
    return [
        KMeans(3, init=centers, n_init=1, tol=0, algorithm="lloyd", store=store, name=f"{name}/kmeans"),
        GaussianMixture(
            3, means_init=centers, weights_init=[0.3, 0.3, 0.4], tol=0, max_iter=12, random_state=1, store=store,
            name=f"{name}/mixture",
        ),
    ]  # fmt: skip


def make(directory: Path, medium: Any, name: str) -> Path:
    """Writes one file."""
    path = directory / f"{medium}-{name}.pm"
    if name == "entries":
        contents.register()
        with pmstore.open(path, "x", media=medium) as store:
            contents.entries(store)
    elif name == "compacted":
        with pmstore.open(path, "x", media=medium) as store:
            contents.large(store)
        assert pmstore.compact(path)
    elif name == "overflow":
        overflowed(path, medium)
    elif name == "fits":
        fits(path, medium)
    else:
        options = {"durability": "async", "sync_interval": 3600.0} if name == "later" else {}
        killed(path, getattr(contents, name), media=medium, **options)
    return path


NAMES = ("entries", "compacted", "log", "later", "overflow", "fits")
FILES = [(medium, name) for medium in ("memory", "file") for name in NAMES]


def about(path: Path, data: bytes) -> dict[str, Any]:
    """What a file is known to hold, beside its contents."""
    found = layout.Store(data)
    out: dict[str, Any] = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "sequence": found.sequence,
        "items": [[item.kind for item in record.items] for record in found.records],
        "entries": sorted({(entry.kind, key[:1].decode()) for key, entry in found.entries.items()}),
    }
    if path.stem.endswith("fits"):
        with pmstore.open(path, "r") as store:
            out["fits"] = digests(store)
    return out


def digests(store: pmstore.Store) -> dict[str, str]:
    """A digest of each array."""
    arrays = {name: np.asarray(value) for name, value in store.items() if isinstance(value, np.ndarray)}
    return {
        name: hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode() + array.tobytes()).hexdigest()[:16]
        for name, array in sorted(arrays.items())
    }


def lines(known: dict[str, Any]) -> str:
    """JSON with a line for each field of each file."""
    files = [
        f"{json.dumps(golden)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
        + "\n}"
        for golden, fields in sorted(known.items())
    ]
    return "{\n" + ",\n".join(files) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("MEDIUM", "NAME", "DIRECTORY"), help="write only this one, there")
    parser.add_argument("--again", action="store_true", help="replace files that are there")
    chosen = parser.parse_args()
    if chosen.one:
        make(Path(chosen.one[2]), chosen.one[0], chosen.one[1])
        return
    archived(chosen.again)
    known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    for medium, name in FILES:
        with tempfile.TemporaryDirectory(dir=MEMORY if medium == "memory" else None) as directory:
            path = in_process(Path(directory), medium, name)
            data = path.read_bytes()
            golden = f"format{int.from_bytes(data[8:12], 'little')}/{path.stem}"
            target = HERE / f"{golden}.pm.gz"
            if target.exists() and not chosen.again:
                print(f"{golden} is there already")
                continue
            known[golden] = about(path, data)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(gzip.compress(data, 9, mtime=0))
        print(f"{golden}: {target.stat().st_size:,} of {len(data):,} bytes")
    KNOWN.write_text(lines(known))


def archived(again: bool) -> None:
    """Writes the golden archive, if it is not there."""
    from pmstore.archive._format import FORMAT

    target = HERE / f"archive{FORMAT}.zip"
    if target.exists() and not again:
        return
    contents.register()
    with tempfile.TemporaryDirectory() as directory:
        with pmstore.open(Path(directory) / "store.pm") as store:
            contents.versions(store, f"{directory}/archive")
        paths = sorted(path for path in (Path(directory) / "archive").rglob("*") if path.is_file())
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
            for path in paths:
                file.writestr(zipfile.ZipInfo(str(path.relative_to(directory))), path.read_bytes())
    print(f"{target.name}: {target.stat().st_size:,} bytes, {len(paths)} files")


ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def in_process(directory: Path, medium: str, name: str) -> Path:
    """Runs it in a process of its own: types are registered once, and OpenMP's threads do not survive a fork."""
    environment = {**os.environ, **ONE_THREAD}
    command = [sys.executable, "-m", "tests.golden.make", "--one", medium, name, str(directory)]
    subprocess.run(command, cwd=HERE.parent.parent, env=environment, check=True, timeout=120)
    return directory / f"{medium}-{name}.pm"


if __name__ == "__main__":
    main()
