"""The arms of the experiments on training are accepted on a CPU and on a simulated GPU."""

import pytest

import simulated_gpus
from chatgot.techniques.base import Machine
from chatgot.techniques.stack import Stack
from tensorkeep_bench.experiment import read_experiment
from tensorkeep_bench.training.workload import arm_config, missing_for

fixed_rates, machine = simulated_gpus.fixed_rates, simulated_gpus.machine


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
