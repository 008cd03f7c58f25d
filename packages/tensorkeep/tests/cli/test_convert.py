"""``tensorkeep convert``: the format by the suffix, and several sources into a folder."""

from pathlib import Path

import pytest
import torch

import tensorkeep
from command_line import Call, RunJson
from tensorkeep.cli.main import main


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``a.pt``, ``b.pt``, a damaged ``bad.pt``, and a run with the steps 1 and 2, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        torch.save({"w": torch.full((3,), float(ord(name)))}, f"{name}.pt")
    Path("bad.pt").write_bytes(b"nothing of torch")
    with tensorkeep.CheckpointManager("run") as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((3,), float(step))})


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *((f"x{suffix}", "safetensors") for suffix in (".safetensors", ".SAFETENSORS")),
        *((f"x{suffix}", "native") for suffix in ("", ".v2", ".ckpt")),
        *((f"x{suffix}", "torch") for suffix in (".pt", ".pth", ".bin", ".PT")),
    ],
)
def test_the_suffix_decides_the_format(name: str, format: str, call: Call) -> None:
    named = "a native checkpoint" if format == "native" else format
    assert call("convert", "a.pt", name).err == f"writing {named}, by the suffix of the destination (see --to)\n"
    assert tensorkeep.info(name).format == format
    assert tensorkeep.convert("b.pt", name, overwrite=True).format == format
    assert tensorkeep.load(name)["w"][0] == ord("b")
    assert tensorkeep.save({"w": torch.ones(1)}, f"saved-{name}").format == format
    # One suffix is one format, whatever is asked for.
    for to in {"native", "torch", "safetensors", "dcp"} - {format} if format != "native" else ():
        refused = call("convert", "a.pt", f"y{name}", "--to", to, code=2).err
        assert f"belongs to the format {format}, not to {to}" in refused
    assert sorted(Path().glob("yx*")) == []


def test_to_overrides_the_suffix_and_a_slash_makes_a_folder(call: Call) -> None:
    assert call("convert", "a.pt", "x.ckpt", "--to", "native").err == ""
    assert tensorkeep.info("x.ckpt").format == "native"
    call("convert", "a.pt", "out/", "--to", "torch")
    assert [path.name for path in Path("out").iterdir()] == ["a.pt"]
    # Unless that is a checkpoint, as after the completion of its name.
    tensorkeep.convert("a.pt", "native")
    call("convert", "b.pt", "native/", "--overwrite")
    assert tensorkeep.load("native")["w"][0] == ord("b")


def test_several_sources_go_into_a_folder(run_json: RunJson) -> None:
    document = run_json("convert", "a.pt", "b.pt", "run@1", "run", "out", "--to", "safetensors")
    assert document["ok"]
    names = sorted(path.name for path in Path("out").iterdir())
    assert names == ["a.safetensors", "b.safetensors", "run.safetensors", "run@1.safetensors"]
    assert [tensorkeep.load(f"out/{name}")["w"][0] for name in names] == [97, 98, 2, 1]
    sources = [each["source"] for each in document["checkpoints"]]
    assert sources == ["a.pt", "b.pt", "run/step-000001", "run/step-000002"]


def test_a_source_that_fails_does_not_stop_the_others(run_json: RunJson, call: Call) -> None:
    step = Path("run/step-000001/model.safetensors")
    step.write_bytes(step.read_bytes()[:-1] + b"\x07")
    arguments = ("convert", "bad.pt", "run@1", "missing", "b.pt", "out", "--to", "safetensors")
    err = call(*arguments, code=4).err  # the most severe of 5, 4 and 5
    assert "error: bad.pt: is not a checkpoint" in err
    assert "error: missing: does not exist" in err
    assert err.splitlines()[-1] == "3 checkpoints of 4 failed"
    assert [path.name for path in Path("out").iterdir()] == ["b.safetensors"]
    document = run_json(*arguments, "--overwrite", code=4)
    assert [each["ok"] for each in document["checkpoints"]] == [False, False, False, True]


def test_several_sources_need_a_folder_and_different_names(call: Call) -> None:
    Path("a.ckpt").write_bytes(Path("a.pt").read_bytes())
    assert "a.pt and a.ckpt would both become a" in call("convert", "b.pt", "a.pt", "a.ckpt", "out", code=2).err
    assert not Path("out").exists()
    tensorkeep.convert("a.pt", "native")
    assert main(["convert", "a.pt", "b.pt", "native"]) == 6
    assert main(["convert", "a.pt", "b.pt", "bad.pt"]) == 6
    assert "no destination is given" in call("convert", "a.pt", code=2).err
