"""Compilation: conformance suite, and the cases in which torch silently falls back to Python."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters

from chatgot.generate import generate
from chatgot.loop import validation_loss
from chatgot.optim.muon import Muon, orthogonal
from chatgot.run.state import OpenRun
from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques.base import Machine
from chatgot.techniques.compile import Compile, CompileSettings
from chatgot.techniques.observe import next_batch
from chatgot.testing import (
    TINY,
    TechniqueSuite,
    killed_copy,
    losses,
    opened,
    train_run,
    trained,
    verified_step,
    with_techniques,
)
from techniques.several_processes import compile_by
from tensorkeep.errors import TechniqueNotActiveError, UsageError
from tensorkeep.testing.cases import case
from tiny_training import check_same

# Tracing takes most of the time of these tests, and grows with the number of blocks.
ONE_BLOCK = TINY.changed({"model.n_layers": 1})
TRACED = with_techniques(ONE_BLOCK, {"compile": {"backend": "aot_eager"}})
TWO_LENGTHS = {"progressive-length": {"pieces": [2, 1], "shares": [0.5, 0.5]}}

# One worker imports the compiler, which takes seconds.
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("compiler")]


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace functions and compute them in Python, for tests of what is traced and how often."""
    compile_by(monkeypatch, "eager")


@pytest.mark.usefixtures("traced_only")
class TestCompile(TechniqueSuite):
    technique = Compile
    variants = ({"backend": "aot_eager", "fullgraph": True},)
    config = ONE_BLOCK

    def break_on_purpose(self, run: StepState) -> None:
        # The loop calls the uncompiled loss.
        run.operations.loss = run.model.loss


@pytest.mark.exhaustive
def test_traced_loss_and_gradient_are_bit_identical(tmp_path: Path, data: Path) -> None:
    train_run(TRACED, tmp_path / "traced", data, stop_after=3)
    assert losses(tmp_path / "traced") == losses(trained(ONE_BLOCK, data))[:4]


def first_step(run: OpenRun) -> dict[str, Any]:
    return verified_step(run)["compile"]


def graphs() -> int:
    """Return how many graphs torch has compiled."""
    return counters["stats"]["unique_graphs"]


@pytest.mark.exhaustive
def test_inductor_keeps_the_losses_with_dropout(tmp_path: Path, data: Path) -> None:
    config = TINY.changed({"model.n_layers": 1, "model.d_model": 16, "eval.every": 0})
    train_run(config, tmp_path / "plain", data, stop_after=2)
    train_run(with_techniques(config, {"compile": {}}), tmp_path / "compiled", data, stop_after=2)
    plain, compiled = ([loss for _, _, loss in losses(tmp_path / each)] for each in ("plain", "compiled"))
    assert compiled == pytest.approx(plain, rel=1e-4)


def test_gradients_of_embeddings_are_added_up_in_one_order(tmp_path: Path, data: Path) -> None:
    """By several threads too, with many tokens of a kind. Other runs compile such a gradient as torch does."""
    from torch._inductor.decomposition import decompositions

    operator = torch.ops.aten.embedding_dense_backward.default
    large = {
        "model.context_length": 128,
        "loop.batch_size": 32,
        "loop.gradient_accumulation_steps": 1,
        "loop.threads": 4,
        "model.dropout": 0.0,
    }
    config = with_techniques(TINY.changed({**large, "model.tied": False}), {"compile": {}})
    assert operator in decompositions
    with opened(config, tmp_path / "run", data) as run, next_batch(run) as batch:
        weight = run.model.tokens.weight
        gradients = [torch.autograd.grad(run.operations.loss(*batch), weight)[0] for _ in range(8)]
        assert operator not in decompositions
    assert all(torch.equal(gradients[0], each) for each in gradients)
    assert operator in decompositions


