"""A network is trained further, and a hundred versions of it are kept in the space of a few.

python examples/finetune_history.py [FOLDER]

1. A perceptron that knows the digits 0 to 4 is trained further with all ten. Each of 100 versions is archived with
   pmstore.codecs.LCDelta, which keeps the largest exponents of the changes (docs/lossy.md).
2. The same training is archived without loss: differences to the version before, shuffled and compressed with zstd.
3. The accuracy of every version is computed from the weights that each archive gives back, for digits that the training
   never saw. It is drawn against the bytes of the history: FOLDER/finetune.png.

Needs the extras of pmstore: pip install 'pmstore[sklearn,archive,plot]'
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import pmstore
from pmstore import archive
from pmstore.codecs import LCDelta

VERSIONS, STEPS, BATCH, RATE = 100, 5, 50, 0.05
KNOWN, HIDDEN, TRAINED = 5, 256, 1300  # the digits after TRAINED are for the test

Weights = Mapping[str, np.ndarray[Any, Any]]


def digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images without the pixels that are alike in all of them, and their digits, in a random order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    images = images[:, np.ptp(images, axis=0) > 0] / 16
    return images[order].astype("f4"), labels[order]


def outputs(weights: Weights, images: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """The outputs of both layers."""
    hidden = np.maximum(images @ weights["w0"] + weights["b0"], 0)
    return [hidden, hidden @ weights["w1"] + weights["b1"]]


def train(weights: Weights, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], steps: int, seed: int) -> None:
    """Stochastic gradient descent, in place."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        rows = rng.integers(len(labels), size=BATCH)
        hidden, last = outputs(weights, images[rows])
        last = np.exp(last - last.max(axis=1, keepdims=True))
        last /= last.sum(axis=1, keepdims=True)
        last[np.arange(BATCH), labels[rows]] -= 1
        before = (last @ weights["w1"].T) * (hidden > 0)
        for name, slope in {
            "w1": hidden.T @ last,
            "b1": last.sum(axis=0),
            "w0": images[rows].T @ before,
            "b0": before.sum(axis=0),
        }.items():
            weights[name][...] -= RATE / BATCH * slope


def accuracy(weights: Weights, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    return float((outputs(weights, images)[1].argmax(axis=1) == labels).mean())


def keep_history(folder: Path, name: str, codec: Any) -> Weights:
    """Train, and archive each version. Returns the weights at the end."""
    images, labels = digits()
    images, labels = images[:TRAINED], labels[:TRAINED]
    rng = np.random.default_rng(0)
    with pmstore.open(folder / f"{name}.pm") as store:
        weights = {}
        for key, shape in (("w0", (images.shape[1], HIDDEN)), ("b0", HIDDEN), ("w1", (HIDDEN, 10)), ("b1", 10)):
            weights[key] = store.create_array(f"weights/{key}", shape, "f4")
            if key.startswith("w"):
                weights[key][...] = rng.standard_normal(shape, "f4") * np.sqrt(2 / weights[key].shape[0])
        known = labels < KNOWN
        train(weights, images[known], labels[known], 300, seed=0)
        with store.drain(folder / name, codec=codec) as drain:
            for version in range(VERSIONS):
                with store.transaction(message=f"after {version * STEPS} steps"):
                    store["version"] = version
                drain.wait()
                train(weights, images, labels, STEPS, seed=1 + version)
        return {key: array.copy() for key, array in weights.items()}


def read_history(folder: Path, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The accuracy of each version that the archive has, and the bytes of the history up to it."""
    images, labels = digits()
    found = archive.open(folder / name)
    log = [info for info in found.log() if "version" in found[info.version]]
    scores = []
    for info in log:
        version = found[info.version]
        weights = {key: version[f"weights/{key}"] for key in ("w0", "b0", "w1", "b1")}
        scores.append(accuracy(weights, images[TRAINED:], labels[TRAINED:]))
    return np.array(scores), np.cumsum([info.size for info in log])


def draw(curves: Mapping[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]], path: Path) -> None:
    """Accuracy against bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for name, (scores, size) in curves.items():
        axes.plot(size / 1e6, 100 * scores, ".-", ms=3, lw=0.8, label=f"{name}: {len(scores)} versions")
    axes.set(xscale="log", xlabel="bytes of the history up to the version (MB)", ylabel="accuracy (%)")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=80)


def main(folder: Path) -> None:
    end = {
        "zstd": keep_history(folder, "zstd", "zstd"),
        "LCDelta": keep_history(folder, "LCDelta", {"weights/*": LCDelta(bits=3)}),
    }
    if any(end["zstd"][key].tobytes() != end["LCDelta"][key].tobytes() for key in end["zstd"]):
        sys.exit("the two trainings differ")
    curves = {name: read_history(folder, name) for name in end}
    one = sum(array.nbytes for array in end["zstd"].values())
    for name, (scores, size) in curves.items():
        print(f"{name}: {len(scores)} versions in the space of {size[-1] / one:.1f} ({size[-1]:,} bytes)")
        print(f"  accuracy {100 * scores[0]:.1f} % → {100 * scores[-1]:.1f} %")
    away = 100 * np.abs(curves["LCDelta"][0] - curves["zstd"][0])
    print(f"LCDelta is {away.mean():.2f} points away on average, {away.max():.2f} at most (version {away.argmax()})")
    draw(curves, folder / "finetune.png")
    print(f"drawn: {folder / 'finetune.png'}")


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory))
