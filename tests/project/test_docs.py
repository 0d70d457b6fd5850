"""The Python blocks of README.md and docs/ run, block after block, each file in a process and directory of its own; and
links of all pages lead to files and headings.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.support.template import WITH_ESTIMATORS, python, template

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md"))]
TUTORIAL = "crash-testing.md"  # files and commands: tests/testing/test_testing_docs.py follows it step by step
FORKING = """import runpy, sys; from tests.support.workers import fork_workers
fork_workers()
runpy.run_path(sys.argv[1], run_name="__main__")"""
LONG = {"scale.md", "crash-testing-shards.md", "watching.md", "workers.md"}  # several processes, or matplotlib
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def program(text: str) -> str:
    """The blocks of a document as one program whose line numbers are those of the document."""
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for n, line in enumerate(block[1].splitlines()):
            lines[first + n] = line
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.long] if path.name in LONG else [])
        for path in DOCUMENTS
        if path.name != TUTORIAL
    ],
    ids=lambda path: path.name,
)
def test_python_blocks_run(path: Path, tmp_path: Path) -> None:
    code = program(path.read_text(encoding="utf-8"))
    if not code.strip():
        pytest.skip("no Python blocks")
    if re.search(r"^(import|from) torch", code, re.MULTILINE):
        pytest.importorskip("torch", reason="no torch: make test-torch installs it")
    script = tmp_path / path.with_suffix(".py").name
    script.write_text(code, encoding="utf-8")
    if "engine=" in code:
        done = template(WITH_ESTIMATORS).run("-c", FORKING, script, directory=tmp_path)
    else:
        done = python(script, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr


def anchors(path: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        there = path.parent / target if target else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize("path", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_are_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert (ROOT / file).is_file(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"
    for name in re.findall(r"`(test_\w+)`", text):
        assert name in names_in_tests(), name


@functools.cache
def names_in_tests() -> frozenset[str]:
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")]
    return frozenset(name for source in sources for name in re.findall(r"^(?:def |class )(\w+)", source, re.MULTILINE))


def test_the_tour_names_every_module() -> None:
    """Those of the estimators' families are alike, and in no list. test_tidy.py compares the files of C."""
    page = (ROOT / "docs" / "source.md").read_text(encoding="utf-8").split("## Python")[1]
    texts = {part.split("`", 1)[0]: part for part in re.split(r"^- `", page, flags=re.MULTILINE)}
    folders = [path.parent for path in (ROOT / "pmstore").glob("*/__init__.py")]
    assert len(folders) > 10
    for folder in folders:
        if not (folder / "_sklearn.py").exists():
            missing = {path.name for path in folder.glob("*.py")} - set(re.findall(r"`(\w+\.py)`", texts[folder.name]))
            assert missing == {"__init__.py"}, f"docs/source.md does not say what these of {folder.name} are for"
