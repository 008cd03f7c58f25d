"""Fully sharded data parallel: each process keeps a part of every tensor, and gathers a block to compute it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.techniques.base import Proof
from tensorkeep.train.techniques.data_parallel import share_batches
from tensorkeep.train.techniques.parallel import Parallel, others_than
from tensorkeep.train.techniques.sharding import Division, divided, replace_parameters, updated_by
from tensorkeep.units import format_bytes

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class Fsdp(Parallel):
    """Zhao et al., arXiv 2304.11277, as torch's FSDP2 has it: weights, gradients and optimizer states are divided."""

    name: ClassVar = "fsdp"
    # Of a run with dropout, which draws other zeros in each process; without it, only the order of sums differs.
    tolerance: ClassVar = 0.05
    summary: ClassVar = "divides weights, gradients and optimizer states among processes, and gathers block by block"
    effect: ClassVar = "the state takes as many times less memory as there are devices, for half as much again to send"
    reference: ClassVar = "arXiv 2304.11277; torch.distributed.fsdp.fully_shard"
    conflicts: ClassVar = others_than("fsdp")

    def configure(self, config: Config) -> Config:
        """Refuse what needs whole matrices.

        Raises
        ------
        UsageError
            If the optimizer is Muon.
        """
        return without_muon(config, self.name)

    def apply(self, run: Run) -> None:
        """Divide the model, block by block, and the batches."""
        share_batches(run)
        before = dict(run.model.named_parameters())
        mesh = init_device_mesh(run.device.type, (run.world.size,))
        for block in run.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        # Of the root, too, which would by default keep what it gathered for an evaluation into the next step.
        fully_shard(run.model, mesh=mesh, reshard_after_forward=True)
        # Generation calls it in place of the model.
        register_fsdp_forward_method(run.model, "last_logits")
        if run.device.type == "cpu":
            # Gloo has no averages.
            for module in (*run.model.blocks, run.model):
                module.set_force_sum_reduction_for_comms(True)
        replace_parameters(run, before, Division(run.world))
        clip = run.operations.clip
        run.operations.clip = lambda: whole_norm(clip())

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Look at the parameters, and at what the optimizers update."""
        proof = Proof()
        yield proof
        parameters = dict(run.model.named_parameters())
        parts = divided(run.model)
        size = run.world.size
        plain = [name for name in parameters if name not in parts or not _is_divided(parts[name], size)]
        if plain:
            raise self.not_active(
                f"{len(plain)} of {len(parameters)} parameters are not divided, such as {plain[0]}", "report it"
            )
        if updated_by(run) != {id(each) for each in parameters.values()}:
            raise self.not_active("the optimizers update tensors that are not the model's", "report it")
        whole = sum(parts[name].nbytes for name in parameters)
        local = sum(parts[name].to_local().nbytes for name in parameters)
        proof.is_that(
            f"{len(parameters)} parameters are divided among {size} processes; this one has {format_bytes(local)} of "
            f"{format_bytes(whole)}",
            parameters=len(parameters),
            processes=size,
            local_bytes=local,
            whole_bytes=whole,
        )


def _is_divided(parameter: DTensor, size: int) -> bool:
    return parameter.placements == (Shard(0),) and parameter.device_mesh.size() == size


def without_muon(config: Config, name: str) -> Config:
    """Return a configuration whose optimizer needs no whole matrices.

    Raises
    ------
    UsageError
        If the optimizer is Muon.
    """
    if config.optim.name == "muon":
        raise UsageError(
            f"optim.name is 'muon', which orthogonalises whole matrices, and {name} divides them",
            remedy="give optim.name adamw, or use ddp",
        )
    return config


def whole_norm(norm: Tensor) -> Tensor:
    """Return the norm of a divided gradient as a plain number."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
