"""Local states of shards: the same bits after deaths and losses of any kind, and errors in words."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scale import Engine, Holder, Processes, Serial, Tag, _local, prune_local, shards_of
from pmstore.scale._messages import BEHIND, HASHES, MARKS, Marks
from pmstore.scale._work import Work
from tests.support.sharded import EPOCHS, At, Factors, Once, killed, several


@pytest.fixture(scope="module")
def undisturbed() -> bytes:
    return ran(Factors(several()))


def ran(factors: Factors, *args: Any, engine: Any = None, **options: Any) -> bytes:
    factors.run(*args, engine=engine or Serial(), **options)
    return factors.bits()


def folder(path: Path) -> Path:
    """The directory of the local states of the only fit in a store."""
    (found,) = Path(f"{path}.local").iterdir()
    return found


@contextlib.contextmanager
def stopped(path: Path, epoch: int, marker: Path) -> Iterator[None]:
    """Runs a fit until its coordinator dies before the decision of an epoch."""
    with pytest.raises(ConnectionError):
        Factors(several(), in_update=At(epoch, Once(marker, "raise"))).run(path, "f", engine=Serial())
    yield


class Counted(Factors):
    """Counts its maps. The class has the name of the other, as that is a part of the fingerprint."""

    calls = 0

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator, local: Any) -> Mapping[str, Any]:
        Counted.calls += 1
        return super().map(shard, shared, rng, local)

    @property
    def title(self) -> str:
        return "Factors"


def counted(path: Path, **options: Any) -> tuple[bytes, int]:
    """The bits of the rest of a fit, and how often it called map."""
    Counted.calls = 0
    factors = Counted(several())
    factors.run(path, "f", engine=Serial(), **options)
    calls = Counted.calls
    return factors.bits(), calls


# ---- results


class Backwards(Serial):
    """Answers in another order, and each question twice."""

    def submit(self, i: int, *question: Any) -> None:
        super().submit(i, *question)
        super().submit(i, *question)
        self._asked.reverse()


def test_replies_in_another_order_and_twice(undisturbed: bytes) -> None:
    assert ran(Factors(several()), engine=Backwards()) == undisturbed


@pytest.mark.parametrize("workers", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_processes_give_the_same_bits(workers: int, path: Path, undisturbed: bytes) -> None:
    assert ran(Factors(several()), path, "f", engine=workers) == undisturbed
    assert sorted(one.name for one in folder(path).iterdir()) == [f"shard-{i}.pm" for i in range(5)]


def test_the_parts_are_lazy_and_right(path: Path) -> None:
    data = several(3)
    factors = Factors(data)
    factors.run(path, "f", engine=Serial())
    W = factors.local_parts("W")
    assert [part.shape for part in W] == [(len(rows), 2) for rows in data]
    assert np.asarray(W).shape == (sum(map(len, data)), 2)
    assert np.asarray(factors.local_parts("epochs")).tolist() == [EPOCHS] * 3
    with pytest.raises(KeyError, match="V"):
        factors.local_parts("V")[0]


def test_a_finished_fit_has_its_parts_without_a_map(path: Path, undisturbed: bytes) -> None:
    Factors(several()).run(path, "f", engine=Serial())
    assert counted(path) == (undisturbed, 0)


def test_parts_that_were_lost_are_computed_again(path: Path, undisturbed: bytes) -> None:
    Factors(several()).run(path, "f", engine=Serial())
    shutil.rmtree(folder(path))
    assert counted(path) == (undisturbed, 0)
    assert Counted.calls == 2 * 5 * EPOCHS  # by each of the accesses, for two fields
    assert not folder_exists(path)


def test_parts_that_are_damaged_are_computed_again(path: Path, undisturbed: bytes) -> None:
    Factors(several()).run(path, "f", engine=Serial())
    for file in folder(path).iterdir():
        names(file)
        with pytest.raises(pmstore.CorruptStoreError), pmstore.open(file, "r") as store:
            list(store)
    assert counted(path) == (undisturbed, 0)


def folder_exists(path: Path) -> bool:
    return any(Path(f"{path}.local").iterdir())


# ---- what is lost


def test_I35_an_attempt_goes_on_with_the_states_that_the_workers_have(
    path: Path, tmp_path: Path, undisturbed: bytes
) -> None:
    with stopped(path, 3, tmp_path / "once"):
        assert counted(path) == (undisturbed, 5 * (EPOCHS - 3))


def test_I35_a_directory_that_is_lost_costs_a_replay(path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    with stopped(path, 3, tmp_path / "once"):
        shutil.rmtree(folder(path))
        assert counted(path) == (undisturbed, 5 * EPOCHS)


def damaged(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def change_store(file: Path) -> None:
        with pmstore.open(file) as store:
            change(store.group("shard"))

    return change_store


def flip(group: Any) -> None:
    for slot in (0, 1):
        group[f"{slot}/W"][3, 1] *= -1


def undecided(group: Any) -> None:
    """The state before epoch 4, which is not decided: the one before epoch 3 is there."""
    newest = int(group["slots"]["epoch"].argmax())
    group[f"{newest}/W"][...] = 0


def other_layout(group: Any) -> None:
    group["0/W"] = np.zeros(3)


def cut(file: Path) -> None:
    os.truncate(file, 6000)


def names(file: Path) -> None:
    """Zeros in the place of the names. Nothing is wrong until they are looked up."""
    data = bytearray(file.read_bytes())
    data[20480:24576] = bytes(4096)
    file.write_bytes(data)


LOST = {
    "bits": (damaged(flip), 5 * (EPOCHS - 3) + 3),
    "undecided": (damaged(undecided), 5 * (EPOCHS - 3)),
    "layout": (damaged(other_layout), 5 * (EPOCHS - 3) + 3),
    "names": (names, 5 * (EPOCHS - 3) + 3),
    "file": (cut, 5 * (EPOCHS - 3) + 3),
    "another shard's": (lambda file: shutil.copy(file.with_name("shard-2.pm"), file), 5 * (EPOCHS - 3) + 3),
}


@pytest.mark.parametrize("lost", LOST)
def test_I35_a_damaged_state_costs_a_replay(lost: str, path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    damage, calls = LOST[lost]
    with stopped(path, 3, tmp_path / "once"):  # shard 1 has the states before the epochs 3 and 4
        damage(folder(path) / "shard-1.pm")
        assert counted(path) == (undisturbed, calls)


def test_I35_a_replay_begins_with_an_older_state(path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    with stopped(path, 2, tmp_path / "once"):
        shutil.copytree(folder(path), tmp_path / "kept")
        with stopped(path, 5, tmp_path / "twice"):
            shutil.rmtree(folder(path))
            shutil.copytree(tmp_path / "kept", folder_of(path, tmp_path))
            assert counted(path) == (undisturbed, 5 * (EPOCHS - 5) + 5 * 2)  # from the states before epoch 3


def folder_of(path: Path, tmp_path: Path) -> Path:
    """The directory that a fit had before it was lost."""
    with pmstore.open(path, "r") as store:
        from pmstore._resume.fingerprint import digest

        return Path(f"{path}.local", digest(store["f/fingerprint"]))


def test_states_of_another_run_are_not_taken(path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    other = Factors([2 * rows for rows in several()])
    other.run(tmp_path / "other.pm", "f", engine=Serial(), local=f"{path}.local")
    with stopped(path, 3, tmp_path / "once"):
        runs = sorted(Path(f"{path}.local").iterdir(), key=lambda one: one.stat().st_mtime)
        for file in runs[0].iterdir():
            shutil.copy(file, runs[1] / file.name)
        assert counted(path)[0] == undisturbed


def test_a_store_that_another_process_has_is_read(path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    with stopped(path, 3, tmp_path / "once"), pmstore.open(folder(path) / "shard-1.pm"):
        assert counted(path) == (undisturbed, 5 * (EPOCHS - 3))
    with pmstore.open(folder(path) / "shard-1.pm", "r") as store:
        assert max(store["shard/slots"]["epoch"]) == 4  # the rest was in memory, which is gone
    assert counted(path) == (undisturbed, 0)  # and computed again for the result


def test_a_shard_that_moves_takes_its_store_along(path: Path) -> None:
    factors = Factors(several(1))
    factors.described = [{"shape": several(1)[0].shape, "contents": None}]
    function = Work(factors, f"{path}.local")
    function._contents = [None]  # type: ignore[list-item]
    holders, shard = [Holder("first"), Holder("second")], shards_of(several(1))[0]
    hashes = np.zeros((1, 16), np.uint8)
    H = np.ones((2, 4))
    log: dict[str, Any] = {}
    stores: list[str] = []
    for epoch, which in enumerate([0, 1, 0, 0, 0, 0]):
        for holder in holders:  # another shard, so that each is asked in each epoch
            holder.disk._release(Tag("run", 1, epoch))
        shared = {"H": H, HASHES: hashes, MARKS: np.array(Marks(0, epoch, epoch - 1)), **log}
        reply = holders[which].answer(0, shard, function, shared, Tag("run", 1, epoch))
        assert reply.result is not None and BEHIND not in reply.result, reply.failure
        (slots,) = holders[which].disk._slots.values()
        stores.append(type(slots.store).__name__)
        hashes = reply.result["/hash"]
        log |= {f"/{epoch}/": np.zeros(0), f"/{epoch}/H": H}
        stale = holders[which].answer(0, shard, function, shared, Tag("run", 0, epoch))
        assert stale.failure is not None and "attempt 0 is asked for after" in stale.failure.text
    assert stores == ["Store", "Memory", "Store", "Store", "Store", "Store"]
    for holder in holders:
        holder.close()


# ---- accidents of processes


def test_I35_a_worker_that_dies_costs_its_shard(path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    factors = Factors(several(), Once(tmp_path / "once", "kill", several()[3]))
    assert ran(factors, path, "f", engine=2) == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("what", ["kill", "stop"])
def test_I35_a_worker_that_dies_or_hangs_in_the_middle(
    what: str, path: Path, tmp_path: Path, undisturbed: bytes
) -> None:
    class Later:
        calls = 0

        def __call__(self, shard: Any) -> None:
            self.calls += 1
            if self.calls == 9:
                Once(tmp_path / "once", what)()

    assert ran(Factors(several(), Later()), path, "f", engine=Processes(2)) == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("lost", [False, True])
def test_I35_a_program_that_was_killed_goes_on(lost: bool, path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    factors = Factors(several(), in_update=At(2, Once(tmp_path / "once", "kill")))
    killed(lambda: factors.run(path, "f", engine=2))
    if lost:
        shutil.rmtree(folder(path))
    assert ran(Factors(several()), path, "f", engine=1) == undisturbed


# ---- maps that are no functions


def test_I33_a_state_that_depends_on_the_worker(path: Path) -> None:
    calls = iter(range(1000))

    class Calls(Factors):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator, local: Any) -> Mapping[str, Any]:
            local.epochs = next(calls)
            return {"WX": np.zeros((2, 4)), "WW": np.ones((2, 2)), "error": 0.0}

        def update(self, total: Mapping[str, Any]) -> None:
            pass

    with pytest.raises(pmstore.NondeterminismError, match="shard . of 3.*two results"):
        Calls(several(3)).run(engine=Backwards())
    calls_once = Calls(several(3))
    calls_once.run(path, "f", engine=Serial())
    assert len(calls_once.local_parts("W")) == 3
    shutil.rmtree(folder(path))
    with pytest.raises(pmstore.NondeterminismError, match="local state of shard 1 .* has other bits"):
        calls_once.local_parts("W")[1]


def test_I35_a_state_that_can_not_be_computed_again(path: Path, tmp_path: Path) -> None:
    class Draws(Factors):
        def local_start(self, shard: Any, local: Any, rng: np.random.Generator) -> None:
            local.W = np.random.default_rng().uniform(0.1, 1, local.W.shape)

        def update(self, total: Mapping[str, Any]) -> Any:
            if self.in_update is not None:
                self.in_update(self.state.epoch)
            return super().update(total)

    with pytest.raises(ConnectionError):
        Draws(several(2), in_update=At(3, Once(tmp_path / "once", "raise"))).run(path, "f", engine=Serial())
    shutil.rmtree(folder(path))
    with pytest.raises(pmstore.NondeterminismError, match=r"shard \d of 2.*before epoch 3 was computed again.*start"):
        Draws(several(2)).run(path, "f", engine=Serial())


# ---- errors


class Own(Factors):
    """Two epochs, and a map of the test's."""

    max_iter = 2
    work: Callable[[Any, Any], None]

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator, local: Any) -> Mapping[str, Any]:
        type(self).work(shard, local)
        return super().map(shard, shared, rng, local)