@pytest.mark.usefixtures("traced_only")
def test_each_length_is_compiled_by_itself_as_in_a_resumed_run(tmp_path: Path, data: Path) -> None:
    """Code for any length may round otherwise, and a resumed run does not know that there was another length."""
    steps = {"loop.steps": 2, "eval.every": 0, "checkpoint.every": 1}
    config = with_techniques(TRACED.changed(steps), TWO_LENGTHS)
    before = graphs()
    train_run(config, tmp_path / "whole", data)
    # The last step is evaluated, which is compiled too.
    assert graphs() == before + 2 + 1
    train_run(config, killed_copy(tmp_path / "whole", tmp_path / "resumed", step=1), data, resume=True)
    check_same(tmp_path / "resumed", tmp_path / "whole", "train")


@pytest.mark.usefixtures("traced_only")
@pytest.mark.exhaustive
def test_more_lengths_are_compiled_than_torch_allows_by_itself(tmp_path: Path, data: Path) -> None:
    """A loss that torch leaves uncompiled ends the run."""
    config = with_techniques(TRACED.changed({"loop.steps": 2, "eval.every": 0}), TWO_LENGTHS)
    with dynamo.patch(recompile_limit=1):
        train_run(config, tmp_path / "run", data)
    assert [step for step, kind, _ in losses(tmp_path / "run") if kind == "train"] == [1, 2]


@pytest.mark.usefixtures("traced_only")
def test_other_compilations_in_the_step_are_not_counted(tmp_path: Path, data: Path) -> None:
    """Such as the compiled update of low-bit-optimizer."""
    with opened(TRACED, tmp_path / "run", data) as run:
        compiled, update = torch.compile(torch.sin), run.operations.update

        def compiled_update() -> None:
            compiled(torch.ones(3))
            update()

        run.operations.update = compiled_update
        assert first_step(run)["recompiled"] == 0


@pytest.mark.usefixtures("traced_only")
def test_warm_up_leaves_no_trace(tmp_path: Path, data: Path) -> None:
    with opened(TRACED, tmp_path / "run", data) as run:
        before = torch.get_rng_state(), run.batches.state_dict(), run.progress.step
        run.techniques.techniques[0].warm_up(run)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (run.batches.state_dict(), run.progress.step) == before[1:]
        assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.usefixtures("traced_only")
def test_loss_and_evaluation_are_each_compiled_once(tmp_path: Path, data: Path) -> None:
    with opened(TRACED, tmp_path / "run", data) as run:
        figures = first_step(run)
        assert (figures["graphs"], figures["breaks"], figures["recompiled"]) == (1, 0, 0)
        before = graphs()
        compiled = [validation_loss(run) for _ in range(3)]
        assert graphs() == before + 1
        # Nor does it change how a training batch of another length is compiled.
        take_step(run)
        assert graphs() == before + 1, "of a training batch after an evaluation"
        for length in (1, 3, 7):
            generate(run.model, list(range(length)), max_new_tokens=2)
            run.model.loss(torch.zeros(2, length, dtype=torch.int64), torch.zeros(2, length, dtype=torch.int64))
        assert graphs() == before + 1, "of generation and other losses"
    with opened(ONE_BLOCK, tmp_path / "plain", data) as run:
        take_step(run)
        assert compiled == [validation_loss(run)] * 3


@pytest.mark.parametrize("evaluation", [True, False])
def test_evaluation_stays_uncompiled_only_if_it_may(tmp_path: Path, data: Path, evaluation: bool) -> None:
    config = with_techniques(ONE_BLOCK, {"compile": {"backend": "aot_eager", "evaluation": evaluation}})
    refused = pytest.raises(TechniqueNotActiveError, match="an evaluation uncompiled") if evaluation else nullcontext()
    with opened(config, tmp_path / "run", data) as run, torch.compiler.set_stance("force_eager"), refused:
        assert validation_loss(run) > 0


@pytest.mark.exhaustive
@pytest.mark.usefixtures("traced_only")
def test_hooks_of_the_first_step_are_not_compiled(tmp_path: Path, data: Path) -> None:
    config = with_techniques(TRACED, {"activation-checkpointing": {}, "mixed-precision": {"dtype": "bf16"}})
    with opened(config, tmp_path / "run", data) as run:
        assert first_step(run)["recompiled"] == 0
        assert run.techniques.proofs["activation-checkpointing"].figures["runs"] == 4
        assert run.techniques.proofs["mixed-precision"].figures["dtype"] == "torch.bfloat16"
        take_step(run)


