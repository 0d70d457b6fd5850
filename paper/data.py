"""The data: MNIST or a stand-in that is called one, spectrogram frames of made music, and scikit-learn's digits.

All are rows of float64. MNIST is real only if a file or openml.org was asked for; nothing is fetched otherwise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _common import Array
from sklearn.datasets import load_digits

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # whose demo reads MNIST too

from mnist import NoImages, fetch_mnist, read_mnist

__all__ = ["BANDS", "Data", "NoImages", "add_options", "digits", "load", "mnist", "music"]

RATE, WINDOW, HOP, BANDS = 11_025, 1024, 512, 128  # samples in a second, in a frame, between frames; bands kept
PITCHES, NOTES_A_FRAME, SOUNDING = 60, 0.5, 12  # SOUNDING: frames that a note lasts


class Data(NamedTuple):
    """One data set. what: one line about where it is from, for every table that shows its figures."""

    name: str
    what: str
    X: Array


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where MNIST comes from."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--mnist", type=Path, metavar="FILE", help="MNIST's images: .npz, or IDX, gzipped or not")
    source.add_argument("--openml", action="store_true", help="fetch MNIST from openml.org")


def mnist(options: argparse.Namespace, rows: int) -> Data:
    """The first images, at most `rows` of them, with values from 0 to 1."""
    if options.mnist or options.openml:
        X = fetch_mnist() if options.openml else read_mnist(options.mnist)
        source = "openml.org" if options.openml else options.mnist.name
        return Data("MNIST", f"real: the first of {len(X):,} images from {source}", X[:rows] / 255)
    return Data("synthetic, MNIST's shape", "synthetic: random mixtures of 20 random images", _images(rows))


def _images(rows: int) -> Array:
    # Mixtures, so that clusters are none too clear and a fit goes on for a while; the noise gives them full rank.
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, 20)) @ rng.normal(0, 0.16, (20, 784))
    X += 0.02 * rng.standard_normal(X.shape)
    return np.clip(X, 0, 1, out=X)


def music(rows: int) -> Data:
    """Log-spectrogram frames of random notes, each a sum of decaying harmonics."""
    rng = np.random.default_rng(1)
    time = np.arange(SOUNDING * HOP) / RATE
    pitches = 55 * 2 ** (np.arange(PITCHES) / 12)  # five octaves from A1
    notes = np.zeros((PITCHES, len(time)))
    for harmonic in range(1, 9):
        below = harmonic * pitches < RATE / 2  # what is above would come back as another tone
        waves = np.sin(2 * np.pi * harmonic * pitches[below, None] * time)
        notes[below] += waves * np.exp(-3 * harmonic**0.5 * time) / harmonic
    sound = 0.001 * rng.standard_normal((rows + SOUNDING) * HOP + WINDOW)
    for onset in rng.integers(0, rows * HOP, int(rows * NOTES_A_FRAME)):
        sound[onset : onset + len(time)] += rng.uniform(0.2, 1) * notes[rng.integers(PITCHES)]
    window = np.hanning(WINDOW)
    frames = np.lib.stride_tricks.sliding_window_view(sound, WINDOW)[::HOP][:rows]
    X = np.empty((rows, BANDS))
    for at in range(0, rows, 1024):
        spectrum = np.fft.rfft(frames[at : at + 1024] * window)[:, 1 : BANDS + 1]
        X[at : at + 1024] = np.log1p(np.abs(spectrum) ** 2) / 10
    what = f"synthetic: log-spectrogram frames, {BANDS} bands, of random notes of eight decaying harmonics"
    return Data("synthetic, MusicNet-like", what, X)


def digits() -> Data:
    """The handwritten digits that come with scikit-learn, from 0 to 1."""
    return Data("digits", "real: the 1,797 handwritten digits that come with scikit-learn", load_digits().data / 16)


def load(options: argparse.Namespace, large: int, middle: int) -> list[Data]:
    """All three. large, middle: rows of the first and the second."""
    return [mnist(options, large), music(middle), digits()]
