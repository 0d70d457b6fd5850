"""Exports to HDF5 whose file can't be written, or whose writing is interrupted: an error, and nothing is left."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pmstore._interchange.hdf5 import _Sink

h5py = pytest.importorskip("h5py", "3.10")

FULL = """
import errno, os, sys, numpy as np, pmstore
disk = sys.argv[1]
arrays = pmstore.open(":memory:")
for k in range(300):
    arrays.create_array(f"g{k % 7}/a{k}", 300 + k % 90, fill_value=k, maxshape=GROWS)
for pages in (1, 3, 12, 40, 100, 180):
    space = os.statvfs(disk)
    with open(f"{disk}/rest", "wb") as rest:
        os.posix_fallocate(rest.fileno(), 0, (space.f_bavail - pages) * space.f_frsize)
    try:
        pmstore.export(arrays, f"{disk}/out.h5")
    except pmstore.OutOfSpaceError as error:
        assert error.errno == errno.ENOSPC and str(error).endswith("can't be written: No space left on device"), error
    else:
        raise AssertionError(f"it has space on {pages} pages")
    assert os.listdir(disk) == ["rest"]
    os.unlink(f"{disk}/rest")
"""


@pytest.mark.parametrize("grows", [None, (None,)])
def test_many_arrays_on_a_full_disk(small_disk: Callable[[str], Path], grows: tuple[None] | None) -> None:
    """HDF5 crashes when it frees arrays that it could not write."""
    program = FULL.replace("GROWS", repr(grows))
    done = subprocess.run([sys.executable, "-c", program, small_disk("4m")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_hdf5_reads_what_it_could_not_write(tmp_path: Path) -> None:
    """It does so when it closes a file whose structures are larger than its cache."""
    (tmp_path / "x.h5").touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    given = np.arange(50_000)
    with _Sink(str(tmp_path / "x.h5")) as sink:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            with h5py.File(sink, "w") as file:
                file["x"] = given[::-1]
                file["x"][...] = given
                file["y"] = given
                assert np.array_equal(file["x"], given) and np.array_equal(file["y"], given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(OSError, match="File too large"):
            sink.require_written()


INTERRUPTED = """
import signal, sys, numpy as np, pmstore
from pmstore._interchange import hdf5
path, at = sys.argv[1], int(sys.argv[2])
write, count = hdf5._Sink.write, 0

def late(self, data):
    global count
    count += 1
    if count >= at:
        signal.raise_signal(signal.SIGINT)
    return write(self, data)

hdf5._Sink.write = late
try:
    pmstore.export({f"a{k}": np.arange(300.0) for k in range(30)} | {"b": {"c": 1}}, path)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("at", [1, 20, 65])
def test_an_interrupt_while_hdf5_writes(tmp_path: Path, at: int) -> None:
    """Handlers of signals run in Python, and HDF5 writes by a file of Python: an exception is no failed write."""
    command = [sys.executable, "-c", INTERRUPTED, tmp_path / "out.h5", str(at)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
    assert os.listdir(tmp_path) == []
