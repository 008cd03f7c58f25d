"""Gradient norms by layer: those of the gradient before it is clipped, in each logged step, without an effect."""

import math
from pathlib import Path

import pytest
import torch

from chatgot.step.train_step import take_step
from chatgot.testing import opened
from conftest import Trained
from tensorkeep.testing.equality import difference
from tiny_training import CONFIG, last_state, lines, run

NORMS = {"log.gradient_norms": True, "log.every": 4}


def test_norms_of_layers_are_logged_and_change_nothing(tmp_path: Path, data: Path, trained: Trained) -> None:
    trained(CONFIG, tmp_path / "plain")
    run(CONFIG.changed(NORMS), tmp_path / "run", data, stop_at=6)
    run(CONFIG.changed(NORMS), tmp_path / "run", data, resume=True)
    logged = lines(tmp_path / "run", "train")
    assert [line["step"] for line in logged] == [4, 8, 12]
    for line in logged:
        norms = line.pop("gradient_norms")
        assert list(norms) == ["norm", "positions", "tokens", "blocks.0"]
        assert math.hypot(*norms.values()) == pytest.approx(line["gradient_norm"], rel=1e-5)
    assert logged == [line for line in lines(tmp_path / "plain", "train") if line["step"] in (4, 8, 12)]
    assert difference(last_state(tmp_path / "run"), last_state(tmp_path / "plain")) is None


@pytest.mark.parametrize(
    "changes", [{"optim.grad_clip": 1e-4}, {"optim.grad_clip": 0}, {"techniques.mixed-precision.dtype": "fp16"}]
)
def test_norms_are_those_before_clipping_and_scaling(tmp_path: Path, data: Path, changes: dict[str, object]) -> None:
    config = CONFIG.changed({"log.every": 1, "model.dropout": 0.0})
    with opened(config.changed(changes | {"log.gradient_norms": True}), tmp_path / "run", data) as found:
        take_step(found)
    with opened(config, tmp_path / "plain", data) as plain:
        plain.operations.loss(*next(plain.batches)).backward()  # type: ignore[no-untyped-call]
        expected = [each.grad for each in plain.model.blocks[0].parameters()]
        norm = float(torch.nn.utils.get_total_norm([each for each in expected if each is not None]))
    assert found.gradient_norms["blocks.0"] == pytest.approx(norm, rel=0.01)


def test_only_logged_steps_compute_them(tmp_path: Path, data: Path) -> None:
    with opened(CONFIG.changed(NORMS), tmp_path / "run", data) as found:
        seen = []
        for _ in range(5):
            take_step(found)
            seen.append(bool(found.gradient_norms))
    assert seen == [False, False, False, True, False]
