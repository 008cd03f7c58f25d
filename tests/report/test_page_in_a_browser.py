"""The report's page in a real browser: layout, sorting, contrast in both colour schemes, and no requests."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from report import documents
from report.demo_results import demo_results
from tensorkeep.report.demo_page import write_demo_page
from tensorkeep.report.files import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


HOSTILE = "<img src=x onerror=alert(1)><script>document.title='broken'</script>\"'&amp;"
LONG = "tensorstore zarr3 with a name that is far too long to stand beside anything " * 2

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


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    arms = {**documents.THREE_WAY, HOSTILE: (3.0, 2.0, 1.0), LONG: (1.5, 2.0, 0.7), "absent": (1.0, 1.0, 1.0)}
    document = documents.document(arms, runs=2, missing={"absent": ("not-run", "the package is not installed")})
    document["experiment"]["title"] = HOSTILE
    document["summary"]["claims"] = documents.with_claims()["summary"]["claims"]
    document["summary"]["warnings"] = [{"text": HOSTILE, "remedy": LONG.replace(" ", "")}]
    return write_report(documents.write(document, folder), folder / "report.html")[0]


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
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


@pytest.fixture
def visit(browser: "Browser", page_file: Path) -> Iterator[Any]:
    """Open the page with a width and a colour scheme; no error and no request may occur."""
    pages: list[Page] = []
    messages: list[str] = []

    def call(width: int = 1400, scheme: Any = "light", file: Path = page_file) -> "Page":
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

    yield call
    for page in pages:
        page.close()
    assert messages == []


def column(page: "Page", table: str, place: int) -> list[str]:
    rows = page.locator(f"table:has(caption:text-is('{table}')) tbody tr")
    return [row.locator("th, td").nth(place).inner_text() for row in rows.all()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_fits_and_is_legible(visit: Any, width: int, scheme: str) -> None:
    page = visit(width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.body.scrollWidth") <= width
    # Tables that are wider scroll inside their own box.
    assert page.evaluate("[...document.querySelectorAll('.scroll')].some((box) => box.scrollWidth > box.clientWidth)")
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 100
    assert min(contrasts)[0] >= 4.5, min(contrasts)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_of_the_demo_fits_and_is_legible(visit: Any, width: int, scheme: str, tmp_path: Path) -> None:
    file = tmp_path / "demo.html"
    write_demo_page(demo_results(), file)
    page = visit(width, scheme, file)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 100
    assert min(contrasts)[0] >= 4.5, min(contrasts)
    widths = page.evaluate("[...document.querySelectorAll('#speed .track span')].map((bar) => bar.clientWidth)")
    assert 0 < widths[0] < widths[4] <= max(widths)


def test_dark_mode_is_dark_and_print_is_not(visit: Any) -> None:
    def colours(page: "Page") -> tuple[str, set[str]]:
        fills = "[...document.querySelectorAll('#gains .plot svg text')].map((text) => getComputedStyle(text).fill)"
        return page.evaluate("getComputedStyle(document.body).backgroundColor"), set(page.evaluate(fills))

    light, dark = visit(scheme="light"), visit(scheme="dark")
    assert colours(light) == ("rgb(255, 255, 255)", {"rgb(27, 31, 36)", "rgb(95, 104, 114)"})
    assert colours(dark) == ("rgb(20, 23, 26)", {"rgb(230, 233, 236)", "rgb(163, 173, 183)"})
    dark.emulate_media(media="print")
    assert colours(dark) == colours(light)


def test_tables_sort_by_mouse_and_by_keyboard(visit: Any) -> None:
    page = visit()
    table = "durable save"
    heading = page.locator(f"table:has(caption:text-is('{table}')) thead th").nth(2)
    before = column(page, table, 0)
    assert before[0] == "pytorch"
    assert heading.get_attribute("aria-sort") == "none"
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    values = column(page, table, 2)
    assert values[-1] == "-"  # arms that did not run come last
    numbers = [float(value.replace(",", "")) for value in values[:-1]]
    assert numbers == sorted(numbers)
    assert numbers[0] < 10 < 100 < numbers[-1]  # sorted as text, 137 would come before 3
    assert column(page, table, 0) != before
    heading.locator("button").press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    values = column(page, table, 2)
    assert [float(value.replace(",", "")) for value in values[:-1]] == numbers[::-1]
    assert values[-1] == "-"
    # Units differ from row to row: 436 MB/s is less than 1.95 GB/s.
    page.locator(f"table:has(caption:text-is('{table}')) thead th").nth(7).locator("button").click()
    throughputs = column(page, table, 7)
    assert {text[-4:] for text in throughputs[:-1]} == {"MB/s", "GB/s"}
    assert [column(page, table, 2)[place] for place in range(len(numbers))] == values[:-1]
    page.locator(f"table:has(caption:text-is('{table}')) thead th").nth(0).locator("button").click()
    assert heading.get_attribute("aria-sort") == "none"
    assert sorted(before) == sorted(column(page, table, 0))


def test_hostile_names_are_text(visit: Any) -> None:
    page = visit()
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.title().startswith(HOSTILE)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert HOSTILE in column(page, "durable save", 0)


def test_everything_can_be_reached_by_keyboard(visit: Any) -> None:
    page = visit(400)
    for box in page.locator(".scroll").all():
        assert box.get_attribute("tabindex") == "0"
        assert box.get_attribute("aria-label")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    for picture in page.locator(".plot svg").all():
        assert picture.get_attribute("role") == "img"
        assert picture.get_attribute("aria-label")


def test_the_page_has_all_sections(visit: Any) -> None:
    page = visit()
    titles = page.locator("h2").all_inner_texts()
    assert titles[:3] == ["Verdict", "Claims checked", "Comparison"]
    assert {"Gains", "Not run, and why", "Machine and state", "Method", "Data"} <= set(titles)
    assert column(page, "Not run", 3) == ["the package is not installed"]
    assert page.locator(".plot svg").count() == 3  # six panels, gains, trade-offs
    page.get_by_text("Raw samples and the command of every cell").click()
    assert len(column(page, "Every cell", 0)) == 14


def test_the_checks_of_the_page_can_fail(visit: Any, page_file: Path, tmp_path: Path) -> None:
    """A page that is too wide, has too little contrast or requests something fails the checks."""
    text = page_file.read_text()
    wide = tmp_path / "wide.html"
    wide.write_text(text.replace("<h2>", "<div style='width:2000px;color:#bbbbbb'>pale</div><h2>", 1))
    page = visit(file=wide)
    assert page.evaluate("document.documentElement.scrollWidth") > 1400
    assert min(page.evaluate(CONTRASTS))[0] < 2
