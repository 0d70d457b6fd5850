"""The program in the guest: mounts file systems, and runs tests on all of them, or commits until the power is cut.

    python -m tests.file_systems.inside test [NAME …]
    python -m tests.file_systems.inside commit NAME

`commit` writes the number of each commit to the serial line when it has returned.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import hypothesis
import numpy
import pytest

import pmstore.testing
from tests.dax.guest import ROOT, SERIAL
from tests.file_systems.test_mounted import UNMAPPABLE, commit

SERVERS = ROOT / "build" / "filesystems" / "servers"
"""Unpacked packages of servers and of tools that make file systems."""
FOLDER = Path("/mnt")
DISK = FOLDER / "disk"
"""An ext4, which the servers in the guest serve."""
TESTS = "tests/file_systems/test_mounted.py"
SETTINGS = ["-q", "--color=no", "--tb=short", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist"]

SMB = f"""
[global]
server role = standalone server
map to guest = Bad User
guest account = root
interfaces = lo
bind interfaces only = yes
load printers = no
disable spoolss = yes
private dir = /tmp/smb
lock directory = /tmp/smb
state directory = /tmp/smb
cache directory = /tmp/smb
pid directory = /tmp/smb
ncalrpc dir = /tmp/smb/ncalrpc
[disk]
path = {DISK}
read only = no
guest ok = yes
force user = root
"""

IMAGES = {"f2fs": "mkfs.f2fs -q", "exfat": "mkfs.exfat", "vfat": "mkfs.vfat", "ntfs3": "mkfs.ntfs -q -F"}
"""How the image of each file system is made."""
_TO_NFS = "vers=4.2,addr=127.0.0.1,clientaddr=127.0.0.1"
_TO_SMB = "guest,ip=127.0.0.1,vers=3.1.1"
_TO_9P = "trans=virtio,version=9p2000.L,msize=262144"
MOUNTS = {  # type, source, options, the directory that is served
    "nfs": ("nfs4", "127.0.0.1:/", _TO_NFS, DISK),
    "smb": ("cifs", "//127.0.0.1/disk", _TO_SMB, DISK),
    "smb-none": ("cifs", "//127.0.0.1/disk", f"{_TO_SMB},cache=none,nosharesock", DISK),
    UNMAPPABLE: ("9p", "share-none", _TO_9P, None),
    "9p-mmap": ("9p", "share-mmap", f"{_TO_9P},cache=mmap", None),
    "9p-loose": ("9p", "share-loose", f"{_TO_9P},cache=loose", None),
    "virtiofs": ("virtiofs", "virtiofs", "rw", None),
    "bindfs": ("fuse", str(DISK), "rw", DISK),
}
"""The sources of 9p and virtiofs are the host's, which does not serve virtiofs if it has no server for it."""


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")


def serve(kinds: set[str]) -> None:
    """Make an ext4, and start the servers of it that these types of mounts need."""
    library = f"{SERVERS}/usr/lib/x86_64-linux-gnu"
    os.environ["LD_LIBRARY_PATH"] = f"{library}:{library}/samba:{SERVERS}/lib/x86_64-linux-gnu"
    os.environ["PATH"] += f":{SERVERS}/usr/sbin:{SERVERS}/sbin:{SERVERS}/usr/bin"
    for place in ("/tmp", "/var/lib", "/var/log"):
        run("mount", "-t", "tmpfs", "tmpfs", place)
    for place in ("/var/lib/nfs/v4recovery", "/var/lib/nfs/sm", "/tmp/smb", "/var/log/samba"):
        os.makedirs(place)
    for place in ("/var/lib/nfs/etab", "/var/lib/nfs/rmtab"):
        Path(place).touch()
    mount_image("ext4", "mkfs.ext4 -q", DISK)
    if "nfs4" in kinds:
        serve_nfs()
    if "cifs" in kinds:
        serve_smb()


def serve_nfs() -> None:
    run("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
    run("exportfs", "-i", "-o", "rw,no_root_squash,insecure,no_subtree_check,fsid=0", f"*:{DISK}")
    run("rpc.mountd", "-N", "3", "-V", "4")
    run("rpc.nfsd", "-N", "3", "-V", "4.2", "-G", "10", "-L", "10", "2")
    Path("/proc/fs/nfsd/v4_end_grace").write_text("Y")


def serve_smb() -> None:
    settings = Path("/tmp/smb.conf")
    settings.write_text(SMB)
    run("smbd", "-D", "-s", settings)
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", 445)):
            return
        time.sleep(0.1)
    raise OSError("smbd does not answer")


def mount_image(kind: str, make: str, place: Path) -> None:
    file = FOLDER / f"{kind}.image"
    with open(file, "wb") as opened:
        opened.truncate(300 << 20)
    run(*make.split(), file)
    place.mkdir()
    run("mount", "-t", kind, "-o", "loop", file, place)


def mounted(name: str) -> tuple[str, str | None]:
    """The directory of a file system, and the directory that its server in this guest serves."""
    place = FOLDER / name
    if name in IMAGES:
        mount_image(name, IMAGES[name], place)
        return str(place), None
    kind, source, options, behind = MOUNTS[name]
    place.mkdir()
    if kind == "fuse":
        run("bindfs", source, place)
    else:
        run("mount", "-i", "-t", kind, "-o", options, source, place)
    return str(place), behind and str(behind)


def test(*names: str) -> int:
    """A file system that can't be mounted is told, and fails only if it was named."""
    chosen = names or (*IMAGES, *MOUNTS)
    serve({MOUNTS[name][0] for name in chosen if name in MOUNTS})
    found = {}
    for name in chosen:
        try:
            found[name] = mounted(name)
        except OSError as error:
            print(f"NOT MOUNTED {name}: {error}", flush=True)
            if names:
                return 1
    del os.environ["LD_LIBRARY_PATH"]
    print(f"MOUNTED {'; '.join(found)}", flush=True)
    os.environ["PMSTORE_MOUNTS"] = json.dumps(found)
    return subprocess.run([sys.executable, "-m", "pytest", *SETTINGS, TESTS]).returncode


def acknowledge(name: str) -> None:
    place, _ = mounted(name)
    serial = os.open(SERIAL, os.O_WRONLY)
    for n in commit(f"{place}/changed.pm", f"{place}/grown.pm", 0):
        os.write(serial, b"%d\n" % n)
        termios.tcdrain(serial)


if __name__ == "__main__":
    assert hypothesis and numpy and pmstore
    if sys.argv[1] == "compile":  # what is imported
        sys.exit(pytest.main(["--collect-only", *SETTINGS, TESTS]))
    run("mount", "-t", "tmpfs", "tmpfs", FOLDER)
    if sys.argv[1] == "commit":
        acknowledge(sys.argv[2])
    sys.exit(test(*sys.argv[2:]))
