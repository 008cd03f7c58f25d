"""The norms of gradients by layer, for the log."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tensorkeep.train.run.state import Run


def observe_gradient_norms(run: Run) -> None:
    """Make a run record, in the steps that are logged, the norm of each layer's gradient before it is clipped."""
    clip = run.operations.clip

    def observed_clip() -> Tensor:
        norm = clip()
        step = run.progress.step
        is_logged = step % run.config.log.every == 0 or step == run.config.loop.steps
        run.gradient_norms = _scaled(_layer_norms(run), norm) if is_logged else {}
        return norm

    run.operations.clip = observed_clip


def _layer_norms(run: Run) -> dict[str, float]:
    """Return the norms of the gradients as they are, clipped; a collective."""
    squares: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in run.model.named_parameters():
        if parameter.grad is not None:
            squares[layer_of(name)].append(_square(parameter.grad))
    norms = {layer: torch.stack(found).sum().sqrt() for layer, found in squares.items()}
    # Read at once: the host waits for the device one time.
    values = torch.stack(list(norms.values())).tolist() if norms else []
    own = dict(zip(norms, values, strict=True))
    # A stage of a pipeline has the gradients of its own layers only.
    return {layer: value for each in reversed(run.world.all_gather(own)) for layer, value in each.items()}


def _square(gradient: Any) -> Tensor:
    """Return the sum of squares of all elements, of all ranks if the gradient is sharded."""
    square = gradient.float().square().sum()
    return square.full_tensor() if isinstance(square, DTensor) else square


def layer_of(name: str) -> str:
    """Return the layer of a parameter: its block, or the module outside of the blocks.

    Examples
    --------
    >>> layer_of("blocks.11.attention.qkv.weight"), layer_of("tokens.weight")
    ('blocks.11', 'tokens')
    """
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def _scaled(norms: dict[str, float], total: Tensor) -> dict[str, float]:
    """Return norms scaled so that their total is that of the gradient before it was clipped."""
    clipped = sum(each**2 for each in norms.values()) ** 0.5
    factor = total.item() / clipped if clipped else 1.0
    return {layer: each * factor for layer, each in sorted(norms.items(), key=_position)}


def _position(item: tuple[str, float]) -> tuple[bool, str, int]:
    """Return the key by which layers are sorted: blocks by their numbers, after the others."""
    name, _, number = item[0].partition(".")
    return (bool(number), name, int(number or 0))
