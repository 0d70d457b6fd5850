"""pmstore.history: one row for every committed iteration, after kills too."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import pmstore
import pmstore.testing
from pmstore._locks import RowPage
from pmstore._resume import history as rows
from pmstore._values.array import address_of
from pmstore.cluster import KMeans
from pmstore.mixture import GaussianMixture
from tests.core.test_readers_damage import before_each_read
from tests.resume.test_changed_state import FITS, X, unfinished
from tests.support.resuming import copied, interrupted

pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.usefixtures("one_thread"),
]

CLOCKS = ("time", "seconds", "attempt")


class Fall(pmstore.Resumable):
    """Something that halves, in two runs."""

    runs = 2

    def __init__(self, iterations: int = 40) -> None:
        self.max_iter = iterations

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("height")]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self.state.height = 2.0 ** (9 + self.state.run)

    def step(self) -> Mapping[str, float] | None:
        self.state.height /= 2
        return {"drop": self.state.height, "objective": self.state.height}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that grow soon."""
    monkeypatch.setattr(rows, "PAGE", 2)
    monkeypatch.setattr(rows, "BLOCK", 32)


def figures(history: pmstore.History, last: int | None = None) -> dict[str, list[float]]:
    """What two runs of the same fit have in common, up to a row; NaN as a text, which equals itself."""
    return {name: list(map(str, column[:last].tolist())) for name, column in history.items() if name not in CLOCKS}


