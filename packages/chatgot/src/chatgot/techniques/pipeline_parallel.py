"""Pipeline parallelism: each process has some of the blocks, and micro-batches pass through them."""

from collections import OrderedDict
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from chatgot.data.batches import Batch, BatchSource
from chatgot.model.attention import Cache
from chatgot.model.gpt import GPT, token_loss
from chatgot.model.layers import RotaryPositions
from chatgot.optim.optimizers import WeightAverage, weights_of
from chatgot.settings import Count
from chatgot.step.world import World
from chatgot.techniques.base import Proof, Section, StepState, Verification
from chatgot.techniques.distributed import FunctionModule, ParallelTechnique, fill_parameters, update_parameters
from chatgot.techniques.observe import count_calls
from chatgot.techniques.wrapped_batches import WrappedBatches, with_loop
from tensorkeep.errors import UsageError

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_ALL_BLOCKS = "its activity check needs every block, but each process has only some"
_ALL_WEIGHTS = "it handles the optimizer states of all weights, and each process has only some weights"


class Stages:
    """The blocks of a model, split among processes; the ``first`` has the embeddings, the ``last`` the head."""

    def __init__(self, model: GPT, world: World) -> None:
        self.model = model
        self.world = world
        layers, size = model.config.n_layers, world.size
        # Integer division spreads the remainder: the sizes of two stages differ by at most one block.
        self._ends = [layers * stage // size for stage in range(size + 1)]
        self.blocks = range(self._ends[world.rank], self._ends[world.rank + 1])
        self.first = world.is_main
        self.last = world.rank == size - 1

    def owner(self, name: str) -> int:
        section, _, rest = name.partition(".")
        if section == "blocks":
            number = int(rest.partition(".")[0])
            return next(rank for rank, end in enumerate(self._ends[1:]) if number < end)
        # A tied parameter belongs to the first process.
        return self.world.size - 1 if section in ("norm", "head") else 0

    def own(self) -> dict[str, nn.Parameter]:
        # The last stage needs the embedding as its head, and both ends sum its gradient in `_clip`.
        tied = {"tokens.weight"} if self.last and self.model.config.tied else set()
        found = self.model.named_parameters()
        return {name: each for name, each in found if self.owner(name) == self.world.rank or name in tied}

    def weights(self) -> dict[str, Tensor]:
        weights = OrderedDict((name, each.data) for name, each in self.own().items())
        if self.model.config.tied and self.last:
            # The same memory, as in a checkpoint of one process.
            weights["head.weight"] = weights["tokens.weight"]
        return weights

    def fill(self, run: StepState) -> None:
        """Make the parameters of this process; the other parameters have shapes, and no memory."""
        own, before = self.own(), dict(self.model.named_parameters())

        def own_values(name: str, parameter: Tensor, full: Tensor) -> Tensor:
            if name in own:
                return full.to(run.device)
            # One element that looks like a full tensor, so that names and shapes stay complete.
            return torch.zeros((), device=run.device).expand(parameter.shape)

        fill_parameters(run, own_values)
        update_parameters(run, before)

    def compute(self, x: Tensor, start: int, cache: Cache | None = None) -> Tensor:
        positions, rotation = self.model.positions, None
        if isinstance(positions, RotaryPositions):
            rotation = positions(start, start + x.shape[1])
        for number in self.blocks:
            x = self.model.blocks[number](x, rotation, None if cache is None else cache.layers[number])
        return x

    def logits(self, x: Tensor) -> Tensor:
        return self.model.logits(self.model.norm(x)).float()

    def compute_micro_batch(self, x: Tensor) -> Tensor:
        x = self.compute(self.model.embed(x) if self.first else x, 0)
        return self.logits(x) if self.last else x

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits in every process: for evaluation."""
        return self._broadcast_logits(self._features(tokens, cache))

    def last_logits(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits of the token after the last one in every process: for generation."""
        return self._broadcast_logits(self._features(tokens, cache)[:, -1])

    def _features(self, tokens: Tensor, cache: Cache | None) -> Tensor:
        start = 0 if cache is None else cache.length
        shape = (*tokens.shape, self.model.config.d_model)
        x = self.model.embed(tokens, cache) if self.first else self.model.tokens.weight.new_empty(shape)
        # One stage after the other, without micro-batches: this path is for evaluation and generation.
        for rank in range(self.world.size):
            if rank == self.world.rank:
                x = self.compute(x, start, cache)
            # A collective needs contiguous memory.
            x = x.contiguous()
            dist.broadcast(x, src=rank)
        for layer in () if cache is None else cache.layers:
            # The caches of other processes' blocks stay empty, and must report the same length.
            layer.length = start + tokens.shape[-1]
        return x

    def _broadcast_logits(self, x: Tensor) -> Tensor:
        logits = self.logits(x) if self.last else x.new_empty((*x.shape[:-1], self.model.config.n_tokens))
        dist.broadcast(logits, src=self.world.size - 1)
        return logits


def save_own_stage(run: StepState, stages: Stages) -> None:
    """Make this rank save and load its own stage; the ranks together save the keys of a run with one process."""
    own = stages.own()
    own_ids = {id(each) for each in own.values()}
    run.average = WeightAverage(own, run.config.ema.decay)
    run.in_checkpoint["model"] = stages.weights

    def own_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        # One stateful object a parameter, so that a process loads its own states only.
        states: dict[int, Any] = {
            number: _ParameterState(optimizer, parameter) if id(parameter) in own_ids else {}
            for number, parameter in enumerate(weights_of(optimizer))
        }
        return {**optimizer.state_dict(), "state": states}

    run.in_checkpoint["optimizers"] = lambda: {name: own_state(each) for name, each in run.optimizers.items()}


class _ParameterState:
    def __init__(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
        self._optimizer = optimizer
        self._parameter = parameter

    def state_dict(self) -> dict[str, Any]:
        return dict(self._optimizer.state.get(self._parameter, {}))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameter = self._parameter
        self._optimizer.state[parameter] = {
            # The step count is a scalar, and AdamW keeps it on the CPU.
            key: value.to(parameter.device) if value.shape == parameter.shape else value
            for key, value in state.items()
        }


class PipelineSettings(Section, frozen=True):
    """How batches pass through the pipeline."""

    # The number of micro-batches in a step; at least the number of processes. While the pipeline fills and drains,
    # processes are idle for (processes - 1) / (parts + processes - 1) of the time.
    parts: Count = 4
    # "1f1b": a process runs a backward pass as soon as it can, and holds the activations of no more micro-batches than
    # there are processes; "gpipe": all forward passes, then all backward passes.
    schedule: Literal["1f1b", "gpipe"] = "1f1b"


class PipelineParallel(ParallelTechnique):
    """Huang et al., arXiv 1811.06965 (GPipe), and Narayanan et al., arXiv 1806.03377 (1F1B)."""

    name: ClassVar = "pipeline-parallel"
    aliases: ClassVar = ("pipeline-parallelism", "model-parallel", "model-parallelism")
    summary: ClassVar = "gives each process some of the blocks, through which micro-batches pass one after the other"
    effect: ClassVar = (
        "memory is divided by the number of stages; little communication; devices are idle in the pipeline bubble"
    )
    reference: ClassVar = "arXiv 1811.06965; torch.distributed.pipelining"
    refuses_conversations: ClassVar = (
        "weights micro-batches equally, whichever tokens count, and of conversations only answers do"
    )
    refuses_document_masks: ClassVar = "only the first stage of a pipeline has the tokens that the mask comes from"
    fills_model: ClassVar = True
    conflicts: ClassVar = {
        **ParallelTechnique.conflicts,
        **dict.fromkeys(("activation-checkpointing", "attention-kernel", "sparse-attention"), _ALL_BLOCKS),
        **dict.fromkeys(("quantised-forward", "triton-kernel"), _ALL_BLOCKS),
        "activation-swapping": "micro-batches alternate, and it swaps the tensors of one loss until its gradient",
        **dict.fromkeys(("fused-optimizer", "low-bit-optimizer", "optimizer-offload"), _ALL_WEIGHTS),
    }
    settings: PipelineSettings

    stages: Stages
    _schedule: Any
    _tied_group: Any = None

    def apply(self, run: StepState) -> None:
        self._check(run)
        loop = run.config.loop
        rows = loop.batch_size * loop.gradient_accumulation_steps

        # All batches of a step pass through the pipeline as one batch: its idle time is per pass.
        def joined(batches: BatchSource) -> Batch:
            inputs, targets = zip(*(next(batches) for _ in range(loop.gradient_accumulation_steps)), strict=True)
            return torch.cat(inputs), torch.cat(targets)

        run.batches = WrappedBatches(run.batches, joined)
        # For this process only; the stored configuration keeps its batches.
        run.config = with_loop(run.config, batch_size=rows, gradient_accumulation_steps=1)
        run.micro_batches = self.settings.parts
        # Each stage draws its own dropout zeros.
        torch.manual_seed(loop.seed + run.world.rank)
        self.stages = Stages(run.model, run.world)
        self.stages.fill(run)
        save_own_stage(run, self.stages)
        self._schedule = self._build_schedule(run, rows // self.settings.parts)
        if run.config.model.tied and run.world.size > 1:
            # A collective: every process takes part, also those between the two ends.
            self._tied_group = dist.new_group([0, run.world.size - 1])
        run.model.forward = self.stages.forward  # type: ignore[method-assign]
        run.model.last_logits = self.stages.last_logits  # type: ignore[method-assign]
        run.model.loss = self._loss  # type: ignore[method-assign, assignment]
        # The schedule has computed the gradient together with the loss.
        run.operations.backward = lambda value: None
        run.operations.clip = lambda: self._clip(run.config.optim.grad_clip)

    def _check(self, run: StepState) -> None:
        size, parts, loop = run.world.size, self.settings.parts, run.config.loop
        rows = loop.batch_size * loop.gradient_accumulation_steps
        if run.config.model.n_layers < size:
            raise UsageError(
                f"{run.config.model.n_layers} blocks are too few for {size} processes",
                remedy=f"start fewer, or give --model.n_layers {size}",
            )
        if parts < size or rows % parts:
            raise UsageError(
                f"the {rows} sequences of a step cannot be split into {parts} equal micro-batches, at least one for "
                f"each of {size} processes",
                remedy="give techniques.pipeline-parallel.parts another number",
            )
        if run.config.techniques.get("mixed-precision", {}).get("dtype") == "fp16":
            raise UsageError(
                "a pipeline computes its gradients before its loss could be scaled, which float16 needs",
                remedy="give techniques.mixed-precision.dtype bf16",
            )

    def _build_schedule(self, run: StepState, rows: int) -> Any:
        model, stages, world = run.config.model, self.stages, run.world
        tokens = torch.empty(rows, model.context_length, dtype=torch.int64, device="meta")
        features, logits = (
            torch.empty(rows, model.context_length, width, device="meta", requires_grad=True)
            for width in (model.d_model, model.n_tokens)
        )
        stage = PipelineStage(
            # torch's schedules call a module, once for each micro-batch.
            FunctionModule(stages.own().values(), stages.compute_micro_batch),
            world.rank,
            world.size,
            torch.device("cuda", torch.cuda.current_device()) if run.device.type == "cuda" else run.device,
            # Without these, the stages would send each other the shapes as pickled objects.
            input_args=tokens if stages.first else features,
            output_args=logits if stages.last else features,
        )
        return _SCHEDULES[self.settings.schedule](stage, self.settings.parts, loss_fn=token_loss)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss in every process; for a training batch, also compute its gradient."""
        if not torch.is_grad_enabled():
            return token_loss(self.stages.forward(inputs), targets)
        losses: list[Tensor] = []
        first_inputs = (inputs,) if self.stages.first else ()
        last_inputs = {"target": targets, "losses": losses} if self.stages.last else {}
        self._schedule.step(*first_inputs, **last_inputs, return_outputs=False)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=inputs.device)
        dist.broadcast(loss, src=self.stages.world.size - 1)
        return loss

    def _clip(self, most: float) -> Tensor:
        own, tied = self.stages.own(), self.stages.model.tokens.weight
        if self._tied_group is not None and "tokens.weight" in own and tied.grad is not None:
            # Both ends computed a part of the gradient of the tied weight, and both update it.
            dist.all_reduce(tied.grad, group=self._tied_group)
        gradients = [each.grad for name, each in own.items() if self.stages.owner(name) == self.stages.world.rank]
        # A tied weight counts once, in its first stage.
        # Squares, because the norm over all processes is the root of their sum.
        norm = torch.nn.utils.get_total_norm([each for each in gradients if each is not None]).square()
        dist.all_reduce(norm)
        norm = norm.sqrt()
        if most:
            torch.nn.utils.clip_grads_with_norm_(list(own.values()), most, norm)
        return norm

    def verify(self, run: StepState) -> Verification:
        blocks = list(run.model.blocks)
        with count_calls(block.norm1 for block in blocks) as calls:  # type: ignore[misc]
            yield
        counts = [calls[block.norm1] for block in blocks]  # type: ignore[index]
        expected = [self.settings.parts if number in self.stages.blocks else 0 for number in range(len(blocks))]
        if counts != expected:
            raise self.not_active(f"the blocks computed {counts} micro-batches instead of {expected}")
        own = self.stages.own()
        foreign = [
            name
            for name, each in run.model.named_parameters()
            # `Stages.fill` makes weights of other stages an expanded zero, of 4 bytes.
            if name not in own and each.untyped_storage().nbytes() > 16
        ]
        if foreign:
            raise self.not_active(f"this process holds {len(foreign)} weights of other stages, such as {foreign[0]}")
        return Proof(
            f"{self.settings.parts} micro-batches passed through {len(self.stages.blocks)} of {len(blocks)} blocks in "
            f"this one of {run.world.size} processes, which has {len(own)} weights",
            parts=self.settings.parts,
            blocks=len(self.stages.blocks),
            processes=run.world.size,
            weights=len(own),
        )
