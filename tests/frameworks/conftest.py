"""Skips the tests of this folder where the framework is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

NEEDED = {"test_lightning.py": ("torch", "lightning"), "test_transformers.py": ("torch", "transformers", "accelerate")}


class Missing(pytest.Module):
    """A module of tests that is not imported."""

    def collect(self) -> Any:
        pytest.skip("no torch, lightning or transformers: make test-frameworks installs them", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    here = all(importlib.util.find_spec(name) is not None for name in NEEDED.get(module_path.name, ()))
    return None if here else Missing.from_parent(parent, path=module_path)
