"""The documentation site that `make docs` builds: its links, its width on a phone, its search without a server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

SITE = Path(os.environ.get("PMSTORE_SITE", "build/site"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE = {"width": 390, "height": 844}  # CSS pixels

pytestmark = pytest.mark.skipif("PMSTORE_SITE" not in os.environ, reason="make docs builds the site and tests it")


class Links(HTMLParser):
    """The targets of a page's links and pictures, and the places that links can lead to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.places.add(value)
            elif value and (tag, name) in (("a", "href"), ("img", "src"), ("link", "href"), ("script", "src")):
                self.targets.append(value)


def pages() -> list[Path]:
    return sorted(page for page in SITE.rglob("*.html") if page.name != "404.html")


def test_links_lead_somewhere() -> None:
    links = {page: Links(page) for page in pages()}
    assert len(links) > 50
    broken = []
    for page, found in links.items():
        for target in found.targets:
            path, anchor = urldefrag(target)
            if "://" in path or path.startswith(("mailto:", "data:")):
                continue
            there = (page.parent / unquote(path)).resolve() if path else page
            there = there / "index.html" if there.is_dir() else there
            if not there.exists() or (anchor and there in links and unquote(anchor) not in links[there].places):
                broken.append(f"{page.relative_to(SITE)}: {target}")
    assert not broken, "\n".join(broken)


def test_every_public_name_has_its_place() -> None:
    import pmstore

    places = Links(SITE / "api" / "pmstore.html").places | Links(SITE / "api" / "pmstore.scale.html").places
    for name in pmstore.__all__:
        if name.isidentifier() and not name.startswith("_"):
            assert f"pmstore.{name}" in places or f"pmstore.scale.{name}" in places, name
    assert "pmstore.Store.transaction" in places


def test_the_plain_text_has_every_page() -> None:
    listed = (SITE / "llms.txt").read_text(encoding="utf-8")
    text = (SITE / "llms-full.txt").read_text(encoding="utf-8")
    for page in pages():
        name = page.relative_to(SITE).with_suffix(".md")
        if page.name != "index.html" and name.parts[0] != "api":
            assert f"({name})" in listed
            assert f"<!-- {name} -->" in text


def test_the_gallery_shows_what_the_notebooks_put_out() -> None:
    text = (SITE / "llms-full.txt").read_text(encoding="utf-8")
    found = [page for page in pages() if page.parent.name == "gallery" and page.name != "index.html"]
    assert found
    listed = Links(SITE / "docs" / "gallery" / "index.html").targets
    for page in found:
        assert {page.name, f"{page.stem}-1.png"} <= set(listed)
        targets = Links(page).targets
        assert f"{page.stem}-1.png" in targets
        assert f"{page.stem}.ipynb" in targets
        plain = text.partition(f"<!-- docs/gallery/{page.stem}.md -->")[2].partition("<!-- docs/")[0]
        assert "```python" in plain
        assert ".png" not in plain


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: make docs installs it")
    if CHROMIUM is None:
        pytest.skip("no browser: apt-get install chromium")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


def test_pages_fit_a_phone_and_load_nothing_from_elsewhere(browser: Any) -> None:
    page = browser.new_page(viewport=PHONE)
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    wide = []
    for path in pages():
        page.goto(path.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > PHONE["width"]:
            wide.append(f"{path.relative_to(SITE)}: {width} pixels")
    assert not wide, "\n".join(wide)
    assert not errors
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.parametrize("name", ["index.html", "docs/decisions/index.html"])
def test_the_search_works_without_a_server(browser: Any, name: str) -> None:
    page = browser.new_page()
    page.goto((SITE / name).as_uri())
    page.fill("input[name=query]", "declared write set")
    page.wait_for_selector(".md-search-result__item a", state="attached")
    found = page.eval_on_selector_all(".md-search-result__item a", "links => links.map(link => link.href)")
    assert any("api/pmstore.html" in link or "decisions" in link or "architecture" in link for link in found)
