"""Persistence domains: what is found out, what is forced, and that nothing is lost to a kill in any of them.

tests/core/instructions.c looks at the instructions that each domain needs. The crash explorer runs with the domain
memory.
"""

from __future__ import annotations

import os
import platform
import signal
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.conftest import Medium

DOMAINS = ("process", "cpu_cache", "memory")
FLUSHES = ("clwb", "clflushopt", "clflush", "stream")
DAX = os.environ.get("PMSTORE_DAX_DOMAIN")
"""In the guest of make test-dax: what its persistent memory has."""


def missing(flush: str) -> bool:
    """Whether the processor lacks the instruction."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return flush != "stream" and flush not in flags


def test_the_domain_of_a_medium_is_found_out(medium: Medium) -> None:
    path = medium.directory / "store.pm"
    with pmstore.open(path, "w") as store:
        expected = {"memory": "process", "file": "disk", "dax": DAX}[store.media]
        assert store.stats().domain == expected
        with pmstore.open(path, "r") as reader:
            assert reader.stats().domain == expected


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_forced_domain_concerns_memory_only(medium: Medium, domain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMSTORE_DOMAIN", domain)
    path = medium.directory / "store.pm"
    with pmstore.open(path, "w") as store:
        expected = domain if store.media != "file" else "disk"
        if store.media == "dax" and domain == "process":  # a power cut would take acknowledged commits
            expected = DAX
        assert store.stats().domain == expected
        with pmstore.open(path, "r") as reader:
            assert reader.stats().domain == expected


@pytest.mark.parametrize("name", ["PMSTORE_DOMAIN", "PMSTORE_FLUSH"])
def test_a_wrong_value_is_an_error_that_lists_the_right_ones(
    medium: Medium, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = medium.directory / "store.pm"
    monkeypatch.setenv(name, "magic")
    with pytest.raises(ValueError, match=f"{name} is one of .*, not 'magic'"):
        pmstore.open(path, "w", media=medium.name)
    assert not path.exists()
    monkeypatch.setenv(name, "")
    pmstore.open(path, "w", media=medium.name).close()


def test_an_instruction_of_another_kind_of_processor(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused on disks, too: a reader's snapshot is in memory."""
    path, other = medium.directory / "store.pm", "cvap" if platform.machine() == "x86_64" else "clwb"
    pmstore.open(path, "w", media=medium.name).close()
    monkeypatch.setenv("PMSTORE_FLUSH", other)
    for mode in ("r", "r+", "w"):
        with pytest.raises(ValueError, match=f"this kind of processor has no {other}"):
            pmstore.open(path, mode)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"this kind of processor has no {other}"):
        pmstore.open(path.with_name("new.pm"), "x", media=medium.name)
    assert [one.name for one in medium.directory.iterdir()] == ["store.pm"]


@pytest.mark.parametrize("flush", ["", *FLUSHES])
@pytest.mark.parametrize("domain", ["", *DOMAINS])
def test_a_kill_takes_no_commit(domain: str, flush: str, medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and large arrays, written whole and in part, in the log and directly; the process kills itself."""
    if medium.name == "file" or (medium.name == "dax" and (domain or flush)):
        pytest.skip("disks have one domain, and nothing to flush; the guest is slow")
    path = medium.directory / "store.pm"
    monkeypatch.setenv("PMSTORE_DOMAIN", domain)
    monkeypatch.setenv("PMSTORE_FLUSH", flush)
    if flush and missing(flush):
        with pytest.raises(ValueError, match=f"this processor has no {flush}"):
            pmstore.open(path, "w")
        return
    large = 3_000_000
    child = os.fork()
    if not child:
        try:
            store = pmstore.open(path, "w")
            arrays = [store.create_array(str(n), n, "u1") for n in (5, 4096, 70_000, large)]
            for commit in range(1, 8):
                for array in arrays:
                    array[:: 1 if commit % 2 else 7] = commit
                store.commit()
            arrays[0][:] = 99  # in no commit
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    with pmstore.open(path, "r+") as store:
        assert store.sequence == 7
        assert store.check().ok
        for n in (5, 4096, 70_000, large):
            assert np.array_equal(store[str(n)], np.full(n, 7, "u1"))
