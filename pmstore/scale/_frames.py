"""Messages over a socket between processes: 8 bytes with the length, and a pickle."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from typing import Any

PIECE = 1 << 20  # bytes that are read at a time


def send(connection: socket.socket, message: Any) -> None:
    """Send a message. Waits until the other end has room for it; raises OSError if there is none any more."""
    data = pickle.dumps(message, 5)
    connection.sendall(len(data).to_bytes(8, "little") + data)


class Incoming:
    """Reads messages. The beginning of an incomplete message is kept, and `read` does not wait for the rest."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.fileno()
        self._buffer = bytearray()

    def read(self) -> bool:
        """Read the bytes that have arrived, or wait for the first one. Returns whether the other end is still there."""
        try:
            data = os.read(self._file, PIECE)
        except OSError:
            return False
        self._buffer += data
        return bool(data)

    def messages(self) -> Iterator[Any]:
        """Take the messages that were read as a whole."""
        while len(self._buffer) >= 8:
            end = 8 + int.from_bytes(self._buffer[:8], "little")
            if len(self._buffer) < end:
                return
            message = pickle.loads(memoryview(self._buffer)[8:end])
            del self._buffer[:end]
            yield message
