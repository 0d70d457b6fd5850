"""Callbacks for frameworks that are not installed."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "packages", "install"),
    [
        ("lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"], "pip install lightning"),
        ("transformers", ["transformers"], "pip install transformers accelerate"),
    ],
)
def test_a_missing_framework_is_named(
    module: str, packages: list[str], install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"pmstore.torch.{module}", raising=False)
    with pytest.raises(ImportError, match=install):
        importlib.import_module(f"pmstore.torch.{module}")
