"""Restrictions of the calling process, as containers have them. For children only: nothing takes them back."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
USERFAULTFD = {"x86_64": 323, "aarch64": 282}
MADVISE = {"x86_64": 28, "aarch64": 233}
IOCTL = {"x86_64": 16, "aarch64": 29}
FCNTL = {"x86_64": 72, "aarch64": 25}
PAGEMAP_SCAN, F_OFD_GETLK = 0xC0606610, 36
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
NEW_NAMESPACE, PRIVATE, RECURSIVE = 0x20000, 1 << 18, 1 << 14


def filter_calls(*, userfaultfd: int = 0, pagemap_scan: int = 0, look_at_locks: int = 0, madvise: int = 0) -> None:
    """seccomp: these calls fail with this error from now on. Raises OSError if filters are refused."""
    machine = platform.machine()
    if machine not in USERFAULTFD:
        raise OSError(errno.ENOSYS, "the numbers of its system calls are not known")

    def instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    def refused(number: int, second: int, error: int) -> bytes:
        """A call by its number and its second argument."""
        code = instruction(LOAD, 0) + instruction(EQUAL, number, 0, 3) + instruction(LOAD, 24)
        return code + instruction(EQUAL, second, 0, 1) + instruction(RETURN, ERRNO | error)

    code = b""
    for numbers, error in ((USERFAULTFD, userfaultfd), (MADVISE, madvise)):
        if error:
            code += instruction(LOAD, 0) + instruction(EQUAL, numbers[machine], 0, 1)
            code += instruction(RETURN, ERRNO | error)
    if pagemap_scan:
        code += refused(IOCTL[machine], PAGEMAP_SCAN, pagemap_scan)
    if look_at_locks:
        code += refused(FCNTL[machine], F_OFD_GETLK, look_at_locks)
    code += instruction(RETURN, ALLOW)
    room = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(room)))
    if LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or LIBC.prctl(SECCOMP, FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "no filter of system calls is allowed")


def hide_proc() -> None:
    """Take /proc away. Raises OSError without the right to mount."""
    if LIBC.unshare(NEW_NAMESPACE) or LIBC.mount(b"none", b"/", None, PRIVATE | RECURSIVE, None):
        raise OSError(ctypes.get_errno(), "no name space of mounts")
    if LIBC.mount(b"tmpfs", b"/proc", b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "can't mount over /proc")


def become_nobody(directory: str) -> None:
    """Go on without privileges, as the owner of a directory. Raises OSError if the process is not root."""
    os.chown(directory, 65534, 65534)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


def let_others_enter(path: Path) -> None:
    """Let other users read the folders that the path lies in, as far as they are this user's."""
    for directory in path.parents:
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o055)