def own(change: Callable[[Any, Any], None]) -> Own:
    class Changing(Own):
        work = staticmethod(change)

    return Changing(several(2))


def set_shape(shard: Any, local: Any) -> None:
    local.W = np.ones((7, 7))


def set_unknown(shard: Any, local: Any) -> None:
    local.V = 1


def raises(shard: Any, local: Any) -> None:
    local.W = 0
    raise ArithmeticError("not today")


@pytest.mark.parametrize(
    ("change", "message"),
    [(set_shape, "could not broadcast"), (set_unknown, "'V' is none of the local fields W, epochs"), (raises, "today")],
)
def test_maps_that_fail(change: Any, message: str, path: Path) -> None:
    with pytest.raises(pmstore.ShardError, match=rf"(?s)shard 0 of 2.*has no result in epoch 0.*{message}"):
        own(change).run(path, "f", engine=Serial())


def test_a_map_that_raises_leaves_the_state_as_it_was(path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    class Fails:
        calls = 0

        def __call__(self, shard: Any) -> None:
            self.calls += 1
            if self.calls == 13:
                raise ArithmeticError("not today")

    with pytest.raises(pmstore.ShardError, match="epoch 2.*not today"):
        Factors(several(), Fails()).run(path, "f", engine=Serial())
    assert counted(path)[0] == undisturbed


def test_a_start_that_raises() -> None:
    class Fails(Factors):
        def local_start(self, shard: Any, local: Any, rng: np.random.Generator) -> None:
            raise ArithmeticError("no beginning")

    with pytest.raises(pmstore.ShardError, match=r"(?s)shard 0 of 2.*no result in epoch 0.*no beginning"):
        Fails(several(2)).run(engine=Serial())


def test_a_used_object_can_be_copied_and_pickled(path: Path, undisturbed: bytes) -> None:
    factors = Factors(several(3))
    expected = ran(factors, path, "f", engine=Serial())
    for again in (copy.deepcopy(factors), pickle.loads(pickle.dumps(factors))):
        assert again.state.epoch == EPOCHS
        assert ran(again, engine=Serial()) == expected


def test_names_that_are_taken() -> None:
    class Takes(Factors):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator, local: Any) -> Mapping[str, Any]:
            return {"/hash": 1}

    with pytest.raises(pmstore.ShardError, match="must not return names that begin with '/': /hash"):
        Takes(several(2)).run(engine=Serial())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([pmstore.Field("a")], "with axes"),
        ([pmstore.Field("a", 3, object)], "with axes"),
        ([pmstore.Field("a", 3, role="working")], "no role"),
        ([pmstore.Field("a", 3), pmstore.Field("a", 4)], "same name"),
        ([pmstore.Field("/a", 3)], "with a / before"),
        (["a"], "Fields"),
    ],
)
def test_fields_that_are_none(fields: Any, message: str) -> None:
    class Other(Factors):
        def local_fields(self, i: int) -> Any:
            return fields

    with pytest.raises((TypeError, ValueError), match=message):
        Other(several(2)).run(engine=Serial())


