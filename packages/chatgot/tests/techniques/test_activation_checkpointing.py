"""Activation checkpointing: bit-identical gradients with less memory."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from chatgot.step.state import StepState
from chatgot.techniques.activation_checkpointing import ActivationCheckpointing
from chatgot.testing import TechniqueSuite, opened, with_techniques
from tensorkeep.errors import TechniqueNotActiveError
from test_memory import counted_activations


def plain_forward(run: StepState, block: torch.nn.Module) -> None:
    block.forward = partial(type(block).forward, block)  # type: ignore[method-assign]


class TestActivationCheckpointing(TechniqueSuite):
    technique = ActivationCheckpointing
    variants = ({}, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ({"keep": "matmuls"}, {"every": 2})))

    def break_on_purpose(self, run: StepState) -> None:
        # As after a loop that rebinds its variable: the first block is unchanged.
        plain_forward(run, run.model.blocks[0])

    def test_a_late_bound_loop_variable_is_caught(self, tmp_path: Path, data: Path) -> None:
        with opened(with_techniques(self.config, {"activation-checkpointing": {}}), tmp_path / "run", data) as run:
            inner = [partial(type(block).forward, block) for block in run.model.blocks]
            last = inner[-1]
            for block in run.model.blocks:
                block.forward = lambda *inputs: checkpoint(last, *inputs, use_reentrant=False)
            with pytest.raises(TechniqueNotActiveError, match="numbers 0, 1 ran 0 times"), run.techniques.verified(run):
                run.operations.backward(run.operations.loss(*next(run.batches)))
                run.operations.backward(run.operations.loss(*next(run.batches)))

    @pytest.mark.parametrize("settings", [{}, {"keep": "matmuls"}, {"every": 2}])
    def test_fewer_bytes_are_saved(self, tmp_path: Path, data: Path, settings: dict[str, object]) -> None:
        kept = {}
        for name, techniques in {"plain": {}, "on": {"activation-checkpointing": settings}}.items():
            config = with_techniques(self.config, techniques)
            with opened(config, tmp_path / name, data) as run, counted_activations(run.model) as sizes:
                run.operations.loss(*next(run.batches))
            kept[name] = sum(sizes)
        assert kept["on"] < 0.8 * kept["plain"]
