"""The program in the guest: mounts file systems, and runs tests on each.

    python -m tests.dax.inside DOMAIN PHASES

DOMAIN is that of the guest. PHASES is JSON, a list of [label, file system, options, PMSTORE_DAX_EXPECT, [pytest's
arguments]]. Modules are imported once, which takes the guest longer than the tests: each phase is a fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import hypothesis
import numpy
import pytest

import pmstore.testing
from tests.dax.guest import FILES

OWN = ["tests/core/test_domains.py", "tests/dax/test_dax.py"]
CONTRACT = [
    "tests/core/test_commit.py",
    "tests/core/test_readers.py",
    "tests/core/test_forks.py",
    "tests/store/test_transactions.py",
    "tests/store/test_backup.py",
    "tests/store/test_compact.py",
]
SUITES = [*OWN, *CONTRACT]
SLOW = (
    "larger_than_any_log",
    "others_are_still_told",
    "space_is_used_again_when",
    "a_snapshot_is_a_commit",
    "a_backup_is_a_commit",
    "arrays_written_whole_are_copied",
    "what_a_kill_left_adopts",
    "300000",
    "without_a_way_to_bring_pages",
)
"""Names in tests of the contract that are left out: they take the guest long, or work on recordings."""
CHOSEN = " and ".join(["dax", *(f"not {name}" for name in SLOW)])


def run(label: str, fs: str, options: str, expect: str, arguments: list[str]) -> int:
    device = subprocess.run(["blkid", "-L", label], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run(["mount", "-t", fs, "-o", options, device, FILES], check=True)
    print(f"PHASE {label}: {fs}, {options}, {expect}", flush=True)
    os.environ["PMSTORE_DAX_EXPECT"], os.environ["PMSTORE_DAX_FILES"] = expect, str(FILES)
    child = os.fork()
    if not child:
        plain = ["-q", "--color=no", "--durations=8", "-p", "no:cacheprovider", "-p", "no:xdist"]
        os._exit(int(pytest.main([*plain, *arguments])))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    subprocess.run(["umount", FILES], check=True)
    return status


if __name__ == "__main__":
    assert hypothesis and numpy and pmstore
    if sys.argv[1:] == []:  # compiles what is imported
        sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *SUITES]))
    os.environ["PMSTORE_DAX_DOMAIN"] = sys.argv[1]
    sys.exit(max(run(*phase) for phase in json.loads(sys.argv[2])))
