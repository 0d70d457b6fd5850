"""The Python blocks of README.md and docs/ run, block after block, each file in a process and directory of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIAL = "crash-testing.md"  # files and commands: tests/test_testing_docs.py follows it step by step
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def program(text: str) -> str:
    """The blocks of a document as one program whose line numbers are those of the document."""
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for n, line in enumerate(block[1].splitlines()):
            lines[first + n] = line
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if p.name != TUTORIAL], ids=lambda path: path.name)
def test_python_blocks_run(path: Path, tmp_path: Path) -> None:
    code = program(path.read_text(encoding="utf-8"))
    if not code.strip():
        pytest.skip("no Python blocks")
    script = tmp_path / path.with_suffix(".py").name
    script.write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not t.startswith("mailto:") and not (path.parent / t).exists()]
    assert not missing
