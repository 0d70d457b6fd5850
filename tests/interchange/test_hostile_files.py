"""Files that reach for other files or for memory; what an import with other names, and an export, keep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _cli
from pmstore._interchange import command
from tests.interchange.test_import import h5py, refused
from tests.interchange.test_round_trips import described

pytestmark = pytest.mark.filterwarnings("ignore:.*Zarr V3.*", "ignore:.*does not have a Zarr.*")

MASKED = np.ma.array([1.0, -999.0, 3.0], mask=[False, True, False])


# ---- hostile files


def test_a_pipe_is_no_file(store: pmstore.Store, tmp_path: Path, form: str) -> None:
    """Nobody writes to it, so that its end would never come."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(pmstore.InterchangeError, match="is neither a file nor a directory"):
        pmstore.load_into(store, tmp_path / "pipe", form)


def test_errors_of_the_system_name_the_file(
    store: pmstore.Store, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"x.{form}"
    with pytest.raises(FileNotFoundError, match="No such file or directory") as caught:
        pmstore.load_into(store, path)
    assert caught.value.filename == str(path)
    if form != "zarr":
        path.mkdir()
        assert _cli.main(["import", str(path), str(tmp_path / "new.pm")]) == 2
        assert capsys.readouterr().err == f"pmstore: {path}: Is a directory\n"


@pytest.mark.parametrize("kind", ["a time", "three bytes"])
def test_types_of_hdf5_that_numpy_lacks(store: pmstore.Store, tmp_path: Path, kind: str) -> None:
    library = h5py()
    made = library.h5t.UNIX_D32LE.copy() if kind == "a time" else library.h5t.STD_I32LE.copy()
    if kind == "three bytes":
        made.set_size(3)
    with library.File(tmp_path / "x.h5", "w") as file:
        library.h5d.create(file.id, b"x", made, library.h5s.create_simple((2,)))
        file["y"] = np.arange(3)
    refused(store, tmp_path / "x.h5", TypeError, "^'x' holds elements of a type of HDF5 that numpy lacks: ")
    assert pmstore.load_into(store, tmp_path / "x.h5", names=["y"]) == 1


@pytest.mark.parametrize("how", ["external storage", "external link", "soft link", "virtual", "group", "many"])
@pytest.mark.parametrize("document", ["__values__", "__attributes__", "__pmstore__"])
def test_documents_of_hdf5_are_in_the_file(store: pmstore.Store, tmp_path: Path, how: str, document: str) -> None:
    library = h5py()
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"token": "a secret"}))
    with library.File(tmp_path / "other.h5", "w") as file:
        file["private"] = secret.read_text()
    path = tmp_path / "x.h5"
    with library.File(path, "w") as file:
        file["x"] = np.arange(3)
        file["own"] = secret.read_text()
        if how == "external storage":
            kind, size = library.h5t.C_S1.copy(), secret.stat().st_size
            kind.set_size(size)
            options = library.h5p.create(library.h5p.DATASET_CREATE)
            options.set_external(os.fsencode(secret), 0, size)
            scalar = library.h5s.create(library.h5s.SCALAR)
            library.h5d.create(file.id, document.encode(), kind, scalar, options)
        elif how == "external link":
            file[document] = library.ExternalLink("other.h5", "/private")
        elif how == "soft link":
            file[document] = library.SoftLink("/own")
        elif how == "virtual":
            layout = library.VirtualLayout((1,), library.string_dtype())
            layout[0] = library.VirtualSource("other.h5", "private", (1,), library.string_dtype())[0]
            file.create_virtual_dataset(document, layout)
        elif how == "group":
            file.create_group(document)
        else:
            file[document] = [secret.read_text()] * 2
    refused(store, path, pmstore.InterchangeError, document)


@pytest.mark.parametrize(
    "labels", [1, [1, 2], np.array([b"ab", b"c"]), np.arange(9.0), None, ["only one"], ["y", ""]], ids=str
)
def test_labels_of_hdf5_are_no_pointers(store: pmstore.Store, tmp_path: Path, labels: Any) -> None:
    """HDF5 itself takes any attribute of this name for pointers to text, and frees them."""
    library = h5py()
    with library.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(6.0).reshape(2, 3)
        file["x"].attrs["DIMENSION_LABELS"] = library.Empty("f4") if labels is None else labels
    assert pmstore.load_into(store, tmp_path / "x.h5") == 1
    name = "dims" if isinstance(labels, list) and labels[-1] == "" else "DIMENSION_LABELS"
    assert {key: np.asarray(found).tolist() for key, found in store.attrs("x").items()} == {
        name: np.asarray(labels).tolist()
    }


