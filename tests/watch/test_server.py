"""The page of watch --web: its readers and its contents."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import urllib.parse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _cli
from pmstore._watch import follow, inside
from pmstore._watch.follow import Follower
from pmstore._watch.server import Server
from tests.watch.conftest import HOSTILE


@pytest.fixture
def server(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(follow, "EVERY", 0.01)
    monkeypatch.setattr(follow, "IDLE", 0.05)
    with Follower(path) as follower, Server(follower, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(server: Server, what: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    """The answer to a request below the token, or of an address from the root."""
    path = what if what.startswith("/") else f"/{server.token}/{what}"
    connection = http.client.HTTPConnection(*server.server_address, timeout=30)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def inside_of(server: Server, name: str) -> dict[str, Any]:
    answer = asked(server, f"inside?name={urllib.parse.quote(name, safe='')}")
    assert answer.status == 200
    return dict(json.loads(answer.read()))


def test_only_who_has_the_token_gets_it(server: Server) -> None:
    token = server.token
    for what in ("/", "//", "/events", "/names", f"/{token[:-1]}/", f"/{token}x/names", "/%C3%A9/", f"/?{token}"):
        answer = asked(server, what)
        assert answer.status == 403 and server.token not in answer.read().decode()
    assert asked(server, "").status == 200 and asked(server, "other").status == 404


def test_only_on_a_loopback_address(server: Server) -> None:
    port = server.server_address[1]
    others = ("example.org", f"example.org:{port}", "10.0.0.1", "127.0.0.1.example.org", "localhost.example.org")
    beside = ("example.org@127.0.0.1", "127.0.0.1/example.org", "127.0.0.1#example.org", "127.0.0.1?example.org")
    for host in (*others, *beside, "", "[", "0.0.0.0"):
        answer = asked(server, "names", Host=host)
        assert answer.status == 403 and b"with 127.0.0.1 in it" in answer.read(), host
    for host in ("127.0.0.1", "127.0.0.1:1", "[::1]:80", "localhost", f"LocalHost:{port}"):
        assert asked(server, "names", Host=host).status == 200, host
    with socket.create_connection(server.server_address) as raw:
        raw.sendall(f"GET /{server.token}/names HTTP/1.0\r\n\r\n".encode())
        assert b" 403 " in raw.makefile("rb").readline()
    with socket.create_connection(server.server_address) as raw:
        raw.sendall(f"GET /{server.token}/names HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: example.org\r\n\r\n".encode())
        assert b" 403 " in raw.makefile("rb").readline()


def test_only_get(server: Server) -> None:
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"):
        answer = asked(server, "", method)
        assert (answer.status, answer.getheader("Allow")) == (405, "GET")


def test_the_page_loads_nothing_and_runs_only_its_own_script(server: Server) -> None:
    answers = [asked(server, "") for _ in range(2)]
    pages = [answer.read().decode() for answer in answers]
    for answer, page in zip(answers, pages):
        policy = answer.getheader("Content-Security-Policy") or ""
        nonces = set(re.findall(r'nonce="(.*?)"', page))
        assert len(nonces) == 1 and f"script-src 'nonce-{nonces.pop()}'" in policy and "default-src 'none'" in policy
        assert (answer.getheader("Referrer-Policy"), answer.getheader("Cache-Control")) == ("no-referrer", "no-store")
        assert not re.findall(r"(?:src|href)=\"(?!data:)|@import|url\(|innerHTML|insertAdjacent|document\.write", page)
    assert pages[0] != pages[1]


def test_an_event_comes_after_a_commit(server: Server, path: Path) -> None:
    answer = asked(server, "events")
    assert answer.status == 200 and answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"

    def view() -> dict[str, Any]:
        line = next(line for line in iter(answer.readline, b"") if line.startswith(b"data: "))
        return dict(json.loads(line[6:]))

    first = view()
    assert first["fits"][0]["curve"] == {"x": [1, 2, 3], "y": [512, 256, 128]} and first["fits"][0]["state"] == "closed"
    with pmstore.open(path) as store:
        store["epoch"] = "</script>"
        store.commit()
        newer = next(one for one in iter(view, None) if one["sequence"] > first["sequence"])
        assert "'</script>'" in [value["text"] for value in newer["values"]]
    assert next(one for one in iter(view, None) if one["writer"] == "closed")["sequence"] == newer["sequence"]


def test_it_goes_on_after_a_problem(server: Server, path: Path) -> None:
    """Among them a moment without a file, as of a program that is started again."""
    answer = asked(server, "events")
    events = (json.loads(line[6:]) for line in iter(answer.readline, b"") if line.startswith(b"data: "))
    path.unlink()
    assert next(one for one in events if one.get("writer") == "missing")["sequence"] > 0
    path.write_bytes(b"no store")
    assert "not a pmstore store" in next(one for one in events if "problem" in one)["problem"]
    path.unlink()
    with pmstore.open(path) as store:
        store["epoch"] = 100
    assert next(one for one in events if one.get("writer") == "closed" and one["sequence"] == 1)["values"]
    assert [row["name"] for row in json.loads(asked(server, "names").read())["names"]] == ["epoch"]
    assert inside_of(server, "epoch")["text"] == "100"


def test_names_are_data(server: Server) -> None:
    answer = asked(server, "names")
    assert answer.getheader("Content-Type") == "application/json; charset=utf-8"
    assert answer.getheader("X-Content-Type-Options") == "nosniff"
    found = json.loads(answer.read())
    assert {"name": "model/w", "kind": "array", "type": "(3, 4) float64", "size": "96 B"} in found["names"]
    assert [row["size"] for row in found["names"] if row["name"] == "losses"] == [""]  # a list is not read
    assert HOSTILE in [row["name"] for row in found["names"]] and found["more"] == 0
    assert inside_of(server, HOSTILE)["text"] == repr(HOSTILE)
    for name in ("none", "", "<script>"):
        missing = asked(server, f"inside?name={urllib.parse.quote(name)}")
        assert missing.status == 404 and missing.getheader("Content-Type") == "text/plain; charset=utf-8"
    assert inside_of(server, "model/w")["heat"] == [[0, 23, 46, 70], [93, 116, 139, 162], [185, 209, 232, 255]]


def test_a_port_that_is_taken(server: Server, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = server.server_address[1]
    assert _cli.main(["watch", "--web", "--port", str(port), str(path)]) == 2
    assert capsys.readouterr().err == f"pmstore: port {port}: it is in use: choose another one, or none\n"


def test_closing_it_ends_the_answers(path: Path) -> None:
    with Follower(path) as follower:
        with Server(follower, 0) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            answer = asked(server, "events")
            assert answer.readline().startswith(b"data: ")
            server.shutdown()
            thread.join()
        assert b"".join(iter(answer.readline, b"")).strip(b":\n ").count(b"data") <= 1


# ---- a look into values


def looked(path: Path, value: Any) -> dict[str, Any]:
    with pmstore.open(path, "w") as store:
        store["value"] = value
    with pmstore.open(path, "r") as store:
        found = inside.inside(store, "value")
    json.dumps(found, allow_nan=False)
    return found


@pytest.mark.parametrize("value", [np.arange(6.0), np.zeros((2, 300)), np.array(["a"]), "text"], ids=range(4))
def test_a_look_is_of_one_commit(path: Path, value: Any) -> None:
    """Also if the writer gives the name another value after the reader's last refresh."""
    with pmstore.open(path, "w") as writer, Follower(path) as follower:
        for before in (np.arange(20.0), np.arange(1000.0).reshape(20, 50), np.array(["b", "c"])):
            writer["value"] = before
            writer.commit()
            follower.store.refresh()
            expected = inside.inside(follower.store, "value")
            writer["value"] = value
            writer.commit()
            found = follower.consistently(lambda store: inside.inside(store, "value"))
            with pmstore.open(path, "r") as new:
                assert found in (expected, inside.inside(new, "value"))


