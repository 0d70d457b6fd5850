"""Skips the tests of this folder where torch is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

HERE = importlib.util.find_spec("torch") is not None


class Missing(pytest.Module):
    """A module of tests that is not imported."""

    def collect(self) -> Any:
        pytest.skip("no torch: make test-torch installs it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    return None if HERE else Missing.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sums have the same bits in every run, whatever the machine has."""
    import torch

    torch.set_num_threads(1)
