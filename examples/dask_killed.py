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
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import pmstore
from pmstore.cluster import KMeans
from pmstore.mixture import GaussianMixture
from pmstore.scale import Dask, Tag

KILLS = {5: "worker", 9: "program", 14: "scheduler", 20: "worker", 24: "program"}
"""What is killed after which epoch, with SIGKILL."""

SCHEDULER = "scheduler.json"  # the file by which the processes of a cluster find its scheduler


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


class Accidents(Dask):
    """The engine on dask. After some epochs, it kills a worker, the scheduler, or the program itself.

    Parameters
    ----------
    client : Client
    folder : Path
        Where a file tells of each accident, so that none happens twice.
    """

    def __init__(self, client: Any, folder: Path) -> None:
        super().__init__(client, patience=20)
        self.client, self.folder = client, folder

    def cancel(self, tag: Tag) -> None:
        super().cancel(tag)
        what = KILLS.get(tag.epoch)
        happened = self.folder / f"epoch-{tag.epoch}"
        if what is None or happened.exists():
            return
        happened.touch()
        print(f"  after epoch {tag.epoch}: kill the {what}", flush=True)
        if what == "program":
            pid = os.getpid()
        elif what == "scheduler":
            pid = self.client.run_on_scheduler(os.getpid)
        else:
            pid = min(self.client.run(os.getpid).values())
        os.kill(pid, signal.SIGKILL)


def fit(kind: str, folder: Path) -> None:
    """The program that computes: one call of fit, on the cluster."""
    import dask
    from dask.distributed import Client

    file = str(folder.parent / SCHEDULER)
    with dask.config.set({"distributed.comm.timeouts.connect": "3s"}), Client(scheduler_file=file) as client:
        client.wait_for_workers(1, timeout=60)  # dask gives up on a worker that is killed while it starts
        engine = Accidents(client, folder)
        fitted = estimator(kind, store=folder / "fit.pm", name=kind, engine=engine).fit(shards())
    (folder / "bits").write_bytes(bits(fitted))


class Cluster:
    """A scheduler and two workers, in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / SCHEDULER
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start it if one of its processes does not run. A process beside the workers replaces those that die."""
        if self.processes and all(process.poll() is None for process in self.processes.values()):
            return
        self.stop()
        self.file.unlink(missing_ok=True)
        common = ["--no-dashboard", "--scheduler-file", str(self.file)]
        self.begin("scheduler", "dask_scheduler", "--port", "0", *common)
        self.begin("workers", "dask_worker", "--nthreads", "1", "--nworkers", "2", "--death-timeout", "60", *common)

    def begin(self, role: str, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.processes[role] = subprocess.Popen(command, env=environment, start_new_session=True, **quiet)

    def stop(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def disturbed(kind: str, folder: Path, cluster: Cluster) -> bytes:
    """The result of a fit on a cluster of which something is killed every few epochs."""
    folder.mkdir()
    starts = 0
    while not (folder / "bits").exists():
        starts += 1
        cluster.start()
        subprocess.run([sys.executable, __file__, "--fit", kind, str(folder)], stderr=subprocess.DEVNULL)
        assert starts < 3 * len(KILLS), f"{kind} was started {starts} times, and is not finished"
    history = pmstore.history(folder / "fit.pm", kind)
    lost, late = int(history["lost"].sum()), int(history["late"].sum())
    print(f"  {kind}: {len(history['iteration'])} epochs, started {starts} times, asked again {lost} lost, {late} late")
    assert all((folder / f"epoch-{epoch}").exists() for epoch in KILLS), "an accident did not happen"
    return (folder / "bits").read_bytes()


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--fit", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.fit:
        fit(given.fit[0], Path(given.fit[1]))
        return 0
    warnings.filterwarnings("ignore", "Best performing initialization did not converge")  # with tol=0, none does
    different = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        cluster = Cluster(Path(folder))
        ends.callback(cluster.stop)
        for kind in ("kmeans", "mixture"):
            undisturbed = bits(estimator(kind, engine=1).fit(shards()))
            same = disturbed(kind, Path(folder, kind), cluster) == undisturbed
            print(f"{kind}: {'the same bits' if same else 'OTHER BITS'}")
            different += not same
    return different


if __name__ == "__main__":
    sys.exit(main())
