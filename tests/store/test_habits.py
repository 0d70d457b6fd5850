"""What users of h5py, zarr and sqlite3 try first."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import pickle
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.conftest import Medium, run_in_fork


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with pmstore.open(tmp_path / "store.pm") as store:
        yield store


def test_w_minus_creates(tmp_path: Path) -> None:
    pmstore.open(tmp_path / "new.pm", "w-").close()
    with pytest.raises(pmstore.StoreExistsError):
        pmstore.open(tmp_path / "new.pm", "w-")


def test_paths_with_the_home_directory_and_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pmstore.open("~/a store.pm") as store:
        assert store.path == str(tmp_path / "a store.pm")
    with pmstore.open(f"file://{tmp_path}/a%20store.pm", "r") as store:
        assert store.path == str(tmp_path / "a store.pm")
    latin = tmp_path / os.fsdecode(b"run-\xe9.pm")  # a name that is not UTF-8
    with pmstore.open(latin.as_uri()) as store:
        assert store.path == str(latin)
    latin.unlink()
    here = "localhost"
    with pmstore.open(f"file://{here}{tmp_path}/a%20store.pm", "r") as store:
        assert store.path == str(tmp_path / "a store.pm")
    with pytest.raises(ValueError, match="not a path"):
        pmstore.open("file:///a%00b.pm")
    with pytest.raises(
        ValueError, match=r"'s3://bucket/x.pm' is not on this machine.*store.drain\('s3://bucket/x.pm'\)"
    ):
        pmstore.open("s3://bucket/x.pm")
    with pytest.raises(ValueError, match="file of another host, 'elsewhere'"):
        pmstore.open("file://elsewhere/x.pm")
    assert sorted(os.listdir(tmp_path)) == ["a store.pm"]


def test_a_working_directory_that_was_deleted(tmp_path: Path) -> None:
    run_in_fork(_without_directory, tmp_path)


def _without_directory(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    text = r"the working directory was deleted, so '(\.\./)?x\.\w+' is not found: give an absolute path"
    with pmstore.open(tmp_path / "x.pm") as store:
        store["a"] = 1
        for work in (
            lambda: pmstore.open("x.pm"),
            lambda: pmstore.open("../x.pm"),
            lambda: pmstore.open(b"x.pm", "r"),
            lambda: store.backup("x.pm"),
            lambda: store.drain("x.arc"),
            lambda: pmstore.export(store, "x.npz"),
            lambda: pmstore.load_into(store, "x.npz"),
        ):
            with pytest.raises(FileNotFoundError, match=text):
                work()
    assert os.listdir(tmp_path) == ["x.pm"]


def test_the_link_of_an_open_file_that_was_deleted(tmp_path: Path) -> None:
    path = tmp_path / "x.pm"
    with pmstore.open(path) as store:
        store["a"] = 1
    fd = os.open(path, os.O_RDWR)
    path.unlink()
    link = f"/proc/self/fd/{fd}"
    for n in range(3):
        with pmstore.open(link) as store:
            assert store["a"] == 1 + n
            store["a"] += 1
        with pmstore.open(link, "r") as store:
            assert store["a"] == 2 + n
    with pmstore.open(f"{path} (deleted)") as other:  # another store
        other["a"] = 10
    for mode in ("a", "r+", "r"):
        with pmstore.open(link, mode) as store:
            assert store["a"] == 4
    os.close(fd)
    assert os.listdir(tmp_path) == ["x.pm (deleted)"]


def files() -> set[tuple[int, int]]:
    """The files that this process has open: their numbers, and how many names they have."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing is closed
            about = os.fstat(int(fd))
            found.add((about.st_ino, about.st_nlink))
    return found


def test_a_store_in_memory() -> None:
    before = files()
    with pmstore.open(":memory:") as store, pmstore.open(":memory:", "w") as other:
        found = files() - before
        assert len(found) >= 2 and all(names == 0 for _, names in found)
        array = store.create_array("x", 3_000_000)  # the file grows
        array += 1
        store.commit()
        with pytest.raises(ZeroDivisionError), store.transaction():
            array += 1 / 0
        array += 1
        store.rollback()
        assert (array == 1).all() and store.check().ok and list(other) == []
    with pytest.raises(ValueError, match="a new store"):
        pmstore.open(":memory:", "r")
    assert not os.path.exists(":memory:")


def test_a_store_in_memory_by_any_kind_of_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (b":memory:", Path(":memory:")):
        with pmstore.open(path) as store:
            store["x"] = 1
        with pytest.raises(ValueError, match="a new store"):
            pmstore.open(path, "r")
        with pytest.raises(ValueError, match="would be gone when this call ends"):
            pmstore.prune(path)  # type: ignore[arg-type]
        with pmstore.open(tmp_path / "s.pm", "w") as store, pytest.raises(ValueError, match="without a file"):
            store.backup(path)
        for use in (pmstore.compact, pmstore.upgrade, partial(pmstore.salvage, tmp_path / "s.pm")):
            with pytest.raises(ValueError, match="without a file"):
                use(path)
        (tmp_path / "s.pm").unlink()
    assert os.listdir(tmp_path) == []
    pmstore.open("./:memory:").close()
    assert os.listdir(tmp_path) == [":memory:"]


