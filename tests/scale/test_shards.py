"""The shards of a data set: which rows each has, and what travels to workers."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.cluster import KMeans
from pmstore.decomposition import IncrementalPCA
from pmstore.mixture import GaussianMixture
from pmstore.scale import Serial, Shard, _shards, shards_of

ROWS = np.arange(300.0).reshape(100, 3)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100])
def test_an_array_has_16_shards_of_about_the_same_size(rows: int, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS[:rows])
    for data in (ROWS[:rows], str(tmp_path / "rows.npy")):
        found = [shard() for shard in shards_of(data)]
        assert len(found) == min(rows, 16) and np.array_equal(np.concatenate(found), ROWS[:rows])
        assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("size, count", [(150, 16), (149, 17), (24, 100), (23, 100)])
def test_large_arrays_have_more_shards(size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shards, "BYTES", size)
    assert len(shards_of(ROWS)) == count


def test_data_without_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "none.npy", ROWS[:0])
    for data in ([], ROWS[:0], tmp_path / "none.npy"):
        with pytest.raises(ValueError, match="no shards: the data are empty"):
            shards_of(data)
    (tmp_path / "bin").write_bytes(bytes(8))
    for array in (ROWS[:0], np.memmap(tmp_path / "bin", np.float32, "r", shape=(0, 3))):
        (shard,) = shards_of([array])
        assert shard().shape == (0, 3) and shard().dtype == array.dtype


def test_an_array_or_a_file_in_a_list_is_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has cut the data already. Only files that are too large for one are cut."""
    np.save(tmp_path / "rows.npy", ROWS[:20])
    own = Shard(np.full, (2, 3), 7.0)
    found = shards_of((ROWS[:30], tmp_path / "rows.npy", own, np.asfortranarray(ROWS[50:])))
    assert len(found) == 4 and found[2] is own and shards_of(own) == (own,)
    expected = np.concatenate([ROWS[:30], ROWS[:20], np.full((2, 3), 7.0), ROWS[50:]])
    assert np.array_equal(np.concatenate([shard() for shard in found]), expected)
    monkeypatch.setattr(_shards, "BYTES", 150)
    assert [len(shard()) for shard in shards_of([tmp_path / "rows.npy"])] == [5, 5, 5, 5]


def changed(array: Any) -> Any:
    array[40] = -1
    return array


def replaced(array: Any) -> Any:
    path = Path(array.filename)
    (path.parent / "other").write_bytes(bytes(path.stat().st_size))
    os.replace(path.parent / "other", path)
    return array


# A map of the rows behind a header of 48 bytes, and whether workers map the file again.
MAPS: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "read-only": (lambda path: np.memmap(path, "f8", "r", 48, (100, 3)), True),
    "writeable": (lambda path: changed(np.memmap(path, "f8", "r+", 48, (100, 3))), True),
    "of integers": (lambda path: np.memmap(path, "<i4", "r", 48, (100, 2, 3)), True),
    "one column": (lambda path: np.memmap(path, "f8", "r", 48, (300, 1)), True),
    "one axis": (lambda path: np.memmap(path, "f8", "r", 48), True),
    "F order": (lambda path: np.memmap(path, "f8", "r", 48, (100, 3), "F"), False),
    "changed in memory": (lambda path: changed(np.memmap(path, "f8", "c", 48, (100, 3))), False),
    "rows of a map": (lambda path: np.memmap(path, "f8", "r", 48, (100, 3))[7:90], False),
    "columns of a map": (lambda path: np.memmap(path, "f8", "r", 48, (100, 3))[:, 1:], False),
    "of a file that was replaced": (lambda path: replaced(np.memmap(path, "f8", "r", 48, (100, 3))), False),
    "in memory": (lambda path: changed(np.memmap(path, "f8", "r", 48, (100, 3)) + 1), False),
}


@pytest.mark.parametrize("kind", MAPS)
def test_memory_maps(kind: str, tmp_path: Path) -> None:
    """A worker maps the file again. Rows that the file does not have in one piece travel."""
    made, mapped = MAPS[kind]
    (tmp_path / "rows").write_bytes(bytes(48) + ROWS.tobytes())
    array = made(tmp_path / "rows")
    for data, count in ((array, 16), ([array], 1)):
        shards = shards_of(data)
        assert len(shards) == count
        for several in (shards, pickle.loads(pickle.dumps(shards))):
            found = [shard() for shard in several]
            assert np.array_equal(np.concatenate(found), array) and found[0].dtype == array.dtype
            assert all(isinstance(one, np.memmap) == mapped for one in found)
            assert mapped == (len(pickle.dumps(several[-1])) < 350)


def test_arguments_keep_their_type() -> None:
    """Also arrays with gaps, which are copied."""
    masked = np.ma.masked_less(ROWS, 9)
    assert Shard(np.ma.count, masked[:, ::2])() == Shard(np.ma.count, a=masked[:, ::2])() == 2 * 97


