"""pmstore.Resumable: an algorithm of one's own that goes on where it was."""

from __future__ import annotations

import itertools
import logging
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import Core
from pmstore._resume import loop
from pmstore._values.values import encode
from tests.conftest import run_in_fork
from tests.support.resuming import copied, in_memory, interrupted

pytest.importorskip("xxhash")
sparse = pytest.importorskip("scipy.sparse")


class Climb(pmstore.Resumable):
    """Random search for the top of a hill, with one field of every kind; the best of several runs."""

    max_iter = 5
    runs = 3

    def __init__(self, peak: Any, seed: int = 0, generator: Any = None) -> None:
        self.peak = np.asarray(peak, dtype=float)
        self.seed = seed
        self.old, self.new = np.random.RandomState(seed), generator or np.random.default_rng(seed)
        self.given = (self.old.get_state()[1].tolist(), str(self.new.bit_generator.state))

    def fields(self) -> Any:
        n = len(self.peak)
        yield pmstore.Field("place", n, role="working")
        yield pmstore.Field("tries/last", (2, n), "f4")
        yield pmstore.Field("height", dtype="f4")
        yield pmstore.Field("stuck", dtype=bool)
        yield pmstore.Field("heights", dtype=object)
        yield pmstore.Field("distances", n, role="derived")
        yield pmstore.Field("best/place", n, role="best")
        yield pmstore.Field("best_height")
        yield pmstore.Field("old", generator=self.old)
        yield pmstore.Field("new", generator=self.new)

    def fingerprint(self) -> dict[str, Any]:
        return {"peak": self.peak, "generators": self.given}

    def start(self) -> None:
        state = self.state
        state.place = self.old.normal(size=len(self.peak))
        state.heights = [*(state.heights or []), "start"]
        state.stuck = False
        self.derive()

    def derive(self) -> None:
        self.state.distances = np.abs(self.state.place - self.peak)

    def step(self) -> None:
        state = self.state
        step = self.new.normal(size=len(self.peak)) * state.distances
        state["tries/last"] = step, -step
        state.place += step * self.old.uniform()
        state.height = -np.abs(state.place - self.peak).sum()
        state.stuck = state.iteration == 3 and state.run == 1
        state.heights = [*state.heights, state.height]
        self.derive()

    def converged(self) -> bool:
        return bool(self.state.stuck)

    def better(self) -> bool:
        return bool(self.state.height > self.state.best_height)

    def keep(self) -> None:
        self.state["best/place"] = self.state.place
        self.state.best_height = self.state.height

    def finish(self) -> None:
        self.state["best/place"][0] += 1


PEAK = [3.0, -1.0, 2.0]