def test_other_local_fields_are_another_fit(path: Path, tmp_path: Path) -> None:
    class Other(Factors):
        def local_fields(self, i: int) -> Any:
            return [*super().local_fields(i), pmstore.Field("more", 1)]

        @property
        def title(self) -> str:
            return "Factors"

    with stopped(path, 3, tmp_path / "once"), pytest.raises(pmstore.FingerprintMismatchError, match="local fields"):
        Other(several()).run(path, "f", engine=Serial())


def test_arguments_that_make_no_sense(path: Path) -> None:
    class Other(Engine):
        start = submit = completed = cancel = close = lambda *given: None  # type: ignore[assignment]

    with pytest.raises(ValueError, match="Other may be on other machines.*local="):
        Factors(several(2)).run(engine=Other())
    with pytest.raises(ValueError, match="call run"):
        Factors(several(2)).local_parts("W")
    path.write_text("a file")
    with pytest.raises(pmstore.ShardError, match=r"can't be kept in .*(Not a directory|File exists).*local="):
        Factors(several(2)).run(engine=Serial(), local=path)


def test_a_directory_that_workers_can_not_write(path: Path, tmp_path: Path) -> None:
    with stopped(path, 3, tmp_path / "once"):
        here = folder(path)
        shutil.rmtree(here)
        here.write_text("a file")
        with pytest.raises(pmstore.ShardError, match=r"shard 0 .*can't be kept in .*local="):
            Factors(several()).run(path, "f", engine=Serial())


