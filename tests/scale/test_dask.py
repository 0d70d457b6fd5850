"""The engine on a dask cluster of two processes: the same bits as one process, whichever process dies."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scale import Dask, Serial, _dask
from pmstore.scale._shards import shards_of
from tests.support.sharded import Always, At, Factors, Once, Unreadable, Walk, killed, result, rows, several

distributed = pytest.importorskip("distributed", reason="no dask: make test-scale installs it")


class _Cluster:
    """A cluster of two workers, which is replaced if a test has left it with fewer: dask gives up on a worker that is
    killed while it starts."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._client: Any = None

    def client(self) -> Any:
        if self._client is not None:
            try:
                self._client.wait_for_workers(2, timeout=30)
            except (TimeoutError, asyncio.TimeoutError):
                self.close()
        if self._client is None:
            cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
            self._client = self._open.enter_context(distributed.Client(self._open.enter_context(cluster)))
        return self._client

    def close(self) -> None:
        self._open.close()
        self._client = None


@pytest.fixture(scope="module")
def cluster() -> Iterator[_Cluster]:
    cluster = _Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def client(cluster: _Cluster) -> Any:
    return cluster.client()


@contextmanager
def cluster_of_processes(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A scheduler that can be killed, and two workers: the scheduler's process, and its address."""
    file = folder / "scheduler.json"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    options = ["--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    scheduler = subprocess.Popen([*command, *options], **quiet)
    command = [sys.executable, "-m", "distributed.cli.dask_worker"]
    options = ["--nthreads", "1", "--nworkers", "2", "--no-dashboard", "--scheduler-file", str(file)]
    workers = subprocess.Popen([*command, *options, "--death-timeout", "60"], **quiet)
    try:
        with distributed.Client(scheduler_file=str(file)) as client:
            client.wait_for_workers(2, timeout=60)
        yield scheduler, json.loads(file.read_text())["address"]
    finally:
        for process in (scheduler, workers):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_the_same_bits_as_one_process(client: Any, undisturbed: bytes, path: Path) -> None:
    walk = Walk(several())
    assert result(walk.run(path, "walk", engine=client)) == undisturbed
    assert not walk.history_["lost"].any()


def test_chunks_of_a_dask_array_are_shards(client: Any) -> None:
    import dask.array

    X = rows(0, 1000)
    lazy = dask.array.from_array(X, chunks=(300, 2))
    blocks = [X[i : i + 300] for i in range(0, 1000, 300)]
    expected = result(Walk(blocks).run(engine=Serial()))
    assert result(Walk(lazy).run(engine=client)) == expected
    assert result(Walk(lazy).run(engine=Serial())) == expected
    persisted = lazy.persist()
    assert result(Walk(persisted).run(engine=client)) == expected


def test_chunks_with_gaps_are_the_same_wherever_they_are(client: Any) -> None:
    """A chunk that was sent has no gaps; neither has one that was not, or sums would be added in another order."""
    import dask.array

    whole = dask.array.from_array(rows(0, 1000), chunks=(300, 4))
    for gaps in (
        lambda block: np.repeat(block, 2, 1)[:, ::2],
        lambda block: np.asfortranarray(np.repeat(block, 2, 0))[::2],
    ):
        lazy = whole.map_blocks(gaps, dtype=whole.dtype)
        assert all(shard().flags.c_contiguous for shard in shards_of(lazy))
        expected = result(Walk(lazy).run(engine=Serial()))
        assert result(Walk(lazy.persist()).run(engine=client)) == expected


def test_persisted_chunks_are_aligned_in_a_map(client: Any) -> None:
    """dask receives them at odd addresses, where numpy adds in another order."""
    import dask.array

    class Sums(Walk):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Any:
            return {"sums": np.full((3, 4), shard.sum()), "counts": np.ones(3)}

    lazy = dask.array.from_array(rows(0, 70_000), chunks=(17_501, 4))
    assert result(Sums(lazy.persist()).run(engine=client)) == result(Sums(lazy).run(engine=Serial()))


def test_a_zarr_array_with_a_relative_path(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers were started in another directory."""
    zarr = pytest.importorskip("zarr", reason="no zarr: make test-scale installs it")
    monkeypatch.chdir(tmp_path)
    array = zarr.create_array("x.zarr", shape=(60, 4), chunks=(13, 4), dtype="f8")
    array[:] = rows(0, 60)
    assert str(tmp_path) not in client.run(os.getcwd).values()
    assert result(Walk(array).run(engine=client)) == result(Walk(array).run(engine=Serial()))


def test_a_persisted_array_needs_its_cluster(client: Any) -> None:
    import dask.array

    persisted = dask.array.from_array(rows(0, 40), chunks=(20, 4)).persist()
    with pytest.raises(pmstore.ShardError, match="pass its client"):
        Walk(persisted).run(engine=1)


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_I32_a_worker_that_dies_or_hangs_costs_its_shards(
    what: str, client: Any, tmp_path: Path, undisturbed: bytes
) -> None:
    pids = client.run(os.getpid)
    walk = Walk(several(), Once(tmp_path / "once", "kill", several()[3]) if what == "kill" else None)
    if what == "stop":
        walk.in_update = At(4, _Stop(pids.popitem()[1]))  # type: ignore[assignment]
    try:
        assert result(walk.run(engine=client)) == undisturbed
        assert walk.history_["lost" if what == "kill" else "late"].any()
    finally:
        if what == "stop":
            walk.in_update.once.go_on()


class _Stop:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __call__(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def test_I31_a_coordinator_that_was_killed_goes_on_with_another_engine(
    tmp_path: Path, path: Path, undisturbed: bytes
) -> None:
    with cluster_of_processes(tmp_path) as (_, address):

        def fit() -> None:
            with distributed.Client(address) as own:
                Walk(several(), in_update=At(3, Once(tmp_path / "once", "kill"))).run(path, "walk", engine=own)

        killed(fit)
        again = Walk(several())
        with distributed.Client(address) as own:
            assert result(again.run(path, "walk", engine=own)) == undisturbed
        assert again.resumed_from_iter_ == 3


def test_a_scheduler_that_was_killed(tmp_path: Path, path: Path, undisturbed: bytes) -> None:
    import dask

    timeouts = {"distributed.comm.timeouts.connect": "2s", "distributed.comm.retry.count": 0}
    with cluster_of_processes(tmp_path) as (scheduler, address), dask.config.set(timeouts):
        client = distributed.Client(address)
        with pytest.raises(pmstore.WorkersLostError, match="scheduler is gone"):
            Walk(several(), in_update=At(3, _Kills(scheduler.pid))).run(path, "walk", engine=Dask(client, patience=10))
        client.close()
    again = Walk(several())
    assert result(again.run(path, "walk", engine=1)) == undisturbed
    assert again.resumed_from_iter_ == 4


def test_a_scheduler_that_is_stopped(
    tmp_path: Path, path: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers nothing, and nobody tells that the workers are gone."""
    monkeypatch.setattr(_dask, "ANSWER", 1.0)
    with cluster_of_processes(tmp_path) as (scheduler, address):
        client = distributed.Client(address)
        workers = client.run(os.getpid).values()
        with pytest.raises(pmstore.WorkersLostError, match="a scheduler that does not answer for 1 s.*Start workers"):
            Walk(several(), in_update=At(3, _StopsAndKills(scheduler.pid, *workers))).run(
                path, "walk", engine=Dask(client, patience=1)
            )
        with pytest.raises(pmstore.WorkersLostError, match="a scheduler that does not answer"):
            Walk(several()).run(path, "walk", engine=Dask(client, patience=1))
        scheduler.kill()
        client.close()
    again = Walk(several())
    assert result(again.run(path, "walk", engine=1)) == undisturbed
    assert again.resumed_from_iter_ == 4


class _StopsAndKills:
    def __init__(self, scheduler: int, *workers: int) -> None:
        self.scheduler, self.workers = scheduler, workers

    def __call__(self) -> None:
        os.kill(self.scheduler, signal.SIGSTOP)
        for pid in self.workers:
            os.kill(pid, signal.SIGKILL)


class _Kills:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __call__(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)


def test_a_client_that_was_closed() -> None:
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        client = distributed.Client(cluster)
        client.close()
        with pytest.raises(pmstore.WorkersLostError, match="client is closed"):
            Walk(several(2)).run(engine=client)


def test_a_cluster_without_workers() -> None:
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
        pytest.raises(pmstore.WorkersLostError, match="no worker for 0.1 s"),
    ):
        Walk(several(2)).run(engine=Dask(client, patience=0.1))


def test_an_asynchronous_client_is_refused() -> None:
    async def fit() -> None:
        async with distributed.Client(asynchronous=True, n_workers=0, dashboard_address=None) as client:
            Walk(several(2)).run(engine=client)

    with pytest.raises(ValueError, match="asynchronous"):
        asyncio.run(fit())


def test_delayed_objects_make_no_shards() -> None:
    import dask

    for data in (dask.delayed(rows)(0), [dask.delayed(rows)(0)]):
        with pytest.raises(TypeError, match="not of dask.delayed.Delayed"):
            Walk(data).run(engine=1)


def test_a_map_that_raises(client: Any) -> None:
    shards = several()
    with pytest.raises(pmstore.ShardError, match="(?s)shard 2 of 5.*dask worker tcp.*this shard is bad"):
        Walk(shards, Always("raise", shards[2])).run(engine=client)


def test_an_algorithm_that_can_not_be_read_on_a_worker(client: Any) -> None:
    with pytest.raises(pmstore.ShardError, match="was lost 5 times, the last time on dask worker .*SilentError"):
        Walk(several(2), Unreadable()).run(engine=client)


LOST = "shard 1 of 2.*was lost 5 times, the last time on dask work"


def test_a_map_that_ends_its_worker(client: Any) -> None:
    shards = several(2)
    with pytest.raises(pmstore.ShardError, match=LOST):
        Walk(shards, Always("kill", shards[1])).run(engine=client)


@pytest.mark.parametrize(("how", "text"), [("exit", r"SystemExit\(3\)"), ("interrupt", r"KeyboardInterrupt\(\)")])
def test_a_map_that_raises_what_would_end_its_worker(how: str, text: str, client: Any) -> None:
    workers = client.run(os.getpid)
    shards = several(2)
    with pytest.raises(pmstore.ShardError, match=f"{LOST}.*the map raised {text}"):
        Walk(shards, Always(how, shards[1])).run(engine=client)
    assert client.run(os.getpid) == workers


def test_what_can_not_travel_is_refused(client: Any) -> None:
    import threading

    with pytest.raises(TypeError, match="the algorithm can't be sent"):
        Walk(several(2), accident=threading.Lock()).run(engine=client)


def test_actors_end_with_the_run(client: Any) -> None:
    def actors(dask_worker: Any) -> int:
        return len(dask_worker.state.actors)

    gc.collect()
    gc.disable()  # the shards must not stay on the workers until cycles are collected here
    try:
        Walk(several()).run(engine=client)
        until = time.monotonic() + 30
        while any(client.run(actors).values()) and time.monotonic() < until:
            pass
        assert not any(client.run(actors).values())
    finally:
        gc.enable()


def test_the_example_that_kills_everything() -> None:
    script = Path(__file__).resolve().parent.parent.parent / "examples" / "dask_killed.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "same bits" in line] == [
        "kmeans: the same bits",
        "mixture: the same bits",
    ]


# ---- local states


@pytest.mark.parametrize("accident", [False, True])
def test_I35_local_states_on_the_workers_of_a_cluster(accident: bool, client: Any, path: Path, tmp_path: Path) -> None:
    factors = Factors(several())
    factors.run(engine=Serial())
    undisturbed = factors.bits()
    once = Once(tmp_path / "once", "kill", several()[3]) if accident else None
    factors = Factors(several(), once)
    factors.run(path, "f", engine=client, local=tmp_path / "local")
    assert factors.bits() == undisturbed
    assert sum(one.suffix == ".pm" for one in (tmp_path / "local").glob("*/*")) == 5
