"""CUDA graphs: the kernels of the loss and of its gradient are captured once, and replayed together."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from chatgot.techniques.base import Config, Proof, StepState, Technique, Verification
from chatgot.techniques.distributed import PARALLEL_TECHNIQUES
from chatgot.techniques.observe import Loss, warm_up_loss
from tensorkeep.errors import UsageError

_WARM_UPS = 3
_COMMUNICATION = "the processes communicate within a step, which cannot be captured"


class CudaGraphs(Technique):
    """Removes the time that kernels wait for Python. Optimizer, clipping and evaluation are not captured."""

    name: ClassVar = "cuda-graphs"
    aliases: ClassVar = ("cuda-graph", "graph-capture")
    changes: ClassVar = "compilation"
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "captures the kernels of a batch, forward and backward, and replays them"
    effect: ClassVar = "up to several times the speed for small models: their kernels take less time than their launch"
    reference: ClassVar = "docs.pytorch.org/docs/stable/notes/cuda.html, CUDA graphs"
    conflicts: ClassVar = {
        "activation-checkpointing": "it reads the state of random numbers, which is not possible in a capture",
        **dict.fromkeys(PARALLEL_TECHNIQUES, _COMMUNICATION),
    }
    after: ClassVar = ("compile",)
    needs_cuda: ClassVar = True

    _graphs: "LossGraphs | None" = None

    def configure(self, config: Config) -> Config:
        if config.techniques.get("compile", {}).get("mode") == "reduce-overhead":
            raise UsageError(
                'cuda-graphs and compile in the mode "reduce-overhead" cannot be combined: each makes graphs',
                remedy="leave cuda-graphs out, or give compile another mode",
            )
        return config

    def apply(self, run: StepState) -> None:
        inner = run.operations.loss
        parameters = [each for each in run.model.parameters() if each.requires_grad]

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            if self._graphs is None:
                self._graphs = LossGraphs(inner, parameters, inputs, targets)
            # A replay reads as many elements as were captured, whatever the batch has.
            if inputs.shape != self._graphs.shape:
                found, captured = (list(shape) for shape in (inputs.shape, self._graphs.shape))
                raise self.not_active(f"a batch has shape {found}, the graph {captured}", "leave it out")
            # Autograd calls backward only if an input needs a gradient.
            anchor = torch.zeros((), device=run.device, requires_grad=True)
            value: Tensor = _Replayed.apply(self._graphs, anchor, inputs, targets)  # type: ignore[no-untyped-call]
            return value

        run.operations.loss, run.operations.plain_loss = loss, run.operations.plain_loss or inner

    def warm_up(self, run: StepState) -> None:
        # Capture now: a capture while techniques observe would contain their hooks.
        warm_up_loss(run)

    def verify(self, run: StepState) -> Verification:
        graphs, expected = self._graphs, run.config.loop.gradient_accumulation_steps
        if graphs is not None:
            graphs.replays.clear()
        yield
        forward, backward = (0 if graphs is None else graphs.replays[way] for way in ("forward", "backward"))
        if (forward, backward) != (expected, expected):
            raise self.not_active(f"of {expected} batches {forward} losses and {backward} gradients were replayed")
        return Proof(
            f"{forward} losses and {backward} gradients were replayed from graphs", forward=forward, backward=backward
        )


class LossGraphs:
    """The graphs of a loss and of its gradient, in the same memory; all batches must have the shape of the first."""

    def __init__(self, loss: Loss, parameters: list[nn.Parameter], inputs: Tensor, targets: Tensor) -> None:
        self.shape = inputs.shape
        self.replays = Counter[str]()
        self._loss = loss
        self._inputs, self._targets = inputs.clone(), targets.clone()
        self._value: Tensor
        # Warming up draws random numbers, which the first replay must draw again.
        with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
            with _side_stream(inputs.device):
                for _ in range(_WARM_UPS):
                    self._compute()
                    found = torch.autograd.grad(self._value, parameters, allow_unused=True)
            self._scale = torch.ones_like(self._value)
            # Parameters without a gradient keep grad=None; with zeros, weight decay would change them.
            used = [each for each, gradient in zip(parameters, found, strict=True) if gradient is not None]
            self._gradients = {parameter: torch.zeros_like(parameter) for parameter in used}
            # Free the warm-up's autograd graph: its accumulation nodes belong to the side stream, not to the capture.
            del found, self._value
            # One pool: the gradient may reuse the loss's memory, because each loss is followed by its gradient.
            pool = torch.cuda.graph_pool_handle() if inputs.is_cuda else None
            self._replay_loss = capture(self._compute, pool)
            self._replay_gradient = capture(self._add_gradient, pool)

    def _compute(self) -> None:
        self._value = self._loss(self._inputs, self._targets)

    def _add_gradient(self) -> None:
        found = torch.autograd.grad(self._value, list(self._gradients), self._scale)
        # In place: the captured kernels add to these addresses at each replay.
        torch._foreach_add_(list(self._gradients.values()), found)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # The graph reads its inputs at fixed addresses.
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._replay_loss()
        self.replays["forward"] += 1
        # A copy, because the next replay overwrites the value.
        return self._value.detach().clone()

    def add_gradient(self, scale: Tensor) -> None:
        # The factor is data of the graph: a new factor needs no new capture.
        self._scale.copy_(scale)
        for parameter, gradient in self._gradients.items():
            # None after zero_grad: the step begins to accumulate again.
            if parameter.grad is None:
                parameter.grad = gradient.zero_()
            elif parameter.grad is not gradient:
                raise UsageError(
                    "the gradient of a parameter is not the tensor that the graph adds to",
                    remedy="leave cuda-graphs out, or the technique that replaces the gradients of parameters",
                )
        self._replay_gradient()
        self.replays["backward"] += 1


class _Replayed(torch.autograd.Function):
    """Makes the replays part of autograd, so that a factor on the loss also scales its gradient."""

    @staticmethod
    def forward(ctx: Any, graphs: LossGraphs, anchor: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        ctx.graphs = graphs
        return graphs.loss(inputs, targets)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, None, None]:
        ctx.graphs.add_gradient(scale)
        return None, None, None, None


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    # torch requires another stream for the warm-up before a capture.
    if device.type != "cuda":
        yield
        return
    current = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # The side stream reads what the current stream has computed, and the other way round at the end.
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


def capture(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Capture work on the GPU; return the function that replays the same kernels on the same memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph.replay