def test_something_else_in_the_place_of_a_store(path: Path, tmp_path: Path) -> None:
    with stopped(path, 3, tmp_path / "once"):
        (folder(path) / "shard-1.pm").write_bytes(b"a picture" * 1000)
        with pytest.raises(pmstore.ShardError, match=r"shard 1 .*where there is something else.*Delete it.*local="):
            Factors(several()).run(path, "f", engine=Serial())
        (folder(path) / "shard-1.pm").unlink()
        assert counted(path)[1] == 5 * (EPOCHS - 3) + 3


def test_a_full_disk_of_a_worker(path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_local.Disk, "_opened", staticmethod(lambda path: pmstore.open(path, max_size=1 << 20)))
        with pytest.raises(pmstore.ShardError, match=r"shard 0 .*has no result in epoch 0.*OutOfSpaceError"):
            Factors([np.ones((40_000, 4)), *several(2)]).run(path, "f", engine=Serial())


class Rated(Factors):
    """A parameter that equals others of another type."""

    def __init__(self, shards: Any, rate: float, in_update: Any = None) -> None:
        super().__init__(shards, in_update=in_update)
        self.rate = rate

    def fingerprint(self) -> Mapping[str, Any]:
        return {"rate": self.rate}


def test_a_number_of_another_type_is_another_fit(path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    with pytest.raises(ConnectionError):
        Rated(several(), 1, At(3, Once(tmp_path / "once", "raise"))).run(path, "f", engine=Serial())
    with pytest.raises(pmstore.FingerprintMismatchError, match=r"rate: 1 ≠ 1\.0"):
        Rated(several(), 1.0).run(path, "f", engine=Serial())
    assert ran(Rated(several(), 1), path, "f") == undisturbed
    (states,) = Path(f"{path}.local").iterdir()
    assert prune_local(path) == []
    shutil.rmtree(states)
    assert ran(Rated(several(), 1), path, "f") == undisturbed  # from the log


def test_nan_and_shards_without_rows(path: Path) -> None:
    shards = [np.zeros((0, 4)), *several(2)]
    shards[1][2, 2] = np.nan
    first = ran(Factors(shards), path, "f")
    shutil.rmtree(folder(path))
    again = Factors(shards)
    assert ran(again, path, "f") == first
    assert np.isnan(again.local_parts("W")[1]).any()
    assert again.local_parts("W")[0].shape == (0, 2)