def test_a_store_in_memory_where_a_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setattr("pmstore._store.entrance._MEMORY", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pmstore.open(":memory:") as store:
        store["x"] = 1
        assert os.path.dirname(os.path.dirname(store.path)) == str(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(pmstore.StoreIOError, match="':memory:' can't be opened: Not a directory") as caught:
        pmstore.open(":memory:")
    assert caught.value.filename == ":memory:"
    assert os.listdir(tmp_path) == ["file"]


def test_a_store_without_a_name_is_of_this_process_only(tmp_path: Path) -> None:
    """Nothing can keep its changes, so that it needs no warning of lost work."""
    for path in (":memory:", tmp_path / "x.pm"):
        store = pmstore.open(path)
        store["x"] = 1
        if path != ":memory:":
            os.unlink(path)
        with pytest.raises(pmstore.StoreNotFoundError, match="no other process can open .* in memory, or was deleted"):
            pickle.dumps(store)
        run_in_fork(_fails, store)
        with pytest.warns(ResourceWarning, match="was not closed$"):
            del store
            gc.collect()


def _fails(store: pmstore.Store) -> None:
    with pytest.raises(pmstore.StoreNotFoundError, match="no other process can open"):
        store["x"]


def test_a_group_is_in_the_store(store: Any) -> None:
    store["model/layer/w"] = 1
    assert "model" in store and "model/layer" in store and "layer" in store.group("model")
    assert "mode" not in store and "model/" not in store and "model/layer/w/x" not in store
    assert store.require_group("model") == store.group("model")
    store.move("model", "old")
    assert "model" not in store and store["old/layer/w"] == 1
    with pytest.raises(KeyError, match=r"group\('old'\).clear\(\) deletes its names"):
        del store["old"]
    store.group("old").clear()
    assert "old" not in store


class Rows:
    """An array-like whose __array__ takes no dtype."""

    def __array__(self) -> Any:
        return np.array([[1, 2], [3, 4]])


@pytest.mark.parametrize("data", [[[1, 2], [3, 4]], np.array([[1, 2], [3, 4]]), Rows()], ids=["list", "array", "rows"])
@pytest.mark.parametrize("dtype", ["f4", "(2,)i4", "(2,3)f8"])
def test_create_array_converts_as_numpy_does(data: Any, dtype: str, store: pmstore.Store) -> None:
    wanted = np.array(np.asarray(data), dtype)
    for name, shape in ("a", None), ("b", (2, 2)):
        made = store.create_array(name, shape, dtype, data=data)
        assert made.dtype == wanted.dtype and made.shape == wanted.shape and (made == wanted).all()


def test_create_array_from_data(store: Any) -> None:
    data = np.arange(6, dtype="i2").reshape(2, 3)
    array = store.create_array("a", data=data)
    assert array.dtype == np.int16 and np.array_equal(array, data) and array is store["a"]
    data[:] = 0
    assert array[1, 2] == 5
    assert store.create_array("b", (2, 3), "f4", data=array).dtype == np.float32
    assert store.create_array("c", 3, data=[1.5, 2, 3]).tolist() == [1.5, 2, 3]
    assert store.create_array("d", data=[]).shape == (0,)
    assert store.create_array("e", data=7).shape == ()
    assert store.create_array("f", (2,)).dtype == np.float64
    assert not store.create_array("g", data=["é", "abc"], writeable=False).flags.writeable
    with pytest.raises(ValueError, match=r"data has the shape \(2, 3\), and shape is 6"):
        store.create_array("h", 6, data=array)
    with pytest.raises(ValueError, match="not both"):
        store.create_array("h", data=array, fill_value=1)
    with pytest.raises(TypeError, match="needs a shape, or data="):
        store.create_array("h")
    with pytest.raises(TypeError, match="masked"):
        store.create_array("h", data=np.ma.masked_array([1, 2], [True, False]))
    with pytest.raises(TypeError, match="masked"):
        store.create_array("h", 2, fill_value=np.ma.masked_array([1, 2], [True, False]))
    with pytest.raises(TypeError):
        store.create_array("h", data=[object()])
    with pytest.raises(ValueError):
        store.create_array("h", data=[[1], [2, 3]])
    assert "h" not in store


def test_an_attribute_that_is_a_name(store: Any) -> None:
    store["x"] = 1
    with pytest.raises(AttributeError, match=r"no attribute 'x'; the value of that name is store\['x'\]"):
        store.x  # noqa: B018
    with pytest.raises(AttributeError, match=r"a Store has no attribute 'y'$"):
        store.y  # noqa: B018
    assert not hasattr(store.group("g"), "x")
    store.close()
    assert not hasattr(store, "x")


def test_verbs_of_other_libraries(store: Any) -> None:
    for verb, instead in {
        "create_dataset": r"create_array\(name, data=array\)",
        "require_dataset": "require_array",
        "create_group": r"require_group\(name\)",
        "flush": r"commit\(\)",
        "compact": "pmstore compact",
        "visit": r"list\(store\)",
    }.items():
        for mapping in (store, store.group("g")):
            with pytest.raises(AttributeError, match=f"no attribute '{verb}'; instead: {instead}"):
                getattr(mapping, verb)
    store["flush"] = 1
    with pytest.raises(AttributeError, match=r"the value of that name is store\['flush'\]"):
        store.flush  # noqa: B018


def test_arguments_of_other_libraries(store: Any, tmp_path: Path) -> None:
    create, path = store.create_array, tmp_path / "other.pm"
    for call, argument, instead in (
        (lambda **other: create("x", 3, **other), "chunks", "is kept in one piece"),
        (lambda **other: store.group("g").create_array("x", 3, **other), "compression", "archive"),
        (lambda **other: store.require_array("x", 3, **other), "fillvalue", "fill_value"),
        (lambda **other: pmstore.open(path, **other), "swmr", 'mode="r"'),
        (lambda **other: pmstore.shelf(path, **other), "size_mb", "max_size="),
    ):
        with pytest.raises(TypeError, match=rf"\(\) has no argument '{argument}': .*{instead}"):
            call(**{argument: 1})
        with pytest.raises(TypeError, match="unexpected keyword argument 'another'"):
            call(another=1)
    assert not list(store) and inspect.signature(create).parameters["fill_value"].default == 0


def test_files_of_other_formats(tmp_path: Path) -> None:
    path = tmp_path / "other"
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    np.save(tmp_path / "a.npy", np.ones(3))
    for contents, hint in {
        b"\x89HDF\r\n\x1a\n" + bytes(9000): "HDF5 file: `pmstore import`",
        (tmp_path / "a.npz").read_bytes(): "zip file.*`pmstore import`",
        (tmp_path / "a.npy").read_bytes(): r"numpy.save: store\[name\] = numpy.load",
        b"SQLite format 3\0" + bytes(9000): "SQLite",
        b"plain text": "not a pmstore store$",
    }.items():
        path.write_bytes(contents)
        for mode in ("r", "r+", "a"):
            with pytest.raises(pmstore.NotAStoreError, match=hint):
                pmstore.open(path, mode)
            assert path.read_bytes() == contents


def test_messages_say_what_to_do_instead(store: Any, tmp_path: Path) -> None:
    store.create_list("runs").append(1)
    with pytest.raises(pmstore.NameConflictError, match=r"store\['runs'\] gives what it has"):
        store.create_list("runs")
    with store.transaction():
        with pytest.raises(pmstore.TransactionError, match="raise an exception that leaves the with statement"):
            store.rollback()
        with pytest.raises(pmstore.TransactionError, match=r"transaction: leave the with statement"):
            store.commit()
    with pytest.raises(ValueError, match="'w-', which is 'x', not 'rb'"):
        pmstore.open(tmp_path / "other.pm", "rb")


def test_a_search_needs_no_name(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from pmstore.cluster import KMeans

    X = np.random.default_rng(0).normal(size=(40, 2))
    fit = KMeans(2, random_state=0, store=tmp_path / "store.pm", name="k").fit(X)
    with pytest.raises(pmstore.FingerprintMismatchError, match="name=None in a search"):
        fit.fit(X[:20])


def test_an_unknown_format_names_those_that_there_are(store: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run.pt' ends in no format: a name ends in one of \.h5, .*\.npz"):
        pmstore.export(store, tmp_path / "run.pt")


def test_a_parent_behind_a_symbolic_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ ".." is the parent of the link's target, as for the system."""
    disk = tmp_path / "disk"
    (disk / "runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(disk / "runs")
    monkeypatch.chdir(tmp_path)
    for given in ("runs/../store.pm", tmp_path / "runs" / ".." / "store.pm"):
        with pmstore.open(given) as store:
            assert store.path == str(disk / "store.pm") and os.path.samefile(given, store.path)
    assert not (tmp_path / "store.pm").exists()
    with pytest.raises(IsADirectoryError):
        pmstore.open("runs/..")


def print_without_standard_streams(path: Path) -> None:
    for number in range(3):
        os.close(number)
    for mode in ("x", "w", "r"):
        with pmstore.open(path, mode) as store, pmstore.open(path, "r") as reader:
            if mode != "r":
                store["a"] = np.arange(1 << 17)
                store.create_array("b", 1 << 17, writeable=False)
                store.commit()
                store.read("a")
                store["a"][:] += 1
                store.commit()
            reader.refresh()
            assert reader["a"][1] == 2 and reader["b"][1] == 0
            reader.wait(timeout=0)
            for number in range(3):
                with pytest.raises(OSError):
                    os.write(number, bytes(8192))
            store.close()
    with pmstore.open(path) as store:
        assert store.check().ok


def test_a_program_without_standard_streams_does_not_print_into_a_store(medium: Medium) -> None:
    run_in_fork(print_without_standard_streams, medium.directory / "a.pm")