def result(state: pmstore.State) -> tuple[Any, ...]:
    names = ("run", "iteration", "best_run", "best_iterations", "height", "best_height", "heights")
    arrays = ("tries/last", "best/place")
    return (*(getattr(state, name) for name in names), *(state[name].tobytes() for name in arrays))


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, if there is such a file system: hundreds of commits that sync a disk take long."""
    with in_memory(tmp_path) as directory:
        yield directory


@pytest.fixture
def reference() -> tuple[Any, ...]:
    """The result without a store."""
    return result(Climb(PEAK).run())


@pytest.mark.parametrize("commit_every", [1, 2, 100, 1e-9, 1e9])
def test_it_goes_on_from_every_commit(
    commit_every: float, tmp_path: Path, reference: Any, commits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = itertools.count()
    with pmstore.open(tmp_path / "climb.pm") as store:
        commits[0] = lambda: shutil.copy(store.path, tmp_path / f"{next(number)}.pm")
        climb = Climb(PEAK)
        assert result(climb.run(store, "climb", commit_every=commit_every)) == reference
        assert climb.old.uniform() == (after := Climb(PEAK).run().old.uniform())
        group = store.group("climb")
        assert set(group) == {
            *("fingerprint", "finished", "progress", "heights", "tries/last", "best/place", "old", "new"),
            *("history/limits", "history/newest"),
        }
    copies = commits[1:-1]
    monkeypatch.undo()
    # the start, 5 + 4 + 5 iterations, the end of three runs
    assert len(copies) == {1: 18, 1e-9: 18, 2: 12}.get(commit_every, 7)
    places = []
    for copy in copies:
        again = Climb(PEAK)
        assert result(again.run(copy, "climb")) == reference
        assert again.old.uniform() == after
        places.append((again.resumed_from_run_, again.resumed_from_iter_))
    assert places == sorted(places) and places[0] == (0, 0) and places[-1] == (2, 5)
    if commit_every == 2:
        assert places[:5] == [(0, 0), (0, 2), (0, 4), (0, 5), (1, 0)]


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "Philox", "SFC64"])
def test_every_generator_of_numpys_is_kept(kind: str, tmp_path: Path) -> None:
    def climb() -> Climb:
        return Climb(PEAK, generator=np.random.Generator(getattr(np.random, kind)(7)))

    reference = result(climb().run())
    with interrupted(Climb, 7):
        climb().run(store=tmp_path / "x.pm")
    again = climb()
    assert result(again.run(tmp_path / "x.pm")) == reference
    assert (again.resumed_from_run_, again.resumed_from_iter_) == (1, 2)


def test_an_interrupt_takes_it_back_to_the_last_commit(tmp_path: Path, reference: Any) -> None:
    with pmstore.open(tmp_path / "x.pm") as store:
        climb = Climb(PEAK)
        with interrupted(Climb, 7):
            climb.run(store=store, name="climb", commit_every=3)
        progress = store["climb/progress"]
        assert (progress["run"], progress["iteration"]) == (1, 0)
        assert result(climb.run(store, "climb")) == reference  # the same object: its generators are taken back
        assert result(climb.state) == reference and climb.slot_name_ == "climb"


def test_a_fit_group_without_a_name_is_found_again_and_pruned(tmp_path: Path, reference: Any) -> None:
    path = tmp_path / "x.pm"
    climb = Climb(PEAK)
    assert result(climb.run(path)) == result(Climb(PEAK).run(str(path))) == reference
    Climb(PEAK, seed=1).run(path)
    Climb(PEAK, seed=1).run(path, "climb/0123456789abcdef")
    with pmstore.open(path) as store:
        assert sum(name.endswith("/finished") for name in store) == 3
        assert climb.slot_name_ is not None and f"{climb.slot_name_}/finished" in store
        Climb(PEAK).reset(store)
        assert f"{climb.slot_name_}/finished" not in store
        assert len(pmstore.prune(store)) == 1
        assert set(store.group("climb")) == {f"0123456789abcdef/{n}" for n in store.group("climb/0123456789abcdef")}
        Climb(PEAK).reset(store, "climb/0123456789abcdef")
        assert len(store) == 0


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: setattr(c, "peak", c.peak + 1), "peak: float64 array"),
        (lambda c: setattr(c, "runs", 2), "runs: 3 ≠ 2"),
        (lambda c: setattr(c, "max_iter", 7), "max_iter: 5 ≠ 7"),
        (lambda c: setattr(c, "version", 2), "algorithm: Climb, version 1 ≠ Climb, version 2"),
    ],
)
def test_another_fit_has_no_place_in_a_fit_group(change: Callable[[Climb], None], message: str, tmp_path: Path) -> None:
    Climb(PEAK).run(tmp_path / "x.pm", "climb")
    other = Climb(PEAK)
    change(other)
    with pytest.raises(pmstore.FingerprintMismatchError, match=message):
        other.run(tmp_path / "x.pm", "climb")
    other.reset(tmp_path / "x.pm", "climb")
    other.run(tmp_path / "x.pm", "climb")


@pytest.mark.parametrize(
    "name, value",
    [
        ("progress", np.zeros((), [("run", "i8")])),
        ("place", np.zeros(4)),
        ("tries/last", None),
        ("best/place", np.zeros(3, "f4")),
        ("old", np.zeros(3)),
        ("new", {"bit_generator": "SFC64"}),
        ("heights", None),
    ],
)
def test_a_fit_group_that_somebody_changed(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pm"
    with interrupted(Climb, 7):
        Climb(PEAK).run(store=path, name="climb")
    with pmstore.open(path) as store:
        del store[f"climb/{name}"]
        if value is not None:
            store[f"climb/{name}"] = value
    with pytest.raises(pmstore.FingerprintMismatchError, match=rf"'climb' in .*'{name}' must be .*reset\(\)"):
        Climb(PEAK).run(path, "climb")


def test_a_damaged_state_is_not_gone_on_with(tmp_path: Path, reference: Any) -> None:
    path = tmp_path / "x.pm"
    with interrupted(Climb, 7):
        Climb(PEAK).run(store=path, name="climb")
    with pmstore.open(path) as store:
        contents = store["climb/tries/last"].tobytes()
    damaged = path.read_bytes().replace(contents, contents[:-1] + bytes([contents[-1] ^ 1]))
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(pmstore.CorruptStoreError, match=r"'climb' in .* is damaged.*'climb/tries/last'.*reset\(\)"):
        Climb(PEAK).run(path, "climb")
    Climb(PEAK).reset(path, "climb")
    assert result(Climb(PEAK).run(path, "climb")) == reference


@pytest.mark.parametrize("given", ["path", "open store"])
def test_a_full_disk_leaves_the_last_commit(
    given: str, tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up during the fit, and then has space again."""
    path, commit, left = tmp_path / "x.pm", Core.commit, 4

    def fails(core: Core) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise pmstore.OutOfSpaceError(28, "no space left on the disk")
        commit(core)

    store: Any = path if given == "path" else pmstore.open(path)
    with monkeypatch.context() as patch, pytest.raises(pmstore.OutOfSpaceError, match="no space"):
        patch.setattr(Core, "commit", fails)
        Climb(PEAK).run(store, "climb")
    again = Climb(PEAK)
    assert result(again.run(store, "climb")) == reference
    assert again.resumed_from_iter_ == (2 if given == "path" else 3)  # of an open store, all is pending
    if store is not path:
        store.close()


