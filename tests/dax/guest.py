"""A Linux guest under QEMU's emulation, with persistent memory that is a file of the host.

The guest sees the host's files read-only, and so runs the host's Python with this source tree. Its file system on
persistent memory is mounted on `FILES`, and the host's file has all that the guest has stored there, whenever the guest
is killed.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = Path("/dev/pmem")
"""Where the file system on persistent memory is, in the guest."""
SERIAL = Path("/dev/ttyS1")
"""In the guest: what is written there, and drained, has reached the host."""

SILENT = 300
"""Seconds without output after which a guest is stuck. No test takes so long, also if two guests and other work share
two slow processors."""

_PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "mke2fs": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "ndctl": "ndctl",
    "dpkg": "dpkg",
    "apt-get": "apt",
}
_KERNELS = ("linux-image-6.12-amd64", "linux-image-amd64", "linux-image-generic")
_MODULES = ("virtio_pci", "crc32c_generic", "ext4", "9pnet_virtio", "9p")
_OF_MEMORY = ("nd_pmem", "nfit", "virtio_pmem", "xfs")
_INFO_BLOCK = 2 << 20

RAW = ".raw"


class Unusable(Exception):
    """This machine can't run the guest; the text says what to do."""


# ---- what the host needs


def missing() -> list[str]:
    """Packages of Debian whose commands are not here. Raises Unusable if they would not help."""
    if platform.machine() != "x86_64":  # the guest runs the host's Python
        raise Unusable("the host is no x86-64")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    lacks = [package for command, package in _PACKAGES.items() if not shutil.which(command)]
    busybox = shutil.which("busybox")
    if busybox and b"/ld-linux" in Path(busybox).read_bytes():  # needs libraries, which the first process lacks
        lacks.append("busybox-static")
    return lacks


def install(packages: Sequence[str]) -> None:
    """Raise Unusable if they can't be installed."""
    text = " ".join(packages)
    if os.geteuid() or not shutil.which("apt-get"):
        raise Unusable(f"these packages are missing, and root can install them: apt-get install {text}")
    print(f"Installing {text} …", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(["apt-get", "update", "-qq"], check=True, stdout=subprocess.DEVNULL, timeout=120)
        command = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, timeout=300)
    except (OSError, subprocess.SubprocessError):
        raise Unusable(f"these packages are missing, and can't be installed here: {text}") from None


def _kernel(folder: Path) -> Path:
    """The unpacked package of a kernel. Nothing of it is installed."""
    unpacked = folder / "kernel"
    if (folder / "complete").exists():
        return unpacked
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in _KERNELS:
        shown = subprocess.run(["apt-cache", "depends", name], capture_output=True, text=True).stdout
        found = [line.split()[1] for line in shown.splitlines() if "Depends: linux-image" in line]
        command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *found[:1]]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if found and not subprocess.run(command, cwd=folder, capture_output=True, timeout=300).returncode:
                break
    else:
        raise Unusable(f"the package of a kernel can't be downloaded; any of these would do: {', '.join(_KERNELS)}")
    [package] = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", package, unpacked], check=True)
    package.unlink()
    [version] = (unpacked / "lib/modules").iterdir()
    subprocess.run(["depmod", "-b", unpacked, version.name], check=True)
    (folder / "complete").touch()
    return unpacked


# ---- the first files of the guest


