"""What is computed in plain Python beside compiled or captured code in the first step: a few rows of each batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chatgot.model.gpt import IGNORED
from chatgot.run.state import OpenRun
from chatgot.step.train_step import take_step
from chatgot.techniques import cuda_graphs, observe
from chatgot.techniques.cuda_graphs import CudaGraphs
from chatgot.testing import TINY, opened, verified_step, with_techniques
from techniques.several_processes import compile_by, group_of_one
from tensorkeep.testing.equality import difference

TRACED = {"compile": {"backend": "aot_eager"}}
ONE_BLOCK = TINY.changed({"model.n_layers": 1})


pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("compiler")]


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay a graph by calling the captured function again; trace functions, and compute them in Python."""
    compile_by(monkeypatch, "eager")

    def capture(work: Callable[[], None], pool: Any) -> Callable[[], None]:
        return torch.enable_grad()(work)

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(CudaGraphs, "missing", lambda self, machine: None)


@pytest.fixture
def one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute one row of a tiny batch."""
    monkeypatch.setattr(observe, "PROVED_TOKENS", TINY.model.context_length)


def plain_rows(run: OpenRun) -> list[int]:
    """Return how many rows the blocks computed in plain Python in a verified step, by batch."""
    rows: list[int] = []
    run.techniques.techniques[0].warm_up(run)
    hook = run.model.norm.register_forward_pre_hook(
        lambda module, inputs: None if torch.compiler.is_compiling() else rows.append(len(inputs[0]))
    )
    with run.techniques.verified(run):
        rows.clear()
        take_step(run)
    hook.remove()
    return rows


@pytest.mark.usefixtures("one_row")
def test_compiled_step_computes_one_row_of_each_batch_in_plain_python(tmp_path: Path, data: Path) -> None:
    with opened(with_techniques(ONE_BLOCK, TRACED), tmp_path / "run", data) as run:
        assert plain_rows(run) == [1, 1]
        assert run.techniques.proofs["compile"].figures["recompiled"] == 0


@pytest.mark.usefixtures("one_row")
@pytest.mark.parametrize("techniques", [TRACED, {"cuda-graphs": {}}, {**TRACED, "cuda-graphs": {}}], ids=" ".join)
def test_one_row_proves_the_techniques_beside(tmp_path: Path, data: Path, techniques: dict[str, Any]) -> None:
    others: dict[str, dict[str, Any]] = {
        "mixed-precision": {"dtype": "bf16"},
        "fused-cross-entropy": {},
        "progressive-length": {},
    }
    if "cuda-graphs" in techniques:
        # Its shapes change; and a simulated replay counts losses too.
        del others["progressive-length"], others["fused-cross-entropy"]
    with opened(with_techniques(ONE_BLOCK, {**techniques, **others}), tmp_path / "run", data) as run:
        figures = verified_step(run)
        assert set(figures) == {*techniques, *others}
        if "cuda-graphs" not in techniques:
            # Those of whole batches.
            tokens, row = TINY.loop.batch_size * TINY.model.context_length, 4 * run.config.model.vocab_size
            assert figures["fused-cross-entropy"]["full_bytes"] == tokens * row
            assert figures["fused-cross-entropy"]["held_bytes"] == tokens // 8 * row
            assert figures["progressive-length"]["tokens"] == TINY.loop.gradient_accumulation_steps * tokens


# torch reads it while it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.exhaustive
def test_fsdp_checkpoints_activations_of_compiled_code(tmp_path: Path, data: Path) -> None:
    """In one process; `test_pairs` has two, which resume."""
    techniques = {**TRACED, "fsdp": {}, "activation-checkpointing": {}}
    with group_of_one(), opened(with_techniques(ONE_BLOCK, techniques), tmp_path / "run", data) as run:
        figures = verified_step(run)
        assert (figures["compile"]["recompiled"], figures["activation-checkpointing"]["runs"]) == (0, 4)
        assert figures["fsdp"]["exchanges"] == 1


@pytest.mark.exhaustive
def test_hooks_of_observers_do_not_recompile_a_sharded_model(tmp_path: Path, data: Path) -> None:
    """Its layers have hooks of their own, so that torch compiles them again when others are added."""
    techniques = {**TRACED, "tensor-parallel": {}, "attention-kernel": {"kernel": "math"}}
    with group_of_one(), opened(with_techniques(ONE_BLOCK, techniques), tmp_path / "run", data) as run:
        figures = verified_step(run)
        assert figures["compile"]["recompiled"] == 0
        # In plain Python, for each batch.
        assert figures["attention-kernel"] == {"kernel": "math", "times": 2}


@pytest.mark.usefixtures("one_row")
def test_observed_step_computes_the_same_bits(tmp_path: Path, data: Path) -> None:
    """With dropout: the rows in plain Python must not use up its random numbers."""
    states: list[dict[str, Any]] = []
    for number, step in enumerate((verified_step, take_step)):
        with opened(with_techniques(ONE_BLOCK, TRACED), tmp_path / str(number), data) as run:
            step(run)  # type: ignore[operator]
            states.append({"model": run.model.state_dict(), "rng": torch.get_rng_state()})
    assert difference(*states) is None


def test_rows_with_targets_are_chosen_first_and_a_long_row_is_one() -> None:
    targets = torch.full((5, 512), IGNORED)
    targets[2, 7] = targets[4, 0] = 1
    inputs = torch.arange(5).unsqueeze(1).expand(5, 512)
    chosen, kept = observe.few_rows(inputs, targets)
    assert chosen[:, 0].tolist() == [2, 4]
    assert bool((kept != IGNORED).any(1).all())
    long: Tensor = torch.zeros(3, 4096, dtype=torch.int64)
    assert observe.few_rows(long, long)[0].shape == (1, 4096)
