"""Tensor parallelism: each process has some heads of every attention, and some hidden units of every MLP."""

from typing import Any, ClassVar

import msgspec
import torch.distributed.tensor.parallel as parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor

from chatgot.model.attention import Cache
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.settings import Steps
from chatgot.techniques.base import Proof, Section, StepState, Verification
from chatgot.techniques.distributed import TENSOR, ParallelTechnique, ShardingTechnique, mesh_of
from chatgot.techniques.observe import observe_outputs
from tensorkeep.errors import UsageError

# Between the two layers each process computes alone; after the second layer the results are summed.
_BY_ROWS = ("attention.qkv", "attention.q", "attention.kv", "mlp.up", "mlp.gate")
_BY_COLUMNS = ("attention.out", "mlp.down")
_BY_CHANNELS = "attention.convolution"
# Norms of queries and keys get the heads of this process only.
_BY_HEADS = ("attention.q_norm", "attention.k_norm")
_REPLICATED = ("norm1", "norm2", "shift1", "shift2")


class TensorSettings(Section, frozen=True):
    """How many processes compute each matmul together."""

    # Processes that share the heads and the hidden units of every block. 0: all processes, or 2 beside fsdp or hsdp.
    degree: Steps = 0


class TensorParallel(ShardingTechnique):
    """Shoeybi et al., arXiv 1909.08053: first layers of attention and MLP are sharded by rows, last ones by columns."""

    name: ClassVar = "tensor-parallel"
    aliases: ClassVar = ("tensor-parallelism", "model-parallel", "model-parallelism")
    summary: ClassVar = "shards the matrices of every block among processes, by heads and by hidden units"
    effect: ClassVar = "the memory of the blocks is divided by the number of devices; two all-reduces per block"
    reference: ClassVar = "arXiv 1909.08053; torch.distributed.tensor.parallel.parallelize_module"
    axis: ClassVar = TENSOR
    conflicts: ClassVar = {
        **{name: why for name, why in ParallelTechnique.conflicts.items() if name not in ("fsdp", "hsdp")},
        "activation-swapping": "it cannot move the sharded activations",
    }
    settings: TensorSettings

    def shard(self, run: StepState, mesh: DeviceMesh) -> None:
        model, own_mesh = run.model, mesh[TENSOR]
        size = own_mesh.size()
        check_sizes(model.config, size)
        styles: dict[str, parallel.ParallelStyle] = {
            **dict.fromkeys(_BY_ROWS, parallel.ColwiseParallel()),
            **dict.fromkeys(_BY_COLUMNS, parallel.RowwiseParallel()),
            **dict.fromkeys(_BY_HEADS, parallel.SequenceParallel(sequence_dim=2, use_local_output=True)),
        }
        for block in model.blocks:
            layers = dict(block.named_modules())
            plan = {name: style for name, style in styles.items() if layers.get(name)}
            parallel.parallelize_module(block, own_mesh, plan)
            # The forward pass splits its projections into the heads of this process.
            block.attention.n_heads //= size  # type: ignore[union-attr, operator]
            block.attention.kv_heads //= size  # type: ignore[union-attr, operator]
            # Each channel is convolved by itself, so the channels follow their heads.
            if layers.get(_BY_CHANNELS) is not None:
                _distribute(layers[_BY_CHANNELS], own_mesh, parameters=Shard(0), features=Shard(2))
            for name in _REPLICATED:
                _replicate(layers.get(name), own_mesh)
        # Embeddings, final norm and head are replicated.
        for module in (model.tokens, model.shift, model.positions, model.norm, model.head):
            _replicate(module, own_mesh)
        # Replicating has made two parameters of the tied one.
        if model.config.tied:
            model.head.weight = model.tokens.weight
        _use_cache_of_own_heads(model, size)

    def verify(self, run: StepState) -> Verification:
        heads: set[int] = set()
        projections = [each.projections[0] for each in run.model.attentions]
        width = (1 if run.config.model.grouped else 3) * run.config.model.head_size
        with observe_outputs(projections, lambda module, output: heads.add(output.shape[-1] // width)):
            yield
        dimensions, size, all_heads = _dimensions(run.model), mesh_of(run)[TENSOR].size(), run.config.model.n_heads
        self.check_sharded(run, dimensions)
        if heads != {all_heads // size}:
            raise self.not_active(f"{sorted(heads)} heads were computed here instead of {all_heads // size}")
        return Proof(
            f"{len(dimensions)} parameters of the blocks are sharded among {size} processes; this one computed "
            f"{all_heads // size} of {all_heads} heads",
            parameters=len(dimensions),
            processes=run.world.size,
            tensor_size=size,
            heads=all_heads // size,
        )


def check_sizes(config: ModelConfig, size: int) -> None:
    """Raise UsageError unless the heads and hidden units are multiples of the number of processes."""
    for name, count in (("n_heads", config.n_heads), ("kv_heads", config.n_kv_heads), ("d_ff", config.mlp_width)):
        if count % size:
            raise UsageError(
                f"tensor-parallel cannot split {name}, which is {count}, equally among {size} processes",
                remedy=f"give a --model.{name} that is a multiple of {size}, or start fewer processes",
            )


def _dimensions(model: GPT) -> dict[str, int]:
    """Return the dimension along which each parameter is sharded; biases of the last layers are not sharded."""
    found: dict[str, int] = {}
    for name, _ in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        if layer.endswith(_BY_ROWS) or _BY_CHANNELS in layer:
            found[name] = 0
        elif layer.endswith(_BY_COLUMNS) and kind == "weight":
            found[name] = 1
    return found


def _replicate(module: nn.Module | None, mesh: DeviceMesh) -> None:
    # An optimizer refuses a mix of DTensors and plain tensors.
    if module is not None and any(True for _ in module.parameters()):
        _distribute(module, mesh, parameters=Replicate(), features=Replicate())


def _distribute(module: nn.Module, mesh: DeviceMesh, *, parameters: Placement, features: Placement) -> None:
    """Place the parameters of a module as DTensors; its inputs and outputs remain local tensors."""

    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, each in module.named_parameters(recurse=False):
            module.register_parameter(key, nn.Parameter(distribute_tensor(each.data, mesh, [parameters])))

    def to_dtensors(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(
            DTensor.from_local(each, mesh, [features], run_check=False) if isinstance(each, Tensor) else each
            for each in inputs
        )

    def to_local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local() if isinstance(output, DTensor) else output

    distribute_module(module, mesh, place, input_fn=to_dtensors, output_fn=to_local)


def _use_cache_of_own_heads(model: GPT, size: int) -> None:
    config = model.config
    # The cache holds the heads of this process only; head_dim is given, because d_model / n_heads has changed.
    own = msgspec.structs.replace(
        config, n_heads=config.n_heads // size, kv_heads=config.n_kv_heads // size, head_dim=config.head_size
    )

    def new_cache(batch_size: int) -> Cache:
        weight = model.tokens.weight
        return Cache(own, batch_size, device=weight.device, dtype=weight.dtype)

    model.new_cache = new_cache  # type: ignore[method-assign]
