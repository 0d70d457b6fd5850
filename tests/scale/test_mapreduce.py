"""MapReduce: the same bits on any engine, errors that name shard and worker, and the store keeps the last epoch."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scale import Engine, Lost, Processes, Reply, Serial, Tag, shards_of
from pmstore.scale._epochs import Epochs
from pmstore.scale._holder import Describe
from pmstore.scale._tree import Tree
from tests.support.sharded import (
    EPOCHS,
    Always,
    At,
    Once,
    Unreadable,
    Walk,
    killed,
    load_once_broken,
    result,
    rows,
    several,
)


class Shuffled(Serial):
    """Answers in another order, and each question twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)

    def completed(self, timeout: float | None) -> list[Reply | Lost]:
        self._rng.shuffle(self._asked)  # type: ignore[arg-type]
        replies = list(super().completed(timeout))
        return replies * 2


# ---- results


@pytest.mark.parametrize("engine", [Serial(), Shuffled(1), Shuffled(2)], ids=["serial", "shuffled-1", "shuffled-2"])
def test_I32_the_order_of_replies_changes_nothing(engine: Engine, undisturbed: bytes) -> None:
    assert result(Walk(several()).run(engine=engine)) == undisturbed


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_give_the_same_bits(workers: int, undisturbed: bytes, path: Path, new_workers: None) -> None:
    walk = Walk(several())
    assert result(walk.run(path, "walk", engine=workers)) == undisturbed
    assert list(walk.history_["iteration"]) == list(range(1, EPOCHS + 1))
    assert not walk.history_["lost"].any()


def test_arrays_in_f_order_give_the_same_bits_on_any_engine() -> None:
    array = np.asfortranarray(np.random.default_rng(0).normal(size=(3000, 4)))
    for data in (array, [array[:1000], array[1000:]]):
        assert result(Walk(data).run(engine=1)) == result(Walk(data).run(engine=Serial()))
        assert all(shard().flags.contiguous for shard in shards_of(data))


def test_a_finished_fit_is_loaded_without_a_map(path: Path, undisturbed: bytes, tmp_path: Path) -> None:
    Walk(several()).run(path, "walk", engine=Serial())
    again = Walk(several(), Always("raise"))
    assert result(again.run(path, "walk", engine=Serial())) == undisturbed
    assert again.resumed_from_iter_ == EPOCHS


