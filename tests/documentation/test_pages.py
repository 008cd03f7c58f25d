"""Every block of Python and every command of the documentation runs, page by page, in an empty folder."""

import importlib
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from documentation.blocks import COMMANDS, PACKAGES, PYTHON, ROOT, blocks, commands, extras_of, pages, runnable
from documentation.prepared import PREPARED, training_loop
from documentation.running import as_tested, run, with_stand_ins

NOT_RUN = {
    **{f"docs/how-to/{name}.md": 1 for name in ("bench-training", "show", "techniques", "train")},
    "docs/how-to/cloud.md": 2,
}
"""How many blocks of commands of each page say that the tests do not run them."""

SAMPLE = {
    *("README.md", *(f"packages/{name}/README.md" for name in ("tensorkeep", "tensorkeep-formats"))),
    *("docs/start.md", "docs/tutorials/first-checkpoint.md", "docs/tutorials/resume-a-run.md"),
}
"""What everyone reads first: `make test` runs these pages; CI runs all of them when documents or commands change."""

SERVICES = {"s3://bucket": "bucket", "from huggingface_hub": "hub", "import wandb": "trackers"}
"""A word in the blocks of a page -> the fixture that its blocks use."""

RUN_TWICE = {"README.md", "index.md"}
"""Files with programs that a reader tries first."""

RUN = [page for page in pages() if any(runnable(page))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_page(page: Path, languages: set[str]) -> None:
    """Run the blocks of a page in these languages, one after the other, as its reader would."""
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for number, block in enumerate(runnable(page), 3):
            if block.language not in languages:
                continue
            if block.language in PYTHON:
                if block.language == "py":
                    names |= training_loop(step=100 * number)
                # Errors name the line of the page.
                code = compile("\n" * (block.line - 1) + with_stand_ins(block.text), str(page), "exec")
                exec(code, names)
            else:
                for command in commands(block):
                    run(command, name_of(page))
    finally:
        # Pages on many ranks run as one, and leave that to the end of the program.
        if distributed.is_initialized():
            distributed.destroy_process_group()


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:::(torch|lightning|transformers)[.].*")  # their advice
@pytest.mark.usefixtures("folder", "quick_training", "without_plots")
@pytest.mark.parametrize(
    "page",
    [page if name_of(page) in SAMPLE else pytest.param(page, marks=pytest.mark.exhaustive) for page in RUN],
    ids=name_of,
)
def test_the_blocks_of_the_page_run(page: Path, request: pytest.FixtureRequest) -> None:
    for word, service in SERVICES.items():
        if any(word in block.text for block in runnable(page)):
            request.getfixturevalue(service)
    for make in PREPARED.get(name_of(page), ()):
        make()
    run_page(page, PYTHON | COMMANDS)
    # A reader tries a program again in the same folder.
    if page.name in RUN_TWICE:
        run_page(page, PYTHON)


def test_blocks_that_do_not_run_say_why_and_those_of_commands_have_commands() -> None:
    found = [(name_of(page), block) for page in pages() for block in blocks(page)]
    assert Counter(name for name, block in found if block.reason_not_to_run) == NOT_RUN
    assert {*SAMPLE, *NOT_RUN, *PREPARED} <= {name_of(page) for page in pages()}
    for name, block in found:
        assert block.language not in COMMANDS or commands(block), f"{name}, line {block.line}"


def test_commands_are_made_shorter() -> None:
    assert as_tested("tensorkeep info run@1200  # a step") == "tensorkeep info run@12"
    assert as_tested("tensorkeep tune checkpoint runs") == "tensorkeep tune checkpoint runs --seconds 1 --size 64MB"
    assert "--loop.steps 5 " in as_tested("tensorkeep train shakespeare-char-cpu --loop.steps 500 --out x")


@pytest.mark.integration
def test_a_command_that_fails_fails_the_test(folder: Path) -> None:
    page = folder / "page.md"
    pinned = "./packages/tensorkeep -c constraints.txt"
    installations = (
        pinned,
        "tensorkeep",
        ".",
        "./packages/chatgot",
        "./packages/missing",
        "'./packages/tensorkeep[unknown]'",
    )
    for text in ("tensorkeep info missing", "false | true", *(f"pip install {each}" for each in installations)):
        page.write_text(f"```console\n$ {text}\n```\n")
        (block,) = runnable(page)
        with pytest.raises(AssertionError):
            run(commands(block)[0], "page.md")


def test_links_resolve_and_the_start_pages_link_to_every_page_and_explain_every_package_and_extra() -> None:
    for page in pages():
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([\w./-]+\.md)\)", index.read_text())}
    readme, packages = ROOT / "README.md", set(PACKAGES.glob("*/README.md"))
    assert set(pages()) - linked == {readme, index, *packages}
    assert all(f"({path.relative_to(ROOT)})" in readme.read_text() for path in packages)
    names = {path.parent.name for path in packages}
    names |= {f"{name}[{extra}]" for name in names for extra in extras_of(name)}
    assert set(re.findall(r"^\| `(.+?)` \|", (ROOT / "docs/start.md").read_text(), re.MULTILINE)) == names


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(PACKAGES / "tensorkeep-bench/benchmarks"))
    return importlib.import_module


def test_the_page_of_measurements_and_the_chart_match_the_results(benchmarks: Callable[[str], Any]) -> None:
    page, chart = map(benchmarks, ("page", "chart"))
    assert (page.PAGE.read_text(), chart.CHART.read_text()) == (page.page(), chart.chart())


def test_the_recording_is_drawn_from_its_commands(benchmarks: Callable[[str], Any]) -> None:
    recording = benchmarks("recording")
    svg = recording.RECORDING.read_text()
    lines = recording.shown(svg)
    assert svg == recording.drawn(lines)
    assert [line for line in lines if line.startswith("$ ")] == [f"$ {command}" for command in recording.COMMANDS]


@pytest.mark.integration
@pytest.mark.exhaustive
def test_the_commands_of_the_recording_print_what_it_shows(tmp_path: Path, benchmarks: Callable[[str], Any]) -> None:
    recording = benchmarks("recording")
    assert recording.record(tmp_path) == recording.shown(recording.RECORDING.read_text())


def test_texts_of_errors_that_are_explained_are_those_of_the_source() -> None:
    source = "".join(path.read_text() for path in sorted(PACKAGES.glob("*/src/**/*.py")))
    source = re.sub(r'"\s*f?"', "", source)  # texts on several lines
    titles = re.findall(r"^### `(.+)`$", (ROOT / "docs/how-to/troubleshoot.md").read_text(), re.MULTILINE)
    assert len(titles) > 10
    for title in titles:
        for piece in title.split("…"):
            assert piece.strip() in source, title
