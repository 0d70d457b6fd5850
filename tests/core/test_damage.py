"""Damaged files: what is said of the damage, and what is mended. tests/testing/test_testing_damage.py sees to it that
none is passed over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.conftest import Medium


def flipped(path: Path, needle: bytes) -> None:
    """Flips a bit in the place where the file holds these bytes; they stand there once."""
    image = bytearray(path.read_bytes())
    at = image.find(needle)
    assert at >= 0
    image[at + len(needle) // 2] ^= 4
    path.write_bytes(image)


def test_check_names_the_array_and_its_rows(medium: Medium) -> None:
    path = medium.directory / "named.pm"
    data = np.random.default_rng(1).random((1000, 16))
    with pmstore.open(path, media=medium.name) as store:
        store["data"] = data
        store["other"] = data[::-1].copy()
    flipped(path, data[500].tobytes())
    with pmstore.open(path, "r", media=medium.name, exclusive=True) as store:
        report = store.check()
        assert not report.ok
        assert [problem.name for problem in report] == ["data"]
        assert "480" in str(report) or "row" in str(report)
        np.testing.assert_array_equal(store["other"], data[::-1])
    with pytest.raises(pmstore.CorruptStoreError, match="data"):
        pmstore.open(path, "r+", media=medium.name, verify=True)


def test_damage_in_a_value_is_found_when_it_is_read(medium: Medium) -> None:
    path = medium.directory / "value.pm"
    with pmstore.open(path, media=medium.name) as store:
        store["blob"] = b"0123456789" * 1000
        store["fine"] = 1
    image = bytearray(path.read_bytes())
    at = image.find(b"0123456789" * 900)
    image[at + 5000] ^= 1
    path.write_bytes(image)
    with pmstore.open(path, media=medium.name) as store:
        with pytest.raises(pmstore.CorruptStoreError, match=r"'blob'.* block 1 of .* does not match its hash"):
            store["blob"]
        assert store["fine"] == 1


def test_one_damaged_header_copy_is_mended(medium: Medium) -> None:
    for copy in (0, 4096):
        path = medium.directory / f"header{copy}.pm"
        with pmstore.open(path, media=medium.name) as store:
            store["x"] = np.arange(5)
        image = bytearray(path.read_bytes())
        image[copy + 40] ^= 1
        path.write_bytes(image)
        with pmstore.open(path, "r", media=medium.name, exclusive=True) as store:
            assert not store.check().ok
        with pmstore.open(path, media=medium.name) as store:
            assert store.check().ok
            assert store["x"].tolist() == [0, 1, 2, 3, 4]


def test_a_lost_record_that_was_durable_is_an_error(medium: Medium) -> None:
    """A bad record in the middle of the log is damage, not its end (D6)."""
    path = medium.directory / "log.pm"
    store = pmstore.open(path, media=medium.name)
    marker = np.frombuffer(b"0123456789abcdef" * 8, "u1")
    store["x"] = np.zeros(128, "u1")
    store.commit()
    store["x"] = marker
    store.commit()
    for i in range(3):
        store["y"] = i
        store.commit()
    log_size = store.stats().log_size
    store._drop(discard=True)
    image = bytearray(path.read_bytes())
    at = image.find(marker.tobytes(), len(image) - log_size)
    assert at > 0
    image[at + 9] ^= 1
    path.write_bytes(image)
    with pytest.raises(pmstore.CorruptStoreError, match="durable"):
        pmstore.open(path, media=medium.name)
