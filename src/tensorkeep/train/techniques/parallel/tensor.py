"""Tensor parallelism: each process has some heads of every attention, and some hidden units of every MLP."""

from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tensorkeep.errors import UsageError
from tensorkeep.train.model.cache import Cache
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import Proof, Verification
from tensorkeep.train.techniques.observe import observe_outputs
from tensorkeep.train.techniques.parallel import Parallel
from tensorkeep.train.techniques.parallel.sharding import ShardedParallel, ShardLayout, use_sharded_parameters

_BY_ROWS = ("attention.qkv", "mlp.up", "mlp.gate")
_BY_COLUMNS = ("attention.out", "mlp.down")


class TensorParallel(ShardedParallel):
    """Shoeybi et al., arXiv 1909.08053: the first layer of attention and MLP is sharded by rows, the last by columns.

    Between the two layers each process computes alone; after the second one the results are summed. Embeddings, norms
    and the head are replicated, and all processes compute the same batches. Dropout in attention draws the same zeros
    for the heads of each process.
    """

    name: ClassVar = "tensor-parallel"
    summary: ClassVar = "shards the matrices of every block among processes, by heads and by hidden units"
    effect: ClassVar = "the memory of the blocks is divided by the number of devices; two all-reduces per block"
    reference: ClassVar = "arXiv 1909.08053; torch.distributed.tensor.parallel.parallelize_module"
    conflicts: ClassVar = {**Parallel.conflicts, "activation-swapping": "it cannot move the sharded activations"}

    def apply(self, run: Run) -> None:
        """Shard the blocks, and replicate all other parameters."""
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
            layers = dict(block.named_modules())
            parallelize_module(block, mesh, {name: style for name, style in plan.items() if name in layers})
            block.attention.n_heads //= size  # type: ignore[union-attr, operator]
            for norm in (block.norm1, block.norm2):
                _replicate(norm, mesh)  # type: ignore[arg-type]
        for module in (model.tokens, model.shift, model.positions, model.norm, model.head):
            if module is not None:
                _replicate(module, mesh)
        if model.config.tied:
            model.head.weight = model.tokens.weight
        _use_cache_of_own_heads(model, size)
        use_sharded_parameters(run, before, ShardLayout(run.world, rows))

    def verify(self, run: Run) -> Verification:
        """Check the parameters of the blocks, what the optimizers update, and the heads that are computed."""
        heads: set[int] = set()
        projections = [block.attention.qkv for block in run.model.blocks]  # type: ignore[union-attr]
        width = 3 * run.config.model.head_size
        with observe_outputs(projections, lambda module, output: heads.add(output.shape[-1] // width)):  # type: ignore[arg-type]
            yield
        placements, size, all_heads = _placements(run.model), run.world.size, run.config.model.n_heads
        self.check_sharded(run, placements)
        if heads != {all_heads // size}:
            raise self.not_active(f"{sorted(heads)} heads were computed here instead of {all_heads // size}")
        return Proof(
            f"{len(placements)} parameters of the blocks are sharded among {size} processes; this one computed "
            f"{all_heads // size} of {all_heads} heads",
            parameters=len(placements),
            processes=size,
            heads=all_heads // size,
        )


def check_sizes(config: ModelConfig, size: int) -> None:
    """Raise UsageError unless heads and hidden units of a model are multiples of the number of processes."""
    for name, count in (("n_heads", config.n_heads), ("d_ff", config.mlp_width)):
        if count % size:
            raise UsageError(
                f"tensor-parallel cannot split {name}, which is {count}, equally among {size} processes",
                remedy=f"give a --model.{name} that is a multiple of {size}, or start fewer processes",
            )


def _placements(model: GPT) -> dict[str, Shard]:
    """Return the placements of the blocks' sharded parameters, by name; biases of layers sharded by columns are not."""
    found: dict[str, Shard] = {}
    for name, _ in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        if layer.endswith(_BY_ROWS):
            found[name] = Shard(0)
        elif layer.endswith(_BY_COLUMNS) and kind == "weight":
            found[name] = Shard(1)
    return found


def _rows_by_head(model: GPT, size: int) -> dict[str, Tensor]:
    """Return the order of the rows of the projections to queries, keys and values, process by process.

    In their own order, the first process would have the queries of all heads and the last one all values.
    """
    width = model.config.d_model
    order = torch.arange(3 * width).view(3, size, width // size).transpose(0, 1).flatten()
    return {name: order for name, _ in model.named_parameters() if ".attention.qkv." in name}


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the parameters of a module replicated DTensors: an optimizer needs all to be of the same type."""

    def to_dtensors(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(
            DTensor.from_local(each, mesh, [Replicate()], run_check=False) if isinstance(each, Tensor) else each
            for each in inputs
        )

    def to_local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local() if isinstance(output, DTensor) else output

    if any(True for _ in module.parameters()):
        distribute_module(module, mesh, input_fn=to_dtensors, output_fn=to_local)


def _use_cache_of_own_heads(model: GPT, size: int) -> None:
    """Make the cache of generation hold the keys and values of this process's heads only."""
    config = model.config
    own = msgspec.structs.replace(config, n_heads=config.n_heads // size, d_model=config.d_model // size)

    def new_cache(batch_size: int) -> Cache:
        weight = model.tokens.weight
        return Cache(own, batch_size, device=weight.device, dtype=weight.dtype)

    model.new_cache = new_cache  # type: ignore[method-assign]
