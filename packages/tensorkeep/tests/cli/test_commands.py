"""The output of each command, as text and as JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from command_line import Call, RunJson
from tensorkeep.checkpoint import verify as verify_module
from tensorkeep.cli import verify as verify_command
from tensorkeep.cli.main import main
from tensorkeep.codecs import coder


def test_info(first: Path, call: Call, run_json: RunJson) -> None:
    text = call("info", first, "--largest", "1").out
    assert text.startswith(f"{first}: native ")
    assert "4 tensors, 8,199 elements" in text
    assert text.endswith("metadata:\nkey  value\nrun  unit\n")
    assert text.count("optimizer.exp_avg") == 1
    document = run_json("info", first)
    assert document["by_dtype"]["bfloat16"]["elements"] == 4096
    assert document["metadata"] == {"run": "unit"}


def test_info_names_the_coder_of_byte_planes_only(first: Path, tmp_path: Path, call: Call, run_json: RunJson) -> None:
    tensorkeep.save({"w": torch.randn(4096).bfloat16()}, tmp_path / "coded", compression="lossless")
    for path, expected in ((first, None), (tmp_path / "coded", coder.describe())):
        assert run_json("info", path)["coder"] == expected
        lines = [line for line in call("info", path).out.splitlines() if line.startswith("coder")]
        assert lines == ([f"coder: {expected}"] if expected else [])


def test_ls_cuts_nothing_in_a_pipe_and_takes_globs(first: Path, call: Call, run_json: RunJson) -> None:
    lines = call("ls", first).out.splitlines()
    assert lines[0].split() == ["name", "dtype", "shape", "size", "stored", "codec", "file"]
    names = ["model.wte.weight", "model.lm_head.weight", "model.bias", "optimizer.exp_avg"]
    assert [line.split()[0] for line in lines[1:5]] == names
    assert lines[5:7] == ["", "plain values:"]
    assert lines[7].split() == ["name", "value"]
    assert not any(line.endswith(" ") or "\x1b" in line for line in lines)
    document = run_json("ls", first, "*.weight", "optimizer.*")
    assert [tensor["name"] for tensor in document["tensors"]] == [*names[:2], names[3]]
    assert document["tensors"][1]["alias_of"] == "model.wte.weight"
    run_json("ls", first, "nothing.*", code=2)
    assert run_json("ls", first, "optimizer.lr")["values"] == {"optimizer.lr": 3e-4}


def test_verify_goes_on_after_damage(first: Path, damaged: Path, tmp_path: Path, call: Call, run_json: RunJson) -> None:
    lines = call("verify", damaged, "--quiet", code=4).out.splitlines()
    assert lines[0] == f"corrupt: {damaged}: 1 problem"
    assert lines[1].startswith("  model.safetensors: tensor 'model.w': block 0: ")
    document = run_json("verify", damaged, code=4)
    assert not document["ok"]
    assert document["checkpoints"][0]["problems"][0]["name"] == "model.w"
    absent = tmp_path / "absent"
    output = call("verify", absent, damaged, first, code=4)
    assert output.err.startswith(f"error: {absent}: ")
    assert [line.split(":")[0] for line in output.out.splitlines() if line[0] != " "] == ["corrupt", "ok"]
    document = run_json("verify", first, absent, code=5)
    assert [checkpoint["ok"] for checkpoint in document["checkpoints"]] == [True, False]
    assert document["checkpoints"][1]["error"]["kind"] == "not-found"


def test_verify_reports_formats_without_checksums(first: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    def without_checksums(*arguments: Any, **options: Any) -> verify_module.VerifyReport:
        return replace(verify_module.verify(*arguments, **options), checked=None)

    monkeypatch.setattr(verify_command, "check", without_checksums)
    assert "structure only" in call("verify", first).out


def test_diff(first: Path, second: Path, tmp_path: Path, call: Call, run_json: RunJson) -> None:
    text = call("diff", first, second, code=1).out
    assert "tensors: 1 changed, 1 added, 3 identical; 1 plain value changed" in text.splitlines()[0]
    assert "model.bias" in text
    assert "0.0003  0.0001" in text
    document = run_json("diff", first, second, code=1)
    assert (document["equal"], document["added"]) == (False, ["model.extra"])
    norms = {"norm_a": 0.0, "norm_b": 0.5, "norm_difference": 0.5, "dot": 0.0, "relative_l2": None, "cosine": None}
    counts = {"elements": 7, "different": 1, "largest": 0.5, "share": 1 / 7, "floating": True, "scalar": False}
    assert document["changed"] == [{"name": "model.bias", **counts, **norms}]
    # JSON has no infinity.
    state = tensorkeep.load(first)
    state["model"]["bias"][0] = float("nan")
    tensorkeep.save(state, tmp_path / "nan")
    document = run_json("diff", first, tmp_path / "nan", code=1)
    assert document["changed"][0]["largest"] is None
    shown = call("diff", first, second, "--atol", "0.5", "--select", "model.bias")
    assert shown.out == f"same: {first} and {second}: tensors: 1 identical\n"


def test_convert(first: Path, tmp_path: Path, call: Call, run_json: RunJson) -> None:
    new = tmp_path / "new"
    output = call("convert", first, new, "--to", "native", "--compression", "lossless")
    assert output.out.startswith(f"converted {first} to {new} (native, lossless): 3 tensors, ")
    assert output.err == ""
    assert tensorkeep.diff(first, new).equal
    report = run_json("convert", first, new, "--to", "native", "--overwrite", "--select", "optimizer.*")
    assert report["tensors"] == 1
    small = tmp_path / "small"
    assert main(["convert", str(first), str(small), "--to", "native", "--shard-bytes", "8kB", "-q"]) == 0
    assert len(list(small.glob("*.safetensors"))) > len(list(first.glob("*.safetensors")))


def test_env(tmp_path: Path, call: Call, run_json: RunJson) -> None:
    document = run_json("env", "--path", tmp_path)
    assert document["versions"]["tensorkeep"] == tensorkeep.__version__
    assert document["processor"]["usable_cores"] >= 1
    assert document["storage"]["path"] == str(tmp_path.resolve())
    assert document["storage"]["direct_io"] in (True, False)
    assert list(tmp_path.iterdir()) == []
    assert document["coder"] == coder.describe()
    lines = [line.split(maxsplit=1) for line in call("env", "--path", tmp_path).out.splitlines()]
    assert ["coder", coder.describe()] in lines
    assert "direct" in [first for first, _ in lines]
    assert main(["env", "--path", str(tmp_path / "absent")]) == 5


def test_json_is_one_document_on_stdout(first: Path, call: Call) -> None:
    for arguments in (["info"], ["ls"], ["verify"], ["diff", first]):
        out, err = call(*arguments, first, "--json", "-q")
        assert isinstance(json.loads(out), dict)
        assert err == ""
