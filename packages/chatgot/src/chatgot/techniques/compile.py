"""Compilation of the loss and its gradient by `torch.compile`; a loss that runs uncompiled is an error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from chatgot.optim.muon import Muon
from chatgot.techniques.base import Machine, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import Loss, warm_up_loss
from tensorkeep.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_SEE_LOG = "see what torch logged"

# The largest number of batch shapes to compile. torch's default is 8; beyond it, the function runs uncompiled.
_MOST_SHAPES = 64


class CompileSettings(Section, frozen=True):
    """How the loss is compiled."""

    # "default"; "reduce-overhead": with CUDA graphs, on CUDA only, and with one batch a step; "max-autotune": with
    # kernels chosen by measurement, and without CUDA graphs. Another choice of kernels may change the last bits, so a
    # resume is exact as long as torch's cache keeps the choice (TORCHINDUCTOR_CACHE_DIR).
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    # Whether the code is compiled for any shape. By default each shape is compiled by itself: a resumed run computes
    # the same bits, although it has not seen the shapes before.
    dynamic: bool | None = None
    # True: a graph break is an error. False: graph breaks are counted.
    fullgraph: bool = False
    # "inductor"; "aot_eager", for debugging, traces like inductor and compiles nothing.
    backend: Literal["inductor", "aot_eager"] = "inductor"
    # Whether evaluations are compiled too, when the first one begins.
    evaluation: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend != "inductor" and self.mode != "default":
            raise UsageError(f"mode {self.mode!r} needs inductor", remedy='give backend "inductor", or leave mode out')


class Compile(Technique):
    """Ansel et al., ASPLOS 2024. Generation is not compiled: its shapes differ from token to token."""

    name: ClassVar = "compile"
    aliases: ClassVar = ("torch-compile", "compilation", "pytorch-compilation", "pytorch-2.0-compilation")
    changes: ClassVar = "compilation"
    tolerance: ClassVar = 0.01
    summary: ClassVar = "compiles the loss and its gradient, and the Newton-Schulz steps of Muon, into fused kernels"
    effect: ClassVar = "often 1.2 to 2 times the speed on a GPU, less on a CPU, after a first step of up to minutes"
    reference: ClassVar = "Ansel et al., ASPLOS 2024, doi 10.1145/3620665.3640366; torch.compile"
    conflicts: ClassVar = {
        "pipeline-parallel": "a stage of the pipeline has no loss that could be compiled as a whole",
    }
    settings: CompileSettings

    _counts_before = _counts_after_warm_up = (0, 0, 0)
    _seconds = 0.0
    _calls = 0
    _recompiled = 0
    _observed = False

    def missing(self, machine: Machine) -> str | None:
        if self.settings.mode == "reduce-overhead" and not machine.on_cuda:
            return f'needs a CUDA device for the mode "reduce-overhead"; the run is on {machine.device}'
        return machine.missing_compiler() if self.settings.backend == "inductor" else None

    @contextmanager
    def process(self) -> Iterator[None]:
        from torch._dynamo import config

        try:
            # More shapes than torch allows, and sums in one order.
            with config.patch(recompile_limit=_MOST_SHAPES), _embeddings_not_compiled():
                yield
        finally:
            # The next run in this process would count the compiled code as its own.
            torch.compiler.reset()

    @property
    def cannot_accumulate(self) -> str | None:
        # A replay of its CUDA graphs overwrites the gradients of the batch before.
        return 'in the mode "reduce-overhead"' if self.settings.mode == "reduce-overhead" else None

    def apply(self, run: StepState) -> None:
        inner, batches = run.operations.loss, run.config.loop.gradient_accumulation_steps
        if self.settings.mode == "reduce-overhead" and batches > 1:
            raise UsageError(
                f'compile in the mode "reduce-overhead" cannot be combined with {batches} batches a step: each replay '
                "of its graph overwrites what the one before returned",
                remedy='give mode "default" and add the technique cuda-graphs: its graphs add gradients up',
            )

        def compiled_only(inputs: Tensor, targets: Tensor) -> Tensor:
            # The compiler evaluates this condition; only an uncompiled call reaches the branch.
            if not torch.compiler.is_compiling():
                raise self.not_active("torch computed a loss uncompiled", _SEE_LOG)
            return inner(inputs, targets)

        compiled = self._compiled(compiled_only, dynamic=bool(self.settings.dynamic))

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            self._calls += 1
            before = _counts()[0] if self._observed else 0
            value: Tensor = compiled(inputs, targets)
            if self._observed:
                self._recompiled += _counts()[0] - before
            return value

        self._counts_before = _counts()
        run.operations.loss, run.operations.plain_loss = loss, inner
        for optimizer in run.optimizers.values():
            if isinstance(optimizer, Muon):
                # A model has few shapes of matrices, and each is compiled by itself.
                optimizer.orthogonal = self._compiled(optimizer.orthogonal, dynamic=False)
        if self.settings.evaluation:
            run.operations.evaluate = self._compiled_evaluation(run.operations.evaluate)

    def _compiled_evaluation(self, inner: Loss) -> Loss:
        # A separate function: torch remembers the shapes that a function has seen, and they decide how it compiles a
        # training batch of another length. A resumed run may not have seen an evaluation.
        def evaluation(inputs: Tensor, targets: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                raise self.not_active("torch computed an evaluation uncompiled", _SEE_LOG)
            return inner(inputs, targets)

        return self._compiled(evaluation, dynamic=False)

    def _compiled(self, function: F, *, dynamic: bool) -> F:
        settings = self.settings
        compiled: Any = torch.compile(
            function,
            backend=settings.backend,
            dynamic=dynamic,
            fullgraph=settings.fullgraph,
            options=self._inductor_options() if settings.backend == "inductor" else None,
        )
        found: F = compiled
        return found

    def _inductor_options(self) -> dict[str, Any]:
        from torch._inductor import list_mode_options

        return {
            **list_mode_options(self.settings.mode),
            # torch's "max-autotune" turns CUDA graphs on, and they are wrong if a step has several batches.
            "triton.cudagraphs": self.settings.mode == "reduce-overhead",
            # Dropout draws the same numbers as uncompiled.
            "fallback_random": True,
        }

    def warm_up(self, run: StepState) -> None:
        from torch._dynamo.exc import TorchDynamoException

        # Compiled before any technique observes: compiled code would contain the hooks.
        begin = time.perf_counter()
        try:
            warm_up_loss(run)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split("\n\n")[0].split())
            remedy = "leave compile out, or fix the cause"
            raise self.not_active(f"torch could not compile: {reason}", remedy) from error
        self._seconds, self._counts_after_warm_up = time.perf_counter() - begin, _counts()

    def verify(self, run: StepState) -> Verification:
        before, self._recompiled, self._observed = self._calls, 0, True
        try:
            yield
        finally:
            self._observed = False
        # A captured graph replays compiled code without calling it: the calls happened during the capture.
        captured = before > 0 and "cuda-graphs" in run.config.techniques
        calls, expected = self._calls - before, run.config.loop.gradient_accumulation_steps
        # Each batch of the step must have gone through compiled code.
        if calls != expected and not captured:
            raise self.not_active(f"{calls} of the step's {expected} losses were compiled")
        graphs, breaks, skips = (
            now - then for now, then in zip(self._counts_after_warm_up, self._counts_before, strict=True)
        )
        if not graphs:
            raise self.not_active("torch compiled nothing", _SEE_LOG)
        if skips and self.settings.mode == "reduce-overhead":
            raise self.not_active("torch left the CUDA graphs out", _SEE_LOG)
        summary = (
            f"{graphs} graphs were compiled in {self._seconds:.1f} s, with {breaks} graph breaks; {self._recompiled} "
            "more in the step"
        )
        return Proof(summary, graphs=graphs, breaks=breaks, recompiled=self._recompiled, seconds=self._seconds)


@contextmanager
def _embeddings_not_compiled() -> Iterator[None]:
    """Leave the gradient of embeddings to torch's own kernel, which adds up the rows of a token in a fixed order."""
    from torch._inductor.decomposition import decompositions
    from torch.compiler import config as cache_config

    config: Any = cache_config
    operator = torch.ops.aten.embedding_dense_backward.default
    # Compiled code adds the rows in any order, on a GPU and with several threads: a resumed run would have other last
    # bits.
    compiled = decompositions.pop(operator, None)
    try:
        # Another cache key: torch's cache may hold code that was compiled with the decomposition.
        with config.patch(cache_key_tag=f"{config.cache_key_tag} embeddings"):
            yield
    finally:
        if compiled is not None:
            decompositions[operator] = compiled


def _counts() -> tuple[int, int, int]:
    from torch._dynamo.utils import counters

    breaks = sum(counters["graph_break"].values())
    return counters["stats"]["unique_graphs"], breaks, counters["inductor"]["cudagraph_skips"]
