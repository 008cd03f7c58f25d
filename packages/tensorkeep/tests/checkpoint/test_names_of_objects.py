"""The names of modules and optimizers in a checkpoint: without wrappers, and by parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorkeep
from tensorkeep.checkpoint.saving import flat_state

Wrap = Callable[[torch.nn.Module], torch.nn.Module]


def compiled(module: torch.nn.Module) -> torch.nn.Module:
    """Wrap as torch.compile does; nothing is compiled before the first call."""
    return torch.compile(module, backend="eager")


WRAPS: list[Wrap] = [
    lambda module: module,
    compiled,
    torch.nn.DataParallel,
    lambda module: torch.nn.DataParallel(compiled(module)),
    lambda module: compiled(torch.nn.DataParallel(module)),
]


def network(*wraps: Wrap) -> torch.nn.Module:
    """A network of nested modules, some of them wrapped. It has an attribute with the name of a wrapper's."""
    first, norm, inner, own, whole = wraps or WRAPS[:1] * 5
    linear = torch.nn.Linear(3, 3, bias=False)
    last = torch.nn.Module()
    last.module = own(torch.nn.Linear(3, 2))
    nested = inner(torch.nn.Sequential(linear, norm(torch.nn.BatchNorm1d(3))))
    return whole(torch.nn.Sequential(first(torch.nn.Linear(2, 3)), nested, last))


def stepped(kind: type[torch.optim.Optimizer], model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    """An optimizer that has taken a step."""
    optimizer = kind(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return optimizer


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(WRAPS), min_size=5, max_size=5))
def test_wrappers_do_not_reach_files(wraps: list[Wrap]) -> None:
    plain = network()
    expected = flat_state({"model": plain, "optimizer": stepped(torch.optim.AdamW, plain)})
    model = network(*wraps)
    found = flat_state({"optimizer": stepped(torch.optim.AdamW, model), "model": model})
    assert {*found.leaves} == {*expected.leaves}
    assert "optimizer.state.1.0.weight.exp_avg" in found.leaves
    assert found.parts == expected.parts


@pytest.mark.parametrize("wrap", [compiled, torch.nn.DataParallel, lambda module: module])
def test_files_of_either_kind_load_into_either_kind(wrap: Any, tmp_path: Path) -> None:
    model = network()
    # As versions before this one wrote it, and as a state_dict() is still saved.
    tensorkeep.save({"model": wrap(model).state_dict()}, tmp_path / "dict")
    tensorkeep.save({"model": wrap(model)}, tmp_path / "object")
    for path in ("dict", "object"):
        for target in (network(), wrap(network())):
            tensorkeep.load(tmp_path / path, into={"model": target})
            for one, other in zip(target.state_dict().values(), model.state_dict().values(), strict=True):
                assert torch.equal(one, other)
    loaded = tensorkeep.load(tmp_path / "object")["model"]
    network().load_state_dict(loaded)
    assert loaded._metadata == model.state_dict()._metadata


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_optimizers_resume_from_old_and_new_names(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], old: bool, fresh: bool, tmp_path: Path
) -> None:
    model, other = network(), network()
    optimizer = stepped(kind, model, **options)
    # A state_dict() has no parameters to name.
    tensorkeep.save({"model": model, "optimizer": optimizer.state_dict() if old else optimizer}, tmp_path / "a")
    with tensorkeep.open(tmp_path / "a") as checkpoint:
        assert any(name.startswith("optimizer.state.1.0.weight.") for name in checkpoint) != old
    restored = kind(other.parameters(), **options) if fresh else stepped(kind, other, **options)
    before = {id(value) for state in restored.state.values() for value in state.values()}
    tensorkeep.load(tmp_path / "a", into={"model": other, "optimizer": restored})
    saved, found = optimizer.state_dict(), restored.state_dict()
    assert saved["param_groups"] == found["param_groups"]
    assert saved["state"].keys() == found["state"].keys()
    for index, state in saved["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(found["state"][index][key]))
    if not fresh:
        after = {id(value) for state in restored.state.values() for value in state.values()}
        assert before == after, "the tensors are filled in place"


def test_the_structure_keeps_the_numbers(tmp_path: Path) -> None:
    model = network()
    optimizer = stepped(torch.optim.AdamW, model)
    tensorkeep.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    loaded = tensorkeep.load(tmp_path / "a")["optimizer"]
    assert loaded["state"].keys() == optimizer.state_dict()["state"].keys() == set(range(len(loaded["state"])))
    torch.optim.AdamW(model.parameters()).load_state_dict(loaded)


def test_parameters_of_several_modules_and_of_none() -> None:
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    both = torch.nn.ModuleList([one, two])
    optimizer = stepped(torch.optim.SGD, both, momentum=0.9)
    found = flat_state({"nets": {"one": one, "two": two}, "optimizer": optimizer}).leaves
    assert "optimizer.state.nets.one.weight.momentum_buffer" in found
    assert "optimizer.state.nets.two.bias.momentum_buffer" in found
    for state in ({"one": one, "optimizer": optimizer}, {"optimizer": optimizer}):
        assert "optimizer.state.3.momentum_buffer" in flat_state(state).leaves


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_other_formats_have_the_same_tensors(to: str, tmp_path: Path) -> None:
    model = network()
    tensorkeep.save({"model": model, "optimizer": stepped(torch.optim.AdamW, model)}, tmp_path / "a")
    tensorkeep.convert(tmp_path / "a", tmp_path / "b", to=to)
    report = tensorkeep.diff(tmp_path / "a", tmp_path / "b")
    assert (report.added, report.removed, report.changed) == ([], [], [])
    assert report.identical == len(tensorkeep.info(tmp_path / "a").entries)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_finds_the_optimizer_by_its_own_names(tmp_path: Path) -> None:
    model = network()
    optimizer = stepped(torch.optim.AdamW, model)
    tensorkeep.save({"model": model, "optimizer": optimizer}, tmp_path / "a", format="dcp")
    state = {"optimizer": {"state": {0: {"exp_avg": torch.zeros(3, 2)}}}}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    first = next(iter(model.parameters()))
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], optimizer.state[first]["exp_avg"])


