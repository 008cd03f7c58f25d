"""Pipeline parallelism: each process has some of the blocks, and micro-batches pass through them."""

from typing import Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tensorkeep.errors import UsageError
from tensorkeep.train.config.sections import Count, Section
from tensorkeep.train.data.batches import Batch, BatchSource
from tensorkeep.train.model.gpt import token_loss
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import Proof, Verification
from tensorkeep.train.techniques.observe import count_calls
from tensorkeep.train.techniques.parallel import Parallel
from tensorkeep.train.techniques.parallel.stages import StageModule, Stages, save_own_stage
from tensorkeep.train.techniques.wrapped_batches import WrappedBatches

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_ALL_BLOCKS = "its activity check needs every block, but each process has only some"
_ALL_WEIGHTS = "it handles the optimizer states of all weights, and each process has only some of them"


class PipelineSettings(Section, frozen=True):
    """How batches pass through the pipeline.

    Attributes
    ----------
    parts : int
        Into how many micro-batches the sequences of a step are split; no fewer than processes. While the pipeline fills
        and drains, processes are idle: for a fraction of (processes - 1) / (parts + processes - 1) of the time.
    schedule : str
        ``"1f1b"``: a process runs a backward pass as soon as it can, and holds the activations of no more micro-batches
        than there are processes; ``"gpipe"``: all forward passes, then all backward passes.
    """

    parts: Count = 4
    schedule: Literal["1f1b", "gpipe"] = "1f1b"


class PipelineParallel(Parallel):
    """Huang et al., arXiv 1811.06965 (GPipe), and Narayanan et al., arXiv 1806.03377 (1F1B).

    All batches of a step pass through as one, whose gradient is complete when its loss is known.
    """

    name: ClassVar = "pipeline-parallel"
    summary: ClassVar = "gives each process some of the blocks, through which micro-batches pass one after the other"
    effect: ClassVar = (
        "memory is divided by the number of stages; little communication; devices are idle in the pipeline bubble"
    )
    reference: ClassVar = "arXiv 1811.06965; torch.distributed.pipelining"
    fills_model: ClassVar = True
    Settings: ClassVar = PipelineSettings
    conflicts: ClassVar = {
        **Parallel.conflicts,
        **dict.fromkeys(("activation-checkpointing", "attention-kernel", "sparse-attention"), _ALL_BLOCKS),
        **dict.fromkeys(("quantised-forward", "triton-kernel"), _ALL_BLOCKS),
        "activation-swapping": "micro-batches alternate, and it swaps the tensors of one loss until its gradient",
        **dict.fromkeys(("fused-optimizer", "low-bit-optimizer", "optimizer-offload"), _ALL_WEIGHTS),
    }
    settings: PipelineSettings

    stages: Stages
    _schedule: Any
    _tied_group: Any = None

    def apply(self, run: Run) -> None:
        """Split the model into stages, join a step's batches, and return the last stage's loss in all processes."""
        self._check(run)
        loop = run.config.loop
        rows = loop.batch_size * loop.accumulate

        def joined(batches: BatchSource) -> Batch:
            inputs, targets = zip(*(next(batches) for _ in range(loop.accumulate)), strict=True)
            return torch.cat(inputs), torch.cat(targets)

        run.batches = WrappedBatches(run.batches, joined)
        run.config = msgspec.structs.replace(
            run.config, loop=msgspec.structs.replace(loop, batch_size=rows, accumulate=1)
        )
        torch.manual_seed(loop.seed + run.world.rank)
        self.stages = Stages(run.model, run.world)
        self.stages.fill(run)
        save_own_stage(run, self.stages)
        self._schedule = self._build_schedule(run, rows // self.settings.parts)
        if run.config.model.tied and run.world.size > 1:
            self._tied_group = dist.new_group([0, run.world.size - 1])
        run.model.forward = self.stages.forward  # type: ignore[method-assign]
        run.model.last_logits = self.stages.last_logits  # type: ignore[method-assign]
        run.model.loss = self._loss  # type: ignore[method-assign, assignment]
        run.operations.backward = lambda value: None
        run.operations.clip = lambda: self._clip(run.config.optim.clip)

    def _check(self, run: Run) -> None:
        size, parts, loop = run.world.size, self.settings.parts, run.config.loop
        rows = loop.batch_size * loop.accumulate
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

    def _build_schedule(self, run: Run, rows: int) -> Any:
        model, stages, world = run.config.model, self.stages, run.world
        tokens = torch.empty(rows, model.context_length, dtype=torch.int64, device="meta")
        features, logits = (
            torch.empty(rows, model.context_length, width, device="meta", requires_grad=True)
            for width in (model.d_model, model.n_tokens)
        )
        stage = PipelineStage(
            StageModule(stages),
            world.rank,
            world.size,
            torch.device("cuda", torch.cuda.current_device()) if run.device.type == "cuda" else run.device,
            # Given here, the shapes are not sent as pickled objects.
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
        """Sum the gradient of a tied weight over both ends; scale by the norm over all processes, and return it."""
        own, tied = self.stages.own(), self.stages.model.tokens.weight
        if self._tied_group is not None and "tokens.weight" in own and tied.grad is not None:
            dist.all_reduce(tied.grad, group=self._tied_group)
        gradients = [each.grad for name, each in own.items() if self.stages.owner(name) == self.stages.world.rank]
        norm = torch.nn.utils.get_total_norm([each for each in gradients if each is not None]).square()
        dist.all_reduce(norm)
        norm = norm.sqrt()
        if most:
            torch.nn.utils.clip_grads_with_norm_(list(own.values()), most, norm)
        return norm

    def verify(self, run: Run) -> Verification:
        """Count the micro-batches that each block computes in this process, and the bytes of other stages' weights."""
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
