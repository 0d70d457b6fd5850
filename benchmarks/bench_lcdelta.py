"""Lossy histories of weights: bytes and recovered accuracy, with `pmstore.codecs.LCDelta` and beside it.

A perceptron with two hidden layers of 512 and 256 learns by SGD. After each 40 batches its weights are committed, 20
times, and each commit becomes a version. The last version is read back, and its accuracy on the test set is compared
with that of the weights that were committed. Three data sets of real measurements, none with a constant feature, and
five seeds each (of the split, the weights and the batches):

    digits       1,797 scanned digits, 61 pixels that are not constant, 10 classes
    cancer       569 biopsies of breasts, 30 measurements, 2 classes
    photographs  6,000 patches of 8 × 8 × 3 out of two photographs, 2 classes: which one

    python benchmarks/bench_lcdelta.py --raw build/bench/results/lcdelta.json
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from _common import parent, parser, save, scratch
from numcodecs import Shuffle, Zstd
from sklearn.datasets import load_breast_cancer, load_digits, load_sample_images

import pmstore
from pmstore import archive
from pmstore.codecs import LCDelta
from pmstore.codecs._passes import Buckets, Coder, decoded, kind_of

HIDDEN, BATCH, RATE, STEPS, VERSIONS = (512, 256), 32, 0.05, 40, 20
SETS = ("digits", "cancer", "photographs")
TINY = 64  # elements; of smaller arrays, top-n and the like keep all

Array = np.ndarray[Any, Any]
Weights = list[Array]


def loaded(name: str) -> tuple[Array, Array]:
    """Features, scaled to mean 0 and variance 1, and classes."""
    if name == "photographs":
        rng, patches, classes = np.random.default_rng(0), [], []
        for number, image in enumerate(load_sample_images().images):
            for _ in range(3000):
                row, column = (rng.integers(0, size - 8) for size in image.shape[:2])
                patches.append(image[row : row + 8, column : column + 8].ravel())
                classes.append(number)
        X, y = np.array(patches, "f4"), np.array(classes)
    else:
        found = load_digits() if name == "digits" else load_breast_cancer()
        X, y = found.data.astype("f4"), found.target
    X = X[:, X.std(0) > 0]
    return (X - X.mean(0)) / X.std(0), y


class Perceptron:
    """Learns batch by batch."""

    def __init__(self, X: Array, y: Array, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        order = self._rng.permutation(len(X))
        X, y, most = X[order], y[order], len(X) * 3 // 4
        self.X, self.y, self._test = X[:most], y[:most], (X[most:], y[most:])
        sizes = (X.shape[1], *HIDDEN, int(y.max()) + 1)
        self.layers = len(sizes) - 1
        shapes = list(itertools.pairwise(sizes))
        self.weights = [(self._rng.normal(size=shape) * (2 / shape[0]) ** 0.5).astype("f4") for shape in shapes]
        self.weights += [np.zeros(shape[1], "f4") for shape in shapes]

    def _forward(self, weights: Weights, X: Array) -> Weights:
        found = [X]
        for number in range(self.layers):
            out = found[-1] @ weights[number] + weights[self.layers + number]
            found.append(out if number == self.layers - 1 else np.maximum(out, 0))
        return found

    def accuracy(self, weights: Weights) -> float:
        X, y = self._test
        return float((self._forward(weights, X)[-1].argmax(1) == y).mean())

    def learn(self) -> None:
        for _ in range(STEPS):
            chosen = self._rng.integers(0, len(self.X), BATCH)
            found = self._forward(self.weights, self.X[chosen])
            out = np.exp(found[-1] - found[-1].max(1, keepdims=True))
            out /= out.sum(1, keepdims=True)
            out[np.arange(BATCH), self.y[chosen]] -= 1
            for number in reversed(range(self.layers)):
                gradient = (found[number].T @ out) / BATCH, out.mean(0)
                if number:
                    out = (out @ self.weights[number].T) * (found[number] > 0)
                self.weights[number] -= np.float32(RATE) * gradient[0]
                self.weights[self.layers + number] -= np.float32(RATE) * gradient[1]


def history(model: Perceptron) -> list[Weights]:
    """The weights of all versions, the first ones in front."""
    found = [[one.copy() for one in model.weights]]
    for _ in range(VERSIONS):
        model.learn()
        found.append([one.copy() for one in model.weights])
    return found


def nbytes(weights: Weights) -> int:
    return sum(one.nbytes for one in weights)


# ---- ways to keep them: the weights that come back, and the bytes of each version but the first


def archived(folder: Path, versions: list[Weights], codec: Any) -> tuple[Weights, list[int]]:
    """The bytes in an archive of a drain, with all that a version takes."""
    with pmstore.open(folder / "store.pm", "w") as store, store.drain(folder / "archive", codec=codec) as drain:
        for weights in versions:
            for number, one in enumerate(weights):
                store[f"weights/{number}"] = one
            store.commit()
            drain.wait()
    found = archive.open(folder / "archive")
    infos = found.log()
    assert len(infos) == len(versions)
    last = found[found.latest]
    return [last[f"weights/{number}"] for number in range(len(versions[0]))], [info.size for info in infos[1:]]


def shuffled(data: Array) -> int:
    return len(
        Zstd(level=3).encode(Shuffle(elementsize=data.itemsize).encode(np.ascontiguousarray(data).view(np.uint8)))
    )


def each_alone(versions: list[Weights]) -> tuple[Weights, list[int]]:
    """Each version as it is, shuffled and compressed."""
    return versions[-1], [sum(map(shuffled, weights)) for weights in versions[1:]]


def halved(versions: list[Weights]) -> tuple[Weights, list[int]]:
    """Each version as float16, shuffled and compressed."""
    halves = [[one.astype("f2") for one in weights] for weights in versions]
    return [one.astype("f4") for one in halves[-1]], [sum(map(shuffled, weights)) for weights in halves[1:]]


def without_feedback(versions: list[Weights]) -> tuple[Weights, list[int]]:
    """LCDelta of what was committed, minus what was committed before."""
    out, sizes = [one.copy() for one in versions[0]], []
    for before, weights in itertools.pairwise(versions):
        values, codes = quantised([a - b for a, b in zip(weights, before)], 3, "mean")
        sizes.append(sum(map(packed, codes)))
        out = [one + value[code].reshape(one.shape) for one, value, code in zip(out, values, codes)]
    return out, sizes


def top(versions: list[Weights], most: list[int]) -> tuple[Weights, list[int]]:
    """The largest changes, as places and float32, with feedback, in as many bytes as `most` has for each version."""
    out, sizes = [one.copy() for one in versions[0]], []
    for weights, limit in zip(versions[1:], most):
        changes = np.concatenate([(a - b).ravel() for a, b in zip(weights, out)])
        order = np.argsort(-np.abs(changes), kind="stable")
        number = limit // 6
        for _ in range(6):  # until the bytes are the same, about
            places = np.sort(order[:number])
            size = shuffled(np.diff(places, prepend=0).astype("u4")) + shuffled(changes[places])
            if abs(size - limit) < limit // 100:
                break
            number = min(number * limit // size, len(changes))
        kept = np.zeros_like(changes)
        kept[places] = changes[places]
        sizes.append(size)
        ends = np.cumsum([one.size for one in out])[:-1]
        out = [one + some.reshape(one.shape) for one, some in zip(out, np.split(kept, ends))]
    return out, sizes


# ---- the same in numpy: what the codec's choices are compared with


def quantised(changes: Weights, bits: int, value: str) -> tuple[Weights, Weights]:
    """The values and the codes of arrays that share buckets. value: of a bucket: "mean" or "midrange"."""
    every = np.concatenate([one.ravel() for one in changes])
    buckets = every.view("u4") >> 23
    there = [one for one in np.flatnonzero(np.bincount(buckets, minlength=512)).tolist() if one % 256]
    counts = np.bincount(buckets, minlength=512)
    there.sort(key=lambda one: (-(one % 256), -int(counts[one])))
    table = np.zeros(512, np.uint8)
    table[there[: (1 << bits) - 1]] = np.arange(1, 1 + min(len(there), (1 << bits) - 1))
    values, codes = [], []
    for one in changes:
        flat = one.ravel()
        code = table[flat.view("u4") >> 23]
        found = np.zeros(1 << bits, "f4")
        if value == "mean":
            count = np.bincount(code, minlength=1 << bits)
            found[:] = np.bincount(code, weights=flat, minlength=1 << bits) / np.maximum(count, 1)
        else:
            for number in np.unique(code).tolist():
                some = flat[code == number]
                found[number] = (some.min() + some.max()) / 2
        found[0] = 0
        values.append(found)
        codes.append(code)
    return values, codes


def packed(code: Array) -> int:
    """Bytes of codes of 3 bits as the codec packs them, with their values."""
    ends = np.flatnonzero(code)
    zeros = np.diff(ends, prepend=-1) - 1
    each = zeros // 32 + 1
    bytes_ = np.full(int(each.sum()), 31 << 3, np.uint8)
    bytes_[np.cumsum(each) - 1] = (zeros % 32) << 3 | code[ends]
    return len(Zstd(level=1).encode(bytes_)) + 7 * 4 + 24


def alone(code: Array) -> int:
    """The same, each code in a byte."""
    return len(Zstd(level=3).encode(code)) + 7 * 4 + 24


def huffman(code: Array) -> int:
    """The bytes of a Huffman code of the codes, and a length for each."""
    counts = [int(n) for n in np.bincount(code) if n]
    if len(counts) == 1:
        return len(code) // 8 + 7 * 4 + 24
    heapq.heapify(counts)
    bits = 0
    while len(counts) > 1:
        both = heapq.heappop(counts) + heapq.heappop(counts)
        bits += both
        heapq.heappush(counts, both)
    return bits // 8 + 8 + 7 * 4 + 24


def entropy(code: Array) -> int:
    """No code of single elements takes less."""
    share = np.bincount(code) / len(code)
    return int(-(share[share > 0] * np.log2(share[share > 0])).sum() * len(code) / 8) + 7 * 4 + 24


def choices(versions: list[Weights]) -> Iterator[tuple[str, Weights, list[int]]]:
    """Other choices than those of the codec, at 3 bits and with feedback."""
    sizes: dict[str, Callable[[Array], int]] = {
        "zstd, with the zeros before it": packed,
        "zstd, a code in a byte": alone,
        "Huffman": huffman,
        "entropy": entropy,
    }
    for shared in (True, False):
        for value in ("mean", "midrange"):
            out, found = [one.copy() for one in versions[0]], {name: [0] * VERSIONS for name in sizes}
            for turn, weights in enumerate(versions[1:]):
                changes = [a - b for a, b in zip(weights, out)]
                groups = [changes] if shared else [[one] for one in changes]
                both = [quantised(group, 3, value) for group in groups]
                values, codes = ([one for pair in both for one in pair[which]] for which in (0, 1))
                for name, size in sizes.items():
                    found[name][turn] = sum(map(size, codes))
                out = [one + some[code].reshape(one.shape) for one, some, code in zip(out, values, codes)]
            for name, all_sizes in found.items():
                where = "one table" if shared else "a table for each array"
                yield f"{where}, {value}, {name}", out, all_sizes


def measured(folder: Path, model: Perceptron, versions: list[Weights]) -> dict[str, Any]:
    """Each way: the ratio of the versions after the first, the ratio with it, the accuracy, and the relative error."""
    raw, first = nbytes(versions[0]), sum(map(shuffled, versions[0]))
    moved = sum(float(((a - b) ** 2).sum()) for a, b in zip(versions[-1], versions[0]))
    total = sum(float((a**2).sum()) for a in versions[-1])

    def told(weights: Weights, sizes: list[int]) -> dict[str, float]:
        away = sum(float(((a.astype("f8") - b) ** 2).sum()) for a, b in zip(weights, versions[-1]))
        return {
            "ratio": raw * VERSIONS / sum(sizes),
            "with the first": raw * (VERSIONS + 1) / (sum(sizes) + first),
            "accuracy": model.accuracy(weights),
            "of the change": (away / moved) ** 0.5,
            "relative error": (away / total) ** 0.5,
        }

    ways: dict[str, Any] = {}
    for bits in (2, 3, 4):
        with scratch(folder) as place:
            ways[f"LCDelta, {bits} bits"] = told(*(kept := archived(place, versions, {"weights/*": LCDelta(bits)})))
        if bits == 3:
            ways["top-n in the same bytes"] = told(*top(versions, kept[1]))
    ways["LCDelta, 3 bits, without feedback"] = told(*without_feedback(versions))
    ways["float16, shuffle and zstd"] = told(*halved(versions))
    ways["shuffle and zstd"] = told(*each_alone(versions))
    with scratch(folder) as place:
        ways["the archive's default, lossless differences"] = told(*archived(place, versions, "zstd"))
    others = {name: told(*found) for name, *found in choices(versions)}
    return {
        "committed": model.accuracy(versions[-1]),
        "first": model.accuracy(versions[0]),
        "ways": ways,
        "choices": others,
    }


# ---- throughput


def throughput(quick: bool) -> dict[str, Any]:
    """Seconds of processor time for 4 MiB of changes, of one thread."""
    rng, found = np.random.default_rng(0), {}
    for name in ("float32", "float64", "float16", "bfloat16"):
        count = (4 << 20) // {"float64": 8, "float32": 4}.get(name, 2)
        x, before = (rng.normal(size=count) * np.exp2(rng.integers(-8, 1, count)) for _ in range(2))
        if name == "bfloat16":
            arrays = [(one.astype("f4").view("u4") >> 16).astype("u2") for one in (x, before)]
        else:
            arrays = [one.astype(name) for one in (x, before)]
        kind = kind_of(arrays[0].dtype, name)
        assert kind is not None
        new, old = (one.view(np.uint8) for one in arrays)
        coder, times = Coder(), {"encode": list[float](), "decode": list[float]()}
        for _ in range(3 if quick else 60):
            begun = thread_time()
            buckets = Buckets()
            changes = buckets.add(kind, new, old)
            made, out, _ = coder.coded(kind, 3, buckets.kept(3), changes, new, old)
            times["encode"].append(thread_time() - begun)
            begun = thread_time()
            again = decoded(made, old)
            times["decode"].append(thread_time() - begun)
            assert np.array_equal(again, out)
        found[name] = {"bytes": new.nbytes, **times}
    change = (rng.normal(size=1 << 20)).astype("f4")
    times_of_numpy = []
    for _ in range(2 if quick else 20):
        begun = thread_time()
        (values,), (code,) = quantised([change], 3, "mean")
        change + values[code]
        packed(code)
        times_of_numpy.append(thread_time() - begun)
    found["float32, in numpy"] = {"bytes": change.nbytes, "encode": times_of_numpy, "decode": []}
    return found


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    results: dict[str, Any] = {"quick": options.quick, "priority": "normal priority", "sets": {}}
    results["throughput"] = throughput(options.quick)
    for name, one in results["throughput"].items():
        print(name, f"{one['bytes'] / statistics.median(one['encode']) / 1e6:.0f} MB/s", flush=True)
    for name in SETS:
        X, y = loaded(name)
        seeds = []
        for seed in range(1 if options.quick else 5):
            model = Perceptron(X, y, seed)
            versions = history(model)
            seeds.append(measured(parent(options, "memory"), model, versions))
            way = seeds[-1]["ways"]["LCDelta, 3 bits"]
            print(name, seed, f"{seeds[-1]['committed']:.4f}", f"{way['accuracy']:.4f} {way['ratio']:.1f}", flush=True)
        results["sets"][name] = {"rows": len(X), "features": X.shape[1], "bytes": nbytes(versions[0]), "seeds": seeds}
    save(options.raw, "lcdelta", results)


if __name__ == "__main__":
    main()
