"""A computation is drained to two places and killed, and its store is deleted; the archive brings everything back.

python examples/archive_fit.py [FOLDER]

1. A process learns centres and drains every round to a folder, and from there to a second place: an S3 server of moto
   if moto and s3fs are installed, otherwise another folder. It is killed in round 25, and its store is deleted.
2. The store is restored and goes on. It ends with the bits of a run that nothing disturbed.
3. The version of round 10 is forked, and goes on with smaller steps and an archive of its own.
4. The centres of all versions are read from the archive and drawn: FOLDER/centres.png.

Needs the extras of pmstore: pip install 'pmstore[sklearn,archive,plot]'
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import pmstore
from pmstore import archive

ROUNDS, KILLED, MIDDLE = 40, 25, 10
RATE, SMALLER = 0.5, 0.1


def learn(store: pmstore.Store, rate: float, rounds: int) -> None:
    """Moves ten centres towards the means of their digits, by a rate, until `rounds` rounds are done."""
    X, _ = load_digits(return_X_y=True)
    centres = store.require_array("centres", (10, X.shape[1]))
    if "round" not in store:
        with store.transaction(message="start"):
            centres[:] = X[:10]
            store["round"] = 0
    while store["round"] < rounds:
        done = store["round"]
        batch = X[np.random.default_rng(done).integers(len(X), size=300)]
        nearest = ((batch[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
        with store.transaction(message=f"round {done + 1}", attributes={"rate": rate}):
            for k in np.unique(nearest):
                centres[k] += rate * (batch[nearest == k].mean(axis=0) - centres[k])
            store["round"] = done + 1


def killed(path: str, first: str, second: str, options: dict[str, Any]) -> None:
    """The process that does not survive."""
    store = pmstore.open(path)
    drain = store.drain([first, second], storage_options=options)
    for rounds in range(KILLED):
        learn(store, RATE, rounds)
        drain.wait()
    learn(store, RATE, KILLED)  # this round is in no archive yet
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def second_place(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """URL and options of the second place."""
    try:
        import s3fs
        from moto.server import ThreadedMotoServer
    except ImportError:
        yield str(folder / "second"), {}
        return
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "endpoint_url": f"http://{host}:{port}",
        "key": "user",
        "secret": "secret",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    s3fs.S3FileSystem(**options).call_s3("create_bucket", Bucket="archives")
    try:
        yield "s3://archives/run", options
    finally:
        server.stop()


def draw(found: archive.Archive, path: Path) -> int:
    """The way of each centre over all versions, in the plane in which they spread most. Returns how many versions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = np.stack([found[version]["centres"] for version in found])
    flat = ways.reshape(-1, ways.shape[2])
    plane = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)[2][:2].T
    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    for k in range(ways.shape[1]):
        x, y = (ways[:, k] @ plane).T
        axes.plot(x, y, lw=1, alpha=0.7)
        axes.plot(x[-1], y[-1], "o", color=axes.lines[-1].get_color())
    axes.set_title(f"Ten centres over {len(ways)} versions")
    figure.savefig(path)
    return len(ways)


def main(folder: Path) -> None:
    with pmstore.open(folder / "undisturbed.pm") as store:
        learn(store, RATE, ROUNDS)
        expected = store["centres"].copy()
    first = str(folder / "first")
    with second_place(folder) as (second, options):
        path = str(folder / "run.pm")
        process = subprocess.run([sys.executable, __file__, "--killed", path, first, second, repr(options)])
        assert process.returncode == -signal.SIGKILL, process.returncode
        os.unlink(path)
        for url, given in ((first, {}), (second, options)):
            found = archive.open(url, **given)
            print(f"{url}: {len(found)} versions, the newest says {found.log()[-1].message!r}")
        version = archive.open(second, **options).restore(path)
        print(f"killed in round {KILLED}, store deleted, version {version} restored from {second}")
    with pmstore.open(path) as store, store.drain(first) as drain:
        for rounds in range(store["round"], ROUNDS + 1):
            learn(store, RATE, rounds)
            drain.wait()
        same = store["centres"].tobytes() == expected.tobytes()
    found = archive.open(first)
    print(f"round {ROUNDS}: {'the same bits as' if same else 'OTHER BITS THAN'} a run that nothing disturbed")

    middle = next(one.version for one in found.log() if one.message == f"round {MIDDLE}")
    found.fork(middle, folder / "fork.pm")
    with pmstore.open(folder / "fork.pm") as store, store.drain(folder / "fork-archive"):
        learn(store, SMALLER, ROUNDS)
    forked = archive.open(folder / "fork-archive")
    away = np.abs(forked[forked.latest]["centres"] - found[found.latest]["centres"]).max()
    print(f"forked at round {MIDDLE} with steps of {SMALLER}: {len(forked)} versions, centres up to {away:.2f} away")
    print(f"{draw(found, folder / 'centres.png')} versions drawn: {folder / 'centres.png'}")
    if not same or not found.verify().ok:
        sys.exit("the archive did not bring back what was computed")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--killed"]:
        import ast

        killed(*sys.argv[2:5], ast.literal_eval(sys.argv[5]))
    elif sys.argv[1:]:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory))
