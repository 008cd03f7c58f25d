"""``tensorkeep show``: what is printed, the page, and errors."""

import sys
from pathlib import Path

import pytest
import torch

import tensorkeep
from command_line import Call, RunJson
from pages.shown_runs import save_run
from tensorkeep.cli import show as module
from tensorkeep.cli.main import main
from tensorkeep.testing.cases import case


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_checkpoint_is_summed_up_and_names_its_page(first: Path, tmp_path: Path, call: Call, run_json: RunJson) -> None:
    lines = call("show", first).out.splitlines()
    assert lines[0] == f"{first}: native"
    assert "4 tensors with" in lines[1]
    assert lines[2] == "All values are finite: neither NaN nor infinity was found."
    assert any(line.startswith("model ") for line in lines)
    assert lines[-1].startswith("wrote first.html (")
    assert [path.name for path in tmp_path.iterdir()] == ["first.html"]
    # The document has the statistics of every tensor.
    document = run_json("show", first, "--out", "page.html")
    assert (document["kind"], document["page"]) == ("checkpoint", "page.html")
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert tensors["model.bias"]["statistics"]["zeros"] == 7
    alias = tensors["model.lm_head.weight"]
    assert (alias["alias_of"], alias["statistics"]) == ("model.wte.weight", None)
    assert document["zero"] == ["model.bias"]
    assert document["sample"] == {"every": 1, "nbytes": 8192 + 28 + 16384, "total": 8192 + 28 + 16384}


def test_a_run_is_shown_and_checkpoints_compared(first: Path, second: Path, tmp_path: Path, run_json: RunJson) -> None:
    document = run_json("show", first, second)
    assert (document["kind"], document["page"]) == ("difference", "first-and-second.html")
    assert [each["name"] for each in document["changed"]] == ["model.bias"]
    save_run(tmp_path / "run", steps=3)
    document = run_json("show", "run")
    assert (document["kind"], document["page"]) == ("run", "run.html")
    assert [step["number"] for step in document["steps"]] == [100, 200, 300]
    assert len(document["motion"]["moved"]) == 6
    save_run(tmp_path / "other", steps=2)
    document = run_json("show", "run", "other")
    assert (document["kind"], document["page"]) == ("runs", "run-and-other.html")
    assert [len(run["steps"]) for run in document["runs"]] == [3, 2]
    # The weights of two runs are compared by their steps.
    assert run_json("show", "run@latest", "other")["kind"] == "difference"
    assert main(["show", "run@200"]) == 0
    assert (tmp_path / "run-200.html").exists()


def test_only_such_a_page_is_replaced(first: Path, call: Call) -> None:
    for _ in range(2):
        call("show", first, "--out", "page.html", "-q")
    error = "error: page.html: exists and is not a page of tensorkeep show\ngive another --out\n"
    for content in (b"mine", b'<html lang="en" data-made-by="tensorkeep-report">'):
        Path("page.html").write_bytes(content)
        assert call("show", first, "--out", "page.html", code=6) == ("", error)
        assert Path("page.html").read_bytes() == content


def test_errors_write_no_page(first: Path, second: Path, tmp_path: Path, call: Call) -> None:
    for arguments, code in (
        (["absent"], 5),
        (["{first}", "--out", "page.txt"], 2),
        (["{first}", "{second}", "--format", "native"], 2),
        (["{first}", "absent"], 5),
        (["{first}", "--sample", "much"], 2),
        (["{first}", "--out", "absent.html/page.html", "--memory-budget", "1MiB"], 2),
    ):
        with case(arguments):
            shown = call("show", *(each.format(first=first, second=second) for each in arguments), code=code)
            assert not list(tmp_path.iterdir())
            assert len(shown.err.splitlines()) == 2


def test_damaged_tensors_and_values_that_are_not_finite_are_named(damaged: Path, tmp_path: Path, call: Call) -> None:
    assert "tensor 'model.w'" in call("show", damaged, code=4).err
    tensorkeep.save({"w": torch.tensor([1.0, float("inf")])}, tmp_path / "x")
    assert "1 tensor holds values that are not finite: w (1 infinite)." in call("show", "x").out


def test_the_package_of_the_page_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert (
        call("show", "absent", code=7).err.splitlines()[1]
        == "in a clone of Tensorkeep: pip install './packages/tensorkeep[show]'"
    )


def test_a_browser_is_opened_only_on_request(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(module.webbrowser, "open", opened.append)
    assert main(["show", str(first), "-q"]) == 0
    assert opened == []
    assert main(["show", str(first), "-q", "--open"]) == 0
    assert opened == [Path("first.html").absolute().as_uri()]
