"""Triton kernel: the activation of an MLP in one pass over memory, forward and backward."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import Tensor

from chatgot.model.gpt import MLP
from chatgot.techniques.base import Machine, Proof, StepState, Technique, Verification
from tensorkeep.errors import UsageError

# Activations that torch computes in several passes. GELU is one kernel in torch.
_SUPPORTED = ("relu2", "swiglu", "geglu")


class TritonKernel(Technique):
    """Kernels of our own, as in Liger, arXiv 2410.10989: only the inputs are kept for the backward pass."""

    name: ClassVar = "triton-kernel"
    aliases: ClassVar = ("fused-kernels", "fused-kernel-operations", "custom-kernels", "custom-cuda-kernels")
    changes: ClassVar = "model"
    tolerance: ClassVar = 0.01
    summary: ClassVar = "computes SwiGLU, GeGLU or squared ReLU in one kernel each way, without intermediate results"
    effect: ClassVar = (
        "a third less memory for activations of the MLP, and a few per cent of a step's time; compile does as much"
    )
    reference: ClassVar = "arXiv 2410.10989; Tillet et al., MAPL 2019, doi 10.1145/3315508.3329973"
    conflicts: ClassVar = {"compile": "the compiler fuses activations itself"}

    def missing(self, machine: Machine) -> str | None:
        return machine.missing_cuda(least=(8, 0)) or machine.missing_package("triton", install="triton")

    def apply(self, run: StepState) -> None:
        kind = run.config.model.activation
        if kind not in _SUPPORTED:
            raise UsageError(
                f"model.activation is {kind!r}, which torch computes in one kernel already",
                remedy=f"leave triton-kernel out, or choose {', '.join(_SUPPORTED)}",
            )
        self._launches = Counter[tuple[int, str]]()
        for number, block in enumerate(run.model.blocks):
            mlp: MLP = block.mlp  # type: ignore[assignment]
            mlp.forward = partial(_forward, mlp, kind, partial(self._count_launch, number))  # type: ignore[method-assign]

    def _count_launch(self, block: int, direction: str) -> None:
        self._launches[block, direction] += 1

    def verify(self, run: StepState) -> Verification:
        self._launches = Counter()
        yield
        expected, blocks = run.config.loop.gradient_accumulation_steps, range(len(run.model.blocks))
        kernels = [(block, way) for block in blocks for way in ("forward", "backward")]
        # Recomputed blocks launch more.
        fewer = [f"{way} of block {block}" for block, way in kernels if self._launches[block, way] < expected]
        if fewer:
            raise self.not_active(f"the kernel was launched fewer than {expected} times in the {', the '.join(fewer)}")
        count = self._launches.total()
        return Proof(f"{count} launches of the kernel, in each of {len(blocks)} blocks", launches=count)


def _forward(mlp: MLP, kind: str, count_launch: Callable[[str], object], x: Tensor) -> Tensor:
    # Imported late: this file must load on machines without Triton.
    from chatgot.techniques.triton_activations import activation

    up: Tensor = mlp.up(x)
    if mlp.gate is None:
        hidden = activation(kind, up, None, count_launch)
    else:
        hidden = activation(kind, mlp.gate(x), up, count_launch)
    result: Tensor = mlp.dropout(mlp.down(hidden))
    return result
