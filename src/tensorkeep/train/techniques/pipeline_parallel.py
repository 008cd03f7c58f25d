"""Pipeline parallelism: each process has some of the blocks, and the parts of a batch pass through them in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tensorkeep.errors import UsageError
from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.sections import Section
from tensorkeep.train.data.batches import Batch, BatchSource
from tensorkeep.train.model.gpt import token_loss
from tensorkeep.train.techniques.base import Proof
from tensorkeep.train.techniques.drawing import Drawing
from tensorkeep.train.techniques.parallel import Parallel, others_than
from tensorkeep.train.techniques.stages import Stage, Stages, save_all_stages
from tensorkeep.train.techniques.watching import counted_calls

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_ALL_BLOCKS = "its proof looks at every block, and a process has some of them"
_ALL_WEIGHTS = "it looks after the states of all weights, and a process has those of some"


class PipelineSettings(Section, frozen=True):
    """How batches pass through.

    Attributes
    ----------
    parts : int
        Into how many parts the sequences of a step are divided; no fewer than processes. While the first ones enter and
        the last ones leave, processes wait: for a share of (processes - 1) / (parts + processes - 1) of the time.
    schedule : str
        ``"1f1b"``: a process that can go back with a part does so before it takes the next one, and holds the
        activations of no more parts than there are processes; ``"gpipe"``: all go forward, then all back.
    """

    parts: int = 4
    schedule: Literal["1f1b", "gpipe"] = "1f1b"

    def __post_init__(self) -> None:
        check_bounds("parts", self.parts, least=1)


class PipelineParallel(Parallel):
    """Huang et al., arXiv 1811.06965 (GPipe), and Narayanan et al., arXiv 1806.03377 (1F1B).

    All batches of a step pass through as one, and its gradient is complete when the loss is known.
    """

    name: ClassVar = "pipeline-parallel"
    # Of a run with dropout, which draws other zeros in each part; without it, only the order of sums differs.
    tolerance: ClassVar = 0.05
    summary: ClassVar = "gives each process some of the blocks, through which the parts of a batch pass in turn"
    effect: ClassVar = "as many times less memory as there are devices, and little to send, but some of them wait"
    reference: ClassVar = "arXiv 1811.06965; torch.distributed.pipelining"
    Settings: ClassVar = PipelineSettings
    conflicts: ClassVar = {
        **others_than("pipeline-parallel"),
        **dict.fromkeys(("activation-checkpointing", "attention-kernel", "sparse-attention"), _ALL_BLOCKS),
        **dict.fromkeys(("quantised-forward", "triton-kernel"), _ALL_BLOCKS),
        "activation-swapping": "parts of a batch pass by turns, and it swaps what one loss keeps until its gradient",
        **dict.fromkeys(("fused-optimizer", "low-bit-optimizer", "optimizer-offload"), _ALL_WEIGHTS),
    }

    def __init__(self, settings: Section) -> None:
        super().__init__(settings)
        self.stages: Stages
        self._schedule: Any
        self._tied: Any = None

    def apply(self, run: Run) -> None:
        """Divide the model, let a step's batches be one, and let its loss be that of the last process.

        Raises
        ------
        UsageError
            If blocks or sequences do not go round, or losses are to be scaled.
        """
        self._check(run)
        loop = run.config.loop
        rows = loop.batch_size * loop.accumulate
        run.batches = _Joined(run.batches, loop.accumulate)
        run.config = msgspec.structs.replace(
            run.config, loop=msgspec.structs.replace(loop, batch_size=rows, accumulate=1)
        )
        torch.manual_seed(loop.seed + run.world.rank)
        self.stages = Stages(run.model, run.world)
        self.stages.let_go()
        save_all_stages(run, self.stages)
        self._schedule = self._scheduled(run, rows // self.settings.parts)
        if run.config.model.tied and run.world.size > 1:
            self._tied = dist.new_group([0, run.world.size - 1])
        run.model.forward = self.stages.forward  # type: ignore[method-assign]
        run.model.last_logits = self.stages.last_logits  # type: ignore[method-assign]
        run.model.loss = self._loss  # type: ignore[method-assign, assignment]
        run.operations.backward = lambda value: None
        run.operations.clip = lambda: self._clip(run.config.optim.clip)

    def _check(self, run: Run) -> None:
        size, parts, loop = run.world.size, self.settings.parts, run.config.loop
        if run.config.model.n_layers < size:
            raise UsageError(
                f"{run.config.model.n_layers} blocks are too few for {size} processes",
                remedy=f"start fewer, or give --model.n_layers {size}",
            )
        if parts < size or loop.batch_size * loop.accumulate % parts:
            raise UsageError(
                f"the {loop.batch_size * loop.accumulate} sequences of a step pass in {parts} parts through {size} "
                "processes: they must divide, and be no fewer than these",
                remedy="give techniques.pipeline-parallel.parts another number",
            )
        if run.config.techniques.get("mixed-precision", {}).get("dtype") == "fp16":
            raise UsageError(
                "a pipeline has its gradients before its loss could be scaled, which float16 needs",
                remedy="give techniques.mixed-precision.dtype bf16",
            )

    def _scheduled(self, run: Run, rows: int) -> Any:
        model, stages, world = run.config.model, self.stages, run.world
        tokens = torch.empty(rows, model.context_length, dtype=torch.int64, device="meta")
        inner, logits = (
            torch.empty(rows, model.context_length, width, device="meta", requires_grad=True)
            for width in (model.d_model, model.vocab_size)
        )
        stage = PipelineStage(
            Stage(stages),
            world.rank,
            world.size,
            torch.device("cuda", torch.cuda.current_device()) if run.device.type == "cuda" else run.device,
            # Known beforehand, they need not be sent as pickled objects.
            input_args=tokens if stages.first else inner,
            output_args=logits if stages.last else inner,
        )
        return _SCHEDULES[self.settings.schedule](stage, self.settings.parts, loss_fn=token_loss)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss in every process; of a training batch, the gradients are there then, too."""
        if not torch.is_grad_enabled():
            return token_loss(self.stages.forward(inputs), targets)
        losses: list[Tensor] = []
        given = (inputs,) if self.stages.first else ()
        wanted = {"target": targets, "losses": losses} if self.stages.last else {}
        self._schedule.step(*given, **wanted, return_outputs=False)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=inputs.device)
        dist.broadcast(loss, src=self.stages.world.size - 1)
        return loss

    def _clip(self, most: float) -> Tensor:
        """Add up what both ends have found for a tied weight; scale by the norm over all processes."""
        own, tied = self.stages.own(), self.stages.model.tokens.weight
        if self._tied is not None and "tokens.weight" in own and tied.grad is not None:
            dist.all_reduce(tied.grad, group=self._tied)
        mine = [each.grad for name, each in own.items() if self.stages.owner(name) == self.stages.world.rank]
        norm = torch.nn.utils.get_total_norm([each for each in mine if each is not None]).square()
        dist.all_reduce(norm)
        norm = norm.sqrt()
        if most:
            torch.nn.utils.clip_grads_with_norm_(list(own.values()), most, norm)
        return norm

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Count how many parts each block computes, here and not here, and the bytes of what others have."""
        proof = Proof()
        blocks = list(run.model.blocks)
        with counted_calls(block.norm1 for block in blocks) as calls:  # type: ignore[misc]
            yield proof
        ran = [calls[block.norm1] for block in blocks]  # type: ignore[index]
        wanted = [self.settings.parts if number in self.stages.blocks else 0 for number in range(len(blocks))]
        if ran != wanted:
            raise self.not_active(f"the blocks computed {ran} parts of the batch instead of {wanted}", "report it")
        own = self.stages.own()
        held = [name for name, each in run.model.named_parameters() if name not in own and _bytes(each) > 16]
        if held:
            raise self.not_active(f"this process holds {len(held)} weights of others, such as {held[0]}", "report it")
        proof.is_that(
            f"{self.settings.parts} parts passed through {len(self.stages.blocks)} of {len(blocks)} blocks in this one "
            f"of {run.world.size} processes, which has {len(own)} weights",
            parts=self.settings.parts,
            blocks=len(self.stages.blocks),
            processes=run.world.size,
            weights=len(own),
        )


class _Joined(Drawing):
    """The batches of a step, as one."""

    def __init__(self, plain: BatchSource, count: int) -> None:
        super().__init__(plain)
        self._count = count

    def __next__(self) -> Batch:
        inputs, targets = zip(*(next(self.plain) for _ in range(self._count)), strict=True)
        return torch.cat(inputs), torch.cat(targets)


def _bytes(parameter: Tensor) -> int:
    return parameter.untyped_storage().nbytes()
