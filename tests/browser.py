"""Pages in a real browser: one browser, pages of a width and a colour scheme, and what goes wrong in them."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Of every element that holds text: the contrast between its colour and the ground below it, as WCAG 2 defines it.
CONTRASTS = """() => {
  const rgb = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length > 3 && n[3] === 0 ? null : n; };
  const light = ([r, g, b]) => {
    const part = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const found = rgb(getComputedStyle(node).backgroundColor);
      if (found) return found;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("body *:not(script):not(svg *)")) {
    if (![...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim())) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(ground(node))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.tagName, node.className]);
  }
  return found;
}"""


@contextmanager
def opened_browser() -> "Iterator[Browser]":
    """Yield Chromium; without one the test is skipped, or fails where it must be installed."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        reason = "no Chromium on this machine (chromium, chromium-browser or google-chrome)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def visits(browser: "Browser", page_file: Path | None = None) -> Iterator[Callable[..., "Page"]]:
    """Yield a function that opens a page with a width and a colour scheme; no error and no request may occur."""
    pages: list[Page] = []
    messages: list[str] = []

    def visit(width: int = 1400, scheme: Any = "light", file: Path | None = page_file) -> "Page":
        assert file is not None
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(page)
        own = file.as_uri()
        page.on("console", lambda message: messages.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: messages.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (messages.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: None if request.url == own else messages.append(f"request: {request.url}"))
        page.on("requestfailed", lambda request: messages.append(f"failed: {request.url}"))
        page.goto(own)
        return page

    yield visit
    for page in pages:
        page.close()
    assert messages == []
