"""A server of S3 that refuses requests. Its reply to a HEAD has no body, and therefore no reason."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore.archive._archive import Archive
from pmstore.archive._objects import Place, RecoveredError, Retrying
from pmstore.archive._sources import Sources
from tests.archive.conftest import Server
from tests.archive.stepping import archived, stepping

pytest.importorskip("numcodecs")

SKEWED = ("RequestTimeTooSkewed", "403 Forbidden")
EXPIRED = ("ExpiredToken", "400 Bad Request")
DENIED = ("AccessDenied", "403 Forbidden")
CUT = ("IncompleteBody", "400 Bad Request")


class Refusing:
    """The application of a server. It refuses what `refuses` says: a function of the method of a request."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self.refuses: Callable[[str], bool] = lambda method: False
        self.code, self.status = DENIED
        self.refused: list[str] = []  # methods

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method = environment["REQUEST_METHOD"]
        if not self.refuses(method):
            return self._application(environment, start)
        self.refused.append(method)
        environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
        text = f"<Error><Code>{self.code}</Code><Message>said {self.code}</Message></Error>"
        body = b"" if method == "HEAD" else text.encode()
        start(self.status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


@pytest.fixture
def refusing(s3: Server, monkeypatch: pytest.MonkeyPatch) -> Refusing:
    server: Any = s3._server._server
    refusing = Refusing(server.app)
    monkeypatch.setattr(server, "app", refusing)
    return refusing


class Waiting:
    """`wait` of `Retrying`: the server refuses nothing any more when a place waits the second time."""

    def __init__(self, refusing: Refusing) -> None:
        self._refusing, self._waits = refusing, 0

    def __call__(self, seconds: float) -> bool:
        self._waits += 1
        if self._waits % 2 == 0:
            self._refusing.refuses = lambda method: False
        return False


@pytest.mark.parametrize("code, status", [SKEWED, EXPIRED])
def test_refusals_that_pass(s3: Server, refusing: Refusing, tmp_path: Path, code: str, status: str) -> None:
    """They begin at any request of a version, and go on until the clock is set right or the credentials are renewed."""
    target, told, first = s3.target(), list[Exception](), list[str]()
    place = Retrying(target.place(), threading.Event(), told.append, wait=Waiting(refusing))
    refusing.code, refusing.status = code, status
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        archived(steps)
        for after in itertools.count():
            counter = itertools.count()
            refusing.refuses = lambda method, after=after, counter=counter: next(counter) >= after  # type: ignore[misc]
            store["x"] = after
            store.commit()
            archived(steps)
            refusing.refuses = lambda method: False
            if not refusing.refused:
                break
            first.append(refusing.refused[0])
            refusing.refused.clear()
    assert {"HEAD", "GET", "PUT"} <= set(first)
    assert len(told) == 2 * len(first) and all(isinstance(one, RecoveredError) for one in told[1::2])
    assert all(f"said {code}" in str(one) for one in told[::2])
    found = Archive(Sources([target.place()]))
    assert found[found.latest]["x"] == after and found.verify().ok


CALLS: list[Callable[[Place], Any]] = [lambda place: place.size("a"), lambda place: place.create("a", [b"x"])]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("methods", [{"HEAD"}, {"HEAD", "GET"}])
def test_a_refused_head(s3: Server, refusing: Refusing, call: Callable[[Place], Any], methods: set[str]) -> None:
    """Permissions are missing, if another request for the object is refused. Otherwise that was for a moment."""
    place = s3.target().place()
    refusing.refuses = lambda method: method in methods
    with pytest.raises(pmstore.ArchiveUnavailableError) as caught:
        call(place)
    assert caught.value.transient is (methods == {"HEAD"})
    assert ("said AccessDenied" in str(caught.value)) is ("GET" in methods)


def test_an_upload_that_is_cut_off(s3: Server, refusing: Refusing, tmp_path: Path) -> None:
    target = s3.target()
    refusing.code, refusing.status = CUT
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(target.url, storage_options=target.options) as drain:
        drain.wait()
        refusing.refuses = lambda method: method == "PUT" and not refusing.refused
        store["x"] = 1
        store.commit()
        with pytest.warns(pmstore.ArchiveWarning, match="said IncompleteBody.* tries again"):
            assert drain.wait() == store.sequence
    assert refusing.refused == ["PUT"]


def test_a_place_that_is_tried_again_leaves_no_tries_to_s3fs(s3: Server, refusing: Refusing) -> None:
    """A server that does not answer would otherwise take minutes for each try."""
    stop = threading.Event()
    stop.set()  # each call is tried once
    place = Retrying(s3.target().place(), stop, lambda error: None)
    refusing.refuses = lambda method: True
    refusing.code, refusing.status = "SlowDown", "503 Slow Down"
    for call in (
        lambda: place.put("a", [b"x"]),
        lambda: place.get("a"),
        lambda: place.list(""),
        lambda: pickle.loads(pickle.dumps(place.once)).list(""),
    ):
        refusing.refused.clear()
        with pytest.raises(pmstore.ArchiveUnavailableError) as caught:
            call()
        assert caught.value.transient and len(refusing.refused) == 1
