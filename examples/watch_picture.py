"""Draws docs/watch.svg: what ``pmstore watch`` shows of a fit that was killed, and of the same fit when it goes on.

With playwright and a Chromium it also draws docs/watch-page.png, the page of ``pmstore watch --web``. Needs the extras
of pmstore: ``pip install 'pmstore[sklearn,watch]'``.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

import pmstore
from pmstore._watch.follow import Follower
from pmstore._watch.server import Server
from pmstore._watch.terminal import drawn

FIT = """
from sklearn.datasets import load_digits
from pmstore.cluster import KMeans

X = load_digits().data
KMeans(n_clusters=200, n_init=100, init="random", random_state=0, store="digits.pm", name="digits").fit(X)
"""


@contextlib.contextmanager
def fitting(path: Path, commits: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that fits, after so many commits. It is killed at the end."""
    fit = subprocess.Popen([sys.executable, "-c", FIT], cwd=path.parent)
    try:
        with pmstore.open(path, "r") as store:
            while store.refresh() < commits:
                store.wait()
        yield fit
    finally:
        fit.kill()
        fit.wait()


def draw_page(path: Path, picture: Path) -> None:
    """A picture of the page, with a look into the best centres."""
    from playwright.sync_api import sync_playwright

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    with Follower(path) as follower, Server(follower, 0) as server, sync_playwright() as tool:
        threading.Thread(target=server.serve_forever).start()
        try:
            options = ["--no-sandbox"] if os.geteuid() == 0 else []
            page = tool.chromium.launch(executable_path=browser, args=options).new_page(
                viewport={"width": 1100, "height": 700}
            )
            page.goto(server.url)
            page.wait_for_selector("#tree details", state="attached")
            page.evaluate("document.querySelectorAll('details').forEach(group => { group.open = true; })")
            page.click("button[data-name='digits/best/centers']")
            page.wait_for_selector("#inside canvas")
            page.evaluate("document.getElementById('path').textContent = 'digits.pm'")
            page.screenshot(path=picture, full_page=True)
        finally:
            server.shutdown()


def main(pictures: Path) -> None:
    console = Console(record=True, width=104, file=io.StringIO(), force_terminal=True)

    def show(path: Path) -> None:
        with Follower(path) as follower:
            console.print(drawn(follower.view()._replace(path=path.name)))
            console.print()

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "digits.pm")
        pmstore.open(path).close()
        with fitting(path, 200) as fit:
            fit.kill()
            fit.wait()
            show(path)
        with fitting(path, 500):
            show(path)
            try:
                draw_page(path, pictures / "watch-page.png")
            except ImportError as error:
                print(f"no picture of the page: {error}", file=sys.stderr)
    without_font = re.sub(r"@font-face \{\{.*?\n    \}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(title="pmstore watch digits.pm", code_format=without_font, unique_id="watch")
    lines = [line.rstrip() for line in svg.splitlines()]
    (pictures / "watch.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).resolve().parent.parent / "docs")
