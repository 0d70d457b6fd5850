"""Train a network on handwritten digits, batch by batch. Interrupt it (Ctrl-C, kill -9) and run it again: it
continues."""

import logging

import numpy as np
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

import pmstore

logging.basicConfig(level=logging.INFO, format="%(message)s")  # prints where it continues

X, digits = load_digits(return_X_y=True)
X, tests, digits, answers = X[:1500] / 16, X[1500:] / 16, digits[:1500], digits[1500:]
batches = [(X[i : i + 50], digits[i : i + 50]) for i in range(0, len(X), 50)]

model = pmstore.partial_fit(
    MLPClassifier((100,), random_state=0), batches, store="mlp.pm", name="digits", epochs=100, classes=np.arange(10)
)
print(f"{model.score(tests, answers):.1%} of digits that it has not seen, after {model.t_ // len(X)} epochs")