class Words(pmstore.MapReduce):
    max_iter = 1

    def __init__(self, shards: Any) -> None:
        self.shards = shards

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("length", dtype=int)]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        pass

    def map(self, shard: Any, shared: Any, rng: Any) -> dict[str, Any]:
        assert not shard.flags.writeable
        return {"length": sum(len(str(word)) for word in shard.flat)}

    def update(self, total: Any) -> None:
        self.state.length = total["length"]


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 2 has it")
def test_arrays_of_text(tmp_path: Path) -> None:
    """A loader may return them; the hash of the contents covers each element."""
    kinds = ["U", np.dtypes.StringDType(), object]
    shards = [Shard(np.array, ["text", "a" * n], dtype) for n, dtype in enumerate(kinds)]
    assert Words(shards).run(tmp_path / "text.pm", "text", engine=Serial()).length == 3 * 4 + 0 + 1 + 2
    for changed in range(3):
        others = [Shard(np.array, ["tex2", "a" * n], kinds[n]) if n == changed else shards[n] for n in range(3)]
        with pytest.raises(pmstore.FingerprintMismatchError, match=f"shard {changed}"):
            Words(others).run(tmp_path / "text.pm", "text", engine=Serial())
    with pytest.raises(ValueError, match="of StringDType.*needs real numbers"):
        KMeans(2, engine=Serial()).fit(Shard(np.array, [["text"]], kinds[1]))


def test_row_groups_of_a_parquet_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: make test-frames installs it")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(dict(zip("abc", ROWS.T))), tmp_path / "rows.parquet", row_group_size=30)
    found = [shard() for shard in shards_of(str(tmp_path / "rows.parquet"))]
    assert list(map(len, found)) == [30, 30, 30, 10] and np.array_equal(np.concatenate(found), ROWS)


