"""The facilities of this machine and of a directory for stores: for bug reports, and for the choice of a disk."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore._display import size_text

__all__ = ["examine", "lines"]

PACKAGES = ("numpy", "cffi", "msgpack", "scikit-learn", "scipy", "fsspec", "numcodecs", "zarr", "torch", "dask", "rich")
INSTRUCTIONS = ("clwb", "clflushopt", "clflush", "avx512f", "avx2", "sse4_2", "dcpop", "crc32")
PAGE, LARGE = 4096, 1 << 20
SPACE_LEAST = 1 << 30

SURVIVES = {
    "process": "a commit survives the end of the process, not that of the machine",
    "cpu_cache": "a commit survives a power cut: the machine writes its caches back",
    "memory": "a commit survives a power cut: it is flushed to the memory",
    "disk": "a commit survives a power cut, if the disk honours flushes",
}
SERVERS = {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre"}
_FROM_ONE = "; use a store there from one machine, and by one mount, at a time: another one may read old bytes"
_BY_SERVER = (
    "a commit is on the server when it returns, and survives a power cut of this machine; what one of the "
    f"server takes depends on the server{_FROM_ONE}"
)
_BY_PROGRAM = f"a commit survives a power cut, if the program that serves this file system honours syncs{_FROM_ONE}"
IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "rootfs"}
_IGNORED = "the kernel ignores syncs of files on this overlay: a power cut may take any commit"
_KEPT_BY_THE_DISK = "no sync flushes the disk's cache: a power cut may take commits"
WITHOUT_SYNCS = {  # options of mounts
    "volatile": _IGNORED,
    "fsync=volatile": _IGNORED,
    "nobarrier": _KEPT_BY_THE_DISK,
    "barrier=0": _KEPT_BY_THE_DISK,
}
TRACKERS = {
    "pagemap": "changes of large arrays are found by their private pages, not by page protection: slower where little "
    "of a large array changes. userfaultfd needs Linux 6.7, and containers often refuse it",
    "compare": "changes of large arrays are found by comparing all bytes: slower where little of a large array "
    "changes. The kernel neither protects pages for pmstore (userfaultfd) nor tells which are private "
    "(/proc/self/pagemap)",
}

_ESCAPED = re.compile(r"\\(0\d\d|1\d\d)")
"""A space, tab, newline, backslash or # in the name of a directory."""


def examine(directory: str) -> dict[str, Any]:
    """The output of `pmstore doctor --json`. A small store is made in the directory, opened again, checked and removed.

    Returns
    -------
    dict
        versions, machine, limits, variables; directory: its file system, and what became of the store; notes: sentences
        on what is missing or slower here. directory["error"] is None if the store works.
    """
    machine, place = _machine(), _directory(directory)
    limits = {name: _limit(getattr(resource, f"RLIMIT_{name}")) for name in ("AS", "FSIZE", "MEMLOCK", "NOFILE")}
    return {
        "versions": {"pmstore": pmstore.__version__, "python": platform.python_version(), **_packages(), **_blas()},
        "machine": machine,
        "limits": limits,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("PMSTORE_")},
        "directory": place,
        "notes": _notes(machine, place, limits),
    }


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _blas() -> dict[str, str]:
    """The library that numpy was built with."""
    try:
        built: Any = np.show_config(mode="dicts")
        blas = built["Build Dependencies"]["blas"]
        return {"blas": f"{blas['name']} {blas.get('version', '')}".strip()}
    except (KeyError, TypeError):
        return {}


def _read(path: str) -> str:
    try:
        return os.fsdecode(Path(path).read_bytes()).strip()
    except OSError:
        return ""


