"""Workers that are stopped while their program is killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import contextlib, os, sys, threading, numpy, pmstore
from pmstore.scale import Processes

class Sum(pmstore.MapReduce):
    max_iter = 1
    shards = [numpy.ones((3, 2))]
    def fields(self): return [pmstore.Field("sum", 2)]
    def fingerprint(self): return {}
    def start(self): pass
    def map(self, shard, shared, rng): return {"sum": shard.sum(axis=0)}
    def update(self, total): self.state.sum = total["sum"]

sys.path.insert(0, sys.argv[1])  # a numpy that stops the worker
threading.Thread(target=lambda: Sum().run(engine=Processes(1)), daemon=True).start()
stopped = None
while stopped is None:
    with contextlib.suppress(ChildProcessError):  # there is none yet
        stopped = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOWAIT)
print(stopped.si_pid, flush=True)
sys.stdin.read()
"""


def test_a_worker_that_is_stopped_in_its_imports_ends_with_its_program(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        process = os.pidfd_open(worker)
        program.kill()
    try:
        assert select.select([process], [], [], 20)[0], "the worker outlives its program"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)