def test_a_read_only_store_gives_what_is_finished(tmp_path: Path, reference: Any) -> None:
    Climb(PEAK).run(tmp_path / "x.pm", "done")
    with interrupted(Climb, 7):
        Climb(PEAK).run(store=tmp_path / "x.pm", name="begun")
    with pmstore.open(tmp_path / "x.pm", "r") as store:
        assert result(Climb(PEAK).run(store, "done")) == reference
        for name in ("begun", "new"):
            with pytest.raises(pmstore.ReadOnlyStoreError, match=name):
                Climb(PEAK).run(store, name)
    with pmstore.open(tmp_path / "x.pm") as store:
        run_in_fork(_fails_in_a_fork, store)


def _fails_in_a_fork(store: pmstore.Store) -> None:
    with pytest.raises(pmstore.ForkedStoreError, match=r"fit 'begun' in .* not finished: this process is a fork"):
        Climb(PEAK).run(store, "begun")


def test_threads_with_one_name_take_turns(tmp_path: Path, reference: Any) -> None:
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(result(Climb(PEAK).run(tmp_path / "x.pm", "climb"))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [reference] * 3


def test_what_it_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=1500)
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO, "pmstore"):
        Climb(PEAK).run(tmp_path / "x.pm", "climb")
        Climb(PEAK).run(tmp_path / "x.pm", "climb")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 14 + 1
    assert said[0] == "Climb: run 0 of 3, 1 iterations of at most 5 done, 50:00 each, 11:40:00 left at most"
    assert said[13].startswith("Climb: run 2 of 3, 5 iterations of at most 5 done") and "0 s left" in said[13]
    assert said[14] == f"Climb: loading 'climb' in {tmp_path / 'x.pm'}, at run 2 of 3, 5 iterations done"


@pytest.mark.parametrize(
    "bad, error",
    [
        (0, ValueError),
        (-1.0, ValueError),
        (np.inf, ValueError),
        (np.nan, ValueError),
        (True, TypeError),
        ("1", TypeError),
        (None, TypeError),
    ],
)
def test_a_bad_commit_every(bad: Any, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match="commit_every"):
        Climb(PEAK).run(tmp_path / "x.pm", commit_every=bad)
    assert not (tmp_path / "x.pm").exists()


