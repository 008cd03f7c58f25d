"""``tensorkeep diff``: what is listed, in which order, and how much of it."""

from pathlib import Path

import pytest
import torch

import tensorkeep
from command_line import Call, RunJson


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two states with 25 blocks, of which each next one has changed more, and a tensor of another dtype."""
    monkeypatch.chdir(tmp_path)
    for name, factor, dtype in (("a", 0, torch.float32), ("b", 0.01, torch.bfloat16)):
        blocks = [{"w": torch.ones(4) * (1 + factor * i), "b": torch.zeros(1) + factor} for i in range(1, 26)]
        tensorkeep.save({"blocks": blocks, "cast": torch.full((3,), 1.001).to(dtype)}, name)
    return "a", "b"


def lines_of(call: Call, *arguments: str) -> list[str]:
    return call("diff", *arguments, code=1).out.splitlines()


def test_the_most_changed_tensors_come_first(pair: tuple[str, str], call: Call) -> None:
    lines = lines_of(call, *pair)
    assert lines[0] == "different: a and b: tensors: 50 changed, 1 of another dtype"
    assert lines[1].startswith("of the changed tensors, 125 of 125 elements differ (100.00%); floating point: relative")
    assert lines[4].split() == ["name", "elements", "different", "rel.", "L2", "cosine", "max", "|a-b|"]
    assert lines[5].split() == ["blocks.0.b", "1", "100.00%", "inf", "-", "0.01"]
    assert lines[25] == "and 30 more (--top 0 shows all)"
    assert lines[27:] == [
        "of another dtype, compared by value:",
        "name                         elements  different   rel. L2    cosine  max |a-b|",
        "cast  (float32 -> bfloat16)         3    100.00%  0.000999  1.000000      0.001",
    ]


def test_options_choose_how_much_is_listed(pair: tuple[str, str], call: Call) -> None:
    lines = lines_of(call, *pair, "--select", "*.w", "--top", "2")
    assert [line.split()[0] for line in lines[5:]] == ["blocks.24.w", "blocks.23.w", "and"]
    assert lines[5].split()[3] == "0.25"
    assert len(lines_of(call, *pair, "--select", "*.w", "--top", "0")) == 5 + 25
    lines = lines_of(call, *pair, "--by-layer", "--top", "1")
    assert lines[3] == "changed layers:"
    assert lines[5].split()[:3] == ["blocks.24", "5", "100.00%"]
    assert lines[6] == "and 24 more (--top 0 shows all)"
    assert "blocks       125" in lines_of(call, *pair, "--by-layer", "--depth", "1")[5]
    call("diff", *pair, "--depth", "1", code=2)
    (line,) = lines_of(call, *pair, "--stat")
    assert line.startswith("different: tensors: 50 changed, 1 of another dtype; 125 of 125 elements differ")
    assert call("diff", "a", "a", "--stat").out == "same: tensors: 51 identical\n"


def test_json_has_everything(pair: tuple[str, str], run_json: RunJson) -> None:
    document = run_json("diff", *pair, "--top", "1", code=1)
    assert [len(document[key]) for key in ("changed", "converted", "layers")] == [50, 1, 25]
    assert document["total"]["different"] == 125
    assert document["changed"][0]["relative_l2"] is None  # infinite, which JSON does not have
    assert len(run_json("diff", *pair, "--by-layer", "--depth", "1", code=1)["layers"]) == 1


def test_integers_have_no_norms_in_the_lists(tmp_path: Path, call: Call) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path, byte in zip(paths, (0, 255), strict=True):
        tensorkeep.save({"w": torch.ones(2) + byte / 510, "rng": torch.full((2,), byte, dtype=torch.uint8)}, path)
    lines = lines_of(call, *paths)
    assert lines[1].endswith("(100.00%); floating point: relative L2 0.5, cosine 1.000000, max |a-b| 0.5")
    assert lines[-1].split() == ["rng", "2", "100.00%", "-", "-", "255"]
    assert lines_of(call, *paths, "--select", "rng", "--stat")[0].endswith("2 of 2 elements differ (100.00%)")
