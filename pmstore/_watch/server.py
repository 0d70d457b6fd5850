"""The page of ``pmstore watch --web``: one page on the loopback interface, and the data that it asks for.

The address holds a random token: other users of the machine can reach the port, but do not know it. Requests whose Host
is no loopback address are refused, because a foreign page could have its own name lead to this server (DNS rebinding).
The page loads nothing from elsewhere, and its Content-Security-Policy runs no other script than its own.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import secrets
import socketserver
import sys
import threading
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from pmstore._errors import Error
from pmstore._watch.follow import IDLE, Follower, views
from pmstore._watch.inside import inside, names

__all__ = ["Server", "serve"]

ADDRESS = "127.0.0.1"
BEAT = 10.0  # seconds without a view after which a line is sent, to notice a browser that has gone
PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def serve(follower: Follower, port: int) -> None:
    """Serve the page until an interrupt. Raises OSError if the port is taken."""
    with Server(follower, port) as server:
        print(f"{server.url}   (Ctrl-C ends it)", flush=True)
        server.serve_forever()


class Server(socketserver.ThreadingTCPServer):
    """The server of the page of one store.

    Parameters
    ----------
    follower : Follower
    port : int
        0: a free port.

    Attributes
    ----------
    url : str
        The address of the page, with the token.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, follower: Follower, port: int) -> None:
        self.follower = follower
        self.token = secrets.token_urlsafe(24)
        self._stopped = threading.Event()
        self._news = threading.Condition()
        self._count, self._newest = 0, ""
        self._viewing = threading.Thread(target=self._view, daemon=True)
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"can't be used ({error.strerror})"
            raise OSError(error.errno, f"it {why}: choose another one, or none", f"port {port}") from error
        self.url = f"http://{ADDRESS}:{self.server_address[1]}/{self.token}/"
        self._viewing.start()

    def server_close(self) -> None:
        """Close the port, and end all answers. The constructor calls this, too, if it fails."""
        super().server_close()
        self._stopped.set()
        with self._news:
            self._news.notify_all()
        if self._viewing.ident is not None:
            self._viewing.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes is no error; anything else is one of this program."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def after(self, count: int) -> tuple[int, str | None]:
        """The newest view and its number, if it is newer; otherwise, after BEAT seconds, None. The number is -1 after
        the last one."""
        with self._news:
            self._news.wait_for(lambda: self._count > count or self._stopped.is_set(), BEAT)
            if self._stopped.is_set():
                return -1, None
            return self._count, self._newest if self._count > count else None

    def _view(self) -> None:
        while not self._stopped.is_set():
            try:
                for view in views(self.follower, self._stopped):
                    self._tell(view.as_json(curves=True))
            except Exception as error:  # the next look may succeed
                self._tell({"problem": f"{self.follower.path}: {error or type(error).__name__}"})
                self._stopped.wait(IDLE)

    def _tell(self, news: dict[str, Any]) -> None:
        text = json.dumps(news, allow_nan=False)
        with self._news:
            self._count, self._newest = self._count + 1, text
            self._news.notify_all()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    server_version = "pmstore"
    sys_version = ""
    timeout = 30.0  # seconds, for a client that sends or reads nothing

    def do_GET(self) -> None:
        """The page; the views, as server-sent events; the names; the data of one of them."""
        path, _, query = self.path.partition("?")
        _, token, *rest = path.split("/", 2) if path.startswith("/") else ["", ""]
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that pmstore has printed, with its token")
        elif not self._from_here():
            self._refuse(HTTPStatus.FORBIDDEN, "open the address with 127.0.0.1 in it, as pmstore has printed it")
        elif rest == [""]:
            self._page()
        elif rest == ["events"]:
            self._events()
        elif rest == ["names"]:
            self._read(names)
        elif rest == ["inside"]:
            name = urllib.parse.parse_qs(query).get("name", [""])[0]
            self._read(lambda store: inside(store, name))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def refuse_method(self) -> None:
        """Answer a request that is no GET."""
        self.close_connection = True
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET", Allow="GET")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = refuse_method

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is not told of requests."""

    def _from_here(self) -> bool:
        """Whether there is one Host, and it is this machine, which no name of another one's leads to."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or any(sign in hosts[0] for sign in "@/?#\\"):  # a name and a port only
            return False
        try:
            name = urllib.parse.urlsplit(f"//{hosts[0]}").hostname
            return name == "localhost" or (name is not None and ipaddress.ip_address(name).is_loopback)
        except ValueError:
            return False

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        page = PAGE.read_text(encoding="utf-8").replace("NONCE", nonce)
        self._send(HTTPStatus.OK, "text/html", page, {"Content-Security-Policy": POLICY.format(nonce)})

    def _events(self) -> None:
        self._begin(HTTPStatus.OK, "text/event-stream", {})
        count = 0
        while count >= 0:
            count, view = self.server.after(count)
            self.wfile.write(b": \n\n" if view is None else f"data: {view}\n\n".encode())

    def _read(self, read: Any) -> None:
        try:
            found = self.server.follower.consistently(read)
        except Error as error:
            status = HTTPStatus.NOT_FOUND if isinstance(error, KeyError) else HTTPStatus.INTERNAL_SERVER_ERROR
            self._refuse(status, str(error))
        else:
            self._send(HTTPStatus.OK, "application/json", json.dumps(found, allow_nan=False), {})

    def _refuse(self, status: HTTPStatus, text: str, **headers: str) -> None:
        self._send(status, "text/plain", text + "\n", headers)

    def _send(self, status: HTTPStatus, kind: str, text: str, headers: dict[str, str]) -> None:
        body = text.encode("utf-8", "backslashreplace")
        self._begin(status, kind, headers | {"Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        always = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in (always | headers).items():
            self.send_header(name, value)
        self.end_headers()
