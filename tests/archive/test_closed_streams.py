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


GROUP = """
import os, sys
from pmstore import archive

for stream in range(3):
    os.close(stream)
pid = os.fork()
rank = 0 if pid else 1
with archive.LocalGroup(sys.argv[1], rank, 2, timeout=20) as group:
    for number in range(3):
        for stream in range(3):
            try:
                os.write(stream, b"progress")
            except OSError:
                pass
        if group.allgather(b"%d" % rank) != [b"0", b"1"]:
            os._exit(1)
os._exit(0 if rank or os.waitpid(pid, 0)[1] == 0 else 2)
"""


def test_prints_into_the_closed_streams_of_a_group(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", GROUP, str(tmp_path / "group")], check=True, timeout=60)
