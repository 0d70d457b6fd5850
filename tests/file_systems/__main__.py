"""`make test-filesystems`: stores on network file systems and others, in a Linux guest (docs/file-systems.md).

python -m tests.file_systems [NAME …]    only these, as they are called in tests/file_systems/inside.py

The guest has servers of NFS and SMB, and images. The host serves 9p and virtiofs: there the guest's power is cut, and
the host looks at what it was given.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.dax import guest
from tests.dax.guest import ROOT, Guest, Unusable
from tests.file_systems.inside import MOUNTS, SERVERS
from tests.file_systems.test_mounted import expect_commits

FOLDER = ROOT / "build" / "filesystems"
RUN = FOLDER / "run"
MEMORY = Path(f"/dev/shm/pmstore-served-{os.getpid()}")
PACKAGES = ("nfs-kernel-server", "samba", "f2fs-tools", "exfatprogs", "dosfstools", "ntfs-3g", "bindfs")
_CIPHERS = ("md5", "hmac", "cmac", "ecb", "ccm", "gcm", "aesni_intel", "sha256_generic", "sha512_generic")
_TEXTS = ("nls_utf8", "nls_cp437", "nls_ascii", "crc32_generic")
_FILE_SYSTEMS = ("nfsd", "nfsv4", "cifs", "f2fs", "exfat", "vfat", "ntfs3", "virtiofs")
MODULES = ("loop", *_CIPHERS, *_TEXTS, *_FILE_SYSTEMS)
CUT = ("9p-mmap", "9p-loose", "virtiofs")
VIRTIOFSD = next(filter(os.path.exists, ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd")), None)


def unpack_servers() -> None:
    """Unpack the packages that the guest needs. Nothing is installed. Raises Unusable."""
    complete, packages = FOLDER / "complete", FOLDER / "packages"
    if complete.exists():
        return
    for folder in (SERVERS, packages):
        shutil.rmtree(folder, ignore_errors=True)
    (packages / "partial").mkdir(parents=True)
    options = ["-o", f"Dir::Cache::archives={packages}", "-o", "APT::Sandbox::User=root"]
    command = ["apt-get", "install", "-qq", "-y", "--download-only", "--no-install-recommends", *options, *PACKAGES]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError):
        raise Unusable(f"these packages can't be downloaded: {', '.join(PACKAGES)}") from None
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, SERVERS], check=True)
    shutil.rmtree(packages)
    complete.touch()


def folder(source: str) -> Path:
    """What the host serves. One is on tmpfs, which 9p tells the guest."""
    return (MEMORY if source == "share-loose" else RUN) / source


@contextlib.contextmanager
def shares() -> Iterator[list[str]]:
    """QEMU's arguments for what the host serves. Each is a new folder."""
    for old in (RUN, MEMORY):
        shutil.rmtree(old, ignore_errors=True)
    arguments = []
    for kind, source, *_ in MOUNTS.values():
        if kind in ("9p", "virtiofs"):
            folder(source).mkdir(parents=True)
        if kind == "9p":
            share = f"local,path={folder(source)},mount_tag={source},security_model=none,multidevs=remap"
            arguments += ["-virtfs", share]
    if VIRTIOFSD is None:
        print("virtiofs is left out: this machine has no virtiofsd")
        yield arguments
        return
    place = RUN / "virtiofs.socket"
    command = [VIRTIOFSD, f"--socket-path={place}", "-o", f"source={folder('virtiofs')}"]
    with open(RUN / "virtiofsd.log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        while not place.exists() and process.poll() is None:
            time.sleep(0.05)
        device = ["-device", "vhost-user-fs-pci,chardev=virtiofs,tag=virtiofs"]
        try:
            yield [*arguments, "-chardev", f"socket,id=virtiofs,path={place}", *device]
        finally:
            process.kill()


def run_tests(host: Guest, names: list[str]) -> int:
    with shares() as arguments:
        command = ["-m", "tests.file_systems.inside", "test", *names]
        status, text = host.start([], command, shares=arguments, console=RUN / "console").end()
    print(text if status else "\n".join(re.findall(r"^(?:NOT MOUNTED|MOUNTED|\d+ passed).*", text, re.M)), flush=True)
    return status


def cut_power(host: Guest, name: str) -> int:
    """Cut the guest's power while it commits. The host has all that was acknowledged, or the next commit."""
    place, acknowledged, last = folder(MOUNTS[name][1]), 0, random.choice((1, 3, 12))
    with shares() as arguments:
        command = ["-m", "tests.file_systems.inside", "commit", name]
        boot = host.start([], command, shares=arguments, console=RUN / "console")
        for line in boot.lines():
            acknowledged = int(line)
            if acknowledged == last:
                time.sleep(random.random() * 0.3)  # somewhere in the next commits; they go on being acknowledged
                boot.cut()
        text = boot.end()[1]
    if not acknowledged:
        print(f"no commit on {name} was acknowledged\n{text}")
        return 1
    expect_commits(place / "changed.pm", place / "grown.pm", acknowledged)
    print(f"power cut on {name} after commit {acknowledged}: the host has it", flush=True)
    return 0


def main(names: list[str]) -> int:
    begun = time.monotonic()
    try:
        if packages := guest.missing():
            guest.install(packages)
        unpack_servers()
        host = Guest(ROOT / "build" / "dax", MODULES)  # which has the kernel of `make test-dax`, too
    except Unusable as unusable:
        print(f"tests on other file systems: skipped, {unusable}")
        return 0
    host.compile(["-m", "tests.file_systems.inside", "compile"])
    status = run_tests(host, names)
    for name in names or CUT:
        if name in CUT and (name != "virtiofs" or VIRTIOFSD):
            status = cut_power(host, name) or status
    if not status:
        shutil.rmtree(RUN)
    shutil.rmtree(MEMORY, ignore_errors=True)
    print(f"{'failed' if status else 'passed'} in {time.monotonic() - begun:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
