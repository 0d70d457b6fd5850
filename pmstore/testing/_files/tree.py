"""The files below a directory as a traced program leaves them, and the meaning of its descriptors and paths."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._files.recording import INSIDE, ROOT, Event, Inode, Recording

__all__ = ["Node", "Place", "Tree", "traced_by"]

AT_FDCWD = -100
BLOCK = 512


class Node:
    """A file, directory or link below the directory, in its present state."""

    def __init__(self, number: int, kind: str, mode: int, path: str) -> None:
        self.number = number
        self.kind = kind
        self.mode = mode
        self.path = path
        self.content = bytearray()
        self.entries: dict[str, Node] = {}
        self.mapped = False
        self.emptied = False
        self.held = False  # it was open when it was emptied, or later
        self.handle = -1

    def frozen(self) -> Inode:
        """The node's present state as an Inode."""
        entries = {name: node.number for name, node in self.entries.items()}
        return Inode(self.kind, self.mode, bytes(self.content), entries)

    def put(self, offset: int, data: bytes) -> None:
        """Apply a write."""
        if len(self.content) < offset:
            self.content.extend(bytes(offset - len(self.content)))
        self.content[offset : offset + len(data)] = data

    def resize(self, size: int) -> None:
        """Apply a truncation or an extension."""
        del self.content[size:]
        self.content.extend(bytes(size - len(self.content)))


class Place(NamedTuple):
    """The target of a path: a name in a directory."""

    folder: Node
    name: str
    path: str


