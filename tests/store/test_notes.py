"""Message and attributes of a commit: committed with it, or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._catalog.names import NOTE_KEY
from tests.conftest import Medium
from tests.support.crashes import BUDGET, assert_survives, record
from tests.support.crashes_async import ASYNC

Open = Callable[..., pmstore.Store]

VALUES: dict[str, Any] = {
    "loss": 0.25,
    "step": 7,
    "name": "run",
    "flag": True,
    "none": None,
    "bytes": b"\0x",
    "list": [1, [2.5, "x"]],
    "dict": {"a": {"b": None}},
    "": 1 << 80,
}


def test_the_note_of_a_commit_that_failed_is_pending(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise pmstore.OutOfSpaceError("full")

    with open_store() as store:
        for end in (store.rollback, store.commit):
            with store.transaction(message="first"):
                store["x"] = 1
            for message in ("second", "third"):
                with monkeypatch.context() as patch:
                    patch.setattr(type(store._catalog.core), "commit", fail)
                    with pytest.raises(pmstore.OutOfSpaceError), store.transaction(message=message):
                        store["x"] = 2
                assert store.commit_note() == ("first", {})
            end()
            assert store.commit_note() == ("third" if store["x"] == 2 else "first", {})


def test_a_commit_says_what_its_transaction_was_given(open_store: Open) -> None:
    with open_store() as store:
        assert store.commit_note() is None
        with store.transaction(message="first", attributes=VALUES) as given:
            assert given is store and store.commit_note() is None
            store["x"] = 1
        assert store.commit_note() == pmstore.CommitNote("first", VALUES)
        assert type(store.commit_note().attributes["flag"]) is bool  # type: ignore[union-attr]
        with store.transaction(message="only a message"):
            pass
        assert store.commit_note() == ("only a message", {}) and store.sequence == 2
        with store.transaction(attributes={}):
            store["x"] = 2
        assert store.commit_note() == (None, {})
        with store.transaction(message=""):
            store["x"] = 3
        assert store.commit_note() == ("", {})
        with store.transaction():
            store["x"] = 4
        assert store.commit_note() is None  # the commit before had one
        with store.transaction(message="pending changes are not the commit"):
            store["x"] = 5
        store["x"] = 6
        assert store.commit_note() == ("pending changes are not the commit", {})
        store.commit()
        assert store.commit_note() is None


def test_notes_stay_when_the_store_is_closed_compacted_and_copied(open_store: Open, tmp_path: Path) -> None:
    long = {"text": "t" * 10_000, "numbers": list(range(3000))}
    with open_store() as store:
        store["gone"] = np.ones(200_000)
        store.commit()
        del store["gone"]
        with store.transaction(message="the last", attributes=long):
            store["x"] = np.arange(10.0)
        assert store.commit_note() == ("the last", long)
    with open_store(verify=True) as store:
        assert store.commit_note() == ("the last", long)
        store.backup(tmp_path / "copy.pm")
    assert pmstore.compact(store.path) > 0
    for path in (store.path, tmp_path / "copy.pm"):
        with pmstore.open(path, "r", verify=True) as store:
            assert store.commit_note() == ("the last", long) and list(store) == ["x"]
    with open_store(mode="r+") as store:
        store["y"] = 1
        store.commit()
        assert store.commit_note() is None and store.check().ok
    pmstore.salvage(store.path, tmp_path / "salvaged.pm")
    with pmstore.open(tmp_path / "salvaged.pm", "r", verify=True) as store:
        assert sorted(store) == ["x", "y"] and store.commit_note() is None


def test_notes_are_no_names(open_store: Open) -> None:
    with open_store() as store:
        store.create_list("list").extend([1, 2, 3])
        store["m"] = 1
        with store.transaction(message="note", attributes={"n": 1}):
            store["commit-note"] = 2
        assert len(store) == 3 and list(store) == ["commit-note", "list", "m"]
        assert str(store).count("note") == repr(store).count("note") + 1 and store.check().ok
        assert len(store.group("m")) == 0
        store.clear()
        with store.transaction(message="empty"):
            pass
        assert len(store) == 0 and list(store) == [] and store.commit_note() == ("empty", {})


def test_the_innermost_that_begins_last_is_committed(open_store: Open) -> None:
    with open_store() as store:
        with store.transaction(message="outer"):
            store["x"] = 1
            with store.transaction():
                store["y"] = 1
        assert store.commit_note() == ("outer", {})
        with store.transaction(message="outer"):
            with store.transaction(message="one"):
                store["x"] = 2
            with store.transaction(attributes={"two": 2}), store.transaction(message="three"):
                store["x"] = 3
            store["y"] = 2
        assert store.commit_note() == ("three", {})
        with store.transaction():
            store["x"] = 4
        assert store.commit_note() is None  # nothing of it stays with the lock


def test_a_rollback_takes_the_note_back(open_store: Open) -> None:
    with open_store() as store:
        with store.transaction(message="kept"):
            store["x"] = 1
        with pytest.raises(ZeroDivisionError), store.transaction(message="lost"):
            store["x"] = 2
            1 / 0  # noqa: B018
        assert store.commit_note() == ("kept", {}) and store.sequence == 1 and store["x"] == 1
        with pytest.raises(pmstore.TransactionError), store.transaction(message="doomed"):
            try:
                with store.transaction(message="inner"):
                    raise KeyError
            except KeyError:
                pass
        assert store.commit_note() == ("kept", {})
        store["x"] = 3
        store.commit()
        assert store.commit_note() is None


class Odd:
    pass


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"message": 1}, "a message is a str, not int"),
        ({"message": b"x"}, "a message is a str, not bytes"),
        ({"attributes": [1]}, "attributes are a dict of str to values, not list"),
        ({"attributes": {1: 2}}, "name of an attribute is a str, not int"),
        ({"attributes": {"a": Odd()}}, "the attribute 'a': a store can't keep .*Odd"),
        ({"attributes": {"a": {"deep": {Odd()}}}}, "the attribute 'a': a store can't keep .*Odd"),
    ],
)
def test_what_can_not_be_said_is_refused_before_the_transaction(
    open_store: Open, given: dict[str, Any], match: str
) -> None:
    with open_store() as store:
        with pytest.raises(TypeError, match=match):
            store.transaction(**given)
        assert not store.in_transaction and store.sequence == 0
        store["x"] = 1


def test_attributes_are_those_of_the_call(open_store: Open) -> None:
    attributes = {"list": [1]}
    with open_store() as store:
        with store.transaction(attributes=attributes):
            attributes["list"].append(2)
        note = store.commit_note()
        assert note is not None and note.attributes == {"list": [1]}
        note.attributes["list"].append(3)
        assert store.commit_note() == (None, {"list": [1]})


def test_with_a_declared_write_set(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMSTORE_DEBUG", "1")
    with open_store() as store:
        a = store.create_array("a", 20_000)
        store.commit()
        for k, attributes in enumerate(({}, {"long": "x" * 5000}, {"short": 1}), 1):
            with store.transaction(only=[a[5:9]], message=f"{k}", attributes=attributes):
                a[5:9] = k
            assert store.commit_note() == (f"{k}", attributes)


def test_snapshots_show_the_note_of_their_commit(open_store: Open) -> None:
    with open_store() as store, open_store(mode="r", exclusive=False) as reader:
        assert reader.commit_note() is None
        for k in range(3):
            with store.transaction(message=f"number {k}", attributes={"pad": "x" * 3000 * k}):
                store["k"] = k
            assert reader.refresh() == k + 1 and reader.commit_note() == (f"number {k}", {"pad": "x" * 3000 * k})
        store["k"] = 9
        store.commit()
        assert reader.commit_note() == ("number 2", {"pad": "x" * 6000})
        reader.refresh()
        assert reader.commit_note() is None


def test_stores_that_can_not_change(open_store: Open) -> None:
    with open_store() as store, store.transaction(message="written"):
        store["x"] = 1
    with pytest.raises(pmstore.ClosedStoreError):
        store.commit_note()
    with pytest.raises(pmstore.ClosedStoreError), store.transaction(message="closed"):
        pass
    with open_store(mode="r") as store:
        assert store.commit_note() == ("written", {})
        with pytest.raises(pmstore.ReadOnlyStoreError), store.transaction(message="read-only"):
            pass


def test_in_a_fork(open_store: Open) -> None:
    with open_store() as store:
        with store.transaction(message="before the fork"):
            store["x"] = 1
        read, write = os.pipe()
        pid = os.fork()
        if not pid:  # no test may go on in the child
            answer = b"0"
            try:
                try:
                    with store.transaction(message="in the child"):
                        pass
                except pmstore.ForkedStoreError:
                    answer = b"1" if store.commit_note() == ("before the fork", {}) else b"2"
            finally:
                os.write(write, answer)
                os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 1) == b"1"
        os.close(read)
        os.close(write)
        assert store.commit_note() == ("before the fork", {})


def test_each_thread_has_its_own(open_store: Open) -> None:
    with open_store() as store:
        found: set[tuple[Any, Any]] = set()

        def run(me: int) -> None:
            for i in range(30):
                with store.transaction(message=f"{me}", attributes={"i": i}):
                    store[f"{me}"] = i
                    store["who"] = me, i
                note = store.read("who")
                found.add(note)

        threads = [threading.Thread(target=run, args=(me,)) for me in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        who, i = store["who"]
        assert store.commit_note() == (f"{who}", {"i": i}) and store.sequence == 90


def test_a_note_without_space_leaves_what_is_pending(open_store: Open) -> None:
    with open_store(mode="x", max_size=4 << 20) as store:
        store["x"] = 1
        store.commit()
        with pytest.raises(pmstore.OutOfSpaceError), store.transaction(attributes={"large": b"x" * (5 << 20)}):
            store["x"] = 2
        assert store["x"] == 2 and store.commit_note() is None and not store.in_transaction
        store.commit()
        assert store.commit_note() is None and store["x"] == 2
        with store.transaction(message="after"):
            store["x"] = 3
        assert store.commit_note() == ("after", {}) and store.check().ok


@pytest.mark.parametrize("damage", [b"", b"\1", bytes(8), (3).to_bytes(8, "little") + b"\xc1"])
def test_damaged_notes(open_store: Open, damage: bytes) -> None:
    """A manipulated file has bytes that no transaction wrote."""
    with open_store() as store:
        catalog = store._catalog
        catalog.core.put(NOTE_KEY, pmstore._core.Entry(0, 0, 2, 0, damage))
        store["x"] = 1
        store.commit()
        store["x"] = 2
        store.commit()
        store["x"] = 3
        store.commit()
        if damage == bytes(8):
            assert store.commit_note() is None and store.check().ok
            return
        with pytest.raises(pmstore.CorruptStoreError):
            store.commit_note()
        assert "note of the last commit" in str(store.check()) and len(store) == 1
        with store.transaction(message="sound again"):
            pass
        assert store.check().ok and store.commit_note() == ("sound again", {})


# ---- crashes


def noted(store: pmstore.Store) -> None:
    """Each commit has a value and a note that belong together; some have none."""
    x = store.create_array("x", 700)
    store.commit()
    for k in range(1, 8):
        x[k * 50 :] = k
        if k % 3 == 0:
            store.commit()
        else:
            with store.transaction(message=f"{k}", attributes={"k": k, "pad": "p" * (k % 2 * 3000)}):
                pass


def assert_note_fits(store: pmstore.Store) -> None:
    note = store.commit_note()
    if "x" not in store:
        assert note is None
        return
    k = int(store["x"].max())
    assert note == ((f"{k}", {"k": k, "pad": "p" * (k % 2 * 3000)}) if k % 3 else None)


def test_I1_a_crash_leaves_changes_and_note_or_neither(crash_explorer: Any) -> None:
    crash_explorer.run(noted, check=assert_note_fits, budget=BUDGET)


def test_commits_that_are_durable_later(tmp_path: Path) -> None:
    assert_survives(record(tmp_path / "store.pm", "file", noted, **ASYNC))


def test_a_kill_between_leaves_both_or_neither(medium: Medium, child: Any) -> None:
    path = medium.directory / "store.pm"
    other = child(
        """
        import sys, pmstore
        store = pmstore.open(sys.argv[1])
        k = 0
        while True:
            k += 1
            with store.transaction(message=f"{k}"):
                store["k"] = k
            if k == 50:
                print("ready", flush=True)
        """,
        path,
    )
    assert other.line() == "ready"
    other.process.kill()
    other.process.wait()
    with pmstore.open(path) as store:
        assert store.commit_note() == (f"{store['k']}", {}) and store.sequence == store["k"] >= 50
