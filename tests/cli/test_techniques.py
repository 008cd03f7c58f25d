"""Techniques on the command line: the list, and the errors for wrong ones before anything is written."""

import json
import os
from pathlib import Path

import pytest

from cli.calls import Call, RunJson
from tensorkeep.cli.trainer import train as techniques
from tensorkeep.testing.cases import case
from tensorkeep.train.techniques.base import TECHNIQUE_CLASSES, Machine
from tensorkeep.train.techniques.stack import COMBINATIONS

TRAIN = ["train", "shakespeare-char-cpu", "--loop.device", "cpu"]


def test_mistyped_techniques_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr("tensorkeep.train.techniques.base.find_spec", lambda _: None)
    (tmp_path / "mine.toml").write_text('[train.techniques]\ncompil = "off"\n')
    shown = call(*TRAIN, "-C", tmp_path / "mine.toml", "--out", tmp_path / "run", code=7)
    assert "there is no technique named 'compil'" in shown.err
    shown = call(*TRAIN, "--out", tmp_path / "run", "--technique", "low-bit-optimizer", code=7)
    assert "low-bit-optimizer needs the package 'torchao', which is missing: pip install" in shown.err
    assert not (tmp_path / "run").exists()


def test_named_techniques_are_turned_on(run_json: RunJson) -> None:
    for words, on in (
        ("--technique fused-optimizer,fused-optimizer", {"fused-optimizer": {}}),
        ("--technique C", {name: {} for name in COMBINATIONS["C"]}),
        ("--technique compile --techniques.compile off", {}),
        ("--techniques.mixed-precision.dtype bf16 --technique mixed-precision", {"mixed-precision": {"dtype": "bf16"}}),
    ):
        with case(words):
            settings = run_json(*TRAIN, *words.split(), "--list-settings")
            assert settings["techniques"] == on


def test_the_list_shows_needs_effect_and_settings(run_json: RunJson, call: Call) -> None:
    found = run_json("train", "--list-techniques", "--loop.device", "cpu")
    assert [each["name"] for each in found["techniques"]] == TECHNIQUE_CLASSES.names()
    assert found["combinations"] == json.loads(json.dumps(COMBINATIONS))
    lines = call("train", "--list-techniques", "--loop.device", "cpu").out.splitlines()
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

    for name in TECHNIQUE_CLASSES.names():
        each = techniques.described(name, Machine(torch.device("cpu")))
        techniques.print_technique(each)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{each['name']} ({each['kind']})"
        assert all(len(line) <= 60 for line in lines)
