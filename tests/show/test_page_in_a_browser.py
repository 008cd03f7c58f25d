"""The pages in a real browser: layout, tables, contrast in both colour schemes, no errors and no requests."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tensorkeep
from browser import CONTRASTS, opened_browser, visits
from show.shown_runs import HOSTILE, save_model, save_run
from tensorkeep.show import checkpoint_page as checkpoint_page_module
from tensorkeep.show.checkpoint import read_contents
from tensorkeep.show.checkpoint_page import checkpoint_page
from tensorkeep.show.difference_page import difference_page
from tensorkeep.show.page import drawn_table, write_page
from tensorkeep.show.run import read_run
from tensorkeep.show.run_page import run_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

KINDS = ("checkpoint", "run", "difference")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    model = save_model(folder / "model")
    state = tensorkeep.load(model)
    state["model"]["blocks"][2]["mlp"]["up"] += 0.01
    state["model"]["blocks"][4]["mlp"]["b"] += 1
    state["others"]["more"] = torch.ones(3)
    tensorkeep.save(state, folder / "changed")
    texts = {
        "checkpoint": checkpoint_page(read_contents(model)),
        "run": run_page(read_run(save_run(folder / "run"), sample=10**9)),
        "difference": difference_page(tensorkeep.diff(model, folder / "changed")),
    }
    for kind, text in texts.items():
        write_page(folder / f"{kind}.html", text)
    return {kind: folder / f"{kind}.html" for kind in texts}


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with opened_browser() as opened:
        yield opened


@pytest.fixture
def visit(browser: "Browser") -> Iterator[Any]:
    with visits(browser) as call:
        yield call


# A phone and a screen, each with one of the colour schemes; `make torture` exchanges them as well.
VIEWS = [
    (400, "light"),
    (1400, "dark"),
    pytest.param(400, "dark", marks=pytest.mark.slow),
    pytest.param(1400, "light", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_a_page_fits_and_is_legible(visit: Any, pages: dict[str, Path], width: int, scheme: str, kind: str) -> None:
    page = visit(width, scheme, pages[kind])
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.locator("[data-table] tbody button").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.body.scrollWidth") <= width
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 40
    assert min(contrasts)[0] >= 4.5, min(contrasts)


def names(page: "Page") -> list[str]:
    return page.locator("[data-table] tbody th").all_inner_texts()


def test_a_table_is_searched_sorted_and_opened(visit: Any, pages: dict[str, Path]) -> None:
    page = visit(file=pages["checkpoint"])
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
    assert row.get_attribute("aria-expanded") == "true"
    assert page.locator(".more svg.big path").count() == 1
    assert "NaN\n1" in page.locator(".more").inner_text()
    row.click()
    assert page.locator(".more").count() == 0


def test_a_cell_of_the_map_lists_its_tensors(visit: Any, pages: dict[str, Path]) -> None:
    page = visit(file=pages["checkpoint"])
    page.locator('#map-0 [data-search="model.blocks.3.mlp. bfloat16"]').click()
    assert names(page) == ["model.blocks.3.mlp.up"]


def test_areas_are_stored_or_raw_bytes(visit: Any, pages: dict[str, Path]) -> None:
    page = visit(file=pages["checkpoint"])
    raw = page.get_by_role("button", name="raw bytes")
    assert (page.locator("#map-0").is_visible(), page.locator("#map-1").is_visible()) == (True, False)
    raw.click()
    assert (page.locator("#map-0").is_visible(), page.locator("#map-1").is_visible()) == (False, True)
    assert raw.get_attribute("aria-pressed") == "true"
    # A bfloat16 weight is smaller than the float32 moments of the same shape.
    sizes = [
        page.locator(f'#map-1 [data-search="{name}"]').first.bounding_box()
        for name in ("model.blocks.3.mlp.up", "optimizer.state.3.exp_avg_sq")
    ]
    weight, moments = (box["width"] * box["height"] for box in sizes if box is not None)
    assert 1.6 < moments / weight < 2.6


def test_a_pointer_reads_a_chart(visit: Any, pages: dict[str, Path]) -> None:
    page = visit(file=pages["run"])
    chart = page.locator("[data-chart]").first
    box = chart.locator("svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + box["height"] / 2)
    assert chart.locator(".readout").inner_text() == "training 0.5882 at step 580; validation 0.5 at step 600"
    page.mouse.move(0, 0)
    assert chart.locator(".readout").inner_text() == ""


def test_hostile_names_are_text(visit: Any, pages: dict[str, Path]) -> None:
    for kind in KINDS:
        page = visit(file=pages[kind])
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 2
    page = visit(file=pages["checkpoint"])
    assert any(HOSTILE in name for name in names(page))


def test_many_rows_are_shown_in_pages(visit: Any, tmp_path: Path) -> None:
    state = {f"layer{number:04d}": torch.tensor(float(number)) for number in range(130)}
    tensorkeep.save(state, tmp_path / "many")
    write_page(tmp_path / "many.html", checkpoint_page(read_contents(tmp_path / "many")))
    page = visit(file=tmp_path / "many.html")
    assert len(names(page)) == 50
    assert page.locator(".count").inner_text() == "1 to 50 of 130 tensors"
    page.get_by_role("button", name="Next").click()
    page.get_by_role("button", name="Next").click()
    assert page.locator(".count").inner_text() == "101 to 130 of 130 tensors"
    assert page.get_by_role("button", name="Next").is_disabled()
    page.get_by_role("button", name="Previous").click()
    assert names(page)[0] == "layer0050"


def test_a_table_that_leaves_rows_out_says_so(visit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_page_module, "drawn_table", partial(drawn_table, limit=2000))
    tensorkeep.save({f"layer{number:04d}": torch.ones(number) for number in range(1, 101)}, tmp_path / "many")
    write_page(tmp_path / "many.html", checkpoint_page(read_contents(tmp_path / "many")))
    page = visit(400, file=tmp_path / "many.html")
    listed = len(names(page))
    assert listed < 50
    assert page.locator(".count").inner_text() == f"{listed} listed tensors; {100 - listed} more are not listed"
    page.get_by_role("searchbox").fill("layer0001")
    assert page.get_by_text("No listed tensor matches.").is_visible()
    assert page.get_by_text(f"Listed here: {listed} of 100 tensors").is_visible()


def test_the_empty_checkpoint_has_a_page(visit: Any, tmp_path: Path) -> None:
    tensorkeep.save({"step": 1}, tmp_path / "empty")
    write_page(tmp_path / "empty.html", checkpoint_page(read_contents(tmp_path / "empty")))
    page = visit(400, file=tmp_path / "empty.html")
    assert page.locator(".count").inner_text() == "0 tensors"
