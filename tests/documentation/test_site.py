"""The built site: no warning, no broken link, and in a real browser legible, searchable and without requests."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Visitor, opened_browser, without_messages
from documentation.blocks import ROOT

Visit = Callable[..., Any]
SEARCHES = {
    "keep_last": "CheckpointManager",
    "--keep-best": "prune",
    "O_DIRECT": "Decisions",
    # Words of those who come from a checkpoint comparison or a training roadmap.
    **dict.fromkeys(("phase4_config", "buffer swapping", "8-bit optimizers", "use_torch_compile"), "roadmap"),
}
pytest.importorskip("sphinx", reason="the extra [docs] is not installed")
# The build takes half a minute; `make docs` does it as well.
pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "--keep-going", "-j", "2", "-c", str(ROOT / "docs/site"), "-d", str(folder / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(folder / "html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder / "html"


@pytest.fixture(scope="module")
def browser(site: Path) -> Iterator[Visitor]:
    with opened_browser(site.as_uri(), "data:") as opened:
        yield opened


@pytest.fixture
def visit(browser: Visitor, site: Path) -> Iterator[Visit]:
    """Open a page of the site from the disk; no error, and no request but for files of the site, may occur."""
    with without_messages(browser):
        yield lambda name, *given: browser(site / name, *given)


def test_every_link_and_anchor_exists(site: Path) -> None:
    command = [sys.executable, str(ROOT / "docs/site/links.py"), str(site)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", ["index.html", "reference/api/tensorkeep.save.html", "how-to/migrate.html"])
def test_pages_fit_and_follow_the_colour_scheme(visit: Visit, name: str, width: int, scheme: str) -> None:
    page = visit(name, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(ground) / 3 < 80) == (scheme == "dark")


def test_the_start_page_leads_to_every_section_and_commands_have_pages(visit: Visit) -> None:
    page = visit("index.html")
    captions = page.locator(".sidebar-tree .caption").all_inner_texts()
    sections = ["start", "keep checkpoints", "train", "measure", "understand", "reference", "develop"]
    assert [text.lower() for text in captions] == sections
    page.locator("article").get_by_role("link", name="Python API").click()
    page.locator("article").get_by_role("link", name="tensorkeep.save", exact=True).click()
    assert page.locator("h1").inner_text().startswith("tensorkeep.save")
    assert "durable on return" in page.locator("article").inner_text()
    assert ">>> report = tensorkeep.save(" in page.locator("article").inner_text()
    # A command has a page.
    text = visit("reference/commands/convert.html").locator("article").inner_text()
    assert "--compression" in text and "$ tensorkeep convert old.pt new --to native" in text


@pytest.mark.parametrize(("words", "found"), SEARCHES.items())
def test_the_search_finds(visit: Visit, words: str, found: str) -> None:
    page = visit("index.html")
    page.locator("input[name=q]").first.fill(words)
    page.keyboard.press("Enter")
    page.locator("#search-results ul.search li").first.wait_for()
    page.locator("p.search-summary", has_text="found").wait_for()
    assert any(found in text for text in page.locator("#search-results li a").all_inner_texts())
