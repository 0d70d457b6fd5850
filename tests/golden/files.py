"""The golden files, for tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore._values import registry
from tests.golden import contents
from tests.golden.make import FILES, HERE, digests

FORMATS = (0, 1)
KNOWN: dict[str, Any] = json.loads((HERE / "known.json").read_text())
GOLDEN = [f"format{version}/{medium}-{name}" for version in FORMATS for medium, name in FILES]


def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden types are registered until the test ends."""
    for name in ("_BY_TYPE", "_BY_NAME"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    contents.register()


def bytes_of(golden: str) -> bytes:
    return gzip.decompress((HERE / f"{golden}.pm.gz").read_bytes())


def unpacked(golden: str, directory: Path) -> Path:
    path = directory / "golden.pm"
    path.write_bytes(bytes_of(golden))
    return path


def check_contents(store: pmstore.Store, golden: str) -> None:
    """Everything reads as it did when the file was written."""
    name = golden.rpartition("-")[2]
    if name == "fits":
        assert digests(store) == KNOWN[golden]["fits"]
    else:
        getattr(contents, f"assert_{'large' if name == 'compacted' else name}")(store)
