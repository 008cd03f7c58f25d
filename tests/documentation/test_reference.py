"""The generated pages of the site: every public name, every error and every command, each with an example."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

import tensorkeep
from documentation.blocks import ROOT, blocks
from tensorkeep.cli.commands import COMMANDS, EXAMPLES
from tensorkeep.cli.main import build_app
from tensorkeep.cli.output import EVERYWHERE

pytest.importorskip("sphinx", reason="the extra [docs] is not installed")
sys.path.append(str(ROOT / "docs" / "site"))
links, reference = map(importlib.import_module, ("links", "reference"))

APP = build_app()
LISTED = reference.listed_names((ROOT / "docs/reference/api.md").read_text())
ERRORS_PAGE = ROOT / "docs/reference/errors.md"


def test_every_public_name_is_listed_once() -> None:
    listed = [name.removeprefix("tensorkeep.") for entry in LISTED for name in entry]
    errors = reference.listed_errors(ERRORS_PAGE.read_text())
    assert len(listed) == len(set(listed)) and set(tensorkeep.__all__) - {*listed, *errors} == {"__version__"}
    classes = {name for name in tensorkeep.__all__ if name.endswith(("Error", "Warning"))}
    assert sorted(errors) == sorted(classes)


@pytest.mark.parametrize("entry", LISTED, ids=lambda entry: entry[0])
def test_the_page_of_a_name_has_an_example(entry: list[str]) -> None:
    names = [each for name in entry for each in reference.members(name)]
    found = [reference.resolved(name) for name in names]
    found += [member for each in found if inspect.isclass(each) for member in vars(each).values()]
    assert any(">>> " in (inspect.getdoc(each) or "") for each in found)
    page = reference.api_page(entry)
    assert all(f":: {name}\n" in page for name in names)


def test_every_error_has_an_example() -> None:
    lines = ERRORS_PAGE.read_text().splitlines()
    headings = [number for number, line in enumerate(lines, 1) if line.startswith("## ")]
    starts = [block.line for block in blocks(ERRORS_PAGE) if block.language == "python"]
    for first, end in zip(headings, [*headings[1:], len(lines)], strict=True):
        assert any(first < start < end for start in starts), lines[first - 1]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_a_command_has_its_options_and_examples(command: str) -> None:
    page = reference.command_page(APP, command)
    assert all(f"   $ {example}\n" in f"{page}\n" for example in EXAMPLES[command])
    found = reference.described(APP, command)
    names = [option.names for panel, options in found.panels.items() if panel != EVERYWHERE.name for option in options]
    assert all(f".. option:: {', '.join(each)}\n" in page for each in names)
    assert found.usage.startswith("tensorkeep ") and len(found.description) > 20


def test_the_contents_of_the_site_are_those_of_the_start_page_and_text_of_the_help_is_escaped() -> None:
    start = "# Start\n\n[a](x.md)\n\n## One\n\n* [b](how-to/y.md), [c](z.md)\n\n## Two\n\nNone.\n"
    page = reference.with_contents(start)
    assert page.endswith(":hidden:\n:caption: One\n\nhow-to/y\nz\n```\n")
    assert page.count("toctree") == 1
    assert reference._escaped("a*b_c `x*y` <d>|") == r"a\*b\_c ``x*y`` \<d\>\|"


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text("<h1 id='top'>b</h1>")
    good = "<a href='b.html#top'>b</a><a href='#'>up</a><a href='https://host.example/x'>far</a><img src='b.html'>"
    (tmp_path / "a.html").write_text(good)
    assert links.problems(tmp_path) == []
    bad = "<a href='c.html'>c</a><a href='b.html#no'>b</a><script src='https://host.example/x.js'></script>"
    (tmp_path / "a.html").write_text(bad)
    expected = ["c.html does not exist", "b.html#no has an anchor that does not exist"]
    expected += ["https://host.example/x.js is loaded from another host"]
    assert [line.partition(" ")[2] for line in links.problems(tmp_path)] == expected
    assert links.problems(tmp_path / "nothing") == [f"{tmp_path / 'nothing'}: no pages"]
