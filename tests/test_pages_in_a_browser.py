"""Pages in a real browser, of reports and of what is shown: layout, tables, contrast, no errors and no requests."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tensorkeep
from browser import CONTRASTS, Visitor, opened_browser, without_messages
from pages.shown_runs import HOSTILE, save_model, save_run
from report import documents
from report.demo_results import demo_results
from report.test_charts import training
from tensorkeep.pages import checkpoint as checkpoint_module
from tensorkeep.pages.checkpoint import read_contents
from tensorkeep.pages.difference import Difference
from tensorkeep.pages.page import drawn_table, write_page
from tensorkeep.pages.run import read_run
from tensorkeep_bench.report.demo import write_demo_page
from tensorkeep_bench.report.html import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("plots")]

MARKUP = "<img src=x onerror=alert(1)><script>document.title='broken'</script>\"'&amp;"
LONG = "tensorstore zarr3 with a name that is far too long to stand beside anything " * 2
# How many elements with text each page has at least.
TEXTS = {"checkpoint": 40, "run": 40, "difference": 40, "report": 100, "demo": 100}
# Every page on a phone, and one on a screen in the dark, as all have the same colours; `make torture` has all views.
SAMPLE = {(400, "light", kind) for kind in TEXTS} | {(1400, "dark", "checkpoint")}
CASES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.exhaustive)
    for case in ((*view, kind) for view in itertools.product((400, 1400), ("light", "dark")) for kind in TEXTS)
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    found = {kind: folder / f"{kind}.html" for kind in TEXTS}
    model = save_model(folder / "model")
    state = tensorkeep.load(model)
    state["model"]["blocks"][2]["mlp"]["up"] += 0.01
    state["model"]["blocks"][4]["mlp"]["b"] += 1
    state["others"]["more"] = torch.ones(3)
    tensorkeep.save(state, folder / "changed")
    write_page(found["checkpoint"], read_contents(model).page())
    write_page(found["run"], read_run(save_run(folder / "run"), sample=10**9).page())
    write_page(found["difference"], Difference(tensorkeep.diff(model, folder / "changed")).page())
    arms = {**documents.THREE_WAY, MARKUP: (3.0, 2.0, 1.0), LONG: (1.5, 2.0, 0.7), "absent": (1.0, 1.0, 1.0)}
    document = documents.document(arms, runs=2, missing={"absent": ("not-run", "the package is not installed")})
    document["experiment"]["title"] = MARKUP
    document["summary"]["claims"] = documents.with_claims()["summary"]["claims"]
    document["summary"]["warnings"] = [{"text": MARKUP, "remedy": LONG.replace(" ", "")}]
    write_report(documents.write(document, folder / "results"), found["report"])
    write_demo_page(demo_results(), found["demo"])
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Visitor]:
    with opened_browser() as opened:
        yield opened


@pytest.fixture
def visit(browser: Visitor) -> Iterator[Visitor]:
    with without_messages(browser):
        yield browser


def names(page: "Page") -> list[str]:
    return page.locator("[data-table] tbody th").all_inner_texts()


def column(page: "Page", table: str, place: int) -> list[str]:
    rows = page.locator(f"table:has(caption:text-is('{table}')) tbody tr")
    return rows.evaluate_all("(rows, place) => rows.map((row) => row.children[place].innerText)", place)


@pytest.mark.parametrize(("width", "scheme", "kind"), CASES)
def test_a_page_fits_and_is_legible(visit: Visitor, pages: dict[str, Path], width: int, scheme: str, kind: str) -> None:
    page = visit(pages[kind], width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    if kind == "report":
        # Tables that are wider scroll inside their own box.
        scrolls = "[...document.querySelectorAll('.scroll')].some((one) => one.scrollWidth > one.clientWidth)"
        assert page.evaluate(scrolls)
    elif kind == "demo":
        bars = page.evaluate("[...document.querySelectorAll('#speed .track span')].map((bar) => bar.clientWidth)")
        assert 0 < bars[0] < bars[4] <= max(bars)
    else:
        page.locator("[data-table] tbody button").first.click()
        # Hostile names are text.
        assert (page.locator("img").count(), page.locator("script").count()) == (0, 2)
        assert kind != "checkpoint" or any(HOSTILE in name for name in names(page))
    assert page.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)") <= width
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > TEXTS[kind]
    assert min(contrasts)[0] >= 4.5, min(contrasts)


def test_dark_mode_is_dark_and_print_is_not(visit: Visitor, pages: dict[str, Path]) -> None:
    def colours(page: "Page") -> tuple[str, set[str]]:
        fills = "[...document.querySelectorAll('#gains .plot svg text')].map((text) => getComputedStyle(text).fill)"
        return page.evaluate("getComputedStyle(document.body).backgroundColor"), set(page.evaluate(fills))

    page = visit(pages["report"], scheme="dark")
    assert colours(page) == ("rgb(20, 23, 26)", {"rgb(230, 233, 236)", "rgb(163, 173, 183)"})
    light = ("rgb(255, 255, 255)", {"rgb(27, 31, 36)", "rgb(95, 104, 114)"})
    for media in ({"media": "print"}, {"media": "screen", "color_scheme": "light"}):
        page.emulate_media(**media)
        assert colours(page) == light, media


def test_tables_sort_by_mouse_and_by_keyboard(visit: Visitor, pages: dict[str, Path]) -> None:
    page = visit(pages["report"])
    table = "durable save"
    heading = page.locator(f"table:has(caption:text-is('{table}')) thead th").nth(2)
    before = column(page, table, 0)
    assert (before[0], heading.get_attribute("aria-sort")) == ("pytorch", "none")
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
    assert ([float(value.replace(",", "")) for value in values[:-1]], values[-1]) == (numbers[::-1], "-")
    # Units differ from row to row: 436 MB/s is less than 1.95 GB/s.
    page.locator(f"table:has(caption:text-is('{table}')) thead th").nth(7).locator("button").click()
    throughputs = column(page, table, 7)
    assert {text[-4:] for text in throughputs[:-1]} == {"MB/s", "GB/s"}
    assert [column(page, table, 2)[place] for place in range(len(numbers))] == values[:-1]
    page.locator(f"table:has(caption:text-is('{table}')) thead th").nth(0).locator("button").click()
    assert heading.get_attribute("aria-sort") == "none"
    assert sorted(before) == sorted(column(page, table, 0))


@pytest.mark.parametrize(("width", "picture"), [(400, 0.6), (1400, 0.9)])
def test_verdict_and_picture_come_first(visit: Visitor, pages: dict[str, Path], width: int, picture: float) -> None:
    page = visit(pages["report"], width)
    machine, verdict = page.locator("h1 small"), page.locator(".verdict")
    assert machine.inner_text() == "OpenLLaMA-3B, first 100 parameters, float16 on A processor, 2 cores"
    assert verdict.inner_text() == "Of 2 published claims, 1 is reproduced and 1 is confounded on this machine."
    tops = [box.bounding_box()["y"] for box in (page.locator("h1"), verdict, page.locator(".picture"))]
    assert tops == sorted(tops) and tops[-1] < 900 * picture
    # Warnings are folded.
    warnings = page.locator("details.warnings")
    assert warnings.locator("summary").inner_text() == "1 warning"
    assert not warnings.locator("li").is_visible()
    warnings.locator("summary").click()
    assert warnings.locator("li").is_visible()


def test_a_pointer_reads_a_loss(visit: Visitor, tmp_path: Path) -> None:
    file = tmp_path / "training.html"
    curves = {"plain": [[(1, 4.0), (2, 3.0)]] * 2, MARKUP: [[(1, 4.0), (2, 2.5)]] * 2}
    write_report(training(curves, step=0.5), file)
    page = visit(file, 400, "dark")
    chart = page.locator("[data-chart]").nth(1)
    chart.scroll_into_view_if_needed()
    box = chart.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + box["height"] / 2)
    assert chart.locator(".readout").inner_text().startswith("plain 3 at second 1; <img")


def test_everything_can_be_reached_by_keyboard(visit: Visitor, pages: dict[str, Path]) -> None:
    page = visit(pages["report"], 400)
    for box in page.locator(".scroll").all():
        assert box.get_attribute("tabindex") == "0" and box.get_attribute("aria-label")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    for picture in page.locator(".plot svg").all():
        assert picture.get_attribute("role") == "img" and picture.get_attribute("aria-label")


def test_the_page_has_all_sections_and_hostile_names_are_text(visit: Visitor, pages: dict[str, Path]) -> None:
    page = visit(pages["report"])
    headings = page.locator("h2").all_inner_texts()
    assert headings[:2] == ["Claims checked", "Details"]
    assert {"Gains", "Not run, and why", "Machine and state", "Method", "Data"} <= set(headings)
    assert column(page, "Not run", 3) == ["the package is not installed"]
    assert page.locator(".plot svg").count() == 2  # gains, trade-offs
    assert page.locator(".picture .bars").count() == 3
    # Every plot names the model, every row of the map its arm, and every step of the scale has a colour of its own.
    titles = page.locator(".plot-title, .picture > figcaption, .gains caption").all_inner_texts()
    assert ["OpenLLaMA-3B" in title for title in titles] == [True] * 4
    rows = page.locator(".gains tbody tr").all()
    assert [(bool(row.locator("th").inner_text()), row.locator("td.field").count()) for row in rows] == [(True, 4)] * 4
    colours = "[...document.querySelectorAll('.swatch.field')].map((one) => getComputedStyle(one).backgroundColor)"
    assert len(set(page.evaluate(colours))) == 9
    assert page.locator("h1").inner_text().startswith(MARKUP) and page.title().startswith(MARKUP)
    assert (page.locator("img").count(), page.locator("script").count()) == (0, 1)
    assert MARKUP in column(page, "durable save", 0)
    page.get_by_text("Raw samples and the command of every cell").click()
    assert len(column(page, "Every cell", 0)) == 14


def test_the_checks_of_the_page_can_fail(visit: Visitor, pages: dict[str, Path], tmp_path: Path) -> None:
    """A page that is too wide, has too little contrast or requests something fails the checks."""
    text = pages["report"].read_text()
    wide = tmp_path / "wide.html"
    wide.write_text(text.replace("<h2>", "<div style='width:2000px;color:#bbbbbb'>pale</div><h2>", 1))
    page = visit(wide)
    assert page.evaluate("document.documentElement.scrollWidth") > 1400
    assert min(page.evaluate(CONTRASTS))[0] < 2


def test_a_table_is_searched_sorted_and_opened(visit: Visitor, pages: dict[str, Path]) -> None:
    page = visit(pages["checkpoint"])
    count = page.locator(".count")
    total = int(count.inner_text().split()[0])
    assert names(page)[0] == "others.broken"
    page.get_by_role("searchbox").fill("blocks up BFLOAT16")
    assert names(page) == [f"model.blocks.{layer}.mlp.up" for layer in range(6)]
    assert count.inner_text() == f"6 tensors, of {total}"
    page.get_by_role("searchbox").fill("no such tensor")
    assert page.get_by_text("No tensor matches.").is_visible()
    page.get_by_role("searchbox").fill("others")
    heading = page.locator("[data-table] thead th", has_text="max")
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert names(page)[0] == "others.uint8"
    heading.get_by_role("button").press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    row = page.get_by_role("button", name="others.broken")
    row.click()
    assert (row.get_attribute("aria-expanded"), page.locator(".more svg.big path").count()) == ("true", 1)
    assert "NaN\n1" in page.locator(".more").inner_text()
    row.click()
    assert page.locator(".more").count() == 0


def test_the_map_lists_tensors_and_shows_stored_or_raw_bytes(visit: Visitor, pages: dict[str, Path]) -> None:
    page = visit(pages["checkpoint"])
    page.locator('#map-0 [data-search="model.blocks.3.mlp. bfloat16"]').click()
    assert names(page) == ["model.blocks.3.mlp.up"]
    raw = page.get_by_role("button", name="raw bytes")
    assert [page.locator(each).is_visible() for each in ("#map-0", "#map-1")] == [True, False]
    raw.click()
    assert [page.locator(each).is_visible() for each in ("#map-0", "#map-1")] == [False, True]
    assert raw.get_attribute("aria-pressed") == "true"
    # A bfloat16 weight is smaller than the float32 moments of the same shape.
    sizes = [
        page.locator(f'#map-1 [data-search="{name}"]').first.bounding_box()
        for name in ("model.blocks.3.mlp.up", "optimizer.state.3.exp_avg_sq")
    ]
    weight, moments = (box["width"] * box["height"] for box in sizes)
    assert 1.6 < moments / weight < 2.6


def test_a_pointer_reads_a_chart(visit: Visitor, pages: dict[str, Path]) -> None:
    page = visit(pages["run"])
    chart = page.locator("[data-chart]").first
    box = chart.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + box["height"] / 2)
    assert chart.locator(".readout").inner_text() == "training 0.5882 at step 580; validation 0.5 at step 600"
    page.mouse.move(0, 0)
    assert chart.locator(".readout").inner_text() == ""


def page_of(state: dict[str, Any], folder: Path) -> Path:
    tensorkeep.save(state, folder / "checkpoint")
    write_page(folder / "page.html", read_contents(folder / "checkpoint").page())
    return folder / "page.html"


def test_many_rows_are_shown_in_pages(visit: Visitor, tmp_path: Path) -> None:
    state = {f"layer{number:04d}": torch.tensor(float(number)) for number in range(130)}
    page = visit(page_of(state, tmp_path))
    assert (len(names(page)), page.locator(".count").inner_text()) == (50, "1 to 50 of 130 tensors")
    page.get_by_role("button", name="Next").click()
    page.get_by_role("button", name="Next").click()
    assert page.locator(".count").inner_text() == "101 to 130 of 130 tensors"
    assert page.get_by_role("button", name="Next").is_disabled()
    page.get_by_role("button", name="Previous").click()
    assert names(page)[0] == "layer0050"


def test_a_table_that_leaves_rows_out_says_so(visit: Visitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "drawn_table", partial(drawn_table, limit=2000))
    state = {f"layer{number:04d}": torch.ones(number) for number in range(1, 101)}
    page = visit(page_of(state, tmp_path), 400)
    listed = len(names(page))
    assert listed < 50
    assert page.locator(".count").inner_text() == f"{listed} listed tensors; {100 - listed} more are not listed"
    page.get_by_role("searchbox").fill("layer0001")
    assert page.get_by_text("No listed tensor matches.").is_visible()
    assert page.get_by_text(f"Listed here: {listed} of 100 tensors").is_visible()


def test_the_empty_checkpoint_has_a_page(visit: Visitor, tmp_path: Path) -> None:
    assert visit(page_of({"step": 1}, tmp_path), 400).locator(".count").inner_text() == "0 tensors"
