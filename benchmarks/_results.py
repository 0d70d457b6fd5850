"""Reads the raw results of the benchmarks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from _targets import Raw


def load(results: Path, names: tuple[str, ...]) -> Raw:
    """What was kept, by the name of the benchmark."""
    paths = {name: results / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


# Names in kept results that were measured before these names changed.
RENAMED = {
    '"floors"': '"baselines"',
    '"floor"': '"baseline"',
    '"home"': '"image"',
    '"promises"': '"guarantees"',
    '"fresh, ': '"new, ',
    '"look': '"refresh',
}


def load_kept(kept: Path, names: tuple[str, ...]) -> Raw:
    """The same of what is in the repository, in the folder `kept`."""

    def read(path: Path) -> Any:
        text = gzip.decompress(path.read_bytes()).decode()
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        return json.loads(text)

    paths = {name: kept / f"{name}.json.gz" for name in names}
    return {name: read(path) for name, path in paths.items() if path.exists()}
