"""Cluster handwritten digits. Interrupt it (Ctrl-C, kill -9) and run it again: it continues after the last commit."""

import logging

from sklearn.datasets import load_digits

from pmstore.cluster import KMeans

logging.basicConfig(level=logging.INFO, format="%(message)s")

X, digits = load_digits(return_X_y=True)
model = KMeans(n_clusters=10, n_init=300, random_state=0, store="digits.pm", name="digits")
model.fit(X)
print(f"inertia {model.inertia_:.1f}, found after {model.resumed_from_run_} runs that earlier processes had done")
