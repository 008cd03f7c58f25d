"""The other operations on checkpoints of many ranks: convert, diff, info, mapping, the log of a run, prune."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from simulated_ranks import at_random, by_dimension, save_by_ranks
from tensorkeep.cli.main import main
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference
from tiers import exhaustive

SPLITS = {"rows": by_dimension(3), "columns": by_dimension(3, 1), "anywhere": at_random(3, seed=8)}


def state() -> dict[str, Any]:
    torch.manual_seed(3)
    return {"w": torch.randn(500, 60), "b": torch.randn(70).bfloat16(), "experts": torch.randn(4, 30, 50)}


@pytest.mark.coder
@pytest.mark.parametrize("split", ["columns", *exhaustive("rows", "anywhere")])
def test_convert_to_every_format(tmp_path: Path, split: str) -> None:
    save_by_ranks(tmp_path / "c", state(), 3, SPLITS[split], compression="lossless", grid_bytes=16384)
    for to in ("native", "torch", "safetensors", "dcp"):
        with case(to):
            tensorkeep.convert(tmp_path / "c", tmp_path / to, to=to)
            assert difference(tensorkeep.load(tmp_path / to), state()) is None
            assert tensorkeep.diff(tmp_path / "c", tmp_path / to).equal


def test_diff_names_what_differs(tmp_path: Path) -> None:
    other = state()
    other["w"][100, 7] += 1
    save_by_ranks(tmp_path / "a", state(), 3, by_dimension(3, 1))
    save_by_ranks(tmp_path / "b", other, 2)
    report = tensorkeep.diff(tmp_path / "a", tmp_path / "b")
    assert [(each.name, each.different) for each in report.changed] == [("w", 1)]


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """Rows that many boxes of columns make up, in blocks of the largest size, and the smallest budget."""
    saved = {"w": torch.randn(1500, 4096)}
    for compression in ("none", "lossless"):
        path = tmp_path / compression
        save_by_ranks(path, saved, 4, by_dimension(4, 1), compression=compression, grid_bytes=16 * 1024**2)
        report = tensorkeep.convert(path, tmp_path / f"{compression}-2", memory_budget="256MiB")
        assert report.peak_buffer_bytes <= 256 * 1024**2
        assert torch.equal(tensorkeep.load(tmp_path / f"{compression}-2")["w"], saved["w"])
        with tensorkeep.open(path) as opened:
            assert torch.equal(opened["w"][5:9], saved["w"][5:9])


def test_a_tensor_that_is_one_box_is_mapped(tmp_path: Path) -> None:
    saved = {"a": torch.randn(30, 4), "bb": torch.randn(50)}
    save_by_ranks(tmp_path / "c", saved, 3, by_dimension(3, 5))  # each tensor is of one rank
    assert difference(tensorkeep.load(tmp_path / "c", mmap=True), saved) is None
    save_by_ranks(tmp_path / "d", saved, 3)
    with pytest.raises(tensorkeep.UnsupportedError, match="not stored in one aligned piece"):
        tensorkeep.load(tmp_path / "d", mmap=True)


def test_info_shows_ranks_and_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_by_ranks(tmp_path / "c", state(), 3, layouts={"w": "mesh (dp=3): S(0)", "experts": "mesh (dp=3): S(0)"})
    details = tensorkeep.info(tmp_path / "c").details
    found = [(rank["fragment"], rank["boxes"]) for rank in details["ranks"]]
    assert found == [("rank-00000.json", 3), ("rank-00001.json", 3), ("rank-00002.json", 2)]
    assert main(["info", str(tmp_path / "c")]) == 0
    shown = capsys.readouterr().out
    assert "saved by 3 ranks" in shown
    assert "rank-00002.json" in shown
    assert "mesh (dp=3): S(0)" in shown
    assert main(["info", str(tmp_path / "c"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["details"]["layouts"]["w"] == "mesh (dp=3): S(0)"
    assert main(["ls", str(tmp_path / "c")]) == 0
    assert "experts" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "c")]) == 0
    # Many ranks are summed up.
    save_by_ranks(tmp_path / "d", {"w": torch.zeros(40)}, 20)
    assert main(["info", str(tmp_path / "d")]) == 0
    shown = capsys.readouterr().out
    assert "4 more ranks" in shown
    assert "rank-00016.json" not in shown


def test_steps_of_a_run_are_logged(tmp_path: Path) -> None:
    with tensorkeep.CheckpointManager(tmp_path) as manager:
        for number in (1, 2):
            manager.save(number, state()).wait()
    step = tmp_path / "step-000001"
    save_by_ranks(step, state(), 3, overwrite=True)
    first = tensorkeep.log(tmp_path).steps[0]
    assert first.problem is None
    assert first.nbytes == sum(file.stat().st_size for file in step.iterdir())
    (step / "rank-00001.json").unlink()
    assert "rank-00001.json" in (tensorkeep.log(tmp_path).steps[0].problem or "")
