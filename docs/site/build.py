"""Builds the documentation site: ``python docs/site/build.py [FOLDER]``, or ``make docs``.

The pages are those of the repository, in its own layout, so that their links work as they do there. Beside them come a
page of the API for each public module, whose text is the docstrings, and all pages as plain text: ``llms.txt`` is the
list, ``llms-full.txt`` has everything. The notebooks of the gallery are pages, too: ``make test-gallery`` has executed
them in build/gallery.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml
from gallery import NOTEBOOKS, markdown, read
from mkdocs.__main__ import cli

SITE = Path(__file__).resolve().parent
ROOT = SITE.parent.parent
EXECUTED = ROOT / "build" / "gallery"

NAV: dict[str, list[str]] = {
    "Start": [
        "README.md",
        "docs/tour.md",
        "docs/stores.md",
        "docs/coming-from.md",
        "docs/compare.md",
        "docs/guarantees.md",
    ],
    "How to": [
        "docs/estimators.md",
        "docs/watching.md",
        "docs/workers.md",
        "docs/interchange.md",
        "docs/derived.md",
        "docs/archive.md",
        "docs/archive-tuning.md",
        "docs/lossy.md",
        "docs/training.md",
        "docs/scale.md",
        "docs/dax.md",
        "docs/file-systems.md",
    ],
    "Gallery": [
        "docs/gallery/README.md",
        "docs/gallery/killed-fit.md",
        "docs/gallery/outlives-the-kernel.md",
        "docs/gallery/frame-and-objects.md",
        "docs/gallery/history-of-a-fit.md",
        "docs/gallery/crash-test.md",
        "docs/gallery/watching.md",
    ],
    "Crash tests": [
        "docs/crash-testing.md",
        "docs/crash-testing-shards.md",
        "docs/what-crashes-leave.md",
        "docs/crash-model.md",
        "docs/power.md",
        "docs/mutants.md",
    ],
    "Speed": [
        "benchmarks/README.md",
        "benchmarks/readers.md",
        "benchmarks/archive.md",
        "benchmarks/aggregate.md",
        "benchmarks/torch.md",
        "benchmarks/lcdelta.md",
        "benchmarks/crash.md",
        "docs/performance.md",
        "docs/scale-model.md",
        "docs/paper.md",
    ],
    "Inside": ["docs/architecture.md", "docs/format.md", "docs/source.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}
"""The pages by tab. The decisions and the API follow from the files; a page that is missing here fails the build."""

MODULES = {
    "pmstore": "stores",
    "pmstore.cluster": "clusters",
    "pmstore.mixture": "mixtures",
    "pmstore.decomposition": "components",
    "pmstore.archive": "versions of stores",
    "pmstore.codecs": "codecs of the archive",
    "pmstore.scale": "fits over shards",
    "pmstore.testing": "crash tests",
    "pmstore.torch": "PyTorch",
}
"""The public modules, with what each is for."""

LAZY = {"pmstore.MapReduce": "pmstore.scale", "pmstore.Shard": "pmstore.scale"}
"""Names that a module imports when they are used, and the module whose page has them."""


def main(out: Path) -> None:
    """Build the site in a folder, which is emptied."""
    pages = out.parent / f"{out.name}-pages"
    for folder in (out, pages):
        shutil.rmtree(folder, ignore_errors=True)
    written = copy_pages(pages)
    write_notebooks(pages)
    for name in ("site.css", "iframe-worker.js"):
        shutil.copy(SITE / name, pages)
    nav: list[Any] = [{tab: list(names)} for tab, names in NAV.items()]
    decisions = sorted(name for name in written if name.startswith("docs/decisions/"))
    write_index(pages / "docs/decisions/index.md", [pages / name for name in decisions])
    nav[-1]["Inside"].append({"Decisions": ["docs/decisions/index.md", *decisions]})
    nav.append({"API": [{module: write_module(pages, module)} for module in MODULES]})
    write_plain_text(pages, [name for names in NAV.values() for name in names] + decisions)
    show_pictures(pages)
    settings = yaml.safe_load((SITE / "mkdocs.yml").read_text(encoding="utf-8"))
    settings["plugins"][-1]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
    settings |= {"docs_dir": str(pages), "site_dir": str(out), "nav": nav}
    config = pages.parent / f"{out.name}.yml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    cli(["build", "--strict", "--config-file", str(config)])  # --quiet would hide what --strict counts


def copy_pages(pages: Path) -> list[str]:
    """Copy all pages and what they link to; returns the names of the pages."""
    sources = [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "benchmarks").glob("*.md")),
    ]
    names = [str(source.relative_to(ROOT)) for source in sources]
    for source, name in zip(sources, names):
        text = source.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            linked = (source.parent / target).resolve()
            if linked.is_file() and linked.suffix != ".md":
                copy = pages / linked.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(linked, copy)
        page = pages / name
        page.parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(r"(\]\([\w./-]+)\.ipynb\)", r"\1.md)", text)
        page.write_text(text.replace("](decisions/)", "](decisions/index.md)"), encoding="utf-8")
    return names


def write_notebooks(pages: Path) -> None:
    """The notebooks of the gallery with their outputs, as pages that offer the notebook itself."""
    for source in NOTEBOOKS:
        page = pages / source.relative_to(ROOT).with_suffix(".md")
        shutil.copy(source, page.parent)
        text = markdown(read(EXECUTED / source.name), page)
        page.write_text(f"{text}\n[This page as a notebook]({source.name})\n", encoding="utf-8")


def show_pictures(pages: Path) -> None:
    """The first picture of each notebook, in the list of the gallery, as a link to its page."""
    index, *stories = (pages / name for name in NAV["Gallery"])
    shown = (
        f'<a href="{page.stem}.html"><img src="{page.stem}-1.png" width="320" alt="{title(page)}"></a>'
        for page in stories
    )
    index.write_text("\n".join([index.read_text(encoding="utf-8"), *shown, ""]), encoding="utf-8")


def title(page: Path) -> str:
    """The first heading of a page."""
    return next(line[2:] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# "))


def write_index(index: Path, pages: list[Path]) -> None:
    """A page with a link to each of others."""
    lines = [f"- [{title(page)}]({page.name})" for page in pages]
    index.write_text("\n".join(["# Decisions", "", *lines, ""]), encoding="utf-8")


def write_module(pages: Path, module: str) -> str:
    """The page of a module: each public name, in the order of ``__all__``. Returns its name."""
    source = ROOT.joinpath(*module.split("."), "__init__.py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    names = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    )
    lines = [f"# {module}: {MODULES[module]}", ""]
    for name in names:
        home = LAZY.get(f"{module}.{name}")
        if home:
            lines += [f"`{name}` is in [{home}]({home}.md).", ""]
        elif not name.startswith("_"):
            lines += [f"::: {module}.{name}", ""]
    page = pages / "api" / f"{module}.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n".join(lines), encoding="utf-8")
    return str(page.relative_to(pages))


def write_plain_text(pages: Path, names: list[str]) -> None:
    """All pages as text: a list of them, and one file with everything."""
    listed = [f"- [{title(pages / name)}]({name})" for name in names]
    description = "> numpy arrays that survive a kill, on persistent memory, tmpfs or an ordinary disk"
    (pages / "llms.txt").write_text("\n".join(["# pmstore", "", description, "", *listed, ""]), encoding="utf-8")
    notebooks = {str(path.relative_to(ROOT).with_suffix(".md")): markdown(read(path)) for path in NOTEBOOKS}
    texts = [f"<!-- {name} -->\n\n{notebooks.get(name) or (pages / name).read_text('utf-8')}" for name in names]
    (pages / "llms-full.txt").write_text("\n\n".join(texts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve())
