"""KMeans and a Gaussian mixture on a dask cluster, while its workers, its scheduler and the program are killed.

    pip install 'dask[array]' distributed
    python examples/dask_killed.py

Each fit runs twice: undisturbed, on one process of this machine; and on a cluster of two worker processes, of which
something is killed every few commits. What was killed is started again, and so is the fit, by the same call. Both runs
must end with the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import pmstore
from pmstore.cluster import KMeans
from pmstore.mixture import GaussianMixture

KILLS = (("worker", 6), ("program", 10), ("scheduler", 14), ("worker", 20), ("program", 24))
"""What is killed, and after which commit of the fit."""


def estimator(kind: str, **where: Any) -> Any:
    """A fit with some hundred epochs."""
    if kind == "kmeans":
        return KMeans(40, tol=0, random_state=0, **where)
    return GaussianMixture(12, covariance_type="diag", max_iter=40, tol=0, random_state=0, **where)


def shards() -> list[Any]:
    """1,797 handwritten digits of 8 × 8 pixels, in six parts."""
    rng = np.random.default_rng(0)
    X = load_digits().data
    return np.array_split(X + rng.normal(scale=0.1, size=X.shape), 6)


def bits(fitted: Any) -> bytes:
    """All that must be the same."""
    names = ("cluster_centers_", "inertia_", "means_", "covariances_", "weights_", "lower_bound_", "n_iter_")
    return b"".join(np.asarray(getattr(fitted, name)).tobytes() for name in names if hasattr(fitted, name))


def fit(kind: str, store: str, scheduler: str, result: str) -> None:
    """The program that computes: one call of fit, on the cluster."""
    import dask
    from dask.distributed import Client

    with dask.config.set({"distributed.comm.timeouts.connect": "3s"}), Client(scheduler_file=scheduler) as client:
        fitted = estimator(kind, store=store, name=kind, engine=client).fit(shards())
    Path(result).write_bytes(bits(fitted))


class Cluster:
    """A scheduler and two workers, in processes that can be killed."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "scheduler.json"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start()

    def start(self) -> None:
        self.stop()
        self.file.unlink(missing_ok=True)
        common = ["--no-dashboard", "--scheduler-file", str(self.file)]
        self.begin("scheduler", "dask_scheduler", "--port", "0", *common)
        self.begin("workers", "dask_worker", "--nthreads", "1", "--nworkers", "2", "--death-timeout", "60", *common)

    def begin(self, role: str, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes[role] = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def kill_worker(self) -> None:
        """Kill a worker; the process that watches over it starts another one."""
        from dask.distributed import Client

        with Client(scheduler_file=str(self.file)) as client:
            client.wait_for_workers(2)
            os.kill(min(client.run(os.getpid).values()), signal.SIGKILL)

    def stop(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def disturbed(kind: str, folder: Path) -> bytes:
    """The result of a fit on a cluster of which something is killed every few commits."""
    store, result = folder / f"{kind}.pm", folder / f"{kind}.bits"
    pmstore.open(store).close()
    command = [sys.executable, __file__, "--fit", kind, str(store), str(folder / "scheduler.json"), str(result)]
    cluster = Cluster(folder)
    left, starts = list(KILLS), 0
    program = None
    try:
        while not result.exists():
            if cluster.processes["scheduler"].poll() is not None:
                cluster.start()
            starts += 1
            program = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            while program.poll() is None and left:
                what, commit = left[0]
                if not committed(store, commit):
                    time.sleep(0.05)  # a reader does not wait if nobody writes
                    continue
                print(f"  commit {commit} of {kind}: kill the {what}", flush=True)
                left.pop(0)
                if what == "worker":
                    cluster.kill_worker()
                    continue
                killed = program if what == "program" else cluster.processes[what]
                killed.kill()
                killed.wait()
                break  # the program ends, too
            program.wait()
            if starts > 3 * len(KILLS):
                raise RuntimeError(f"{kind} was started {starts} times, and is not finished")
    finally:
        if program is not None:
            program.kill()
        cluster.stop()
    history = pmstore.history(store, kind)
    lost, late = int(history["lost"].sum()), int(history["late"].sum())
    print(f"  {kind}: {len(history['iteration'])} epochs, started {starts} times, asked again {lost} lost, {late} late")
    assert not left, f"the fit ended before {left}"
    return result.read_bytes()


def committed(store: Path, commit: int) -> bool:
    """Whether the store has a commit; waits for it for a second. A reader may look while the fit writes."""
    with pmstore.open(store, "r") as reader:
        return reader.sequence >= commit or reader.wait(after=commit - 1, timeout=1.0).sequence >= commit


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--fit", nargs=4, metavar=("KIND", "STORE", "SCHEDULER", "RESULT"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.fit:
        fit(*given.fit)
        return 0
    warnings.filterwarnings("ignore", "Best performing initialization did not converge")  # with tol=0, none does
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("kmeans", "mixture"):
            undisturbed = bits(estimator(kind, engine=1).fit(shards()))
            same = disturbed(kind, Path(folder)) == undisturbed
            print(f"{kind}: {'the same bits' if same else 'OTHER BITS'}")
            different += not same
    return different


if __name__ == "__main__":
    sys.exit(main())
