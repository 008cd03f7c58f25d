"""Curriculum by loss: 0.64 times the plain speed with 2 candidates, and no lower loss at equal tokens (on a CPU).

More windows are drawn than trained, and the trained windows are at a rising quantile of the loss.
"""

from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from chatgot.data.batches import Batch, BatchSource
from chatgot.model.gpt import GPT, token_loss
from chatgot.step.train_step import evaluating
from chatgot.techniques.base import Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import record_inputs
from chatgot.techniques.wrapped_batches import WrappedBatches, same_tokens


class LossCurriculumSettings(Section, frozen=True):
    """How many candidates there are, and which candidates are trained."""

    # Batches that are drawn for each batch that is trained.
    candidates: Annotated[int, Meta(ge=2, le=100)] = 2
    # The quantile of the candidates' losses where windows are chosen, in the first and in the last step: 0 is the
    # easiest, 1 the hardest. In between, the quantile changes linearly.
    begin: Annotated[float, Meta(ge=0, le=1)] = 0.0
    end: Annotated[float, Meta(ge=0, le=1)] = 1.0


class LossCurriculum(Technique):
    """Loshchilov and Hutter, arXiv 1511.06343, who rank by loss; the trained ranks change as in a curriculum."""

    name: ClassVar = "loss-curriculum"
    aliases: ClassVar = ("curriculum", "curriculum-based-training")
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "data"
    summary: ClassVar = "draws more windows than it trains, and trains the easiest at first, the hardest at last"
    effect: ClassVar = "each candidate costs a forward pass, two candidates about 0.7 of a step: compare at equal time"
    reference: ClassVar = "arXiv 1511.06343"
    depends_on_steps: ClassVar = True
    conflicts: ClassVar = {
        "pipeline-parallel": "no process has the full model, which the losses of the candidates need",
        "tensor-parallel": "the losses of the candidates need the head, which is sharded",
        **dict.fromkeys(
            ("fsdp", "hsdp"),
            "weights are gathered when the whole model is called; the candidates call its modules separately",
        ),
    }
    settings: LossCurriculumSettings

    # While observed, by position: the losses of the candidates, and the numbers and inputs of the chosen windows.
    _selections: dict[int, tuple[Tensor, Tensor, Tensor]] | None = None

    def apply(self, run: StepState) -> None:
        def choose(batches: BatchSource) -> Batch:
            position = batches.position
            # Windows that are not chosen are not drawn again in the same epoch.
            drawn = [next(batches) for _ in range(self.settings.candidates)]
            losses = torch.cat([window_losses(run.model, *batch) for batch in drawn])
            chosen = at_quantile(losses, self._quantile(run), count=len(drawn[0][0]))
            inputs, targets = (torch.cat(each)[chosen] for each in zip(*drawn, strict=True))
            if self._selections is not None:
                # By position, because a batch that a warm-up draws is drawn again.
                self._selections[position] = losses, chosen, inputs
            return inputs, targets

        run.batches = WrappedBatches(run.batches, choose)

    def _quantile(self, run: StepState) -> float:
        # A warm-up draws a batch before the first step.
        done = max(0, run.progress.step - 1) / max(1, run.config.loop.steps - 1)
        return self.settings.begin + (self.settings.end - self.settings.begin) * min(done, 1.0)

    def verify(self, run: StepState) -> Verification:
        self._selections = {}
        with record_inputs(run) as inputs:
            yield
        found, self._selections = list(self._selections.values()), None
        if not found or not same_tokens(inputs, [each for *_, each in found]):
            raise self.not_active("the trained windows are not the chosen ones")
        losses = torch.cat([each for each, _, _ in found])
        chosen = torch.cat([each[numbers] for each, numbers, _ in found])
        quantile = self._quantile(run)
        return Proof(
            f"{len(chosen)} of {len(losses)} windows were chosen at quantile {quantile:.2f}; their mean loss is "
            f"{chosen.mean():.3f}, and {losses.mean():.3f} for all candidates",
            chosen=len(chosen),
            candidates=len(losses),
            quantile=quantile,
            loss=float(chosen.mean()),
            loss_of_all=float(losses.mean()),
        )


@torch.no_grad()
def window_losses(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of every window of a batch [rows, context]: float32 on the CPU, of shape [rows]."""
    device = model.tokens.weight.device
    # Without dropout no random numbers are drawn, so a resumed run chooses the same windows.
    with evaluating(model):
        features = model.features(inputs.to(device))
        # Row by row, so that only the logits of one window are in memory.
        rows = [
            token_loss(model.logits(row.unsqueeze(0)), target.unsqueeze(0))
            for row, target in zip(features, targets.to(device), strict=True)
        ]
    return torch.stack(rows).cpu()


def at_quantile(losses: Tensor, quantile: float, *, count: int) -> Tensor:
    """Return the indices of the windows with consecutive ranks by loss at a quantile, lowest loss first."""
    first = round(quantile * (len(losses) - count))
    # Stable, so that windows with equal losses are chosen alike in a resumed run.
    return losses.argsort(stable=True)[first : first + count]
