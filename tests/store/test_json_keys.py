"""The JSON of the commands: its keys are public, and docs/stores.md has a table of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _cli
from pmstore._interchange import formats


def keys_in(found: Any) -> set[str]:
    """The keys of a dict and of the dicts in its lists, or of the dicts in a list."""
    if isinstance(found, dict):
        return set(found).union(*(keys_in(one) for one in found.values() if isinstance(one, list)))
    return set().union(*map(keys_in, found)) if isinstance(found, list) else set()


def test_the_table_has_the_keys_of_each_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parent.parent.parent / "docs" / "stores.md"
    if not page.is_file():
        pytest.skip("no docs/")
    table = page.read_text(encoding="utf-8").partition("| command | keys |\n")[2].partition("\n\n")[0]
    said = {command: set(keys) for command, *keys in (re.findall(r"`(\w+)`", row) for row in table.splitlines()[1:])}
    store = tmp_path / "run.pm"
    with pmstore.open(store) as writer:
        writer["x"] = np.arange(6.0)
        writer["epoch"] = 3
        writer.attrs("x")["unit"] = "m"
    words = {
        **{command: [store] for command in ("info", "ls", "check", "upgrade", "compact")},
        "backup": [store, tmp_path / "copy.pm"],
        "export": [store, tmp_path / "run.npz"],
        "import": [tmp_path / "run.npz", tmp_path / "new.pm"],
        "salvage": [tmp_path / "copy.pm", tmp_path / "rescued.pm"],
    }
    for command, paths in words.items():
        if command == "salvage":
            damaged = bytearray(paths[0].read_bytes())
            damaged[damaged.find(np.arange(6.0).tobytes()) + 9] ^= 1
            paths[0].write_bytes(damaged)
        _cli.main([command, "--json", *map(str, paths)])
        assert keys_in(json.loads(capsys.readouterr().out)) == said.pop(command), command
    assert not said


def test_the_formats_of_the_commands_are_all() -> None:
    assert set(_cli.FORMATS) == set(formats.FORMATS)
