"""MNIST's images: from a local file, or from openml.org. There is no substitute if neither works."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import fetch_openml


class NoImages(Exception):
    """The requested images don't exist; the text has a remedy."""


def fetch_mnist() -> Any:
    """All 70,000 images as rows of float64, from openml.org."""
    try:
        images = fetch_openml("mnist_784", version=1, as_frame=False, parser="liac-arff").data
    except OSError as error:
        raise NoImages(
            f"openml.org can't be reached ({error}). Get MNIST elsewhere and give the file: --mnist FILE"
        ) from error
    return np.ascontiguousarray(images, dtype=float)


def read_mnist(path: Path) -> Any:
    """Rows of float64 from an .npz with an array of images, or from an IDX file, gzipped or not."""
    try:
        images = _read_npz(path) if path.suffix == ".npz" else _read_idx(path)
    except (OSError, ValueError, KeyError, EOFError, struct.error) as error:
        raise NoImages(f"{path} holds no images that this program can read: {error}") from error
    return images.reshape(len(images), -1).astype(float)


def _read_npz(path: Path) -> Any:
    with np.load(path, allow_pickle=False) as arrays:
        for name in ("x", "data", "X", "x_train", "images"):
            if name in arrays and arrays[name].ndim > 1:
                return arrays[name]
        raise KeyError(f"none of its arrays ({', '.join(arrays)}) is called x, data, X, x_train or images")


def _read_idx(path: Path) -> Any:
    """IDX: two zero bytes, the type (8: unsigned bytes), the number of dimensions, the dimensions, big-endian."""
    with path.open("rb") as file:
        contents = file.read()
    if contents[:2] == b"\x1f\x8b":
        contents = gzip.decompress(contents)
    zeros, kind, dimensions = struct.unpack_from(">HBB", contents)
    if (zeros, kind) != (0, 8) or dimensions < 2:
        raise ValueError("it is no IDX file of images")
    shape = struct.unpack_from(f">{dimensions}I", contents, 4)
    return np.frombuffer(contents, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
