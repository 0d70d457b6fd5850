"""Take handwritten digits apart into strokes: a matrix factorization whose state is in a store.

Interrupt it (Ctrl-C, kill -9) and run it again: it continues after the last commit, and ends with the same bits as
without the interruption. Run it a third time: it loads the result.

The algorithm is that of D. D. Lee and H. S. Seung, "Algorithms for non-negative matrix factorization", NIPS 2000:
X ≈ W H, improved by multiplying W and H by non-negative factors.
"""

import logging

import numpy as np
from sklearn.datasets import load_digits

import pmstore


class NMF(pmstore.Resumable):
    """W (n, k) and H (k, d), all non-negative, such that W H is near X (n, d)."""

    max_iter = 400

    def __init__(self, X, k, *, tolerance=1e-4, seed=0):
        self.X, self.k, self.tolerance, self.seed = X, k, tolerance, seed

    def fingerprint(self):
        return {"X": self.X, "k": self.k, "tolerance": self.tolerance, "seed": self.seed}

    def fields(self):
        (n, d), k = self.X.shape, self.k
        return [
            pmstore.Field("W", (n, k)),
            pmstore.Field("H", (k, d)),
            pmstore.Field("error"),  # of the last iteration, relative to X
            pmstore.Field("gain"),  # over the one before
        ]

    def start(self):
        rng = np.random.default_rng(self.seed)
        self.state.W = rng.uniform(0.1, 1, self.state.W.shape)
        self.state.H = rng.uniform(0.1, 1, self.state.H.shape)
        self.state.error = np.inf

    def step(self):
        X, W, H = self.X, self.state.W, self.state.H  # the arrays in the store: their changes are committed
        H *= (W.T @ X) / (W.T @ W @ H + 1e-12)
        W *= (X @ H.T) / (W @ (H @ H.T) + 1e-12)
        error = np.linalg.norm(X - W @ H) / np.linalg.norm(X)
        self.state.gain = self.state.error - error
        self.state.error = error
        return {"objective": error}  # for pmstore.history

    def converged(self):
        return self.state.gain < self.tolerance


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    algorithm = NMF(load_digits().data, k=16)
    result = algorithm.run(store="nmf.pm", name="digits", commit_every=1)
    print(f"{result.iteration} iterations, of which earlier processes had done {algorithm.resumed_from_iter_}")
    print(f"error {result.error!r}, brightest stroke: row {int(result.H.sum(axis=1).argmax())} of H")
