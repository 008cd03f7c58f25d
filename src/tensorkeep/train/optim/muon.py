"""Muon whose matrices of one shape are orthogonalised together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_AT_ONCE = 1 << 26
"""Elements that are orthogonalised at once: what that takes of memory stays small beside a model that has more."""


class Muon(torch.optim.Muon):
    """Jordan et al., 2024, https://kellerjordan.github.io/posts/muon, as `torch.optim.Muon` has it, and as its states.

    torch multiplies one matrix after another. All matrices of one shape in one batched product take about half the time
    where they are small, as those of a few hundred rows are on a CPU; the updates are the same but for rounding.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update; see `torch.optim.Muon`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, parameters, gradients, momenta)
            if parameters:
                _update(group, parameters, gradients, momenta)
        return loss


def _update(group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]) -> None:
    torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
    directions = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    for chosen in _together(parameters):
        lying = [directions[each].mT if _is_tall(directions[each]) else directions[each] for each in chosen]
        for each, update in zip(chosen, _orthogonal(torch.stack(lying), group), strict=True):
            parameter = parameters[each]
            rate = group["lr"] * _share(parameter)
            parameter.add_(update.mT if _is_tall(parameter) else update, alpha=-rate)


def _together(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Return the positions of those that are orthogonalised at once."""
    by_shape: dict[tuple[Any, ...], list[int]] = {}
    for position, each in enumerate(parameters):
        by_shape.setdefault((each.device, *sorted(each.shape)), []).append(position)
    for same in by_shape.values():
        most = max(1, _AT_ONCE // parameters[same[0]].numel())
        for begin in range(0, len(same), most):
            yield same[begin : begin + most]


def update_bytes(parameters: Sequence[Tensor]) -> int:
    """Return the most bytes that an update of some matrices takes for a while, as it follows from their shapes."""
    # The stack, in 32 bits, with what goes into a product and what comes out of it in 16; and two of the short sides.
    stacks = (
        sum(8 * parameters[each].numel() + 4 * min(parameters[each].shape) ** 2 for each in chosen)
        for chosen in _together(parameters)
    )
    return 4 * sum(each.numel() for each in parameters) + max(stacks, default=0)


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _orthogonal(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the nearest orthogonal matrices, about: by steps of Newton and Schulz in bfloat16, as in torch."""
    a, b, c = group["ns_coefficients"]
    found = matrices.bfloat16()
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found


def _share(parameter: Tensor) -> float:
    """Return the share of the learning rate that makes updates of all shapes of one size."""
    rows, columns = parameter.shape
    return math.sqrt(max(1.0, rows / columns))
