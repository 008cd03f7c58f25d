"""Fused cross-entropy: head and loss are computed for a chunk of tokens at a time, without the logits of a whole batch.

`torch.nn.functional.linear_cross_entropy` (since 2.13) is not used: it returns the loss in the dtype of its input, and
accumulates the head's gradient in it, so that in 16 bits losses have two to three digits and a scaled loss overflows.
Here both are float32.
"""

from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from tensorkeep.train.config.sections import Section
from tensorkeep.train.model.gpt import IGNORED
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import Proof, Technique, Verification
from tensorkeep.train.techniques.observe import observe_outputs
from tensorkeep.units import format_bytes


class FusedCrossEntropySettings(Section, frozen=True):
    """How many logits are in memory at a time.

    Attributes
    ----------
    parts : int
        Into how many chunks the tokens of a batch are split; only the logits of one chunk are in memory.
    """

    parts: Annotated[int, Meta(ge=2)] = 8


class FusedCrossEntropy(Technique):
    """Wijmans et al., arXiv 2411.09009, in chunks, with gradients in the forward pass as in Liger, arXiv 2410.10989."""

    name: ClassVar = "fused-cross-entropy"
    kind: ClassVar = "systems"
    changes: ClassVar = "model"
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "computes the head and the loss, with their gradients, for a chunk of the tokens at a time"
    effect: ClassVar = (
        "logits and their gradients take an eighth of their memory; with a vocabulary of fewer tokens than a few times "
        "d_model nothing is saved, and steps take longer"
    )
    reference: ClassVar = "arXiv 2411.09009, arXiv 2410.10989"
    Settings: ClassVar = FusedCrossEntropySettings
    conflicts: ClassVar = {
        "tensor-parallel": "the head is sharded, and the processes compute the loss together",
        "pipeline-parallel": "only the last stage computes the loss",
        **dict.fromkeys(
            ("fsdp", "hsdp"), "the head is gathered in the model's forward, which this technique does not call"
        ),
    }
    settings: FusedCrossEntropySettings

    _losses = 0
    _chunk = 0

    def apply(self, run: Run) -> None:
        """Compute training losses from the model's features and the weights of its head; evaluation is unchanged."""
        plain_loss = run.model.loss

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return plain_loss(tokens, targets)
            features = run.model.features(tokens).flatten(0, 1)
            chunk = -(-len(features) // self.settings.parts)
            # A counter in compiled code would be recompiled at each value.
            if not torch.compiler.is_compiling():
                self._losses, self._chunk = self._losses + 1, chunk
            return linear_cross_entropy(features, run.model.head.weight, targets.flatten(), at_once=chunk)

        run.model.loss = loss  # type: ignore[method-assign]

    def verify(self, run: Run) -> Verification:
        """Count the losses computed in chunks; the head module itself must return nothing."""
        head_outputs: list[int] = []
        self._losses = 0
        with observe_outputs([run.model.head], lambda module, logits: head_outputs.append(logits.nbytes)):
            yield
        loop = run.config.loop
        if head_outputs or self._losses != loop.accumulate:
            raise self.not_active(
                f"{self._losses} of {loop.accumulate} losses were computed in chunks, and the head returned "
                f"{format_bytes(sum(head_outputs))} of logits"
            )
        row = 4 * run.config.model.vocab_size
        held, full = row * self._chunk, row * loop.batch_size * run.config.model.context_length
        return Proof(
            f"at most {format_bytes(held)} of logits at a time, of {format_bytes(full)} of a batch",
            held_bytes=held,
            full_bytes=full,
        )


def linear_cross_entropy(features: Tensor, weight: Tensor, targets: Tensor, *, at_once: int) -> Tensor:
    """Return the mean cross-entropy of ``features @ weight.T``, as `tensorkeep.train.model.gpt.token_loss`, in float32.

    Under autocast the matmuls are computed in its dtype, all sums in float32. The features have the shape
    [tokens, d_model], the weight [vocab_size, d_model], and the targets, int64, [tokens]. Targets of -1 are ignored; if
    all are, the mean is NaN. A chunk has ``at_once`` tokens.
    """
    device = features.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
    loss: Tensor = _LinearCrossEntropy.apply(features, weight, targets, at_once, dtype)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients with the loss, while the logits are in memory; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, features: Tensor, weight: Tensor, targets: Tensor, at_once: int, dtype: torch.dtype
    ) -> Tensor:
        total = torch.zeros((), device=features.device)
        by_features, by_weight = torch.empty_like(features), torch.zeros_like(weight)
        factor = weight.to(dtype)
        for chunk in (slice(begin, begin + at_once) for begin in range(0, len(features), at_once)):
            inputs = features[chunk].to(dtype)
            grad, loss = _gradient_and_loss(inputs @ factor.T, targets[chunk])
            total += loss
            grad = grad.to(dtype)
            by_features[chunk] = grad @ factor
            by_weight += grad.T @ inputs
        # Divided at the end: in float16 the gradient of a mean over many tokens would vanish.
        counted = (targets != IGNORED).sum()
        ctx.save_for_backward(by_features, by_weight, counted)
        return total / counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        by_features, by_weight, counted = ctx.saved_tensors
        scale = gradient / counted
        return by_features.mul_(scale), by_weight.mul_(scale), None, None, None


def _gradient_and_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the summed cross-entropy with respect to the logits, and that sum, in float32."""
    logits = logits.float()
    counted = (targets != IGNORED).unsqueeze(1)
    targets = targets.clamp(min=0).unsqueeze(1)
    norms = logits.logsumexp(1, keepdim=True)
    loss = (norms - logits.gather(1, targets)).masked_fill(~counted, 0.0).sum()
    grad = logits.sub_(norms).exp_()
    grad.scatter_add_(1, targets, -torch.ones_like(norms))
    return grad.masked_fill_(~counted, 0.0), loss