def test_groups_of_hdf5_with_two_names(store: pmstore.Store, tmp_path: Path) -> None:
    """A small file can't have names without end."""
    with h5py().File(tmp_path / "x.h5", "w") as file:
        group = file.create_group("g")
        for _ in range(40):
            inner = group.create_group("a")
            group["b"] = inner
            group = inner
        group["x"] = np.arange(3)
        file["again"] = group["x"]
    with pytest.warns(UserWarning, match="left out: 'g/(a/)*b' is another name of the group 'g/(a/)*a'") as told:
        assert pmstore.load_into(store, tmp_path / "x.h5") == 2
    assert len(told) == 40 and store[f"g/{'a/' * 40}x"].tolist() == store["again"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dims", [["y", "x"], None])
@pytest.mark.parametrize("own", [[1], np.arange(3), "abc", ("a", "b"), ["a", "b"]], ids=str)
def test_an_attribute_with_the_name_of_labels(tmp_path: Path, form: str, own: Any, dims: Any) -> None:
    """HDF5 has its own use of the name: the attribute comes back, and other programs read the names of axes."""
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second:
        first["x"], first["v"] = np.zeros((2, 3)), (1, 2)
        first.attrs("x").update({"DIMENSION_LABELS": own} | ({"dims": dims} if dims else {}))
        first.attrs()["DIMENSION_LABELS"] = first.attrs("v")["DIMENSION_LABELS"] = own
        pmstore.export(first, tmp_path / "x", form)
        pmstore.load_into(second, tmp_path / "x", form)
        assert described(first) == described(second)
    if form == "hdf5":
        with h5py().File(tmp_path / "x", "r") as file:
            assert [axis.label for axis in file["x"].dims] == (dims or ["", ""])


@pytest.mark.parametrize("chunk", [True, False])
def test_links_that_lead_out_of_a_zarr_directory(store: pmstore.Store, tmp_path: Path, chunk: bool) -> None:
    pytest.importorskip("zarr", "3")
    pmstore.export({"a": np.arange(4.0)}, tmp_path / "s.zarr")
    inside = tmp_path / "s.zarr" / "a" / ("c/0" if chunk else "zarr.json")
    inside.rename(inside.with_name("moved"))
    inside.symlink_to("moved")
    assert pmstore.load_into(store.group("sound"), tmp_path / "s.zarr") == 1
    inside.unlink()
    inside.with_name("moved").rename(tmp_path / "secret")
    inside.symlink_to(tmp_path / "secret")
    refused(store, tmp_path / "s.zarr", pmstore.InterchangeError, "is a link to another file")
    (tmp_path / "link.zarr").symlink_to("s.zarr")
    inside.unlink()
    (tmp_path / "secret").rename(inside)
    assert pmstore.load_into(store, tmp_path / "link.zarr") == 1


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("zarr.json", "attributes", 5),
        ("zarr.json", "consolidated_metadata", 1),
        ("zarr.json", "attr1butes", {}),
        ("a/zarr.json", "codecs", 7),
        ("a/zarr.json", "chunk_grid", 3),
        ("a/zarr.json", "dimension_names", 1.5),
    ],
)
def test_damaged_metadata_of_zarr(store: pmstore.Store, tmp_path: Path, file: str, key: str, value: Any) -> None:
    pytest.importorskip("zarr", "3")
    pmstore.export({"a": np.arange(3)}, tmp_path / "x.zarr")
    path = tmp_path / "x.zarr" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    refused(store, tmp_path / "x.zarr", pmstore.InterchangeError, "can't be read")


