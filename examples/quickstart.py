"""Count the runs of this program, in a file that stays consistent through crashes."""

import numpy as np

import pmstore

with pmstore.open("quickstart.pm") as store:
    history = store.require_array("history", shape=(1000,), dtype="f8")
    with store.transaction():
        runs = store.get("runs", 0)
        history[runs % len(history)] = np.random.default_rng().normal()  # these two change together, or neither does
        store["runs"] = runs + 1
    print(f"This program ran {store['runs']} times; mean of what it drew: {history[: runs + 1].mean():+.3f}")