@pytest.mark.parametrize("size", [4, 1 << 14])
def test_a_value_that_is_changed_in_place(
    size: int, tmp_path: Path, commits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Log(pmstore.Resumable):
        max_iter = 4

        def fields(self) -> Any:
            for name in ("list", "dict", "inside", "array", "turned", "gaps", "words", "record", "aside", "sparse"):
                yield pmstore.Field(name, dtype=object)

        def fingerprint(self) -> dict[str, Any]:
            return {}

        def start(self) -> None:
            state = self.state
            state.list, state.dict, state.inside = [], {"n": 0}, (1, [np.zeros(size), {}])
            state.array, state.turned = np.zeros((2, size)), np.asfortranarray(np.zeros((2, size)))
            state.gaps, state.words = np.zeros((2, size))[:, ::2], np.array(["a"] * 3, np.dtypes.StringDType())
            state.record, state.aside = np.zeros((), "i4,f8")[()], []
            state.sparse = (1, sparse.eye_array(3, format="csr"))
            self.derive()

        def derive(self) -> None:
            self.mine = self.state.aside

        def step(self) -> None:
            state, n = self.state, self.state.iteration
            state.list.append(n)
            state.dict["n"] += 1
            state.inside[1][0][n] = state.inside[1][1][str(n)] = n
            for one in (state.array, state.turned, state.gaps):
                one[1, -1 if n else 0] += 1
            if n == 2:
                state.words = np.array(["b", "c", "d"], np.dtypes.StringDType())
            state.words[1] = str(n) * 20
            state.record["f1"] += 1
            state.sparse[1].data[n % 3] += n
            self.mine.append(n)

    def found(state: Any) -> list[Any]:
        return [encode(state[field.name]) for field in Log().fields()]

    expected = found(Log().run())
    number = itertools.count()
    commits[0] = lambda: shutil.copy(tmp_path / "x.pm", tmp_path / f"{next(number)}.pm")
    with pmstore.open(tmp_path / "x.pm") as store:
        assert found(Log().run(store, "fit")) == expected
    copies = commits[1:]
    monkeypatch.undo()
    assert len(copies) == 1 + 4 + 1 + 1
    for copy in copies:
        assert found(Log().run(copy, "fit")) == expected


def test_a_value_that_stays_is_not_written_again(tmp_path: Path) -> None:
    class Idle(pmstore.Resumable):
        max_iter = 50

        def fields(self) -> Any:
            yield pmstore.Field("values", dtype=object)

        def fingerprint(self) -> dict[str, Any]:
            return {}

        def start(self) -> None:
            self.state.values = [np.zeros(20_000), {"a": [1]}]

        def step(self) -> None:
            self.read = list(self.state.values)

    with pmstore.open(tmp_path / "x.pm") as store:
        Idle().run(store, "fit")
    assert (tmp_path / "x.pm").stat().st_size < 4 << 20


@pytest.mark.parametrize("size", [4, 1 << 14])
def test_a_value_can_be_an_array(
    size: int, tmp_path: Path, commits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that each iteration makes anew, of a dtype and an order that aren't always the same."""

    class Halving(pmstore.Resumable):
        max_iter, runs = 3, 2

        def fields(self) -> Any:
            yield pmstore.Field("values", (2, size // 2), object, "working")
            yield pmstore.Field("log", dtype=object)
            yield pmstore.Field("best/values", (2, size // 2), object, "best")

        def fingerprint(self) -> dict[str, Any]:
            return {"size": size}

        def start(self) -> None:
            self.state.values = np.asfortranarray(np.arange(size).reshape(2, -1) + self.state.run)
            self.state.log = (np.zeros(1), "start")

        def step(self) -> None:
            half = self.state.values / np.float32(2)
            self.state.values = np.ascontiguousarray(half) if self.state.iteration else half

        def better(self) -> bool:
            return True

        def keep(self) -> None:
            self.state["best/values"] = self.state.values

    expected = (np.arange(size).reshape(2, -1) + 1) / 8
    with pmstore.open(tmp_path / "x.pm") as store:
        number = itertools.count()
        commits[0] = lambda: shutil.copy(store.path, tmp_path / f"{next(number)}.pm")
        state = Halving().run(store, "fit")
        assert (state["best/values"] == expected).all() and state.log[1] == "start"
        state["best/values"][:] = 0  # a copy
        assert (store["fit/best/values"] == expected).all() and "fit/values" not in store
    copies = commits[1:]
    monkeypatch.undo()
    assert len(copies) == 1 + 3 + 1 + 3 + 1 + 1  # the last: the store is closed
    for copy, order in zip(copies[1:], "FC"):
        with pmstore.open(copy, "r") as store:
            assert store["fit/values"].flags[f"{order}_CONTIGUOUS"]
    for copy in copies:
        assert (Halving().run(copy, "fit")["best/values"] == expected).all()
    for changed in (None, np.zeros(3), 7):
        with pmstore.open(tmp_path / "1.pm") as store:
            store["fit/best/values"] = changed
        if changed is None:
            Halving().run(tmp_path / "1.pm", "fit")
        else:
            with pytest.raises(pmstore.FingerprintMismatchError, match=r"'best/values' must be an array of shape"):
                Halving().run(tmp_path / "1.pm", "fit")


def test_the_result_says_where_the_history_is() -> None:
    climb = Climb(PEAK)
    result = climb.run()
    with pytest.raises(AttributeError, match=r"none of the fields .*; the object whose run\(\) was called has it"):
        _ = result.history_
    assert len(climb.history_["iteration"]) and not hasattr(result, "other_")


def test_bad_tables(tmp_path: Path) -> None:
    class Bad(Climb):
        def fields(self) -> Any:
            return [pmstore.Field(name) for name in self.names]  # type: ignore[attr-defined]

    messages = {name: f"no field can have them: {name}$" for name in ("run", "finished", "load", "_record")}
    for names, message in ((["a", "b", "a"], "the same name: a$"), *(([name], messages[name]) for name in messages)):
        bad = Bad(PEAK)
        bad.names = names  # type: ignore[attr-defined]
        for store in (None, tmp_path / "x.pm"):
            with pytest.raises(ValueError, match=message):
                bad.run(store)
    with pytest.raises(ValueError, match="not 'stored'"):
        pmstore.Field("x", role="stored")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs axes"):
        pmstore.Field("x", role="derived")
    with pytest.raises(ValueError, match="MT19937"):
        pmstore.Field("x", generator=np.random.RandomState(np.random.PCG64(1)))  # type: ignore[arg-type]


def test_state_has_its_fields_and_no_others() -> None:
    climb = Climb(PEAK)
    state = climb.run()
    assert state is climb.state and "place" not in dir(climb) and "height" in dir(state)
    for name in ("nothing", "place", "distances"):  # the working and the derived ones are gone
        with pytest.raises(AttributeError, match=name):
            getattr(state, name)
    with pytest.raises(AttributeError, match="none of the fields"):
        state.nothing = 1
    with pytest.raises(TypeError, match="generator"):
        state.old = 1


@pytest.mark.parametrize("again", [deepcopy, lambda climb: pickle.loads(pickle.dumps(climb))])
@pytest.mark.parametrize("stored", [False, True])
def test_a_finished_algorithm_can_be_copied_and_pickled(again: Any, stored: bool, path: Path) -> None:
    climb = Climb(PEAK)
    climb.run(path if stored else None, "climb" if stored else None)
    other = again(climb)
    path.unlink(missing_ok=True)
    for name in ("height", "iteration", "best_run"):
        assert np.array_equal(other.state[name], climb.state[name]), name
    other.state.iteration += 1
    assert other.state.iteration == climb.state.iteration + 1
    assert other.run(path, "climb").height == climb.run().height


def test_the_state_of_a_fit_that_went_on_can_be_copied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, copies = Climb.step, []

    def live(state: pmstore.State) -> dict[str, Any]:
        names = ("iteration", "height", "heights", "place", "tries/last", "distances", "best/place")
        return {name: np.array(state[name]).tolist() for name in names}

    def step_and_copy(climb: Climb) -> None:
        step(climb)
        copies.append((deepcopy(climb.state), live(climb.state)))

    with interrupted(Climb, 4):
        Climb(PEAK).run(path, "climb")
    monkeypatch.setattr(Climb, "step", step_and_copy)
    Climb(PEAK).run(path, "climb")
    path.unlink()
    assert len(copies) > 3
    assert all(live(copy) == wanted for copy, wanted in copies)


def test_a_state_whose_store_was_closed_can_be_copied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, states = Climb.step, []

    def kept(climb: Climb) -> None:
        step(climb)
        states.append(climb.state)

    monkeypatch.setattr(Climb, "step", kept)
    with interrupted(Climb, 4):
        Climb(PEAK).run(path, "climb")
    copy = deepcopy(states[-1])
    assert copy["place"].tolist() == states[-1]["place"].tolist()
    with pytest.raises(KeyError, match="best/place"):
        copy["best/place"]


def test_an_algorithm_without_an_end_is_refused() -> None:
    class Endless(Climb):
        max_iter = None  # type: ignore[assignment]
        converged = pmstore.Resumable.converged

    with pytest.raises(TypeError, match="Endless would never end"):
        Endless(PEAK).run()


def test_without_xxhash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    with pytest.raises(ModuleNotFoundError, match="pip install xxhash"):
        Climb(PEAK).run(tmp_path / "x.pm")
    Climb(PEAK).run()


class Between(pmstore.Resumable):
    """A walk that two generators of the old kind disagree about."""

    max_iter = 4

    def __init__(self) -> None:
        self.up, self.down = np.random.RandomState(1), np.random.RandomState(2)

    def fields(self) -> Any:
        yield pmstore.Field("place")
        yield pmstore.Field("up", generator=self.up)
        yield pmstore.Field("down", generator=self.down)

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self.state.place = 0

    def step(self) -> None:
        self.state.place += self.up.uniform() - 2 * self.down.uniform()


def test_each_of_two_generators_goes_on_where_it_was(path: Path) -> None:
    whole = Between()
    with copied(path) as copies:
        whole.run(path, "walk")
    for copy in copies:
        resumed = Between()
        resumed.run(copy, "walk")
        assert resumed.state.place == whole.state.place
