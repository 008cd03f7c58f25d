"""Fused cross-entropy: head and loss are computed for a chunk of tokens at a time, without the logits of a whole batch.

Compiled code computes loss and gradient of a chunk in one kernel; uncompiled, operations work on a float32 copy.
"""

# torch.nn.functional.linear_cross_entropy (since 2.13) is not used: it returns the loss and accumulates the head's
# gradient in the dtype of its input. In 16 bits, losses have two to three digits and a scaled loss overflows. Here both
# are float32.

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor
from torch.autograd.function import once_differentiable

from chatgot.model.gpt import IGNORED
from chatgot.techniques.base import Machine, MemoryEffects, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import observe_outputs
from tensorkeep.ext import format_bytes


class FusedCrossEntropySettings(Section, frozen=True):
    """How many logits are in memory at a time."""

    # The number of chunks that the tokens of a batch are split into; only the logits of one chunk are in memory.
    parts: Annotated[int, Meta(ge=2)] = 8
    # How loss and gradient of a chunk are computed from the logits: "compiled", by a kernel that torch compiles;
    # "plain", by operations of torch; "auto", compiled on CUDA with Triton, else plain. The technique compile compiles
    # them in any case.
    kernel: Literal["auto", "compiled", "plain"] = "auto"


class FusedCrossEntropy(Technique):
    """Wijmans et al., arXiv 2411.09009, in chunks, with gradients in the forward pass as in Liger, arXiv 2410.10989."""

    name: ClassVar = "fused-cross-entropy"
    aliases: ClassVar = ("fused-kernels", "fused-kernel-operations", "chunked-cross-entropy", "linear-cross-entropy")
    changes: ClassVar = "model"
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "computes the head and the loss, with their gradients, for a chunk of the tokens at a time"
    effect: ClassVar = (
        "logits and their gradients take an eighth of their memory; a vocabulary smaller than a few times d_model "
        "saves nothing and makes steps slower"
    )
    reference: ClassVar = "arXiv 2411.09009, arXiv 2410.10989"
    predicts_memory: ClassVar = True
    conflicts: ClassVar = {
        "tensor-parallel": "the head is sharded, and the processes compute the loss together",
        "pipeline-parallel": "only the last stage computes the loss",
        **dict.fromkeys(
            ("fsdp", "hsdp"), "the head is gathered in the model's forward, which this technique does not call"
        ),
    }
    settings: FusedCrossEntropySettings

    _losses = 0

    def missing(self, machine: Machine) -> str | None:
        return machine.missing_compiler() if self.settings.kernel == "compiled" else None

    def _kernel(self, device: torch.device) -> "LossKernel":
        machine, requested = Machine(device), self.settings.kernel
        compiled = (
            machine.on_cuda and machine.missing_compiler() is None if requested == "auto" else requested != "plain"
        )
        return _compiled_kernel() if compiled else gradient_and_loss

    def apply(self, run: StepState) -> None:
        plain_loss, kernel, padding = run.model.loss, self._kernel(run.device), run.config.model.vocab_padding

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return plain_loss(tokens, targets)
            features = run.model.features(tokens).flatten(0, 1)
            chunk = -(-len(features) // self.settings.parts)
            # Compiled code with a counter would be recompiled at each value.
            if not torch.compiler.is_compiling():
                self._losses += 1
            return linear_cross_entropy(
                *(features, run.model.head.weight, targets.flatten()), at_once=chunk, padding=padding, kernel=kernel
            )

        run.model.loss = loss  # type: ignore[method-assign]

    def affect_memory(self, effects: MemoryEffects) -> None:
        effects.loss_chunks = self.settings.parts

    def verify(self, run: StepState) -> Verification:
        head_outputs: list[int] = []
        self._losses = 0
        with observe_outputs([run.model.head], lambda module, logits: head_outputs.append(logits.nbytes)):
            yield
        loop, expected = run.config.loop, run.config.loop.gradient_accumulation_steps
        # The head module itself must not run: it would make the logits of all tokens.
        if head_outputs or self._losses != expected:
            raise self.not_active(
                f"{self._losses} of {expected} losses were computed in chunks, and the head returned "
                f"{format_bytes(sum(head_outputs))} of logits"
            )
        # Logits are float32 while their loss is computed.
        row, tokens = 4 * run.config.model.vocab_size, loop.batch_size * run.config.model.context_length
        held, full = row * -(-tokens // self.settings.parts), row * tokens
        summary = f"at most {format_bytes(held)} of logits at a time, of {format_bytes(full)} of a batch"
        return Proof(summary, held_bytes=held, full_bytes=full)


# Computes `gradient_and_loss` of logits [tokens, vocab_size], which it may overwrite, and targets [tokens].
LossKernel = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    at_once: int,
    padding: int = 0,
    kernel: LossKernel | None = None,
) -> Tensor:
    """Return the mean cross-entropy of ``features @ weight.T``, as `chatgot.model.gpt.token_loss`, in float32.

    Features [tokens, d_model], weight [vocab_size, d_model], int64 targets [tokens]; a target of -1 is ignored, and the
    mean is NaN if all are. ``at_once`` tokens are a chunk; the last ``padding`` rows of the weight are not tokens.
    """
    device = features.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
    # The technique compile turns these operations into one kernel.
    chosen = fusable_gradient_and_loss if torch.compiler.is_compiling() else kernel or gradient_and_loss
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        features, weight, targets, at_once, padding, dtype, chosen
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients with the loss, while the logits are in memory; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        targets: Tensor,
        at_once: int,
        padding: int,
        dtype: torch.dtype,
        kernel: LossKernel,
    ) -> Tensor:
        # All sums are in float32; under autocast only the matmuls are in 16 bits.
        total = torch.zeros((), device=features.device)
        by_features = torch.empty_like(features)
        # A frozen head, as with lora, has no gradient.
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        # Cast once, not in every chunk.
        factor = weight.to(dtype)
        for chunk in (slice(begin, begin + at_once) for begin in range(0, len(features), at_once)):
            inputs = features[chunk].to(dtype)
            grad, loss = kernel(inputs @ factor.T, targets[chunk], padding)
            total += loss
            by_features[chunk] = grad @ factor
            if by_weight is not None:
                by_weight += grad.T @ inputs
        # Divide at the end: in float16, the gradient of a mean over many tokens would vanish.
        counted = (targets != IGNORED).sum()
        ctx.save_for_backward(by_features, by_weight, counted)
        return total / counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None, None]:
        by_features, by_weight, counted = ctx.saved_tensors
        scale = gradient / counted
        of_weight = None if by_weight is None else by_weight.mul_(scale)
        # In place: the saved gradients are used once.
        return by_features.mul_(scale), of_weight, None, None, None, None, None


