"""Non-negative factors of a matrix whose rows are on several workers, each with its rows of W.

    python examples/nmf_shards.py

X ≈ W H, by the multiplicative updates of D. D. Lee and H. S. Seung, "Algorithms for non-negative matrix factorization",
NIPS 2000. H is small: it travels, and is in the coordinator's store. W is as long as X: its rows stay where the rows of
X are, as local states of the shards.

The program fits with one, two and three workers; again while workers and the program are killed and the local states
are deleted; and with scikit-learn from the same start. All of pmstore's results must have the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore.scale import Processes, Tag

KILLS = {
    3: "a worker",
    7: "the program",
    11: "the local states and both workers",
    19: "the local states",
    20: "the program",
}
"""What is killed or deleted after which epoch."""

STROKES, SHARDS = 16, 6


class NMF(pmstore.MapReduce):
    """W (n, k), in parts, and H (k, d), all non-negative, such that W H is near X (n, d).

    Parameters
    ----------
    shards : as for MapReduce
        Rows of X.
    k : int
    """

    max_iter = 40

    def __init__(self, shards: Any, k: int = STROKES) -> None:
        self.shards, self.k = shards, k

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("H", (self.k, self.described[0]["shape"][1])), pmstore.Field("error")]

    def local_fields(self, i: int) -> list[pmstore.Field]:
        return [pmstore.Field("W", (self.described[i]["shape"][0], self.k))]

    def fingerprint(self) -> Mapping[str, Any]:
        return {"k": self.k}

    def start(self) -> None:
        self.state.H = np.random.default_rng(self.seed).uniform(0.1, 1, self.state.H.shape)

    def local_start(self, shard: Any, local: Any, rng: np.random.Generator) -> None:
        local.W = rng.uniform(0.1, 1, local.W.shape)

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator, local: Any) -> Mapping[str, Any]:
        W, H = local.W, shared["H"]
        W *= (shard @ H.T) / (W @ (H @ H.T))
        return {"WX": W.T @ shard, "WW": W.T @ W, "error": np.square(shard - W @ H).sum()}

    def update(self, total: Mapping[str, Any]) -> Mapping[str, float]:
        self.state.H *= total["WX"] / (total["WW"] @ self.state.H)
        self.state.error = float(np.sqrt(total["error"]))
        return {"objective": self.state.error}


def parts() -> list[Any]:
    """1,797 handwritten digits of 8 × 8 pixels."""
    from sklearn.datasets import load_digits  # workers import this file, and get the digits from the program

    return np.array_split(load_digits().data + 1e-3, SHARDS)


def bits(fit: NMF) -> bytes:
    """All that must be the same."""
    return fit.state.H.tobytes() + np.asarray(fit.local_parts("W")).tobytes()


class Accidents(Processes):
    """Two workers. After some epochs, they or the program are killed, or what they keep is deleted.

    Parameters
    ----------
    folder : Path
        Where a file tells of each accident, so that none happens twice.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(2)
        self.folder = folder

    def cancel(self, tag: Tag) -> None:
        super().cancel(tag)
        what, happened = KILLS.get(tag.epoch, ""), self.folder / f"epoch-{tag.epoch}"
        if not what or happened.exists():
            return
        happened.touch()
        print(f"  after epoch {tag.epoch}: {what}", flush=True)
        if "local states" in what:
            shutil.rmtree(self.folder / "nmf.pm.local")
        if "worker" in what:
            for pid in children()[: 2 if "both" in what else 1]:
                os.kill(pid, signal.SIGKILL)
        if "program" in what:
            os.kill(os.getpid(), signal.SIGKILL)


def children() -> list[int]:
    """The processes that this one has started."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(file.parent.name))
    return sorted(found)


def disturbed(folder: Path) -> bytes:
    """The result of a fit to which all accidents happen."""
    starts = 0
    while not (folder / "bits").exists():
        starts += 1
        subprocess.run([sys.executable, __file__, "--fit", str(folder)], stderr=subprocess.DEVNULL)
        assert starts <= 2 * len(KILLS), f"it was started {starts} times, and is not finished"
    assert all((folder / f"epoch-{epoch}").exists() for epoch in KILLS), "an accident did not happen"
    print(f"  started {starts} times")
    return (folder / "bits").read_bytes()


def difference(fit: NMF) -> float:
    """The largest difference from scikit-learn's W and H after as many iterations, relative to the largest element."""
    import warnings

    from sklearn.decomposition import NMF as Theirs

    rngs = [np.random.default_rng(np.random.SeedSequence(0, spawn_key=(0, i, 0))) for i in range(SHARDS)]
    W = np.concatenate([rng.uniform(0.1, 1, (len(part), STROKES)) for rng, part in zip(rngs, parts(), strict=True)])
    H = np.random.default_rng(0).uniform(0.1, 1, fit.state.H.shape)
    theirs = Theirs(STROKES, init="custom", solver="mu", tol=0, max_iter=NMF.max_iter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about iterations that did not converge
        W = theirs.fit_transform(np.concatenate(parts()), W=W, H=H)
    pairs = (np.asarray(fit.local_parts("W")), W), (fit.state.H, theirs.components_)
    return max(float(np.abs(ours - other).max() / np.abs(other).max()) for ours, other in pairs)


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--fit", metavar="FOLDER", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.fit:
        folder = Path(given.fit)
        fit = NMF(parts())
        fit.run(store=folder / "nmf.pm", name="digits", engine=Accidents(folder))
        (folder / "bits").write_bytes(bits(fit))
        return 0
    different = 0
    with tempfile.TemporaryDirectory() as temporary:
        fits = [NMF(parts()) for _ in range(3)]
        for workers, fit in enumerate(fits, 1):
            fit.run(store=Path(temporary, f"{workers}.pm"), name="digits", engine=workers)
        results = {f"{workers} workers": bits(fit) for workers, fit in enumerate(fits, 1)}
        print("two workers, disturbed:")
        results["killed and deleted"] = disturbed(Path(temporary))
        for name, found in results.items():
            same = found == results["1 workers"]
            print(f"{name}: {'the same bits' if same else 'OTHER BITS'}")
            different += not same
        largest = difference(fits[0])
    print(f"error {fits[0].state.error:.6f}; relative difference from scikit-learn: {largest:.1e}")
    return int(different or largest > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
