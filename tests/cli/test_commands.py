"""The output of each command, as text and as JSON."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep.checkpoint.load import verify as verify_module
from tensorkeep.cli import verify as verify_command
from tensorkeep.cli.main import main
from tensorkeep.cli.text import Table, printable
from tensorkeep.codecs import coder

Run = Callable[..., tuple[int, Any]]


def test_info(first: Path, capsys: pytest.CaptureFixture[str], run_json: Run) -> None:
    assert main(["info", str(first), "--largest", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{first}: native ")
    assert "4 tensors, 8,199 elements" in text
    assert text.endswith("metadata:\nkey  value\nrun  unit\n")
    assert text.count("optimizer.exp_avg") == 1
    code, document = run_json("info", first)
    assert code == 0
    assert document["by_dtype"]["bfloat16"]["elements"] == 4096
    assert document["metadata"] == {"run": "unit"}


def test_info_names_the_coder_of_byte_planes_only(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], run_json: Run
) -> None:
    assert run_json("info", first)[1]["coder"] is None
    tensorkeep.save({"w": torch.randn(4096).bfloat16()}, tmp_path / "coded", compression="lossless")
    assert run_json("info", tmp_path / "coded")[1]["coder"] == coder.describe()
    assert main(["info", str(first)]) == main(["info", str(tmp_path / "coded")]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("coder")] == [
        f"coder: {coder.describe()}"
    ]


def test_ls_cuts_nothing_in_a_pipe(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(first)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "dtype", "shape", "size", "stored", "codec", "file"]
    assert [line.split()[0] for line in lines[1:]] == [
        "model.wte.weight",
        "model.lm_head.weight",
        "model.bias",
        "optimizer.exp_avg",
    ]
    assert not any(line.endswith(" ") or "\x1b" in line for line in lines)


def test_ls_takes_globs(first: Path, run_json: Run) -> None:
    code, document = run_json("ls", first, "*.weight", "optimizer.*")
    assert code == 0
    assert [tensor["name"] for tensor in document["tensors"]] == [
        "model.wte.weight",
        "model.lm_head.weight",
        "optimizer.exp_avg",
    ]
    assert document["tensors"][1]["alias_of"] == "model.wte.weight"
    assert run_json("ls", first, "nothing.*")[0] == 2


def test_verify_names_the_bad_block(damaged: Path, capsys: pytest.CaptureFixture[str], run_json: Run) -> None:
    assert main(["verify", str(damaged), "--quiet"]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"corrupt: {damaged}: 1 problem"
    assert lines[1].startswith("  model.safetensors: tensor 'model.w': block 0: ")
    code, document = run_json("verify", damaged)
    assert (code, document["ok"]) == (4, False)
    assert document["checkpoints"][0]["problems"][0]["name"] == "model.w"


def test_verify_continues_after_a_corrupt_checkpoint(
    first: Path, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], run_json: Run
) -> None:
    absent = tmp_path / "absent"
    assert main(["verify", str(absent), str(damaged), str(first)]) == 4
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {absent}: ")
    assert [line.split(":")[0] for line in output.out.splitlines() if line[0] != " "] == ["corrupt", "ok"]
    code, document = run_json("verify", first, absent)
    assert code == 5
    assert [checkpoint["ok"] for checkpoint in document["checkpoints"]] == [True, False]
    assert document["checkpoints"][1]["error"]["kind"] == "not-found"


def test_verify_reports_formats_without_checksums(
    first: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_checksums(*arguments: Any, **options: Any) -> verify_module.VerifyReport:
        return replace(verify_module.verify(*arguments, **options), checked=None)

    monkeypatch.setattr(verify_command, "check", without_checksums)
    assert main(["verify", str(first)]) == 0
    assert "structure only" in capsys.readouterr().out


def test_diff(first: Path, second: Path, capsys: pytest.CaptureFixture[str], run_json: Run) -> None:
    assert main(["diff", str(first), str(second)]) == 1
    text = capsys.readouterr().out
    assert "tensors: 1 changed, 1 added, 3 identical; 1 plain value changed" in text.splitlines()[0]
    assert "model.bias" in text
    assert "0.0003  0.0001" in text
    code, document = run_json("diff", first, second)
    assert (code, document["equal"], document["added"]) == (1, False, ["model.extra"])
    assert document["changed"] == [
        {
            "name": "model.bias",
            "elements": 7,
            "different": 1,
            "largest": 0.5,
            "share": 1 / 7,
            "norm_a": 0.0,
            "norm_b": 0.5,
            "norm_difference": 0.5,
            "dot": 0.0,
            "floating": True,
            "relative_l2": None,
            "cosine": None,
        }
    ]


def test_diff_within_a_tolerance(first: Path, second: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(first), str(second), "--atol", "0.5", "--select", "model.bias"]) == 0
    assert capsys.readouterr().out == f"same: {first} and {second}: tensors: 1 identical\n"


def test_json_has_no_infinity(first: Path, run_json: Run, tmp_path: Path) -> None:
    state = tensorkeep.load(first)
    state["model"]["bias"][0] = float("nan")
    tensorkeep.save(state, tmp_path / "nan")
    code, document = run_json("diff", first, tmp_path / "nan")
    assert (code, document["changed"][0]["largest"]) == (1, None)


def test_convert(first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], run_json: Run) -> None:
    new = tmp_path / "new"
    assert main(["convert", str(first), str(new), "--to", "native", "--compression", "lossless"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"converted {first} to {new} (native, lossless): 3 tensors, ")
    assert output.err == ""
    assert tensorkeep.diff(first, new).equal
    code, report = run_json("convert", first, new, "--to", "native", "--overwrite", "--select", "optimizer.*")
    assert (code, report["tensors"]) == (0, 1)


def test_convert_follows_the_shard_size(first: Path, tmp_path: Path) -> None:
    assert main(["convert", str(first), str(tmp_path / "new"), "--to", "native", "--shard-bytes", "8kB", "-q"]) == 0
    assert len(list((tmp_path / "new").glob("*.safetensors"))) > len(list(first.glob("*.safetensors")))


def test_env(tmp_path: Path, capsys: pytest.CaptureFixture[str], run_json: Run) -> None:
    code, document = run_json("env", "--path", tmp_path)
    assert code == 0
    assert document["versions"]["tensorkeep"] == tensorkeep.__version__
    assert document["processor"]["usable_cores"] >= 1
    assert document["storage"]["path"] == str(tmp_path.resolve())
    assert document["storage"]["direct_io"] in (True, False)
    assert list(tmp_path.iterdir()) == []
    assert document["coder"] == coder.describe()
    assert main(["env", "--path", str(tmp_path)]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["coder", coder.describe()] in lines
    assert "direct" in [first for first, _ in lines]
    assert main(["env", "--path", str(tmp_path / "absent")]) == 5


def test_control_characters_in_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    Table(("name",), [("\x1b[31mred\u202e\n",)]).show()
    assert capsys.readouterr().out == "name\n\\x1b[31mred\\u202e\\n\n"
    assert printable("größe 大") == "größe 大"


def test_json_is_one_document_on_stdout(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["info"], ["ls"], ["verify"], ["diff", str(first)]):
        assert main([*arguments, str(first), "--json", "-q"]) == 0
        output = capsys.readouterr()
        assert isinstance(json.loads(output.out), dict)
        assert output.err == ""