def gradient_and_loss(logits: Tensor, targets: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of the summed cross-entropy with respect to the logits, in their dtype, and the sum."""
    dtype, logits = logits.dtype, logits.float()
    if padding:
        logits[:, -padding:] = -torch.inf
    counted = (targets != IGNORED).unsqueeze(1)
    # -1 is not an index; the loss becomes 0 below.
    targets = targets.clamp(min=0).unsqueeze(1)
    # Log-sum-exp subtracts the maximum first, so that large logits do not overflow.
    norms = logits.logsumexp(1, keepdim=True)
    loss = (norms - logits.gather(1, targets)).masked_fill(~counted, 0.0).sum()
    # Softmax minus one-hot, in the memory of the logits.
    grad = logits.sub_(norms).exp_()
    grad.scatter_add_(1, targets, -torch.ones_like(norms))
    return grad.masked_fill_(~counted, 0.0).to(dtype), loss


def fusable_gradient_and_loss(logits: Tensor, targets: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Return the same as `gradient_and_loss`, by operations that a compiler fuses: no scatter, no in-place writes."""
    dtype, logits = logits.dtype, logits.float()
    tokens = torch.arange(logits.shape[1], device=logits.device)
    if padding:
        logits = logits.masked_fill(tokens >= logits.shape[1] - padding, -torch.inf)
    counted = (targets != IGNORED).unsqueeze(1)
    is_target = tokens == targets.unsqueeze(1)
    norms = logits.logsumexp(1, keepdim=True)
    # Select the target's logit by `where`, not by a product with 0: the logits of padding are infinite.
    chosen = torch.where(is_target, logits, 0.0).sum(1, keepdim=True)
    loss = torch.where(counted, norms - chosen, 0.0).sum()
    grad = torch.where(counted, (logits - norms).exp() - is_target.float(), 0.0)
    return grad.to(dtype), loss


@cache
def _compiled_kernel() -> LossKernel:
    # Each shape is compiled by itself, so that a resumed run, which has not seen earlier shapes, computes equal bits.
    compiled: LossKernel = torch.compile(fusable_gradient_and_loss, dynamic=False)
    return compiled
