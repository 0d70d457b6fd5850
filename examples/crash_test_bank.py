"""A crash test of one's own: pytest examples/crash_test_bank.py

Money moves between accounts; whatever crash comes, the sum stays. Each transfer is one transaction: take the with
statement away, commit after each line, and see the test fail. docs/crash-testing.md explains what it then prints.
"""

from __future__ import annotations

import numpy as np

import pmstore
import pmstore.testing

ACCOUNTS, MONEY = 8, 100


def open_bank(store: pmstore.Store) -> None:
    """All accounts at once, each with the same money."""
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
    """What holds in every store that a crash can leave."""
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
    """The first life is killed in the middle of a transfer, and the second one goes on."""

    def first(store: pmstore.Store) -> None:
        open_bank(store)
        transfer(store, 0, 1, 30)
        store["accounts"][2] -= 10  # killed

    def second(store: pmstore.Store) -> None:
        assert store["accounts"][2] == MONEY
        transfer(store, 1, 2, 50)

    print(crash_explorer.run(first, second, check=check, budget=500))