def test_I31_an_attempt_goes_on_after_the_last_epoch(path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    stopped = Walk(several(), in_update=At(3, Once(tmp_path / "once", "raise")))
    with pytest.raises(ConnectionError):
        stopped.run(path, "walk", engine=Serial())
    with pmstore.open(path, "r") as store:
        progress = store["walk/progress"]
        assert (progress["attempt"], progress["epoch"], progress["iteration"]) == (1, 3, 3)
    again = Walk(several())
    state = again.run(path, "walk", engine=Serial())
    assert again.resumed_from_iter_ == 3
    assert (state.attempt, state.epoch) == (2, EPOCHS)
    assert result(state) == undisturbed


def test_random_numbers_follow_from_seed_epoch_and_shard() -> None:
    drawn = {}

    class Draw(Walk):
        max_iter = 2

        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
            drawn[self.seed, int(shared["shift"]), len(shard)] = rng.integers(2**60)
            return {"sums": np.ones((3, 4)), "counts": np.ones(3, int)}

        def update(self, total: Mapping[str, Any]) -> None:
            self.state.shift += 1

    for seed in (0, 1):
        draw = Draw(several(2))
        draw.seed = seed
        draw.run(engine=Serial())
    assert len(set(drawn.values())) == len(drawn) == 8
    expected = np.random.default_rng(np.random.SeedSequence(1, spawn_key=(1, 0))).integers(2**60)
    assert drawn[1, 1, 30] == expected


def test_a_tree_is_fixed_by_the_numbers_of_its_leaves() -> None:
    orders = np.random.default_rng(0)
    for leaves in range(1, 20):
        shapes = set()
        for _ in range(6):
            tree: Tree[str] = Tree(leaves, lambda left, right: f"({left} {right})")
            for leaf in orders.permutation(leaves):
                tree.put(int(leaf), str(leaf))
            shapes.add(tree.root())
        (shape,) = shapes
        assert [int(leaf) for leaf in shape.replace("(", " ").replace(")", " ").split()] == list(range(leaves))


def test_a_node_takes_the_place_of_its_leaves() -> None:
    def joined(left: str, right: str) -> str:
        return f"({left} {right})"

    for leaves in range(1, 20):
        whole: Tree[str] = Tree(leaves, joined)
        for leaf in range(leaves):
            whole.put(leaf, str(leaf))
        for first in range(leaves):
            for count in range(1, leaves - first + 1):
                tree: Tree[str] = Tree(leaves, joined)
                part: Tree[str] = Tree(leaves, joined)
                for leaf in range(first, first + count):
                    part.put(leaf, str(leaf))
                assert tree.is_node(first, count) == (len(part.nodes()) == 1), (leaves, first, count)
                if tree.is_node(first, count):
                    for leaf in [*range(first), *range(first, first + count - 1), *range(first + count, leaves)]:
                        tree.put(leaf, str(leaf))
                    tree.put(first, *part.nodes(), count)  # type: ignore[misc]
                    assert tree.root() == whole.root()


# ---- accidents of processes


class Later:
    """A map that stops its process once times are known, the first time that any process does so."""

    def __init__(self, marker: Path, calls: int) -> None:
        self.once, self.calls, self.after = Once(marker, "stop"), 0, calls

    def __call__(self, shard: Any) -> None:
        self.calls += 1
        if self.calls > self.after:
            self.once()


def test_I32_a_worker_that_dies_costs_its_shard(tmp_path: Path, undisturbed: bytes) -> None:
    shards = several()
    walk = Walk(shards, Once(tmp_path / "once", "kill", shards[3]))
    assert result(walk.run(engine=2)) == undisturbed
    assert walk.history_["lost"][0] in (1, 2)  # what the process had, and the next question


def test_I32_a_worker_that_hangs_costs_its_shard(tmp_path: Path, undisturbed: bytes) -> None:
    walk = Walk(several(), Later(tmp_path / "once", 7))
    assert result(walk.run(engine=2)) == undisturbed
    assert walk.history_["late"].any()


class StopsInAReply:
    """Stops the process when it has sent a part of its reply, once."""

    def __init__(self, marker: Path, shard: Any) -> None:
        self.once, self.shard = Once(marker, "stop"), shard

    def __call__(self, shard: Any) -> None:
        if not np.array_equal(shard, self.shard):
            return

        def send(connection: Any, data: Any) -> None:
            os.write(connection.fileno(), data[:2])
            self.once()
            whole(connection, data[2:])

        whole, socket.socket.sendall = socket.socket.sendall, send  # type: ignore[method-assign,assignment]


def test_I32_a_worker_that_stops_in_its_reply_costs_its_shard(tmp_path: Path, undisturbed: bytes) -> None:
    shards = several()
    walk = Walk(shards, StopsInAReply(tmp_path / "once", shards[3]))
    assert result(walk.run(engine=2, timeout=60)) == undisturbed
    assert walk.history_["late"].any()


def test_a_worker_alone_that_hangs_is_replaced(tmp_path: Path, undisturbed: bytes) -> None:
    walk = Walk(several(), Later(tmp_path / "once", 14))
    assert result(walk.run(engine=1)) == undisturbed
    assert walk.history_["late"].any()


def test_a_coordinator_that_was_killed_goes_on(path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    walk = Walk(several(), in_update=At(2, Once(tmp_path / "once", "kill")))
    killed(lambda: walk.run(path, "walk", engine=2))
    again = Walk(several())
    assert result(again.run(path, "walk", engine=1)) == undisturbed
    assert again.resumed_from_iter_ == 2


def test_processes_end_with_their_run() -> None:
    pids: list[int] = []

    class Notes(Processes):
        def close(self) -> None:
            pids.extend(place._process.pid for place in self._places)
            super().close()

    engine = Notes(2)
    Walk(several()).run(engine=engine)
    assert len(set(pids)) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    Walk(several()).run(engine=engine)  # and the engine can be used again
    assert len(set(pids)) == 4


@pytest.mark.parametrize(("where", "name"), [(threading.Thread, "start"), (os, "pwrite")])
def test_ctrl_c_while_processes_start_leaves_nothing(where: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> list[str]:
        children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
        return [*children, *sorted(os.listdir("/proc/self/fd"))]

    def interrupted(*arguments: Any) -> Any:
        done.append(called(*arguments))
        if len(done) == 2:
            raise KeyboardInterrupt
        return done[-1]

    before = opened()
    called, done = getattr(where, name), []
    monkeypatch.setattr(where, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        Walk(several()).run(engine=Processes(3))
    assert len(done) == 2 and opened() == before


# ---- errors


def test_a_map_that_raises(path: Path) -> None:
    shards = several()
    with pytest.raises(
        pmstore.ShardError, match=r"(?s)shard 2 of 5.*worker 0.*ValueError: this shard is bad"
    ) as caught:
        Walk(shards, Always("raise", shards[2])).run(path, "walk", engine=1)
    assert caught.value.shard == 2
    assert "pid" in str(caught.value.worker)


@pytest.mark.parametrize("engine", [Serial(), 1], ids=["serial", "processes"])
def test_a_map_that_raises_what_has_no_text(engine: Any) -> None:
    with pytest.raises(
        pmstore.ShardError, match=r"(?s)has no result in epoch 0, on .*SilentError.*Traceback"
    ) as caught:
        Walk(several(2), Always("raise silently", several(2)[1])).run(engine=engine)
    assert caught.value.shard == 1


def test_an_algorithm_that_can_not_be_read_on_a_worker() -> None:
    with pytest.raises(pmstore.ShardError, match=r"(?s)what was sent can't be read: .*SilentError.*Traceback"):
        Walk(several(2), Unreadable()).run(engine=1)


def test_a_map_that_ends_its_process(new_workers: None) -> None:
    shards = several(2)
    with pytest.raises(pmstore.ShardError, match="shard 1 of 2.*was lost 5 times.*signal 9") as caught:
        Walk(shards, Always("kill", shards[1])).run(engine=2)
    assert caught.value.shard == 1


@pytest.mark.parametrize("deaths", [3, 1000])
def test_processes_that_end_as_soon_as_they_begin(
    deaths: int, path: Path, tmp_path: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch, new_workers: None
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\necho begun >> {tmp_path}/log\n[ $(wc -l < {tmp_path}/log) -gt {deaths} ] || exit 7\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    walk = Walk(several())
    if deaths < 1000:  # no question was lost to them
        assert result(walk.run(path, "walk", engine=1)) == undisturbed
        assert not walk.history_["lost"].any()
    else:
        with pytest.raises(pmstore.WorkersLostError, match="5 processes of worker 0 ended.*began.*status 7") as caught:
            walk.run(path, "walk", engine=1)
        assert caught.value.shard is None
        assert re.fullmatch(r"worker 0, process 5 \(pid \d+\)", str(caught.value.worker))


def test_a_map_that_never_ends() -> None:
    now = [0.0]

    class Hangs(Serial):
        def completed(self, timeout: float | None) -> Any:
            replies = [reply for reply in super().completed(timeout) if reply.shard != 2]
            now[0] += 0.1 if replies else 60.0 if timeout is None else timeout
            return replies

    shards = shards_of(several(3))
    hangs = Hangs()
    hangs.start(shards)
    epochs = Epochs(hangs, shards, timeout=30.0, clock=lambda: now[0])
    with pytest.raises(pmstore.ShardTimeoutError, match="shard 2 of 3.*timeout is 30 s") as caught:
        epochs.run(Describe(), {}, Tag("run", 1, 0), lambda left, right: {**left, **right})
    assert isinstance(caught.value, TimeoutError)
    assert epochs.late > 0  # it was asked again before


def test_a_shard_that_can_not_be_prepared_is_named() -> None:
    class Own(Walk):
        def prepare(self, shard: Any) -> Any:
            if np.array_equal(shard, several(2)[1]):
                raise ArithmeticError("not this one")
            return shard

    with pytest.raises(pmstore.ShardError, match=r"shard 1 of 2, .* can't be prepared, on .*not this one") as caught:
        Own(several(2)).run(engine=Serial())
    assert caught.value.shard == 1


def test_a_shard_that_can_not_be_loaded_once_is_loaded_again(tmp_path: Path, undisturbed: bytes) -> None:
    shards: list[Any] = several()
    np.save(tmp_path / "1.npy", shards[1])
    once = Once(tmp_path / "once", "raise")
    shards[1] = pmstore.Shard(load_once_broken, once, str(tmp_path / "1.npy"))
    assert result(Walk(shards).run(engine=Serial())) == undisturbed


def test_a_shard_that_vanished(tmp_path: Path) -> None:
    np.save(tmp_path / "1.npy", rows(1))
    shard = pmstore.Shard(np.load, str(tmp_path / "1.npy"))
    (tmp_path / "1.npy").unlink()
    with pytest.raises(pmstore.ShardError, match=r"shard 1 of 2, Shard\(load.*can't be loaded.*FileNotFoundError"):
        Walk([rows(0), shard]).run(engine=Serial())


class Labelled:
    """An array, and more than that."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return rows(1)


@pytest.mark.parametrize("data", [np.ma.masked_less(rows(1), 0), Labelled(), [rows(1), {"b": Labelled()}], print])
def test_I34_a_shard_that_is_more_than_arrays_is_refused(data: Any) -> None:
    with pytest.raises(pmstore.ShardError, match=r"(?s)shard 1 of.*(MaskedArray|Labelled|builtin\w+) is none of them"):
        Walk([rows(0), pmstore.Shard(lambda: data)]).run(engine=Serial())


@pytest.mark.parametrize("data", [np.array([[None], [{}]]), np.zeros(2, [("a", object)]), {"a": np.array([rows, 1])}])
def test_I34_arrays_of_other_objects_than_plain_values_are_refused(data: Any) -> None:
    with pytest.raises(pmstore.ShardError, match=r"(?s)shard 1 of.*an array of .* more than plain values"):
        Walk([rows(0), pmstore.Shard(lambda: data)]).run(engine=Serial())


def test_I34_a_shard_that_changed_between_two_attempts(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "1.npy", rows(1))
    shards = [rows(0), tmp_path / "1.npy"]
    with pytest.raises(ConnectionError):
        Walk(shards, in_update=At(3, Once(tmp_path / "once", "raise"))).run(path, "walk", engine=Serial())
    np.save(tmp_path / "1.npy", rows(2))
    with pytest.raises(pmstore.FingerprintMismatchError, match="shard 1"):
        Walk(shards).run(path, "walk", engine=Serial())


def test_I34_a_shard_that_changed_while_a_worker_was_lost(tmp_path: Path) -> None:
    np.save(tmp_path / "1.npy", rows(1))

    class Changes(Serial):
        """Loses its holder, and the file changes, after the third epoch."""

        def cancel(self, tag: Tag) -> None:
            super().cancel(tag)
            if tag.epoch == 2:
                np.save(tmp_path / "1.npy", rows(2))
                self._holder = type(self._holder)("another process")

    with pytest.raises(pmstore.ShardError, match="is not what it was when the fit began, on another process"):
        Walk([rows(0), tmp_path / "1.npy"]).run(engine=Changes())


def test_I33_a_map_that_is_no_function() -> None:
    class Clock(Walk):
        calls = 0

        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
            self.calls += 1
            return {"sums": np.full((3, 4), self.calls), "counts": np.ones(3, int)}

    class Twice(Serial):
        def submit(self, i: int, *question: Any) -> None:
            super().submit(i, *question)
            if i == 1:
                super().submit(i, *question)

    with pytest.raises(pmstore.NondeterminismError, match=r"shard 1 of 3.*two results in epoch 0.*rng") as caught:
        Clock(several(3)).run(engine=Twice())
    assert caught.value.shard == 1


def test_workers_with_other_libraries_are_refused() -> None:
    class Other(Serial):
        def completed(self, timeout: float | None) -> Any:
            replies = super().completed(timeout)
            for reply in replies:
                if reply.shard == 1 and isinstance(reply, Reply):
                    object.__setattr__(reply, "environment", "another BLAS")
            return replies

    with pytest.raises(pmstore.WorkersLostError, match="same environment"):
        Walk(several(2)).run(engine=Other())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "dict of arrays"),
        ([1, 2], "dict of arrays"),
        ({1: 2}, "dict of arrays"),
        ({"a": object()}, "arrays of numbers"),
    ],
)
def test_what_a_map_may_return(returned: Any, message: str) -> None:
    class Returns(Walk):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Any:
            return returned

    with pytest.raises(pmstore.ShardError, match=message):
        Returns(several(2)).run(engine=Serial())


def test_a_map_may_use_a_buffer_again() -> None:
    class Buffered(Walk):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Any:
            buffer = vars(self).setdefault("buffer", np.zeros(1))
            buffer[0] = len(shard)
            return {"rows": buffer}

        def update(self, total: Mapping[str, Any]) -> None:
            self.state.shift = total["rows"][0]

    data = several(4)
    assert Buffered(data).run(engine=Serial()).shift == sum(len(array) for array in data)


def test_contributions_of_different_shapes_are_named() -> None:
    class Lengths(Walk):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Any:
            return {"rows": shard}

    with pytest.raises(ValueError, match=r"\(37, 4\) for shard 1 of 2.* on .*\(30, 4\) for shard 0 of 2.* on"):
        Lengths(several(2)).run(engine=Serial())


def test_a_map_can_not_change_its_arguments() -> None:
    class Writes(Walk):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Any:
            shard[0] = 0
            return {}

    with pytest.raises(pmstore.ShardError, match="read-only"):
        Writes(several(2)).run(engine=Serial())

    class WritesPrepared(Writes):
        def prepare(self, shard: Any) -> Any:
            return shard + 1

    with pytest.raises(pmstore.ShardError, match="read-only"):
        WritesPrepared(several(2)).run(engine=Serial())

    class WritesShared(Walk):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Any:
            shared["centers"][0] = 0
            return {}

    with pytest.raises(pmstore.ShardError, match="read-only"):
        WritesShared(several(2)).run(engine=Serial())


@pytest.mark.parametrize("engine", [0, -1, True, "2", 1.5, None])
def test_engines_that_are_none(engine: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="number|engine"):
        Walk(several(2)).run(engine=engine)


@pytest.mark.parametrize("seed", [None, -1, 0.5, True])
def test_seeds_that_are_none(seed: Any) -> None:
    walk = Walk(several(2))
    walk.seed = seed
    with pytest.raises(ValueError, match="seed is a whole number"):
        walk.run(engine=Serial())


def test_an_engine_at_work_is_refused(undisturbed: bytes) -> None:
    engine = Serial()

    class Nested(Walk):
        def update(self, total: Mapping[str, Any]) -> Any:
            with pytest.raises(RuntimeError, match="at work for another fit"):
                Walk(several(2)).run(engine=engine)
            return super().update(total)

    assert result(Nested(several()).run(engine=engine)) == undisturbed
    assert result(Walk(several()).run(engine=engine)) == undisturbed


def test_what_can_not_travel_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="the algorithm can't be sent to workers"):
        Walk(several(2), accident=lock).run(engine=1)
    with pytest.raises(TypeError, match="the shards can't be sent to workers"):
        Walk([pmstore.Shard(np.load, lock)]).run(engine=1)


def test_sys_path_may_have_other_things_in_it(monkeypatch: pytest.MonkeyPatch, undisturbed: bytes) -> None:
    monkeypatch.setattr("sys.path", [*sys.path, Path("/folder")])
    assert result(Walk(several()).run(engine=1)) == undisturbed


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('another json')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    Walk(several(2)).run(engine=1)


def test_a_full_disk_at_the_decision_keeps_the_last_epoch(path: Path, undisturbed: bytes) -> None:
    class Fills(Walk):
        def update(self, total: Mapping[str, Any]) -> Any:
            if self.state.epoch == 3:
                raise pmstore.OutOfSpaceError("the disk is full")
            return super().update(total)

    with pytest.raises(pmstore.OutOfSpaceError):
        Fills(several()).run(path, "walk", engine=Serial())
    with contextlib.closing(pmstore.open(path)) as store:
        assert store["walk/progress"]["epoch"] == 3


def test_reset_forgets(path: Path) -> None:
    walk = Walk(several(2))
    with pytest.raises(ValueError, match="call run first"):
        walk.reset(path)
    walk.run(path, engine=Serial())
    walk.reset(path)
    with pmstore.open(path, "r") as store:
        assert len(store) == 0


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_is_none(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout is a number of seconds"):
        Walk(several(2)).run(engine=Serial(), timeout=timeout)


def test_an_algorithm_without_shards() -> None:
    class Nothing(Walk):
        def __init__(self) -> None:
            self.accident = None

    with pytest.raises(TypeError, match="set the attribute shards"):
        Nothing().run(engine=Serial())


def test_a_number_of_processes_of_numpy() -> None:
    assert Processes(np.int64(2))._workers == 2  # type: ignore[arg-type]
