"""Triton kernel: the activation of each MLP in one pass over memory, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from tensorkeep.errors import UsageError
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.machine import Machine

if TYPE_CHECKING:
    from tensorkeep.train.config.sections import Section
    from tensorkeep.train.model.mlp import MLP
    from tensorkeep.train.run.state import Run

_WON = ("relu2", "swiglu", "geglu")
"""Activations that torch computes in several passes; GELU is one kernel there."""


class TritonKernel(Technique):
    """Kernels of our own, as in Liger, arXiv 2410.10989: only what goes in is kept for the backward pass."""

    name: ClassVar = "triton-kernel"
    kind: ClassVar = "systems"
    changes: ClassVar = "model"
    tolerance: ClassVar = 0.01
    summary: ClassVar = "computes SwiGLU, GeGLU or squared ReLU in one kernel each way, and keeps no results between"
    effect: ClassVar = "a third fewer activations of the MLP, and a few per cent of a step's time; compile does as much"
    reference: ClassVar = "arXiv 2410.10989; Tillet et al., MAPL 2019, doi 10.1145/3315508.3329973"
    conflicts: ClassVar = {"compile": "the compiler fuses activations by itself"}

    def __init__(self, settings: Section) -> None:
        super().__init__(settings)
        self._launches: Counter[tuple[int, str]] = Counter()

    def lacks(self, machine: Machine) -> str | None:
        """Say that there is no GPU that Triton compiles for, or no Triton."""
        return machine.lacks_cuda(least=(8, 0)) or machine.lacks_package("triton", install="triton")

    def apply(self, run: Run) -> None:
        """Give the MLPs of all blocks a forward that launches the kernel.

        Raises
        ------
        UsageError
            If the model's activation is one kernel of torch's.
        """
        kind = run.config.model.activation
        if kind not in _WON:
            raise UsageError(
                f"model.activation is {kind!r}, which torch computes in one kernel: there is nothing to win",
                remedy=f"leave triton-kernel out, or choose {', '.join(_WON)}",
            )
        for number, block in enumerate(run.model.blocks):
            mlp: MLP = block.mlp  # type: ignore[assignment]
            mlp.forward = partial(_forward, mlp, kind, partial(self._launched, number))  # type: ignore[method-assign]

    def _launched(self, block: int, way: str) -> None:
        self._launches[block, way] += 1

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Count the kernels that each block launches on both ways."""
        proof = Proof()
        self._launches.clear()
        yield proof
        wanted = run.config.loop.accumulate
        ways = [(number, way) for number in range(len(run.model.blocks)) for way in ("forward", "backward")]
        # More than wanted, where blocks are computed again.
        fewer = [f"{way} of block {number}" for number, way in ways if self._launches[number, way] < wanted]
        if fewer:
            raise self.not_active(
                f"the kernel was launched fewer than {wanted} times in the {', the '.join(fewer)}",
                "report it, with the other techniques that are on",
            )
        count = self._launches.total()
        proof.is_that(f"{count} launches of the kernel, in each of {len(run.model.blocks)} blocks", launches=count)


def _forward(mlp: MLP, kind: str, launched: Callable[[str], object], x: Tensor) -> Tensor:
    """Compute what `MLP.forward` does."""
    from tensorkeep.train.techniques.activation_kernels import activation

    up: Tensor = mlp.up(x)
    hidden = activation(kind, up, None, launched) if mlp.gate is None else activation(kind, mlp.gate(x), up, launched)
    added: Tensor = mlp.dropout(mlp.down(hidden))
    return added
