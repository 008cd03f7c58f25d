"""``tensorkeep show``: what is printed, the page, and errors."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from show.shown_runs import save_run
from tensorkeep.cli import show as module
from tensorkeep.cli.main import main


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_checkpoint_is_summed_up_and_its_page_named_like_it(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(first)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{first}: native"
    assert "4 tensors with" in lines[1]
    assert lines[2] == "All values are finite: neither NaN nor infinity was found."
    assert any(line.startswith("model ") for line in lines)
    assert lines[-1].startswith("wrote first.html (")
    assert [path.name for path in tmp_path.iterdir()] == ["first.html"]


def test_json_has_the_statistics_of_every_tensor(first: Path, run_json: Callable[..., tuple[int, Any]]) -> None:
    code, document = run_json("show", first, "--out", "page.html")
    assert (code, document["kind"], document["page"]) == (0, "checkpoint", "page.html")
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert tensors["model.bias"]["statistics"]["zeros"] == 7
    assert tensors["model.lm_head.weight"]["alias_of"] == "model.wte.weight"
    assert tensors["model.lm_head.weight"]["statistics"] is None
    assert document["zero"] == ["model.bias"]
    assert document["sample"] == {"every": 1, "nbytes": 8192 + 28 + 16384, "total": 8192 + 28 + 16384}


def test_a_run_is_shown(tmp_path: Path, run_json: Callable[..., tuple[int, Any]]) -> None:
    save_run(tmp_path / "run", steps=3)
    code, document = run_json("show", "run")
    assert (code, document["kind"], document["page"]) == (0, "run", "run.html")
    assert [step["number"] for step in document["steps"]] == [100, 200, 300]
    assert len(document["motion"]["moved"]) == 6
    assert main(["show", "run@200"]) == 0
    assert (tmp_path / "run-200.html").exists()


def test_two_checkpoints_are_compared(first: Path, second: Path, run_json: Callable[..., tuple[int, Any]]) -> None:
    code, document = run_json("show", first, second)
    assert (code, document["kind"], document["page"]) == (0, "difference", "first-and-second.html")
    assert [each["name"] for each in document["changed"]] == ["model.bias"]


@pytest.mark.parametrize("content", [b"mine", b'<html lang="en" data-made-by="tensorkeep-report">'])
def test_only_such_a_page_is_replaced(
    content: bytes, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(first), "--out", "page.html", "-q"]) == 0
    assert main(["show", str(first), "--out", "page.html", "-q"]) == 0
    Path("page.html").write_bytes(content)
    assert main(["show", str(first), "--out", "page.html"]) == 6
    assert Path("page.html").read_bytes() == content
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "error: page.html: exists and is not a page of tensorkeep show\ngive another --out\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["absent"], 5),
        (["{first}", "--out", "page.txt"], 2),
        (["{first}", "{second}", "--format", "native"], 2),
        (["{first}", "--sample", "much"], 2),
        (["{first}", "--out", "absent.html/page.html", "--memory-budget", "1MiB"], 2),
    ],
)
def test_errors_write_no_page(
    arguments: list[str], code: int, first: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *(each.format(first=first, second=second) for each in arguments)]) == code
    assert not list(tmp_path.iterdir())
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_damaged_tensor_is_named(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(damaged)]) == 4
    assert "tensor 'model.w'" in capsys.readouterr().err


def test_values_that_are_not_finite_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensorkeep.save({"w": torch.tensor([1.0, float("inf")])}, tmp_path / "x")
    assert main(["show", "x"]) == 0
    assert "1 tensor holds values that are not finite: w (1 infinite)." in capsys.readouterr().out


def test_the_package_of_the_page_is_named_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["show", "absent"]) == 7
    assert capsys.readouterr().err.splitlines()[1] == "in a clone of Tensorkeep: pip install '.[show]'"


def test_a_browser_is_opened_only_on_request(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(module.webbrowser, "open", opened.append)
    assert main(["show", str(first), "-q"]) == 0
    assert opened == []
    assert main(["show", str(first), "-q", "--open"]) == 0
    assert opened == [Path("first.html").absolute().as_uri()]
