"""Every Python block of the documentation runs, page by page, in an empty folder."""

import importlib
import re
from pathlib import Path

import pytest
from torch import distributed

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if re.search(r"^```python$", page.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_the_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, object] = {"__name__": "page"}
    try:
        for block in blocks:
            exec(compile(block, str(page), "exec"), names)
    finally:
        # Pages on many ranks run as one, and leave that to the end of the program.
        if distributed.is_initialized():
            distributed.destroy_process_group()


def test_links_of_the_page_resolve() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_page_of_measurements_matches_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = importlib.import_module("page")
    assert page.PAGE.read_text() == page.page()
