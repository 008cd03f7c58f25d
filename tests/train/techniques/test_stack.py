"""Techniques together: unknown ones, conflicts, order, and what a machine lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from tensorkeep.errors import MissingExtraError, UnsupportedError, UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.recipes import RECIPES, get_recipe
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import TECHNIQUE_CLASSES, Proof, Technique
from tensorkeep.train.techniques.combinations import COMBINATIONS, expanded
from tensorkeep.train.techniques.machine import Machine
from tensorkeep.train.techniques.stack import Stack


class Fake(Technique):
    kind: ClassVar = "systems"
    changes: ClassVar = "loss"
    summary: ClassVar = "does nothing"
    effect: ClassVar = "none"
    reference: ClassVar = "none"

    def apply(self, run: Run) -> None: ...

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        yield Proof()


def fake(name: str, **declared: Any) -> Technique:
    kind: type[Fake] = type(name, (Fake,), {"name": name, **declared})
    return kind(kind.Settings())


def test_the_nearest_name_is_told() -> None:
    with pytest.raises(UnsupportedError, match="did you mean 'mixed-precision'"):
        Stack.of({"mixed-precison": {}})


def test_an_unknown_setting_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="dytpe") as caught:
        Stack.of({"mixed-precision": {"dytpe": "bf16"}})
    assert "dtype" in str(caught.value.remedy)


def test_a_setting_out_of_range_names_its_technique() -> None:
    with pytest.raises(UsageError, match="activation-checkpointing: every is 0"):
        Stack.of({"activation-checkpointing": {"every": 0}})


def test_a_conflict_names_both_and_the_reason() -> None:
    first = fake("compile", conflicts={"tf32": "they fight"})
    with pytest.raises(UsageError, match="compile and tf32 cannot be combined: they fight"):
        Stack([fake("tf32"), first])


def test_each_comes_after_those_it_wants_before_it() -> None:
    techniques = [fake("mixed-precision", after=("tf32",)), fake("tf32", after=("compile",)), fake("compile")]
    assert [each.name for each in Stack(techniques).techniques] == ["compile", "tf32", "mixed-precision"]


def test_they_are_applied_in_the_order_of_what_they_change_and_then_by_name() -> None:
    named = [("a", "compilation"), ("b", "data"), ("c", "processes"), ("d", "model"), ("z", "process"), ("e", "model")]
    for techniques in (named, named[::-1]):
        stack = Stack([fake(name, changes=changes) for name, changes in techniques])
        assert [each.name for each in stack.techniques] == ["z", "d", "e", "c", "b", "a"]


def test_a_circle_is_refused() -> None:
    with pytest.raises(UsageError, match="compile, tf32 each want to come after another"):
        Stack([fake("tf32", after=("compile",)), fake("compile", after=("tf32",))])


def test_what_a_machine_lacks_is_said() -> None:
    machine = Machine(torch.device("cpu"))
    cuda = fake("tf32", lacks=lambda self, machine: machine.lacks_cuda())
    with pytest.raises(UnsupportedError, match="tf32 needs a CUDA device; the run is on cpu"):
        Stack([cuda]).check(machine)
    package = fake("tf32", lacks=lambda self, machine: machine.lacks_package("no_such_module", install="nothing"))
    with pytest.raises(MissingExtraError, match="pip install nothing"):
        Stack([package]).check(machine)


def test_combinations_are_of_known_techniques() -> None:
    assert expanded(["C", "low-bit-optimizer", "tf32"]) == ["activation-checkpointing", "low-bit-optimizer", "tf32"]
    for names in COMBINATIONS.values():
        assert set(names) <= set(TECHNIQUE_CLASSES.names())
        Stack.of({name: {} for name in names})


def test_a_technique_is_turned_on_off_and_changed_by_name() -> None:
    config = get_recipe(next(iter(RECIPES)))
    on = config.changed({"techniques.compile": "on", "techniques.tf32.some": 1})
    assert on.techniques == {"compile": {}, "tf32": {"some": 1}}
    assert on.changed({"techniques.compile": "off", "techniques.tf32": "on"}).techniques == {"tf32": {"some": 1}}
    assert Config.from_dict(on.as_dict()) == on
    with pytest.raises(UsageError, match=r"techniques\.compile is 'yes'"):
        config.changed({"techniques.compile": "yes"})
