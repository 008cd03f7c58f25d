"""CUDA graphs: the kernels of the loss and of its gradient, recorded once and started together from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.machine import Machine
from tensorkeep.train.techniques.rehearsal import Loss, compute_and_forget, rehearse_loss

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

_WARM_UPS = 3
_SHAPES = "a graph is of one shape, and the lengths of its windows change"
_TALKS = "the processes talk to each other within a step, which is not recorded"


class CudaGraphs(Technique):
    """Kernels then wait for no Python. Optimizer, clipping and evaluation run as they do without."""

    name: ClassVar = "cuda-graphs"
    kind: ClassVar = "systems"
    changes: ClassVar = "compilation"
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "records the kernels of a batch, forward and backward, and replays them"
    effect: ClassVar = "up to several times the speed for small models, whose kernels take less time than starting them"
    reference: ClassVar = "docs.pytorch.org/docs/stable/notes/cuda.html, CUDA graphs"
    conflicts: ClassVar = {
        "activation-checkpointing": "it reads the state of random numbers, which is not possible in a recording",
        "progressive-length": _SHAPES,
        "activation-swapping": "what is copied to the CPU is waited for, which is not possible in a recording",
        "ddp": _TALKS,
        "fsdp": _TALKS,
        "tensor-parallel": _TALKS,
        "pipeline-parallel": _TALKS,
    }
    after: ClassVar = ("compile",)

    _graphs: LossGraphs | None = None
    _watched = False

    def lacks(self, machine: Machine) -> str | None:
        """Say that CUDA is missing."""
        return machine.lacks_cuda()

    def configure(self, config: Config) -> Config:
        """Refuse graphs within a graph."""
        if config.techniques.get("compile", {}).get("mode") == "reduce-overhead":
            raise UsageError(
                'cuda-graphs and compile in the mode "reduce-overhead" cannot be combined: each makes graphs',
                remedy="leave cuda-graphs out, or give compile another mode",
            )
        return config

    def apply(self, run: Run) -> None:
        """Replay the loss, and where its gradient is asked for, that."""
        inner = run.operations.loss
        parameters = [each for each in run.model.parameters() if each.requires_grad]

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            if self._graphs is None:
                self._graphs = LossGraphs(inner, parameters, inputs, targets)
            if self._watched:
                compute_and_forget(run, inner, inputs, targets)
            if inputs.shape != self._graphs.shape:
                found, recorded = (list(shape) for shape in (inputs.shape, self._graphs.shape))
                raise self.not_active(f"a batch is of shape {found}, the graph of {recorded}", "leave it out")
            # Autograd runs what has an input that needs a gradient.
            anchor = torch.zeros((), device=run.device, requires_grad=True)
            value: Tensor = _Replayed.apply(self._graphs, anchor, inputs, targets)  # type: ignore[no-untyped-call]
            return value

        run.operations.loss = loss

    def rehearse(self, run: Run) -> None:
        """Record, before anything watches."""
        rehearse_loss(run)

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Count the replays: one forward and one backward for each batch of the step."""
        proof = Proof()
        graphs, wanted = self._graphs, run.config.loop.accumulate
        before = (0, 0) if graphs is None else graphs.replays
        self._watched = True
        try:
            yield proof
        finally:
            self._watched = False
        after = (0, 0) if graphs is None else graphs.replays
        forward, backward = (now - then for now, then in zip(after, before, strict=True))
        if (forward, backward) != (wanted, wanted):
            raise self.not_active(
                f"of {wanted} batches {forward} losses and {backward} gradients were replayed",
                "report it, with the other techniques that are on",
            )
        proof.is_that(
            f"{forward} losses and {backward} gradients were replayed from graphs", forward=forward, backward=backward
        )


class LossGraphs:
    """The graph of a loss and the graph of its gradient, which work in memory that stays where it is.

    Parameters
    ----------
    loss : callable
    parameters : list of Parameter
        Their gradients are added up in buffers, which become their ``grad``.
    inputs, targets : Tensor
        A batch; all others must have its shape.

    Attributes
    ----------
    shape : torch.Size
        Of inputs.
    replays : (int, int)
        How often the loss and the gradient were replayed.
    """

    def __init__(self, loss: Loss, parameters: list[nn.Parameter], inputs: Tensor, targets: Tensor) -> None:
        self.shape = inputs.shape
        self.replays = (0, 0)
        self._loss = loss
        self._inputs, self._targets = inputs.clone(), targets.clone()
        self._value: Tensor
        # Warming up draws random numbers, behind which the first replay would go on.
        with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
            with _beside(inputs.device):
                for _ in range(_WARM_UPS):
                    self._compute()
                    found = torch.autograd.grad(self._value, parameters, allow_unused=True)
            self._slope = torch.ones_like(self._value)
            # What gets no gradient without graphs, gets none with them: weight decay tells zeros from nothing.
            used = [each for each, gradient in zip(parameters, found, strict=True) if gradient is not None]
            self._gradients = {parameter: torch.zeros_like(parameter) for parameter in used}
            del found
            # One pool: the gradient may work in what the loss has left, as each loss is followed by its gradient.
            pool = torch.cuda.graph_pool_handle() if inputs.is_cuda else None
            self._replay_loss = recorded(self._compute, pool)
            self._replay_gradient = recorded(self._add_gradient, pool)

    def _compute(self) -> None:
        self._value = self._loss(self._inputs, self._targets)

    def _add_gradient(self) -> None:
        found = torch.autograd.grad(self._value, list(self._gradients), self._slope)
        torch._foreach_add_(list(self._gradients.values()), found)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._replay_loss()
        self.replays = (self.replays[0] + 1, self.replays[1])
        return self._value.detach().clone()

    def add_gradient(self, slope: Tensor) -> None:
        """Add the gradient of the last loss, times a factor, to that of the parameters."""
        self._slope.copy_(slope)
        for parameter, gradient in self._gradients.items():
            if parameter.grad is None:
                parameter.grad = gradient.zero_()
            elif parameter.grad is not gradient:
                raise UsageError(
                    "the gradient of a parameter is another tensor than the graph adds to",
                    remedy="leave cuda-graphs out, or what changes the gradients of parameters",
                )
        self._replay_gradient()
        self.replays = (self.replays[0], self.replays[1] + 1)


class _Replayed(torch.autograd.Function):
    """Puts the replays where autograd calls them, so that whatever scales a loss scales its gradient."""

    @staticmethod
    def forward(ctx: Any, graphs: LossGraphs, anchor: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        ctx.graphs = graphs
        return graphs.loss(inputs, targets)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[None, None, None, None]:
        ctx.graphs.add_gradient(slope)
        return None, None, None, None


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Run on another stream, as what comes before a recording has to."""
    if device.type != "cuda":
        yield
        return
    present = torch.cuda.current_stream(device)
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    beside.wait_stream(present)
    with torch.cuda.stream(beside):
        yield
    present.wait_stream(beside)


def recorded(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Return what replays some work on the GPU: the same kernels on the same memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph.replay