def _member(name: str, mode: int, contents: bytes = b"") -> bytes:
    """A member of a cpio archive (newc)."""
    numbers = (0, mode, 0, 0, 1, 0, len(contents), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08x" % number for number in numbers) + name.encode() + b"\0"
    return head + b"\0" * (-len(head) % 4) + contents + b"\0" * (-len(contents) % 4)


_END = _member("TRAILER!!!", 0)


def _modules(kernel: Path, names: Sequence[str]) -> Iterator[bytes]:
    """These modules and those that they need, in the order in which they are loaded."""
    [folder] = (kernel / "lib/modules").iterdir()
    needs = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[Path(path).name.partition(".")[0].replace("-", "_")] = (path, others.split())
    order: list[str] = []
    for name in names:
        if name not in needs:
            continue  # it is built in
        path, others = needs[name]
        order += [one for one in (*reversed(others), path) if one not in order]
    for number, path in enumerate(order, 100):
        code = (folder / path).read_bytes()
        name = Path(path).name
        if name.endswith(".xz"):
            name, code = name[:-3], lzma.decompress(code)
        elif name.endswith(".zst"):
            code = subprocess.run(["zstd", "-dc"], input=code, capture_output=True, check=True).stdout
            name = name[:-4]
        yield _member(f"mod/{number}-{name}", 0o100644, code)


class Guest:
    """Boots guests. Raises Unusable if there is no kernel for them.

    Parameters
    ----------
    folder : Path
        Keeps the kernel between runs.
    modules : sequence of str
        Of the kernel, beside those that each guest needs; default: those for persistent memory.
    """

    def __init__(self, folder: Path, modules: Sequence[str] = _OF_MEMORY) -> None:
        kernel = _kernel(folder / "guest")
        [self.image] = (kernel / "boot").glob("vmlinuz-*")
        busybox = shutil.which("busybox")
        assert busybox is not None
        parts = [_member(name, 0o040755) for name in ("bin", "mod", "proc", "sys", "dev", "host")]
        parts.append(_member("bin/busybox", 0o100755, Path(busybox).read_bytes()))
        parts.append(_member("init", 0o100755, Path(__file__).with_name("init").read_bytes()))
        parts.extend(_modules(kernel, (*_MODULES, *modules)))
        self._bytecode = folder / "bytecode"
        self._first = gzip.compress(b"".join(parts) + _END, 1)

    def compile(self, *commands: Sequence[str]) -> None:
        """Compile what Python's commands import, which takes the guest long."""
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(self._bytecode), "PYTHONPATH": str(ROOT)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for command in commands:
            subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, check=True, capture_output=True)

    @property
    def kernel(self) -> str:
        return self.image.name.removeprefix("vmlinuz-")

    def start(
        self,
        memories: Sequence[Path],
        command: Sequence[str],
        *,
        fs: str = "none",
        persist: str = "mem-ctrl",
        shares: Sequence[str] = (),
        console: Path | None = None,
    ) -> Boot:
        """Boot a guest that runs a command in this source tree.

        Parameters
        ----------
        memories : sequence of Path
            The files that are its persistent memory: see `new_memory`. Those whose names end with `RAW` are devices for
            virtio-pmem, the others NVDIMMs.
        command : sequence of str
            Python's arguments.
        fs : {"none", "ext4", "xfs"}
            The file system of the first device, which is mounted on `FILES` with ``-o dax=always``.
        persist : {"mem-ctrl", "cpu"}
            What the guest is told of the persistence domain.
        shares : sequence of str
            QEMU's arguments for what it shares with the guest. "ram" is the guest's memory.
        console : Path, optional
            The file for the guest's output; default: beside the first memory.
        """
        setting = {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(self._bytecode)}
        shell = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in setting.items())
        shell += f"cd {shlex.quote(str(ROOT))} && exec {shlex.join([sys.executable, *command])}\n"
        own = _member("command", 0o100755, shell.encode()) + _END
        console = console or memories[0].with_suffix(".console")
        initrd = console.with_suffix(".initrd")
        console.write_bytes(b"")
        initrd.write_bytes(self._first + b"\0" * (-len(self._first) % 4) + own)
        devices = []
        for number, memory in enumerate(memories):
            device = "virtio-pmem-pci" if memory.name.endswith(RAW) else "nvdimm"
            place, size = str(memory).replace(",", ",,"), memory.stat().st_size
            backing = f"memory-backend-file,id=pm{number},share=on,mem-path={place},size={size}"
            devices += ["-object", backing, "-device", f"{device},id=nv{number},memdev=pm{number}"]
        share = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
        arguments = {
            "-object": "memory-backend-memfd,id=ram,size=2G,share=on",
            "-machine": f"q35,memory-backend=ram,nvdimm=on,nvdimm-persistence={persist}",
            "-accel": "tcg",
            "-cpu": "max,la57=off",
            "-smp": "1",  # with two, one sometimes runs a breakpoint that the other has just taken away: "Oops: int3"
            "-m": "2G,slots=4,maxmem=16G",
            "-virtfs": share,
            "-display": "none",
            "-kernel": str(self.image),
            "-initrd": str(initrd),
            "-append": f"console=ttyS0 quiet panic=-1 mitigations=off FS={fs}",
        }
        flags = ["-nodefaults", "-no-user-config", "-no-reboot", "-serial", f"file:{console}", "-serial", "stdio"]
        line = ["qemu-system-x86_64", *flags, *devices, *shares, *(word for pair in arguments.items() for word in pair)]
        return Boot(line, console, initrd)


