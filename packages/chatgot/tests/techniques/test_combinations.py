"""Named combinations, and the arms of the experiments that measure them, on a CPU and on a simulated GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from chatgot.techniques import attention_kernel, base, mixed_precision
from chatgot.techniques.base import Machine
from chatgot.techniques.stack import COMBINATIONS, Stack
from chatgot.testing import TINY, opened, verified_step, with_techniques
from techniques.several_processes import compile_by
from tensorkeep_bench.experiment import read_experiment
from tensorkeep_bench.training.workload import arm_config, missing_for

FASTER_IN_16_BITS = {torch.float32: 1e9, torch.bfloat16: 2e9, torch.float16: 2e9}

# Settings with which the techniques need no compiler.
SETTINGS: dict[str, dict[str, Any]] = {"compile": {"backend": "aot_eager"}, "low-bit-optimizer": {"compiled": False}}
# Wide enough to quantise the states, without dropout, which flash attention on CPUs does not support.
CONFIG = TINY.changed({"model.d_model": 64, "model.dropout": 0.0, "model.n_layers": 1})


@pytest.fixture(autouse=True)
def fixed_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "measured_peak", lambda device, dtype=torch.float32: FASTER_IN_16_BITS[dtype])


@pytest.fixture(params=["cpu", "ampere", "hopper"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine; the GPUs exist only for those who ask for their properties."""
    if request.param == "cpu":
        return Machine(torch.device("cpu"))
    capability = {"ampere": (8, 0), "hopper": (9, 0)}[request.param]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"simulated {request.param}")
    # Triton comes with torch for CUDA only.
    monkeypatch.setattr(base, "find_spec", lambda module: object())
    return Machine(torch.device("cuda"))


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


@pytest.mark.parametrize("experiment", ["combinations", "best-stack"])
def test_arms_of_experiment_are_accepted(experiment: str, machine: Machine) -> None:
    arms = read_experiment(experiment).arms
    assert len(arms) > 5
    for arm in arms:
        assert missing_for(arm.settings) is None, arm.name
        config = arm_config("shakespeare-char-cpu", {**arm.settings, "loop.device": machine.device.type}, steps=10)
        stack = Stack.of(config.techniques)
        stack.check(machine)
        stack.configure(config.changed({"loop.device": "auto"}))
