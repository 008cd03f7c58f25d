"""Pages in a real browser: one page of a width and a colour scheme, and what goes wrong in it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

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


class Visitor:
    """A page of the browser that visits one file after another, and notes whatever goes wrong in them."""

    def __init__(self, page: "Page", *allowed: str) -> None:
        """Begin with no file; a request of another one is noted, unless its URL starts with what is allowed."""
        self._page, self._file, self._allowed = page, "", allowed
        self.messages: list[str] = []
        note = self.messages.append
        page.on("console", lambda message: note(f"console: {message.text}"))
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on("dialog", lambda dialog: (note(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self._is_allowed(request.url) or note(f"request: {request.url}"))
        page.on("requestfailed", lambda request: note(f"failed: {request.url}"))

    def _is_allowed(self, url: str) -> bool:
        return url == self._file or url.startswith(self._allowed)

    def __call__(self, file: Path, width: int = 1400, scheme: Any = "light") -> "Page":
        """Open a file on a screen of this width, with a colour scheme, and nothing below the pointer."""
        self._file = file.as_uri()
        self._page.set_viewport_size({"width": width, "height": 900})
        self._page.emulate_media(color_scheme=scheme, media="screen")
        self._page.mouse.move(0, 0)
        self._page.goto(self._file)
        return self._page


@contextmanager
def opened_browser(*allowed: str) -> Iterator[Visitor]:
    """Yield a page of Chromium, for `Visitor`; without one the test is skipped, or fails where it must be installed."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        reason = "no Chromium on this machine (chromium, chromium-browser or google-chrome)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield Visitor(opened.new_page(), *allowed)
        opened.close()


@contextmanager
def without_messages(visitor: Visitor) -> Iterator[None]:
    """Require that no error, no message and no request occurs in the pages that are visited within."""
    visitor.messages.clear()
    yield
    assert visitor.messages == []
