"""CUDA graphs on the CPU, where the captured function is called again instead of replaying kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques import cuda_graphs
from chatgot.techniques.cuda_graphs import CudaGraphs, LossGraphs
from chatgot.testing import TINY, TechniqueSuite, losses, opened, trained, verified_step
from tensorkeep.errors import TechniqueNotActiveError, UsageError

NO_SETTINGS = CudaGraphs.Settings()


@pytest.fixture
def simulated_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay by calling the function again, with gradients enabled."""

    def capture(work: Callable[[], None], pool: Any) -> Callable[[], None]:
        return torch.enable_grad()(work)

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(CudaGraphs, "missing", lambda self, machine: None)


class TestCudaGraphs(TechniqueSuite):
    technique = CudaGraphs

    @pytest.fixture(autouse=True)
    def check_machine(self, simulated_capture: None) -> None:
        """Allow it on the CPU."""

    def break_on_purpose(self, run: StepState) -> None:
        # Graphs are captured, and the loop calls the plain loss.
        run.operations.loss = run.model.loss

    def test_losses_are_bit_identical(self, data: Path) -> None:
        """With dropout, tied weights and two batches a step."""
        assert losses(trained(self.config_with({}), data)) == losses(trained(TINY, data))

    def test_another_shape_is_refused(self, tmp_path: Path, data: Path) -> None:
        """In any step, because a graph would compute with the captured shape."""
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            take_step(run)
            tokens = torch.zeros(4, 8, dtype=torch.int64)
            with pytest.raises(TechniqueNotActiveError, match=r"has shape \[4, 8\], the graph \[4, 16\]"):
                run.operations.loss(tokens, tokens)

    def test_hooks_run_for_each_batch_of_the_first_step(self, tmp_path: Path, data: Path) -> None:
        """Other techniques can be proved, although graphs call no hooks."""
        config = self.config_with({}).changed({"techniques.mixed-precision.dtype": "bf16"})
        with opened(config, tmp_path / "run", data) as run:
            verified_step(run)
            layers = sum(isinstance(each, nn.Linear) for each in run.model.blocks.modules())
            assert run.techniques.proofs["mixed-precision"].figures["results"] >= 2 * layers


def test_nested_graphs_are_refused() -> None:
    technique = CudaGraphs(NO_SETTINGS)
    with pytest.raises(UsageError, match="reduce-overhead"):
        technique.configure(TINY.changed({"techniques.compile.mode": "reduce-overhead"}))
    for changes in ({"techniques.compile": "on"}, {"techniques.compile.mode": "max-autotune"}):
        others = TINY.changed(changes)
        assert technique.configure(others) == others


class _Graphs:
    """Two weights; the loss uses one."""

    def __init__(self) -> None:
        self.used, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        one = torch.ones(3)
        self.graphs = LossGraphs(lambda x, y: (self.used * x * y).sum(), [self.used, self.unused], one, one)

    def gradient(self, x: Tensor, *, slope: float) -> Tensor:
        self.graphs.loss(x, torch.ones(3))
        self.graphs.add_gradient(torch.tensor(slope))
        assert self.used.grad is not None
        return self.used.grad


@pytest.mark.usefixtures("simulated_capture")
def test_gradients_of_used_weights_accumulate_until_dropped_and_replaced_ones_are_refused() -> None:
    it = _Graphs()
    assert it.used.grad is None
    assert it.gradient(torch.tensor([1.0, 2.0, 3.0]), slope=0.5).tolist() == [0.5, 1.0, 1.5]
    assert it.gradient(torch.tensor([1.0, 1.0, 1.0]), slope=2.0).tolist() == [2.5, 3.0, 3.5]
    it.used.grad = None
    assert it.gradient(torch.tensor([1.0, 2.0, 3.0]), slope=1.0).tolist() == [1.0, 2.0, 3.0]
    assert it.graphs.replays == {"forward": 3, "backward": 3}
    assert it.unused.grad is None
    it.used.grad = torch.zeros(3)
    with pytest.raises(UsageError, match="not the tensor that the graph adds to"):
        it.gradient(torch.ones(3), slope=1.0)


@pytest.mark.usefixtures("simulated_capture")
def test_warm_up_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    weight = nn.Parameter(torch.ones(3))
    LossGraphs(lambda x, y: (weight * torch.rand(3)).sum(), [weight], torch.ones(3), torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)
