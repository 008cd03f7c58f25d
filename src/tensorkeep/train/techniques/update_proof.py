"""The proof of an update: AdamW's formula, computed again in float64 for a sample of each weight.

That a kernel was called, or a state is quantised, does not show that the weights have moved as they should: an
optimizer that leaves them as they are, or moves them half as far, would pass. The losses of a few steps would show
neither, because they change by less than the tolerance of most techniques.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import Technique
from tensorkeep.train.techniques.observe import replace_operation

_SAMPLED = 4096
"""Elements of each weight that are compared, evenly spaced."""
_TOLERANCE = 0.01
"""How far an update may be from the formula, relative to its length."""
_ROUNDING = 4 * torch.finfo(torch.float32).eps
"""The relative error of a weight in float32 after an update; a difference that is smaller is not an error."""

State = Mapping[str, Any]


@dataclass
class AdamWUpdate:
    """What was observed of AdamW in a step: how many updates it made, and the weights with another update."""

    updates: int = 0
    compared: int = 0
    """Weights that had a gradient."""
    largest: float = 0.0
    """The largest relative distance of an update from the formula."""
    wrong: list[str] = field(default_factory=list)

    def check(self, technique: Technique) -> None:
        """Raise TechniqueNotActiveError if weights were not updated as AdamW would."""
        if self.wrong:
            raise technique.not_active(
                f"the updates of {len(self.wrong)} of {self.compared} weights are not those of AdamW: that of "
                f"{self.wrong[0]} is {self.largest:.0%} off",
                "report it, with the versions of torch and torchao, and the device",
            )


@contextmanager
def observe_adamw(run: Run, state_of: Callable[[Tensor], State] | None = None) -> Iterator[AdamWUpdate]:
    """Compare the update of AdamW within this context with the formula of Loshchilov and Hutter, arXiv 1711.05101.

    ``state_of`` returns the state of a weight before the update; by default that of the optimizer.
    """
    found, update = AdamWUpdate(), run.operations.update
    names = {id(weight): name for name, weight in run.model.named_parameters()}

    def observed_update() -> None:
        optimizer = run.optimizers["adamw"]
        states = state_of or (lambda weight: optimizer.state.get(weight, {}))
        samples = {
            names.get(id(weight), "a weight"): _Sample(weight, states(weight), group)
            for group in optimizer.param_groups
            for weight in group["params"]
            if weight.grad is not None
        }
        update()
        found.updates += 1
        found.compared += len(samples)
        errors = {name: sample.error() for name, sample in samples.items()}
        # The worst first.
        found.wrong = sorted((name for name in errors if errors[name] > _TOLERANCE), key=lambda name: -errors[name])
        found.largest = max(errors.values(), default=0.0)

    with replace_operation(run, "update", observed_update):
        yield found


class _Sample:
    """Elements of a weight before an update, and what the update should make of them."""

    @torch.no_grad()
    def __init__(self, weight: Tensor, state: State, group: Mapping[str, Any]) -> None:
        self._weight = weight
        self._before = _elements(weight)
        gradient = _elements(weight.grad)
        beta1, beta2 = group["betas"]
        step = float(state.get("step", 0)) + 1
        momentum, variance = (
            _elements(state[key]) if key in state else torch.zeros_like(gradient) for key in ("exp_avg", "exp_avg_sq")
        )
        momentum = torch.lerp(momentum, gradient, 1 - beta1) / (1 - beta1**step)
        variance = torch.lerp(variance, gradient.square(), 1 - beta2) / (1 - beta2**step)
        direction = momentum / (variance.sqrt() + group["eps"])
        self._expected = self._before * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * direction

    def error(self) -> float:
        """Return the distance of the update from what it should be, relative to its length; 0 within rounding."""
        distance = (_elements(self._weight) - self._expected).abs() - _ROUNDING * self._before.abs()
        length = (self._expected - self._before).norm()
        # 0 of 0 is not an error; NaN is one.
        missed = distance.clamp(min=0).norm()
        return 0.0 if bool(missed == 0) else float((missed / length).nan_to_num(float("inf"), float("inf")))


def _elements(tensor: Any) -> Tensor:
    """Return evenly spaced elements of what this process has of a tensor, in float64 on the CPU."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if is_traceable_wrapper_subclass(local):
        # A quantised state of torchao.
        local = local.dequantize()  # type: ignore[attr-defined]
    flat: Tensor = local.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLED)].to("cpu", torch.float64, copy=True)
