"""Compilation of the loss and its gradient by `torch.compile`, in which no silent return to Python is possible."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from tensorkeep.errors import UsageError
from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.machine import Machine
from tensorkeep.train.techniques.rehearsal import compute_and_forget, rehearse_loss, without_modes

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


_REPORT = "report it, with the other techniques that are on"
_LOGGED = "see what torch has logged"


class CompileSettings(Section, frozen=True):
    """How the loss is compiled.

    Attributes
    ----------
    mode : str
        ``"default"``; ``"reduce-overhead"``: with CUDA graphs, on CUDA only, and not where a step has several batches;
        ``"max-autotune"``: with kernels chosen by measurement, and without CUDA graphs. Another choice may change the
        last bits, so that a run goes on exactly as long as torch's cache remembers the choice
        (``TORCHINDUCTOR_CACHE_DIR``).
    dynamic : bool, optional
        Whether code is made for any shape. By default for the first one, and for any once there was a second.
    fullgraph : bool
        True makes it an error that part of the loss stays Python; false counts the breaks.
    backend : str
        ``"inductor"``, or to look for an error ``"aot_eager"``, which traces as it does and compiles nothing.
    """

    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    dynamic: bool | None = None
    fullgraph: bool = False
    backend: Literal["inductor", "aot_eager"] = "inductor"

    def __post_init__(self) -> None:
        if self.backend != "inductor" and self.mode != "default":
            raise UsageError(f"mode {self.mode!r} is inductor's", remedy='give backend "inductor", or no mode')


class Compile(Technique):
    """Ansel et al., ASPLOS 2024. What is compiled is the loss of a training batch, with its gradient.

    Evaluation and generation, whose shapes differ, stay as they are.
    """

    name: ClassVar = "compile"
    kind: ClassVar = "systems"
    changes: ClassVar = "compilation"
    tolerance: ClassVar = 0.01
    summary: ClassVar = "compiles the loss and its gradient into fused kernels"
    effect: ClassVar = "often 1.2 to 2 times the speed on a GPU, less on a CPU, after a first step of up to minutes"
    reference: ClassVar = "Ansel et al., ASPLOS 2024, doi 10.1145/3620665.3640366; torch.compile"
    Settings: ClassVar = CompileSettings
    conflicts: ClassVar = {
        "activation-swapping": "compiled code keeps its activations where hooks on single tensors do not reach",
        "pipeline-parallel": "a stage of the pipeline is no loss that could be compiled as one",
    }

    def __init__(self, settings: Section) -> None:
        super().__init__(settings)
        self._before: tuple[int, int, int]
        self._first: tuple[int, int, int]
        self._seconds = 0.0
        self._calls = 0
        self._again = 0
        self._watched = False

    def lacks(self, machine: Machine) -> str | None:
        """Say what is missing: a compiler, or for CUDA graphs CUDA."""
        if self.settings.mode == "reduce-overhead" and not machine.on_cuda:
            return f'needs a CUDA device for the mode "reduce-overhead"; the run is on {machine.device}'
        return machine.lacks_compiler() if self.settings.backend == "inductor" else None

    @contextmanager
    def process(self) -> Iterator[None]:
        """Let go of compiled code at the end: it would count against the limit of the next run."""
        try:
            yield
        finally:
            torch.compiler.reset()

    def apply(self, run: Run) -> None:
        """Let the loss be compiled when it is first called.

        Raises
        ------
        UsageError
            If several batches make a step, which CUDA graphs cannot do.
        """
        inner, batches = run.operations.loss, run.config.loop.accumulate
        if self.settings.mode == "reduce-overhead" and batches > 1:
            raise UsageError(
                f'compile in the mode "reduce-overhead" cannot be combined with {batches} batches a step: each replay '
                "of its graph overwrites what the one before returned",
                remedy='give mode "default", or make each step of one batch (loop.accumulate)',
            )

        def compiled_only(inputs: Tensor, targets: Tensor) -> Tensor:
            # Compiled code has no trace of this branch: who comes here, runs as Python.
            if not torch.compiler.is_compiling():
                raise self.not_active("torch computed a loss uncompiled", _LOGGED)
            return inner(inputs, targets)

        compiled = torch.compile(compiled_only, **self._how())

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            self._calls += 1
            if not self._watched:
                return compiled(inputs, targets)
            compute_and_forget(run, inner, inputs, targets)
            before = _counts()[0]
            with without_modes():
                value = compiled(inputs, targets)
            self._again += _counts()[0] - before
            return value

        self._before = _counts()
        run.operations.loss = loss

    def _how(self) -> dict[str, Any]:
        settings = self.settings
        how = {"backend": settings.backend, "dynamic": settings.dynamic, "fullgraph": settings.fullgraph}
        if settings.backend == "inductor":
            from torch._inductor import list_mode_options

            how["options"] = {
                **list_mode_options(settings.mode),
                # Torch's "max-autotune" has them, too, and they are wrong where a step has several batches.
                "triton.cudagraphs": settings.mode == "reduce-overhead",
                # Dropout is to draw the numbers that it draws uncompiled.
                "fallback_random": True,
            }
        return how

    def rehearse(self, run: Run) -> None:
        """Compile, before anything watches."""
        from torch._dynamo.exc import TorchDynamoException

        begin = time.perf_counter()
        try:
            rehearse_loss(run)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split("\n\n")[0].split())
            raise self.not_active(f"torch could not compile: {reason}", "leave compile out, or repair that") from error
        self._seconds, self._first = time.perf_counter() - begin, _counts()

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Count the losses of the step that compiled code computed, the graphs, and what is not in them."""
        proof = Proof()
        before, self._again, self._watched = self._calls, 0, True
        try:
            yield proof
        finally:
            self._watched = False
        calls, wanted = self._calls - before, run.config.loop.accumulate
        if calls != wanted:
            raise self.not_active(f"{calls} of the step's {wanted} losses were compiled", _REPORT)
        graphs, breaks, skips = (now - then for now, then in zip(self._first, self._before, strict=True))
        if not graphs:
            raise self.not_active("torch compiled nothing", _LOGGED)
        if skips and self.settings.mode == "reduce-overhead":
            raise self.not_active("torch left the CUDA graphs out", _LOGGED)
        proof.is_that(
            f"{graphs} graphs were compiled in {self._seconds:.1f} s, with {breaks} breaks; {self._again} more in the "
            "step",
            graphs=graphs,
            breaks=breaks,
            recompiled=self._again,
            seconds=self._seconds,
        )


def _counts() -> tuple[int, int, int]:
    """Return how many graphs torch has compiled, how often one broke off, and how many CUDA graphs it left out."""
    from torch._dynamo.utils import counters

    breaks = sum(counters["graph_break"].values())
    return counters["stats"]["unique_graphs"], breaks, counters["inductor"]["cudagraph_skips"]
