"""Activation swapping: what the backward pass will need waits in the memory of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.autograd.graph import save_on_cpu

from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.machine import Machine
from tensorkeep.train.techniques.swapping import Swapper
from tensorkeep.units import format_bytes

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class ActivationSwappingSettings(Section, frozen=True):
    """How tensors are moved.

    Attributes
    ----------
    pool : bool
        Through memory that is used again, by two streams beside the one that computes. False: by torch's own
        ``save_on_cpu``, which copies in the stream that computes, every tensor that is saved, weights among them.
    least : int
        With the pool: tensors of fewer bytes stay.
    ahead : int
        With the pool: how many tensors are on their way back while one is used.
    """

    pool: bool = True
    least: int = 1 << 20
    ahead: int = 2

    def __post_init__(self) -> None:
        check_bounds("least", self.least, least=1)
        check_bounds("ahead", self.ahead, least=0)


class ActivationSwapping(Technique):
    """Rhu et al., arXiv 1602.08124, for whatever autograd saves."""

    name: ClassVar = "activation-swapping"
    kind: ClassVar = "systems"
    changes: ClassVar = "loss"
    summary: ClassVar = "moves activations to the CPU's memory, and back for the backward pass"
    effect: ClassVar = "activations take little GPU memory; steps take longer where the bus is slower than the layers"
    reference: ClassVar = "arXiv 1602.08124; torch.autograd.graph.save_on_cpu"
    Settings: ClassVar = ActivationSwappingSettings
    conflicts: ClassVar = {
        "activation-checkpointing": "checkpointed blocks save nothing that could be moved",
        "compile": "compiled code takes back at once all that it saved, which is the memory that was to be spared",
        "cuda-graphs": "a recorded graph does not ask for tensors, so that none could be moved back",
        "fsdp": "it gathers weights anew for the backward pass, and they would be moved as if they were activations",
    }

    def __init__(self, settings: Section) -> None:
        super().__init__(settings)
        self._mover: Swapper | _SaveOnCPU

    def lacks(self, machine: Machine) -> str | None:
        """Say that there is no GPU whose memory could be saved."""
        return machine.lacks_cuda()

    def apply(self, run: Run) -> None:
        """Compute losses while what autograd saves is moved."""
        settings = self.settings
        self._mover = (
            Swapper(run.device, list(run.model.parameters()), least=settings.least, ahead=settings.ahead)
            if settings.pool
            else _SaveOnCPU(pinned=run.device.type == "cuda")
        )
        inner = run.operations.loss

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            with self._mover.hooks():
                return inner(inputs, targets)

        run.operations.loss = loss

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Count the bytes that are moved, which must all come back."""
        proof = Proof()
        mover = self._mover
        out, back = mover.out_bytes, mover.back_bytes
        yield proof
        out, back = mover.out_bytes - out, mover.back_bytes - back
        if not out or back < out:
            raise self.not_active(
                f"{format_bytes(out)} were moved to the CPU, and {format_bytes(back)} came back",
                f"give a smaller techniques.{self.name}.least than {self.settings.least:,}, or report it",
            )
        proof.is_that(f"{format_bytes(out)} were moved to the CPU's memory and back", out_bytes=out, back_bytes=back)


class _SaveOnCPU:
    """torch's own, with the bytes counted."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self.out_bytes = 0
        self.back_bytes = 0

    def hooks(self) -> AbstractContextManager[None]:
        """Return a context for one forward pass."""
        hooks = save_on_cpu(pin_memory=self._pinned)
        pack, unpack = hooks.pack_hook, hooks.unpack_hook

        def counted_pack(tensor: Tensor) -> Any:
            self.out_bytes += tensor.nbytes
            return pack(tensor)

        def counted_unpack(packed: Any) -> Tensor:
            tensor: Tensor = unpack(packed)
            self.back_bytes += tensor.nbytes
            return tensor

        hooks.pack_hook, hooks.unpack_hook = counted_pack, counted_unpack
        return hooks
