"""The notebooks of docs/gallery: clean in the repository, executed by ``make test-gallery``, and pages of the site.

``python docs/site/gallery.py`` removes outputs, counts and metadata, after a notebook was edited and run in Jupyter.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "gallery").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SECONDS = 300  # the longest that a kernel may take to start, and a cell to end

Notebook = dict[str, Any]


def read(path: Path) -> Notebook:
    """A notebook, in which the source of each cell is one str."""
    notebook: Notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def clean(notebook: Notebook) -> str:
    """The text of a notebook without outputs, in the layout that Jupyter writes.

    Of the metadata of a cell, only "alt" stays: the text for those who can't see its picture.
    """
    cells = []
    for number, cell in enumerate(notebook["cells"], 1):
        kept: Notebook = {"cell_type": cell["cell_type"], "id": f"cell-{number}"}
        kept["metadata"] = {key: cell["metadata"][key] for key in ("alt",) if key in cell["metadata"]}
        kept["source"] = cell["source"].strip().splitlines(keepends=True)
        if cell["cell_type"] == "code":
            kept |= {"execution_count": None, "outputs": []}
        cells.append(dict(sorted(kept.items())))
    whole = {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def execute(path: Path, folder: Path) -> Notebook:
    """A notebook with its outputs, from a new kernel in an empty folder. Raises an error if one of its cells does."""
    import nbclient
    import nbformat

    places = {"IPYTHONDIR": folder / "ipython", "TMPDIR": folder / "tmp"}
    for place in places.values():
        place.mkdir()
    notebook = nbformat.reads(clean(read(path)), as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        startup_timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--InlineBackend.figure_format=retina", "--HistoryManager.enabled=False", "--log-level=ERROR"],
    )
    client.execute(env=os.environ | {name: str(place) for name, place in places.items()})
    done: Notebook = json.loads(nbformat.writes(notebook))
    for cell in done["cells"]:
        cell["source"] = "".join(cell["source"])
    return done


def markdown(notebook: Notebook, page: Path | None = None) -> str:
    """A notebook as a page, whose pictures are written beside it; without a page, the text without outputs."""
    parts: list[str] = []
    pictures = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
            continue
        parts.append(f"```python\n{cell['source']}\n```")
        for output in cell["outputs"] if page else ():
            data = output.get("data", {})
            if page and "image/png" in data:
                pictures += 1
                picture = page.with_name(f"{page.stem}-{pictures}.png")
                picture.write_bytes(base64.b64decode("".join(data["image/png"])))
                width = output["metadata"]["image/png"]["width"]  # half of the pixels, for sharp screens
                alt = html.escape(cell["metadata"]["alt"])
                parts.append(f'<img src="{picture.name}" width="{width}" alt="{alt}">')
            elif "text/html" in data:
                parts.append(table(joined(data["text/html"])))
            else:
                text = joined(output.get("text") or data.get("text/plain", ""))
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def table(text: str) -> str:
    """A table as the site draws it: one block without styles of its own."""
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:class|border|style)="[^"]*"', "", text)
    return re.sub(r"\n\s*", "", text)


def pictures(notebook: Notebook) -> Iterator[Notebook]:
    """The code cells that draw."""
    for cell in notebook["cells"]:
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", ())):
            yield cell


if __name__ == "__main__":
    for path in NOTEBOOKS:
        path.write_text(clean(read(path)), encoding="utf-8")
