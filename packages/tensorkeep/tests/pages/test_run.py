"""What is read of a run: figures of the log, origins of the bytes, and moves of the layers."""

import math
from pathlib import Path

import pytest
import torch

import tensorkeep
from faults.injection import flip_bit
from pages.shown_runs import save_run
from tensorkeep.pages.run import RunContents, figures_of, read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def contents(run: Path) -> RunContents:
    return read_run(run, sample=10**9)


def test_figures_are_those_of_the_log_and_origins_name_the_step_that_wrote_the_bytes(contents: RunContents) -> None:
    names = [f"train/{name}" for name in ("gradient_norm", "learning_rate", "loss", "tokens_per_second")]
    assert sorted(contents.figures) == ["evaluate/best", "evaluate/validation_loss", *names]
    assert contents.figures["train/loss"][0] == (10, 4 / 1.1)
    assert contents.figures["evaluate/validation_loss"] == [(step * 100, 3.0 / step) for step in range(1, 7)]
    sizes = {step.number: step for step in contents.log.steps}
    for number, found in contents.origins.items():
        assert (sum(found.values()), found[number]) == (sizes[number].nbytes, sizes[number].new_bytes)
    assert set(contents.origins[600]) > {600}


def test_damaged_lines_and_values_that_are_no_numbers_are_left_out() -> None:
    first = b'{"step": 1, "kind": "a", "x": 1, "y": null, "z": "text", "w": true}'
    content = first + b'\nnonsense\n{"step": 1, "kind": "a", "x": 2}'
    found = figures_of(content)
    assert found["a/x"] == [(1, 2)]
    assert math.isnan(found["a/y"][0][1])
    assert (set(found), figures_of(b"")) == ({"a/x", "a/y"}, {})


def test_moves_are_relative_l2_differences(contents: RunContents, run: Path) -> None:
    motion = contents.motion
    assert motion.steps == [100, 200, 300, 400, 500, 600]
    assert motion.layers == [*(f"model.blocks.{layer}" for layer in range(5)), "model.head"]
    report = tensorkeep.diff(run / "checkpoints" / "step-000200", run / "checkpoints" / "step-000300")
    exact = {found.name: found.relative_l2 for found in report.by_layer()}
    for layer, row in zip(motion.layers, motion.moved, strict=True):
        assert row[1] == pytest.approx(exact.get(layer, 0.0), rel=1e-9)
    assert motion.moved[0] == [0.0] * 5


def test_many_steps_are_sampled_and_only_weights_compared(tmp_path: Path) -> None:
    w = torch.zeros(1000)
    with tensorkeep.CheckpointManager(tmp_path) as manager:
        for step in range(40):
            state = {"net": {"w": w + step, "n": torch.tensor(step)}, "optimizer": {"m": torch.ones(9)}}
            manager.save(step, state)
    motion = read_run(tmp_path, sample=10**9).motion
    assert (motion.layers, len(motion.steps), motion.steps[0], motion.steps[-1]) == (["net"], 32, 0, 39)
    assert motion.moved[0][0] == math.inf  # from 0
    assert "32 of 40 steps" in motion.text
    assert len(read_run(tmp_path, sample=1).motion.steps) == 4


def test_a_damaged_step_is_named_and_skipped(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", steps=5)
    truncated, flipped = (
        max(each for each in step.iterdir() if each.stat().st_nlink == 1 and each.suffix != ".json")
        for step in (run / "checkpoints" / "step-000400", run / "checkpoints" / "step-000500")
    )
    truncated.write_bytes(truncated.read_bytes()[:-1])
    flip_bit(flipped, -5000)
    found = read_run(run, sample=10**9)
    assert (set(found.problems), found.motion.steps) == ({400, 500}, [100, 200, 300])


@pytest.mark.parametrize("steps", [[1], [1, 2]], ids=["one step", "one of two can be read"])
def test_a_run_of_which_one_step_can_be_read_has_no_moves(tmp_path: Path, steps: list[int]) -> None:
    with tensorkeep.CheckpointManager(tmp_path) as manager:
        for step in steps:
            manager.save(step, {"w": torch.randn(5000)})
    for step in steps[1:]:
        flip_bit(next((tmp_path / f"step-00000{step}").glob("*.safetensors")), -100)
    found = read_run(tmp_path, sample=10**9)
    assert (set(found.problems), found.moves) == (set(steps[1:]), None)
    assert all(f"Step {step}: " in found.page() for step in steps[1:])
