"""Tensor parallelism: each process has some heads of every attention, and some of the hidden layer of every MLP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.model.cache import Cache
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.techniques.base import Proof
from tensorkeep.train.techniques.fsdp import whole_norm, without_muon
from tensorkeep.train.techniques.parallel import Parallel, others_than
from tensorkeep.train.techniques.sharding import Division, divided, replace_parameters, updated_by

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

_BY_ROWS = ("attention.qkv", "mlp.up", "mlp.gate")
_BY_COLUMNS = ("attention.out", "mlp.down")


class TensorParallel(Parallel):
    """Shoeybi et al., arXiv 1909.08053: the layer into attention and MLP is divided by rows, the one out by columns.

    Between them each process computes alone; after each pair their results are added. All else, the embeddings, norms
    and the head, every process computes by itself, and so do all of them the same batches. Dropout within attention
    draws the same zeros for the heads of each process.
    """

    name: ClassVar = "tensor-parallel"
    # Of a run with dropout, which draws other zeros for heads; without it, only the order of sums differs.
    tolerance: ClassVar = 0.05
    summary: ClassVar = "divides the matrices of every block among processes, by heads and by hidden units"
    effect: ClassVar = "blocks take as many times less memory as there are devices; every block waits for them twice"
    reference: ClassVar = "arXiv 1909.08053; torch.distributed.tensor.parallel.parallelize_module"
    conflicts: ClassVar = {
        **others_than("tensor-parallel"),
        "activation-swapping": "what is kept of divided matrices are parts, which it does not know how to move",
    }

    def configure(self, config: Config) -> Config:
        """Refuse what needs whole matrices.

        Raises
        ------
        UsageError
            If the optimizer is Muon.
        """
        return without_muon(config, self.name)

    def apply(self, run: Run) -> None:
        """Divide the blocks, and let all other parameters be there in each process.

        Raises
        ------
        UsageError
            If heads or hidden units do not divide.
        """
        model, size = run.model, run.world.size
        check_sizes(model.config, size)
        before = dict(model.named_parameters())
        rows = _rows_by_head(model, size)
        mesh = init_device_mesh(run.device.type, (size,))
        with torch.no_grad():
            for name, order in rows.items():
                before[name].copy_(before[name][order.to(run.device)])
        for block in model.blocks:
            plan = {name: ColwiseParallel() for name in _BY_ROWS} | {name: RowwiseParallel() for name in _BY_COLUMNS}
            parallelize_module(block, mesh, {name: how for name, how in plan.items() if _has(block, name)})
            block.attention.n_heads //= size  # type: ignore[union-attr, operator]
            for norm in (block.norm1, block.norm2):
                _replicate(norm, mesh)  # type: ignore[arg-type]
        for module in (model.tokens, model.shift, model.positions, model.norm, model.head):
            if module is not None:
                _replicate(module, mesh)
        if model.config.tied:
            model.head.weight = model.tokens.weight
        _shrink_cache(model, size)
        replace_parameters(run, before, Division(run.world, rows))
        clip = run.operations.clip
        run.operations.clip = lambda: whole_norm(clip())

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Look at the parameters of the blocks, at what the optimizers update, and at the heads that are computed."""
        proof = Proof()
        heads: set[int] = set()

        def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
            heads.add(output.shape[-1] // (3 * run.config.model.head_size))

        hooks = [block.attention.qkv.register_forward_hook(look) for block in run.model.blocks]  # type: ignore[union-attr]
        try:
            yield proof
        finally:
            for hook in hooks:
                hook.remove()
        size, parts = run.world.size, divided(run.model)
        wrong = [name for name, how in _placements(run.model).items() if not _is_placed(parts.get(name), how, size)]
        if wrong:
            raise self.not_active(
                f"{len(wrong)} parameters of the blocks are not divided, such as {wrong[0]}", "report it"
            )
        if updated_by(run) != {id(each) for each in run.model.parameters()}:
            raise self.not_active("the optimizers update tensors that are not the model's", "report it")
        wanted = run.config.model.n_heads // size
        if heads != {wanted}:
            raise self.not_active(f"{sorted(heads)} heads were computed here instead of {wanted}", "report it")
        count, all_heads = len(_placements(run.model)), run.config.model.n_heads
        proof.is_that(
            f"{count} parameters of the blocks are divided among {size} processes; this one computed {wanted} of "
            f"{all_heads} heads",
            parameters=count,
            processes=size,
            heads=wanted,
        )


def check_sizes(config: ModelConfig, size: int) -> None:
    """Raise UsageError unless heads and hidden units of a model divide among so many processes."""
    for what, count in (("n_heads", config.n_heads), ("d_ff", config.mlp_width)):
        if count % size:
            raise UsageError(
                f"{count} does not divide among {size} processes, which tensor-parallel needs of {what}",
                remedy=f"give a --model.{what} that is a multiple of {size}, or start fewer processes",
            )


def _placements(model: GPT) -> dict[str, Shard]:
    """Return how the parameters of the blocks are to be divided, by name; biases behind columns are not."""
    found: dict[str, Shard] = {}
    for name, _ in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        if layer.endswith(_BY_ROWS):
            found[name] = Shard(0)
        elif layer.endswith(_BY_COLUMNS) and kind == "weight":
            found[name] = Shard(1)
    return found


def _is_placed(parameter: DTensor | None, how: Shard, size: int) -> bool:
    return parameter is not None and parameter.placements == (how,) and parameter.device_mesh.size() == size


def _has(block: nn.Module, name: str) -> bool:
    try:
        return isinstance(block.get_submodule(name), nn.Linear)
    except AttributeError:
        return False


def _rows_by_head(model: GPT, size: int) -> dict[str, Tensor]:
    """Return, for the projections to queries, keys and values, their rows as they lie from process to process.

    Divided as they come, the first process would have the queries of all heads and the last one all values.
    """
    width = model.config.d_model
    order = torch.arange(3 * width).view(3, size, width // size).transpose(0, 1).flatten()
    return {name: order for name, _ in model.named_parameters() if ".attention.qkv." in name}


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let the parameters of a module be whole DTensors: optimizers want all to be of one sort."""

    def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(
            DTensor.from_local(each, mesh, [Replicate()], run_check=False) if isinstance(each, Tensor) else each
            for each in inputs
        )

    def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local() if isinstance(output, DTensor) else output

    if any(True for _ in module.parameters()):
        distribute_module(module, mesh, input_fn=enter, output_fn=leave)


def _shrink_cache(model: GPT, size: int) -> None:
    """Let the keys and values of a process's own heads be kept while text is generated."""
    config = model.config
    own = msgspec.structs.replace(config, n_heads=config.n_heads // size, d_model=config.d_model // size)

    def new_cache(batch_size: int) -> Cache:
        weight = model.tokens.weight
        return Cache(own, batch_size, device=weight.device, dtype=weight.dtype)

    model.new_cache = new_cache  # type: ignore[method-assign]
