"""The report's page in a real browser: layout, sorting, contrast in both colour schemes, and no requests."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser import CONTRASTS, opened_browser, visits
from report import documents
from report.demo_results import demo_results
from report.test_charts import training
from tensorkeep.report.demo_page import write_demo_page
from tensorkeep.report.files import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


HOSTILE = "<img src=x onerror=alert(1)><script>document.title='broken'</script>\"'&amp;"
LONG = "tensorstore zarr3 with a name that is far too long to stand beside anything " * 2


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
    with opened_browser() as opened:
        yield opened


@pytest.fixture
def visit(browser: "Browser", page_file: Path) -> Iterator[Any]:
    with visits(browser, page_file) as call:
        yield call


def column(page: "Page", table: str, place: int) -> list[str]:
    rows = page.locator(f"table:has(caption:text-is('{table}')) tbody tr")
    return [row.locator("th, td").nth(place).inner_text() for row in rows.all()]


# A phone and a screen, each with one of the colour schemes; `make torture` exchanges them as well.
VIEWS = [
    (400, "light"),
    (1400, "dark"),
    pytest.param(400, "dark", marks=pytest.mark.slow),
    pytest.param(1400, "light", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
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


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
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


@pytest.mark.parametrize(("width", "picture"), [(400, 0.6), (1400, 0.9)])
def test_verdict_and_picture_come_first_and_warnings_are_folded(visit: Any, width: int, picture: float) -> None:
    page = visit(width)
    machine, verdict = page.locator("h1 small"), page.locator(".verdict")
    assert machine.inner_text() == "OpenLLaMA-3B, first 100 parameters, float16 on A processor, 2 cores"
    assert verdict.inner_text() == "Of 2 published claims, 1 is reproduced and 1 is confounded on this machine."
    tops = [box.bounding_box()["y"] for box in (page.locator("h1"), verdict, page.locator(".picture"))]
    assert tops == sorted(tops)
    assert tops[-1] < 900 * picture
    warnings = page.locator("details.warnings")
    assert warnings.locator("summary").inner_text() == "1 warning"
    assert not warnings.locator("li").is_visible()
    warnings.locator("summary").click()
    assert warnings.locator("li").is_visible()


def test_every_plot_names_the_model_and_every_row_of_the_map_its_arm(visit: Any) -> None:
    page = visit()
    titles = page.locator(".plot-title, .picture > figcaption, .gains caption").all_inner_texts()
    assert len(titles) == 4
    assert all("OpenLLaMA-3B" in title for title in titles)
    rows = page.locator(".gains tbody tr")
    assert rows.count() == 4
    for row in rows.all():
        assert row.locator("th").inner_text()
        assert row.locator("td.field").count() == 4
    # Every step of the scale has a colour of its own.
    colours = "[...document.querySelectorAll('.swatch.field')].map((one) => getComputedStyle(one).backgroundColor)"
    assert len(set(page.evaluate(colours))) == 9


def test_a_pointer_reads_a_loss(visit: Any, tmp_path: Path) -> None:
    file = tmp_path / "training.html"
    curves = {"plain": [[(1, 4.0), (2, 3.0)]] * 2, HOSTILE: [[(1, 4.0), (2, 2.5)]] * 2}
    write_report(training(curves, step=0.5), file)
    page = visit(400, "dark", file)
    chart = page.locator("[data-chart]").nth(1)
    chart.scroll_into_view_if_needed()
    box = chart.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + box["height"] / 2)
    assert chart.locator(".readout").inner_text().startswith("plain 3 at second 1; <img")


def test_hostile_names_are_text(visit: Any) -> None:
    page = visit()
    assert page.locator("h1").inner_text().startswith(HOSTILE)
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
    assert titles[:2] == ["Claims checked", "Details"]
    assert {"Gains", "Not run, and why", "Machine and state", "Method", "Data"} <= set(titles)
    assert column(page, "Not run", 3) == ["the package is not installed"]
    assert page.locator(".plot svg").count() == 2  # gains, trade-offs
    assert page.locator(".picture .bars").count() == 3
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
