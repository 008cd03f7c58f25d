"""The states of all optimizers are restored, and those of other parameters are refused."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorkeep
from tensorkeep.testing.equality import same
from tiers import exhaustive

Make = Callable[[Any], torch.optim.Optimizer]

EVERY: dict[str, Any] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
WITH_OPTIONS: dict[str, Make] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop with everything": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "AMSGrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "a learning rate that is a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "LBFGS with a line search": lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe"),
}
ALL: dict[str, Make] = {**EVERY, **WITH_OPTIONS}


class Tower(nn.Module):
    """Its first parameter has one dimension, unless the optimizer takes matrices only."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=name != "Muon")
        self.embedding = nn.Embedding(8, 6, sparse=name == "SparseAdam")
        self.weight = nn.Parameter(torch.randn(6, 4), requires_grad=name != "SparseAdam")

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = (self.embedding(torch.tensor([1, 2, 5])) @ self.weight + self.bias - 3).square().mean()
        return found


def build(name: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Tower(name)
    if name == "SparseAdam":
        model.bias.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {"model": model, "optimizer": ALL[name](trained)}


def train(state: dict[str, Any], steps: int) -> None:
    def closure() -> torch.Tensor:
        state["optimizer"].zero_grad()
        loss: torch.Tensor = state["model"].loss()
        loss.backward()
        return loss

    for _ in range(steps):
        state["optimizer"].step(closure)


def saved(state: Any, path: Path) -> Path:
    tensorkeep.save(state, path)
    return path


@pytest.mark.parametrize(("name", "steps"), [*zip(ALL, cycle((0, 1))), *exhaustive(*zip(ALL, cycle((1, 0))))])
def test_training_resumes_with_every_optimizer(tmp_path: Path, name: str, steps: int) -> None:
    state, other = build(name, 0), build(name, 1)
    train(state, 2)
    path = saved(state, tmp_path / "saved")
    train(other, steps)
    tensorkeep.load(path, into=other)
    assert same(other["optimizer"].state_dict(), state["optimizer"].state_dict())
    train(state, 2)
    train(other, 2)
    assert same(dict(other["model"].state_dict()), dict(state["model"].state_dict()))
    assert same(other["optimizer"].state_dict(), state["optimizer"].state_dict())


def test_every_optimizer_of_torch_is_among_them() -> None:
    assert {"Adafactor", "AdamW", "LBFGS", "Muon", "SGD", "SparseAdam"} <= set(EVERY)


def refusal(path: Path, into: Any) -> str:
    before = {key: [tensor.clone() for tensor in into[key].state_dict().values()] for key in into if key != "optimizer"}
    states = len(into["optimizer"].state)
    with pytest.raises(tensorkeep.StateMismatchError, match="nothing was touched") as raised:
        tensorkeep.load(path, into=into)
    assert all(same(list(into[key].state_dict().values()), tensors) for key, tensors in before.items())
    assert len(into["optimizer"].state) == states
    return str(raised.value)


def test_a_group_that_was_added_after_saving_and_a_state_without_groups_are_named(tmp_path: Path) -> None:
    model, head = nn.Linear(3, 2), nn.Linear(2, 1)
    path = saved({"model": model, "optimizer": torch.optim.Adam(model.parameters())}, tmp_path / "saved")
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.add_param_group({"params": list(head.parameters())})
    error = refusal(path, {"model": nn.Linear(3, 2), "optimizer": optimizer})
    assert "optimizer: groups of [2, 2] parameters in the state, of [2] saved" in error
    error = refusal(saved({"optimizer": {"param_groups": 3}}, tmp_path / "none"), {"optimizer": optimizer})
    assert "optimizer: an optimizer in the state, none saved" in error


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", ["Adafactor", "AdamW"])
def test_the_state_of_an_optimizer_of_other_parameters_is_named(tmp_path: Path, name: str, used: bool) -> None:
    def build(width: int, steps: int) -> torch.optim.Optimizer:
        weight = nn.Parameter(torch.ones(width, 3))
        bias = nn.Parameter(torch.ones(width))
        optimizer: torch.optim.Optimizer = EVERY[name]([weight, bias])
        for _ in range(steps):
            (weight.sum() + bias.sum()).backward()
            optimizer.step()
        return optimizer

    path = saved({"optimizer": build(5, 1)}, tmp_path / "saved")
    error = refusal(path, {"optimizer": build(4, int(used))})
    key = "variance" if name == "Adafactor" else "exp_avg"
    assert f"optimizer.state.1.{key}: " in error
    assert ("float32 [4] in the state, float32 [5] saved" if used else "[5] saved, for a parameter of [4]") in error


@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum", "Adafactor"])
def test_parameters_in_another_order_or_with_other_names_do_not_take_the_state_of_others(
    tmp_path: Path, name: str
) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    named = [*model.named_parameters()]
    path = saved({"optimizer": ALL[name](named)}, tmp_path / "saved")
    error = refusal(path, {"optimizer": ALL[name](named[::-1])})
    assert "optimizer.param_groups.0.param_names.0: parameter 0 is 'b.weight' in the state, 'a.weight' saved" in error
    wrapped = [("_orig_mod." + name.replace(".", ".module."), parameter) for name, parameter in named]
    for same_order in (named, wrapped, [parameter for _, parameter in named]):
        tensorkeep.load(path, into={"optimizer": ALL[name](same_order)})


class Projected(torch.optim.Optimizer):
    """Its state is smaller than its parameters, under the name that others have for one of the same shape."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = parameter.grad.mean(1, keepdim=True)


def test_third_party_optimizers_may_have_states_of_any_shape(tmp_path: Path) -> None:
    weight, other = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    optimizer, fresh = Projected([weight]), Projected([other])
    weight.sum().backward()
    optimizer.step()
    tensorkeep.load(saved({"optimizer": optimizer}, tmp_path / "saved"), into={"optimizer": fresh})
    assert torch.equal(fresh.state[other]["exp_avg"], torch.ones(4, 1))
