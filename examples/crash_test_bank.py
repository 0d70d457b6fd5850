"""An example of a crash test: pytest examples/crash_test_bank.py

Money moves between accounts, and the sum is the same after every crash. Each transfer is one transaction. Remove the
with statement and commit after each line to see the test fail. docs/crash-testing.md explains its output.
"""

from __future__ import annotations

import numpy as np

import pmstore
import pmstore.testing

ACCOUNTS, MONEY = 8, 100


def open_bank(store: pmstore.Store) -> None:
    """Create all accounts at once, each with the same money."""
    store["accounts"] = np.full(ACCOUNTS, MONEY)
    store.commit()


def transfer(store: pmstore.Store, payer: int, payee: int, amount: int) -> None:
    """Both accounts and the journal change together."""
    accounts = store["accounts"]
    with store.transaction():
        accounts[payer] -= amount
        accounts[payee] += amount
        store["transfers"] = store.get("transfers", 0) + 1


def check(store: pmstore.Store, crash: pmstore.testing.Crash) -> None:
    """The condition that holds after every crash."""
    if "accounts" not in store:
        assert crash.acknowledged == 0, "the bank was open, and is gone"
        return
    assert store["accounts"].sum() == ACCOUNTS * MONEY
    assert store.get("transfers", 0) >= crash.acknowledged - 1


@pmstore.testing.crash_test(check=check)
def test_transfers(store: pmstore.Store) -> None:
    """Some transfers, the same ones every time."""
    rng = np.random.default_rng(1)
    open_bank(store)
    for _ in range(4):
        payer, payee = rng.choice(ACCOUNTS, 2, replace=False)
        transfer(store, int(payer), int(payee), int(rng.integers(1, 50)))


def test_a_restart(crash_explorer: pmstore.testing.CrashExplorer) -> None:
    """The first run is killed in the middle of a transfer, and the second one continues."""

    def first(store: pmstore.Store) -> None:
        open_bank(store)
        transfer(store, 0, 1, 30)
        store["accounts"][2] -= 10  # the kill comes here

    def second(store: pmstore.Store) -> None:
        assert store["accounts"][2] == MONEY
        transfer(store, 1, 2, 50)

    print(crash_explorer.run(first, second, check=check, budget=500))