def _machine() -> dict[str, Any]:
    cpu: dict[str, str] = {}
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        cpu.setdefault(key.strip(), value.strip())
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    return {
        "kernel": platform.release(),
        "processor": cpu.get("model name") or platform.machine(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "page": os.sysconf("SC_PAGE_SIZE"),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "libc": " ".join(platform.libc_ver()),
        "unprivileged_userfaultfd": _read("/proc/sys/vm/unprivileged_userfaultfd"),
        "overcommit_memory": _read("/proc/sys/vm/overcommit_memory"),
    }


def _limit(which: int) -> int | None:
    """The soft limit; None: there is none."""
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _file_system(directory: str) -> dict[str, str | None]:
    """Type and options of the mount that a directory is on, and the type below the upper layer of an overlay, if this
    process sees that layer. mountinfo names a mount by its device; the files of btrfs have another one."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    found: dict[str, str | None] = {"type": "unknown", "options": "", "upper": None}
    best = (False, -1)
    real = os.path.realpath(directory)
    for line in filter(None, _read("/proc/self/mountinfo").split("\n")):
        left, _, right = line.partition(" - ")
        fields, more = left.split(" "), right.split(" ")
        point = _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
        above = os.path.commonpath([point, real]) == point
        rank = (fields[2] == number, len(point))
        if above and rank >= best and (rank[0] or more[0] == "btrfs"):
            best = rank
            found = {"type": more[0], "options": ",".join([fields[5], *more[2:]]), "upper": None}
    upper = _upper_layer(found)
    if upper is not None and os.path.isdir(upper) and os.stat(upper).st_dev != device:
        below = _file_system(upper)
        found["upper"] = below["upper"] or below["type"]
    return found


def _upper_layer(found: dict[str, str | None]) -> str | None:
    """The directory that takes the changes of an overlay; None for other file systems. The path is that of the process
    that mounted it: a container does not see it."""
    options = (found["options"] or "").split(",") if found["type"] == "overlay" else []
    return next((option.partition("=")[2] for option in options if option.startswith("upperdir=")), None)


def _directory(directory: str) -> dict[str, Any]:
    path = os.path.abspath(os.path.expanduser(directory))
    found: dict[str, Any] = {"path": path, "error": None, "medium": None, "domain": None, "tracker": None}
    if not os.path.isdir(path):
        found["error"] = "it is a file, not a directory" if os.path.exists(path) else "there is no such directory"
        return found
    try:
        found |= _file_system(path)
        found["free"] = shutil.disk_usage(path).free
        found |= _try(path)
    except (OSError, pmstore.Error, ValueError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _try(directory: str) -> dict[str, str]:
    """Makes a store, commits twice, opens it again and checks it."""
    with tempfile.TemporaryDirectory(prefix=".pmstore-doctor-", dir=directory) as folder:
        file = os.path.join(folder, "store.pm")
        with pmstore.open(file, "x") as store:
            array = store.create_array("array", LARGE, "u1")
            store.commit()
            array[LARGE // 2] = 1
            store.commit()
            stats = store.stats()
        with pmstore.open(file, "r", verify=True) as store:
            if store["array"].sum() != 1:
                raise pmstore.CorruptStoreError("a store that was made here has other bytes than it was given")
        return {"medium": stats.medium, "domain": stats.domain, "tracker": stats.tracker}


def _notes(machine: dict[str, Any], place: dict[str, Any], limits: dict[str, int | None]) -> list[str]:
    notes = []
    if place["error"]:
        notes.append(f"no store can be made in {place['path']}: {place['error']}")
    if place["domain"]:
        notes.append(_survives(place))
    if place["tracker"] in TRACKERS and not os.environ.get("PMSTORE_TRACKER"):
        notes.append(TRACKERS[place["tracker"]])
    if not place["error"] and place["free"] < SPACE_LEAST:
        notes.append(f"only {size_text(place['free'])} are free")
    if limits["AS"] is not None:
        notes.append(f"addresses are limited to {size_text(limits['AS'])} (ulimit -v): stores can't be larger")
    if limits["FSIZE"] is not None:
        notes.append(f"files are limited to {size_text(limits['FSIZE'])} (ulimit -f): stores can't be larger")
    if machine["page"] != PAGE:
        notes.append(f"the kernel has pages of {size_text(machine['page'])}: pmstore was tried with 4 KiB only")
    return notes


def _survives(place: dict[str, Any]) -> str:
    """The domain says what a commit does. Whether that outlives a power cut depends on the file system, too."""
    kind, upper, domain = place["type"], place["upper"], place["domain"]
    if kind in IN_MEMORY or upper in IN_MEMORY:
        over = f"an overlay whose changes are on {upper}" if upper in IN_MEMORY else str(kind)
        note = f"{SURVIVES['process']}: the bytes of {over} are in its memory only"
        return note if domain in ("process", "disk") else f"{note} (domain {domain}: an emulation of persistent memory)"
    if kind in SERVERS and domain == "disk":
        return _BY_SERVER
    if kind.startswith("fuse") and kind != "fuseblk" and domain == "disk":
        return _BY_PROGRAM
    options = place["options"].split(",")
    unsafe = next((option for option in options if option in WITHOUT_SYNCS), None)
    if unsafe is not None:
        return f"{WITHOUT_SYNCS[unsafe]} (it is mounted with {unsafe!r})"
    hidden = kind == "overlay" and upper is None
    return SURVIVES[domain] + (", and if the upper layer of this overlay, which is hidden here, is on one" * hidden)


def lines(found: dict[str, Any]) -> list[str]:
    """The same for a terminal."""
    machine, place = found["machine"], found["directory"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    free = f", {size_text(place['free'])} free" if "free" in place else ""
    upper = f", whose upper layer is on {place['upper']}" if place.get("upper") else ""
    told = [
        versions,
        f"Linux {machine['kernel']}, {machine['processor']} ({machine['architecture']}), {machine['cores']} cores, "
        f"{size_text(machine['memory'])}, {machine['libc']}",
        f"instructions: {', '.join(machine['instructions']) or 'none that pmstore looks for'}",
        *(f"{name}={value}" for name, value in found["variables"].items()),
    ]
    if "type" in place:
        told.append(f"{place['path']}: {place['type']} ({place['options']}){upper}{free}")
    if not place["error"]:
        told.append(
            f"  a store was made here, opened again and checked: medium {place['medium']}, domain {place['domain']}, "
            f"tracker {place['tracker']}"
        )
    return told + [f"- {note}" for note in found["notes"]]
