"""The arms of the experiments on training are accepted on a CPU and on a simulated GPU."""

import shlex

import pytest
from msgspec.structs import replace

import simulated_gpus
from chatgot.cli.train import technique_names
from chatgot.config.config import TECHNIQUES, read_words
from chatgot.config.recipes import get_recipe
from chatgot.techniques.base import Machine
from chatgot.techniques.stack import Stack
from tensorkeep_bench.experiment import read_experiment, shipped
from tensorkeep_bench.training.workload import WORKLOAD, arm_config, missing_for

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


@pytest.mark.parametrize("experiment", shipped("training"))
def test_the_use_of_an_arm_trains_what_the_arm_does(experiment: str) -> None:
    plan = read_experiment(experiment)
    recipe = plan.experiment.settings["recipe"]
    for arm in plan.arms:
        start, words = WORKLOAD.use(plan.experiment.settings, arm.settings).split(" train ")
        ranks = arm.settings.get("ranks")
        assert start == ("tensorkeep" if ranks is None else f"torchrun --nproc-per-node {ranks} -m tensorkeep")
        given = shlex.split(words)
        at = given.index("--technique") if "--technique" in given else len(given)
        names = technique_names(given[at + 1]) if at < len(given) else []
        named, settings = read_words(given[:at] + given[at + 2 :])
        trained = get_recipe(named).changed({f"{TECHNIQUES}{each}": "on" for each in names} | settings)
        expected = get_recipe(recipe).changed({key: value for key, value in arm.settings.items() if key != "ranks"})
        assert replace(trained, techniques={}) == replace(expected, techniques={}), arm.name
        found, wanted = (Stack.of(config.techniques).techniques for config in (trained, expected))
        assert [(each.name, each.settings) for each in found] == [(each.name, each.settings) for each in wanted]
        assert {*names} == {*expected.techniques}


def test_the_use_of_an_arm_quotes_its_data_and_turns_techniques_off() -> None:
    arm = {"techniques.compile": "off", "eval.patience": None, "techniques.ddp": "on", "ranks": 2}
    assert WORKLOAD.use({"recipe": "gpt2-124m", "data": "my text.txt"}, arm) == (
        "torchrun --nproc-per-node 2 -m tensorkeep train gpt2-124m --data 'my text.txt' --technique ddp "
        "--techniques.compile off --eval.patience none"
    )
