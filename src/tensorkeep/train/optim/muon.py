"""Muon that orthogonalises all matrices of one shape in one batch."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_AT_ONCE = 1 << 26
"""Elements of a batch: the temporary memory stays small compared to a larger model."""


class Muon(torch.optim.Muon):
    """Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) with the states of `torch.optim.Muon`.

    torch processes one matrix after another. Batched matmuls of all matrices of one shape take about half the time if
    the matrices are small (a few hundred rows on a CPU). The updates are equal up to rounding.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once; see `torch.optim.Muon`."""
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
    for chosen in _batches(parameters):
        wide = [directions[each].mT if _is_tall(directions[each]) else directions[each] for each in chosen]
        for each, update in zip(chosen, _orthogonal(torch.stack(wide), group), strict=True):
            parameter = parameters[each]
            rows, columns = parameter.shape
            # The factor gives updates of all shapes the same size.
            rate = group["lr"] * math.sqrt(max(1.0, rows / columns))
            parameter.add_(update.mT if _is_tall(parameter) else update, alpha=-rate)


def _batches(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the positions of the parameters of each batch."""
    by_shape: dict[tuple[Any, ...], list[int]] = {}
    for position, each in enumerate(parameters):
        by_shape.setdefault((each.device, *sorted(each.shape)), []).append(position)
    for same in by_shape.values():
        most = max(1, _AT_ONCE // parameters[same[0]].numel())
        for begin in range(0, len(same), most):
            yield same[begin : begin + most]


def update_bytes(parameters: Sequence[Tensor]) -> int:
    """Return the largest temporary memory of an update in bytes, computed from the shapes of the matrices."""
    # The float32 stack, the bfloat16 operand and result of a matmul, and two bfloat16 Gram matrices.
    stacks = (
        sum(8 * parameters[each].numel() + 4 * min(parameters[each].shape) ** 2 for each in chosen)
        for chosen in _batches(parameters)
    )
    return 4 * sum(each.numel() for each in parameters) + max(stacks, default=0)


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _orthogonal(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Return approximately the nearest orthogonal matrices, by Newton-Schulz steps in bfloat16, as in torch."""
    a, b, c = group["ns_coefficients"]
    found = matrices.bfloat16()
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found
