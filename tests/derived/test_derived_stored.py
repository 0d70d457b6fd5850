"""What the store keeps of derived arrays, how that is decided, and how a value is known again."""

from __future__ import annotations

import itertools
import logging
import types

import numpy as np
import pytest

import pmstore
from pmstore._derived.decision import decide
from tests.support.derivations import CALLS, doubled, table

DRIFT = [0.0]


one_medium = pytest.mark.parametrize("medium", ["memory"], indirect=True)


@pytest.fixture(autouse=True)
def calls():
    CALLS.clear()
    return CALLS


def unstable(x):
    return x + DRIFT[0]


# ---- what is stored


def test_recompute_stores_the_declaration_alone(open_store, calls):
    with open_store() as store:
        store["x"] = np.ones((100, 1000))
        store.commit()
        before = store.stats()
        y = store.derive("y", doubled, "x", policy="recompute")
        assert y.value[0, 0] == 2 and y.decision.policy == "recompute" and y.decision.recompute_seconds is None
        store.commit()
        after = store.stats()
        assert after.bytes_written - before.bytes_written < 1 << 16 and after.region_used == before.region_used
        assert y[0, 0] == 2 and calls == ["doubled"]
        store.commit()
        assert store.sequence == after.sequence  # reading has changed nothing
    with open_store() as store:
        assert store.derive("y", doubled, "x", policy="recompute")[0, 0] == 2 and calls == ["doubled"] * 2


def test_stored_values_are_loaded_if_they_fit(open_store, calls):
    with open_store() as store:
        x = table(store)
        y = store.derive("y", doubled, "x", policy="store")
        assert y[0, 1] == 2
    with open_store() as store:
        y, x = store.derive("y", doubled, "x", policy="store"), store["x"]
        assert y.valid and y[0, 1] == 2 and calls == ["doubled"]
        x[0, 1] = 5  # committed without a look at y: what is stored is not that of x
    with open_store() as store:
        y = store.derive("y", doubled, "x", policy="store")
        assert not y.valid and y[0, 1] == 10 and calls == ["doubled"] * 2
        store.rollback()  # takes what was stored back, too
        assert y[0, 1] == 10 and calls == ["doubled"] * 2
    with open_store() as store:
        y = store.derive("y", doubled, "x", policy="recompute")
        assert y[0, 1] == 10 and "not stored" in str(store)


def test_a_damaged_stored_value_is_recomputed(open_store, medium, caplog):
    with open_store() as store:
        store["x"] = np.full(3000, 1.25)
        store.derive("y", doubled, "x", policy="store").value  # noqa: B018
    path = medium.directory / "store.pm"
    contents = path.read_bytes()
    where = contents.index(np.full(3000, 2.5).tobytes())
    path.write_bytes(contents[: where + 8] + b"\1" + contents[where + 9 :])
    with open_store() as store:
        assert {problem.name for problem in store.check()} == {"y"}
        assert (store.derive("y", doubled, "x", policy="store").value == 2.5).all()
        assert "damaged" in caplog.text
    with open_store(mode="r") as store:
        assert store.check().ok


@pytest.mark.parametrize("interrupted", ["put_array", "put_encoded"])
def test_I16_an_interrupt_leaves_no_wrong_value(open_store, monkeypatch, interrupted):
    with open_store() as store:
        x = table(store)
        y = store.derive("y", doubled, "x", policy="store")
        old, _ = x.copy(), y.value
        store.commit()
        x += 1

        def interrupt(*arguments):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(store._catalog), interrupted, interrupt)
            y.value  # noqa: B018
        store.commit()
    for now in (old + 1, old):
        with open_store() as store:
            store["x"] = now
            assert np.array_equal(store.derive("y", doubled, "x", policy="store"), now * 2)
            store.rollback()


def test_a_full_store_hands_the_value_out(open_store, caplog):
    with open_store(max_size=1 << 21) as store:
        store["x"] = np.ones(60_000)
        y = store.derive("y", doubled, "x", policy="store")
        store.commit()
        with pytest.raises(pmstore.OutOfSpaceError):
            for n in range(40):
                store[f"z{n}"] = np.ones(10_000)
        assert y.value.sum() == 120_000 and "'y' is not stored, and will be recomputed" in caplog.text
        assert y.value.sum() == 120_000
        store.rollback()


def test_decisions_rest_on_costs_and_do_not_flap():
    def policy(before, compute):  # in ms, for 1 MiB that takes 1 ms to write
        return decide(before, compute / 1000, 1 << 20, lambda: 1e-3 / (1 << 20))

    assert policy(None, 90).policy == "recompute"  # 90 commits pay for it
    assert policy(None, 110).policy == "store"
    for before, compute in (("store", 90), ("recompute", 110), ("store", 51), ("recompute", 199)):
        assert policy(before, compute).policy == before
    assert policy("store", 49).policy == "recompute"
    found = policy("recompute", 201)
    assert found.policy == "store" and "201 ms" in found.reason and "1.0 MiB" in found.reason
    assert (found.recompute_seconds, found.write_seconds) == (0.201, 1e-3)
    unnoticed = decide(None, 0.9e-3, 8, lambda: pytest.fail("it needn't be measured"))
    assert unnoticed.policy == "recompute" and unnoticed.write_seconds is None


