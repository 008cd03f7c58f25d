"""Curriculum by loss: of more windows than are trained, those are chosen whose loss is at a rising quantile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.sections import Section
from tensorkeep.train.data.batches import Batch
from tensorkeep.train.model.gpt import GPT, token_loss
from tensorkeep.train.model.modes import evaluating
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.drawing import Drawing, given_inputs, same_tokens

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class LossCurriculumSettings(Section, frozen=True):
    """Among how many windows is chosen, and which.

    Attributes
    ----------
    candidates : int
        Batches that are drawn for each that is trained.
    begin, end : float
        The quantile of their losses at which windows are taken, in the first step and the last: 0 is the easiest, 1 the
        hardest. Between, it changes by the same amount with each step.
    """

    candidates: int = 2
    begin: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        check_bounds("candidates", self.candidates, least=2, most=100)
        check_bounds("begin", self.begin, least=0, most=1)
        check_bounds("end", self.end, least=0, most=1)


@dataclass(frozen=True)
class Choice:
    """One batch as it was chosen.

    Attributes
    ----------
    position : int
        The number of its first candidate among the batches of the run.
    losses : Tensor
        Of all candidates.
    chosen : Tensor
        The numbers of those that are trained.
    inputs : Tensor
        Theirs.
    """

    position: int
    losses: Tensor
    chosen: Tensor
    inputs: Tensor


class _ByLoss(Drawing):
    """Chooses; ``tell`` is called with each choice."""

    def __init__(self, run: Run, candidates: int, quantile: Callable[[], float]) -> None:
        super().__init__(run.batches)
        self._model = run.model
        self._candidates = candidates
        self._quantile = quantile
        self.tell: Callable[[Choice], object] = lambda choice: None

    def __next__(self) -> Batch:
        position = self.position
        drawn = [next(self.plain) for _ in range(self._candidates)]
        losses = torch.cat([window_losses(self._model, *batch) for batch in drawn])
        chosen = at_quantile(losses, self._quantile(), count=len(drawn[0][0]))
        inputs, targets = (torch.cat(each)[chosen] for each in zip(*drawn, strict=True))
        self.tell(Choice(position, losses, chosen, inputs))
        return inputs, targets


class LossCurriculum(Technique):
    """Loshchilov and Hutter, arXiv 1511.06343, who rank by loss; which ranks are trained changes as in a curriculum.

    The losses are those of the present weights, in evaluation mode and float32: no random numbers are drawn, and a
    resumed run chooses the same windows. What is not chosen is not trained, and is not drawn again before the next
    epoch.
    """

    name: ClassVar = "loss-curriculum"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "data"
    summary: ClassVar = "draws more windows than it trains, and trains the easiest at first, the hardest at last"
    effect: ClassVar = "each candidate costs a forward pass, two of them about 0.7 of a step: compare at equal time"
    reference: ClassVar = "arXiv 1511.06343"
    Settings: ClassVar = LossCurriculumSettings
    conflicts: ClassVar = {
        "pipeline-parallel": "no process has the whole model, which the losses of the candidates need",
        "tensor-parallel": "the losses of the candidates need the head, which is divided among devices",
        "fsdp": "weights are gathered where the model is called as a whole; for the candidates it is called in parts",
    }

    def apply(self, run: Run) -> None:
        """Put batches that are chosen in place of the run's."""
        self._drawing = _ByLoss(run, self.settings.candidates, lambda: self._quantile(run))
        run.batches = self._drawing

    def _quantile(self, run: Run) -> float:
        # Before the first step a batch may be drawn to rehearse it.
        done = max(0, run.progress.step - 1) / max(1, run.config.loop.steps - 1)
        return float(self.settings.begin + (self.settings.end - self.settings.begin) * min(done, 1.0))

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Compare what is trained with what was chosen, and where that lies among the candidates."""
        proof = Proof()
        # By position: a batch that is drawn to be rehearsed is drawn again.
        told: dict[int, Choice] = {}
        tell, self._drawing.tell = self._drawing.tell, lambda choice: told.update({choice.position: choice})
        try:
            with given_inputs(run) as given:
                yield proof
        finally:
            self._drawing.tell = tell
        choices, quantile = list(told.values()), self._quantile(run)
        if not choices or not same_tokens(given, [choice.inputs for choice in choices]):
            raise self.not_active(
                "what was trained is not what was chosen", "report it, with the other techniques that are on"
            )
        chosen = torch.cat([choice.losses[choice.chosen] for choice in choices])
        losses = torch.cat([choice.losses for choice in choices])
        proof.is_that(
            f"{len(chosen)} of {len(losses)} windows were chosen at quantile {quantile:.2f}, of loss "
            f"{chosen.mean():.3f} on average where all have {losses.mean():.3f}",
            chosen=len(chosen),
            candidates=len(losses),
            quantile=quantile,
            loss=float(chosen.mean()),
            loss_of_all=float(losses.mean()),
        )


@torch.no_grad()
def window_losses(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of each window of a batch, on the CPU, of shape [rows]."""
    device = model.tokens.weight.device
    with evaluating(model):
        features = model.features(inputs.to(device))
        # Row by row, so that no more logits are held than those of one window.
        rows = [
            token_loss(model.head(row.unsqueeze(0)), wanted.unsqueeze(0))
            for row, wanted in zip(features, targets.to(device), strict=True)
        ]
    return torch.stack(rows).cpu()


def at_quantile(losses: Tensor, quantile: float, *, count: int) -> Tensor:
    """Return the numbers of the windows whose ranks by loss lie next to each other at a quantile, lowest loss first."""
    first = round(quantile * (len(losses) - count))
    return losses.argsort(stable=True)[first : first + count]