def test_directories_that_are_no_group_of_zarr(store: pmstore.Store, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", "3")
    zarr.save_array(tmp_path / "array.zarr", np.arange(5))
    refused(store, tmp_path / "array.zarr", pmstore.InterchangeError, "it is an array, and no group")
    (tmp_path / "empty.zarr").mkdir()
    refused(store, tmp_path / "empty.zarr", pmstore.InterchangeError, "can't be read")


def test_damaged_attributes_of_hdf5(store: pmstore.Store, tmp_path: Path) -> None:
    with h5py().File(tmp_path / "x.h5", "w") as file:
        file["x"] = 1
        file.attrs["t"] = ["a text", "another"]
    sound = (tmp_path / "x.h5").read_bytes()
    (tmp_path / "x.h5").write_bytes(sound.replace(b"GCOL", b"GCOX"))
    refused(store, tmp_path / "x.h5", pmstore.InterchangeError, "can't be read")


def test_documents_of_npz_do_not_inflate(store: pmstore.Store, tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("__values__.json", b'{"x": [' + b"[]," * (6 << 20) + b"[]]}")
    refused(store, path, pmstore.InterchangeError, "__values__.json is compressed, and has over 16 MiB")


def test_forms_that_are_nested_too_deeply(store: pmstore.Store, tmp_path: Path) -> None:
    deep = "[" * 900 + "]" * 900
    path = tmp_path / "deep.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("__values__.json", f'{{"x": {deep}}}')
        file.writestr("__pmstore__.json", json.dumps({"values": {"x": "XWMd"}}))
    refused(store, path, ValueError, "nested more than 128 levels")
    with zipfile.ZipFile(path, "w") as file:
        head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (" + b"-" * 60_000 + b"1,)}"
        file.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    refused(store, path, pmstore.InterchangeError, "its head is damaged")


# ---- names and attributes


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (None, {"": "file", "data": "d", "data/x": "x", "model": "m", "model/w": "w"}),
        (["model"], {"": "file", "model": "m", "model/w": "w"}),
        (["model/w"], {"": "file", "model": "m", "model/w": "w"}),
        ({"model": "net", "data": "data"}, {"": "file", "data": "d", "data/x": "x", "net": "m", "net/w": "w"}),
        ({"model/w": "w"}, {"": "file", "w": "w"}),
        ({"model/w": "model/v"}, {"": "file", "model": "m", "model/v": "w"}),
        ({"model": "model/old"}, {"": "file", "model/old": "m", "model/old/w": "w"}),
    ],
)
def test_attributes_go_with_their_names(
    store: pmstore.Store, tmp_path: Path, form: str, names: Any, kept: dict[str, str]
) -> None:
    store["data/x"], store["model/w"] = np.arange(2.0), np.arange(3.0)
    for name, text in {"": "file", "data": "d", "data/x": "x", "model": "m", "model/w": "w"}.items():
        store.attrs(name)["note"] = text
    path = tmp_path / f"out.{'h5' if form == 'hdf5' else form}"
    pmstore.export(store, path)
    with pmstore.open(tmp_path / "new.pm") as new:
        pmstore.load_into(new, path, names=names)
        assert {name: found["note"] for name, found in new._attributes().items()} == kept


@pytest.mark.parametrize("names", [[""], "", {"": "g"}, {"": ""}])
def test_there_is_no_empty_name(store: pmstore.Store, tmp_path: Path, names: Any) -> None:
    pmstore.export({"w": np.arange(2.0)}, tmp_path / "x.npz")
    with pytest.raises(pmstore.UnknownNameError, match="no name '' in the file"):
        pmstore.load_into(store, tmp_path / "x.npz", names=names)


def test_what_is_left_out_of_a_chosen_group_is_told(store: pmstore.Store, tmp_path: Path) -> None:
    library = h5py()
    with library.File(tmp_path / "x.h5", "w") as file:
        for group in ("a", "b"):
            file[f"{group}/x"] = np.arange(3)
            file[f"{group}/link"] = library.SoftLink("/a/x")
    with pytest.warns(UserWarning, match="left out: 'b/link' is a soft") as told:
        pmstore.load_into(store, tmp_path / "x.h5", names={"b": "c"})
    assert len(told) == 1 and list(store) == ["c/x"]


@pytest.mark.parametrize("names", [None, ["ok"]])
def test_names_of_hdf5_that_are_not_in_utf8(store: pmstore.Store, tmp_path: Path, names: Any) -> None:
    with h5py().File(tmp_path / "x.h5", "w") as file:
        file["ok"] = 2
        file["ok"].attrs.create("unit\xe9".encode("latin1"), "K")
        file.create_dataset("temp\xe9rature".encode("latin1"), data=1)
    with pytest.warns(UserWarning, match="not in UTF-8") as told:
        assert pmstore.load_into(store, tmp_path / "x.h5", names=names) == 1
    assert len(told) == (2 if names is None else 1) and not store.attrs("ok")