class Tree:
    """The files, and the events on them until now."""

    def __init__(self, root: Path, said: int) -> None:
        self.root = os.fspath(root)
        self.device = os.stat(root).st_dev
        self.events: list[Event] = []
        self.nodes: dict[tuple[int, int], Node] = {}
        self.number = ROOT
        self.created: list[Node] = []
        self.said = said
        self.said_key = self.key(os.fstat(said))
        self.said_size = 0
        self.mapped: dict[int, Node] = {}
        self.emptied: list[Node] = []
        self.top = self.scan(self.root, "")
        self.base = {node.number: node.frozen() for node in self.created}
        self.created.clear()

    def recording(self, command: Sequence[str]) -> Recording:
        """The recording until now. Raises CrashTestError if it does not explain the state of the files."""
        self.compare(self.top, self.root)
        made = {
            node.number: Inode(node.kind, node.mode, bytes(node.content) if node.kind == "link" else b"", {})
            for node in self.created
        }
        return Recording(list(command), {**self.base, **made}, self.events, frozenset(self.mapped))

    # ---- the files

    @staticmethod
    def key(status: os.stat_result) -> tuple[int, int]:
        return status.st_dev, status.st_ino

    def new(self, status: os.stat_result, path: str) -> Node:
        kinds = {stat.S_IFDIR: "directory", stat.S_IFLNK: "link", stat.S_IFREG: "file"}
        kind = kinds.get(stat.S_IFMT(status.st_mode))
        if kind is None:
            raise CrashTestError(f"{path} is neither a file nor a directory nor a link: only these can be recorded")
        node = Node(self.number, kind, stat.S_IMODE(status.st_mode), path)
        self.number += 1
        self.created.append(node)
        self.nodes[self.key(status)] = node
        return node

    def target(self, full: str) -> bytearray:
        """The content of a symbolic link: of one to an absolute path in the directory, with INSIDE in the place of the
        directory, as each image is in another one."""
        found = os.readlink(full)
        if os.path.isabs(found):  # by another path of the directory, too
            there = os.path.normpath(os.path.join(os.path.realpath(os.path.dirname(found)), os.path.basename(found)))
            if f"{there}/".startswith(f"{self.root}/"):
                return bytearray(INSIDE + os.fsencode(there[len(self.root) :]))
        return bytearray(os.fsencode(found))

    def scan(self, full: str, path: str) -> Node:
        """The files from before the program runs, from a directory downward."""
        status = os.lstat(full)
        known = self.nodes.get(self.key(status))
        if known is not None:
            return known  # a second name of a known file
        node = self.new(status, path)
        if node.kind == "file":
            node.content = bytearray(Path(full).read_bytes())
        elif node.kind == "link":
            node.content = self.target(full)
        else:
            for name in sorted(os.listdir(full)):
                node.entries[name] = self.scan(os.path.join(full, name), os.path.join(path, name))
        return node

    def compare(self, node: Node, full: str) -> None:
        """Compare the recorder's state of the files with the real files, which another program, or an unknown call,
        may have changed.
        """
        where = node.path or "the directory"
        unexplained = (
            f"{where} has changed in a way that the recorded calls don't explain: another program wrote to it, "
            "or this one used a call that isn't recorded (such as an ioctl that clones files)"
        )
        if node.kind == "directory":
            if set(os.listdir(full)) != set(node.entries):
                raise CrashTestError(unexplained)
            for name, child in node.entries.items():
                self.compare(child, os.path.join(full, name))
        elif node.kind == "file" and Path(full).read_bytes() != node.content:
            raise CrashTestError(unexplained)

    def reader(self, node: Node, path: str) -> int:
        """A descriptor of the recorder itself. It stays open, so that the inode's number is not used again."""
        if node.handle < 0:
            try:
                node.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CrashTestError(f"{node.path} can't be read while it is recorded: {error.strerror}") from None
        return node.handle

    @staticmethod
    def descriptors(pid: int) -> list[int]:
        try:
            return [int(fd) for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:  # it ends just now
            return []

    def has_copies(self, pid: int, fd: int) -> bool:
        """Whether an open file has other descriptors in traced processes: copies, as a shell makes them, or those of
        forks."""
        owner = _process_of(pid)
        node = self.at(pid, fd)
        return any(
            (other, copy) != (owner, fd) and self.at(other, copy) is node and _is_same_file(owner, fd, other, copy)
            for other, _ in traced_by(os.getpid())
            for copy in self.descriptors(other)
        )

    def is_open(self, node: Node) -> bool:
        """Whether a traced process has the file open."""
        return any(self.at(pid, fd) is node for pid, _ in traced_by(os.getpid()) for fd in self.descriptors(pid))

    def catch_up(self) -> None:
        """Stores to shared mappings since the last call: the differences become writes."""
        for node in self.mapped.values():
            size = len(node.content)
            data = os.pread(node.handle, size, 0)
            if data == node.content:
                continue
            data = data.ljust(size, b"\0")
            start = None
            for at in range(0, size + BLOCK, BLOCK):
                differs = at < size and data[at : at + BLOCK] != node.content[at : at + BLOCK]
                if differs and start is None:
                    start = at
                elif not differs and start is not None:
                    self.write(node, start, data[start : min(at, size)], "store")
                    start = None

    def write(self, node: Node, offset: int, data: bytes, call: str) -> None:
        node.put(offset, data)
        self.events.append(Event("write", node.number, offset, len(data), data, call=call, path=node.path))

    # ---- descriptors and paths of a thread

    def at(self, pid: int, fd: int) -> Node | None:
        try:
            return self.nodes.get(self.key(os.stat(f"/proc/{pid}/fd/{fd}")))
        except OSError:
            return None

    def file(self, pid: int, fd: int) -> Node | None:
        node = self.at(pid, fd)
        if node is None or node.kind != "file":
            return None
        self.reader(node, f"/proc/{pid}/fd/{fd}")
        return node

    def is_said(self, pid: int, fd: int) -> bool:
        try:
            return self.key(os.stat(f"/proc/{pid}/fd/{fd}")) == self.said_key
        except OSError:
            return False

    @staticmethod
    def about(pid: int, fd: int) -> tuple[int, int]:
        """Position and flags of an open file."""
        lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().split("\n")
        return int(lines[0].split()[1]), int(lines[1].split()[1], 8)

    @staticmethod
    def memory(pid: int, address: int, length: int) -> bytes:
        handle = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(handle, length, address)
        finally:
            os.close(handle)

    def text(self, pid: int, address: int) -> str:
        found = b""
        while b"\0" not in found:
            if len(found) > 8192:
                return ""
            try:
                part = self.memory(pid, address + len(found), 4096 - (address + len(found)) % 4096)
            except OSError:
                return ""
            if not part:
                return ""
            found += part
        return os.fsdecode(found.partition(b"\0")[0])

    def place(self, pid: int, fd: int, address: int, follow: bool = False) -> Place | None:
        """The target of a path; None if it is not below the directory."""
        path = self.text(pid, address)
        if not path:
            return None
        try:
            start = (
                "/"
                if path.startswith("/")
                else os.readlink(f"/proc/{pid}/" + ("cwd" if fd == AT_FDCWD else f"fd/{fd}"))
            )
        except OSError:
            return None
        full = os.path.join(start, path).rstrip("/")
        if full.startswith("/proc/self/"):
            full = f"/proc/{pid}/" + full.removeprefix("/proc/self/")
        name = os.path.basename(full)
        if name in (".", "..", "") or (follow and os.path.islink(full)):
            full = os.path.realpath(full)
            name = os.path.basename(full)
        folder = os.path.realpath(os.path.dirname(full))
        full = os.path.join(folder, name)
        if not full.startswith(self.root + "/"):
            return None
        node: Node | None = self.top
        relative = os.path.relpath(folder, self.root)
        for part in [] if relative == "." else relative.split("/"):
            node = node.entries.get(part) if node is not None else None
        return None if node is None else Place(node, name, os.path.relpath(full, self.root))


def traced_by(tracer: int) -> list[tuple[int, str]]:
    """The processes that a process traces, and their commands."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if f"\nTracerPid:\t{tracer}\n" in status.read_text():
                command = (status.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                found.append((int(status.parent.name), command.strip()[:80]))
    return found


def _process_of(thread: int) -> int:
    for line in Path(f"/proc/{thread}/status").read_text().split("\n"):
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    return thread


_KCMP = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine)
_KCMP_FILE = 0


def _is_same_file(pid: int, fd: int, other: int, copy: int) -> bool:
    """Whether two descriptors of one file are of one open file: the kernel says so, or else their positions do."""
    if _KCMP is not None and (order := ctypes.CDLL(None).syscall(_KCMP, pid, other, _KCMP_FILE, fd, copy)) >= 0:
        return bool(order == 0)
    with contextlib.suppress(OSError):
        return Tree.about(pid, fd) == Tree.about(other, copy)
    return False