class OwnModule(torch.nn.Module):
    """``weight`` and ``module.weight``: the names of a wrapped module and of its wrapper, and here two tensors."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2, bias=False)
        self.weight = torch.nn.Parameter(torch.full((2, 2), value))
        torch.nn.init.constant_(self.module.weight, value + 1)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("save_wrap", WRAPS[:3])
def test_an_attribute_named_module_in_a_wrapper(save_wrap: Wrap, wrap: Wrap, strict: bool, tmp_path: Path) -> None:
    tensorkeep.save({"model": save_wrap(OwnModule(1.0))}, tmp_path / "a")
    own = OwnModule(5.0)
    tensorkeep.load(tmp_path / "a", into={"model": wrap(own)}, strict=strict)
    assert [own.weight[0, 0].item(), own.module.weight[0, 0].item()] == [1.0, 2.0]


def test_a_wrapped_module_in_two_places_is_unwrapped_in_both() -> None:
    model = torch.nn.Module()
    model.first = model.second = compiled(torch.nn.Linear(2, 2, bias=False))
    assert flat_state({"model": model}).parts.keys() == {"model.first.weight", "model.second.weight"}


def test_parameters_of_the_same_name_keep_their_numbers(tmp_path: Path) -> None:
    models = {"a.b": torch.nn.Linear(2, 2, bias=False), "a": {"b": torch.nn.Linear(2, 2, bias=False)}}
    parameters = [*models["a.b"].parameters(), *models["a"]["b"].parameters()]
    optimizer = torch.optim.SGD(parameters, momentum=0.9)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    tensorkeep.save({"models": models, "optimizer": optimizer}, tmp_path / "a")
    with tensorkeep.open(tmp_path / "a") as checkpoint:
        assert "optimizer.state.1.momentum_buffer" in checkpoint


def test_a_comparison_with_numbers_goes_by_keys(tmp_path: Path) -> None:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2)) for _ in range(3)])
    # The names of the parameters are numbers, and not those that the optimizer gives them.
    optimizer = torch.optim.SGD([*model][::-1], momentum=0.9)
    sum(number * parameter.sum() for number, parameter in enumerate(model)).backward()
    optimizer.step()
    tensorkeep.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    tensorkeep.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "b")
    report = tensorkeep.diff(tmp_path / "a", tmp_path / "b")
    assert (report.added, report.removed, report.changed, report.identical) == ([], [], [], 6)