def _broken(graph: Any, examples: Any) -> Any:
    raise RuntimeError("broken compiler")


def test_what_is_not_compiled_ends_the_run(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because it is not asked of the compiler, or because of its error, which may be suppressed."""
    for number, (within, message) in enumerate(
        (
            (partial(torch.compiler.set_stance, "force_eager"), "uncompiled"),
            (partial(dynamo.patch, suppress_errors=True), "uncompiled"),
            (partial(dynamo.patch, suppress_errors=False), r"could not compile: .*broken compiler"),
        )
    ):
        if number == 1:
            compile_by(monkeypatch, _broken)
        refused = pytest.raises(TechniqueNotActiveError, match=message)
        with case(number), opened(TRACED, tmp_path / str(number), data) as run, within(), refused:
            first_step(run)


@pytest.mark.usefixtures("traced_only")
def test_recompilation_limit_is_an_error_in_any_step(tmp_path: Path, data: Path) -> None:
    with opened(TRACED, tmp_path / "run", data) as run, dynamo.patch(recompile_limit=1):
        first_step(run)
        with pytest.raises(TechniqueNotActiveError, match="uncompiled"):
            run.operations.loss(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("traced_only")
def test_later_runs_of_a_process_are_compiled_too(tmp_path: Path, data: Path) -> None:
    with dynamo.patch(recompile_limit=1):
        for number in range(2):
            train_run(TRACED, tmp_path / str(number), data, stop_after=1)
            assert losses(tmp_path / str(number))[0][:2] == (1, "train")


def test_cuda_graphs_with_several_batches_are_refused(tmp_path: Path, data: Path) -> None:
    with opened(TINY, tmp_path / "run", data) as run:
        technique = Compile(CompileSettings(mode="reduce-overhead"))
        assert "CUDA" in str(technique.missing(Machine(torch.device("cpu"))))
        with pytest.raises(UsageError, match="2 batches a step"):
            technique.apply(run)


@pytest.mark.parametrize(("mode", "graphs"), [("default", False), ("reduce-overhead", True), ("max-autotune", False)])
def test_only_reduce_overhead_has_cuda_graphs(mode: Any, graphs: bool) -> None:
    assert Compile(CompileSettings(mode=mode))._inductor_options()["triton.cudagraphs"] is graphs


def test_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    here = Machine(torch.device("cpu"))
    assert "C++ compiler" in str(Compile(CompileSettings()).missing(here))
    assert Compile(CompileSettings(backend="aot_eager")).missing(here) is None


@pytest.mark.exhaustive
@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("others", [[], ["fused-optimizer"]], ids=str)
def test_newton_schulz_steps_of_muon_are_compiled(tmp_path: Path, data: Path, others: list[str]) -> None:
    muon = with_techniques(ONE_BLOCK.changed({"optim.name": "muon"}), {name: {} for name in others})
    found: dict[str, list[float]] = {}
    for name, techniques in {"plain": {}, "traced": {"compile": {"backend": "aot_eager", "fullgraph": True}}}.items():
        with opened(with_techniques(muon, techniques), tmp_path / name, data) as run:
            optimizer, update, compiled = run.optimizers["muon"], run.operations.update, list[int]()
            assert isinstance(optimizer, Muon)
            assert (optimizer.orthogonal is orthogonal) == (not techniques)

            def counted_update(update: Any = update, compiled: list[int] = compiled) -> None:
                before = graphs()
                update()
                compiled.append(graphs() - before)

            run.operations.update = counted_update
            verified_step(run)
            # One for each matrix shape: attention's projections and output, and the two matrices of the MLP.
            assert compiled == ([4] if techniques else [0])
            found[name] = [take_step(run)["loss"] for _ in range(2)]
    assert found["traced"] == pytest.approx(found["plain"], rel=1e-3)
