"""A disk with blocks that can't be read: a FUSE file system that mirrors the files of a directory and refuses to read
some of their bytes. It speaks FUSE's protocol without a library, and needs only root.

If the page cache can't get a page, touching its mapping raises a signal, as on a real disk.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import warnings
from pathlib import Path

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS = 1, 2, 3, 4, 14, 15, 16, 17
RELEASE, FSYNC, FLUSH, INIT, OPENDIR, RELEASEDIR, BATCH_FORGET = 18, 20, 25, 26, 27, 29, 42
BIG_WRITES, SIZE = 1 << 5, 1 << 3
MOST = 1 << 17  # bytes of a write
PR_SET_PDEATHSIG = 1
ROOT = 1

LIBC = ctypes.CDLL(None, use_errno=True)


class BadDisk:
    """Mounted at `mount`, it shows the files of `behind`. Pages given to `spoil` can't be read until they are
    written; those given to `wear_out` can't be written either."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError if there is no FUSE here, or no right to mount it."""
        self.behind, self.mount = directory / "behind", directory / "disk"
        self.behind.mkdir()
        self.mount.mkdir()
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        try:
            options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
            if LIBC.mount(b"bad", os.fsencode(self.mount), b"fuse", 0, options.encode()):
                raise OSError(ctypes.get_errno(), "can't mount")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # for fork beside threads
                self._server = os.fork()
            if not self._server:
                self._serve(device)
        finally:
            os.close(device)

    def close(self) -> None:
        LIBC.umount2(os.fsencode(self.mount), 2)  # MNT_DETACH
        os.kill(self._server, signal.SIGKILL)
        os.waitpid(self._server, 0)

    def spoil(self, name: str, *pages: int) -> None:
        """Make these pages of 4096 bytes of a file unreadable. None of them may be in the page cache yet."""
        (self.behind / f"{name}.bad").write_text(" ".join(map(str, pages)))

    def wear_out(self, name: str, *pages: int) -> None:
        (self.behind / f"{name}.worn").write_text(" ".join(map(str, pages)))
        self.spoil(name, *pages)

    def _serve(self, device: int) -> None:
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            served = Served(self.behind)
            while True:
                request = os.read(device, MOST + 4096)
                length, operation, unique, node = struct.unpack_from("<IIQQ", request)
                if operation in (FORGET, BATCH_FORGET):
                    continue
                try:
                    answer, error = served.answer(operation, node, request[40:length]), 0
                except OSError as failure:
                    answer, error = b"", failure.errno or errno.EIO
                os.write(device, struct.pack("<IiQ", 16 + len(answer), -error, unique) + answer)
        finally:
            os._exit(0)


class Served:
    """Files by the number of their node, from 2 on."""

    def __init__(self, behind: Path) -> None:
        self.behind = behind
        self.files: list[Path] = []

    def answer(self, operation: int, node: int, body: bytes) -> bytes:
        if operation == INIT:
            return struct.pack("<IIIIHHII9I", 7, 31, 0, BIG_WRITES, 16, 12, MOST, 1, *[0] * 9)
        if operation == LOOKUP:
            return self._lookup(body.rstrip(b"\0").decode())
        if operation in (GETATTR, SETATTR):
            if operation == SETATTR and struct.unpack_from("<I", body)[0] & SIZE:
                os.truncate(self._file(node), struct.unpack_from("<Q", body, 16)[0])
            return struct.pack("<QII", 0, 0, 0) + self._attributes(node)
        if operation in (OPEN, OPENDIR):
            return bytes(16)
        if operation == READ:
            return self._read(node, *struct.unpack_from("<QI", body, 8))
        if operation == WRITE:
            return self._write(node, *struct.unpack_from("<QI", body, 8), body[40:])
        if operation == STATFS:
            return struct.pack("<QQQQQIIII24x", 1 << 20, 1 << 20, 1 << 20, 0, 0, 4096, 255, 4096, 0)
        if operation in (RELEASE, RELEASEDIR, FSYNC, FLUSH):
            return b""
        raise OSError(errno.ENOSYS, "not here")

    def _file(self, node: int) -> Path:
        return self.files[node - 2]

    def _lookup(self, name: str) -> bytes:
        path = self.behind / name
        path.stat()
        if path not in self.files:
            self.files.append(path)
        node = 2 + self.files.index(path)
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + self._attributes(node)

    def _attributes(self, node: int) -> bytes:
        at = (self.behind if node == ROOT else self._file(node)).stat()
        mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o644
        return struct.pack(
            "<6Q10I", node, at.st_size, -(-at.st_size // 512), 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
        )

    def _bad(self, node: int, kind: str = "bad") -> set[int]:
        path = self._file(node).with_name(f"{self._file(node).name}.{kind}")
        return set(map(int, path.read_text().split())) if path.exists() else set()

    def _read(self, node: int, offset: int, size: int) -> bytes:
        if self._bad(node) & set(range(offset // 4096, -(-(offset + size) // 4096))):
            raise OSError(errno.EIO, "a bad block")
        with self._file(node).open("rb") as file:
            return os.pread(file.fileno(), size, offset)

    def _write(self, node: int, offset: int, size: int, data: bytes) -> bytes:
        if self._bad(node, "worn") & set(range(offset // 4096, -(-(offset + size) // 4096))):
            raise OSError(errno.EIO, "a block that is worn out")
        left = self._bad(node) - set(
            range(-(-offset // 4096), (offset + size) // 4096)
        )  # a page that is written as a whole can be read again
        self._file(node).with_name(f"{self._file(node).name}.bad").write_text(" ".join(map(str, left)))
        with self._file(node).open("r+b") as file:
            return struct.pack("<II", os.pwrite(file.fileno(), data[:size], offset), 0)