def test_auto_decides_says_so_and_remembers(open_store, monkeypatch, caplog, calls):
    clock = itertools.count(0.0, 5.0)  # each call seems to take 5 s
    monkeypatch.setattr("pmstore._derived.derived.time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    with open_store() as store, caplog.at_level(logging.INFO, "pmstore"):
        table(store)
        y = store.derive("y", doubled, "x")
        assert y.decision == pmstore.Decision("recompute", "nothing was measured yet")
        y.value  # noqa: B018
        assert y.decision.policy == "store" and y.decision.recompute_seconds == 5 and y.decision.write_seconds > 0
        assert "'y': policy store: recomputing takes 5 s" in caplog.text
    with open_store() as store:
        y = store.derive("y", doubled, "x")
        assert y.decision.policy == "store" and y.decision.recompute_seconds == 5
        assert y.valid and y[0, 1] == 2 and calls == ["doubled"]


def test_set_declares_a_value_valid(open_store, calls):
    with open_store() as store:
        x = table(store)
        y = store.derive("y", doubled, "x", policy="store")
        with store.transaction():
            x += 1
            mine = x * 2
            y.set(mine)
        mine[:] = 0
        assert y[0, 0] == 2
        frozen = x * 2
        frozen.flags.writeable = False
        y.set(frozen)
        assert np.shares_memory(y.value, frozen)
        with pytest.raises(pmstore.DerivedArrayError, match="was given a list"):
            y.set([1])
        x += 1
        assert not y.valid
        y.set(x * 2)
    with open_store() as store:
        assert store.derive("y", doubled, "x", policy="store")[0, 0] == 4 and calls == []


# ---- verifying


@one_medium
def test_verify_by_hash(open_store):
    for life, drift in enumerate([0.0, 0.0, 1e-9]):
        DRIFT[0] = drift
        with open_store() as store:
            store["x"] = np.arange(100.0)
            y = store.derive("y", unstable, "x", policy="recompute", verify="hash")
            if life < 2:
                assert y[1] == 1
                continue
            for _ in range(2):  # it stays an error
                with pytest.raises(pmstore.NonDeterministicError, match=r"'y' had another value .*:unstable is not"):
                    y.value  # noqa: B018
            y = store.derive("y", unstable, "x", version=2, verify="hash", replace=True)
            assert y[1] == 1 + 1e-9


PADDED = np.dtype([("flag", "u1"), ("number", "f8")], align=True)
PADDING = [0]


def padded(x, given):
    """The same elements each time, with other bytes in their padding."""
    assert np.array_equal(x, given)
    PADDING[0] += 1
    made = np.full(len(x) * PADDED.itemsize, PADDING[0], "u1").view(PADDED)
    made["flag"], made["number"] = x["flag"], x["number"] + 1
    return made


@one_medium
def test_padding_of_elements_does_not_count(open_store, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PADDING", [0])
    for life in range(3):
        rows = np.full(5 * PADDED.itemsize, 10 + life, "u1").view(PADDED)
        rows["flag"], rows["number"] = 1, np.arange(5.0)
        with open_store() as store:
            if life == 0:
                store["x"] = rows
            kept = store.derive("kept", padded, "x", rows, policy="store", verify="hash")
            again = store.derive("again", padded, "x", rows, policy="recompute", verify="hash")
            assert kept["number"][4] == again["number"][4] == 5
            assert PADDING[0] == 2 + life  # the stored one was computed once


CHANGE = [lambda x: x]


def changed(x):
    return CHANGE[0](x)


@one_medium
def test_verify_by_tolerance(store, monkeypatch):
    monkeypatch.setattr(f"{__name__}.CHANGE", CHANGE.copy())
    x = np.arange(100.0)
    store["x"], other = x, x + 1
    y = store.derive("y", changed, "x", policy="recompute", verify=(1e-6, 0.0))
    for change, caught in (
        (lambda x: x * (1 + 1e-9), ""),
        (lambda x: x * 1.001, "the sum is"),
        (lambda x: x[::-1].copy(), "a sampled element is 99.0 and not 0.0"),
        (lambda x: np.where(x == 50.0, np.nan, x), "100 numbers, 99 of them finite, and not 100 and 100"),
        (lambda x: np.where(x == 99.0, 99.001, x), "the largest is 99.001"),
        (lambda x: x[:-1].copy(), "99 numbers"),
        (lambda x: x.astype("c16") * 1j, "200 numbers"),
    ):
        CHANGE[0] = np.array
        y.value  # noqa: B018
        CHANGE[0] = change
        # Another handle knows nothing of the value.
        del store._derived.declared["y"]
        y = store.derive("y", changed, "x", policy="recompute", verify=(1e-6, 0.0))
        if caught:
            with pytest.raises(pmstore.NonDeterministicError, match=f"'y' had another value .*{caught}"):
                y.value  # noqa: B018
        else:
            assert y[1] == pytest.approx(1)
        store["x"], x, other = other, other, x


@one_medium
def test_a_tolerance_needs_numbers(store):
    y = store.derive("y", np.asarray, np.array(["a"]), verify=0.1)
    with pytest.raises(pmstore.DerivedArrayError, match="can't be verified: a tolerance needs numbers"):
        y.value  # noqa: B018
    for wrong in ("sum", -1.0, (1, 2, 3), True, float("nan")):
        with pytest.raises(ValueError, match="verify is"):
            store.derive("z", doubled, "x", verify=wrong)


def test_names_of_numpy_are_plain_text(open_store):
    with open_store() as store:
        y = store.derive("y", np.cov, np.ones((3, 2)), kwargs={np.str_("rowvar"): False})
        assert y.value.shape == (2, 2)
        store.commit()
        assert store.check().ok and dict(store)["y"].shape == (2, 2)