class Boot:
    """A running guest. `lines` are those that it writes to `SERIAL`."""

    def __init__(self, line: list[str], console: Path, initrd: Path) -> None:
        self._console, self._initrd = console, initrd
        self._process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    def lines(self) -> Iterator[str]:
        """What the guest acknowledges. They end if it is stuck."""
        assert self._process.stdout is not None
        while True:
            timer = threading.Timer(SILENT, self._process.kill)
            timer.start()
            line = self._process.stdout.readline()
            timer.cancel()
            if not line.endswith(b"\n"):  # half a line was not acknowledged
                return
            yield line.decode().strip()

    def cut(self) -> None:
        """Cut the power."""
        self._process.kill()

    def end(self) -> tuple[int, str]:
        """Wait for the guest to power off. Returns the status of its command, and the console. 125: it did not end."""
        ended, written = False, -1
        while not ended:
            try:
                self._process.communicate(timeout=SILENT)
                ended = True
            except subprocess.TimeoutExpired:
                before, written = written, self._console.stat().st_size
                if written == before:
                    self._process.kill()
        self._initrd.unlink(missing_ok=True)
        text = self._console.read_text(errors="replace").replace("\r", "")
        _, found, status = text.rpartition("GUEST-RC=")
        return int(status.split()[0]) if found else 125, text

    @property
    def came_up(self) -> bool:
        return "GUEST-UP" in self._console.read_text(errors="replace")


# ---- persistent memory


def new_memory(path: Path, fs: str, *, mebibytes: int = 512) -> Path:
    """A file for a guest's persistent memory, with a file system, whose label is the file's name.

    The kernel has DAX for an NVDIMM only behind an info block, which says where the kernel keeps its notes on pages.
    """
    raw = path.name.endswith(RAW)
    offset, whole, inner = 0 if raw else _INFO_BLOCK, mebibytes << 20, path.with_suffix(".fs")
    with open(path, "wb") as file:
        file.truncate(whole)
    with open(inner, "wb") as file:
        file.truncate(whole - offset)
    make = {"ext4": ["mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096"], "xfs": ["mkfs.xfs", "-q", "-m", "reflink=0"]}
    subprocess.run([*make[fs], "-L", path.name, inner], check=True)
    if not raw:
        block = path.with_suffix(".block")
        settings = ["--mode=fsdax", "--map=mem", f"--size={whole}", "--align=2M"]
        subprocess.run(["ndctl", "write-infoblock", "-o", block, *settings], check=True, capture_output=True)
        copy(block, path, 0)
        block.unlink()
    copy(inner, path, offset)
    inner.unlink()
    return path


def copy(source: Path, target: Path, offset: int) -> None:
    """Copy the data of a sparse file into another one."""
    with open(source, "rb") as read, open(target, "r+b") as write:
        end, at = os.fstat(read.fileno()).st_size, 0
        while at < end:
            try:
                at = os.lseek(read.fileno(), at, os.SEEK_DATA)
            except OSError:
                return  # zeros up to the end
            until = os.lseek(read.fileno(), at, os.SEEK_HOLE)
            for place in range(at, until, 1 << 20):
                os.pwrite(write.fileno(), os.pread(read.fileno(), min(1 << 20, until - place), place), place + offset)
            at = until


def check_file_system(memory: Path) -> str:
    """What e2fsck says of an ext4 that was unmounted; nothing if it is sound."""
    done = subprocess.run(["e2fsck", "-fn", f"{memory}?offset={_INFO_BLOCK}"], capture_output=True, text=True)
    return "" if not done.returncode else done.stdout + done.stderr