def test_names_of_some_axes_of_zarr(store: pmstore.Store, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", "3")
    root = zarr.open_group(tmp_path / "x.zarr", mode="w")
    root.create_array("some", data=np.zeros((2, 3)), dimension_names=["time", None])
    root.create_array("none", data=np.zeros((2, 3)), dimension_names=[None, None])
    pmstore.load_into(store, tmp_path / "x.zarr")
    assert store.attrs("some")["dims"] == ["time", ""] and not store.attrs("none")


# ---- exports


def test_lists_of_arrays_as_attributes(tmp_path: Path, form: str) -> None:
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second:
        first["x"] = np.arange(3)
        first.attrs("x").update(edges=[np.arange(2.0), np.arange(3.0)], same=[np.arange(2), np.arange(2)])
        pmstore.export(first, tmp_path / "x", form)
        pmstore.load_into(second, tmp_path / "x", form)
        assert described(first) == described(second)


def test_text_that_hdf5_lacks_is_named(tmp_path: Path) -> None:
    h5py()
    with pytest.raises(ValueError, match="'t' has text that HDF5 can't keep .*: npz keeps it"):
        pmstore.export({"t": np.array(["a\ud800"])}, tmp_path / "x.h5")
    assert not os.listdir(tmp_path)


def test_masks_are_kept(store: pmstore.Store, tmp_path: Path, form: str) -> None:
    store["x"] = np.arange(2)
    store.attrs("x")["quality"] = MASKED
    end = "h5" if form == "hdf5" else form
    pmstore.export(store, tmp_path / f"attribute.{end}")
    pmstore.export({"m": MASKED}, tmp_path / f"mapping.{end}")
    with pmstore.open(tmp_path / "new.pm") as new:
        pmstore.load_into(new, tmp_path / f"attribute.{end}")
        pmstore.load_into(new, tmp_path / f"mapping.{end}")
        for found in (new.attrs("x")["quality"], new["m"]):
            assert type(found) is np.ma.MaskedArray and found.tolist() == [1.0, None, 3.0]


def test_records_and_names_of_axes_of_zarr(store: pmstore.Store, tmp_path: Path) -> None:
    pytest.importorskip("zarr", "3")
    store["r"] = np.array([(1, 2.0)], np.dtype((np.record, [("a", "<i4"), ("b", "<f8")])))
    store["plain"] = np.array([(1,)], [("a", "<i4")])
    store.attrs("plain")["_ARRAY_DIMENSIONS"] = [1, 2]
    store.attrs("r")["_ARRAY_DIMENSIONS"] = ["q"]
    pmstore.export(store, tmp_path / "x.zarr")
    with pmstore.open(tmp_path / "new.pm") as new:
        pmstore.load_into(new, tmp_path / "x.zarr")
        assert new["r"].dtype == store["r"].dtype and new["r"].dtype.type is store["r"].dtype.type
        assert new["plain"].dtype.type is np.void
        assert dict(new.attrs("plain")) == {"_ARRAY_DIMENSIONS": [1, 2]}
        assert dict(new.attrs("r")) == {"_ARRAY_DIMENSIONS": ["q"]}


@pytest.mark.parametrize("shape", [(2,), (2, 1), ()])
def test_text_that_another_program_made_longer(store: pmstore.Store, tmp_path: Path, shape: tuple[int, ...]) -> None:
    library = h5py()
    store["text"] = np.full(shape, "ab")
    pmstore.export(store, tmp_path / "x.h5")
    with library.File(tmp_path / "x.h5", "r+") as file:
        file["text"][...] = b"changed!"
    with pmstore.open(tmp_path / "new.pm") as new:
        pmstore.load_into(new, tmp_path / "x.h5")
        assert new["text"].tolist() == np.full(shape, "changed!").tolist() and new["text"].dtype == "U8"


def test_a_file_that_is_being_written(store: pmstore.Store, tmp_path: Path) -> None:
    library = h5py()
    with library.File(tmp_path / "x.h5", "w", locking=True) as file:
        file["x"] = 1
        file.flush()
        program = "import pmstore, sys; pmstore.load_into(pmstore.open(':memory:'), sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", program, tmp_path / "x.h5"], capture_output=True, text=True)
        assert "InterchangeError" in done.stderr and "another process has it open for writing" in done.stderr
    assert pmstore.load_into(store, tmp_path / "x.h5") == 1


