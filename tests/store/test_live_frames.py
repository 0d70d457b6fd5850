"""Frames of pandas whose arrays are live: what pandas makes of them is not, and changes that are lost are told."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.support.interrupting import signalled_at

MADE_OF_A_FRAME = {
    "rename": lambda frame: frame.rename(columns=str.upper),
    "reset_index": lambda frame: frame.reset_index(drop=True),
    "astype": lambda frame: frame.astype("f8"),
    "assign": lambda frame: frame.assign(z=1.0),
    "columns": lambda frame: frame[["x", "n"]],
    "column": lambda frame: frame["x"],
    "rows": lambda frame: frame.iloc[:2],
    "concat": lambda frame: pytest.importorskip("pandas").concat([frame], axis=1),
    "shallow": lambda frame: frame.copy(deep=False),
    "nullable": lambda frame: frame[["n"]].rename(columns=str.upper),
    "renamed column": lambda frame: frame["x"].rename("y"),
}


def copies_on_write() -> Any:
    """pandas, or a skip of the test if its frames share what is written."""
    pandas = pytest.importorskip("pandas")
    if int(pandas.__version__.partition(".")[0]) < 3:
        pytest.skip("before pandas 3, what is made of a frame may share its arrays")
    return pandas


@pytest.mark.parametrize("between", ["", "commit", "rollback", "commits and reads", "assigned"])
@pytest.mark.parametrize("way", MADE_OF_A_FRAME)
def test_what_pandas_makes_of_a_frame_is_not_live(open_store: Any, way: str, between: str) -> None:
    """Also when the frame that the store gave is gone: pandas promises a copy."""
    pandas = copies_on_write()
    frame = pandas.DataFrame({"x": [1.0, 2.0, 3.0], "n": pandas.array([1, 2, 3], "Int64")})
    with open_store() as store:
        store["f"] = frame
        store.commit()
        made = MADE_OF_A_FRAME[way](store["f"])
        for turn in range(5 if between == "commits and reads" else bool(between)):
            if turn:
                assert store["f"].loc[0, "x"] == 1.0
            store["k"] = turn
            if between == "assigned":
                store["f"] = store["f"]
            (store.rollback if between == "rollback" else store.commit)()
        made.iloc[(0,) * made.ndim] = 99
        assert 99 in made.to_numpy()
        pandas.testing.assert_frame_equal(store["f"], frame)
        store["f"].loc[1, "x"] = -1.0  # this is
    with open_store(mode="r") as store:
        assert store["f"]["x"].tolist() == [1.0, -1.0, 3.0]


@pytest.mark.parametrize("what", ["numbers", "times", "categories", "levels", "nullable", "index categories", "ends"])
def test_what_pandas_makes_of_an_index_is_not_live(open_store: Any, what: str) -> None:
    pandas = pytest.importorskip("pandas")
    index = pandas.date_range("2020", periods=3) if what == "times" else pandas.Index([10.0, 20.0, 30.0])
    frame = pandas.DataFrame({"c": pandas.Categorical([5.0, 6.0, 5.0])}, index=index)
    if what == "levels":
        frame.index = pandas.MultiIndex.from_product([[1.0, 2.0, 3.0], ["a"]])
    if what == "nullable":
        frame.index = pandas.Index([1, 2, 3], dtype="Int64")
    if what == "index categories":
        frame.index = pandas.CategoricalIndex([1.0, 2.0, 1.0])
    if what == "ends":
        frame.index = pandas.interval_range(0.0, 3.0)
    with open_store() as store:
        store["f"] = frame
        store.commit()
        given = store["f"]
        indices = {
            "categories": given["c"].cat.categories,
            "levels": getattr(given.index, "levels", [None])[0],
            "index categories": getattr(given.index, "categories", None),
            "ends": getattr(given.index, "left", None),
        }
        made = pandas.Series(indices.get(what, given.index))
        del given, indices
        store.commit()
        store.commit()
        made[0] = made[1]
    with open_store(mode="r") as store:
        pandas.testing.assert_frame_equal(store["f"], frame, check_freq=True)


def test_an_interrupt_while_a_frame_goes(store: Any) -> None:
    pandas = copies_on_write()
    frames: list[Any] = []

    def go() -> None:
        frames.clear()
        store.commit()

    moment, reached = 0, True
    while reached:
        moment += 1
        store["f"] = pandas.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]})
        store.commit()
        frames.append(store["f"])
        made = frames[0].rename(columns=str.upper)
        reached = signalled_at(moment, go)
        made.iloc[0, :] = -1.0
        assert store["f"]["x"].tolist() == [1.0, 2.0]
    assert moment > 5


def test_a_frame_is_not_kept(store: Any) -> None:
    """What is made of it is no live array all the same, until it is gone or has arrays of its own."""
    pandas = copies_on_write()
    store["f"] = pandas.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]})
    store.commit()
    guards = store._catalog.lost_updates.guards
    for change in (
        lambda frame: frame.sum(),
        lambda frame: frame.__setitem__("z", frame["x"]),
        lambda frame: setattr(frame, "index", frame["x"]),
        lambda frame: frame.set_index("x", drop=False, inplace=True),
        lambda frame: frame.describe(),
    ):
        frame = store["f"]
        change(frame)
        given, made = weakref.ref(frame), frame.rename(columns=str.upper)
        del frame
        for _ in range(3):
            store.commit()
        assert given() is None and guards
        made.iloc[0, :] = -1.0
        assert store["f"]["x"].tolist() == [1.0, 2.0]
        del made
        store.commit()
        assert not guards


LEAVE = {
    "assigned": lambda frame: frame.__setitem__("x", 0.0),
    "popped": lambda frame: frame.pop("x"),
    "deleted": lambda frame: frame.__delitem__("x"),
    "under another name": lambda frame: (frame.__setitem__("z", frame["x"]), frame.pop("x")),
    "an index": lambda frame: frame.set_index("x", inplace=True),
    "dropped": lambda frame: frame.drop(columns="x", inplace=True),
    "doubled": lambda frame: frame.__imul__(2),
    "copied on write": lambda frame: frame.loc.__setitem__((0, "x"), 7.0),
}


@pytest.mark.parametrize("change", LEAVE)
def test_an_array_that_the_frame_itself_has_left(store: Any, change: str) -> None:
    pandas = copies_on_write()
    store["f"] = pandas.DataFrame({"x": [1.0, 2.0, 3.0]})
    store.commit()
    frame = store["f"]
    made = frame["x"].rename("other")
    LEAVE[change](frame)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pmstore.LostUpdateWarning)
        store.commit()
    made[0] = 99.0
    if "z" in frame:
        frame.loc[1, "z"] = 99.0
    assert store["f"]["x"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("change", ["del", "pop", "drop", "assign another"])
def test_the_other_columns_stay_live(store: Any, change: str) -> None:
    """pandas makes new blocks of them."""
    pandas = copies_on_write() if change == "drop" else pytest.importorskip("pandas")  # pandas 2 copies all
    store["f"] = pandas.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]})
    store.commit()
    frame = store["f"]
    if change == "del":
        del frame["y"]
    elif change == "pop":
        frame.pop("y")
    elif change == "drop":
        frame.drop(columns="y", inplace=True)
    else:
        frame["y"] = 5.0
    store["f"] = frame
    for turn in range(3):
        frame.loc[0, "x"] = 7.0 + turn
        assert store["f"].loc[0, "x"] == 7.0 + turn
        store.commit()


def test_many_changes_in_place(store: Any) -> None:
    """Each is one of the live array."""
    pandas = pytest.importorskip("pandas")
    store["f"] = pandas.DataFrame({"x": [1.0, 2.0, 3.0], "n": pandas.array([1, 2, None], "Int64")})
    store["s"] = pandas.Series([1.0, 2.0])
    store.commit()
    frame, series = store["f"], store["s"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", pmstore.LostUpdateWarning)
        for turn in range(5):
            frame.loc[0, "x"] = frame.iloc[1, 0] = frame.at[2, "x"] = float(turn)
            frame.loc[frame["x"] == turn, "n"] = turn
            frame.iloc[:, 0] += 1.0
            series.loc[0] = series.iloc[1] = float(turn)
            assert frame.rename(columns=str.upper).shape == (3, 2) and len(series.rename("t")) == 2
            store.commit()
            assert store["f"].equals(frame) and store["s"].equals(series)
            assert store["f"]["x"].tolist() == [turn + 1.0] * 3 and store["s"].tolist() == [turn] * 2


def test_a_change_of_a_frame_that_the_store_lacks_is_told(store: Any) -> None:
    pandas = pytest.importorskip("pandas")
    store["f"] = pandas.DataFrame({"x": [1.0, 2.0], "text": ["a", "b"]})
    store["s"] = pandas.Series([1.0, 2.0])
    store.commit()
    frame, series = store["f"], store["s"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.commit()
        frame.loc[0, "x"], series.loc[0] = 5.0, 5.0
        assert frame.describe().shape and len(frame.rename(columns=str.upper)) == 2
        store.commit()
    assert store["f"].loc[0, "x"] == store["s"].loc[0] == 5.0

    def told(what: str) -> None:
        with pytest.warns(pmstore.LostUpdateWarning, match=f"'{what}' was read from the store and changed, but not"):
            store.commit()

    frame = store["f"]
    frame["x"] = frame["x"] * 2  # an array of its own
    told("f")
    assert store["f"].loc[0, "x"] == 5.0
    store["f"] = frame
    frame = store["f"]
    assert frame.loc[0, "x"] == 10.0
    frame["more"] = 1
    told("f")
    series = store["s"]
    series.index = [3, 4]
    told("s")
    copies_on_write()
    frame = store["f"]
    column = frame["x"]
    frame.loc[0, "x"] = -1.0  # pandas copies, because the column is in use
    told("f")
    assert column[0] == store["f"].loc[0, "x"] == 10.0


COPIES = {
    "text": lambda frame: frame.loc.__setitem__((0, "text"), "c"),
    "object": lambda frame: frame.loc.__setitem__((0, "object"), 2),
    "zoned": lambda frame: frame.loc.__setitem__((0, "zoned"), frame["zoned"][1]),
    "a name": lambda frame: setattr(frame.index, "name", "row"),
    "attrs": lambda frame: frame.attrs.update(unit="m"),
    "a row": lambda frame: frame.loc.__setitem__(0, frame.loc[1]),
    "order": lambda frame: frame.sort_values("x", ascending=False, inplace=True),
}


@pytest.mark.parametrize("where", ["name", "attribute", "element"])
@pytest.mark.parametrize("change", COPIES)
def test_a_change_of_a_copy_in_a_frame_is_told(store: Any, change: str, where: str) -> None:
    pandas = pytest.importorskip("pandas")
    zoned = pandas.date_range("2020", periods=2, tz="Europe/Berlin")
    texts = pandas.array(["a", "b"], "string[python]")
    value = pandas.DataFrame({"x": [1.0, 2.0], "text": texts, "zoned": zoned, "object": np.array([1, "a"], object)})
    if where == "name":
        store["f"] = value
    elif where == "attribute":
        store.attrs["f"] = value
    else:
        store.create_list("l").append(value)
    store.commit()
    frame = store["f"] if where == "name" else store.attrs["f"] if where == "attribute" else store["l"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.commit()
        store.commit()
    COPIES[change](frame)
    with pytest.warns(pmstore.LostUpdateWarning, match="was read from the store and changed"):
        for _ in range(4):
            store.commit()


EQUAL = {
    "labels": lambda frame: setattr(frame, "columns", list(frame.columns)),
    "index": lambda frame: setattr(frame, "index", pytest.importorskip("pandas").RangeIndex(len(frame))),
    "column": lambda frame: frame.__setitem__("x", frame["x"].to_numpy()),
    "no missing ones": lambda frame: frame.fillna({"x": 0.0}, inplace=True),
}


@pytest.mark.parametrize("change", EQUAL)
def test_a_frame_with_other_arrays_of_the_same_contents(store: Any, change: str) -> None:
    pandas = pytest.importorskip("pandas")
    store["f"] = pandas.DataFrame({"x": [1.0, 2.0], "text": ["a", "b"]})
    store.commit()
    frame = store["f"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", pmstore.LostUpdateWarning)
        EQUAL[change](frame)
        for _ in range(3):
            store.commit()
    frame.loc[:, "text"] = "c"
    with pytest.warns(pmstore.LostUpdateWarning, match="'f' was read from the store and changed"):
        for _ in range(8):
            store.commit()


def test_a_column_that_was_new_when_the_frame_was_assigned(store: Any) -> None:
    """The store has a copy of it."""
    pandas = pytest.importorskip("pandas")
    store["f"] = pandas.DataFrame({"x": [1.0, 2.0]})
    frame = store["f"]
    frame["y"] = 1.0
    store["f"] = frame
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frame.loc[0, "x"] = 5.0
        for _ in range(4):
            store.commit()
    assert store["f"].loc[0, "x"] == 5.0
    frame.loc[0, "y"] = 9.0
    with pytest.warns(pmstore.LostUpdateWarning, match="'f' was read from the store and changed"):
        for _ in range(16):
            store.commit()
