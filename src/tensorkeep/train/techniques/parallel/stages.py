"""Stages of a pipeline: which process has which blocks of a model, and saves them."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from tensorkeep.train.model.cache import Cache
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.model.positions import RotaryPositions
from tensorkeep.train.optim.average import WeightAverage
from tensorkeep.train.optim.optimizers import weights_of
from tensorkeep.train.run.state import Run
from tensorkeep.train.run.world import World
from tensorkeep.train.techniques.parallel.filling import fill_parameters, update_parameters


class Stages:
    """The blocks of a model, split among the processes of a run.

    ``blocks`` are the numbers of those that this process has. The ``first`` process also has the embeddings, the
    ``last`` one the final norm and the head.
    """

    def __init__(self, model: GPT, world: World) -> None:
        self.model = model
        self.world = world
        layers, size = model.config.n_layers, world.size
        self._ends = [layers * stage // size for stage in range(size + 1)]
        self.blocks = range(self._ends[world.rank], self._ends[world.rank + 1])
        self.first = world.is_main
        self.last = world.rank == size - 1

    def owner(self, name: str) -> int:
        """Return the rank of the process that has a parameter; the first of two for a tied one."""
        section, _, rest = name.partition(".")
        if section == "blocks":
            number = int(rest.partition(".")[0])
            return next(rank for rank, end in enumerate(self._ends[1:]) if number < end)
        return self.world.size - 1 if section in ("norm", "head") else 0

    def own(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this process has, by name."""
        tied = {"tokens.weight"} if self.last and self.model.config.tied else set()
        found = self.model.named_parameters()
        return {name: each for name, each in found if self.owner(name) == self.world.rank or name in tied}

    def weights(self) -> dict[str, Tensor]:
        """Return what this process has of the model's ``state_dict()``."""
        weights = OrderedDict((name, each.data) for name, each in self.own().items())
        if self.model.config.tied and self.last:
            # The same memory, as in a checkpoint of one process.
            weights["head.weight"] = weights["tokens.weight"]
        return weights

    def fill(self, run: Run) -> None:
        """Make the parameters of this process; those of other processes have shapes, and no memory."""
        own, before = self.own(), dict(self.model.named_parameters())

        def own_values(name: str, parameter: Tensor, full: Tensor) -> Tensor:
            if name in own:
                return full.to(run.device)
            return torch.zeros((), device=run.device).expand(parameter.shape)

        fill_parameters(run, own_values)
        update_parameters(run, before)

    def compute(self, x: Tensor, start: int, cache: Cache | None = None) -> Tensor:
        """Return the output of this process's blocks."""
        positions, rotation = self.model.positions, None
        if isinstance(positions, RotaryPositions):
            rotation = positions(start, start + x.shape[1])
        for number in self.blocks:
            x = self.model.blocks[number](x, rotation, None if cache is None else cache.layers[number])
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the last stage, in float32."""
        return self.model.logits(self.model.norm(x)).float()

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits in every process: for evaluation."""
        return self._broadcast_logits(self._features(tokens, cache))

    def last_logits(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits of the token after the last one in every process: for generation."""
        return self._broadcast_logits(self._features(tokens, cache)[:, -1])

    def _features(self, tokens: Tensor, cache: Cache | None) -> Tensor:
        """Return the output of the last stage's blocks in every process."""
        start = 0 if cache is None else cache.length
        shape = (*tokens.shape, self.model.config.d_model)
        x = self.model.embed(tokens, cache) if self.first else self.model.tokens.weight.new_empty(shape)
        for rank in range(self.world.size):
            if rank == self.world.rank:
                x = self.compute(x, start, cache)
            x = x.contiguous()
            dist.broadcast(x, src=rank)
        for layer in () if cache is None else cache.layers:
            # The caches of other processes' blocks are empty, and must have the same length.
            layer.length = start + tokens.shape[-1]
        return x

    def _broadcast_logits(self, x: Tensor) -> Tensor:
        logits = self.logits(x) if self.last else x.new_empty((*x.shape[:-1], self.model.config.n_tokens))
        dist.broadcast(logits, src=self.world.size - 1)
        return logits


class StageModule(nn.Module):
    """The computation of this process in a step, as a module for torch's schedules."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self._stages = stages
        self.parameters_of_stage = nn.ParameterList(stages.own().values())

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of the next stage, or the logits."""
        stages = self._stages
        x = stages.compute(stages.model.embed(x) if stages.first else x, 0)
        return stages.logits(x) if stages.last else x


def save_own_stage(run: Run, stages: Stages) -> None:
    """Make this rank save and load the parameters, averages and optimizer states of its stage only.

    The keys are those of one process: the ranks together have all of them.
    """
    run.average = WeightAverage(stages.own(), run.config.ema.decay)
    run.in_checkpoint["model"] = stages.weights
    run.in_checkpoint["optimizers"] = lambda: {
        name: _own_state(optimizer, stages) for name, optimizer in run.optimizers.items()
    }


def _own_state(optimizer: torch.optim.Optimizer, stages: Stages) -> dict[str, Any]:
    """Return the state of an optimizer by the numbers of the parameters, empty for those of other processes.

    An object of its own for each parameter lets a process load its states only.
    """
    own = {id(each) for each in stages.own().values()}
    states: dict[int, Any] = {
        number: _ParameterState(optimizer, parameter) if id(parameter) in own else {}
        for number, parameter in enumerate(weights_of(optimizer))
    }
    return {**optimizer.state_dict(), "state": states}


class _ParameterState:
    """The state that an optimizer has for one parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
        self._optimizer = optimizer
        self._parameter = parameter

    def state_dict(self) -> dict[str, Any]:
        return dict(self._optimizer.state.get(self._parameter, {}))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameter = self._parameter
        self._optimizer.state[parameter] = {
            key: value.to(parameter.device) if value.shape == parameter.shape else value for key, value in state.items()
        }
