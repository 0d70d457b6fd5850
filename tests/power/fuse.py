"""One file, served through the kernel's FUSE protocol. The file is the device, and each write to it is recorded.

The root of the file system is the file itself, so that few operations exist. It is opened without page cache
(FOPEN_DIRECT_IO) and without asynchronous direct I/O, so that each request of a loop device arrives separately and
whole. A file of this server is never durable; a power cut is computed later, from the recording.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
from pathlib import Path

MAJOR, MINOR = 7, 31
FORGET, GETATTR, OPEN, READ, WRITE, RELEASE, FSYNC, FLUSH, INIT = 2, 3, 14, 15, 16, 18, 20, 25, 26
INTERRUPT, DESTROY, BATCH_FORGET = 36, 38, 42
WITHOUT_REPLY = (FORGET, BATCH_FORGET, INTERRUPT)
BIG_WRITES, MAX_PAGES = 1 << 5, 1 << 22
DIRECT_IO = 1
LARGEST = 1 << 20  # bytes of one write

HEADER = struct.Struct("<IIQQIIII")
REPLY = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<QIIQQQQQQIIIIIIIIII")
TRANSFER = struct.Struct("<QQIIQII")  # of READ and WRITE: handle, offset, size, …
WRITTEN = struct.Struct("<QQ")  # one write of a recording: offset and length; its bytes are in another file

Reply = tuple[int, bytes]


class Server:
    """Answers requests about one file. image: its bytes; writes: the file for `WRITTEN`; data: the file for the
    written bytes."""

    def __init__(self, image: int, writes: int, data: int) -> None:
        self.image, self.writes, self.data = image, writes, data
        self.size = os.fstat(image).st_size

    def serve(self, device: int) -> None:
        """Answer requests until the file system is unmounted."""
        while True:
            try:
                request = os.read(device, LARGEST + (1 << 16))
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):  # ENOENT: it was interrupted meanwhile
                    continue
                if error.errno == errno.ENODEV:
                    return
                raise
            _, operation, unique, *_ = HEADER.unpack_from(request)
            if operation in WITHOUT_REPLY:
                continue
            failed, body = self.answer(operation, request)
            try:
                os.writev(device, [REPLY.pack(REPLY.size + len(body), -failed, unique), body])
            except FileNotFoundError:
                pass  # the requesting process is gone

    def answer(self, operation: int, request: bytes) -> Reply:
        """errno; or 0 and the bytes after the header of the reply."""
        if operation == INIT:
            return 0, struct.pack(
                "<IIIIHHIIHHI28x", MAJOR, MINOR, 0, BIG_WRITES | MAX_PAGES, 12, 9, LARGEST, 1, LARGEST // 4096, 0, 0
            )
        if operation == GETATTR:
            mode, size = stat.S_IFREG | 0o600, self.size
            return 0, ATTRIBUTES.pack(3600, 0, 0, 1, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
        if operation == OPEN:
            return 0, struct.pack("<QII", 0, DIRECT_IO, 0)
        if operation == READ:
            _, offset, size, *_ = TRANSFER.unpack_from(request, HEADER.size)
            return 0, os.pread(self.image, size, offset)
        if operation == WRITE:
            _, offset, size, *_ = TRANSFER.unpack_from(request, HEADER.size)
            self.write(offset, memoryview(request)[HEADER.size + TRANSFER.size :])
            return 0, struct.pack("<II", size, 0)
        if operation in (FSYNC, FLUSH, RELEASE, DESTROY):
            return 0, b""
        return errno.ENOSYS, b""

    def write(self, offset: int, contents: memoryview) -> None:
        if os.pwrite(self.image, contents, offset) != len(contents) or os.write(self.data, contents) != len(contents):
            raise OSError(errno.ENOSPC, "no room for the recording")
        os.write(self.writes, WRITTEN.pack(offset, len(contents)))


def main() -> None:
    """python -m tests.power.fuse DEVICE FOLDER: the descriptor of /dev/fuse, and the folder for the recording."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: without its parent, the recording is useless
    device, folder = int(sys.argv[1]), Path(sys.argv[2])
    descriptors = [os.open(folder / name, os.O_RDWR | os.O_CREAT) for name in ("image", "writes", "data")]
    Server(*descriptors).serve(device)


if __name__ == "__main__":
    main()
