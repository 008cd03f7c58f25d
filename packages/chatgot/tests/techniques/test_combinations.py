"""Named combinations, on a CPU and on a simulated GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

import simulated_gpus
from chatgot.techniques import attention_kernel, mixed_precision
from chatgot.techniques.base import Machine
from chatgot.techniques.stack import COMBINATIONS, Stack
from chatgot.testing import TINY, opened, verified_step, with_techniques
from techniques.several_processes import compile_by

fixed_rates, machine = simulated_gpus.fixed_rates, simulated_gpus.machine

# Settings with which the techniques need no compiler.
SETTINGS: dict[str, dict[str, Any]] = {"compile": {"backend": "aot_eager"}, "low-bit-optimizer": {"compiled": False}}
# Wide enough to quantise the states, without dropout, which flash attention on CPUs does not support.
CONFIG = TINY.changed({"model.d_model": 64, "model.dropout": 0.0, "model.n_layers": 1})


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combination_is_accepted(name: str, machine: Machine) -> None:
    techniques = {each: {} for each in COMBINATIONS[name]}
    stack = Stack.of(techniques)
    stack.check(machine)
    stack.configure(with_techniques(CONFIG.changed({"loop.device": "auto"}), techniques))


@pytest.mark.integration
@pytest.mark.xdist_group("compiler")
@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("on_cuda", [False, True])
def test_all_are_proved(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, name: str, on_cuda: bool) -> None:
    """With ``on_cuda``, the techniques configure themselves for a GPU, and the run computes on the CPU."""
    compile_by(monkeypatch, "eager")
    if on_cuda:
        for module in (attention_kernel, mixed_precision):
            monkeypatch.setattr(module, "chosen_device", lambda name: torch.device("cuda"))
    config = with_techniques(CONFIG, {each: SETTINGS.get(each, {}) for each in COMBINATIONS[name]})
    with opened(config, tmp_path / "run", data) as run:
        assert set(verified_step(run)) == set(COMBINATIONS[name])
