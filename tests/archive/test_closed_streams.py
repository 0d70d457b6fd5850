"""What a program prints after it closed its standard output does not reach a drain's files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pmstore import archive

PROGRAM = """
import contextlib, os, sys, threading
import numpy as np
import pmstore

def talk():
    while not done.is_set():
        with contextlib.suppress(OSError):  # nothing has the number 1
            os.write(1, b"progress " * 20)

os.close(1)
done = threading.Event()
thread = threading.Thread(target=talk)
thread.start()
try:
    with pmstore.open(sys.argv[1]) as store, store.drain(sys.argv[2]) as drain:
        w = store.create_array("w", 1000)
        for number in range(30):
            w += np.random.default_rng(number).random(1000)
            store.commit()
            drain.wait()
finally:
    done.set()
    thread.join()
"""


def test_prints_into_a_closed_stream(tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "a.pm"), str(tmp_path / "archive")]
    subprocess.run(program, check=True, timeout=60)
    report = archive.open(tmp_path / "archive").verify()
    assert report.ok and report.versions == 30