def test_columns_of_parquet_files_go_by_their_names(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: make test-frames installs it")
    parquet = pytest.importorskip("pyarrow.parquet")
    a, b, c = ROWS.T
    parquet.write_table(pyarrow.table({"a": a, "b": b, "c": c}), tmp_path / "abc.parquet")
    parquet.write_table(pyarrow.table({"c": c, "a": a, "b": b}), tmp_path / "cab.parquet")
    parquet.write_table(pyarrow.table({"a": a, "b": b, "d": c}), tmp_path / "abd.parquet")
    paths = [tmp_path / "cab.parquet", ROWS[:5], tmp_path / "abc.parquet"]
    first, _, second = (shard() for shard in shards_of(paths))
    assert np.array_equal(first, ROWS[:, [2, 0, 1]]) and np.array_equal(second, first)
    text = r"the columns \['c', 'd'\] are only in one of .*abd.parquet' and .*abc.parquet'"
    with pytest.raises(ValueError, match=text):
        shards_of([tmp_path / "abc.parquet", tmp_path / "abd.parquet"])


@pytest.mark.parametrize("kind", [KMeans, GaussianMixture, IncrementalPCA])
def test_predictions_take_the_columns_of_the_fit(kind: Any, tmp_path: Path) -> None:
    """Columns of .parquet files go by their names, also if the fit was one of a data frame."""
    pandas = pytest.importorskip("pandas", reason="no pandas: make test-frames installs it")
    pytest.importorskip("pyarrow", reason="no pyarrow: make test-frames installs it")
    frame = pandas.DataFrame(ROWS, columns=list("abc"))
    frame.to_parquet(tmp_path / "abc.parquet")
    frame[["c", "a", "b"]].to_parquet(tmp_path / "cab.parquet")
    frame[["a", "b"]].to_parquet(tmp_path / "ab.parquet")
    frame.rename(columns={"c": "d"}).to_parquet(tmp_path / "abd.parquet")
    options = {} if kind is IncrementalPCA else {"random_state": 0}
    sharded = kind(2, engine=1, **options).fit(tmp_path / "abc.parquet")
    assert list(sharded.feature_names_in_) == list("abc")
    for model in (sharded, kind(2, **options).fit(frame)):
        names = [name for name in ("predict", "transform", "predict_proba") if hasattr(model, name)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the columns of blocks have no names
            for name in names:
                found = [np.asarray(getattr(model, name)(tmp_path / f"{one}.parquet")) for one in ("abc", "cab")]
                assert np.array_equal(*found) and np.array_equal(found[0], getattr(model, name)(frame))
            if hasattr(model, "score"):
                assert model.score(tmp_path / "cab.parquet") == model.score(tmp_path / "abc.parquet")
        for other in ("ab", "abd"):
            with pytest.raises(ValueError, match=f"are only in one of .*{other}.parquet' and the data of the fit"):
                getattr(model, names[0])(tmp_path / f"{other}.parquet")
    again = sharded.fit(ROWS)
    assert not hasattr(again, "feature_names_in_")


def test_an_index_of_pandas_is_no_column(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="no pandas: make test-frames installs it")
    frame = pandas.DataFrame(ROWS, columns=list("abc"))
    frame[frame.a > 30].to_parquet(tmp_path / "some.parquet")
    frame.set_index("b").to_parquet(tmp_path / "named.parquet")
    frame.to_parquet(tmp_path / "all.parquet")
    some, all_rows = (shard() for shard in shards_of([tmp_path / "some.parquet", tmp_path / "all.parquet"]))
    assert np.array_equal(some, ROWS[11:]) and np.array_equal(all_rows, ROWS)
    (named,) = shards_of(tmp_path / "named.parquet")
    assert np.array_equal(named(), ROWS[:, [0, 2]])


def test_row_groups_without_rows_are_no_shards(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: make test-frames installs it")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(dict(zip("abc", ROWS.T)))
    with parquet.ParquetWriter(tmp_path / "rows.parquet", table.schema) as writer:
        for rows in (table[:30], table[:0], table[30:]):
            writer.write_table(rows)
    found = [shard() for shard in shards_of(tmp_path / "rows.parquet")]
    assert list(map(len, found)) == [30, 70] and np.array_equal(np.concatenate(found), ROWS)


def test_parquet_files_that_make_no_shards(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: make test-frames installs it")
    parquet = pytest.importorskip("pyarrow.parquet")
    a, b, _ = ROWS.T
    (tmp_path / "of dask.parquet").mkdir()
    parquet.write_table(pyarrow.table({"a": a, "b": b}), tmp_path / "of dask.parquet/part.0.parquet")
    with pytest.raises(IsADirectoryError, match=r"of dask.parquet' is a directory: give the list of its files"):
        shards_of(tmp_path / "of dask.parquet")
    assert len(shards_of(sorted((tmp_path / "of dask.parquet").glob("*.parquet")))) == 1
    table = pyarrow.Table.from_arrays([pyarrow.array(one) for one in (a, b, a, a)], names=list("abac"))
    parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice.parquet' has several columns with the name 'a': rename them, or give"):
        shards_of([tmp_path / "twice.parquet"])
    footer = b"PAR1" + bytes(1000) + (900).to_bytes(4, "little") + b"PAR1"
    for name, contents in {"empty": b"", "short": b"PAR1", "footer": footer}.items():
        (tmp_path / f"{name}.parquet").write_bytes(contents)
        with pytest.raises(ValueError, match=rf"{name}.parquet' can't be read as .parquet: it is damaged"):
            shards_of(tmp_path / f"{name}.parquet")
    parquet.write_table(table.select([]), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"none.parquet' has no columns$"):
        shards_of(tmp_path / "none.parquet")
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"a": a}).set_index("a").to_parquet(tmp_path / "index.parquet")
    with pytest.raises(ValueError, match=r"index.parquet' has no columns but an index of pandas: .*reset_index"):
        shards_of(tmp_path / "index.parquet")


def test_dates_beside_durations_in_a_parquet_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: make test-frames installs it")
    parquet = pytest.importorskip("pyarrow.parquet")
    times = np.arange(100)
    table = pyarrow.table({"when": times.astype("M8[us]"), "long": times.astype("m8[us]")})
    parquet.write_table(table, tmp_path / "x.parquet")
    text = r"no array has the columns 'when' of datetime64\[us\] and 'long' of timedelta64\[us\], of '.*x.parquet'"
    with pytest.raises(TypeError, match=f"{text}: write numbers instead, or give"):
        shards_of(tmp_path / "x.parquet")[0]()


@pytest.mark.parametrize("dates", ["M8[us]", "M8[D]", "m8[s]"])
def test_dates_beside_numbers_in_a_parquet_file(dates: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: make test-frames installs it")
    parquet = pytest.importorskip("pyarrow.parquet")
    when = np.arange(100).astype(dates)
    parquet.write_table(pyarrow.table({"a": ROWS[:, 0], "when": when, "b": ROWS[:, 1]}), tmp_path / "x.parquet")
    text = r"no array has the columns 'b' of float64 and 'when' of (datetime|timedelta)64\[.*\], of '.*x.parquet'"
    with pytest.raises(pmstore.ShardError, match=f"(?s)TypeError: {text}: write numbers instead, or give"):
        KMeans(2, engine=Serial()).fit(tmp_path / "x.parquet")


def test_a_parquet_file_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pyarrow"):
        shards_of(tmp_path / "rows.parquet")


@pytest.mark.parametrize("data", [np.array(1.0), np.array([None]), [np.array(1.0)], {"X": ROWS}, [1, 2], "rows.csv"])
def test_data_that_make_no_shards(data: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="make shards|shards are made|is no .npy or .parquet"):
        shards_of(data)


def test_paths_that_make_no_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "one.npy", 1.0)
    np.save(tmp_path / "rows.npy", ROWS)
    with pytest.raises(TypeError, match="not those of 0 axes"):
        shards_of(tmp_path / "one.npy")
    for url in ("s3://bucket/rows.npy", "https://host/rows.npy"):
        with pytest.raises(ValueError, match="is not on this machine.*loader of your own"):
            shards_of([url])
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/rows.npy", f"file://{tmp_path}/rows.npy"):
        assert np.array_equal(np.concatenate([shard() for shard in shards_of(path)]), ROWS)


@pytest.mark.parametrize("contents", [b"", b"not an array", b"\x93NUMPY\x01\x00v\x00{'descr': '<f8'", b"whole"])
def test_files_that_are_no_arrays(contents: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    if contents == b"whole":
        np.save(path, ROWS)
        contents = path.read_bytes()[:-8]
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=r"rows.npy' can't be read as .npy: it is damaged") as told:
        shards_of([path])
    assert str(path) in str(told.value)
    np.save(path, np.array([None, 1], object))
    with pytest.raises(ValueError, match=r"rows.npy' can't be read as .npy: .* more than numbers"):
        shards_of([path])
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_bytes(contents)
    with pytest.raises(ValueError, match=r"rows.parquet' can't be read as .parquet: it is damaged"):
        shards_of([tmp_path / "rows.parquet"])


def test_an_npz_file_with_the_name_of_an_npy_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    with path.open("wb") as file:
        np.savez(file, ROWS)
    with pytest.raises(ValueError, match=r"rows.npy' is an .npz file with another name: give a pmstore.Shard"):
        KMeans(2, engine=Serial()).fit(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"rows.npy' can't be read as .npy: it is damaged"):
        shards_of([path])


class Frame:
    """A data frame of dask, to its name and methods."""

    def to_delayed(self) -> list[Any]:
        return []


Frame.__module__ = "dask.dataframe.dask_expr"


def test_a_frame_of_dask_is_refused() -> None:
    with pytest.raises(TypeError, match=r"not of dask.*Frame: give its values as an array"):
        shards_of(Frame())
    with pytest.raises(TypeError, match=r"not of dask.*Frame: give its values as an array"):
        shards_of([Frame()])


def test_I34_a_mask_is_refused_and_not_dropped() -> None:
    masked = np.ma.masked_less(np.random.default_rng(0).normal(size=(40, 2)), 0)
    model = KMeans(2, random_state=0, engine=Serial()).fit([masked.data[:20], masked.data[20:]])
    shard = Shard(lambda: masked)
    for call in (model.score, lambda data: list(model.predict(data))):
        with pytest.raises(TypeError, match="MaskedArray is none of them"):
            call([shard])
    dask = pytest.importorskip("dask.array")
    chunks = dask.ma.masked_less(dask.from_array(masked.data, chunks=(20, 2)), 0)
    with pytest.raises(pmstore.ShardError, match="(?s)MaskedArray is none of them"):
        KMeans(2, random_state=0, engine=Serial()).fit(chunks)
    with pytest.raises(TypeError, match="MaskedArray is none of them"):
        model.predict(chunks).compute(scheduler="synchronous")


def test_nulls_of_a_parquet_column_with_a_dictionary(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"word": pyarrow.array(["a", None, "b"]).dictionary_encode(), "n": [1.0, 2.0, 3.0]}),
        tmp_path / "x.parquet",
    )
    (shard,) = shards_of([tmp_path / "x.parquet"])
    assert shard().tolist() == [["a", 1.0], [None, 2.0], ["b", 3.0]]


class Loader:
    """A loader, and data that one could return."""

    def __call__(self, *arguments: Any) -> Any:
        return ROWS


def load(*arguments: Any) -> Any:
    return ROWS


@functools.lru_cache
def cached(*arguments: Any) -> Any:
    return ROWS


@pytest.mark.parametrize("shard", [Shard(load), Shard(Loader()), Shard(cached), Shard(np.asarray, [{"x": Loader}])])
def test_without_cloudpickle_parts_of_the_program_are_refused(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    for one in (load, Loader, cached):
        monkeypatch.setattr(one, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], one.__name__, one, raising=False)
    with pytest.raises(TypeError, match="a part of it is defined in the program .* pip install cloudpickle"):
        KMeans(3, engine=1).fit([shard])


def test_without_cloudpickle_data_may_have_the_name_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    folder = tmp_path / "__main__"
    folder.mkdir()
    np.save(folder / "rows.npy", ROWS)
    fitted = KMeans(3, random_state=0, engine=1).fit([folder / "rows.npy", Shard(np.load, f"{folder}/rows.npy")])
    assert fitted.n_features_in_ == 3