def test_longdoubles_beyond_floats_are_not_finite(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert looked(path, np.full(3, np.longdouble("1e4000")))["text"] == "no finite numbers"


def test_large_arrays_are_read_in_part(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = looked(path, np.arange(100_000.0))
    assert (found["read"], found["of"]) == (inside.BLOCKS * inside.BLOCK, 100_000)
    assert (found["low"], found["high"], sum(found["histogram"])) == (0.0, 99_999.0, found["read"])
    assert found["line"]["x"] == found["line"]["y"] and len(found["line"]["x"]) == 2 * inside.ROWS
    found = looked(path, np.arange(300_000, dtype="i4").reshape(1000, 300))
    assert (found["read"], found["of"]) == (inside.ROWS * 300, 300_000)
    assert (found["rows"][0], found["rows"][-1], found["columns"][-1]) == (0, 999, 299)
    assert found["heat"][0][0] == 0 and found["heat"][-1][-1] == 255
    monkeypatch.setattr(inside, "MOST_BYTES", 1000)
    assert looked(path, np.zeros((2, 100)))["text"] == inside.TOO_LARGE
    assert looked(path, np.zeros((200, 3), order="F"))["text"] == inside.TOO_LARGE


def test_arrays_of_every_kind(path: Path) -> None:
    odd = looked(path, np.array([[np.nan, 1.0, -np.inf], [3.0, 2.0, np.inf]]))
    assert (odd["heat"], odd["low"], odd["high"]) == ([[None, 0, None], [255, 128, None]], 1.0, 3.0)
    assert looked(path, np.array([3 + 4j, 0]))["line"]["y"] == [5.0, 0.0]
    assert looked(path, np.array([-1.7e308, 1.7e308]))["histogram"][-1] == 1
    assert looked(path, np.array([True, False]))["line"]["y"] == [1.0, 0.0]
    assert len(looked(path, np.zeros((2, 2, 2), order="F"))["heat"][0]) == 4
    for value in (np.array(1.5), np.zeros((0, 3)), np.array(["a"]), np.array([np.nan]), {"a": 1}, "text", None):
        assert looked(path, value)["text"]
    assert looked(path, "x" * 5000)["text"].endswith("…")
    assert looked(path, "x" * (inside.MOST_VALUE + 1))["text"] == "too large to be looked into"
