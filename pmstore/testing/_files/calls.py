"""The system calls of a traced program, as events on the files below a directory."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Iterable, Sequence

from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._files.recording import Event
from pmstore.testing._files.tree import AT_FDCWD, Node, Place, Tree

__all__ = ["Calls", "Finish"]

Finish = Callable[[int], None]
"""The function that handles the result of a call."""

Arguments = Sequence[int]

# The kernel's numbers, where Python has none; these are the same on x86-64 and aarch64.
O_DSYNC, O_SYNC, O_TMPFILE = 0o10000, 0o4000000, 0o20000000
RWF_DSYNC, RWF_SYNC = 2, 4
RENAME_EXCHANGE = 2
MS_SYNC = 4
SYNC_AND_WAIT = 2 | 4
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, UNSHARE = 1, 2, 16, 64

ASYNCHRONOUS = (
    "the program uses io_uring, whose writes the recorder can't see. Have it use ordinary calls: UV_USE_IO_URING=0 for "
    "what is built on libuv (Node.js), or the option of the program or library that turns it off"
)


def signed(value: int, bits: int = 32) -> int:
    """An argument as its C type."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


class Calls(Tree):
    """Turns calls into events: `enter` gets each call before it is made, and the `Finish` that it returns gets the
    result.
    """

    saying = b""
    """The unfinished last line of standard output."""

    def enter(self, pid: int, name: str, arguments: Arguments) -> Finish | None:
        """The function to call when the call has returned; None if the call doesn't concern the files."""
        if name == "io_uring_setup":
            raise CrashTestError(ASYNCHRONOUS)
        finish: Finish | None = getattr(self, f"call_{name}")(pid, arguments)
        return finish

    def _event(self, kind: str, call: str, path: str, **fields: object) -> None:
        self.events.append(Event(kind, call=call, path=path, **fields))  # type: ignore[arg-type]

    # ---- opening and closing

    def _open(self, call: str, pid: int, fd: int, address: int, flags: int) -> Finish | None:
        if flags & O_TMPFILE:
            return self._unnamed(pid, fd, address)
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        place = self.place(pid, fd, address, follow=not (exclusive or flags & os.O_NOFOLLOW))
        if place is None:
            return None
        known = place.folder.entries.get(place.name)

        def finish(result: int) -> None:
            if result < 0:
                return
            if known is None:
                if not flags & os.O_CREAT:
                    return  # a file without a name, opened again through /proc/self/fd
                status = os.stat(f"/proc/{pid}/fd/{result}")
                if stat.S_ISREG(status.st_mode):
                    node = self._enter(place, self.new(status, place.path), call, "create")
                    self.reader(node, f"/proc/{pid}/fd/{result}")
            elif known.kind == "file":
                if flags & os.O_TRUNC:
                    self._resize(known, 0, f"{call}(O_TRUNC)")
                known.held = known.emptied

        return finish

    def _unnamed(self, pid: int, fd: int, address: int) -> Finish | None:
        """O_TMPFILE: a file without a name. The path is that of a directory."""
        place = self.place(pid, fd, address, follow=True)
        start = os.path.join(os.readlink(f"/proc/{pid}/cwd"), self.text(pid, address))
        if place is None and os.path.realpath(start) != self.root:
            return None

        def finish(result: int) -> None:
            if result >= 0:
                name = f"/proc/{pid}/fd/{result}"
                self.reader(self.new(os.stat(name), "an unnamed file"), name)

        return finish

    def _enter(self, place: Place, node: Node, call: str, kind: str) -> Node:
        place.folder.entries[place.name] = node
        node.path = place.path
        self._event(kind, call, place.path, inode=node.number, folder=place.folder.number, name=place.name)
        return node

    def call_open(self, pid: int, a: Arguments) -> Finish | None:
        return self._open("open", pid, AT_FDCWD, a[0], a[1])

    def call_creat(self, pid: int, a: Arguments) -> Finish | None:
        return self._open("creat", pid, AT_FDCWD, a[0], os.O_CREAT | os.O_TRUNC | os.O_WRONLY)

    def call_openat(self, pid: int, a: Arguments) -> Finish | None:
        return self._open("openat", pid, signed(a[0]), a[1], a[2])

    def call_openat2(self, pid: int, a: Arguments) -> Finish | None:
        try:
            (flags,) = struct.unpack("<Q", self.memory(pid, a[2], 8))
        except (OSError, struct.error):
            return None
        return self._open("openat2", pid, signed(a[0]), a[1], flags)

    def _released(self, pid: int, fds: Iterable[int]) -> Finish | None:
        """Descriptors are closed. If one is the last of its open file, ext4 writes out a file that was emptied."""
        nodes = [node for fd in fds if (node := self._last_one(pid, fd)) is not None] if self.emptied else []

        def finish(result: int) -> None:
            for node in nodes if result >= 0 else ():
                self._closed(node)

        return finish if nodes else None

    def _last_one(self, pid: int, fd: int) -> Node | None:
        """The file that was emptied, of a descriptor without copies in this process or others."""
        node = self.at(pid, fd)
        return node if node is not None and node.emptied and not self.has_copies(pid, fd) else None

    def _closed(self, node: Node) -> None:
        if node.emptied:
            node.emptied = False
            self.emptied.remove(node)
            self._event("close", "close", node.path, inode=node.number)

    def call_close(self, pid: int, a: Arguments) -> Finish | None:
        return self._released(pid, [signed(a[0])])

    def call_close_range(self, pid: int, a: Arguments) -> Finish | None:
        return self._released(pid, [fd for fd in self.descriptors(pid) if a[0] <= fd <= a[1] & 0xFFFFFFFF])

    def call_dup2(self, pid: int, a: Arguments) -> Finish | None:
        return self._released(pid, [signed(a[1])] if a[0] != a[1] else [])

    call_dup3 = call_dup2

    def call_exit_group(self, pid: int, a: Arguments) -> None:
        """It does not return, and closes all."""
        for node in [self._last_one(pid, fd) for fd in self.descriptors(pid)] if self.emptied else ():
            if node is not None:
                self._closed(node)

    def died(self) -> None:
        """A process has ended, perhaps by a signal."""
        for node in list(self.emptied):
            if node.held and not self.is_open(node):
                self._closed(node)

    # ---- contents

    def _written(self, call: str, pid: int, fd: int, offset: int | None, flags: int = 0) -> Finish | None:
        """offset: the place of the bytes; None: the open file's position."""
        if self.is_said(pid, fd):
            return self._say
        node = self.file(pid, fd)
        if node is None:
            return None
        _, how = self.about(pid, fd)
        appends = how & os.O_APPEND or flags & 16  # RWF_APPEND

        def finish(result: int) -> None:
            if result <= 0:
                return
            if offset is None:
                end = self.about(pid, fd)[0]
            elif appends:
                end = os.fstat(node.handle).st_size
            else:
                end = offset + result
            self.write(node, end - result, os.pread(node.handle, result, end - result), call)
            if how & O_DSYNC or flags & (RWF_DSYNC | RWF_SYNC):
                name = "O_SYNC" if how & O_SYNC == O_SYNC else "O_DSYNC" if how & O_DSYNC else "RWF_DSYNC"
                self._sync(node, name, "range", end - result, result)

        return finish

    def _say(self, result: int) -> None:
        """Record only whole lines: half a line acknowledges nothing, and Python may write a line in several parts."""
        size = os.fstat(self.said).st_size
        self.saying += os.pread(self.said, size - self.said_size, self.said_size)
        self.said_size = size
        lines, newline, rest = self.saying.rpartition(b"\n")
        if newline:
            self._event("said", "write", "standard output", data=lines + newline, length=len(lines) + 1)
            self.saying = rest

    def finish(self) -> None:
        """The program has ended."""
        self.catch_up()
        if self.saying:
            self._event("said", "write", "standard output", data=self.saying, length=len(self.saying))

    def call_write(self, pid: int, a: Arguments) -> Finish | None:
        return self._written("write", pid, signed(a[0]), None)

    def call_writev(self, pid: int, a: Arguments) -> Finish | None:
        return self._written("writev", pid, signed(a[0]), None)

    def call_pwrite64(self, pid: int, a: Arguments) -> Finish | None:
        return self._written("pwrite", pid, signed(a[0]), a[3])

    def call_pwritev(self, pid: int, a: Arguments) -> Finish | None:
        return self._written("pwritev", pid, signed(a[0]), a[3])

    def call_pwritev2(self, pid: int, a: Arguments) -> Finish | None:
        offset = None if signed(a[3], 64) == -1 else a[3]
        return self._written("pwritev2", pid, signed(a[0]), offset, a[5])

    def call_sendfile(self, pid: int, a: Arguments) -> Finish | None:
        return self._written("sendfile", pid, signed(a[0]), None)

    def _copied(self, call: str, pid: int, fd: int, address: int) -> Finish | None:
        """copy_file_range and splice: the offset is in the program's memory, or is the position."""
        if address == 0:
            return self._written(call, pid, fd, None)
        try:
            (offset,) = struct.unpack("<q", self.memory(pid, address, 8))
        except (OSError, struct.error):
            return None
        return self._written(call, pid, fd, offset)

    def call_copy_file_range(self, pid: int, a: Arguments) -> Finish | None:
        return self._copied("copy_file_range", pid, signed(a[2]), a[3])

    def call_splice(self, pid: int, a: Arguments) -> Finish | None:
        return self._copied("splice", pid, signed(a[2]), a[3])

    def _resize(self, node: Node, size: int, call: str) -> None:
        if size == len(node.content):
            return
        if size == 0 and not node.emptied:
            node.emptied, node.held = True, call != "truncate"
            self.emptied.append(node)
        node.resize(size)
        self._event("size", call, node.path, inode=node.number, length=size)

    def call_truncate(self, pid: int, a: Arguments) -> Finish | None:
        place = self.place(pid, AT_FDCWD, a[0], follow=True)
        node = place.folder.entries.get(place.name) if place is not None else None
        if node is None:
            return None
        return lambda result: self._resize(node, a[1], "truncate") if result == 0 else None

    def call_ftruncate(self, pid: int, a: Arguments) -> Finish | None:
        node = self.file(pid, signed(a[0]))
        if node is None:
            return None
        return lambda result: self._resize(node, a[1], "ftruncate") if result == 0 else None

    def call_fallocate(self, pid: int, a: Arguments) -> Finish | None:
        node = self.file(pid, signed(a[0]))
        if node is None:
            return None
        mode, offset, length = signed(a[1]), a[2], a[3]
        if mode & ~(KEEP_SIZE | PUNCH_HOLE | ZERO_RANGE | UNSHARE):
            raise CrashTestError(f"fallocate with mode {mode:#x} on {node.path} can't be recorded")

        def finish(result: int) -> None:
            if result != 0:
                return
            if not mode & KEEP_SIZE and offset + length > len(node.content):
                self._resize(node, offset + length, "fallocate")
            if mode & (PUNCH_HOLE | ZERO_RANGE):
                zeros = bytes(max(0, min(length, len(node.content) - offset)))
                if zeros:
                    self.write(node, offset, zeros, "fallocate")

        return finish

    def call_mmap(self, pid: int, a: Arguments) -> Finish | None:
        fd = signed(a[4])
        node = self.file(pid, fd) if fd >= 0 else None
        if node is None or self.about(pid, fd)[1] & os.O_ACCMODE != os.O_RDWR:
            return None

        def finish(result: int) -> None:
            if result > 0 or result < -4095:
                self.mapped[node.number] = node

        return finish

    # ---- syncs

    def _sync(self, node: Node, call: str, how: str, offset: int = 0, length: int = -1) -> None:
        self._event("sync", call, node.path, inode=node.number, how=how, offset=offset, length=length)

    def _synced(self, call: str, how: str, pid: int, fd: int, offset: int = 0, length: int = -1) -> Finish | None:
        node = self.at(pid, fd)
        if node is None:
            return None
        return lambda result: self._sync(node, call, how, offset, length) if result == 0 else None

    def call_fsync(self, pid: int, a: Arguments) -> Finish | None:
        return self._synced("fsync", "file", pid, signed(a[0]))

    def call_fdatasync(self, pid: int, a: Arguments) -> Finish | None:
        return self._synced("fdatasync", "data", pid, signed(a[0]))

    def call_sync_file_range(self, pid: int, a: Arguments) -> Finish | None:
        if a[3] & SYNC_AND_WAIT != SYNC_AND_WAIT:
            return None  # this flag makes nothing durable
        return self._synced("sync_file_range", "handed", pid, signed(a[0]), a[1], a[2] or -1)

    def call_sync(self, pid: int, a: Arguments) -> Finish | None:
        return lambda result: self._event("sync", "sync", "everything", how="all", length=-1)

    def call_syncfs(self, pid: int, a: Arguments) -> Finish | None:
        try:
            if os.stat(f"/proc/{pid}/fd/{signed(a[0])}").st_dev != self.device:
                return None
        except OSError:
            return None
        return lambda result: self._event("sync", "syncfs", "everything", how="all", length=-1) if result == 0 else None

    def call_msync(self, pid: int, a: Arguments) -> Finish | None:
        if not self.mapped or not a[2] & MS_SYNC:
            return None
        found = []
        with open(f"/proc/{pid}/maps") as maps:
            for line in maps:
                span, _, offset, device, inode, *_ = line.split()
                start, end = (int(part, 16) for part in span.split("-"))
                major, minor = (int(part, 16) for part in device.split(":"))
                node = self.nodes.get((os.makedev(major, minor), int(inode)))
                low, high = max(start, a[0]), min(end, a[0] + a[1])
                if node is not None and low < high:
                    found.append((node, int(offset, 16) + low - start, high - low))

        def finish(result: int) -> None:
            if result == 0:
                for node, offset, length in found:
                    self._sync(node, "msync", "range", offset, length)

        return finish if found else None

    # ---- names

    def _made(self, call: str, pid: int, fd: int, address: int) -> Finish | None:
        """A new directory or symbolic link."""
        place = self.place(pid, fd, address)
        if place is None:
            return None

        def finish(result: int) -> None:
            if result == 0:
                full = os.path.join(self.root, place.path)
                node = self.new(os.lstat(full), place.path)
                if node.kind == "link":
                    node.content = self.target(full)
                self._enter(place, node, call, "create")

        return finish

    def call_mkdir(self, pid: int, a: Arguments) -> Finish | None:
        return self._made("mkdir", pid, AT_FDCWD, a[0])

    def call_mkdirat(self, pid: int, a: Arguments) -> Finish | None:
        return self._made("mkdirat", pid, signed(a[0]), a[1])

    def call_symlink(self, pid: int, a: Arguments) -> Finish | None:
        return self._made("symlink", pid, AT_FDCWD, a[1])

    def call_symlinkat(self, pid: int, a: Arguments) -> Finish | None:
        return self._made("symlinkat", pid, signed(a[1]), a[2])

    def _linked(self, call: str, pid: int, fd: int, address: int) -> Finish | None:
        place = self.place(pid, fd, address)
        if place is None:
            return None

        def finish(result: int) -> None:
            if result == 0:
                node = self.nodes.get(self.key(os.lstat(os.path.join(self.root, place.path))))
                if node is None:
                    raise self._from_outside(place)
                self._enter(place, node, call, "link")

        return finish

    def _from_outside(self, place: Place) -> CrashTestError:
        return CrashTestError(
            f"{place.path} was moved or linked into {self.root} from elsewhere, so it isn't known which of its bytes "
            "had been synced: give --files a directory that holds both places, or let the program write its temporary "
            "file there"
        )

    def call_link(self, pid: int, a: Arguments) -> Finish | None:
        return self._linked("link", pid, AT_FDCWD, a[1])

    def call_linkat(self, pid: int, a: Arguments) -> Finish | None:
        return self._linked("linkat", pid, signed(a[2]), a[3])

    def _unlinked(self, call: str, pid: int, fd: int, address: int) -> Finish | None:
        place = self.place(pid, fd, address)
        if place is None:
            return None

        def finish(result: int) -> None:
            node = place.folder.entries.pop(place.name, None) if result == 0 else None
            if node is not None:
                fields = {"inode": node.number, "folder": place.folder.number, "name": place.name}
                self._event("unlink", call, place.path, **fields)

        return finish

    def call_unlink(self, pid: int, a: Arguments) -> Finish | None:
        return self._unlinked("unlink", pid, AT_FDCWD, a[0])

    def call_rmdir(self, pid: int, a: Arguments) -> Finish | None:
        return self._unlinked("rmdir", pid, AT_FDCWD, a[0])

    def call_unlinkat(self, pid: int, a: Arguments) -> Finish | None:
        return self._unlinked("unlinkat", pid, signed(a[0]), a[1])

    def _renamed(
        self, call: str, pid: int, old: tuple[int, int], new: tuple[int, int], flags: int = 0
    ) -> Finish | None:
        source, target = self.place(pid, *old), self.place(pid, *new)
        if source is None and target is None:
            return None

        def finish(result: int) -> None:
            if result == 0:
                self._rename(call, source, target, flags)

        return finish

    def _rename(self, call: str, source: Place | None, target: Place | None, flags: int) -> None:
        node = source.folder.entries.get(source.name) if source is not None else None
        other = target.folder.entries.get(target.name) if target is not None else None
        if source is None or node is None:
            if target is not None:
                raise self._from_outside(target)
            return
        if node is other:
            return  # two names of one file: rename does nothing
        del source.folder.entries[source.name]
        fields = {"inode": node.number, "folder": source.folder.number, "name": source.name}
        if target is None:
            self._event("unlink", call, source.path, **fields)
            return
        fields |= {"folder2": target.folder.number, "name2": target.name, "other": other.number if other else 0}
        target.folder.entries[target.name] = node
        node.path = target.path
        if flags & RENAME_EXCHANGE and other is not None:
            source.folder.entries[source.name] = other
            other.path = source.path
        self._event("exchange" if flags & RENAME_EXCHANGE else "rename", call, source.path, **fields)

    def call_rename(self, pid: int, a: Arguments) -> Finish | None:
        return self._renamed("rename", pid, (AT_FDCWD, a[0]), (AT_FDCWD, a[1]))

    def call_renameat(self, pid: int, a: Arguments) -> Finish | None:
        return self._renamed("renameat", pid, (signed(a[0]), a[1]), (signed(a[2]), a[3]))

    def call_renameat2(self, pid: int, a: Arguments) -> Finish | None:
        return self._renamed("renameat2", pid, (signed(a[0]), a[1]), (signed(a[2]), a[3]), a[4])