def test_a_warning_of_a_library_is_nothing_that_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imports(*arguments: Any, **options: Any) -> int:
        warnings.warn("x.npz: left out: 'y' is a link", UserWarning, stacklevel=2)
        warnings.warn("a word of the library", UserWarning, stacklevel=2)
        return 1

    np.savez(tmp_path / "x.npz", x=np.arange(3))
    monkeypatch.setattr(command, "load_into", imports)
    with pytest.warns(UserWarning, match="a word of the library") as told:
        assert _cli.main(["import", "--json", str(tmp_path / "x.npz"), str(tmp_path / "to.pm")]) == 0
    assert len(told) == 1 and json.loads(capsys.readouterr().out)["left_out"] == ["'y' is a link"]


def test_a_derived_array_that_nobody_declares_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pmstore.open(tmp_path / "run.pm") as store:
        store["x"] = np.arange(6.0).reshape(2, 3)
        store.derive("cov", np.cov, store["x"], version=1)
        assert store["cov"].shape == (2, 2)
    assert _cli.main(["export", str(tmp_path / "run.pm"), str(tmp_path / "a.npz")]) == 0
    assert "left out: 'cov' is derived" in capsys.readouterr().err
    assert np.load(tmp_path / "a.npz").files == ["x"]
    with pmstore.open(tmp_path / "run.pm", "r") as store:
        with pytest.warns(UserWarning, match="'cov' is derived .*: only a program that declares it") as told:
            assert pmstore.export(store, tmp_path / "b.npz") == 1
        assert told[0].filename == __file__
        with pytest.raises(pmstore.DerivedArrayError):
            pmstore.export(store, tmp_path / "c.npz", names=["cov"])


def fails(x: Any) -> Any:
    raise ZeroDivisionError


def test_a_derived_array_that_fails_is_no_array_to_leave_out(store: pmstore.Store, tmp_path: Path) -> None:
    store["x"] = np.arange(3)
    store.derive("d", fails, store["x"], version=1)
    with pytest.raises(pmstore.DerivedArrayError, match="ZeroDivisionError"):
        pmstore.export(store, tmp_path / "a.npz")


def test_a_killed_export_of_a_copy_leaves_nothing_for_long(tmp_path: Path) -> None:
    """The copy of a store that is written too quickly goes with the next export beside it."""
    with pmstore.open(tmp_path / "run.pm") as store:
        store["x"] = np.arange(8.0)
    program = (
        "import os, signal, sys; from pmstore import _cli; from pmstore._interchange import command\n"
        "def export(store, *arguments, **more):\n"
        "    if store.path.endswith('run.pm'): raise command.StaleSnapshotError\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "command.export = export; _cli.main(sys.argv[1:])"
    )
    words = ["export", str(tmp_path / "run.pm"), str(tmp_path / "out.npz")]
    killed = subprocess.run([sys.executable, "-c", program, *words], timeout=60, check=False)
    assert killed.returncode < 0 and len(list(tmp_path.glob(".pmstore-*/store.pm"))) == 1
    with pmstore.open(tmp_path / "run.pm", "r") as store:
        pmstore.export(store, tmp_path / "out.npz")
    assert not list(tmp_path.glob(".pmstore-*"))


OVERLAPPING = np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]})


@pytest.mark.parametrize("form", ["safetensors", "hdf5", "zarr", "npz"])
def test_a_type_that_no_format_has(form: str, store: pmstore.Store, tmp_path: Path) -> None:
    package = {"hdf5": "h5py", "zarr": "zarr"}.get(form)
    if package is not None:
        pytest.importorskip(package)
    store.create_array("x", (3,), OVERLAPPING)
    with pytest.raises(TypeError, match="'x' has dtype") as told:
        pmstore.export(store, tmp_path / "to", form)
    assert "npz keeps it" not in str(told.value) and not (tmp_path / "to").exists()
