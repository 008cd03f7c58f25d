"""Muon that orthogonalises all matrices of one shape in one batch, divided among the ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from tensorkeep.ext import machine

# The coefficients a, b, c of a step X -> (a + b X X^T + c (X X^T)^2) X.
Polynomial = tuple[float, float, float]
# Computes `orthogonal`.
Orthogonal = Callable[[Tensor, Sequence[Polynomial], float, bool, torch.dtype], Tensor]
# By how much rounding in bfloat16 may enlarge a singular value: beyond their range, these polynomials diverge.
_MARGIN = 1.01
# The best polynomial for each step in turn (Amsel et al., arXiv 2505.16932); the last one is repeated.
POLAR_EXPRESS: tuple[Polynomial, ...] = tuple(
    (a / _MARGIN, b / _MARGIN**3, c / _MARGIN**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.875 * _MARGIN, -1.25 * _MARGIN**3, 0.375 * _MARGIN**5),
    )
)

# Elements of a batch: the temporary memory stays small compared to a larger model.
_AT_ONCE = 1 << 26


class Muon(torch.optim.Muon):
    """Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) with the states of `torch.optim.Muon`.

    torch processes one matrix after another. Batched matmuls of all matrices of one shape take about half the time if
    the matrices are small (a few hundred rows on a CPU). The updates are equal up to rounding.

    More keys of a parameter group change them: ``projections``, how many matrices of equal shape each parameter has one
    above the other, which are orthogonalised each by itself; ``polar_express``, true if the steps take the polynomials
    of `POLAR_EXPRESS` in place of ``ns_coefficients``; and ``beta2``, the decay that normalises the rows of an update
    (see `normalise_rows`). Then the state of a parameter also has ``row_variance``, float32 of shape [rows, 1], which
    is whole where the parameter is sharded.
    """

    # The ranks that update the same parameters, whole or sharded (``DTensor``). Each rank orthogonalises some matrices
    # of a batch, and the ranks exchange the results.
    ranks: dist.ProcessGroup | None = None
    # 1.0 to leave parameters and states as they are, else 0.0, as of `torch.optim.AdamW`: decided on the device.
    found_inf: Tensor | None = None

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # A technique may compile it.
        self.orthogonal: Orthogonal = orthogonal

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
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
                variances = []
                for each in parameters if "beta2" in group else ():
                    if "row_variance" not in self.state[each]:
                        self.state[each]["row_variance"] = torch.zeros(each.shape[0], 1, device=each.device)
                    variances.append(self.state[each]["row_variance"])
                with self._undone_where_not_finite(parameters + momenta + variances):
                    self._update(group, parameters, gradients, momenta, variances)
        return loss

    @contextmanager
    def _undone_where_not_finite(self, tensors: list[Tensor]) -> Iterator[None]:
        """Restore the tensors afterwards if `found_inf` is 1; the CPU does not read it."""
        if self.found_inf is None:
            yield
            return
        own = [_local(each) for each in tensors]
        # Copies, because the update changes these tensors in place.
        before = [each.clone() for each in own]
        yield
        for each, old in zip(own, before, strict=True):
            each.copy_(torch.where(self.found_inf > 0, old, each))

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        momenta: list[Tensor],
        variances: list[Tensor],
    ) -> None:
        own, own_gradients, own_momenta = (list(map(_local, each)) for each in (parameters, gradients, momenta))
        # One call for all tensors: many small kernels take longer than their work.
        torch._foreach_lerp_(own_momenta, own_gradients, 1 - group["momentum"])
        nesterov = group["nesterov"]
        directions = torch._foreach_lerp(own_gradients, own_momenta, group["momentum"]) if nesterov else own_momenta
        torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
        if _is_sharded(parameters[0]):
            for chosen in _batches(parameters):
                self._update_shards(group, *(_chosen(each, chosen) for each in (parameters, directions, variances)))
        else:
            self._apply_updates(group, parameters, list(directions), variances)

    def _apply_updates(
        self, group: dict[str, Any], parameters: list[Tensor], directions: list[Tensor], variances: list[Tensor]
    ) -> None:
        """Subtract the orthogonalised directions, times the learning rate, from the parameters."""
        if "projections" in group:
            parameters, directions, variances = (
                [part for each in tensors for part in each.chunk(group["projections"])]
                for tensors in (parameters, directions, variances)
            )
        for chosen in _batches(parameters):
            changed = _chosen(parameters, chosen)
            rows, columns = changed[0].shape
            # The factor gives updates of all shapes the same size.
            rate = group["lr"] * math.sqrt(max(1.0, rows / columns))
            update = self._orthogonalised(_chosen(directions, chosen), group)
            if variances:
                update = normalise_rows(update, _chosen(variances, chosen), group["beta2"])
            torch._foreach_add_(changed, update.to(changed[0].dtype).unbind(), alpha=-rate)
            # Freed before the next batch.
            del update

    def _update_shards(
        self, group: dict[str, Any], parameters: list[Any], directions: list[Tensor], variances: list[Tensor]
    ) -> None:
        """Gather the directions of sharded parameters, compute their updates, and add the rows of this rank."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        full = [
            DTensor.from_local(
                own, each.device_mesh, each.placements, run_check=False, shape=each.shape, stride=each.stride()
            ).full_tensor()
            for each, own in zip(parameters, directions, strict=True)
        ]
        # The update of zeros is the change itself.
        changes = [torch.zeros_like(each) for each in full]
        self._apply_updates(group, changes, full, variances)
        for each, change in zip(parameters, changes, strict=True):
            # Every rank has the whole change, so nothing is sent.
            placed = distribute_tensor(change, each.device_mesh, each.placements, src_data_rank=None)
            each.to_local().add_(placed.to_local())

    def _orthogonalised(self, matrices: list[Tensor], group: dict[str, Any]) -> Tensor:
        express, steps = bool(group.get("polar_express")), range(group["ns_steps"])
        polynomials = tuple(
            POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)] if express else group["ns_coefficients"] for step in steps
        )
        ranks, dtype = self.ranks, dtype_of_steps(matrices[0].device.type)
        size = 1 if ranks is None else dist.get_world_size(ranks)
        if size == 1:
            return self.orthogonal(torch.stack(matrices), polynomials, group["eps"], express, dtype)
        count, rank = -(-len(matrices) // size), dist.get_rank(ranks)
        # Filled up with zeros: a gather needs as many matrices from each rank.
        chosen = matrices[0].new_zeros(count, *matrices[0].shape)
        for place, each in enumerate(matrices[rank * count : (rank + 1) * count]):
            chosen[place] = each
        own = self.orthogonal(chosen, polynomials, group["eps"], express, dtype).contiguous()
        found = own.new_empty(size * count, *own.shape[1:])
        # As bytes: not every backend exchanges bfloat16.
        dist.all_gather_into_tensor(found.view(torch.uint8), own.view(torch.uint8), group=ranks)
        # Without the zeros that filled up the batches of the last ranks.
        return found[: len(matrices)]


def _is_sharded(tensor: Any) -> bool:
    # Without the import of DTensor, which a run of one process does not need.
    return hasattr(tensor, "device_mesh")


def _chosen(tensors: Sequence[Tensor], positions: Sequence[int]) -> list[Tensor]:
    return [tensors[each] for each in positions] if tensors else []


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if _is_sharded(tensor) else tensor
    return found


def _batches(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    by_shape: dict[tuple[Any, ...], list[int]] = {}
    for position, each in enumerate(parameters):
        by_shape.setdefault((each.device, *each.shape), []).append(position)
    for same in by_shape.values():
        most = max(1, _AT_ONCE // parameters[same[0]].numel())
        for begin in range(0, len(same), most):
            yield same[begin : begin + most]


def dtype_of_steps(device: str) -> torch.dtype:
    """Return the dtype of the Newton-Schulz steps on a type of device: bfloat16, as in torch, unless that is slow."""
    return torch.float32 if device == "cpu" and not machine.multiplies_bfloat16_fast() else torch.bfloat16


def update_bytes(parameters: Sequence[Tensor], dtype: torch.dtype) -> int:
    """Return the largest temporary memory of an update in bytes, computed from the shapes of the matrices."""
    # The float32 stack, the operand and the result of a matmul, and two Gram matrices in the dtype.
    size = dtype.itemsize
    stacks = (
        sum((4 + 2 * size) * parameters[each].numel() + 2 * size * min(parameters[each].shape) ** 2 for each in chosen)
        for chosen in _batches(parameters)
    )
    return 4 * sum(each.numel() for each in parameters) + max(stacks, default=0)


def orthogonal(
    matrices: Tensor, polynomials: Sequence[Polynomial], eps: float, with_margin: bool, dtype: torch.dtype
) -> Tensor:
    """Return approximately the nearest orthogonal matrices, by Newton-Schulz steps in a dtype; torch has bfloat16."""
    found = matrices.to(dtype)
    norm = found.norm(dim=(1, 2), keepdim=True)
    found = found / (norm * _MARGIN if with_margin else norm).clamp(min=eps)
    # The smaller Gram matrix; nothing is transposed in memory, which takes as long as a product.
    tall = found.shape[1] > found.shape[2]
    for a, b, c in polynomials:
        gram = found.mT @ found if tall else found @ found.mT
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, found, factor, beta=a) if tall else torch.baddbmm(found, factor, found, beta=a)
    return found


def normalise_rows(matrices: Tensor, variances: Sequence[Tensor], beta2: float) -> Tensor:
    """Divide the rows of updates by the root of the running mean of their squares; each matrix keeps its norm.

    NorMuon (Li et al., arXiv 2510.05491). ``variances``, of shape [rows, 1] each, forget with ``beta2``, and are
    changed in place.
    """
    # Orthogonal matrices of fewer columns than rows have rows of very different norms, and the largest would decide the
    # learning rate of all.
    squares = torch.linalg.vector_norm(matrices, dim=2, keepdim=True, dtype=torch.float32).square()
    torch._foreach_lerp_(list(variances), (squares / matrices.shape[2]).unbind(), 1 - beta2)
    # A row without a gradient so far must not be divided by 0.
    tiny = torch.finfo(torch.float32).tiny
    factors = torch.stack(list(variances)).clamp(min=tiny).rsqrt()
    sums = (each.sum(1, keepdim=True) for each in (squares, squares * factors.square()))
    before, after = (each.clamp(min=tiny) for each in sums)
    result: Tensor = matrices * (factors * (before / after).sqrt())
    return result
