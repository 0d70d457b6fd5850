"""The page of watch --web in the distribution's Chromium, driven by playwright: `make test-browser`."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._watch.follow import Follower
from pmstore._watch.server import Server
from tests.watch.conftest import HOSTILE, Falling

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: make test-browser installs it")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium"),
]


def test_the_page(path: Path) -> None:
    """It shows a fit that runs, the tree of names and a look into an array, and runs nothing that a name says."""
    with pmstore.open(path) as store:
        store[f"model/{HOSTILE}"] = np.eye(3)
        store.commit()
        with Follower(path) as follower, Server(follower, 0) as server, playwright.sync_playwright() as tool:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            options = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = tool.chromium.launch(executable_path=CHROMIUM, args=options)
            try:
                page = browser.new_page()
                said: list[str] = []
                asked: list[str] = []
                page.on("console", lambda message: said.append(message.text))
                page.on("pageerror", lambda error: said.append(str(error)))
                page.on("dialog", lambda dialog: said.append(dialog.message))
                page.on("request", lambda request: asked.append(request.url))
                page.goto(server.url)
                page.wait_for_selector("#fits svg path")
                assert page.inner_text("#fits h2") == "fits/fall running"
                Falling().run(store, "fits/fall")
                page.wait_for_selector("#fits .finished")
                assert "10 of 10" in page.inner_text("#fits")
                assert page.inner_text("#values td >> nth=0") == HOSTILE
                assert page.inner_text("#values tr:has(svg) td >> nth=0") == "losses"
                page.evaluate("document.querySelectorAll('details').forEach(group => { group.open = true; })")
                page.locator("#tree button", has_text=HOSTILE.partition("/")[2]).last.click()
                page.wait_for_selector("#inside canvas")
                assert page.evaluate("document.querySelector('#inside canvas').width") == 3
                page.click("#inside button >> text=show a histogram")
                page.wait_for_selector("#inside rect >> nth=39", state="attached")
                assert HOSTILE in page.text_content("#inside h2")
                server.shutdown()
                thread.join()
                server.server_close()
                page.wait_for_selector("#about >> text=no connection")
                assert [text for text in said if "ERR_" not in text] == []
                assert all(url.startswith(server.url) for url in asked)
            finally:
                browser.close()
                server.shutdown()
                thread.join()
