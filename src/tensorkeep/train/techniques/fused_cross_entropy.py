"""Fused cross-entropy: head and loss in one, which never holds the logits of a whole batch.

torch has it as `torch.nn.functional.linear_cross_entropy` since 2.13. It is not used: it returns the loss in the dtype
of its input, and adds up the head's gradient in it, so that in 16 bits losses have two to three digits, and a scaled
loss overflows. Here both are kept in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.sections import Section
from tensorkeep.train.model.gpt import IGNORED
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.watching import seen_outputs
from tensorkeep.units import format_bytes

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class FusedCrossEntropySettings(Section, frozen=True):
    """How little is held at a time.

    Attributes
    ----------
    parts : int
        Into how many parts the tokens of a batch are divided; there are logits for one part at a time.
    """

    parts: int = 8

    def __post_init__(self) -> None:
        check_bounds("parts", self.parts, least=2)


class FusedCrossEntropy(Technique):
    """Wijmans et al., arXiv 2411.09009, in chunks, with gradients in the forward pass as in Liger, arXiv 2410.10989."""

    name: ClassVar = "fused-cross-entropy"
    kind: ClassVar = "systems"
    changes: ClassVar = "model"
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "computes the head and the loss, with their gradients, for a part of the tokens at a time"
    effect: ClassVar = (
        "logits and their gradients take an eighth of their memory; with a vocabulary of fewer tokens than a few times "
        "d_model there is nothing to win, and steps take longer"
    )
    reference: ClassVar = "arXiv 2411.09009, arXiv 2410.10989"
    Settings: ClassVar = FusedCrossEntropySettings
    conflicts: ClassVar = {
        "tensor-parallel": "the head is divided among devices, which compute the loss together",
        "pipeline-parallel": "the loss is computed by the last stage alone",
        "fsdp": "the weights of the head are gathered where the model is called as a whole, which it is not",
    }

    def __init__(self, settings: Section) -> None:
        super().__init__(settings)
        self._losses = 0
        self._at_once = 0

    def apply(self, run: Run) -> None:
        """Compute the model's losses from its features and the weights of its head, but where it is evaluated."""
        whole = run.model.loss

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return whole(tokens, targets)
            features = run.model.features(tokens).flatten(0, 1)
            at_once = -(-len(features) // self.settings.parts)
            # Compiled code would be made anew for each number.
            if not torch.compiler.is_compiling():
                self._losses, self._at_once = self._losses + 1, at_once
            return linear_cross_entropy(features, run.model.head.weight, targets.flatten(), at_once=at_once)

        run.model.loss = loss  # type: ignore[method-assign]

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """See that each loss was computed in parts, and that the head itself returned nothing."""
        proof = Proof()
        whole: list[int] = []
        self._losses = 0
        with seen_outputs([run.model.head], lambda module, logits: whole.append(logits.nbytes)):
            yield proof
        loop = run.config.loop
        if whole or self._losses != loop.accumulate:
            raise self.not_active(
                f"{self._losses} of {loop.accumulate} losses were computed in parts, and the head returned "
                f"{format_bytes(sum(whole))} of logits",
                "report it, with the other techniques that are on",
            )
        row = 4 * run.config.model.vocab_size
        held = row * self._at_once
        full = row * loop.batch_size * run.config.model.context_length
        proof.is_that(
            f"no more than {format_bytes(held)} of logits at a time, of {format_bytes(full)} of a batch",
            held_bytes=held,
            full_bytes=full,
        )


def linear_cross_entropy(features: Tensor, weight: Tensor, targets: Tensor, *, at_once: int) -> Tensor:
    """Return what `tensorkeep.train.model.gpt.token_loss` gives for ``features @ weight.T``, in nats and float32.

    Under autocast the products are computed in its dtype, all sums in float32.

    Parameters
    ----------
    features : Tensor
        Of shape [tokens, d_model].
    weight : Tensor
        Of shape [vocab_size, d_model].
    targets : Tensor
        int64, of shape [tokens]. Those that are -1 are left out; if all are, the mean is NaN.
    at_once : int
        For how many tokens there are logits at a time.
    """
    place = features.device.type
    dtype = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else features.dtype
    found: Tensor = _LinearCrossEntropy.apply(features, weight, targets, at_once, dtype)  # type: ignore[no-untyped-call]
    return found


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes gradients with the loss, while the logits are there; they are scaled on the way back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, features: Tensor, weight: Tensor, targets: Tensor, at_once: int, dtype: torch.dtype
    ) -> Tensor:
        total = torch.zeros((), device=features.device)
        by_features, by_weight = torch.empty_like(features), torch.zeros_like(weight)
        factor = weight.to(dtype)
        for part in (slice(begin, begin + at_once) for begin in range(0, len(features), at_once)):
            given = features[part].to(dtype)
            slope, loss = _slope_and_loss(given @ factor.T, targets[part])
            total += loss
            slope = slope.to(dtype)
            by_features[part] = slope @ factor
            by_weight += slope.T @ given
        # Last, because in float16 the gradient of a mean over many tokens would vanish.
        counted = (targets != IGNORED).sum()
        ctx.save_for_backward(by_features, by_weight, counted)
        return total / counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        by_features, by_weight, counted = ctx.saved_tensors
        scale = gradient / counted
        return by_features.mul_(scale), by_weight.mul_(scale), None, None, None


def _slope_and_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the summed cross entropy with respect to logits, and that sum, in float32."""
    logits = logits.float()
    counted = (targets != IGNORED).unsqueeze(1)
    targets = targets.clamp(min=0).unsqueeze(1)
    norms = logits.logsumexp(1, keepdim=True)
    loss = (norms - logits.gather(1, targets)).masked_fill(~counted, 0.0).sum()
    slope = logits.sub_(norms).exp_()
    slope.scatter_add_(1, targets, -torch.ones_like(norms))
    return slope.masked_fill_(~counted, 0.0), loss
