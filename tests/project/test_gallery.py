"""The notebooks of docs/gallery: clean, linked, and executed. ``make test-gallery`` has what their execution needs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.project.test_docs import ROOT, anchors

NEEDED = ("matplotlib", "nbclient", "ipykernel")


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gallery = loaded("gallery")
each = pytest.mark.parametrize("path", gallery.NOTEBOOKS, ids=lambda path: path.stem)


@each
def test_the_repository_has_no_outputs(path: Path) -> None:
    """No outputs, no counts, no metadata of a machine."""
    assert path.read_text(encoding="utf-8") == gallery.clean(gallery.read(path)), "run: python docs/site/gallery.py"


def test_cleaning_removes_what_jupyter_adds() -> None:
    one = gallery.read(gallery.NOTEBOOKS[0])
    text = gallery.clean(one)
    for number, cell in enumerate(one["cells"]):
        cell["id"] = f"{number:08x}"
        cell["metadata"] |= {"scrolled": True, "execution": {"iopub.status.idle": "2026-01-05T12:00:00Z"}}
        cell |= {"execution_count": number, "outputs": [{"output_type": "stream", "name": "stdout", "text": "1\n"}]}
    one["metadata"]["language_info"] |= {"version": "3.11.7"}
    assert gallery.clean(one) == text


@each
def test_cells_can_be_read_and_can_fail(path: Path) -> None:
    cells = gallery.read(path)["cells"]
    assert re.match(r"# \S.*\n", cells[0]["source"])
    assert not [line for cell in cells for line in cell["source"].splitlines() if len(line) > 120]
    assert sum(cell["source"].count("assert ") for cell in cells if cell["cell_type"] == "code") >= 2


@each
def test_links_of_notebooks_lead_somewhere(path: Path) -> None:
    found = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", gallery.markdown({"cells": texts(path)}))
    assert found
    for target, anchor in found:
        assert (path.parent / target).is_file(), target
        assert not anchor or anchor in anchors(path.parent / target), f"{target}#{anchor}"


def texts(path: Path) -> list[dict[str, str]]:
    return [cell for cell in gallery.read(path)["cells"] if cell["cell_type"] == "markdown"]


def test_the_list_and_the_site_have_each_notebook() -> None:
    listed = (ROOT / "docs" / "gallery" / "README.md").read_text(encoding="utf-8")
    pages = (ROOT / "docs" / "site" / "build.py").read_text(encoding="utf-8")
    names = [path.stem for path in gallery.NOTEBOOKS]
    assert names
    assert sorted(re.findall(r"\]\(([\w-]+)\.ipynb\)", listed)) == names
    assert sorted(re.findall(r'"docs/gallery/([\w-]+)\.md"', pages)) == sorted([*names, "README"])


@pytest.mark.slow
def test_an_assertion_that_fails_is_an_error(tmp_path: Path) -> None:
    for name in NEEDED:
        pytest.importorskip(name, reason=f"no {name}: make test-gallery installs it")
    cells = [{"cell_type": "code", "metadata": {}, "source": source} for source in ("kept = 1", "assert kept == 2")]
    path = tmp_path / "wrong.ipynb"
    path.write_text(gallery.clean({"cells": cells}), encoding="utf-8")
    with pytest.raises(importlib.import_module("nbclient.exceptions").CellExecutionError, match="assert kept == 2"):
        gallery.execute(path, tmp_path)


@pytest.mark.slow
@each
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """All of its assertions hold, nothing warns, and each picture has a text for those who can't see it."""
    code = "\n".join(cell["source"] for cell in gallery.read(path)["cells"] if cell["cell_type"] == "code")
    for name in (*NEEDED, *re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)):
        if f"%%writefile {name}.py" not in code:
            pytest.importorskip(name, reason=f"no {name}: make test-gallery installs it")
    done = gallery.execute(path, tmp_path)
    outputs = [output for cell in done["cells"] for output in cell.get("outputs", ())]
    for place in (str(tmp_path), sys.prefix):
        assert place not in json.dumps(outputs), "an output names a folder of this machine"
    assert not [output["text"] for output in outputs if output.get("name") == "stderr"]
    drawing = [cell["id"] for cell in gallery.pictures(done)]
    assert drawing
    assert drawing == [cell["id"] for cell in done["cells"] if cell["metadata"].get("alt")]
    if "PMSTORE_GALLERY" in os.environ:  # make docs makes pages of them
        Path(os.environ["PMSTORE_GALLERY"], path.name).write_text(json.dumps(done), encoding="utf-8")
