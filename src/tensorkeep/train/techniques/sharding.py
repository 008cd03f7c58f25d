"""Checkpoints of models whose tensors are divided among processes: they hold whole tensors, as those of one process do.

Torch's own tools for this (`torch.distributed.checkpoint.state_dict`) name the states of optimizers by parameter, and
step an optimizer to learn them. Here a checkpoint is laid out as any other, and one process can go on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tensorkeep.train.optim.average import WeightAverage
from tensorkeep.train.run.world import World

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class Division:
    """How the parameters of a model are divided, and made whole again.

    Parameters
    ----------
    world : World
    rows : mapping of str to Tensor
        For parameters whose rows are not divided as they come: the numbers of the rows, as they lie from process to
        process.
    """

    def __init__(self, world: World, rows: Mapping[str, Tensor] | None = None) -> None:
        self._world = world
        self._rows = rows or {}

    def whole(self, name: str, part: DTensor) -> Tensor:
        """Return the whole of a tensor that is divided as the parameter of a name is; empty where it is not saved."""
        found = self._world.full_tensor(part)
        if name not in self._rows or not found.numel():
            return found
        return torch.empty_like(found).index_copy_(0, self._rows[name], found)

    def part(self, name: str, whole: Tensor, like: DTensor) -> DTensor:
        """Return a tensor, whole in each process, divided as the parameter of a name is, like which it is placed."""
        if name in self._rows:
            whole = whole.index_select(0, self._rows[name].to(whole.device))
        # Every process has it already: nothing is sent.
        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def replace_parameters(run: Run, before: Mapping[str, nn.Parameter], division: Division) -> None:
    """Let optimizers and average have the parameters that a model has now, and checkpoints hold whole tensors.

    Parameters
    ----------
    run : Run
        Of a model whose parameters are DTensors.
    before : mapping of str to Parameter
        Those that it was built with, by name.
    division : Division
    """
    now = dict(run.model.named_parameters())
    new = {id(old): now[name] for name, old in before.items()}
    for optimizer in run.optimizers.values():
        for group in optimizer.param_groups:
            group["params"] = [new[id(each)] for each in group["params"]]
        _save_whole_states(optimizer, run.model, division)
    run.average = _Average(run.model, run.config.ema.decay, division)
    _save_whole_weights(run.model, division)


def divided(model: nn.Module) -> dict[str, DTensor]:
    """Return the parameters of a model that are DTensors, by name; those that are tied under each of their names."""
    found = model.named_parameters(remove_duplicate=False)
    return {name: each.data for name, each in found if isinstance(each.data, DTensor)}


def updated_by(run: Run) -> set[int]:
    """Return the identities of the tensors that the optimizers of a run update."""
    groups = (group for optimizer in run.optimizers.values() for group in optimizer.param_groups)
    return {id(each) for group in groups for each in group["params"]}


def _save_whole_weights(model: nn.Module, division: Division) -> None:
    def gather(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        # Tied weights share their memory in a checkpoint, too.
        whole: dict[int, Tensor] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in whole:
                whole[id(parameter)] = division.whole(name, parameter.data)  # type: ignore[arg-type]
            state[prefix + name] = whole[id(parameter)]

    def divide(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for name, parameter in divided(module).items():
            state[prefix + name] = division.part(name, state[prefix + name], parameter)

    model.register_state_dict_post_hook(gather)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(divide)  # type: ignore[no-untyped-call]


def _save_whole_states(optimizer: torch.optim.Optimizer, model: nn.Module, division: Division) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [each for group in optimizer.param_groups for each in group["params"]]

    def gather(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        def whole(parameter: Any, value: Any) -> Any:
            return division.whole(names[id(parameter)], value) if isinstance(value, DTensor) else value

        return _mapped(state, parameters, whole)

    def divide(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        def part(parameter: Any, value: Any) -> Any:
            fits = isinstance(value, Tensor) and value.shape == parameter.shape
            return division.part(names[id(parameter)], value, parameter.data) if fits else value

        return _mapped(state, parameters, part)

    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(divide)


def _mapped(state: dict[str, Any], parameters: list[Any], change: Callable[[Any, Any], Any]) -> dict[str, Any]:
    states = {
        index: {key: change(parameters[index], value) for key, value in each.items()}
        for index, each in state["state"].items()
    }
    return {**state, "state": states}


class _Average(WeightAverage):
    """An average whose tensors are divided as the weights are."""

    def __init__(self, model: nn.Module, decay: float, division: Division) -> None:
        super().__init__(model, decay)
        self._division = division

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by parameter, each whole."""
        return {name: self._division.whole(name, each) for name, each in self._parts().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take averages that `state_dict` gave."""
        parts = self._parts().items()
        super().load_state_dict({name: self._division.part(name, state[name], like) for name, like in parts})

    def _parts(self) -> dict[str, Any]:
        return super().state_dict()