@pytest.mark.parametrize("fit", FITS)
def test_a_killed_fit_has_the_history_of_an_undisturbed_one(fit: str, path: Path) -> None:
    with copied(path) as copies:
        result = FITS[fit](path)
    whole = pmstore.history(path, "fit")
    assert whole.finished and len(whole["iteration"]) > 2 and set(whole["attempt"]) == {1}
    assert (np.diff(whole["time"]) >= 0).all() and (whole["seconds"] > 0).all()
    if fit != "learned":
        assert fit in ("philox", "twister") or figures(result.history_) == figures(whole)
    for killed in (copies[0], copies[len(copies) // 2]):
        with pmstore.open(killed, "r") as store:
            before, progress = pmstore.history(store, "fit"), store["fit/progress"].copy()
            assert "fit/history/newest" not in store or store["fit/history/newest"].itemsize <= 64
        done = len(before["iteration"])
        assert not before.finished and (figures(before) == figures(whole, done) or not done)
        if progress["iteration"]:
            assert (before["iteration"][-1], before["run"][-1]) == (progress["iteration"], progress["run"])
        FITS[fit](killed)
        after = pmstore.history(killed, "fit")
        assert figures(after) == figures(whole)
        assert after["attempt"].tolist() == [1] * done + [min(done, 1) + 1] * (len(whole["iteration"]) - done)
        assert after["time"][:done].tolist() == before["time"].tolist()


def test_every_row_is_there_after_every_commit_while_the_table_grows(path: Path, short: None) -> None:
    with copied(path) as copies:
        Fall().run(path, "fall")
    for n, killed in zip([*range(41), 40, *range(41, 81)], copies):  # the start and the end of a run add no row
        history = pmstore.history(killed, "fall")
        assert history["iteration"].tolist() == [*range(1, 41), *range(1, 41)][:n]
        assert history["run"].tolist() == [0] * min(n, 40) + [1] * (n - 40)
        assert history["objective"].tolist() == [2.0 ** (8 - i) for i in range(40)][:n] + [
            2.0 ** (9 - i) for i in range(n - 40)
        ]
        if n % 9 == 0:
            again = Fall()
            again.run(killed, "fall")
            assert len(again.history_["iteration"]) == 80 and again.history_["attempt"][n] == min(n, 1) + 1


@pytest.mark.parametrize("medium", ["memory", "file"])
def test_the_row_and_the_state_agree_after_every_crash(medium: str, short: None) -> None:
    def check(store: pmstore.Store) -> None:
        if "fall/progress" in store:
            progress, history = store["fall/progress"], pmstore.history(store, "fall")
            assert len(history["iteration"]) == 8 * progress["run"] + progress["iteration"]
            assert (history["objective"] == history.get("drop", [])).all()

    @pmstore.testing.crash_test(check=check, budget=150, media=medium)
    def falling(store: pmstore.Store) -> None:
        Fall(8).run(store, "fall")

    falling()


def test_it_can_be_read_while_the_fit_runs_and_has_committed_rows_only(path: Path, short: None) -> None:
    lengths: list[int] = []

    def look(store: pmstore.Store) -> None:
        thread = threading.Thread(target=lambda: lengths.append(len(pmstore.history(store, "fall")["iteration"])))
        thread.start()
        thread.join()

    class Watched(Fall):
        runs = 1

        def step(self) -> Mapping[str, float] | None:
            if self.state.iteration % 3 == 2:  # two rows are written and not committed
                look(store)
            return super().step()

    with pmstore.open(path) as store:
        Watched(18).run(store, "fall", commit_every=3)
        assert lengths == [0, 3, 6, 9, 12, 15]
        look(store)
    assert lengths[-1] == 18


def test_a_fit_of_an_older_version_begins_a_history(path: Path, short: None) -> None:
    with interrupted(Fall, 50):
        Fall().run(path, "fall")
    with pmstore.open(path) as store:
        assert len(pmstore.history(store, "fall")["iteration"]) == 50
        store.group("fall/history").clear()
        assert pmstore.history(store, "fall")["objective"].shape == (0,)
    again = Fall()
    again.run(path, "fall")
    assert again.history_["iteration"].tolist() == [*range(11, 41)] and set(again.history_["run"]) == {1}


def test_new_figures_get_columns(path: Path, short: None) -> None:

    class More(Fall):
        def step(self) -> Mapping[str, float] | None:
            step = super().step() or {}
            return step if self.state.iteration < 5 else {"more": 7.0, **step}

    algorithm = More(12)
    algorithm.run(path, "more")
    assert algorithm.history_["drop"].tolist() == algorithm.history_["objective"].tolist()
    assert algorithm.history_["more"].tolist()[3:7] == pytest.approx([np.nan, np.nan, 7, 7], nan_ok=True)


def test_what_it_gives(path: Path) -> None:
    model = KMeans(3, n_init=2, max_iter=7, random_state=0, store=path, name="fit").fit(X)
    history = model.history_
    assert list(history) == ["iteration", "run", "objective", "shift", "seconds", "time", "attempt"]
    assert (history.max_iter, history.runs, history.finished) == (7, 2, True)
    assert {column.dtype.str for column in history.values()} == {"<i8", "<f8"}
    assert repr(history).startswith(f"<History of a fit (finished), {len(history['iteration'])} iterations: iteration,")
    for again in (pickle.loads(pickle.dumps(history)), copy.deepcopy(history)):
        assert figures(again) == figures(history) and again.max_iter == 7
    history["objective"][:] = 0  # a copy
    assert pmstore.history(path, "fit")["objective"].all()
    with pmstore.open(path, "r") as store:
        assert figures(KMeans(3, n_init=2, max_iter=7, random_state=0, store=store, name="fit").fit(X).history_)
    assert not hasattr(model.set_params(store=None).fit(X), "history_")
    in_memory = Fall()
    in_memory.run()
    assert len(in_memory.history_["iteration"]) == 80


def test_the_objective_is_that_of_the_algorithm(path: Path) -> None:
    for algorithm in ("lloyd", "elkan"):
        model = KMeans(3, random_state=0, algorithm=algorithm, max_iter=4, tol=0, store=path).fit(X)
        assert (np.diff(model.history_["objective"]) < 1e-9).all()
        again = KMeans(3, random_state=0, algorithm=algorithm, tol=0, store=path).fit(X)
        assert again.history_["objective"][-1] == pytest.approx(again.inertia_, rel=1e-12)
    mixture = GaussianMixture(2, random_state=0, store=path).fit(X)
    assert mixture.history_["objective"].tolist() == mixture.lower_bounds_


@pytest.mark.parametrize("name", ["nothing", "w", "fit/history"])
def test_a_name_that_is_no_fit(name: str, path: Path) -> None:
    path.write_bytes(unfinished("lloyd"))
    with pmstore.open(path) as store:
        store["w"] = np.zeros(3)
        with pytest.raises(
            pmstore.UnknownNameError, match=f"no fit '{name}' in the store; the store has the fits 'fit'"
        ):
            pmstore.history(store, name)
    with pytest.raises(pmstore.UnknownNameError, match="the store has the fits 'fit'"):
        pmstore.history(path, name)
    with pmstore.open(path) as store:
        store.clear()
        with pytest.raises(KeyError, match="the store has no fits"):
            pmstore.history(store, name)
    with pytest.raises(pmstore.StoreNotFoundError):
        pmstore.history(path.with_name("none.pm"), name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("newest", 7),
        ("newest", np.zeros(256)),
        ("limits", {"max_iter": "many"}),
        ("0", np.zeros((2, 2))),
        ("0", "odd"),
    ],
)
def test_a_history_that_somebody_changed(name: str, value: Any, path: Path) -> None:
    path.write_bytes(unfinished("lloyd"))
    with pmstore.open(path) as store:
        page = store["fit/history/newest"]
        store[f"fit/history/{name}"] = page[:1] if isinstance(value, str) else value
        for use in (lambda: pmstore.history(store, "fit"), lambda: FITS["lloyd"](store)):
            with pytest.raises(pmstore.FingerprintMismatchError, match=rf"'history/{name}' must be .*reset\(\)"):
                use()


def test_figures_of_any_order_and_kind() -> None:
    """The quick way in C and the other one write the same rows, over several pages, and a failure writes none. The
    clock is asked once for each row."""
    group: dict[str, Any] = {}
    times = itertools.count()
    written = rows.Rows(group, None, 2, lambda: float(next(times)))
    figures: list[Any] = [
        {"objective": 1, "shift": np.float32(2)},
        {"shift": 4.0, "objective": 3.0},
        {"objective": True},
        {"objective": 2**70, "shift": np.int64(6)},
        None,
        {},
        types.MappingProxyType({"shift": 8, "objective": 7}),
    ]
    expected = [(1, 2), (3, 4), (1, np.nan), (2.0**70, 6), (np.nan, np.nan), (np.nan, np.nan), (7, 8)]
    count = 3 * rows.PAGE + 10
    for i in range(count):
        for bad in ({"objective": "low", "shift": 1}, {"objective": 1, "shift": None}):
            if i % 100 == 0 and i:
                with pytest.raises(TypeError, match="must be numbers"):
                    written.add(0, i + 1, 0.5, bad)
        written.add(i % 2, np.int64(i + 1), np.float64(0.25), figures[i % len(figures)])  # type: ignore[arg-type]
    found = rows.history_of(group)
    assert written.count == count == len(found["run"])
    assert (found["iteration"] == np.arange(1, count + 1)).all() and (found["run"] == np.arange(count) % 2).all()
    assert (found["time"] == np.arange(count)).all()
    assert set(found["seconds"][1:]) == {0.25} and set(found["attempt"]) == {1}
    wanted = np.array([expected[i % len(expected)] for i in range(count)])
    np.testing.assert_array_equal(np.column_stack([found["objective"], found["shift"]]), wanted)


def test_a_row_that_is_added_while_another_one_is() -> None:
    """A clock, or a figure, is code of the caller's: nothing is written behind the page."""
    page = np.zeros(4, "i4, i4, i8, f8, f8, f8")
    ends = 2 * page.itemsize
    again = [True]

    def clock() -> float:
        if again:
            again.clear()
            rows_of_page.add(0, 7, 0.0, {"objective": 7.0})
        return 1.0

    address = address_of(page)
    rows_of_page = RowPage(page, address, page.itemsize, ends, page.itemsize, ("objective",), 1, clock)
    with pytest.raises(RuntimeError, match="another row was added"):
        rows_of_page.add(0, 1, 0.0, {"objective": 2.0})
    assert rows_of_page.place == ends and page["f2"].tolist() == [0, 7, 0, 0]


def test_pages_that_can_not_be(path: Path) -> None:
    page = np.zeros(4, "i4, i4, i8, f8, f8, f8")
    address = address_of(page)

    def made(place: int, end: int, row: int, names: Any) -> RowPage:
        return RowPage(page, address, place, end, row, names, 1, float)

    for place, end, row, names in (
        (8, 160, 40, ("a",)),
        (-40, 160, 40, ("a",)),
        (0, 150, 40, ("a",)),
        (0, 160, 40, ("a", "b")),
        (0, 160, 40, ["a"]),
        (0, 960, 96 + 8, ("a",) * 9),
    ):
        with pytest.raises(ValueError, match="no such rows"):
            made(place, end, row, names)
    newest = made(120, 160, 40, ("a",))
    assert newest.add(1, 2, 3.0, {"a": 4}) and newest.place == 160
    assert not newest.add(1, 2, 3.0, {"a": 4}) and newest.place == 160
    assert not made(0, 160, 40, ("a",)).add(2**40, 2, 3.0, {"a": 4})
    with pytest.raises(TypeError, match="takes run"):
        newest.add(1)  # type: ignore[call-arg]
    assert page[3].tolist() == (1, 1, 2, 0.0, 0.0, 4.0) and not page[:3].view(np.uint8).any()


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ({"objective": "low"}, TypeError, "must be numbers, not {'objective': 'low'}"),
        ({"time": 1.0}, ValueError, "whose names are not .*time"),
        (dict.fromkeys("abcd", 1.0), ValueError, r"step\(\) may return the figure 'objective' and at most 3 others"),
        (5, TypeError, r"^step\(\) returns a dict of figures, or None, not 5$"),
    ],
)
def test_bad_figures(returned: Any, error: type[Exception], message: str, path: Path) -> None:
    class Bad(Fall):
        def step(self) -> Mapping[str, float] | None:
            super().step()
            return returned  # type: ignore[no-any-return]

    with pytest.raises(error, match=message):
        Bad().run(path, "bad")
    with pytest.raises(ValueError, match="no field can have them: history, history/x$"):
        pmstore.State([pmstore.Field("history"), pmstore.Field("history/x", 3)])


def test_a_history_beside_a_quick_writer(path: Path) -> None:
    """Commits change the rows before a snapshot has copied them: arrays before them have its room for small ones."""
    Fall().run(path, name="fit")
    with pmstore.open(path, "r+") as writer:
        for i in range(4):
            writer[f"a{i}"] = np.zeros(32_768)  # 256 KiB
        writer.commit()
        newest = writer["fit/history/newest"]

        def commit_before_a_read() -> None:
            newest["seconds"][0] += 1
            writer.commit()

        with pmstore.open(path, "r") as snapshot:
            commit_before_a_read()
            assert pmstore.history(snapshot, "fit")["seconds"][0] == newest["seconds"][0]
            assert snapshot.sequence == writer.sequence
        with before_each_read(commit_before_a_read):
            assert len(pmstore.history(path, "fit")["seconds"]) == 80
