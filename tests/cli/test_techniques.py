"""Techniques on the command line: the list, and the errors for wrong ones before anything is written."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorkeep.cli import list_techniques as techniques
from tensorkeep.cli.main import main
from tensorkeep.train.techniques.base import TECHNIQUE_CLASSES
from tensorkeep.train.techniques.requirements import Machine
from tensorkeep.train.techniques.stack import COMBINATIONS

TRAIN = ["train", "shakespeare-char-cpu", "--loop.device", "cpu"]


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--technique", "compil"], 7, "there is no technique named 'compil'\ndid you mean 'compile'?"),
        (["--technique", "fused_optimizer"], 7, "did you mean 'fused-optimizer'?"),
        (["--technique", "b"], 7, "there is no technique named 'b'\ndid you mean the combination? --technique B"),
        (["--techniques.A", "on"], 7, "did you mean the combination? --technique A"),
        (["--techniques.compil", "off"], 7, "there is no technique named 'compil'\ndid you mean 'compile'?"),
        (["--techniques.compil.mode", "default"], 7, "there is no technique named 'compil'"),
        (["--technique", ""], 2, "--technique '' names no technique\nomit it, or give a name"),
        (["--technique", " , "], 2, "--technique ' , ' names no technique"),
        (["--technique", "A", "--technique", "B"], 2, "--technique specified multiple times"),
        (
            ["--technique", "fused-optimizer,low-bit-optimizer"],
            2,
            "low-bit-optimizer and fused-optimizer cannot be combined: ",
        ),
        (["--technique", "C,activation-swapping"], 2, "cannot be combined: checkpointed blocks save nothing"),
        (["--technique", "cuda-graphs"], 7, "cuda-graphs needs a CUDA device; the run is on cpu"),
        (["--technique", "ddp"], 7, "ddp needs torchrun: torchrun --nproc-per-node 2 -m tensorkeep train"),
        (["--techniques.gradient-accumulation.batches", "0"], 2, "gradient-accumulation: batches is '0'"),
        (["--techniques.gradient-accumulation.batches", "two"], 2, "gradient-accumulation: batches is 'two'"),
        (
            ["--techniques.gradient-accumulation.parts", "2"],
            2,
            "has no setting 'parts'\nits settings: batches",
        ),
        (
            ["--techniques.compile.mode", "fast"],
            2,
            "compile: mode is 'fast'\ngive one of default",
        ),
        (["--techniques.compile", "yes"], 2, 'techniques.compile is \'yes\'\ngive "on", "off", or a setting'),
    ],
)
def test_wrong_techniques_are_refused_before_anything_is_written(
    words: list[str], code: int, expected: str, tmp_path: Path, check_refused: Callable[..., list[str]]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 60)
    arguments = [*TRAIN, "--data", str(text), "--out", str(tmp_path / "run"), *words]
    assert len(check_refused(arguments, code, expected)) == 2
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_reported_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tensorkeep.train.techniques.requirements.find_spec", lambda _: None)
    assert main([*TRAIN, "--out", str(tmp_path / "run"), "--technique", "low-bit-optimizer"]) == 7
    assert "low-bit-optimizer needs the package 'torchao', which is missing: pip install" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "on"),
    [
        (["--technique", "fused-optimizer,fused-optimizer"], {"fused-optimizer": {}}),
        (["--technique", "C"], {name: {} for name in COMBINATIONS["C"]}),
        (["--technique", "compile", "--techniques.compile", "off"], {}),
        (
            ["--techniques.mixed-precision.dtype", "bf16", "--technique", "mixed-precision"],
            {"mixed-precision": {"dtype": "bf16"}},
        ),
    ],
)
def test_named_techniques_are_turned_on(
    words: list[str], on: dict[str, Any], run_json: Callable[..., tuple[int, Any]]
) -> None:
    code, settings = run_json(*TRAIN, *words, "--list-settings")
    assert code == 0
    assert settings["techniques"] == on


def test_a_mistyped_technique_in_a_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text('[train.techniques]\ncompil = "off"\n')
    assert main([*TRAIN, "-C", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "run")]) == 7
    assert "there is no technique named 'compil'" in capsys.readouterr().err


def test_the_list_shows_needs_effect_and_settings(
    run_json: Callable[..., tuple[int, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run_json("train", "--list-techniques", "--loop.device", "cpu")
    assert code == 0
    assert [each["name"] for each in found["techniques"]] == TECHNIQUE_CLASSES.names()
    assert found["combinations"] == json.loads(json.dumps(COMBINATIONS))
    assert main(["train", "--list-techniques", "--loop.device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    here, elsewhere = lines.index("Can run here"), lines.index("Cannot run here")
    for each in found["techniques"]:
        at = lines.index(f"{each['name']} ({each['kind']})")
        assert (here < at < elsewhere) is (each["lacks"] is None)
        own = lines[at : lines.index("", at)]
        assert f"    effect: {each['effect']}" in own
        assert each["lacks"] is None or f"    {each['lacks']}" in own
        assert all(any(f"{name} = " in line for line in own) for name in each["settings"])


def test_the_list_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((60, 24)))
    import torch

    for each in techniques._described(Machine(torch.device("cpu"))):
        techniques._print_one(each)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{each['name']} ({each['kind']})"
        assert all(len(line) <= 60 for line in lines)
