"""Fixtures: the places where objects live, and an S3 server of moto on the loopback interface."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pmstore.archive._objects import Place, place_of


class Target(NamedTuple):
    """A URL with its options: place_of(url, **options)."""

    url: str
    options: dict[str, Any]

    def place(self) -> Place:
        return place_of(self.url, **self.options)


class Server:
    """An S3 server with a bucket."""

    def __init__(self) -> None:
        self._server = importlib.import_module("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        self.host, self.port = self._server.get_host_and_port()
        s3fs = importlib.import_module("s3fs")
        system = s3fs.S3FileSystem(**self.options(), skip_instance_cache=True)
        system.call_s3("create_bucket", Bucket="bucket")

    def options(self, port: int | None = None) -> dict[str, Any]:
        """The options for another port: a server that stands before this one."""
        return {
            "endpoint_url": f"http://{self.host}:{port or self.port}",
            "key": "user",
            "secret": "a secret",
            "client_kwargs": {"region_name": "us-east-1"},
            "config_kwargs": {"retries": {"total_max_attempts": 1}, "connect_timeout": 5, "read_timeout": 20},
        }

    def target(self, port: int | None = None) -> Target:
        return Target(f"s3://bucket/{uuid.uuid4().hex}", self.options(port))

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """Needs moto and s3fs."""
    for name in ("moto", "flask", "s3fs"):
        pytest.importorskip(name, reason=f"no {name}: make test-archive installs it")
    server = Server()
    yield server
    server.stop()


@pytest.fixture(params=["local", "memory", "renaming", "s3"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """Every kind of place in turn, empty. renaming: a folder that fsspec reaches, as it reaches sftp."""
    if request.param == "local":
        return Target(str(tmp_path / "objects"), {})
    if request.param == "s3":
        server: Server = request.getfixturevalue("s3")
        return server.target()
    pytest.importorskip("fsspec")
    if request.param == "memory":
        return Target(f"memory://{uuid.uuid4().hex}", {})
    return Target(f"local://{tmp_path / 'objects'}", {})


@pytest.fixture
def another(target: Target) -> Callable[[], Place]:
    """another(): a new place for the same target."""

    def make() -> Place:
        if target.url.startswith("local:"):
            from pmstore.archive._fsspec import FsspecPlace

            return FsspecPlace(target.url)
        return target.place()

    return make


@pytest.fixture
def place(another: Callable[[], Place]) -> Place:
    return another()
