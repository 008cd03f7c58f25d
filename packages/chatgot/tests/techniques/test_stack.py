"""The stack of techniques: unknown names, conflicts, order, and missing requirements."""

from typing import Any, ClassVar

import pytest
import torch

from chatgot.config.config import Config
from chatgot.config.recipes import RECIPES, get_recipe
from chatgot.step.state import StepState
from chatgot.techniques.base import TECHNIQUE_CLASSES, Machine, Section, Technique, Verification
from chatgot.techniques.stack import COMBINATIONS, Stack, expanded
from tensorkeep.errors import MissingExtraError, UnsupportedError, UsageError


class Fake(Technique):
    kind: ClassVar = "systems"
    changes: ClassVar = "loss"
    summary: ClassVar = "does nothing"
    effect: ClassVar = "none"
    reference: ClassVar = "none"

    def apply(self, run: StepState) -> None: ...

    def verify(self, run: StepState) -> Verification:
        yield
        return None


class TechniqueSettings(Section, frozen=True):
    degree: int = 2


def fake(name: str, **declared: Any) -> Technique:
    kind: type[Fake] = type(name, (Fake,), {"name": name, **declared})
    return kind(kind.Settings())


def test_unknown_names_settings_and_conflicts_are_errors_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="did you mean --technique mixed-precision"):
        Stack.of({"mixed-precison": {}})
    with pytest.raises(UsageError, match="dytpe") as caught:
        Stack.of({"mixed-precision": {"dytpe": "bf16"}})
    assert "dtype" in str(caught.value.remedy)
    first = fake("compile", conflicts={"tf32": "they fight"})
    with pytest.raises(UsageError, match="compile and tf32 cannot be combined: they fight"):
        Stack([fake("tf32"), first])


def test_settings_have_the_stated_type_or_the_annotated_one_which_may_be_text() -> None:
    class Annotated(Fake):
        settings: "TechniqueSettings"

    class Stated(Fake):
        settings: Any
        Settings: ClassVar = TechniqueSettings

    assert Annotated.Settings is Stated.Settings is TechniqueSettings


def test_order_is_by_after_then_by_what_changes_and_by_name_and_never_circular() -> None:
    techniques = [fake("mixed-precision", after=("tf32",)), fake("tf32", after=("compile",)), fake("compile")]
    assert [each.name for each in Stack(techniques).techniques] == ["compile", "tf32", "mixed-precision"]
    named = [("a", "compilation"), ("b", "data"), ("c", "processes"), ("d", "model"), ("z", "process"), ("e", "model")]
    for techniques in (named, named[::-1]):
        stack = Stack([fake(name, changes=changes) for name, changes in techniques])
        assert [each.name for each in stack.techniques] == ["z", "d", "e", "c", "b", "a"]
    with pytest.raises(UsageError, match="compile, tf32 must each come after another"):
        Stack([fake("tf32", after=("compile",)), fake("compile", after=("tf32",))])


def test_all_missing_requirements_are_errors_with_what_turns_them_off() -> None:
    machine = Machine(torch.device("cpu"))
    cuda = fake("tf32", missing=lambda self, machine: machine.missing_cuda())
    with pytest.raises(UnsupportedError, match="tf32 needs a CUDA device; the run is on cpu"):
        Stack([cuda]).check(machine)
    package = fake("tf32", missing=lambda self, machine: machine.missing_package("no_such_module", install="nothing"))
    with pytest.raises(MissingExtraError, match="pip install nothing"):
        Stack([package]).check(machine)
    lacking = [fake(name, missing=lambda self, machine: machine.missing_cuda()) for name in ("tf32", "cuda-graphs")]
    with pytest.raises(UnsupportedError, match=r"cuda-graphs needs a CUDA device.*; tf32 needs a CUDA") as raised:
        Stack([*lacking, fake("compile")]).check(machine)
    options = "--techniques.cuda-graphs off --techniques.tf32 off"
    remedy = f"leave cuda-graphs and tf32 out ({options}), or use a machine that has what is missing"
    assert raised.value.remedy == remedy


def test_combinations_have_known_members_and_techniques_are_switched_by_name() -> None:
    assert expanded(["C", "low-bit-optimizer", "tf32"]) == ["activation-checkpointing", "low-bit-optimizer", "tf32"]
    for names in COMBINATIONS.values():
        assert set(names) <= set(TECHNIQUE_CLASSES.names())
        Stack.of({name: {} for name in names})
    config = get_recipe(next(iter(RECIPES)))
    on = config.changed({"techniques.compile": "on", "techniques.tf32.some": 1})
    assert on.techniques == {"compile": {}, "tf32": {"some": 1}}
    assert on.changed({"techniques.compile": "off", "techniques.tf32": "on"}).techniques == {"tf32": {"some": 1}}
    assert Config.from_dict(on.as_dict()) == on
    with pytest.raises(UsageError, match=r"techniques\.compile is 'yes'"):
        config.changed({"techniques.compile": "yes"})
