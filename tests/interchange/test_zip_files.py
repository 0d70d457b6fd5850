"""The directory of an npz file: what is damaged in it is an error, and what other programs write is read."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.interchange.test_import import refused

ARRAYS = {"a": np.arange(3.0), "größe": np.arange(4), "c": np.arange(6, dtype="i2").reshape(2, 3)}


class _Stream(io.RawIOBase):
    """A file in which nothing can be changed later, such as a pipe: sizes and checksums come behind each member."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def _zip(target: Any, compression: int = zipfile.ZIP_STORED, comment: bytes = b"", force_zip64: bool = False) -> None:
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, array in ARRAYS.items():
            with archive.open(f"{name}.npy", "w", force_zip64=force_zip64) as member:
                member.write(_npy(array))
        archive.comment = comment


def _export(path: Path, monkeypatch: Any) -> None:
    with pmstore.open(":memory:") as store:
        store.update(ARRAYS | {"conf": {"k": (1, 2)}, "v": 7})
        store.attrs("a")["unit"] = "K"
        pmstore.export(store, path)


def _savez(path: Path, monkeypatch: Any) -> None:
    np.savez(path, **ARRAYS)


def _savez_compressed(path: Path, monkeypatch: Any) -> None:
    np.savez_compressed(path, **ARRAYS)


def _commented(path: Path, monkeypatch: Any) -> None:
    _zip(path, comment=b"a comment\0\0")


def _large(path: Path, monkeypatch: Any) -> None:
    """An end record as of a file with over 65535 members."""
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    _zip(path, force_zip64=True)
    assert b"PK\6\6" in path.read_bytes()


def _streamed(path: Path, monkeypatch: Any) -> None:
    with _Stream(path) as stream:
        _zip(stream, zipfile.ZIP_DEFLATED)


def _streamed_large(path: Path, monkeypatch: Any) -> None:
    with _Stream(path) as stream:
        _zip(stream, force_zip64=True)


def _inside(path: Path, monkeypatch: Any) -> None:
    """A member is a zip file: its end record must not be taken for the file's."""
    inner = io.BytesIO()
    np.savez(inner, a=np.arange(9.0))
    np.savez(path, a=ARRAYS["a"], zip=np.frombuffer(inner.getvalue(), np.uint8))


def _read(store: pmstore.Store, path: Path) -> dict[str, Any]:
    """All that an import brings, which the store does not keep."""
    try:
        pmstore.load_into(store, path)
        found = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in store.items()}
        return {"names": found, "attributes": {name: dict(store.attrs(name)) for name in store}}
    finally:
        store.rollback()


@pytest.mark.parametrize("write", [_export, _savez, _commented, _large, _inside], ids=lambda write: write.__name__)
def test_each_flipped_bit_of_the_directory(tmp_path: Path, monkeypatch: Any, write: Callable[..., None]) -> None:
    """One is an error, or changes nothing: never are names gone, or others, without a word."""
    path = tmp_path / "x.npz"
    write(path, monkeypatch)
    sound = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    silent, errors = [], 0
    with pmstore.open(":memory:") as store, path.open("r+b", 0) as file, warnings.catch_warnings():
        warnings.simplefilter("error")  # none is told beside a part of the names
        whole = _read(store, path)
        for bit in range(start * 8, len(sound) * 8):
            at = bit // 8
            os.pwrite(file.fileno(), bytes([sound[at] ^ 1 << bit % 8]), at)
            try:
                if _read(store, path) != whole:
                    silent.append((at - start, bit % 8))
            except pmstore.InterchangeError:
                errors += 1
            os.pwrite(file.fileno(), sound[at : at + 1], at)
        assert _read(store, path) == whole
    assert not silent and errors > 100


@pytest.mark.parametrize(
    "write",
    [_savez_compressed, _commented, _large, _streamed, _streamed_large],
    ids=lambda write: write.__name__,
)
def test_what_numpy_and_python_write_is_read(
    store: pmstore.Store, tmp_path: Path, monkeypatch: Any, write: Callable[..., None]
) -> None:
    write(tmp_path / "x.npz", monkeypatch)
    assert _read(store, tmp_path / "x.npz")["names"] == {name: array.tolist() for name, array in ARRAYS.items()}


@pytest.mark.parametrize("options", [[], ["-0"], ["-fz"], ["-fd"], ["-z"], ["stream"]], ids=str)
def test_what_info_zip_writes_is_read(store: pmstore.Store, tmp_path: Path, options: list[str]) -> None:
    program = shutil.which("zip")
    if program is None:
        pytest.skip("zip is not installed")
    for name in "ac":
        np.save(tmp_path / f"{name}.npy", ARRAYS[name])
    path, names = tmp_path / "x.npz", ["a.npy", "c.npy"]
    if options == ["stream"]:
        done = subprocess.run([program, "-q", "-", *names], cwd=tmp_path, capture_output=True, check=True)
        path.write_bytes(done.stdout)
    else:
        subprocess.run([program, "-q", *options, path, *names], cwd=tmp_path, input=b"a comment\n", check=True)
    assert _read(store, path)["names"] == {name: ARRAYS[name].tolist() for name in "ac"}


def test_members_that_are_no_arrays(store: pmstore.Store, tmp_path: Path) -> None:
    """They are told by the names that they have; another name in the directory is damage of it."""
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", _npy(ARRAYS["a"]))
        archive.writestr("READ.ME", "a text")
    sound = path.read_bytes()
    with pytest.warns(UserWarning, match=r"left out: the member 'READ.ME' is no array"):
        assert pmstore.load_into(store.group("sound"), path) == 1
    first, _, last = sound.rpartition(b"x.npy")
    path.write_bytes(first + b"x.npx" + last)
    refused(store, path, pmstore.InterchangeError, r"the member 'x.npy' is 'x.npx' in its directory")


def test_a_file_that_goes_on_behind_its_directory(store: pmstore.Store, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **ARRAYS)
    with (tmp_path / "x.npz").open("ab") as file:
        file.write(b"more")
    refused(store, tmp_path / "x.npz", pmstore.InterchangeError, "it does not end with its directory")


def test_files_of_python_2(store: pmstore.Store, tmp_path: Path) -> None:
    """Lengths end in L if it ran on Windows. np.load reads these, too."""
    record = np.dtype([("a 1L", "i4", (2,))])
    members = {
        "x": (np.arange(6).reshape(2, 3), "'<i8'", "(2L, 3L)"),
        "one": (np.arange(4.0), "'<f8'", "(4L,)"),
        "records": (np.array([([1, 2],), ([3, 4],)], record), "[('a 1L', '<i4', (2L,))]", "(2L,)"),
    }
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for name, (array, descr, shape) in members.items():
            head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
            archive.writestr(f"{name}.npy", b"\x93NUMPY\1\0\x76\0" + head.encode() + array.tobytes())
    with pytest.warns(UserWarning, match="Python 2"), np.load(tmp_path / "x.npz") as library:
        assert np.array_equal(library["x"], members["x"][0])
    assert pmstore.load_into(store, tmp_path / "x.npz") == 3
    for name, (array, *_) in members.items():
        assert store[name].dtype == array.dtype and np.array_equal(store[name], array)
